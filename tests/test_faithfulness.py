"""python -m pytest tests/test_faithfulness.py      about 7 s, nearly all of them to import torch"""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import faithfulness
from data import Sample
from faithfulness import (
    AGGREGATES,
    Finding,
    Rate,
    count,
    cross_table,
    faithful,
    finding,
    rates,
)
from rewards import BoxJudge, Reward, Weights, accuracy, crop, hand_made, tapo
from sandbox import Observation

IMAGE = Image.new("RGB", (256, 256))
SEARCH = Sample(
    "s1", IMAGE, "Which texture is on the red square ?", "checker", boxes=((76, 76, 120, 120),)
)
NEUTRAL = replace(SEARCH, id="n1", kind="neutral")
GOOD, WIDE, WRONG, FULL = (
    crop(SEARCH, box)
    for box in ((64, 64, 128, 128), (64, 64, 192, 192), (0, 0, 64, 64), (0, 0, 256, 256))
)
AGAIN = crop(SEARCH, (64, 64, 128, 128), red_lines=["no_op"])
TYPO = Observation(error="NameError: imag", red_lines=["sandbox_error"])
OURS = Observation(error="no worker", environment="no worker")
PRINTED = Observation(text="checker")
DRAWN = Observation(images=[IMAGE], boxes=[None], sources=["show"])


def scored(trajectories):
    return tapo(trajectories, BoxJudge(), Weights(), random.Random(0))


def found(*seen, answer="checker", sample=SEARCH) -> Finding:
    trajectory = hand_made(sample, *seen, answer=answer)
    return finding(trajectory, scored([trajectory])[0])


def made(*scores, correct=True, search=True, recalls=()) -> Finding:
    """A finding in short: one picture for each score."""
    return Finding(search, correct, scores, len(scores), 0, (0.1,) * len(scores), recalls)


# Rates


def test_a_rate_of_nothing_is_none_and_prints():
    assert Rate(3, 4).value == 0.75 and str(Rate(3, 4)) == "0.750 (3/4)"
    assert Rate(0, 0).value is None and str(Rate(0, 0)) == "none (0/0)"


# One trajectory


@pytest.mark.parametrize(
    "seen, scores, look",
    [
        ((), (), "no tool"),
        ((PRINTED,), (), "no tool"),  # a tool was used, but nothing was shown
        ((TYPO,), (), "no tool"),
        ((OURS,), (), "no tool"),
        ((GOOD,), (1.0,), "faithful"),
        ((WIDE,), (0.5,), "unfaithful"),  # half a score is not faithful
        ((WRONG,), (0.0,), "unfaithful"),
        ((FULL,), (0.0,), "unfaithful"),
        ((DRAWN,), (0.0,), "unfaithful"),
        ((PRINTED, WRONG, GOOD), (0.0, 1.0), "faithful"),
        ((GOOD, AGAIN), (1.0, -1.0), "faithful"),
    ],
)
def test_each_trajectory_falls_into_one_of_three_classes(seen, scores, look):
    f = found(*seen)
    assert f.scores == scores and f.calls == len(seen)
    counts = count([f])
    assert [counts[name].value for name in ("faithful", "unfaithful", "no_tool")] == [
        float(look == name) for name in ("faithful", "unfaithful", "no tool")
    ]


def test_calls_that_failed_by_our_fault_are_no_errors():
    assert [found(seen).failed for seen in (TYPO, OURS, GOOD)] == [1, 0, 0]


def test_areas_are_of_every_crop_and_recall_is_of_the_best_proper_one():
    f = found(FULL, crop(SEARCH, (76, 76, 98, 120)), WRONG)
    assert f.areas == (1.0, 22 * 44 / 65536, 4096 / 65536)
    assert f.recalls == (0.5,)  # half of the target; the whole image is no proper crop
    assert found(FULL).recalls == found(DRAWN).recalls == (0.0,)


def test_rewards_without_step_scores_are_refused():
    trajectory = hand_made(SEARCH, GOOD, answer="checker")
    (reward,) = accuracy([trajectory], BoxJudge(), Weights(), random.Random(0))
    with pytest.raises(ValueError, match="s1.*1 tool steps, got 0; rate with rewards.tapo"):
        rates([trajectory], [reward])


# Several pictures


