"""
sandbox_server.py: the process that forks workers, and the wire between the processes.

Concept     Imports take seconds and a fork milliseconds: one server imports the libraries once, and
            forks a worker for each trajectory. The trainer talks to both through sockets.
Paper       nothing: CodeV's Appendix 13 says what the sandbox does, not in which process
In          requests for a worker; then the limits, one image, pieces of code
Out         workers behind walls, and their replies
Left out    other machines: trainer, server and workers share one
Read next   sandbox_worker.py (what a worker does), sandbox_walls.py (what confines it)
"""

import fcntl
import gc
import glob
import math
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from importlib.util import find_spec
from json import dumps, loads  # by name: code that patches json does not reach these
from typing import BinaryIO

import numpy as np
from PIL import Image

from kit.sandbox_walls import lock_in
from kit.sandbox_worker import Worker

# Between the processes: a length (4 bytes), JSON, and perhaps raw RGB pixels.


def pack(header: dict) -> bytes:
    data = dumps(header).encode()
    return struct.pack(">I", len(data)) + data


def read(sock: socket.socket, size: int, deadline: float = math.inf, watch=None) -> bytearray:
    """Exactly `size` bytes, however slowly they drip. watch: called while none come. Raises
    TimeoutError after the deadline (of time.monotonic), EOFError if the other side ended."""
    data, done = bytearray(size), 0
    while done < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer in time")
        sock.settimeout(None if left == math.inf else min(left, 0.2))
        try:
            part = sock.recv_into(memoryview(data)[done:])
        except TimeoutError:
            if watch:
                watch()
            continue
        if not part:
            raise EOFError
        done += part
    return data


def read_json(sock: socket.socket, deadline: float = math.inf, watch=None, most=1 << 18) -> dict:
    """The next header. Raises ValueError if it has more than `most` bytes or is no JSON."""
    (size,) = struct.unpack(">I", read(sock, 4, deadline, watch))
    if size > most:
        raise ValueError(f"a reply of {size} bytes, expected at most {most}")
    return loads(read(sock, size, deadline, watch))


def ready(descriptor: int | socket.socket, seconds: float = 0.0) -> bool:
    """Is there anything to read, or has the other side (or the process of a pidfd) ended?"""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def seconds_without_core(pid: int) -> float:
    """How long the process has been ready to run while others had the cores."""
    with suppress(OSError), open(f"/proc/{pid}/schedstat") as file:
        return int(file.read().split()[1]) / 1e9
    return 0.0


# The program that the server runs. It imports `kit` from the project's root and then forgets that
# folder, so that `import data` in the policy's code does not find data.py.
DOOR = """
import socket, sys
fd, root, *packages = sys.argv[1:]
sys.path += [root, *(path for path in packages if path not in sys.path)]
import kit
from kit.sandbox_server import serve
sys.path.remove(root)
kit.__path__ = []
serve(socket.socket(fileno=int(fd)))"""


