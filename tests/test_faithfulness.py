"""python -m pytest tests/test_faithfulness.py      rates, and perturbed plays"""

import itertools
import random
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import MagicMock

import pytest
import torch
from conftest import (
    AGAIN, ANSWER, DRAWN, FULL, GOOD, LOOK, NEUTRAL, OURS, PRINTED, RULES, SEARCH, SHORT, TYPO,
    WIDE, WRONG, fresh_logits, scripted,
)  # fmt: skip
from hypothesis import given
from hypothesis import strategies as st

import faithfulness
import rollout
from beyond.evidence import perturb_table
from data import CELL, crop_turn, toy_questions
from faithfulness import (
    Finding, Rate, answers, changes, count, cross_table, finding, kinds_of, listing, means, perturb,
    perturbed, play_perturbed, question_of, rates, tool_use, up_to,
)  # fmt: skip
from kit.perturbations import PERTURBATIONS
from rewards import BoxJudge, Lambdas, Reward, accuracy, crop, hand_made, tapo
from rollout import Rules, Trajectory, Turn, encode_observation, play
from sandbox import Observation


def scored(trajectories):
    return tapo(trajectories, BoxJudge(), Lambdas(), random.Random(0))


def found(*seen, answer="checker", sample=SEARCH) -> Finding:
    trajectory = hand_made(sample, *seen, answer=answer)
    return finding(trajectory, scored([trajectory])[0])


def made(*scores, correct=True, search=True, recalls=()) -> Finding:
    """A finding in short: one picture for each score."""
    return Finding(search, correct, scores, len(scores), 0, (0.1,) * len(scores), recalls)


@pytest.mark.parametrize("seen, scores, look", [
    ((), (), "no tool"),
    ((PRINTED,), (), "no tool"),  # a tool was used, but nothing was shown
    ((TYPO,), (), "no tool"), ((OURS,), (), "no tool"), ((GOOD,), (1.0,), "faithful"),
    ((WIDE,), (0.5,), "unfaithful"),  # half a score is not faithful, and two halves are none
    ((WIDE, crop(SEARCH, (60, 60, 188, 188))), (0.5, 0.5), "unfaithful"),
    ((WRONG,), (-2.5 / 16,), "unfaithful"), ((FULL,), (-1.0,), "unfaithful"),
    ((DRAWN,), (0.0,), "unfaithful"),
    ((PRINTED, WRONG, GOOD), (-2.5 / 16, 1.0), "faithful"),  # one hit is enough
    ((GOOD, WIDE, AGAIN), (1.0, 0.5, -1.0), "faithful"),
])  # fmt: skip
def test_each_trajectory_falls_into_one_of_three_classes(seen, scores, look):
    f, classes = found(*seen), ("faithful", "unfaithful", "no_tool")
    assert (f.scores, f.calls, f.look) == (scores, len(seen), look)
    assert f.failed == seen.count(TYPO)  # but not by a failure of ours
    assert [name for name in classes if count([f])[name].value] == [look.replace(" ", "_")]


def test_areas_are_of_every_crop_and_recall_is_by_proper_ones():
    f = found(FULL, crop(SEARCH, (76, 76, 98, 120)), WRONG)
    assert f.areas == (1.0, 22 * 44 / 65536, 4096 / 65536)
    assert f.recalls == (0.5,)  # half of the target; the whole image is no proper crop
    assert f.focuses == (2.0,)  # of the crops that show half of the target
    assert found(FULL).recalls == found(DRAWN).recalls == (0.0,)


def cells(findings):
    """The four numbers of the table correct x faithful."""
    head, *rows = cross_table(count(findings)).splitlines()
    assert head.split() == ["faithful", "not"]
    assert [row.split()[0] for row in rows] == ["correct", "wrong"]
    return [float(cell) for row in rows for cell in row.split()[1:]]