@pytest.mark.parametrize(
    "scores, shares",
    [
        ((1.0,), {"any": 1, "all": 1, "last": 1, "mean": 1}),
        ((0.5,), {"any": 0, "all": 0, "last": 0, "mean": 0}),
        ((0.0, 1.0), {"any": 1, "all": 0, "last": 1, "mean": 0.5}),
        ((1.0, 0.0), {"any": 1, "all": 0, "last": 0, "mean": 0.5}),
        ((1.0, 0.5, -1.0, 1.0), {"any": 1, "all": 0, "last": 1, "mean": 0.5}),
        ((), {"any": 0, "all": 0, "last": 0, "mean": 0}),
    ],
)
def test_four_ways_to_treat_several_pictures(scores, shares):
    assert {name: faithful(made(*scores), name) for name in AGGREGATES} == shares


def test_an_unknown_aggregate_lists_the_known_ones():
    with pytest.raises(ValueError, match="any, all, last, mean; got 'most'"):
        faithful(made(1.0), "most")


# Counts

# Ten questions, eight of them search questions, counted by hand below.
TEN = [
    found(WRONG, GOOD),  # right, faithful
    found(GOOD),  # right, faithful
    found(GOOD, answer="diagonal"),  # wrong, faithful
    found(FULL),  # right, unfaithful
    found(WIDE, answer="diagonal"),  # wrong, unfaithful
    found(),  # right, no tool
    found(TYPO),  # right, no tool
    found(answer=None),  # ran out of turns, no tool
    found(sample=NEUTRAL),  # right
    found(GOOD, sample=NEUTRAL, answer="diagonal"),  # wrong; a crop there is no search
]


def test_ten_questions_by_hand():
    got = {name: (rate.numerator, rate.denominator) for name, rate in count(TEN).items()}
    area = (4096 * 4 + 65536 + 16384) / 65536  # four cells, the whole image, a crop of four cells
    assert got == {
        "accuracy": (6, 10),
        "search_accuracy": (5, 8),
        "direct_accuracy": (1, 2),
        "tool_use": (6, 8),
        "faithful": (3, 8),
        "unfaithful": (2, 8),
        "no_tool": (3, 8),
        "faithful_and_correct": (2, 8),
        "faithful_given_correct": (2, 5),
        "unfaithful_given_correct": (1, 5),
        "no_tool_given_correct": (2, 5),
        "faithful_given_correct_and_shown": (2, 3),
        "faithful_per_call": (3, 6),
        "accuracy_given_faithful": (2, 3),
        "box_any_50": (4, 8),  # the crop of four cells shows the target too
        "box_all_50": (4, 8),
        "box_any_80": (4, 8),
        "box_all_80": (4, 8),
        "crop_area": (area, 6),
        "calls": (8, 10),
        "error_rate": (1, 10),
        "no_verdict": (0, 8),
    }
    assert cross_table(TEN) == {
        "correct": {"faithful": 2, "not": 3},
        "wrong": {"faithful": 1, "not": 2},
    }


def test_boxes_are_hit_by_half_or_by_four_fifths_and_one_or_all():
    """Two targets. Recall by hand: the first in full, the second 25 of 40 columns, 0.625."""
    sample = replace(SEARCH, boxes=((10, 10, 50, 50), (100, 100, 140, 140)))
    one = found(crop(sample, (0, 0, 64, 64)), sample=sample)
    two = found(crop(sample, (0, 0, 64, 64)), crop(sample, (115, 90, 200, 200)), sample=sample)
    part = found(crop(sample, (115, 90, 200, 200)), sample=sample)
    assert [f.recalls for f in (one, two, part)] == [(1.0, 0.0), (1.0, 0.625), (0.0, 0.625)]
    got = [[count([f])[f"box_{k}"].value for k in ("any_50", "all_50", "any_80", "all_80")]
           for f in (one, two, part)]  # fmt: skip
    assert got == [[1, 0, 1, 0], [1, 1, 1, 0], [1, 0, 0, 0]]


def test_questions_without_boxes_stay_out_of_the_box_rates():
    blind = made(1.0)
    assert count([blind])["box_any_50"].denominator == 0
    assert count([blind, made(1.0, recalls=(0.9,))])["box_any_50"] == Rate(1, 1)


