"""python -m pytest tests/test_boxes.py      about 2 s: the arithmetic of boxes, as laws"""

import math
from collections import Counter
from random import Random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kit.boxes import Box, area, beside, covered, intersection, iou, outwards, recall, share

WIDTH, HEIGHT = 12, 9


@st.composite
def boxes(draw, width: int = WIDTH, height: int = HEIGHT) -> Box:
    """A box with at least one pixel, inside an image of this size."""
    x0, y0 = draw(st.integers(0, width - 1)), draw(st.integers(0, height - 1))
    return x0, y0, draw(st.integers(x0 + 1, width)), draw(st.integers(y0 + 1, height))


def mask(box: Box) -> np.ndarray:
    """The box, painted into an image."""
    pixels = np.zeros((HEIGHT, WIDTH), bool)
    pixels[box[1] : box[3], box[0] : box[2]] = True
    return pixels


@given(a=boxes(), b=boxes(), c=boxes())
def test_every_number_is_what_counting_pixels_gives(a, b, c):
    both, either = (mask(a) & mask(b)).sum(), (mask(a) | mask(b)).sum()
    assert area(a) == mask(a).sum()
    assert area(intersection(a, b)) == both
    assert recall(a, b) == both / area(b)
    assert iou(a, b) == both / either
    assert share(a, (WIDTH, HEIGHT)) == mask(a).mean()
    assert covered(a, [b, c]) == (mask(b) | mask(c))[mask(a)].mean()
    assert iou(a, a) == recall(a, a) == 1


@pytest.mark.parametrize("empty", [(3, 3, 3, 9), (5, 5, 2, 2), (0, 0, 0, 0)])
def test_a_box_without_pixels_counts_nothing_and_is_no_target(empty):
    assert area(empty) == iou(empty, empty) == iou(empty, (0, 0, 9, 9)) == 0
    assert recall(empty, (0, 0, 9, 9)) == 0
    with pytest.raises(ValueError, match="a target is a box"):
        recall((0, 0, 9, 9), empty)


corner = st.floats(-20, 30) | st.integers(-20, 30)
odd = corner | st.sampled_from([math.nan, math.inf, -math.inf, 1e300, -1e300])


@given(st.tuples(*[corner] * 4) | st.tuples(*[odd] * 4), st.booleans())
@example((2, 3, 10**400, 10**400), True)
@example((2.0, 3.0, 5.0, 7.0), True)
@example((2.2, 3.2, 5.2, 7.2), True)
def test_outwards_is_the_smallest_box_that_holds_the_corners(corners, border):
    x0, y0, x1, y1 = corners
    size = (WIDTH, HEIGHT) if border else None
    try:
        box = outwards(*corners, size)
    except ValueError as error:
        assert str([*corners]) in str(error)  # it names the box
        if any(v != v or abs(v) == math.inf for v in corners):
            assert "NaN or infinity" in str(error)
            return
        # No pixel of the image is touched; an integer x0 = x1 touches none.
        xs, ys = map(range, size) if size else [range(-20, 30)] * 2
        wide, high = any(x0 - 1 < x < x1 for x in xs), any(y0 - 1 < y < y1 for y in ys)
        assert not (wide and high)
        return
    assert all(isinstance(v, int) for v in box) and area(box) > 0
    a, b, c, d = box
    if border:
        assert 0 <= a < c <= WIDTH and 0 <= b < d <= HEIGHT
        x0, y0, x1, y1 = max(x0, 0), max(y0, 0), min(x1, WIDTH), min(y1, HEIGHT)
    assert a <= x0 < a + 1 and b <= y0 < b + 1 and c - 1 < x1 <= c and d - 1 < y1 <= d


@given(box=boxes(), seed=st.integers(0, 9))
def test_a_box_beside_another_is_as_large_in_the_image_and_apart(box, seed):
    place = beside(box, (WIDTH, HEIGHT), Random(seed))
    w, h = box[2] - box[0], box[3] - box[1]
    every = [(x, y, x + w, y + h) for x in range(WIDTH - w + 1) for y in range(HEIGHT - h + 1)]
    apart = [other for other in every if area(intersection(other, box)) == 0]
    assert place in apart if apart else place is None


def test_every_place_beside_a_box_is_as_likely():
    rng = Random(0)
    counts = Counter(beside((2, 1, 4, 3), (6, 5), rng) for _ in range(8000))
    assert len(counts) == 5 * 4 - 9 and max(counts.values()) < 1.25 * min(counts.values())