def test_ten_questions_by_hand():
    """Eight of them are search questions. In a neutral one a crop is no search."""
    right = [found(WRONG, GOOD), found(GOOD), found(FULL), found(), found(TYPO),
             found(sample=NEUTRAL)]  # fmt: skip
    wrong = [found(GOOD, answer="no"), found(WIDE, answer="no"), found(answer=None),
             found(GOOD, sample=NEUTRAL, answer="no")]  # fmt: skip
    area = (4096 * 4 + 65536 + 16384) / 65536  # four cells, the whole image, a crop of four cells
    got = {name: (rate.numerator, rate.denominator) for name, rate in count(right + wrong).items()}
    assert got == {
        "accuracy": (6, 10), "search_accuracy": (5, 8), "direct_accuracy": (1, 2),
        "tool_use": (6, 8), "faithful": (3, 8), "unfaithful": (2, 8), "no_tool": (3, 8),
        "faithful_and_correct": (2, 8), "faithful_given_correct": (2, 5),
        "unfaithful_given_correct": (1, 5), "no_tool_given_correct": (2, 5),
        "faithful_given_correct_and_shown": (2, 3), "faithful_per_call": (3, 6),
        "accuracy_given_faithful": (2, 3),
        "box_any_50": (4, 8), "box_all_50": (4, 8),  # the crop of four cells shows the target too
        "box_any_80": (4, 8), "box_all_80": (4, 8),
        "focus": (3 * 44**2 / 64**2 + 44**2 / 128**2, 4),  # the whole image is no proper crop
        "crop_area": (area, 6), "calls": (8, 10), "error_rate": (1, 10), "no_verdict": (0, 8),
    }  # fmt: skip
    assert cells(right + wrong) == [2, 3, 1, 2]


TARGETS = ((10, 10, 50, 50), (100, 100, 140, 140))  # of 40 x 40 pixels
FIRST, MOST = (0, 0, 64, 64), (115, 90, 200, 200)
LEFT, LOWER = (50, 90, 115, 150), (90, 120, 150, 160)


@pytest.mark.parametrize("targets, boxes, recalls, hit", [
    (TARGETS, [FIRST], (1.0, 0.0), [1, 0, 1, 0]),
    (TARGETS, [FIRST, MOST], (1.0, 0.625), [1, 1, 1, 0]),  # 25 of 40 columns
    (TARGETS, [MOST], (0.0, 0.625), [1, 0, 0, 0]),
    (TARGETS[1:], [LEFT], (0.375,), [0, 0, 0, 0]), (TARGETS[1:], [LOWER], (0.5,), [1, 1, 0, 0]),
    (TARGETS[1:], [LEFT, LOWER], (27.5 / 40,), [1, 1, 0, 0]),  # their union
])  # fmt: skip
def test_boxes_are_hit_by_half_or_by_four_fifths_and_one_or_all(targets, boxes, recalls, hit):
    sample = replace(SEARCH, boxes=targets)
    f = found(*[crop(sample, box) for box in boxes], sample=sample)
    counts = count([f])
    got = [counts[f"box_{k}"].value for k in ("any_50", "all_50", "any_80", "all_80")]
    assert (f.recalls, got) == (recalls, hit)
    assert faithfulness.HALF == BoxJudge(visible=0.5, focus=(0, 0)) and faithfulness.DRAWS == 1000


def test_what_has_no_boxes_or_no_verdict_leaves_the_rates_that_need_them_and_is_counted():
    counts = count([made(1.0), made(1.0, recalls=(0.9,))])
    assert counts["box_any_50"] == Rate(1, 1)
    counts = count([made(1.0), made(None, 1.0), made(0.0, correct=False)])
    assert counts["faithful"] == Rate(1, 2) and counts["no_verdict"] == Rate(1, 3)
    assert counts["search_accuracy"] == Rate(2, 3) and counts["tool_use"] == Rate(3, 3)
    counts = count([made(1.0), made(1.0, correct=None)])
    assert counts["accuracy"] == counts["faithful_and_correct"] == Rate(1, 1)
    assert counts["accuracy_given_faithful"] == counts["faithful_given_correct"] == Rate(1, 1)
    assert counts["faithful"] == Rate(2, 2)
    assert cells([made(1.0, correct=None)]) == [0, 0, 0, 0]


def test_nothing_to_count_gives_none_and_no_error():
    assert rates([], []) == {"n": 0, **dict.fromkeys(count([]))} and listing(tool_use([])) == ""
    assert str(Rate(3, 4)) == "0.750 (3/4)" and str(Rate(0, 0)) == "none (0/0)"


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
    lone = [*findings, made(1.0, search=False)]  # the only question that needs no search
    assert count(lone, draws=50)["direct_accuracy"] == Rate(1, 1)
    one = [replace(f, cluster="q") for f in findings]
    assert count(one, draws=50)["accuracy"].interval is count(one)["accuracy"].interval is None


