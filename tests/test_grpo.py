"""python -m pytest tests/test_grpo.py      the objective, the group row, one step"""

import copy
import math
import re
from dataclasses import astuple
from pathlib import Path

import pytest
import torch
from conftest import RULES, SCRIPTS, copied, fresh_logp, gradient_of, performed
from hypothesis import example, given
from hypothesis import strategies as st

import grpo
import rollout
from grpo import ADVANTAGES, LOSS_AVERAGES, Objective, advantage_mean, advantage_std
from grpo import clipped_surrogate, group_row, group_rows, kl_k3, learn, log_probs, micro_batches
from rollout import Rules, play

README = Path(__file__).parent.parent / "README.md"


@pytest.fixture(scope="module")
def played(policy, samples):
    """Two groups of three, with 0 to 3 images in the branches and 1 to 4 turns."""
    return performed(policy, samples[:2], SCRIPTS, RULES)


def known(reward):
    return torch.ones_like(reward, dtype=torch.bool)


# --- advantages ------------------------------------------------------------------------------

rewards = st.lists(st.sampled_from([-0.4, 0.0, 0.2, 1.0, 1.2]), min_size=4, max_size=4)


@given(rewards, rewards, st.floats(0.005, 20))
@example([0.0, 0.0, 0.0, 0.2], [0.0] * 4, 0.005)  # a thousandth is a difference
def test_advantages_agree_with_plain_floats(R, other, scale):
    """Whatever the group beside them, and however small the rewards."""
    R = [scale * r for r in R]
    gaps, both = [r - sum(R) / 4 for r in R], torch.tensor([R, other])
    deviation = math.sqrt(sum(gap**2 for gap in gaps) / 3)
    divided = [gap / (deviation + 1e-4) for gap in gaps]
    for advantage, expected in ((advantage_mean, gaps), (advantage_std, divided)):
        found = advantage(both, known(both))[0].tolist()
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)


@given(st.floats(-2, 2, width=32), st.integers(2, 9), st.integers(0, 9))
def test_a_constant_group_gets_exactly_zero(value, K, silent):
    R = torch.full((1, K), value) + torch.linspace(0, 1e-7, K)  # float noise is no signal
    verdict = torch.arange(K)[None] != silent
    assert all(advantage(R, verdict).eq(0).all() for advantage in ADVANTAGES.values())


@given(rewards, st.lists(st.booleans(), min_size=4, max_size=4))
def test_no_verdict_leaves_the_baseline_and_gets_zero(R, verdict):
    R, verdict = torch.tensor([R]), torch.tensor([verdict])
    poisoned = R.masked_fill(~verdict, float("nan"))
    for advantage in ADVANTAGES.values():
        A = advantage(poisoned, verdict)
        assert A[~verdict].eq(0).all() and A.isfinite().all()
        if verdict.any():
            rest = R[verdict][None]
            torch.testing.assert_close(A[verdict][None], advantage(rest, known(rest)))


# --- the objective, token by token -----------------------------------------------------------

logps = st.floats(-6, 0, width=32)


@given(logps, logps, st.floats(-2, 2, width=32))
@example(0.0, 0.0, -1e-45)  # next to 0
@example(-6.0, 0.0, 2.0)
@example(0.0, -6.0, -2.0)
def test_clipping_never_helps_for_either_sign_of_A(new, old, A):
    """Eq. 4 is a lower bound of the unclipped surrogate, and agrees with a formula in floats."""
    gain = clipped_surrogate(torch.tensor(new), torch.tensor(old), torch.tensor(A), eps=0.2).item()
    ratio = math.exp(new - old)
    assert gain <= ratio * A + 1e-4 * abs(ratio * A) + 1e-30
    plain = min(ratio * A, max(0.8, min(1.2, ratio)) * A)
    assert gain == pytest.approx(plain, rel=1e-4, abs=1e-5)


@given(st.lists(st.tuples(logps, logps), min_size=2, max_size=5))
def test_k3_averages_to_the_kl_divergence(pairs):
    """And no token's share is negative, nor anything but 0 at equality."""
    p, q = torch.tensor(pairs).T.log_softmax(-1)
    kl, divergence = kl_k3(p, q), (p.exp() * (p - q)).sum()
    torch.testing.assert_close((p.exp() * kl).sum(), divergence, rtol=1e-4, atol=1e-5)
    assert kl.min() >= -1e-6 and kl_k3(p, p).eq(0).all()


