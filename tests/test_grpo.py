"""python -m pytest tests/test_grpo.py      about 15 s: the objective, the group row, one step"""

import copy
import math
import re
from pathlib import Path

import pytest
import torch
from conftest import RULES, SCRIPTS, fresh_logits, scripted
from hypothesis import example, given
from hypothesis import strategies as st

import grpo
import rollout
from data import TAGS
from grpo import (
    ADVANTAGES,
    LOSS_AVERAGES,
    Objective,
    advantage_mean,
    advantage_std,
    clipped_surrogate,
    group_row,
    group_rows,
    kl_k3,
    learn,
    log_probs,
    micro_batches,
)
from kit.qwen import Policy
from rollout import Rules, play


@pytest.fixture(scope="module")
def played(policy, samples):
    """Two groups of three, with 0 to 3 images in the branches and 1 to 4 turns."""
    with scripted(policy, SCRIPTS):
        groups = play(policy, samples[:2], 3, RULES)
    return [t for group in groups for t in group]


README = Path(__file__).parent.parent / "README.md"


def known(reward):
    return torch.ones_like(reward, dtype=torch.bool)


# --- advantages ------------------------------------------------------------------------------

rewards = st.lists(st.sampled_from([-0.4, 0.0, 0.2, 1.0, 1.2]), min_size=4, max_size=4)


@given(rewards, st.integers(-3, 3), st.floats(0.005, 20))
@example([0.0, 0.0, 0.0, 0.2], 0, 0.005)  # a thousandth is a difference
def test_advantages_sum_to_0_grow_with_R_and_know_only_differences_within_the_group(R, c, scale):
    R = torch.tensor([R])
    for advantage in ADVANTAGES.values():
        A = advantage(R, known(R))
        assert A.sum().item() == pytest.approx(0, abs=1e-5)
        torch.testing.assert_close(advantage(R + c, known(R)), A)
    A, scaled = (advantage_mean(R * by, known(R)) for by in (1.0, scale))
    torch.testing.assert_close(scaled, scale * A)


@given(rewards, rewards, st.permutations(range(4)))
def test_permuting_rollouts_permutes_advantages_and_groups_do_not_mix(R, other, order):
    both = torch.tensor([R, other])
    for advantage in ADVANTAGES.values():
        A = advantage(both, known(both))
        torch.testing.assert_close(advantage(both[:, order], known(both)), A[:, order])
        torch.testing.assert_close(advantage(both[:1], known(both[:1])), A[:1])


@given(st.floats(-2, 2, width=32), st.integers(2, 9))
def test_a_constant_group_gets_exactly_zero(value, K):
    R = torch.full((1, K), value) + torch.linspace(0, 1e-7, K)  # float noise is no signal
    for advantage in ADVANTAGES.values():
        assert advantage(R, known(R)).eq(0).all()


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


@given(rewards)
def test_advantages_agree_with_plain_floats(R):
    mean = sum(R) / 4
    deviation = math.sqrt(sum((r - mean) ** 2 for r in R) / 3)
    both = torch.tensor([R])
    assert advantage_mean(both, known(both))[0].tolist() == pytest.approx(
        [r - mean for r in R], abs=1e-6
    )
    assert advantage_std(both, known(both))[0].tolist() == pytest.approx(
        [(r - mean) / (deviation + 1e-4) for r in R], abs=1e-4
    )


# --- the objective, token by token -----------------------------------------------------------

logps = st.floats(-6, 0, width=32)
advantages = st.floats(-2, 2, width=32)


@given(logps, logps, advantages)
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


def test_clip_worked_cases():
    """A good token gains no more above 1.2; a bad one is punished in full however likely."""
    ratio = torch.tensor([0.5, 1.0, 1.5])
    good = clipped_surrogate(ratio.log(), torch.zeros(3), torch.tensor(1.0), eps=0.2)
    bad = clipped_surrogate(ratio.log(), torch.zeros(3), torch.tensor(-1.0), eps=0.2)
    assert good.tolist() == pytest.approx([0.5, 1.0, 1.2])
    assert bad.tolist() == pytest.approx([-0.8, -1.0, -1.5])


