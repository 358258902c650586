"""python -m pytest tests/test_perturb.py      about 15 s: policies and perturbed pictures"""

import io
import random
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import ANSWER, LOOK, PRINT, RULES, SHORT, fresh_logits, scripted
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import beyond.evidence
import faithfulness
import rollout
from beyond.evidence import (
    ablation,
    answer_log_probs,
    answer_now,
    evidence,
    perturb_table,
    without_tools,
)
from data import CELL, crop_turn, toy_questions
from faithfulness import perturb, perturbed, play_perturbed, up_to
from kit.boxes import beside
from kit.perturbations import PERTURBATIONS
from rewards import BoxJudge, Lambdas, tapo
from rollout import encode_observation, play
from sandbox import Observation

GREEDY = replace(RULES, temperature=0.0)
SEARCH = toy_questions(3, "perturbed", neutral_share=0)
NEUTRAL = toy_questions(1, "neutral", neutral_share=1)


def cell_of(sample):
    x0, y0, *_ = sample.boxes[0] if sample.boxes else (0, 0)
    x0, y0 = x0 // CELL * CELL, y0 // CELL * CELL
    return x0, y0, x0 + CELL, y0 + CELL


def looks(sample, away=False):
    """The turn that crops the cell of the target, or the one next to it."""
    x0, y0, x1, y1 = cell_of(sample)
    shift = (CELL if x0 == 0 else -CELL) if away else 0
    return crop_turn(" I need a closer look .", (x0 + shift, y0, x1 + shift, y1))


def answers(text):
    return f"<think> The crop shows it .</think><answer>{text}</answer>"


@contextmanager
def speaking(reply):
    """Inside, a policy says reply(trajectory): it may depend on what the trajectory was shown."""

    def said(policy, players, rules, tally):
        for p in players:
            p.said = policy.encode(reply(policy, p.t), []).ids
            slots = len(p.t.ids) + len(p.said) - 1 - p.read
            p.kept = [
                tuple(torch.cat([x, x[:1].expand(slots, -1, -1)]) for x in pair) for pair in p.kept
            ]
        return [True] * len(players)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout, "continue_turns", said)
        yield


def reads(policy, t):
    """Looks at the target's cell, and answers rightly if that is what it then sees."""
    if len(t.ids) == t.prompt:
        return looks(t.sample)
    if len(t.images) == 1:  # had to answer without a picture
        return answers("nothing") if t.turns else "nothing</answer>"
    crop = policy.pictures([t.sample.image.crop(cell_of(t.sample))])[0]
    same = (t.images[-1].pixels - crop.pixels).abs().mean() < 0.1
    return answers(t.sample.answer if same else "nothing")


def deaf(policy, t):
    return answers(t.sample.answer) if t.turns else looks(t.sample, t.sample.id.endswith("1"))


def played(policy, reply, samples=SEARCH, rules=GREEDY):
    with speaking(reply):
        trajectories = [t for (t,) in play(policy, list(samples), 1, rules)]
    return trajectories, tapo(trajectories, BoxJudge(), Lambdas(), random.Random(0))


def values(rates):
    return {name: rate.value for name, rate in rates.items()}


# What is shown instead

sizes = st.tuples(st.integers(1, 40), st.integers(1, 40))


@st.composite
def crops(draw):
    """An image, and a box in it."""
    width, height = draw(sizes)
    x0, y0 = draw(st.integers(0, width - 1)), draw(st.integers(0, height - 1))
    x1, y1 = draw(st.integers(x0 + 1, width)), draw(st.integers(y0 + 1, height))
    pixels = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 256, (height, width, 3))
    plain = draw(st.sampled_from([None, 0, 128]))
    pixels = pixels if plain is None else np.full_like(pixels, plain)
    return Image.fromarray(pixels.astype(np.uint8)), (x0, y0, x1, y1)


def seen_in(image, box, **more):
    return Observation("log", [image.crop(box)], [box], ["crop"], **more)


def overlap(a, b):
    return max(a[0], b[0]) < min(a[2], b[2]) and max(a[1], b[1]) < min(a[3], b[3])


@given(crops(), st.integers(0, 9))
def test_mask_and_noise_differ_from_any_picture_and_keep_its_size(crop, seed):
    image, box = crop
    seen = seen_in(image, box)
    for name in ("mask", "noise"):
        (told,) = perturbed(name, seen, image, random.Random(seed)).images
        assert told.size == seen.images[0].size and told.mode == "RGB"
        assert told.tobytes() != seen.images[0].tobytes() or (name == "noise" and area(box) < 4)


