"""
sandbox.py: run the policy's Python on an image, and hand back what it showed.

Concept     A tool call is a program. Whatever it does has a value, errors included: they teach.
Paper       CodeV, arXiv:2511.19661, Appendix 13 (what the sandbox does for the policy)
In          one image per trajectory, then one piece of code per call
Out         an Observation: text, images with verified boxes, error, repairs, red lines
Left out    containers, cgroups, an allow-list of system calls; anything but Linux
Read next   data.py (what is asked), rollout.py (who calls `run`)

Contained   As root and as an ordinary user, by the kernel: files outside a private folder, the
            input image, other processes, signals, threads, the network, memory, disk and time.
            The trainer starts one server, which imports the libraries and forks a worker for
            each trajectory; the worker walls itself in before it sees any code. The trainer reads
            JSON and raw pixels from it, and takes both for forged until they are checked.
Not         Kernel bugs; that a file exists and how big it is (`stat` works); one busy core up to
            the time limit; lies in the code's own output (so a crop is only called a crop if
            the trainer can cut the same pixels itself). If the code may come from an attacker,
            and not just from a policy that likes rewards, put the whole node into a VM.
"""

import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from PIL import Image, ImageOps

from kit.boxes import Box, iou, outwards
from kit.sandbox_server import pack, read, read_json, remove, the_server
from kit.sandbox_stand_ins import digest
from kit.sandbox_walls import WALLS, missing_walls

MOST_STEPS = 8  # ours: crops and resizes that the trainer repeats to verify one image
MOST_WORK = 1 << 24  # ours: pixels that it is willing to make for that


@dataclass(frozen=True)
class Limits:
    seconds: float = 10.0  # as in Thyme: wall clock of a call; then the worker is killed
    start: float = 30.0  # wall clock of a worker's start; then the machine is to blame
    memory: int = 2 << 30  # bytes of address space
    file: int = 16 << 20  # bytes in one file
    disk: int = 64 << 20  # bytes in the private folder
    text: int = 20_000  # bytes of output per call
    error: int = 300  # characters of an error message
    images: int = 5  # as in the released code: images per call
    shortest: int = 28  # pixels, a side of an image shown: one visual token of Qwen2.5-VL
    longest: int = 2048  # ours: pixels, a side of an image shown; larger ones are shrunk
    ratio: int = 100  # ours: longest by shortest side; thinner images are not shown


@dataclass
class Observation:
    """What one call showed.

    Red lines are what a reward should punish: "sandbox_error" (an error of the code),
    "invalid_coords" (a box off the image), "io_scratch" (an image that was saved, loaded, and shown
    as it was), "no_op" (only images that had been shown before).
    """

    text: str = ""
    images: list[Image.Image] = field(default_factory=list)
    boxes: list[Box | None] = field(default_factory=list)  # in the input image; None: no crop
    sources: list[str] = field(default_factory=list)  # verified: crop; else file, figure, ...
    error: str | None = None
    timed_out: bool = False
    blocked: bool = False  # refused by the scan, never run
    restarted: bool = False  # earlier variables are gone
    environment: str | None = None  # a failure of the sandbox itself: never a red line
    notes: list[str] = field(default_factory=list)  # one line per repair
    seconds: float = 0.0
    red_lines: list[str] = field(default_factory=list)


class View(NamedTuple):
    """An image that was shown: where it is in the input image (None: no crop), and its digest."""

    box: Box | None
    pixels: bytes


