"""
study.py: train with every reward, in two worlds: what does each one teach?

Concept     The runs differ in the reward alone: all start from the same SFT models, and meet the
            same questions. In a second study they differ in the judge, which errs (judges.py).
Paper       CodeV, arXiv:2511.19661, Tables 1 and 2, Figs. 6, 9 and 10: in our metrics, on the toy
In          the folder of the study, which two studies may share
Out         study.json, study.png, study_parts.png; or judges.json, judges.png; tables in Markdown
Left out    data sets other than the toy
Read next   train.py (each run is one call of it), docs/results.md and docs/judge.md (what came out)
"""

import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

from beyond import judges
from beyond.judges import COLOR, CORNER, KINDS
from data import SIZE
from evaluate import COLORS, EPISODES, LABELS, LINES, MARKERS
from faithfulness import Rate
from kit.boxes import recall, share
from kit.flags import knob, parse, refusals
from kit.folder import read_json
from kit.perturbations import PERTURBATIONS
from kit.records import Records

WORLDS = {"guessing pays": 1.0, "looking pays": 0.5}  # their --shortcut
HOME = "guessing pays"  # where all SFT models learn
NAMES = {  # what is compared, and its name in the tables
    "start": "SFT, where all start", "tapo": "**TAPO**",
    "blind": "`blind`, TAPO whose judge credits every crop",
    "tool_bonus": "`tool_bonus`, a bonus per call", "deepeyes": "`deepeyes`, a gated bonus",
    "codedance": "`codedance`, a bonus that shrinks with ease", "thyme": "`thyme`, consistency",
    "accuracy": "`accuracy`", "random": "`random`, the null", "zero-rl": "TAPO without SFT",
}  # fmt: skip
REWARDS = tuple(NAMES)[1:-1]
CONTROLS = ("tapo", "blind", "tool_bonus", "accuracy", "random")  # three seeds where guessing pays
START = "sft-episodes"  # the evaluation of the start, in the folder of a run


@dataclass(frozen=True)
class Options:
    """Train with every reward. A run that has ended stays: new code wants a new --out."""

    study: str = knob("rewards", "what is varied", choices=("rewards", "judges"))
    quick: bool = knob(False, "few rewards, one world, one seed")
    out: Path = knob(Path("runs/eval"), "folder of the study", metavar="DIR")


class Job(NamedTuple):
    """One run of train.py in a folder of the study."""

    reward: str  # what --reward takes; "zero-rl", TAPO from the base model; "sft", stage 1 alone
    world: str = HOME  # a key of WORLDS
    seed: int = 0
    more: tuple[str, ...] = ()  # flags and their values: what else differs

    @property
    def name(self) -> str:
        what = self.reward.split(".")[-1], *(word.strip("-") for word in self.more)
        return "-".join([*what, self.world.split()[0], f"{self.seed}"])

    @property
    def start(self) -> "Job | None":
        """Whose SFT model it takes over: all runs of a seed and a habit start from one."""
        if self.reward in ("sft", "zero-rl"):
            return None
        return Job("sft", HOME, self.seed, self.more if "--habit" in self.more else ())

    def command(self, study: Path) -> list[str]:
        """What one would type by hand. A run that was cut off goes on where it was."""
        folder = study / self.name
        if (folder / "state.json").exists():
            return ["train.py", "--resume", f"{folder}"]
        flags = {"--seed": self.seed, "--shortcut": WORLDS[self.world], "--out": folder}
        special = {"sft": {"--rl-steps": 0}, "zero-rl": {"--sft-steps": 0}}
        flags |= special.get(self.reward, {"--reward": self.reward})
        flags |= {"--eval-every": 20} if self.reward in CONTROLS else {}
        if self.start:
            flags |= {"--model": study / self.start.name / "sft", "--sft-steps": 0}
        flags |= zip(self.more[::2], self.more[1::2])
        return ["train.py", *(str(word) for pair in flags.items() for word in pair)]


class Greedy(NamedTuple):
    """What stands for a run in which the model that a job ends with plays greedily, as the paper's
    does; after the default habit, with seed 0, it is lied to as well."""

    start: Job
    world: str = ""  # its questions are no run's

    @property
    def name(self) -> str:
        return f"{self.start.name}-greedy"

    def command(self, study: Path) -> list[str]:
        model = study / self.start.name / ("sft" if self.start.reward == "sft" else "rl")
        flags = {"--model": model, "--limit": 512, "--out": study / self.name}
        flags["--perturb"] = "none" if self.start.seed or "--habit" in self.start.more else "all"
        return ["evaluate.py", *(str(word) for pair in flags.items() for word in pair)]


