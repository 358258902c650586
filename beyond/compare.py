"""
compare.py: several runs in one table, one figure and one page.

Concept     Several runs in one table, one figure and one page.
Paper       nothing
In          
Out         
Left out    
Read next   
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from evaluate import COLORS, LABELS, MARKERS, Episodes, _publish, make_folder, spread, table


def compare(columns: dict[str, dict], path: Path) -> None:
    """Several runs in one figure: a row for each rate, a mark for each run."""
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
        for row, name in enumerate(labels):  # 95 % intervals
            ends = metrics.get("rates", {}).get(name, {}).get("interval")
            axes.plot(ends or [], [row + aside] * len(ends or []), color=color, linewidth=1)
    axes.set_yticks(range(len(labels)), labels.values())
    axes.set(xlim=(-0.02, None), ylim=(max(len(labels), 1) - 0.5, -0.5), xlabel="rate")
    axes.grid(alpha=0.3)
    if columns:
        figure.legend(loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=120)


def report_runs(folder: Path, runs: Sequence[str], columns: dict[str, dict]) -> Path:
    """report.html in `folder`: samples that all runs played, side by side. A run that kept no
    episodes is only in the table."""
    kept = {run.rstrip("/"): Episodes(Path(run)) for run in runs}
    kept = {run: episodes for run, episodes in kept.items() if len(episodes)}
    ids = [dict.fromkeys(episodes.ids) for episodes in kept.values()] or [{}]
    common = [id for id in ids[0] if all(id in own for own in ids)]
    plays = []
    for id in spread(common, max(1, 50 // len(runs))):
        at = {run: episodes.ids.index(id) for run, episodes in kept.items()}  # its first play
        plays.append([(run, kept[run][i], kept[run].rewards[i]) for run, i in at.items()])
    return _publish(folder, plays, columns, len(common))


# Command line


def columns_of(runs: Sequence[str]) -> dict[str, dict]:
    """A column for each stage of each run, from the summary.json in its folder."""
    columns = {}
    for run in runs:
        try:
            summary = json.loads((Path(run) / "summary.json").read_text(encoding="utf-8"))
            stages = summary["stages"].items()
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"no run in {run}: expected a folder with the summary.json of a finished run of "
                f"train.py or evaluate.py --model, but {error!r}"
            ) from error
        columns.update({f"{run.rstrip('/')} {stage}": metrics for stage, metrics in stages})
    return columns


def compare_runs(runs: Sequence[str], out: Path) -> None:
    columns = columns_of(runs)
    make_folder(out)
    compare(columns, out / "compare.png")
    print(table(columns), out / "compare.png", report_runs(out, runs, columns), sep="\n\n")


def main(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    try:
        compare_runs(args.compare, args.out)
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))