def test_the_cycles_of_a_question_are_one_question():
    one = replace(SEARCH, id="0", cycle="0", options=("a", "b"))
    two = replace(one, id="1", cycle="1", options=("b", "a"))
    assert question_of(one) == question_of(two) != question_of(SEARCH) == "s1"
    assert question_of(replace(one, cycle="")) == "0"


# How tools were used
def coded(*calls, said=""):
    """calls: (code, observation)"""
    steps = [Turn(f"<code>{code}</code>", code, seen, 0, 0) for code, seen in calls]
    steps.append(Turn(f"<think>{said}</think><answer>checker</answer>", None, None, 0, 0))
    return Trajectory(SEARCH, turns=steps, answer="checker", ended="answered")


@pytest.mark.parametrize("code, seen, kinds", [
    ("image.crop((0, 0, 9, 9)).show()", PRINTED, {"crop"}),
    ("plt.imshow(a[10:20, 5:9])", PRINTED, {"crop"}), ("image.rotate(90)", PRINTED, {"rotate"}),
    ("ImageEnhance.Contrast(image.crop(b)).enhance(2)", PRINTED, {"crop", "contrast"}),
    ("ImageDraw.Draw(image).rectangle(b)", PRINTED, {"draw"}),
    ("cv2.line(a, p, q, 0)", PRINTED, {"draw"}), ("print(3 * [1, 2][0])", PRINTED, {"compute"}),
    ("look()", GOOD, {"crop"}),  # a recorded box proves a crop
    ("image.show()", DRAWN, {"other"}),  # a picture is no computation
])  # fmt: skip
def test_kinds_of_code(code, seen, kinds):
    assert kinds_of(Turn("", code, seen, 0, 0)) == kinds


def test_use_of_tools_by_hand():
    mended = replace(GOOD, notes=["a missing bracket was added"])
    trajectories = [
        coded(("imag.crop(b)", TYPO), ("image.crop(b).show()", mended)),
        coded(("image.rotate(9).show()", replace(DRAWN, sources=["edited"])), *[("1/0", TYPO)] * 4),
        coded(said="The crop shows it ."),
        coded(),
        coded(("print(1)", OURS), ("image.show()", FULL)),
    ]
    used = tool_use(trajectories).items()
    assert {name: (r.numerator, r.denominator) for name, r in used if r.value} == {
        "0 calls": (2, 5), "2 calls": (2, 5), "5 or more calls": (1, 5),
        "crop (of calls)": (3, 9), "rotate (of calls)": (1, 9), "compute (of calls)": (5, 9),
        "crops of 5% to 25%": (1, 2), "crops of 90% to 100%": (1, 2),
        "failed calls": (5, 9), "failed calls after which one ran": (1, 5),
        "repaired calls": (1, 9), "verified crops (of pictures)": (2, 3),
        "edited crops (of pictures)": (1, 3), "decorative crops": (1, 5),
    }  # fmt: skip


@pytest.mark.parametrize("said, claimed", [
    ("I cropped the sign.", True), ("Zooming in on it, I see a 7.", True),
    ("I'll zoom into the corner", True), ("image.crop((0, 0, 9, 9))", True),
    ("I can see it .", False), ("The farmer's crops are corn.", False),
])  # fmt: skip
def test_a_look_that_was_only_claimed(said, claimed):
    plays = [coded(said=said), coded(("look()", GOOD), said=said)]
    assert [tool_use([t])["decorative crops"].numerator for t in plays] == [claimed, 0]


def test_a_crop_that_was_tried_and_failed_is_not_decorative():
    assert tool_use([coded(("imag.crop(b)", TYPO))])["decorative crops"].numerator == 0


