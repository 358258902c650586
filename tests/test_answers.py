"""python -m pytest tests/test_answers.py      about 8 s, most of them to import torch"""

import os
import resource
import signal
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from data import Sample, parse
from kit.answers import is_correct, is_open, read_choice
from kit.grader import GRADER, MathGrader
from rewards import format_error, grade, outcome
from rollout import Trajectory, Turn
from sandbox import Observation

IMAGE = Image.new("RGB", (32, 32))


def question(answer, options=()):
    return Sample("q", IMAGE, "?", answer, tuple(options))


TABLE = [
    # reference, reply, right?
    ("B", "(B) the red one", True),
    ("B", "A or B", False),
    ("B", "", False),
    ("B", "B", True),
    ("B", " b\n", True),
    ("B", "(b)", True),
    ("B", "B.", True),
    ("B", "**B**", True),
    ("B", r"$\boxed{\text{B}}$", True),
    ("B", r"\boxed{C}", False),
    ("B", r"\boxed{F = ma}, so the answer is B", True),
    ("F", r"\boxed{F = ma}", False),
    ("B", "(A) or (B)", False),
    ("B", "A, B", False),
    ("B", "B, A", False),
    ("B", "AB", False),
    ("B", "not B", False),
    ("B", "B, not A", True),
    ("B", "B, because it is red", True),
    ("A", "A", True),
    ("A", "A red car", False),
    ("B", "(B) A red car", True),
    ("D", "Answer: **D**", True),
    ("D", "**Answer:** D", True),
    ("D", "Answer: A\nFinal answer: D", True),
    ("1/2", r"\boxed{\frac{1}{2}}", True),
    ("1234", "1,234", True),
    ("1234", "1234.0", True),
    ("1234", "1,23", False),
    ("28%", "28 percent", True),
    ("28%", r"28\%", True),
    ("28%", "28", True),
    ("28%", "0.28", True),
    ("28%", "28 cm", False),
    ("28%", "29", False),
    ("0.5", ".50", True),
    ("0.5", "50%", True),
    ("0.5", "0.50001", False),
    ("0.333333333", "1/3", True),
    ("5551234567", "5551234568", False),
    ("3", "3 apples", True),
    ("3 apples", "3", True),
    ("3 apples", "3 pears", False),
    ("3", "3 million", False),
    ("3", "3 or 4", False),
    ("3", "about 3", False),
    ("3", "three", False),
    ("10", "1", False),
    ("1", "10", False),
    ("-5", "5", False),
    ("-5", "−5", True),
    ("5 cm", "5cm", True),
    ("$5", "5 dollars", True),
    ("7up", "7", False),
    ("12:30", "24:60", False),
    ("1", "3-2", False),
    ("blue", "not blue", False),
    ("blue", "Blue.", True),
    ("blue", "the blue", True),
    ("blue", '"blue"', True),
    ("blue", "blue car", False),
    ("blue", "yes, blue", False),
    ("blue", r"\text{blue}", True),
    ("blue", ":", False),
    ("blue", "", False),
    ("dark blue", "dark-blue", True),
    ("no", "on", False),
    ("C++", "C", False),
    ("", "", False),
    (r"2\sqrt{2}", r"The answer is $\sqrt{8}$.", True),
    (r"2\sqrt{2}", r"\sqrt{9}", False),
    ("x+1", "1+x", True),
    ("3", "x=3", True),
    ("1", r"\frac{1}{2} \text{ or } 1", False),
    ("(1,2)", "(1, 2)", True),
    ("1234", "1 234", False),
    ("1.5", "1,5", False),
    ("1234", r"\boxed{1{,}234}", True),
    ("5 cm", r"\boxed{5\text{ cm}}", True),
    ("5 cm", r"$5\,\mathrm{cm}$", True),
    ("5 cm", "$5$ cm", True),
    ("5 cm", r"\boxed{5\text{ m}}", False),
    ("90°", r"90^{\circ}", True),
    ("90 degrees", r"$90^\circ$", True),
    ("(B)", "B", True),
    ("(B)", "(A) red", False),
    ("1/2", "1/3", False),
    ("5 cm", "50 mm", False),
    ("30", "30°", True),
    ("-0.5", "-1/2", True),
    ("2", "2 × 10^0", True),
    ("red", "blue, red", False),
    ("red", "the answer is red", True),
    ("red", "The answer is not red", False),
    ("yes", "Yes", True),
    ("yes", "yes and no", False),
    ("New York", "new york", True),
    ("a", "A", True),
]


@pytest.mark.parametrize("reference, reply, right", TABLE)
def test_the_answer_table(reference, reply, right):
    assert is_correct(reply, question(reference)) is right


OPTIONS = ("blue", "red", "3 cm", "3 m")


@pytest.mark.parametrize(
    "reference, reply, right",
    [
        ("B", "B", True),
        ("B", "red", True),
        ("red", "B", True),
        ("B", "(B) red", True),
        ("B", "(A) red", False),  # letter and text disagree
        ("A", "(A) red", False),
        ("B", "a red", True),  # an article, not option A
        ("B", "red or blue", False),
        ("B", "E", False),  # there is no E
        ("C", "3 cm", True),
        ("C", "3", False),  # it fits two options
    ],
)
def test_an_option_may_be_named_by_letter_or_by_its_text(reference, reply, right):
    assert is_correct(reply, question(reference, OPTIONS)) is right


def test_the_option_read_to_the_letter_wins_over_one_of_equal_meaning():
    assert read_choice("28", ("28%", "28")) == "B"
    assert read_choice("1,500", ("1200", "1500")) == "B"
    assert read_choice("y", ("x", "y")) == "B"  # there is no option Y
    assert read_choice("Final choice: **D**") == "D"