def test_as_a_loss_k3_pulls_like_the_divergence_of_the_reference_from_the_policy():
    logits = torch.tensor([2.0, -0.2, 0.1], requires_grad=True)  # far from q
    q = torch.tensor([0.3, 0.3, 0.4])
    drawn = logits.detach().softmax(0)  # how often each token: that is no part of the gradient

    def pull(loss):
        return torch.autograd.grad(loss(logits.log_softmax(0)), logits)[0]

    own = pull(lambda logp: (drawn * kl_k3(logp, q.log())).sum())
    torch.testing.assert_close(own, pull(lambda logp: (q * (q.log() - logp)).sum()))  # KL(ref||pi)
    other = pull(lambda logp: (logp.exp() * (logp - q.log())).sum())  # KL(pi||ref)
    assert (own - other).abs().max() > 0.02


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6))
@example([0, 5, 2])  # one is masked
@example([0, 0])
def test_loss_averages_agree_with_their_definitions(lengths):
    tokens, rollouts = sum(lengths), sum(n > 0 for n in lengths)
    expected = {
        "token": [1 / max(tokens, 1)] * len(lengths),
        "sequence": [1 / n / rollouts if n else 0.0 for n in lengths],
    }
    for name, weights in expected.items():
        found = LOSS_AVERAGES[name](torch.tensor(lengths).float())
        assert found.tolist() == pytest.approx(weights)


def test_the_constants_are_those_that_the_readme_states():
    stated = re.search(r"^\| ε, β \| not given \| (\S+) and (\S+) ", README.read_text(), re.M)
    others = 1.0, "old", "token", False, 1, 8192, 1.0
    assert astuple(Objective()) == (*map(float, stated.groups()), *others)


# --- one row per group -----------------------------------------------------------------------
def rows_within(policy, played, row_tokens=8192):
    """The rows of both groups; `owner` counts through both."""
    groups = [*enumerate(played[:3])], [*enumerate(played[3:], start=3)]
    return [row for group in groups for row in group_rows(policy, group, row_tokens)]


def test_score_equals_a_fresh_forward_of_each_trajectory(policy, played):
    """What is scored are the acted tokens of each, the last of every turn included; and no branch
    sees its siblings."""
    with torch.no_grad():
        logp, owner = log_probs(policy, rows_within(policy, played))
    for i, t in enumerate(played):
        torch.testing.assert_close(logp[owner == i], fresh_logp(policy, t), rtol=0, atol=1e-5)


def gradient(policy, rows, weight, budget=8192):
    policy.model.zero_grad()
    for batch in micro_batches(rows, budget):
        logp, owner = log_probs(policy, batch)
        (logp * weight[owner]).sum().backward()
    return gradient_of(policy)


def apart(found, expected):
    """How far two gradients are apart."""
    return (found - expected).norm() / expected.norm()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_group_row_has_the_gradient_of_one_row_each(policy, played, checkpointing):
    learner, weight = copied(policy), torch.linspace(-1, 2, len(played))
    alone = [group_row(policy, [one]) for one in enumerate(played)]
    expected = gradient(policy, alone, weight, budget=1)
    if checkpointing:
        learner.model.activation_checkpointing_enable()
        learner.model.train()
    for row_tokens in (8192, 150, 1):  # one row a group; several rows; a row a branch
        found = gradient(learner, rows_within(policy, played, row_tokens), weight)
        assert apart(found, expected) <= 1e-5


def test_rows_and_micro_batches_keep_within_their_budget(policy, played):
    rows = group_rows(policy, [*enumerate(played[:3])], 150)
    labels, acted = (len(row.labels) for row in rows), (sum(t.acted) for t in played[:3])
    assert len(rows) > 1 and sum(labels) == sum(acted)
    assert all(len(row.ids) <= 150 or len({*row.owner.tolist()}) == 1 for row in rows)
    for batch in micro_batches(rows * 3, 600):
        assert len(batch) == 1 or len(batch) * max(len(row.ids) for row in batch) <= 600


# --- one step --------------------------------------------------------------------------------

A6 = torch.tensor([0.75, -0.25, -0.5, 1.0, -0.5, -0.5])


def step(learner, trajectories, A, reference=None, rate=0.0, **changes):
    """The report of a step on groups of three: at rate 0 one that changes nothing."""
    groups = [trajectories[i : i + 3] for i in range(0, len(trajectories), 3)]
    optimizer = torch.optim.SGD(learner.model.parameters(), lr=rate)
    objective = Objective(**{"max_grad_norm": 1e9, **changes})
    return learn(learner, optimizer, groups, A.view(-1, 3), reference, objective)


def a_step(policy, *what, **changes):
    """Report and gradient of a step that changes nothing."""
    return step(policy, *what, **changes), gradient_of(policy)


