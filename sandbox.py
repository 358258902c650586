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

import ast
import builtins
import ctypes
import errno
import fcntl
import functools
import gc
import glob
import hashlib
import importlib
import io
import itertools
import math
import os
import re
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import traceback
import warnings
from dataclasses import asdict, dataclass, field
from json import dumps, loads           # by name: code that patches json does not reach these

import numpy as np
from PIL import Image, ImageOps

Box = tuple[int, int, int, int]         # x0, y0, x1, y1 in pixels
THIN, SMALL, LARGE = 100, 28, 2048      # sides: ratio (ours), least (Qwen2.5-VL), most (ours)
WALLS = {"files", "calls", "rights", "sizes", "disk"}       # lock_in puts them up


@dataclass(frozen=True)
class Limits:
    seconds: float = 10.0       # as in Thyme: wall clock of a call; then the worker is killed
    start: float = 30.0         # wall clock of a worker's start; then the machine is to blame
    memory: int = 2 << 30       # bytes of address space
    file: int = 16 << 20        # bytes in one file
    disk: int = 64 << 20        # bytes in the private folder
    text: int = 20_000          # bytes of output per call
    error: int = 300            # characters of an error message
    images: int = 5             # as in the released code: images per call


@dataclass
class Observation:
    """What one call showed. Red lines: invalid_coords (a box off the image), no_op (nothing
    new), io_scratch (saved, loaded, shown as it was), sandbox_error (an error of the code)."""
    text: str = ""
    images: list[Image.Image] = field(default_factory=list)
    boxes: list[Box | None] = field(default_factory=list)   # in the input image; None: no crop
    sources: list[str] = field(default_factory=list)        # verified: crop; else file, figure, ...
    error: str | None = None
    timed_out: bool = False
    blocked: bool = False                                   # refused by the scan, never run
    restarted: bool = False                                 # earlier variables are gone
    environment: str | None = None                          # our failure: never a red line
    notes: list[str] = field(default_factory=list)          # one line per repair
    seconds: float = 0.0
    red_lines: list[str] = field(default_factory=list)      # what a reward should punish


class Sandbox:
    """One trajectory: a worker that starts at the first `run` and is gone after `close`.

    Variables, functions and imports persist from call to call. A Sandbox belongs to one thread
    at a time; any number of them may live side by side.
    """

    def __init__(self, image: Image.Image, limits: Limits = Limits(), allow_weak: bool = False):
        missing = missing_walls()
        if missing and not allow_weak:
            raise RuntimeError(
                f"cannot wall the code in: this machine has no {' and no '.join(missing)}. Use one "
                "that has, or pass allow_weak=True (--allow-weak-sandbox) if the code may do to "
                "your files whatever you may")
        if missing:
            warnings.warn(f"weak sandbox: no {' and no '.join(missing)}")   # shown once
        self.walls = WALLS - set(missing.values())
        self.image = ImageOps.exif_transpose(image).convert("RGB")  # our own, to check crops with
        self.limits = limits
        self.views: list[tuple[Box | None, bytes]] = []     # what was shown so far
        self.socket: socket.socket | None = None
        self.started, self.closing = False, threading.Lock()

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        with self.closing:              # closing twice is fine, even from two threads
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
            self.pidfd = os.pidfd_open(self.pid)    # a pid may be reused, this may not
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
        key = os.urandom(8).hex()                   # no reply made earlier can hold it
        try:
            signal.pidfd_send_signal(self.pidfd, signal.SIGCONT)
            self.socket.settimeout(seconds)
            self.socket.sendall(pack({"id": key, "code": code}))
            self._read_reply(seen, key, deadline)
            signal.pidfd_send_signal(self.pidfd, signal.SIGSTOP)    # no work between calls
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
        reply, shown = read_json(self.socket, deadline, self._check_disk), []
        if reply["id"] != key or len(reply["images"]) > self.limits.images:
            raise ValueError("wrong reply")
        for item in reply["images"]:
            (w, h), source = item["size"], item["source"]
            if not (type(w) is type(h) is int and SMALL <= min(w, h) and w * h <= LARGE * LARGE
                    and max(w, h) <= THIN * min(w, h)
                    and source in ("file", "figure", "show", "value")):
                raise ValueError(f"wrong image {w}x{h}")
            raw = read(self.socket, w * h * 3, deadline, self._check_disk)
            image = Image.frombytes("RGB", (w, h), raw)
            shown.append((image, verified_box(self.image, image, item["steps"]), source))
        text, error = plain(reply["text"], self.limits.text), reply["error"]
        error = None if error is None else one_line(error, self.limits.error) or "Error"
        notes = [one_line(note, 200) for note in reply["notes"][:10]]
        flags = [f for f in ("invalid_coords", "io_scratch") if f in reply["flags"]]

        seen.text, seen.error, seen.blocked = text, error, reply["blocked"] is True
        seen.notes += notes
        seen.images = [image for image, _, _ in shown]
        seen.boxes = [box for _, box, _ in shown]
        seen.sources = ["crop" if box else source for _, box, source in shown]
        if shown and not self.views:                # the first view is the input
            self.views.append(((0, 0, *self.image.size), digest(self.image)))
        views = [(box, digest(image)) for image, box, _ in shown]
        nothing_new = views and all(any(same_view(v, old) for old in self.views) for v in views)
        seen.red_lines = flags + ["no_op"] * bool(nothing_new)
        self.views += views

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
                pass                                # the server is gone, init has reaped
            os.close(self.pidfd)
            remove(self.folder)
        channel.close()
        self.socket = None
        if ended is None:
            return None, "the sandbox server died"
        if not alone:
            return "RuntimeError: the process closed its channel", None
        if ended == -signal.SIGKILL:                # the code cannot: kill is refused
            return None, "the worker was killed from outside (out of memory?)"
        how = signal.Signals(-ended).name if ended < 0 else f"exit code {ended}"
        return f"RuntimeError: the process ended ({how})", None