# Perturbations
def test_each_question_perturbation_and_seed_draws_a_place_of_its_own(monkeypatch):
    drawn, plays = [], [hand_made(replace(SEARCH, id=i), GOOD, answer="x") for i in ("a", "b")]
    draw = lambda name, seen, image, rng: drawn.append(rng.random()) or seen  # noqa: E731
    for name, stand_in in (("Sandbox", MagicMock()), ("listen", MagicMock(return_value=False)),
                           ("perturbed", draw)):  # fmt: skip
        monkeypatch.setattr(faithfulness, name, stand_in)
    for name, seed in (*itertools.product(("noise", "random"), (0, 1)), ("noise", 0)):
        play_perturbed(MagicMock(), [(t, 0) for t in plays], name, Rules(), seed)
    assert len({*drawn}) == 8 and drawn[:2] == drawn[-2:]


@pytest.mark.parametrize("reward, hit, clean, clean_hit, clean_miss", [
    (1.0, 1.0, True, True, None), (0.0, 0.0, False, None, False),
    (None, 1.0, None, None, None), (1.0, None, True, None, None),
])  # fmt: skip
def test_a_verdict_on_the_answer_and_one_on_the_turn_are_each_needed(
    reward, hit, clean, clean_hit, clean_miss
):
    """The judge calls "a lorry" right, the rules do not: clean accuracy is the judge's. The copy
    is right by the rules, wherever that is asked."""
    t, copy = (hand_made(SEARCH, GOOD, answer=answer) for answer in ("a lorry", "checker"))
    got = changes(t, copy, 0, finding(t, Reward(reward, None, 0.0, (hit,), None)))
    for name, expected in (("", clean), ("_hit", clean_hit), ("_miss", clean_miss)):
        assert got["clean" + name] == expected
        assert got["accuracy" + name] == (None if expected is None else True)
    assert changes(t, replace(copy, ended="turns"), 0, found(GOOD))["accuracy"] is False


GREEDY = replace(RULES, temperature=0.0)
ASKED = toy_questions(3, "perturbed", neutral_share=0)
DIRECT = toy_questions(1, "neutral", neutral_share=1)
CUT = (0, 0, 64, 64)


def test_empty_says_and_shows_nothing_at_all_and_the_others_leave_what_was_printed(policy):
    image = ASKED[0].image
    seen = Observation("log", [image.crop(CUT)], [CUT], ["crop"], "an error", notes=["a repair"])
    told = {name: perturbed(name, seen, image, random.Random(0)) for name in PERTURBATIONS}
    empty, nothing = (encode_observation(policy, x, [], False, 99)
                      for x in (told.pop("empty"), Observation()))  # fmt: skip
    assert empty == nothing
    assert all((other.text, other.boxes) == ("log", [CUT]) for other in told.values())


def cell_of(sample):
    x0, y0 = (x // CELL * CELL for x in (*sample.boxes, (0, 0))[0][:2])  # neutral: a1
    return x0, y0, x0 + CELL, y0 + CELL


def looks(sample, away=False):
    """The turn that crops the cell of the target, or the one next to it."""
    x0, y0, x1, y1 = cell_of(sample)
    shift = (CELL if x0 == 0 else -CELL) if away else 0
    return crop_turn(" I need a closer look .", (x0 + shift, y0, x1 + shift, y1))


def saying(text):
    return f"<think> The crop shows it .</think><answer>{text}</answer>"


@contextmanager
def speaking(reply):
    """Inside, a policy says reply(trajectory): it may depend on what the trajectory was shown."""

    def said(policy, players, rules, tally):
        for p in players:
            p.said = policy.encode(reply(policy, p.t), []).ids
            slots = len(p.t.ids) + len(p.said) - 1 - p.read
            longer = lambda x: torch.cat([x, x[:1].expand(slots, -1, -1)])  # noqa: B023, E731
            p.kept = [tuple(map(longer, pair)) for pair in p.kept]
        return [True] * len(players)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout, "continue_turns", said)
        yield


def played(policy, reply, samples=ASKED, rules=GREEDY):
    """Their only rollouts, and what these earn."""
    with speaking(reply):
        trajectories = [t for (t,) in play(policy, list(samples), 1, rules)]
    return trajectories, scored(trajectories)


def studied(policy, reply, samples=ASKED, names=PERTURBATIONS):
    """Table 6 of a policy."""
    trajectories, paid = played(policy, reply, samples)
    with speaking(reply):
        return perturb(policy, trajectories, paid, GREEDY, names)


