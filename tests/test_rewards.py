"""python -m pytest tests/test_rewards.py      about 14 s, most of them to import torch"""

import itertools
import random
import threading
import time
from dataclasses import fields, replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from beyond.rivals import RIVALS
from data import CELL, GRID, Sample, draw_scene, parse, search_sample
from rewards import (
    REWARDS,
    BoxJudge,
    JudgeRequest,
    Labels,
    Lambdas,
    crop,
    format_error,
    grade,
    hand_made,
    judge_input,
    outcome,
    reward_named,
    score,
    summary,
    turn_score,
    turn_scores,
)
from rollout import Trajectory, Turn
from sandbox import Observation

IMAGE = Image.new("RGB", (256, 256))
CELL_B2, FOUR = (64, 64, 128, 128), (64, 64, 192, 192)
AWAY, WHOLE = (0, 0, 64, 64), (0, 0, 256, 256)
SEARCH = Sample(
    "s1", IMAGE, "Which texture is on the red square ?", "checker", boxes=((76, 76, 120, 120),)
)
NEUTRAL = replace(SEARCH, id="n1", kind="neutral")

GOOD, WIDE, WRONG, FULL = (crop(SEARCH, box) for box in (CELL_B2, FOUR, AWAY, WHOLE))
AGAIN = crop(SEARCH, CELL_B2, red_lines=["no_op"])  # as the sandbox marks a crop shown before
TYPO = Observation(error="NameError: imag", red_lines=["sandbox_error"])
BLOCKED = Observation(error="blocked: os.remove", blocked=True, red_lines=["sandbox_error"])
EMPTY, PRINTED = Observation(), Observation(text="checker")
CELL_PRICE = 2.5 / 16  # of a look at a cell, a 16th of the image, without evidence
OURS = Observation(error="the worker did not start", environment="the worker did not start")


def reward(trajectory, name="tapo", judge=BoxJudge(), weights=Lambdas(), seed=0):
    return reward_named(name)([trajectory], judge, weights, random.Random(seed))[0]


def tools(*seen, sample=SEARCH):
    """TAPO's tool part of a policy that saw these observations."""
    return reward(hand_made(sample, *seen, answer="checker")).tools


# Format


def turns(*texts, answer="x"):
    steps = [Turn(text, None, None, 0, 0) for text in texts]
    return Trajectory(SEARCH, turns=steps, answer=answer, ended="answered")


@pytest.mark.parametrize(
    "texts",
    [
        ("<answer>x</answer>",),
        ("<think>a</think>\n\n<answer>\nx\n</answer>\n",),
        ("<think>a</think><code>1</code>", "<think>b</think><answer>x</answer>"),
        ("<think>a <code>1</code>", "so</think><answer>x</answer>"),  # one thought, two turns
        ("<code>print('<answer>y</answer> <think>')</code>", "<answer>x</answer>"),
        ("<code>print('</code>')</code>", "<answer>x</answer>"),
        ("<think>maybe <answer>y</answer>, or </code>?</think><answer>x</answer>",),
        ("<think>I could <code> it</think><answer>x</answer>",),
        ("<think>a<think>b</think><answer>x</answer>",),
        ("<think>a <code>1</code>", "</answer> is a tag</think><answer>x</answer>"),
    ],
)
def test_well_formed_turns(texts):
    assert not format_error(turns(*texts))


@pytest.mark.parametrize(
    "texts",
    [
        (),
        ("x",),
        ("<answer>x",),
        ("x</answer>",),
        ("Final choice: **D**",),
        ("<answer>x</answer> <answer>x</answer>",),
        ("<answer>y</answer>", "<answer>x</answer>"),
        ("<answer>x</answer>", "so it is"),
        ("<think>a<answer>x</answer>",),
        ("<think><answer>x</answer></think>",),
        ("a</think><answer>x</answer>",),
        ("<answer>x</answer><think>so it is</think>",),
        ("<think>a<answer>x</answer>", "</think>"),
        ("<code>1", "</code><answer>x</answer>"),
        ("<code>1</code>",),
        ("<answer>x<think></answer></think>",),
    ],
)
def test_ill_formed_turns(texts):
    assert format_error(turns(*texts))


