"""python -m pytest tests/test_faithfulness.py      about 10 s, most of them to import torch"""

import json
import random
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import beyond.agents
import evaluate
import faithfulness
from beyond.agents import read_foreign
from beyond.evidence import agreement
from data import Sample
from faithfulness import (
    Finding,
    Rate,
    answers,
    count,
    cross_table,
    finding,
    kinds_of,
    listing,
    means,
    question_of,
    rates,
    tool_use,
)
from rewards import BoxJudge, Lambdas, Reward, accuracy, crop, hand_made, tapo
from rollout import Rules, Trajectory, Turn
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
    return tapo(trajectories, BoxJudge(), Lambdas(), random.Random(0))


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
    assert listing(tool_use([])) == ""


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


def test_areas_are_of_every_crop_and_recall_is_by_proper_ones():
    f = found(FULL, crop(SEARCH, (76, 76, 98, 120)), WRONG)
    assert f.areas == (1.0, 22 * 44 / 65536, 4096 / 65536)
    assert f.recalls == (0.5,)  # half of the target; the whole image is no proper crop
    assert found(FULL).recalls == found(DRAWN).recalls == (0.0,)


def test_rewards_without_step_scores_are_refused():
    trajectory = hand_made(SEARCH, GOOD, answer="checker")
    (reward,) = accuracy([trajectory], BoxJudge(), Lambdas(), random.Random(0))
    with pytest.raises(ValueError, match="s1.*1 tool turns, got 0; rate with rewards.tapo"):
        rates([trajectory], [reward])


# Several pictures


@pytest.mark.parametrize(
    "scores, look",
    [
        ((1.0,), "faithful"),
        ((0.5,), "unfaithful"),
        ((0.0, 1.0), "faithful"),
        ((1.0, 0.0), "faithful"),
        ((1.0, 0.5, -1.0, 1.0), "faithful"),
        ((0.5, 0.5), "unfaithful"),
        ((), "no tool"),
    ],
)
def test_one_hit_among_several_pictures_is_enough(scores, look):
    assert made(*scores).look == look


# Counts


def cells(findings):
    """The four numbers of the table correct x faithful."""
    head, *rows = cross_table(count(findings)).splitlines()
    assert head.split() == ["faithful", "not"]
    assert [row.split()[0] for row in rows] == ["correct", "wrong"]
    return [float(cell) for row in rows for cell in row.split()[1:]]


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
        "focus": (3 * 44**2 / 64**2 + 44**2 / 128**2, 4),  # the whole image is no proper crop
        "crop_area": (area, 6),
        "calls": (8, 10),
        "error_rate": (1, 10),
        "no_verdict": (0, 8),
    }
    assert cells(TEN) == [2, 3, 1, 2]


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


def test_a_target_seen_in_parts_is_covered_by_their_union():
    """40 x 40. Crops of its left 15 columns and its lower 20 rows: 15 + 25/2 of 40 columns."""
    sample = replace(SEARCH, boxes=((100, 100, 140, 140),))
    parts = [crop(sample, box) for box in ((50, 90, 115, 150), (90, 120, 150, 160))]
    f = found(*parts, sample=sample)
    assert f.recalls == (27.5 / 40,) and count([f])["box_all_50"].value == 1
    assert [found(part, sample=sample).recalls for part in parts] == [(0.375,), (0.5,)]
    assert f.focuses == (1600 / 2400,)  # only the second shows half of the target


def test_questions_without_boxes_stay_out_of_the_box_rates():
    blind = made(1.0)
    assert count([blind])["box_any_50"].denominator == 0
    assert count([blind, made(1.0, recalls=(0.9,))])["box_any_50"] == Rate(1, 1)


def test_what_has_no_verdict_leaves_the_faithful_rates_and_is_counted():
    counts = count([made(1.0), made(None, 1.0), made(0.0, correct=False)])
    assert counts["faithful"] == Rate(1, 2) and counts["no_verdict"] == Rate(1, 3)
    assert counts["search_accuracy"] == Rate(2, 3) and counts["tool_use"] == Rate(3, 3)


