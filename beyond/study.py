"""
study.py: train with every reward, in two worlds: what does each one teach?

Concept     The runs differ in the reward alone: all start from the same SFT models, and meet the
            same questions.
Paper       CodeV, arXiv:2511.19661, Tables 1 and 2, Figs. 6, 9 and 10: in our metrics, on the toy
In          the folder of the study
Out         study.json, study.png, study_parts.png, and tables in Markdown
Left out    data sets other than the toy
Read next   train.py (each run is one call of it), docs/results.md (what came out), judges.py
"""

import importlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

from evaluate import COLORS, LABELS, LINES
from kit.flags import knob, parse, refusals
from kit.folder import read_json

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
SHOWN = ("accuracy", "ood_accuracy", "tool_use", "faithful", "crop_area", "error_rate")
# what is drawn: the label of a panel, and its name in log.jsonl
CURVES = {"tool use": "tool_use", "faithful": "faithful"}
PARTS = {"answer reward": "answer", "tool reward": "tools", "format reward": "format",
         "tokens per step": "generated_tokens", "calls per rollout": "calls"}  # fmt: skip


@dataclass(frozen=True)
class Options:
    """Train with every reward. A run that has ended stays: new code wants a new --out."""

    study: str = knob("rewards", "what is varied", choices=("rewards", "judges"))
    quick: bool = knob(False, "few rewards, one world, one seed")
    out: Path = knob(Path("runs/eval"), "folder of the study", metavar="DIR")


@dataclass(frozen=True)
class Job:
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


def begin(job: Job, study: Path) -> subprocess.Popen:
    """Start a job. Raises OSError if it cannot start."""
    (study / job.name).mkdir(parents=True, exist_ok=True)
    theirs, own = study / (job.start or job).name / START, study / job.name / START
    if job.world == HOME and "--shortcut" not in job.more and theirs.is_dir() and not own.exists():
        shutil.copytree(theirs, own)  # of one model and the same questions: not played again
    with open(study / f"{job.name}.txt", "a") as printed:
        how = dict(cwd=Path(__file__).parents[1], stdout=printed, stderr=printed)
        return subprocess.Popen([sys.executable, *job.command(study)], **how)


def control_jobs(quick: bool) -> list[Job]:
    """The runs that both studies show: in one folder they are run once."""
    rewards, seeds = (CONTROLS[:-1], (0,)) if quick else (CONTROLS, (0, 1, 2))
    return [Job(reward, HOME, seed) for seed in seeds for reward in ("sft", *rewards)]


def study_rewards(study: Path, quick: bool) -> str:
    """Every reward where guessing pays, the controls there with three seeds, and where looking
    pays. Writes study.json and two figures, and returns the tables."""
    jobs = control_jobs(quick)
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


def run_all(jobs: Sequence[Job], study: Path) -> None:
    """One run a core at a time; those that have ended are not run again. Raises RuntimeError when
    one fails, once all that had begun by then have ended."""
    study = study.resolve()  # the runs start in the folder of train.py
    waiting = [job for job in jobs if not (study / job.name / "summary.json").exists()]
    running, cores = {}, len(os.sched_getaffinity(0))
    bar = tqdm(total=len(waiting), desc="runs")
    try:
        while waiting or running:
            # Wait for the run whose SFT model this one starts from.
            ready = [job for job in waiting if job.start not in {*waiting, *running}]
            for job in ready[: cores - len(running)]:
                waiting.remove(job)
                running[job] = begin(job, study)
            time.sleep(0.1)
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


def result(job: Job, study: Path) -> dict:
    """What is kept of a run: the metrics of its start and its end, and the means of the training
    log over every ten steps, which hold more rollouts than one evaluation."""
    stages = read_json(study / job.name / "summary.json")["stages"]
    log = map(json.loads, open(study / job.name / "log.jsonl", encoding="utf-8"))
    steps = [line for line in log if line["stage"] == "rl"]
    curve = []
    for block in (steps[i : i + 10] for i in range(0, len(steps), 10)):
        means = {k: fmean(known(line[k] for line in block)) for k in (CURVES | PARTS).values()}
        curve.append({"step": block[-1]["step"]} | means)
    found = {"start": stages["sft"], "end": stages["rl"], "routes": routes(stages["sft"])}
    return asdict(job) | found | {"curve": curve}