def digest(image: Image.Image) -> bytes:
    return hashlib.blake2b(repr(image.size).encode() + image.tobytes()).digest()


def plain(text: object, limit: int) -> str:
    return str(text)[:limit].encode("utf-8", "replace").decode()    # a lone surrogate becomes ?


def one_line(text: object, limit: int) -> str:
    return plain(" ".join(str(text).split()), limit)


def same_view(new: tuple[Box | None, bytes], old: tuple[Box | None, bytes]) -> bool:
    """The same pixels, or boxes that overlap by more than 95 % (intersection over union)."""
    (a, pixels), (b, old_pixels) = new, old
    if a is None or b is None or pixels == old_pixels:
        return pixels == old_pixels
    w, h = (max(0, min(a[i + 2], b[i + 2]) - max(a[i], b[i])) for i in (0, 1))
    both = sum((k[2] - k[0]) * (k[3] - k[1]) for k in (a, b))
    return w * h > 0.95 * (both - w * h)


def verified_box(original: Image.Image, shown: Image.Image, steps: object) -> Box | None:
    """Repeat the crops and resizes that the worker claims, on our own copy of the image.

    Only if the very same pixels come out is it a crop, and this its box in the original, rounded
    outwards. A step is [x0, y0, x1, y1], a crop, or that and [w, h, filter, gap], a resize.
    """
    if not isinstance(steps, list) or len(steps) > 8:
        return None
    image, work = original, 4 * LARGE * LARGE       # pixels that we are willing to make for this
    (left, top), (right, bottom) = (0.0, 0.0), original.size
    try:
        for x0, y0, x1, y1, *resize in steps:
            w, h = image.size
            if not (0 <= x0 < x1 <= w and 0 <= y0 < y1 <= h):
                return None
            if resize:
                to_w, to_h, resample, gap = resize
                work -= to_w * to_h
                if work < 0 or to_w < 1 or to_h < 1:
                    return None
                image = image.resize((to_w, to_h), resample, (x0, y0, x1, y1), gap)
            else:
                image = image.crop((x0, y0, x1, y1))
            sx, sy = (right - left) / w, (bottom - top) / h
            left, top, right, bottom = left + x0 * sx, top + y0 * sy, left + x1 * sx, top + y1 * sy
    except (TypeError, ValueError, OverflowError):
        return None             # not even steps
    if image.size != shown.size or image.tobytes() != shown.tobytes():
        return None
    return (math.floor(left + 1e-6), math.floor(top + 1e-6),        # 127.9999999 is 128
            math.ceil(right - 1e-6), math.ceil(bottom - 1e-6))