def test_a_grey_picture_is_masked_black_though_it_was_read_from_a_file():
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (128, 128, 128)).save(buffer, "PNG")
    seen = Observation("log", [Image.open(buffer)], [None], ["crop"])
    (told,) = perturbed("mask", seen, Image.new("RGB", (9, 9)), random.Random(0)).images
    assert told.getextrema() == ((0, 0),) * 3


def area(box):
    return (box[2] - box[0]) * (box[3] - box[1])


@given(crops(), st.integers(0, 9))
def test_random_is_as_large_lies_in_the_image_and_never_overlaps(crop, seed):
    image, box = crop
    place = beside(box, image.size, random.Random(seed))
    w, h = box[2] - box[0], box[3] - box[1]
    others = [(x, y, x + w, y + h) for x in range(image.width - w + 1)
              for y in range(image.height - h + 1)]  # fmt: skip
    others = [other for other in others if not overlap(other, box)]
    assert place in others if others else place is None


def test_random_reaches_every_free_place_equally():
    rng, counts = random.Random(0), {}
    for _ in range(8000):
        place = beside((2, 1, 4, 3), (6, 5), rng)
        counts[place] = counts.get(place, 0) + 1
    assert len(counts) == 5 * 4 - 9 and max(counts.values()) < 1.25 * min(counts.values())


def test_random_shows_that_place_at_the_scale_of_the_crop():
    image = SEARCH[0].image
    seen = replace(seen_in(image, (0, 0, 64, 64)), images=[Image.new("RGB", (128, 128))])
    told = perturbed("random", seen, image, random.Random(3))
    place = beside((0, 0, 64, 64), image.size, random.Random(3))
    assert told.images[0].tobytes() == image.crop(place).resize((128, 128)).tobytes()


def test_identity_is_encoded_again_and_looks_the_same():
    image = SEARCH[0].image
    seen = seen_in(image, cell_of(SEARCH[0]))
    (told,) = perturbed("identity", seen, image, random.Random(0)).images
    gap = np.abs(np.asarray(told, int) - np.asarray(seen.images[0], int))
    assert 0 < gap.mean() < 4 and told.size == seen.images[0].size


def test_empty_says_and_shows_nothing_at_all(policy):
    seen = seen_in(SEARCH[0].image, (0, 0, 64, 64), notes=["a repair"], error="an error")
    told = perturbed("empty", seen, SEARCH[0].image, random.Random(0))
    nothing = encode_observation(policy, Observation(), [], False, 99)
    assert encode_observation(policy, told, [], False, 99) == nothing


def test_other_lies_leave_what_was_printed_and_what_the_code_asked_for():
    seen = seen_in(SEARCH[0].image, (0, 0, 64, 64))
    for name in ("identity", "mask", "noise", "random"):
        told = perturbed(name, seen, SEARCH[0].image, random.Random(0))
        assert (told.text, told.boxes) == ("log", [(0, 0, 64, 64)])


def test_no_room_and_no_box_cannot_be_told_as_random():
    image = SEARCH[0].image
    drawn = Observation(images=[image], boxes=[None], sources=["show"])
    for seen in (seen_in(image, (0, 0, 129, 256)), drawn):
        assert perturbed("random", seen, image, random.Random(0)).environment
        assert not perturbed("mask", seen, image, random.Random(0)).environment


# The study


def test_who_reads_the_crop_loses_all_under_every_lie_but_identity(policy):
    trajectories, rewards = played(policy, reads)
    with speaking(reads):
        study = perturb(policy, trajectories, rewards, GREEDY)
    assert list(study) == ["toy"] and list(study["toy"]) == list(PERTURBATIONS)
    for name, rates in study["toy"].items():
        got, kept = values(rates), float(name == "identity")
        assert rates["possible"].numerator == rates["accuracy"].denominator == 3
        assert got["clean"] == got["clean_hit"] == 1 and got["clean_miss"] is None
        assert got["accuracy"] == got["accuracy_hit"] == kept
        assert got["answers"] == 1 - kept and got["thoughts"] == got["actions"] == 0


