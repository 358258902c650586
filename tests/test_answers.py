"""python -m pytest tests/test_answers.py      which text counts as right"""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kit import answers
from kit.answers import check_reference, is_correct, is_open, same_answer, undressed
from kit.formulas import plain


def rows_of(table):
    """(reference, reply, options, right?) of each reply in a table like that of answers.py."""
    for line in table.splitlines():
        cells = re.split(r" {2,}", line.strip())
        if line[2] != " ":
            head = re.fullmatch(r"(.*?)(?: \[(.*)\])?", cells.pop(0))
            reference, options = head[1], tuple(head[2].split(" / ")) if head[2] else ()
        assert len(cells) == 2, line
        for replies, right in zip(cells, (True, False)):
            for reply in replies.split(" ; "):
                yield *(text.replace("↵", "\n") for text in (reference, reply)), options, right


MORE = r"""
  B                 (B) the red one ; (b) ; B, not A             \boxed{C} ; (A) or (B) ; A, B
                    B, because it is red ; (B) A red car         B, A
                    \boxed{F = ma}, so the answer is B           (C) A red car
  F                 F                                            \boxed{F = ma}
  D                 Answer: A↵Final answer: D                    Answer: D↵Final answer: A
  0.333333333       1/3                                          0.33333
  5551234567        5551234567                                   5551234568
  3 apples          3                                            3 pears
  1                 3/3                                          10 ; 3-2 ; \frac12 \text{ or } 1
  $5                5 dollars ; 5                                6 dollars ; 5 euros
  7up               7up                                          7
  no                No                                           on
  2                 2 × 10^0                                     2 × 10^1
  B [red / blue]    The answer is **B**. ; '**(B) blue**.'       *A*. ; A, B, and A
                    **B.** blue ; The answer is **(B)** blue.    **B.** red ; **A.** blue
  B [(1, 2) / C. / It is red.]  **B.** C. ; B (C.)               A (C.)
  A [(1, 2) / C. / It is red.]  (1, 2) (A) ; A - (1, 2)          (1, 2) (B)
  red car           **red** car ; The answer is **red** car      red
  B [1 / 2 / 3]     2 (B) ; B = 2 ; B – 2 ; "B"                  3 (B) ; 2 (A) ; A. 1↵B. 2
  A [A cat / A dog / I / vitamin C]  A cat ; A. A cat ; a cat    A dog ; A (I) ; I
  D [A cat / A dog / I / vitamin C]  D. vitamin C ; vitamin C    (D) A cat ; C
  A, C [red / blue / green]  Options A and C ; ['A', 'C']        A, B ; A. red
                    A. red↵C. green ; A, C, and A                A. red↵B. blue↵C. green
  1, 2              2, 1 ; 1 and 2 ; x=1, y=2                    1 ; 1, 2, 3 ; 1 or 2 ; 12
  E. coli           E. coli ; E                                  coli bacteria ; F
  .0                0 ; .00 ; 0.0                                .01
  5                 **5**. ; x = 5 ; ‘5’ ; 5​                .0 ; 5 x ; xİ ; 5\FRAC{1}{2}
  don't             don’t                                        dont
  2ˣ                2^x ; 2^{x}                                  2x ; 2
  5ᵗʰ               5th ; $5^{th}$                               5
  \log_2 3          log₂3 ; \log_{2}{3}                          log(23) ; log 3
  10₂               10_2 ; 10_{2}                                102 ; 10
  x₁ = 2            x_1 = 2 ; x_{1}=2 ; x1 = 2 ; 2               x_2 = 2
  AB ∥ CD           AB \parallel CD ; AB∥CD                      AB ⊥ CD
  \angle ABC = 30^\circ   ∠ABC=30° ; ∠ ABC = 30° ; 30° ; {30}^{\circ}   31° ; ∠ABD = 30°
  -2                — 2 ; –2                                     2
  2008-2012         2008 – 2012 ; 2008–2012                      2009-2013
  9:30 AM           9:30 a.m. ; 9:30am                           9:30 pm ; 9:30
  6.02e23           6.02X10^23 ; 6.02\times{10}^{23}             6.02×10₂₃
  12\,000\text{ m}  12000 ; 12,000 m                             12
  B [10° / 15° / 20°]  \boxed{\textbf{(B)}} ; \boxed{\mathbf{B}} ; \textit{B}. 15°   \mathbf{A}
                    \boxed{\text{(B)}\ 15^\circ} ; \boxed{\textbf{(B) } 15^\circ}    \textbf{(C)}
                    \boxed{{\bf (B)} 15^\circ} ; \boxed{\text{B: }15^{\circ}}        {\bf C}
                    \(\boxed{\text{B}}\) ; $\boldsymbol{B}$                          $\mathbf{C}$
  B [6 cm / 12 cm / 18 cm]  \boxed{\text{(B)} ~ 12}              \boxed{\text{(B)} ~ 18}
  B [A / B / C / D / E]  B. B ; (B) B ; B: B ; Option B: B ; **B. B**   B. C ; B or C ; (B) or (C)
  B [2 / 2√{3} / √{3} / 2√{2}]  \boxed{2\sqrt{3}} ; 2√3 ; B. $2\sqrt 3$   2√7
  A [2 / √{3} / 4 / 6]  2                                        2√3
  B [$4 \times 6$ / $3 \times 8$]  3 \times 8                    24
  B [blue / red]    （B） ; 【B】 red ; Ｂ。                     【A】 red
  B [28% / 28]      28                                           28%
  B [1200 / 1500]   1,500                                        1,200
  B [x / y]         y                                            x
  A [B / A / D / C]  A. B                                        A. A
  D                 Final choice: **D**                          Final choice: **A**
"""[1:]
SPECIFICATION = [*rows_of(re.search(r" right +wrong\n(.*?)\n\n", answers.__doc__, re.DOTALL)[1])]
assert len(SPECIFICATION) > 180  # it was read


