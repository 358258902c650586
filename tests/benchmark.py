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
row per rollout. They are correct, and tested to be: see `agree` below.
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
from importlib.metadata import distributions
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
TRL = "1.16.0"  # optional: only --trl needs it


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


def picture(visual_tokens: int) -> Image.Image:
    side = int(visual_tokens**0.5) * 16
    noise = np.random.default_rng(0).integers(0, 255, (side, side, 3), np.uint8)
    return Image.fromarray(noise)


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


def ours_play(policy: Policy, sample: Sample, rollouts: int = K, turns: int = TURNS) -> list:
    rules = Rules(turns=turns, max_new_tokens=NEW, max_length=8192, patience=60)
    return play(policy, [sample], rollouts, rules)[0]


@torch.no_grad()
def plain_play(policy: Policy, sample: Sample, rollouts: int = K, turns: int = TURNS) -> list:
    """The usual way: each turn encodes the whole history of each rollout, pictures included."""
    rules = Rules(turns=turns, max_new_tokens=NEW, max_length=8192)
    rows = [begin(sample, encode_prompt(policy, sample)) for _ in range(rollouts)]
    for _ in range(turns):
        ids, mask = left_pad([t.ids for t in rows], policy.pad_id, policy.device)
        output = policy.model.generate(
            input_ids=ids, attention_mask=mask,
            mm_token_type_ids=(ids == policy.image_id).int(),
            generation_config=GenerationConfig(
                do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=NEW,
                suppress_tokens=policy.forbidden, pad_token_id=policy.pad_id),
            **policy.model_images([p for t in rows for p in t.images]),
        )  # fmt: skip
        for t, reply in zip(rows, output[:, ids.shape[1] :].tolist()):
            always_code(policy, t, reply)
            pictures = policy.pictures(Eyes.shown.images)
            rollout.listen(policy, t, Eyes.shown, pictures, rules)
    return rows


# --- Measuring -------------------------------------------------------------------------------


def paired(ours: Callable, baseline: Callable, repeats: int) -> tuple[float, float]:
    """CPU seconds of both, run in turn, medians; one unmeasured run each comes first."""
    spent: dict[Callable, list[float]] = {ours: [], baseline: []}
    for _ in range(repeats + 1):
        for run, spans in spent.items():
            began = time.process_time()
            run()
            spans.append(time.process_time() - began)
    return tuple(statistics.median(spans[1:]) for spans in spent.values())


def line(check: str, ours: float, baseline: float, bound: float, at_most: bool = False) -> bool:
    ratio = ours / baseline if at_most else baseline / ours
    ok = ratio <= bound if at_most else ratio >= bound
    values = {"ours": round(ours, 4), "baseline": round(baseline, 4), "ratio": round(ratio, 3)}
    print(json.dumps({"check": check, **values, "bound": bound, "ok": ok}), flush=True)
    return ok


def rollouts(visual: int, bound: float, repeats: int) -> bool:
    ways = [partial(play, build(), question(visual)) for play in (ours_play, plain_play)]
    check = f"rollout, K 8, 3 turns, {visual} visual tokens: plain / ours"
    return line(check, *paired(*ways, repeats), bound)


@torch.no_grad()
def prefill() -> bool:
    policy, sample = build(layers=4), question(256)
    prompt = encode_prompt(policy, sample)

    def encode(copies: int, repeat: int) -> None:
        ids = torch.tensor([prompt.ids] * copies)
        cache = DynamicCache(config=policy.model.config)
        policy.model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1,
                     mm_token_type_ids=(ids == policy.image_id).int(),
                     **policy.model_images(prompt.pictures * copies))  # fmt: skip
        cache.batch_repeat_interleave(repeat)

    ours, plain = paired(lambda: encode(1, K), lambda: encode(K, 1), 7)
    return line("prefill, K 8, 256 visual tokens: K copies / once", ours, plain, 6)


def group(policy: Policy, sample: Sample, length: int) -> list:
    """K one-turn rollouts of 0.4 to 1.6 times `length` tokens."""
    prompt, generator = encode_prompt(policy, sample), torch.Generator().manual_seed(0)
    trajectories = []
    for share in torch.linspace(0.4, 1.6, K).tolist():
        t = begin(sample, prompt)
        t.act(torch.randint(20, 250, (int(length * share),), generator=generator).tolist())
        trajectories.append(t)
    return trajectories