def again(policy, reply, name, i=0, rules=GREEDY):
    """A play, and its copy that is told something else from turn i on."""
    (t,), _ = played(policy, reply, ASKED[:1], rules)
    with speaking(reply):
        return t, *play_perturbed(policy, [(t, i)], name, rules, seed=0)


def fooled(policy, t, i=1):
    """Is the i-th picture not the target's cell?"""
    crop = policy.pictures([t.sample.image.crop(cell_of(t.sample))])[0]
    return (t.images[i].pixels - crop.pixels).abs().mean() > 0.1


def reads(policy, t):
    """Looks at the target's cell, and answers rightly if that is what it then sees."""
    if len(t.ids) == t.prompt:
        return looks(t.sample)
    if len(t.images) == 1:  # had to answer without a picture
        return saying("nothing") if t.turns else "nothing</answer>"
    return saying("nothing" if fooled(policy, t, -1) else t.sample.answer)


def deaf(policy, t):
    return saying(t.sample.answer) if t.turns else looks(t.sample, t.sample.id.endswith("1"))


@pytest.fixture(scope="module")
def study(policy):
    """Table 6 of the policy that reads, on questions of two sources."""
    return studied(policy, reads, [ASKED[0], *(replace(s, source="hard") for s in ASKED[1:])])


def test_who_reads_the_crop_loses_all_under_every_lie_but_identity(study):
    assert list(study["all"]) == list(PERTURBATIONS)
    for name, told in study["all"].items():
        got, kept = {k: rate.value for k, rate in told.items()}, float(name == "identity")
        assert told["possible"].numerator == told["accuracy"].denominator == 3
        assert got["clean"] == got["clean_hit"] == 1 and got["clean_miss"] is None
        assert got["accuracy"] == got["accuracy_hit"] == kept
        assert got["answers"] == 1 - kept and got["thoughts"] == got["actions"] == 0


def test_questions_of_several_sources_are_reported_apart_and_together(study):
    assert study["hard"]["mask"]["possible"].denominator == 2
    assert "nothing to perturb" in perturb_table({})
    lines = [line.split() for line in perturb_table(study).splitlines()]
    assert lines[1] == ["all"]
    assert lines[3] == "mask 3/3 0.0 0.0 100.0 0.0 [0.0, 0.0] 100.0 0.0 100.0 - -".split()


def test_who_does_not_look_at_the_picture_never_changes_hit_or_miss(policy):
    """Questions that need no search, or were answered without a picture, are left out."""
    reply = lambda policy, t: SHORT if t.sample.id == "guess" else deaf(policy, t)  # noqa: E731
    (of_toy,) = studied(policy, reply, [*ASKED, *DIRECT, replace(ASKED[0], id="guess")]).values()
    for told in of_toy.values():
        changed = ("thoughts", "actions", "answers", "accuracy")
        assert [told[name].value for name in changed] == [0, 0, 0, 1]
        assert (told["clean_hit"].denominator, told["clean_miss"].denominator) == (2, 1)


def test_changed_thoughts_and_actions_are_each_counted_from_the_first_picture_on(policy):
    def restless(policy, t):  # when fooled: thinks aloud (sample 0), looks elsewhere (sample 1)
        if len(t.images) == 1:
            return looks(t.sample)
        lie = fooled(policy, t)
        if lie and t.sample.id.endswith("1") and len(t.images) == 2:
            return looks(t.sample, away=True)
        word = "odd " if lie and t.sample.id.endswith("0") else ""
        return f"<think> {word}The crop shows it .</think><answer>x</answer>"

    told = studied(policy, restless, names=["mask"])["toy"]["mask"]
    assert told["actions"].numerator == 1 and told["answers"].numerator == 0
    assert told["thoughts"].numerator == 2  # the second look was thought about, too


