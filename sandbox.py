"""sandbox.py: run the policy's Python and hand back what it showed. (First version, walls follow.)"""

import argparse
import ast
import builtins
import ctypes
import io
import json
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field

from PIL import Image, ImageOps

Box = tuple[int, int, int, int]


@dataclass(frozen=True)
class Limits:
    seconds: float = 10.0
    memory: int = 2 << 30
    file: int = 16 << 20
    disk: int = 64 << 20
    text: int = 20_000
    error: int = 500
    images: int = 5
    side: int = 2048
    starting: float = 30.0


@dataclass
class Observation:
    text: str = ""
    images: list = field(default_factory=list)
    boxes: list = field(default_factory=list)
    sources: list = field(default_factory=list)
    error: str | None = None
    timed_out: bool = False
    blocked: bool = False
    restarted: bool = False
    environment: str | None = None
    notes: list = field(default_factory=list)
    seconds: float = 0.0
    red_lines: list = field(default_factory=list)


def pack(header, payload=b""):
    data = json.dumps(header).encode()
    return struct.pack(">I", len(data)) + data + payload


def read(sock, size, deadline=None):
    data = bytearray()
    while len(data) < size:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            sock.settimeout(left)
        part = sock.recv(min(size - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def read_header(sock, deadline=None, limit=1 << 18):
    size, = struct.unpack(">I", read(sock, 4, deadline))
    if size > limit:
        raise ValueError(f"header of {size} bytes")
    return json.loads(read(sock, size, deadline))


class Server:
    def __init__(self):
        self.lock = threading.Lock()
        self.root = tempfile.mkdtemp(prefix="codev-sandbox-")
        self.control, other = socket.socketpair()
        environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1",
                       "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
                       "MPLBACKEND": "Agg", "MPLCONFIGDIR": self.root}
        self.process = subprocess.Popen(
            [sys.executable, "-I", os.path.abspath(__file__), "--server", str(other.fileno())],
            pass_fds=[other.fileno()], env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, start_new_session=True, cwd="/")
        other.close()
        read_header(self.control)
        self.owner = os.getpid()
        self.count = 0

    def ask(self, request, fd):
        with self.lock:
            data = pack(request)
            socket.send_fds(self.control, [data[:4]], [fd])
            self.control.sendall(data[4:])
            return read_header(self.control)


_server = None
_server_lock = threading.Lock()


def server():
    global _server
    with _server_lock:
        if _server is None or _server.owner != os.getpid() or _server.process.poll() is not None:
            _server = Server()
        return _server


class Sandbox:
    def __init__(self, image, limits=Limits(), allow_weak=False):
        self.image = ImageOps.exif_transpose(image).convert("RGB")
        self.limits = limits
        self.socket = None
        self.history = [((0, 0, *self.image.size), self.image.tobytes())]
        self.lost = False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    @property
    def protection(self):
        return {}

    def start(self):
        self.server = server()
        self.socket, other = socket.socketpair()
        with self.server.lock:
            self.server.count += 1
            number = self.server.count
        self.folder = os.path.join(self.server.root, str(number))
        os.makedirs(self.folder)
        with other:
            self.pid = self.server.ask({"op": "fork"}, other.fileno())["pid"]
        setup = {"folder": self.folder, "size": self.image.size, "limits": vars(self.limits)}
        self.socket.settimeout(self.limits.starting)
        self.socket.sendall(pack(setup, self.image.tobytes()))
        read_header(self.socket, time.monotonic() + self.limits.starting)

    def close(self):
        if self.socket is None:
            return "never started"
        self.socket.close()
        self.socket = None
        os.kill(self.pid, signal.SIGKILL)
        status = self.server.ask({"op": "reap", "pid": self.pid}, 0)["status"]
        subprocess.run(["rm", "-rf", "--", self.folder])
        return status

    def run(self, code):
        began = time.monotonic()
        seen = Observation()
        try:
            if self.socket is None:
                self.start()
                seen.restarted = self.lost
                self.lost = False
                if seen.restarted:
                    seen.notes.append("the sandbox was restarted: variables and files are gone")
        except (OSError, EOFError) as problem:
            seen.environment = seen.error = f"the worker did not start: {problem!r}"
            return seen
        deadline = time.monotonic() + self.limits.seconds
        key = os.urandom(8).hex()
        try:
            self.socket.settimeout(self.limits.seconds)
            self.socket.sendall(pack({"id": key, "code": code}))
            reply = read_header(self.socket, deadline)
            if reply["id"] != key:
                raise ValueError("wrong id")
            self.fill(seen, reply, deadline)
        except TimeoutError:
            seen.timed_out = self.lost = True
            seen.error = f"TimeoutError: stopped after {self.limits.seconds:g} s"
            self.close()
        except (EOFError, OSError):
            self.lost = True
            status = self.close()
            seen.error = f"RuntimeError: the process ended ({status})"
        except (ValueError, KeyError, TypeError, RecursionError) as problem:
            self.lost = True
            seen.error = f"RuntimeError: broken reply ({problem})"
            self.close()
        if seen.error and not seen.environment:
            seen.red_lines.append("sandbox_error")
        seen.seconds = time.monotonic() - began
        return seen

    def fill(self, seen, reply, deadline):
        seen.text, seen.error, seen.blocked = reply["text"], reply["error"], reply["blocked"]
        seen.notes += reply["notes"]
        seen.red_lines += reply["flags"]
        repeats = []
        for item in reply["images"]:
            w, h = item["size"]
            image = Image.frombytes("RGB", (w, h), read(self.socket, w * h * 3, deadline))
            box = verified_box(self.image, image, item["recipe"])
            seen.images.append(image)
            seen.boxes.append(box)
            seen.sources.append("crop" if box else item["source"])
            repeats.append(any(raw == image.tobytes() or box and iou(box, old) > 0.95
                               for old, raw in self.history if old or True))
        self.history += [(b, i.tobytes()) for b, i in zip(seen.boxes, seen.images)]
        if repeats and all(repeats):
            seen.red_lines.append("no_op")


def iou(a, b):
    if a is None or b is None:
        return 0.0
    w = min(a[2], b[2]) - max(a[0], b[0])
    h = min(a[3], b[3]) - max(a[1], b[1])
    both = max(w, 0) * max(h, 0)
    area = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1])
    return both / (area - both)