def begin(job: Job | Greedy, study: Path) -> subprocess.Popen:
    """Start a job. Raises OSError if it cannot start."""
    (study / job.name).mkdir(parents=True, exist_ok=True)
    theirs, own = study / (job.start or job).name / START, study / job.name / START
    if job.world == HOME and "--shortcut" not in job.more and theirs.is_dir() and not own.exists():
        shutil.copytree(theirs, own)  # of one model and the same questions: not played again
    with open(study / f"{job.name}.txt", "a") as printed:
        how = dict(cwd=Path(__file__).parents[1], stdout=printed, stderr=printed)
        return subprocess.Popen([sys.executable, *job.command(study)], **how)


def run_all(jobs: Sequence[Job | Greedy], study: Path) -> None:
    """One run a core at a time; those that have ended are not run again. Raises RuntimeError when
    one fails, once all that had begun by then have ended."""
    study = study.resolve()  # the runs start in the folder of train.py
    waiting = [job for job in jobs if not (study / job.name / "summary.json").exists()]
    running, cores = {}, len(os.sched_getaffinity(0))
    bar = tqdm(total=len(waiting), desc="runs")
    try:
        while waiting or running:
            # Wait for the run whose SFT model this one starts from.
            ahead = {*waiting, *running}
            ready = [job for job in waiting if job.start not in ahead]
            for job in ready[: cores - len(running)]:
                waiting.remove(job)
                running[job] = begin(job, study)
            time.sleep(0.5)
            for job in [job for job in running if running[job].poll() is not None]:
                code = running.pop(job).returncode
                bar.update()
                if code:
                    raise RuntimeError(f"{job.name} ended with {code}: see {study / job.name}.txt")
    except BaseException as error:  # Ctrl-C as well: the runs that have begun hear it, too
        bar.write(f"{str(error) or 'stopped'}. The study ends when the runs that have begun do")
        for process in running.values():
            process.wait()
        raise


def end_of(job: Job | Greedy, study: Path) -> dict:
    """The metrics at the end of a job; {} if it has not ended."""
    file = study / job.name / "summary.json"
    return [*read_json(file)["stages"].values()][-1] if file.exists() else {}


def told(values: Iterable[float | None], ends: bool = False) -> str:
    """The mean of those that are known, and their range; empty if none is."""
    if not (known := [value for value in values if value is not None]):
        return ""
    return f"{fmean(known):.2f}" + f" ({min(known):.2f}–{max(known):.2f})" * ends