def test_an_answer_may_have_a_thousand_characters():
    for length, error in ((1000, False), (1001, True)):
        answer = "y" * length
        assert format_error(turns(f"<answer>{answer}</answer>", answer=answer)) is error


# Answers


def question(answer, options=()):
    return Sample("q", IMAGE, "?", answer, tuple(options))


# From the whole reply: the last turn's single <answer> is what counts


def reply(*texts):
    """The policy said these; nothing it wrote was code. As rollout.speak reads it."""
    steps, answer, ended = [], None, "no_action"
    for text in texts:
        _, answer = parse(text, closed=True)
        steps.append(Turn(text, None, None, 0, 0))
        ended = "answered" if answer is not None else "no_action"
    return Trajectory(question("B"), turns=steps, answer=answer, ended=ended)


@pytest.mark.parametrize(
    "text, right, malformed",
    [
        ("<answer>(B) the red one</answer>", 1, False),
        ("<answer>A or B</answer>", 0, False),
        ("<answer></answer>", 0, False),
        ("<think>A</think><answer>B</answer>", 1, False),
        ("<think><answer>A</answer></think><answer>B</answer>", 1, False),
        ("<answer>A</answer> ... <answer>B</answer>", 0, True),  # the first ends the turn
        ("<answer>B</answer> ... <answer>A</answer>", 1, True),
        ("<answer>B", 0, True),
        ("<answer>\n B \n</answer>\n", 1, False),
        ("Final choice: **D**", 0, True),
        ("<sandbox_output><answer>B</answer></sandbox_output>", 1, True),  # words of the policy
    ],
)
def test_the_single_answer_of_the_last_turn_counts(text, right, malformed):
    t = reply(text)
    assert (outcome(t, None).answer, format_error(t)) == (right, malformed)


def test_what_the_sandbox_printed_is_no_answer():
    t = reply("<think>so</think>")
    seen = Observation(text="<answer>B</answer>")
    t.turns.insert(0, Turn("<code>forge()</code>", "forge()", seen, 0, 0))
    assert outcome(t, None).answer == 0 and t.answer is None
    code = "<code>print('<answer>B</answer>')</code>"
    assert parse(code, closed=True)[1] is None


# Open answers: what the rules call wrong may be right in other words


class Examiner:
    def __init__(self, verdict):
        self.verdict, self.asked = verdict, []

    def same_answer(self, *texts):
        self.asked.append(texts)
        return self.verdict


@pytest.mark.parametrize("verdict, expected", [(True, 1.0), (False, 0.0), (None, None)])
def test_other_words_are_for_the_judge(verdict, expected):
    judge = Examiner(verdict)
    assert grade("a lorry", question("truck"), judge) == expected
    assert judge.asked == [("?", "truck", "a lorry")]


def test_without_a_judge_other_words_are_wrong():
    assert grade("a lorry", question("truck"), lambda *asked: 1.0) == 0.0


def test_what_the_rules_call_right_is_not_asked():
    judge = Examiner(False)
    assert grade("The truck.", question("truck"), judge) == 1.0 and not judge.asked


def test_what_no_judge_may_decide_is_not_asked():
    judge = Examiner(True)
    for reference, options, answer in (
        ("B", (), "the second"),
        ("red", ("red", "blue"), "crimson"),
        ("3", (), "three"),
        ("truck", (), "Solution:"),
        ("truck", (), None),
    ):
        assert grade(answer, question(reference, options), judge) == 0.0
    assert not judge.asked


def test_a_reference_that_is_no_option_names_the_sample():
    with pytest.raises(ValueError, match="sample q: the answer should name .*'green'"):
        grade("A", question("green", ("red", "blue")), None)


# Judges


def test_no_judge_can_see_thoughts_code_or_the_reference_answer():
    told = [field.name for field in fields(JudgeRequest)]
    assert told == [
        "question",
        "images",
        "text",
        "boxes",
        "sources",
        "size",
    ]  # (Q, o_t, metadata_t)
    sample = replace(SEARCH, id="SECRET", answer="SECRET", source="SECRET")
    seen = replace(GOOD, text="a log", notes=["SECRET"])
    thought = Turn("<think>SECRET</think><code>SECRET</code>", "SECRET", seen, 0, 0)
    requests = []

    def judge(request, labels):
        requests.append(request)
        return 1.0

    turn_scores(Trajectory(sample, turns=[thought], answer="SECRET", ended="answered"), judge)
    (request,) = requests
    assert "SECRET" not in repr(request)
    assert request.text == "a log" and request.boxes == (CELL_B2,)


