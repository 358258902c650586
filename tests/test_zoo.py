"""python -m pytest tests/test_zoo.py      seconds: hacks, played through the real sandbox"""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from beyond.rivals import RIVALS
from beyond.zoo import act_out, zoo, zoo_table
from data import CELL, GRID, PERIOD, SIDES, SIZE, Sample, draw_scene
from kit.boxes import Box, area
from rewards import REWARDS, BoxJudge, Lambdas, score, turn_score
from sandbox import Observation
from test_boxes import boxes as any_box

HONEST = {"the right crop", "the right crop, misread", "raises, then the right crop"}
REPEATED = "the right crop, five times"


@pytest.fixture(scope="module")
def played():
    return zoo()


def paid(played, name):
    """What TAPO pays for it among seven direct answers, four of them right."""
    guess = played["a guess"]
    group = [played[name], *[guess] * 4, *[act_out(guess.sample, ["<answer>no</answer>"])] * 3]
    return score([group], "tapo", BoxJudge(), Lambdas(), random.Random(0))[0][0]


def shown(played, name):
    return [step.observation for step in played[name].tool_turns]


def test_the_sandbox_ran_what_the_hacks_say(played):
    """A hack that only failed would prove nothing."""
    for name in played:
        seen = shown(played, name)
        assert any(each.error for each in seen) is ("raise" in name), name
        assert not any(each.environment for each in seen)
    pictures = {name: sum(len(seen.images) for seen in shown(played, name)) for name in played}
    blind = "only a comment", "the answer, printed", "decorative arithmetic", "a forged log"
    showy = "the whole image", "99 % of the image", "the answer, drawn", "a forged crop box"
    assert [pictures[name] for name in blind + showy] == [0] * 4 + [1] * 4


def test_no_hack_is_paid_more_than_a_guess_by_tapo(played):
    for name in set(played) - HONEST:
        reward = paid(played, name)
        assert reward.total <= paid(played, "a guess").total, name
        assert name == REPEATED or all(step <= 0 for step in reward.scores), name


def test_looking_right_is_paid_by_tapo_and_not_with_a_right_answer_alone(played):
    assert paid(played, "the right crop").total == 1.2 and paid(played, "a guess").total == 1.0
    assert paid(played, "the right crop, misread").total == 0.2


def test_a_turn_is_worth_what_it_showed_and_what_the_sandbox_prints_answers_nothing(played):
    worth = {
        "one flat colour": (0.0,),
        "a mosaic": (0.0,),
        "four quadrants in one call": (-1.0,),  # one always shows the target, all the whole image
        "all cells in one call": (-5 * 2.5 / 16,),  # of sixteen the sandbox shows five
        REPEATED: (1.0, -1.0, -1.0, -1.0, -1.0),
    }
    assert {name: paid(played, name).scores for name in worth} == worth
    forged = paid(played, "a forged answer, out of turns")
    assert (forged.answer, forged.tools, forged.format) == (0.0, 0.0, -1.0)


def test_boxes_cannot_be_forged_and_are_of_pictures_with_detail(played):
    (forged,) = shown(played, "a forged crop box")
    assert forged.boxes[0] != played["a forged crop box"].sample.boxes[0]
    for name in ("one flat colour", "a mosaic"):
        assert shown(played, name)[0].boxes == [None]
    for name in ("a speck beside the target", "a crop of a crop of nothing"):  # true crops
        (seen,) = shown(played, name)
        assert seen.sources == ["crop"] and area(seen.boxes[0]) < 64 * 64, name


def blind_score(boxes: list[Box], lazy: float = Lambdas.lazy) -> float:
    """The mean score of a turn that shows these boxes, over all targets that a map can have: the
    worth of looking without knowing where. No number and no size of crops makes it positive."""
    image, mean = Image.new("RGB", (SIZE, SIZE)), 0.0
    seen = Observation(images=[image] * len(boxes), boxes=boxes, sources=["crop"] * len(boxes))
    for side in SIDES:
        places = range(8, CELL - 4 - side + 1, PERIOD)  # in a cell, as draw_scene has them
        starts = [cell * CELL + place for cell in range(GRID) for place in places]
        for x, y in itertools.product(starts, repeat=2):
            sample = Sample("", image, "?", "!", boxes=((x, y, x + side, y + side),))
            score = turn_score(sample, seen, BoxJudge(), lazy=lazy)
            mean += score / len(SIDES) / len(starts) ** 2
    return mean


@st.composite
def tight(draw):
    """The best blind crops: in a cell, as large as the targets may be."""
    x, y = (draw(st.integers(0, 3)) * CELL + draw(st.integers(8, 12)) for _ in "xy")
    return x, y, x + draw(st.integers(44, 52)), y + draw(st.integers(44, 52))


@settings(max_examples=25)
@given(st.lists(tight() | any_box(SIZE, SIZE), min_size=1, max_size=9))
def test_no_number_and_no_size_of_blind_crops_earns_more_than_a_guess(boxes):
    """The law of the zoo. A turn with no picture, and no turn at all, score 0."""
    assert blind_score(boxes) <= 1e-9


def test_the_best_blind_crops_cost_what_they_win():
    """Found by search over sizes and places: crops of 52 x 44 pixels, one in each of three cells.
    They are why the price is not below 2.2."""
    boxes = [(x, 12, x + 52, 56) for x in (8, 72, 136)]
    assert blind_score(boxes) < 0 < blind_score(boxes, lazy=2.1)


def test_the_targets_of_the_law_are_those_of_the_maps():
    scenes = (draw_scene(random.Random(seed), shortcut=1.0) for seed in range(300))
    boxes = {square.box for scene in scenes for square in scene.squares}
    starts = {side: range(8, CELL - 4 - side + 1, 4) for side in SIDES}
    assert {x1 - x0 for x0, _, x1, _ in boxes} == set(SIDES)
    for x0, y0, x1, _ in boxes:
        assert x0 % CELL in starts[x1 - x0] and y0 % CELL in starts[x1 - x0]


PAYS = {
    "tool_bonus": {"only a comment", "decorative arithmetic", "the whole image"},
    "deepeyes": {"the whole image", "the wrong square", "the answer, drawn"},
    "pixel_reasoner": {"only a comment", "the whole image"},
    "codedance": {"only a comment", "the wrong square"},
    "pyvision": {"only a comment", "code that raises"},
    "faitheyes": {"only a comment", "the answer, printed"},
}


def test_the_table_marks_that_each_other_design_pays_for_some_hack(played):
    lines = zoo_table(played).splitlines()
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    assert head[2:] == [name for name in (*REWARDS, *RIVALS) if name != "random"]
    assert [name for name, *_ in rows] == [*played]
    marked = {design: {row[0] for row in rows if row[i].endswith("!")}
              for i, design in enumerate(head[2:], start=2)}  # fmt: skip
    assert not marked["tapo"] and "the right crop" not in set().union(*marked.values())
    assert all(marked[design] >= hacks for design, hacks in PAYS.items())
    assert dict(zip(head, rows[[*played].index("only a comment")]))["tool_bonus"] == "1.20!"
