"""python -m pytest tests/test_answers.py      about 9 s, most of them to import torch"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.answers import is_correct, is_open, read_choice, same_answer

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
    assert is_correct(reply, reference) is right


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
    assert is_correct(reply, reference, OPTIONS) is right


def test_the_option_read_to_the_letter_wins_over_one_of_equal_meaning():
    assert read_choice("28", ("28%", "28")) == "B"
    assert read_choice("1,500", ("1200", "1500")) == "B"
    assert read_choice("y", ("x", "y")) == "B"  # there is no option Y
    assert read_choice("Final choice: **D**") == "D"


def test_a_reference_that_is_no_option_is_refused():
    with pytest.raises(ValueError, match="one of the options .*'3 m'.*but is 'green': correct"):
        is_correct("A", "green", OPTIONS)


def test_working_is_left_out_of_the_reply_alone():
    assert same_answer("The answer is red", "red")
    assert not same_answer("red", "The answer is red")


def test_no_answer_is_wrong_and_so_is_a_long_one():
    assert not is_correct(None, "blue")
    assert is_correct("1" * 1000, "1" * 1000)
    assert not is_correct("1" * 1001, "1" * 1001)


@given(st.text(max_size=30))
def test_any_text_can_be_graded(reply):
    for reference in ("B", "3 cm", "blue"):
        assert is_correct(reply, reference) in (True, False)
    assert is_correct(reply, "B", OPTIONS) in (True, False)


@given(st.integers(-(10**9), 10**9), st.integers(-(10**9), 10**9))
def test_whole_numbers_are_right_exactly_when_equal_however_grouped(a, b):
    assert is_correct(f"{b:,}", str(a)) is (a == b)


# Open answers: what the rules call wrong may be right in other words


@pytest.mark.parametrize(
    "reference, options, reply",
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
def test_some_answers_are_not_for_a_judge(reference, options, reply):
    assert not is_open(reply, reference, options)


def test_words_are_for_a_judge():
    assert is_open("a lorry", "truck")


def test_an_opener_followed_by_an_answer_is_one():
    assert is_open("Let's see: a lorry", "truck")
    assert is_open("so it is a lorry", "truck")
