"""
train.py: the whole method as a story. Act, judge, compare, learn, report.

Concept     Stage 1 (SFT) teaches the policy to speak the format; stage 2 (TAPO) teaches it to look
            where the evidence is. `main` is the table of contents; every verb has its own file.
Paper       CodeV, arXiv:2511.19661, the method and its training
In          the command line, which is the Config below and nothing else. (No `from __future__
            import annotations` here: each flag takes its type from a field of Config.)
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

import argparse
import copy
import fcntl
import gc
import importlib.util
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import timedelta
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator, InitProcessGroupKwargs, PartialState
from torch.distributed.tensor import DTensor
from tqdm import tqdm
from transformers import Qwen2_5_VLConfig
from transformers import Qwen2_5_VLForConditionalGeneration as Model
from transformers.utils.logging import disable_progress_bar

from data import Sample, demonstrations, load_rl, read_rows, toy_questions
from evaluate import Unusable, curves, evaluate, load_toy, report, table
from faithfulness import rates
from grpo import ADVANTAGES, CHUNK, LOSS_AVERAGES, Objective, Row, actor_of, gathered, learn
from grpo import merged, micro_batches, mine, parts, processes, shard, sync
from rewards import REWARDS, BoxJudge, ChatJudge, Judge, Reward, VerdictWatch, Weights, score
from rewards import summary
from rollout import Policy, Rules, Trajectory, check_checkpoint, check_fits, freeze_vision
from rollout import load_policy, play
from sandbox import Limits
from sft import TRAIN_ROUNDS, imitate, load_thyme, mean_logp, pretrain_tiny, replay_all, rows_of
from sft import shuffled


def knob(default, source: str, help: str, choices: tuple = ()):
    """A field of Config. source of its default: the paper, notes by others on it, verl (RL
    library), Thyme (SFT) or us."""
    text = f"{help} [{source}: {default}]".replace("%", "%%")  # argparse formats it
    return field(default=default, metadata={"help": text, "choices": choices})


# fmt: off
@dataclass(frozen=True)
class Config:
    """Every field is a flag, and what is saved beside each run. Defaults are those of the paper's
    7B run where it gives any; the presets below say where the toy differs."""

    preset: str = knob("toy", "ours", "a set of defaults", ("toy", "codev-7b", "tiny-base"))
    model: str = knob("tiny", "ours", "checkpoint folder or hub name to start from")
    out: str = knob("runs/toy", "ours", "folder for everything this run writes")
    seed: int = knob(0, "ours", "the same seed on the same machine repeats a CPU run exactly")
    threads: int = knob(0, "ours", "CPU threads of torch; 0: torch chooses")
    save_every: int = knob(10, "ours", "steps between two checkpoints to resume from")
    keep: int = knob(1, "ours", "newest checkpoints that are kept, beside the best")
    timeout: float = knob(1800.0, "ours", "seconds that processes wait for one that does not come")
    tracker: str = knob("none", "ours", "also send the log to this",
                        ("none", "tensorboard", "wandb", "trackio"))
    transcript_every: int = knob(10, "ours", "steps between two episodes written out as text")

    sft_data: str = knob("", "ours", "demonstrations in Thyme-SFT's form: a file, folder or hub "
                         "name; empty: the toy's")
    rl_data: str = knob("", "ours", "questions: file, folder or hub name; empty: the toy's")
    on_bad: str = knob("skip", "ours", "a row that cannot be used", ("skip", "stop"))
    max_pixels: int = knob(3_211_264, "thyme", "pixels of an image (RL: ours); 0: the model's own")
    judge_url: str = knob("", "ours", "OpenAI-compatible server of the judge; key: JUDGE_API_KEY")
    judge_model: str = knob("Qwen/Qwen2.5-VL-32B-Instruct", "notes", "the judge's name there")
    shortcut: float = knob(1.0, "ours", "toy: share of squares that wear their colour's usual "
                           "texture. 1: guessing pays; 0.5: looking pays")

    sft_steps: int = knob(-1, "ours", "steps of stage 1; -1: --sft-epochs; 0: --model has had SFT")
    sft_epochs: float = knob(3.0, "paper", "passes over --sft-data")
    sft_batch: int = knob(128, "thyme", "demonstrations per step")
    sft_lr: float = knob(1e-5, "thyme", "peak learning rate of stage 1")
    sft_warmup: float = knob(0.05, "thyme", "share of stage 1 in which the learning rate rises")
    sft_demos: int = knob(2500, "ours", "toy: demonstrations in all")
    train_rounds: str = knob("last_code_and_answer", "thyme", "turns of a demonstration to learn",
                             tuple(TRAIN_ROUNDS))
    freeze_vision: str = knob("sft", "thyme", "where the vision tower keeps its weights (rl: ours)",
                              ("none", "sft", "rl", "both"))

    rl_steps: int = knob(200, "paper", "steps of stage 2")
    questions: int = knob(256, "paper", "questions per step, those of all processes together")
    rollouts: int = knob(8, "paper", "K, rollouts per question")
    turns: int = knob(5, "ours", "T, turns of one rollout, in training and in its evaluation")
    temperature: float = knob(1.0, "paper", "of the sampler, and of every log-probability")
    max_new_tokens: int = knob(1024, "ours", "tokens of one turn")
    max_length: int = knob(10240, "thyme", "tokens of a whole trajectory (in RL: ours)")
    max_log_chars: int = knob(2000, "ours", "characters of a program's output; errors stay whole")

    reward: str = knob("tapo", "paper", "what stage 2 rewards", tuple(REWARDS))
    lambda_acc: float = knob(1.0, "ours", "weight of a right answer, Eq. 5")
    lambda_tool: float = knob(0.2, "ours", "weight of what the tools showed, Eq. 5")
    lambda_fmt: float = knob(0.2, "ours", "weight of the format penalty; 0 gives the printed Eq. 5")
    gate_tool_on_correct: bool = knob(False, "notes", "pay tools only where the answer is right")
    step_credit: float = knob(0.0, "ours", "adds this much of a step's own score to its advantage")
    adv_norm: str = knob("none", "paper", "divide advantages by the group's deviation?",
                         tuple(ADVANTAGES))
    ratio_anchor: str = knob("old", "ours", "denominator of Eq. 3; notes on the paper have ref",
                             ("old", "ref"))
    loss_agg: str = knob("token", "verl", "mean over all tokens, or of each rollout's own mean",
                         tuple(LOSS_AVERAGES))
    eps: float = knob(0.2, "verl", "clip range of Eq. 4")
    beta: float = knob(1e-3, "verl", "KL weight of Eq. 4; at 0 the reference model is not loaded")
    mask_truncated: bool = knob(False, "ours", "a deviation: cut-off rollouts teach nothing")
    updates: int = knob(1, "verl", "optimiser steps per batch of rollouts")
    rl_lr: float = knob(1e-6, "paper", "learning rate of stage 2")
    max_grad_norm: float = knob(1.0, "verl", "gradient clipping")
    row_tokens: int = knob(8192, "ours", "most tokens in one row or micro-batch: sets memory")
    activation_checkpointing: bool = knob(True, "ours", "recompute activations: time for memory")

    kv_budget_gb: float = knob(0.0, "ours", "GB for the KV cache; 0: 80 % of what is free")
    patience: float = knob(1.0, "ours", "seconds until rollouts whose code has run go on without "
                           "the slow ones; a run repeats exactly only if none is ever left behind")
    sandboxes: int = knob(8, "ours", "programs that run at the same time, per process")
    sandbox_seconds: float = knob(10.0, "thyme", "wall-clock limit of one program")
    allow_weak_sandbox: bool = knob(False, "ours", "run code that this system cannot fully confine")
    eval_every: int = knob(0, "ours", "steps between evaluations of every 4th question; 0: none")
    eval_questions: int = knob(512, "ours", "questions of the evaluation, held out of --rl-data (a "
                               "tenth of it at most); toy: and half as many against the prior")
# fmt: on


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


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def parse_config(argv: list[str] | None = None) -> Config:
    """The command line -> Config, checked before anything is loaded."""
    argv = sys.argv[1:] if argv is None else argv
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--preset", default="toy")
    preset = first.parse_known_args(argv)[0].preset
    parser = argparse.ArgumentParser(
        description="Train with TAPO. Defaults shown are those of the preset; [paper], [notes] (on "
        "it), [verl] and [thyme] say where the default of the 7B run comes from, [ours] that it is "
        "our choice.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--resume", metavar="DIR", default=argparse.SUPPRESS,
        help="continue the run in DIR, with its own config, on any number of processes",
    )  # fmt: skip
    parser.add_argument(
        "--plan", metavar="GPUSxGB", nargs="?", const="8x80", default=argparse.SUPPRESS,
        help="load nothing: what the run would need on so many GPUs of so many GB, and if it fits",
    )  # fmt: skip
    for f in fields(Config):
        kind = {"action": argparse.BooleanOptionalAction} if f.type is bool else {"type": f.type}
        if f.metadata["choices"]:
            kind["choices"] = f.metadata["choices"]
        parser.add_argument(flag(f.name), default=f.default, help=f.metadata["help"], **kind)
    parser.set_defaults(**PRESETS.get(preset, {}))
    values = vars(parser.parse_args(argv))
    resume, node = values.pop("resume", None), values.pop("plan", None)
    if resume is not None and len(argv) > 1 + ("--resume" in argv):  # --resume=DIR is one word
        parser.error("--resume goes alone: a run continues with its own config")
    if resume == "":
        parser.error("--resume wants the folder of a run, got an empty name")
    try:
        config = Config(**values) if resume is None else read_config(Path(resume))
        check(config)
        if node:
            fits, text = plan(config, node)
            parser.exit(0 if fits else 2, text)
        if config.preset != "tiny-base" and not resume:
            check_checkpoint(config.model)
            check_data(config)
        if not resume and (Path(config.out) / "state.json").exists():
            raise ValueError(f"{config.out} holds a run already: continue it with --resume "
                             f"{config.out}, or give this one another --out")  # fmt: skip
        out = Path(config.out)
        there = next(path for path in (out, *out.parents) if path.exists())
        if not there.is_dir() or not os.access(there, os.W_OK):
            raise ValueError(f"--out {out} cannot be made: {there} is no folder to write to")
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))
    return config


WHAT_NOW = "put a copy back, or start a new run with another --out"


def read_config(folder: Path) -> Config:
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"nothing to resume in {folder}: it has no config.json")
    try:
        config = replace(Config(**read_json(path)), out=str(folder))
    except TypeError as error:
        raise ValueError(f"{path} is not the config of a run of this version: {error}") from error
    for f in fields(Config):
        value, kinds = getattr(config, f.name), (int, float) if f.type is float else (f.type,)
        if type(value) not in kinds:
            raise ValueError(f"{path}: {f.name} should be of type {f.type.__name__}, got {value!r}")
    read_state(folder)
    return config


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


def check(config: Config) -> None:
    """What can be refused before a model loads is refused here."""
    least = dict(sft_steps=-1, rl_steps=0, keep=1, timeout=1, transcript_every=1, max_pixels=0,
                 sft_epochs=1e-9, sft_warmup=0, step_credit=0, questions=1, turns=1, patience=0,
                 max_new_tokens=1, sft_batch=1, sft_demos=1, save_every=1, sandboxes=1,
                 row_tokens=1, updates=1, eval_questions=4, threads=0, eval_every=0, beta=0, eps=0,
                 sandbox_seconds=0.1, sft_lr=1e-12, rl_lr=1e-12, max_grad_norm=1e-12,
                 lambda_acc=1e-12, lambda_fmt=0, kv_budget_gb=0, max_log_chars=0)  # fmt: skip
    for name, value in asdict(config).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{flag(name)} must be a finite number, got {value}")
        if name in least and value < least[name]:
            raise ValueError(f"{flag(name)} must be at least {least[name]}, got {value}")
    if config.rollouts < 2:
        raise ValueError(f"--rollouts must be at least 2, got {config.rollouts}: a rollout is "
                         f"compared with the others of its group")  # fmt: skip
    if config.temperature <= 0:
        raise ValueError(f"--temperature must be above 0 for training, got {config.temperature}: "
                         f"greedy rollouts of one question are all the same")  # fmt: skip
    if not 0 <= config.shortcut <= 1:
        raise ValueError(f"--shortcut is a share between 0 and 1, got {config.shortcut}")
    if config.max_new_tokens >= config.max_length:
        raise ValueError(f"--max-new-tokens {config.max_new_tokens} leaves no room for a prompt in "
                         f"--max-length {config.max_length}")  # fmt: skip
    if (tracker := config.tracker) != "none" and importlib.util.find_spec(tracker) is None:
        raise ValueError(f"--tracker {tracker} needs a package: pip install {tracker}")
    if config.step_credit and config.reward != "tapo":
        raise ValueError(f"--step-credit spreads the step scores of tapo; {config.reward} has none")
    weights(config)


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


def weights(config: Config) -> Weights:
    lambdas = dict(answer=config.lambda_acc, tools=config.lambda_tool, format=config.lambda_fmt)
    return shared(config, Weights, **lambdas)


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


# Would it fit? Arithmetic from the model's config; no weight is loaded.

QWEN_7B = "Qwen/Qwen2.5-VL-7B-Instruct"  # its published geometry, so that a plan needs no network
GEOMETRY_7B = dict(
    text_config=dict(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
        num_attention_heads=28, num_key_value_heads=4, max_position_embeddings=128000,
        rope_parameters=dict(rope_type="default", rope_theta=1e6, mrope_section=[16, 24, 24]),
    ),
    vision_config=dict(hidden_size=1280, out_hidden_size=3584),  # else transformers' own values
    tie_word_embeddings=False,
)  # fmt: skip


def geometry(name: str) -> Qwen2_5_VLConfig:
    if name == QWEN_7B:
        return Qwen2_5_VLConfig(**GEOMETRY_7B)
    try:
        return Qwen2_5_VLConfig.from_pretrained(name)
    except OSError as error:
        raise FileNotFoundError(
            f"--plan reads the config.json of {name}, but there is no such folder, and the hub "
            f"does not know it or cannot be reached. Only the shape of {QWEN_7B} is built in"
        ) from error


def plan(config: Config, node: str) -> tuple[bool, str]:
    """Does stage 2 fit on `node`, such as "8x80": 8 GPUs of 80 GB? With the arithmetic, and what to
    lower if not. 1 GB is 1e9 bytes. Stage 1 needs less: it has no reference and no cache."""
    match = re.fullmatch(r"([1-9]\d*)x(\d+(?:\.\d+)?)", node)
    if not match:
        raise ValueError(f"--plan wants GPUs x GB of each, such as 8x80, got {node!r}")
    gpus, card = int(match[1]), float(match[2])
    shape = geometry(config.model)
    text, eye = shape.text_config, shape.vision_config
    with torch.device("meta"):
        model = Model(shape)

    def count(module: torch.nn.Module) -> int:
        return sum(p.numel() for p in module.parameters())

    N, vision = count(model), count(model.model.visual)
    frozen = config.freeze_vision in ("rl", "both")
    learnt = N - vision * frozen  # parameters that are trained
    layers = [*map(count, (*model.model.visual.blocks, *model.model.language_model.layers))]
    root = N - sum(layers)  # embeddings, lm_head and what else is in no layer
    slots, H, K = config.row_tokens, text.hidden_size, config.rollouts  # H: the language width
    width = H // text.num_attention_heads * text.num_key_value_heads
    row = 4 * text.num_hidden_layers * width * config.max_length / 1e9  # GB: bf16 keys and values
    # kept: bf16 inputs of all layers, as if every slot were image (4 patches); once: inside a layer
    kept = 2 * slots * H * text.num_hidden_layers + 8 * slots * eye.hidden_size * eye.depth
    once = 2 * slots * (8 * H + 4 * text.intermediate_size)
    if not config.activation_checkpointing:
        kept, once = once * text.num_hidden_layers + 4 * kept, 0
    reference = 4 * N / gpus * compared(config)

    always = {
        "weights": (4 * N / gpus, f"fp32, {N / 1e9:.3f}e9 x 4 B / {gpus}"),
        "optimiser": (8 * learnt / gpus, f"two fp32 moments, {learnt / 1e9:.3f}e9 x 8 B / {gpus}"),
        "reference": (reference, "fp32, as the weights" if reference else "none"),
        "actor": (2 * N, f"a whole copy in bf16, {N / 1e9:.3f}e9 x 2 B"),
        "CUDA": (2.5e9, "context and libraries, a guess"),
    }
    learning = {
        "gradients": (4 * learnt / gpus, f"fp32, {learnt / 1e9:.3f}e9 x 4 B / {gpus}"),
        "fetched": (8 * root + 8 * max(layers), f"embeddings and lm_head ({root / 1e9:.2f}e9), two "
                    f"layers: bf16, gradients bf16 and fp32"),
        "activations": (kept + once, f"{slots} slots, as if all held image"),
        "logits": (3 * 4 * CHUNK * text.vocab_size, f"{CHUNK} x {text.vocab_size} x 4 B x 3"),
    }  # fmt: skip
    held, usable = sum(v for v, _ in always.values()) / 1e9, 0.95 * card
    budget = config.kv_budget_gb or 0.8 * max(usable - held, 0)
    rows = int(budget // row)
    peak = dict(
        loading=(4 * N + 2 * N) / 1e9,  # the whole policy in fp32, before it is cut, and the actor
        acting=held + budget,
        learning=held + sum(v for v, _ in learning.values()) / 1e9,
    )
    own = math.ceil(config.questions / gpus) * K
    imitating = str(config.sft_steps)
    if config.sft_steps < 0:
        imitating = (f"{config.sft_epochs:g} x rows / {config.sft_batch} (333,000 rows: "
                     f"{math.ceil(config.sft_epochs * 333_000 / config.sft_batch):,})")  # fmt: skip
    lines = [f"{config.model} on {gpus} GPUs of {card:g} GB; {usable:.1f} GB of each are usable",
             f"parameters {N:,}, of them vision {vision:,}{' (frozen)' * frozen}"]  # fmt: skip
    for title, items in (("always", always), ("while learning", learning)):
        lines += ["", f"{title}, GB per GPU"]
        lines += [f"  {name:12}{value / 1e9:7.1f}   {how}" for name, (value, how) in items.items()]
    lines += [
        "", "while acting, GB per GPU",
        f"  cache       {budget:7.1f}   {rows} rows of {config.max_length} slots, {row:.3f} each",
        "peak, GB per GPU: " + ", ".join(f"{name} {value:.1f}" for name, value in peak.items()), "",
        f"rows per wave   {rows // K * K} of the {own} of each GPU and step "
        f"({config.questions} questions x {K} / {gpus})",
        f"steps           stage 1: {imitating}; stage 2: {config.rl_steps}, "
        f"{config.rl_steps * config.questions * K:,} trajectories",
        f"disk            {12 * N / 1e9:.0f} GB a checkpoint x {config.keep + 2} (kept, best, the "
        f"one being written) + {2 * N / 1e9:.0f} GB x 3 exports",
        f"host memory     {4 * N / 1e9:.0f} GB a process while weights load", "",
    ]  # fmt: skip
    problems = [f"{name} takes {value:.1f} of {usable:.1f} GB"
                for name, value in peak.items() if value > usable]  # fmt: skip
    if rows < K:
        problems += [f"the cache has room for {rows} rows, a group has {K}: lower --max-length or "
                     f"--rollouts"]  # fmt: skip
    if not problems:
        return True, "\n".join([*lines, "it fits", ""])
    levers = {
        "--beta 0 (no reference)": reference,
        "--freeze-vision both": 12 * vision / gpus * (not frozen),
        f"--row-tokens {slots // 2}": (kept + once) / 2,
        "--kv-budget-gb 0": config.kv_budget_gb * 1e9,
        "twice as many GPUs": (4 * N + reference * gpus + 12 * learnt) / gpus / 2,
    }
    lines += [f"it does not fit: {problem}" for problem in problems] + ["what to lower:"]
    lines += [f"  {name:26} saves {value / 1e9:4.1f} GB" for name, value in levers.items() if value]
    if peak["loading"] > usable:
        lines += [f"The actor alone takes {2 * N / 1e9:.1f} GB on any number of GPUs, and loading "
                  f"{peak['loading']:.1f}: take larger ones."]  # fmt: skip
    return False, "\n".join([*lines, ""])


class Run:
    """The folder of a run: its log, its clock, its newest checkpoints; and what the processes of a
    run need beside the gradient: to wait for each other, and to say which one failed, and where.

    state.json says how far the run is. It names the checkpoint to go on from, and is replaced in
    one motion once that checkpoint is whole: a kill at any moment loses at most the steps since.
    Only process 0 writes it.
    """

    def __init__(self, config: Config, team: Accelerator | None = None) -> None:
        self.folder, self.team, self.keep = Path(config.out), team, config.keep
        self.rank, self.n = processes()
        self.first, self.doing, self.now = self.rank == 0, "start", "before its first step"
        self.skipped, self.lap, self.lines, self._world = 0, {}, 0, None  # lap: a step's seconds
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
    def clock(self, name: str) -> Iterator[None]:
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

    def open(self, config: Config, stage: str, start: str | Path, lr: float, betas: tuple, device):
        """(policy, actor, optimizer) of a stage: from its checkpoint, or from `start` if it is new.
        The policy learns, in fp32, cut over all processes; the actor, a whole copy, plays."""
        gc.collect()  # frees the last stage's policy, whose hooks refer to each other
        with self.clock("load"):
            policy = load_policy(start, device, config.max_pixels or None)
            if config.freeze_vision in (stage, "both"):
                freeze_vision(policy)
            actor = actor_of(policy)
            if config.activation_checkpointing:
                policy.model.activation_checkpointing_enable()
            shard(policy)
            learnt = [p for p in policy.model.parameters() if p.requires_grad]
            optimizer = torch.optim.AdamW(learnt, lr, betas, weight_decay=0.0)
            if self.state["checkpoint"]:
                self.restore(policy, optimizer, self.state["checkpoint"])
            sync(policy, actor)
        return policy, actor, optimizer

    def steps_left(self, steps: int) -> range:
        """The steps of stage 2 still to do; none once it is over."""
        return range(self.state["step"] if self.state["stage"] == "rl" else steps, steps)

    def save(self, policy: Policy, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Each process writes its own part of the weights and moments."""
        name = f"checkpoint-{self.state['stage']}-{step}"
        if self.first:  # a kill may have left one half written
            shutil.rmtree(self.folder / name, ignore_errors=True)
        with self.clock("save"):
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
        with self.clock("export"):
            if self.first:
                actor.save(self.folder / stage)
        self.state["stages"][stage] = metrics
        self.update(stage=following, step=0, checkpoint=None, kept=[])

    def export_best(self, policy: Policy, actor: Policy, optimizer, steps: int) -> None:
        """Write rl-best/, the checkpoint before which the mean reward (since the one before it) was
        highest, unless the run ended with it."""
        best = self.state["best"]
        with self.clock("export"):
            if best and best["step"] < steps:
                self.restore(policy, optimizer, best["checkpoint"])
                sync(policy, actor)
                if self.first:
                    actor.save(self.folder / "rl-best")
        self.update(best=None)

    def world(self, config: Config, policy: Policy):
        """Made once: it reads through all rows of --rl-data, to find those that cannot be used."""
        if not self._world:
            made = data_world(config, policy, self.folder) if config.rl_data else toy_world(config)
            self._world = made
        return self._world


