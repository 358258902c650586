"""
train.py: the whole method as a story. Act, judge, compare, learn, report.

Concept     Stage 1 (SFT) teaches the policy to speak the format; stage 2 (TAPO) teaches it to look
            where the evidence is. `main` is the table of contents; every verb has its own file.
Paper       CodeV, arXiv:2511.19661, the method and its training
In          the command line, which is the Config below and nothing else (so no annotations as
            strings in this file: the types of its fields make the flags)
Out         a folder with config.json, log.jsonl, summary.json, curves.png, report.html, sft/, rl/
Left out    several GPUs: one process for now; public data sets
Read next   rollout.py, rewards.py, grpo.py: the verbs in their order

    python train.py                              the toy: SFT, TAPO, one table; minutes on 2 cores
    python train.py --reward accuracy            what the paper warns of
    python train.py --resume runs/toy            go on after a crash, to the same end
    python train.py --preset tiny-base --out tiny    make the committed base checkpoint again

Everything random is drawn from (seed, stage, step), never from what happened before: a resumed
run needs no saved generator states to end exactly where the uninterrupted one does.
"""

import argparse
import json
import math
import os
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import torch
from accelerate import Accelerator
from tqdm import tqdm
from transformers.utils.logging import disable_progress_bar

from data import demonstrations, toy_questions
from evaluate import curves, evaluate, load_toy, report, table
from faithfulness import rates
from grpo import ADVANTAGES, LOSS_AVERAGES, Objective, Row, learn, micro_batches, mine, parts
from rewards import REWARDS, BoxJudge, Weights, score, summary
from rollout import Policy, Rules, check_checkpoint, load_policy, play
from sandbox import Limits
from sft import imitate, mean_logp, pretrain_tiny, replay_all, rows_of, shuffled


def knob(default, source: str, help: str, choices: tuple = ()):
    """A field of Config. source: whose number its default is: paper, verl, thyme or ours."""
    text = f"{help} [{source}: {default}]".replace("%", "%%")  # argparse formats it
    return field(default=default, metadata={"help": text, "choices": choices})


# fmt: off
@dataclass(frozen=True)
class Config:
    """Every field is a flag, and what is saved beside each checkpoint. Defaults are those of the
    paper's 7B run where it gives any; the presets below say where the toy differs."""

    preset: str = knob("toy", "ours", "a set of defaults", ("toy", "tiny-base"))
    model: str = knob("tiny", "ours", "checkpoint folder or hub name to start from")
    out: str = knob("runs/toy", "ours", "folder for everything this run writes")
    seed: int = knob(0, "ours", "the same seed on the same machine repeats a CPU run exactly")
    threads: int = knob(0, "ours", "CPU threads of torch; 0: its own choice")
    save_every: int = knob(10, "ours", "steps between two checkpoints to resume from")

    shortcut: float = knob(1.0, "ours", "toy: share of squares that wear their colour's usual "
                           "texture. 1: guessing pays; 0.5: looking pays")

    sft_steps: int = knob(500, "ours", "steps of stage 1; 0: --model is the SFT model already")
    sft_batch: int = knob(128, "thyme", "demonstrations per step")
    sft_lr: float = knob(1e-5, "thyme", "peak learning rate of stage 1")
    sft_demos: int = knob(2500, "ours", "toy: demonstrations in all")

    rl_steps: int = knob(200, "paper", "steps of stage 2")
    questions: int = knob(256, "paper", "questions per step")
    rollouts: int = knob(8, "paper", "K, rollouts per question")
    turns: int = knob(5, "ours", "T, turns of one rollout, in training and in its evaluation")
    temperature: float = knob(1.0, "paper", "of the sampler, and of every log-probability")
    max_new_tokens: int = knob(1024, "ours", "tokens of one turn")
    max_length: int = knob(16384, "ours", "tokens of a whole trajectory")
    max_log_chars: int = knob(2000, "ours", "characters of what one program printed; errors and "
                              "repairs are told in full")

    reward: str = knob("tapo", "paper", "what stage 2 rewards", tuple(REWARDS))
    lambda_acc: float = knob(1.0, "ours", "weight of a right answer, Eq. 5")
    lambda_tool: float = knob(0.2, "ours", "weight of what the tools showed, Eq. 5")
    lambda_fmt: float = knob(0.2, "ours", "weight of the format penalty; 0 gives the printed Eq. 5")
    adv_norm: str = knob("none", "paper", "divide advantages by the group's deviation?",
                         tuple(ADVANTAGES))
    ratio_anchor: str = knob("old", "ours", "denominator of Eq. 3; the paper prints ref",
                             ("old", "ref"))
    loss_agg: str = knob("token", "verl", "average over all tokens, or over each rollout's first",
                         tuple(LOSS_AVERAGES))
    eps: float = knob(0.2, "verl", "clip range of Eq. 4")
    beta: float = knob(1e-3, "verl", "KL weight of Eq. 4; at 0 the reference model is not loaded")
    mask_truncated: bool = knob(False, "ours", "rollouts out of turns or length teach nothing")
    updates: int = knob(1, "verl", "optimiser steps per batch of rollouts")
    rl_lr: float = knob(1e-6, "paper", "learning rate of stage 2")
    max_grad_norm: float = knob(1.0, "verl", "gradient clipping")
    row_tokens: int = knob(8192, "ours", "slots of one row and of one micro-batch: memory")
    activation_checkpointing: bool = knob(True, "ours", "recompute activations: time for memory")

    kv_budget_gb: float = knob(0.0, "ours", "memory for the KV cache of one wave of rollouts; "
                               "0: 80 % of what is free")
    patience: float = knob(1.0, "ours", "seconds until rollouts whose code has run go on without "
                           "the slow ones; a run repeats exactly only if none is ever left behind")
    sandboxes: int = knob(8, "ours", "programs that run at the same time")
    sandbox_seconds: float = knob(10.0, "thyme", "wall-clock limit of one program")
    allow_weak_sandbox: bool = knob(False, "ours", "run model-written code although this system "
                                    "cannot confine it fully")
    eval_questions: int = knob(256, "ours", "toy: questions of the evaluation, and half as many "
                               "more against the prior")
