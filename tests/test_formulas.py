"""python -m pytest tests/test_formulas.py      formulas, read in whole or not"""

import pytest

from kit.formulas import equal

EQUAL = [
    (r"\frac{1}{2004!}", r"\frac{1}{2004!}"), (r"\sqrt{2}", "1.414213"),
    ("6.02e23", r"6.02 \times 10^{23}"), ("1e5", "10^5"),
    ("6.02 × 10²³", r"6.02 \times 10^{23}"), ("6.02 x 10^23", r"6.02 \times 10^{23}"),
    ("y <= 5", "5 ≥ y"), ("3ab", "3ba"), ("10^-1", "0.1"), ("–2", "-2"), (r"2\frac{1}{2}", "2.5"),
    ("2½", "2.5"), (r"-2\frac12", "-2.5"), ("2 1/2", "2.5"), ("2(3)", "6"), ("(2)(3)", "6"),
    ("2^3^2", "512"), ("-2^2", "-4"), ("1/2 x", r"\frac{x}{2}"), (r"\frac12 x + 3", "3+0.5x"),
    ("x=3", "3"), ("y=2x+1", "2x+1=y"), ("y=2x+1", "2x+1"), ("f(x)=2x+1", "2x+1"),
    ("2x = 4", "x = 2"), ("x < 3", "-x > -3"), ("1<x<2", "2>x>1"), ("x = ±2", "x=2, x=-2"),
    ("x = ±2", "±2"), (r"2±\sqrt{3}", "2+√3, 2-√3"), (r"\infty", "∞"), (r"(-\infty, 3]", "(−∞, 3]"),
    (r"x \in (-\infty, 3]", "(−∞, 3]"), (r"\{1,2\}", r"\{2, 1\}"),
    (r"\left(\frac{1}{2}, 3\right)", "(0.5, 3)"), (r"\sin 30^\circ", r"\frac{1}{2}"),
    ("sin(30°)", "0.5"), (r"\sin^2 x + \cos^2 x", "1"), (r"\sin 2x", r"2\sin x\cos x"),
    (r"\sin 2x", "2sin(x)cos(x)"), (r"\log_2 8", "3"), (r"\log_{2}{8}", "3"),
    (r"\log 8", r"3\log 2"), (r"\ln e", "1"), (r"\tan^{-1} 1", r"\frac{\pi}{4}"),
    (r"\sqrt[3]{8}", "2"), (r"\sqrt[3]{-8}", "-2"), (r"\sqrt{12}", "2√3"), (r"\sqrt12", "2√3"),
    ("|-3|", "3"), ("|x||y|", "|xy|"), (r"\sqrt{x^2}", "|x|"), (r"\sqrt{2}\sqrt{2}-2", "0"),
    (r"\sin\pi", "0"), ("x_1", "x_{1}"), (r"\pi\times 10^{70}", "3.14159265358979e70"),
    (r"\frac{\sqrt{2^{3}}}{2}", "√2"), ("3!", "6"), ("5%", "0.05"), ("i^2", "-1"),
    (r"1,234\pi", "1234π"), (r"\alpha+\beta", "β + α"), ("1-10^{-9}", "1"), ("2÷3", r"\frac{2}{3}"),
    ("3·4", "12"), (r"\sqrt{ab}", r"\sqrt{ba}"), (r"\dfrac{3}{4}", "3/4"), (r"x \geq 2", "x>=2"),
    (r"x \neq 2", r"2 \ne x"), ("a/b", r"\frac{a}{b}"), ("(x+1)^2", "x^2+2x+1"), ("2^{10}", "1024"),
    (r"\frac{-1}{2}", "-0.5"), (r"2\cdot10^{5}", "200000"), (r"3\%", "0.03"), ("x^{-1}", "1/x"),
    ("x^{1/2}", "√x"), ("x^½", "√x"), ("√(x+1)", r"\sqrt{x+1}"), (r"\frac{\pi}{6}", "π/6"),
    (r"2\pi r", "2πr"), ("2*π*r", "2 pi r"), ("1 1/2", "3/2"), ("2∛{5}", r"2\sqrt[3]{5}"),
    ("∜16", "2"), ("1/2", "½"),
]  # fmt: skip
DIFFERENT = [
    (r"6.63 \times 10^{-34}", "0.0"),
    (r"-1.6 \times 10^{-19}", r"1.6 \times 10^{-19}"), (r"\frac{1}{2004!}", r"\frac{1}{2006!}"),
    ("e^{-40}", "e^{-41}"), (r"1-\frac{1}{\mathrm{e}}", r"1+\frac{1}{\mathrm{e}}"),
    (r"1-\frac{1}{\mathrm{e}}", "1"), (r"10^{-5}\pi", "0.000031"), (r"\sqrt{2}", "1.41421"),
    ("∛5", "√5"), ("4 2", "6"), ("A'", "A"), ("x=3", "y=3"), ("x < 3", "-x < -3"),
    ("1<x<2", "1<x<3"), (r"-\infty", "∞"), ("∞", "5"), (r"(-\infty, 3]", "(−∞, 3)"),
    ("(1,2)", "(2,1)"), ("(1,2)", "[1,2]"), (r"\log 100", "2"), ("|x|", "x"), ("10^8+x", "10^8"),
    ("10^{8}+1", "10^8"), (r"3.0 \text{ or } 4", "3"), (r"\frac{1}{", "1"), ("x +", "x"),
    ("(x", "x"), ("x_1", "x_2"), ("5551234567+0", "5551234568"), ("9.1×10⁻³¹", "1.6×10⁻¹⁹"),
    ("1:2:3", "1:2:4"), ("e^{ab}", "e^ab"), ("√x+1", r"\sqrt{x+1}"), ("12:30", "24:60"),
]  # fmt: skip


def read_equal(one: str, other: str) -> bool | None:
    """None where one of the two is no formula."""
    try:
        return equal(one, other)
    except (ValueError, TypeError, ArithmeticError):
        return None


@pytest.mark.parametrize("one, other", EQUAL)
def test_formulas_of_one_value_are_equal(one, other):
    assert read_equal(one, other) is True and read_equal(other, one) is True


@pytest.mark.parametrize("one, other", DIFFERENT)
def test_formulas_of_two_values_and_halves_of_formulas_are_not(one, other):
    assert not read_equal(one, other) and not read_equal(other, one)


NONE = ["4 2", "x2", "H2O", "(x", "x)", "x +", r"\foo{3}", "3..4", "5 #", "2{", "", "^2"]


@pytest.mark.parametrize("text", NONE)
def test_what_is_no_formula_is_not_read(text):
    assert read_equal(text, text) is None
