"""python -m pytest tests/test_processes.py      two processes do what one does"""

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import PartialState
from conftest import ANSWER, LOOK, PRINT, SHORT, TWO
from conftest import copied, json_lines, performed, tied, together, trained
from tqdm import tqdm

import kit.processes
from beyond.tiny import tiny_policy
from data import toy_questions
from grpo import LogProbs, Objective, blank_row, learn, log_probs, micro_batches
from kit.adapter import adapted
from kit.folder import Run
from kit.processes import actor_of, clip_gradient, gathered, level, mine, parts, processes
from kit.processes import shard, sync, whole
from rollout import Trajectory, load_policy
from sft import mean_logp, rows_of

A = torch.tensor([[0.75, -0.25, -0.5], [1.0, -0.5, -0.5], [0.2, 0.3, -0.5], [0.0, 1.0, -1.0]])
OBJECTIVES = {
    "one micro-batch": dict(),
    "many, of unequal number": dict(row_tokens=150),
    "by rollout, against the reference": dict(loss_agg="sequence", beta=0.1, row_tokens=300),
    "one process has nothing to learn": dict(beta=0.0),
    "two updates": dict(updates=2),
}


def text_only(policy, words):
    t = Trajectory(sample=toy_questions(1, seed=words)[0])
    question = "<|im_start|>user\nWhere is it ?<|im_end|>\n<|im_start|>assistant\n"
    t.observe(policy.encode(question, []))
    t.prompt = len(t.ids)
    t.act(policy.encode(words, []).ids)
    return t


def union(policy):
    """Four groups of three: the first and third short or without any picture, the other two with
    up to four pictures over three turns. Two processes take every other one of them."""
    short, long = toy_questions(2, seed="distributed")
    slow = [[LOOK, PRINT, SHORT], [TWO, LOOK, ANSWER], [SHORT]]
    words = ("red", "I can see it . <answer>red</answer>", "a1 blue")
    yield performed(policy, [short], [[SHORT], [ANSWER], [SHORT]])
    yield performed(policy, [long], slow)
    yield [text_only(policy, w) for w in words]
    yield performed(policy, [long], slow[::-1])


def another(policy):
    """A reference: the same network, elsewhere."""
    other, generator = copied(policy), torch.Generator().manual_seed(3)
    for p in other.model.parameters():
        p.data += 0.05 * torch.randn(p.shape, generator=generator)
    return other


KINDS = {
    "all weights": lambda: tiny_policy(seed=0),
    "tied": lambda: tied(tiny_policy(seed=0)),
    "adapter": lambda: adapted(tiny_policy(seed=0), 4, "seed"),
    "tied adapter": lambda: adapted(tied(tiny_policy(seed=0)), 4, "seed"),
}


def learnt(policy):
    return {name: p for name, p in policy.model.named_parameters() if p.requires_grad}


def weights(policy, grad=False):
    """Those that learn, whole; or their gradients."""
    found = {name: p.grad if grad else p.detach() for name, p in learnt(policy).items()}
    return {name: whole(tensor).clone() for name, tensor in found.items()}


def adam(policy):
    return torch.optim.AdamW(learnt(policy).values(), lr=1e-2)


def a_step(policy, optimizer, groups, advantage):
    report = learn(policy, optimizer, groups, advantage, policy.base, Objective(beta=0.0))
    return report | {"kl": report["kl"] or 0.0}


def three_steps(policy, groups, advantage, actor=None, run=None):
    """Of which the second is one to the right of one process alone. Returns their reports and the
    weights after them; and with a run those after the third is done again, from a checkpoint of
    the second. Exports the first."""
    optimizer = adam(policy)
    lone = torch.where((advantage == A[1]).all(1, True), advantage, 0.0)
    reports = [a_step(policy, optimizer, groups, pull) for pull in (advantage, lone)]
    if run:
        run.save(policy, optimizer, 2)
    reports.append(a_step(policy, optimizer, groups, advantage))
    straight = weights(policy)
    if run:
        sync(policy, actor)
        if run.first:
            actor.save(run.folder / "export")
        return reports, straight, third_again(run, policy, groups, advantage)
    return reports, straight


