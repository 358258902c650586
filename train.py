"""
train.py: the whole method as a story. Act, judge, compare, learn, report.

Concept     Stage 1 (SFT) teaches the policy to speak the format; stage 2 (TAPO) teaches it to look
            where the evidence is. `main` is the table of contents; every verb has its own file.
Paper       CodeV, arXiv:2511.19661, the method and its training
In          the command line, which is the Config below and nothing else
Out         a folder with config.json, log.jsonl, summary.json, curves.png, report.html, sft/, rl/
Left out    generation by another engine than transformers; several judges
Read next   rollout.py, rewards.py, grpo.py: the verbs in their order

    python train.py                              the toy: SFT, TAPO, one table; minutes on 2 cores
    python train.py --reward accuracy            pay for right answers alone: the paper's warning
    python train.py --resume runs/toy            go on after a crash, to the same end
    python train.py --preset tiny-base --out tiny    make the committed base checkpoint again
    python train.py --preset codev-7b --plan 8x80    would it fit on 8 GPUs of 80 GB?
    accelerate launch train.py --preset codev-7b --judge-url http://host:8000/v1    the real thing

Everything random is drawn from (seed, stage, step, question), never from what happened before or
on which process: a resumed run needs no saved generator states to end exactly where the
uninterrupted one does, and two processes play the same games as one.
"""

from __future__ import annotations

import copy
import gc
import importlib
import importlib.util
import json
import math
import os
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from functools import partial, partialmethod
from pathlib import Path
from types import SimpleNamespace

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from tqdm import tqdm
from transformers.utils.logging import disable_progress_bar

from data import Sample, demonstrations, load_rl, toy_questions
from evaluate import curves, evaluate, lines, load_toy, table
from faithfulness import rates
from grpo import ADVANTAGES, LOSS_AVERAGES, LogProbs, Objective, Row, learn, micro_batches
from kit.flags import knob, parse, refusals, through_door
from kit.folder import Run, can_be_made, read_config, write_json
from kit.page import report
from kit.processes import actor_of, gathered, merged, mine, parts, processes, shard, sync
from kit.qwen import Policy, check_checkpoint, freeze_vision
from kit.records import Unusable
from kit.tables import read_rows
from rewards import (
    BoxJudge,
    ChatJudge,
    Judge,
    Lambdas,
    Reward,
    VerdictWatch,
    reward_named,
    score,
    summary,
)
from rollout import Rules, Trajectory, check_fits, encode_prompt, load_policy, play
from sandbox import Limits
from sft import TRAIN_ROUNDS, imitate, load_thyme, mean_logp, replay_all, rows_of, shuffled


paper, notes, verl, thyme, ours = (
    partial(knob, source=name) for name in ("paper", "notes", "verl", "thyme", "ours")
)


