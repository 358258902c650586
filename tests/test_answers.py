"""python -m pytest tests/test_answers.py      about 20 s, most of them for the laws"""

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kit import answers
from kit.answers import check_reference, is_correct, is_open, read_choice, same_answer
from kit.formulas import plain


def specification():
    """(reference, options, reply, right?) of each reply in the table at the head of answers.py."""
    table = re.search(r" right +wrong\n(.*?)\n\n", answers.__doc__, re.DOTALL)[1]
    for line in table.splitlines():
        cells = re.split(r" {2,}", line.strip())
        if line[2] != " ":
            head = re.fullmatch(r"(.*?)(?: \[(.*)\])?", cells.pop(0))
            reference, options = head[1], tuple(head[2].split(" / ")) if head[2] else ()
        assert len(cells) == 2, line
        for replies, right in zip(cells, (True, False)):
            for reply in replies.split(" ; "):
                yield *(text.replace("↵", "\n") for text in (reference, reply)), options, right


SPECIFICATION = [*specification()]


@pytest.mark.parametrize("reference, reply, options, right", SPECIFICATION)
def test_the_specification(reference, reply, options, right):
    check_reference(reference, options)
    assert is_correct(reply, reference, options) is right


def test_the_specification_is_read():
    assert (
        len(SPECIFICATION) > 180 and ("B", "red", ("red", "blue", "2 cm"), False) in SPECIFICATION
    )


