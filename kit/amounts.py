r"""
amounts.py: numbers, and the units behind them.

Concept     "5 cm", "$5" and "28 percent" are amounts: a number and perhaps a unit. A unit counts
            only where both name one. Nothing is converted.
Paper       nothing: CodeV does not say how numbers are compared
In          a plain text (formulas.plain)
Out         its number and unit; whether two amounts are equal
Left out    conversion of units, numbers in words
Read next   answers.py (the table of what is right)
"""

from __future__ import annotations

import re
from fractions import Fraction

from kit.formulas import GREEK

NUMBER = re.compile(
    r"([-+]?) ?([$€£]?) ?(?:(\d+)(?: | ?\\frac\{)(\d+)(?:/|\}\{)(\d+)\}?|"  # 2 1/2
    r"((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)"
    r"(?:e([-+]?\d{1,3})| ?\* ?10 ?\^ ?([-+]?\d{1,3})\b)?"
    r"(?: ?/ ?(0*[1-9]\d*))?)(.*)",
    re.I,
)
UNITS = {  # unit -> its names; symbols also take the prefixes k, c, m, ..., and names "kilo", ...
    "m": "meter metre", "g": "gram gramme", "s": "second sec", "l": "L liter litre", "N": "newton",
    "J": "joule", "W": "watt", "V": "volt", "Pa": "pascal", "Hz": "hertz", "Ω": "ohm",
    "mol": "mole", "eV": "", "A": "ampere amp", "K": "kelvin", "cal": "calorie",
    "min": "minute", "h": "hour hr", "in": "inch", "ft": "foot feet", "yd": "yard", "mi": "mile",
    "lb": "pound", "oz": "ounce", "°": "degree deg", "°C": "", "°F": "", "%": "percent pct",
    "$": "dollar usd", "€": "euro", "£": "", "cc": "",
}  # fmt: skip
PREFIXES = {"kilo": "k", "centi": "c", "milli": "m", "deci": "d", "mega": "M", "giga": "G",
            "micro": "μ", "nano": "n"}  # fmt: skip
UNIT_OF = {name: unit for unit, names in UNITS.items() for name in [unit, *names.split()]}
NAMED = sorted(UNIT_OF, key=len, reverse=True)
UNIT = re.compile(
    rf"({'|'.join(PREFIXES)}|[kcmdMGμn])?({'|'.join(map(re.escape, NAMED))})(?:s|es)?"
)
FACTOR = re.compile(r" ?([*/]?) ?([^\W\d_]+|°[CF]?|[%$€£])\.?(?:\^?(-?\d))?")
AMOUNTS = re.compile(  # what follows a number and is no unit: part of the number, or a letter
    rf"(?:hundred|thousand|.illion|dozen|lakh|crore|hal(?:f|ve)|third|quarter|\w+th|squared|cubed|"
    rf"and|or|to|{'|'.join(GREEK)})s?"
)


def read_number(text: str) -> tuple[Fraction, str] | None:
    """(value, unit or "") if the whole plain text is one number, else None."""
    if (match := NUMBER.fullmatch(text)) is None:
        return None
    sign, currency, whole, above, under, digits, power, ten, below, rest = match.groups("")
    unit = read_unit(rest)
    if unit is None or under and not int(under):
        return None
    value = Fraction(f"{digits.replace(',', '') or whole}e{power or ten or 0}") / int(below or 1)
    value += Fraction(int(above), int(under)) if under else 0
    return value * (-1 if sign == "-" else 1), unit or currency


def read_unit(text: str) -> str | None:
    """The unit that a text after a number names, "" for none; None if the text is no unit."""
    text = re.sub(r"(?:°|degrees?) ?([CF])(?:elsius|ahrenheit)?\b", r"°\1", text, flags=re.I)
    text = re.sub(r"(?i)\b(?:square|sq\.?) (\w+)|(\w+) squared", r"\1\2^2", text)
    text = re.sub(r"(?i)\b(?:cubic|cu\.?) (\w+)|(\w+) cubed", r"\1\2^3", text)
    text = re.sub(
        r"\bkm?p?h$", "km/h", text.replace("μ ", "μ").replace(" per ", "/").replace("mph", "mi/h")
    ).rstrip()
    if not re.fullmatch(rf"(?:{FACTOR.pattern})*", text):
        return None
    powers: dict[str, int] = {}
    for over, name, power in FACTOR.findall(text):
        match = UNIT.fullmatch(name) or len(name) > 1 and UNIT.fullmatch(name.lower())
        if match:
            name = PREFIXES.get(match[1], match[1] or "") + UNIT_OF[match[2]]
        elif len(powers) or len(name) < 3 or text[0] != " " or AMOUNTS.fullmatch(name.lower()):
            return None
        powers[name.rstrip("s") or "s"] = int(power or 1) * (-1 if over == "/" else 1)
    if text in ("s", "A", "K", "d", "in"):  # 1990s, 4K and 3A are no amounts
        return None
    return "*".join(name + f"^{power}" * (power != 1) for name, power in sorted(powers.items()))


def split_unit(formula: str) -> tuple[str, str]:
    """A product and the unit after it, or the formula and ""."""
    match = re.fullmatch(r"((?:[\d.,π√{}()*/ ]|\\frac)+)([^\W\dπ][^+=<>]*)", formula)
    unit = read_unit(match[2]) if match else None
    return (match[1].strip(), unit) if match and unit else (formula, "")


def same_number(said: Fraction, unit: str, wanted: Fraction, wanted_unit: str) -> bool:
    """Whole numbers exactly, others within a millionth. 28% is 28 and also 0.28."""

    def close(said: Fraction, wanted: Fraction) -> bool:
        whole = said.denominator == wanted.denominator == 1
        largest = max(abs(said), abs(wanted))
        return said == wanted or not whole and abs(said - wanted) * 10**6 <= largest

    if (unit, wanted_unit) == ("%", "") and close(said / 100, wanted):
        return True
    if (unit, wanted_unit) == ("", "%") and close(said, wanted / 100):
        return True
    return (unit == wanted_unit or "" in (unit, wanted_unit)) and close(said, wanted)