@given(logps, logps)
def test_k3_is_never_negative_and_zero_at_equality(new, ref):
    kl = kl_k3(torch.tensor(new), torch.tensor(ref)).item()
    assert kl >= -1e-6
    assert kl == pytest.approx(math.exp(ref - new) - (ref - new) - 1, rel=1e-3, abs=1e-5)
    assert kl_k3(torch.tensor(new), torch.tensor(new)).item() == 0


def test_k3_averages_to_the_kl_divergence():
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    expected = (p * (p / q).log()).sum()
    torch.testing.assert_close((p * kl_k3(p.log(), q.log())).sum(), expected)


def test_as_a_loss_k3_pulls_like_the_divergence_of_the_reference_from_the_policy():
    logits = torch.tensor([2.0, -0.2, 0.1], requires_grad=True)  # far from q
    q = torch.tensor([0.3, 0.3, 0.4])

    def pull(loss):
        return torch.autograd.grad(loss, logits)[0]

    logp = logits.log_softmax(0)
    p = logp.detach().exp()  # how often each token is drawn: that is no part of the gradient
    own = pull((p * kl_k3(logp, q.log())).sum())
    logp = logits.log_softmax(0)
    torch.testing.assert_close(own, pull((q * (q.log() - logp)).sum()))  # KL(ref || pi)
    logp = logits.log_softmax(0)
    assert (own - pull((logp.exp() * (logp - q.log())).sum())).abs().max() > 0.02  # KL(pi || ref)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6))
@example([0, 5, 2])  # one is masked
@example([0, 0])
def test_loss_averages_agree_with_their_definitions(lengths):
    token, sequence = (
        LOSS_AVERAGES[k](torch.tensor(lengths, dtype=torch.float32)) for k in ("token", "sequence")
    )
    total, rollouts = sum(lengths), sum(n > 0 for n in lengths)
    for n, t, s in zip(lengths, token.tolist(), sequence.tolist()):
        assert t == pytest.approx(1 / max(total, 1))
        assert s == pytest.approx(1 / n / rollouts if n else 0.0)
    for weights in (token, sequence):  # of all acted tokens
        assert (weights * torch.tensor(lengths)).sum().item() == pytest.approx(float(total > 0))


def test_the_constants_are_those_that_the_readme_states():
    stated = re.search(r"^\| ε, β \| not given \| (\S+) and (\S+) ", README.read_text(), re.M)
    assert (Objective().eps, Objective().beta) == tuple(map(float, stated.groups()))


# --- one row per group -----------------------------------------------------------------------


def test_keep_points_at_the_token_before_each_acted_token(policy, played):
    """The labels are exactly the acted tokens, the last of each turn included, and each slot in
    `keep` holds what stood before it in its own branch (the prompt's last token for the first)."""
    row = group_row(policy, list(enumerate(played[:3])))
    labels, owners = [], []
    for i, t in enumerate(played[:3]):
        where = [k for k, acted in enumerate(t.acted) if acted]
        labels += [t.ids[k] for k in where]
        owners += [i] * len(where)
        mine = row.owner == i
        assert row.ids[row.keep[mine]].tolist() == [t.ids[k - 1] for k in where]
    assert row.labels.tolist() == labels and row.owner.tolist() == owners


def test_score_equals_a_fresh_forward_of_each_trajectory(policy, played):
    rows = [r for g in (0, 3) for r in group_rows(policy, list(enumerate(played))[g : g + 3], 8192)]
    with torch.no_grad():
        logp, owner = grpo.log_probs(policy, rows)
    for i, t in enumerate(played):
        logits = fresh_logits(policy, t)
        logits[:, policy.forbidden] = float("-inf")
        at = torch.tensor([k for k, acted in enumerate(t.acted) if acted])
        fresh = logits.log_softmax(-1)[at - 1, torch.tensor(t.ids)[at]]
        assert (logp[owner == i] - fresh).abs().max() <= 1e-5


