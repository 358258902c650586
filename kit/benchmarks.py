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
import math
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

from kit.answers import check_reference, final_answer, is_open, read_number, same_answer, undressed
from kit.boxes import outwards
from kit.grader import GRADER
from kit.tables import Bad, Usable, blaming, read_image, read_rows


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


# Where a row keeps a field: of these columns the first that is filled counts.
COLUMNS = {
    "id": ("index", "id", "pid", "sample_index", "question_id", "Question_id"),
    "question": ("question", "Text", "prompt", "query_wo", "reasoning_q"),
    "options": ("options", "choices", "multi-choice options", "Answer choices"),
    "answer": ("answer", "Ground truth", "answers", "groundtruth", "reasoning_a"),
    "part": ("Task", "task", "problem_version", "subject", "category"),
    "picture": ("decoded_image", "image", "bytes", "Image", *(f"image_{i}" for i in range(1, 8)),
                "image_path"),
}  # fmt: skip
LISTED = ("['", '["')  # so begins a list of texts; [0, 1) is an interval


def maybe(row: dict, field: str, default=None):
    """What a row holds of a field of COLUMNS, or in a column of that name; else the default."""
    cells = (row.get(name) for name in COLUMNS.get(field, (field,)))
    filled = (c.strip() and c if isinstance(c, str) else c for c in cells)  # a blank is nothing
    return next((cell for cell in filled if cell not in (None, "", [], {})), default)


def filled(row: dict, field: str):
    """The same, but it has to be there."""
    if (cell := maybe(row, field)) is None:
        columns = " or ".join(COLUMNS.get(field, (field,)))
        raise Bad(field, f"expected something in column {columns}")
    return cell


def literal(cell: object) -> object:
    """The value of a Python literal that a TSV holds as text; what is no text stays as it is."""
    try:
        return ast.literal_eval(cell) if isinstance(cell, str) else cell
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise Bad("literal", f"expected a list or dict, got {cell!r:.60}") from error


def ask(row: dict, rule: Callable | None = None, choice: bool = False, **given) -> dict:
    """The fields of a question: those `given`, the others from their columns. Its answer has to be
    right by the rule that will score it. choice: it cannot be asked without options."""
    fields = {name: given.get(name) or filled(row, name) for name in ("question", "answer", "part")}
    options = undressed(given["options"] if "options" in given else options_of(row))
    if choice and not options:
        raise Bad("options", f"expected options in {', '.join(COLUMNS['options'])}, A, B, ...")
    answer = str(fields["answer"]).strip()
    with blaming("answer"):
        if rule is None:
            check_reference(answer, options)
        elif not rule(answer, answer):
            raise ValueError(f"{answer!r} is not right by its own rule: correct the data")
    fields |= {"id": str(maybe(row, "id", "")), "question": fields["question"].strip()}
    return given | fields | {"options": options, "answer": answer, "rule": rule}


def options_of(row: dict) -> list[str]:
    """The options: a list in a column, or else VLMEvalKit's columns A, B, C, ..."""
    letters = [c for c in LETTERS if maybe(row, c) is not None]
    if letters != list(LETTERS[: len(letters)]):
        raise Bad("A", f"expected options A, B, ... without a gap, got {', '.join(letters)}")
    return literal(maybe(row, "options", [])) or [row[c] for c in letters]


def vstar(row: dict) -> dict:
    """The authors' test_questions.jsonl, a JSON of boxes beside each picture; TSVs have none."""
    if "text" not in row:
        return ask(row, choice=True)
    question, *options = re.split(r"\s*^\([A-Z]\) ?", row["text"], flags=re.MULTILINE)
    if not options:
        raise Bad("text", f"expected a question and options (A) ..., got {row['text']!r}")
    options[-1] = options[-1].split("\n")[0]  # below it stands how to answer: we say that
    labels = row["folder"] / Path(filled(row, "image")).with_suffix(".json")
    if not labels.is_file():
        raise Bad("image", f"expected its boxes in {labels}")
    with blaming("image"):  # x, y, width, height of each box
        found = filled(json.loads(labels.read_text(encoding="utf-8")), "bbox")
        boxes = tuple(outwards(x, y, x + width, y + height) for x, y, width, height in found)
    row = row | {"question": question, "answer": filled(row, "label")}
    return ask(row, choice=True, options=options, boxes=boxes)