def training_state(policy: Policy, optimizer: torch.optim.Optimizer) -> dict:
    """Weights and moments under their names: what a checkpoint holds, and where it is read into."""
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
        check_fits(policy, sample, policy.encode_prompt(sample, pixels=False), rules(config))

    data = load_rl(config.rl_data, config.on_bad, fits)
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


def check_prompts(config: Config, policy: Policy, samples: Sequence[Sample]) -> None:
    """The first stands for all: the toy's are alike, and data_world has checked those of files."""
    try:
        prompt = policy.encode_prompt(samples[0], pixels=False)
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
    run: Run, config: Config, actor: Policy, out: Path | None = None, every: int = 1
) -> dict:
    """Metrics on the same questions with the same sampling seed in every run; on the toy at
    temperature 1, where shares mirror the policy: greedy play shows only its likeliest ways.

    out: the folder of a stage's episodes; those that it holds of this policy are not played again.
    every: without `out`, amid training, one question of so many."""
    with run.clock("evaluation"):
        world, several = run.world(config, actor), {}
        yardstick = replace(rules(config), temperature=0.0 if config.rl_data else 1.0)
        if run.n > 1 and out:  # each process plays its part of the questions
            several = dict(wave=math.ceil(len(world.measured) / run.n), processes=PartialState())
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


