"""
benchmarks.py: ten public benchmarks, where a row becomes a question and a rule says what is right.

Concept     Each benchmark is published in several forms, with columns of its own. A row of any form
            becomes the same fields: a question, its options, its answer, and so on.
Paper       CodeV, arXiv:2511.19661, Tables 3 and 4: the benchmarks and how each is scored
In          the rows of a table (kit/tables.py), as dicts
Out         the fields of a question as a dict, and its picture; the score of a benchmark
Left out    tools of VLMEvalKit that read an answer out of free prose
Read next   evaluate.py (load_bench makes Samples of these fields)
"""

import ast
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from statistics import fmean
from string import ascii_uppercase as LETTERS

from PIL import Image

from kit.answers import check_reference, final_answer, is_open, read_number, same_answer
from kit.boxes import outwards
from kit.tables import image_bytes, read_image, read_rows
from kit.usable import Bad, Skipped, bad_rows


@dataclass(frozen=True)
class Bench:
    """A benchmark of the paper's Tables 3 and 4.

    where   hub name:split (tables.read_rows); VLMEvalKit's TSV files have the same questions
    read    a row -> id, question, options, answer, part (the score is split by it), and perhaps
            boxes, cycle, and the benchmark's own rule(answer, reference) -> bool; or raises Bad
    """

    where: str
    read: Callable[[dict], dict]
    kind: str = "neutral"  # "search": the evidence must be looked for
    judged: bool = False  # open answers that the rules call wrong go to a judge
    mean_of_parts: bool = False  # the score is the mean of the parts' scores, not of all answers


def maybe(row: dict, *names: str):
    """The cell of the first of these columns that is not empty; None if all are empty."""
    cells = (row.get(name) for name in names)
    return next((cell for cell in cells if cell not in (None, "", [], {})), None)


def filled(row: dict, *names: str):
    """The same, but at least one of the columns has to be filled."""
    if (cell := maybe(row, *names)) is None:
        raise Bad(names[0], f"expected something in column {' or '.join(names)}")
    return cell


def literal(cell: object) -> object:
    """The value of a Python literal that a TSV holds as text; what is no text stays as it is."""
    try:
        return ast.literal_eval(cell) if isinstance(cell, str) else cell
    except (ValueError, SyntaxError) as error:
        raise Bad("literal", f"expected a list or dict, got {cell!r}") from error


def ask(
    row: dict, question: str, options: Iterable, answer: object, part: str, rule=None, **more
) -> dict:
    """The fields of a question. Its answer has to be right by the rule that will score it."""
    options, answer = tuple(map(str, options)), str(answer).strip()
    try:
        if rule is None:
            check_reference(answer, options)
        elif not rule(answer, answer):
            raise ValueError(f"{answer!r} is not right by its own rule: correct the data")
    except ValueError as error:
        raise Bad("answer", str(error)) from error
    id = maybe(row, "index", "id", "pid", "sample_index", "question_id", "Question_id")
    words = {"id": "" if id is None else str(id), "question": question.strip()}
    return words | {"options": options, "answer": answer, "part": part, "rule": rule} | more


def options_of(row: dict, *names: str, needed: bool = True) -> list[str]:
    """The options: a list in one of these columns, or else VLMEvalKit's columns A, B, C, ..."""
    letters = [c for c in LETTERS if maybe(row, c) is not None]
    if letters != list(LETTERS[: len(letters)]):
        raise Bad("A", f"expected options A, B, ... without a gap, got {', '.join(letters)}")
    options = literal(maybe(row, *names) or []) or [row[c] for c in letters]
    if needed and not options:
        raise Bad("options", f"expected options in columns {', '.join([*names, 'A, B, ...'])}")
    return options


def vstar(row: dict) -> dict:
    """The authors' test_questions.jsonl, a JSON of boxes beside each picture; TSVs have none."""
    part = filled(row, "category")
    if "text" not in row:
        return ask(row, filled(row, "question"), options_of(row), filled(row, "answer"), part)
    question, *options = re.split(r"\s*^\([A-Z]\) ?", row["text"], flags=re.MULTILINE)
    if not options:
        raise Bad("text", f"expected a question and options (A) ..., got {row['text']!r}")
    options[-1] = options[-1].split("\n")[0]  # below it stands how to answer: we say that
    labels = row["folder"] / Path(filled(row, "image")).with_suffix(".json")
    if not labels.is_file():
        raise Bad("image", f"expected its boxes in {labels}")
    found = json.loads(labels.read_text(encoding="utf-8"))["bbox"]  # x, y, width, height of each
    boxes = tuple(outwards(x, y, x + width, y + height) for x, y, width, height in found)
    return ask(row, question, options, filled(row, "label"), part, boxes=boxes)


