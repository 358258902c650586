"""
boxes.py: rectangles in an image, and how two of them compare.

Concept     A box is x0, y0, x1, y1 in whole pixels; x1 and y1 stand just outside of it, as in
            Pillow. Every other form of a box (floats, beyond the border) is rounded outwards.
Paper       nothing: it speaks of crops and targets, and this is their arithmetic
In          boxes, the size of an image
Out         a number or a box
Left out    rotated boxes, masks, boxes as shares of the width and height
Read next   sandbox.py (which crops are true), rewards.py (what a crop of a target earns)
"""

import math
from collections.abc import Iterable
from random import Random

import numpy as np

Box = tuple[int, int, int, int]  # x0, y0, x1, y1 in pixels of the input image


def area(box: Box) -> int:
    """Pixels in the box; 0 if its corners are in the wrong order."""
    return max(box[2] - box[0], 0) * max(box[3] - box[1], 0)


def intersection(a: Box, b: Box) -> Box:
    """The box that both share. Where they share none, its area is 0."""
    return max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3])


def recall(crop: Box, target: Box) -> float:
    """|crop ∩ target| / |target|, the share in view. Raises ValueError for a target of no pixel."""
    if area(target) == 0:
        raise ValueError(f"a target is a box x0, y0, x1, y1 with x0 < x1 and y0 < y1, got {target}")
    return area(intersection(crop, target)) / area(target)


def iou(a: Box, b: Box) -> float:
    """|a ∩ b| / |a ∪ b|, intersection over union, from 0 to 1; 0 for two boxes without a pixel."""
    both = area(intersection(a, b))
    union = area(a) + area(b) - both
    return both / union if union else 0.0


def share(box: Box, size: tuple[int, int]) -> float:
    """The box's area as a share of an image's, from 0 to 1. size: width, height."""
    return area(box) / (size[0] * size[1])


def outwards(x0: float, y0: float, x1: float, y1: float, size=None) -> Box:
    """The smallest box of whole pixels that holds these corners, cut at the border of an image.

    size: width, height of the image; None for no border. Raises ValueError if a corner is NaN or
    infinite, or if no pixel is left."""
    given = [x0, y0, x1, y1]
    try:
        box = math.floor(x0), math.floor(y0), math.ceil(x1), math.ceil(y1)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"box {given} holds NaN or infinity") from error
    if size:
        box = intersection(box, (0, 0, *size))
    if area(box) == 0:
        image = f" of an image of {size[0]}x{size[1]}" if size else ": expected x0 < x1 and y0 < y1"
        raise ValueError(f"box {given} has no pixel{image}")
    return box


def covered(target: Box, crops: Iterable[Box]) -> float:
    """|target ∩ (the union of the crops)| / |target|, counted pixel by pixel."""
    x0, y0, x1, y1 = target
    seen = np.zeros((y1 - y0, x1 - x0), bool)
    for u0, v0, u1, v1 in crops:
        seen[max(v0 - y0, 0) : max(v1 - y0, 0), max(u0 - x0, 0) : max(u1 - x0, 0)] = True
    return float(seen.mean())


def beside(box: Box, size: tuple[int, int], rng: Random) -> Box | None:
    """A box as large as this one, uniformly drawn among all that do not overlap it."""
    (x0, y0, x1, y1), (w, h) = box, (box[2] - box[0], box[3] - box[1])
    right, bottom = size[0] - w, size[1] - h  # the last places of a box's upper left corner
    first, last = max(0, x0 - w + 1), min(x1 - 1, right)  # above and below the box
    left_right = [(0, x0 - w, 0, bottom), (x1, right, 0, bottom)]
    strips = [*left_right, (first, last, 0, y0 - h), (first, last, y1, bottom)]
    sizes = [max(0, b - a + 1) * max(0, d - c + 1) for a, b, c, d in strips]
    if not sum(sizes):
        return None
    a, b, c, d = rng.choices(strips, sizes)[0]  # least and most x, least and most y of that corner
    x, y = rng.randint(a, b), rng.randint(c, d)
    return x, y, x + w, y + h