def seconds_without_core(pid: int) -> float:
    """How long the process has been ready to run while others had the cores."""
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except OSError:
        return 0.0


def remove(folder: str) -> None:
    try:
        os.rmdir(folder)        # a private tmpfs leaves it empty
    except OSError:             # shutil.rmtree recurses, and the code may have nested deeply
        script = 'chmod -R u+rwx -- "$0"; rm -rf -- "$0"'
        subprocess.run(["sh", "-c", script, folder], stderr=subprocess.DEVNULL)


# Between the processes: a length (4 bytes), JSON, and perhaps raw RGB pixels.


def pack(header: dict) -> bytes:
    data = dumps(header).encode()
    return struct.pack(">I", len(data)) + data


def read(sock: socket.socket, size: int, deadline: float = math.inf, watch=None) -> bytes:
    """Exactly `size` bytes, before `deadline` however slowly they drip. watch: called meanwhile."""
    data = bytearray()
    while len(data) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer in time")
        sock.settimeout(None if left == math.inf else min(left, 0.2))
        try:
            part = sock.recv(min(size - len(data), 1 << 20))
        except TimeoutError:
            if watch:
                watch()
            continue
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def read_json(sock: socket.socket, deadline: float = math.inf, watch=None, most=1 << 18) -> dict:
    size, = struct.unpack(">I", read(sock, 4, deadline, watch))
    if size > most:
        raise ValueError(f"a reply of {size} bytes, expected at most {most}")
    return loads(read(sock, size, deadline, watch))


def ready(descriptor: int | socket.socket, seconds: float = 0.0) -> bool:
    """Is there anything to read, or has the other side (or the process of a pidfd) ended?"""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


class Server:
    """The trainer's handle on the process that forks workers. It is executed, not forked, so
    neither CUDA, nor data, nor keys, nor open files of the trainer come with it."""

    def __init__(self):
        self.owner, self.lock = os.getpid(), threading.Lock()
        self.control, theirs = socket.socketpair()
        environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "MPLBACKEND": "Agg",
                       "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
                       "TMPDIR": tempfile.gettempdir()}
        packages = [path for path in sys.path if path.endswith("-packages")]    # -I drops some
        command = [sys.executable, "-I", os.path.abspath(__file__), "--server"]
        with theirs:
            self.process = subprocess.Popen(
                [*command, str(theirs.fileno()), *packages], pass_fds=[theirs.fileno()], cwd="/",
                env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                start_new_session=True)
        try:
            read_json(self.control, time.monotonic() + 120)
        except (OSError, EOFError) as problem:
            self.process.kill()
            raise RuntimeError("the sandbox server did not start, its error is printed above; "
                               "does `python -c 'import numpy, PIL'` work?") from problem

    def ask(self, request: dict, *descriptors: int) -> dict:
        with self.lock:
            try:
                socket.send_fds(self.control, [pack(request)], descriptors)
                return read_json(self.control, time.monotonic() + 60)
            except (OSError, EOFError):
                self.process.kill()         # out of step; the next worker gets a new server
                raise


_server: Server | None = None
_starting = threading.Lock()


def the_server() -> Server:
    global _server
    with _starting:
        if not _server or _server.owner != os.getpid() or _server.process.poll() is not None:
            _server = Server()
        return _server


def serve(control: socket.socket) -> None:
    """Import once, fork a worker on request. When the trainer ends, so does all of this."""
    root, workers, me = make_root(), set(), os.getpid()
    os.environ["MPLCONFIGDIR"] = root       # where matplotlib writes its list of fonts
    names = usual_names()
    if MACHINE in MACHINES:
        call_filter()                       # made once, for all workers
    gc.freeze()                             # no collection writes to (so copies) shared memory
    control.sendall(pack({"ready": True}))
    while True:
        try:
            size, descriptors, _, _ = socket.recv_fds(control, 4, 1)
            request = loads(read(control, *struct.unpack(">I", size)))
        except (OSError, EOFError, struct.error):
            break
        if "reap" in request:
            reply = {"exit": os.waitstatus_to_exitcode(os.waitpid(request["reap"], 0)[1])}
            workers.discard(request["reap"])
        else:
            folder = tempfile.mkdtemp(dir=root)
            pid = os.fork()
            if pid == 0:
                os.dup2(descriptors[0], 3)
                os.closerange(4, 1024)
                os.dup2(1, 2)               # /dev/null
                work(socket.socket(fileno=3), folder, names, me)
            os.close(descriptors[0])
            workers.add(pid)
            reply = {"pid": pid, "folder": folder}
        control.sendall(pack(reply))
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    remove(root)


