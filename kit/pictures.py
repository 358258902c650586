"""
pictures.py: any picture made plain; and a picture in the place of another.

Concept     The same file looks the same wherever it is opened: by a data set, or by code in the
            sandbox. What is deeper than 8 bits is scaled, never clipped; what is transparent lies
            on white; a photo is turned upright. And to learn whether an agent uses what a tool
            shows, show it something else: the same once more, grey, noise, or another part.
Paper       CodeV, arXiv:2511.19661, Table 6 names four perturbations; how they are made is ours
In          a PIL image of any mode; or a picture, and the box of the image that it shows
Out         an upright, opaque one in RGB, 8 bits a channel; another one of the same size, or None
Left out    colour profiles; all of EXIF but the orientation; a tool's words stay as they are
Read next   tables.py (pictures of data sets), sandbox_stand_ins.py (pictures that code shows),
            faithfulness.py (which plays on with another picture)
"""

import io
import struct
from collections.abc import Iterable
from random import Random

import numpy as np
from PIL import Image

from kit.boxes import Box, beside

# An orientation of EXIF (1 is upright), and which Image.Transpose undoes it.
TURNS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}


def eight_bits(values: np.ndarray) -> np.ndarray:
    """Pixels of any type as uint8. Of 16 bits, 65535 is white: they are divided by 257.

    Signed and float pixels do not say their depth. White is 1 if none is brighter, else 255, else
    65535, else 2**31 - 1. What stays below 4 x 255 is taken for 8 bits that were made brighter, and
    clipped: as 16 bits it would have 4 shades. NaN and what is below 0 are black."""
    if values.dtype == np.uint8:
        return values
    if values.dtype.kind == "u" and values.dtype.itemsize == 2:
        white = 65535
    else:
        values = np.nan_to_num(values.astype(float))
        top = values.max(initial=0)
        white = 1 if top <= 1 else 255 if top < 4 * 255 else 65535 if top <= 65535 else 2**31 - 1
    pixels = values.clip(0, white) * (255.0 / white)
    return (pixels.round() if white > 255 else pixels).astype(np.uint8)


def flat(image: Image.Image) -> Image.Image:
    """A copy in RGB with 8 bits a channel, with white behind whatever is transparent."""
    image.load()  # some formats tell only now what is transparent
    if image.mode[0] in "IF":  # one channel of 16 or 32 bits, which PIL would clip
        values = np.asarray(image)
        pixels = eight_bits(values)
        if (clear := image.info.get("transparency")) is not None:
            pixels = np.where(values == clear, np.uint8(255), pixels)
        return Image.fromarray(pixels).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def upright_rgb(image: Image.Image) -> Image.Image:
    """The picture turned upright, opaque and in RGB; the same object if it is that already."""
    image.load()  # TIFF is turned by PIL here
    try:
        turn = TURNS.get(image.getexif().get(0x0112))
    except (ValueError, TypeError, SyntaxError, LookupError, OSError, struct.error):
        turn = None  # no part of EXIF can be read; where only some is damaged, PIL goes on
    if image.mode == "RGB" and turn is None and not image.has_transparency_data:
        return image
    image = flat(image)
    if turn is not None:
        image = image.transpose(turn)
    image.info = {}  # it says no more how the photo has to be turned
    return image


# In the place of another

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
