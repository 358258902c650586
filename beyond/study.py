"""
study.py: train with every reward, in two worlds and with three seeds: what does each one teach?

Concept     The runs differ in the reward alone: they start from the same SFT models, meet the same
            questions in training, and are asked the same ones at the end.
Paper       CodeV, arXiv:2511.19661, Tables 1 and 2, Figs. 6, 9 and 10: in our metrics, on the toy
In          the folder of the study
Out         study.json, study.png, study_parts.png, and tables in Markdown
Left out    data sets other than the toy
Read next   train.py (each run is one call of it), docs/results.md (what came out)
"""

from __future__ import annotations

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

from matplotlib.figure import Figure
from tqdm import tqdm

from evaluate import COLORS, EPISODES, LABELS, LINES, measure, read_trajectories
from kit.flags import knob, parse, refusals
from kit.folder import read_json

WORLDS = {"guessing pays": 1.0, "looking pays": 0.5}  # their --shortcut
HOME = "guessing pays"  # where all SFT models learn
NAMES = {  # what is compared, and its name in the tables
    "start": "SFT, where all start", "tapo": "**TAPO**",
    "tool_bonus": "`tool_bonus`, a bonus per call", "deepeyes": "`deepeyes`, a gated bonus",
    "codedance": "`codedance`, a bonus that shrinks with ease", "thyme": "`thyme`, consistency",
    "accuracy": "`accuracy`", "random": "`random`, the null", "zero-rl": "TAPO without SFT",
}  # fmt: skip
REWARDS = tuple(NAMES)[1:-1]
SHOWN = ("accuracy", "ood_accuracy", "tool_use", "faithful", "crop_area", "error_rate")
SWEEP = (0.1, 0.2, 0.4)  # of lambda_tool
QUICK = (("tapo", "tool_bonus", "accuracy"), (HOME,), (0,))  # rewards, worlds, seeds


@dataclass(frozen=True)
class Options:
    """Train with every reward. A run that has ended stays: new code wants a new --out."""

    study: str = knob("rewards", "what is varied", choices=("rewards",))
    quick: bool = knob(False, "three rewards, one world, one seed; else seven, two, three")
    out: Path = knob(Path("runs/eval"), "folder of the study", metavar="DIR")


@dataclass(frozen=True)
class Job:
    """One run of train.py in a folder of the study."""

    reward: str  # one of REWARDS; "zero-rl", TAPO from the base model; "sft", stage 1 alone
    world: str  # a key of WORLDS
    seed: int
    lambda_tool: float = 0.2

    @property
    def name(self) -> str:
        swept = "" if self.lambda_tool == 0.2 else f"-lambda-{self.lambda_tool:g}"
        return f"{self.reward}{swept}-{self.world.split()[0]}-{self.seed}"

    @property
    def start(self) -> Job | None:
        """Whose SFT model it takes over: its seed's, once that was measured in this world."""
        if self.reward == "sft":
            return None if self.world == HOME else Job("sft", HOME, self.seed)
        return None if self.reward == "zero-rl" else Job("sft", self.world, self.seed)

    def command(self, study: Path) -> list[str]:
        """What one would type by hand. A run that was cut off goes on where it was."""
        folder = study / self.name
        flags = {"--seed": self.seed, "--shortcut": WORLDS[self.world], "--eval-every": 10}
        flags |= {"--lambda-tool": self.lambda_tool, "--out": folder}
        special = {"sft": {"--rl-steps": 0}, "zero-rl": {"--sft-steps": 0}}
        flags |= special.get(self.reward, {"--reward": self.reward})
        if self.start:
            flags |= {"--model": study / self.start.name / "sft", "--sft-steps": 0}
        flags = {"--resume": folder} if (folder / "state.json").exists() else flags
        return [sys.executable, "train.py", *(str(word) for pair in flags.items() for word in pair)]

    def begin(self, study: Path) -> subprocess.Popen:
        """Start to train. Raises OSError if it cannot start."""
        folder, start = study / self.name, self.start
        folder.mkdir(parents=True, exist_ok=True)
        if start and start.world == self.world and not (folder / "state.json").exists():
            # Both ask the same model the same questions: the episodes are not played again.
            played = study / start.name / "sft-episodes"
            if played.is_dir():
                shutil.copytree(played, folder / played.name, dirs_exist_ok=True)
        with open(study / f"{self.name}.txt", "a") as told:
            place = Path(__file__).parent.parent
            return subprocess.Popen(self.command(study), cwd=place, stdout=told, stderr=told)


