"""
plan.py: would it fit? Arithmetic from the model's config; no weight is loaded.

Concept     Every number of stage 2 that takes memory is known before it starts: parameters, layers,
            slots and rows. Add them up for loading, acting and learning, and compare each with one
            GPU. Stage 1 needs less: it has no reference and no cache.
Paper       nothing: it names no machine
In          the flags of train.py, and --plan 8x80: 8 GPUs of 80 GB
Out         the sums, what to lower if they are too large; exit status 0 if it fits, else 2
Left out    time; memory that PyTorch reserves and does not use (5 % of a GPU are kept free for it)
Read next   kit/processes.py (what is cut over the GPUs), grpo.py (what a row is)
"""

import re
import sys
from dataclasses import dataclass

import torch
from torch import nn
from transformers import Qwen2_5_VLConfig
from transformers import Qwen2_5_VLForConditionalGeneration as Model

from grpo import CHUNK
from kit.flags import knob, parse, refusals
from train import PRESETS, Config

QWEN_3B, QWEN_7B = "Qwen/Qwen2.5-VL-3B-Instruct", "Qwen/Qwen2.5-VL-7B-Instruct"
GEOMETRIES = {  # as published, so that a plan needs no network
    QWEN_3B: dict(
        text_config=dict(
            vocab_size=151936, hidden_size=2048, intermediate_size=11008, num_hidden_layers=36,
            num_attention_heads=16, num_key_value_heads=2,
        ),
        vision_config=dict(hidden_size=1280, out_hidden_size=2048),  # else transformers' own values
        tie_word_embeddings=True,  # lm_head is the token embeddings: they count once
    ),
    QWEN_7B: dict(
        text_config=dict(
            vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
            num_attention_heads=28, num_key_value_heads=4,
        ),
        vision_config=dict(hidden_size=1280, out_hidden_size=3584),
        tie_word_embeddings=False,
    ),
}  # fmt: skip


LOWER = """\
lower, in this order: --row-tokens (learning), --max-length or --kv-budget-gb (acting),
--freeze-vision both, --beta 0 (no reference). More GPUs share weights, optimiser, reference and
gradients; but each has a whole actor, and takes as much while loading. An adapter (--lora-rank 32,
a deviation) has no reference and no actor of its own; each GPU then has all weights."""


@dataclass(frozen=True)
class Planned(Config):
    """Load nothing: what the run would need on so many GPUs of so many GB, and whether it fits."""

    plan: str = knob("8x80", "GPUs, and GB of each", nargs="?", const="8x80", metavar="GPUSxGB")


def geometry(name: str) -> Qwen2_5_VLConfig:
    if name in GEOMETRIES:
        return Qwen2_5_VLConfig(**GEOMETRIES[name])
    return Qwen2_5_VLConfig.from_pretrained(name)


def billions(module: nn.Module) -> float:
    return sum(p.numel() for p in module.parameters()) / 1e9


def listing(items: dict[str, tuple[float, str]]) -> str:
    return "\n".join(f"  {name:12}{gb:7.1f}   {how}" for name, (gb, how) in items.items())