def test_the_judge_gets_the_pictures_of_its_turn_in_order():
    images = [Image.new("RGB", (40, 40), color) for color in ("red", "green", "blue")]
    seen = Observation(images=images, boxes=[None, CELL_B2, None], sources=["file", "crop", "show"])
    request, _ = judge_input(SEARCH, seen)
    assert request.images[0] is images[0] and request.images[2] is images[2]
    assert request.images[1].getpixel((0, 0)) == (0, 0, 0)  # a verified crop is cut again
    assert request.boxes == (None, CELL_B2, None) and request.sources == ("file", "crop", "show")
    assert request.size == (256, 256)


def test_what_only_an_exact_judge_or_a_measuring_prompt_may_know_stands_apart():
    _, labels = judge_input(replace(SEARCH, options=("checker", "diagonal")), GOOD)
    assert labels == Labels(SEARCH.boxes, ("checker", "diagonal"), SEARCH.image)


def looked_at(*boxes, targets=((76, 76, 120, 120),)):
    images = (IMAGE,) * len(boxes)
    request = JudgeRequest("?", images, "", boxes, ("crop",) * len(boxes), IMAGE.size)
    return request, Labels(targets, (), IMAGE)


@pytest.mark.parametrize(
    "boxes, expected",
    [
        # The target has 44 x 44 = 1936 pixels.
        (((64, 64, 128, 128),), 1.0),  # all of it in 4096: focus 0.473
        (((64, 64, 192, 128),), 1.0),  # in 8192: 0.236
        (((64, 64, 192, 192),), 0.5),  # in 16384: 0.118
        (((0, 0, 192, 192),), 0.0),  # in 36864: 0.053
        (((0, 0, 64, 64),), 0.0),  # elsewhere
        (((80, 76, 120, 120),), 1.0),  # 40 of 44 columns: recall 0.909
        (((81, 76, 120, 120),), 0.0),  # 39 of 44: 0.886
        (((90, 90, 94, 94),), 0.0),  # a speck inside the target
        (((0, 0, 64, 64), (64, 64, 128, 128)), 1.0),  # the best picture counts
        ((None,), 0.0),  # a drawing shows no region of the image
        ((), 0.0),
    ],
)
def test_box_judge_by_hand(boxes, expected):
    assert BoxJudge()(*looked_at(*boxes)) == expected


def test_one_target_of_several_is_enough():
    targets = ((0, 0, 20, 20), (76, 76, 120, 120))
    assert BoxJudge()(*looked_at(CELL_B2, targets=targets)) == 1.0


def test_nearly_the_whole_image_is_no_crop_even_of_a_large_target():
    large = ((0, 0, 250, 250),)
    judge = BoxJudge(focus=(0.1, 0.05))
    assert judge(*looked_at((0, 0, 256, 256), targets=large)) == 0.0
    assert judge(*looked_at((0, 0, 255, 254), targets=large)) == 0.0  # 99 %
    assert judge(*looked_at((0, 0, 242, 242), targets=large)) == 1.0  # 89 %


@pytest.mark.parametrize("judge, score", [
    (BoxJudge(0.9, (0.0, 0.0)), 1.0), (BoxJudge(0.91, (0.0, 0.0)), 0.0),
    (BoxJudge(0.9, (1.0, 0.5)), 1.0), (BoxJudge(0.9, (1.01, 1.0)), 0.5),
    (BoxJudge(0.9, (0.0, 0.0), 100 / 65536), 1.0), (BoxJudge(0.9, (0.0, 0.0), 0.0015), 0.0),
])  # fmt: skip
def test_who_just_reaches_a_limit_of_the_judge_has_reached_it(judge, score):
    """A crop of 10 x 10 shows 9 of the 10 columns of a target of the same size: recall 0.9."""
    assert judge(*looked_at((1, 0, 11, 10), targets=((0, 0, 10, 10),))) == score


