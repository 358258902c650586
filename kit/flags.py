"""
flags.py: a dataclass becomes a command line.

Concept     Each field of a dataclass is one flag. `knob` says all that a reader and the command
            line must know of it: its default, a help, who the default is from, its bounds.
Paper       nothing: all programs here read their command lines in this way
In          a dataclass whose fields are knobs, and the words of a command line
Out         an instance, its numbers within bounds; or a line that says what is wrong, and status 2
Left out    subcommands, short flags, abbreviations
Read next   train.py, whose Config is the largest command line here

    @dataclass(frozen=True)
    class Options:
        '''What the program is for: --help begins with this.'''
        turns: int = knob(5, "turns of one try", "paper", least=1)  # --turns 5; [paper: 5]
        quick: bool = knob(False, "few questions")  # --quick, --no-quick
        runs: list[str] = knob(None, "folders", word=True, nargs="*")  # RUN RUN, without a flag

    if not through_door(argv, DOORS):  # DOORS = {"--film": "beyond.film"}: its main takes over
        options = parse(Options, argv, DOORS)
        with refusals():  # what the user can mend becomes one line and status 2
            look_at(options.runs)
"""

import importlib
import math
import operator
from argparse import SUPPRESS, ArgumentDefaultsHelpFormatter, ArgumentParser, BooleanOptionalAction
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import field, fields
from pathlib import Path
from typing import TypeVar, get_args, get_type_hints

T = TypeVar("T")
BOUNDS = {"least": operator.ge, "above": operator.gt, "most": operator.le}
HOW = {"formatter_class": ArgumentDefaultsHelpFormatter, "allow_abbrev": False}


def knob(default, help: str, source: str = "", word: bool = False, **rules):
    """A field that is a flag, or a word without one. source: who the default is from, whatever a
    preset has. rules: the bounds least, most and above (a number must be greater); all else goes to
    argparse, such as choices, metavar and nargs."""
    bounds = {name: rules.pop(name) for name in BOUNDS if name in rules}
    rules["help"] = help + f" [{source}: {default}]" * bool(source)
    return field(default=default, metadata={"word": word, "bounds": bounds, "argparse": rules})


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def parse(kind: type[T], argv: list[str], doors=(), presets=None, by: str = "preset") -> T:
    """The words of a command line as a `kind`. doors: {flag: module} of other programs, for --help.
    presets: {value of the flag `by`: {field: another default}}."""
    hints, defaults = get_type_hints(kind), {f.name: f.default for f in fields(kind)}
    if presets:
        first = ArgumentParser(add_help=False, **HOW)
        first.add_argument(flag(by), dest="by", default=defaults[by])
        defaults |= presets.get(first.parse_known_args(argv)[0].by, {})
    parser = ArgumentParser(usage="%(prog)s [flags]", description=kind.__doc__, **HOW)
    for f in fields(kind):
        hint, default, how = hints[f.name], defaults[f.name], {**f.metadata["argparse"]}
        value = (get_args(hint) or (hint,))[0]  # int, for int | None and for list[int] as well
        how |= {"action": BooleanOptionalAction} if value is bool else {"type": value}
        how |= {"default": SUPPRESS if default is None else default}
        how["help"] = how["help"].replace("%", "%%")  # argparse formats it
        parser.add_argument(f.name if f.metadata["word"] else flag(f.name), **how)
    others = parser.add_argument_group("other programs, each with a --help of its own")
    for word in doors:
        file = Path(__file__).parents[1] / f"{doors[word].replace('.', '/')}.py"
        header = file.read_text(encoding="utf-8").splitlines()[1]
        others.add_argument(word, nargs="...", default=SUPPRESS, help=header)
    with refusals():
        return checked(kind(**vars(parser.parse_args(argv))))


def shared(options, kind: type[T], **others) -> T:
    """A `kind` made of those values whose fields have the same names in both, and of `others`."""
    names = {f.name for f in fields(kind)} & {f.name for f in fields(options)}
    return kind(**{name: getattr(options, name) for name in names}, **others)


def checked(options: T) -> T:
    """The options, if each is of its default's type and within its bounds; else a ValueError."""
    for f in fields(options):
        value, kind, bounds = getattr(options, f.name), type(f.default), f.metadata["bounds"]
        if f.default is not None and type(value) not in (kind, int if kind is float else kind):
            raise ValueError(f"{flag(f.name)}: expected a value like {f.default!r}, got {value!r}")
        within = [BOUNDS[name](value, limit) for name, limit in bounds.items() if value is not None]
        if not all(within) or isinstance(value, float) and not math.isfinite(value):
            wanted = "".join(f", {name} {limit}" for name, limit in bounds.items())
            raise ValueError(f"{flag(f.name)}: expected a finite number{wanted}; got {value}")
    return options


def overrides(argv: list[str], options, free: list[str], beside: str) -> dict[str, object]:
    """Those of the fields `free` that a command line sets, which stand beside the flag `beside`.
    Raises ValueError for any other flag."""
    words = {w.partition("=")[0].replace("--no-", "--") for w in argv if w.startswith("--")}
    if others := sorted(words - {beside, *map(flag, free)}):
        raise ValueError(
            f"{beside} goes on with what the run began with, so {', '.join(others)} cannot stand "
            f"beside it. These can: {', '.join(map(flag, free))}"
        )
    return {name: getattr(options, name) for name in free if flag(name) in words}


@contextmanager
def refusals(*kinds: type[Exception]) -> Iterator[None]:
    """An error inside that the user can mend becomes one line, and the end of the program."""
    kinds = kinds or (ValueError, OSError)
    try:
        yield
    except kinds as error:
        ArgumentParser(usage="%(prog)s [flags]").error(str(error))


def through_door(argv: list[str], doors: dict[str, str]) -> bool:
    """Hand argv to main of the module whose flag comes first in it; False if none is there."""
    for word in argv:
        if module := doors.get(word.partition("=")[0]):
            importlib.import_module(module).main(argv)
            return True
    return False
