"""python tests/gpu_check.py      what only a GPU can tell, as one line of JSON; under 8 minutes, no
downloads. Wants one GPU with at least 100 GB for the 7B part, which is else left out by name.

    toy         the command line of the toy, short, on CUDA
    equal       the learning policy and the actor that plays give the same log-probabilities, to
                the last bit: fp32 weights fetched in bf16 against bf16 weights
    sandbox     programs run beside a CUDA context, and find no GPU of ours in their environment
    rollout     Qwen2.5-VL-7B's geometry, random weights: 64 trajectories at 2,000 prompt tokens
    learn       the same: one row of the default budget, forward and backward

    python tests/gpu_check.py --dry    every line of it, on a CPU and with the tiny network
"""

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from beyond.plan import QWEN_7B, geometry
from beyond.tiny import tiny_policy, tiny_tokenizer
from data import TAGS, Sample, toy_questions
from grpo import LogProbs, Objective, group_row, learn, log_probs
from kit.processes import actor_of, shard, sync
from kit.qwen import ImageProcessor, Model, Policy
from rollout import Rules, encode_prompt, play
from sandbox import Sandbox

TOY = ("--sft-steps 40 --sft-demos 200 --rl-steps 3 --eval-questions 16 --questions 4 "
       "--rollouts 4").split()  # fmt: skip


def on(device: str, policy: Policy) -> Policy:
    policy.model.to(device)
    return policy


def policy_7b(device: str) -> Policy:
    """Real shapes and random weights. The tokenizer is the tiny one, whose few hundred tokens are
    all it can say: sizes and speeds do not depend on which."""
    tokenizer = tiny_tokenizer()
    shape = geometry(QWEN_7B)
    for name, token in (("image_token_id", "<|image_pad|>"), ("video_token_id", "<|video_pad|>"),
                        ("vision_start_token_id", "<|vision_start|>")):  # fmt: skip
        setattr(shape, name, tokenizer.convert_tokens_to_ids(token))
    with torch.device(device):
        model = Model._from_config(shape, attn_implementation="sdpa", dtype=torch.float32)
    processor = ImageProcessor(patch_size=14, merge_size=2,
                               size={"shortest_edge": 3136, "longest_edge": 3_211_264})  # fmt: skip
    return Policy(model.eval(), tokenizer, processor, TAGS)


def question(policy: Policy, i: int, tokens: int) -> Sample:
    """A prompt of so many tokens: four fifths of it a picture, the rest one letter each."""
    cell = policy.image_processor.patch_size * 2
    side = int((0.8 * tokens) ** 0.5) * cell
    sample = Sample(f"check-{i}", Image.effect_noise((side, side), 99).convert("RGB"), "?", "")
    missing = tokens - len(encode_prompt(policy, sample).ids)
    words = "".join(chr(ord("a") + (i + k) % 26) for k in range(max(missing, 0) + 1))
    return Sample(sample.id, sample.image, words, "")


def never_ending(policy: Policy) -> Policy:
    """Every turn takes all its tokens: nothing depends on what random weights happen to say."""
    ends = [policy.end_id, *(i for t, i in policy.tokenizer.get_vocab().items() if ">" in t)]
    policy.forbidden = sorted({*policy.forbidden, *ends})
    return policy


class Peak:
    """Seconds and peak memory of a block."""

    def __enter__(self):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self.began = time.perf_counter()
        return self

    def __exit__(self, *error):
        self.gb = None
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            self.gb = round(torch.cuda.max_memory_allocated() / 1e9, 1)
        self.seconds = round(time.perf_counter() - self.began, 2)


def check_toy(device: str) -> dict:
    with tempfile.TemporaryDirectory() as folder, Peak() as peak:
        command = [sys.executable, "train.py", "--out", f"{folder}/run", *TOY]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
        if done.returncode:
            raise SystemExit(f"the toy failed on {device}:\n{done.stderr[-3000:]}")
        lines = Path(folder, "run", "log.jsonl").read_text().splitlines()
    rl = [json.loads(line) for line in lines if '"rl"' in line]
    return {"seconds": peak.seconds, "losses": [line["loss"] for line in rl], "kl": rl[0]["kl"]}


