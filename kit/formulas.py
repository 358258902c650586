r"""
formulas.py: one spelling for mathematics, and a reader that takes a formula in whole or not at all.

Concept     Two formulas are equal if they have the same value, whatever numbers their letters
            stand for. The reader puts in a few numbers and compares. What its grammar does not
            cover is no formula, so that no formula is ever compared in part.
Paper       nothing: CodeV does not say how formulas are compared
In          texts as people, LaTeX and keyboards write them
Out         plain(text): one spelling of all of them; equal(a, b) of two texts
Left out    matrices, sums, integrals, logic, unions of intervals
Read next   grader.py (the process in which formulas are read), answers.py

The grammar, loosest first: a list with commas; = ≠ < > ≤ ≥ ∈; ratios a:b; + and -; products; signs;
powers, after ! % and °; atoms. A number follows another factor only after a sign, so "4 2", "x2"
and "H2O" are no products; "2 1/2" is a mixed number. ± stands for a list of two.
"""

from __future__ import annotations

import operator
import random
import re
import unicodedata
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import mpmath as mp

mp.mp.dps, CANCELLED = 60, mp.mpf(10) ** -40  # digits; a sum so much less than its terms is 0
SIGNS = {
    "*": r"× · ⋅ ∙ \times \cdot \ast", "/": r"÷ ∕ ⁄ \div", "-": "− – ‐ ‑", "^": "**",
    "≤": r"<= ⩽ \le \leq \leqslant", "≥": r">= ⩾ \ge \geq \geqslant", "≠": r"!= \ne \neq",
    "<": r"\lt", ">": r"\gt", "±": r"+/- \pm", "∓": r"\mp", "∞": r"\infty infinity", "∈": r"\in",
    "√": r"\sqrt sqrt", "≈": r"\approx \sim ∼", "°": r"^\circ ^{\circ} \circ \degree", "'": r"′",
    "|": r"\lvert \rvert \vert", "%": r"\%", "$": r"\$", "\\frac": r"\dfrac \tfrac \cfrac",
    " ": r"\, \; \: \quad \qquad \\", "∠": r"\angle", "△": r"\triangle", "(": "【 〔",
    ")": "】 〕", ".": "。", ",": "、 {,}",
}  # fmt: skip
GREEK = dict(zip(
    ("alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho "
     "sigmaf sigma tau upsilon phi chi psi omega").split(), map(chr, range(0x3B1, 0x3CA)),
))  # fmt: skip
SIGN_OF = {form: sign for sign, forms in SIGNS.items() for form in forms.split()} | {
    "\\ ": " ",
    "\\!": "",
}
FORMS = "|".join(  # a command or a word ends where its letters end, and no word begins amid one
    (r"(?<![A-Za-z\\])" if form[0].isalpha() else "")
    + re.escape(form)
    + (r"(?![A-Za-z]) ?" if form[-1].isalpha() else "")
    for form in sorted(SIGN_OF, key=len, reverse=True)
)
GROUP = r"[^{}]*+"
for _ in range(8):
    GROUP = rf"(?:[^{{}}]|\{{{GROUP}\}})*+"  # whatever holds whole groups {...}, eight deep
STYLES = (
    r"\\(?:text(?!color)[a-z]*|math(?:rm|bf|it|sf|tt|cal|normal)|operatorname\*?|[mhf]box|boldsymbol"
    r"|bm|pmb|bf|rm|it|sf|tt|em(?:ph)?|underline|displaystyle|left|right|[bB]igg?[lr]?|limits)"
)
MARKUP = {
    r"\\\\(?=[A-Za-z])": r"\\",
    r"\\(?:text)?color ?\{[a-z]+\}": "",
    rf"{STYLES} ?\{{({GROUP})\}}": r"\1",
    rf"{STYLES}(?![A-Za-z]) ?": "",
    r"(?<!\\)\$\$?([^$]+?)(?<!\\)\$\$?": r"\1",
    r"\\[(\[](.+?)\\[)\]]": r"\1",
    r"(?<![\w)*])(\*\*|__|\*|_|`)(?=\S)(.+?)(?<=\S)\1(?![\w(*])": r"\2",
    r"(?<![\\_^}\]√A-Za-z])\{([A-Za-z ]+)\}": r"\1",  # {\rm cm}
}
LAYOUT = {
    "∛": "√[3]",
    "∜": "√[4]",
    FORMS: lambda match: SIGN_OF[match[0] if match[0] in SIGN_OF else match[0].rstrip()],
    rf"(?i)(?:\\(?:var)?|(?<![A-Za-z\\]))({'|'.join(GREEK)})(?![A-Za-z])": (
        lambda match: (str.lower if match[1].islower() else str.upper)(GREEK[match[1].lower()])
    ),
    r"(?<=[^\s=<>≤≥≈(,:])\s*~": " ",  # LaTeX's blank, but "~3" is about 3
    r"\s+": " ",
    r"(?<=\d) ?x ?(?=10 ?\^)": "*",
    r"\^ ?\{ ?([-+]?\d+|[A-Za-z]) ?\}": r"^\1 ",
    r"\\frac ?(\d) ?(?=[\d{])": r"\\frac{\1}",
    r"(\\frac ?\{[^{}]*\}) ?(\d)": r"\1{\2}",
}