def known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def routes(m: dict) -> dict[str, tuple[float, float | None]]:
    """Each way to deal with a search question: its share, and its accuracy, which is
    P(right | route) = P(route | right) P(right) / P(route)."""
    names = {"right crop": "faithful", "careless crop": "unfaithful", "direct answer": "no_tool"}
    right = {n: (m[f"{n}_given_correct"] or 0.0) * m["search_accuracy"] for n in names.values()}
    return {way: (m[n], right[n] / m[n] if m[n] else None) for way, n in names.items()}


def picked(runs: Iterable[dict], **wanted) -> list[dict]:
    """The runs with these values; with more flags only where they are asked for."""
    return [run for run in runs if ({"more": ()} | wanted).items() <= run.items()]


def rewards_table(runs: Sequence[dict]) -> dict[str, dict[str, dict[str, list[float]]]]:
    """The paper's Tables 1 and 2 in our metrics: world -> reward -> metric -> its value at the end
    of every seed's run. The reward "start" is the SFT model, before any."""
    table: dict = {}
    for world, name in itertools.product(WORLDS, NAMES):
        reward, when = ("tapo", "start") if name == "start" else (name, "end")
        if metrics := [run[when] for run in picked(runs, reward=reward, world=world)]:
            table.setdefault(world, {})[name] = {n: [m[n] for m in metrics] for n in SHOWN}
    return table


def rewards_markdown(found: dict) -> str:
    """The tables of the study as docs/results.md shows them: mean (lowest to highest seed)."""
    labels, runs, tables, routed = [LABELS[n] for n in SHOWN], found["runs"].values(), [], []
    for world, rewards in found["table"].items():
        rows = [[NAMES[r], f"{len(m['accuracy'])}", *(told(m[n], ends=True) for n in SHOWN)]
                for r, m in rewards.items()]  # fmt: skip
        title = f"{world.capitalize()} (`--shortcut {WORLDS[world]}`):"
        tables.append(markdown(title, ["", "seeds", *labels], rows))
        own = [run["routes"] for run in picked(runs, reward="tapo", world=world)]
        pairs = {way: zip(*(run[way] for run in own)) for way in own[0]}  # (shares, accuracies)
        routed.append([world, *(", ".join(map(told, pair)) for pair in pairs.values())])
    means = "share of search questions, accuracy; means over seeds"
    title = f"What each route pays at the start ({means}):"
    tables.append(markdown(title, ["", *pairs], routed))
    return "\n\n".join(tables)


def markdown(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = (f"| {' | '.join(row)} |" for row in (head, *rows))
    return "\n".join([title, "", next(lines), "|---" * len(head) + "|", *lines])


def told(values: Iterable[float | None], ends: bool = False) -> str:
    """The mean of those that are known, and their range; empty if none is."""
    if not (numbers := known(values)):
        return ""
    span = f" ({min(numbers):.2f}–{max(numbers):.2f})" if ends else ""
    return f"{fmean(numbers):.2f}{span}"


def draw_study(runs: Sequence[dict], panels: dict[str, str], path: Path) -> None:
    """The paper's Figs. 6, 9 and 10 in our metrics: a row for each world, a column for each number,
    a line for each reward: the mean of its seeds, with their range shaded."""
    worlds = list(dict.fromkeys(run["world"] for run in runs))
    figure = Figure((3.2 * len(panels) + 1, 3 * len(worlds) + 0.6), layout="constrained")
    places = figure.subplots(len(worlds), len(panels), squeeze=False, sharey="col")
    for row, world in zip(places, worlds):
        for axes, (label, name) in zip(row, panels.items()):
            for reward, color, line in zip(REWARDS, (*COLORS, "#777777"), (*LINES, "-.")):
                if own := [run["curve"] for run in picked(runs, reward=reward, world=world)]:
                    steps = [point["step"] for point in own[0]]
                    values = np.array([[point[name] for point in curve] for curve in own])
                    axes.plot(steps, values.mean(0), color=color, linestyle=line, label=reward)
                    axes.fill_between(steps, values.min(0), values.max(0), color=color, alpha=0.12)
            axes.set(title=f"{world}: {label}", xlabel="training step")
            axes.grid(alpha=0.3)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=120)


def main(argv: list[str]) -> None:
    options = parse(Options, argv)
    with refusals():
        options.out.mkdir(parents=True, exist_ok=True)
        judges = importlib.import_module("beyond.judges")  # it imports this file
        study = judges.study_judges if options.study == "judges" else study_rewards
        tables = study(options.out, options.quick)
    print(tables, "", options.out, sep="\n")