def stage_1(run: Run, config: Config, device: torch.device) -> None:
    """SFT: imitate demonstrations, the mean log-probability of their acted tokens."""
    start, betas = config.model, (0.9, 0.98)
    policy, actor, optimizer = run.open(config, "sft", start, config.sft_lr, betas, device)
    check_prompts(config, policy, run.world(config, policy).measured)  # before hours of imitation
    steps = config.sft_steps
    if steps:
        with run.clock("demonstrations"):
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

    with run.clock("sft"):
        imitate(policy, optimizer, batches_of, range(run.state["step"], steps), rate, after)
    sync(policy, actor)
    metrics = measure_policy(run, config, actor, out=run.folder / "sft-episodes")
    run.end_stage(actor, metrics, following="rl")


def reference_of(config: Config, sft: Path, device: torch.device) -> Policy | None:
    """pi_ref of Eqs. 1, 3 and 4: the SFT model, if anything is compared with it."""
    if not compared(config):
        return None
    reference = load_policy(sft, device, config.max_pixels or None)
    shard(reference)
    return reference


def report_step(run, config, world, step, groups, rewards, learnt, tally, seconds) -> None:
    """One line of the log and one on the screen; every name is in the README's glossary."""
    run.spent({k.removesuffix("_seconds"): v for k, v in tally.items() if k.endswith("_seconds")})
    counts = Counter({k: v for k, v in tally.items() if not k.endswith("_seconds")})
    judged = rewards  # faithfulness is measured by tapo's step scores, whatever is paid for
    if config.reward != "tapo":
        judged = score(groups, "tapo", world.judge, weights(config), random.Random(0))
    if run.n > 1:
        own = ([[light(t) for t in group] for group in groups], rewards, judged)
        groups, rewards, judged = (merged(gathered(x)) for x in own)
        counts = sum(gathered(counts), Counter())
    played, flat = ([x for group in nested for x in group] for nested in (groups, judged))
    seen = rates(played, flat)
    line = {"stage": "rl", "step": step} | summary(groups, rewards) | learnt
    line["useful_calls"] = sum((s or 0) > 0 for r in flat for s in r.steps) / len(flat)
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
    for step in trajectory.steps:
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

    sample, steps = copy.copy(trajectory.sample), []
    object.__setattr__(sample, "image", outline(sample.image))
    for step in trajectory.steps:
        seen = step.observation
        if seen is not None:
            seen = replace(seen, images=[outline(image) for image in seen.images])
        steps.append(replace(step, observation=seen))
    return replace(trajectory, sample=sample, steps=steps, images=[])