sides = st.tuples(*[st.integers(0, 76)] * 2, *[st.integers(120, 256)] * 2)  # around the target


@given(sides, sides)
@example((0, 0, 256, 256), (0, 0, 128, 128))
def test_to_tighten_a_crop_around_its_target_never_lowers_its_score(a, b):
    inner = (max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3]))
    assert BoxJudge()(*looked_at(inner)) >= BoxJudge()(*looked_at(a))


def test_without_labelled_boxes_there_is_no_verdict():
    assert BoxJudge()(*looked_at(CELL_B2, targets=())) is None


def test_an_empty_target_is_refused():
    with pytest.raises(ValueError, match="x0 < x1"):
        BoxJudge()(*looked_at(CELL_B2, targets=((9, 9, 9, 20),)))


@given(st.integers(0, 10**6))
def test_on_the_toy_one_or_two_cells_earn_1_up_to_four_a_half_and_more_nothing(seed):
    scene = draw_scene(random.Random(seed), shortcut=1.0)
    square = scene.squares[seed % 5]
    spans = [(a, b) for a, b in itertools.combinations(range(GRID + 1), 2)]
    for (c0, c1), (r0, r1) in itertools.product(spans, spans):
        cells = (c1 - c0) * (r1 - r0)
        holds = c0 <= square.column < c1 and r0 <= square.row < r1
        expected = 0.0 if not holds or cells > 4 else 1.0 if cells <= 2 else 0.5
        asked = looked_at((c0 * CELL, r0 * CELL, c1 * CELL, r1 * CELL), targets=(square.box,))
        assert BoxJudge()(*asked) == expected
    assert search_sample(scene, square, "x").boxes == (square.box,)


# Steps


@pytest.mark.parametrize(
    "seen, expected",
    [
        ((), 0.0),
        ((GOOD,), 1.0),
        ((WIDE,), 0.5),
        ((WRONG,), -CELL_PRICE),
        ((FULL,), -1.0),
        ((TYPO,), -1.0),
        ((GOOD, WRONG), (1 - CELL_PRICE) / 2),
        ((TYPO, GOOD), 0.0),
        ((GOOD, WIDE, WRONG, TYPO), (0.5 - CELL_PRICE) / 4),  # (1 + 0.5 - price - 1) / 4
        ((GOOD, AGAIN), 0.0),
    ],
)
def test_the_tool_part_is_the_mean_over_steps(seen, expected):
    assert tools(*seen) == expected


@pytest.mark.parametrize("line", ["invalid_coords", "sandbox_error", "io_scratch"])
def test_a_red_line_costs_1_even_with_the_evidence_in_view(line):
    assert turn_score(SEARCH, crop(SEARCH, CELL_B2, red_lines=[line]), BoxJudge()) == -1.0


def test_a_no_op_is_a_red_line_only_once_something_has_been_shown():
    whole = crop(SEARCH, WHOLE, red_lines=["no_op"])
    free = Lambdas(lazy=0.0)
    assert reward(hand_made(SEARCH, whole, answer="x"), weights=free).scores == (0.0,)
    assert reward(hand_made(SEARCH, whole, whole, answer="x"), weights=free).scores == (0.0, -1.0)
    assert reward(hand_made(SEARCH, GOOD, AGAIN, answer="x"), weights=free).scores == (1.0, -1.0)
    assert reward(hand_made(SEARCH, EMPTY, whole, answer="x"), weights=free).scores == (0.0, 0.0)
    both = crop(SEARCH, WHOLE, red_lines=["no_op", "invalid_coords"])
    assert reward(hand_made(SEARCH, both, answer="x")).scores == (-1.0,)


def test_no_judge_can_pay_for_the_whole_image():
    whole = crop(SEARCH, WHOLE, red_lines=["no_op"])
    assert reward(hand_made(SEARCH, whole, answer="x"), judge=lambda *asked: 1.0).scores == (-1.0,)