def plain(text: str) -> str:
    """A text without markup and outer punctuation, and with one spelling for each sign."""
    text = re.sub("[⁰¹²³⁴-⁹⁺⁻ⁿ]+", r"^{\g<0>}", re.sub("[º˚]", "°", text))
    text = re.sub("[¼-¾⅐-⅞]", lambda match: fraction(match[0]), text)
    text, before = unicodedata.normalize("NFKC", text), None
    while text != before:
        before = text
        for pattern, new in MARKUP.items():
            text = re.sub(pattern, new, text, flags=re.S).strip(" *`\n")
    for pattern, new in LAYOUT.items():
        text = re.sub(pattern, new, text)
    before = None
    while text != before:
        before, text = text, text.strip(" *`").lstrip(":") or text.strip()
        text = re.sub(r"""^(?:["'“‘「](.*)["'”’」]|\{(.*)\})$""", r"\1\2", text)
        text = re.sub(r"(?<=.)(?:[.,;:?]|(?<=[^\W\d_]{2})!)$", "", text)
    return text


def fraction(sign: str) -> str:
    above, below = unicodedata.normalize("NFKC", sign).split("⁄")
    return rf"\frac{{{above}}}{{{below}}}"


class Parts(NamedTuple):
    """What is no number: a list "," (in any order), a pair or an interval "()", "[)", ..., a ratio
    ":", or the sides of relations "=", "<", "<≤", ..."""

    kind: str
    members: list
    named: bool = False  # "x = 3", which 3 also answers


def joined(kind: str, left, right) -> Parts:
    longer = isinstance(left, Parts) and left.kind == kind
    return Parts(kind, [*(left.members if longer else [left]), right])


def related(sign: str, left, right) -> Parts:
    chain = isinstance(left, Parts) and left.kind[0] in RELATIONS  # 1 < x < 2
    kind, members = left[:2] if chain else ("", [left])
    if sign in ">≥":  # read from behind
        return Parts("<≤"[sign == "≥"] + kind, [right, *members])
    return Parts(kind + sign, [*members, right])


def add(left, right):
    value = left + right
    return mp.mpf(0) if abs(value) <= CANCELLED * abs(left) else value


def root(degree, value):
    odd = degree % 2 == 1 and mp.im(value) == 0 and mp.re(value) < 0
    return -mp.root(-value, degree) if odd else value ** (1 / degree)


RELATIONS = "=≠<>≤≥∈"
BINARY = {  # how tightly a sign binds, and what it does; "" stands for no sign
    **{sign: (0, partial(joined, ",")) for sign in ",;"},
    **{sign: (1, partial(related, sign)) for sign in RELATIONS},
    ":": (2, partial(joined, ":")),
    "+": (3, add),
    "-": (3, lambda left, right: add(left, -right)),
    "*": (4, operator.mul),
    "/": (4, operator.truediv),
    "": (4, operator.mul),
    "^": (6, operator.pow),
}
AFTER = {"!": mp.factorial, "%": lambda x: x / 100, "°": lambda x: x * mp.pi / 180}
FUNCTIONS = {
    **{f"arc{name}": getattr(mp, f"a{name}") for name in ("sin", "cos", "tan")},
    **{name: getattr(mp, name) for name in "sinh cosh tanh sin cos tan cot sec csc exp".split()},
    "ln": mp.log,
    "lg": mp.log10,
    "log": mp.log,
}
CONSTANTS = {"π": mp.pi, "e": mp.e, "i": mp.j, "∞": mp.inf}
TOKEN = re.compile(
    r" *((?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,3}(?![\d.]))?|\.\d+"
    rf"|\\frac|\\[{{}}]|\\?(?:{'|'.join(FUNCTIONS)})"
    r"|[A-Za-zα-ωΑ-Ω](?:_(?:\{\w+\}|\w))?'*|[-+*/^=≠<>≤≥∈:,;!%°|_√∞(){}\[\]])"
)
MIXED = re.compile(r"\d+ (?:frac \{ (\d+) \} \{ (\d+) \}|(\d+) / (\d+)(?! [!^]))")


