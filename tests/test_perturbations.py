"""python -m pytest tests/test_perturbations.py      seconds: a picture in the place of another"""

import io
from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from data import toy_questions
from kit.boxes import area, beside
from kit.perturbations import instead_of
from test_boxes import boxes

SAMPLE = toy_questions(1, "perturbed", neutral_share=0)[0]
IMAGE = SAMPLE.image
CELL = (0, 0, 64, 64)


@given(boxes(40, 40), st.sampled_from([None, 0, 128]), st.integers(0, 99))
def test_mask_and_noise_differ_from_any_picture_and_keep_its_size(box, plain, seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (40, 40, 3))
    pixels = pixels if plain is None else np.full_like(pixels, plain)
    image = Image.fromarray(pixels.astype(np.uint8))
    shown = image.crop(box)
    for name in ("mask", "noise"):
        told = instead_of(shown, name, box, image, Random(seed))
        assert told.size == shown.size and told.mode == "RGB"
        assert told.tobytes() != shown.tobytes() or (name == "noise" and area(box) < 4)


def test_a_mask_of_grey_is_black_random_is_another_place_and_identity_looks_the_same():
    Image.new("RGB", (8, 8), (128, 128, 128)).save(buffer := io.BytesIO(), "PNG")
    told = instead_of(Image.open(buffer), "mask", None, IMAGE, Random(0))
    assert told.getextrema() == ((0, 0),) * 3  # though the grey was read from a file
    told = instead_of(Image.new("RGB", (128, 128)), "random", CELL, IMAGE, Random(3))
    place = beside(CELL, IMAGE.size, Random(3))
    assert told.tobytes() == IMAGE.crop(place).resize((128, 128)).tobytes()
    assert instead_of(IMAGE, "random", None, IMAGE, Random(3)) is None
    shown = IMAGE.crop(SAMPLE.boxes[0])
    told = instead_of(shown, "identity", CELL, IMAGE, Random(0))
    gap = np.abs(np.asarray(told, int) - np.asarray(shown, int))  # sizes are equal
    assert 0 < gap.mean() < 1  # encoded again; a JPEG of quality 75 has 3