@pytest.mark.parametrize("judge", [BoxJudge(), lambda *asked: 0.0])
def test_a_look_at_nothing_costs_its_share_of_the_image_whoever_judges(judge):
    half = crop(SEARCH, (128, 0, 256, 256))
    for lazy, *expected in ((2.5, -CELL_PRICE, -1.0), (1.0, -1 / 16, -0.5), (0.0, 0.0, 0.0)):
        assert [turn_score(SEARCH, seen, judge, lazy=lazy) for seen in (WRONG, half)] == expected
    two = replace(WRONG, images=WRONG.images * 2, boxes=WRONG.boxes * 2, sources=["crop"] * 2)
    assert turn_score(SEARCH, two, judge) == -2 * CELL_PRICE
    drawn = Observation(images=[IMAGE], boxes=[None], sources=["show"])
    assert turn_score(SEARCH, drawn, judge) == 0.0
    assert turn_score(NEUTRAL, WRONG, judge) == 0.0


@given(st.lists(st.tuples(*[st.integers(0, 3)] * 2, *[st.integers(1, 4)] * 2), min_size=1))
def test_many_crops_of_one_turn_score_at_most_what_one_as_large_would(cells):
    """One target, in the cell b2, of 44 x 44 pixels."""
    boxes = [
        (x * CELL, y * CELL, min(x + w, 4) * CELL, min(y + h, 4) * CELL) for x, y, w, h in cells
    ]
    pixels = sum((x1 - x0) * (y1 - y0) for x0, y0, x1, y1 in boxes)
    focus = 44 * 44 / pixels
    most = 1.0 if focus >= 0.19 else 0.5 if focus >= 0.095 else 0.0
    request = JudgeRequest("", (), "", tuple(boxes), ("crop",) * len(boxes), IMAGE.size)
    got = BoxJudge()(request, Labels(SEARCH.boxes, (), IMAGE))
    assert got == (most if any(x <= 64 < x1 and y <= 64 < y1 for x, y, x1, y1 in boxes) else 0.0)


def test_the_control_without_a_judge_credits_every_proper_crop_and_only_those():
    shown = (GOOD, WRONG, WIDE, FULL, TYPO, PRINTED)
    got = [reward(hand_made(SEARCH, seen, answer="checker"), "blind").tools for seen in shown]
    assert got == [1.0, 1.0, 1.0, -1.0, -1.0, 0.0]
    unlabelled = replace(SEARCH, boxes=())
    assert reward(hand_made(unlabelled, WRONG, answer="checker"), "blind").total == 1.2


def test_a_question_without_search_knows_only_red_lines():
    def never(request, labels):
        raise AssertionError("the judge was asked")

    group = [hand_made(NEUTRAL, GOOD, TYPO, answer="checker")]
    (got,) = REWARDS["tapo"](group, never, Lambdas(), random.Random(0))
    assert got.scores == (0.0, -1.0) and got.tools == -0.5


def test_text_alone_is_not_shown_to_the_judge():
    assert reward(hand_made(SEARCH, PRINTED, answer="x"), judge=lambda *asked: 1.0).tools == 0.0


def test_a_failure_of_ours_drops_out_of_the_mean_and_is_counted():
    trajectory = hand_made(SEARCH, OURS, GOOD, answer="checker")
    got = reward(trajectory)
    assert got.scores == (None, 1.0) and got.tools == 1.0 and got.total == 1.2
    assert summary([[got]], calls=2, environment=1)["environment"] == 1
    assert tools(OURS) == 0.0
    assert reward(hand_made(SEARCH, OURS, answer="checker"), "tool_bonus").tools == 0.0


def test_no_verdict_on_a_step_leaves_the_trajectory_without_a_reward():
    got = reward(hand_made(SEARCH, GOOD, answer="checker"), judge=lambda *asked: None)
    assert got.scores == (None,) and got.tools is None and got.total is None
    assert got.answer == 1.0


def test_a_judge_that_leaves_its_range_is_an_error():
    for bad in (-1.0, 1.5, 10):
        with pytest.raises(ValueError, match=r"\[0, 1\]"):
            reward(hand_made(SEARCH, GOOD, answer="x"), judge=lambda *asked, bad=bad: bad)


seen = st.sampled_from([GOOD, WIDE, WRONG, FULL, TYPO, BLOCKED, EMPTY, PRINTED])
some_seen = st.lists(seen, max_size=5)


