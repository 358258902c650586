"""python tests/gpu_check.py      what only a GPU can tell, as one line of JSON and a table for
docs/lab.md; under 8 minutes, no downloads. Wants one GPU with at least 100 GB for the 7B part,
which is else left out by name.

    toy         the command line of the toy, short, on CUDA
    equal       the learning policy and the actor that plays give the same log-probabilities, to
                the last bit: fp32 weights fetched in bf16 against bf16 weights
    sandbox     programs run beside a CUDA context, and find no GPU of ours in their environment
    rollout     Qwen2.5-VL-7B's geometry, random weights: 64 trajectories of two turns, 2,000 tokens
                of prompt, a close-up of 1,000; plain, then read in parts, then with vision windows
                of a length in one call
    learn       the same: one row of the default budget, forward and backward; and the gap, how far
                the sampler's log-probabilities are from the learner's
    peak_gb     each time beside the plan's line (planned_gb)

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
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import benchmark

import rollout
from beyond.plan import QWEN_7B, geometry, needs
from beyond.tiny import random_policy, tiny_policy
from data import Sample, toy_questions
from grpo import LogProbs, Objective, group_row, learn, log_probs
from kit.processes import actor_of, shard, sync
from kit.qwen import Policy
from rollout import Rules, encode_prompt, play
from sandbox import Observation, Sandbox
from train import PRESETS, Config

# {what is tried: (rollout.READ, the tower's attention)}
WAYS = {"plain": (1 << 40, "sdpa"), "in parts": (8192, "sdpa"),
        "windows in one call": (8192, "flash_in_windows")}  # fmt: skip

TOY = ("--sft-steps 40 --sft-demos 200 --rl-steps 3 --eval-questions 16 --questions 4 "
       "--rollouts 4").split()  # fmt: skip


def policy_of(device: str, big: bool) -> Policy:
    """Every turn takes all its tokens: nothing depends on what random weights happen to say."""
    policy = random_policy(geometry(QWEN_7B), device) if big else tiny_policy(0)
    policy.model.to(device)
    ends = [policy.end_id, *(i for t, i in policy.tokenizer.get_vocab().items() if ">" in t)]
    policy.forbidden = sorted({*policy.forbidden, *ends})
    return policy


def question(policy: Policy, i: int, tokens: int) -> Sample:
    """A prompt of so many tokens: four fifths of it a picture, the rest one letter each."""
    pixels = policy.image_processor.patch_size * 2
    sample = Sample(f"check-{i}", benchmark.picture(0.8 * tokens, pixels), "?", "")
    missing = max(tokens - len(encode_prompt(policy, sample).ids), 0)
    return replace(sample, question="".join(chr(97 + (i + k) % 26) for k in range(missing + 1)))


class Peak:
    """Seconds and peak memory of a block."""

    def __enter__(self):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self.gb, self.began = None, time.perf_counter()
        return self

    def __exit__(self, *error):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            self.gb = round(torch.cuda.max_memory_allocated() / 1e9, 1)
        self.seconds = round(time.perf_counter() - self.began, 2)


def check_toy(device: str) -> dict:
    with tempfile.TemporaryDirectory() as folder, Peak() as peak:
        command = [sys.executable, "train.py", "--out", f"{folder}/run", *TOY]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
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


def planned(model: torch.nn.Module, length: int = 1, rows: int = 1, row_tokens: int = 8192) -> dict:
    """The plan's sums, GB, for one GPU: {what: GB}."""
    slot = 4e-9 * model.config.text_config.num_hidden_layers * 512  # of the 7B, in bf16
    config = replace(Config(**PRESETS["codev-7b"]), max_length=length, row_tokens=row_tokens,
                     kv_budget_gb=(rows + 0.5) * slot * length)  # fmt: skip
    sums = needs(config, model, 1, 141.0).sums
    return {when: {what: gb for what, (gb, _) in items.items()} for when, items in sums.items()}