class Sandbox:
    """One trajectory: a worker that starts at the first `run` and is gone after `close`.

    Variables, functions and imports persist from call to call. A Sandbox belongs to one thread
    at a time; any number of them may live side by side. Raises RuntimeError on a system that
    cannot confine code, unless `allow_weak`.
    """

    def __init__(self, image: Image.Image, limits: Limits = Limits(), allow_weak: bool = False):
        missing = missing_walls()
        if missing and not allow_weak:
            raise RuntimeError(
                f"cannot wall the code in: this machine has no {' and no '.join(missing)}. Use one "
                "that has, or pass allow_weak=True (--allow-weak-sandbox) if the code may do to "
                "your files whatever you may"
            )
        if missing:
            warnings.warn(f"weak sandbox: no {' and no '.join(missing)}", stacklevel=1)
        self.walls = WALLS - set(missing.values())
        self.image = ImageOps.exif_transpose(image).convert("RGB")  # a copy to check crops with
        self.limits = limits
        self.views: list[View] = []  # what the trajectory has been shown so far
        self.socket: socket.socket | None = None
        self.started, self.closing = False, threading.Lock()

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        with self.closing:  # closing twice is fine, even from two threads
            if self.socket:
                self._end()

    @property
    def protection(self) -> dict[str, str]:
        """The walls that stand, as the worker reported before it saw any code."""
        if not self.socket:
            self._start()
        return self._protection

    def run(self, code: str) -> Observation:
        """Run `code` and say what it showed. Never raises for anything the code did."""
        began, seen = time.monotonic(), Observation()
        try:
            if self.socket and ready(self.socket):  # a forged reply, or the end of the worker
                self._end()
            if not self.socket:
                seen.restarted = self.started
                self._start()
        except (OSError, EOFError) as problem:
            seen.environment = f"the sandbox did not start: {problem or 'its worker ended'}"
        else:
            if seen.restarted:
                seen.notes.append("restarted: variables and files are gone")
            self._call(code, seen)
        if seen.error:
            seen.red_lines.append("sandbox_error")
        seen.seconds = time.monotonic() - began
        return seen

    def _start(self) -> None:
        """Have the server fork a worker, hand it the image, wait until it is walled in."""
        self.server, self.pidfd = the_server(), None
        self.socket, theirs = socket.socketpair()
        try:
            with theirs:
                born = self.server.ask({"fork": True}, theirs.fileno())
            self.pid, self.folder = born["pid"], born["folder"]
            self.pidfd = os.pidfd_open(self.pid)  # a pid may be reused, this may not
            setup = asdict(self.limits) | {"walls": list(self.walls), "shape": self.image.size}
            self.socket.settimeout(self.limits.start)
            self.socket.sendall(pack(setup) + self.image.tobytes())
            self._protection = read_json(self.socket, time.monotonic() + self.limits.start)
            if "failed" in self._protection:
                raise OSError(self._protection["failed"])
        except (OSError, EOFError):
            self._end()
            raise
        self.started = True

    def _call(self, code: str, seen: Observation) -> None:
        """Send the code, read the reply. Whatever goes wrong here costs the worker its life."""
        seconds, waited = self.limits.seconds, seconds_without_core(self.pid)
        deadline = time.monotonic() + seconds
        key = os.urandom(8).hex()  # no reply made earlier can hold it
        try:
            signal.pidfd_send_signal(self.pidfd, signal.SIGCONT)
            self.socket.settimeout(seconds)
            self.socket.sendall(pack({"id": key, "code": code}))
            self._read_reply(seen, key, deadline)
            signal.pidfd_send_signal(self.pidfd, signal.SIGSTOP)  # no work between calls
        except TimeoutError:
            waited = seconds_without_core(self.pid) - waited
            seen.timed_out = True
            if waited > 0.75 * seconds:
                seen.environment = f"machine too slow: {waited:.1f} of {seconds:g} s without a core"
            else:
                seen.error = f"TimeoutError: stopped after {seconds:g} s"
            self._end()
        except (ValueError, KeyError, TypeError, RecursionError) as problem:
            seen.error = one_line(f"RuntimeError: stopped: {problem}", self.limits.error)
            self._end()
        except (OSError, EOFError):
            seen.error, seen.environment = self._end(patience=0.2)

    def _read_reply(self, seen: Observation, key: str, deadline: float) -> None:
        """Everything here may be forged: check all of it before using any of it."""
        reply = read_json(self.socket, deadline, self._check_disk)
        if reply["id"] != key or len(reply["images"]) > self.limits.images:
            raise ValueError("wrong reply")
        images = [self._read_image(item, deadline) for item in reply["images"]]
        shown = [*zip(images, reply["images"])]
        boxes = [verified_box(self.image, image, item["steps"]) for image, item in shown]
        sources = ["crop" if box else item["source"] for box, (_, item) in zip(boxes, shown)]
        text, error = plain(reply["text"], self.limits.text), reply["error"]
        error = None if error is None else one_line(error, self.limits.error) or "Error"
        notes = [one_line(note, 200) for note in reply["notes"][:10]]
        flags = [flag for flag in ("invalid_coords", "io_scratch") if flag in reply["flags"]]

        seen.text, seen.error, seen.blocked = text, error, reply["blocked"] is True
        seen.images, seen.boxes, seen.sources = images, boxes, sources
        seen.notes += notes
        seen.red_lines = flags + ["no_op"] * self._only_repeats(seen)

    def _read_image(self, item: dict, deadline: float) -> Image.Image:
        """The pixels that a reply announces as {"size", "source", "steps"}."""
        (w, h), limits = item["size"], self.limits
        right_size = (
            type(w) is type(h) is int
            and limits.shortest <= min(w, h)
            and w * h <= limits.longest**2
            and max(w, h) <= limits.ratio * min(w, h)
        )
        if not right_size or item["source"] not in ("file", "figure", "show", "value"):
            raise ValueError(f"wrong image {w}x{h}")
        raw = read(self.socket, w * h * 3, deadline, self._check_disk)
        return Image.frombytes("RGB", (w, h), raw)

    def _only_repeats(self, seen: Observation) -> bool:
        """Did the call show images, and the trajectory each of them before? Then remember them."""
        if seen.images and not self.views:  # the first view is the input
            self.views.append(View((0, 0, *self.image.size), digest(self.image)))
        views = [View(box, digest(image)) for box, image in zip(seen.boxes, seen.images)]
        known = [any(same_view(view, old) for old in self.views) for view in views]
        self.views += views
        return bool(known) and all(known)

    def _check_disk(self) -> None:
        """Where there is no private tmpfs, nobody else adds up what all the files hold."""
        if "tmpfs" not in self._protection["disk"]:
            used = subprocess.run(["du", "-sk", self.folder], capture_output=True).stdout.split()
            if used and int(used[0]) << 10 > self.limits.disk + 3 * math.prod(self.image.size):
                raise ValueError(f"more than {self.limits.disk >> 20} MB written")

    def _end(self, patience: float = 0.0) -> tuple[str | None, str | None]:
        """Kill the worker. If it had ended before, say why: (the code's error, our failure)."""
        channel, alone, ended = self.socket, False, None
        if self.pidfd is not None:
            alone = ready(self.pidfd, patience)
            try:
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
                ready(self.pidfd, 10)
                ended = self.server.ask({"reap": self.pid})["exit"]
            except (OSError, EOFError):
                pass  # the server is gone, init has reaped
            os.close(self.pidfd)
            remove(self.folder)
        channel.close()
        self.socket = None
        if ended is None:
            return None, "the sandbox server died"
        if not alone:
            return "RuntimeError: the process closed its channel", None
        if ended == -signal.SIGKILL:  # the code cannot: kill is refused
            return None, "the worker was killed from outside (out of memory?)"
        how = signal.Signals(-ended).name if ended < 0 else f"exit code {ended}"
        return f"RuntimeError: the process ended ({how})", None


