"""python tests/mutants.py      plant small faults, one at a time: does a test of the module notice?

Each fault of mutants.txt is planted in a copy of the project, and the tests of that module run
there until one fails: then the fault is dead. What lives shows what no test proves.

    python tests/mutants.py grpo.py kit/boxes.py G15     those of some files, or some by name
    python tests/mutants.py --sample 10 --seed 7         ten of them, drawn at random
"""

import argparse
import os
import random
import re
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

# What all tests import is imported once: each run is a fork of this process.
os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
import datasets  # noqa: F401
import hypothesis  # noqa: F401
import matplotlib.pyplot  # noqa: F401
import openai  # noqa: F401
import psutil
import pytest
from transformers import Qwen2_5_VLForConditionalGeneration  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent
MOST, IDLE = 200, 100  # seconds: of CPU for one fault; without any, when it waits for ever


class Mutant(NamedTuple):
    id: str
    file: str
    what: str
    old: str  # stands in the file once
    new: str
    test: str  # of the test that is about it a part of its name: it runs before the others
    excuse: str  # why it may live; "" if it must die

    def planted(self) -> str:
        """The file with the fault in it. Raises ValueError if the table is out of date."""
        text = (ROOT / self.file).read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(f"{self.id}: expected this once in {self.file}: {self.old!r}")
        return text.replace(self.old, self.new)


def table() -> list[Mutant]:
    found, text = [], Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
    for head, *lines in (block.split("\n") for block in text.strip().split("\n\n")):
        parts = ("\n".join(line[2:] for line in lines if line[0] == mark) for mark in "-+@!")
        found.append(Mutant(*re.fullmatch(r"# (\w+) (\S+): (.+)", head).groups(), *parts))
    return found


def tests_of(file: str) -> list[str]:
    """The tests of a module; those of the module that it is a part of, if it has none."""
    name, folder = Path(file).stem, ROOT / "tests"
    while not (found := [*folder.glob(f"test_{name}.py"), *folder.glob(f"test_{name}_*.py")]):
        name = name.rstrip("*").rpartition("_")[0] + "*"
    return sorted({f"tests/{path.name}" for path in found})


def cpu(process: psutil.Process) -> float:
    with suppress(psutil.Error):  # it has ended
        return sum(process.cpu_times()[:4])  # user, system, and of children that have ended
    return 0.0


def run(mutant: Mutant, words: list[str]) -> str:
    """The test that noticed, or ""."""
    with tempfile.TemporaryDirectory() as folder:
        copy, out = Path(folder) / "copy", Path(folder) / "out"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "runs", "build"))
        (copy / mutant.file).write_text(mutant.planted(), encoding="utf-8")
        if not (child := os.fork()):
            os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT), 1)
            os.dup2(1, 2)
            os.chdir(copy)
            sys.path[0] = str(copy / "tests")
            os._exit(pytest.main(["-x", "-q", "-n0", "-p", "no:cacheprovider", *words]))
        process, spent, idle = psutil.Process(child), 0.0, 0
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            time.sleep(0.2)
            family, before = [process, *process.children(recursive=True)], spent
            spent = max(spent, sum(map(cpu, family)))
            idle = 0 if spent > before else idle + 1
            if spent > MOST or idle > 5 * IDLE:
                [each.kill() for each in family]
        text = out.read_text(encoding="utf-8", errors="replace")
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
        lived = not failed and re.search(r"\d+ (passed|deselected)", text)
        return "" if lived else [*failed, "no test: it took too long, or nothing ran"][0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="only faults of these files, or of these names")
    parser.add_argument("--sample", type=int, help="only so many, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the drawing")
    options = parser.parse_args()
    chosen = [m for m in table() if not options.names or {m.file, m.id} & {*options.names}]
    if options.sample:
        chosen = random.Random(options.seed).sample(chosen, options.sample)
    fates = []
    for m in chosen:
        words = tests_of(m.file)
        noticed = (m.test and run(m, [*words, "-k", m.test])) or run(m, words)
        fates.append("killed" if noticed else "excused" if m.excuse else "SURVIVED")
        print(f"{fates[-1]:8} {m.id} {m.file}: {m.what} [{noticed or m.excuse}]", flush=True)
    print(len(fates), "planted,", *(f"{fates.count(fate)} {fate}" for fate in sorted({*fates})))
    sys.exit("SURVIVED" in fates)


if __name__ == "__main__":
    main()