def check_equal(policy: Policy, sample: Sample) -> dict:
    """The same tokens, scored by both. (On one CPU the actor is the policy.)"""
    rules = Rules(turns=1, max_new_tokens=32, max_length=4096, kv_budget_gb=4)
    actor = actor_of(policy)
    shard(policy, LogProbs(policy))
    sync(policy, actor)
    (group,) = play(actor, [sample], 4, rules)
    row = group_row(actor, list(enumerate(group)))
    with torch.no_grad():
        ours, theirs = (log_probs(p, [row])[0] for p in (policy, actor))
    return {"largest_difference": (ours - theirs).abs().max().item(), "tokens": len(ours)}


def check_sandbox(device: str) -> dict:
    torch.ones(8, device=device).sum().item()  # a context, if there is a GPU
    code = "import os\nimage.crop((0, 0, 64, 64)).show()\nprint(os.environ.get('CUDA_HOME'))"
    with Peak() as peak, Sandbox(Image.new("RGB", (128, 128), "red")) as box:
        seen = box.run(code)
    if seen.error or seen.boxes != [(0, 0, 64, 64)]:
        raise SystemExit(f"the sandbox fails beside {device}: {seen}")
    return {"seconds": peak.seconds, "printed": seen.text}


def check_rollout(actor: Policy, samples: list[Sample], new: int) -> tuple[dict, list]:
    tally = Counter()
    rules = Rules(turns=1, max_new_tokens=new, max_length=4096, patience=60)
    with Peak() as peak:
        groups = play(actor, samples, 8, rules, tally)
    return {
        "trajectories": sum(map(len, groups)), "prompt_tokens": groups[0][0].prompt,
        "generated_tokens": tally["generated_tokens"], "seconds": peak.seconds,
        "tokens_per_second": round(tally["generated_tokens"] / tally["decode_seconds"]),
        "prefill_seconds": round(tally["prefill_seconds"], 2), "peak_gb": peak.gb,
    }, groups  # fmt: skip


def check_learn(policy: Policy, group: list, row_tokens: int) -> dict:
    """One micro-batch: the prompt and as many branches as the budget holds."""
    policy.model.activation_checkpointing_enable()
    branch = len(group[0].ids) - group[0].prompt
    group = group[: max((row_tokens - group[0].prompt) // branch, 1)]
    advantage = torch.linspace(-1, 1, len(group))[None]
    still = torch.optim.SGD(policy.model.parameters(), lr=0.0)  # no moments: one GPU, not eight
    seconds = []
    for _ in range(2):  # the first one warms up
        with Peak() as peak:
            objective = Objective(beta=0.0, row_tokens=row_tokens)
            report = learn(policy, still, [group], advantage, None, objective)
        seconds.append(peak.seconds)
        still.zero_grad()
    slots = group[0].prompt + len(group) * branch
    return {"slots": slots, "seconds": seconds, "peak_gb": peak.gb, "norm": report["grad_norm"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dry", action="store_true", help="on a CPU, with the tiny network")
    dry = parser.parse_args().dry
    if not dry and not torch.cuda.is_available():
        raise SystemExit("no CUDA device here: this check is for a GPU (--dry runs it on a CPU)")
    device = "cpu" if dry else "cuda"
    began = time.perf_counter()
    found = {"device": "cpu" if dry else torch.cuda.get_device_name(), "torch": torch.__version__}
    found["toy"] = check_toy(device)
    found["sandbox"] = check_sandbox(device)
    found["equal_tiny"] = check_equal(on(device, tiny_policy(0)), toy_questions(1, "check")[0])
    big = not dry and torch.cuda.get_device_properties(0).total_memory > 100e9
    if not dry and not big:
        found["7b"] = "left out: it wants a GPU with 100 GB"
    else:
        policy = never_ending(policy_7b(device) if big else tiny_policy(0))
        tokens, new, row_tokens = (2000, 256, 8192) if big else (100, 8, 400)
        samples = [question(policy, i, tokens) for i in range(8)]
        found["equal_7b"] = check_equal(policy, samples[0])
        policy.sharded = None
        del policy
        gc.collect()
        policy = never_ending(policy_7b(device) if big else tiny_policy(0))
        actor = actor_of(policy)
        found["rollout"], groups = check_rollout(actor, samples, new)
        del actor
        gc.collect()
        shard(policy, LogProbs(policy))
        found["learn"] = check_learn(policy, groups[0], row_tokens)
    found["seconds"] = round(time.perf_counter() - began, 1)
    print(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
