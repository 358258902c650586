"""
grader.py: are two formulas equal? Read in a process of its own, with a limit.

Concept     "9^{9^{9^9}}" has no value that a computer could hold, and nobody knows beforehand how
            long a formula takes. So formulas are read in another process, which ends by itself
            after some seconds of computing. Waiting for a core of a busy machine does not count.
Paper       nothing: CodeV does not say how formulas are compared
In          two texts
Out         equal or not; what takes too long, or all the memory, is not
Left out    what a formula is and when two are equal (formulas.py)
Read next   formulas.py, answers.py
"""

from __future__ import annotations

import atexit
import json
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent  # the folder of kit


class MathGrader:
    """The process, begun when first needed and again after it ended. Threads may share it."""

    def __init__(self, seconds: float = 5.0) -> None:
        """seconds: most that one comparison may compute."""
        self.seconds, self.lock = seconds, threading.Lock()
        self.process: subprocess.Popen | None = None

    def same(self, reply: str, reference: str, places: int | None = None) -> bool:
        """formulas.equal. Raises RuntimeError if the process cannot be started."""
        with self.lock:
            if self.process is None or self.process.poll() is not None:
                program = f"from kit.grader import serve; serve({self.seconds})"
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
                self.process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, **pipes)
                if self.process.stdout.readline() != b"ready\n":
                    raise RuntimeError(
                        "expected the grader of formulas to start, but its process ended (the "
                        "reason stands above); try: pip install -r requirements.txt"
                    )
            self.process.stdin.write(json.dumps([reply, reference, places]).encode() + b"\n")
            line = self.process.stdout.readline()
            if not line:
                self.close()
            return line == b"1\n"

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()


def serve(seconds: float) -> None:
    """The other process. A line [reply, reference, places] in, a line "1" or "0" out."""
    from kit.formulas import equal

    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    print("ready", flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # of computing; then SIGPROF ends us
        try:
            verdict = equal(*json.loads(line))
        except (ValueError, ArithmeticError, TypeError, RuntimeError, MemoryError):
            verdict = False  # one is no formula, or has no value that mpmath knows or memory holds
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(int(verdict), flush=True)


GRADER = MathGrader()
atexit.register(GRADER.close)