def plan(config: Planned) -> tuple[bool, str]:
    """Does stage 2 fit? With the arithmetic, and what to lower if not. 1 GB is 1e9 bytes."""
    match = re.fullmatch(r"([1-9]\d*)x(\d+(?:\.\d+)?)", config.plan)
    if not match:
        raise ValueError(f"--plan wants GPUs x GB of each, such as 8x80, got {config.plan!r}")
    gpus, card = int(match[1]), float(match[2])
    shape, slots = geometry(config.model), config.row_tokens
    text, eye, usable = shape.text_config, shape.vision_config, 0.95 * card
    with torch.device("meta"):
        model = Model(shape)
    N, vision = billions(model), billions(model.model.visual)
    rank, layers = config.lora_rank, [*model.model.language_model.layers]
    linear = [m for layer in layers for m in layer.modules() if isinstance(m, nn.Linear)]
    adapter = 1e-9 * rank * sum(m.in_features + m.out_features for m in linear)  # A and B
    frozen = rank > 0 or config.freeze_vision in ("rl", "both")
    learnt = adapter or N - vision * frozen  # parameters that are trained
    sizes = [*map(billions, (*model.model.visual.blocks, *layers))]
    root = N - sum(sizes)  # embeddings, lm_head and what else is in no layer
    # kept: bf16 inputs of all layers, as if every slot were image (4 patches); once: inside a layer
    kept = 2e-9 * slots * text.hidden_size * text.num_hidden_layers
    kept += 8e-9 * slots * eye.hidden_size * eye.depth * (not frozen)
    once = 2e-9 * slots * (8 * text.hidden_size + 4 * text.intermediate_size)
    # An adapter also keeps what comes into each of its layers, in fp32.
    once += 4e-9 * slots * sum(m.in_features for m in linear) / len(layers) * (rank > 0)
    if not config.activation_checkpointing:
        kept, once = once * text.num_hidden_layers + 4 * kept, 0
    reference = 4 * N / gpus * (config.beta > 0 or config.ratio_anchor == "ref")
    logits = (12e-9 * CHUNK * text.vocab_size, f"{CHUNK} x {text.vocab_size} x 4 B x 3")
    activations = (kept + once, f"{slots} slots, as if all held image")
    cuda = (2.5, "context and libraries, a guess")
    if rank:  # each GPU has all of it
        always = {
            "weights": (
                2 * N,
                f"frozen, bf16, {N:.3f}e9 x 2 B; policy, actor and reference in one",
            ),
            "adapter": (4 * adapter, f"fp32, rank {rank}, {adapter:.3f}e9 x 4 B"),
            "optimiser": (8 * adapter, f"two fp32 moments, {adapter:.3f}e9 x 8 B"),
            "CUDA": cuda,
        }
        gradients = (4 * adapter, f"fp32, {adapter:.3f}e9 x 4 B")
        learning = {"gradients": gradients, "activations": activations, "logits": logits}
    else:
        always = {
            "weights": (4 * N / gpus, f"fp32, {N:.3f}e9 x 4 B / {gpus}"),
            "optimiser": (8 * learnt / gpus, f"two fp32 moments, {learnt:.3f}e9 x 8 B / {gpus}"),
            "reference": (reference, "fp32, as the weights" if reference else "none"),
            "actor": (2 * N, f"a whole copy in bf16, {N:.3f}e9 x 2 B"),
            "CUDA": cuda,
        }
        fetched = (
            f"embeddings and lm_head ({root:.2f}e9), two layers: bf16, gradients bf16 and fp32"
        )
        learning = {
            "gradients": (4 * learnt / gpus, f"fp32, {learnt:.3f}e9 x 4 B / {gpus}"),
            "fetched": (8 * root + 8 * max(sizes), fetched),
            "activations": activations,
            "logits": logits,
        }
    width = text.hidden_size // text.num_attention_heads * text.num_key_value_heads
    row = 4e-9 * text.num_hidden_layers * width * config.max_length  # bf16 keys and values
    held = sum(gb for gb, _ in always.values())
    budget = config.kv_budget_gb or 0.8 * max(usable - held, 0)
    rows = int(budget / row)
    peak = {
        # the whole policy in fp32, before it is cut or rounded; and the actor, if there is one
        "loading": (4 if rank else 6) * N,
        "acting": held + budget,
        "learning": held + sum(gb for gb, _ in learning.values()),
    }
    report = f"""\
{config.model} on {gpus} GPUs of {card:g} GB; {usable:.1f} GB of each are usable
parameters {N * 1e9:,.0f}, of them vision {vision * 1e9:,.0f}{" (frozen)" * frozen}

always, GB per GPU
{listing(always)}

while learning, GB per GPU
{listing(learning)}

while acting, GB per GPU
  cache       {budget:7.1f}   {rows} rows of {config.max_length} slots, {row:.3f} each
peak, GB per GPU: {", ".join(f"{name} {gb:.1f}" for name, gb in peak.items())}

disk            {12 * (adapter or N):.1f} GB a checkpoint x {config.keep + 2} \
(kept, best, the one being written) + {2 * N:.0f} GB x 3 exports
host memory     {4 * N:.0f} GB a process while weights load

"""
    over = [f"{name} takes {gb:.1f} of {usable:.1f} GB" for name, gb in peak.items() if gb > usable]
    if rows < config.rollouts:
        over.append(f"the cache has room for {rows} rows, a group has {config.rollouts}")
    problems = "".join(f"it does not fit: {problem}\n" for problem in over)
    return not over, report + (problems + LOWER if over else "it fits")


def main(argv: list[str]) -> None:
    with refusals():
        fits, text = plan(parse(Planned, argv, presets=PRESETS))
    print(text)
    sys.exit(0 if fits else 2)