def verified_box(original, shown, recipe):
    if recipe is None:
        return None
    image = original
    x0, y0, x1, y1 = 0.0, 0.0, *map(float, image.size)
    for step in recipe:
        w, h = image.size
        a, b, c, d = step["box"]
        if not (0 <= a < c <= w and 0 <= b < d <= h):
            return None
        if step["size"] is None:
            image = image.crop((a, b, c, d))
        else:
            if not all(1 <= s <= 4096 for s in step["size"]):
                return None
            image = image.resize(step["size"], step["filter"], (a, b, c, d))
        sx, sy = (x1 - x0) / w, (y1 - y0) / h
        x0, y0, x1, y1 = x0 + a * sx, y0 + b * sy, x0 + c * sx, y0 + d * sy
    if image.size != shown.size or image.tobytes() != shown.tobytes():
        return None
    return (math.floor(x0 + 1e-6), math.floor(y0 + 1e-6),
            math.ceil(x1 - 1e-6), math.ceil(y1 - 1e-6))


# ------------------------------------------------------------------ server and worker

RECIPE = "recipe"
PIL_OPEN, PIL_SAVE, PIL_CROP = Image.open, Image.Image.save, Image.Image.crop
PIL_SHOW, PIL_RESIZE = Image.Image.show, Image.Image.resize


