"""
study.py: the study: what does each reward teach?

Concept     The study: what does each reward teach?
Paper       nothing
In          
Out         
Left out    
Read next   
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure
from tqdm import tqdm

from evaluate import COLORS, LABELS, LINES, make_folder, measure, read_trajectories

# The study: what does each reward teach?

WORLDS = {"guessing pays": 1.0, "looking pays": 0.5}  # their --shortcut
HOME = "guessing pays"  # where all SFT models learn
STUDIED = ("tapo", "tool_bonus", "deepeyes", "codedance", "thyme", "accuracy", "random")
SHOWN = ("accuracy", "ood_accuracy", "tool_use", "faithful", "crop_area", "error_rate")
QUICK = (("tapo", "tool_bonus", "accuracy"), ("guessing pays",), (0,))  # rewards, worlds, seeds


@dataclass(frozen=True)
class Job:
    """One run of train.py in a folder of the study."""

    reward: str  # a key of REWARDS; "zero-rl", TAPO from the base model; "sft", stage 1 alone
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
        folder, python = study / self.name, [sys.executable, "train.py"]
        if (folder / "state.json").exists():
            return [*python, "--resume", str(folder)]
        begin = ["--model", f"{study}/{self.start.name}/sft"] if self.start else []
        begin += ["--sft-steps", "0"] if self.start or self.reward == "zero-rl" else []
        then = {"sft": ["--rl-steps", "0"], "zero-rl": []}
        return [
            *python, *begin, *then.get(self.reward, ["--reward", self.reward]),
            "--seed", str(self.seed), "--shortcut", str(WORLDS[self.world]), "--eval-every", "10",
            "--lambda-tool", str(self.lambda_tool), "--out", str(folder),
        ]  # fmt: skip

    def run(self, study: Path) -> None:
        """Train, unless that is done."""
        folder, start = study / self.name, self.start
        if not (folder / "summary.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            if start and start.world == self.world and not (folder / "state.json").exists():
                # It asked the same model the same questions: they are not played again.
                theirs = study / start.name / "sft-episodes"
                if theirs.is_dir():
                    shutil.copytree(theirs, folder / theirs.name, dirs_exist_ok=True)
            with open(study / f"{self.name}.txt", "a") as heard:
                how = {"cwd": Path(__file__).parent.parent, "stdout": heard, "stderr": heard}
                code = subprocess.run(self.command(study), **how).returncode
            if code:
                raise RuntimeError(f"{self.name} ended with {code}; its words: {heard.name}")


def study_rewards(study: Path, quick: bool) -> dict:
    """Every reward in both worlds, three seeds, from the same SFT models. Writes study.json, which
    it returns, and two figures. One run a core at a time. Finished runs are not run again: after a
    change of the code, give a new folder."""
    study = study.resolve()  # the runs start in the folder of train.py
    rewards, worlds, seeds = QUICK if quick else (STUDIED, tuple(WORLDS), (0, 1, 2))
    jobs = [Job("sft", HOME, seed) for seed in seeds]
    if not quick:
        jobs += [Job("zero-rl", HOME, seed) for seed in seeds]
        jobs += [Job("tapo", HOME, 0, weight) for weight in (0.1, 0.4)]
    jobs += [Job(r, w, s) for s in seeds for w in worlds for r in ("sft", *rewards)]
    jobs, running = list(dict.fromkeys(jobs)), {}  # each once, and after the one it starts from
    over = threading.Event()

    def turn(job: Job) -> None:
        """It comes when the run has ended that this one starts from; after a failure, never."""
        try:
            if job.start:
                running[job.start].result()
            if not over.is_set():
                job.run(study)
        except (RuntimeError, OSError) as error:  # of a run; a full disk, a file in the way
            over.set()
            if isinstance(error, OSError):
                raise RuntimeError(f"{job.name} could not begin: {str(error)[:300]}") from error
            raise

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        bar = tqdm(total=len(jobs), desc="runs")
        try:
            for job in jobs:
                running[job] = pool.submit(turn, job)
            for run in as_completed(running.values()):
                run.result()
                bar.update()
        except BaseException as error:  # Ctrl-C as well: the runs that have begun hear it, too
            over.set()
            pool.shutdown(wait=False, cancel_futures=True)
            bar.write(f"{error or 'stopped'}. The study ends when the runs that have begun do")
            raise
    runs = [result(job, study) for job in jobs]
    found = {"runs": dict(zip((job.name for job in jobs), runs)), "table": rewards_table(runs)}
    (study / "study.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    draw_study(runs, CURVES, study / "study.png")
    draw_study(runs, PARTS, study / "study_parts.png")
    return found


def quarter(folder: Path) -> dict:
    """Metrics on every fourth question of a stage, those that are asked amid training, too."""
    episodes, rewards = read_trajectories(folder / "trajectories.jsonl")
    return measure(episodes[::4], rewards[::4])


def result(job: Job, study: Path) -> dict:
    """What is kept of a run: metrics of its start and its end (all questions), of an evaluation
    every ten steps (a fourth of them), and the means of the training log over every ten steps."""
    folder = study / job.name
    try:
        stages = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["stages"]
        log = [json.loads(line) for line in open(folder / "log.jsonl", encoding="utf-8")]
    except ValueError as error:
        raise ValueError(f"the summary.json or log.jsonl of {folder} is damaged ({error}): delete "
                         f"that folder and give the same command again") from error  # fmt: skip
    steps = [e for e in log if e["stage"] == "rl"]
    start, end = ({k: v for k, v in stages[s].items() if isinstance(v, int | float | None)}
                  for s in ("sft", "rl"))  # fmt: skip
    asked = [{"step": 0} | quarter(folder / "sft-episodes")]
    asked += [e for e in log if e["stage"] == "evaluation"]
    asked += [{"step": steps[-1]["step"]} | quarter(folder)] if steps else []
    tested = [{name: e[name] for name in ("step", *SHOWN)} for e in asked]
    curve = []
    for i in range(0, len(steps), 10):
        block = steps[i : i + 10]  # ten training steps hold more rollouts than one evaluation
        numbers = [(k, v) for e in block for k, v in e.items() if isinstance(v, int | float)]
        means = {name: fmean(v for k, v in numbers if k == name) for name, _ in numbers}
        curve.append(means | {"step": block[-1]["step"]})
    found = {"routes": routes(start), "start": start, "end": end}
    return {**asdict(job), **found, "evaluations": tested, "curve": curve}


def routes(m: dict) -> dict[str, dict[str, float | None]]:
    """Each way to deal with a search question: its share, and its accuracy, which is
    P(right | route) = P(route | right) P(right) / P(route)."""
    names = {"right crop": "faithful", "careless crop": "unfaithful", "direct answer": "no_tool"}
    paid = {}
    for route, name in names.items():
        right = (m[f"{name}_given_correct"] or 0.0) * m["search_accuracy"]
        paid[route] = {"share": m[name], "accuracy": right / m[name] if m[name] else None}
    return paid


def rewards_table(runs: Sequence[dict]) -> dict[str, dict[str, dict[str, list[float]]]]:
    """The paper's Tables 1 and 2 in our metrics: world -> reward -> metric -> its value at the end
    of every seed's run. The reward "start" is the SFT model, before any."""
    table: dict = {}
    for run in (run for run in runs if run["lambda_tool"] == 0.2):
        told = [("start", run["start"])] if run["reward"] == "tapo" else []
        told += [(run["reward"], run["end"])] if run["reward"] != "sft" else []
        for reward, metrics in told:
            numbers = table.setdefault(run["world"], {}).setdefault(reward, {})
            for name in SHOWN:
                numbers.setdefault(name, []).append(metrics[name])
    return table


