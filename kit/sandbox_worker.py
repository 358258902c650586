"""
sandbox_worker.py: runs code in one lasting namespace, and collects what it showed.

Concept     Printed text, saved files, open figures, the value of the last line, a last new image:
            all of these are ways to show something. Whatever the code raises is a result too.
Paper       nothing: CodeV's Appendix 13 says what a call shows, not how
In          the limits, a folder, the names that the code finds, the input image; then code
Out         the reply to the trainer and the pixels that follow it
Left out    trust: the code shares this process with the worker, so a reply may be forged
Read next   sandbox_stand_ins.py (what is kinder here), sandbox.py (who checks the reply)
"""

import ast
import builtins
import glob
import io
import itertools
import math
import os
import signal
import sys
import tempfile
import traceback
import warnings

import numpy as np
from PIL import Image

from kit.boxes import Box
from kit.sandbox_repair import forbidden_call, repair, rewrite
from kit.sandbox_stand_ins import (INVENTED, LARGE, PICTURES, SMALL, STEPS, THIN, digest, flat,
                                   pillow_open, stand_ins)


class Capture(io.BytesIO):
    """What the code prints, up to a limit."""

    def __init__(self, limit: int):
        super().__init__()
        self.limit, self.lost = limit, 0

    def write(self, data) -> int:
        data = bytes(data)
        fits = max(0, self.limit - self.tell())
        super().write(data[:fits])
        self.lost += len(data[fits:])
        return len(data)

    def close(self) -> None:
        """Code may close its output; what it has printed stays."""


class Blocked(Exception):
    """Refused by the scan."""


