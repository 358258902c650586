"""
plan.py: would it fit? Arithmetic from the model's config; no weight is loaded.

Concept     Every number of stage 2 that takes memory is known before it starts: parameters, layers,
            slots and rows. Add them up for loading, acting and learning, and compare each with one
            GPU. Stage 1 needs less: it has no reference and no cache. simulate.py checks the sums.
Paper       nothing: it names no machine
In          the flags of train.py, and --plan 8x80: 8 GPUs of 80 GB
Out         the sums, what to lower if they are too large; exit status 0 if it fits, else 2
Left out    time; memory that PyTorch reserves and does not use (5 % of a GPU are kept free for it)
Read next   kit/processes.py (what is cut over the GPUs), grpo.py (what a row is)
"""

import re
import sys
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from transformers import Qwen2_5_VLConfig
from transformers import Qwen2_5_VLForConditionalGeneration as Model

from grpo import CHUNK
from kit.flags import knob, parse, refusals
from kit.qwen import CACHE_SHARE
from rollout import READ
from train import PRESETS, Config

QWEN_3B, QWEN_7B = "Qwen/Qwen2.5-VL-3B-Instruct", "Qwen/Qwen2.5-VL-7B-Instruct"
TEXT = {  # as published, so that a plan needs no network
    QWEN_3B: dict(
        vocab_size=151936, hidden_size=2048, intermediate_size=11008, num_hidden_layers=36,
        num_attention_heads=16, num_key_value_heads=2, tie_word_embeddings=True,
    ),
    QWEN_7B: dict(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
        num_attention_heads=28, num_key_value_heads=4, tie_word_embeddings=False,
    ),
}  # fmt: skip
CUDA = 2.5  # GB
LOWER = """\
lower, in this order: --row-tokens (learning), --max-length or --kv-budget-gb (acting),
--freeze-vision both, --beta 0 (no reference). More GPUs share weights, optimiser, reference and
gradients; but each has a whole actor, and takes as much while loading. An adapter (--lora-rank 32,
a deviation) has no reference and no actor of its own; each GPU then has all weights."""


@dataclass(frozen=True)
class Planned(Config):
    """Load nothing: what the run would need on so many GPUs of so many GB, and whether it fits."""

    plan: str = knob("8x80", "GPUs, and GB of each", nargs="?", const="8x80", metavar="GPUSxGB")
    simulate: str = knob("8x80", "the same, counted by torch", nargs="?", const="8x80")


def geometry(name: str) -> Qwen2_5_VLConfig:
    if name not in TEXT:
        return Qwen2_5_VLConfig.from_pretrained(name)
    text, tied = TEXT[name], TEXT[name]["tie_word_embeddings"]
    eye = dict(hidden_size=1280, out_hidden_size=text["hidden_size"])  # else transformers' own
    return Qwen2_5_VLConfig(text_config=text, vision_config=eye, tie_word_embeddings=tied)


def billions(module: nn.Module) -> float:
    return sum(p.numel() for p in module.parameters()) / 1e9


def node(words: str) -> tuple[int, float]:
    match = re.fullmatch(r"([1-9]\d*)x(\d+(?:\.\d+)?)", words)
    if not match:
        raise ValueError(f"--plan wants GPUs x GB of each, such as 8x80, got {words!r}")
    return int(match[1]), float(match[2])


class Needs(NamedTuple):
    sums: dict[str, dict[str, tuple[float, str]]]  # {when: {what: (GB of 1e9 bytes, how counted)}}
    peak: dict[str, float]
    rows: int  # played at a time
    over: list[str]  # what does not fit