def test_a_branch_does_not_see_its_siblings(policy, played):
    changed = copy.deepcopy(played[:3])
    turn = changed[0].turns[0]
    changed[0].ids[turn.start : turn.end] = [99] * (turn.end - turn.start)
    with torch.no_grad():
        before, owner = grpo.log_probs(policy, [group_row(policy, list(enumerate(played[:3])))])
        after, _ = grpo.log_probs(policy, [group_row(policy, list(enumerate(changed)))])
    assert not torch.allclose(before[owner == 0], after[owner == 0])
    torch.testing.assert_close(before[owner > 0], after[owner > 0], rtol=0, atol=1e-6)


def gradient(policy: Policy, rows, weight, budget=8192):
    policy.model.zero_grad()
    for batch in micro_batches(rows, budget):
        logp, owner = grpo.log_probs(policy, batch)
        (logp * weight[owner]).sum().backward()
    return torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_group_row_has_the_gradient_of_one_row_each(policy, played, checkpointing):
    weight, indexed = torch.linspace(-1, 2, len(played)), list(enumerate(played))
    alone = gradient(policy, [group_row(policy, [one]) for one in indexed], weight, budget=1)
    if checkpointing:
        policy.model.activation_checkpointing_enable()
        policy.model.train()
    for row_tokens in (8192, 150, 1):  # one row a group; several rows; a row a branch
        rows = [row for g in (0, 3) for row in group_rows(policy, indexed[g : g + 3], row_tokens)]
        together = gradient(policy, rows, weight)
        assert (together - alone).norm() / alone.norm() <= 1e-5
    if checkpointing:
        policy.model.activation_checkpointing_disable()
        policy.model.eval()


def test_rows_and_micro_batches_keep_within_their_budget(policy, played):
    rows = list(group_rows(policy, list(enumerate(played[:3])), 150))
    assert len(rows) > 1 and sum(len(r.labels) for r in rows) == sum(
        sum(t.acted) for t in played[:3]
    )
    for row in rows:
        assert len(row.ids) <= 150 or len(set(row.owner.tolist())) == 1
    for batch in micro_batches(rows * 3, 600):
        assert len(batch) == 1 or len(batch) * max(len(r.ids) for r in batch) <= 600


def test_rollouts_of_different_prompts_are_no_group(policy, played):
    with pytest.raises(ValueError, match="must share one prompt"):
        group_row(policy, [(0, played[0]), (1, played[3])])


# --- one step --------------------------------------------------------------------------------


class Frozen(torch.optim.SGD):
    """An optimiser that changes nothing: steps can be compared."""

    def __init__(self, model):
        super().__init__(model.parameters(), lr=0.0)


def pair(trajectories):
    return [trajectories[i : i + 3] for i in range(0, len(trajectories), 3)]


def a_step(policy, played, advantage, reference=None, **changes):
    objective = Objective(**{"max_grad_norm": 1e9, **changes})
    report = learn(
        policy, Frozen(policy.model), pair(played), advantage.view(-1, 3), reference, objective
    )
    grads = [p.grad.flatten() for p in policy.model.parameters() if p.grad is not None]
    return report, torch.cat(grads) if grads else torch.zeros(1)


@pytest.fixture(scope="module")
def reference(policy):
    other = copy.deepcopy(policy.model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=generator))
    return Policy(other, policy.tokenizer, policy.image_processor, TAGS)


A6 = torch.tensor([0.75, -0.25, -0.5, 1.0, -0.5, -0.5])


