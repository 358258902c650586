"""
benchmarks.py: ten public benchmarks, where a row becomes a question and a rule says what is right.

Concept     Each benchmark is published in several forms, with columns of its own. A row of any form
            becomes the same fields: a question, its options, its answer, and so on.
Paper       CodeV, arXiv:2511.19661, Tables 3 and 4: the benchmarks and how each is scored
In          a row of a table (kit/tables.py), as a dict
Out         the fields of a question as a dict; the score of a benchmark and of its parts
Left out    tools of VLMEvalKit that read an answer out of free prose
Read next   evaluate.py (load_bench makes Samples of these fields)
"""

import ast
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from string import ascii_uppercase as LETTERS

from PIL import Image

from kit.answers import final_answer, read_number, same_answer
from kit.boxes import outwards
from kit.tables import read_image
from kit.usable import Bad


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


def ask(row: dict, question: str, options: Iterable, answer: object, part: str, **more) -> dict:
    options, answer = tuple(map(str, options)), str(answer)
    if options and answer not in {*LETTERS[: len(options)], *options}:
        raise Bad("answer", f"{answer!r} is neither a letter nor a text of {options}")
    id = maybe(row, "index", "id", "pid", "sample_index", "question_id", "Question_id")
    words = {"id": "" if id is None else str(id), "question": question.strip()}
    return words | {"options": options, "answer": answer, "part": part} | more


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
    }.get(form, ("a word or two", None))
    unit = f" (Unit: {row['unit']})" if maybe(row, "unit") else ""
    return ask(row, f"{question}{unit}\nAnswer with {wanted}.", (), answer, part, rule=rule)


def rounded(how: Callable[[float], float], answer: str, reference: str) -> bool:
    number = read_number(final_answer(answer))
    fits = number is not None and abs(number[0]) < 1e300  # else no float can hold it
    return fits and how(float(number[0])) == float(reference)


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
    """A question may have images <image 1> to <image 7>: `picture` joins them to one."""
    options = options_of(row, "options", needed=False)
    question, answer = filled(row, "question"), str(filled(row, "answer"))
    if len(set(re.findall(r"<image (\d)>", question))) > 1:
        question += "\n(The images stand below each other, image 1 at the top.)"
    subject = re.sub(r"^[a-z]+_|_\d+$", "", filled(row, "category", "id"))  # validation_Math_1
    rule = any_of if not options and answer.startswith("[") else None
    question = re.sub(r"<image (\d)>", r"[image \1]", question)
    return ask(row, question, options, answer, subject, rule=rule)


def any_of(answer: str, references: str) -> bool:
    return any(same_answer(answer, str(reference)) for reference in literal(references))


BENCHES = {
    "vstar": Bench("craigwu/vstar_bench", vstar, "search"),
    "hrbench4k": Bench("DreamMr/HR-Bench:hr_bench_4k", hrbench, "search"),
    "hrbench8k": Bench("DreamMr/HR-Bench:hr_bench_8k", hrbench, "search"),
    "vlmblind": Bench("XAI/vlmsareblind:valid", vlmblind, mean_of_parts=True),
    "mme-realworld-lite": Bench(
        "yifanzhang114/MME-RealWorld-lite-lmms-eval", mme_realworld, "search"
    ),
    "mathvista": Bench("AI4Math/MathVista:testmini", mathvista, judged=True),
    "mathverse": Bench("AI4Math/MathVerse:testmini.parquet", mathverse, judged=True),
    "mathvision": Bench("MathLLMs/MathVision:testmini", mathvision),
    "charxiv": Bench("princeton-nlp/CharXiv:val", charxiv, judged=True),
    "mmmu": Bench("lmms-lab/MMMU:validation", mmmu, judged=True),
}

PICTURES = ("decoded_image", "image", "bytes", "Image", *(f"image_{i}" for i in range(1, 8)))


def picture(row: dict, folder: Path) -> Image.Image:
    """A row's image; several are joined below each other, so that there is one to look at."""
    cells = [cell for name in PICTURES if (cell := maybe(row, name)) is not None]
    if "image_1" not in row:
        cells = literal(cells[0]) if str(cells[0])[:1] == "[" else cells[:1]
    images, gap = [read_image(cell, folder) for cell in cells], 16
    size = max(i.width for i in images), sum(i.height + gap for i in images) - gap
    sheet, y = Image.new("RGB", size, "white"), 0
    for image in images:
        sheet.paste(image, (0, y))
        y += image.height + gap
    return sheet


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