def work(channel: socket.socket, folder: str, names: dict, parent: int) -> None:
    """The life of a worker: take the image, put up the walls, answer until the channel closes."""
    try:
        setup, folder = read_json(channel), os.path.realpath(folder)
        size = tuple(setup["shape"])
        image = Image.frombytes("RGB", size, read(channel, 3 * math.prod(size)))
        try:
            stand = lock_in(setup, folder, image, parent)
        except OSError as problem:
            stand = {"failed": str(problem)}        # the trainer hangs up on us
        worker = Worker(setup, folder, names, image)
        channel.sendall(pack(stand))
        while "failed" not in stand:
            request = read_json(channel, most=1 << 24)
            reply, pixels = worker.run(request["code"])
            channel.sendall(pack(reply | {"id": request["id"]}) + pixels)
    finally:
        os._exit(0)


def make_root() -> str:
    """A locked folder in the temporary one; those of dead servers are swept away.

    The kernel drops a lock however its owner dies. The folder gets its final name only once it
    is locked, so that nobody takes it for a dead one."""
    fresh = tempfile.mkdtemp(prefix="codev-new-")
    final = os.path.join(tempfile.gettempdir(), f"codev-sandbox-{os.getuid()}-")
    for folder in [fresh, *glob.glob(final + "*")]:
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue                        # in use
        if folder != fresh:
            remove(folder)
    os.rename(fresh, root := final + fresh[-8:])
    return root


PREDEFINED = """builtins collections copy csv datetime functools glob io itertools json math os
pathlib random re shutil statistics string sys tempfile time numpy numpy:np PIL PIL.Image:Image
PIL.ImageChops:ImageChops PIL.ImageDraw:ImageDraw PIL.ImageEnhance:ImageEnhance cv2 cv2:cv
PIL.ImageFilter:ImageFilter PIL.ImageFont:ImageFont PIL.ImageOps:ImageOps PIL.ImageStat:ImageStat
matplotlib matplotlib.pyplot:plt"""


def usual_names() -> dict[str, object]:
    names = {"__name__": "__main__"}
    for word in PREDEFINED.split():
        module, _, name = word.partition(":")
        try:
            names[name or module] = importlib.import_module(module)
        except ImportError:
            continue                        # optional; code that imports it gets the usual message
    Image.init()                            # loads Pillow's decoders, once for all workers
    return names | {"Path": names["pathlib"].Path}


# The walls: each worker puts them up around itself, before it sees any code. seccomp refuses system
# calls, Landlock paths, a tmpfs (files in memory) bounds what is written. Bare numbers are Linux's.

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}    # linux/audit.h
MACHINE = os.uname().machine
libc = ctypes.CDLL(None, use_errno=True)