def test_an_answer_without_a_verdict_leaves_the_rates_of_correctness():
    counts = count([made(1.0), made(1.0, correct=None)])
    assert counts["accuracy"] == counts["faithful_and_correct"] == Rate(1, 1)
    assert counts["accuracy_given_faithful"] == counts["faithful_given_correct"] == Rate(1, 1)
    assert counts["faithful"] == Rate(2, 2)
    assert cells([made(1.0, correct=None)]) == [0, 0, 0, 0]


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
    told = Reward(answer=1.0, tools=1.0, format=0.0, scores=(1.0,), total=1.0)
    assert rates([trajectory], [told])["faithful_and_correct"] == 1.0


def test_the_demonstration_prints_counts():
    assert "faithful_and_correct              0.200 [0.000, 0.600] (1/5)" in faithfulness.demo()


# Intervals


def test_the_interval_of_a_share_is_the_one_of_the_textbooks():
    """50 of 100: one deviation is 5 points, so 95 % reach from 40.2 to 59.8."""
    findings = [made(1.0, correct=i % 2 == 0) for i in range(100)]
    low, high = count(findings, draws=4000)["accuracy"].interval
    assert low == pytest.approx(0.402, abs=0.015) and high == pytest.approx(0.598, abs=0.015)


def test_plays_of_one_question_are_drawn_together():
    """25 questions played four times with equal outcomes say no more than 25 questions."""
    one = [replace(made(1.0, correct=i % 2 == 0), cluster=str(i)) for i in range(25)]
    alone, four = (count(x, draws=2000)["accuracy"].interval for x in (one, one * 4))
    assert four == pytest.approx(alone)
    loose = count([replace(f, cluster="") for f in one * 4], draws=2000)["accuracy"].interval
    assert loose[1] - loose[0] < 0.6 * (four[1] - four[0])


def test_intervals_repeat_with_their_seed_and_are_absent_where_nothing_can_be_drawn():
    findings = [made(1.0, correct=i < 3) for i in range(9)]
    units = [(answers(f), "") for f in findings]
    assert means(units, 50, seed=1) == means(units, 50, seed=1) != means(units, 50, seed=2)
    assert count(findings)["accuracy"].interval is None
    assert count(findings, draws=50)["direct_accuracy"].interval is None  # 0 of 0
    assert count([replace(f, cluster="q") for f in findings], draws=50)["accuracy"].interval is None
    lone = [*findings, made(1.0, search=False)]  # the only question that needs no search
    assert count(lone, draws=50)["direct_accuracy"] == Rate(1, 1)


def test_the_cycles_of_a_question_are_one_question():
    rows = [replace(SEARCH, id=str(i), source="hrbench4k", part="single", cycle=str(i),
                    options=options)
            for i, options in enumerate((("a", "b"), ("b", "a")))]  # fmt: skip
    assert question_of(rows[0]) == question_of(rows[1]) != question_of(SEARCH) == "s1"
    assert question_of(replace(rows[0], cycle="")) == "0"


# Two judges


def judged(*steps):
    return Reward(1.0, None, 0.0, steps, None)


def test_kappa_by_hand():
    """Ten calls. Both yes 4, both no 3, only the first 2, only the second 1: they agree on 0.7,
    chance on 0.6 * 0.5 + 0.4 * 0.5 = 0.5, so kappa is 0.4."""
    pairs = [(1.0, 1.0)] * 4 + [(0.0, 0.5)] * 3 + [(1.0, 0.0)] * 2 + [(0.5, 1.0)]
    t = [hand_made(SEARCH, GOOD, answer="x")] * 10
    table, rate, kappa = agreement(t, *([judged(score) for score in s] for s in zip(*pairs)))
    assert rate == Rate(7, 10) and kappa == pytest.approx(0.4)
    assert [table[a, b] for a in (True, False) for b in (True, False)] == [4, 2, 1, 3]