def test_first_step_loss_is_zero_but_its_gradient_is_not(policy, played):
    """The FAQ's first question: at ratio 1 the advantages cancel, their gradients do not."""
    same = [played[0]] * 6  # six equal lengths, so that the mean over tokens cancels too
    report, _ = a_step(policy, same, torch.tensor([1.0, -1, 0, 1, -1, 0]), beta=0.0)
    assert report["loss"] == pytest.approx(0, abs=1e-6)
    report, gradient = a_step(policy, played, A6, beta=0.0)
    assert report["clip_fraction"] == 0 and gradient.norm() > 1e-3


def test_kl_to_itself_is_zero_at_any_temperature(policy, played):
    for temperature in (0.7, 1.0, 1.5):
        report, _ = a_step(policy, played, A6, reference=policy, temperature=temperature)
        assert abs(report["kl"]) < 1e-9


@pytest.mark.parametrize("loss_agg", ["token", "sequence"])
@pytest.mark.parametrize("anchor", ["old", "ref"])
def test_a_step_agrees_with_a_slow_loop_in_plain_floats(
    policy, played, reference, loss_agg, anchor
):
    """Eqs. 3 and 4 once more, from fresh forwards and without torch."""
    T, eps, beta = 0.8, 0.2, 0.1
    terms, kls, clipped, lengths = [], [], [], []
    for t, A in zip(played, A6.tolist()):
        at = [k for k, acted in enumerate(t.acted) if acted]
        lp = []
        for who in (policy, reference):
            logits = fresh_logits(who, t) / T
            logits[:, policy.forbidden] = float("-inf")
            table = logits.log_softmax(-1)
            lp.append([table[k - 1, t.ids[k]].item() for k in at])
        gain, gap, cut = [], [], []
        for new, ref in zip(*lp):
            ratio = math.exp(new - (new if anchor == "old" else ref))
            gain.append(min(ratio * A, max(1 - eps, min(1 + eps, ratio)) * A))
            gap.append(math.exp(ref - new) - (ref - new) - 1)
            cut.append(gain[-1] < ratio * A - 1e-9)
        terms.append(sum(g - beta * k for g, k in zip(gain, gap)))
        kls.append(sum(gap))
        clipped.append(sum(cut))
        lengths.append(len(at))
    if loss_agg == "token":
        w = [1 / sum(lengths)] * 6
    else:
        w = [1 / (6 * n) for n in lengths]
    report, _ = a_step(
        policy, played, A6, reference, temperature=T, eps=eps, beta=beta,
        loss_agg=loss_agg, ratio_anchor=anchor,
    )  # fmt: skip
    assert report["loss"] == pytest.approx(-sum(a * b for a, b in zip(w, terms)), rel=1e-4)
    assert report["kl"] == pytest.approx(sum(a * b for a, b in zip(w, kls)), rel=1e-4)
    assert report["clip_fraction"] == pytest.approx(
        sum(a * b for a, b in zip(w, clipped)), abs=1e-4
    )


def test_a_second_update_is_anchored_at_the_sampler(policy, played):
    """The first update moves the policy by much; only then does the clip have work to do."""
    learner = Policy(copy.deepcopy(policy.model), policy.tokenizer, policy.image_processor, TAGS)
    optimizer = torch.optim.SGD(learner.model.parameters(), lr=0.5)
    report = learn(
        learner, optimizer, pair(played), A6.view(2, 3), None, Objective(beta=0.0, updates=1)
    )
    assert report["clip_fraction"] == 0
    learner.model.load_state_dict(policy.model.state_dict())
    report = learn(
        learner, optimizer, pair(played), A6.view(2, 3), None, Objective(beta=0.0, updates=2)
    )
    assert report["clip_fraction"] > 0.02


def alike(one, other):
    """Two steps with the same report and the same gradient."""
    assert one[0] == pytest.approx(other[0], rel=1e-4, abs=1e-6)
    assert (one[1] - other[1]).norm() / other[1].norm() <= 1e-5


