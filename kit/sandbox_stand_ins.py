"""
sandbox_stand_ins.py: Pillow, OpenCV and matplotlib, kinder than they are.

Concept     A policy that invents a path or a box off the image gets what it meant, and a note that
            says so. The same stand-ins record what is shown, and how a crop came from the input.
Paper       nothing: CodeV's Appendix 13 names the repairs, not the functions
In          calls of open, crop, resize, save, show, imread, imwrite, savefig
Out         their results, and a Recorder that holds what they showed
Left out    other libraries; trust: code may call the true functions, and forge what is recorded
Read next   sandbox_worker.py (who uses this), sandbox.verified_box (who checks the steps)
"""

import hashlib
import math
import os
import re
import sys

import numpy as np
from PIL import Image

from kit.boxes import Box, outwards

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff")
INVENTED = re.compile(
    r"(path[_ ]?to|the|your|my|input|original|source|test|user|uploaded|sample)?"
    r"[_ -]?(image|img|photo|picture|input)[_ -]?(file|path|\d)?",
    re.IGNORECASE,
)
STEPS = "crops and resizes"  # a key of Image.info, which Pillow hands on to its results
true_open = Image.open


def digest(image: Image.Image) -> bytes:
    """Equal if and only if size and pixels are."""
    return hashlib.blake2b(repr(image.size).encode() + image.tobytes()).digest()


def flat(image: Image.Image) -> Image.Image:
    """A copy in RGB, with white behind whatever is transparent."""
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image, info = image.convert("RGBA"), image.info
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        image.info = info
    return image.convert("RGB")


