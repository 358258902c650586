"""
sandbox_stand_ins.py: Pillow, OpenCV and matplotlib, kinder than they are.

Concept     A policy that invents a path or a box off the image gets what it meant, and a note that
            says so. The same stand-ins record what is shown, and remember crops and resizes.
Paper       nothing: CodeV's Appendix 13 names the repairs, not the functions
In          calls of open, crop, resize, save, show, imread, imwrite, savefig
Out         their results, and a Recorder that holds what they showed and how it was made
Left out    other libraries; trust: code may call the true functions, and forge what is recorded
Read next   sandbox_worker.py (who uses this), sandbox_looks.py (where pixels come from)
"""

import builtins
import hashlib
import io
import math
import ntpath
import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageFont

from kit.boxes import Box, outwards
from kit.pictures import eight_bits, flat
from kit.sandbox_looks import Origins, size_of

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff")
PICTURES += (".avif", ".jp2", ".pbm", ".pgm", ".ppm")
INVENTED = re.compile(
    r"(path[_ ]?to|the|your|my|input|original|source|test|user|uploaded|sample)?"
    r"[_ -]?(image|img|photo|picture|input)[_ -]?(file|path|\d{1,3})?"
    r"\.(png|jpe?g|bmp|webp|gif|tiff?)",
    re.IGNORECASE,
)
true_open = Image.open


def digest(image: Image.Image) -> bytes:
    """Equal if and only if size and pixels are."""
    return hashlib.blake2b(repr(image.size).encode() + image.tobytes()).digest()


def is_path(file: object) -> bool:
    return isinstance(file, (str, os.PathLike))