@pytest.mark.parametrize("reference, reply, options, right", [*SPECIFICATION, *rows_of(MORE)])
def test_the_specification(reference, reply, options, right):
    check_reference(reference, options)
    assert is_correct(reply, reference, options) is right


OPTIONS = ("blue", "red", "3 cm", "3 m")


@pytest.mark.parametrize("reference, options", [
    ("", ()), ("\\boxed{}", ()), ("1" * 1001, ()), ("green", OPTIONS), ("E", OPTIONS),
    ("B. 3 m", OPTIONS), ("A or B", OPTIONS), ("B", ("red", "red")),
])  # fmt: skip
def test_a_reference_that_cannot_be_right_is_refused_when_it_is_loaded(reference, options):
    with pytest.raises(ValueError, match="drop the question"):
        check_reference(reference, options)


def test_no_answer_is_wrong_and_so_is_a_long_one():
    for reply in (None, "", ":", " b\n" * 400):
        assert not is_correct(reply, "blue") and not is_correct(reply, "B")
    assert is_correct(" b\n", "B") and not is_correct("", "")
    assert [is_correct("1" * n, "1" * n) for n in (1000, 1001)] == [True, False]


@given(st.text(max_size=30))
def test_any_text_can_be_graded(reply):
    for reference, options in ("B", ()), ("3 cm", ()), ("blue", ()), ("B", OPTIONS):
        assert is_correct(reply, reference, options) in (True, False)


@given(st.integers(-(10**9), 10**9), st.integers(-(10**9), 10**9))
def test_whole_numbers_are_right_exactly_when_equal_however_grouped(a, b):
    assert is_correct(f"{b:,}", str(a)) is (a == b)


UNITS = [
    ("5 MW", "5 mW", False), ("5 MW", "5 megawatts", True), ("5 mm", "5 millimetres", True),
    ("6 μm", "6 micrometers", True), ("6 μm", "6 mm", False), ("60 mph", "60 miles per hour", True),
    ("9.8 m/s²", "9.8 meters per second squared", True), ("20 N·m", "20 N m", True),
    ("10 cm³", "10 cubic centimeters", True), ("5 CM", "5 cm", True), ("5 [cm]", "5", True),
    ("300 K", "300", True), ("3K", "3", False), ("1990s", "1990", False), ("3 dozen", "3", False),
    (r"5\ \mathrm{m}\cdot\mathrm{s}^{-1}", "5 m/s", True), (r"5\mu\mathrm{m}", "5 um", True),
    (r"1.6\times10^{-19}\text{ C}", "1.6e-19", True), ("5 μF", "5", True), ("£5", "5 pounds", True),
    ("¥5", "5 yen", True), ("$5", "US$5", True), ("60 km/h", "60 kmph", True), ("3 B", "3", False),
    ("28%", "28 per cent", True), ("3C", "3", False), ("1.5T", "1.5", False), ("5 am", "5", False),
    ("A = 5 cm", "5 cm", True), ("A = 5 cm", "5 m", False), ("30 °C", "30 degrees Celsius", True),
]  # fmt: skip


@pytest.mark.parametrize("reference, reply, right", UNITS)
def test_units(reference, reply, right):
    assert is_correct(reply, reference) is right and is_correct(reference, reply) is right


