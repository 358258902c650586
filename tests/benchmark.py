"""
benchmark.py: is sharing the prompt worth its lines? Ratios against the plain Hugging Face way.

    python tests/benchmark.py                   all checks, about 3 minutes on 2 cores
    python tests/benchmark.py --only sandbox    checks whose name contains "sandbox"
    python tests/benchmark.py --trl             also a whole step against TRL's GRPOTrainer, about
                                                2 minutes more (pip install trl==1.16.0)

One JSON line a check: {"check", "ours", "baseline", "ratio", "bound", "ok"}, then a table of how
cost grows. Exit status 1 if a bound fails. Every ratio is paired: both sides run in turn in this
process, on one thread, and are measured in CPU seconds, medians of some repeats. The baselines are
what one writes first: K copies of prompt and image, everything encoded anew each turn, one padded
row per rollout. They are correct, and tested to be.
"""

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from transformers import DynamicCache, GenerationConfig, Qwen2_5_VLConfig

import rollout
from beyond.tiny import tiny_policy
from data import TAGS, Sample
from grpo import LogProbs, Objective, advantage_std, group_row, learn, log_probs
from kit.caches import left_pad
from kit.qwen import ImageProcessor, Model, Policy
from rollout import Rules, begin, encode_prompt, play, speak
from sandbox import Limits, Observation, Sandbox

K, TURNS, NEW = 8, 3, 16  # rollouts, turns, tokens a turn


def build(hidden: int = 256, layers: int = 2, vocabulary: int | None = None) -> Policy:
    """A Qwen2.5-VL of the given size with random weights and 16-pixel visual tokens."""
    tiny, eighth = tiny_policy(0), hidden // 32  # of a head
    shape = tiny.model.config.to_dict()
    shape["text_config"].pop("layer_types")
    shape["text_config"] |= dict(
        vocab_size=vocabulary or len(tiny.tokenizer), hidden_size=hidden, num_hidden_layers=layers,
        intermediate_size=2 * hidden, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=8192, initializer_range=0.02,
        rope_parameters=dict(rope_type="default", rope_theta=1e6,
                             mrope_section=[eighth, eighth, 2 * eighth]),
    )  # fmt: skip
    shape["vision_config"] |= dict(
        depth=2, hidden_size=hidden // 2, intermediate_size=hidden, num_heads=4, window_size=64,
        out_hidden_size=hidden, fullatt_block_indexes=[1], initializer_range=0.02,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Model(Qwen2_5_VLConfig(**shape)).eval()
    size = {"shortest_edge": 256, "longest_edge": 1 << 24}
    policy = Policy(model, tiny.tokenizer, ImageProcessor(patch_size=8, size=size), TAGS)
    ends = policy.tokenizer.convert_tokens_to_ids(["<|im_end|>", "</code>", "</answer>"])
    policy.forbidden = sorted({*ends, *policy.forbidden})  # turns of a fixed length
    return policy


def inputs(policy: Policy, ids: torch.Tensor, pictures: list) -> dict[str, torch.Tensor]:
    """The arguments of a forward."""
    kinds = (ids == policy.image_id).int()
    return dict(input_ids=ids, mm_token_type_ids=kinds, **policy.model_images(pictures))


def picture(visual_tokens: float, pixels: int = 16) -> Image.Image:
    side = int(visual_tokens**0.5) * pixels
    return Image.effect_noise((side, side), 99).convert("RGB")


def question(visual_tokens: int) -> Sample:
    return Sample("benchmark", picture(visual_tokens), "Which texture is on the red square ?", "")


class Eyes:
    """Stands in for the sandbox: the same close-up, 64 visual tokens, after every turn."""

    shown = Observation(images=[picture(64)], boxes=[None], sources=["show"])

    def __init__(self, *args) -> None:
        self.run, self.close = lambda code: self.shown, lambda: None


def always_code(policy, trajectory, reply):
    """Stands in for rollout.speak: every turn is a program."""
    start = len(trajectory.ids)
    trajectory.act(reply)
    trajectory.turns.append(rollout.Turn("", "look()", None, start, len(trajectory.ids)))
    return "look()"


RULES = Rules(turns=TURNS, max_new_tokens=NEW, max_length=8192, patience=60)


def ours_play(policy: Policy, sample: Sample, rollouts: int = K) -> list:
    return play(policy, [sample], rollouts, RULES)


@torch.no_grad()
def plain_play(policy: Policy, sample: Sample) -> list:
    """The usual way: each turn encodes the whole history of each rollout, pictures included."""
    rows = [begin(sample, encode_prompt(policy, sample)) for _ in range(K)]
    config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=NEW,
        suppress_tokens=policy.forbidden, pad_token_id=policy.pad_id,
    )  # fmt: skip
    for _ in range(TURNS):
        ids, mask = left_pad([t.ids for t in rows], policy.pad_id, policy.device)
        given = inputs(policy, ids, [p for t in rows for p in t.images])
        output = policy.model.generate(attention_mask=mask, generation_config=config, **given)
        for t, reply in zip(rows, output[:, ids.shape[1] :].tolist()):
            always_code(policy, t, reply)
            rollout.listen(policy, t, Eyes.shown, policy.pictures(Eyes.shown.images), RULES)
    return rows


