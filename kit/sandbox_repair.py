"""
sandbox_repair.py: code that almost parses is repaired; what it should not call is named.

Concept     A policy that wraps its code in markdown learns little from "invalid syntax". Code that
            parses is never changed. Other code is, until it parses, and notes say how.
Paper       nothing: CodeV's Appendix 13 says what the sandbox repairs, not how
In          code as the policy wrote it
Out         code that parses and notes on how; the name of a refused call; a rewritten syntax tree
Left out    safety: whoever wants to gets around the scan, and the walls hold without it
Read next   sandbox_worker.py (who executes the result), sandbox_walls.py (what does hold)
"""

import ast
import re
import textwrap

FORBIDDEN = re.compile(
    r"(os|posix)\.(system|popen|kill|killpg|fork|forkpty|exec\w+|spawn\w+|posix_spawnp?)|"
    r"subprocess\.\w+"
)
TYPOGRAPHIC = str.maketrans("“”„‘’′（），：；–−", "\"\"\"'''(),:;--")


def parses(code: str) -> bool:
    try:
        return bool(ast.parse(code))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def plain(code: str) -> list[str]:
    """Without byte order marks, zero-width spaces and foreign ends of lines."""
    return [re.sub("[\ufeff\u200b\0]", "", re.sub("\r\n?", "\n", code)).replace("\u00a0", " ")]


def unfence(code: str) -> list[str]:
    """The first block of markdown, or what stands before it if that is code."""
    before, *blocks = re.split(r"^[ \t]*(?:```|~~~).*\n?", code, flags=re.M)
    if blocks and not (before.strip() and parses(textwrap.dedent(before))):
        before = blocks[0]
    before = re.sub(r"^[ \t]*</?code>[ \t]*$", "", before, flags=re.M)
    return [re.sub(r"\A\s*python3?[ \t]*\n|\n[ \t]*python3?\s*\Z", "\n", before)]


def reindent(code: str) -> list[str]:
    """With tabs of 8; with tabs of 4; the first line as deep as the others; depths in fours."""
    lines = textwrap.dedent(code.expandtabs(4)).strip("\n").split("\n")
    depths = [len(line) - len(line.lstrip()) for line in lines]
    margin = min((d for d, line in zip(depths[1:], lines[1:]) if line.strip()), default=0)
    first = " " * margin + lines[0].lstrip()
    rounded = [" " * (4 * round(d / 4)) + line.lstrip() for d, line in zip(depths, lines)]
    candidates = code.expandtabs(8).split("\n"), lines, [first, *lines[1:]]
    return [*(textwrap.dedent("\n".join(c)) for c in candidates), "\n".join(rounded)]


def cut(code: str) -> list[str]:
    """Without its last lines."""
    lines = code.rstrip().split("\n")
    return ["\n".join(lines[:-n]) for n in (1, 2, 3) if n < len(lines)] or [code]


COMMAND = re.compile(r"^([ \t]*)[!%]\w.*", re.MULTILINE)  # of a notebook: !ls, %timeit
REPAIRS = {  # note -> what proposes candidates; the first that parses is taken
    "removed invisible characters": plain,
    "removed the markdown around the code": unfence,
    "left out notebook commands": lambda code: [COMMAND.sub(r"\1pass", code)],
    "repaired the indentation": reindent,
    "replaced typographic characters": lambda code: [code.translate(TYPOGRAPHIC)],
    "left out the unfinished end": cut,
}


def repair(code: str) -> tuple[str, list[str]]:
    """Change code that does not parse until it does, and say how. All other code stays as it is."""
    repaired, notes = code, []
    for note, candidates in REPAIRS.items():
        if parses(repaired):
            return repaired, notes
        options = candidates(repaired)
        best = next(filter(parses, options), options[0])
        if best != repaired:
            tail = f": {repaired[len(best) :].strip()[:80]!r}" if candidates is cut else ""
            notes.append(note + tail)
            repaired = best
    return (repaired, notes) if parses(repaired) else (code, [])


def forbidden_call(nodes: list[ast.AST]) -> str | None:
    """A clear message for honest code, of which these are all nodes. It is easily walked around;
    the walls hold without it."""
    names = {"os": "os"}

    def dotted(node):
        if isinstance(node, ast.Attribute):
            return f"{dotted(node.value)}.{node.attr}"
        return names.get(node.id, "") if isinstance(node, ast.Name) else ""

    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            home = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names |= {a.asname or a.name: home + a.name for a in node.names}
    for node in nodes:
        if isinstance(node, ast.Call) and FORBIDDEN.fullmatch(name := dotted(node.func)):
            return f"line {node.lineno} calls {name}"
    return None


def rewrite(tree: ast.Module, nodes: list[ast.AST]) -> ast.Module:
    """Change the tree, of which these are all nodes: as in a notebook, the last value is shown, and
    `return` at top level works.

    The worker provides __display__, __return__, and __parts__, which sees what is cut by slices.
    """

    def call(name, value):
        function = ast.copy_location(ast.Name(name, ast.Load()), value)
        return ast.copy_location(ast.Call(function, [value], []), value)

    for node in nodes:
        match node:
            case ast.Subscript(slice=ast.Slice() | ast.Tuple(elts=[ast.Slice(), *_])):
                node.value = call("__parts__", node.value)
            case ast.ExceptHandler(type=None):  # or it would catch `return` and exit()
                node.type = ast.copy_location(ast.Name("Exception", ast.Load()), node)
    blocks = [tree]
    while blocks:  # all blocks of statements outside functions and classes
        for _, block in ast.iter_fields(blocks.pop()):
            for i, node in enumerate(block if isinstance(block, list) else []):
                if isinstance(node, ast.Return):
                    value = node.value or ast.copy_location(ast.Constant(None), node)
                    block[i] = ast.copy_location(ast.Expr(call("__return__", value)), node)
                elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    blocks.append(node)
    match tree.body:
        case [*_, ast.Expr(value=value) as last] if not isinstance(value, ast.Constant | ast.Await):
            last.value = call("__display__", value)
    return tree