def third_again(run, policy, groups, advantage):
    optimizer = adam(policy)
    run.restore(policy, optimizer, "checkpoint-sft-2")
    a_step(policy, optimizer, groups, advantage)
    return weights(policy)


def run_in(folder, timeout=60):
    return Run(folder, {}, timeout=timeout, keep=1)


def measured(groups, advantage, policy, reference) -> dict:
    """What is compared: report and gradient of a step on all groups, and of imitating them."""
    found = {}
    for name, changes in OBJECTIVES.items():
        objective = Objective(**{"max_grad_norm": 1e9, "beta": 1e-3, **changes})
        pull = advantage.clone()
        if "nothing" in name:  # groups 0 and 2 are constant: both are those of process 0
            pull[torch.isin(pull[:, 0], A[[0, 2], 0])] = 0.0
        ref = reference if objective.beta else None
        still = torch.optim.SGD(policy.model.parameters(), lr=0.0)
        report = learn(policy, still, groups, pull, ref, objective)
        report["kl"] = report["kl"] or 0.0
        found[name] = report, weights(policy, grad=True)
    rows = rows_of(policy, [t for group in groups for t in group])
    batches = [b for part in parts(rows) for b in micro_batches(part, 200)]
    policy.model.zero_grad()
    report = {"logp": mean_logp(policy, batches, learn=True)}
    found["imitation"] = report, weights(policy, grad=True)
    return found


def work(out: Path, groups: list) -> None:
    """One of two processes. Each has its own rollouts: those of process 0 end in turn 1 or have no
    picture at all, those of process 1 take three turns, and its judge takes a while."""
    PartialState(cpu=True)  # they meet
    policy = tiny_policy(seed=0)
    actor, reference = actor_of(policy), another(policy)
    policy.model.activation_checkpointing_enable()
    shard(policy, LogProbs(policy))
    shard(reference, LogProbs(reference))
    sync(policy, actor)
    assert len(mine(groups)) == 2 and processes()[1] == 2
    time.sleep(processes()[0])
    found = measured(mine(groups), mine(A), policy, reference)
    found["held"] = sum(p.to_local().numel() for p in policy.model.parameters())
    batch = rows_of(policy, groups[1])
    with torch.no_grad():
        acted = log_probs(actor, batch)[0]
        scored = log_probs(policy, level(policy, [batch], blank_row)[0])[0]
    found["actor is off by"] = (acted - scored).abs().max().item()
    for kind, make in KINDS.items():
        policy = make()
        actor = actor_of(policy)
        shard(policy, LogProbs(policy))
        found[kind] = three_steps(policy, mine(groups), mine(A), actor, run_in(out / kind))
    if processes()[0] == 0:
        torch.save(found, out / "found.pt")
    assert gathered("x") == ["x", "x"]


def stall(out: Path) -> None:
    """Process 1 never comes to learn."""
    PartialState(cpu=True)
    run = run_in(out, timeout=2)
    run.now = "after rl step 7"
    with run.phase("act"):
        pass
    if not run.first:
        time.sleep(120)
    with run.phase("learn"):
        pass


@pytest.fixture(scope="module")
def groups(policy):
    return [*union(policy)]


@pytest.fixture(scope="module")
def two(tmp_path_factory, groups):
    """What two processes found, and where."""
    folder = tmp_path_factory.mktemp("two")
    codes, told = together(2, work, folder, groups)
    assert codes == [0, 0], told
    return torch.load(folder / "found.pt", weights_only=False) | {"folder": folder}


@pytest.fixture(scope="module")
def one(policy, groups):
    return measured(groups, A, policy, another(policy))


@pytest.mark.parametrize("case", [*OBJECTIVES, "imitation"])
def test_two_unequal_processes_have_the_gradient_of_one(one, two, case):
    (report, gradient), (report_2, gradient_2) = one[case], two[case]
    assert report_2 == pytest.approx(report, rel=1e-5, abs=1e-7)
    g, g2 = (torch.cat([x.flatten() for x in gs.values()]) for gs in (gradient, gradient_2))
    assert g.norm() > 1e-3 and (g - g2).norm() / g.norm() <= 1e-6
    assert torch.equal(g, g2) or case != "one micro-batch"  # with one each, to the last bit
    seeing = [name for name in gradient if "visual" in name]
    assert any(gradient_2[name].norm() > 0 for name in seeing)