def same_view(new: View, old: View) -> bool:
    """The same pixels, or boxes that overlap by more than 95 % (intersection over union)."""
    if new.box is None or old.box is None or new.pixels == old.pixels:
        return new.pixels == old.pixels
    return iou(new.box, old.box) > 0.95


def verified_box(original: Image.Image, shown: Image.Image, steps: object) -> Box | None:
    """The box of a crop in the original, rounded outwards; None unless it is truly a crop.

    It is one if the steps that the worker claims, repeated here on the trainer's own copy of the
    image, give the very pixels that were shown.
    """
    try:
        image, (x0, y0, x1, y1) = repeated(original, steps)
        same = image.size == shown.size and image.tobytes() == shown.tobytes()
        # 127.9999999 is 128: floats are not exact.
        return outwards(x0 + 1e-6, y0 + 1e-6, x1 - 1e-6, y1 - 1e-6) if same else None
    except (TypeError, ValueError, OverflowError):
        return None  # not even steps


def repeated(original: Image.Image, steps: list[list]) -> tuple[Image.Image, tuple[float, ...]]:
    """The image that these steps lead to, and the corners of what it shows of the original.

    A step is a crop, [x0, y0, x1, y1] in pixels of the image before it, or a resize of that region,
    [x0, y0, x1, y1, width, height, filter, gap], as in Image.resize. Raises ValueError, TypeError
    or OverflowError for anything else.
    """
    if not isinstance(steps, list) or len(steps) > MOST_STEPS:
        raise ValueError(f"expected at most {MOST_STEPS} steps")
    image, work = original, 0
    left, top, right, bottom = 0.0, 0.0, *original.size
    for x0, y0, x1, y1, *resize in steps:
        w, h = image.size
        if not (0 <= x0 < x1 <= w and 0 <= y0 < y1 <= h):
            raise ValueError("a step that leaves the image")
        if resize:
            to_w, to_h, resample, gap = resize
            work += to_w * to_h
            if work > MOST_WORK or to_w < 1 or to_h < 1:
                raise ValueError("too much work")
            image = image.resize((to_w, to_h), resample, (x0, y0, x1, y1), gap)
        else:
            image = image.crop((x0, y0, x1, y1))
        sx, sy = (right - left) / w, (bottom - top) / h
        left, top, right, bottom = left + x0 * sx, top + y0 * sy, left + x1 * sx, top + y1 * sy
    return image, (left, top, right, bottom)


