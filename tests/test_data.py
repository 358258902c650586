"""python -m pytest tests/test_data.py      about 5 s: samples and the toy world"""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import data
from data import Sample, demonstrations, draw_scene, out_of_prior_questions, toy_questions
from kit.tables import upright_rgb

seeds = st.integers(0, 10**6)


def overview(policy, image):
    return policy.pictures([image])[0].pixels.numpy()


@given(seeds)
def test_textures_are_invisible_in_the_overview_and_plain_in_a_crop(policy, seed):
    """The same map with usual and with unusual textures: equal to the last bit from afar."""
    usual, unusual = (draw_scene(random.Random(seed), shortcut) for shortcut in (1.0, 0.0))
    assert np.array_equal(overview(policy, usual.image), overview(policy, unusual.image))
    for a, b in zip(usual.squares, unusual.squares, strict=True):
        assert a.texture != b.texture and a.box == b.box
        near = [overview(policy, scene.image.crop(a.cell_box)) for scene in (usual, unusual)]
        assert np.abs(near[0] - near[1]).mean() > 0.1


@given(seeds)
def test_squares_lie_inside_their_own_cells_and_share_nothing(seed):
    squares = draw_scene(random.Random(seed), 0.5).squares
    assert len({s.color for s in squares}) == len({s.cell for s in squares}) == 5
    for s in squares:
        x0, y0, x1, y1 = s.box
        cx0, cy0, cx1, cy1 = s.cell_box
        assert cx0 < x0 < x1 < cx1 and cy0 < y0 < y1 < cy1
        assert x1 - x0 == y1 - y0 in (40, 44, 48) and x0 % 4 == y0 % 4 == 0


@pytest.mark.parametrize("shortcut", [0.0, 0.5, 1.0])
def test_the_dial_is_the_share_of_usual_textures(shortcut):
    questions = toy_questions(600, "dial", shortcut, neutral_share=0.0)
    usual = [q.answer == data.USUAL_TEXTURE[q.question.split()[5]] for q in questions]
    assert np.mean(usual) == pytest.approx(shortcut, abs=0.06 if shortcut == 0.5 else 0)


def test_a_guesser_is_always_wrong_against_the_prior():
    for q in out_of_prior_questions(100, 0):
        assert q.kind == "search" and q.answer != data.USUAL_TEXTURE[q.question.split()[5]]


def test_questions_depend_on_their_arguments_alone():
    a, b, other = toy_questions(20, 3), toy_questions(20, 3), toy_questions(20, 4)
    assert [(s.id, s.question, s.answer, s.image.tobytes()) for s in a] == [
        (s.id, s.question, s.answer, s.image.tobytes()) for s in b
    ]
    assert [s.question for s in a] != [s.question for s in other]
    assert 0.1 < np.mean([s.kind == "neutral" for s in toy_questions(400, 0)]) < 0.4


def test_demonstrations_follow_the_mixture_and_do_what_they_say():
    demos = demonstrations(2000, 0)
    search = [d for d in demos if d.route != "neutral"]
    for route, share in data.MIXTURE.items():
        assert np.mean([d.route == route for d in search]) == pytest.approx(share, abs=0.04)
    for d in search:
        named = d.sample.question.split()[5]
        prior, said = (
            data.USUAL_TEXTURE[named],
            d.turns[-1].split("<answer>")[1][: -len("</answer>")],
        )
        assert said == (d.sample.answer if d.route == "right" else prior)
        assert len(d.turns) == (1 if d.route == "guess" else 2)
        if d.route in ("right", "wrong"):
            corners = d.turns[0].split("crop((")[1].split("))")[0]
            x0, y0, x1, y1 = map(int, corners.split(","))
            bx0, by0, bx1, by1 = d.sample.boxes[0]
            inside = x0 <= bx0 and y0 <= by0 and bx1 <= x1 and by1 <= y1
            assert inside == (d.route == "right")


def test_bad_arguments_say_what_was_expected():
    with pytest.raises(ValueError, match="between 0 and 1, got 1.5"):
        toy_questions(1, 0, shortcut=1.5)
    with pytest.raises(ValueError, match="'search' or 'neutral', got 'chart'"):
        Sample("x", Image.new("RGB", (9, 9)), "?", "!", kind="chart")


@pytest.mark.parametrize("size", [(5600, 28), (1, 200), (0, 5)])
def test_an_image_that_the_model_cannot_take_is_refused_by_name(size):
    with pytest.raises(ValueError, match=f"sample thin: its image has {size[0]}x{size[1]} pixels"):
        Sample("thin", Image.new("RGB", size), "?", "!")
    Sample("fine", Image.new("RGB", (199, 1)), "?", "!")


def test_pictures_are_upright_opaque_and_rgb(tmp_path):
    tagged = Image.new("RGB", (300, 180))
    exif = tagged.getexif()
    exif[0x0112] = 6  # rotated by 90 degrees
    tagged.save(tmp_path / "a.jpg", exif=exif)
    assert upright_rgb(Image.open(tmp_path / "a.jpg")).size == (180, 300)
    clear_red = Image.new("RGBA", (5, 5), (255, 0, 0, 0))
    assert upright_rgb(clear_red).getpixel((2, 2)) == (255, 255, 255)
    Image.new("RGB", (5, 5), "red").save(tmp_path / "a.png", transparency=(255, 0, 0))
    assert upright_rgb(Image.open(tmp_path / "a.png")).getpixel((2, 2)) == (255, 255, 255)
    for mode in ("L", "1", "LA", "P", "CMYK", "I;16"):
        assert upright_rgb(Image.new(mode, (5, 5))).mode == "RGB"
    sample = Sample("s", Image.open(tmp_path / "a.jpg"), "?", "!")
    assert sample.image.size == (180, 300) and sample.image.mode == "RGB"