def test_what_no_judge_saw_is_not_compared_and_what_one_missed_is_counted():
    t = hand_made(SEARCH, GOOD, PRINTED, AGAIN, WRONG, answer="x")
    first, second = judged(1.0, 0.0, -1.0, None), judged(1.0, 0.0, -1.0, 0.0)
    table, rate, kappa = agreement([t], [first], [second])
    assert rate == Rate(1, 1) and table[None] == 1 and kappa is None


@given(st.lists(st.tuples(*[st.sampled_from([0.0, 0.5, 1.0])] * 2), min_size=1, max_size=12))
def test_kappa_is_symmetric_at_most_one_and_one_only_in_full_agreement(pairs):
    t = [hand_made(SEARCH, GOOD, answer="x")] * len(pairs)
    first, second = ([judged(score) for score in s] for s in zip(*pairs))
    _, rate, kappa = agreement(t, first, second)
    assert kappa == agreement(t, second, first)[2]
    assert kappa is None or (kappa == pytest.approx(1)) == (rate.value == 1) and kappa <= 1


# How tools were used


def coded(sample, *calls, said="", answer="checker"):
    """calls: (code, observation)"""
    steps = [Turn(f"<code>{code}</code>", code, seen, 0, 0) for code, seen in calls]
    steps.append(Turn(f"<think>{said}</think><answer>{answer}</answer>", None, None, 0, 0))
    return Trajectory(sample, turns=steps, answer=answer, ended="answered")


@pytest.mark.parametrize(
    "code, kinds",
    [
        ("image.crop((0, 0, 9, 9)).show()", {"crop"}),
        ("plt.imshow(a[10:20, 5:9])", {"crop"}),
        ("image.rotate(90).show()", {"rotate"}),
        ("ImageEnhance.Contrast(image.crop(b)).enhance(2)", {"crop", "contrast"}),
        ("ImageDraw.Draw(image).rectangle(b)", {"draw"}),
        ("cv2.line(a, p, q, 0)", {"draw"}),
        ("print(3 * [1, 2][0])", {"compute"}),
    ],
)
def test_kinds_of_code(code, kinds):
    assert kinds_of(Turn("", code, PRINTED, 0, 0)) == kinds


def test_a_recorded_box_proves_a_crop_and_a_picture_is_no_computation():
    assert kinds_of(Turn("", "look()", GOOD, 0, 0)) == {"crop"}
    assert kinds_of(Turn("", "image.show()", DRAWN, 0, 0)) == {"other"}


def test_use_of_tools_by_hand():
    mended = replace(GOOD, notes=["a missing bracket was added"])
    trajectories = [
        coded(SEARCH, ("imag.crop(b)", TYPO), ("image.crop(b).show()", mended)),
        coded(
            SEARCH, ("image.rotate(9).show()", DRAWN), ("1/0", TYPO), ("1/0", TYPO), ("1/0", TYPO)
        ),
        coded(SEARCH, said="The crop shows it ."),
        coded(SEARCH),
        coded(SEARCH, ("print(1)", OURS), ("image.show()", FULL)),
    ]
    got = {name: (r.numerator, r.denominator) for name, r in tool_use(trajectories).items()}
    assert got == {
        "0 calls": (2, 5), "1 calls": (0, 5), "2 calls": (2, 5), "3 calls": (0, 5),
        "4 calls": (1, 5), "5 or more calls": (0, 5),
        "crop (of calls)": (3, 8), "rotate (of calls)": (1, 8), "contrast (of calls)": (0, 8),
        "draw (of calls)": (0, 8), "compute (of calls)": (4, 8), "other (of calls)": (0, 8),
        "crops of 0% to 1%": (0, 2), "crops of 1% to 5%": (0, 2), "crops of 5% to 25%": (1, 2),
        "crops of 25% to 50%": (0, 2), "crops of 50% to 90%": (0, 2),
        "crops of 90% to 100%": (1, 2),
        "failed calls": (4, 8), "failed calls after which one ran": (1, 4),
        "repaired calls": (1, 8), "verified crops (of pictures)": (2, 3),
        "edited crops (of pictures)": (0, 3),
        "decorative crops": (1, 5),
    }  # fmt: skip