class Recorder:
    """What one call shows, and what was repaired on the way. `begin` makes it ready for a call."""

    def __init__(self, limits: dict, folder: str, image: Image.Image):
        self.limits, self.origins = limits, Origins(image)
        self.folder, self.path = f"{folder}/work", f"{folder}/image.png"
        self.made_up = set()  # folders elsewhere that code believes to be there
        self.believe("/mnt/data")  # where public traces keep their files
        self.bgr = False  # does the code keep its arrays as OpenCV does, blue first?

    def begin(self) -> None:
        self.notes, self.flags = [], set()
        self.origins.begin()
        self.shown = {}  # a path, or a key of its own -> digest, image, what the reply says of it
        self.written, self.reloaded = set(), set()  # paths; digests of files read back
        self.more, self.drawn = 0, set()  # images beyond the limit; figures that were saved

    def note(self, text: str) -> None:
        if text not in self.notes and len(self.notes) < 10:
            self.notes.append(text)

    def show(self, image: Image.Image, source: str, path: str | None = None) -> None:
        """Keep a copy of an image that is shown: the code may go on painting. path: the file that
        it was written to. Equal images count once, as does a file."""
        image = flat(image)
        if path:
            self.written.add(path)
            self.shown.pop(path, None)  # it was overwritten
        if min(image.size) == 0 or max(image.size) > self.limits["ratio"] * min(image.size):
            return self.note(f"image of {image.width}x{image.height} is too thin to show")
        pixels = digest(image)
        reloaded = pixels in self.reloaded  # written, read back, shown as it was
        for other, _, facts in self.shown.values():
            if pixels == other:
                facts["reloaded"] |= reloaded
                return
        if len(self.shown) == self.limits["images"]:
            self.more += 1
            return
        image = self.resized(image)
        steps = None if source == "figure" else self.origins.of(image)
        facts = {"size": image.size, "source": source, "steps": steps, "reloaded": reloaded}
        self.shown[path or object()] = pixels, image, facts

    def resized(self, image: Image.Image) -> Image.Image:
        """Shrunk or enlarged to what a vision encoder takes."""
        (w, h), longest, shortest = image.size, self.limits["longest"], self.limits["shortest"]
        if (side := max(w, h)) > longest:
            w, h = math.ceil(w * longest / side), math.ceil(h * longest / side)
        if (side := min(w, h)) < shortest:
            w, h = round(w * shortest / side), round(h * shortest / side)
        if (w, h) == image.size:
            return image
        self.note(f"image resized from {image.width}x{image.height} to {w}x{h}")
        return image.resize((w, h))

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
        if pixels.dtype not in (np.uint8, np.uint16):  # cv2 writes no others: it clips them
            pixels = np.minimum(pixels.astype(float), 255)
        pixels = eight_bits(pixels)
        if pixels.ndim == 3:
            order = {1: 0, 3: [2, 1, 0], 4: [2, 1, 0, 3]} if bgr else {1: 0}
            pixels = pixels[..., order.get(pixels.shape[2], slice(None))]
        return Image.fromarray(np.ascontiguousarray(pixels))

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

    def real(self, path: str | os.PathLike) -> str | None:
        """Where it leads in the working folder; None: elsewhere, as the link to the input does."""
        real = os.path.realpath(path)
        return real if f"{real}/".startswith(self.folder + "/") else None

    def believe(self, folder: str) -> None:
        self.made_up |= {folder, *map(str, Path(folder).parents)}

    def meant(self, path: object) -> object:
        """The path; or, if it leads to nothing, what code believes to be there: a folder, our file
        of that name, or, if it is INVENTED, the input. What can be read must be there."""
        if not is_path(path) or os.access(path, os.F_OK):
            return path
        if os.path.abspath(path) in self.made_up:
            return self.folder
        mine = os.path.join(self.folder, name := ntpath.basename(path))
        if os.access(mine, os.F_OK) and not self.real(path):
            return mine
        return f"{self.folder}/image.png" if INVENTED.fullmatch(name) else path

    def to_read(self, file: object) -> object:
        """The path, if it exists; or our file of that name; or, if it is INVENTED, the input."""
        if not is_path(file) or os.access(file, os.F_OK):
            return file
        name = ntpath.basename(file)  # / or \\
        if os.access(mine := os.path.join(self.folder, name), os.F_OK):
            self.note(f"{str(file)[-80:]} not found: took {name}")
            return mine
        if name.lower().endswith(PICTURES) and (os.path.isabs(file) or INVENTED.fullmatch(name)):
            self.note(f"{str(file)[-80:]} not found: took the input image")
            return self.path
        return file

    def to_write(self, file: object, extension: str = "") -> object:
        """A path in the working folder; folders that it lacks are made."""
        if not is_path(file):
            return file
        path = inside = self.real(file)
        if os.path.abspath(file) in self.made_up:
            return self.folder
        if not path:
            self.believe(os.path.dirname(os.path.abspath(file)))
            path = os.path.join(self.folder, os.path.basename(file) or "output")
        if not os.path.splitext(path)[1]:
            path += extension
        if not inside or not os.path.splitext(file)[1] and extension:
            self.note(f"{str(file)[-80:]} written to {os.path.basename(path)}")
        if os.path.islink(path):  # the input's file stays as it is
            os.unlink(path)
        if not os.path.isdir(folder := os.path.dirname(path)):
            os.makedirs(folder)
            self.note(f"made the folder {os.path.relpath(folder, self.folder)}")
        return path

    def own(self, path: object) -> object:
        """What the code means by a path that it wants changed. Raises PermissionError outside."""
        path = self.meant(path)
        if not os.path.abspath(path).startswith(self.folder + "/"):
            raise PermissionError(f"{str(path)[-80:]} is not in the working folder")
        return path