@dataclass(frozen=True)
class Config:
    """Every field is a flag, and what is saved beside each run. Its name says where the default of
    the paper's 7B run comes from: the paper, notes by others on it, verl (a library for RL), Thyme
    (its SFT data and code) or us. The presets below say where the toy differs."""

    preset: str = ours("toy", "a set of defaults", choices=("toy", "codev-7b", "tiny-base"))
    model: str = ours("tiny", "checkpoint folder or hub name to start from")
    out: str = ours("runs/toy", "folder for everything this run writes")
    seed: int = ours(0, "the same seed on the same machine repeats a CPU run exactly")
    threads: int = ours(0, "CPU threads of torch; 0: torch chooses", least=0)
    save_every: int = ours(10, "steps between two checkpoints to resume from", least=1)
    keep: int = ours(1, "newest checkpoints that are kept, beside the best", least=1)
    timeout: float = ours(1800.0, "seconds to wait for a process that does not come", least=1)
    tracker: str = ours(
        "none", "also send the log to this", choices=("none", "tensorboard", "wandb", "trackio")
    )
    transcript_every: int = ours(10, "steps between two episodes written out as text", least=1)

    sft_data: str = ours("", "demonstrations like Thyme-SFT's: file, folder or hub name; else toy")
    rl_data: str = ours("", "questions: a file, folder or hub name; empty: the toy's")
    on_bad: str = ours("skip", "a row that cannot be used", choices=("skip", "stop"))
    max_pixels: int = thyme(3_211_264, "pixels of an image (RL: ours); 0: the model's own", least=0)
    judge_url: str = ours("", "OpenAI-compatible server of the judge; its key: JUDGE_API_KEY")
    judge_model: str = notes("Qwen/Qwen2.5-VL-32B-Instruct", "the judge's name there")
    shortcut: float = ours(1.0, "toy: squares with their usual texture; 1: all", least=0, most=1)

    sft_steps: int = ours(-1, "steps of SFT; -1: --sft-epochs; 0: --model has had it", least=-1)
    sft_epochs: float = paper(3.0, "passes over --sft-data", above=0)
    sft_batch: int = thyme(128, "demonstrations per step", least=1)
    sft_lr: float = thyme(1e-5, "peak learning rate of stage 1", above=0)
    sft_warmup: float = thyme(0.05, "share of stage 1 in which the learning rate rises", least=0)
    sft_demos: int = ours(2500, "toy: demonstrations in all", least=1)
    train_rounds: str = thyme("last_code_and_answer", "turns to learn from", choices=TRAIN_ROUNDS)
    freeze_vision: str = thyme(
        "sft", "where the vision tower keeps its weights", choices=("none", "sft", "rl", "both")
    )

    rl_steps: int = paper(200, "steps of stage 2", least=0)
    questions: int = paper(256, "questions per step, those of all processes together", least=1)
    rollouts: int = paper(8, "K, rollouts per question, to compare with each other", least=2)
    turns: int = ours(5, "T, turns of one rollout, in training and in its evaluation", least=1)
    temperature: float = paper(1.0, "of the sampler, and of every log-probability", above=0)
    max_new_tokens: int = ours(1024, "tokens of one turn", least=1)
    max_length: int = thyme(10240, "tokens of a whole trajectory (in RL: ours)")
    max_log_chars: int = ours(2000, "characters of a program's output; errors stay whole", least=0)

    reward: str = paper(
        "tapo",
        "tapo, accuracy, tool_bonus, random, a rival (beyond/rivals.py) or my_file.my_reward",
    )
    lambda_acc: float = ours(1.0, "weight of a right answer, Eq. 5", above=0)
    lambda_tool: float = ours(0.2, "weight of what the tools showed, Eq. 5")
    lambda_fmt: float = ours(0.2, "weight of the format; 0 gives the printed Eq. 5", least=0)
    adv_norm: str = paper("none", "divide by the group's deviation?", choices=ADVANTAGES)
    ratio_anchor: str = ours("old", "denominator of Eq. 3; notes have ref", choices=("old", "ref"))
    loss_agg: str = verl("token", "a mean over all tokens, or by rollout", choices=LOSS_AVERAGES)
    eps: float = verl(0.2, "clip range of Eq. 4", least=0)
    beta: float = verl(1e-3, "KL weight of Eq. 4; at 0 no reference model is loaded", least=0)
    mask_truncated: bool = ours(False, "a deviation: cut-off rollouts teach nothing")
    updates: int = verl(1, "optimiser steps per batch of rollouts", least=1)
    rl_lr: float = paper(1e-6, "learning rate of stage 2", above=0)
    max_grad_norm: float = verl(1.0, "gradient clipping", above=0)
    row_tokens: int = ours(8192, "most tokens in a row or micro-batch: sets memory", least=1)
    activation_checkpointing: bool = ours(True, "recompute activations: time for memory")

    kv_budget_gb: float = ours(0.0, "GB for the KV cache; 0: 80 % of what is free", least=0)
    patience: float = ours(
        1.0, "seconds until rollouts go on without slow code; runs repeat if none is left", least=0
    )
    sandboxes: int = ours(8, "programs that run at the same time, per process", least=1)
    sandbox_seconds: float = thyme(10.0, "wall-clock limit of one program", least=0.1)
    allow_weak_sandbox: bool = ours(False, "run code that this system cannot fully confine")
    eval_every: int = ours(0, "steps between evaluations of every 4th question; 0: none", least=0)
    eval_questions: int = ours(
        512, "of --rl-data: held out, a tenth at most; toy: and half as many out-of-prior", least=4
    )


