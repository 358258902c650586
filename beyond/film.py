"""
film.py: one episode as a picture.

Concept     One episode as a picture.
Paper       nothing
In
Out
Left out
Read next
"""

from __future__ import annotations

import argparse
import re
import textwrap
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from evaluate import COLORS, Episodes, make_folder, runs_of, scored
from faithfulness import finding
from kit.benchmarks import LETTERS
from kit.boxes import Box
from rewards import Reward
from rollout import Trajectory

# One episode as a picture


def film(trajectory: Trajectory, reward: Reward, path: Path) -> None:
    """A film strip as a PNG: the image with its targets and the boxes shown; every turn with its
    picture and score; and below, who chose each token."""
    sample, turns = trajectory.sample, scored(trajectory, reward)
    options = (f"{letter}. {text}" for letter, text in zip(LETTERS, sample.options))
    words = [_lines("\n".join([sample.question, *options])), *(_lines(s.text) for s, _ in turns)]
    heights = 2.6, 0.16 * max(text.count("\n") + 1 for text in words), 0.14  # inches
    size = 2.9 * len(words), sum(heights) + 0.8
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    places = figure.add_gridspec(3, len(words), height_ratios=heights)

    def cell(row: int, column: int | slice) -> Axes:
        axes = figure.add_subplot(places[row, column], xticks=[], yticks=[])
        axes.spines[:].set_visible(row == 0)
        return axes

    def outline(axes: Axes, box: Box, color: str, line: str) -> None:
        x0, y0, x1, y1 = box
        for edge, width, dash in (("white", 4, "-"), (color, 2, line)):
            style = {"fill": False, "edgecolor": edge, "linewidth": width, "linestyle": dash}
            axes.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, **style))

    first = cell(0, 0)
    first.imshow(sample.image, interpolation="nearest")
    first.set_title("image; dashed: the target" if sample.boxes else "image", fontsize=9)
    for box in sample.boxes:
        outline(first, box, "black", "--")
    for i, text in enumerate(words):
        cell(1, i).text(0, 1, text, va="top", fontsize=8, family="monospace")
    for i, (step, value) in enumerate(turns, start=1):
        top = cell(0, i)
        if seen := step.observation:
            verdict = "no verdict" if value is None else f"score {value:g}"
            top.set_title(f"{i}. {', '.join([*seen.sources, verdict])}", fontsize=9)
            for image in seen.images[:1]:
                top.imshow(image, interpolation="nearest")
            for box in filter(None, seen.boxes):
                outline(first, box, COLORS[0], "-")
                first.text(box[0], box[1], f" {i}", color=COLORS[0], va="bottom", weight="bold")
        else:
            said = "no answer" if trajectory.answer is None else trajectory.answer
            verdict = f"{'✓' if reward.right else '✗'} {said}\n(reference: {sample.answer})"
            top.set_title(f"{i}. answer", fontsize=9)
            top.set_box_aspect(sample.image.height / sample.image.width)  # shaped like the image
            color = COLORS[0 if reward.right else 1]
            top.text(0.5, 0.5, _lines(verdict, 20), color=color, ha="center", va="center")
    bar, start = cell(2, slice(None)), 0
    for who, tokens in runs_of(trajectory.acted):
        bar.barh(0, tokens, left=start, color=COLORS[0] if who else "#c9c6be")
        start += tokens
    bar.margins(x=0)
    bar.set_xlabel("blue: tokens chosen by the policy", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")


def _lines(text: str, width: int = 38, most: int = 16) -> str:
    """Broken into lines that fit a cell; a $ does not begin a formula."""
    text = re.sub(r"(?<=</think>)(?=.)|(?<=.)(?=<answer>)", "\n", text)
    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, width)]
    lines = lines[:most] + ["..."] * (len(lines) > most)
    return "\n".join(lines).replace("$", r"\$")


def draw_film(args: argparse.Namespace) -> Path:
    episodes = Episodes(Path(args.film))
    if not len(episodes):
        raise ValueError(f"no trajectories.jsonl with episodes in {args.film}")
    pairs = enumerate(zip(episodes, episodes.rewards), start=1)
    good = (i for i, (t, r) in pairs if r.right and finding(t, r).look == "faithful")
    at = (next(good, 1) if args.episode is None else args.episode) - 1
    if not 0 <= at < len(episodes):
        raise ValueError(f"--episode is 1 to {len(episodes)}, got {args.episode}")
    make_folder(args.out)
    film(episodes[at], episodes.rewards[at], args.out / "film.png")
    return args.out / "film.png"


def main(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    try:
        print(draw_film(args))
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))
