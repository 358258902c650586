"""python -m pytest tests/test_grader.py      formulas that never end, a busy machine"""

import os
import resource
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

from kit.answers import is_correct
from kit.grader import GRADER, MathGrader


def test_formulas_are_graded_alike_in_any_thread_by_a_process_of_its_own():
    with ThreadPoolExecutor(8) as pool:
        got = pool.map(lambda i: is_correct(rf"\sqrt{{{8 + i % 2}}}", r"2\sqrt{2}"), range(8))
        assert [*got] == [True, False] * 4
    assert GRADER.process.pid != os.getpid()


def test_a_formula_that_never_ends_is_wrong_in_time_and_the_next_one_is_graded():
    grader, before = MathGrader(seconds=1), resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    assert grader.same("2", r"\frac{4}{2}")
    resource.prlimit(grader.process.pid, resource.RLIMIT_CPU, (20, 20))  # else this never ends
    assert not grader.same("2", "9^{9^{9^{9}}}")
    spent = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    assert spent < 10  # seconds of computing, imports and the first formula with them
    assert grader.process.poll() is not None  # nothing is left that burns a core
    assert grader.same("2", r"\frac{4}{2}")
    grader.close()


def test_a_busy_machine_makes_no_formula_wrong():
    grader = MathGrader(seconds=1)
    assert grader.same("2", r"\frac{4}{2}")
    os.kill(grader.process.pid, signal.SIGSTOP)  # for longer than the limit, it gets no core
    threading.Timer(1.5, os.kill, (grader.process.pid, signal.SIGCONT)).start()
    assert grader.same("2", r"\frac{4}{2}")
    grader.close()
