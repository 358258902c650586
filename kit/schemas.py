"""
schemas.py: the columns of public data sets, and what they hold of a question or a demonstration.

Concept     Public sets agree on what a question is, and differ in where they keep it. One table
            names the columns. A row that lacks something is refused; the reason names the field.
Paper       nothing: these are the layouts of its data, and our words for its task types
In          a row, as tables.read_rows gives it
Out         the fields of a data.Sample; the parts of a demonstration of Thyme-SFT
Left out    the benchmarks (benchmarks.py)
Read next   tables.py (files and pictures), data.load_rl and sft.load_thyme (who asks for these)
"""

import re
import reprlib
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from kit.answers import check_reference, undressed
from kit.boxes import outwards
from kit.tables import Bad, blaming, read_image

# Where a set keeps what a question needs; the first column that holds something counts. The form
# of the RL library verl (CodeV-RL-Data, DeepEyes-47K), flat rows (ThinkLite-VL), our own.
COLUMNS = {
    "image": ("images", "image"),
    "question": ("extra_info.question", "question", "problem", "prompt", "messages"),
    "answer": ("reward_model.ground_truth", "answer", "ground_truth", "solution"),
    "source": ("data_source", "source", "dataset"),
}

# A word in the name of a question's source gives its kind; without one of them it is "search".
# That rewards differ by task type is known from notes on the paper; the words are ours.
KINDS = {
    **dict.fromkeys(("thinklite", "geo", "math", "tabmwp"), "neutral"),
    **dict.fromkeys(("vstar", "chart", "arxivqa"), "search"),
}


def rl_fields(row: dict, number: int, folder: Path) -> dict:
    """One row -> id, image, question, answer, options, kind, boxes, source, as in data.Sample. The
    row's number makes an id where there is none; paths start from `folder`. Raises Bad."""
    for field in ("image", "question", "answer"):
        if cell_of(row, field) is None:
            raise Bad(field, f"nothing in {' or '.join(COLUMNS[field])}")
    picture, question, answer, source = (cell_of(row, field) for field in COLUMNS)
    question, source = question_of(question), str(source or "")
    if isinstance(answer, bool | list | dict):
        raise Bad("answer", f"expected a text or a number, got {answer!r}")
    answer = re.sub(r"(?s)^.*<answer>(.*)</answer>.*$", r"\1", str(answer)).strip()
    options, boxes = row.get("options") or [], row.get("boxes") or []
    if not isinstance(options, list) or not all(isinstance(o, str) and o for o in options):
        raise Bad("options", f"expected a list of texts, got {reprlib.repr(options)}")
    options = undressed(options)
    with blaming("answer"):
        check_reference(answer, options)
    kind = row.get("kind") or KINDS.get(named(source, KINDS), "search")
    if kind not in ("search", "neutral"):
        raise Bad("kind", f"expected 'search' or 'neutral', got {kind!r}")
    with blaming("image"):
        image = read_image(picture, folder)
    try:
        boxes = tuple(outwards(x0, y0, x1, y1, image.size) for x0, y0, x1, y1 in boxes)
    except (TypeError, ValueError) as error:
        got = reprlib.repr(boxes)
        raise Bad("boxes", f"expected [x0, y0, x1, y1] each, got {got}: {error}") from error
    id = str(row.get("id") or f"{source or 'row'}-{number}")
    return dict(id=id, image=image, question=question, answer=answer, options=options,
                kind=kind, boxes=boxes, source=source)  # fmt: skip


def cell_of(row: dict, field: str):
    """The first cell of COLUMNS[field] that holds something, else None."""
    for column in COLUMNS[field]:
        outer, _, inner = column.rpartition(".")
        cell = ((row.get(outer) or {}) if outer else row).get(inner)
        if cell not in (None, "", []) and cell == cell:  # NaN, too, is none
            return cell
    return None


def question_of(cell: object) -> str:
    """A text; or a conversation, a list of messages, of which the user's last one counts."""
    if isinstance(cell, list):
        turns = [turn for turn in cell if isinstance(turn, dict) and turn.get("role") == "user"]
        cell = turns[-1].get("content") if turns else None
        if isinstance(cell, list):  # a message in parts, some of them text
            cell = "".join(str(part.get("text") or "") for part in cell if isinstance(part, dict))
    if not isinstance(cell, str) or not (question := plain_question(cell)):
        raise Bad("question", f"expected a text, got {reprlib.repr(cell)}")
    return question


def plain_question(text: str) -> str:
    """Without image placeholders and the metadata lines, which data.messages writes anew."""
    facts = r"\n[\s*]*#+ \W*(?:User Image|Output Format)"
    return re.split(facts, text.replace("<image>", ""))[0].strip()


def named(source: str, words: Iterable[str]) -> str | None:
    """The first of `words` in the name of a data source, however that is punctuated."""
    name = re.sub(r"[^a-z0-9]", "", source.lower())
    return next((word for word in words if word in name), None)


# Demonstrations

USER_PATH = re.compile(r'User Image Path\W*"([^"\n]+)"')
OTHER_PATH = re.compile(r"/(?:[\w.+-]+/)+([\w.+-]+\.(?:png|jpe?g|webp|bmp|gif|tiff?))", re.I)


class Demonstrated(NamedTuple):
    """What a demonstrator did. turns[k] ran a program that showed outputs[k]; the last none."""

    question: str
    image: Image.Image
    turns: list[str]
    outputs: list[tuple[str, list[Image.Image]]]


def thyme_fields(row: dict, folder: Path) -> Demonstrated:
    """One row of Thyme-SFT: `image`, a list of pictures; `question`; `response`, a single message
    that holds code, and what it showed inline. Paths become those of our sandbox. May raise Bad."""
    for name, kind in (("image", list), ("question", str), ("response", str)):
        if not row.get(name) or not isinstance(row[name], kind):
            raise Bad(name, f"expected a {kind.__name__}, got {str(row.get(name))[:60]!r}")
    with blaming("image"):
        images = [read_image(cell, folder) for cell in row["image"]]
    path = USER_PATH.search(row["question"])
    text = row["response"].strip().replace(path[1] if path else "image.png", "image.png")
    text = OTHER_PATH.sub(r"\1", text.replace("/mnt/data/temp_processed_images", "."))
    pieces = re.split(r"(?s)<sandbox_output>(.*?)</sandbox_output>", text)
    turns, shown = [turn.strip() for turn in pieces[::2]], pieces[1::2]
    places = [text.count("<image>") for text in (row["question"], *shown)]
    if places[0] != 1 or sum(places) != len(images):
        raise Bad("image", f"{len(images)} pictures for {places} places in question and outputs")
    first, *others = images
    left = iter(others)
    outputs = [(t.replace("<image>", ""), [*islice(left, n)]) for t, n in zip(shown, places[1:])]
    return Demonstrated(plain_question(row["question"]), first, turns, outputs)