class Recorder:
    """What one call shows, and what was repaired on the way. `begin` makes it ready for a call."""

    def __init__(self, limits: dict, folder: str, size: tuple[int, int]):
        self.limits, self.size = limits, size
        self.folder, self.path = f"{folder}/work", f"{folder}/image.png"
        self.bgr = False  # does the code keep its arrays as OpenCV does, blue first?

    def begin(self) -> None:
        self.notes, self.flags = [], set()
        self.shown = {}  # a path, or a key of its own -> digest, image, source
        self.more = 0  # images beyond the limit
        self.written, self.reloaded = set(), set()  # paths; digests of files read back
        self.drawn = set()  # figures that were saved

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def show(self, image: Image.Image, source: str, path: str | None = None) -> None:
        """Keep a copy of an image that is shown: the code may go on painting.

        path: the file that it was written to. Equal images count once, as does a file.
        """
        image = flat(image)
        if path:
            self.written.add(path)
            self.shown.pop(path, None)  # it was overwritten
        if min(image.size) == 0 or max(image.size) > self.limits["ratio"] * min(image.size):
            return self.note(f"image of {image.width}x{image.height} is too thin to show")
        pixels = digest(image)
        if pixels in self.reloaded:
            self.flags.add("io_scratch")  # written, read back, shown as it was
        if any(pixels == other[0] for other in self.shown.values()):
            return
        if len(self.shown) == self.limits["images"]:
            self.more += 1
        else:
            self.shown[path or object()] = pixels, image, source

    def show_figures(self) -> None:
        plt = sys.modules["matplotlib.pyplot"]
        for figure in map(plt.figure, plt.get_fignums()):
            if figure.axes and figure not in self.drawn:
                figure.canvas.draw()
                self.show(Image.fromarray(np.asarray(figure.canvas.buffer_rgba())), "figure")
        plt.close("all")

    def as_image(self, value: object) -> Image.Image | None:
        """An image, or an array that looks like one; None for anything else."""
        if isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.size > 1000:
            if value.ndim == 2 or value.ndim == 3 and value.shape[2] in (1, 3, 4):
                return self.from_array(value, self.bgr)
        return value if isinstance(value, Image.Image) else None

    def from_array(self, array: np.ndarray, bgr: bool = True) -> Image.Image:
        pixels = np.asarray(array)
        if pixels.dtype != np.uint8:
            pixels = np.nan_to_num(pixels.astype(float))
            pixels = (pixels * 255 if pixels.max(initial=0) <= 1 else pixels).clip(0, 255)
        if pixels.ndim == 3:
            order = {1: 0, 3: [2, 1, 0], 4: [2, 1, 0, 3]} if bgr else {1: 0}
            pixels = pixels[..., order.get(pixels.shape[2], slice(None))]
        image = Image.fromarray(np.ascontiguousarray(pixels, dtype=np.uint8))
        return self.with_origin(image, array)

    def with_origin(self, image: Image.Image, array: object) -> Image.Image:
        """Record a crop if `array` is a slice of one as large as the input: its address in memory
        says from where."""
        whole = array
        while isinstance(getattr(whole, "base", None), np.ndarray):
            whole = whole.base
        if isinstance(whole, np.ndarray) and whole.shape[1::-1] == self.size:
            start, origin = (a.__array_interface__["data"][0] for a in (array, whole))
            y, x = divmod(start - origin, whole.strides[0])
            x //= whole.strides[1]
            image.info[STEPS] = [[x, y, x + image.width, y + image.height]]
        return image  # if strided or flipped, the trainer finds other pixels

    def step(self, image: Image.Image, result: Image.Image, *step) -> Image.Image:
        """Record how `result` came from `image`, if that itself came from the input."""
        if STEPS in image.info:
            result.info[STEPS] = self.latest = [*image.info[STEPS], list(step)]
        return result

    def fit(self, box: object, width: int, height: int) -> Box:
        """A box in whole pixels inside the image, or a ValueError that says why there is none."""
        given = np.asarray(box, dtype=float).ravel().tolist()
        x0, y0, x1, y1, *more = [*given, *[math.nan] * (4 - len(given))]
        said, how = f"crop box ({', '.join(f'{v:g}' for v in given[:8])})", []
        if more or not math.isfinite(x0 + y0 + x1 + y1):
            self.flags.add("invalid_coords")
            raise ValueError(f"{said} is not left, top, right, bottom, or holds NaN or infinity")
        if all(0 <= v <= 1 for v in given) and not set(given) <= {0, 1}:
            x0, y0, x1, y1 = x0 * width, y0 * height, x1 * width, y1 * height
            how.append("scaled to pixels")
        if x0 > x1 or y0 > y1:
            (x0, x1), (y0, y1) = sorted((x0, x1)), sorted((y0, y1))
            how.append("sorted; for x, y, width, height use (x, y, x+width, y+height)")
        whole = (x1 - x0) * (y1 - y0)
        x0, y0, x1, y1 = max(x0, 0), max(y0, 0), min(x1, width), min(y1, height)
        if x0 >= x1 or y0 >= y1:
            self.flags.add("invalid_coords")
            raise ValueError(f"{said} is empty or outside the {width}x{height} image")
        if (inside := (x1 - x0) * (y1 - y0)) < whole:
            how.append("clamped to the image")
            if inside < 0.9 * whole:  # ours: more than a tenth of the box was outside
                self.flags.add("invalid_coords")
        kept = outwards(x0, y0, x1, y1)
        if list(kept) != given:
            self.note(f"{said} -> {kept}: {', '.join(how) or 'rounded outwards'}")
        return kept

    def is_own(self, file: object) -> bool:
        return isinstance(file, (str, os.PathLike)) and self.folder in os.path.abspath(file)

    def to_read(self, file: object) -> object:
        """The path, if it exists; or our file of that name; or, if it is INVENTED, the input."""
        if not isinstance(file, (str, os.PathLike)) or os.path.exists(file):
            return file
        name = os.path.basename(file)
        if os.path.isfile(mine := os.path.join(self.folder, name)):
            self.note(f"{str(file)[-80:]} not found: took {name}")
            return mine
        stem, extension = os.path.splitext(name)
        if extension.lower() in PICTURES and (os.path.isabs(file) or INVENTED.fullmatch(stem)):
            self.note(f"{str(file)[-80:]} not found: took the input image")
            return self.path
        return file

    def to_write(self, file: object, extension: str = "") -> object:
        """A path in the working folder; folders that it lacks are made."""
        if not isinstance(file, (str, os.PathLike)):
            return file
        path = os.path.realpath(file)
        inside = path.startswith(self.folder + "/")
        if not inside:
            path = os.path.join(self.folder, os.path.basename(file) or "output")
        if not os.path.splitext(path)[1]:
            path += extension
        if not inside or not os.path.splitext(file)[1] and extension:
            self.note(f"{str(file)[-80:]} written to {os.path.basename(path)}")
        if not os.path.isdir(folder := os.path.dirname(path)):
            os.makedirs(folder)
            self.note(f"made the folder {os.path.relpath(folder, self.folder)}")
        return path

    def open(self, file, mode="r", *rest, **options):
        path = self.to_write(file) if set(mode) & set("wax+") else self.to_read(file)
        return open(path, mode, *rest, **options)


