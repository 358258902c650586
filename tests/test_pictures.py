"""python -m pytest tests/test_pictures.py      about 2 s: depth, transparency, EXIF"""

import io
import struct

import numpy as np
import pytest
from PIL import Image

from kit.pictures import TURNS, eight_bits, flat, upright_rgb
from kit.tables import read_image

RAMP = np.linspace(0, 65535, 64 * 64).round().astype(np.uint16).reshape(64, 64)
EIGHT = (np.arange(64 * 64) % 256).reshape(64, 64)


def encoded(image, kind, **more) -> bytes:
    image.save(file := io.BytesIO(), kind, **more)
    return file.getvalue()


def opened(image, kind, **more):
    return Image.open(io.BytesIO(encoded(image, kind, **more)))


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM", "JPEG2000"])
def test_16_bits_are_divided_by_257(kind):
    image = read_image(encoded(Image.fromarray(RAMP), kind))
    assert abs(np.asarray(image)[..., 1] - RAMP / 257).max() <= 0.5


@pytest.mark.parametrize("mode", ["I;16", "I;16B", "I", "F"])
def test_every_mode_of_16_bits_is_scaled(mode):
    image = Image.fromarray(RAMP.astype(">u2" if mode == "I;16B" else "<u2"))
    image = (
        image
        if mode.startswith("I;")
        else Image.fromarray(RAMP.astype({"I": "i4", "F": "f4"}[mode]))
    )
    assert image.mode == mode
    assert abs(np.asarray(flat(image))[..., 0] - RAMP / 257).max() <= 0.5


@pytest.mark.parametrize("values, got", [
    ([0, 128, 255], [0, 128, 255]),
    (np.uint16([0, 257, 65535]), [0, 1, 255]),
    (np.uint16([0, 255]), [0, 1]),
    ([-5, 7.5, 255], [0, 7, 255]),
    ([0.0, 0.5, 1.0], [0, 127, 255]),
    ([0, 200, 400], [0, 200, 255]),  # brightened
    ([0, 2**30, 2**31 - 1], [0, 128, 255]),
    ([np.nan, 257, 65535], [0, 1, 255]),
    ([True, False], [255, 0]),
])  # fmt: skip
def test_white_is_what_the_depth_says(values, got):
    assert eight_bits(np.asarray(values)).tolist() == got


def test_what_is_transparent_is_white_in_every_mode():
    for mode, clear in (("P", 0), ("L", 7), ("RGB", (9, 8, 7)), ("I;16", 40_000)):
        image = Image.new(mode, (5, 5), clear)
        shown = flat(opened(image, "PNG", transparency=clear))
        assert shown.getpixel((2, 2)) == (255, 255, 255), mode


def exif(order, *entries) -> bytes:
    """An EXIF block of (tag, type, count, four bytes or what stands behind the table)."""
    table, tail, end = struct.pack("<H", len(entries)), b"", 8 + 2 + 12 * len(entries) + 4
    for tag, kind, count, value in entries:
        if len(value) > 4:
            value, tail = struct.pack("<I", end + len(tail)), tail + value
        table += struct.pack("<HHI", tag, kind, count) + value.ljust(4, b"\0")
    return b"Exif\0\0II*\0\x08\0\0\0" + table + b"\0\0\0\0" + tail


ORIENTED = (0x0112, 3, 1, struct.pack("<H", 6))
ODD = {
    "a negative resolution": (0x011A, 10, 1, struct.pack("<ii", -1, 0)),
    "a large compression": (0x0103, 4, 1, struct.pack("<I", 70_000)),
    "a count too large": (0x010E, 2, 60_000, b"abc"),
}


@pytest.mark.parametrize("name", ODD)
def test_a_photo_with_odd_exif_is_turned_all_the_same(name):
    image = Image.new("RGB", (30, 18), "red")
    image.paste("blue", (0, 0, 5, 5))
    entries = sorted([ORIENTED, ODD[name]])
    turned = read_image(encoded(image, "JPEG", exif=exif("II", *entries), quality=95))
    assert turned.size == (18, 30) and turned.getpixel((15, 2))[2] > 200
    assert not turned.getexif()


def test_exif_that_cannot_be_read_turns_nothing():
    image = opened(Image.new("RGB", (30, 18)), "JPEG", exif=b"Exif\0\0MMMMMMMMMMMM")
    assert upright_rgb(image).size == (30, 18)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_is_undone_once(orientation, kind):
    image = Image.new("RGB", (32, 16), "white")
    image.paste("red", (0, 0, 16, 8))
    inverse = {6: 8, 8: 6}.get(orientation, orientation)
    stored = image.transpose(TURNS[inverse]) if orientation > 1 else image
    tag = Image.Exif()
    tag[0x0112] = orientation
    upright = upright_rgb(upright_rgb(opened(stored, kind, exif=tag)))
    assert upright.size == (32, 16)
    corners = [upright.getpixel(at) for at in ((4, 3), (28, 3), (4, 13), (28, 13))]
    assert [green < 128 for _, green, _ in corners] == [True, False, False, False]


def test_a_picture_that_needs_nothing_is_the_same_object():
    image = Image.new("RGB", (5, 5))
    assert upright_rgb(image) is image