# Measuring
def tell(check: str, bound: float | None, at_least: bool = False, **values: float) -> bool:
    """One JSON line. Does the last value keep the bound? (None: it is only told.)"""
    values = {name: round(value, 4) for name, value in values.items()}
    *_, value = values.values()
    ok = bound is None or (value >= bound if at_least else value <= bound)
    print(json.dumps({"check": check, **values, "bound": bound, "ok": ok}), flush=True)
    return ok


def race(check: str, ours: Callable, baseline: Callable, bound, repeats, at_most=False) -> bool:
    """CPU seconds of both, run in turn, medians; one unmeasured run each comes first."""
    spent: dict[Callable, list[float]] = {ours: [], baseline: []}
    for _ in range(repeats + 1):
        for run, spans in spent.items():
            began = time.process_time()
            run()
            spans.append(time.process_time() - began)
    a, b = (statistics.median(spans[1:]) for spans in spent.values())
    ratio = a / b if at_most else b / a
    return tell(check, bound, not at_most, ours=a, baseline=b, ratio=ratio)


def rollouts(visual: int, bound: float, repeats: int) -> bool:
    ways = [partial(play, build(), question(visual)) for play in (ours_play, plain_play)]
    check = f"rollout, K 8, 3 turns, {visual} visual tokens: plain / ours"
    return race(check, *ways, bound, repeats)


@torch.no_grad()
def prefill() -> bool:
    policy, sample = build(layers=4), question(256)
    prompt = encode_prompt(policy, sample)

    def encode(copies: int, repeat: int) -> None:
        given = inputs(policy, torch.tensor([prompt.ids] * copies), prompt.pictures * copies)
        cache = DynamicCache(config=policy.model.config)
        policy.model(cache=cache, use_cache=True, logits_to_keep=1, **given)
        cache.batch_repeat_interleave(repeat)

    check = "prefill, K 8, 256 visual tokens: K copies / once"
    return race(check, partial(encode, 1, K), partial(encode, K, 1), 6, 7)


def group(policy: Policy, sample: Sample, length: int) -> list:
    """K one-turn rollouts of 0.4 to 1.6 times `length` tokens."""
    prompt, generator = encode_prompt(policy, sample), torch.Generator().manual_seed(0)
    trajectories = [begin(sample, prompt) for _ in range(K)]
    for t, share in zip(trajectories, torch.linspace(0.4, 1.6, K).tolist()):
        t.act(torch.randint(20, 250, (int(length * share),), generator=generator).tolist())
    return trajectories


