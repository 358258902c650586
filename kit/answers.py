"""
answers.py: which text counts as right: one table of rules.

Concept     Which text counts as right: one table of rules.
Paper       nothing
In          
Out         
Left out    
Read next   
"""

from __future__ import annotations

import re
import string
from fractions import Fraction

from kit.grader import GRADER

# Answers. The rules in one table; * marks what other projects settle differently.
#
#   reference   right                                wrong
#   B           B  b  (B)  B. red  **B**  \boxed{B}  A or B   not B   B and so on (no delimiter) *
#   B           red, if that is the text of B        (A) red, if "red" is the text of B *
#   1234        1,234   1234.0   1{,}234             1,23   1 234 *   1235: whole numbers exactly
#   0.5         .50   1/2   \frac{1}{2}   50%        0.50001: within one part in a million *
#   5 cm        5   5.0 cm   5\text{ cm}   5cm       5 m   50 mm: nothing is converted *
#   28%         28 percent   0.28   28 *             28 cm: units agree where both name one *
#   3           3 apples   $3 *                      3 million   3 or 4   about 3   three *
#   2\sqrt{2}   \sqrt{8}, by math-verify             what math-verify cannot settle in 5 s *
#   blue        Blue.   the blue   "blue"            not blue   blue car   yes, blue *   (empty)
#   blue        azure, if a judge says so            azure without a judge; "Solution:" anyhow *
#   any         at most 1,000 characters             longer
#
# Text before the last "answer is" or "answer:", or outside the last \boxed{}, is working. *

MAX_ANSWER = 1000  # characters: long answers are how graders get talked round

# Each expression reads one kind of thing in the table; CUE is all the text up to "answer is".
CUE = re.compile(r".*\b(?:answer|option|choice)\b[\s*]*(?:is\b|:)[\s*:]*", re.I | re.S)
BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")
WRAPPED = re.compile(r"\$+([^$]+)\$+|\\\((.+)\\\)|\\\[(.+)\\\]|\\(?:text|mathrm)\{([^{}]*)\}")
LONE = re.compile(r"\(?[A-Z]\)?")  # a reference that is a letter, though no options are listed
LETTER = re.compile(r"(?:option )?\(?([a-z])(?:$|[.):,]+ ?(.*))", re.I)  # "B", "(B)", "B. red"
ANOTHER = re.compile(r"\W*[A-Za-z]\W*$|.*(?:\([A-Za-z]\)|(?:\b(?:or|and)|[,/&]) ?[A-Z]\b)")
NUMBER = re.compile(
    r"([-+]?) ?([$€£]?) ?((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)(e[-+]?\d\d?)?"
    r"(?: ?/ ?(0*[1-9]\d*))?( ?[%°]| (?!thousand|.illion)[^\W\d_]+)?"
)
LATEX = {
    r"\\(?:text|mathrm|mbox)\{([^{}]*)\}": r" \1", r"\$([^$]+)\$": r"\1", r"\\[,;: ]|~": " ",
    r"\{,\}": ",", r" ?\^\{?\\circ\}?": "°", r"\\([%$])": r"\1", "−": "-",
}  # fmt: skip
SIGNS = {"percent": "%", "dollars": "$", "degrees": "°"}
FORMULA = re.compile(r"[\\^=√π]|\b[a-z] ?[-+*/]|[-+*/] ?[a-z]\b", re.I)
OPENER = re.compile(
    r"(?i)((ok(ay)?|sure|well|so|solution|reasoning|thought process|(final )?answer|step by step|"
    r"let(['’]s| us| me) (think|solve|work|look|see|answer|find)\b[^.:]*)\W*)+"
)
WORD = re.compile(r"(?<![\\a-z])[a-z]{2}", re.I)  # but not \frac


def is_correct(answer: str | None, sample) -> bool:
    """Is the text of the single <answer> right? The table above is the specification."""
    if answer is None or len(answer) > MAX_ANSWER:
        return False
    reference = sample.answer.strip()
    if not sample.options and not LONE.fullmatch(reference):
        return same_answer(reference, answer)
    right = read_choice(reference, sample.options)
    if right is None:
        raise ValueError(
            f"sample {sample.id}: its answer should name one of the options {sample.options}, by "
            f"letter or text, but is {sample.answer!r}: correct the data, or drop the question"
        )
    return read_choice(answer, sample.options) == right


