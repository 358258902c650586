"""
plan.py: would it fit? Arithmetic from the model's config; no weight is loaded.

Concept     Would it fit? Arithmetic from the model's config; no weight is loaded.
Paper       nothing
In
Out
Left out
Read next
"""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass

import torch
from transformers import Qwen2_5_VLConfig
from transformers import Qwen2_5_VLForConditionalGeneration as Model

from grpo import CHUNK
from kit.flags import knob, parse, refusals
from train import PRESETS, Config, check, compared

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


@dataclass(frozen=True)
class Planned(Config):
    """Load nothing: what the run would need on so many GPUs of so many GB, and whether it fits."""

    plan: str = knob("8x80", "GPUs, and GB of each", nargs="?", const="8x80", metavar="GPUSxGB")


def main(argv: list[str]) -> None:
    config = parse(Planned, argv, presets=PRESETS)
    with refusals():
        check(config)
        fits, text = plan(config, config.plan)
    print(text, end="")
    sys.exit(0 if fits else 2)
