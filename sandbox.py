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
            the time limit. If the code may come from an attacker, and not just from a policy that
            likes rewards, put the whole node into a VM.
Forged      Code shares its process with the worker, so it can read its call's id there and answer
            for itself: its text, its error, its notes, and that it cut beyond the image or read a
            file back, are its own word. It cannot forge a box, for the trainer makes the same
            pixels itself; nor that it showed something new, its time, or the reply to another call.
"""

import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

import numpy as np
from PIL import Image

from kit.boxes import Box, iou
from kit.pictures import upright_rgb
from kit.sandbox_looks import UPRIGHT, find, is_edit, repeated, same_pixels
from kit.sandbox_server import pack, read, read_json, ready, remove
from kit.sandbox_server import seconds_without_core, the_server
from kit.sandbox_stand_ins import digest
from kit.sandbox_walls import WALLS, missing_walls, room

HUNG = 10.0  # ours: seconds after which a server that forks no worker is given up


@dataclass(frozen=True)
class Limits:
    seconds: float = 10.0  # as in Thyme: wall clock of a call; then the worker is killed
    start: float = 30.0  # wall clock of a worker's start; then the machine is to blame
    memory: int = 2 << 30  # bytes of address space
    file: int = 16 << 20  # bytes in one file, above those of one as large as the input
    disk: int = 64 << 20  # bytes in the private folder, above those of four such files
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
    "invalid_coords" (a box off the image), "no_op" (only what had been shown before, and not larger
    than then), "io_scratch" (the same, by an image that was saved, loaded, and shown as it was).
    """

    text: str = ""
    images: list[Image.Image] = field(default_factory=list)
    boxes: list[Box | None] = field(default_factory=list)  # in the input image; None: no crop
    sources: list[str] = field(default_factory=list)  # verified: crop, edited; else file, ...
    error: str | None = None
    timed_out: bool = False
    blocked: bool = False  # refused by the scan, never run
    restarted: bool = False  # earlier variables are gone
    environment: str | None = None  # a failure of the sandbox itself: never a red line
    notes: list[str] = field(default_factory=list)  # one line per repair
    seconds: float = 0.0
    red_lines: list[str] = field(default_factory=list)


class View(NamedTuple):
    """An image that was shown: where it is in the input image (None: no crop), how it is laid down
    or that it is "edited", its size in pixels, and the digest of them."""

    box: Box | None
    source: str
    way: str
    pixels: int
    digest: bytes
    reloaded: bool = False  # from a file of the code's own, as it was


