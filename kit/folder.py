"""
folder.py: the folder of a run: its log, its clock and its checkpoints.

Concept     The folder of a run: its log, its clock and its checkpoints.
Paper       nothing
In
Out
Left out
Read next
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from torch.distributed.tensor import DTensor

from kit.flags import checked, flag
from kit.processes import gathered, processes, sync
from kit.qwen import Policy

T = TypeVar("T")
WHAT_NOW = "put a copy back, or start a new run with another --out"


def read_state(folder: Path) -> dict:
    """How far the run in this folder is (class Run)."""
    state = {"stage": "sft", "step": 0, "checkpoint": None, "log_bytes": 0, "kept": [],
             "best": None, "seconds": {}, "stages": {}}  # fmt: skip
    if (path := folder / "state.json").exists():
        if state.keys() - (found := read_json(path)).keys():
            raise ValueError(f"{path} is damaged: {WHAT_NOW}")
        state |= found
    name = state["checkpoint"]
    if name and not (folder / name / ".metadata").is_file():
        raise ValueError(f"{path} goes on from {name}, which is not there or not whole: {WHAT_NOW}")
    return state


def read_json(path: Path) -> dict:
    try:
        value = json.loads(path.read_text())
    except ValueError:  # cut short, or no text
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is damaged: {WHAT_NOW}")
    return value


def read_config(folder: Path, kind: type[T]) -> T:
    """The config of the run in a folder, to go on with."""
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"nothing to resume in {folder}: it has no config.json")
    values = read_json(path)
    try:
        config = replace(checked(kind(**values)), out=str(folder))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is not the config of a run of this version: {error}") from error
    read_state(folder)
    return config


def can_be_made(out: Path) -> None:
    """May a new run write to this folder?"""
    if (out / "state.json").exists():
        raise ValueError(f"{out} holds a run already: continue it with --resume {out}, or give "
                         f"this one another --out")  # fmt: skip
    there = next(path for path in (out, *out.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(f"--out {out} cannot be made: {there} is no folder to write to")


class Run:
    """The folder of a run: its log, its clock, its newest checkpoints; and what the processes of a
    run need beside the gradient: to wait for each other, and to say which one failed, and where.

    state.json says how far the run is. It names the checkpoint to go on from, and is replaced in
    one motion once that checkpoint is whole: a kill at any moment loses at most the steps since.
    Only process 0 writes it.
    """

    def __init__(self, config, team: Accelerator | None = None) -> None:
        self.folder, self.team, self.keep = Path(config.out), team, config.keep
        self.rank, self.n = processes()
        self.first, self.doing, self.now = self.rank == 0, "start", "before its first step"
        self.skipped, self.lap, self.lines = 0, {}, 0  # lap: a step's seconds
        self.timeout, self.side = timedelta(seconds=config.timeout), None
        if self.n > 1:
            self.side = dist.new_group(backend="gloo", timeout=self.timeout)
            # When one process dies, torchrun sends SIGTERM to the others: they say where they were.
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(f"told to end: {self.place()}"))
        if self.first:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.log_file = open(self.folder / "log.jsonl", "ab")
            try:  # until this process ends, however it does
                fcntl.flock(self.log_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SystemExit(f"another process is training in {self.folder}: wait for it, or "
                                 f"give --out another folder") from None  # fmt: skip
        self.state = read_state(self.folder)
        if not self.first:
            return
        write_json(self.folder / "config.json", asdict(config))
        # A log may run ahead of its checkpoint: those steps will be done, and logged, again.
        there, counted = self.log_file.tell(), self.state["log_bytes"]
        if there < counted:
            raise SystemExit(f"{self.folder}/log.jsonl has {there} bytes, but state.json counts on "
                             f"{counted}: put the log back, or start a new run")  # fmt: skip
        self.log_file.truncate(counted)
        self.lines = len((self.folder / "log.jsonl").read_bytes().splitlines())

    def log(self, line: dict) -> None:
        """Write one line of log.jsonl. It is the same in two equal runs: the seconds of the step go
        to times.jsonl. Three skipped steps in a row end the run."""
        self.now = f"after {line['stage']} step {line['step']}"
        if self.first:
            rounded = {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in line.items()}
            self.log_file.write(json.dumps(rounded).encode() + b"\n")
            self.log_file.flush()
            # (times.jsonl is not cut on resume: steps that were done twice stand there twice.)
            with open(self.folder / "times.jsonl", "a") as file:
                print(json.dumps({k: line[k] for k in ("stage", "step")} | self.lap), file=file)
        if self.team:
            numbers = {f"{line['stage']}/{k}": v for k, v in line.items()
                       if isinstance(v, int | float) and k != "step"}  # fmt: skip
            self.team.log(numbers, step=self.lines)
        self.lap, self.lines = {}, self.lines + 1
        if "grad_norm" in line:
            self.skipped = self.skipped + 1 if line["grad_norm"] is None else 0
        if self.skipped == 3:
            raise SystemExit(
                f"stopped {self.now}: three steps in a row had no finite loss or gradient and were "
                f"skipped. Start a new run with a lower learning rate, from the last good stage in "
                f"{self.folder}."
            )

    def log_lines(self, stage: str) -> list[dict]:
        lines = map(json.loads, (self.folder / "log.jsonl").read_text().splitlines())
        return [line for line in lines if line["stage"] == stage]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a part of the story, which all processes begin together: one that does not come
        within --timeout is named. An error inside is told with its process, part and step."""
        began, before, self.doing = time.perf_counter(), self.doing, name
        try:
            if self.side:
                dist.monitored_barrier(self.side, self.timeout, wait_all_ranks=True)
            yield
        except FloatingPointError as error:
            raise SystemExit(self.diverged(str(error))) from error
        except Exception as error:
            error.add_note(self.place())
            raise
        self.doing = before
        self.spent({name: time.perf_counter() - began})

    def place(self) -> str:
        return f"process {self.rank} of {self.n}, at `{self.doing}`, {self.now}"

    def diverged(self, what: str) -> str:
        lr, last = f"{self.state['stage']}_lr", self.state["checkpoint"] or "the stage's start"
        return (f"stopped ({self.place()}): {what}. Lower {lr} in {self.folder}/config.json and go "
                f"on with --resume {self.folder} (from {last}), or start a new run with a lower "
                f"{flag(lr)}")  # fmt: skip

    def check_weights(self, policy: Policy) -> None:
        """After each step, so that no broken policy plays or is saved. Each process looks at its
        own part. Of squares, as those of huge but finite weights overflow in a forward too."""
        own = [p.to_local() if isinstance(p, DTensor) else p for p in policy.model.parameters()]
        sums = torch.stack([p.detach().square().sum() for p in own])
        if not all(gathered(bool(sums.isfinite().all()))):
            raise SystemExit(self.diverged("the policy's weights are not finite, or huge"))

    def spent(self, seconds: dict[str, float]) -> None:
        for sums in (self.state["seconds"], self.lap):
            sums |= {name: round(sums.get(name, 0.0) + s, 3) for name, s in seconds.items()}

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
        best = self.state["best"]
        if self.first and self.state["stage"] == "rl":
            since = [x["reward"] for x in self.log_lines("rl") if x["step"] > self.state["step"]]
            reward = sum(since) / max(len(since), 1)
            if best is None or reward > best["reward"]:
                best = {"checkpoint": name, "step": step, "reward": reward}
        kept = [k for k in self.state["kept"] if k != name] + [name]
        self.update(step=step, checkpoint=name, kept=kept[-self.keep :], best=gathered(best)[0])

    def restore(self, policy: Policy, optimizer: torch.optim.Optimizer, name: str) -> None:
        """Parts are found by name, whoever wrote them: the number of processes may change."""
        dcp.load(training_state(policy, optimizer), checkpoint_id=self.folder / name)

    def update(self, **changes) -> None:
        """Replace state.json; checkpoints that it no longer names are then deleted."""
        self.state |= changes
        if not self.first:
            return
        self.state["log_bytes"] = self.log_file.tell()
        write_json(self.folder / "state.json", self.state)
        best = self.state["best"] or {}
        for folder in self.folder.glob("checkpoint-*"):
            if folder.name not in (*self.state["kept"], best.get("checkpoint")):
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


def training_state(policy: Policy, optimizer: torch.optim.Optimizer) -> dict:
    """Lambdas and moments under their names: what a checkpoint holds, and where it is read into."""
    moments = {}
    for name, p in policy.model.named_parameters():
        if p.requires_grad:
            if not optimizer.state[p]:
                zeros = dict(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                optimizer.state[p] = {"step": torch.tensor(0.0), **zeros}
            moments[name] = optimizer.state[p]
    return {"weights": policy.model.state_dict(), "moments": moments}


def write_json(path: Path, value: dict) -> None:
    """In one motion: readers see the old file or the new one, never a part."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value, indent=2) + "\n")
    os.replace(part, path)