def test_a_reference_that_is_no_option_names_the_sample():
    with pytest.raises(ValueError, match="sample q.*'green'"):
        is_correct("A", question("green", OPTIONS))


def test_no_answer_is_wrong_and_so_is_a_long_one():
    assert not is_correct(None, question("blue"))
    assert is_correct("1" * 1000, question("1" * 1000))
    assert not is_correct("1" * 1001, question("1" * 1001))


@given(st.text(max_size=30))
def test_any_text_can_be_graded(reply):
    for reference in ("B", "3 cm", "blue"):
        assert is_correct(reply, question(reference)) in (True, False)
    assert is_correct(reply, question("B", OPTIONS)) in (True, False)


@given(st.integers(-(10**9), 10**9), st.integers(-(10**9), 10**9))
def test_whole_numbers_are_right_exactly_when_equal_however_grouped(a, b):
    assert is_correct(f"{b:,}", question(str(a))) is (a == b)


def test_formulas_are_graded_alike_in_any_thread():
    got = {}

    def one(i):
        got[i] = is_correct(r"\sqrt{8}" if i % 2 else r"\sqrt{9}", question(r"2\sqrt{2}"))

    threads = [threading.Thread(target=one, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {i: bool(i % 2) for i in range(8)}


def test_a_formula_that_never_ends_is_wrong_in_time_and_the_next_one_is_graded():
    grader, before = MathGrader(seconds=2), resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    assert grader.same("2", r"\frac{4}{2}")
    assert not grader.same("2", "9^{9^{9}}")
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
    assert is_correct("1+x", question("x+1"))
    assert GRADER.process.pid != os.getpid()


# From the whole reply: the last turn's single <answer> is what counts


def reply(*texts):
    """The policy said these; nothing it wrote was code. As rollout.speak reads it."""
    steps, answer, ended = [], None, "no_action"
    for text in texts:
        _, answer = parse(text, closed=True)
        steps.append(Turn(text, None, None, 0, 0))
        ended = "answered" if answer is not None else "no_action"
    return Trajectory(question("B"), turns=steps, answer=answer, ended=ended)


@pytest.mark.parametrize(
    "text, right, malformed",
    [
        ("<answer>(B) the red one</answer>", 1, False),
        ("<answer>A or B</answer>", 0, False),
        ("<answer></answer>", 0, False),
        ("<think>A</think><answer>B</answer>", 1, False),
        ("<think><answer>A</answer></think><answer>B</answer>", 1, True),
        ("<answer>A</answer> ... <answer>B</answer>", 0, True),  # two are none *
        ("<answer>B</answer> ... <answer>B</answer>", 0, True),
        ("<answer>B", 0, True),
        ("<answer>\n B \n</answer>\n", 1, False),
        ("Final choice: **D**", 0, True),
        ("<sandbox_output><answer>B</answer></sandbox_output>", 1, True),  # words of the policy
    ],
)
def test_the_single_answer_of_the_last_turn_counts(text, right, malformed):
    t = reply(text)
    assert (outcome(t, None).answer, format_error(t)) == (right, malformed)


def test_what_the_sandbox_printed_is_no_answer():
    t = reply("<think>so</think>")
    seen = Observation(text="<answer>B</answer>")
    t.turns.insert(0, Turn("<code>forge()</code>", "forge()", seen, 0, 0))
    assert outcome(t, None).answer == 0 and t.answer is None
    code = "<code>print('<answer>B</answer>')</code>"
    assert parse(code, closed=True)[1] is None


# Open answers: what the rules call wrong may be right in other words


class Judge:
    def __init__(self, verdict):
        self.verdict, self.asked = verdict, []

    def same_answer(self, *texts):
        self.asked.append(texts)
        return self.verdict


@pytest.mark.parametrize("verdict, expected", [(True, 1.0), (False, 0.0), (None, None)])
def test_other_words_are_for_the_judge(verdict, expected):
    judge = Judge(verdict)
    assert grade("a lorry", question("truck"), judge) == expected
    assert judge.asked == [("?", "truck", "a lorry")]


def test_without_a_judge_other_words_are_wrong():
    assert grade("a lorry", question("truck"), lambda request: 1.0) == 0.0


def test_what_the_rules_call_right_is_not_asked():
    judge = Judge(False)
    assert grade("The truck.", question("truck"), judge) == 1.0 and not judge.asked


@pytest.mark.parametrize(
    "reference, options, answer",
    [
        ("B", (), "the second"),  # a letter is a choice
        ("(B)", (), "the second"),
        ("", (), "anything"),
        ("red", ("red", "blue"), "crimson"),
        ("3", (), "three"),
        ("3 apples", (), "three apples"),
        (r"\sqrt{2}", (), "the root of two"),
        ("truck", (), None),
        ("truck", (), "lorry " * 200),
        ("truck", (), ""),
        ("truck", (), ":"),
        ("truck", (), " . * "),
        ("truck", (), "Thought process:"),
        ("truck", (), "Let's solve this problem step by step."),
        ("truck", (), "Solution"),
        ("truck", (), "Final answer:"),
        ("truck", (), "The answer is:"),
        ("truck", (), "OK. Sure, let me think"),
    ],
)
def test_some_answers_never_reach_the_judge(reference, options, answer):
    judge = Judge(True)
    assert grade(answer, question(reference, options), judge) == 0.0 and not judge.asked


def test_an_opener_followed_by_an_answer_is_one():
    assert is_open("Let's see: a lorry", question("truck"))
    assert is_open("so it is a lorry", question("truck"))