def test_the_gap_is_between_the_sampler_and_who_learns(policy, samples, monkeypatch):
    """0 for the policy itself, also if it spoke in parts; not the way that its own steps go; and
    what a policy that is not quite the sampler is off by."""
    monkeypatch.setattr(rollout, "STRIDE", 7)
    torch.manual_seed(0)
    rules = Rules(turns=1, max_new_tokens=20, max_length=512, temperature=0.7)
    groups = play(policy, samples[:2], 2, rules)
    assert all(len(t.sampled) == sum(t.acted) for group in groups for t in group)
    learner = Policy(copy.deepcopy(policy.model), policy.tokenizer, policy.image_processor, TAGS)
    A, objective = A6[:4].view(2, 2), Objective(beta=0.0, updates=2, temperature=0.7)
    sgd = torch.optim.SGD(learner.model.parameters(), lr=0.5)
    report = learn(learner, sgd, groups, A, None, objective)
    assert report["gap"] == report["largest_gap"] == 0 and report["clip_fraction"] > 0
    rows = [group_row(policy, [(i, t)]) for i, t in enumerate(sum(groups, []))]
    with torch.no_grad():
        off = [log_probs(learner, [row], 0.7)[0] - row.sampled for row in rows]
    off = torch.cat(off).abs()
    report = learn(learner, sgd, groups, A, None, objective)
    assert report["gap"] == pytest.approx(off.mean().item(), abs=2e-5) and report["gap"] > 1e-3
    assert report["largest_gap"] == pytest.approx(off.max().item(), abs=1e-4)


@pytest.mark.parametrize("loss_agg", ["token", "sequence"])
def test_how_a_step_is_cut_ordered_repeated_or_done_at_rate_0_changes_nothing(
    policy, played, reference, loss_agg
):
    whole = a_step(policy, played, A6, reference, loss_agg=loss_agg)
    for change in (dict(row_tokens=1), dict(row_tokens=150), dict(row_tokens=400), dict(updates=3)):
        alike(a_step(policy, played, A6, reference, loss_agg=loss_agg, **change), whole)
    orders = [3, 4, 5, 0, 1, 2], [2, 0, 1, 4, 5, 3], [0, 1, 2, 3, 4, 5] * 2
    for order in orders:  # groups, rollouts, the batch twice
        mixed = [played[i] for i in order]
        alike(a_step(policy, mixed, A6[order], reference, loss_agg=loss_agg), whole)


def test_without_advantages_a_step_is_the_gradient_of_beta_kl(policy, played, reference):
    rows = [
        row for i in (0, 3) for row in group_rows(policy, list(enumerate(played))[i : i + 3], 8192)
    ]
    policy.model.zero_grad()
    with torch.no_grad():
        gap = grpo.log_probs(reference, rows)[0]
    gap = gap - grpo.log_probs(policy, rows)[0]
    (0.1 * (gap.exp() - gap - 1).mean()).backward()
    pull = torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None])
    report, gradient = a_step(policy, played, torch.zeros(6), reference, beta=0.1)
    assert report["kl"] > 0.001 and (gradient - pull).norm() / pull.norm() <= 1e-5


def test_a_gradient_is_clipped_to_its_limit_and_never_stretched(policy, played):
    report, gradient = a_step(policy, played, A6, beta=0.0)
    norm = gradient.norm().item()
    assert report["grad_norm"] == pytest.approx(norm, rel=1e-5)
    for limit in (norm / 3, norm, 3 * norm):
        report, clipped = a_step(policy, played, A6, beta=0.0, max_grad_norm=limit)
        assert clipped.norm() <= limit * (1 + 1e-6) and report["grad_norm"] == pytest.approx(
            norm, rel=1e-4
        )
        scaled = min(1.0, limit / norm) * gradient
        assert (clipped - scaled).norm() <= 1e-5 * norm