def serve(fd):
    import gc
    import re, random, glob, shutil, string, collections, itertools, functools, statistics, datetime
    import pathlib
    import PIL, numpy
    from PIL import ImageDraw, ImageFont, ImageFilter, ImageEnhance
    names = {m.__name__: m for m in (re, random, glob, shutil, string, collections, itertools,
                                     functools, statistics, datetime, PIL, numpy, math, os, sys,
                                     io, json, time)}
    names |= dict(np=numpy, Image=Image, ImageDraw=ImageDraw, ImageFont=ImageFont,
                  ImageOps=ImageOps, ImageFilter=ImageFilter, ImageEnhance=ImageEnhance,
                  Path=pathlib.Path)
    try:
        import cv2
        names |= dict(cv2=cv2, cv=cv2)
    except ImportError:
        pass
    try:
        import matplotlib, matplotlib.pyplot
        names |= dict(matplotlib=matplotlib, plt=matplotlib.pyplot)
    except ImportError:
        pass
    Image.init()
    control = socket.socket(fileno=fd)
    gc.freeze()
    control.sendall(pack({"ready": True}))
    while True:
        start, fds, _, _ = socket.recv_fds(control, 4, 1)
        if not start:
            os._exit(0)
        request = json.loads(read(control, struct.unpack(">I", start)[0]))
        if request["op"] == "fork":
            pid = os.fork()
            if pid == 0:
                os.dup2(fds[0], 3)
                os.closerange(4, 4096)
                libc.prctl(1, signal.SIGKILL, 0, 0, 0)
                work(socket.socket(fileno=3), names)
            control.sendall(pack({"pid": pid}))
        else:
            _, status = os.waitpid(request["pid"], 0)
            code = os.waitstatus_to_exitcode(status)
            control.sendall(pack({"status": signal.Signals(-code).name if code < 0
                                  else f"exit status {code}"}))
        for f in fds:
            os.close(f)


libc = ctypes.CDLL(None, use_errno=True)