def padded_logp(policy: Policy, trajectories: list) -> torch.Tensor:
    """The usual way: one padded row per rollout, logits for the completion part only."""
    ids, mask = left_pad([t.ids for t in trajectories], policy.pad_id, policy.device)
    acted, _ = left_pad([t.acted for t in trajectories], 0, policy.device)
    given = inputs(policy, ids, [p for t in trajectories for p in t.images])
    most = ids.shape[1] - trajectories[0].prompt
    given |= dict(attention_mask=mask, use_cache=False, logits_to_keep=most + 1)
    logits = policy.model(**given).logits[:, :-1]
    logits[..., policy.forbidden] = float("-inf")
    logp = logits.float().log_softmax(-1).gather(-1, ids[:, -most:, None])[..., 0]
    return logp[acted[:, -most:].bool()]


def learning(visual: int, bound: float, repeats: int) -> bool:
    policy = build()
    trajectories = group(policy, question(visual), 128)
    ours = lambda: log_probs(policy, [group_row(policy, [*enumerate(trajectories)])])[0]  # noqa: E731
    plain = partial(padded_logp, policy, trajectories)
    with torch.no_grad():
        assert (ours() - plain()).abs().max() < 1e-4, "ours and the baseline disagree"
    check = f"learning row, K 8, prompt {trajectories[0].prompt}, 128 tokens each: padded / ours"
    ways = (lambda: ours().sum().backward(), lambda: plain().sum().backward())
    return race(check, *ways, bound, repeats)


def saved_bytes() -> bool:
    """What autograd keeps for the log-probs of 1,024 of 2,048 tokens, vocabulary 152,064."""
    policy = build(hidden=64, vocabulary=152_064)
    head, hidden = policy.model.lm_head, torch.randn(2048, 64, requires_grad=True)
    keep, labels = torch.arange(1024), torch.randint(0, 300, (1024,))

    def kept(run: Callable) -> float:
        sizes = []

        def pack(tensor):
            sizes.append(tensor.nbytes * (tensor.data_ptr() != head.weight.data_ptr()))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            run()
        return sum(sizes) / 2**20

    ours = kept(lambda: LogProbs(policy).chunked(hidden[keep], labels))
    plain = kept(lambda: head(hidden).float().log_softmax(-1)[keep].gather(-1, labels[:, None]))
    check = "log-probs, MiB kept for backward: full logits / ours"
    return tell(check, 20, True, ours=ours, baseline=plain, ratio=plain / ours)


@torch.no_grad()
def generate_overhead() -> bool:
    """generate() against a bare loop of forwards, 28 layers of 64, batch 8, 32 tokens."""
    policy = build(hidden=64, layers=28)
    ids = torch.randint(20, 250, (8, 16))
    config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, max_new_tokens=32,
                              pad_token_id=policy.pad_id)  # fmt: skip

    def bare() -> None:
        cache, new = DynamicCache(config=policy.model.config), ids
        for _ in range(32):
            output = policy.model(input_ids=new, cache=cache, use_cache=True, logits_to_keep=1)
            new = output.logits[:, -1].softmax(-1).multinomial(1)

    ours = partial(policy.model.generate, ids, generation_config=config)
    return race("generate / bare loop, 28 layers", ours, bare, 1.4, 5, at_most=True)


# One whole step against TRL. Counted on both sides: image processing, the prompt's tokens, rollouts
# of a fixed length, rewards, advantages, forward, backward, clipping, AdamW. For TRL alone, being
# part of its step: each copy of a prompt and its image is prepared twice (to sample, to score),
# entropies are computed, the lm head reads every slot (on a CPU), and train() sets up its loop
# (under 1 %). For neither: building models and trainer, saving. No program is run.


def distinct(completion_ids: list[list[int]]) -> list[float]:
    """The reward of both sides: how many different tokens a completion has."""
    return [float(len(set(ids))) for ids in completion_ids]