def stand_ins(w: Recorder) -> list[tuple[object, str, object]]:
    """(owner, name, what to put there): functions that repair paths and boxes, and record what is
    shown."""
    kinder = []

    def instead_of(owner, name):
        def register(function):
            old = getattr(owner, name)
            kinder.append((owner, name, lambda *args, **options: function(old, *args, **options)))

        return register

    @instead_of(Image, "open")
    def _(old, file, *rest, **options):
        path = w.to_read(file)
        image = old(path, *rest, **options)
        if w.is_own(path):
            w.reloaded.add(digest(flat(image)))
        elif str(path) == w.path:
            image.info[STEPS] = []
        return image

    @instead_of(Image.Image, "crop")
    def _(old, image, box=None):
        box = (0, 0, *image.size) if box is None else w.fit(box, *image.size)
        return w.step(image, old(image, box), *box)

    @instead_of(Image.Image, "resize")
    def _(old, image, size, resample=None, box=None, reducing_gap=None):
        result = old(image, size, resample, box, reducing_gap)
        corners = (float(v) for v in box or (0, 0, *image.size))
        return w.step(image, result, *corners, *result.size, resample, reducing_gap)

    @instead_of(Image.Image, "thumbnail")  # it resizes a hidden copy
    def _(old, image, *rest, **options):
        before = image.size
        old(image, *rest, **options)
        if image.size != before and STEPS in image.info:
            image.info[STEPS] = w.latest

    @instead_of(Image.Image, "save")
    def _(old, image, file, format=None, **options):
        path = w.to_write(file, ".png")
        kind = (format or os.path.splitext(str(path))[1].lstrip(".")).upper()
        if kind in ("JPG", "JPEG"):
            format = "JPEG"
            if image.mode not in ("RGB", "L", "CMYK"):
                w.note(f"{image.mode} turned into RGB for JPEG")
                image = flat(image)
        old(image, path, format, **options)
        if isinstance(path, str):
            w.show(image, "file", path)

    @instead_of(Image.Image, "show")
    def _(old, image, *_, **__):
        w.show(image, "show")

    @instead_of(Image, "fromarray")
    def _(old, array, *rest, **options):
        return w.with_origin(old(array, *rest, **options), array)

    if cv2 := sys.modules.get("cv2"):

        @instead_of(cv2, "imread")
        def _(old, file, *rest):
            path = w.to_read(file)
            pixels = old(path, *rest)
            if pixels is None:
                w.note(f"cv2.imread found no image at {str(path)[-80:]}")
            elif w.is_own(path):
                w.reloaded.add(digest(flat(w.from_array(pixels))))
            return pixels

        @instead_of(cv2, "imwrite")
        def _(old, file, pixels, *rest):
            path = w.to_write(file, ".png")
            done = old(path, pixels, *rest)
            w.show(w.from_array(pixels), "file", path)
            return done

        instead_of(cv2, "imshow")(lambda old, _, pixels: w.show(w.from_array(pixels), "show"))
        for name in "waitKey", "waitKeyEx":
            instead_of(cv2, name)(lambda *_, **__: -1)
        for name in "namedWindow resizeWindow moveWindow destroyWindow destroyAllWindows".split():
            instead_of(cv2, name)(lambda *_, **__: None)

    if plt := sys.modules.get("matplotlib.pyplot"):

        @instead_of(plt, "show")
        def _(old, *_, **__):
            if not any(plt.figure(number).axes for number in plt.get_fignums()):
                w.note("plt.show(): no figure")
            w.show_figures()

        @instead_of(plt.Figure, "savefig")
        def _(old, figure, file, *rest, **options):
            path = w.to_write(file, ".png")
            old(figure, path, *rest, **options)
            w.drawn.add(figure)
            if path in w.shown:  # matplotlib saves through Pillow
                w.shown[path] = (*w.shown[path][:2], "figure")

    return kinder