class Reader:
    """Reads one text; `trial` decides what its letters stand for. Whatever cannot be read raises
    ValueError, or what arithmetic raises."""

    def __init__(self, text: str, trial: int) -> None:
        self.tokens, self.at, self.trial, self.inside = [], 0, trial, ""
        while text := text.strip():
            if not (match := TOKEN.match(text)):
                raise ValueError(f"expected a formula, got {text!r}")
            self.tokens.append(match[1].lstrip("\\") if match[1][1:2].isalpha() else match[1])
            text = text[match.end() :]
        self.tokens += [""]

    def take(self, *signs: str) -> str:
        """The next token, if it is one of these; else "", and nothing is taken."""
        token = self.tokens[self.at] if self.tokens[self.at] in signs else ""
        self.at += bool(token)
        return token

    def need(self, *signs: str) -> str:
        if not (token := self.take(*signs)):
            raise ValueError(f"expected one of {signs}, got {self.tokens[self.at]!r}")
        return token

    def whole(self):
        value = self.read(0)
        if self.tokens[self.at]:
            raise ValueError(f"expected the end, got {self.tokens[self.at]!r}")
        return value

    def factor_follows(self) -> bool:
        token = self.tokens[self.at]
        if token == "|" or token in FUNCTIONS:
            return not self.inside
        return token in ("(", "{", "√", "frac", "∞") or token[:1].isalpha()

    def read(self, loosest: float):
        """The longest formula from here whose signs bind at least as tightly as `loosest`."""
        start, value = self.at, self.atom()
        while True:
            while sign := self.take(*AFTER):
                value = AFTER[sign](value)
            sign = "" if self.factor_follows() else self.tokens[self.at] or "end"
            level, join = BINARY.get(sign, (-1, None))
            level += 0.5 * (sign == "" and self.inside == "function")
            if level < loosest:
                return value
            named = sign in ("=", "∈") and NAMED.fullmatch("".join(self.tokens[start : self.at]))
            self.at += bool(sign)
            value = join(value, self.read(level + 0.1 * (sign != "^")))
            value = value._replace(kind="=", named=True) if named else value

    def atom(self):
        if match := MIXED.match(" ".join(self.tokens[self.at : self.at + 8])):
            whole, (above, below) = self.tokens[self.at], filter(None, match.groups())
            self.at += match[0].count(" ") + 1
            return mp.mpf(whole) + mp.mpf(above) / mp.mpf(below)
        token, self.at = self.tokens[self.at], self.at + 1
        if token[:1].isdigit() or token[:1] == ".":
            return mp.mpf(token.replace(",", ""))
        if token in ("+", "-"):
            return self.read(5) * (-1 if token == "-" else 1)
        if token in CLOSING:
            value = self.within("", 0)
            closed = token + self.need(*CLOSING[token])
            pair = token in "([" and isinstance(value, Parts) and value.kind == ","
            return value._replace(kind=closed) if pair else value
        if token == "|":
            value = self.within("bars", 3)
            self.need("|")
            return abs(value)
        if token == "frac":
            return self.atom() / self.atom()
        if token == "√":
            degree = self.within("", 0) if self.take("[") and self.tokens[self.at] else mp.mpf(2)
            self.take("]")
            return root(degree, self.atom())
        if token in FUNCTIONS:
            return self.function(token)
        if not token[:1].isalpha() and token != "∞":
            raise ValueError(f"expected a formula, got {token!r}")
        letter = random.Random(re.sub("[{}]", "", token))  # x_1 is x_{1}
        powers = letter.sample([-9, 0, 9] * 3, TRIALS)  # so that no term hides behind a large one
        numbers = [letter.choice((-1, 1)) * letter.uniform(1, 2) for _ in powers]
        size = mp.mpf(10) ** powers[self.trial]
        return +CONSTANTS.get(token, numbers[self.trial] * size)

    def within(self, place: str, loosest: float):
        """Read on; `place` tells factor_follows which signs end a product here."""
        before, self.inside = self.inside, place
        value = self.read(loosest)
        self.inside = before
        return value

    def function(self, name: str):
        base = self.atom() if self.take("_") else None
        power = self.read(6) if self.take("^") else 1
        bracket = self.tokens[self.at] in CLOSING
        value = self.atom() if bracket else self.within("function", 4.5)
        if power == -1 and f"arc{name}" in FUNCTIONS:
            name, power = f"arc{name}", 1
        value = FUNCTIONS[name](value)
        if name == "log":  # some mean 10 by no base, some e: it is a number of its own
            value /= mp.log(base) if base else Reader("λ_log", self.trial).atom()
        return (mp.mpf(0) if abs(value) < CANCELLED and name != "exp" else value) ** power