def hrbench(row: dict) -> dict:
    """A question is four rows; from one `cycle` to the next its options move on by one place. FSP
    and FCP: fine-grained perception of a single instance, and across instances."""
    parts, kind = {"single": "FSP", "cross": "FCP"}, filled(row, "category")
    if kind not in parts:
        raise Bad("category", f"expected single or cross, got {kind!r}")
    question, answer = filled(row, "question"), filled(row, "answer")
    cycle = str(filled(row, "cycle_category"))
    return ask(row, question, options_of(row), answer, parts[kind], cycle=cycle)


def mme_realworld(row: dict) -> dict:
    part = filled(row, "Task", "category").split("/")[0]  # Perception or Reasoning
    listed = options_of(row, "multi-choice options", "Answer choices")
    options = [re.sub(r"^\([A-E]\) ?", "", option) for option in listed]
    question, answer = filled(row, "question", "Text"), filled(row, "answer", "Ground truth")
    return ask(row, question, options, answer, part)


def vlmblind(row: dict) -> dict:
    task, question = filled(row, "task"), filled(row, "question", "prompt")
    rules = {"Counting": rows_and_columns, "Touching": contained, "Olympic": contained}
    rule = rules.get(task.split()[0], in_braces)
    return ask(row, question, (), filled(row, "answers", "groundtruth"), task, rule=rule)


def in_braces(answer: str, reference: str) -> bool:
    """The answer is asked for as {5}; one that is nothing but the value needs no braces."""
    braced = re.search(r"\{(.*?)\}", answer)
    return (braced[1] if braced else answer).strip() == reference


def contained(answer: str, reference: str) -> bool:
    return reference.casefold() in answer.casefold()


def rows_and_columns(answer: str, reference: str) -> bool:
    """rows={5} columns={6}, in either order, or (5, 6)."""
    named = [re.search(rf"(?i){name}s?\D*(\d+)", answer) for name in ("row", "column")]
    numbers = [match[1] for match in named] if all(named) else re.findall(r"\d+", answer)
    return numbers == re.findall(r"\d+", reference)


def mathvista(row: dict) -> dict:
    question, form, answer = (filled(row, c) for c in ("question", "answer_type", "answer"))
    part = maybe(literal(maybe(row, "metadata") or row), "task") or form
    if filled(row, "question_type") == "multi_choice":
        question = question.split("\nChoices:")[0]
        return ask(row, question, options_of(row, "choices"), answer, part)
    precision = maybe(row, "precision")
    digits = len(str(answer).partition(".")[2]) if precision is None else int(float(precision))
    wanted, rule = {
        "integer": ("a whole number", partial(rounded, int)),
        "float": (f"a number with {digits} decimals", partial(rounded, lambda x: round(x, digits))),
        "list": ("a Python list", same_list),
    }.get(form, ("a word or two", exactly))
    unit = f" (Unit: {row['unit']})" if maybe(row, "unit") else ""
    return ask(row, f"{question}{unit}\nAnswer with {wanted}.", (), answer, part, rule=rule)


def rounded(how: Callable[[float], float], answer: str, reference: str) -> bool:
    number = as_float(answer)
    return number is not None and how(number) == float(reference)


def as_float(text: str) -> float | None:
    number = read_number(final_answer(text))
    fits = number is not None and abs(number[0]) < 1e300  # else no float can hold it
    return float(number[0]) if fits else None


def exactly(answer: str, reference: str) -> bool:
    return final_answer(answer) == final_answer(reference)


def same_list(answer: str, reference: str) -> bool:
    try:
        return ast.literal_eval(final_answer(answer)) == ast.literal_eval(reference)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False


