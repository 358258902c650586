"""
grader.py: are two formulas equal? math-verify answers, in a process of its own.

Concept     math-verify keeps its time limit by SIGALRM, which only a main thread may set; without a
            limit "9^{9^9}" hangs the run. So it gets its own process, which ends by itself after
            some seconds of computing. Waiting for a core of a busy machine does not count.
Paper       nothing: CodeV does not say how formulas are compared
In          two texts
Out         equal or not; what takes too long, or all the memory, is not
Left out    which texts are formulas (answers.py)
Read next   answers.py
"""

from __future__ import annotations

import atexit
import inspect
import json
import subprocess
import sys
import threading


class MathGrader:
    """The process, begun when first needed and again after it ended. Threads may share it."""

    def __init__(self, seconds: float = 5.0) -> None:
        """seconds: most that one comparison may compute."""
        self.seconds, self.lock = seconds, threading.Lock()
        self.process: subprocess.Popen | None = None

    def same(self, reply: str, reference: str) -> bool:
        """Are two formulas equal? Raises RuntimeError if math-verify cannot be started."""
        with self.lock:
            if self.process is None or self.process.poll() is not None:
                program = inspect.getsource(_grade_forever) + f"_grade_forever({self.seconds})"
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
                self.process = subprocess.Popen([sys.executable, "-P", "-c", program], **pipes)
                if self.process.stdout.readline() != b"ready\n":
                    raise RuntimeError(
                        "expected math-verify to start, but its process ended (the reason stands "
                        "above); try: pip install -r requirements.txt"
                    )
            self.process.stdin.write(json.dumps([reply, reference]).encode() + b"\n")
            line = self.process.stdout.readline()
            if not line:
                self.close()
            return line == b"1\n"

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()


def _grade_forever(seconds: float) -> None:
    """The other process. A line [reply, reference] in, a line "1" or "0" out."""
    import json  # noqa: E401
    import logging
    import resource
    import signal
    import sys

    from math_verify import parse, verify

    logging.disable()
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    print("ready", flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # of computing; then SIGPROF ends us
        # Each text as one formula: "1 or 2" is then a set of two and equals neither.
        texts = (f"${text.replace('$', '')}$" for text in json.loads(line))
        reply, reference = (parse(text, parsing_timeout=None) for text in texts)
        print(int(verify(reference, reply, timeout_seconds=None)), flush=True)
        signal.setitimer(signal.ITIMER_PROF, 0)


GRADER = MathGrader()
atexit.register(GRADER.close)
