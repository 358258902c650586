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


def refused(capsys, *words, **how):
    with pytest.raises(SystemExit) as stopped:
        parse(Options, list(words), **how)
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_without_words_all_is_as_the_dataclass_says():
    assert parse(Options, []) == Options()


def test_every_field_is_a_flag_of_its_own_type_or_a_word():
    words = "a b --turns 3 --rate 2 --limit 4 --out x --plan 4x24 --quick-look --share=1".split()
    options = parse(Options, words)
    assert options.runs == ["a", "b"] and (options.turns, options.limit) == (3, 4)
    assert type(options.rate) is float and options.out == Path("x")
    assert (options.plan, options.quick_look, options.share) == ("4x24", True, 1.0)
    assert parse(Options, ["--plan", "--no-quick-look"]).plan == "8x80"


def test_a_preset_is_a_set_of_defaults():
    how = dict(presets=PRESETS)
    assert parse(Options, ["--preset", "small"], **how).turns == 2
    assert parse(Options, ["--turns", "7", "--preset=small"], **how).turns == 7
    assert parse(Options, [], **how).turns == 5


def test_help_shows_default_source_preset_and_doors(capsys):
    with pytest.raises(SystemExit):
        parse(Options, ["--preset", "small", "--help"], DOORS, PRESETS)
    said = " ".join(capsys.readouterr().out.split())
    assert "Asks 100 % of the questions." in said
    assert "100 % of the turns [paper: 5] (default: 2)" in said and "--out DIR" in said
    assert "--film ... film.py: one episode as a picture" in said
    assert "default: None" not in said
    for f in fields(Options)[1:]:
        assert flag(f.name) in said


@pytest.mark.parametrize("words, message", [
    ("--turns 0", "--turns: expected a finite number, least 1; got 0"),
    ("--limit 0", "--limit: expected a finite number, least 1; got 0"),
    ("--rate 0", "--rate: expected a finite number, above 0; got 0.0"),
    ("--rate nan", "--rate: expected a finite number, above 0; got nan"),
    ("--share 1.5", "--share: expected a finite number, least 0, most 1; got 1.5"),
    ("--free nan", "--free: expected a finite number; got nan"),
    ("--free inf", "--free: expected a finite number; got inf"),
    ("--turns many", "argument --turns: invalid int value: 'many'"),
    ("--preset huge", "invalid choice: 'huge'"),
    ("--turn 3", "unrecognized arguments: --turn"),
    ("--pre small", "unrecognized arguments: --pre"),
])  # fmt: skip
def test_what_is_not_allowed_is_told_with_its_flag(words, message, capsys):
    said = refused(capsys, *words.split(), presets=PRESETS)
    assert message in said and said.count("\n") == 2  # one short line of usage, and this one


@pytest.mark.parametrize("values, message", [
    (dict(turns=True), "--turns: expected a value like 5, got True"),
    (dict(turns=1.0), "--turns: expected a value like 5, got 1.0"),
    (dict(rate="1"), "--rate: expected a value like 1e-05, got '1'"),
    (dict(quick_look=1), "--quick-look: expected a value like False, got 1"),
    (dict(share=-1), "--share: expected a finite number, least 0, most 1; got -1"),
])  # fmt: skip
def test_values_from_a_file_are_held_to_types_and_bounds(values, message):
    with pytest.raises(ValueError) as error:
        checked(Options(**values))
    assert str(error.value) == message


def test_a_whole_number_will_do_for_a_float():
    assert checked(Options(rate=1)).rate == 1


def test_an_error_that_the_user_can_mend_is_one_line(capsys):
    with pytest.raises(SystemExit) as stopped, refusals():
        raise FileNotFoundError("no such folder: x")
    assert stopped.value.code == 2 and "error: no such folder: x\n" in capsys.readouterr().err
    with pytest.raises(KeyError), refusals():
        raise KeyError("a fault of ours")
    with pytest.raises(SystemExit), refusals(KeyError):
        raise KeyError("of the kind that was named")
    with pytest.raises(ValueError), refusals(KeyError):
        raise ValueError("a fault of ours")


@pytest.mark.parametrize("words", [["--film", "x"], ["--out", "y", "--film=x"]])
def test_a_door_takes_all_the_words(words, monkeypatch):
    heard = []
    monkeypatch.setattr("beyond.film.main", heard.append)
    assert through_door(words, DOORS) and heard == [words]
    assert not through_door(["--films", "film"], DOORS) and len(heard) == 1
