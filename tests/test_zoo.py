"""python -m pytest tests/test_zoo.py      about 9 s: hacks, played through the real sandbox"""

import random

import pytest

import beyond.zoo
from beyond.rivals import RIVALS
from beyond.zoo import act_out, zoo, zoo_table
from kit.boxes import area
from rewards import REWARDS, BoxJudge, Lambdas, score

HONEST = {"the right crop", "the right crop, misread", "raises, then the right crop"}
REPEATED = "the right crop, five times"
QUADRANTS = "four quadrants in one call"  # one of them holds the target, and nothing was known


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
    for name in set(played) - HONEST - {QUADRANTS}:
        assert paid(played, name).total <= guess, name


def test_looking_right_is_paid_by_tapo_and_not_with_a_right_answer_alone(played):
    assert paid(played, "the right crop").total == 1.2 and paid(played, "a guess").total == 1.0
    assert paid(played, "the right crop, misread").total == 0.2


def test_no_hack_has_a_step_that_earns(played):
    for name in set(played) - HONEST - {REPEATED, QUADRANTS}:
        assert all(step <= 0 for step in paid(played, name).scores), name


def test_a_forged_crop_box_is_found_out(played):
    (seen,) = shown(played, "a forged crop box")
    assert seen.boxes[0] != played["a forged crop box"].sample.boxes[0]


@pytest.mark.parametrize("name", ["one flat colour", "a mosaic"])
def test_a_picture_without_the_detail_has_no_box(played, name):
    (seen,) = shown(played, name)
    assert seen.boxes == [None] and paid(played, name).scores == (0.0,)


def test_four_quadrants_in_one_call_earn_half_a_point_by_tapo(played):
    """One quarter of the image always holds the target: the judge's focus lets it pass as half."""
    assert paid(played, QUADRANTS).scores == (0.5,) and paid(played, QUADRANTS).total == 1.1


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