def hrbench(row: dict) -> dict:
    """A question is four rows; from one `cycle` to the next its options move on by one place. FSP
    and FCP: fine-grained perception of a single instance, and across instances."""
    parts, kind = {"single": "FSP", "cross": "FCP"}, filled(row, "category")
    if kind not in parts:
        raise Bad("category", f"expected single or cross, got {kind!r}")
    return ask(row, choice=True, part=parts[kind], cycle=str(filled(row, "cycle_category")))


def mme_realworld(row: dict) -> dict:
    part = filled(row, "part").split("/")[0]  # Perception or Reasoning
    return ask(row, choice=True, part=part)


def vlmblind(row: dict) -> dict:
    rules = {"Counting": rows_and_columns, "Touching": contained, "Olympic": contained}
    return ask(row, rules.get(filled(row, "task").split()[0], in_braces))


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
    row = {**literal(maybe(row, "metadata", {})), **row}  # the hub's rows have the task there
    question, form, answer = (filled(row, c) for c in ("question", "answer_type", "answer"))
    if filled(row, "question_type") == "multi_choice":
        texts = [*map(str, options_of(row))]
        if answer in [*LETTERS] and answer in texts:  # it is a text, even where that is a letter
            answer = LETTERS[texts.index(answer)]
        return ask(row, choice=True, question=question.split("\nChoices:")[0], answer=answer)
    precision = maybe(row, "precision")
    with blaming("precision"):
        digits = decimals(answer) if precision is None else int(float(precision))
    wanted, rule = {
        "integer": ("a whole number", partial(rounded, int)),
        "float": (f"a number with {digits} decimals", partial(rounded, lambda x: round(x, digits))),
        "list": ("a Python list", same_list),
    }.get(form, ("a word or two", exactly))
    unit = f" (Unit: {row['unit']})" if maybe(row, "unit") else ""
    return ask(row, rule, question=f"{question}{unit}\nAnswer with {wanted}.", options=())


def rounded(how: Callable[[float], float], answer: str, reference: str) -> bool:
    number = as_float(answer)
    return not math.isnan(number) and how(number) == float(reference)


def as_float(text: str) -> float:
    """Its number; nan if it is none, or none that a float can hold."""
    number = read_number(final_answer(text))
    return float(number[0]) if number and abs(number[0]) < 1e300 else math.nan


def exactly(answer: str, reference: str) -> bool:
    return final_answer(answer) == final_answer(reference)


def same_list(answer: str, reference: str) -> bool:
    try:
        return literal(final_answer(answer)) == literal(reference)
    except Bad:
        return False


def mathverse(row: dict) -> dict:
    """(Of the version "Vision Only" even the question stands in the image.)"""
    row = {**literal(maybe(row, "metadata", {})), **row}
    question, *choices = filled(row, "question").split("\nChoices:")
    options = re.findall(r"^\(?[A-Z][:：.)] ?(.*)$", "".join(choices), re.MULTILINE)
    return ask(row, question=question, options=options, part=filled(row, "problem_version"))


def mathvision(row: dict) -> dict:
    question, options = re.sub(r"<image\d+>", "", filled(row, "question")), options_of(row)
    return ask(row, None if options else near_value, question=question, options=options)


def near_value(answer: str, reference: str) -> bool:
    """Numbers and formulas are equal if they are when rounded to two decimals."""
    texts = final_answer(answer), final_answer(reference)
    return same_answer(answer, reference) or GRADER.same(*texts, 2)