odd = "0.5|.5|1/2|2 1/2|1e5|1,234|1.6e-19|6.63e-34|0.0|50%".split("|")
units = st.sampled_from("|cm|m| m^2| m²| km/h| °C| square meters|%".split("|"))
amounts = st.tuples(st.integers(-30, 30).map(str) | st.sampled_from(odd), units).map("".join)
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
words = "red|the red|blue|dark-blue|New York|no|on|yes|C++|H2O|蓝色|2nd|x-ray".split("|")
bare = st.one_of(amounts, formulas, st.sampled_from(words))


@given(bare)
@example("!")
@example("a=b or c=d")
@example(r"\frac{1}{")
@example("A'")
@example("(A), (C)")
def test_law_every_reference_is_right_by_its_own_rule(reference):
    check_reference(reference)
    assert is_correct(reference, reference)


@given(bare, bare)
@example("4√2", "4")
@example("400 cm^2", r"400 \mathrm{~cm}^{2}")
@example("0.0", r"6.63 \times 10^{-34}")
@example("1", "1.000001")
@example("1.0000010000005", "1.0")
def test_law_equality_is_symmetric_where_both_sides_are_bare(one, other):
    assert same_answer(one, other) == same_answer(other, one)


@given(st.lists(bare, min_size=2, max_size=5, unique_by=plain), bare)
@example(["28%", "28"], "28")
@example(["5 cm", "5 m"], "5")
@example([*"ABCDE"], "B. C")
@example(["B", "A"], "A. B")
@example(["red", "blue"], "A, B")
def test_law_no_answer_equals_two_different_options(options, reply):
    assert sum(is_correct(reply, letter, options) for letter in "ABCDE"[: len(options)]) <= 1
    assert all(is_correct(letter, letter, options) for letter in "ABCDE"[: len(options)])


DRESSES = (
    r"\text{%s}", r"\textbf{%s}", r"\mathbf{%s}", r"\mathrm{%s}", r"{\bf %s}", r"\boldsymbol{%s}",
    r"\boxed{%s}", r"\boxed{\text{%s}}", r"\fbox{\textit{%s}}", "$%s$", r"$\boxed{%s}$", r"\(%s\)",
    r"\[ %s \]", "**%s**", "`%s`", '"%s"', "“%s”", "The answer is %s.", "**Answer:** %s", "%s。",
    "The answer is **%s**.", "**Answer:** **%s**", "**Answer: %s**.", "Answer is: %s",
)  # fmt: skip


def test_options_lose_the_letters_of_their_own():
    for options in (["(A) red", "(B)blue"], ["A. red", "B. blue"], ["A) red", "B: blue"]):
        assert undressed(options) == ("red", "blue")
    others = ("B. red", "B:C", "C", "D.5", "A cat")
    assert undressed(others) == others and undressed([1, "(B)"]) == ("1", "(B)")


@given(bare, bare, st.sampled_from(DRESSES))
@example("red", "red", r"\boxed{\textbf{%s}}")
@example("5 cm", "5", "$%s$")
@example("4", r"4√2", r"\boxed{\text{%s}}")
@example("D", "D", "Answer: **%s**")
def test_law_markup_never_changes_a_verdict(reply, reference, dress):
    right = is_correct(reply, reference)
    assert is_correct(dress.replace("%s", reply), reference) is right
    assert is_correct(reply, dress.replace("%s", reference)) is right


@given(formulas, st.sampled_from(r"# √ \foo \foo{2} ⊕2 ^ { @ ∫".split() + [" 2 3"]))
@example("4", "√2")
@example(r"2√{3}", " or 4")
def test_law_nothing_is_compared_in_part(formula, more):
    assert not same_answer(formula + more, formula)
    assert not same_answer(f"∫{formula}", formula) and not same_answer(f"#{formula}", formula)


@pytest.mark.parametrize("reference, options, reply, judged", [
    ("B", (), "the second", False), ("(B)", (), "the second", False),  # a letter is a choice
    ("", (), "anything", False), ("red", ("red", "blue"), "crimson", False),
    ("3", (), "three", False), ("3 apples", (), "three apples", False),
    (r"\sqrt{2}", (), "the root of two", False),
    *(("truck", (), reply, False) for reply in (
        None, "lorry " * 200, "", ":", " . * ", "Thought process:", "Solution", "Final answer:",
        "Let's solve this problem step by step.", "The answer is:", "OK. Sure, let me think")),
    *(("truck", (), reply, True) for reply in (
        "a lorry", "Let's see: a lorry", "so it is a lorry")),
])  # fmt: skip
def test_words_alone_are_for_a_judge_and_only_behind_an_opener(reference, options, reply, judged):
    assert is_open(reply, reference, options) is judged