# fmt: on


PRESETS = {
    # ours throughout: measured on the toy, with no claim beyond it
    "toy": dict(
        threads=1, sft_batch=32, sft_lr=4e-3, rl_steps=120, questions=12, turns=3,
        max_new_tokens=32, max_length=1024, max_log_chars=96, rl_lr=7.5e-5,
        kv_budget_gb=1.0, patience=60.0, activation_checkpointing=False,
    ),
    "tiny-base": dict(threads=1, seed=2, out="tiny"),
}  # fmt: skip


def parse_config(argv: list[str] | None = None) -> Config:
    """The command line -> Config, checked before anything is loaded."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--preset", default="toy")
    preset = first.parse_known_args(argv)[0].preset
    parser = argparse.ArgumentParser(
        description="Train with TAPO. Defaults shown are those of the preset; [paper], [verl] and "
        "[thyme] say where the default of the 7B run comes from, [ours] that it is our choice.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--resume", metavar="DIR", default=argparse.SUPPRESS,
        help="continue the run in DIR, with its own config",
    )  # fmt: skip
    for f in fields(Config):
        kind = {"action": argparse.BooleanOptionalAction} if f.type is bool else {"type": f.type}
        if f.metadata["choices"]:
            kind["choices"] = f.metadata["choices"]
        flag = "--" + f.name.replace("_", "-")
        parser.add_argument(flag, default=f.default, help=f.metadata["help"], **kind)
    parser.set_defaults(**PRESETS.get(preset, {}))
    values = vars(parser.parse_args(argv))
    resume = values.pop("resume", None)
    if resume and len(sys.argv[1:] if argv is None else argv) > 2:
        parser.error("--resume goes alone: a run continues with its own config")
    try:
        config = read_config(Path(resume)) if resume else Config(**values)
        check(config)
        if config.preset != "tiny-base" and not resume:
            check_checkpoint(config.model)
        if not resume and (Path(config.out) / "state.json").exists():
            raise ValueError(
                f"{config.out} holds a run already: continue it with --resume {config.out}, or "
                f"give this one another --out"
            )
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))
    return config


def read_config(folder: Path) -> Config:
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"nothing to resume in {folder}: it has no config.json")
    try:
        return replace(Config(**json.loads(path.read_text())), out=str(folder))
    except TypeError as error:
        raise ValueError(f"{path} is not the config of a run of this version: {error}") from error


def check(config: Config) -> None:
    """What can be refused before a model loads is refused here."""
    least = dict(sft_steps=0, rl_steps=0, questions=1, turns=1, max_new_tokens=1, sft_batch=1,
                 sft_demos=1, save_every=1, sandboxes=1, row_tokens=1, updates=1, eval_questions=4,
                 threads=0, beta=0, eps=0, sandbox_seconds=0.1, sft_lr=1e-12, rl_lr=1e-12,
                 max_grad_norm=1e-12, lambda_acc=1e-12, lambda_fmt=0, kv_budget_gb=0, patience=0,
                 max_log_chars=0)  # fmt: skip
    for f in fields(config):
        if f.type is float and not math.isfinite(getattr(config, f.name)):
            raise ValueError(f"--{f.name.replace('_', '-')} must be a finite number")
    for name, low in least.items():
        if getattr(config, name) < low:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} must be at least {low}, got {getattr(config, name)}")
    if config.rollouts < 2:
        raise ValueError(
            f"--rollouts must be at least 2, got {config.rollouts}: a rollout is compared with "
            f"the others of its group, and alone its advantage is always 0"
        )
    if config.temperature <= 0:
        raise ValueError(
            f"--temperature must be above 0 for training, got {config.temperature}: greedy "
            f"rollouts of one question are all the same"
        )
    if not 0 <= config.shortcut <= 1:
        raise ValueError(f"--shortcut is a share between 0 and 1, got {config.shortcut}")
    if config.max_new_tokens >= config.max_length:
        raise ValueError(
            f"--max-new-tokens {config.max_new_tokens} leaves no room for a prompt in "
            f"--max-length {config.max_length}"
        )
    weights(config)


def weights(config: Config) -> Weights:
    return Weights(config.lambda_acc, config.lambda_tool, config.lambda_fmt)


def rules(config: Config) -> Rules:
    return Rules(limits=Limits(seconds=config.sandbox_seconds), **shared_fields(config, Rules))


def objective(config: Config) -> Objective:
    return Objective(**shared_fields(config, Objective))


def shared_fields(config: Config, kind: type) -> dict:
    """The fields that Config and another dataclass have in common, by name."""
    names = {f.name for f in fields(kind)} & {f.name for f in fields(Config)}
    return {name: getattr(config, name) for name in names}


class Run:
    """The folder of a run: its log, its clock, its newest checkpoint.

    state.json is the truth. It names the checkpoint to go on from, and is replaced in one motion
    once that checkpoint is whole, so that a kill at any moment loses at most the steps since.
    """

    def __init__(self, config: Config) -> None:
        self.folder, self.skipped, self.lap = Path(config.out), 0, {}
        self.state = {"stage": "sft", "step": 0, "checkpoint": None, "log_bytes": 0,
                      "seconds": {}, "stages": {}}  # fmt: skip
        if (self.folder / "state.json").is_file():
            self.state = json.loads((self.folder / "state.json").read_text())
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / "config.json", asdict(config))
        # A log may run ahead of its checkpoint: those steps will be done, and logged, again.
        self.log_file = open(self.folder / "log.jsonl", "ab")
        if self.log_file.tell() < self.state["log_bytes"]:
            raise SystemExit(
                f"{self.folder}/log.jsonl has {self.log_file.tell()} bytes, but state.json counts "
                f"on {self.state['log_bytes']}: put the log back, or start a new run"
            )
        self.log_file.truncate(self.state["log_bytes"])

    def log(self, line: dict) -> None:
        """One line of log.jsonl. Nothing in it differs between two equal runs: the seconds of the
        step go to times.jsonl. Three skipped steps in a row end the run."""
        rounded = {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in line.items()}
        self.log_file.write(json.dumps(rounded).encode() + b"\n")
        self.log_file.flush()
        # (times.jsonl is not cut on resume: what was done twice stands there twice.)
        with open(self.folder / "times.jsonl", "a") as file:
            print(json.dumps({k: line[k] for k in ("stage", "step")} | self.lap), file=file)
        self.lap = {}
        self.skipped = self.skipped + 1 if line["grad_norm"] is None else 0
        if self.skipped == 3:
            raise SystemExit(
                f"stopped at {line['stage']} step {line['step']}: three steps in a row had no "
                f"finite loss or gradient and were skipped. Start a new run "
                f"with a lower learning rate, from the last good stage in {self.folder}."
            )

    def log_lines(self, stage: str) -> list[dict]:
        lines = map(json.loads, (self.folder / "log.jsonl").read_text().splitlines())
        return [line for line in lines if line["stage"] == stage]

    @contextmanager
    def clock(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.spent({name: time.perf_counter() - began})

    def spent(self, seconds: dict[str, float]) -> None:
        for sums in (self.state["seconds"], self.lap):
            sums |= {name: round(sums.get(name, 0.0) + s, 3) for name, s in seconds.items()}

    def open(self, config: Config, start: str | Path, lr: float, betas: tuple, device):
        """(policy, optimizer) of this stage: from its checkpoint, or from `start` if it is new."""
        checkpoint = self.state["checkpoint"]
        policy = load_policy(self.folder / checkpoint if checkpoint else start, device)
        if config.activation_checkpointing:
            policy.model.activation_checkpointing_enable()
        optimizer = torch.optim.AdamW(policy.model.parameters(), lr, betas, weight_decay=0.0)
        if checkpoint:
            saved = torch.load(self.folder / checkpoint / "optimizer.pt", weights_only=True)
            optimizer.load_state_dict(saved)
        return policy, optimizer

    def steps_left(self, steps: int) -> range:
        """Of stage 2; none once it is over."""
        return range(self.state["step"] if self.state["stage"] == "rl" else steps, steps)

    def save(self, policy: Policy, optimizer: torch.optim.Optimizer, step: int) -> None:
        name = f"checkpoint-{self.state['stage']}-{step}"
        shutil.rmtree(self.folder / name, ignore_errors=True)  # a half-written one, from a kill
        policy.save(self.folder / name)
        torch.save(optimizer.state_dict(), self.folder / name / "optimizer.pt")
        self.update(step=step, checkpoint=name)

    def update(self, **changes) -> None:
        """Replace state.json; checkpoints that it no longer names are then deleted."""
        self.state |= {"log_bytes": self.log_file.tell()} | changes
        write_json(self.folder / "state.json", self.state)
        for folder in self.folder.glob("checkpoint-*"):
            if folder.name != self.state["checkpoint"]:
                shutil.rmtree(folder)

    def end_stage(self, policy: Policy, metrics: dict, following: str) -> None:
        """Export the stage's policy and go on to the next stage, with a fresh optimiser."""
        stage, self.lap = self.state["stage"], {}
        policy.save(self.folder / stage)
        self.state["stages"][stage] = metrics
        self.update(stage=following, step=0, checkpoint=None)


