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
import io
import itertools
import os
import random
import re
import signal
import sys
import tempfile
import traceback
import types
import warnings
from contextlib import suppress

import numpy as np
from PIL import Image

from kit.sandbox_repair import forbidden_call, repair, rewrite
from kit.sandbox_stand_ins import PICTURES, Parts, Recorder, stand_ins, true_open


class Output(io.BytesIO):
    """What the code prints, up to a limit in bytes. Code may close it; what was printed stays."""

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
        pass


class Worker(Recorder):
    """Runs code in one lasting namespace, with kinder stand-ins for a few functions."""

    def __init__(self, setup: dict, folder: str, names: dict, image: Image.Image):
        super().__init__(setup, folder, image)
        tempfile.tempdir = os.environ["HOME"] = os.environ["TMPDIR"] = self.folder
        warnings.simplefilter("ignore")
        random.seed(0)  # what code shows should not differ from run to run
        np.random.seed(0)
        os.urandom = random._urandom = random.Random(0).randbytes  # uuid, secrets, default_rng
        tempfile._name_sequence = map(str, itertools.count())
        self.names = names | {"image": image, "image_path": self.path}
        self.files, self.builtins = self.listing(), dict(vars(builtins))
        self.stand_ins = stand_ins(self)
        notebook, shows = types.ModuleType("IPython"), types.ModuleType("IPython.display")
        notebook.display, shows.display = shows, self.display
        notebook.version_info, notebook.get_ipython = (9, 0), lambda: None  # matplotlib asks
        shows.Image = lambda data=None, filename=None, **_: Image.open(
            io.BytesIO(data) if isinstance(data, bytes) else data or filename
        )
        for name in "HTML Markdown Latex Math SVG JSON Code clear_output".split():
            setattr(shows, name, lambda *_, **__: None)
        shows.cv2_imshow = lambda img: self.show(self.from_array(img), "show")
        for name in "IPython", "IPython.core", "google", "google.colab":
            sys.modules |= {name: notebook, f"{name}.display": shows, f"{name}.patches": shows}

    def run(self, code: str) -> tuple[dict, bytes]:
        """One call: the reply to the trainer (but for its id), and the pixels that follow it."""
        self.begin()
        self.output, self.error = Output(self.limits["text"]), None
        self.before = {name: id(value) for name, value in self.names.items()}
        for act in lambda: self.execute(code), self.collect:
            self.reset()
            try:
                act()
            except SystemExit as end:
                if end.code != "return":
                    self.note("exit() ends this code only")
            except BaseException as problem:  # on purpose: what code raises is its result
                self.reset()  # it may have replaced what describes it
                self.error = self.error or self.describe(problem)
        for count, what in (self.more, "images"), (self.output.lost, "bytes of output"):
            if count:
                self.note(f"{count} more {what} not shown")
        reply = {
            "text": self.plain(self.output.getvalue().decode("utf-8", "replace")),
            "error": self.error,
            "blocked": (self.error or "").startswith("Blocked: "),
            "flags": sorted(self.flags),
            "notes": self.notes,
            "images": [facts for _, _, facts in self.shown.values()],
        }
        return reply, b"".join(image.tobytes() for _, image, _ in self.shown.values())

    def reset(self) -> None:
        """Undo what code may have done to the interpreter: for order, not for safety."""
        sys.settrace(None)
        sys.setprofile(None)
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.setrecursionlimit(1000)
        vars(builtins).update(self.builtins)
        for owner, name, function in self.stand_ins:
            if vars(owner).get(name) is not function:  # setting it flushes caches of Python
                setattr(owner, name, function)
        os.chdir(self.folder)
        text = io.TextIOWrapper(self.output, "utf-8", "backslashreplace", write_through=True)
        sys.stdout = sys.stderr = text

    def execute(self, code: str) -> None:
        code, self.notes = repair(code)
        tree = ast.parse(code, "<code>")
        if call := forbidden_call(nodes := [*ast.walk(tree)]):
            self.error = f"Blocked: {call}; processes can be neither started nor signalled"
            return
        self.bgr = (self.bgr or "imread" in code) and "2RGB" not in code
        hooks = {"__parts__": self.parts, "__display__": self.display, "__return__": self.leave}
        self.names |= hooks | {"open": builtins.open, "input": self.input, "display": self.display}
        exec(compile(rewrite(tree, nodes), "<code>", "exec"), self.names)

    def collect(self) -> None:
        """Show what the code left behind: open figures, new files, or else its newest image."""
        if "matplotlib.pyplot" in sys.modules:
            self.show_figures()
        old, self.files = self.files, self.listing()
        fresh = sorted((state, path) for path, state in self.files.items() - old.items())
        new = [path for _, path in fresh if path not in self.written]
        new = [p for p in new if p.lower().endswith(PICTURES) and os.path.basename(p)[:3] != "tmp"]
        broken = []
        for path in new[:20]:
            try:
                self.show(true_open(path), "file")
            except Exception:  # over bytes of the code's own, decoders raise anything
                broken.append(os.path.basename(path))
        for what, paths in ("no image in", broken), ("not looked at", new[20:]):
            if paths:
                self.note(f"{what} {len(paths)} files: {', '.join(paths[:2])[:80]}")
        if not (self.shown or self.output.tell() or self.error):
            for name, value in reversed(self.names.items()):
                if self.before.get(name) != id(value) and not name.startswith("_"):
                    value = value[-1] if isinstance(value, (list, tuple)) and value else value
                    if (image := self.as_image(value)) is not None:
                        self.note(f"nothing was shown; this is {name}")
                        return self.show(image, "value")

    def listing(self) -> dict[str, tuple]:
        """Files at most three folders deep: path -> what changes if the file does."""
        states, folders = {}, [(self.folder, 1)]
        for folder, depth in folders:
            with suppress(OSError), os.scandir(folder) as entries:  # code may have closed it
                for entry in itertools.islice(entries, 5000 - len(states)):
                    s = entry.stat(follow_symlinks=False)
                    states[entry.path] = s.st_mtime_ns, s.st_size, s.st_ino
                    if depth < 3 and entry.is_dir(follow_symlinks=False):
                        folders.append((entry.path, depth + 1))
        return states

    def plain(self, text: str) -> str:
        """Without what differs from run to run: the folder's name and addresses in memory."""
        home = os.path.dirname(self.path)
        return re.sub(r"(?i) at 0x[\da-f]{6,}(?=[>,])", "", text.replace(home, ""))

    def describe(self, problem: BaseException) -> str:
        """One short line: type, message, line of the code."""
        try:
            text = self.plain(" ".join(str(problem)[:2000].split()))
            trace = traceback.walk_tb(problem.__traceback__)
            lines = [n for frame, n in trace if frame.f_code.co_filename == "<code>"]
            if isinstance(problem, SyntaxError):
                text, lines = problem.msg, [problem.lineno]
            if isinstance(problem, FileNotFoundError):
                text += f"; files here: {sorted(map(os.path.basename, self.listing()))[:8]}"
            where = f" (line {lines[-1]})" if lines else ""
        except BaseException:  # its __str__ is the code's as well
            text = where = ""
        return f"{type(problem).__name__}: {text}"[: self.limits["error"] - len(where)] + where

    # What the code finds under other names.

    def input(self, *_) -> None:
        raise EOFError("input() is not available, nobody would answer")

    def display(self, *values: object) -> None:
        """As a notebook does with the value of the last line."""
        for value in values:
            first = value[0] if isinstance(value, (list, tuple)) and value else value
            if (image := self.as_image(value)) is not None:
                self.show(image, "value")
            elif first is not value and self.as_image(first) is not None:
                self.display(*value)
            elif value is not None and not type(first).__module__.startswith("matplotlib"):
                print(repr(value))

    def leave(self, value: object) -> None:
        """`return` outside of a function."""
        self.display(value)
        raise SystemExit("return")

    def parts(self, value: object) -> object:
        """What code cuts slices out of: an array remembers them."""
        array = isinstance(value, np.ndarray) and value.ndim in (2, 3)
        return Parts(value, self) if array else value