class Parts:
    """An array while slices are cut out of it, `array[y0:y1, x0:x1]`, which is remembered. Bounds
    may be floats, and a start below 0 with an end above it is 0: numpy would find nothing there."""

    def __init__(self, array: np.ndarray, w: Recorder):
        self.array, self.w = array, w

    def __getitem__(self, index):
        index = self.whole(index)
        part, slices = self.array[index], [*index, slice(None)][:2]
        if isinstance(part, np.ndarray) and all(isinstance(s, slice) for s in slices):
            (y0, y1, down), (x0, x1, right) = map(slice.indices, slices, self.array.shape)
            if part.size:
                step = ["crop", x0, y0, x1, y1]
                if (right, down) != (1, 1):  # the nearest to just beside the middle
                    x, y = x0 + 0.51 - right / 2, y0 + 0.51 - down / 2
                    step = ["affine", *size_of(part), right, 0, x, 0, down, y, 0]
                self.w.origins.made(part, self.array, step)
        return part

    def __setitem__(self, index, value):
        self.array[self.whole(index)] = value

    def whole(self, index) -> tuple:
        return tuple(map(self.bounds, index if isinstance(index, tuple) else (index,)))

    def bounds(self, part: object) -> object:
        """Of a slice: floats are rounded outwards. Anything else stays as it is."""
        if not isinstance(part, slice):
            return part
        start, stop = part.start, part.stop
        if any(isinstance(bound, (float, np.floating)) for bound in (start, stop)):
            self.w.note("slice bounds rounded to whole pixels")
            start = None if start is None else math.floor(start)
            stop = None if stop is None else math.ceil(stop)
        if start is not None and stop is not None and start < 0 <= stop:
            self.w.note(f"slice start {start} set to 0")
            start = 0
        return slice(start, stop, part.step)