def write_json(path: Path, value: dict) -> None:
    """In one motion: readers see the old file or the new one, never a part."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value, indent=2) + "\n")
    os.replace(part, path)


def measure_policy(run: Run, config: Config, policy: Policy, out: Path | None = None) -> dict:
    """The toy's yardstick: the same questions and the same sampling seed for every run. At
    temperature 1 shares mirror the policy; greedy decoding shows only its likeliest routes."""
    with run.clock("evaluation"):
        questions = load_toy(config.eval_questions, shortcut=config.shortcut)
        yardstick = replace(rules(config), temperature=1.0)
        return evaluate(policy, questions, BoxJudge(), rules=yardstick, out=out)[0]


def stage_1(run: Run, config: Config, device: torch.device) -> None:
    """SFT: imitate demonstrations, the mean log-probability of their acted tokens."""
    policy, optimizer = run.open(config, config.model, config.sft_lr, (0.9, 0.98), device)
    if config.sft_steps:
        with run.clock("demonstrations"):
            demos = demonstrations(config.sft_demos + 100, config.seed)
            played = replay_all(policy, demos, rules(config))
            bar = tqdm(played, desc="playing demonstrations", total=len(demos), mininterval=5)
            whole = [t for t in bar if t.ended == "answered"]  # others do not fit: never cut
            if len(whole) < len(demos):
                print(f"{len(demos) - len(whole)} of {len(demos)} demonstrations are too long")
            rows = rows_of(policy, whole)
            rows, held_out = rows[:-100], rows[-100:]
            order = shuffled(len(rows), config.sft_batch, config.seed)

    def packed(rows: list[Row]) -> list[list[Row]]:  # the micro-batches of this process
        split = parts(mine(rows))
        return [batch for part in split for batch in micro_batches(part, config.row_tokens)]

    def rate(i: int) -> float:  # ten steps of warm-up, then down to 2 %
        left = 1 - 0.98 * (i + 1) / config.sft_steps
        return config.sft_lr * min(1.0, (i + 1) / 10) * left

    def after(i: int, loss: float, grad_norm: float | None) -> None:
        line = {"stage": "sft", "step": i + 1, "loss": loss, "grad_norm": grad_norm}
        if (i + 1) % 50 == 0:
            line["held_out"] = -mean_logp(policy, packed(held_out), learn=False)
        run.log(line)
        if (i + 1) % config.save_every == 0:
            run.save(policy, optimizer, i + 1)

    with run.clock("sft"):
        imitate(
            policy, optimizer, lambda i: packed([rows[k] for k in order(i)]), config.sft_steps,
            rate, start=run.state["step"], after=after,
        )  # fmt: skip
    run.end_stage(policy, measure_policy(run, config, policy), following="rl")


def report_step(run, config, step, groups, rewards, learnt, tally, seconds) -> None:
    """One line of the log and one on the screen; every name is in the README's glossary."""
    judged = rewards  # what training does not pay for is measured all the same
    if config.reward != "tapo":
        judged = score(groups, "tapo", BoxJudge(), weights(config), random.Random(0))
    played, flat = ([x for group in nested for x in group] for nested in (groups, judged))
    seen = rates(played, flat)
    line = {"stage": "rl", "step": step} | summary(groups, rewards) | learnt
    line["useful_calls"] = sum((s or 0) > 0 for r in flat for s in r.steps) / len(flat)
    line |= {name: seen[name] for name in ("tool_use", "faithful", "crop_area", "error_rate")}
    line |= {name: n for name, n in tally.items() if not name.endswith("_seconds")}
    shown = ("answer", "tools", "tool_use", "faithful", "calls", "kl", "grad_norm")
    words = [f"{name} {line[name]:.3f}" for name in shown if line[name] is not None]
    print(f"step {step:>4}", *words, f"{seconds:.1f} s", sep="  ", flush=True)
    run.spent({k.removesuffix("_seconds"): v for k, v in tally.items() if k.endswith("_seconds")})
    run.log(line)