def plain(text: object, limit: int) -> str:
    """At most `limit` characters; a lone surrogate becomes ?."""
    return str(text)[:limit].encode("utf-8", "replace").decode()


def one_line(text: object, limit: int) -> str:
    return plain(" ".join(str(text).split()), limit)


def ready(descriptor: int | socket.socket, seconds: float = 0.0) -> bool:
    """Is there anything to read, or has the other side (or the process of a pidfd) ended?"""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def seconds_without_core(pid: int) -> float:
    """How long the process has been ready to run while others had the cores."""
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except OSError:
        return 0.0


# What each wall must stop. The scan would refuse some of it, so the code walks around the scan.
PROBES = {
    "files": "open('/etc/passwd').read()",
    "calls": "getattr(os, 'fork')() or os._exit(0)",
    "rights": "os.close(os.open('m', os.O_CREAT, 0)); open('m')",
    "sizes": "import mmap; mmap.mmap(-1, 8 << 30)",
    "disk": "for i in range(20): open(f'{i}.bin', 'wb').write(bytes(8 << 20))",
    "clock": "while True: pass",
    "channel": "os.write(3, b'....')",
}


def self_test(image: Image.Image) -> None:
    """Print which walls stand on this machine, and what happens to code that runs against each."""
    for wall, code in PROBES.items():
        with Sandbox(image, Limits(seconds=2.0), allow_weak=True) as sandbox:
            stand = sandbox.protection | {"clock": "SIGKILL from outside", "channel": "checked"}
            seen = sandbox.run(code)
            print(f"{wall:8} {stand[wall]:28} {seen.error or seen.environment or 'NOT STOPPED'}")


def main(arguments: list[str]) -> None:
    picture = Image.linear_gradient("L").convert("RGB")
    if arguments == ["--self-test"]:
        return self_test(picture)
    with Sandbox(picture) as sandbox:
        print(sandbox.run(arguments[0] if arguments else "image.crop((64, 64, 128, 128))"))


if __name__ == "__main__":
    main(sys.argv[1:])