@pytest.fixture(scope="module")
def reference(policy):
    other, generator = copied(policy), torch.Generator().manual_seed(3)
    for p in other.model.parameters():
        p.data += 0.05 * torch.randn(p.shape, generator=generator)
    return other


def test_first_step_loss_is_zero_but_its_gradient_is_not(policy, played):
    """The FAQ's first question: at ratio 1 the advantages cancel, their gradients do not."""
    same = [played[0]] * 6  # six equal lengths, so that the mean over tokens cancels too
    report = step(policy, same, torch.tensor([1.0, -1, 0, 1, -1, 0]), beta=0.0)
    assert report["loss"] == pytest.approx(0, abs=1e-6)
    report, gradient = a_step(policy, played, A6, beta=0.0)
    assert report["clip_fraction"] == 0 and report["grad_norm"] > 1e-3
    limit = report["grad_norm"] / 3  # a clipped gradient keeps its direction
    shorter = a_step(policy, played, A6, beta=0.0, max_grad_norm=limit)[1]
    assert apart(3 * shorter, gradient) <= 1e-4


def test_kl_to_itself_is_zero_at_any_temperature(policy, played):
    for temperature in (0.7, 1.0, 1.5):
        assert abs(step(policy, played, A6, policy, temperature=temperature)["kl"]) < 1e-9