def finish(run: Run, config: Config, policy: Policy, actor: Policy, optimizer) -> None:
    """Measure and export stage 2, unless that is done. Then one table, one page and two figures;
    the numbers are in summary.json."""
    if run.state["stage"] == "rl":
        sync(policy, actor)
        metrics = measure_policy(run, config, actor, out=run.folder)
        run.end_stage(actor, metrics, following="done")
    run.export_best(policy, actor, optimizer, config.rl_steps)
    if not run.first:
        return
    stages, seconds = run.state["stages"], run.state["seconds"]
    names = {"sft": "SFT", "rl": "TAPO" if config.reward == "tapo" else config.reward}
    columns = {names[stage]: metrics for stage, metrics in stages.items()}
    curves(run.log_lines("rl"), run.folder / "curves.png")
    page = report(run.folder, columns)
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
        return pretrain_tiny(config.seed, config.row_tokens, print).save(config.out)
    team = assemble(config)
    device, run = team.device, Run(config, team)

    # Stage 1, SFT. Speak the format.                                         sft.py
    if run.state["stage"] == "sft":
        stage_1(run, config, device)

    # Stage 2, TAPO. Look where the evidence is.
    sft = run.folder / "sft"
    policy, actor, optimizer = run.open(config, "rl", sft, config.rl_lr, (0.9, 0.95), device)
    reference, world = reference_of(config, sft, device), run.world(config, actor)
    watch = VerdictWatch()

    for step in tqdm(run.steps_left(config.rl_steps), "rl", mininterval=5):
        began, tally, key = time.perf_counter(), Counter(), f"{config.seed}-{step}"
        torch.manual_seed(random.Random(f"sampling {key}").getrandbits(63))
        questions = world.questions(step)

        # 1. Act. K rollouts of every question, tool calls and all.           rollout.py, Eq. 2
        with run.clock("act"):
            sync(policy, actor)
            groups = play(actor, questions, config.rollouts, rules(config), tally)

        # 2. Judge. Was it right, and did the tools show the evidence?        rewards.py, Eqs. 5, 6
        with run.clock("judge"):
            rng = random.Random(f"reward {key}")
            rewards = score(groups, config.reward, world.judge, weights(config), rng)
            watch(merged(gathered(rewards)), world.judge)

        # 3. Compare. Each rollout against the others of its own question.    grpo.py
        total = torch.tensor([[r.total or 0.0 for r in group] for group in rewards])  # [G, K]
        verdict = torch.tensor([[r.total is not None for r in group] for group in rewards])
        advantage = ADVANTAGES[config.adv_norm](total, verdict)  # [G, K]

        # 4. Learn. One clipped step towards the better rollouts.             grpo.py, Eqs. 1, 3, 4
        for group in optimizer.param_groups:
            group["lr"] = config.rl_lr * min(1.0, (step + 1) / 5)  # warm-up over five steps
        with run.clock("learn"):
            turns = [[r.turns for r in group] for group in rewards]
            learnt = learn(
                policy, optimizer, groups, advantage, reference, objective(config), turns
            )
            optimizer.zero_grad()  # the next KV cache needs the memory of the gradients

        # 5. Report. Where did it look, and what did it cost?                 faithfulness.py
        seconds = time.perf_counter() - began
        report_step(run, config, world, step + 1, groups, rewards, learnt, tally, seconds)
        run.check_weights(policy)
        every, done = config.eval_every, step + 1
        if every and done % every == 0 and done < config.rl_steps:  # the end: of all questions
            sync(policy, actor)
            seen = measure_policy(run, config, actor, every=4)
            run.log({"stage": "evaluation", "step": step + 1} | seen)
        if (step + 1) % config.save_every == 0:
            run.save(policy, optimizer, step + 1)

    finish(run, config, policy, actor, optimizer)
    team.end_training()


if __name__ == "__main__":
    chosen = parse_config()
    try:
        main(chosen)
    except KeyboardInterrupt:  # Ctrl-C
        begun = (Path(chosen.out) / "log.jsonl").exists()
        print("\nstopped" + f"; to go on: python train.py --resume {chosen.out}" * begun)
        sys.exit(130)
