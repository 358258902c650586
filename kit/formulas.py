r"""
formulas.py: one spelling for mathematics, and a reader that takes a formula in whole or not at all.

Concept     Two formulas are equal if they have the same value, whatever numbers their letters
            stand for: here each letter stands for nine at once. What the grammar does not cover is
            no formula, so that no formula is ever compared in part.
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
from dataclasses import dataclass
from functools import partial
from unicodedata import normalize

import mpmath as mp
import numpy as np

mp.mp.dps, CANCELLED = 60, mp.mpf(10) ** -40  # digits; a sum so much less than its terms is 0
TRIALS = 9  # a value is [TRIALS], an array of mpmath's numbers
SIGNS = {
    "*": r"× · ⋅ ∙ ∗ • \times \cdot \ast", "/": r"÷ ∕ ⁄ \div", "-": "− – — ‐ ‑", "^": "**",
    "≤": r"<= ⩽ ≦ \le \leq \leqslant", "≥": r">= ⩾ ≧ \ge \geq \geqslant", "≠": r"!= \ne \neq",
    "<": r"\lt", ">": r"\gt", "±": r"+/- \pm", "∓": r"\mp", "∞": r"\infty infinity", "∈": r"\in",
    "√": r"\sqrt sqrt", "≈": r"\approx \sim ∼", "°": r"^\circ ^{\circ} \circ \degree", "'": "′ ’ ‘",
    "|": r"\lvert \rvert \vert", "%": r"\%", "$": r"\$", "\\frac": r"\dfrac \tfrac \cfrac",
    " ": r"\, \; \: \quad \qquad \\", "∠": r"\angle", "△": r"\triangle", "∥": r"\parallel",
    "⊥": r"\perp", "∪": r"\cup", "∩": r"\cap", "∅": r"\emptyset \varnothing", "→": r"\to",
    "(": "【 〔", ")": "】 〕", ".": "。", ",": "、 {,}", ":": "∶",
}  # fmt: skip
GREEK = dict(zip(
    ("alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho "
     "sigmaf sigma tau upsilon phi chi psi omega").split(), map(chr, range(0x3B1, 0x3CA)),
))  # fmt: skip
SIGN_OF = {form: sign for sign, forms in SIGNS.items() for form in forms.split()}
SIGN_OF |= {"\\ ": " ", "\\!": "", "{}": ""}
CHARACTERS = str.maketrans("º˚", "°°", "\u00ad\u200b\u200c\u200d\u2060\ufeff")  # last: invisible
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
    r"\\(?:text(?!color)[a-z]*|math(?:rm|bf|bb|it|sf|tt|cal|normal)|operatorname\*?|(?:[mhf]|frame)box"
    r"|boldsymbol|bm|pmb|bf|rm|it|sf|tt|em(?:ph)?|underline|displaystyle|left|right|[bB]igg?[lr]?"
    r"|limits|[lL]arge|huge)"
)
MARKUP = {
    r"(?<![\w)*])(\*\*|__|\*|_|`)(?=\S)(.+?)(?<=\S)\1(?![\w(*])": r"\2",
    r"\\\\(?=[A-Za-z])": r"\\",
    r"(\\[A-Za-z]+)(?=\\[A-Za-z])": r"\1 ",  # so that no \text{...} grows together with it
    r"(?<=\d)\\,(?=\d{3}(?!\d))": "",  # 12\,000
    r"\\(?:text)?color ?\{[a-z]+\}": "",
    rf"{STYLES} ?\{{({GROUP})\}}": r"\1",
    rf"{STYLES}(?![A-Za-z]) ?": "",
    r"(?<!\\)\$\$?([^$]+?)(?<!\\)\$\$?": r"\1",
    r"\\[(\[](.+?)\\[)\]]": r"\1",
    r"(?<![\\_^}\]√A-Za-z\d])\{([A-Za-z ]+|[\d.]+)\}": r"\1",  # {\rm cm}, {60}^\circ
    r"\*+(?=[.,;:!?]+\Z)": "",  # after "the answer is **"
}
LAYOUT = {
    **{"∛": "√[3]", "∜": "√[4]"},
    FORMS: lambda match: SIGN_OF[match[0] if match[0] in SIGN_OF else match[0].rstrip()],
    rf"(?ai)(?:\\(?:var)?|(?<![A-Za-z\\]))({'|'.join(GREEK)})(?![A-Za-z])": (
        lambda match: (str.lower if match[1].islower() else str.upper)(GREEK[match[1].lower()])
    ),
    r"(?<=[^\s=<>≤≥≈(,:])\s*~": " ",  # LaTeX's blank, but "~3" is about 3
    r"\s+": " ",
    r"(?<=\d) ?[xX] ?(?=10 ?\^)": "*",
    r"(?<=\d) ?\^ ?\{(st|nd|rd|th)\}": r"\1",
    r"\^ ?\{ ?([-+]?\d+|[A-Za-z]) ?\}": r"^\1 ",
    r"_ ?\{(\w)\}(?!\d)": r"_\1",
    r"\\frac ?(\d) ?(?=[\d{])": r"\\frac{\1}",
    r"(\\frac ?\{[^{}]*\}) ?(\d)": r"\1{\2}",
}


def plain(text: str) -> str:
    """A text without markup and outer punctuation, and with one spelling for each sign."""
    for sign, characters in {"^": "⁰¹²³⁴-⁹⁺⁻⁽⁾ⁱⁿʰʳˢˣʸᵃ-ᵛ", "_": "₀-₉₊₋₍₎ₐ-ₜᵢ"}.items():
        text = re.sub(f"[{characters}]+", rf"{sign}{{\g<0>}}", text)
    half = lambda f: re.sub("(.)⁄(.+)", r"\\frac{\1}{\2}", normalize("NFKC", f[0]))  # noqa: E731
    text = re.sub("[¼-¾⅐-⅞]", half, text)
    text, before = normalize("NFKC", text.translate(CHARACTERS)), None
    while text != before:
        before = text
        for pattern, new in MARKUP.items():
            text = re.sub(pattern, new, text, flags=re.S).strip(" *`\n")
    for pattern, new in LAYOUT.items():
        text = re.sub(pattern, new, text)
    before = None
    while text != before:
        before, text = text, text.strip(" *`").lstrip(":") or text.strip()
        text = re.sub(r"""^(?:["'“「«](.*)["'”」»]|\{(.*)\})$""", r"\1\2", text)
        text = re.sub(r"(?<=.)(?:[.,;:?]|(?<=[^\W\d_]{2})!)$", "", text)
    return text


@dataclass(frozen=True, eq=False)
class Parts:
    """What is no number: a list "," (in any order), a pair or an interval "()", "[)", ..., a ratio
    ":", or the sides of relations "=", "<", "<≤", ..."""

    kind: str
    members: list


def joined(kind: str, left, right) -> Parts:
    longer = isinstance(left, Parts) and left.kind == kind
    return Parts(kind, [*(left.members if longer else [left]), right])


def related(sign: str, left, right) -> Parts:
    chain = isinstance(left, Parts) and left.kind[0] in RELATIONS  # 1 < x < 2
    kind, members = (left.kind, left.members) if chain else ("", [left])
    if sign in ">≥":  # read from behind
        return Parts("<≤"[sign == "≥"] + kind, [right, *members])
    return Parts(kind + sign, [*members, right])


def cleaned(value, scale=1):
    """0 for what is so much less than the scale that only rounding is left of it."""
    return np.where(abs(value) <= CANCELLED * abs(scale), mp.mpf(0), value)


def root(degree, value):
    odd = degree % 2 == 1 and mp.im(value) == 0 and mp.re(value) < 0
    return -mp.root(-value, degree) if odd else value ** (1 / degree)


RELATIONS = "=≠<>≤≥∈"
BINARY = {  # how tightly a sign binds, and what it does; "" stands for no sign
    **{sign: (0, partial(joined, ",")) for sign in ",;"},
    **{sign: (1, partial(related, sign)) for sign in RELATIONS},
    ":": (2, partial(joined, ":")),
    "+": (3, lambda left, right: cleaned(left + right, left)),
    "-": (3, lambda left, right: cleaned(left - right, left)),
    **dict.fromkeys(("*", ""), (4, operator.mul)),
    "/": (4, operator.truediv), "^": (6, operator.pow),
}  # fmt: skip
AFTER = {"%": lambda x: x / 100, "°": lambda x: x * mp.pi / 180}
AFTER["!"] = np.frompyfunc(mp.factorial, 1, 1)
FUNCTIONS = {
    **{f"arc{name}": getattr(mp, f"a{name}") for name in ("sin", "cos", "tan")},
    **{name: getattr(mp, name) for name in "sinh cosh tanh sin cos tan cot sec csc exp".split()},
    **{"ln": mp.log, "lg": mp.log10, "log": mp.log},
}
CONSTANTS = {"π": mp.pi, "e": mp.e, "i": mp.j, "∞": mp.inf}
CLOSING = {"(": ")]", "[": ")]", "{": "}", "\\{": ("\\}",)}
DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
TOKEN = re.compile(
    rf"(?:{DIGITS})(?:[eE][-+]?\d{{1,3}}(?![\d.]))?|\\frac|\\[{{}}]|\\?(?:{'|'.join(FUNCTIONS)})"
    r"|[A-Za-zα-ωΑ-Ω](?:_(?:\{\w+\}|\w))?'*|[-+*/^=≠<>≤≥∈:,;!%°|_√∞(){}\[\]]"
)
MIXED = re.compile(r"\d+ (?:frac \{ (\d+) \} \{ (\d+) \}|(\d+) / (\d+)(?! [!^]))")
NAME = re.compile(r"(^|[,;(] ?)(?:m?∠ ?\w+|[^\W\d]\w*)(?:\{\w+\})?'*(?:\([a-z]\))? ?[=∈] ?")


class Reader:
    """Reads one text. What cannot be read raises ValueError, or what arithmetic raises."""

    def __init__(self, text: str) -> None:
        tokens, self.at, self.inside = TOKEN.findall(text), 0, ""
        if "".join(tokens) != text.replace(" ", ""):
            raise ValueError(f"expected a formula, got {text!r}")
        self.tokens = [t.lstrip("\\") if t[1:2].isalpha() else t for t in tokens] + [""]

    def take(self, *signs: str) -> str:
        """The next token, if it is one of these; else "", and nothing is taken."""
        token = self.tokens[self.at] if self.tokens[self.at] in signs else ""
        self.at += bool(token)
        return token

    def need(self, *signs: str) -> str:
        if self.tokens[self.at] not in signs:
            raise ValueError(f"expected one of {signs}, got {self.tokens[self.at]!r}")
        return self.take(*signs)

    def factor_follows(self) -> bool:
        token = self.tokens[self.at]
        if token == "|" or token in FUNCTIONS:
            return not self.inside
        return token in ("(", "{", "√", "frac", "∞") or token[:1].isalpha()

    def read(self, loosest: float, inside: str | None = None):
        """The longest formula from here whose signs bind at least as tightly as `loosest`; inside:
        where it stands, which tells factor_follows what ends a product."""
        before, self.inside = self.inside, self.inside if inside is None else inside
        value = self.atom()
        while True:
            while sign := self.take(*AFTER):
                value = AFTER[sign](value)
            sign = "" if self.factor_follows() else self.tokens[self.at] or "end"
            level, join = BINARY.get(sign, (-1, None))
            level += 0.5 * (sign == "" and self.inside == "function")
            if level < loosest:
                self.inside = before
                return value
            self.at += bool(sign)
            value = join(value, self.read(level + 0.1 * (sign != "^")))

    def atom(self):
        if match := MIXED.match(" ".join(self.tokens[self.at : self.at + 8])):
            whole, (above, below) = self.tokens[self.at], filter(None, match.groups())
            self.at += match[0].count(" ") + 1
            return number(whole) + number(above) / number(below)
        token, self.at = self.tokens[self.at], self.at + 1
        if token[:1].isdigit() or token[:1] == ".":
            return number(token)
        if token in ("+", "-"):
            return self.read(5) * (-1 if token == "-" else 1)
        if token in CLOSING:
            value = self.read(0, inside="")
            closed = token + self.need(*CLOSING[token])
            pair = token in "([" and isinstance(value, Parts) and value.kind == ","
            return Parts(closed, value.members) if pair else value
        if token == "|":
            value = self.read(3, inside="bars")
            self.need("|")
            return abs(value)
        if token == "frac":
            return self.atom() / self.atom()
        if token == "√":
            degree = self.read(0, inside="") if self.take("[") else number(2)
            self.take("]")
            return np.frompyfunc(root, 2, 1)(degree, self.atom())
        if token in FUNCTIONS:
            return self.function(token)
        if not token[:1].isalpha() and token != "∞":
            raise ValueError(f"expected a formula, got {token!r}")
        return number(CONSTANTS[token]) if token in CONSTANTS else letter(token)

    def function(self, name: str):
        base = self.atom() if self.take("_") else None
        power = self.read(6) if self.take("^") else number(1)
        bracket = self.tokens[self.at] in CLOSING
        value = self.atom() if bracket else self.read(4.5, inside="function")
        if f"arc{name}" in FUNCTIONS and (power == -1).all():
            name, power = f"arc{name}", number(1)
        value = np.frompyfunc(FUNCTIONS[name], 1, 1)(value)
        if name == "log":  # some mean 10 by no base, some e: it is a number of its own
            value = value / (letter("λ_log") if base is None else np.frompyfunc(mp.log, 1, 1)(base))
        return (value if name == "exp" else cleaned(value)) ** power


def number(value) -> np.ndarray:
    """A constant, or the digits of one, as a value: the same in each trial. [TRIALS]"""
    value = "0" + value.replace(",", "") if isinstance(value, str) else +value  # mpmath reads no .0
    return np.full(TRIALS, mp.mpmathify(value))


def letter(name: str) -> np.ndarray:
    """What a letter stands for. [TRIALS]"""
    draw = random.Random(re.sub("[{}]", "", name))  # x_1 is x_{1}
    powers = draw.sample([-9, 0, 9] * 3, TRIALS)  # so that no term hides behind a large one
    numbers = [draw.choice((-1, 1)) * draw.uniform(1, 2) for _ in powers]
    return np.array([x * mp.mpf(10) ** power for x, power in zip(numbers, powers)])


def equal(one: str, other: str, places: int | None = None) -> bool:
    """Are two texts formulas of the same value, within one part in a million, or, if both are plain
    numbers, when rounded to so many decimal places? ("x = 3" has the value of 3, too.) Raises what
    reading and arithmetic raise for a text that is none."""
    one, other = plain(one), plain(other)
    pairs = (one, other), (NAME.sub(r"\1", one), other), (one, NAME.sub(r"\1", other))
    if any(alike(*map(value_of, pair)) for pair in pairs):
        return True
    said, wanted = value_of(one), value_of(other)
    if places is None or any(isinstance(value, Parts) for value in (said, wanted)):
        return False
    fixed = all(near(x, value[0]) for value in (said, wanted) for x in value)  # without letters
    real = mp.im(said[0]) == mp.im(wanted[0]) == 0
    return fixed and real and round(float(said[0]), places) == round(float(wanted[0]), places)


def value_of(text: str) -> np.ndarray | Parts:
    if {"±", "∓"} & {*text}:
        pair = (text.translate(str.maketrans("±∓", signs)) for signs in ("+-", "-+"))
        return Parts(",", [*map(value_of, pair)])
    reader = Reader(text)
    value = reader.read(0)
    reader.need("")  # the end
    return value


def alike(one, other) -> bool:
    """Are two values the same in every trial?"""
    kind = getattr(one, "kind", "")
    if kind != getattr(other, "kind", ""):
        return False
    if kind == "":
        return all(map(near, one, other))
    one, other = [*one.members], [*other.members]
    if kind != ",":
        same = len(one) == len(other) and all(map(alike, one, other))
        return same or kind in [*RELATIONS] and proportional(kind, *one, *other)
    for member in one:
        twin = next((i for i, each in enumerate(other) if alike(member, each)), None)
        if twin is None:
            return False
        del other[twin]
    return not other


def proportional(kind: str, left, right, other_left, other_right) -> bool:
    """Is one relation of two sides the other one times a number, as 2x = 4 is x = 2?"""
    if any(isinstance(side, Parts) for side in (left, right, other_left, other_right)):
        return False
    gaps, others = left - right, other_left - other_right
    if not all(others):
        return False
    ratios = gaps / others
    allowed = ratios[0] != 0 if kind in "=≠" else mp.im(ratios[0]) == 0 and mp.re(ratios[0]) > 0
    return allowed and all(near(ratio, ratios[0]) for ratio in ratios)


def near(one, other) -> bool:
    """Whole numbers are equal exactly, others within a millionth. Only 0 is equal to 0."""
    largest = max(abs(one), abs(other))
    if one == other or mp.isinf(largest):
        return bool(one == other)
    exact = mp.isint(one) and mp.isint(other) and largest < mp.mpf(10) ** 50
    return not exact and abs(one - other) <= largest * mp.mpf(10) ** -6