def report_run(run: Run, config: Config) -> None:
    """One table, one page, two figures; the numbers are in summary.json."""
    stages, seconds = run.state["stages"], run.state["seconds"]
    write_json(run.folder / "summary.json",
               {"config": asdict(config), "seconds": seconds, "stages": stages})  # fmt: skip
    names = {"sft": "SFT", "rl": "TAPO" if config.reward == "tapo" else config.reward}
    columns = {names[stage]: metrics for stage, metrics in stages.items()}
    curves(run.log_lines("rl"), run.folder / "curves.png")
    page = report(run.folder, columns)
    print(f"\n{table(columns)}\n\n{page}\n{run.folder / 'summary.json'}")


def main() -> None:
    config = parse_config()
    disable_progress_bar()  # of transformers, which would show one for every small checkpoint
    torch.set_num_threads(config.threads or torch.get_num_threads())
    if config.preset == "tiny-base":
        return pretrain_tiny(config.seed, config.row_tokens, print).save(config.out)
    accelerator = Accelerator()
    if accelerator.num_processes > 1:
        raise SystemExit("one process, please: training on several is not here yet")
    device = accelerator.device
    run = Run(config)

    # Stage 1, SFT. Speak the format.                                         sft.py
    if run.state["stage"] == "sft":
        stage_1(run, config, device)

    # Stage 2, TAPO. Look where the evidence is.
    sft = run.folder / "sft"
    policy, optimizer = run.open(config, sft, config.rl_lr, (0.9, 0.95), device)
    compared = config.beta > 0 or config.ratio_anchor == "ref"
    reference = load_policy(sft, device) if compared else None

    for step in run.steps_left(config.rl_steps):
        began, tally, key = time.perf_counter(), Counter(), f"{config.seed}-{step}"
        torch.manual_seed(random.Random(f"sampling {key}").getrandbits(63))
        questions = toy_questions(config.questions, key, config.shortcut)

        # 1. Act. K rollouts of every question, tool calls and all.           rollout.py, Eq. 2
        with run.clock("act"):
            groups = play(policy, questions, config.rollouts, rules(config), tally)

        # 2. Judge. Was it right, and did the tools show the evidence?        rewards.py, Eqs. 5, 6
        with run.clock("judge"):
            rng = random.Random(f"reward {key}")
            rewards = score(groups, config.reward, BoxJudge(), weights(config), rng)

        # 3. Compare. Each rollout against the others of its own question.    grpo.py
        total = torch.tensor([[r.total or 0.0 for r in group] for group in rewards])  # [G, K]
        verdict = torch.tensor([[r.total is not None for r in group] for group in rewards])
        advantage = ADVANTAGES[config.adv_norm](total, verdict)  # [G, K]

        # 4. Learn. One clipped step towards the better rollouts.             grpo.py, Eqs. 1, 3, 4
        for group in optimizer.param_groups:
            group["lr"] = config.rl_lr * min(1.0, (step + 1) / 5)
        with run.clock("learn"):
            learnt = learn(policy, optimizer, groups, advantage, reference, objective(config))

        # 5. Report. Where did it look, and what did it cost?                 faithfulness.py
        seconds = time.perf_counter() - began
        report_step(run, config, step + 1, groups, rewards, learnt, tally, seconds)
        if (step + 1) % config.save_every == 0:
            run.save(policy, optimizer, step + 1)

    if run.state["stage"] == "rl":
        metrics = measure_policy(run, config, policy, out=run.folder)
        run.end_stage(policy, metrics, following="done")
    report_run(run, config)


if __name__ == "__main__":
    main()