DOORS = {"--plan": "beyond.plan"}
PRESETS = {
    # all ours: measured on the toy, with no claim beyond it
    "toy": dict(
        threads=1, max_pixels=0, freeze_vision="none", sft_steps=320, sft_batch=32, sft_lr=4e-3,
        sft_warmup=0.03, rl_steps=60, questions=12, turns=3, max_new_tokens=32, max_length=1024,
        max_log_chars=96, rl_lr=1.5e-4, beta=0.02, kv_budget_gb=1.0, patience=60.0,
        activation_checkpointing=False,
    ),
    # the paper's run: all else is as above, where each default has its source
    "codev-7b": dict(
        model="Qwen/Qwen2.5-VL-7B-Instruct", out="runs/codev-7b", sft_data="Kwai-Keye/Thyme-SFT",
        rl_data="RenlyH/CodeV-RL-Data", save_every=20, keep=2,
    ),
    "tiny-base": dict(threads=1, seed=2, out="tiny"),
}  # fmt: skip


@dataclass(frozen=True)
class Command(Config):
    """Train with TAPO. Defaults shown are those of the preset; [paper], [notes] (on it), [verl] and
    [thyme] say where the default of the 7B run comes from, [ours] that it is our choice."""

    resume: str | None = knob(
        None,
        "go on with the run in DIR, by its own config, on any number of processes",
        metavar="DIR",
    )


def parse_config(argv: list[str]) -> Config:
    """The command line -> Config, checked before anything is loaded."""
    if through_door(argv, DOORS):
        sys.exit()
    command = parse(Command, argv, DOORS, PRESETS)
    with refusals():
        if command.resume is not None:
            if len(argv) > 1 + ("--resume" in argv):  # --resume=DIR is one word
                raise ValueError("--resume goes alone: a run continues with its own config")
            config = read_config(Path(command.resume), Config)
            check(config)
            return config
        config = shared(command, Config)
        check(config)
        if config.preset != "tiny-base":
            check_checkpoint(config.model)
            check_data(config)
        can_be_made(Path(config.out))
    return config


def check(config: Config) -> None:
    """What can be refused before a model loads is refused here."""
    if config.max_new_tokens >= config.max_length:
        raise ValueError(f"--max-new-tokens {config.max_new_tokens} leaves no room for a prompt in "
                         f"--max-length {config.max_length}")  # fmt: skip
    if (tracker := config.tracker) != "none" and importlib.util.find_spec(tracker) is None:
        raise ValueError(f"--tracker {tracker} needs a package: pip install {tracker}")
    lambdas(config)
    reward_named(config.reward)


def check_data(config: Config) -> None:
    """Data of one's own need what the toy brings along: questions, a judge, a number of steps."""
    if config.preset == "codev-7b" and config.rl_steps and not config.rl_data:
        raise ValueError("--preset codev-7b wants questions: --rl-data, a file, folder or hub name")
    if config.rl_data and config.rl_steps and not config.judge_url:
        raise ValueError("--rl-data has no boxes to judge by: give --judge-url, the address of a "
                         "served vision-language model such as http://host:8000/v1")  # fmt: skip
    if config.sft_steps < 0 and not config.sft_data:
        raise ValueError("--sft-steps -1 counts passes over --sft-data: give that, or a number")
    if config.judge_url:
        ChatJudge(config.judge_url, config.judge_model)  # so that a wrong address is found now,
    if config.sft_data and config.sft_steps:
        read_rows(config.sft_data)  # and a wrong name, not when its stage begins
    if config.rl_data and config.rl_steps:
        n = len(read_rows(config.rl_data))
        if n - (held := held_back(config, n)) < config.questions:
            raise ValueError(f"{config.rl_data} has {n} rows, {held} of them held out, for "
                             f"--questions {config.questions} a step: give more rows or lower "
                             f"--questions")  # fmt: skip


