"""python -m pytest tests/test_gpu_branch.py      the way of a GPU, taken on a CPU.

A GPU holds fp32 weights, cut even for one process. It fetches them in bf16, and an actor in bf16
plays. `kit.processes.AS_ON_A_GPU` makes a CPU do the same, so that all but the device is run."""

import json
import signal
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
import torch
from accelerate import PartialState
from conftest import json_lines, killed, same_end, tied, together, trained
from test_processes import A, run_in, three_steps, union

import kit.processes
from beyond.tiny import tiny_policy
from grpo import LogProbs, blank_row, log_probs
from kit.processes import actor_of, level, mine, precision, processes, shard, sync, whole
from kit.qwen import Policy
from rollout import load_policy
from sft import rows_of

RUN = """--sft-steps 1 --sft-demos 4 --rl-steps 2 --questions 2 --rollouts 3 --eval-questions 4
    --save-every 1 --rl-lr 1e-2""".split()


def work(policy: Policy, groups: list, folder: Path | None) -> None:
    """One of some processes. With a folder it goes on from a checkpoint there, too."""
    PartialState(cpu=True)  # they meet
    kit.processes.AS_ON_A_GPU = True
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    actor = actor_of(policy)
    policy.model.activation_checkpointing_enable()
    shard(policy, LogProbs(policy))
    sync(policy, actor)
    groups = mine(groups)
    assert len(groups) == 2 // processes()[1] and precision(policy) == torch.bfloat16

    def agree() -> bool:
        """Is every token's log-probability the same to the bit, with rows padded side by side?"""
        policy.model.train()
        rows = level(policy, [rows_of(actor, group) for group in groups], blank_row)
        with torch.no_grad():
            return all(torch.equal(*(log_probs(p, b)[0] for p in (policy, actor))) for b in rows)

    assert agree()
    saved = (actor, run_in(folder)) if folder else ()
    _, straight, *resumed = three_steps(policy, groups, mine(A[:2]), *saved)
    for name, weight in straight.items():
        assert not torch.equal(weight, before[name]), name
        assert all(torch.equal(weight, again[name]) for again in resumed), name
    sync(policy, actor)
    assert agree() and {b.dtype for b in actor.model.buffers()} == {torch.float32}  # angles
    for p, q in zip(policy.model.parameters(), actor.model.parameters()):
        assert (p.dtype, q.dtype) == (torch.float32, torch.bfloat16)
        assert torch.equal(whole(p.detach()).bfloat16(), q)


@pytest.mark.parametrize("kind, n", [("tiny", 1), ("tied", 2), ("standin", 1)])
def test_the_way_of_a_gpu_is_exact(kind, n, tmp_path, request):
    """tied: with one tensor for the embeddings and for lm_head, as the 3B has."""
    standin = kind == "standin"
    policy = load_policy(request.getfixturevalue("standin_folder")) if standin else tiny_policy(0)
    policy = policy if kind == "tiny" else tied(policy)
    groups = [*islice(union(policy), 2)]
    codes, told = together(n, work, policy, groups, None if standin else tmp_path)
    assert codes == [0] * n, told


def on_a_gpu(task: Callable, *words) -> None:
    kit.processes.AS_ON_A_GPU = True
    task(*words)


def test_a_run_on_it_that_is_killed_ends_as_if_it_had_not_been(tmp_path):
    whole, out = tmp_path / "whole", tmp_path / "killed"
    for code, *words in (
        (0, trained, "--out", whole, *RUN),
        (-signal.SIGKILL, killed, "checkpoint-rl-2", "--out", out, *RUN),
        (0, trained, "--resume", out),
    ):
        codes, told = together(1, on_a_gpu, *words)
        assert codes == [code], told
    assert same_end(whole, out) and json_lines(out / "log.jsonl")[-1]["kl"] > 0
    assert json.loads((out / "rl" / "config.json").read_text())["dtype"] == "bfloat16"