MORE = [
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


@pytest.mark.parametrize("reference, reply, right", MORE)
def test_more_of_the_same(reference, reply, right):
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


@pytest.mark.parametrize(
    "reference, options",
    [("", ()), ("\\boxed{}", ()), ("1" * 1001, ()), ("green", OPTIONS), ("E", OPTIONS),
     ("B. 3 m", OPTIONS), ("A or B", OPTIONS), ("B", ("red", "red"))],
)  # fmt: skip
def test_a_reference_that_cannot_be_right_is_refused_when_it_is_loaded(reference, options):
    with pytest.raises(ValueError, match="drop the question"):
        check_reference(reference, options)


def test_working_is_left_out_of_reply_and_reference():
    assert same_answer("The answer is red", "red")
    assert same_answer("red", "The answer is red")


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


DEGREES, CENTIMETRES = ("10°", "15°", "20°"), ("6 cm", "12 cm", "18 cm")
ROOTS = ("2", r"2√{3}", r"√{3}", r"2√{2}")
LETTERS = ("A", "B", "C", "D", "E")
REPORTED = [  # by people who train and evaluate such policies: options, reply, the option it names
    *[(DEGREES, reply, "B") for reply in (
        r"\boxed{\textbf{(B)}}", r"\boxed{\mathbf{B}}", r"\boxed{\text{(B)}\ 15^\circ}",
        r"\boxed{\textbf{(B) } 15^\circ}", r"\boxed{{\bf (B)} 15^\circ}", r"\(\boxed{\text{B}}\)",
        r"$\boldsymbol{B}$", r"\textit{B}. 15°", r"\boxed{\text{B: }15^{\circ}}")],
    (CENTIMETRES, r"\boxed{\text{(B)} ~ 18}", None),
    (CENTIMETRES, r"\boxed{\text{(B)} ~ 12}", "B"),
    *[(LETTERS, reply, "B") for reply in ("B. B", "(B) B", "B: B", "Option B: B", "**B. B**")],
    *[(LETTERS, reply, None) for reply in ("B. C", "B or C", "B: A", "(B) or (C)")],
    *[(ROOTS, reply, "B") for reply in (r"\boxed{2\sqrt{3}}", "2√3", r"B. $2\sqrt 3$")],
    (ROOTS, "2√7", None),
    (("2", "√{3}", "4", "6"), "2√3", None),
    ((r"$4 \times 6$", r"$3 \times 8$"), r"3 \times 8", "B"),
    ((r"$4 \times 6$", r"$3 \times 8$"), "24", None),
    (("blue", "red"), "（B）", "B"),
    (("blue", "red"), "【B】 red", "B"),
    (("blue", "red"), "Ｂ。", "B"),
]  # fmt: skip


@pytest.mark.parametrize("options, reply, letter", REPORTED)
def test_reported_choices(options, reply, letter):
    assert read_choice(reply, options) == letter


UNITS = [
    ("5 MW", "5 mW", False), ("5 MW", "5 megawatts", True), ("5 mm", "5 millimetres", True),
    ("6 μm", "6 micrometers", True), ("6 μm", "6 mm", False), ("60 mph", "60 miles per hour", True),
    ("9.8 m/s²", "9.8 meters per second squared", True), ("9.8 m/s²", "9.8 m/s", False),
    ("20 N·m", "20 N m", True), ("10 cm³", "10 cubic centimeters", True), ("5 CM", "5 cm", True),
    ("300 K", "300", True), ("3K", "3", False), ("1990s", "1990", False), ("3 dozen", "3", False),
    (r"25\pi \text{ cm}^2", "25π", True), ("25π cm²", "25π m²", False), ("5:30 am", "5", False),
    (r"400 \mathrm{~cm}^{2}", "400", True), ("30 °C", "30 degrees Celsius", True),
]  # fmt: skip


@pytest.mark.parametrize("reference, reply, right", UNITS)
def test_units(reference, reply, right):
    assert is_correct(reply, reference) is right and is_correct(reference, reply) is right


# Laws

numbers = st.one_of(
    st.integers(-30, 30).map(str),
    st.sampled_from(
        ["0.5", ".5", "1/2", "2 1/2", "1e5", "1,234", "1.6e-19", "6.63e-34", "0.0", "50%"]
    ),
)
amounts = st.tuples(
    numbers, st.sampled_from(["", "cm", "m", " m^2", " m²", " km/h", " °C", " square meters", "%"])
).map("".join)
letters = st.sampled_from([*"abxyABE", "π", r"\pi", "e"])
formulas = st.recursive(
    st.one_of(st.integers(0, 9).map(str), letters, st.sampled_from(["0.5", r"10^{-31}", "2004!"])),
    lambda part: st.one_of(
        st.tuples(part, st.sampled_from(["+", "-", r"\times ", "·", "*", "/"]), part).map("".join),
        st.builds(r"\frac{{{}}}{{{}}}".format, part, part),
        st.builds("({})^{{{}}}".format, part, st.integers(-3, 3)),
        st.builds(r"\sqrt{{{}}}".format, part),
        st.builds("√({})".format, part),
        st.builds("{}={}".format, letters, part),
    ),
    max_leaves=4,
)
words = st.sampled_from(
    "red|the red|blue|dark-blue|New York|no|on|yes|C++|H2O|蓝色|2nd|x-ray".split("|")
)
bare = st.one_of(amounts, formulas, words)
laws = settings(deadline=None, max_examples=100, derandomize=True)


@laws
@given(bare)
@example("!")
@example("(A) red")
@example("The answer is red")
@example(r"\boxed{A}")
@example("a=b or c=d")
@example(r"\frac{1}{")
@example("A'")
def test_law_every_reference_is_right_by_its_own_rule(reference):
    check_reference(reference)
    assert is_correct(reference, reference)


@laws
@given(bare, bare)
@example("4√2", "4")
@example("400 cm^2", r"400 \mathrm{~cm}^{2}")
@example("x=3", "3")
@example("28%", "0.28")
@example("0.0", r"6.63 \times 10^{-34}")
@example("1", "1.000001")
@example("1.0000010000005", "1.0")
def test_law_equality_is_symmetric_where_both_sides_are_bare(one, other):
    assert same_answer(one, other) == same_answer(other, one)


@laws
@given(st.lists(bare, min_size=2, max_size=5, unique_by=plain), bare)
@example(["2", "√{3}", "4", "6"], "2√3")
@example(["28%", "28"], "28")
@example(["5 cm", "5 m"], "5")
@example([*"ABCDE"], "B. C")
@example(["B", "A"], "A. B")
@example(["red", "blue"], "A, B")
def test_law_no_answer_equals_two_different_options(options, reply):
    assert sum(is_correct(reply, letter, options) for letter in "ABCDE"[: len(options)]) <= 1
    named = [
        letter for letter, text in zip("ABCDE", options) if is_correct(letter, letter, options)
    ]
    assert named == [*"ABCDE"[: len(options)]]


DRESSES = (
    r"\text{%s}", r"\textbf{%s}", r"\mathbf{%s}", r"\mathrm{%s}", r"{\bf %s}", r"\boldsymbol{%s}",
    r"\boxed{%s}", r"\boxed{\text{%s}}", r"\fbox{\textit{%s}}", "$%s$", r"$\boxed{%s}$", r"\(%s\)",
    r"\[ %s \]", "**%s**", "`%s`", '"%s"', "“%s”", "The answer is %s.", "**Answer:** %s", "%s。",
)  # fmt: skip


@laws
@given(bare, bare, st.sampled_from(DRESSES))
@example("red", "red", r"\boxed{\textbf{%s}}")
@example("5 cm", "5", "$%s$")
@example("4", r"4√2", r"\boxed{\text{%s}}")
@example("D", "D", "Answer: **%s**")
def test_law_markup_never_changes_a_verdict(reply, reference, dress):
    right = is_correct(reply, reference)
    assert is_correct(dress.replace("%s", reply), reference) is right
    assert is_correct(reply, dress.replace("%s", reference)) is right


@laws
@given(
    formulas, st.sampled_from(["#", "√", r"\foo", r"\foo{2}", "⊕ 2", "^", "{", " 2 3", "@", "∫"])
)
@example("4", "√2")
@example(r"2√{3}", " or 4")
def test_law_nothing_is_compared_in_part(formula, more):
    assert not same_answer(formula + more, formula)
    assert not same_answer(f"∫{formula}", formula) and not same_answer(f"#{formula}", formula)


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