def mathverse(row: dict) -> dict:
    """(Of the version "Vision Only" even the question stands in the image.)"""
    question, *choices = filled(row, "question", "query_wo").split("\nChoices:")
    options = re.findall(r"^[A-Z]:(.*)$", "".join(choices), re.MULTILINE)
    about = {**literal(maybe(row, "metadata") or {}), **row}
    return ask(row, question, options, filled(row, "answer"), filled(about, "problem_version"))


def mathvision(row: dict) -> dict:
    question = re.sub(r"<image\d+>", "", filled(row, "question"))
    options = options_of(row, "options", "choices", needed=False)
    return ask(row, question, options, filled(row, "answer"), filled(row, "subject", "category"))


def charxiv(row: dict) -> dict:
    """The hub's rows give their descriptive questions as numbers, so we take the reasoning one;
    --data CharXiv_descriptive_val.tsv has the descriptive ones in words."""
    question, answer = filled(row, "question", "reasoning_q"), filled(row, "answer", "reasoning_a")
    return ask(row, question, (), answer, "descriptive" if "qid" in row else "reasoning")


def mmmu(row: dict) -> dict:
    """A question may have images <image 1> to <image 7>, which its options may name as well:
    `picture` joins them to one. An open one may have a list of references."""
    texts = [filled(row, "question"), str(filled(row, "answer"))]
    texts += map(str, options_of(row, "options", needed=False))
    places = {place for text in texts for place in re.findall(r"<image (\d)>", text)}
    question, answer, *options = (re.sub(r"<image (\d)>", r"[image \1]", t) for t in texts)
    if len(places) > 1:
        question += "\n(The images stand below each other, image 1 at the top.)"
    subject = re.sub(r"^[a-z]+_|_\d+$", "", filled(row, "category", "id"))  # validation_Math_1
    by_rule = answer.startswith("[") or read_number(final_answer(answer))
    rule = None if options or not by_rule else two_decimals
    return ask(row, question, options, answer, subject, rule=rule)


def two_decimals(answer: str, references: str) -> bool:
    """One of the references is enough. Numbers are equal if they are when rounded to two decimals:
    0.29 is 0.286, and the authors' rule says so."""
    listed = literal(references) if references.startswith("[") else [references]
    texts = [str(each) for each in listed]
    wanted = [number for text in texts if (number := as_float(text)) is not None]
    near = any(rounded(lambda x: round(x, 2), answer, str(round(x, 2))) for x in wanted)
    return near or answer == references or any(same_answer(answer, text) for text in texts)


BENCHES = {
    "vstar": Bench("craigwu/vstar_bench", vstar, "search"),
    "hrbench4k": Bench("DreamMr/HR-Bench:hr_bench_4k", hrbench, "search"),
    "hrbench8k": Bench("DreamMr/HR-Bench:hr_bench_8k", hrbench, "search"),
    "vlmblind": Bench("XAI/vlmsareblind:valid", vlmblind, mean_of_parts=True),
    "mme-realworld-lite": Bench(
        "yifanzhang114/MME-RealWorld-lite-lmms-eval", mme_realworld, "search"
    ),
    "mathvista": Bench("AI4Math/MathVista:testmini", mathvista),
    "mathverse": Bench("AI4Math/MathVerse:testmini.parquet", mathverse, judged=True),
    "mathvision": Bench("MathLLMs/MathVision:testmini", mathvision),
    "charxiv": Bench("princeton-nlp/CharXiv:val", charxiv, judged=True),
    "mmmu": Bench("lmms-lab/MMMU:validation", mmmu, judged=True),
}

PICTURES = ("decoded_image", "image", "bytes", "Image", *(f"image_{i}" for i in range(1, 8)),
            "image_path")  # fmt: skip