@pytest.mark.parametrize(
    "said, claimed",
    [
        ("I cropped the sign.", True),
        ("Zooming in on it, I see a 7.", True),
        ("I'll zoom into the corner", True),
        ("image.crop((0, 0, 9, 9))", True),
        ("I can see it .", False),
        ("The farmer's crops are corn.", False),
    ],
)
def test_a_look_that_was_only_claimed(said, claimed):
    decorative = tool_use([coded(SEARCH, said=said)])["decorative crops"]
    assert decorative.numerator == claimed
    shown = tool_use([coded(SEARCH, ("look()", GOOD), said=said)])["decorative crops"]
    assert shown.numerator == 0


def test_a_crop_that_was_tried_and_failed_is_not_decorative():
    assert tool_use([coded(SEARCH, ("imag.crop(b)", TYPO))])["decorative crops"].numerator == 0


# Perturbations


class Shut:
    """A sandbox in which nothing runs."""

    __init__ = __exit__ = run = lambda self, *_: None
    __enter__ = lambda self: self  # noqa: E731


def test_each_question_perturbation_and_seed_draws_a_place_of_its_own(monkeypatch):
    drawn, plays = [], [hand_made(replace(SEARCH, id=i), GOOD, answer="x") for i in ("a", "b")]
    monkeypatch.setattr(faithfulness, "Sandbox", Shut)
    monkeypatch.setattr(faithfulness, "listen", lambda *_: None)
    monkeypatch.setattr(
        faithfulness, "perturbed", lambda n, s, i, rng: drawn.append(rng.random()) or s
    )
    policy = SimpleNamespace(pictures=lambda images: images)

    def places(name, seed):
        drawn.clear()
        faithfulness.play_perturbed(policy, [(t, 0) for t in plays], name, Rules(), seed)
        return tuple(drawn)

    found = [places(name, seed) for name in ("noise", "random") for seed in (0, 1)]
    assert len({place for pair in found for place in pair}) == 8
    assert found[0] == places("noise", 0)


@pytest.mark.parametrize("reward, hit, expected", [
    (1.0, 1.0, dict(clean=True, clean_hit=True, clean_miss=None)),
    (0.0, 0.0, dict(clean=False, clean_hit=None, clean_miss=False)),
    (None, 1.0, dict(clean=None, clean_hit=None, clean_miss=None)),
    (1.0, None, dict(clean=True, clean_hit=None, clean_miss=None)),
])  # fmt: skip
def test_a_verdict_on_the_answer_and_one_on_the_turn_are_each_needed(reward, hit, expected):
    """The judge calls "a lorry" right, the rules do not: clean accuracy is the judge's."""
    t, copy = (hand_made(SEARCH, GOOD, answer=answer) for answer in ("a lorry", "checker"))
    found = finding(t, Reward(reward, None, 0.0, (hit,), None))
    got = faithfulness.changes(t, copy, 0, found)
    assert {name: got[name] for name in expected} == expected
    asked = {"accuracy": "clean", "accuracy_hit": "clean_hit", "accuracy_miss": "clean_miss"}
    assert {name: got[name] for name in asked} == {
        name: None if expected[clean] is None else True for name, clean in asked.items()
    }


# Trajectories of other agents


@pytest.fixture
def folder(tmp_path):
    IMAGE.save(tmp_path / "map.png")
    Image.new("RGB", (9, 9)).save(tmp_path / "shown.png")
    return tmp_path


BASE = {"question": "Which?", "image": "map.png", "answer": "A", "correct": True, "steps": []}


def write(folder, *lines):
    texts = (
        line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines
    )
    (folder / "t.jsonl").write_text("\n".join(texts) + "\n", encoding="utf-8")
    return folder / "t.jsonl"


