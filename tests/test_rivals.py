"""python -m pytest tests/test_rivals.py      seconds, most of them to import torch

Every number below is worked out by hand from the formula."""

import random

import pytest
from conftest import EMPTY, GOOD, NEUTRAL, OURS, PRINTED, SEARCH, TYPO, WRONG
from hypothesis import given
from hypothesis import strategies as st

from beyond.rivals import RIVALS, contradicts
from rewards import REWARDS, BoxJudge, Lambdas, hand_made, reward_named
from rollout import Trajectory

RIGHT, LIE, NONE = "checker", "diagonal", None


def pay(name, *group, judge=BoxJudge(), sample=SEARCH):
    """Totals of a group. Each is a trajectory, or (answer or None, *observations)."""
    played = [t if isinstance(t, Trajectory) else hand_made(sample, *t[1:], answer=t[0])
              for t in group]  # fmt: skip
    return [r.total for r in reward_named(name)(played, judge, Lambdas(), random.Random(0))]


def thinking(thought, answer="checker"):
    t = hand_made(SEARCH, GOOD, answer=answer)
    t.turns[-1].text = f"<think>{thought}</think><answer>{answer}</answer>"
    return t


def test_thyme_by_hand():
    # r_res + 0.5 consistent if right + 0.5 well-formed
    assert pay("thyme", (RIGHT,), (RIGHT, GOOD, GOOD), (LIE, GOOD), (NONE, GOOD)) == [
        1 + 0.5 + 0.5, 1 + 0.5 + 0.5, -1 + 0 + 0.5, 0 + 0 + 0,
    ]  # fmt: skip
    torn, firm = thinking("so the answer is diagonal."), thinking("so the answer is checker.")
    assert pay("thyme", torn, firm) == [1 + 0 + 0.5, 1 + 0.5 + 0.5]


@pytest.mark.parametrize("thought, answer, torn", [
    ("I can see it.", "checker", False),  # concludes nothing
    ("It looks diagonal, or checker.", "checker", False),
    ("The answer is diagonal.", "checker", True),
    ("The answer is diagonal." + " hm" * 200, "checker", False),  # only the end is read
    ("The answer is checker. It has two tones.", "checker", False),
    (r"So \boxed{2}", "2.0", False),
    (r"So \boxed{3}", "2", True),
    ("The answer is diagonal. No: the answer is checker", "checker", False),
])  # fmt: skip
def test_thoughts_that_conclude_otherwise_contradict_the_answer(thought, answer, torn):
    assert contradicts(thinking(thought, answer)) is torn


def test_deepeyes_by_hand():
    # 0.8 right + 0.2 format + 1.2 (right and a picture came back)
    cases = (RIGHT,), (RIGHT, GOOD), (LIE, GOOD), (RIGHT, EMPTY), (NONE, GOOD), (RIGHT, GOOD, GOOD)
    assert pay("deepeyes", *cases) == pytest.approx([0.8, 2.0, 0.0, 0.8, -0.2, 2.0])
    assert pay("deepeyes", *cases, sample=NEUTRAL) == pytest.approx([1.2, 1.2, 0, 1.2, -0.4, 1.2])


def test_pixel_reasoner_by_hand():
    # One of ten calls, twice: RaPR 0.1, bonus 0.25 * 0.2 / 0.2 - 0.05 = 0.2. The others: 0.
    rare = pay("pixel_reasoner", (LIE, GOOD, GOOD), (RIGHT,), *[(LIE,)] * 8)
    assert rare == pytest.approx([0.2, 1.0] + [0.0] * 8)
    # Two of four: RaPR 0.5, above 0.3: only the second call costs, 0.05.
    often = pay("pixel_reasoner", (RIGHT, GOOD), (RIGHT, GOOD, GOOD), (RIGHT,), (LIE,))
    assert often == pytest.approx([1.0, 0.95, 1.0, 0.0])
    # An error that stands at the end takes the answer away; one that was mended does not.
    late, mended = pay("pixel_reasoner", (RIGHT, GOOD, TYPO), (RIGHT, TYPO, GOOD))
    assert (late, mended) == pytest.approx((-0.05, 0.95))