def test_after_an_update_that_is_not_finite_none_follows(policy, played, monkeypatch):
    norms = iter([0.5, None, 0.5])
    monkeypatch.setattr(grpo, "apply_gradient", lambda *_: next(norms))
    report, _ = a_step(policy, played, A6, beta=0.0, updates=3)
    assert (report["skipped"], report["grad_norm"], next(norms)) == (1, None, 0.5)


def test_without_kl_a_constant_group_costs_and_teaches_nothing(policy, played, monkeypatch):
    A = torch.cat([torch.zeros(3), A6[3:]])
    expected = a_step(policy, played, A, beta=0.0)
    monkeypatch.setattr(grpo, "group_rows", _only_nonempty(grpo.group_rows, seen := []))
    assert a_step(policy, played, A, beta=0.0)[0] == expected[0]
    assert seen == [0, 3]


def _only_nonempty(group_rows, seen):
    def spy(policy, group, row_tokens):
        seen.append(len(group))
        return group_rows(policy, group, row_tokens)

    return spy


def test_entropy_does_not_fall_because_groups_are_constant(policy, played):
    """Without KL they are not scored, so they must not be counted either."""
    A = torch.cat([torch.zeros(3), A6[3:]])
    part = a_step(policy, played, A, beta=0.0)[0]
    alone = a_step(policy, [*played[3:], *played[3:]], torch.cat([A6[3:], A6[3:]]), beta=0.0)[0]
    assert part["entropy"] == pytest.approx(alone["entropy"], rel=1e-4)
    assert part["kl"] is None


def test_the_printed_ratio_needs_its_reference(policy, played):
    with pytest.raises(ValueError, match="--ratio-anchor ref"):
        a_step(policy, played, A6, beta=0.0, ratio_anchor="ref")


@pytest.mark.parametrize("ended", ["turns", "length"])
def test_masked_truncated_rollouts_leave_loss_and_denominator(policy, played, ended):
    cut = copy.deepcopy(played)
    cut[2].ended = ended
    masked = a_step(policy, cut, A6, mask_truncated=True, beta=0.0)
    without = a_step(policy, [*played[:2], played[0], *played[3:]],
                     torch.where(torch.arange(6) == 2, 0.0, A6), beta=0.0)  # fmt: skip
    n = [sum(t.acted) for t in played]
    scale = (sum(n) - n[2] + n[0]) / (sum(n) - n[2])
    assert (masked[1] - scale * without[1]).norm() / masked[1].norm() <= 1e-5
    everything = [copy.deepcopy(cut[2]) for _ in range(6)]
    report, gradient = a_step(policy, everything, A6, mask_truncated=True)
    assert report["loss"] == 0 and report["skipped"] == 0 and gradient.eq(0).all()
    assert report["entropy"] is None  # nothing was scored


def test_what_was_observed_is_never_a_label(policy, played):
    """Break `acted` and this fails: other observed text, same trained positions and labels."""
    changed = copy.deepcopy(played[2])
    observed = [k for k in range(changed.prompt, len(changed.ids)) if not changed.acted[k]]
    words = [k for k in observed if changed.ids[k] not in policy.forbidden]
    for k in words:
        changed.ids[k] = 77
    one, other = (group_row(policy, [(0, t)]) for t in (played[2], changed))
    assert words and torch.equal(one.labels, other.labels) and torch.equal(one.keep, other.keep)


def test_no_nan_reaches_the_weights(policy, played, caplog):
    model = copy.deepcopy(policy.model)
    before = copy.deepcopy(model.state_dict())
    mine = Policy(model, policy.tokenizer, policy.image_processor, TAGS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    A = A6.clone()
    A[0] = float("nan")
    report = learn(mine, optimizer, pair(played), A.view(2, 3), None, Objective(beta=0.0))
    assert report["skipped"] == 1 and report["grad_norm"] is None
    assert "toy-tests-0" in caplog.text
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values()))
    assert (
        learn(mine, optimizer, pair(played), A6.view(2, 3), None, Objective(beta=0.0))["skipped"]
        == 0
    )
    assert not all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values()))
