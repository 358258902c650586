"""python -m pytest tests/test_gpu_branch.py      about 60 s: the way of a GPU, taken on a CPU.

A GPU holds fp32 weights, cut even for one process. It fetches them in bf16, and an actor in bf16
plays. `kit.processes.AS_ON_A_GPU` makes a CPU do the same, so that all but the device is run."""

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import tied, together
from test_processes import A, run_in, three_steps, union

import kit.folder
import kit.processes
import train
from beyond.tiny import tiny_policy
from grpo import LogProbs, blank_row, log_probs
from kit.processes import actor_of, level, mine, precision, shard, sync, whole
from rollout import load_policy
from sft import rows_of

RUN = """--sft-steps 3 --sft-demos 12 --rl-steps 3 --questions 2 --rollouts 3 --eval-questions 4
    --save-every 2 --sft-lr 8e-3""".split()


def policy_of(kind: str):
    """The tiny network; the same with one tensor for the embeddings and for lm_head, as the 3B
    has; or a checkpoint folder, tied as well."""
    policy = tiny_policy(0) if kind in ("tiny", "tied") else load_policy(kind)
    return policy if kind == "tiny" else tied(policy)


def work(out: Path, kind: str) -> None:
    kit.processes.AS_ON_A_GPU = True
    policy = policy_of(kind)
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    actor = actor_of(policy)
    policy.model.activation_checkpointing_enable()
    shard(policy, LogProbs(policy))
    sync(policy, actor)
    groups = mine(union(actor))
    assert len(groups) == len(A) // dist.get_world_size()

    def gap() -> float:
        """The largest difference of a token's log-probability, with rows padded side by side."""
        policy.model.train()
        rows = level(policy, [rows_of(actor, group) for group in groups], blank_row)
        with torch.no_grad():
            pairs = [[log_probs(p, batch)[0] for p in (policy, actor)] for batch in rows]
        return max((a - b).abs().max().item() for a, b in pairs)

    first = gap()
    _, straight, resumed = three_steps(policy, groups, mine(A), actor, run_in(out.parent / "run"))
    sync(policy, actor)
    pairs = zip(policy.model.parameters(), actor.model.parameters())
    found = {
        "gaps": [first, gap()],
        "precision": precision(policy),
        "actor": {p.dtype for p in actor.model.parameters()},
        "angles": {b.dtype for b in actor.model.buffers()},
        "weights": {p.dtype for p in policy.model.parameters()},
        "still": [name for name in before if torch.equal(before[name], straight[name])],
        "resumed": all(torch.equal(w, resumed[name]) for name, w in straight.items()),
        "synced": all(torch.equal(whole(p.detach()).bfloat16(), q) for p, q in pairs),
    }
    if dist.get_rank() == 0:
        torch.save(found, out)


@pytest.mark.parametrize("kind, n", [("tiny", 1), ("tied", 2), ("standin", 1)])
def test_the_way_of_a_gpu_is_exact(kind, n, tmp_path, request):
    where = request.getfixturevalue("standin_folder") if kind == "standin" else kind
    codes, told = together(n, work, tmp_path / "found.pt", str(where))
    assert codes == [0] * n, told
    assert torch.load(tmp_path / "found.pt", weights_only=False) == {
        "gaps": [0.0, 0.0],  # policy and actor agree to the bit, also after a step
        "precision": torch.bfloat16,
        "actor": {torch.bfloat16},
        "angles": {torch.float32},
        "weights": {torch.float32},
        "still": [],
        "resumed": True,
        "synced": True,
    }


def command(dies: bool, *words: str) -> None:
    """The command line of training; one that dies does so at the third step of stage 2."""
    kit.processes.AS_ON_A_GPU, log = True, kit.folder.Run.log

    def dying(run, line):
        if (line["stage"], line["step"]) == ("rl", 3):
            os._exit(9)  # without a word
        log(run, line)

    kit.folder.Run.log = dying if dies else log
    train.main(train.parse_config([*words]))


def test_a_run_on_it_that_is_killed_ends_as_if_it_had_not_been(tmp_path):
    whole, killed, logs = str(tmp_path / "whole"), str(tmp_path / "killed"), []
    for code, words in (
        (0, ("--out", whole, *RUN)),
        (9, ("--out", killed, *RUN)),
        (0, ("--resume", killed)),
    ):
        codes, told = together(1, command, code == 9, *words)
        assert codes == [code], told
    for folder in (Path(whole), Path(killed)):
        logs.append([json.loads(line) for line in open(folder / "log.jsonl")])
        assert json.loads((folder / "rl" / "config.json").read_text())["dtype"] == "bfloat16"
    assert logs[0] == logs[1] and logs[0][-1]["step"] == 3
