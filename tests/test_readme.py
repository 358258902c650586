"""python -m pytest tests/test_readme.py      README.md and docs/ tell the truth"""

import importlib
import inspect
import io
import re
import runpy
import sys
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path

import pytest
from test_law import FILES, NINE, ROOT

SOURCES = {name: file.read_text(encoding="utf-8") for name, file in FILES.items()}
TESTS = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("*.py"))
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)


def section(title: str) -> str:
    """The text under "## title" of README.md."""
    return re.split(r"^## ", README.split(f"\n## {title}\n")[1], flags=re.M)[0]


# The equation map
def tags(text: str) -> set[str]:
    """Places of the paper: "Eqs. 1, 3 and 4; Fig. 2" -> {"Eq 1", "Eq 3", "Eq 4", "Fig 2"}"""
    places = re.findall(r"(Eq|Fig|Table|Appendi)\w*\.? ?((?:\d+(?:, and |, | and )?)+)", text)
    return {f"{kind} {n}" for kind, numbers in places for n in re.findall(r"\d+", numbers)}


MAP = [
    (tags(paper), re.findall(r"`([\w.]+)\.(\w+)`", code), re.findall(r"`(test_\w+)`", tests))
    for paper, code, tests in re.findall(
        r"(?m)^\| ((?:Eq|Fig|Table|Appendi)[^|]*) \| [^|]* \| ([^|]*) \| ([^|]*) \|$",
        section("Equation map"),
    )
]


def test_the_map_holds_every_place_that_the_nine_name_and_none_that_no_file_names():
    mapped = set().union(*(paper for paper, _, _ in MAP))
    assert tags("\n".join(SOURCES[name] for name in NINE)) <= mapped
    assert mapped <= tags("\n".join(SOURCES.values()))
    assert {f"Eq {n}" for n in range(1, 7)} <= mapped


@pytest.mark.parametrize("paper, code, tests", MAP, ids=lambda x: " ".join(sorted(map(str, x))))
def test_a_row_of_the_map_leads_to_code_that_carries_its_tag_and_to_tests(paper, code, tests):
    modules = [module for module, _ in code]
    named = [(getattr(importlib.import_module(m), name), SOURCES[m]) for m, name in code]
    carried = set().union(*(tags(inspect.getsource(function)) for function, _ in named))
    for _, source in named:  # a whole file may stand for an appendix or a figure, not an equation
        carried |= {t for t in tags(source.split('"""')[1]) if not t.startswith("Eq")}
    assert code and paper <= carried
    assert {*modules} <= {*NINE} or not any("Eq" in tag for tag in paper)
    assert tests and all(f"def {name}(" in TESTS for name in tests)


# Names of tests, files and pages
def test_tests_files_and_names_of_modules_that_the_pages_name_exist():
    for name in re.findall(r"`(test_\w+)`", TEXT):
        assert f"def {name}(" in TESTS, name
    for file in re.findall(r"`((?:kit/|beyond/|tests/)?\w+\.(?:py|html|toml|txt))`", TEXT):
        folder = ROOT / "tests" if file.startswith("test_") else ROOT
        made = file in ("report.html", "my_file.py")  # by a run, by the reader
        assert made or (folder / file).exists(), file
    for module, name in re.findall(r"`((?:kit\.|beyond\.)?\w+)\.([A-Za-z_]\w*)`", TEXT):
        if module in SOURCES and name != "py":
            assert hasattr(importlib.import_module(module), name), f"{module}.{name}"


def links(page: Path) -> list[str]:
    """What a page links to or shows, the web left out."""
    found = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    return [link for link in found if not link.startswith("http")]