@given(some_seen, st.sampled_from([TYPO, BLOCKED]))
def test_a_failed_or_blocked_step_never_raises_the_tool_part(seen, more):
    assert tools(*seen, more) <= tools(*seen)


@given(some_seen.filter(bool), st.data())
def test_repeating_a_call_never_raises_the_tool_part(seen, data):
    """The sandbox marks a picture shown before as a no-op, and an error is an error again. (What
    shows nothing is in the next test.)"""
    again = data.draw(st.sampled_from(seen))
    if again.images:
        again = replace(again, red_lines=["no_op"])
    if again.images or again.error:
        assert tools(*seen, again) <= tools(*seen)


@given(some_seen, st.sampled_from([WRONG, FULL, EMPTY, PRINTED]))
def test_an_irrelevant_empty_or_text_only_step_never_earns(seen, more):
    """It pulls the mean of Eq. 6 towards 0: a good record suffers, one below 0 is diluted, and
    never gets above what no step at all would have earned."""
    before, after = tools(*seen), tools(*seen, more)
    assert after <= max(before, 0.0)
    if before >= 0:
        assert after <= before


@given(some_seen)
def test_the_tool_part_is_a_mean_of_values_from_minus_1_to_1(seen):
    assert -1.0 <= tools(*seen) <= 1.0
    assert -1.0 <= tools(*seen, sample=NEUTRAL) <= 0.0


# Canned hacks


def test_comment_only_code_earns_answer_credit_and_no_more():
    got = reward(hand_made(SEARCH, EMPTY, answer="checker"))
    assert (got.answer, got.tools, got.total) == (1.0, 0.0, 1.0)


def test_a_crop_of_the_whole_image_or_of_99_percent_costs_as_much_as_a_red_line():
    almost = crop(SEARCH, (0, 0, 256, 254))
    for hack in (FULL, almost):
        got = reward(hand_made(SEARCH, hack, answer="checker"))
        assert (got.answer, got.tools) == (1.0, -1.0)
        assert reward(hand_made(SEARCH, hack, answer="checker"), "tool_bonus").total == 1.2


def test_an_answer_printed_by_code_earns_nothing_by_being_printed():
    for answer, total in (("checker", 1.0), ("diagonal", 0.0)):
        got = reward(hand_made(SEARCH, Observation(text=answer), answer=answer))
        assert (got.tools, got.total) == (0.0, total)


def test_an_answer_drawn_on_the_image_earns_nothing():
    drawn = Observation(images=[IMAGE], boxes=[None], sources=["show"])
    assert tools(drawn) == 0.0


# Rewards


@pytest.mark.parametrize(
    "name, part, total",
    [
        ("tapo", 0.125, 1.025),  # (1 + 0 + 0.5 - 1) / 4, and a fifth of it
        ("accuracy", 0.0, 1.0),
        ("tool_bonus", 3.0, 1.6),  # three calls ran
    ],
)
def test_one_trajectory_under_each_reward(name, part, total):
    got = reward(hand_made(SEARCH, GOOD, PRINTED, WIDE, TYPO, answer="checker"), name)
    assert got.tools == part and got.total == pytest.approx(total)


def test_format_and_answer_by_hand():
    bad = hand_made(SEARCH, GOOD, answer="diagonal")
    bad.turns[-1].text = "<answer>diagonal</answer></think>"
    got = reward(bad)
    assert (got.answer, got.tools, got.format) == (0.0, 1.0, -1.0)
    assert got.total == 0.0  # 1 * 0 + 0.2 * 1 + 0.2 * (-1)
    assert reward(bad, weights=Lambdas(format=0)).total == pytest.approx(0.2)


@pytest.mark.parametrize("ended", ["turns", "length", "no_action"])
def test_whoever_did_not_end_with_an_answer_has_none(ended):
    trajectory = hand_made(SEARCH, GOOD, answer=None)
    trajectory.ended, trajectory.answer = ended, "checker"
    got = reward(trajectory)
    assert (got.answer, got.tools, got.format) == (0.0, 1.0, -1.0)


anything = st.builds(
    lambda seen, right: hand_made(SEARCH, *seen, answer="checker" if right else "diagonal"),
    some_seen,
    st.booleans(),
)