TOLD = {
    "start": "SFT, where all start", "tapo": "**TAPO**",
    "tool_bonus": "`tool_bonus`, a bonus per call", "deepeyes": "`deepeyes`, a gated bonus",
    "codedance": "`codedance`, a bonus that shrinks with ease", "thyme": "`thyme`, consistency",
    "accuracy": "`accuracy`", "random": "`random`, the null", "zero-rl": "TAPO without SFT",
}  # fmt: skip


def rewards_markdown(found: dict) -> str:
    """The tables of the study as the README shows them: mean (lowest to highest seed)."""
    runs, lines = found["runs"].values(), []

    def head(*names: str) -> None:
        lines.extend([f"| {' | '.join(names)} |", "|---" * len(names) + "|"])

    for world, rewards in found["table"].items():
        lines += [f"{world.capitalize()} (`--shortcut {WORLDS[world]}`):", ""]
        head("", "seeds", *(LABELS[name] for name in SHOWN))
        for reward in (name for name in TOLD if name in rewards):
            cells = [[v for v in rewards[reward][name] if v is not None] for name in SHOWN]
            texts = [f"{fmean(c):.2f} ({min(c):.2f}–{max(c):.2f})" if c else "" for c in cells]
            lines.append(f"| {TOLD[reward]} | {len(cells[0])} | {' | '.join(texts)} |")
        lines.append("")

    ours = [run for run in runs if run["reward"] == "tapo"]
    lines += ["What each route pays at the start (share of search questions, accuracy; means over "
              "seeds):", ""]  # fmt: skip
    head("", *ours[0]["routes"])
    for world in found["table"]:
        own = [r["routes"] for r in ours if (r["world"], r["lambda_tool"]) == (world, 0.2)]
        cells = [[[r[route][x] for r in own if r[route][x] is not None]
                  for x in ("share", "accuracy")] for route in own[0]]  # fmt: skip
        texts = [", ".join(f"{fmean(c):.2f}" if c else "" for c in pair) for pair in cells]
        lines.append(f"| {world} | {' | '.join(texts)} |")

    swept = [r for r in ours if (r["world"], r["seed"]) == (HOME, 0)]
    if len(swept) > 1:
        lines += ["", f"TAPO with other weights of what tools showed ({HOME}, seed 0):", ""]
        head("λ_tool", *(LABELS[name] for name in SHOWN[:-1]))
        for run in sorted(swept, key=lambda run: run["lambda_tool"]):
            texts = [f"{run['end'][name]:.2f}" for name in SHOWN[:-1]]
            lines.append(f"| {run['lambda_tool']} | {' | '.join(texts)} |")
    return "\n".join(lines)