def trl_trainer(policy: Policy, samples: list[Sample], reward: Callable, new: int, folder: str):
    """TRL's GRPOTrainer on the policy's own parts, set to do what grpo.py does: fp32, nothing
    recomputed, no KL term, the loss a mean over all tokens, one step for each train()."""
    from datasets import Dataset
    from transformers import PrinterCallback, Qwen2_5_VLProcessor
    from trl import GRPOConfig, GRPOTrainer

    class Processor(Qwen2_5_VLProcessor):
        def check_argument_for_proper_class(self, *args) -> None:
            """A real video processor needs torchvision. No video comes, so anything may pass."""

    images, tokenizer = policy.image_processor, policy.tokenizer
    config = GRPOConfig(
        output_dir=folder, save_strategy="no", report_to=[], disable_tqdm=True, logging_steps=1,
        use_cpu=True, bf16=False, gradient_checkpointing=False, shuffle_dataset=False, max_steps=1,
        per_device_train_batch_size=K * len(samples), num_generations=K, max_completion_length=new,
        generation_kwargs={"suppress_tokens": policy.forbidden}, temperature=1.0, top_k=0,
        top_p=1.0, beta=0.0, loss_type="dapo", max_grad_norm=1.0, lr_scheduler_type="constant",
    )  # fmt: skip
    data = Dataset.from_dict({"row": list(range(len(samples)))}).with_transform(lambda batch: {
        "prompt": [[{"role": "user", "content": samples[i].question}] for i in batch["row"]],
        "image": [samples[i].image for i in batch["row"]],
    })  # fmt: skip
    trainer = GRPOTrainer(
        policy.model, reward, config, data,
        processing_class=Processor(images, tokenizer, images, tokenizer.chat_template),
        optimizers=(torch.optim.AdamW(policy.model.parameters(), 1e-6), None),
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)  # stdout is for JSON lines
    return trainer


def against_trl(visual: int, prompts: int, new: int, bound: float, repeats: int) -> bool:
    import trl

    policy, samples = build(layers=4), [question(visual)] * prompts
    optimizer = torch.optim.AdamW(policy.model.parameters(), 1e-6)
    rules = Rules(turns=1, max_new_tokens=new, max_length=8192)
    completions: list[list[int]] = []  # TRL's newest

    def reward(completion_ids: list[list[int]], **others) -> list[float]:
        completions[:] = completion_ids
        return distinct(completion_ids)

    def teach(groups: list) -> dict:
        R = torch.tensor([distinct([t.ids[t.prompt :] for t in group]) for group in groups])
        A = advantage_std(R, torch.ones_like(R, dtype=torch.bool))
        return learn(policy, optimizer, groups, A, None, Objective(beta=0.0))

    def agree() -> None:
        """TRL's first step, learnt by us from the same weights, must have the same gradient."""
        trainer.train()
        groups = [[begin(s, encode_prompt(policy, s)) for _ in range(K)] for s in samples]
        for t, ids in zip(sum(groups, []), completions, strict=True):
            t.act(ids)
            assert len(ids) == new, "a completion has another length"
        # TRL forbids tokens when it samples, not when it scores. Here, and only here, nor do we.
        with mock.patch.object(policy, "forbidden", np.array([], int)):
            ratio = teach(groups)["grad_norm"] / trainer.state.log_history[0]["grad_norm"]
        assert abs(ratio - 1) < 1e-3, "TRL and ours disagree"

    # The true `speak`, not always_code: nothing to run, nothing to show.
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(rollout, "speak", speak):
        trainer = trl_trainer(build(layers=4), samples, reward, new, folder)
        agree()
        what = f"K {K}, {visual} visual tokens, {prompts} x {new} tokens"
        ours = lambda: teach(play(policy, samples, K, rules))  # noqa: E731
        check = f"one step, {what}: TRL {trl.__version__} / ours"
        return race(check, ours, trainer.train, bound, repeats)