class Questions:
    """The rows of a benchmark, those of the hub or of `where`. `numbers` are those that count: a
    table may also have rows to show the form of the questions by, whose `split` is dev."""

    def __init__(self, name: str, where: str | None = None, first: int | None = None) -> None:
        self.bench, self.rows = BENCHES[name], read_rows(where or BENCHES[name].where)
        self.name, self.title = name, f"{name} ({where or self.bench.where})"
        splits = len(self.rows) and "split" in self.rows[0]  # else no row need be read for that
        every = range(len(self.rows))
        counted = (i for i in every if not splits or self.rows[i].get("split") != "dev")
        self.numbers = [*islice(counted, first)]

    @cached_property
    def number_of(self) -> dict[str, int]:
        return {str(row["index"]): i for i, row in enumerate(self.rows) if "index" in row}

    def row(self, i: int) -> dict:
        """Row i. VLMEvalKit's TSVs may hold the index of another row, whose picture it is."""
        row = {**self.rows[i], "folder": self.rows.folder}
        if len(cell := str(row.get("image"))) <= 64 and cell in self.number_of:
            row["image"] = self.rows[self.number_of[cell]]["image"]
        return row

    def fields(self, i: int) -> dict:
        """What row i asks. Raises Bad for one that cannot be asked or scored, and for one whose
        picture is not there; but what is there is not decoded."""
        row = self.row(i)
        filled(row, *PICTURES)
        try:
            for cell in pictures(row):
                held = (cell.get("bytes") or cell.get("path")) if isinstance(cell, dict) else cell
                few = len(held or "") < 4096  # a path; or no picture at all, which a path may hide
                if few and len(image_bytes(cell, row["folder"])) < 4096:
                    read_image(cell, row["folder"])
        except ValueError as error:
            raise Bad("image", str(error)) from error
        fields = self.bench.read(row)
        return fields | {"id": f"{self.name}-{i}-{fields['id']}".rstrip("-")}  # theirs: no key?

    def bad(self) -> list[Skipped]:
        """The rows that count and for which `fields` raises Bad, in order."""
        counted = {*self.numbers}
        total = max(counted, default=-1) + 1
        return bad_rows(total, lambda i: i in counted and self.fields(i), self.title)

    def check(self) -> None:
        """Raises ValueError, which names the first bad row."""
        if bad := self.bad():
            raise ValueError(f"{self.title}: row {bad[0].row}, {bad[0].field}: {bad[0].reason}")

    def way(self, i: int) -> str:
        """By which rule row i is scored, in words."""
        fields = self.fields(i)
        if rule := fields["rule"]:
            return f"by the authors' rule: {getattr(rule, 'func', rule).__name__}"
        if fields["options"]:
            return "by the option that is named"
        if not is_open("words", fields["answer"]):
            return "as a number, letter or formula"
        return "in words: by rule" + ", then by the judge" * self.bench.judged

    def picture(self, i: int) -> Image.Image:
        row = self.row(i)
        try:
            return sheet([read_image(cell, row["folder"]) for cell in pictures(row)])
        except ValueError as error:
            raise ValueError(f"{self.title}: row {i}: {error}") from error


def pictures(row: dict) -> list:
    """The cells of a row's pictures: image_1 to image_7, or the first column that has any."""
    cells = [cell for name in PICTURES if (cell := maybe(row, name)) is not None]
    if "image_1" in row or isinstance(cells[0], list):
        return cells if "image_1" in row else cells[0]
    listed = isinstance(cells[0], str) and cells[0].startswith("[")
    return literal(cells[0]) if listed else cells[:1]


def sheet(images: list[Image.Image], gap: int = 16) -> Image.Image:
    """Several images below each other, so that there is one to look at."""
    size = max(i.width for i in images), sum(i.height + gap for i in images) - gap
    joined, y = Image.new("RGB", size, "white"), 0
    for image in images:
        joined.paste(image, (0, y))
        y += image.height + gap
    return joined


def published(answers: Iterable[tuple[str, str, float]], mean_of_parts: bool = False) -> dict:
    """The scores of a benchmark ("all") and its parts. With cycles (HR-Bench) each is the mean of
    the cycles' accuracies; with `mean_of_parts` (VLMs are blind) "all" is a mean over parts. Each
    answer is its part, its cycle ("" where there are none), and 1 if it is right, else 0.

    >>> published([("p", "0", 1), ("p", "0", 0), ("p", "1", 1)])
    {'p': 0.75, 'all': 0.75}
    """
    cycles = defaultdict(lambda: defaultdict(list))
    for part, cycle, right in answers:
        cycles[cycle][part].append(right)
    scores = defaultdict(list)
    for parts in cycles.values():
        means = {part: fmean(rights) for part, rights in sorted(parts.items())}
        total = means.values() if mean_of_parts else sum(parts.values(), [])
        for part, value in (means | {"all": fmean(total)}).items():
            scores[part].append(value)
    return {part: fmean(values) for part, values in scores.items()}
