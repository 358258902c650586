"""
compare.py: several runs in one table, one figure and one page.

Concept     A number means little alone. Runs side by side, each rate with its interval, and the
            same episode as every run played it.
Paper       nothing: Tables 1 to 4 stand side by side in the same way
In          folders with the summary.json of train.py or evaluate.py
Out         a table, compare.png, report.html
Left out    tests of significance: intervals of one run each, and no seeds
Read next   kit/page.py (episodes side by side), study.py (the same for every reward)
"""

import itertools
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from evaluate import COLORS, LABELS, MARKERS, lines, table
from kit.flags import knob, parse, refusals
from kit.folder import read_json
from kit.page import report


@dataclass(frozen=True)
class Options:
    """Show several runs in one table, one figure and one page."""

    compare: list[str] = knob(None, "folders with summary.json", metavar="RUN", nargs="+")
    out: Path = knob(Path("runs/eval"), "folder for the figure and the page", metavar="DIR")


def compare(columns: dict[str, dict], path: Path) -> None:
    """One figure: a row for each rate, a mark for each column, a line for its 95 % interval."""
    measured = {name for metrics in columns.values() for name in metrics} - {"n", "ungraded"}
    labels = {name: label for name, label in LABELS.items() if name in measured}
    size = 8, 1.5 + 0.35 * len(labels) + 0.25 * len(columns)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    styles = itertools.cycle(zip(COLORS, MARKERS))
    for i, ((run, metrics), (color, marker)) in enumerate(zip(columns.items(), styles)):
        aside = 0.5 * (i + 0.5) / len(columns) - 0.25  # so that equal values do not hide each other
        values = [metrics.get(name) for name in labels]
        places = [(value, row + aside) for row, value in enumerate(values) if value is not None]
        axes.plot(*zip(*places), color=color, marker=marker, linestyle="none", label=run)
        for row, name in enumerate(labels):
            ends = metrics.get("rates", {}).get(name, {}).get("interval") or []
            axes.plot(ends, [row + aside] * len(ends), color=color, linewidth=1)
    axes.set_yticks(range(len(labels)), labels.values())
    axes.set(xlim=(-0.02, None), ylim=(len(labels) - 0.5, -0.5), xlabel="rate")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=120)


def main(argv: list[str]) -> None:
    options, columns = parse(Options, argv), {}
    with refusals():
        for run in options.compare:  # a column for each stage of each run
            stages = read_json(Path(run) / "summary.json", keys=["stages"])["stages"]
            columns |= {f"{run.rstrip('/')} {stage}": metrics for stage, metrics in stages.items()}
        options.out.mkdir(parents=True, exist_ok=True)
        compare(columns, options.out / "compare.png")
        page = report(options.out, lines(columns), ["compare.png"], options.compare)
    print(table(columns), options.out / "compare.png", page, sep="\n\n")