@pytest.mark.parametrize("loss_agg", ["token", "sequence"])
@pytest.mark.parametrize("anchor", ["old", "ref"])
def test_a_step_agrees_with_a_slow_loop_in_plain_floats(
    policy, played, reference, loss_agg, anchor
):
    """Eqs. 3 and 4 once more, from fresh forwards and without torch."""
    T, eps, beta = 0.8, 0.2, 0.1
    tokens, expected = sum(sum(t.acted) for t in played), dict(loss=0.0, kl=0.0, clip_fraction=0.0)
    for t, A in zip(played, A6.tolist()):
        weight = 1 / tokens if loss_agg == "token" else 1 / (6 * sum(t.acted))
        for new, ref in zip(*(fresh_logp(who, t, T).tolist() for who in (policy, reference))):
            ratio = math.exp(new - (new if anchor == "old" else ref))
            gain = min(ratio * A, max(1 - eps, min(1 + eps, ratio)) * A)
            kl = math.exp(ref - new) - (ref - new) - 1
            expected["loss"] -= weight * (gain - beta * kl)
            expected["kl"] += weight * kl
            expected["clip_fraction"] += weight * (gain < ratio * A - 1e-9)
    objective = dict(temperature=T, eps=eps, beta=beta, loss_agg=loss_agg, ratio_anchor=anchor)
    report = step(policy, played, A6, reference, **objective)
    assert {name: report[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_a_second_update_is_anchored_at_the_sampler(policy, played):
    """The first update moves the policy by much; only then does the clip have work to do."""
    for updates in (1, 2):
        report = step(copied(policy), played, A6, rate=0.5, max_grad_norm=1.0, beta=0.0,
                      updates=updates)  # fmt: skip
        assert report["clip_fraction"] == 0 if updates == 1 else report["clip_fraction"] > 0.02


def test_the_gap_is_between_the_sampler_and_who_learns(policy, samples, monkeypatch):
    """0 for the policy itself, also if it spoke in parts; not the way that its own steps go; and
    what a policy that is not quite the sampler is off by."""
    monkeypatch.setattr(rollout, "STRIDE", 7)
    torch.manual_seed(0)
    rules = Rules(turns=1, max_new_tokens=20, max_length=512, temperature=0.7)
    spoken, learner = sum(play(policy, samples[:2], 3, rules), []), copied(policy)
    how = dict(rate=0.5, max_grad_norm=1.0, beta=0.0, updates=2, temperature=0.7)
    report = step(learner, spoken, A6, **how)
    assert report["gap"] == report["largest_gap"] == 0 and report["clip_fraction"] > 0
    off = [fresh_logp(learner, t, 0.7) - torch.tensor(t.sampled) for t in spoken]
    off = torch.cat(off).abs()
    report = step(learner, spoken, A6, row_tokens=1, **how)
    assert report["gap"] == pytest.approx(off.mean().item(), abs=2e-5) and report["gap"] > 1e-3
    assert report["largest_gap"] == pytest.approx(off.max().item(), abs=1e-4)


@pytest.mark.parametrize("loss_agg", ["token", "sequence"])
def test_how_a_step_is_cut_or_done_at_rate_0_changes_nothing(policy, played, reference, loss_agg):
    straight = [*range(6)]
    report, whole = a_step(policy, played, A6, reference, loss_agg=loss_agg)
    for order, change in (
        (straight, dict(row_tokens=1)), (straight, dict(row_tokens=150)),
        (straight, dict(updates=3)), (straight * 2, {}), ([5, 3, 4, 2, 0, 1], {}),
    ):  # fmt: skip
        how = [played[i] for i in order], A6[order], reference
        again, gradient = a_step(policy, *how, loss_agg=loss_agg, **change)
        assert again == pytest.approx(report, rel=1e-4, abs=1e-6) and apart(gradient, whole) <= 1e-5


def test_without_advantages_a_step_is_the_gradient_of_beta_kl(policy, played, reference):
    rows = rows_within(policy, played)
    with torch.no_grad():
        ref = log_probs(reference, rows)[0]
    policy.model.zero_grad()
    further = ref - log_probs(policy, rows)[0]
    (0.1 * (further.exp() - further - 1).mean()).backward()
    pull = gradient_of(policy)
    report, gradient = a_step(policy, played, torch.zeros(6), reference, beta=0.1)
    assert report["kl"] > 0.001 and apart(gradient, pull) <= 1e-5


def test_after_an_update_that_is_not_finite_none_follows(policy, played, monkeypatch):
    norms = iter([0.5, None, 0.5])
    monkeypatch.setattr(grpo, "apply_gradient", lambda *_: next(norms))
    report = step(policy, played, A6, beta=0.0, updates=3)
    assert (report["skipped"], report["grad_norm"], next(norms)) == (1, None, 0.5)


def test_without_kl_a_constant_group_is_neither_scored_nor_counted(policy, played, monkeypatch):
    """Else the entropy would seem to fall, only because more groups are constant."""
    seen, A = [], torch.cat([torch.zeros(3), A6[3:]])
    noting = lambda policy, group, n: seen.append(len(group)) or group_rows(policy, group, n)  # noqa: E731
    monkeypatch.setattr(grpo, "group_rows", noting)
    report = step(policy, played, A, beta=0.0)
    alone = step(policy, played[3:], A6[3:], beta=0.0)
    assert seen == [0, 3, 3]
    assert report["entropy"] == pytest.approx(alone["entropy"], rel=1e-4) and report["entropy"] > 0
    assert report["kl"] is None


def test_a_group_of_two_prompts_and_a_ratio_without_its_reference_are_refused(policy, played):
    with pytest.raises(ValueError, match="must share one prompt"):
        group_row(policy, [(0, played[0]), (1, played[3])])
    with pytest.raises(ValueError, match="--ratio-anchor ref"):
        step(policy, played, A6, beta=0.0, ratio_anchor="ref")


@pytest.mark.parametrize("ended", ["turns", "length"])
def test_masked_truncated_rollouts_leave_loss_and_denominator(policy, played, ended):
    cut = copy.deepcopy(played)
    cut[2].ended = ended
    masked = a_step(policy, cut, A6, mask_truncated=True, beta=0.0)[1]
    others = [*played[:2], played[0], *played[3:]]
    without = a_step(policy, others, A6 * torch.tensor([1, 1, 0, 1, 1, 1]), beta=0.0)[1]
    n = [sum(t.acted) for t in played]
    scale = (sum(n) - n[2] + n[0]) / (sum(n) - n[2])
    assert apart(scale * without, masked) <= 1e-5
    report, gradient = a_step(policy, [cut[2]] * 6, A6, mask_truncated=True)
    assert report["loss"] == 0 and report["skipped"] == 0 and gradient.eq(0).all()
    assert report["entropy"] is None  # nothing was scored


def test_no_nan_reaches_the_weights(policy, played, caplog, monkeypatch):
    learner, true, how = copied(policy), grpo.gradient_of_J, dict(rate=1.0, beta=0.0)

    def moved():
        pairs = zip(learner.model.parameters(), policy.model.parameters())
        return not all(torch.equal(a, b) for a, b in pairs)

    report = step(learner, played, torch.tensor([torch.nan, *A6[1:]]), **how)
    assert report["skipped"] == 1 and report["grad_norm"] is None and not moved()
    assert "toy-tests-0" in caplog.text
    with monkeypatch.context() as patch:  # a loss may be infinite where its gradient is not
        patch.setattr(grpo, "gradient_of_J", lambda *x: (torch.tensor(torch.inf), *true(*x)[1:]))
        assert step(learner, played, A6, **how)["skipped"] == 1 and not moved()
    assert step(learner, played, A6, **how)["skipped"] == 0 and moved()
