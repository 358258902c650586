"""python -m pytest tests/test_pictures.py      about 2 s: depth, transparency, EXIF"""

import io
import struct

import numpy as np
import pytest
from PIL import Image

from kit.pictures import TURNS, eight_bits, flat, upright_rgb
from kit.tables import read_image

RAMP = np.linspace(0, 65535, 64 * 64).round().astype(np.uint16).reshape(64, 64)


def encoded(image, kind, **more) -> bytes:
    image.save(file := io.BytesIO(), kind, **more)
    return file.getvalue()


def opened(*image, **more) -> Image.Image:
    return Image.open(io.BytesIO(encoded(*image, **more)))


@pytest.mark.parametrize("image", [
    *(Image.fromarray(RAMP.astype(kind)) for kind in ("<u2", ">u2", "i4", "f4")),  # four modes
    *(opened(Image.fromarray(RAMP), kind) for kind in ("PNG", "TIFF", "PPM", "JPEG2000")),
], ids=lambda image: f"{image.format} {image.mode}")  # fmt: skip
def test_16_bits_are_divided_by_257(image):
    assert abs(np.asarray(upright_rgb(image))[..., 1] - RAMP / 257).max() <= 0.5


@pytest.mark.parametrize("kind", ["AVIF", "JPEG2000", "PPM", "WEBP", "BMP"])
def test_what_pillow_can_open_is_a_cell(kind):
    same = np.asarray(read_image(encoded(Image.new("RGB", (40, 30), (20, 40, 200)), kind)))
    assert same.shape == (30, 40, 3) and abs(same - np.int16([20, 40, 200])).max() <= 6


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


def exif(*entries) -> bytes:
    """An EXIF block of (tag, type, count, four bytes or what stands behind the table)."""
    table, tail, end = struct.pack("<H", len(entries)), b"", 8 + 2 + 12 * len(entries) + 4
    for tag, kind, count, value in entries:
        if len(value) > 4:
            value, tail = struct.pack("<I", end + len(tail)), tail + value
        table += struct.pack("<HHI", tag, kind, count) + value.ljust(4, b"\0")
    return b"Exif\0\0II*\0\x08\0\0\0" + table + b"\0\0\0\0" + tail


ORIENTED = (0x0112, 3, 1, struct.pack("<H", 6))


@pytest.mark.parametrize("odd", [
    (0x011A, 10, 1, struct.pack("<ii", -1, 0)),  # a negative resolution
    (0x0103, 4, 1, struct.pack("<I", 70_000)),  # a large compression
    (0x010E, 2, 60_000, b"abc"),  # a count too large
])  # fmt: skip
def test_a_photo_with_odd_exif_is_turned_all_the_same(odd):
    image = Image.new("RGB", (30, 18), "red")
    image.paste("blue", (0, 0, 5, 5))
    turned = read_image(encoded(image, "JPEG", exif=exif(*sorted([ORIENTED, odd])), quality=95))
    assert turned.size == (18, 30) and turned.getpixel((15, 2))[2] > 200
    assert not turned.getexif()


def test_exif_that_cannot_be_read_turns_nothing():
    image = opened(Image.new("RGB", (30, 18)), "JPEG", exif=b"Exif\0\0MMMMMMMMMMMM")
    assert upright_rgb(image).size == (30, 18)
    assert upright_rgb(plain := image.convert("RGB")) is plain  # nothing is to be done


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_is_undone_once(orientation, kind):
    image = Image.new("RGB", (32, 16), "white")
    image.paste("red", (0, 0, 16, 8))
    inverse = {6: 8, 8: 6}.get(orientation, orientation)
    stored = image.transpose(TURNS[inverse]) if orientation > 1 else image
    entry = (0x0112, 3, 1, struct.pack("<H", orientation))
    upright = upright_rgb(upright_rgb(opened(stored, kind, exif=exif(entry))))
    assert upright.size == (32, 16)
    corners = [upright.getpixel(at) for at in ((4, 3), (28, 3), (4, 13), (28, 13))]
    assert [green < 128 for _, green, _ in corners] == [True, False, False, False]