CURVES = {"tool use": "tool_use", "faithful": "faithful"}
PARTS = {"answer reward": "answer", "tool reward": "tools", "format reward": "format",
         "tokens per step": "generated_tokens", "calls per rollout": "calls"}  # fmt: skip


def draw_study(runs: Sequence[dict], panels: dict[str, str], path: Path) -> None:
    """The paper's Figs. 6, 9 and 10 in our metrics: a row for each world, a column for each number,
    a line for each reward: the mean of its seeds, with their range shaded."""
    worlds = list(dict.fromkeys(run["world"] for run in runs))
    told = (run["reward"] for run in runs if run["curve"] and run["reward"] != "zero-rl")
    rewards = list(dict.fromkeys(told))
    size = (3.2 * len(panels) + 1, 3 * len(worlds) + 0.6)
    figure = Figure(figsize=size, layout="constrained")
    places = figure.subplots(len(worlds), len(panels), squeeze=False, sharey="col")
    for row, world in zip(places, worlds):
        for axes, (label, name) in zip(row, panels.items()):
            for i, reward in enumerate(rewards):
                own = [r["curve"] for r in runs if (r["reward"], r["world"], r["lambda_tool"])
                       == (reward, world, 0.2)]  # fmt: skip
                if own:
                    steps = [point["step"] for point in own[0]]
                    values = [[point[name] for point in points] for points in zip(*own)]
                    style = {"color": COLORS[i % 7], "linestyle": LINES[i % 7]}
                    axes.plot(steps, list(map(fmean, values)), **style, label=reward)
                    axes.fill_between(steps, [*map(min, values)], [*map(max, values)],
                                      color=COLORS[i % 7], alpha=0.12)  # fmt: skip
            axes.set(title=f"{world}: {label}", xlabel="training step")
            axes.grid(alpha=0.3)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=120)


def main(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    try:
        make_folder(args.out)
        found = study_rewards(args.out, args.quick)
        print(rewards_markdown(found), "", args.out / "study.json", sep="\n")
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:  # Ctrl-C
        parser.exit(130, "\nstopped; to go on: the same command\n")