# System calls by name, with their numbers on x86-64 and on aarch64 (-1: it has none).
REFUSED = """fork 57 -1, vfork 58 -1, clone 56 220, execve 59 221, execveat 322 281, ptrace 101 117,
socket 41 198, socketpair 53 199, kill 62 129, tkill 200 130, tgkill 234 131,
rt_sigqueueinfo 129 138, kcmp 312 272, rt_tgsigqueueinfo 297 240, pidfd_open 434 434,
pidfd_send_signal 424 424, pidfd_getfd 438 438, process_vm_readv 310 270, process_vm_writev 311 271,
process_madvise 440 440, process_mrelease 448 448, setpriority 141 140, ioprio_set 251 30,
sched_setaffinity 203 122, sched_setscheduler 144 119, sched_setparam 142 118,
sched_setattr 314 274, unshare 272 97, setns 308 268, mount 165 40, umount2 166 39,
pivot_root 155 41, chroot 161 51, fsopen 430 430, fsmount 432 432, fsconfig 431 431, fspick 433 433,
open_tree 428 428, open_tree_attr 467 467, move_mount 429 429, mount_setattr 442 442, bpf 321 280,
perf_event_open 298 241, userfaultfd 323 282, io_uring_setup 425 425, keyctl 250 219,
add_key 248 217, request_key 249 218, shmget 29 194, semget 64 190, msgget 68 186, mq_open 240 180,
memfd_create 319 279, memfd_secret 447 447, open_by_handle_at 304 265, name_to_handle_at 303 264,
fanotify_init 300 262, inotify_init 253 -1, inotify_init1 294 26, personality 135 92,
truncate 76 45, setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7, setxattrat 463 463,
removexattr 197 14, lremovexattr 198 15, fremovexattr 199 16, removexattrat 466 466,
file_setattr 469 469"""
ABSENT = "clone3 435 435, openat2 437 437"      # libc then falls back to clone and openat
# Landlock does not see these, and shutil.copy must not fail over them: nothing happens, quietly.
PRETENDED = """chmod 90 -1, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, chown 92 -1,
lchown 94 -1, fchown 93 55, fchownat 260 54, utime 132 -1, utimes 235 -1, futimesat 261 -1,
utimensat 280 88"""
TRUNCATES = os.O_ACCMODE | os.O_TRUNC           # to open for reading may empty a file, too
FILTERED = [("prctl 157 167", 0, 0xFFFFFFFF, 1, True),          # argument, mask, value; refused
            ("prlimit64 302 261", 0, 0xFFFFFFFF, 0, False),     # if equal (True), if not (False)
            ("open 2 -1", 1, TRUNCATES, os.O_TRUNC, True),
            ("openat 257 56", 2, TRUNCATES, os.O_TRUNC, True),
            *(("fcntl 72 25", 1, 0xFFFFFFFF, command, True) for command in (8, 10, 15)),
            *(("ioctl 16 29", 1, 0xFFFFFFFF, command, True) for command in (0x8901, 0x8902))]
# (The last two rows: who gets a signal, and which, when a file has data.)


def numbers(table: str) -> list[int]:
    column = 1 + list(MACHINES).index(MACHINE)
    return [n for row in table.split(",") if (n := int(row.split()[column])) >= 0]


@functools.cache
def call_filter() -> bytes:
    """Refuse what a program with one process, one thread and its own files does not need.

    A filter is a list of (operation, jump if so, jump if not, operand), see linux/filter.h. It
    may load from struct seccomp_data: the number at 0, the machine at 4, the arguments from 16."""
    load, equal, at_least, mask_by, give = 0x20, 0x15, 0x35, 0x54, 0x06
    allow, kill, error = 0x7FFF0000, 0x80000000, 0x50000
    program = [(load, 0, 0, 4), (equal, 1, 0, MACHINES[MACHINE]), (give, 0, 0, kill),
               (load, 0, 0, 0)]
    if MACHINE == "x86_64":     # the x32 numbers are a second door to the same rooms
        program += [(at_least, 0, 1, 0x40000000), (give, 0, 0, error | errno.ENOSYS)]
    for table, code in (REFUSED, errno.EPERM), (ABSENT, errno.ENOSYS), (PRETENDED, 0):
        for number in numbers(table):
            program += [(equal, 0, 1, number), (give, 0, 0, error | code)]
    for table, argument, mask, value, if_equal in FILTERED:
        for number in numbers(table):
            program += [(equal, 0, 5, number), (load, 0, 0, 16 + 8 * argument),
                        (mask_by, 0, 0, mask), (equal, not if_equal, if_equal, value),
                        (give, 0, 0, error | errno.EPERM), (load, 0, 0, 0)]
    program.append((give, 0, 0, allow))
    return b"".join(struct.pack("HBBI", *line) for line in program)


def seccomp() -> str:
    code = ctypes.create_string_buffer(call_filter())
    header = struct.pack("HxxxxxxQ", len(call_filter()) // struct.calcsize("HBBI"),
                         ctypes.addressof(code))
    check(libc.prctl(22, 2, header, 0, 0), "seccomp")       # PR_SET_SECCOMP, filter
    return f"seccomp, {len(numbers(REFUSED))} calls refused"


