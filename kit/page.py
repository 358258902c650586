"""
page.py: one HTML file that shows what a policy looked at and what it answered.

Concept     A rate should be checked against pictures. A film strip shows one episode: the image,
            what each turn wrote and what it saw, and who chose each token.
Paper       nothing: the page is a tool for the reader
In          trajectories.jsonl with its pictures; a table of texts; figures as PNG files
Out         report.html: one file that asks for no other file and for no network
Left out    a server for all episodes: the page holds at most PAGE_LIMIT bytes of them
Read next   page.html (all of the markup)
"""

import base64
import hashlib
import io
import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import jinja2
from PIL import Image
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from kit.records import Records

PAGE_LIMIT = 4_500_000  # bytes of episodes on one page; trajectories.jsonl has all of them


class Play(NamedTuple):
    run: str  # the name of the run that played; "" if the page shows only one run
    folder: Path  # where the names of its pictures begin
    line: dict  # a line of trajectories.jsonl


Card = Sequence[Play]  # one sample: its play in each of the runs
Names = Sequence[str]
Table = Sequence[Names]  # rows of texts; the first row is the head


def report(folder: Path, table: Table, figures: Names = (), runs: Names = ()) -> Path:
    """Write folder/report.html: the table, the figures, and at most 50 episodes of the folder,
    evenly spread; or, of several `runs`, samples that all of them played, side by side. `runs` are
    folders: one without trajectories.jsonl is only in the table. `figures` are names of PNG files
    in the folder."""
    if runs:
        lines = {run: found for run in runs if (found := episodes_in(Path(run)))}
        ids = {run: [line["sample"]["id"] for line in found] for run, found in lines.items()}
        first, *others = ids.values() or [[]]
        there = sorted(set(first).intersection(*others), key=first.index)
        cards = [  # of several plays of a sample, the first
            [Play(run.rstrip("/"), Path(run), lines[run][ids[run].index(id)]) for run in lines]
            for id in spread(there, max(1, 50 // len(runs)))
        ]
    else:
        there = episodes_in(folder)
        cards = [[Play("", folder, line)] for line in spread(there, 50)]
    turns = [turn for card in cards for play in card for turn in play.line["steps"]]
    pictures = len(cards) + sum(len(t["observation"]["images"]) for t in turns if t["observation"])
    budget = PAGE_LIMIT * 2 // 3 // max(1, pictures)  # characters; the other third is for texts
    small = partial(picture, budget=budget)
    pngs = {name: picture(folder / name, 200_000) for name in figures}
    text = TEMPLATES.get_template("page.html").render(
        cards=cards, total=len(there), table=table, figures=pngs, picture=small, that_fit=that_fit
    )
    # A model may write half of a surrogate pair, which UTF-8 cannot hold.
    (folder / "report.html").write_text(text.lstrip(), encoding="utf-8", errors="backslashreplace")
    return folder / "report.html"


def episodes_in(folder: Path) -> Sequence[dict]:
    """The lines of the folder's trajectories.jsonl; none without that file."""
    path = folder / "trajectories.jsonl"
    return Records(path) if path.exists() else []


def spread(items: Sequence, most: int) -> Sequence:
    """At most so many of them, from the first on, evenly spread."""
    return items[:: max(1, math.ceil(len(items) / most))]


def that_fit(write: Callable[[int, Card], str], cards: Sequence[Card]) -> list[str]:
    """The first cards as HTML, as many as PAGE_LIMIT holds. `write` is a macro of page.html."""
    texts = [write(number, card) for number, card in enumerate(cards, start=1)]
    sizes = accumulate(len(text.encode(errors="backslashreplace")) for text in texts)
    return [text for text, size in zip(texts, sizes) if size <= PAGE_LIMIT]


class Picture(NamedTuple):
    width: int  # of the file, in pixels: the picture in the URL may be smaller
    height: int
    url: str


def picture(path: Path, budget: int) -> Picture:
    """A data URL of at most `budget` characters: PNG, else a JPEG that may shrink to 64 pixels."""
    with Image.open(path) as image:
        small, (width, height) = image.convert("RGB"), image.size
    for form, side in zip(("png", *["jpeg"] * 7), (1024, 1024, 768, 512, 384, 256, 128, 64)):
        buffer = io.BytesIO()
        small.thumbnail((side, side))
        small.save(buffer, form, quality=80)
        url = f"data:image/{form};base64,{base64.b64encode(buffer.getvalue()).decode()}"
        if len(url) <= budget:
            break
    return Picture(width, height, url)


LOADER = jinja2.FileSystemLoader(Path(__file__).parent)
STRICT = dict(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
# Escaped: whatever a model or a data set wrote is text, never markup.
TEMPLATES = jinja2.Environment(loader=LOADER, autoescape=True, **STRICT)
# The two splits return a list: what a tag encloses, or a tag itself, stands at the odd places.
TEMPLATES.filters |= {
    # Code as escaped HTML: each word in a span whose class page.html gives a colour to.
    "python": partial(highlight, lexer=PythonLexer(), formatter=HtmlFormatter(nowrap=True)),
    "sha256": lambda text: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode(),
    "split_at_code": re.compile("<code>(.*?)(?:</code>|$)", re.DOTALL).split,
    "split_at_tags": re.compile("(</?(?:think|answer)>)").split,
}
