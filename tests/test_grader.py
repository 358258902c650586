"""python -m pytest tests/test_grader.py      about 10 s: formulas that never end, a busy machine"""

import os
import resource
import signal
import threading

from kit.answers import is_correct
from kit.grader import GRADER, MathGrader


def test_formulas_are_graded_alike_in_any_thread():
    got = {}

    def one(i):
        got[i] = is_correct(r"\sqrt{8}" if i % 2 else r"\sqrt{9}", r"2\sqrt{2}")

    threads = [threading.Thread(target=one, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {i: bool(i % 2) for i in range(8)}


def test_a_formula_that_never_ends_is_wrong_in_time_and_the_next_one_is_graded():
    grader, before = MathGrader(seconds=2), resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    assert grader.same("2", r"\frac{4}{2}")
    assert not grader.same("2", "9^{9^{9^{9}}}")
    spent = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    assert spent < 10  # seconds of computing, imports and the first formula with them
    assert grader.process.poll() is not None  # nothing is left that burns a core
    assert grader.same("2", r"\frac{4}{2}")
    grader.close()


def test_a_busy_machine_makes_no_formula_wrong():
    grader = MathGrader(seconds=2)
    assert grader.same("2", r"\frac{4}{2}")
    os.kill(grader.process.pid, signal.SIGSTOP)  # for longer than the limit, it gets no core
    threading.Timer(3, os.kill, (grader.process.pid, signal.SIGCONT)).start()
    assert grader.same("2", r"\frac{4}{2}")
    grader.close()


def test_the_grader_of_formulas_is_a_process_of_its_own():
    assert is_correct("1+x", "x+1")
    assert GRADER.process.pid != os.getpid()