def study_rewards(study: Path, quick: bool) -> dict:
    """Every reward in both worlds, three seeds, from the same SFT models. Writes study.json, which
    it returns, and two figures."""
    study = study.resolve()  # the runs start in the folder of train.py
    rewards, worlds, seeds = QUICK if quick else (REWARDS, tuple(WORLDS), (0, 1, 2))
    jobs = [Job("sft", HOME, seed) for seed in seeds]
    if not quick:
        jobs += [Job("zero-rl", HOME, seed) for seed in seeds]
        jobs += [Job("tapo", HOME, 0, weight) for weight in SWEEP]
    jobs += [Job(r, w, s) for s in seeds for w in worlds for r in ("sft", *rewards)]
    jobs = list(dict.fromkeys(jobs))  # each once
    run_all(jobs, study)
    runs = [result(job, study) for job in jobs]
    found = {"runs": {job.name: run for job, run in zip(jobs, runs)}, "table": rewards_table(runs)}
    (study / "study.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    draw_study(runs, CURVES, study / "study.png")
    draw_study(runs, PARTS, study / "study_parts.png")
    return found


def run_all(jobs: Sequence[Job], study: Path) -> None:
    """One run a core at a time; those that have ended are not run again. Raises RuntimeError when
    one fails, once all that had begun by then have ended."""
    waiting = [job for job in jobs if not (study / job.name / "summary.json").exists()]
    running, cores = {}, len(os.sched_getaffinity(0))
    bar = tqdm(total=len(waiting), desc="runs")
    try:
        while waiting or running:
            # Wait for the run whose SFT model this one starts from.
            ready = [job for job in waiting if job.start not in {*waiting, *running}]
            for job in ready[: cores - len(running)]:
                waiting.remove(job)
                running[job] = job.begin(study)
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


def quarter(folder: Path) -> dict:
    """Metrics on every fourth question of a stage: those that are asked amid training, too."""
    trajectories, rewards = read_trajectories(folder / EPISODES)
    return measure(trajectories[::4], rewards[::4])


def result(job: Job, study: Path) -> dict:
    """What is kept of a run: metrics of its start and its end (all questions), of an evaluation
    every ten steps (a fourth of them), and the means of the training log over every ten steps."""
    folder = study / job.name
    stages = read_json(folder / "summary.json")["stages"]
    log = [json.loads(line) for line in open(folder / "log.jsonl", encoding="utf-8")]
    steps = [line for line in log if line["stage"] == "rl"]
    start, end = (
        {name: v for name, v in stages[stage].items() if isinstance(v, int | float | None)}
        for stage in ("sft", "rl")
    )
    asked = [{"step": 0} | quarter(folder / "sft-episodes")]
    asked += [line for line in log if line["stage"] == "evaluation"]
    asked += [{"step": steps[-1]["step"]} | quarter(folder)] if steps else []
    tested = [{name: line[name] for name in ("step", *SHOWN)} for line in asked]
    curve = []
    for i in range(0, len(steps), 10):
        block = steps[i : i + 10]  # ten training steps hold more rollouts than one evaluation
        numbers = [(k, v) for line in block for k, v in line.items() if isinstance(v, int | float)]
        means = {name: fmean(v for k, v in numbers if k == name) for name, _ in numbers}
        curve.append(means | {"step": block[-1]["step"]})
    found = {"routes": routes(start), "start": start, "end": end}
    return asdict(job) | found | {"evaluations": tested, "curve": curve}


def routes(m: dict) -> dict[str, dict[str, float | None]]:
    """Each way to deal with a search question: its share, and its accuracy, which is
    P(right | route) = P(route | right) P(right) / P(route)."""
    names = {"right crop": "faithful", "careless crop": "unfaithful", "direct answer": "no_tool"}
    right = {n: (m[f"{n}_given_correct"] or 0.0) * m["search_accuracy"] for n in names.values()}
    paid = {n: right[n] / m[n] if m[n] else None for n in names.values()}
    return {route: {"share": m[n], "accuracy": paid[n]} for route, n in names.items()}


def picked(runs: Iterable[dict], **wanted) -> list[dict]:
    """The runs with these values; with another lambda_tool only where that is asked for."""
    return [run for run in runs if ({"lambda_tool": 0.2} | wanted).items() <= run.items()]


def rewards_table(runs: Sequence[dict]) -> dict[str, dict[str, dict[str, list[float]]]]:
    """The paper's Tables 1 and 2 in our metrics: world -> reward -> metric -> its value at the end
    of every seed's run. The reward "start" is the SFT model, before any."""
    table: dict = {}
    for world in dict.fromkeys(run["world"] for run in runs):
        ends = {"start": [run["start"] for run in picked(runs, reward="tapo", world=world)]}
        for reward in (*REWARDS, "zero-rl"):
            ends[reward] = [run["end"] for run in picked(runs, reward=reward, world=world)]
        kept = {reward: metrics for reward, metrics in ends.items() if metrics}
        table[world] = {r: {n: [m[n] for m in kept[r]] for n in SHOWN} for r in kept}
    return table


def rewards_markdown(found: dict) -> str:
    """The tables of the study as the README shows them: mean (lowest to highest seed)."""
    sections, labels, runs = [], [LABELS[name] for name in SHOWN], found["runs"].values()

    def section(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        lines = (f"| {' | '.join(row)} |" for row in (head, *rows))
        sections.append("\n".join([title, "", next(lines), "|---" * len(head) + "|", *lines]))

    rows = []
    for world, rewards in found["table"].items():
        cells = {r: [told(m[name], ends=True) for name in SHOWN] for r, m in rewards.items()}
        seeds = {r: f"{len(m['accuracy'])}" for r, m in rewards.items()}
        title = f"{world.capitalize()} (`--shortcut {WORLDS[world]}`):"
        section(title, ["", "seeds", *labels], ([NAMES[r], seeds[r], *cells[r]] for r in rewards))
        own = [run["routes"] for run in picked(runs, reward="tapo", world=world)]
        shares = ([run[route] for run in own] for route in own[0])
        pairs = ([told(way[x] for way in ways) for x in ("share", "accuracy")] for ways in shares)
        rows.append([world, *map(", ".join, pairs)])
    means = "share of search questions, accuracy; means over seeds"
    section(f"What each route pays at the start ({means}):", ["", *own[0]], rows)

    one = {"reward": "tapo", "world": HOME, "seed": 0}
    swept = [run for weight in SWEEP for run in picked(runs, lambda_tool=weight, **one)]
    if len(swept) > 1:
        rows = ([f"{r['lambda_tool']}", *(told([r["end"][n]]) for n in SHOWN[:-1])] for r in swept)
        title = f"TAPO with other weights of what tools showed ({HOME}, seed 0):"
        section(title, ["λ_tool", *labels[:-1]], rows)
    return "\n\n".join(sections)


def told(values: Iterable[float | None], ends: bool = False) -> str:
    """The mean of those that are known, and their range."""
    known = [value for value in values if value is not None]
    span = f" ({min(known):.2f}–{max(known):.2f})" if known and ends else ""
    return f"{fmean(known):.2f}{span}" if known else ""


CURVES = {"tool use": "tool_use", "faithful": "faithful"}
PARTS = {"answer reward": "answer", "tool reward": "tools", "format reward": "format",
         "tokens per step": "generated_tokens", "calls per rollout": "calls"}  # fmt: skip


def draw_study(runs: Sequence[dict], panels: dict[str, str], path: Path) -> None:
    """The paper's Figs. 6, 9 and 10 in our metrics: a row for each world, a column for each number,
    a line for each reward: the mean of its seeds, with their range shaded."""
    runs = [run for run in runs if run["curve"]]
    worlds, rewards = (list(dict.fromkeys(run[key] for run in runs)) for key in ("world", "reward"))
    size = (3.2 * len(panels) + 1, 3 * len(worlds) + 0.6)
    figure = Figure(figsize=size, layout="constrained")
    places = figure.subplots(len(worlds), len(panels), squeeze=False, sharey="col")
    styles = dict(zip((r for r in rewards if r != "zero-rl"), itertools.cycle(zip(COLORS, LINES))))
    for row, world in zip(places, worlds):
        for axes, (label, name) in zip(row, panels.items()):
            for reward, (color, line) in styles.items():
                if own := [run["curve"] for run in picked(runs, reward=reward, world=world)]:
                    steps = [point["step"] for point in own[0]]
                    values = [[point[name] for point in points] for points in zip(*own)]
                    low, mean, high = ([*map(of, values)] for of in (min, fmean, max))
                    axes.plot(steps, mean, color=color, linestyle=line, label=reward)
                    axes.fill_between(steps, low, high, color=color, alpha=0.12)
            axes.set(title=f"{world}: {label}", xlabel="training step")
            axes.grid(alpha=0.3)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=120)


def main(argv: list[str]) -> None:
    options = parse(Options, argv)
    with refusals():
        options.out.mkdir(parents=True, exist_ok=True)
        found = study_rewards(options.out, options.quick)
    print(rewards_markdown(found), "", options.out / "study.json", sep="\n")