def charxiv(row: dict) -> dict:
    """The hub's rows give their descriptive questions as numbers, so we take the reasoning one;
    --data CharXiv_descriptive_val.tsv has the descriptive ones in words. A number that stands
    nowhere in the chart (type 4) is asked for with its decimals, as the authors ask."""
    question, part = filled(row, "question"), "descriptive" if "qid" in row else "reasoning"
    if str(maybe(row, "reasoning_a_type")) == "4":
        digits = decimals(filled(row, "answer"))
        wanted = f"a number with {digits} decimals" if digits else "a whole number"
        question += f"\nAnswer with {wanted}."
    return ask(row, question=question, part=part)


def decimals(number: object) -> int:
    return len("".join(re.findall(r"\.(\d+)", str(number))[:1]))


def mmmu(row: dict) -> dict:
    """A question may have images <image 1> to <image 7>, which its options may name as well:
    `picture` joins them to one. An open one may have a list of references."""
    texts = [filled(row, "question"), str(filled(row, "answer")), *map(str, options_of(row))]
    places = {place for text in texts for place in re.findall(r"<image (\d)>", text)}
    question, answer, *options = (re.sub(r"<image (\d)>", r"[image \1]", t) for t in texts)
    if len(places) > 1:
        question += "\n(The images stand below each other, image 1 at the top.)"
    # The hub's rows have their subject in an id such as validation_Math_1.
    part = maybe(row, "category") or re.sub(r"^[a-z]+_|_\d+$", "", filled(row, "id"))
    by_rule = answer[:2] in LISTED or read_number(final_answer(answer))
    rule = two_decimals if by_rule and not options else None
    return ask(row, rule, question=question, options=options, answer=answer, part=part)


def two_decimals(answer: str, references: str) -> bool:
    """One of the references is enough. Numbers are equal if they are when rounded to two decimals:
    0.29 is 0.286, and the authors' rule says so."""
    listed = literal(references) if references[:2] in LISTED else [references]
    texts, said = [*map(str, listed)], round(as_float(answer), 2)
    near = any(round(as_float(text), 2) == said for text in texts)
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
            other = self.rows[self.number_of[cell]]
            row |= {name: other[name] for name in COLUMNS["picture"] if name in other}
        return row

    def fields(self, i: int) -> dict:
        """What row i asks. Raises Bad for one that cannot be asked or scored, and for one whose
        picture is not there; of those that are, only small ones are decoded."""
        row = self.row(i)
        filled(row, "picture")
        with blaming("image"):
            for cell in pictures(row):
                if len(cell) < 65536:  # a path, or one that may be cut, or is no picture
                    read_image(cell, row["folder"], whole=False)
        fields = self.bench.read(row)
        return fields | {"id": f"{self.name}-{i}-{fields['id']}".rstrip("-")}  # theirs: no key?

    def usable(self, make: Callable[[int], object], on_bad: str = "stop") -> Usable:
        """What make(i) makes of each row that counts (see Usable)."""
        return Usable(self.numbers, self.fields, make, on_bad, self.title)

    def way(self, i: int) -> str:
        """By which rule row i is scored, in words."""
        fields = self.fields(i)
        if rule := fields["rule"]:
            return f"by the authors' rule: {getattr(rule, 'func', rule).__name__}"
        if fields["options"]:
            return "by the option that is named"
        in_words = "in words: by rule" + ", then by the judge" * self.bench.judged
        return in_words if is_open("words", fields["answer"]) else "as a number, letter or formula"

    def picture(self, i: int) -> Image.Image:
        row = self.row(i)
        try:
            return sheet([read_image(cell, row["folder"]) for cell in pictures(row)])
        except ValueError as error:
            raise ValueError(f"{self.title}: row {i}: {error}") from error


def pictures(row: dict) -> list:
    """The cells of a row's pictures: image_1 to image_7, or the first column that has any."""
    cells = [cell for name in COLUMNS["picture"] if (cell := maybe(row, name)) is not None]
    if "image_1" in row:
        return cells
    listed = isinstance(cells[0], list) or isinstance(cells[0], str) and cells[0].startswith("[")
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