def is_open(answer: str | None, sample) -> bool:
    """May a judge say whether this is right? Not where the reference is an option, a number or a
    formula; nor where the reply says nothing: judges are known to pass ":" and "Solution:"."""
    reference = unwrap(sample.answer)
    ruled = LONE.fullmatch(reference) or read_number(reference) or is_formula(reference)
    if sample.options or not reference or ruled or answer is None or len(answer) > MAX_ANSWER:
        return False
    said = final_answer(answer)
    return bool(re.search(r"[^\W_]", said)) and not OPENER.fullmatch(said)


def read_choice(reply: str, options: tuple[str, ...] = ()) -> str | None:
    """The one option that a reply names, as a letter; None if it names none, or several."""
    text = final_answer(reply)
    letters = string.ascii_uppercase[: len(options) or None]

    def with_text(text: str) -> str | None:
        for same in (same_text, same_answer):  # to the letter, else in meaning
            fits = [c for c, option in zip(letters, options) if same(option, text)]
            if fits:
                return fits[0] if len(fits) == 1 else None
        return None

    match = LETTER.fullmatch(text)
    if not match or match[1].upper() not in letters:
        return with_text(text)
    letter, rest = match[1].upper(), match[2] or ""
    contradicted = ANOTHER.match(rest) or with_text(rest) not in (None, letter)
    return None if contradicted else letter


def same_answer(reference: str, reply: str) -> bool:
    """As two numbers if both are, else as texts, else as formulas."""
    reference, reply = unwrap(reference), final_answer(reply)
    a, b = read_number(reference), read_number(reply)
    if a and b:
        return same_number(*a, *b)
    if same_text(reference, reply):
        return True
    calculable = (a or is_formula(reference)) and (b or is_formula(reply))
    return bool(calculable) and GRADER.same(reference, reply)


def same_text(reference: str, reply: str) -> bool:
    def plain(text: str) -> str:
        text = re.sub(r"(?<=[^\W\d])-(?=[^\W\d])", " ", text.casefold()).strip(" .,;:!?")
        return re.sub(r"^(?:a|an|the) (?=.)|(?<=,) |(?<=\d) (?=[a-z])", "", text)

    return plain(reference) == plain(reply) != ""


def read_number(text: str) -> tuple[Fraction, str] | None:
    """(value, unit) if the whole text is one number, else None."""
    for latex, plain in LATEX.items():
        text = re.sub(latex, plain, text)
    text = " ".join(text.casefold().split())
    if (match := NUMBER.fullmatch(text)) is None:
        return None
    sign, currency, digits, power, below, unit = match.groups("")
    value = Fraction(sign + digits.replace(",", "") + power) / int(below or 1)
    return value, SIGNS.get(unit.strip(), unit.strip()) or currency


def same_number(a: Fraction, unit_a: str, b: Fraction, unit_b: str) -> bool:
    def close(a: Fraction, b: Fraction) -> bool:
        whole = a.denominator == b.denominator == 1
        return a == b or not whole and abs(a - b) * 10**6 <= abs(a)

    if {unit_a, unit_b} == {"%", ""} and close(*((a / 100, b) if unit_a else (a, b / 100))):
        return True
    return (unit_a == unit_b or "" in (unit_a, unit_b)) and close(a, b)


def is_formula(text: str) -> bool:
    return bool(FORMULA.search(text)) and not WORD.search(text)


def final_answer(reply: str) -> str:
    text = CUE.sub("", reply, count=1)
    return unwrap((BOXED.findall(text) or [text])[-1])


def unwrap(text: str) -> str:
    """Take off what carries no meaning: markup, quotes, formula delimiters, a final full stop."""
    text, before = " ".join(text.split()), None
    while text != before:
        before, text = text, text.strip(" :*`\"'“”‘’").removesuffix(".")
        match = WRAPPED.fullmatch(text)
        text = next(filter(None, match.groups()), "") if match else text
    return text