def markdown(title: str, columns: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    head = ["", *columns]  # (a row has its name before its cells)
    lines = (f"| {' | '.join(row)} |" for row in (head, *rows))
    return "\n".join([title, "", next(lines), "|---" * len(head) + "|", *lines])


# What each reward teaches

SHOWN = ("accuracy", "ood_accuracy", "tool_use", "faithful", "crop_area", "error_rate")
# what is drawn: the label of a panel, and its name in log.jsonl
CURVES = {"tool use": "tool_use", "faithful": "faithful"}
PARTS = {"answer reward": "answer", "tool reward": "tools", "format reward": "format",
         "tokens per step": "generated_tokens", "calls per rollout": "calls"}  # fmt: skip


def study_rewards(study: Path, quick: bool) -> str:
    """Every reward where guessing pays, the controls there with three seeds, and where looking
    pays. Writes study.json and two figures, and returns the tables."""
    rewards, seeds = (CONTROLS[:-1], (0,)) if quick else (CONTROLS, (0, 1, 2))
    jobs = [Job(reward, HOME, seed) for seed in seeds for reward in ("sft", *rewards)]
    if not quick:
        jobs += [Job(reward, "looking pays") for reward in CONTROLS]
        jobs += [Job(reward) for reward in (*REWARDS, "zero-rl") if reward not in CONTROLS]
    run_all(jobs, study)
    runs = [result(job, study) for job in jobs]
    found = {"runs": {job.name: run for job, run in zip(jobs, runs)}, "table": rewards_table(runs)}
    (study / "study.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    draw_study(runs, CURVES, study / "study.png")
    draw_study(runs, PARTS, study / "study_parts.png")
    return rewards_markdown(found)


def result(job: Job, study: Path) -> dict:
    """What is kept of a run: the metrics of its start and its end, and the means of the training
    log over every ten steps, which hold more rollouts than one evaluation."""
    stages = read_json(study / job.name / "summary.json")["stages"]
    log, curve = Records(study / job.name / "log.jsonl"), []
    steps = [line for line in log if line["stage"] == "rl"]
    for block in (steps[i : i + 10] for i in range(0, len(steps), 10)):
        columns = {k: [line[k] for line in block] for k in (CURVES | PARTS).values()}
        means = {k: fmean(v for v in column if v is not None) for k, column in columns.items()}
        curve.append({"step": block[-1]["step"]} | means)
    found = {"start": stages["sft"], "end": stages["rl"], "routes": routes(stages["sft"])}
    return job._asdict() | found | {"curve": curve}


def routes(m: dict) -> dict[str, tuple[float, float | None]]:
    """Each way to deal with a search question: its share, and its accuracy, which is
    P(right | route) = P(route | right) P(right) / P(route)."""
    names = {"right crop": "faithful", "careless crop": "unfaithful", "direct answer": "no_tool"}
    right = {n: (m[f"{n}_given_correct"] or 0.0) * m["search_accuracy"] for n in names.values()}
    return {way: (m[n], right[n] / m[n] if m[n] else None) for way, n in names.items()}


def picked(runs: Iterable[dict], reward: str, world: str, what: str) -> list:
    return [run[what] for run in runs if (run["reward"], run["world"]) == (reward, world)]


def rewards_table(runs: Sequence[dict]) -> dict[str, dict[str, dict[str, list[float]]]]:
    """The paper's Tables 1 and 2 in our metrics: world -> reward -> metric -> its value at the end
    of every seed's run. The reward "start" is the SFT model, before any."""
    table: dict = {}
    for world, name in itertools.product(WORLDS, NAMES):
        reward, when = ("tapo", "start") if name == "start" else (name, "end")
        if metrics := picked(runs, reward, world, when):
            table.setdefault(world, {})[name] = {n: [m[n] for m in metrics] for n in SHOWN}
    return table


def rewards_markdown(found: dict) -> str:
    """The tables of the study as docs/results.md shows them: mean (lowest to highest seed)."""
    columns, tables, routed = ["seeds", *(LABELS[n] for n in SHOWN)], [], []
    for world, rewards in found["table"].items():
        rows = [[NAMES[r], f"{len(m['accuracy'])}", *(told(m[n], ends=True) for n in SHOWN)]
                for r, m in rewards.items()]  # fmt: skip
        title = f"{world.capitalize()} (`--shortcut {WORLDS[world]}`):"
        tables.append(markdown(title, columns, rows))
        own = picked(found["runs"].values(), "tapo", world, "routes")
        pairs = {way: zip(*(run[way] for run in own)) for way in own[0]}  # (shares, accuracies)
        routed.append([world, *(", ".join(map(told, pair)) for pair in pairs.values())])
    means = "share of search questions, accuracy; means over seeds"
    tables.append(markdown(f"What each route pays at the start ({means}):", pairs, routed))
    return "\n\n".join(tables)


def draw_study(runs: Sequence[dict], panels: dict[str, str], path: Path) -> None:
    """The paper's Figs. 6, 9 and 10 in our metrics: a row for each world, a column for each number,
    a line for each reward: the mean of its seeds, with their range shaded."""
    worlds = list(dict.fromkeys(run["world"] for run in runs))
    figure = Figure((3.2 * len(panels) + 1, 3 * len(worlds) + 0.6), layout="constrained")
    places = figure.subplots(len(worlds), len(panels), squeeze=False, sharey="col")
    for row, world in zip(places, worlds):
        for axes, (label, name) in zip(row, panels.items()):
            for reward, color, line in zip(REWARDS, (*COLORS, "#777777"), (*LINES, "-.")):
                if own := picked(runs, reward, world, "curve"):
                    steps = [point["step"] for point in own[0]]
                    values = np.array([[point[name] for point in curve] for curve in own])
                    axes.plot(steps, values.mean(0), color=color, linestyle=line, label=reward)
                    axes.fill_between(steps, values.min(0), values.max(0), color=color, alpha=0.12)
            axes.set(title=f"{world}: {label}", xlabel="training step")
            axes.grid(alpha=0.3)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=120)


# How good must a judge be?

RATES = (0, 25, 50)  # percent of misses, and of false alarms
SYSTEM = ("size", "color", "corner")
NOISE = [f"crop_{miss}_{alarm}" for miss in RATES for alarm in RATES if miss + alarm]
COLUMNS = ("faithful", "ood_accuracy", "ood_given_faithful", "tool_use", "accuracy", "crop_area",
           "calls")  # fmt: skip
HEAD = [LABELS.get(name, "read what it saw") for name in COLUMNS]
Table = dict[str, list[Job]]  # name of a row: its runs, one for each seed


def named(reward: str, *more: str, seeds: Sequence[int] = (0,)) -> list[Job]:
    ours = reward.split("_")[0] in {*judges.PARTS, *KINDS}
    return [Job("beyond.judges." * ours + reward, HOME, seed, more) for seed in seeds]


def study_tables(quick: bool) -> dict[str, Table]:
    """Title -> table, the controls first. A run that stands in two of them is run once."""
    asked, seeds = ("sft", *CONTROLS), (0,) if quick else (0, 1, 2)
    found = {"The controls": {NAMES.get(r, "SFT"): named(r, seeds=seeds) for r in asked}}
    if quick:
        return found | {"Errors at random": {r: named(r) for r in ("crop_50_0", "crop_0_50")}}
    one, longer = {"`tapo`": named("tapo")}, ("--rl-steps", "120")
    found["Twice the steps"] = {NAMES[r]: named(r, *longer, seeds=seeds) for r in CONTROLS[:2]}
    for flag, value in (("--habit", "careful"), ("--habit", "eager"), ("--shortcut", "0.95")):
        own = asked[flag == "--shortcut" : -1]  # SFT is the same in every world
        found[f"`{flag} {value}`"] = {NAMES.get(r, "SFT"): named(r, flag, value) for r in own}
    away = {f"`{r}`": named(r) for r in ("blind", *judges.PARTS)}
    away["`--lazy 0`"] = named("tapo", "--lazy", "0")
    found["TAPO without one of its parts"] = one | away
    found["Errors at random"] = one | {f"`{r}`": named(r) for r in (*NOISE, "call_25_25")}
    found["Errors with a system"] = {f"`{r}`, {KINDS[r]}": named(r) for r in SYSTEM}
    weighed = itertools.product(("tapo", "crop_25_25"), ("0.1", "0.4"))
    rows = {f"`{r}`, λ_tool {w}": named(r, "--lambda-tool", w) for r, w in weighed}
    return found | {"Other weights of what programs showed": rows}


def study_judges(study: Path, quick: bool) -> str:
    """Writes judges.json and judges.png, and returns the tables."""
    tables = study_tables(quick)
    by_table = [sum(table.values(), []) for table in tables.values()]
    jobs, greedy = sum(by_table, []), [Greedy(job) for job in sum(by_table[:3], [])]
    starts = [job.start for job in jobs if job.start]
    run_all([*dict.fromkeys([*starts, *jobs, *greedy])], study)
    return shown(study, tables)


def shown(study: Path, tables: dict[str, Table]) -> str:
    """The tables in Markdown, with what has ended by now. What has not is an empty cell."""
    columns = ["seeds", *HEAD, "greedily: faithful", "out-of-prior accuracy"]
    parts, numbers = [], {}
    for title, table in tables.items():
        rows = []
        for name, jobs in table.items():
            both = jobs, [*map(Greedy, jobs)]
            ends, greedy = ({j.name: m for j in each if (m := end_of(j, study))} for each in both)
            asked = [(ends, c) for c in COLUMNS] + [(greedy, c) for c in COLUMNS[:2]]
            cells = [told([m[c] for m in of.values()], len(jobs) > 1) for of, c in asked]
            rows.append([name, f"{len(ends)}", *cells])
            numbers |= {job: {c: m[c] for c in COLUMNS} for job, m in (ends | greedy).items()}
        parts.append(markdown(f"{title}:", columns, rows))
    (study / "judges.json").write_text(json.dumps(numbers, indent=1), encoding="utf-8")
    draw_judges(numbers, study / "judges.png")
    parts += over_time(study, tables["The controls"]), lies(study, tables), places(study)
    return "\n\n".join(parts)


def over_time(study: Path, table: Table) -> str:
    """Looked, or used? Both over the steps, from evaluations of every fourth question."""
    rows = []
    for name, jobs in table.items():
        logs = [Records(f) for job in jobs if (f := study / job.name / "log.jsonl").exists()]
        lines = [line for log in logs for line in log if line["stage"] == "evaluation"]
        for step in sorted({line["step"] for line in lines}):
            at = [line for line in lines if line["step"] == step]
            rows.append([name, f"{step}", *(told([m[c] for m in at], True) for c in COLUMNS[:3])])
    return markdown("Looked, or used:", ["step", *HEAD[:3]], rows)


def lies(study: Path, tables: dict[str, Table]) -> str:
    """The lies of Table 6 before training, in the middle and later: what becomes, out of prior, of
    the greedy answers that follow a hit."""
    rows = []
    for job in (jobs[0] for title in [*tables][:2] for jobs in tables[title].values()):
        if (file := study / Greedy(job).name / "studies.json").exists():
            found = read_json(file)["perturb"].get("toy, out of prior", {})
            rates = [Rate(**measures["accuracy_hit"]) for measures in found.values()]
            hits = f"{rates[0].denominator:.0f}" if rates else "0"
            cells = [told([rate.value]) for rate in rates] or [""] * len(PERTURBATIONS)
            rows.append([job.name.removesuffix("-guessing-0"), hits, *cells])
    return markdown("Lied to after a hit:", ["hits", *PERTURBATIONS], rows)


def places(study: Path) -> str:
    """What systematic errors and the eager habit teach: where the policy looks at the end, and how
    many crops it has shown before, on search questions."""
    rows, jobs = [], [*map(named, ("tapo", "whole", *SYSTEM))]
    jobs += [named(reward, "--habit", "eager") for reward in ("sft", *CONTROLS[:-1])]
    for job in (job for (job,) in jobs if end_of(job, study)):
        found, boxes, again = {True: [], False: []}, [], []
        for t in Records(study / job.name / EPISODES):
            if t["sample"]["kind"] == "search":
                found[COLOR in t["sample"]["question"].split()].append(t["look"] == "faithful")
                seen = (step["observation"] for step in t["steps"] if step["observation"])
                own = [box for one in seen for box in one["boxes"] if box]
                boxes, again = boxes + own, again + [b in own[:i] for i, b in enumerate(own)]
        shares = [share(box, (SIZE, SIZE)) for box in boxes]
        corner = [recall(b, CORNER) == 1 and s < 0.9 for b, s in zip(boxes, shares)]
        numbers = (found[True], found[False], corner, [s > 0.9 for s in shares], again)
        rows.append([job.name.removesuffix("-guessing-0"), *map(told, numbers)])
    columns = f"faithful on {COLOR}", "on other colours", "crops of a1", "whole images", "again"
    return markdown("Where the policy looks:", columns, rows)


def draw_judges(numbers: dict[str, dict], path: Path) -> None:
    """Faithful and out-of-prior accuracy over contrast, 1 - misses - false alarms, beside TAPO,
    blind and SFT."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, column in zip(figure.subplots(1, 2, sharey=True), COLUMNS):
        for name in (*NOISE, "call_25_25"):
            kind, miss, alarm = name.split("_")
            if metrics := numbers.get(named(name)[0].name):
                n, contrast = RATES.index(int(alarm)), 1 - (int(miss) + int(alarm)) / 100
                fill, at = "none" if kind == "call" else "full", (contrast, metrics[column])
                axes.plot(*at, MARKERS[n], color=COLORS[n], fillstyle=fill)
                axes.annotate(f" {miss}, {alarm}", at)
        for reward, line in {"tapo": "-", "blind": "--", "sft": ":"}.items():
            if metrics := numbers.get(f"{reward}-guessing-0"):
                axes.axhline(metrics[column], color="#777777", linestyle=line, label=reward)
        axes.set(xlabel="contrast (labels: misses, false alarms in %)", title=LABELS[column])
        axes.grid(alpha=0.3)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=120)


def main(argv: list[str]) -> None:
    options = parse(Options, argv)
    with refusals():
        options.out.mkdir(parents=True, exist_ok=True)
        study = {"rewards": study_rewards, "judges": study_judges}[options.study]
        tables = study(options.out, options.quick)
    print(tables, "", options.out, sep="\n")
