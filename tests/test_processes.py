"""python -m pytest tests/test_processes.py      about 60 s: two processes do what one does.

Run by torchrun, this file is also the two processes (`work`, below)."""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import ANSWER, LOOK, PRINT, RULES, TWO, scripted, tied_policy
from conftest import SHORT as RED

from beyond.tiny import tiny_policy
from data import toy_questions
from grpo import LogProbs, Objective, blank_row, learn, log_probs, micro_batches
from kit.adapter import adapted
from kit.folder import Run, training_state
from kit.processes import actor_of, clip_gradient, gathered, level, mine, parts, processes
from kit.processes import shard, sync, whole
from rollout import Trajectory, load_policy, play
from sft import mean_logp, rows_of

ROOT = Path(__file__).resolve().parent.parent
FAST = [[RED], [ANSWER], [RED]]
SLOW = [[LOOK, PRINT, RED], [TWO, LOOK, ANSWER], [RED]]
A = torch.tensor([[0.75, -0.25, -0.5], [1.0, -0.5, -0.5], [0.2, 0.3, -0.5], [0.0, 1.0, -1.0]])
# fmt: off
SHORT = ["--sft-steps", "8", "--sft-demos", "40", "--rl-steps", "3", "--questions", "4",
         "--rollouts", "4", "--eval-questions", "8", "--save-every", "2", "--sft-lr", "8e-3"]
# fmt: on
OBJECTIVES = {
    "one micro-batch": dict(),
    "many, of unequal number": dict(row_tokens=150),
    "by rollout, against the reference": dict(loss_agg="sequence", beta=0.1, row_tokens=300),
    "one process has nothing to learn": dict(beta=0.0),
    "two updates": dict(updates=2),
}


class Found(tuple):
    """What `work` left."""

    def __new__(cls, values, folder):
        made = super().__new__(cls, values)
        made.folder = folder
        return made


class Still(torch.optim.SGD):
    """An optimiser that changes nothing: gradients stay to be looked at."""

    def __init__(self, policy):
        super().__init__(policy.model.parameters(), lr=0.0)


def torchrun(*words, n=2, **kwargs):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(n),
               "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]  # fmt: skip
    quiet = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, *map(str, words)], cwd=ROOT, env=quiet, capture_output=True, text=True,
        timeout=600, **kwargs,
    )  # fmt: skip


def text_only(policy, words):
    t = Trajectory(sample=toy_questions(1, seed=words)[0])
    t.observe(
        policy.encode("<|im_start|>user\nWhere is it ?<|im_end|>\n<|im_start|>assistant\n", [])
    )
    t.prompt = len(t.ids)
    t.act(policy.encode(words, []).ids)
    return t


def union(policy):
    """Four groups of three: the first and third short or without any picture, the other two with
    up to four pictures over three turns. Two processes take every other one of them."""
    short, long = toy_questions(2, seed="distributed")
    with scripted(policy, FAST):
        (first,) = play(policy, [short], 3, RULES)
    words = ("red", "I can see it . <answer>red</answer>", "a1 blue")
    third = [text_only(policy, w) for w in words]
    with scripted(policy, SLOW):
        (second,) = play(policy, [long], 3, RULES)
    with scripted(policy, SLOW[::-1]):
        (fourth,) = play(policy, [long], 3, RULES)
    return [first, second, third, fourth]


def another(policy, seed=3):
    """A reference: the same network, elsewhere."""
    other = tiny_policy(seed=0)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in other.model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=generator))
    return other


def gradients(policy):
    learnt = {n: p for n, p in policy.model.named_parameters() if p.requires_grad}
    return {name: whole(p.grad).clone() for name, p in learnt.items()}


SMALL = {"adapter": lambda: adapted(tiny_policy(seed=0), 4, "seed"), "tied": tied_policy}


def small_steps(kind, groups, advantage, folder=None) -> tuple:
    """Three steps of an adapter, or of all weights where lm_head is tied, of which the second is
    one to the right of process 0 alone. Returns reports, weights, and those after a checkpoint of
    the second step is read, the third done again."""
    policy = SMALL[kind]()
    actor = actor_of(policy)
    shard(policy, LogProbs(policy))
    learnt = [p for p in policy.model.parameters() if p.requires_grad]

    def step(pull):
        report = learn(policy, optimizer, groups, pull, policy.base, Objective(beta=0.0))
        return report | {"kl": report["kl"] or 0.0}

    def weights(state):
        return {name: whole(p).clone() for name, p in state.items()}

    optimizer = torch.optim.AdamW(learnt, lr=1e-2)
    lone = torch.where((advantage == A[1]).all(1, True), advantage, 0.0)  # of one group
    reports = [step(advantage), step(lone)]
    if folder:
        run = Run(folder, {}, timeout=60, keep=1)
        run.save(policy, optimizer, 2)
    reports.append(step(advantage))
    found = weights(training_state(policy, optimizer)["weights"])
    if not folder:
        return reports, found
    sync(policy, actor)
    if run.first:
        actor.save(folder / "export")
    optimizer = torch.optim.AdamW(learnt, lr=1e-2)
    run.restore(policy, optimizer, "checkpoint-sft-2")
    step(advantage)
    return reports, found, weights(training_state(policy, optimizer)["weights"])