def test_codedance_by_hand():
    # Right with 1 of 2 calls well, right without, two wrong: S = 1, 1, 0, 0; mean 0.5, so that
    # d = sigmoid(0) - 0.2 = 0.3, and the part of the first is 1.5 * 0.3 / 2.
    group = (RIGHT, TYPO, GOOD), (RIGHT,), (LIE, GOOD), (LIE,)
    assert pay("codedance", *group) == pytest.approx([1.225, 1.0, 0.5 * 0.3, 0.0])
    # All right: sigmoid(8 * -0.5) = 0.017986, less 0.2: a fee.
    easy = (RIGHT, GOOD), (RIGHT,)
    assert pay("codedance", *easy) == pytest.approx([1 + 1.5 * (0.017986 - 0.2), 1.0], abs=1e-6)
    # The format penalty is in the mean: S = 0.8 and -0.2, mean 0.3: sigmoid(8 * 0.2) = 0.832018.
    bad = [hand_made(SEARCH, GOOD, answer=a) for a in (RIGHT, LIE)]
    for t in bad:
        t.turns[-1].text += "</think>"
    d = 0.832018 - 0.2
    assert pay("codedance", *bad) == pytest.approx([0.8 + 1.5 * d, -0.2 + 0.5 * d], abs=1e-6)


def test_pyvision_by_hand():
    cases = (RIGHT, GOOD, TYPO, EMPTY), (RIGHT,), (LIE, GOOD)
    assert pay("pyvision", *cases) == pytest.approx([1.3, 1.0, 0.0])


def test_adatooler_by_hand():
    # With calls 2 of 2 right, without 1 of 2: dS 0.5. exp(-2 (5/6)^2) = 0.249352 for one call
    # that ran, exp(-2) = 0.135335 for none.
    group = (RIGHT, GOOD), (RIGHT, TYPO), (RIGHT,), (LIE,)
    one, none = 0.6 * 0.5 * 0.249352, 0.6 * 0.5 * 0.135335
    assert pay("adatooler", *group) == pytest.approx([1 + one, 1 + none, 1 + none, none], abs=1e-6)
    assert pay("adatooler", (RIGHT, GOOD), (LIE, GOOD)) == [1.0, 0.0]  # nothing to compare with


def test_faitheyes_by_hand():
    # Of four calls one fails, one is rejected by the judge: 0.2 * (1 - 2 / 4).
    got = pay("faitheyes", (RIGHT, GOOD, TYPO, WRONG, PRINTED), (RIGHT,), (LIE, GOOD), (NONE, GOOD))
    assert got == pytest.approx([1.1, 1.0, 0.2, 0.2 - 0.2 - 0.2])
    long = hand_made(SEARCH, GOOD, answer=None)
    long.ended = "length"  # cut off as well
    assert pay("faitheyes", long) == pytest.approx([0.2 - 0.2 - 0.2])
    assert pay("faitheyes", thinking("The answer is red.")) == pytest.approx([1 + 0.2 - 0.2])
    assert pay("faitheyes", (RIGHT, GOOD), judge=lambda *asked: None) == [None]


def test_a_failure_of_ours_is_no_call_for_anybody():
    for name in sorted({*REWARDS, *RIVALS} - {"random"}):
        with_it, without = pay(name, (RIGHT, OURS, GOOD)), pay(name, (RIGHT, GOOD))
        assert with_it == without, name


some_shown = st.lists(st.sampled_from([GOOD, WRONG, TYPO, EMPTY, PRINTED]), max_size=5)
anything = st.tuples(st.sampled_from([RIGHT, LIE]), some_shown).map(lambda t: (t[0], *t[1]))


@given(st.lists(anything, min_size=1, max_size=5))
def test_accuracy_and_thyme_do_not_see_what_tools_showed(group):
    for name in ("accuracy", "thyme"):
        assert pay(name, *group) == pay(name, *[(answer,) for answer, *_ in group])


@given(some_shown)
def test_gated_bonuses_never_pay_for_a_wrong_answer(shown):
    for name in ("deepeyes", "pyvision"):
        assert pay(name, (LIE, *shown)) == [0.0]
