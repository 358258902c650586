"""
film.py: one episode as a picture, OUT/film.png.

Concept     The image with what was looked at, what each turn wrote and was shown, and who chose
            each token. The first right and faithful episode; if there is none, the first.
Paper       nothing: a picture for a README or a talk
In          the folder of a run with trajectories.jsonl
Out         film.png
Left out    the other episodes: report.html has them
Read next   kit/page.py (the same strip for a browser)
"""

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase as LETTERS

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from evaluate import COLORS, EPISODES
from kit.boxes import Box
from kit.flags import knob, parse, refusals
from kit.records import Records, opened


@dataclass(frozen=True)
class Options:
    """Draw one episode of a run as a picture, OUT/film.png."""

    film: Path = knob(Path(), "folder of the run", metavar="RUN")
    out: Path = knob(Path("runs/eval"), "folder for the picture", metavar="DIR")


def film(record: dict, folder: Path, path: Path) -> None:
    """A line of trajectories.jsonl as a PNG: the image with its targets and the boxes shown; every
    turn with its picture and score; and below, who chose each token."""
    sample, turns = record["sample"], record["steps"]
    options = (f"{letter}. {text}" for letter, text in zip(LETTERS, sample["options"]))
    question = "\n".join([sample["question"], *options])
    words = [broken(text) for text in (question, *(turn["text"] for turn in turns))]
    heights = 2.6, 0.16 * max(text.count("\n") + 1 for text in words), 0.14  # inches
    figure = Figure(figsize=(2.9 * len(words), sum(heights) + 0.8), layout="constrained")
    places = figure.add_gridspec(3, len(words), height_ratios=heights)

    def cell(row: int, column: int | slice) -> Axes:
        axes = figure.add_subplot(places[row, column], xticks=[], yticks=[])
        axes.spines[:].set_visible(row == 0)
        return axes

    whole, first = opened(folder, sample["image"]), cell(0, 0)
    first.imshow(whole, interpolation="nearest")
    first.set_title("image; dashed: the target" if sample["boxes"] else "image", fontsize=9)
    for box in sample["boxes"]:
        outline(first, box, "black", "--")
    for i, text in enumerate(words):
        cell(1, i).text(0, 1, text, va="top", fontsize=8, family="monospace")
    for i, turn in enumerate(turns, start=1):
        axes = cell(0, i)
        if observation := turn["observation"]:
            verdict = "no verdict" if turn["score"] is None else f"score {turn['score']:g}"
            axes.set_title(f"{i}. {', '.join([*observation['sources'], verdict])}", fontsize=9)
            for name in observation["images"][:1]:
                axes.imshow(opened(folder, name), interpolation="nearest")
            for box in filter(None, observation["boxes"]):
                outline(first, box, COLORS[0], "-")
                first.text(*box[:2], f" {i}", color=COLORS[0], va="bottom", weight="bold")
        else:
            said = "no answer" if record["answer"] is None else record["answer"]
            mark, color = ("✓", COLORS[0]) if record["correct"] else ("✗", COLORS[1])
            text = broken(f"{mark} {said}\n(reference: {sample['answer']})", 20)
            axes.set_title(f"{i}. answer", fontsize=9)
            axes.set_box_aspect(whole.height / whole.width)  # shaped like the image
            axes.text(0.5, 0.5, text, color=color, ha="center", va="center")
    bar, start = cell(2, slice(None)), 0
    for who, tokens in record["acted"]:
        bar.barh(0, tokens, left=start, color=COLORS[0] if who else "#c9c6be")
        start += tokens
    bar.margins(x=0)
    bar.set_xlabel("blue: tokens chosen by the policy", fontsize=8)
    figure.savefig(path, dpi=150, bbox_inches="tight")


def outline(axes: Axes, box: Box, color: str, line: str) -> None:
    x0, y0, x1, y1 = box
    for edge, width, dash in (("white", 4, "-"), (color, 2, line)):
        style = dict(fill=False, edgecolor=edge, linewidth=width, linestyle=dash)
        axes.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, **style))


def broken(text: str, width: int = 38, most: int = 16) -> str:
    """Broken into lines that fit a cell; a $ does not begin a formula."""
    text = re.sub(r"(?<=</think>)(?=.)|(?<=.)(?=<answer>)", "\n", text)
    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, width)]
    return "\n".join(lines[:most] + ["..."] * (len(lines) > most)).replace("$", r"\$")


def main(argv: list[str]) -> None:
    options = parse(Options, argv)
    with refusals():
        records = Records(options.film / EPISODES)
        good = (record for record in records if record["correct"] and record["look"] == "faithful")
        record = next(good, None) or records[0]
        options.out.mkdir(parents=True, exist_ok=True)
    film(record, options.film, options.out / "film.png")
    print(options.out / "film.png")
