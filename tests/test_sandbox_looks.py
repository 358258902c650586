"""python -m pytest tests/test_sandbox_looks.py       about half a minute: docs/looks.md is true

The page holds ways to look at a part of an image, as a policy writes them, and what the sandbox
makes of each. Every program of the page is run here, and must give what its row says.
"""

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageFilter

from kit import sandbox_looks
from kit.sandbox_looks import is_edit, lay, same_pixels
from sandbox import Sandbox, verified

PAGE = (Path(__file__).parent.parent / "docs" / "looks.md").read_text(encoding="utf-8")
BOX = (200, 150, 400, 300)


def program(cell: str) -> str:
    """The code in a cell of the page, where each line stands in backticks."""
    return "\n".join(line[1:-1] for line in cell.replace("\\|", "|").split("<br>"))


ROWS = [
    (program(cell), kind, has_box == "yes", why_not)
    for cell, kind, has_box, why_not in re.findall(
        r"^\| (`.+`) \| (\w+) \| (yes|no) \| (.*) \|$", PAGE, re.MULTILINE
    )
]


def scene() -> Image.Image:
    """A picture with edges, waves and some noise, like a photograph in what editing does to it."""
    rng, (y, x) = np.random.default_rng(3), np.mgrid[:600, :800].astype(float)
    waves = [
        127 + 50 * np.sin(x / (19 + 3 * k) + k) + 40 * np.cos(y / 23 - x / 61) for k in range(3)
    ]
    pixels = np.stack(waves, axis=2)
    for _ in range(150):
        x0, y0, w, h = rng.integers((0, 0, 8, 8), (780, 580, 60, 60))
        patch = pixels[y0 : y0 + h, x0 : x0 + w]
        patch[:] = 0.4 * patch + 0.6 * rng.integers(0, 256, 3)
    return Image.fromarray((pixels + rng.normal(0, 3, pixels.shape)).clip(0, 255).astype(np.uint8))


PICTURE = scene()


def class_of(picture: Image.Image, box: tuple | None, source: str) -> str:
    if box is None or source == "edited":
        return source if source in ("figure", "edited") else "drawn"
    crop, pixels = np.asarray(PICTURE.crop(box)), np.asarray(picture)
    if same_pixels(crop, pixels):
        return "crop"
    turned = any(same_pixels(lay(crop, way), pixels) for way in range(8))
    return "turned" if turned else "resized"


@pytest.mark.parametrize("code, kind, has_box, why_not", ROWS, ids=range(len(ROWS)))
def test_a_program_of_the_page_gives_what_its_row_says(code, kind, has_box, why_not):
    with Sandbox(PICTURE) as sandbox:
        seen = sandbox.run(re.sub(r"\bB\b", str(BOX), code))
    assert seen.error is None and seen.environment is None and seen.images, seen
    assert set(seen.red_lines) <= {"no_op"}, seen
    assert class_of(seen.images[-1], seen.boxes[-1], seen.sources[-1]) == kind
    assert (seen.boxes[-1] is not None) == has_box == (why_not == ""), seen


def test_the_page_counts_its_programs():
    counts = f"{len(ROWS)} programs", f"{sum(box for _, _, box, _ in ROWS)} of them are credited"
    assert all(words in PAGE for words in counts) and PAGE.count("\n| `") == len(ROWS) >= 140
    assert str(BOX) in PAGE and len({code for code, *_ in ROWS}) == len(ROWS)


def test_a_sharpened_crop_is_an_edit_though_pillow_leaves_its_rim_as_it_is():
    crop = ImageEnhance.Contrast(PICTURE.crop(BOX)).enhance(2)
    assert is_edit(crop, crop.filter(ImageFilter.Kernel((3, 3), [-1] * 4 + [9] + [-1] * 4)))


@pytest.mark.parametrize("k", range(1, 6))
def test_a_picture_that_lost_more_than_half_its_resolution_on_the_way_has_no_box(k):
    few = 800 // k, 600 // k
    steps = [["pil", *few, 3, 0, 0, 800, 600, None], ["pil", 800, 600, 3, 0, 0, *few, None]]
    box, _ = verified(PICTURE, PICTURE.resize(few).resize((800, 600)), steps)
    assert box == ((0, 0, 800, 600) if k < 3 else None)


def test_what_is_remembered_and_searched_for_in_one_program_is_bounded(monkeypatch):
    searched = []
    monkeypatch.setattr(sandbox_looks, "find", lambda part, whole: searched.append(part))
    array, odd = np.asarray(PICTURE), np.zeros((40, 90, 3), np.uint8)
    origins = sandbox_looks.Origins(PICTURE)
    for call in 1, 2:
        origins.begin()
        for i in range(2500):
            x, y = i % 700, i // 700 + 10 * call
            origins.made(array[y:, x:], array, ["crop", x, y, 800, 600])
        assert len(origins.known) == 1 + 2000 * call
        for i in range(30):
            origins.of(odd + np.uint8(i))
        assert len(searched) == 20 * call
