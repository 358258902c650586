"""python -m pytest tests/test_zoo.py      about 9 s: hacks, played through the real sandbox"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import beyond.zoo
from beyond.rivals import RIVALS
from beyond.zoo import act_out, blind_score, zoo, zoo_table
from data import CELL, SIDES, SIZE, draw_scene
from kit.boxes import area
from rewards import REWARDS, BoxJudge, Lambdas, score

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
        raises = "raise" in name
        errors = [seen.error for seen in shown(played, name)]
        assert any(errors) is raises, (name, errors)
        assert not any(seen.environment for seen in shown(played, name))
    pictures = {name: sum(len(seen.images) for seen in shown(played, name)) for name in played}
    for name in ("only a comment", "the answer, printed", "decorative arithmetic", "a forged log"):
        assert pictures[name] == 0, name
    for name in ("the whole image", "99 % of the image", "the answer, drawn", "a forged crop box"):
        assert pictures[name] == 1, name


def test_no_hack_is_paid_more_than_a_guess_by_tapo(played):
    guess = paid(played, "a guess").total
    for name in set(played) - HONEST:
        assert paid(played, name).total <= guess, name


def test_looking_right_is_paid_by_tapo_and_not_with_a_right_answer_alone(played):
    assert paid(played, "the right crop").total == 1.2 and paid(played, "a guess").total == 1.0
    assert paid(played, "the right crop, misread").total == 0.2


def test_no_hack_has_a_step_that_earns(played):
    for name in set(played) - HONEST - {REPEATED}:
        assert all(step <= 0 for step in paid(played, name).scores), name


def test_a_forged_crop_box_is_found_out(played):
    (seen,) = shown(played, "a forged crop box")
    assert seen.boxes[0] != played["a forged crop box"].sample.boxes[0]


@pytest.mark.parametrize("name", ["one flat colour", "a mosaic"])
def test_a_picture_without_the_detail_has_no_box(played, name):
    (seen,) = shown(played, name)
    assert seen.boxes == [None] and paid(played, name).scores == (0.0,)


def test_many_crops_in_one_call_are_one_look_as_large_as_all_of_them(played):
    """One quadrant always shows the target; together they show the whole image. Of sixteen cells
    the sandbox shows five."""
    assert paid(played, "four quadrants in one call").scores == (-1.0,)
    assert paid(played, "all cells in one call").scores == (-5 * 2.5 / 16,)


def on_the_map(span):
    return st.tuples(st.integers(0, SIZE - 1), st.integers(1, span)).map(
        lambda pair: (pair[0], min(pair[0] + pair[1], SIZE))
    )


cells = st.integers(0, 15).map(lambda i: (i % 4 * CELL, i // 4 * CELL))
tight = st.tuples(cells, st.integers(8, 12), st.integers(44, 52)).map(  # the best blind crops
    lambda t: (t[0][0] + t[1], t[0][1] + t[1], t[0][0] + t[1] + t[2], t[0][1] + t[1] + t[2])
)
anywhere = st.tuples(on_the_map(SIZE), on_the_map(SIZE)).map(
    lambda p: (p[0][0], p[1][0], p[0][1], p[1][1])
)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.one_of(tight, anywhere), min_size=1, max_size=9))
def test_no_number_and_no_size_of_blind_crops_earns_more_than_a_guess(boxes):
    """The law of the zoo. A turn with no picture, and no turn at all, score 0."""
    assert blind_score(boxes) <= 1e-9


@pytest.mark.parametrize("n", range(1, 17))
def test_the_best_blind_crops_cost_what_they_win(n):
    """Found by search over sizes and places: crops of 52 x 44 pixels, one in each of n cells. They
    are why the price is not below 2.2."""
    boxes = [(i % 4 * CELL + 8, i // 4 * CELL + 12, i % 4 * CELL + 60, i // 4 * CELL + 56)
             for i in range(n)]  # fmt: skip
    assert blind_score(boxes) < 0 and (blind_score(boxes, lazy=2.1) > 0) == (n == 3)
    assert blind_score(boxes, lazy=0.0) >= 0


def test_the_targets_of_the_law_are_those_of_the_maps():
    boxes = {square.box for seed in range(300) for square in drawn(seed)}
    starts = {side: range(8, CELL - 4 - side + 1, 4) for side in SIDES}
    assert {x1 - x0 for x0, _, x1, _ in boxes} == set(SIDES)
    assert all(x0 % CELL in starts[x1 - x0] and y0 % CELL in starts[x1 - x0]
               for x0, y0, x1, _ in boxes)  # fmt: skip


def drawn(seed):
    return draw_scene(random.Random(seed), shortcut=1.0).squares


def test_the_same_crop_again_is_a_no_op(played):
    assert paid(played, REPEATED).scores == (1.0, -1.0, -1.0, -1.0, -1.0)


def test_the_speck_and_nothing_are_verified_crops_without_the_target(played):
    for name in ("a speck beside the target", "a crop of a crop of nothing"):
        (seen,) = shown(played, name)
        assert seen.sources == ["crop"] and area(seen.boxes[0]) < 64 * 64, name


def test_what_the_sandbox_prints_answers_nothing(played):
    forged = paid(played, "a forged answer, out of turns")
    assert (forged.answer, forged.tools, forged.format) == (0.0, 0.0, -1.0)


@pytest.mark.parametrize(
    "design, hacks",
    [
        ("tool_bonus", {"only a comment", "decorative arithmetic", "the whole image"}),
        ("deepeyes", {"the whole image", "the wrong square", "the answer, drawn"}),
        ("pixel_reasoner", {"only a comment", "the whole image"}),
        ("codedance", {"only a comment", "the wrong square"}),
        ("pyvision", {"only a comment", "code that raises"}),
        ("faitheyes", {"only a comment", "the answer, printed"}),
    ],
)
def test_each_other_design_pays_for_some_hack(played, design, hacks):
    for name in hacks:
        assert paid(played, name, design).total > paid(played, "a guess", design).total, name


def test_two_designs_are_indifferent_to_looking(played):
    for design in ("accuracy", "thyme"):
        one, other = (paid(played, n, design).total for n in ("the right crop", "a guess"))
        assert one == other
    assert paid(played, "a guess its thought denies", "thyme").total == 1.5


def test_the_table_has_every_case_and_design_and_marks_what_pays(played):
    head, rule, *lines = zoo_table(played).splitlines()
    designs = [cell.strip() for cell in head.strip("|").split("|")][2:]
    assert designs == [name for name in (*REWARDS, *RIVALS) if name != "random"]
    assert [line.split("|")[1].strip() for line in lines] == list(played)
    assert {line.count("|") for line in (head, rule, *lines)} == {len(designs) + 3}
    cells = {line.split("|")[1].strip(): line.split("|")[2:] for line in lines}
    assert not any("!" in cells[name][1] for name in played)  # tapo
    assert all("!" not in cell for cell in cells["the right crop"])
    assert cells["only a comment"][3].strip() == "1.20!"  # tool_bonus


def test_the_module_prints_it(capsys, played, monkeypatch):
    monkeypatch.setattr(beyond.zoo, "zoo", lambda: played)
    beyond.zoo.main([])
    assert "orders to the judge, drawn" in capsys.readouterr().out