def check_rollout(actor: Policy, samples: list[Sample], new: int, crop: int) -> tuple[dict, list]:
    """Two turns; after the first all are shown a picture of crop x crop pixels. Each way once."""
    found, seen = {}, [benchmark.picture(1, crop)]
    shown = Observation(images=seen, boxes=[None], sources=["show"])
    tower = actor.model.model.visual.config
    rules = Rules(turns=2, max_new_tokens=new, max_length=4096, patience=60)
    for way, (read, windows) in WAYS.items():
        tally, eyes = Counter(), type("Eyes", (benchmark.Eyes,), {"shown": shown})
        tower._attn_implementation = windows
        replaced = dict(READ=read, Sandbox=eyes, speak=benchmark.always_code)
        with mock.patch.multiple(rollout, **replaced), Peak() as peak:
            groups = play(actor, samples, 8, rules, tally)
        flat = [t for group in groups for t in group]
        found[way] = {
            "trajectories": len(flat), "prompt_tokens": flat[0].prompt,
            "generated_tokens": tally["generated_tokens"], "seconds": peak.seconds,
            "tokens_per_second": round(tally["generated_tokens"] / tally["decode_seconds"]),
            "read_seconds": round(tally["prefill_seconds"], 2), "peak_gb": peak.gb,
        }  # fmt: skip
    plan = planned(actor.model, max(len(t.ids) for t in flat), len(flat))
    gb = 3 * plan["always"]["actor"] + sum(plan["while acting"].values())  # the policy in fp32, too
    found["planned_gb"] = round(gb, 1)
    return found, groups


def check_learn(policy: Policy, group: list, row_tokens: int) -> dict:
    """One micro-batch: the prompt and as many branches as the budget holds."""
    policy.model.activation_checkpointing_enable()
    branch = len(group[0].ids) - group[0].prompt
    group = group[: max((row_tokens - group[0].prompt) // branch, 1)]
    advantage = torch.linspace(-1, 1, len(group))[None]
    still = torch.optim.SGD(policy.model.parameters(), lr=0.0)  # no moments: one GPU, not eight
    objective, seconds = Objective(beta=0.0, row_tokens=row_tokens), []
    for _ in range(2):  # the first one warms up
        with Peak() as peak:
            report = learn(policy, still, [group], advantage, None, objective)
        seconds.append(peak.seconds)
        still.zero_grad()
    plan = planned(policy.model, row_tokens=row_tokens)
    learning = plan["while learning"]
    gb = sum(learning.values()) - learning["end"] - learning["logits"] + plan["always"]["weights"]
    found = {"slots": group[0].prompt + len(group) * branch, "seconds": seconds}
    found |= {"peak_gb": peak.gb, "planned_gb": round(gb, 1)}
    return found | {name: report[name] for name in ("gap", "largest_gap", "grad_norm")}


def markdown(found: dict) -> str:
    """The rows for docs/lab.md: one for each number."""

    def rows(name: str, value: object) -> list[str]:
        if not isinstance(value, dict):
            return [f"| {name} | {value} |"]
        return [row for key, inner in value.items() for row in rows(f"{name} {key}".strip(), inner)]

    return "\n".join(["| measured | |", "|---|---|", *rows("", found)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dry", action="store_true", help="on a CPU, with the tiny network")
    dry = parser.parse_args().dry
    if not dry and not torch.cuda.is_available():
        raise SystemExit("no CUDA device here: this check is for a GPU (--dry runs it on a CPU)")
    device = "cpu" if dry else "cuda"
    began = time.perf_counter()
    found = {"device": "cpu" if dry else torch.cuda.get_device_name(), "torch": torch.__version__}
    found |= {"toy": check_toy(device), "sandbox": check_sandbox(device)}
    found["equal_tiny"] = check_equal(policy_of(device, False), toy_questions(1, "check")[0])
    big = not dry and torch.cuda.get_device_properties(0).total_memory > 100e9
    if not dry and not big:
        found["7b"] = "left out: it wants a GPU with 100 GB"
    else:
        tokens, new, row_tokens, crop = (2000, 128, 8192, 880) if big else (100, 8, 400, 64)
        policy = policy_of(device, big)
        samples = [question(policy, i, tokens) for i in range(8)]
        found["equal_7b"] = check_equal(policy, samples[0])
        policy.sharded = None
        del policy
        gc.collect()
        policy = policy_of(device, big)
        actor = actor_of(policy)
        found["rollout"], groups = check_rollout(actor, samples, new, crop)
        del actor
        gc.collect()
        shard(policy, LogProbs(policy))
        found["learn"] = check_learn(policy, groups[0], row_tokens)
    found["seconds"] = round(time.perf_counter() - began, 1)
    print(json.dumps(found), markdown(found), sep="\n\n")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