def padded_logp(policy: Policy, trajectories: list) -> torch.Tensor:
    """The usual way: one padded row per rollout, logits for the completion part only."""
    width = max(len(t.ids) for t in trajectories)
    P, pads = trajectories[0].prompt, [width - len(t.ids) for t in trajectories]
    ids = torch.tensor([t.ids + [policy.pad_id] * n for t, n in zip(trajectories, pads)])
    acted = torch.tensor([t.acted + [False] * n for t, n in zip(trajectories, pads)])
    mask = torch.tensor([[1] * (width - n) + [0] * n for n in pads])
    logits = policy.model(
        input_ids=ids, attention_mask=mask, mm_token_type_ids=(ids == policy.image_id).int(),
        use_cache=False, logits_to_keep=width - P + 1,
        **policy.model_images([p for t in trajectories for p in t.images]),
    ).logits[:, :-1]  # fmt: skip
    logits[..., policy.forbidden] = float("-inf")
    logp = logits.float().log_softmax(-1).gather(-1, ids[:, P:, None])[..., 0]
    return logp[acted[:, P:]]


def agree(policy: Policy, trajectories: list) -> None:
    """Both ways must give the same numbers, or the race is void."""
    with torch.no_grad():
        ours = log_probs(policy, [group_row(policy, list(enumerate(trajectories)))])[0]
        plain = padded_logp(policy, trajectories)
    assert (ours - plain).abs().max() < 1e-4, "ours and the baseline disagree"


def learning(visual: int, bound: float, repeats: int) -> bool:
    policy = build()
    trajectories = group(policy, question(visual), 128)
    agree(policy, trajectories)

    def ours() -> None:
        log_probs(policy, [group_row(policy, list(enumerate(trajectories)))])[0].sum().backward()

    spent = paired(ours, lambda: padded_logp(policy, trajectories).sum().backward(), repeats)
    P = trajectories[0].prompt
    return line(f"learning row, K 8, prompt {P}, 128 tokens each: padded / ours", *spent, bound)


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
    return line("log-probs, MiB kept for backward: full logits / ours", ours, plain, 20)


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

    ours, plain = paired(lambda: policy.model.generate(ids, generation_config=config), bare, 5)
    return line("generate / bare loop, 28 layers", ours, plain, 1.4, at_most=True)


# --- One whole step against TRL ----------------------------------------------------------------
#
# Counted on both sides: image processing, the prompt's tokens, K rollouts of a fixed length,
# rewards, advantages, forward, backward, clipping, AdamW. Pictures lie in memory. For TRL alone,
# being part of its step: each copy of a prompt and its image is prepared twice (to sample, to
# score), entropies are computed, the lm head reads every slot (on a CPU), and train() sets up its
# loop (under 1 %). For neither: building models and trainer, saving. No program is run.


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
        spent = paired(lambda: teach(play(policy, samples, K, rules)), trainer.train, repeats)
    what = f"K {K}, {visual} visual tokens, {prompts} x {new} tokens"
    return line(f"one step, {what}: TRL {TRL} / ours", *spent, bound)


# --- The sandbox -------------------------------------------------------------------------------


def limit(check: str, value: float, bound: float | None) -> bool:
    """A measured value, the most it may be (None: it is only told) and whether it holds."""
    values = {"value": round(value, 2), "bound": bound, "ok": bound is None or value <= bound}
    print(json.dumps({"check": check, **values}), flush=True)
    return values["ok"]


def sandbox_speed() -> bool:
    """Wall-clock milliseconds, medians; a picture of 256 x 256."""
    image, bounds = picture(256), {"start": 60, "no-op": 2, "crop and save": 20}
    spent = {what: [] for what in bounds}

    def timed(what: str, run: Callable, *words) -> None:
        began = time.perf_counter()
        run(*words)
        spent[what].append(1e3 * (time.perf_counter() - began))

    with Sandbox(image) as first:
        first.run("")  # the server starts once per training run, not per trajectory
    for _ in range(40):
        with Sandbox(image) as sandbox:
            timed("start", lambda: sandbox.protection)
            for n in range(4):
                timed("no-op", sandbox.run, "")
                timed("crop and save", sandbox.run, f"image.crop(({n},0,200,150)).save('c.png')")
    return all([limit(f"sandbox: {what}, ms, median", statistics.median(spent[what]), bound)
                for what, bound in bounds.items()])  # fmt: skip