def stand_ins(w: Recorder) -> list[tuple[object, str, object]]:
    """(owner, name, what to put there): functions that repair paths and boxes, and record what is
    shown."""
    kinder = []

    def instead_of(owner, name):
        def register(function):
            old = getattr(owner, name)
            kinder.append((owner, name, lambda *args, **options: function(old, *args, **options)))

        return register

    def remembering(owner, name):
        def register(step):  # of the result, and all that was given
            @instead_of(owner, name)
            def _(old, *args, **options):
                result, source = old(*args, **options), args[0] if args else options["src"]
                w.origins.made(result, source, step(result, *args, **options))
                return result

        return register

    @instead_of(Image, "open")
    def _(old, fp, *rest, **options):
        path = w.to_read(fp)
        image = old(path, *rest, **options)
        if is_path(name := getattr(path, "name", path)) and w.real(name):
            w.reloaded.add(digest(flat(image)))
        return image

    @instead_of(Image.Image, "crop")
    def _(old, image, box=None):
        box = (0, 0, *image.size) if box is None else w.fit(box, *image.size)
        result = old(image, box)
        w.origins.made(result, image, ["crop", *box])
        return result

    @remembering(Image.Image, "resize")
    def _(new, image, size, resample=None, box=None, reducing_gap=None):
        return ["pil", *new.size, resample, *map(float, box or (0, 0, *image.size)), reducing_gap]

    @remembering(Image.Image, "reduce")
    def _(new, image, factor, box=None):
        return ["pil", *new.size, Image.BOX, *map(float, box or (0, 0, *image.size)), None]

    @remembering(Image.Image, "transform")
    def _(new, image, size, method, data=None, resample=Image.NEAREST, *_, **__):
        if method == Image.EXTENT:
            (x0, y0, x1, y1), (wide, high) = data, size
            method, data = Image.AFFINE, ((x1 - x0) / wide, 0, x0, 0, (y1 - y0) / high, y0)
        if method == Image.AFFINE:
            return ["affine", *new.size, *map(float, data[:6]), int(resample)]

    @instead_of(Image.Image, "save")
    def _(old, image, fp, format=None, **options):
        path = w.to_write(fp, ".png")
        kind = (format or os.path.splitext(str(path))[1].lstrip(".")).upper()
        if kind in ("JPG", "JPEG"):
            format = "JPEG"
            if image.mode not in ("RGB", "L", "CMYK"):
                w.note(f"{image.mode} turned into RGB for JPEG")
                image = flat(image)
        old(image, path, format, **{"compress_level": 1} | options)  # PNG: at 8K, in time
        if isinstance(path, str):
            if kind in ("PNG", "GIF") and "transparency" in options:  # a colour that they hide
                image = image.copy()
                image.info["transparency"] = options["transparency"]
            w.show(image, "file", path)

    instead_of(Image.Image, "show")(lambda _, image, *__, **___: w.show(image, "show"))

    @instead_of(ImageFont, "truetype")
    def _(old, font=None, size=10, *rest, **options):
        try:
            return old(font, size, *rest, **options)
        except OSError:
            w.note(f"font {str(font)[-80:]} not found: took the default")
            return ImageFont.load_default(size)

    @instead_of(os, "mkdir")  # os.makedirs and Path.mkdir call it
    def _(old, path, *rest, **options):
        if w.real(path) or os.access(path, os.F_OK):
            return old(path, *rest, **options)
        w.believe(os.path.abspath(path))
        w.note(f"{str(path)[-80:]} is outside; what is saved there goes to the working folder")

    for owner in builtins, io:  # whoever calls it: Path, shutil, numpy

        @instead_of(owner, "open")
        def _(old, file, mode="r", *rest, **options):
            path = w.to_write(file) if set(mode) & set("wax+") else w.to_read(file)
            return old(path, mode, *rest, **options)

    for owner, names, *repairs in (
        (os.path, "lexists", w.meant),  # glob calls it
        (os, "stat listdir scandir chdir", w.meant),
        (os, "utime", lambda path: os.stat(path) and path),  # the kernel pretends: see PRETENDED
        (os, "remove unlink rmdir", w.own),
        (os, "rename replace", w.own, w.to_write),
        (shutil, "rmtree", w.own),
        (shutil, "move", w.own, w.to_write),
    ):
        for name in names.split():

            @instead_of(owner, name)
            def _(old, *paths, repairs=repairs, **options):
                named = [options.pop(key) for key in ("path", "src", "dst") if key in options]
                paths = *paths, *named
                meant = [repair(path) for repair, path in zip(repairs, paths)]
                return old(*meant, *paths[len(meant) :], **options)

    if cv2 := sys.modules.get("cv2"):

        @instead_of(cv2, "imread")
        def _(old, filename, *rest, **options):
            path = w.to_read(filename)
            pixels = old(path, *rest, **options)
            if pixels is None:
                w.note(f"cv2.imread found no image at {str(path)[-80:]}")
            elif w.real(path) and pixels.ndim == 3:
                w.reloaded.add(digest(flat(w.from_array(pixels))))
            return pixels

        @remembering(cv2, "resize")
        def _(new, src, dsize=None, dst=None, fx=0, fy=0, interpolation=cv2.INTER_LINEAR):
            size = (0, 0) if dsize is None else map(int, dsize)
            return ["cv2", *size, float(fx), float(fy), int(interpolation)]

        def warped(new, src, M, dsize, dst=None, flags=1, borderMode=0, *_, **__):
            m, back = np.array([*M, [0, 0, 1]][:3], float), cv2.WARP_INVERSE_MAP
            m = m if flags & back else np.linalg.inv(m)
            if abs(m[2, :2]).max() < 1e-9:  # else a perspective
                m = (m[:2] / m[2, 2]).ravel().tolist()
                return ["warp", *size_of(new), *m, int(flags) | back, int(borderMode)]

        for name in "warpAffine", "warpPerspective":
            remembering(cv2, name)(warped)

        @instead_of(cv2, "imwrite")
        def _(old, filename, img, *rest, **options):
            path = w.to_write(filename, ".png")
            done = old(path, img, *rest, **options)
            w.show(w.from_array(img), "file", path)
            return done

        instead_of(cv2, "imshow")(lambda _, winname, mat: w.show(w.from_array(mat), "show"))
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

        instead_of(sys.modules["matplotlib"], "use")(lambda *_, **__: None)  # there is no screen
        instead_of(plt, "switch_backend")(lambda old, *_, **__: old("agg"))

        @instead_of(plt.Figure, "savefig")
        def _(old, figure, fname, *rest, **options):
            path = w.to_write(fname, ".png")
            old(figure, path, *rest, **options)
            w.drawn.add(figure)
            if path in w.shown:  # matplotlib saves through Pillow
                w.shown[path][2].update(source="figure", steps=None)

    return kinder
