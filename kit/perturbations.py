"""
perturbations.py: a picture in the place of another.

Concept     To learn whether an agent uses what a tool shows, show it something else: the same once
            more, grey, noise, or another part of the image.
Paper       CodeV, arXiv:2511.19661, Table 6 names four; how exactly they are made is ours
In          the picture, and the box of the image that it shows
Out         another picture of the same size, or None
Left out    perturbed text: a tool's words stay as they are
Read next   faithfulness.py (which plays on with it)
"""

import io
from collections.abc import Iterable
from random import Random

import numpy as np
from PIL import Image

from kit.boxes import Box, beside

# empty: no tool output at all, neither pictures nor text; the others are made below.
PERTURBATIONS = ("identity", "mask", "noise", "random", "empty")


def check_perturbations(names: Iterable[str]) -> None:
    if unknown := sorted(set(names) - set(PERTURBATIONS)):
        known = ", ".join(PERTURBATIONS)
        raise ValueError(f"perturbations are all, or some of {known}; got {', '.join(unknown)}")


def instead_of(
    picture: Image.Image, name: str, box: Box | None, image: Image.Image, rng: Random
) -> Image.Image | None:
    """What is shown instead of `picture`, in its size; None: there is nothing to show. name: one
    of PERTURBATIONS but "empty"; box: what the picture shows of `image`."""
    if name == "identity":  # encoded once more, as a good JPEG: what changes then is noise
        picture.convert("RGB").save(buffer := io.BytesIO(), "JPEG", quality=95, subsampling=0)
        return Image.open(buffer).convert("RGB")
    if name == "mask":  # grey all over; black, if it was grey all over
        grey = Image.new("RGB", picture.size, (128, 128, 128))
        same = picture.convert("RGB").tobytes() == grey.tobytes()
        return Image.new("RGB", picture.size) if same else grey
    if name == "noise":  # Gaussian, with nothing of the picture in it
        draw, shape = np.random.default_rng(rng.getrandbits(32)), (*picture.size[::-1], 3)
        return Image.fromarray(draw.normal(128, 64, shape).clip(0, 255).astype(np.uint8))
    place = box and beside(box, image.size, rng)  # random: another part, at the same scale
    return place and image.crop(place).resize(picture.size)