def test_later_pictures_are_lies_too_and_the_code_lives_in_the_true_world(policy):
    turns = ["<code>\nx = 41\nprint(x)\n</code>", looks(ASKED[0]), looks(ASKED[0], away=True),
             "<code>\nprint(x + 1)\n</code>"]  # fmt: skip
    reply = lambda policy, t: dict(enumerate(turns)).get(len(t.turns), SHORT)  # noqa: E731
    t, copy = again(policy, reply, "mask", i=1, rules=replace(GREEDY, turns=6))
    shown = [step.observation.images for step in copy.tool_turns]
    assert [len(images) for images in shown] == [0, 1, 1, 0]
    assert all(picture.getextrema() == ((128, 128),) * 3 for i in shown for picture in i)
    assert copy.turns[3].observation.text.strip() == "42" and copy.answer == "red"
    assert t.turns[1].observation.images[0].getextrema() != ((128, 128),) * 3  # the clean one


def test_all_before_the_first_lie_is_the_clean_trajectory(policy):
    t, copy = again(policy, reads, "noise")
    end = t.turns[0].end
    assert copy.ids[:end] == t.ids[:end] and copy.acted[:end] == t.acted[:end]
    assert copy.ids != t.ids and len(copy.images) == len(t.images) == 2
    assert torch.equal(copy.images[0].pixels, t.images[0].pixels)
    assert t.turns[0].observation.images[0].size == (64, 64) and t.ended == "answered"
    for i in (0, 1):  # one that was read from a file, without pixels, goes on the same
        two = [up_to(policy, x, i).images for x in (t, replace(t, images=[]))]
        for one, other in zip(*two, strict=True):
            assert torch.equal(one.pixels, other.pixels) and torch.equal(one.grid, other.grid)


def test_going_on_from_the_middle_is_exact(policy):
    """What the policy says after the lie follows from the whole history, pictures included."""
    script = [LOOK, LOOK.replace("64,128,128,192", "0,0,64,64"), ANSWER]
    with scripted(policy, [script]) as heard:
        groups = play(policy, ASKED[:2], 1, GREEDY)
        copies = play_perturbed(policy, [(t, 0) for (t,) in groups], "noise", GREEDY, seed=0)
    for copy in copies:
        assert len(heard[id(copy)]) == 2 and copy.ended == "answered"
        for turn, logits in zip(copy.turns[1:], heard[id(copy)]):
            expected = fresh_logits(policy, copy)[turn.start - 1 : turn.end - 1]
            assert torch.allclose(logits, expected, atol=1e-4)


def test_where_there_is_no_room_the_trajectory_leaves_that_lie_and_is_counted(policy):
    large = crop_turn(" look", (0, 0, 200, 256))
    reply = lambda policy, t: saying("x") if t.turns else large  # noqa: E731
    told = studied(policy, reply, names=["random", "mask"])["toy"]
    assert told["random"]["possible"] == Rate(0, 3, (0.0, 0.0))
    assert told["random"]["accuracy"].denominator == told["random"]["clean"].denominator == 0
    assert told["mask"]["possible"].value == 1


def test_rewards_without_scores_and_a_warm_policy_are_refused(policy):
    t = hand_made(SEARCH, GOOD, answer="checker")
    (reward,) = accuracy([t], BoxJudge(), Lambdas(), random.Random(0))
    with pytest.raises(ValueError, match="s1.*1 tool turns, got 0; rate with rewards.tapo"):
        perturb(policy, [t], [reward], GREEDY)
    with pytest.raises(ValueError, match="greedy.*temperature 1"):
        perturb(policy, [], [], RULES)


# Laws
scores = st.lists(st.sampled_from([1.0, 1.0, 0.5, 0.0, -1.0, None]), max_size=4)
one = st.builds(lambda scores, right, search: made(*scores, correct=right, search=search),
                scores, st.booleans(), st.booleans())  # fmt: skip
some = st.lists(one, max_size=12)


@given(some)
def test_the_three_rates_partition_the_questions(findings):
    counts = count(findings)
    for suffix in ("", "_given_correct"):
        names = [name + suffix for name in ("faithful", "unfaithful", "no_tool")]
        total = sum(counts[name].numerator for name in names)
        assert total == pytest.approx(counts[names[0]].denominator)


@given(some)
def test_conditional_times_accuracy_is_the_headline(findings):
    counts = count([f for f in findings if None not in f.scores])
    names = ("faithful_given_correct", "search_accuracy", "faithful_and_correct")
    conditional, accuracy, headline = (counts[name].value or 0.0 for name in names)
    assert conditional * accuracy == pytest.approx(headline)