# The sandbox
def sandbox_speed() -> bool:
    """Wall-clock milliseconds, medians; a picture of 256 x 256."""
    image, bounds = picture(256), {"start": 60, "no-op": 2, "crop and save": 20}
    spent = {what: [] for what in bounds}

    def timed(what: str, run: Callable, *words) -> None:
        began = time.perf_counter()
        run(*words)
        spent[what].append(1e3 * (time.perf_counter() - began))

    Sandbox(image).run("")  # the server starts once per training run, not per trajectory
    for _ in range(40):
        with Sandbox(image) as sandbox:
            timed("start", lambda: sandbox.protection)
            for n in range(4):
                timed("no-op", sandbox.run, "")
                timed("crop and save", sandbox.run, f"image.crop(({n},0,200,150)).save('c.png')")
    return all([
        tell(f"sandbox: {what}, ms, median", bound, value=statistics.median(spent[what]))
        for what, bound in bounds.items()
    ])  # fmt: skip


def sandbox_limit() -> bool:
    """By how much a program that never ends outlives its limit."""
    late = []
    for _ in range(5):
        with Sandbox(picture(256), Limits(seconds=0.5)) as sandbox:
            sandbox.run("")
            late.append(sandbox.run("while True: pass").seconds - 0.5)
    return tell("sandbox: past the hard limit, s, worst of 5", 0.6, value=max(late))


def sandbox_crowd() -> bool:
    """Memory of 64 workers that have each cut a crop, and calls per second of 16 in parallel."""
    crowd = [Sandbox(picture(256)) for _ in range(64)]
    crops = [f"image.crop(({i},0,{i + 64},64)).show()" for i in range(20)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda sandbox: sandbox.run(crops[0]), crowd))
        rollups = [Path(f"/proc/{sandbox.pid}/smaps_rollup").read_text() for sandbox in crowd]
        held = sum(int(re.search(r"^Pss:\s+(\d+)", rollup, re.M)[1]) for rollup in rollups)
        began = time.perf_counter()
        list(pool.map(lambda sandbox: [*map(sandbox.run, crops)], crowd[:16]))
        rate = 16 * len(crops) / (time.perf_counter() - began)
    tell("sandbox: crops per second, 16 in parallel", None, value=rate)
    return tell("sandbox: 64 workers, GiB, proportional set size", 1.5, value=held / 2**20)


def growth() -> None:
    """CPU seconds per trajectory of a 3-turn rollout, as K and the picture grow."""
    policy, sizes = build(), (64, 256, 1024, 4096)
    print("\nCPU seconds per trajectory, 3 turns\n\nK \\ visual tokens", *(f"{n:8}" for n in sizes))
    for rollouts in (1, 2, 4, 8, 16):
        spent = []
        for size in sizes:
            sample, began = question(size), time.process_time()
            ours_play(policy, sample, rollouts)
            spent.append((time.process_time() - began) / rollouts)
        print(f"{rollouts:17}", *(f"{seconds:8.3f}" for seconds in spent), flush=True)


CHECKS: dict[str, Callable[[], bool]] = {
    "rollout 1024": partial(rollouts, 1024, 6, 1),
    "rollout 256": partial(rollouts, 256, 2.5, 3),
    "prefill": prefill,
    "learning 1024": partial(learning, 1024, 5, 2),
    "learning 256": partial(learning, 256, 2.5, 3),
    "log-probs": saved_bytes,
    "generate": generate_overhead,
    "sandbox speed": sandbox_speed,
    "sandbox limit": sandbox_limit,
    "sandbox crowd": sandbox_crowd,
    "trl 256": partial(against_trl, 256, 2, 32, 2.5, 3),
    "trl 1024": partial(against_trl, 1024, 1, 48, 4, 2),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", default="", help="run checks whose name contains this")
    parser.add_argument("--trl", action="store_true", help="also a whole step against TRL")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rollout.Sandbox, rollout.speak = Eyes, always_code
    offered = [name for name in CHECKS if args.trl or "trl" not in name]
    chosen = [name for name in offered if args.only in name]
    if not chosen:
        parser.error(f"no check contains {args.only!r}; there are: {', '.join(offered)}")
    results = [CHECKS[name]() for name in chosen]
    if not args.only:
        growth()
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