def test_who_does_not_look_at_the_picture_never_changes_hit_or_miss(policy):
    trajectories, rewards = played(policy, deaf)
    with speaking(deaf):
        study = perturb(policy, trajectories, rewards, GREEDY)
    for rates in study["toy"].values():
        assert [rates[x].value for x in ("thoughts", "actions", "answers", "accuracy")] == [
            0,
            0,
            0,
            1,
        ]
        assert (rates["clean_hit"].denominator, rates["clean_miss"].denominator) == (2, 1)


def test_changed_thoughts_and_actions_are_each_counted(policy):
    def restless(policy, t):  # when fooled: thinks aloud (sample 0), looks elsewhere (sample 1)
        first = policy.pictures([t.sample.image.crop(cell_of(t.sample))])[0]
        if len(t.images) == 1:
            return looks(t.sample)
        fooled = (t.images[1].pixels - first.pixels).abs().mean() > 0.1
        if fooled and t.sample.id.endswith("1") and len(t.images) == 2:
            return looks(t.sample, away=True)
        word = "odd " if fooled and t.sample.id.endswith("0") else ""
        return f"<think> {word}The crop shows it .</think><answer>x</answer>"

    trajectories, rewards = played(policy, restless)
    with speaking(restless):
        rates = perturb(policy, trajectories, rewards, GREEDY, ["mask"])["toy"]["mask"]
    assert rates["actions"].numerator == 1 and rates["answers"].numerator == 0
    assert rates["thoughts"].numerator == 2  # the second look was thought about, too


def test_the_first_picture_is_already_a_lie(policy):
    def twice(policy, t):  # looks a second time, and elsewhere if the first picture was a lie
        first = policy.pictures([t.sample.image.crop(cell_of(t.sample))])[0]
        if len(t.images) == 1:
            return looks(t.sample)
        fooled = (t.images[1].pixels - first.pixels).abs().mean() > 0.1
        return looks(t.sample, fooled) if len(t.images) == 2 else answers("x")

    trajectories, rewards = played(policy, twice, SEARCH[:2])
    with speaking(twice):
        rates = perturb(policy, trajectories, rewards, GREEDY, ["mask"])["toy"]["mask"]
    assert rates["actions"] == faithfulness.Rate(2, 2, (1.0, 1.0))


def test_later_pictures_are_lies_too_and_the_code_lives_in_the_true_world(policy):
    turns = ["<code>\nx = 41\nprint(x)\n</code>", looks(SEARCH[0]), looks(SEARCH[0], away=True),
             "<code>\nprint(x + 1)\n</code>"]  # fmt: skip

    def reply(policy, t):
        return dict(enumerate(turns)).get(len(t.turns), SHORT)

    rules = replace(GREEDY, turns=6)
    (t,), _ = played(policy, reply, SEARCH[:1], rules)
    with speaking(reply):
        (copy,) = play_perturbed(policy, [(t, 1)], "mask", rules, seed=0)
    shown = [step.observation.images for step in copy.tool_turns]
    assert [len(images) for images in shown] == [0, 1, 1, 0]
    assert all(picture.getextrema() == ((128, 128),) * 3 for i in shown for picture in i)
    assert copy.turns[3].observation.text.strip() == "42" and copy.answer == "red"
    assert t.turns[1].observation.images[0].getextrema() != ((128, 128),) * 3  # the clean one


def test_all_before_the_first_lie_is_the_clean_trajectory(policy):
    (t,), _ = played(policy, reads, SEARCH[:1])
    with speaking(reads):
        (copy,) = play_perturbed(policy, [(t, 0)], "noise", GREEDY, seed=0)
    end = t.turns[0].end
    assert copy.ids[:end] == t.ids[:end] and copy.acted[:end] == t.acted[:end]
    assert copy.ids != t.ids and len(copy.images) == len(t.images) == 2
    assert torch.equal(copy.images[0].pixels, t.images[0].pixels)
    assert t.turns[0].observation.images[0].size == (64, 64) and t.ended == "answered"


def test_going_on_from_the_middle_is_exact(policy):
    """What the policy says after the lie follows from the whole history, pictures included."""
    script = [LOOK, LOOK.replace("64,128,128,192", "0,0,64,64"), ANSWER]
    with scripted(policy, [script]) as heard:
        groups = play(policy, SEARCH[:2], 1, GREEDY)
        copies = play_perturbed(policy, [(t, 0) for (t,) in groups], "noise", GREEDY, seed=0)
    for copy in copies:
        logits, turns = fresh_logits(policy, copy), heard[id(copy)]
        assert len(turns) == 2 and copy.ended == "answered"
        for step, got in zip(copy.turns[1:], turns, strict=True):
            expected = logits[step.start - 1 : step.end - 1]
            assert torch.allclose(got, expected, atol=1e-4)