def test_what_has_no_verdict_leaves_the_faithful_rates_and_is_counted():
    counts = count([made(1.0), made(None, 1.0), made(0.0, correct=False)])
    assert counts["faithful"] == Rate(1, 2) and counts["no_verdict"] == Rate(1, 3)
    assert counts["search_accuracy"] == Rate(2, 3) and counts["tool_use"] == Rate(3, 3)


def test_nothing_to_count_gives_none_and_no_error():
    assert rates([], []) == {"n": 0, **{name: None for name in count([])}}


def test_rates_are_the_values_of_the_counts_under_the_names_of_summary_json():
    trajectories = [hand_made(SEARCH, GOOD, answer="checker"), hand_made(SEARCH, answer="x")]
    got = rates(trajectories, scored(trajectories))
    names = (
        "n accuracy tool_use faithful unfaithful no_tool faithful_and_correct "
        "faithful_given_correct calls error_rate crop_area accuracy_given_faithful direct_accuracy"
    ).split()
    expected = [2, 0.5, 0.5, 0.5, 0, 0.5, 0.5, 1, 0.5, 0, 1 / 16, 1, None]
    assert [got[name] for name in names] == expected


def test_the_rates_use_the_scores_they_are_given():
    trajectory = hand_made(SEARCH, WRONG, answer="x")
    told = Reward(answer=1.0, tools=1.0, format=0.0, steps=(1.0,), total=1.0)
    assert rates([trajectory], [told])["faithful_and_correct"] == 1.0


def test_the_demonstration_prints_counts():
    assert "faithful_and_correct              0.200 (1/5)" in faithfulness.demo()


# Laws

scores = st.lists(st.sampled_from([1.0, 1.0, 0.5, 0.0, -1.0, None]), max_size=4)
some = st.lists(
    st.builds(
        lambda scores, correct, search: made(*scores, correct=correct, search=search),
        scores, st.booleans(), st.booleans(),
    ),
    max_size=12,
)  # fmt: skip
aggregates = st.sampled_from(list(AGGREGATES))


def total(counts, suffix=""):
    names = ("faithful", "unfaithful", "no_tool")
    return sum(counts[name + suffix].numerator for name in names)


@given(some, aggregates)
def test_the_three_rates_partition_the_questions(findings, aggregate):
    counts = count(findings, aggregate)
    assert total(counts) == pytest.approx(counts["faithful"].denominator)
    given_correct = counts["faithful_given_correct"].denominator
    assert total(counts, "_given_correct") == pytest.approx(given_correct)


@given(some, aggregates)
def test_conditional_times_accuracy_is_the_headline(findings, aggregate):
    counts = count([f for f in findings if f.has_verdict], aggregate)
    headline = counts["faithful_and_correct"].value
    conditional, share = counts["faithful_given_correct"], counts["search_accuracy"]
    if conditional.value is not None:
        assert conditional.value * share.value == pytest.approx(headline)
    else:
        assert not headline


@given(some, st.data())
def test_one_more_hit_never_lowers_the_any_rate(findings, data):
    before = count(findings)["faithful"]
    if findings:
        i = data.draw(st.integers(0, len(findings) - 1))
        findings[i] = replace(findings[i], scores=(*findings[i].scores, 1.0))
    after = count(findings)["faithful"]
    assert (after.value or 0) >= (before.value or 0)


@given(some)
def test_all_is_the_strictest_and_any_the_most_lenient(findings):
    shares = {name: count(findings, name)["faithful"].numerator for name in AGGREGATES}
    assert shares["all"] <= shares["mean"] <= shares["any"]
    assert shares["all"] <= shares["last"] <= shares["any"]


@given(some, st.randoms(use_true_random=False), aggregates)
def test_order_does_not_matter(findings, shuffle, aggregate):
    mixed = findings[:]
    shuffle.shuffle(mixed)
    for name, rate in count(findings, aggregate).items():
        other = count(mixed, aggregate)[name]
        assert (rate.value, rate.denominator) == pytest.approx((other.value, other.denominator))


@given(some, aggregates)
def test_the_cross_table_adds_up(findings, aggregate):
    table, counts = cross_table(findings, aggregate), count(findings, aggregate)
    cells = [value for row in table.values() for value in row.values()]
    assert sum(cells) == pytest.approx(counts["faithful"].denominator)
    assert table["correct"]["faithful"] == pytest.approx(counts["faithful_and_correct"].numerator)