def check(result: int, what: str) -> int:
    if result < 0:
        raise OSError(f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def landlock_abi() -> int:
    return max(0, libc.syscall(444, None, ctypes.c_size_t(0), ctypes.c_uint(1)))    # 0: none


def landlock(readable: list[str], writable: str) -> str:
    """From here on: read in some folders, write in one; the kernel refuses the rest."""
    abi = landlock_abi()
    rights = (1 << (13, 14, 15, 15, 16)[min(abi, 5) - 1]) - 1       # all this kernel can refuse
    ruleset = struct.pack("QQQ", rights, 3, 3)                      # files; TCP; sockets, signals
    ruleset = ruleset[:8 if abi < 4 else 16 if abi < 6 else 24]
    rules = check(libc.syscall(444, ruleset, ctypes.c_size_t(len(ruleset)), ctypes.c_uint(0)),
                  "landlock_create_ruleset")
    read, write = 1 << 2 | 1 << 3, 1 << 1 | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 13 | 1 << 14
    for path in filter(os.path.exists, [*readable, writable]):      # write: no links, no devices
        allowed = read | write if path == writable else read if os.path.isdir(path) else 1 << 2
        target = os.open(path, os.O_PATH)
        rule = struct.pack("=Qi", allowed & rights, target)
        check(libc.syscall(445, rules, 1, rule, 0), f"landlock_add_rule {path}")
        os.close(target)
    check(libc.syscall(446, rules, 0), "landlock_restrict_self")
    os.close(rules)
    return f"Landlock ABI {abi}"


def missing_walls() -> dict[str, str]:
    """Without these two there is no sandbox: what is missing, and which wall falls with it."""
    tests = (("Landlock (Linux 5.13 or newer, switched on)", "files", landlock_abi() > 0),
             (f"table of system calls for {MACHINE}", "calls", MACHINE in MACHINES))
    return {what: wall for what, wall, there in tests if not there}


def private_disk(folder: str, size: int) -> str:
    """Mount a tmpfs that only this process sees and that vanishes with it, if we may."""
    uid, gid, polled = os.getuid(), os.getgid(), "polled quota"
    if libc.unshare(0x20000):                       # CLONE_NEWNS; an ordinary user needs more:
        if libc.unshare(0x10020000):                # CLONE_NEWUSER
            return polled
        for name, line in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"),
                           ("gid_map", f"{gid} {gid} 1")):
            try:
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(line)
            except OSError:
                return polled
    options = f"size={size},nr_inodes=2000,mode=755".encode()
    if (libc.mount(None, b"/", None, ctypes.c_ulong(0x44000), None)         # MS_REC | MS_PRIVATE
            or libc.mount(b"tmpfs", folder.encode(), b"tmpfs", ctypes.c_ulong(14), options)):
        return polled                               # 14: no suid, no devices, no programs
    return f"private tmpfs, {size >> 20} MB"