def slugs(page: Path) -> set[str]:
    """The anchors of a page's titles, as GitHub names them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_link_leads_somewhere_and_every_page_and_picture_is_reached_from_the_readme():
    reached, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        for link in links(page) if page.suffix == ".md" and page not in reached else ():
            file, _, anchor = link.partition("#")
            todo.append((page.parent / file).resolve() if file else page)
            assert todo[-1].exists() and (not anchor or anchor in slugs(todo[-1])), (page, link)
        reached.add(page)
    assert reached >= {*PAGES, *(ROOT / "docs" / "pictures").iterdir()}
    own = {(ROOT / link).resolve() for link in links(ROOT / "README.md")}
    assert own >= set(PAGES[1:])  # one click away, not two


def test_the_sources_point_at_pages_and_sections_that_exist():
    text = "\n".join(SOURCES.values())
    assert all((ROOT / page).exists() for page in re.findall(r"docs/\w+\.md", text))
    titles = re.findall(r"^#+ (.*)$", TEXT, re.M)
    for title in re.findall(r'(?:README|docs/\w+\.md), "([^"]+)"', text):
        assert any(known.startswith(title) for known in titles), title


# Commands and flags
JOINED = re.sub(r"\\\n\s*", " ", TEXT)  # a command over two lines is one
COMMANDS = sorted(set(re.findall(
    r"(?:python|launch|torchrun[^\n]*?|--\S+) ((?:\w+|tests/\w+)\.py)((?: [^\n#`|&]*)?)", JOINED
)))  # fmt: skip
PROGRAMS = "train.py evaluate.py data.py rewards.py faithfulness.py".split()
PROGRAMS += ["tests/benchmark.py", "tests/gpu_check.py"]
# Flags of vllm, torchrun, accelerate and setpriv.
FOREIGN = """--tensor-parallel-size --port --nproc-per-node --num-machines --num-processes
    --machine-rank --main-process-ip --reuid --regid --clear-groups""".split()


@cache
def help_of(file: str, words: str = "") -> str:
    """What `python FILE WORDS --help` prints. The words are parsed first, and --help then ends the
    program before it does anything."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as out:
        patch.chdir(ROOT)
        patch.setattr(sys, "argv", [file, *words.split(), "--help"])
        patch.setattr(sys, "path", [str((ROOT / file).parent), *sys.path])
        patch.setenv("COLUMNS", "100")
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(file, run_name="__main__")
    assert ended.value.code == 0, f"{file} {words}"
    return out.getvalue()


def flags(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))


def test_commands_and_flags_of_the_pages_are_understood():
    known = {*FOREIGN, "--self-test"}.union(*(flags(help_of(file)) for file in PROGRAMS))
    for file, words in COMMANDS:
        assert (ROOT / file).exists()
        if file == "sandbox.py":  # its words are a program, or this
            assert words.strip() in ("", "--self-test") and '"--self-test"' in SOURCES["sandbox"]
        elif words.strip():
            assert file in PROGRAMS
            own = flags(help_of(file, words))  # a door has its own
            assert flags(words) <= own | flags(help_of(file))
            known |= own
    assert flags(TEXT) <= known


# What the README promises of itself
def test_the_two_commands_stand_within_ten_lines_of_the_opening_sentence():
    shown = "\n".join(README.split("**\n", 1)[1].splitlines()[:10])
    assert re.search(r"^    .*pip install.* train\.py$", shown, re.M)
    assert re.search(r"^    .*pip install.* -m pytest$", shown, re.M)
    assert len(README.splitlines()) <= 240


def test_every_module_is_in_the_reading_order_with_its_length():
    order = re.findall(r"^\| `(\w+)\.py` \| (\d+) \| (\d+)", section("Reading order"), re.M)
    assert [name for name, _, _ in order] == NINE
    for name, told, minutes in order:
        lines = len(SOURCES[name].splitlines())
        assert abs(int(told) - lines) <= 0.1 * lines, f"{name}.py has {lines} lines"
        assert lines / 12 - 3 <= int(minutes) <= lines / 10 + 3, f"{name}.py has {lines} lines"


@pytest.mark.parametrize("module", NINE[:-2])
def test_every_module_shows_its_concept_as_a_script(module, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [f"{module}.py"])
    runpy.run_path(f"{module}.py", run_name="__main__")
    assert len(capsys.readouterr().out.splitlines()) >= 1