@given(some_seen, some_seen, st.floats(0.1, 10), st.sampled_from([-0.49, -0.3, 0.0, 0.3, 0.49]))
def test_right_beats_wrong_while_tools_weigh_less_than_half_an_answer(a, b, answer, share):
    weights = Lambdas(answer, answer * share, 0.2)
    right, wrong = (
        reward(hand_made(SEARCH, *seen, answer=said), weights=weights)
        for seen, said in ((a, "checker"), (b, "diagonal"))
    )
    assert right.total > wrong.total


@given(some_seen, some_seen, st.booleans(), st.booleans())
def test_at_the_defaults_a_badly_formed_right_answer_still_beats_any_wrong_one(a, b, bad_a, bad_b):
    right, wrong = (
        hand_made(SEARCH, *seen, answer=x) for seen, x in ((a, "checker"), (b, "diagonal"))
    )
    for t, bad in ((right, bad_a), (wrong, bad_b)):
        t.turns[-1].text += "</think>" * bad
    assert reward(right).total > reward(wrong).total  # 1 - 0.2 - 0.2 > 0.2


@given(anything)
def test_without_a_weight_for_tools_tapo_pays_what_accuracy_pays(trajectory):
    without = Lambdas(tools=0.0)
    paid = [reward(trajectory, name, weights=without).total for name in ("tapo", "accuracy")]
    assert paid[0] == paid[1] == reward(trajectory, "accuracy").total


def test_from_half_an_answer_on_the_order_can_turn_and_we_are_warned():
    with pytest.warns(UserWarning, match="answer / 2"):
        weights = Lambdas(answer=1.0, tools=0.6)
    right = reward(hand_made(SEARCH, TYPO, answer="checker"), weights=weights)
    wrong = reward(hand_made(SEARCH, GOOD, answer="diagonal"), weights=weights)
    assert wrong.total > right.total  # 0.6 > 1 - 0.6


@pytest.mark.parametrize("tools, told", [(0.499, False), (0.5, True), (-0.5, True)])
def test_the_warning_begins_at_exactly_half_an_answer(tools, told, recwarn):
    Lambdas(answer=1.0, tools=tools)
    assert bool(recwarn.list) == told


@pytest.mark.parametrize("tools", [1.0, -1.0, 2.0, float("nan")])
def test_tools_that_weigh_as_much_as_the_answer_are_refused(tools):
    with pytest.raises(ValueError, match="below the answer's"):
        Lambdas(answer=1.0, tools=tools)