def lock_in(setup: dict, folder: str, image: Image.Image, parent: int) -> dict[str, str]:
    """Put up the walls in the one order that works; say which ones stand."""
    walls, stand = set(setup["walls"]), dict.fromkeys(sorted(WALLS), "none")
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")                      # short of memory, the trainer goes last
    except OSError:
        pass                                        # /proc is read-only in some containers
    size = setup["disk"] + 3 * image.width * image.height + (1 << 20)
    stand["disk"] = private_disk(folder, size) if "disk" in walls else "polled quota"
    os.mkdir(f"{folder}/work")
    image.save(f"{folder}/image.png", compress_level=0)             # no metadata, neutral name
    if "sizes" in walls:
        for name, value in (("AS", setup["memory"]), ("FSIZE", setup["file"]), ("NOFILE", 64),
                            ("CPU", 3600), ("CORE", 0), ("MSGQUEUE", 0), ("MEMLOCK", 0)):
            kind = getattr(resource, f"RLIMIT_{name}")
            hard = resource.getrlimit(kind)[1]      # nobody may raise it; -1: there is none
            resource.setrlimit(kind, (value if hard < 0 else min(value, hard),) * 2)
        stand["sizes"] = f"rlimits, {setup['memory'] >> 20} MB of memory"
    if "rights" in walls:
        for capability in range(64):
            libc.prctl(24, capability, 0, 0, 0)     # PR_CAPBSET_DROP
        capset = 126 if MACHINE == "x86_64" else 91
        check(libc.syscall(capset, struct.pack("Ii", 0x20080522, 0), bytes(24)), "capset")
        stand["rights"] = "no capabilities"
    check(libc.prctl(1, signal.SIGKILL, 0, 0, 0), "PR_SET_PDEATHSIG")       # not without the server
    if os.getppid() != parent:
        os._exit(0)
    check(libc.prctl(38, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")
    if "files" in walls:
        system = ["/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/fonts", "/dev/null",
                  "/dev/zero", "/dev/urandom", sys.prefix, sys.base_prefix]
        packages = [path for path in sys.path if path.endswith("-packages")]
        stand["files"] = landlock([*system, *packages, folder], f"{folder}/work")
    if "calls" in walls:
        stand["calls"] = seccomp()
    return stand


# Forgiving: what the worker does for honest code.

STEPS = "crops and resizes"             # a key of Image.info, which Pillow hands on to its results
PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff")
INVENTED = re.compile(r"(path[_ ]?to|the|your|my|input|original|source|test|user|uploaded|sample)?"
                      r"[_ -]?(image|img|photo|picture|input)[_ -]?(file|path|\d)?", re.I)
FORBIDDEN = re.compile(
    r"(os|posix)\.(remove|unlink|rmdir|removedirs|renames?|replace|system|popen|kill|killpg|fork|"
    r"forkpty|exec\w+|spawn\w+|posix_spawnp?)|shutil\.(rmtree|move)|subprocess\.\w+|"
    r"pathlib\.Path\(\)\.(rename|replace)|.*\.(unlink|rmdir)")
QUOTES = str.maketrans("“”„‘’′（），：；–−", "\"\"\"'''(),:;--")


def parses(code: str) -> bool:
    try:
        return bool(ast.parse(code))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def unfence(code: str) -> list[str]:
    before, *blocks = re.split(r"^[ \t]*(?:```|~~~).*\n?", code, flags=re.M)
    if blocks and not (before.strip() and parses(textwrap.dedent(before))):
        before = blocks[0]
    before = re.sub(r"^\s*</?code>\s*$", "", before, flags=re.M)
    return [re.sub(r"\A\s*python3?[ \t]*\n|\n[ \t]*python3?\s*\Z", "\n", before)]


def reindent(code: str) -> list[str]:
    first, *rest = lines = textwrap.dedent(code.expandtabs(4)).strip("\n").split("\n")
    depth = [len(line) - len(line.lstrip()) for line in lines]
    margin = min((d for d, line in zip(depth[1:], rest) if line.strip()), default=0)
    return [textwrap.dedent(code.expandtabs(8)), "\n".join(lines),
            textwrap.dedent("\n".join([" " * margin + first.lstrip(), *rest])),
            "\n".join(" " * (4 * round(d / 4)) + line.lstrip() for d, line in zip(depth, lines))]


def cut(code: str) -> list[str]:
    lines = code.rstrip().split("\n")
    return ["\n".join(lines[:-n]) for n in (1, 2, 3) if n < len(lines)] or [code]


REPAIRS = {         # note: what proposes candidates; the first that parses is taken
    "removed invisible characters": lambda code: [
        re.sub("[\ufeff\u200b\0]", "", re.sub("\r\n?", "\n", code)).replace("\u00a0", " ")],
    "removed the markdown around the code": unfence,
    "left out notebook commands": lambda code: [
        re.sub(r"^([ \t]*)[!%]\w.*", r"\1pass", code, flags=re.M)],
    "repaired the indentation": reindent,
    "replaced typographic characters": lambda code: [code.translate(QUOTES)],
    "left out the unfinished end": cut,
}


def repair(code: str) -> tuple[str, list[str]]:
    """Change code that does not parse until it does, and say how. All other code stays as it is."""
    repaired, notes = code, []
    for note, candidates in REPAIRS.items():
        if parses(repaired):
            return repaired, notes
        options = candidates(repaired)
        best = next(filter(parses, options), options[0])
        if best != repaired:
            tail = f": {repaired[len(best):].strip()[:80]!r}" if candidates is cut else ""
            notes.append(note + tail)
            repaired = best
    return (repaired, notes) if parses(repaired) else (code, [])


def forbidden_call(tree: ast.AST) -> str | None:
    """A clear message for the honest. It is easily walked around, and the walls hold without it."""
    names = {"os": "os", "shutil": "shutil", "subprocess": "subprocess", "Path": "pathlib.Path"}

    def dotted(node):
        if isinstance(node, ast.Attribute):
            return f"{dotted(node.value)}.{node.attr}"
        if isinstance(node, ast.Call):
            return f"{dotted(node.func)}()"
        return names.get(node.id, "") if isinstance(node, ast.Name) else ""

    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {a.asname or a.name: a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and FORBIDDEN.fullmatch(name := dotted(node.func)):
            return f"line {node.lineno} calls {name}"
    return None


def rewrite(tree: ast.Module) -> ast.Module:
    """As in a notebook, the last value is shown; `return` at top level and float slices work."""
    def call(name, value):
        return ast.copy_location(ast.Call(ast.Name(name, ast.Load()), [value], []), value)

    for node in ast.walk(tree):
        match node:
            case ast.Subscript(slice=ast.Tuple(elts=[ast.Slice() as y, ast.Slice() as x, *_])):
                for bounds in y, x:
                    if bounds.lower and not isinstance(bounds.lower, ast.UnaryOp):
                        bounds.lower = call("__lower__", bounds.lower)
                    if bounds.upper:
                        bounds.upper = call("__whole__", bounds.upper)
    blocks = [tree]
    while blocks:                       # all blocks of statements outside functions and classes
        for _, block in ast.iter_fields(blocks.pop()):
            for i, node in enumerate(block if isinstance(block, list) else []):
                if isinstance(node, ast.Return):
                    value = node.value or ast.copy_location(ast.Constant(None), node)
                    block[i] = ast.copy_location(ast.Expr(call("__return__", value)), node)
                elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    blocks.append(node)
    match tree.body:
        case [*_, ast.Expr(value=value) as last] if not isinstance(value, ast.Constant | ast.Await):
            last.value = call("__display__", value)
    return ast.fix_missing_locations(tree)


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


def flat(image: Image.Image) -> Image.Image:
    """A copy in RGB, with white behind whatever is transparent."""
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image, info = image.convert("RGBA"), image.info
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        image.info = info
    return image.convert("RGB")


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


pillow_open = Image.open


def stand_ins(w: Worker) -> list[tuple[object, str, object]]:
    """(owner, name, function): they repair paths and boxes, and notice what is shown."""
    kinder = []

    def instead_of(owner, *names):
        def register(function):
            for name in names:
                old = getattr(owner, name)
                kinder.append((owner, name, lambda *args, _old=old, **named: function(
                    _old, *args, **named)))
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

    @instead_of(Image.Image, "thumbnail")       # it resizes a hidden copy
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

    instead_of(Image.Image, "show")(lambda old, image, *_, **__: w.show(image, "show"))
    instead_of(Image, "fromarray")(
        lambda old, array, *rest, **named: w.with_origin(old(array, *rest, **named), array))

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
        instead_of(cv2, "waitKey", "waitKeyEx")(lambda *_, **__: -1)
        instead_of(cv2, "namedWindow", "resizeWindow", "moveWindow", "destroyWindow",
                   "destroyAllWindows")(lambda *_, **__: None)

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
            if path in w.shown:                 # matplotlib saves through Pillow
                w.shown[path] = (*w.shown[path][:2], "figure")

    return kinder


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
    """Which walls stand on this machine, and what happens to code that runs against each."""
    for wall, code in PROBES.items():
        with Sandbox(image, Limits(seconds=2.0), allow_weak=True) as sandbox:
            stand = sandbox.protection | {"clock": "SIGKILL from outside", "channel": "checked"}
            seen = sandbox.run(code)
            print(f"{wall:8} {stand[wall]:28} {seen.error or seen.environment or 'NOT STOPPED'}")


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--server"]:
        sys.path += [path for path in arguments[2:] if path not in sys.path]
        return serve(socket.socket(fileno=int(arguments[1])))
    picture = Image.linear_gradient("L").convert("RGB")
    if arguments == ["--self-test"]:
        return self_test(picture)
    with Sandbox(picture) as sandbox:
        print(sandbox.run(arguments[0] if arguments else "image.crop((64, 64, 128, 128))"))


if __name__ == "__main__":
    main(sys.argv[1:])