def test_each_process_holds_half_and_the_actor_is_the_policy(two, policy):
    weights = sum(p.numel() for p in policy.model.parameters())
    assert two["held"] == pytest.approx(weights / 2, rel=0.02) and two["actor is off by"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_two_train_as_one_does_and_go_on_from_a_checkpoint(kind, two, groups):
    """The two to the bit; one process, which can read their checkpoint, up to rounding."""
    (reports, straight, resumed), folder = two[kind], two["folder"] / kind
    expected, alone = three_steps(KINDS[kind](), groups, A)
    assert reports == [pytest.approx(report, rel=1e-5, abs=1e-7) for report in expected]
    assert straight.keys() == alone.keys() and ("lora" in [*alone][0]) == ("adapter" in kind)
    read = third_again(run_in(folder), KINDS[kind](), groups, A)
    model = load_policy(folder / "export").model
    exported = straight if "adapter" in kind else dict(model.named_parameters())
    for name, weight in straight.items():
        assert torch.equal(weight, resumed[name]) and torch.equal(weight, exported[name]), name
        for other in (alone, read):
            assert torch.allclose(weight, other[name], atol=1e-6), name
    embeddings = model.model.language_model.embed_tokens
    assert (model.lm_head.weight is embeddings.weight) == ("tied" in kind)


@pytest.mark.parametrize("limit, kept", [(2.5, 0.5), (5.0, 1.0), (50.0, 1.0)])
def test_a_gradient_is_shortened_to_its_limit_and_never_stretched(limit, kept):
    layer = torch.nn.Linear(1, 1)
    layer.weight.grad, layer.bias.grad = torch.tensor([[3.0]]), torch.tensor([4.0])
    assert clip_gradient(layer, limit) == pytest.approx(5.0)  # as long as it was
    assert [p.grad.item() for p in layer.parameters()] == pytest.approx([3 * kept, 4 * kept])


def test_a_process_that_does_not_come_is_named(tmp_path):
    codes, told = together(2, stall, tmp_path)
    assert codes[0] == 1 and "Ranks 1 failed to pass monitoredBarrier in 2000 ms" in told
    assert "process 0 of 2, at `learn`, after rl step 7" in told


@pytest.mark.parametrize("first", [True, False])
def test_one_process_alone_speaks_and_shows_its_bar(first, monkeypatch, tmp_path, capsys):
    made = []
    team = SimpleNamespace(is_main_process=first, init_trackers=lambda *of: made.append(of))
    monkeypatch.setattr(kit.processes, "Accelerator", lambda **how: made.append(how) or team)
    monkeypatch.setattr(tqdm, "__init__", tqdm.__init__)
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    with pytest.raises(SystemExit, match="--tracker nowhere needs a package"):
        kit.processes.assemble(tmp_path, {}, 60, "nowhere")
    kit.processes.assemble(tmp_path, {"a": 1}, 60, "json")  # a package that is there
    assert (made[0]["log_with"], made[1]) == ("json", ("codev", {"a": 1}))
    assert made[0]["kwargs_handlers"][0].timeout.total_seconds() == 60
    print("said")
    list(tqdm("ab", "waves", disable=False, mininterval=0))
    told = capsys.readouterr()
    assert ("said" in told.out) == ("waves" in told.err) == first


WORDS = """--sft-steps 2 --sft-demos 6 --rl-steps 2 --questions 4 --rollouts 3 --eval-questions 4
    --save-every 2""".split()


def test_two_processes_end_with_the_log_of_one(tmp_path):
    """The whole command line: rewards equal, losses within 1e-4, and one voice."""
    codes, told = together(2, trained, "--out", tmp_path / "2", *WORDS)
    assert codes == [0, 0], told
    assert told.count("step    2") == 1 and told.count("no tool") == 1
    trained("--out", tmp_path / "1", *WORDS)
    logs = [json_lines(tmp_path / n / "log.jsonl") for n in "12"]
    for one, two in zip(*logs, strict=True):
        assert one.keys() == two.keys() and one.get("reward") == two.get("reward")
        assert one["grad_norm"] > 0
        for name in one:
            close = one[name] == two[name] or abs(one[name] - two[name]) < 1e-4
            assert close, (one["stage"], one["step"], name)