@given(st.lists(anything, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_the_order_of_a_group_does_not_matter(group, shuffle):
    order = list(range(len(group)))
    shuffle.shuffle(order)
    for name in sorted({*REWARDS, *RIVALS} - {"random"}):
        how = name, BoxJudge(), Lambdas()
        (straight,) = score([group], *how, random.Random(0))
        (mixed,) = score([[group[i] for i in order]], *how, random.Random(0))
        for reward, i in zip(mixed, order, strict=True):
            assert reward == straight[i]


def test_the_naive_bonus_pays_every_call_that_ran():
    five = [crop(SEARCH, WHOLE, red_lines=["no_op"]) for _ in range(5)]
    assert reward(hand_made(SEARCH, *five, answer="checker"), "tool_bonus").total == 2.0
    late = Observation(timed_out=True, red_lines=["sandbox_error"])
    failed = hand_made(SEARCH, TYPO, BLOCKED, late, answer="checker")
    assert reward(failed, "tool_bonus").total == 1.0


def test_the_null_is_a_coin_that_sees_nothing():
    good = [hand_made(SEARCH, GOOD, answer="checker")] * 4000
    bad = [hand_made(SEARCH, TYPO, answer="diagonal")] * 4000
    a, b = (REWARDS["random"](g, BoxJudge(), Lambdas(), random.Random(7)) for g in (good, bad))
    assert [r.total for r in a] == [r.total for r in b]
    assert {r.total for r in a} == {0.0, 1.0}
    assert sum(r.total for r in a) / 4000 == pytest.approx(0.75, abs=0.03)
    assert a[0].answer == 1.0 and b[0].answer == 0.0


def test_a_reward_of_ones_own_is_found_by_file_and_name(tmp_path, monkeypatch):
    (tmp_path / "my_file.py").write_text("from rewards import accuracy\nmy_reward = accuracy\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert reward_named("my_file.my_reward") is REWARDS["accuracy"]
    assert reward_named("deepeyes") is RIVALS["deepeyes"]
    with pytest.raises(ValueError, match="beside train.py; got 'no_file"):
        reward_named("no_file.my_reward")


def test_an_unknown_reward_lists_the_known_ones():
    with pytest.raises(
        ValueError,
        match="tapo, blind, .*, one of beyond.rivals.py, or my_file.my_reward .*; got 'tapoo'",
    ):
        score([], "tapoo", BoxJudge(), Lambdas(), random.Random(0))


def test_the_log_line_by_hand():
    a = hand_made(SEARCH, GOOD, answer="checker")  # 1.2
    b = hand_made(SEARCH, answer="diagonal")  # 0
    c = hand_made(SEARCH, GOOD, TYPO, answer=None)  # -0.2
    blind = hand_made(replace(SEARCH, boxes=()), GOOD, answer="checker")  # no verdict
    groups = [[a, b], [c, c], [a, blind]]
    rewards = score(groups, "tapo", BoxJudge(), Lambdas(), random.Random(0))
    got = summary(rewards, calls=7, environment=0)
    assert got == pytest.approx(
        {
            "reward": (1.2 + 0 - 0.2 - 0.2 + 1.2) / 5,
            "answer": 3 / 6,
            "tools": (1 + 0 + 0 + 0 + 1) / 5,
            "format": -2 / 6,
            "calls": 7 / 6,
            "constant_groups": 2 / 3,
            "no_verdict": 1,
            "environment": 0,
        }
    )


class Answering:
    """Grades open answers; has no opinion of what tools show."""

    def __init__(self, verdict):
        self.verdict, self.asked = verdict, []

    def __call__(self, request, labels):
        return 0.0

    def same_answer(self, question, reference, reply):
        self.asked.append((question, reference, reply))
        return self.verdict


def test_an_open_answer_without_a_verdict_leaves_the_trajectory_without_a_reward():
    for name in sorted({*REWARDS, *RIVALS} - {"random"}):
        group = [hand_made(SEARCH, GOOD, answer="chequered"), hand_made(SEARCH, answer="checker")]
        (got,) = score([group], name, Answering(None), Lambdas(), random.Random(0))
        assert got[0].answer is None and got[0].total is None, name
        assert got[1].answer == 1.0 and got[1].total is not None, name
        assert summary([got], calls=1, environment=0)["no_verdict"] == 1


def test_groups_are_judged_side_by_side_and_come_back_in_order():
    class Slow(BoxJudge):
        concurrency, most, now, lock = 3, 0, 0, threading.Lock()

        def __call__(self, request, labels):
            with Slow.lock:
                Slow.now += 1
                Slow.most = max(Slow.most, Slow.now)
            time.sleep(0.02)
            with Slow.lock:
                Slow.now -= 1
            return super().__call__(request, labels)

    groups = [[hand_made(SEARCH, seen, answer="checker")] for seen in (GOOD, WRONG, WIDE) * 4]
    got = score(groups, "tapo", Slow(), Lambdas(), random.Random(0))
    assert [r.scores for (r,) in got] == [(1.0,), (-CELL_PRICE,), (0.5,)] * 4
    assert Slow.most == 3


def test_the_null_does_not_depend_on_which_thread_is_first():
    samples = [replace(SEARCH, question=f"{i} ?") for i in range(12)]
    groups = [[hand_made(sample, answer="unheard")] * 4 for sample in samples]

    class Many(BoxJudge):
        concurrency = 4

        def same_answer(self, question, reference, reply):
            time.sleep(0.02 * (question in ("0 ?", "1 ?")))  # the first come last
            return False

    one, many = (
        score(groups, "random", judge, Lambdas(), random.Random(5))
        for judge in (BoxJudge(), Many())
    )
    assert one == many and len({r.total for group in one for r in group}) == 2
    coins = [[r.total for r in group] for group in one]
    other = score(groups, "random", BoxJudge(), Lambdas(), random.Random(6))
    assert any(coin != coins[0] for coin in coins)
    assert coins != [[r.total for r in group] for group in other]
