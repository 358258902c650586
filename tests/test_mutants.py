"""python -m pytest tests/test_mutants.py      the table of faults, and two of them planted"""

import re
import subprocess
import sys
from pathlib import Path

import mutants

ROOT = Path(__file__).resolve().parent.parent
QUICK = "boxes flags pictures records schemas tables".split()  # their tests take seconds
TABLE = mutants.table()


def test_every_fault_can_be_planted_and_no_two_are_the_same():
    """When code changes, so does the table: give a fault that lost its place its new one. Faults
    are compared as compiled code, so that one in a comment alone is none."""
    files = {m.file for m in TABLE}
    sound = {(file, compile((ROOT / file).read_text(), "", "exec")) for file in files}
    planted = {(m.file, compile(m.planted(), "", "exec")) for m in TABLE}
    assert len(planted) == len({m.id for m in TABLE}) == len(TABLE) and not planted & sound


def test_the_table_has_faults_of_each_of_the_nine_and_of_all_of_kit():
    files = {*ROOT.glob("*.py"), *(ROOT / "kit").glob("*.py")}
    assert {str(file.relative_to(ROOT)) for file in files} <= {m.file for m in TABLE}


def test_a_fault_names_a_test_of_its_own_module():
    for m in (m for m in TABLE if m.test):
        text = "".join((ROOT / file).read_text() for file in mutants.tests_of(m.file))
        assert any(m.test in name for name in re.findall(r"def (test_\w+)", text)), m


def test_at_most_one_fault_in_twenty_is_excused():
    assert sum(bool(m.excuse) for m in TABLE) <= len(TABLE) / 20


def test_a_sample_dies():
    files = [f"kit/{name}.py" for name in QUICK]
    words = [sys.executable, "tests/mutants.py", *files, "--sample", "2"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "2 planted" in done.stdout, done.stdout + done.stderr