def test_any_agents_steps_are_held_against_the_targets(folder):
    target = [76, 76, 120, 120]
    steps = [
        {"box": [70.5, 60, 130, 400], "text": "The line separator \u2028 is text."},
        {"box": [-4, -0.5, 60, 60]},
        {"box": [0, 0, 60, 60], "score": 1},
        {"image": "shown.png"},
        {"image": "shown.png", "box": [64, 64, 128, 128]},
        {"error": "NameError"},
        {"code": "print(1)"},
    ]
    line = BASE | {"targets": [target], "steps": steps, "id": "q"}
    ((t, reward),) = read_foreign(write(folder, line))
    boxes = [step.observation.boxes for step in t.tool_turns[:2]]
    assert boxes == [[(70, 60, 130, 256)], [(0, 0, 60, 60)]]  # outwards, and cut
    assert reward.scores == (1.0, 0.0, 1, None, 1.0, -1.0, 0.0)
    assert t.tool_turns[4].observation.images[0].size == (9, 9)
    f = finding(t, reward)
    assert (f.calls, f.failed, f.correct, f.cluster) == (7, 1, True, "q")


def test_a_judge_that_sees_takes_the_pictures_without_score(folder):
    asked = []

    def judge(request, labels):
        asked.append(request.images[0].size)
        return 1.0

    steps = [{"image": "shown.png"}, {"image": "shown.png", "score": None}, {"code": "print(1)"}]
    ((_, reward),) = read_foreign(write(folder, BASE | {"steps": steps}), judge)
    assert reward.scores == (1.0, None, 0.0) and asked == [(9, 9)]


def test_without_targets_or_scores_there_is_no_verdict(folder):
    lines = [BASE | {"steps": [{"box": [0, 0, 9, 9]}]}, BASE | {"kind": "neutral", "answer": None}]
    findings = [finding(*pair) for pair in read_foreign(write(folder, *lines))]
    assert findings[0].scores == (None,) and not findings[1].search
    assert count(findings)["no_verdict"] == Rate(1, 1)


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "line 2.*Expecting property name"),
        ("[]", r"line 2.*the line is \[\], no object"),
        ({"question": "?", "image": "map.png"}, "line 2.*lacks .'answer', 'correct', 'steps'"),
        (BASE | {"target": []}, "line 2.*has .'target'.; known are question, .*targets"),
        (BASE | {"correct": 1}, "line 2.*correct 1, which is of another type"),
        (BASE | {"image": "lost.png"}, "line 2.*no such file.*lost.png"),
        (BASE | {"kind": "ocr"}, "line 2.*kind is 'search' or 'neutral', got 'ocr'"),
        (BASE | {"targets": [[0, 0, 9]]}, "line 2.*a box is .x0, y0, x1, y1., not .0, 0, 9."),
        (BASE | {"steps": [{}, {"bbox": 1}]}, "line 2.*step 2 .*'bbox'.; known are box, image"),
        (BASE | {"targets": [[9, 9, 0, 0]]}, "line 2.*has no pixel"),
        (BASE | {"steps": [{"score": 7}]}, "line 2.*step 1 has score 7: expected one from 0 to 1"),
        (BASE | {"steps": ["box"]}, "line 2.*step 1 is 'box', no object"),
        (BASE | {"steps": [{"box": [0.25, 0, 0.5, 1]}]}, "line 2.*expected pixels"),
        ("[" * 100_000, "line 2.*recursion"),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_schema_is_named_with_its_line(folder, line, message):
    with pytest.raises(ValueError, match=message):
        list(read_foreign(write(folder, BASE, line)))


BAD_BOXES = {
    "no area": [10, 10, 10, 40],
    "reversed": [90, 90, 10, 10],
    "outside": [300, 0, 310, 9],
    "infinite": [0, 0, 9, float("inf")],
    "null": None,
}