CLOSING = {"(": ")]", "[": ")]", "{": "}", "\\{": ("\\}",)}
NAMED = re.compile(r"[^\W\d]\w*'*(?:\([a-z]\))?")
TRIALS = 9


def equal(one: str, other: str, places: int | None = None) -> bool:
    """Are two texts formulas of the same value, within one part in a million, or, if both are plain
    numbers, when rounded to so many decimal places? Raises what reading and arithmetic raise for a
    text that is none."""
    said, wanted = readings(plain(one)), readings(plain(other))
    if alike(said, wanted) or places is None:
        return alike(said, wanted)
    if any(isinstance(value, Parts) or mp.im(value) for value in (*said, *wanted)):
        return False
    fixed = all(near(value, of[0]) for of in (said, wanted) for value in of)  # without letters
    return fixed and round(float(said[0]), places) == round(float(wanted[0]), places)


def readings(text: str) -> list:
    """The value in each trial. ± makes a list of two."""
    if not {"±", "∓"} & {*text}:
        return [Reader(text, trial).whole() for trial in range(TRIALS)]
    pair = (text.translate(str.maketrans("±∓", signs)) for signs in ("+-", "-+"))
    return [Parts(",", [*values]) for values in zip(*map(readings, pair))]


def alike(one: Sequence, other: Sequence) -> bool:
    """Are two readings the same in every trial?"""
    kinds = {getattr(reading[0], "kind", "") for reading in (one, other)}
    if len(kinds) > 1:  # perhaps "x = 3" and "3"
        one, other = (
            [value.members[1] for value in reading] if getattr(reading[0], "named", 0) else reading
            for reading in (one, other)
        )
        kinds = {getattr(reading[0], "kind", "") for reading in (one, other)}
    if len(kinds) > 1:
        return False
    kind = kinds.pop()
    if kind == "":
        return all(map(near, one, other))
    one, other = ([*zip(*(value.members for value in reading))] for reading in (one, other))
    if kind != ",":
        same = len(one) == len(other) and all(map(alike, one, other))
        return same or kind in RELATIONS and proportional(kind, one, other)
    for member in one:
        twin = next((i for i, each in enumerate(other) if alike(member, each)), None)
        if twin is None:
            return False
        del other[twin]
    return not other


def proportional(kind: str, one: Sequence, other: Sequence) -> bool:
    """Is one relation of two sides the other one times a number, as 2x = 4 is x = 2?"""
    if any(isinstance(value, Parts) for reading in (*one, *other) for value in reading):
        return False
    one, other = ([left - right for left, right in zip(*sides)] for sides in (one, other))
    if 0 in other:
        return False
    ratios = [a / b for a, b in zip(one, other)]
    allowed = ratios[0] != 0 if kind in "=≠" else mp.im(ratios[0]) == 0 and mp.re(ratios[0]) > 0
    return allowed and all(near(ratio, ratios[0]) for ratio in ratios)


def near(one, other) -> bool:
    """Whole numbers are equal exactly, others within a millionth. Only 0 is equal to 0."""
    largest = max(abs(one), abs(other))
    if one == other or mp.isinf(largest):
        return bool(one == other)
    exact = mp.isint(one) and mp.isint(other) and largest < mp.mpf(10) ** 50
    return not exact and abs(one - other) <= largest * mp.mpf(10) ** -6
