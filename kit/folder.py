"""
folder.py: the folder of a run: its log, its clock and its checkpoints.

Concept     A run that is killed goes on from its folder, to the same end. state.json says how far
            it is. It names the checkpoint to go on from, and is replaced in one motion when that
            checkpoint is whole: a kill loses at most the steps since.
Paper       nothing: this is what it takes to train for days
In          a folder, the processes of a run, and what each step has to say
Out         config.json, log.jsonl, times.jsonl, state.json, checkpoint-*/ and the exports
Left out    checkpoints that are written while training goes on
Read next   processes.py (what else the processes of a run share), train.py (which tells the story)
"""

import fcntl
import hashlib
import json
import math
import os
import re
import resource
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from statistics import fmean

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from kit.flags import checked
from kit.processes import gathered, processes, sync
from kit.qwen import Policy
from kit.tables import read_rows

WHAT_NOW = "put a copy back, or start a new run with another --out"


def read_json(path: Path, keys=()) -> dict:
    try:
        value = json.loads(path.read_text())
    except ValueError:  # cut short, or no text
        value = None
    if not isinstance(value, dict) or set(keys) - value.keys():
        raise ValueError(f"{path} is damaged: {WHAT_NOW}")
    return value


def write_json(path: Path, value: dict) -> None:
    """In one motion: readers see the old file or the new one, never a part."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value, indent=2) + "\n")
    os.replace(part, path)


def read_state(folder: Path) -> dict:
    """How far the run in this folder is."""
    state = {"stage": "sft", "step": 0, "checkpoint": None, "log_bytes": 0}
    state |= {"kept": [], "best": None, "seconds": {}, "stages": {}}
    if (path := folder / "state.json").exists():
        state = read_json(path, keys=state)
    state.setdefault("data", {})
    name = state["checkpoint"]
    if name and not (folder / name / ".metadata").is_file():
        raise ValueError(f"{path} goes on from {name}, which is not there or not whole: {WHAT_NOW}")
    return state


def read_config(folder: Path, kind: type):
    """The config of the run in this folder, as a `kind`: the run is to go on."""
    try:
        return replace(checked(kind(**read_json(folder / "config.json"))), out=str(folder))
    except TypeError as error:
        raise ValueError(f"{folder}/config.json is of another version: {error}") from error


def check_new(folder: Path) -> None:
    if (folder / "state.json").exists():
        raise ValueError(f"{folder} holds a run: --resume {folder} continues it, or change --out")


class Run:
    """A run and its folder. All processes have one: it makes them wait for each other, and says
    which one failed, and where. Only process 0 writes; of a checkpoint each writes its part."""

    def __init__(self, folder: Path, config: dict, timeout: float, keep: int, team=None) -> None:
        """team: an Accelerator, from processes.assemble. Raises ValueError or OSError if the run
        cannot be written to the folder, or cannot go on from there."""
        self.folder, self.keep, self.team = folder, keep, team
        self.device = team.device if team else torch.device("cpu")
        (self.rank, self.n), self.timeout = processes(), timedelta(seconds=timeout)
        self.first, self.side = self.rank == 0, None
        self.doing, self.now = "start", "before its first step"
        self.skipped = 0  # steps in a row
        self.lap: dict[str, float] = {}  # seconds of this step's phases
        self.rewards: list[float] = []  # of the steps since the last checkpoint
        if self.n > 1:
            self.side = dist.new_group(backend="gloo", timeout=self.timeout)
            # When one process dies, torchrun sends SIGTERM to the others: they say where they were.
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(f"told to end: {self.place()}"))
        if self.first:
            folder.mkdir(parents=True, exist_ok=True)
            self.log_file = open(folder / "log.jsonl", "ab")
            try:  # until this process ends, however it does
                fcntl.flock(self.log_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ValueError(f"another process is training in {folder}: wait for it") from error
        self.state = read_state(folder)
        if self.first:
            write_json(folder / "config.json", config)
            there, counted = self.log_file.tell(), self.state["log_bytes"]
            if there < counted:
                told = f"log.jsonl has {there} bytes, but state.json counts on {counted}"
                raise ValueError(f"{folder}/{told}: {WHAT_NOW}")
            # A log may run ahead of its checkpoint: those steps will be done, and logged, again.
            self.log_file.truncate(counted)
            self.lines = (folder / "log.jsonl").read_bytes().count(b"\n")

    def check_data(self, name: str, where: str) -> None:
        """Refuse to go on with other rows than the run began with: in another order, and with some
        that were held out among those to learn from, it would come to another end in silence."""
        if where:
            flag = f"--{name.replace('_', '-')} {where}"
            self.check_same(name, flag, read_rows(where).fingerprint())

    def check_same(self, name: str, what: str, found: str) -> None:
        if (began := self.state["data"].setdefault(name, found)) != found:
            told = f"{what} has changed since this run began: {began} then, {found} now"
            raise ValueError(f"{told}; {WHAT_NOW}")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A part of a step, with its seconds kept. All processes begin it together: there is a
        barrier first. An error in it is told with its process, phase and step."""
        began, before, self.doing = time.perf_counter(), self.doing, name
        try:
            if self.side:  # a process that does not come within the timeout is named
                dist.monitored_barrier(self.side, self.timeout, wait_all_ranks=True)
            yield
        except FloatingPointError as error:
            raise SystemExit(self.diverged(str(error))) from error
        except Exception as error:
            error.add_note(self.place())
            raise
        self.doing = before
        self.spent({name: time.perf_counter() - began})

    def emptied(self, name: str) -> Path:
        """A folder that all processes write to, with nothing in it yet."""
        if self.first:
            shutil.rmtree(self.folder / name, ignore_errors=True)
        gathered(None)  # nobody writes before it is gone
        return self.folder / name

    def spent(self, seconds: dict[str, float]) -> None:
        for sums in (self.state["seconds"], self.lap):
            sums |= {name: round(sums.get(name, 0.0) + s, 3) for name, s in seconds.items()}

    def place(self) -> str:
        where = f"process {self.rank} of {self.n}, at `{self.doing}`, {self.now}"
        return f"{where}; to go on: the same launcher, train.py --resume {self.folder}"

    def diverged(self, what: str) -> str:
        lr, last = f"{self.state['stage']}_lr", self.state["checkpoint"] or "the stage's start"
        how = f"Lower {lr} in {self.folder}/config.json and go on with --resume {self.folder}"
        return f"stopped ({self.now}): {what}. {how} (from {last})"

    def check_weights(self, policy: Policy) -> None:
        """After each step, so that no broken policy plays or is saved. Each process looks at its
        own part. Of squares, as those of huge but finite weights overflow in a forward too."""
        own = [p.to_local() if isinstance(p, DTensor) else p for p in policy.model.parameters()]
        sums = torch.stack([p.detach().square().sum() for p in own])
        if not all(gathered(bool(sums.isfinite().all()))):
            raise SystemExit(self.diverged("the policy's weights are not finite, or huge"))

    def log(self, line: dict) -> None:
        """Write one line of log.jsonl, with null for what is not finite. Two equal runs write the
        same: the step's seconds, memory and speed go to times.jsonl. A tracker gets both. Three
        skipped steps in a row end the run."""
        self.now = f"after {line['stage']} step {line['step']}"
        if self.first:
            floats = {k: v for k, v in line.items() if isinstance(v, float)}
            kept = {k: float(f"{v:.6g}") if math.isfinite(v) else None for k, v in floats.items()}
            self.log_file.write(json.dumps(line | kept, allow_nan=False).encode() + b"\n")
            self.log_file.flush()
            # (times.jsonl is not cut on resume: steps that were done twice stand there twice.)
            cost = {**self.lap, "peak_gb": peak_gb()}
            if cost.get("decode") and "generated_tokens" in line:  # seconds here, tokens of all
                cost["tokens_per_second"] = round(line["generated_tokens"] / cost["decode"], 1)
            with open(self.folder / "times.jsonl", "a") as file:
                print(json.dumps({k: line[k] for k in ("stage", "step")} | cost), file=file)
            if self.team:  # trackers take numbers alone
                named = {f"{line['stage']}/{k}": v for k, v in (line | cost).items()}
                numbers = {k: v for k, v in named.items() if isinstance(v, int | float)}
                self.team.log(numbers, step=self.lines)
            self.lines += 1
        self.lap = {}
        if "reward" in line:
            self.rewards.append(line["reward"])
        if "grad_norm" in line:
            self.skipped = self.skipped + 1 if line["grad_norm"] is None else 0
        if self.skipped == 3:
            told = f"stopped {self.now}: three steps in a row had no finite loss or gradient"
            raise SystemExit(f"{told}. Start a new run with a lower learning rate")

    def log_lines(self, stage: str) -> list[dict]:
        lines = map(json.loads, (self.folder / "log.jsonl").read_text().splitlines())
        return [line for line in lines if line["stage"] == stage]

    def tell_skipped(self, usable: int, skipped: list, name: str) -> None:
        """Say how many rows are used; the file `name` gets the reason for each that is not."""
        print(f"{usable} of {usable + len(skipped)} rows loaded, {len(skipped)} skipped ({name})")
        if self.first:
            lines = [json.dumps(row._asdict(), ensure_ascii=False) + "\n" for row in skipped]
            (self.folder / name).write_text("".join(lines))
        others = hashlib.sha256(repr([row.row for row in skipped]).encode()).hexdigest()[:16]
        self.check_same(name, "which rows can be used", f"{usable}, without {others},")

    def write_transcript(self, step: int, policy: Policy, ids: list[int], reward: object) -> None:
        """What the policy read and wrote in one episode, each picture as one word."""
        text = re.sub(r"(<\|image_pad\|>)+", "<picture>", policy.tokenizer.decode(ids))
        folder = self.folder / "transcripts"
        folder.mkdir(exist_ok=True)
        (folder / f"step-{step:05}.txt").write_text(f"{text}\n\n{reward}\n")

    def steps_left(self, steps: int) -> range:
        """The steps of stage 2 still to do; none once it is over."""
        return range(self.state["step"] if self.state["stage"] == "rl" else steps, steps)

    def save(self, policy: Policy, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Each process writes its own part of the weights and moments."""
        name = f"checkpoint-{self.state['stage']}-{step}"
        if self.first:  # a kill may have left one half written
            shutil.rmtree(self.folder / name, ignore_errors=True)
        with self.phase("save"):
            dcp.save(training_state(policy, optimizer), checkpoint_id=self.folder / name)
        best, rewards, self.rewards = self.state["best"], self.rewards, []
        if rewards and (best is None or fmean(rewards) > best["reward"]):
            best = {"checkpoint": name, "step": step, "reward": fmean(rewards)}
        kept = [k for k in self.state["kept"] if k != name] + [name]
        self.update(step=step, checkpoint=name, kept=kept[-self.keep :], best=best)

    def restore(self, policy: Policy, optimizer: torch.optim.Optimizer, name: str) -> None:
        """Parts are found by name, whoever wrote them: the number of processes may change."""
        dcp.load(training_state(policy, optimizer), checkpoint_id=self.folder / name)

    def update(self, **changes) -> None:
        """Replace state.json; checkpoints that it no longer names are then deleted."""
        self.state |= changes
        if self.first:
            self.state["log_bytes"] = self.log_file.tell()
            write_json(self.folder / "state.json", self.state)
            best = self.state["best"] or {"checkpoint": None}
            for folder in self.folder.glob("checkpoint-*"):
                if folder.name not in (*self.state["kept"], best["checkpoint"]):
                    shutil.rmtree(folder)

    def end_stage(self, actor: Policy, metrics: dict, following: str) -> None:
        """Export the stage's policy and go on to the next stage, with a fresh optimiser."""
        stage, self.lap = self.state["stage"], {}
        with self.phase("export"):
            if self.first:
                actor.save(self.folder / stage)
        self.state["stages"][stage] = metrics
        self.update(stage=following, step=0, checkpoint=None, kept=[])

    def export_best(self, policy: Policy, actor: Policy, optimizer, steps: int) -> None:
        """Write rl-best/, the checkpoint before which the mean reward (since the one before it) was
        highest, unless the run ended with it."""
        best = self.state["best"]
        with self.phase("export"):
            if best and best["step"] < steps:
                self.restore(policy, optimizer, best["checkpoint"])
                sync(policy, actor)
                if self.first:
                    actor.save(self.folder / "rl-best")
        self.update(best=None)


def peak_gb() -> float:
    """The most memory so far: of the GPU, since the last call; without one, of the process."""
    if not torch.cuda.is_available():
        return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 2)
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return round(peak / 1e9, 2)


def training_state(policy: Policy, optimizer: torch.optim.Optimizer) -> dict:
    """What moves, and its moments, under the weights' names: what a checkpoint holds, and where it
    is read into. Weights that stay, such as those beneath an adapter, are those of the start."""
    learnt = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
    for p in learnt.values():
        if not optimizer.state[p]:
            zeros = dict(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            optimizer.state[p] = {"step": torch.tensor(0.0), **zeros}
    weights = {name: p.detach() for name, p in learnt.items()}
    return {"weights": weights, "moments": {n: optimizer.state[p] for n, p in learnt.items()}}
