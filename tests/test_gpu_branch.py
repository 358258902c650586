"""python -m pytest tests/test_gpu_branch.py      about 60 s: the way of a GPU, taken on a CPU.

A GPU holds fp32 weights, cut even for one process. It fetches them in bf16, and an actor in bf16
plays. `kit.processes.AS_ON_A_GPU` makes a CPU do the same, so that all but the device is run. Run
as a program, this file is one such process, or one of two."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_processes import ROOT, A, saved_and_resumed, torchrun, union

import kit.folder
import kit.processes
import train
from beyond.tiny import tiny_policy
from grpo import LogProbs, blank_row, log_probs
from kit.processes import actor_of, level, mine, precision, shard, sync, whole
from rollout import load_policy
from sft import rows_of

RUN = (
    "--sft-steps 6 --sft-demos 40 --rl-steps 3 --questions 4 --rollouts 4 --eval-questions 8"
    " --save-every 2 --sft-lr 8e-3"
).split()


def policy_of(kind: str):
    """The tiny network; the same with one tensor for the embeddings and for lm_head, as the 3B
    has; or a checkpoint folder, tied as well."""
    policy = tiny_policy(0) if kind in ("tiny", "tied") else load_policy(kind)
    if kind != "tiny":
        policy.model.lm_head.weight = policy.model.model.language_model.embed_tokens.weight
    return policy


def work(out: Path, kind: str) -> None:
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
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
    straight, resumed = saved_and_resumed(policy, actor, groups, out.parent / f"run-{out.stem}")
    sync(policy, actor)
    found = {
        "gaps": [first, gap()],
        "precision": precision(policy),
        "actor": {p.dtype for p in actor.model.parameters()},
        "angles": {b.dtype for b in actor.model.buffers()},
        "weights": {p.dtype for p in policy.model.parameters()},
        "still": [name for name in before if torch.equal(before[name], straight[name])],
        "resumed": all(torch.equal(w, resumed[name]) for name, w in straight.items()),
        "actor_is_policy": all(
            torch.equal(whole(p.detach()).bfloat16(), q)
            for p, q in zip(policy.model.parameters(), actor.model.parameters())
        ),
    }
    if dist.get_rank() == 0:
        torch.save(found, out)
    dist.destroy_process_group()


def alone(*words) -> subprocess.CompletedProcess:
    quiet = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, *map(str, words)]
    return subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("kind, n", [("tiny", 1), ("tied", 2), ("standin", 2)])
def test_the_way_of_a_gpu_is_exact(kind, n, tmp_path, request):
    where = request.getfixturevalue("standin_folder") if kind == "standin" else kind
    out = tmp_path / "found.pt"
    words = ("work", out, where)
    done = alone(*words) if n == 1 else torchrun(__file__, *words, n=n)
    assert done.returncode == 0, done.stderr[-3000:]
    found = torch.load(out, weights_only=False)
    assert found["gaps"] == [0.0, 0.0]  # policy and actor agree to the bit, also after a step
    assert found["precision"] == torch.bfloat16 and found["actor"] == {torch.bfloat16}
    assert found["weights"] == {torch.float32} and found["angles"] == {torch.float32}
    assert found["still"] == [] and found["resumed"] and found["actor_is_policy"]


def test_a_run_on_it_that_is_killed_ends_as_if_it_had_not_been(tmp_path):
    logs = []
    for name, flags in (("whole", RUN), ("killed", ["--die", *RUN])):
        done = alone("train", "--out", tmp_path / name, *flags)
        assert done.returncode == (9 if "--die" in flags else 0), done.stderr[-3000:]
    assert alone("train", "--resume", tmp_path / "killed").returncode == 0
    for name in ("whole", "killed"):
        lines = (tmp_path / name / "log.jsonl").read_text().splitlines()
        logs.append([json.loads(line) for line in lines])
        assert (
            json.loads((tmp_path / name / "rl" / "config.json").read_text())["dtype"] == "bfloat16"
        )
    assert logs[0] == logs[1] and logs[0][-1]["step"] == 3


def main(task: str, *words: str) -> None:
    kit.processes.AS_ON_A_GPU = True
    if task == "work":
        work(Path(words[0]), words[1])
    else:
        if "--die" in words:  # at the third step of stage 2, without a word
            log = kit.folder.Run.log
            dying = lambda run, line: os._exit(9) if died(line) else log(run, line)  # noqa: E731
            died = lambda line: line["stage"] == "rl" and line["step"] == 3  # noqa: E731
            kit.folder.Run.log = dying
        train.main(train.parse_config([word for word in words if word != "--die"]))


if __name__ == "__main__":
    main(*sys.argv[1:])
