"""python -m pytest tests/test_evidence.py      two judges; what a call is worth"""

from dataclasses import replace

import pytest
from conftest import AGAIN, GOOD, PRINT, PRINTED, RULES, SEARCH, WRONG, fresh_logp
from hypothesis import given
from hypothesis import strategies as st
from test_faithfulness import ASKED, DIRECT, GREEDY, deaf, played, reads, saying, speaking

import beyond.evidence
from beyond.evidence import (
    ablation, agreement, answer_log_probs, answer_now, evidence, without_tools,
)  # fmt: skip
from data import crop_turn
from faithfulness import Rate, up_to
from rewards import Reward, hand_made
from rollout import encode_observation
from sandbox import Observation

SHOWN = hand_made(SEARCH, GOOD, answer="x")


# Two judges
def agreed(pairs):
    """How two judges agree, from what they say of each of some plays with one call."""
    judged = ([Reward(1.0, None, 0.0, (score,), None) for score in said] for said in zip(*pairs))
    return agreement([SHOWN] * len(pairs), *judged)


def test_kappa_by_hand():
    """Ten calls. Both yes 4, both no 3, only the first 2, only the second 1: they agree on 0.7,
    chance on 0.6 * 0.5 + 0.4 * 0.5 = 0.5, so kappa is 0.4."""
    pairs = [(1.0, 1.0)] * 4 + [(0.0, 0.5)] * 3 + [(1.0, 0.0)] * 2 + [(0.5, 1.0)]
    table, rate, kappa = agreed(pairs)
    assert rate == Rate(7, 10) and kappa == pytest.approx(0.4)
    assert [table[a, b] for a in (True, False) for b in (True, False)] == [4, 2, 1, 3]


def test_what_no_judge_saw_is_not_compared_and_what_one_missed_is_counted():
    t = hand_made(SEARCH, GOOD, PRINTED, AGAIN, WRONG, answer="x")
    judges = ([Reward(1.0, None, 0.0, (1.0, 0.0, -1.0, last), None)] for last in (None, 0.0))
    table, rate, kappa = agreement([t], *judges)
    assert rate == Rate(1, 1) and table[None] == 1 and kappa is None


@given(st.lists(st.tuples(*[st.sampled_from([0.0, 0.5, 1.0])] * 2), min_size=1, max_size=12))
def test_kappa_is_symmetric_at_most_one_and_one_only_in_full_agreement(pairs):
    _, rate, kappa = agreed(pairs)
    assert kappa == agreed([pair[::-1] for pair in pairs])[2]
    assert kappa is None or (kappa == pytest.approx(1)) == (rate.value == 1) and kappa <= 1


# Without tools
def thinks(policy, t):
    return saying("x") if t.turns else "<think> look<code>\nprint(1)\n</code>"


@pytest.mark.parametrize("reply, thought", [(reads, " I need a closer look ."), (thinks, " look")])
def test_without_tools_the_thought_is_closed_and_the_answer_follows_at_once(policy, reply, thought):
    (t,), _ = played(policy, reply, ASKED[:1])
    copy = answer_now(policy, t, 0)
    added = policy.tokenizer.decode(copy.ids[t.prompt :])
    assert added == f"<think>{thought}</think><answer>"
    assert copy.ids[: t.prompt] == t.ids[: t.prompt] and not any(copy.acted) and not copy.turns


def test_the_ablation_tells_what_only_tools_solve(policy):
    def reply(policy, t):  # sample 2 is answered without a look
        return saying(t.sample.answer) if t.sample.id.endswith("2") else reads(policy, t)

    trajectories, _ = played(policy, reply, [*ASKED, *DIRECT])
    with speaking(reply):
        direct = list(without_tools(policy, trajectories, RULES))
    assert [d.answer for d in direct[:2]] == ["nothing"] * 2 and direct[2] is trajectories[2]
    counts = {"with tools": 3, "without tools": 1, "tool gain": 2, "tool harm": 0}
    for against in (False, True):
        for t in trajectories:
            t.sample = replace(t.sample, against_prior=against)
        got = {n: (r.numerator, r.denominator) for n, r in ablation(trajectories, direct).items()}
        for n, k in counts.items():
            assert got.pop(n) == (k, 3)
            assert got.pop(f"{n}, out of prior") == (k * against, 3 * against)
        assert not got


def test_code_does_not_run_in_the_ablation_and_no_answer_is_none(policy, monkeypatch):
    (t,), _ = played(policy, reads, ASKED[:1])
    rules, play_on = [], beyond.evidence.play_on
    monkeypatch.setattr(beyond.evidence, "play_on", lambda *a: rules.append(a[3]) or play_on(*a))
    with speaking(lambda policy, t: "<code>\nprint(1)\n</code>"):
        (direct,) = without_tools(policy, [t], RULES)
    assert direct.answer is None and direct.ended == "length"
    assert [step.observation.error for step in direct.turns] == ["no tools"]
    assert rules[0].temperature == 0


# What a call is worth
def test_log_probs_of_the_reference_are_those_of_a_plain_forward(policy):
    (t,), _ = played(policy, reads, ASKED[:1])
    seen, blank = t.turns[0].observation, Observation(text="nothing")
    got = answer_log_probs(policy, t, 0, [seen, blank], GREEDY)
    reply = policy.encode(t.sample.answer + "</answer>", []).ids
    for score, shown in zip(got, (seen, blank, None), strict=True):
        whole = up_to(policy, t, 0) if shown else answer_now(policy, t, 0)
        if shown:
            pictures = policy.pictures(shown.images)
            whole.observe(encode_observation(policy, shown, pictures, False, 99))
            whole.observe(policy.encode("<answer>", []))
        whole.acted = [False] * len(whole.ids)
        whole.act(reply)
        assert score == pytest.approx(fresh_logp(policy, whole).sum().item(), abs=1e-4)


def test_evidence_and_decision_values_by_hand(policy, monkeypatch):
    trajectories, rewards = played(policy, deaf, [*ASKED, *DIRECT])  # hit, miss, hit; no search
    table = [[-1.0, *[-3.0, -2.0] * 2, -5.0], [*[-2.0] * 5, -2.25], [-1.0, *[-2.0] * 4, -1.0625]]
    monkeypatch.setattr(beyond.evidence, "answer_log_probs", lambda *args: table.pop(0))
    got = evidence(policy, trajectories, rewards, GREEDY)
    assert {name: (r.numerator, r.denominator) for name, r in got.items()} == {
        "measured": (3, 3), "evidence value": (1.5 + 0 + 1, 3),
        "decision value": (4 + 0.25 + 0.0625, 3),
        "evidence value of a hit": (2.5, 2), "evidence value of a miss": (0, 1),
        "used": (2, 3), "needed": (2, 3), "needed and used": (1, 3),
    }  # fmt: skip


@pytest.mark.parametrize("call", [crop_turn(" look", (0, 0, 256, 256)), PRINT])
def test_calls_that_no_other_crop_can_replace_are_not_measured(policy, call):
    trajectories, rewards = played(policy, lambda p, t: saying("x") if t.turns else call)
    got = evidence(policy, trajectories, rewards, GREEDY)
    assert got["measured"].value == 0 and got["evidence value"].value is None