class Sandbox(AbstractContextManager):
    """One trajectory: a worker that starts at the first `run` and is gone after `close`.

    Variables, functions and imports persist from call to call. A Sandbox belongs to one thread
    at a time; any number of them may live side by side. Raises RuntimeError on a system that
    cannot confine code, unless `allow_weak`.
    """

    socket = None  # to the worker, while there is one

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
        self.image = upright_rgb(image).copy()  # to check crops with
        self.limits = limits
        whole = View((0, 0, *self.image.size), "crop", UPRIGHT, math.prod(self.image.size), b"")
        self.views, self.closing = [whole], threading.Lock()  # what has been shown so far
        self.started = self.lost = False  # lost: did a failure of ours take variables and files?

    def __exit__(self, *_) -> None:
        self.close()

    def __del__(self) -> None:
        if self.socket:
            self._kill()
            self.status.close()

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
                self.lost = bool(self._end()[1])
            if not self.socket:
                seen.restarted = self.started
                self._start()
        except (OSError, EOFError) as problem:
            seen.environment = f"the sandbox did not start: {str(problem) or 'its worker ended'}"
        else:
            if seen.restarted:
                seen.notes.append("restarted: variables and files are gone")
            self._call(code, seen)
            missing = (seen.error or "").startswith(("NameError", "FileNotFoundError"))
            if self.lost and seen.restarted and missing:
                seen.environment = "variables and files were lost to a failure of ours"
            self.lost = bool(seen.environment) and not self.socket
        seen.red_lines += ["sandbox_error"] * bool(seen.error and not seen.environment)
        seen.seconds = time.monotonic() - began
        return seen

    def _start(self) -> None:
        """Have the server fork a worker, hand it the image, wait until it is walled in."""
        self.pidfd, self.server = None, the_server()  # which may take its time to start
        deadline = (began := time.monotonic()) + self.limits.start
        (self.socket, channel), (self.status, status) = socket.socketpair(), socket.socketpair()
        try:
            with channel, status, open(os.memfd_create("image"), "wb") as pixels:
                self.image.save(pixels, "PPM")  # a short head and the pixels, without a copy
                self.server.fork(channel, status, pixels)
            born = read_json(self.socket, deadline)
            if "failed" in born:
                raise OSError(born["failed"])
            self.pid, self.folder = born["pid"], born["folder"]
            self.pidfd = os.pidfd_open(self.pid)  # a pid may be reused, this may not
            setup = asdict(self.limits) | {"walls": list(self.walls), "shape": self.image.size}
            self.socket.settimeout(max(deadline - time.monotonic(), 0.01))
            self.socket.sendall(pack(setup))
            self._protection = read_json(self.socket, deadline)
            if "failed" in self._protection:
                raise OSError(self._protection["failed"])
        except (OSError, EOFError):
            if self.pidfd is None and time.monotonic() - began > HUNG:
                self.server.process.kill()  # its workers end too; the next start gets another
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
            with suppress(ProcessLookupError):  # it ended after its reply; the next call will see
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
        shown = [self._read_view(item, deadline) for item in reply["images"]]
        text, error = plain(reply["text"], self.limits.text), reply["error"]
        error = None if error is None else one_line(error, self.limits.error) or "Error"
        notes = [one_line(note, 200) for note in reply["notes"][:10]]
        red_lines = ["invalid_coords"] * ("invalid_coords" in reply["flags"])

        seen.text, seen.error, seen.blocked = text, error, reply["blocked"] is True
        seen.images, views = [image for image, _ in shown], [view for _, view in shown]
        seen.boxes, seen.sources = [v.box for v in views], [v.source for v in views]
        seen.notes, seen.red_lines = seen.notes + notes, red_lines
        if self._only_repeats(views):
            red_lines += ["io_scratch"] * any(v.reloaded for v in views) + ["no_op"]

    def _read_view(self, item: dict, deadline: float) -> tuple[Image.Image, View]:
        """An image that a reply announces as {"size", "source", "steps", "reloaded"}."""
        (w, h), limits, source = item["size"], self.limits, item["source"]
        right_size = (
            type(w) is type(h) is int
            and limits.shortest <= min(w, h)
            and w * h <= limits.longest**2
            and max(w, h) <= limits.ratio * min(w, h)
        )
        if not right_size or source not in ("file", "figure", "show", "value"):
            raise ValueError(f"wrong image {w}x{h}")
        raw = read(self.socket, w * h * 3, deadline, self._check_disk)
        image = Image.frombytes("RGB", (w, h), raw)
        box, way = verified(self.image, image, item["steps"])
        source = ("edited" if way == "edited" else "crop") if box else source
        return image, View(box, source, way, w * h, digest(image), item["reloaded"] is True)

    def _only_repeats(self, views: list[View]) -> bool:
        """Did the call show images, and the trajectory each of them before? Then remember them."""
        known = [any(same_view(view, old) for old in self.views) for view in views]
        self.views += views
        return bool(known) and all(known)

    def _check_disk(self) -> None:
        """Where there is no private tmpfs, nobody else adds up what all the files hold."""
        if "tmpfs" not in self._protection["disk"]:
            with suppress(OSError):  # no fork now: the next time
                du = subprocess.run(["du", "-sk", self.folder], capture_output=True).stdout.split()
                if du and int(du[0]) << 10 > self.limits.disk + 4 * room(self.image.size):
                    raise ValueError(f"more than {self.limits.disk >> 20} MB written")

    def _end(self, patience: float = 0.0) -> tuple[str | None, str | None]:
        """Kill the worker. If it had ended before, say why: (the code's error, our failure)."""
        alone = self.pidfd is not None and ready(self.pidfd, patience)
        self._kill()
        try:
            with self.status:  # which waits for no worker that never said its pid
                patience = time.monotonic() + 5 * (self.pidfd is not None)
                ended = read_json(self.status, patience)["exit"]
        except (OSError, EOFError):  # init has reaped
            return None, "the sandbox server died"
        if not alone:
            return "RuntimeError: the process closed its channel", None
        if ended == -signal.SIGKILL:  # the code cannot: kill is refused
            return None, "the worker was killed from outside (out of memory?)"
        how = signal.Signals(-ended).name if ended < 0 else f"exit code {ended}"
        return f"RuntimeError: the process ended ({how})", None

    def _kill(self) -> None:
        if self.pidfd is not None:
            with suppress(OSError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
                ready(self.pidfd, 10)
            os.close(self.pidfd)
            remove(self.folder)
        self.socket.close()
        self.socket = None


def same_view(new: View, old: View) -> bool:
    """The same pixels; or boxes that overlap by more than 95 % (intersection over union), laid down
    in the same way, and not twice as many pixels as before. Each edit of a crop is a view of its
    own, but a file of the code's own is none."""
    if new.box is None or old.box is None or new.digest == old.digest:
        return new.digest == old.digest
    alike = new.reloaded or new.way == old.way != "edited"
    return alike and new.pixels < 2 * old.pixels and iou(new.box, old.box) > 0.95


def verified(original: Image.Image, shown: Image.Image, steps: object) -> tuple[Box | None, str]:
    """The box of a crop in the original, rounded outwards, and the way it is shown: how it lies, or
    "edited". None unless it is truly a crop.

    It is one if the steps that the worker claims, repeated here on the trainer's own copy of the
    image, give the pixels that were shown, or if a search finds them in it. It is an edited crop if
    `is_edit` says so of what the steps give.
    """
    pixels = np.asarray(shown)
    claimed = repeated(original, steps)
    if claimed and same_pixels(np.asarray(claimed.image), pixels):
        return claimed.box, claimed.way
    if found := repeated(original, find(pixels, np.asarray(original))):
        return found.box, found.way
    if claimed and claimed.image.size == shown.size and is_edit(claimed.image, shown):
        return claimed.box, "edited"
    return None, ""


def plain(text: object, limit: int) -> str:
    """At most `limit` characters; a lone surrogate becomes ?."""
    return str(text)[:limit].encode("utf-8", "replace").decode()


def one_line(text: object, limit: int) -> str:
    return plain(" ".join(str(text).split()), limit)


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