def measured(groups, advantage, policy, reference) -> dict:
    """What is compared: report and gradient of a step on all groups, and of imitating them."""
    found = {}
    for name, changes in OBJECTIVES.items():
        objective = Objective(**{"max_grad_norm": 1e9, "beta": 1e-3, **changes})
        pull = advantage.clone()
        if "nothing" in name:  # groups 0 and 2 are constant: both are those of process 0
            pull[torch.isin(pull[:, 0], A[[0, 2], 0])] = 0.0
        ref = reference if objective.beta else None
        report = learn(policy, Still(policy), groups, pull, ref, objective)
        report["kl"] = report["kl"] or 0.0
        found[name] = (report, gradients(policy))
    rows = rows_of(policy, [t for group in groups for t in group])
    batches = [b for part in parts(rows) for b in micro_batches(part, 200)]
    policy.model.zero_grad()
    found["imitation"] = ({"logp": mean_logp(policy, batches, learn=True)}, gradients(policy))
    return found


def work(out: Path) -> None:
    """One of two processes. Each has its own rollouts: those of process 0 end in turn 1 or have no
    picture at all, those of process 1 take three turns, and its judge takes a while."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    policy, reference = tiny_policy(seed=0), another(None)
    actor = actor_of(policy)
    policy.model.activation_checkpointing_enable()
    shard(policy, LogProbs(policy)), shard(reference, LogProbs(reference))
    sync(policy, actor)
    groups = union(actor)
    assert len(mine(groups)) == 2 and processes()[1] == 2
    time.sleep(2 * processes()[0])
    found = measured(mine(groups), mine(A), policy, reference)
    held = sum(p.to_local().numel() for p in policy.model.parameters())
    batch = rows_of(policy, groups[1])
    with torch.no_grad():
        acted = log_probs(actor, batch)[0]
        scored = log_probs(policy, level(policy, [batch], blank_row)[0])[0]
    resumed = saved_and_resumed(policy, actor, mine(groups), out.parent / "run")
    small = {k: small_steps(k, mine(groups), mine(A), out.parent / k) for k in SMALL}
    if processes()[0] == 0:
        torch.save((found, held, (acted - scored).abs().max().item(), resumed, small), out)
    assert gathered("x") == ["x", "x"]
    dist.destroy_process_group()


def saved_and_resumed(policy, actor, groups, folder):
    """Weights after a step, a checkpoint and a step; and after the checkpoint and the same step
    again. Exports the first."""
    run = Run(folder, {}, timeout=60, keep=1)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=1e-2)

    def step():
        learn(policy, optimizer, groups, mine(A), None, Objective(beta=0.0))
        return {name: whole(p.detach()).clone() for name, p in policy.model.named_parameters()}

    step()
    run.save(policy, optimizer, 1)
    straight = step()
    sync(policy, actor)
    if run.first:
        actor.save(folder / "export")
    fresh = torch.optim.AdamW(policy.model.parameters(), lr=1e-2)
    run.restore(policy, fresh, "checkpoint-sft-1")
    optimizer = fresh
    return straight, step()


def stall(out: Path) -> None:
    """Process 1 never comes to learn."""
    dist.init_process_group("gloo")
    run = Run(out, {}, timeout=3, keep=1)
    run.now = "after rl step 7"
    with run.phase("act"):
        pass
    if not run.first:
        time.sleep(120)
    with run.phase("learn"):
        pass


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    out = tmp_path_factory.mktemp("two") / "found.pt"
    done = torchrun(__file__, out)
    assert done.returncode == 0, done.stderr[-3000:]
    return Found(torch.load(out, weights_only=False), out.parent)


@pytest.fixture(scope="module")
def one(policy):
    return measured(union(policy), A, policy, another(policy))


@pytest.mark.parametrize("case", [*OBJECTIVES, "imitation"])
def test_two_unequal_processes_have_the_gradient_of_one(one, two, case):
    (report, gradient), (report_2, gradient_2) = one[case], two[0][case]
    assert report_2 == pytest.approx(report, rel=1e-5, abs=1e-7)
    g, g2 = (torch.cat([x.flatten() for x in gs.values()]) for gs in (gradient, gradient_2))
    assert g.norm() > 1e-3 and (g - g2).norm() / g.norm() <= 1e-6
    seeing = [name for name in gradient if "visual" in name]
    assert any(gradient_2[name].norm() > 0 for name in seeing)


def test_with_one_micro_batch_each_they_agree_to_the_last_bit(one, two):
    (_, gradient), (_, gradient_2) = one["one micro-batch"], two[0]["one micro-batch"]
    assert all(torch.equal(g, gradient_2[name]) for name, g in gradient.items())


def test_each_process_holds_half_and_the_actor_is_the_policy(two, policy):
    assert two[1] == pytest.approx(sum(p.numel() for p in policy.model.parameters()) / 2, rel=0.02)
    assert two[2] == 0


def test_saved_and_resumed_the_next_step_is_the_same_to_the_bit(two):
    straight, resumed = two[3]
    assert all(torch.equal(weight, resumed[name]) for name, weight in straight.items())


def test_the_export_is_the_whole_policy(two, tmp_path_factory):
    again = load_policy(two.folder / "run" / "export")
    for name, p in again.model.named_parameters():
        assert torch.equal(p, two[3][0][name]), name


@pytest.mark.parametrize("kind", SMALL)
def test_two_train_an_adapter_or_tied_weights_as_one_does(kind, two, policy):
    reports, weights, resumed = two[4][kind]
    expected, alone = small_steps(kind, union(policy), A)
    assert reports == [pytest.approx(report, rel=1e-5, abs=1e-7) for report in expected]
    assert weights.keys() == alone.keys() and ("lora" in [*weights][0]) == (kind == "adapter")
    for name, weight in weights.items():
        assert torch.allclose(weight, alone[name], atol=1e-6), name
        assert torch.equal(weight, resumed[name]), name
    export = load_policy(two.folder / kind / "export").model
    head, embeddings = export.lm_head.weight, export.model.language_model.embed_tokens.weight
    assert (head is embeddings) == (kind == "tied")


def test_a_checkpoint_of_two_is_read_by_one(two, policy):
    """Its step, done by one process, ends with the weights that two ended with."""
    alone = tiny_policy(seed=0)
    optimizer = torch.optim.AdamW(alone.model.parameters(), lr=1e-2)
    Run(two.folder / "run", {}, timeout=60, keep=1).restore(alone, optimizer, "checkpoint-sft-1")
    learn(alone, optimizer, union(policy), A, None, Objective(beta=0.0))
    for name, p in alone.model.named_parameters():
        assert torch.allclose(p, two[3][0][name], atol=1e-6), name


@pytest.mark.parametrize("limit, kept", [(2.5, 0.5), (5.0, 1.0), (50.0, 1.0)])
def test_a_gradient_is_shortened_to_its_limit_and_never_stretched(limit, kept):
    layer = torch.nn.Linear(2, 1, bias=False)
    layer.weight.grad = torch.tensor([[3.0, 4.0]])
    assert clip_gradient(layer, limit) == pytest.approx(5.0)  # as long as it was
    assert layer.weight.grad[0].tolist() == pytest.approx([3 * kept, 4 * kept])


def test_a_process_that_does_not_come_is_named(tmp_path):
    done = torchrun(__file__, tmp_path, "stall")
    assert done.returncode != 0
    assert "Ranks 1 failed to pass monitoredBarrier in 3000 ms" in done.stderr
    assert "process 0 of 2, at `learn`, after rl step 7" in done.stderr


def test_two_processes_end_with_the_log_of_one(tmp_path):
    """The whole command line: rewards equal, losses within 1e-4, and one voice."""

    def run(n):  # both at once, to save time
        return torchrun("train.py", "--out", tmp_path / str(n), *SHORT, n=n)

    logs = []
    with ThreadPoolExecutor() as pool:
        ended = pool.map(run, (1, 2))
    for n, done in zip((1, 2), ended):
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count("step    3") == 1 and done.stdout.count("no tool") == 1
        lines = (tmp_path / str(n) / "log.jsonl").read_text().splitlines()
        logs.append([json.loads(line) for line in lines])
    for one, two in zip(*logs, strict=True):
        assert one.keys() == two.keys() and one.get("reward") == two.get("reward")
        for name in one:
            close = one[name] == two[name] or abs(one[name] - two[name]) < 1e-4
            assert close, (one["stage"], one["step"], name)


if __name__ == "__main__":
    (stall if "stall" in sys.argv else work)(Path(sys.argv[1]))