@pytest.mark.parametrize("name", BAD_BOXES)
def test_a_call_with_a_bad_box_showed_nothing_and_is_counted(folder, capsys, name):
    good, bad = {"box": [64, 64, 128, 128]}, {"box": BAD_BOXES[name]}
    line = BASE | {"targets": [[70, 70, 90, 90]]}
    steps = [bad, bad | {"error": "ValueError"}, bad | {"image": "shown.png"}]
    path = write(folder, line | {"steps": [good]}, line | {"steps": steps})
    _, (t, reward) = read_foreign(path)
    shown = [len(turn.observation.images) for turn in t.tool_turns]
    assert shown == [0, 0, 1] and reward.scores == (0.0, -1.0, None)
    out = run_main(capsys, path)
    number = 2 if name == "null" else 3  # beside a picture, null is no box at all
    assert out.startswith(
        f"{number} calls gave a box that holds nothing of the image (null, reversed, "
    )
    assert "gave a box" not in run_main(capsys, write(folder, line | {"steps": [good]}))


def run_main(capsys, *argv):
    beyond.agents.main([*map(str, argv)])
    return capsys.readouterr().out


def test_the_command_prints_rates_intervals_and_tables(folder, capsys):
    hit = BASE | {"targets": [[70, 70, 90, 90]], "steps": [{"box": [64, 64, 128, 128]}]}
    out = run_main(capsys, write(folder, hit, "", hit | {"correct": False}))
    assert re.search(r"faithful_and_correct +0.500 \[0.000, 1.000\] \(1/2\)", out)
    assert re.search(r"correct +1 +0\nwrong +1 +0\n", out)
    assert re.search(r"1 calls +1.000 ", out)


def test_the_command_reads_our_own_trajectories_too(folder, capsys):
    trajectories = [hand_made(SEARCH, WRONG, GOOD, answer="checker"), hand_made(SEARCH, answer="x")]
    evaluate.write_trajectories(folder / evaluate.EPISODES, trajectories, scored(trajectories))
    out = run_main(capsys, folder / "trajectories.jsonl")
    assert re.search(r"faithful_and_correct +0.500 \(1/2\)", out)  # one question: no interval


@pytest.mark.parametrize(
    "text, message", [("", "is empty"), (None, "No such file"), ("{", "line 1")]
)
def test_the_command_says_what_is_wrong_with_a_file(folder, capsys, text, message):
    path = folder / "none.jsonl" if text is None else write(folder, text)
    with pytest.raises(SystemExit):
        run_main(capsys, path)
    assert message in capsys.readouterr().err


# Laws

scores = st.lists(st.sampled_from([1.0, 1.0, 0.5, 0.0, -1.0, None]), max_size=4)
some = st.lists(
    st.builds(
        lambda scores, correct, search: made(*scores, correct=correct, search=search),
        scores, st.booleans(), st.booleans(),
    ),
    max_size=12,
)  # fmt: skip


def total(counts, suffix=""):
    names = ("faithful", "unfaithful", "no_tool")
    return sum(counts[name + suffix].numerator for name in names)


@given(some)
def test_the_three_rates_partition_the_questions(findings):
    counts = count(findings)
    assert total(counts) == pytest.approx(counts["faithful"].denominator)
    given_correct = counts["faithful_given_correct"].denominator
    assert total(counts, "_given_correct") == pytest.approx(given_correct)


@given(some)
def test_conditional_times_accuracy_is_the_headline(findings):
    counts = count([f for f in findings if None not in f.scores])
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


@given(some, st.randoms(use_true_random=False))
def test_order_does_not_matter(findings, shuffle):
    mixed = findings[:]
    shuffle.shuffle(mixed)
    for name, rate in count(findings).items():
        other = count(mixed)[name]
        assert (rate.value, rate.denominator) == pytest.approx((other.value, other.denominator))


@given(some)
def test_the_cross_table_adds_up(findings):
    told = [f for f in findings if f.search and None not in f.scores]
    expected = [sum(share(any(f.hits)) for f in told if f.correct == right)
                for right in (True, False) for share in (float, lambda x: 1 - x)]  # fmt: skip
    assert cells(findings) == pytest.approx(expected, rel=1e-4)


@given(some)
def test_an_interval_holds_its_rate_and_lies_between_what_units_say(findings):
    for rate in count(findings, draws=40).values():
        if rate.interval:
            low, high = rate.interval
            assert 0 <= low <= high and (rate.numerator > 0 or low == high == 0)