class Worker:
    def __init__(self, setup, names, image):
        self.limits = setup["limits"]
        self.work = os.path.join(setup["folder"], "work")
        os.mkdir(self.work)
        self.path = os.path.join(setup["folder"], "image.png")
        image.save(self.path, compress_level=0)
        image.info[RECIPE] = []
        self.names = names | {"__name__": "__main__", "image": image, "image_path": self.path,
                              "display": self.display}
        self.notes, self.flags, self.shown = [], set(), {}

    def note(self, text):
        if text not in self.notes and len(self.notes) < 10:
            self.notes.append(text[:200])

    def show(self, image, source="show", key=None):
        image_ = image.convert("RGB")
        if min(image.size) and max(image.size) / min(image.size) > 100:
            return self.note(f"image {image.size} is too thin to show")
        self.shown[key or object()] = (image_.copy(), source, image.info.get(RECIPE))

    def display(self, value):
        if isinstance(value, Image.Image):
            self.show(value, "value")
        elif value is not None:
            print(repr(value)[:2000])

    def install(self):
        worker = self

        def crop(image, box=None):
            if box is None:
                box = (0, 0, *image.size)
            clean = worker.fix(box, *image.size)
            result = PIL_CROP(image, clean)
            if RECIPE in image.info:
                result.info[RECIPE] = image.info[RECIPE] + [{"box": clean, "size": None}]
            return result

        def resize(image, size, resample=None, box=None, reducing_gap=None):
            result = PIL_RESIZE(image, size, resample, box, reducing_gap)
            if RECIPE in image.info and reducing_gap is None:
                step = {"box": box or (0, 0, *image.size), "size": size, "filter": resample}
                result.info[RECIPE] = image.info[RECIPE] + [step]
            return result

        def save(image, fp, format=None, **options):
            if isinstance(fp, (str, os.PathLike)):
                fp = os.path.join(worker.work, os.path.basename(os.fspath(fp)))
                if not os.path.splitext(fp)[1]:
                    fp += ".png"
                if fp.lower().endswith((".jpg", ".jpeg")):
                    image = image.convert("RGB")
            PIL_SAVE(image, fp, format, **options)
            if isinstance(fp, str):
                worker.show(image, "file", fp)

        Image.Image.crop, Image.Image.resize, Image.Image.save = crop, resize, save
        Image.Image.show = lambda image, *a, **k: worker.show(image)

        def no_input(*_):
            raise EOFError("input() is not available")
        builtins.input = no_input

    def fix(self, box, w, h):
        numbers = [float(v) for v in box]
        if len(numbers) != 4 or not all(map(math.isfinite, numbers)):
            self.flags.add("invalid_coords")
            raise ValueError(f"crop box {box} needs 4 finite numbers")
        a, b, c, d = numbers
        x0, x1, y0, y1 = min(a, c), max(a, c), min(b, d), max(b, d)
        if (x0, y0) != (a, b):
            self.note("crop corners were reversed: sorted")
        full = math.floor(x0), math.floor(y0), math.ceil(x1), math.ceil(y1)
        kept = max(full[0], 0), max(full[1], 0), min(full[2], w), min(full[3], h)
        if kept[0] >= kept[2] or kept[1] >= kept[3]:
            self.flags.add("invalid_coords")
            raise ValueError(f"crop box {tuple(numbers)} is empty or outside the {w}x{h} image")
        if kept != full:
            self.note(f"crop box clamped to {kept}")
            inside = (kept[2] - kept[0]) * (kept[3] - kept[1])
            if inside < 0.9 * (full[2] - full[0]) * (full[3] - full[1]):
                self.flags.add("invalid_coords")
        return kept

    def run(self, code):
        self.notes, self.flags, self.shown = [], set(), {}
        self.install()
        os.chdir(self.work)
        text, error = io.StringIO(), None
        sys.stdout = sys.stderr = text
        try:
            tree = ast.parse(code)
            if tree.body and isinstance(tree.body[-1], ast.Expr):
                last = tree.body[-1]
                last.value = ast.Call(ast.Name("__display__", ast.Load()), [last.value], [])
                ast.fix_missing_locations(tree)
            self.names["__display__"] = self.display
            exec(compile(tree, "<code>", "exec"), self.names)
        except SystemExit:
            self.note("exit() ends this call only")
        except BaseException as problem:      # whatever the user's code raises is its result
            error = f"{type(problem).__name__}: {problem}"[:self.limits["error"]]
        images, payload, seen = [], b"", set()
        for image, source, recipe in list(self.shown.values()):
            raw = image.tobytes()
            if (image.size, raw) in seen or len(images) == self.limits["images"]:
                continue
            seen.add((image.size, raw))
            scale = max(1, 28 / min(image.size))
            if scale > 1:
                size = tuple(math.ceil(s * scale) for s in image.size)
                recipe = recipe and recipe + [{"box": (0, 0, *image.size), "size": size,
                                               "filter": 3}]
                image = PIL_RESIZE(image, size, 3)
                raw = image.tobytes()
            images.append({"size": image.size, "source": source, "recipe": recipe})
            payload += raw
        return {"text": text.getvalue()[:self.limits["text"]], "error": error, "blocked": False,
                "notes": self.notes, "flags": sorted(self.flags), "images": images}, payload


def work(sock, names):
    setup = read_header(sock)
    size = tuple(setup["size"])
    image = Image.frombytes("RGB", size, read(sock, size[0] * size[1] * 3))
    worker = Worker(setup, names, image)
    sock.sendall(pack({"ready": True}))
    while True:
        try:
            request = read_header(sock, limit=1 << 24)
        except EOFError:
            os._exit(0)
        header, payload = worker.run(request["code"])
        sock.sendall(pack(header | {"id": request["id"]}, payload))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--server"]:
        serve(int(sys.argv[2]))
    else:
        with Sandbox(Image.linear_gradient("L").convert("RGB")) as box:
            print(box.run(sys.argv[1] if sys.argv[1:] else "print(1/0)"))