def sandbox_limit() -> bool:
    """By how much a program that never ends outlives its limit."""
    late = []
    for _ in range(5):
        with Sandbox(picture(256), Limits(seconds=0.5)) as sandbox:
            sandbox.run("")
            late.append(sandbox.run("while True: pass").seconds - 0.5)
    return limit("sandbox: past the hard limit, s, worst of 5", max(late), 0.6)


def sandbox_crowd() -> bool:
    """Memory of 64 workers that have each cut a crop, and calls per second of 16 in parallel."""
    crowd = [Sandbox(picture(256)) for _ in range(64)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda sandbox: sandbox.run("image.crop((0,0,50,50)).show()"), crowd))
        held = 0
        for pid in (sandbox.pid for sandbox in crowd):
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            held += int(re.search(r"^Pss:\s+(\d+)", rollup, re.M)[1])
        began = time.perf_counter()
        crops = [f"image.crop(({i},0,{i + 64},64)).show()" for i in range(20)]
        list(pool.map(lambda sandbox: [sandbox.run(crop) for crop in crops], crowd[:16]))
        rate = 16 * len(crops) / (time.perf_counter() - began)
    for sandbox in crowd:
        sandbox.close()
    fits = limit("sandbox: 64 workers, GiB, proportional set size", held / 2**20, 1.5)
    return limit("sandbox: crops per second, 16 in parallel", rate, None) and fits


def growth() -> None:
    """CPU seconds per trajectory of a 3-turn rollout, as K and the picture grow."""
    policy = build()
    sizes, counts = (64, 256, 1024, 4096), (1, 2, 4, 8, 16)
    print("\nCPU seconds per trajectory, 3 turns\n")
    print("K \\ visual tokens" + "".join(f"{n:>9}" for n in sizes))
    for rollouts in counts:
        cells = []
        for size in sizes:
            sample, began = question(size), time.process_time()
            ours_play(policy, sample, rollouts)
            cells.append((time.process_time() - began) / rollouts)
        print(f"{rollouts:>17}" + "".join(f"{cell:>9.3f}" for cell in cells), flush=True)


CHECKS: dict[str, Callable[[], bool]] = {
    "rollout 1024": lambda: rollouts(1024, 6, 1),
    "rollout 256": lambda: rollouts(256, 2.5, 3),
    "prefill": prefill,
    "learning 1024": lambda: learning(1024, 5, 2),
    "learning 256": lambda: learning(256, 2.5, 3),
    "log-probs": saved_bytes,
    "generate": generate_overhead,
    "sandbox speed": sandbox_speed,
    "sandbox limit": sandbox_limit,
    "sandbox crowd": sandbox_crowd,
}
TRL_CHECKS: dict[str, Callable[[], bool]] = {
    "trl 256": lambda: against_trl(256, 2, 32, 2.5, 3),
    "trl 1024": lambda: against_trl(1024, 1, 48, 4, 2),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", default="", help="run checks whose name contains this")
    parser.add_argument("--trl", action="store_true", help="also a whole step against TRL")
    args = parser.parse_args()
    if args.trl:
        found = next((package.version for package in distributions(name="trl")), None)
        if found != TRL:
            parser.error(f"--trl needs TRL {TRL}, found {found}: pip install trl=={TRL}")
        CHECKS.update(TRL_CHECKS)
    torch.set_num_threads(1)
    rollout.Sandbox, rollout.speak = Eyes, always_code
    chosen = [name for name in CHECKS if args.only in name]
    if not chosen:
        parser.error(f"no check contains {args.only!r}; there are: {', '.join(CHECKS)}")
    results = [CHECKS[name]() for name in chosen]
    if not args.only:
        growth()
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