def held_back(config: Config, n: int) -> int:
    """How many of n questions of --rl-data are kept for the evaluation."""
    return min(config.eval_questions, max(1, n // 10))


def lambdas(config: Config) -> Lambdas:
    return Lambdas(config.lambda_acc, config.lambda_tool, config.lambda_fmt)


def rules(config: Config) -> Rules:
    return shared(config, Rules, limits=Limits(seconds=config.sandbox_seconds))


def objective(config: Config) -> Objective:
    return shared(config, Objective)


def compared(config: Config) -> bool:
    return config.beta > 0 or config.ratio_anchor == "ref"  # else no reference model is needed


def shared(config: Config, kind: type, **others):
    """A `kind`, whose fields are those of Config with the same names, and `others`."""
    names = {f.name for f in fields(kind)} & {f.name for f in fields(Config)}
    return kind(**{name: getattr(config, name) for name in names}, **others)


# Questions, and who judges


@dataclass
class World:
    questions: Callable[[int], list[Sample]]  # this process's share of a step's questions
    measured: Sequence[Sample]  # those of the evaluation
    judge: Judge
    examiner: Judge  # the judge of the evaluation; a served one is given another prompt


def toy_world(config: Config) -> World:
    def questions(step: int) -> list[Sample]:
        return mine(toy_questions(config.questions, f"{config.seed}-{step}", config.shortcut))

    measured = load_toy(config.eval_questions, shortcut=config.shortcut)
    return World(questions, measured, BoxJudge(), BoxJudge())


def data_world(config: Config, policy: Policy, folder: Path) -> World:
    """--rl-data: a few questions held out for the evaluation, epochs over the others."""

    def fits(sample: Sample) -> None:
        check_fits(policy, sample, encode_prompt(policy, sample, pixels=False), rules(config))

    fits_key = policy.version(), config.max_length, config.max_new_tokens
    data = load_rl(config.rl_data, config.on_bad, fits, fits_key)
    tell_skipped(data, data.skipped, folder / "skipped-rl.jsonl")
    held = held_back(config, len(data))
    everything = shuffled(len(data), len(data), f"held out {config.seed}")(0)
    own, measured = everything[held:], [data[i] for i in everything[:held]]
    if len(own) < config.questions:
        raise SystemExit(
            f"--questions {config.questions} a step, but {config.rl_data} has {len(data)} usable "
            f"ones, {held} of them held out: lower --questions or --eval-questions"
        )
    order = shuffled(len(own), config.questions, config.seed)

    def questions(step: int) -> list[Sample]:
        return [data[own[i]] for i in mine(order(step))]

    asked = dict(url=config.judge_url, model=config.judge_model, cache=folder / "judge")
    return World(questions, measured, ChatJudge(**asked), ChatJudge(**asked, prompt="evaluation"))


def opened(
    run: Run, config: Config, stage: str, start: str | Path, lr: float, betas: tuple, device
) -> tuple[Policy, Policy, torch.optim.Optimizer]:
    """(policy, actor, optimizer) of a stage: from its checkpoint, or from `start` if it is new.
    The policy learns, in fp32, cut over all processes; the actor, a whole copy, plays."""
    gc.collect()  # frees the last stage's policy, whose hooks refer to each other
    with run.phase("load"):
        policy = load_policy(start, device, config.max_pixels or None)
        if config.freeze_vision in (stage, "both"):
            freeze_vision(policy)
        actor = actor_of(policy)
        if config.activation_checkpointing:
            policy.model.activation_checkpointing_enable()
        shard(policy, LogProbs(policy))
        learnt = [p for p in policy.model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(learnt, lr, betas, weight_decay=0.0)
        if run.state["checkpoint"]:
            run.restore(policy, optimizer, run.state["checkpoint"])
        sync(policy, actor)
    return policy, actor, optimizer


def world_of(config: Config, policy: Policy, folder: Path) -> World:
    """With --rl-data this reads through all rows, to find those that cannot be used."""
    return data_world(config, policy, folder) if config.rl_data else toy_world(config)


def check_prompts(config: Config, policy: Policy, samples: Sequence[Sample]) -> None:
    """The first stands for all: the toy's are alike, and data_world has checked those of files."""
    try:
        prompt = encode_prompt(policy, samples[0], pixels=False)
        check_fits(policy, samples[0], prompt, rules(config))
    except ValueError as error:
        raise SystemExit(str(error)) from error


def tell_skipped(usable: Sequence, skipped: list, path: Path) -> None:
    """Print loaded + skipped = total; the file gets the reason for each skipped row."""
    total = len(usable) + len(skipped)
    print(f"{len(usable)} of {total} rows loaded, {len(skipped)} skipped ({path.name})")
    if processes()[0] == 0:
        lines = [json.dumps(row._asdict(), ensure_ascii=False) + "\n" for row in skipped]
        path.write_text("".join(lines))


def measure_policy(
    run: Run, config: Config, world: World, actor: Policy, out: Path | None = None, every: int = 1
) -> dict:
    """Metrics on the same questions with the same sampling seed in every run; on the toy at
    temperature 1, where shares mirror the policy: greedy play shows only its likeliest ways.

    out: the folder of a stage's episodes; those that it holds of this policy are not played again.
    every: without `out`, amid training, one question of so many."""
    with run.phase("evaluation"):
        several = {}
        yardstick = replace(rules(config), temperature=0.0 if config.rl_data else 1.0)
        if run.n > 1 and out:  # each process plays its part of the questions
            several = dict(wave=math.ceil(len(world.measured) / run.n))
        elif not run.first:
            return {}
        how = dict(rules=yardstick, out=out) | several
        samples, judge = world.measured[::every], world.examiner
        try:
            return evaluate(actor, samples, judge, **how)[0]
        except Unusable as error:  # as steps were done again, or by another number of processes
            print(f"{error}\nThey are played again.")
            gathered(0)  # all have read
            for file in out.glob("trajectories*.jsonl") if run.first else ():
                file.unlink()
            gathered(0)
            return evaluate(actor, samples, judge, **how)[0]


# The two stages


def demonstration_rows(
    run: Run, config: Config, policy: Policy
) -> tuple[Sequence[Row], Sequence[Row]]:
    """(the demonstrations to learn from, this process's share of those that are only measured)"""
    if config.sft_data:
        how = config.train_rounds, rules(config), config.on_bad
        demos, skipped = load_thyme(policy, config.sft_data, *how)
        tell_skipped(demos, skipped, run.folder / "skipped-sft.jsonl")
        if not len(demos):
            raise SystemExit(f"0 of {len(skipped)} demonstrations of {config.sft_data} can be "
                             f"used, see {run.folder / 'skipped-sft.jsonl'}")  # fmt: skip
        held = min(100, len(demos) // 10)
    else:
        scripts, held = demonstrations(config.sft_demos + 100, config.seed), 100
        played = replay_all(policy, scripts, rules(config))
        bar = tqdm(played, "playing demonstrations", len(scripts), mininterval=5)
        demos = [t for t in bar if t.ended == "answered"]  # others are too long: left out, not cut
        if len(demos) < len(scripts):
            print(f"{len(scripts) - len(demos)} of {len(scripts)} demonstrations are too long")
    rows = rows_of(policy, demos)
    if (n := len(rows) - held) < 1:
        raise SystemExit(f"{len(rows)} usable demonstrations less {held} held out leave none to "
                         f"learn from: raise --max-length, or see the rows skipped")  # fmt: skip
    return rows[:n], list(mine(rows[n:]))


def stage_1(run: Run, config: Config, device: torch.device) -> World:
    """SFT: imitate demonstrations, the mean log-probability of their acted tokens."""
    start, betas = config.model, (0.9, 0.98)
    policy, actor, optimizer = opened(run, config, "sft", start, config.sft_lr, betas, device)
    world = world_of(config, policy, run.folder)
    check_prompts(config, policy, world.measured)  # before hours of imitation
    steps = config.sft_steps
    if steps:
        with run.phase("demonstrations"):
            rows, held_out = demonstration_rows(run, config, policy)
        batch = min(config.sft_batch, len(rows))
        order = shuffled(len(rows), batch, config.seed)
        steps = math.ceil(config.sft_epochs * len(rows) / batch) if steps < 0 else steps

    def batched(rows: list[Row]) -> list[list[Row]]:
        return [b for part in parts(rows) for b in micro_batches(part, config.row_tokens)]

    def batches_of(i: int) -> list[list[Row]]:
        return batched([rows[k] for k in mine(order(i))])

    def rate(i: int) -> float:  # the learning rate: up to its peak, then down to 2 % of it
        left = 1 - 0.98 * (i + 1) / steps
        return config.sft_lr * min(1.0, (i + 1) / max(1, round(config.sft_warmup * steps))) * left

    def after(i: int, loss: float, grad_norm: float | None) -> None:
        line = {"stage": "sft", "step": i + 1, "loss": loss, "grad_norm": grad_norm}
        if (i + 1) % 50 == 0 and sum(gathered(len(held_out))):
            line["held_out"] = -mean_logp(policy, batched(held_out), learn=False)
        run.log(line)
        run.check_weights(policy)
        if (i + 1) % config.save_every == 0:
            run.save(policy, optimizer, i + 1)

    with run.phase("sft"):
        imitate(policy, optimizer, batches_of, range(run.state["step"], steps), rate, after)
    sync(policy, actor)
    metrics = measure_policy(run, config, world, actor, out=run.folder / "sft-episodes")
    run.end_stage(actor, metrics, following="rl")
    return world


def reference_of(config: Config, sft: Path, device: torch.device) -> Policy | None:
    """pi_ref of Eqs. 1, 3 and 4: the SFT model, if anything is compared with it."""
    if not compared(config):
        return None
    reference = load_policy(sft, device, config.max_pixels or None)
    shard(reference, LogProbs(reference))
    return reference


def report_step(run, config, world, step, groups, rewards, learnt, tally, seconds) -> None:
    """One line of the log and one on the screen; every name is in the README's glossary."""
    run.spent({k.removesuffix("_seconds"): v for k, v in tally.items() if k.endswith("_seconds")})
    counts = Counter({k: v for k, v in tally.items() if not k.endswith("_seconds")})
    judged = rewards  # faithfulness is measured by tapo's step scores, whatever is paid for
    if config.reward != "tapo":
        judged = score(groups, "tapo", world.judge, lambdas(config), random.Random(0))
    if run.n > 1:
        own = ([[light(t) for t in group] for group in groups], rewards, judged)
        groups, rewards, judged = (merged(gathered(x)) for x in own)
        counts = sum(gathered(counts), Counter())
    played, flat = ([x for group in nested for x in group] for nested in (groups, judged))
    seen = rates(played, flat)
    line = {"stage": "rl", "step": step} | summary(groups, rewards) | learnt
    line["useful_calls"] = sum((s or 0) > 0 for r in flat for s in r.scores) / len(flat)
    line |= {name: seen[name] for name in ("tool_use", "faithful", "crop_area", "error_rate")}
    line |= counts
    shown = ("reward", "answer", "tools", "tool_use", "faithful", "calls", "kl", "grad_norm")
    words = [f"{name} {line[name]:6.3f}" if line[name] is not None else f"{name}      -"
             for name in shown]  # fmt: skip
    tqdm.write("  ".join([f"step {step:>4}", *words, f"{seconds:6.1f} s"]))
    run.log(line)
    if run.first and step % config.transcript_every == 0:
        folder = run.folder / "transcripts"
        folder.mkdir(exist_ok=True)
        (folder / f"step-{step:05}.txt").write_text(transcript(groups[0][0], rewards[0][0]))


def transcript(trajectory: Trajectory, reward: Reward) -> str:
    """One episode as text. Of each picture it has the size, and where it was cut out."""
    sample = trajectory.sample
    lines = [f"{sample.id}, {sample.kind}, {sample.image.width} x {sample.image.height} pixels",
             sample.question, *sample.options]  # fmt: skip
    for step in trajectory.turns:
        lines += ["", "--- policy", step.text]
        if step.observation is not None:
            seen = step.observation
            lines += ["", "--- sandbox", *filter(None, [seen.text, seen.error, *seen.notes])]
            lines += [f"[picture {image.width} x {image.height}, of {box or 'no pure crop'}]"
                      for image, box in zip(seen.images, seen.boxes)]  # fmt: skip
    lines += ["", f"--- ended: {trajectory.ended}. answer {trajectory.answer!r}, reference "
              f"{sample.answer!r}", str(reward), ""]  # fmt: skip
    return "\n".join(lines)


def light(trajectory: Trajectory) -> Trajectory:
    """A copy without pixels, which the report does not need: what one process sends the others."""

    def outline(image) -> SimpleNamespace:
        return SimpleNamespace(size=image.size, width=image.width, height=image.height)

    sample, turns = copy.copy(trajectory.sample), []
    object.__setattr__(sample, "image", outline(sample.image))
    for turn in trajectory.turns:
        seen = turn.observation
        if seen is not None:
            seen = replace(seen, images=[outline(image) for image in seen.images])
        turns.append(replace(turn, observation=seen))
    return replace(trajectory, sample=sample, turns=turns, images=[])


def finish(
    run: Run, config: Config, world: World, policy: Policy, actor: Policy, optimizer
) -> None:
    """Measure and export stage 2, unless that is done. Then one table, one page and two figures;
    the numbers are in summary.json."""
    if run.state["stage"] == "rl":
        sync(policy, actor)
        metrics = measure_policy(run, config, world, actor, out=run.folder)
        run.end_stage(actor, metrics, following="done")
    run.export_best(policy, actor, optimizer, config.rl_steps)
    if not run.first:
        return
    stages, seconds = run.state["stages"], run.state["seconds"]
    names = {"sft": "SFT", "rl": "TAPO" if config.reward == "tapo" else config.reward}
    columns = {names[stage]: metrics for stage, metrics in stages.items()}
    curves(run.log_lines("rl"), run.folder / "curves.png")
    page = report(run.folder, lines(columns), ["curves.png"])
    write_json(run.folder / "summary.json",
               {"config": asdict(config), "seconds": seconds, "stages": stages})  # fmt: skip
    print(f"\n{table(columns)}\n\n{page}\n{run.folder / 'summary.json'}")


def assemble(config: Config) -> Accelerator:
    """The processes of this run, as `torchrun` or `accelerate launch` started them. Only process 0
    speaks; errors of the others are still heard."""
    wait = InitProcessGroupKwargs(timeout=timedelta(seconds=config.timeout))
    tracker = None if config.tracker == "none" else config.tracker
    cpu = "WORLD_SIZE" in os.environ and not torch.cuda.is_available()  # else each would be alone
    disable_progress_bar()  # of transformers, which would show one for every small checkpoint
    # torch warns of checkpoints that are written without other processes: here that is intended.
    warnings.filterwarnings("ignore", message=".*is not initialized.*|.*single process.*")
    team = Accelerator(cpu=cpu, log_with=tracker, project_dir=config.out, kwargs_handlers=[wait])
    if config.questions < team.num_processes:
        raise SystemExit(f"--questions {config.questions} for {team.num_processes} processes: "
                         f"each needs at least one, so raise it")  # fmt: skip
    if tracker:
        team.init_trackers("codev", asdict(config))
    if not team.is_main_process:
        sys.stdout = open(os.devnull, "w")
        tqdm.__init__ = partialmethod(tqdm.__init__, disable=True)
    return team


def main(config: Config) -> None:
    torch.set_num_threads(config.threads or torch.get_num_threads())
    if config.preset == "tiny-base":
        tiny = importlib.import_module("beyond.tiny")
        return tiny.pretrain_tiny(config.seed, config.row_tokens, print).save(config.out)
    team = assemble(config)
    device, run, world = team.device, Run(config, team), None

    # Stage 1, SFT. Speak the format.                                         sft.py
    if run.state["stage"] == "sft":
        world = stage_1(run, config, device)

    # Stage 2, TAPO. Look where the evidence is.
    sft = run.folder / "sft"
    policy, actor, optimizer = opened(run, config, "rl", sft, config.rl_lr, (0.9, 0.95), device)
    reference = reference_of(config, sft, device)
    world = world or world_of(config, actor, run.folder)
    watch = VerdictWatch()

    for step in tqdm(run.steps_left(config.rl_steps), "rl", mininterval=5):
        began, tally, key = time.perf_counter(), Counter(), f"{config.seed}-{step}"
        torch.manual_seed(random.Random(f"sampling {key}").getrandbits(63))
        questions = world.questions(step)

        # 1. Act. K rollouts of every question, tool calls and all.           rollout.py, Eq. 2
        with run.phase("act"):
            sync(policy, actor)
            groups = play(actor, questions, config.rollouts, rules(config), tally)

        # 2. Judge. Was it right, and did the tools show the evidence?        rewards.py, Eqs. 5, 6
        with run.phase("judge"):
            rng = random.Random(f"reward {key}")
            rewards = score(groups, config.reward, world.judge, lambdas(config), rng)
            watch(merged(gathered(rewards)), world.judge)

        # 3. Compare. Each rollout against the others of its own question.    grpo.py
        total = torch.tensor([[r.total or 0.0 for r in group] for group in rewards])  # [G, K]
        verdict = torch.tensor([[r.total is not None for r in group] for group in rewards])
        advantage = ADVANTAGES[config.adv_norm](total, verdict)  # [G, K]

        # 4. Learn. One clipped step towards the better rollouts.             grpo.py, Eqs. 1, 3, 4
        for group in optimizer.param_groups:
            group["lr"] = config.rl_lr * min(1.0, (step + 1) / 5)  # warm-up over five steps
        with run.phase("learn"):
            learnt = learn(policy, optimizer, groups, advantage, reference, objective(config))
            optimizer.zero_grad()  # the next KV cache needs the memory of the gradients

        # 5. Report. Where did it look, and what did it cost?                 faithfulness.py
        seconds = time.perf_counter() - began
        report_step(run, config, world, step + 1, groups, rewards, learnt, tally, seconds)
        run.check_weights(policy)
        every, done = config.eval_every, step + 1
        if every and done % every == 0 and done < config.rl_steps:  # the end: of all questions
            sync(policy, actor)
            seen = measure_policy(run, config, world, actor, every=4)
            run.log({"stage": "evaluation", "step": step + 1} | seen)
        if (step + 1) % config.save_every == 0:
            run.save(policy, optimizer, step + 1)

    finish(run, config, world, policy, actor, optimizer)
    team.end_training()


if __name__ == "__main__":
    chosen = parse_config(sys.argv[1:])
    try:
        main(chosen)
    except KeyboardInterrupt:  # Ctrl-C
        begun = (Path(chosen.out) / "log.jsonl").exists()
        print("\nstopped" + f"; to go on: python train.py --resume {chosen.out}" * begun)
        sys.exit(130)