def test_a_trajectory_that_was_read_from_a_file_goes_on_the_same(policy):
    (t,), _ = played(policy, reads, SEARCH[:1])
    bare = replace(t, images=[])
    for i in (0, 1):
        for one, two in zip(up_to(policy, t, i).images, up_to(policy, bare, i).images, strict=True):
            assert torch.equal(one.pixels, two.pixels) and torch.equal(one.grid, two.grid)


def test_where_there_is_no_room_the_trajectory_leaves_that_lie_and_is_counted(policy):
    def whole(policy, t):
        return answers("x") if t.turns else crop_turn(" look", (0, 0, 200, 256))

    trajectories, rewards = played(policy, whole)
    with speaking(whole):
        study = perturb(policy, trajectories, rewards, GREEDY, ["random", "mask"])["toy"]
    possible = study["random"]["possible"]
    assert (possible.numerator, possible.denominator) == (0, 3)
    assert study["random"]["accuracy"].denominator == study["random"]["clean"].denominator == 0
    assert study["mask"]["possible"].value == 1


def test_only_search_questions_with_a_picture_are_perturbed(policy):
    def reply(policy, t):
        neutral = t.sample.kind == "neutral" and not t.turns
        return crop_turn(" look", (0, 0, 64, 64)) if neutral else answers("x")

    trajectories, rewards = played(policy, reply, [*SEARCH, *NEUTRAL])
    assert trajectories[-1].tool_turns and perturb(policy, trajectories, rewards, GREEDY) == {}
    assert "nothing to perturb" in perturb_table({})


def test_questions_of_several_sources_are_reported_apart_and_together(policy):
    samples = [SEARCH[0], *(replace(s, source="hard") for s in SEARCH[1:])]
    trajectories, rewards = played(policy, reads, samples)
    with speaking(reads):
        study = perturb(policy, trajectories, rewards, GREEDY, ["mask"])
    assert {name: by_name["mask"]["possible"].denominator for name, by_name in study.items()} == {
        "all": 3, "toy": 1, "hard": 2,
    }  # fmt: skip
    lines = perturb_table(study).splitlines()
    assert lines[1] == "all" and lines[2].split() == (
        "mask 3/3 0.0 0.0 100.0 0.0 [0.0, 0.0] 100.0 0.0 100.0 - -".split()
    )


def test_answers_without_a_verdict_leave_accuracy_and_nothing_else(policy):
    trajectories, rewards = played(policy, reads)
    rewards = [replace(r, answer=None) for r in rewards]
    with speaking(reads):
        study = perturb(policy, trajectories, rewards, GREEDY, ["mask"])
    rates = study["toy"]["mask"]
    assert rates["accuracy"].denominator == 0 and rates["answers"].denominator == 3


def test_an_unknown_perturbation_and_a_warm_policy_are_refused(policy):
    with pytest.raises(ValueError, match="identity, mask, noise, random, empty; got blur"):
        perturb(policy, [], [], GREEDY, ["mask", "blur"])
    with pytest.raises(ValueError, match="greedy.*temperature 1"):
        perturb(policy, [], [], RULES)