class Server:
    """The trainer's handle on the process that forks workers. That process is executed, not
    forked, so neither CUDA nor data, keys or open files of the trainer come with it."""

    def __init__(self):
        self.owner = os.getpid()
        self.control, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "TMPDIR": tempfile.gettempdir()}
        environment |= {"MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        environment |= {"PYTHONHASHSEED": "0", "PYTHONSAFEPATH": "1"}  # sets in the same order
        root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        libraries = [find_spec(name) for name in ("numpy", "PIL", "cv2", "matplotlib")]
        files = [spec.origin for spec in libraries if spec and spec.origin]
        homes = {os.path.dirname(os.path.dirname(file)) for file in files}
        packages = [path for path in sys.path if path.endswith("-packages") or path in homes]
        with theirs:  # -s drops what is installed for one user
            self.process = subprocess.Popen(
                [sys.executable, "-s", "-c", DOOR, str(theirs.fileno()), root, *packages],
                pass_fds=[theirs.fileno()],
                env=environment,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        if not (ready(self.control, 120) and self.control.recv(1)):
            self.process.kill()
            raise RuntimeError(
                "the sandbox server did not start, its error is printed above. It looks for "
                f"packages in {', '.join(packages) or 'no folder'}"
            )
        self.control.settimeout(5.0)

    def fork(self, channel: socket.socket, status: socket.socket, pixels: BinaryIO) -> None:
        """Ask for a worker at the other end of `channel`, for the image in this file (PPM). When
        it has ended, `status` says how: {"exit": as of os.waitstatus_to_exitcode}. Raises OSError
        if the server does not listen."""
        socket.send_fds(self.control, [b"fork"], [f.fileno() for f in (channel, status, pixels)])


_server: Server | None = None
_starting = threading.Lock()


def the_server() -> Server:
    """The server of this process, started if there is none or it has died."""
    global _server
    with _starting:
        if not _server or _server.owner != os.getpid() or _server.process.poll() is not None:
            _server = Server()
        return _server


def serve(control: socket.socket) -> None:
    """Import once, fork a worker on request. When the trainer ends, the server ends its workers."""
    root, me, workers = make_root(), os.getpid(), {}  # a pidfd -> the pid, who wants to know
    os.environ["MPLCONFIGDIR"] = root  # where matplotlib writes its list of fonts
    names, poll = usual_names(), select.poll()
    gc.freeze()  # a collection would write to shared memory, and so copy it
    poll.register(control, select.POLLIN)
    control.send(b"!")
    while True:
        events = {descriptor for descriptor, _ in poll.poll()}
        for ended in events & workers.keys():
            pid, status = workers.pop(ended)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with status, suppress(OSError):  # nobody may want to know
                status.sendall(pack({"exit": code}))
            poll.unregister(ended)
            os.close(ended)
        if control.fileno() not in events:
            continue
        request = b""
        with suppress(OSError):
            request, descriptors, _, _ = socket.recv_fds(control, 4, 3)
        if not request:
            break
        channel, status = (socket.socket(fileno=descriptor) for descriptor in descriptors[:2])
        with channel, open(descriptors[2], "rb") as pixels:
            folder = os.path.join(root, "none")
            try:
                folder = tempfile.mkdtemp(dir=root)
                pid = os.fork()
            except OSError as problem:  # only this start fails; the other workers live on
                with status, suppress(OSError):
                    channel.sendall(pack({"failed": f"no worker: {problem}"}))
                    os.rmdir(folder)
                continue
            if pid == 0:
                os.dup2(channel.fileno(), 3)
                os.dup2(pixels.fileno(), 4)
                os.closerange(5, 1024)
                os.dup2(1, 2)  # /dev/null
                work(socket.socket(fileno=3), 4, folder, names, me)
            workers[pidfd := os.pidfd_open(pid)] = pid, status
            poll.register(pidfd, select.POLLIN)
    for pidfd in workers:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    remove(root)


def work(channel: socket.socket, memory: int, folder: str, names: dict, parent: int) -> None:
    """The life of a worker: take the image, put up the walls, answer until the channel closes."""
    try:
        try:
            channel.sendall(pack({"pid": os.getpid(), "folder": folder}))
            setup, folder = read_json(channel), os.path.realpath(folder)
        except (OSError, EOFError):  # the trainer did not wait for this worker
            return os.rmdir(folder)
        with open(memory, "rb") as file:  # the pixels are its end
            w, h = setup["shape"]
            head = os.fstat(memory).st_size - 3 * w * h
            pixels = np.memmap(file, np.uint8, "r", head, (h, w, 3))
        image = Image.fromarray(pixels)
        try:
            stand = lock_in(setup, folder, pixels, parent)
        except OSError as problem:
            stand = {"failed": str(problem)}
        del pixels  # what is mapped counts against the limit of memory
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

    The kernel drops a lock however its owner dies. The folder gets its final name only once it is
    locked, so that nobody takes it for a dead one."""
    fresh = tempfile.mkdtemp(prefix="codev-new-")
    final = os.path.join(tempfile.gettempdir(), f"codev-sandbox-{os.getuid()}-")
    for folder in [fresh, *glob.glob(final + "*")]:
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # in use
        if folder != fresh:
            remove(folder)
    os.rename(fresh, root := final + fresh[-8:])
    return root


def remove(folder: str) -> None:
    """Remove a folder, whatever the code has made of it."""
    try:
        os.rmdir(folder)  # a private tmpfs leaves it empty
    except OSError:  # shutil.rmtree recurses, and the code may have nested deeply
        script = 'chmod -R u+rwx -- "$0"; rm -rf -- "$0"'
        with suppress(OSError):  # no fork now: the next server sweeps
            subprocess.run(["sh", "-c", script, folder], stderr=subprocess.DEVNULL)


# What code finds without an import.
PREDEFINED = """
import builtins, collections, copy, csv, datetime, functools, glob, io, itertools, json, math, os
import pathlib, random, re, shutil, statistics, string, sys, tempfile, time, numpy.random, PIL
from pathlib import Path
from PIL import Image, ImageChops, ImageDraw, ImageEnhance, ImageFilter, ImageFont, ImageOps
from PIL import ImageStat
np = numpy"""
OPTIONAL = "import cv2; cv = cv2", "import matplotlib; import matplotlib.pyplot as plt"


def usual_names() -> dict[str, object]:
    names = {"__name__": "__main__"}
    exec(PREDEFINED, names)
    for line in OPTIONAL:
        with suppress(ImportError):  # code that imports it gets the usual message
            exec(line, names)
    Image.init()  # loads Pillow's decoders, once for all workers
    return names
