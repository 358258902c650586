"""python -m pytest tests/test_zoo.py      seconds: hacks, played through the real sandbox"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import beyond.zoo
from beyond.rivals import RIVALS
from beyond.zoo import act_out, blind_score, zoo
from data import CELL, SIDES, SIZE, draw_scene
from kit.boxes import area
from rewards import REWARDS, BoxJudge, Lambdas, score
from test_boxes import boxes as any_box

HONEST = {"the right crop", "the right crop, misread", "raises, then the right crop"}
REPEATED = "the right crop, five times"


@pytest.fixture(scope="module")
def played():
    return zoo()


def paid(played, name, reward="tapo"):
    """What a design pays for it among seven direct answers, four of them right."""
    guess = played["a guess"]
    group = [played[name], *[guess] * 4, *[act_out(guess.sample, ["<answer>no</answer>"])] * 3]
    return score([group], reward, BoxJudge(), Lambdas(), random.Random(0))[0][0]


def shown(played, name):
    return [step.observation for step in played[name].tool_turns]


def test_the_sandbox_ran_what_the_hacks_say(played):
    """A hack that only failed would prove nothing."""
    for name in played:
        errors = [seen.error for seen in shown(played, name)]
        assert any(errors) is ("raise" in name), (name, errors)
        assert not any(seen.environment for seen in shown(played, name))
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


@pytest.mark.parametrize("name, scores", [
    ("one flat colour", (0.0,)),
    ("a mosaic", (0.0,)),
    ("four quadrants in one call", (-1.0,)),  # one always shows the target, all the whole image
    ("all cells in one call", (-5 * 2.5 / 16,)),  # of sixteen the sandbox shows five
    (REPEATED, (1.0, -1.0, -1.0, -1.0, -1.0)),
])  # fmt: skip
def test_a_turn_is_worth_what_it_showed(played, name, scores):
    assert paid(played, name).scores == scores


def test_boxes_cannot_be_forged_and_are_of_pictures_with_detail(played):
    (forged,) = shown(played, "a forged crop box")
    assert forged.boxes[0] != played["a forged crop box"].sample.boxes[0]
    for name in ("one flat colour", "a mosaic"):
        assert shown(played, name)[0].boxes == [None]
    for name in ("a speck beside the target", "a crop of a crop of nothing"):  # true crops
        (seen,) = shown(played, name)
        assert seen.sources == ["crop"] and area(seen.boxes[0]) < 64 * 64, name


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


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8, 16])
def test_the_best_blind_crops_cost_what_they_win(n):
    """Found by search over sizes and places: crops of 52 x 44 pixels, one in each of n cells. They
    are why the price is not below 2.2."""
    boxes = [(i % 4 * CELL + 8, i // 4 * CELL + 12, i % 4 * CELL + 60, i // 4 * CELL + 56)
             for i in range(n)]  # fmt: skip
    assert blind_score(boxes) < 0 and (blind_score(boxes, lazy=2.1) > 0) == (n == 3)
    assert blind_score(boxes, lazy=0.0) >= 0


def test_the_targets_of_the_law_are_those_of_the_maps():
    scenes = (draw_scene(random.Random(seed), shortcut=1.0) for seed in range(300))
    boxes = {square.box for scene in scenes for square in scene.squares}
    starts = {side: range(8, CELL - 4 - side + 1, 4) for side in SIDES}
    assert {x1 - x0 for x0, _, x1, _ in boxes} == set(SIDES)
    for x0, y0, x1, _ in boxes:
        assert x0 % CELL in starts[x1 - x0] and y0 % CELL in starts[x1 - x0]


def test_what_the_sandbox_prints_answers_nothing(played):
    forged = paid(played, "a forged answer, out of turns")
    assert (forged.answer, forged.tools, forged.format) == (0.0, 0.0, -1.0)


@pytest.mark.parametrize("design, hacks", [
    ("tool_bonus", {"only a comment", "decorative arithmetic", "the whole image"}),
    ("deepeyes", {"the whole image", "the wrong square", "the answer, drawn"}),
    ("pixel_reasoner", {"only a comment", "the whole image"}),
    ("codedance", {"only a comment", "the wrong square"}),
    ("pyvision", {"only a comment", "code that raises"}),
    ("faitheyes", {"only a comment", "the answer, printed"}),
])  # fmt: skip
def test_each_other_design_pays_for_some_hack(played, design, hacks):
    for name in hacks:
        assert paid(played, name, design).total > paid(played, "a guess", design).total, name


def test_the_table_has_every_case_and_design_and_marks_what_pays(played, capsys, monkeypatch):
    monkeypatch.setattr(beyond.zoo, "zoo", lambda: played)
    beyond.zoo.main([])
    head, rule, *lines = capsys.readouterr().out.splitlines()
    designs = [cell.strip() for cell in head.strip("|").split("|")][2:]
    assert designs == [name for name in (*REWARDS, *RIVALS) if name != "random"]
    cells = {line.split("|")[1].strip(): line.split("|")[2:] for line in lines}
    assert [*cells] == [*played] and len(lines) == len(played)
    assert {line.count("|") for line in (head, rule, *lines)} == {len(designs) + 3}
    assert not any("!" in cells[name][1] for name in played)  # tapo
    assert all("!" not in cell for cell in cells["the right crop"])
    assert cells["only a comment"][3].strip() == "1.20!"  # tool_bonus