def needs(config: Config, model: Model, gpus: int, card: float) -> Needs:
    text, eye = model.config.text_config, model.config.vision_config
    slots, usable, layers = config.row_tokens, 0.95 * card, text.num_hidden_layers
    N, vision = billions(model), billions(model.model.visual)
    linear = [m for m in model.model.language_model.layers.modules() if isinstance(m, nn.Linear)]
    rank, wide = config.lora_rank, sum(m.in_features for m in linear)
    adapter = 1e-9 * rank * (wide + sum(m.out_features for m in linear))  # matrices A and B
    frozen = rank > 0 or config.freeze_vision in ("rl", "both")
    learnt = adapter or N - vision * frozen  # parameters that are trained
    blocks = [*map(billions, (*model.model.visual.blocks, *model.model.language_model.layers))]
    layer, root = max(blocks), N - sum(blocks)  # root: embeddings, lm_head; what is in no layer
    gradients = 4 * adapter or 4 * learnt / gpus
    reference = 4 * N / gpus * (config.beta > 0 or config.ratio_anchor == "ref")
    always = {
        "weights": (4 * N / gpus, f"fp32, {N:.3f}e9 x 4 B / {gpus}"),
        "optimiser": (2 * gradients, f"two fp32 moments, {learnt:.3f}e9 x 8 B / {gpus}"),
        "reference": (reference, "fp32, as the weights" if reference else "none"),
        "actor": (2 * N, f"a whole copy in bf16, {N:.3f}e9 x 2 B"),
        "CUDA": (CUDA, "context and libraries, a guess"),
    }
    if rank:  # each GPU has all of it, and fetches nothing
        reference, root, layer, one = 0, 0, 0, f"{adapter:.3f}e9 x"
        always = {
            "weights": (2 * N, f"frozen, bf16, {N:.3f}e9 x 2 B: policy, actor and reference"),
            "adapter": (4 * adapter, f"fp32, rank {rank}, {one} 4 B"),
            "optimiser": (8 * adapter, f"two fp32 moments, {one} 8 B"),
            "CUDA": always["CUDA"],
        }
    held = sum(gb for gb, _ in always.values())
    # kept: bf16 inputs of all layers, as if every slot were image (4 patches)
    kept = 2e-9 * slots * text.hidden_size * layers
    kept += 8e-9 * slots * eye.hidden_size * eye.depth * (not frozen)
    inside = 2e-9 * slots * (8 * text.hidden_size + 4 * text.intermediate_size)
    inside += 4e-9 * slots * wide / layers * (rank > 0)  # an adapter keeps its layers' inputs, fp32
    if not config.activation_checkpointing:
        kept, inside = inside * layers + 4 * kept, 0
    logits, back = 12e-9 * CHUNK * text.vocab_size, inside + 10 * layer
    end = max(8 * root, gradients)
    learning = {
        "gradients": (gradients, f"fp32, {learnt:.3f}e9 x 4 B" + f" / {gpus}" * (not rank)),
        "kept": (kept, f"what each layer begins with, {slots} slots, as if all held image"),
        "no layer's": (4 * root, f"embeddings, lm_head ({root:.2f}e9): bf16, and gradients"),
        "logits": (logits, f"{CHUNK} x {text.vocab_size} x 4 B x 3; when they are gone:"),
        "a layer": (back, "activations, weights and gradients, bf16 and fp32; and at last:"),
        "end": (end, "fp32 gradients of what is in no layer, or the update; nothing is kept"),
    }
    heads = text.num_attention_heads // text.num_key_value_heads
    row = 4e-9 * layers * text.hidden_size / heads * config.max_length  # bf16 keys and values
    budget = config.kv_budget_gb or CACHE_SHARE * max(usable - held, 0)
    rows = int(budget / row)
    cache, read = rows * row, 16e-9 * READ * text.hidden_size
    acting = {
        "cache": (cache, f"{rows} rows of {config.max_length} slots, {row:.3f} each"),
        "a layer": (cache * heads / layers, f"its keys and values again, for {heads} heads each"),
        "reading": (read, f"{READ} new slots at a time"),
    }
    peak = {
        # the whole policy in fp32, before it is cut or rounded, with its actor; or, on resuming, a
        # whole reference beside all the rest
        "loading": max((4 if rank else 6) * N + CUDA, held - reference + 4 * N * (reference > 0)),
        "acting": held + sum(gb for gb, _ in acting.values()),
        "learning": held + gradients + max(kept + 4 * root + max(logits, back), end),
    }
    over = [f"{name} takes {gb:.1f} of {usable:.1f} GB" for name, gb in peak.items() if gb > usable]
    if rows < config.rollouts:
        over.append(f"the cache has room for {rows} rows, a group has {config.rollouts}")
    sums = {"always": always, "while learning": learning, "while acting": acting}
    return Needs(sums, peak, rows, over)


def plan(config: Planned) -> tuple[bool, str]:
    """Does stage 2 fit? With the arithmetic, and what to lower if not."""
    gpus, card = node(config.plan)
    with torch.device("meta"):
        model = Model(geometry(config.model))
    N, vision = billions(model), billions(model.model.visual)
    need = needs(config, model, gpus, card)
    frozen = " (frozen)" * (config.lora_rank > 0 or config.freeze_vision in ("rl", "both"))
    saved = need.sums["always"]["optimiser"][0] * (1 if config.lora_rank else gpus)
    fit = (n for n in range(1, 129) if not needs(config, model, n, card).over)
    sums = ""
    for when, items in need.sums.items():
        lines = (f"  {what:12}{gb:7.1f}   {how}\n" for what, (gb, how) in items.items())
        sums += f"{when}, GB per GPU\n{''.join(lines)}\n"
    report = f"""\
{config.model} on {gpus} GPUs of {card:g} GB; {0.95 * card:.1f} GB of each are usable
parameters {N * 1e9:,.0f}, of them vision {vision * 1e9:,.0f}{frozen}

{sums}peak, GB per GPU: {", ".join(f"{name} {gb:.1f}" for name, gb in need.peak.items())}

disk            {1.5 * saved:.1f} GB a checkpoint x {config.keep + 2} \
(kept, best, the one being written) + {2 * N:.0f} GB x 3 exports
host memory     {4 * N:.0f} GB a process while weights load
least number    {next(fit, "none")} of such GPUs

"""
    problems = "".join(f"it does not fit: {problem}\n" for problem in need.over)
    return not need.over, report + (problems + LOWER if need.over else "it fits")


def main(argv: list[str]) -> None:
    with refusals():
        fits, text = plan(parse(Planned, argv, presets=PRESETS))
    print(text)
    sys.exit(0 if fits else 2)