class Worker:
    """Runs code in one lasting namespace, with kinder stand-ins for a few functions."""

    def __init__(self, setup: dict, folder: str, names: dict, image: Image.Image):
        self.limits, self.files, self.bgr = setup, {}, False
        self.folder, self.path, self.size = f"{folder}/work", f"{folder}/image.png", image.size
        tempfile.tempdir = os.environ["HOME"] = os.environ["TMPDIR"] = self.folder
        warnings.simplefilter("ignore")
        image.info[STEPS] = []
        self.names = names | {"image": image, "image_path": self.path}
        self.builtins, self.stand_ins = dict(vars(builtins)), stand_ins(self)

    def run(self, code: str) -> tuple[dict, bytes]:
        """One call: the reply to the trainer (but for its id), and the pixels that follow it."""
        self.notes, self.flags, self.shown, self.more = [], set(), {}, 0
        self.written, self.reloaded, self.drawn = set(), set(), set()
        self.output, self.error = Capture(self.limits["text"]), None
        self.before = {name: id(value) for name, value in self.names.items()}
        for act in lambda: self.execute(code), self.collect:
            self.reset()
            try:
                act()
            except SystemExit as end:
                if end.code != "return":
                    self.note("exit() ends this code only")
            except BaseException as problem:    # on purpose: what code raises is its result
                self.reset()                    # it may have replaced what we describe it with
                self.error = self.error or self.describe(problem)
        self.reset()
        shown = [(self.to_limits(image), source) for _, image, source in self.shown.values()]
        for count, what in (self.more, "images"), (self.output.lost, "bytes of output"):
            if count:
                self.note(f"{count} more {what} not shown")
        return {"text": self.output.getvalue().decode("utf-8", "replace"), "error": self.error,
                "blocked": (self.error or "").startswith("Blocked: "),
                "flags": sorted(self.flags), "notes": self.notes,
                "images": [{"size": image.size, "source": source, "steps": image.info.get(STEPS)}
                           for image, source in shown],
                }, b"".join(image.tobytes() for image, _ in shown)

    def reset(self) -> None:
        """Undo what code may have done to the interpreter: for order, not for safety."""
        sys.settrace(None)
        sys.setprofile(None)
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.setrecursionlimit(1000)
        vars(builtins).update(self.builtins)
        for owner, name, function in self.stand_ins:
            setattr(owner, name, function)
        os.chdir(self.folder)
        sys.stdout = sys.stderr = io.TextIOWrapper(
            self.output, "utf-8", "backslashreplace", write_through=True)

    def execute(self, code: str) -> None:
        code, self.notes = repair(code)
        tree = ast.parse(code, "<code>")
        if call := forbidden_call(tree):
            raise Blocked(f"{call}; deleting, moving, renaming and starting processes is refused")
        self.bgr = (self.bgr or "imread" in code) and "2RGB" not in code     # cv2: blue first
        self.names |= {"display": self.display, "__display__": self.display, "open": self.open,
                       "__return__": self.leave, "__lower__": self.lower, "__whole__": self.whole,
                       "input": self.input}
        exec(compile(rewrite(tree), "<code>", "exec"), self.names)

    def collect(self) -> None:
        """What the code left behind: open figures, files, or else its newest image."""
        if "matplotlib.pyplot" in sys.modules:
            self.show_figures()
        old, self.files = self.files, self.listing()
        new = [p for p in self.files if self.files[p] != old.get(p) and p not in self.written
               and p.lower().endswith(PICTURES) and not os.path.basename(p).startswith("tmp")]
        broken = []
        for path in sorted(new, key=self.files.get)[:20]:
            try:
                self.show(pillow_open(path), "file")
            except Exception:                   # decoders raise anything over bytes of code's own
                broken.append(os.path.basename(path))
        for what, names in ("no image in", broken), ("not looked at", new[20:]):
            if names:
                self.note(f"{what} {len(names)} files: {', '.join(names[:2])[:80]}")
        if not (self.shown or self.output.tell() or self.error):
            for name, value in reversed(self.names.items()):
                if self.before.get(name) != id(value) and not name.startswith("_"):
                    if (image := self.as_image(value)) is not None:
                        self.note(f"nothing was shown; this is {name}")
                        return self.show(image, "value")

    def listing(self) -> dict[str, tuple]:
        """At most three folders deep: each path with what tells a new file from an old one."""
        paths = (path for deep in ("*", "*/*", "*/*/*") for path in
                 glob.iglob(f"{glob.escape(self.folder)}/{deep}"))
        return {path: (status.st_mtime_ns, status.st_size, status.st_ino)
                for path in itertools.islice(paths, 5000) if (status := os.lstat(path))}

    def describe(self, problem: BaseException) -> str:
        """One short line: type, message, line of the code."""
        try:
            text = " ".join(str(problem)[:2000].split()).replace(os.path.dirname(self.folder), "")
            lines = [line for frame, line in traceback.walk_tb(problem.__traceback__)
                     if frame.f_code.co_filename == "<code>"]
            if isinstance(problem, SyntaxError):
                text, lines = problem.msg, [problem.lineno]
            if isinstance(problem, FileNotFoundError):
                text += f"; files here: {sorted(map(os.path.basename, self.listing()))[:8]}"
            where = f" (line {lines[-1]})" if lines else ""
        except BaseException:                   # its __str__ is the code's as well
            text = where = ""
        kind = type(problem).__name__
        return f"{kind}: {text}"[:self.limits["error"] - len(where)] + where

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def show(self, image: Image.Image, source: str, path: str | None = None) -> None:
        """Keep a copy of what is shown: the code may go on painting."""
        image = flat(image)
        if path:
            self.written.add(path)
            self.shown.pop(path, None)          # it was overwritten
        if min(image.size) == 0 or max(image.size) > THIN * min(image.size):
            return self.note(f"image of {image.width}x{image.height} is too thin to show")
        pixels = digest(image)
        if pixels in self.reloaded:
            self.flags.add("io_scratch")        # written, read back, shown as it was
        if any(pixels == other[0] for other in self.shown.values()):
            return
        if len(self.shown) == self.limits["images"]:
            self.more += 1
        else:
            self.shown[path or object()] = pixels, image, source    # object(): a key of its own

    def to_limits(self, image: Image.Image) -> Image.Image:
        """Shrink or enlarge to what a vision encoder takes."""
        w, h = image.size
        if (longest := max(w, h)) > LARGE:
            w, h = math.ceil(w * LARGE / longest), math.ceil(h * LARGE / longest)
        if (shortest := min(w, h)) < SMALL:
            w, h = round(w * SMALL / shortest), round(h * SMALL / shortest)
        if (w, h) == image.size:
            return image
        self.note(f"image resized from {image.width}x{image.height} to {w}x{h}")
        return image.resize((w, h))

    def display(self, *values: object) -> None:
        """As a notebook does with the value of the last line."""
        for value in values:
            first = value[0] if isinstance(value, (list, tuple)) and value else value
            if (image := self.as_image(value)) is not None:
                self.show(image, "value")
            elif value is not None and not type(first).__module__.startswith("matplotlib"):
                print(repr(value))

    def leave(self, value: object) -> None:
        self.display(value)
        raise SystemExit("return")

    def input(self, *_) -> None:
        raise EOFError("input() is not available, nobody would answer")

    def lower(self, bound: object) -> object:
        """The start of a slice: numpy would count a negative one from the far end."""
        bound = self.whole(bound, math.floor)
        if isinstance(bound, (int, np.integer)) and bound < 0:
            self.note(f"slice start {bound} set to 0")
            return 0
        return bound

    def whole(self, bound: object, towards=math.ceil) -> object:
        if isinstance(bound, (float, np.floating)):
            self.note("slice bounds rounded to whole pixels")
            return towards(bound)
        return bound

    def as_image(self, value: object) -> Image.Image | None:
        if isinstance(value, Image.Image):
            return value
        if isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.size > 1000:
            if value.ndim == 2 or value.ndim == 3 and value.shape[2] in (1, 3, 4):
                return self.from_array(value, self.bgr)
        return None

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
        """A slice of an array as large as the input is a crop; its address says from where."""
        whole = array
        while isinstance(getattr(whole, "base", None), np.ndarray):
            whole = whole.base
        if isinstance(whole, np.ndarray) and whole.shape[1::-1] == self.size:
            start, origin = (a.__array_interface__["data"][0] for a in (array, whole))
            y, x = divmod(start - origin, whole.strides[0])
            x //= whole.strides[1]
            image.info[STEPS] = [[x, y, x + image.width, y + image.height]]
        return image            # if strided or flipped, the trainer finds other pixels

    def to_read(self, file: object) -> object:
        """The path if it exists; else our file of that name; else, if INVENTED, the input."""
        if not isinstance(file, (str, os.PathLike)) or os.path.exists(file):
            return file
        name = os.path.basename(file)
        if os.path.isfile(mine := os.path.join(self.folder, name)):
            self.note(f"{str(file)[-80:]} not found: took {name}")
            return mine
        stem, extension = os.path.splitext(name)
        if extension.lower() in PICTURES and (
                os.path.isabs(file) or INVENTED.fullmatch(stem)):
            self.note(f"{str(file)[-80:]} not found: took the input image")
            return self.path
        return file

    def to_write(self, file: object, extension: str = "") -> object:
        """A path in the working folder, with its folders made."""
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
        writes = set(mode) & set("wax+")
        return open(self.to_write(file) if writes else self.to_read(file), mode, *rest, **options)

    def is_own(self, file: object) -> bool:
        return isinstance(file, (str, os.PathLike)) and self.folder in os.path.abspath(file)

    def step(self, image: Image.Image, result: Image.Image, *step) -> Image.Image:
        """Note how `result` came from `image`, if that itself came from the input."""
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
        area = (x1 - x0) * (y1 - y0)
        x0, y0, x1, y1 = max(x0, 0), max(y0, 0), min(x1, width), min(y1, height)
        if x0 >= x1 or y0 >= y1:
            self.flags.add("invalid_coords")
            raise ValueError(f"{said} is empty or outside the {width}x{height} image")
        if (inside := (x1 - x0) * (y1 - y0)) < area:
            how.append("clamped to the image")
            if inside < 0.9 * area:             # ours: more than a tenth of the box was outside
                self.flags.add("invalid_coords")
        kept = math.floor(x0), math.floor(y0), math.ceil(x1), math.ceil(y1)
        if list(kept) != given:
            self.note(f"{said} -> {kept}: {', '.join(how) or 'rounded outwards'}")
        return kept

    def show_figures(self) -> None:
        plt = sys.modules["matplotlib.pyplot"]
        for figure in map(plt.figure, plt.get_fignums()):
            if figure.axes and figure not in self.drawn:
                figure.canvas.draw()
                self.show(Image.fromarray(np.asarray(figure.canvas.buffer_rgba())), "figure")
        plt.close("all")
