"""
check.py: can every row of a benchmark's file be asked and scored? Without a model, in seconds.

Concept     A row that cannot be scored stops an evaluation. This reads the whole file beforehand,
            and grades each reference as if a policy had given it: by its own rule it must be right.
Paper       nothing
In          the name of a benchmark, and its file
Out         how many rows would be scored by which rule; the bad ones, each with the reason
Left out    decoding pictures above 64 KB: of these is only asked whether they are there
Read next   kit/benchmarks.py (the rules), docs/benchmarks.md (where they differ from the authors')

    python evaluate.py --bench mmmu --data MMMU_DEV_VAL.tsv --check
"""

import sys
from collections import Counter
from dataclasses import dataclass

import evaluate
from kit.benchmarks import Questions
from kit.flags import knob, parse, refusals


@dataclass(frozen=True)
class Options(evaluate.Options):
    """Can every row of a benchmark be scored? Of the flags only --bench, --data and --limit count;
    the others may stand there as for the evaluation itself."""

    model: str | None = knob(None, "not needed", metavar="DIR")
    check: bool = knob(False, "read and grade the references, and play nothing")


def main(argv: list[str]) -> None:
    options = parse(Options, argv)
    with refusals():
        if options.bench == "toy":
            raise ValueError("the toy world is drawn, not read: give --bench a benchmark's name")
        questions = Questions(options.bench, options.data, options.limit)
        usable = questions.usable(questions.way, on_bad="skip")
    others = len(questions.rows) - len(questions.numbers)
    print(f"{questions.title}: {len(usable)} of {len(questions.numbers)} rows would be scored")
    for way, rows in Counter(usable).most_common():
        print(f"{rows:7} {way}")
    print(f"{others:7} rows more, which do not count (split dev, or beyond --limit)" * bool(others))
    for row, field, reason in usable.skipped:
        print(f"row {row}, {field}: {reason}")
    if usable.skipped or not usable:
        sys.exit(1)
