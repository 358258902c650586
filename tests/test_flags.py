"""python -m pytest tests/test_flags.py      at once: how a dataclass becomes a command line"""

from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from kit.flags import checked, flag, knob, parse, refusals, through_door

DOORS = {"--film": "beyond.film"}
PRESETS = {"small": {"turns": 2}}


@dataclass(frozen=True)
class Options:
    """Asks 100 % of the questions."""

    runs: list[str] = knob(None, "folders", word=True, nargs="*")
    preset: str = knob("large", "a set of defaults", choices=("small", "large"))
    turns: int = knob(5, "100 % of the turns", "paper", least=1)
    rate: float = knob(1e-5, "learning rate", above=0)
    share: float = knob(0.5, "a share", least=0, most=1)
    free: float = knob(0.0, "any number")
    limit: int | None = knob(None, "questions; else all", least=1)
    out: Path = knob(Path("runs"), "folder", metavar="DIR")
    plan: str = knob("none", "would it fit?", nargs="?", const="8x80")
    quick_look: bool = knob(False, "few questions")


@pytest.mark.parametrize("words, changed", [
    ("", dict()),
    ("a b --turns 1", dict(runs=["a", "b"], turns=1)),
    ("--rate 2 --limit 4 --out x", dict(rate=2.0, limit=4, out=Path("x"))),
    ("--plan 4x24 --quick-look --share=1", dict(plan="4x24", quick_look=True, share=1.0)),
    ("--plan --no-quick-look", dict(plan="8x80")),
    ("--preset small", dict(preset="small", turns=2)),
    ("--turns 7 --preset=small", dict(preset="small", turns=7)),
])  # fmt: skip
def test_every_field_is_a_flag_or_a_word_and_a_preset_is_a_set_of_defaults(words, changed):
    options = parse(Options, words.split(), presets=PRESETS)
    assert options == Options(**changed) and type(options.rate) is type(options.share) is float


def test_help_shows_default_source_preset_and_doors(capsys):
    with pytest.raises(SystemExit):
        parse(Options, ["--preset", "small", "--help"], DOORS, PRESETS)
    said = " ".join(capsys.readouterr().out.split())
    assert "Asks 100 % of the questions." in said and "default: None" not in said
    assert "100 % of the turns [paper: 5] (default: 2)" in said and "--out DIR" in said
    assert "--film ... film.py: one episode as a picture" in said
    assert all(flag(f.name) in said for f in fields(Options)[1:])


@pytest.mark.parametrize("words, message", [
    ("--turns 0", "--turns: expected a finite number, least 1; got 0"),
    ("--limit 0", "--limit: expected a finite number, least 1; got 0"),
    ("--rate 0", "--rate: expected a finite number, above 0; got 0.0"),
    ("--share 1.5", "--share: expected a finite number, least 0, most 1; got 1.5"),
    ("--free nan", "--free: expected a finite number; got nan"),
    ("--free inf", "--free: expected a finite number; got inf"),
    ("--turns many", "--turns: invalid int"), ("--preset huge", "invalid choice: 'huge'"),
    ("--turn 3", "arguments: --turn"), ("--pre small", "arguments: --pre"),  # no abbreviations
])  # fmt: skip
def test_what_is_not_allowed_is_told_with_its_flag(words, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(Options, words.split(), presets=PRESETS)
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and message in said
    assert said.count("\n") == 2  # one short line of usage, and this one


@pytest.mark.parametrize("values, message", [
    (dict(turns=True), "--turns: expected a value like 5, got True"),
    (dict(turns=1.0), "--turns: expected a value like 5, got 1.0"),
    (dict(rate="1"), "--rate: expected a value like 1e-05, got '1'"),
    (dict(quick_look=1), "--quick-look: expected a value like False, got 1"),
])  # fmt: skip
def test_values_from_a_file_are_held_to_the_types_of_the_defaults(values, message):
    with pytest.raises(ValueError, match=message):
        checked(Options(**values))
    assert checked(Options(rate=1)).rate == 1  # a whole number will do for a float


@pytest.mark.parametrize("error, kinds, ends", [
    (FileNotFoundError("no such folder: x"), (), True), (KeyError("a fault of ours"), (), False),
    (KeyError("of the kind that was named"), (KeyError,), True),
    (ValueError("a fault of ours"), (KeyError,), False),
])  # fmt: skip
def test_an_error_that_the_user_can_mend_is_one_line(error, kinds, ends, capsys):
    with pytest.raises(SystemExit if ends else type(error)), refusals(*kinds):
        raise error
    assert (f"error: {error}\n" in capsys.readouterr().err) is ends


@pytest.mark.parametrize("words", [["--film", "x"], ["--out", "y", "--film=x"]])
def test_a_door_takes_all_the_words(words, monkeypatch):
    heard = []
    monkeypatch.setattr("beyond.film.main", heard.append)
    assert through_door(words, DOORS) and heard == [words]
    assert not through_door(["--films", "film"], DOORS) and len(heard) == 1
