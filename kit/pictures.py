"""
pictures.py: any picture becomes an upright, opaque one in RGB with 8 bits a channel.

Concept     The same file looks the same wherever it is opened: by a data set, or by code in the
            sandbox. What is deeper than 8 bits is scaled, never clipped; what is transparent lies
            on white; a photo is turned upright.
Paper       nothing: encoders of pictures take 8 bits a channel
In          a PIL image of any mode
Out         a PIL image in RGB
Left out    colour profiles; all of EXIF but the orientation
Read next   tables.py (pictures of data sets), sandbox_stand_ins.py (pictures that code shows)
"""

import struct

import numpy as np
from PIL import Image

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


def orientation(image: Image.Image) -> object:
    """How a camera was held, as EXIF says it: 1 to 8. The rest of EXIF may be damaged."""
    try:
        return image.getexif().get(0x0112, 1)
    except (ValueError, TypeError, SyntaxError, LookupError, OSError, struct.error):
        return 1  # no part of it can be read


def upright_rgb(image: Image.Image) -> Image.Image:
    """The picture turned upright, opaque and in RGB; the same object if it is that already."""
    image.load()  # TIFF is turned by PIL here
    turn = TURNS.get(orientation(image))
    if image.mode == "RGB" and turn is None and not image.has_transparency_data:
        return image
    image = flat(image)
    if turn is not None:
        image = image.transpose(turn)
    image.info = {}  # it says no more how the photo has to be turned
    return image