def test_no_sandbox_outlives_an_error(policy, monkeypatch):
    (t,), _ = played(policy, reads, SEARCH[:1])
    opened, closed = [], []

    class Watched(faithfulness.Sandbox):
        def __init__(self, *args):
            opened.append(self)
            super().__init__(*args)

        def close(self):
            closed.append(self)
            super().close()

    monkeypatch.setattr(faithfulness, "Sandbox", Watched)
    monkeypatch.setattr(faithfulness, "play_on", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        play_perturbed(policy, [(t, 0), (t, 0)], "mask", GREEDY, seed=0)
    assert len(opened) == 2 and set(opened) == set(closed)


# Without tools


def test_without_tools_the_thought_stays_and_the_answer_follows_at_once(policy):
    (t,), _ = played(policy, reads, SEARCH[:1])
    copy = answer_now(policy, t, 0)
    added = policy.tokenizer.decode(copy.ids[t.prompt :])
    assert added == "<think> I need a closer look .</think><answer>"
    assert copy.ids[: t.prompt] == t.ids[: t.prompt] and not any(copy.acted) and not copy.turns


def test_an_open_thought_is_closed_before_the_answer(policy):
    def reply(policy, t):
        return answers("x") if t.turns else "<think> look<code>\nprint(1)\n</code>"

    (t,), _ = played(policy, reply, SEARCH[:1])
    text = policy.tokenizer.decode(answer_now(policy, t, 0).ids[t.prompt :])
    assert text == "<think> look</think><answer>"


def test_the_ablation_tells_what_only_tools_solve(policy):
    def reply(policy, t):  # sample 2 is answered without a look
        return answers(t.sample.answer) if t.sample.id.endswith("2") else reads(policy, t)

    trajectories, _ = played(policy, reply, [*SEARCH, *NEUTRAL])
    with speaking(reply):
        direct = list(without_tools(policy, trajectories, RULES))
    assert [d.answer for d in direct[:2]] == ["nothing"] * 2 and direct[2] is trajectories[2]
    got = ablation(trajectories, direct)
    assert {name: (r.numerator, r.denominator) for name, r in got.items()} == {
        "with tools": (3, 3), "without tools": (1, 3), "solved only with": (2, 3),
        "solved only without": (0, 3),
    }  # fmt: skip


def test_code_does_not_run_in_the_ablation_and_no_answer_is_none(policy, monkeypatch):
    (t,), _ = played(policy, reads, SEARCH[:1])
    rules, play_on = [], beyond.evidence.play_on
    monkeypatch.setattr(beyond.evidence, "play_on", lambda *a: rules.append(a[3]) or play_on(*a))
    with speaking(lambda policy, t: "<code>\nprint(1)\n</code>"):
        (direct,) = without_tools(policy, [t], RULES)
    assert direct.answer is None and direct.ended == "length"
    assert [step.observation.error for step in direct.turns] == ["no tools"]
    assert rules[0].temperature == 0


# What a call is worth


def test_log_probs_of_the_reference_are_those_of_a_plain_forward(policy):
    (t,), _ = played(policy, reads, SEARCH[:1])
    seen, blank = t.turns[0].observation, Observation(text="nothing")
    got = answer_log_probs(policy, t, 0, [seen, blank], GREEDY)
    reply = policy.encode(t.sample.answer + "</answer>", []).ids
    for score, shown in zip(got, (seen, blank, None), strict=True):
        if shown is None:
            whole = answer_now(policy, t, 0)
        else:
            whole = up_to(policy, t, 0)
            pictures = policy.pictures(shown.images)
            whole.observe(encode_observation(policy, shown, pictures, False, 99))
            whole.observe(policy.encode("<answer>", []))
        whole.act(reply)
        logits = fresh_logits(policy, whole)
        logits[:, policy.forbidden] = -torch.inf
        logp = logits.log_softmax(-1)[-len(reply) - 1 : -1]
        expected = sum(row[token].item() for row, token in zip(logp, reply))
        assert score == pytest.approx(expected, abs=1e-4)


def test_evidence_and_decision_values_by_hand(policy, monkeypatch):
    trajectories, rewards = played(policy, deaf, [*SEARCH, *NEUTRAL])  # hit, miss, hit; no search
    table = iter(
        [[-1.0, *[-3.0, -2.0] * 2, -5.0], [*[-2.0] * 5, -2.25], [-1.0, *[-2.0] * 4, -1.0625]]
    )
    monkeypatch.setattr(beyond.evidence, "answer_log_probs", lambda *args: next(table))
    got = evidence(policy, trajectories, rewards, GREEDY)
    assert {name: (r.numerator, r.denominator) for name, r in got.items()} == {
        "measured": (3, 3), "evidence value": (1.5 + 0 + 1, 3),
        "decision value": (4 + 0.25 + 0.0625, 3),
        "evidence value of a hit": (2.5, 2), "evidence value of a miss": (0, 1),
        "used": (2, 3), "needed": (2, 3), "needed and used": (1, 3),
    }  # fmt: skip


@pytest.mark.parametrize("call", [crop_turn(" look", (0, 0, 256, 256)), PRINT])
def test_calls_that_no_other_crop_can_replace_are_not_measured(policy, call):
    trajectories, rewards = played(policy, lambda p, t: answers("x") if t.turns else call)
    got = evidence(policy, trajectories, rewards, GREEDY)
    assert got["measured"].value == 0 and got["evidence value"].value is None
