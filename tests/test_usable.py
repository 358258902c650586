"""python -m pytest tests/test_usable.py      about 10 s: which rows can be used, found out once"""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kit.tables
from kit.tables import Bad, Skipped, Usable

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """A cache of its own for each test."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    return tmp_path / "usable"


class Check:
    """Refuses some rows, and counts how often it is asked."""

    def __init__(self, bad: dict[int, tuple[str, str]]) -> None:
        self.bad, self.asked = bad, []

    def load(self, total: int = 6, on_bad: str = "skip", key: object = "key") -> Usable:
        def check(i: int) -> None:
            self.asked.append(i)
            if i in self.bad:
                raise Bad(*self.bad[i])

        return Usable(range(total), check, lambda i: i * i, on_bad, "rows.parquet", key)


FEW = {1: ("answer", "empty"), 4: ("length", "9 tokens")}


@given(st.integers(0, 30), st.sets(st.integers(0, 29)))
def test_loaded_and_skipped_are_all_rows(total, bad):
    bad = {i for i in bad if i < total}
    usable = Check({i: ("answer", f"no {i}") for i in bad}).load(total, key=None)
    assert [*usable] == [i * i for i in range(total) if i not in bad]
    assert usable.skipped == [Skipped(i, "answer", f"no {i}") for i in sorted(bad)]
    assert len(usable) + len(usable.skipped) == total


def test_the_first_bad_row_can_stop_the_run():
    words = "rows.parquet: row 1, answer: empty"
    for _ in range(2):  # found out, and read again
        with pytest.raises(ValueError, match=words):
            Check(FEW).load(on_bad="stop")
    with pytest.raises(ValueError, match="'skip' or 'stop', got 'ignore'"):
        Check({}).load(on_bad="ignore")


@pytest.mark.parametrize("bad", [FEW, {}])
def test_a_second_start_asks_about_no_row_and_finds_the_same(bad):
    first, second = Check(bad), Check(bad)
    was, now = first.load(), second.load()
    assert sorted(first.asked) == [*range(6)] and second.asked == []
    assert [*now] == [*was] and now.skipped == was.skipped == [Skipped(i, *bad[i]) for i in bad]


def test_other_rows_limits_or_code_are_asked_about_anew(monkeypatch, tmp_path):
    Check(FEW).load()
    for total, key in ((6, "other"), (5, "key"), (6, None), (6, None)):
        again = Check({})
        assert len(again.load(total, key=key)) == total
        assert sorted(again.asked) == [*range(total)]
    (tmp_path / "kit").mkdir()
    (tmp_path / "kit" / "schemas.py").write_text("VERSION = 2")
    monkeypatch.setattr(kit.tables, "__file__", str(tmp_path / "kit" / "tables.py"))
    again = Check({})
    assert len(again.load()) == 6 and len(again.asked) == 6


def test_what_was_no_picture_is_looked_at_again():
    """It may lie in a file of its own, which is there by now; the other findings stay."""
    bad = FEW | {2: ("image", "no such file"), 3: ("image", "cut off")}
    Check(bad).load()
    again = Check({3: ("image", "cut off still")})
    assert again.load().skipped == [
        Skipped(1, *FEW[1]),
        Skipped(3, "image", "cut off still"),
        Skipped(4, *FEW[4]),
    ]
    assert again.asked == [2, 3]


def test_an_error_that_is_no_bad_row_stops_the_check_and_leaves_nothing_behind(cache):
    def check(i: int) -> None:
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        Usable(range(3), check, int, "skip", "rows", "key")
    assert not [*cache.glob("*.arrow")]


PROCESS = """
import sys, time
import datasets
from pathlib import Path
from kit.tables import Bad, Usable
folder = Path(sys.argv[1])
datasets.config.HF_DATASETS_CACHE = folder
(folder / f"ready-{sys.argv[2]}").touch()
while len([*folder.glob("ready-*")]) < 3:
    time.sleep(0.01)
def check(i):
    with open(folder / f"asked-{sys.argv[2]}", "a") as file:
        file.write(f"{i}\\n")
    time.sleep(0.05)
    if i == 7:
        raise Bad("answer", "empty")
usable = Usable(range(20), check, int, "skip", "rows", "key")
assert len(usable) == 19 and usable.skipped[0].row == 7
"""


@pytest.fixture
def command(tmp_path, monkeypatch) -> list[str]:
    """PROCESS as a program; its last word is to be the number of the process."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "process.py").write_text(PROCESS)
    return [sys.executable, str(tmp_path / "process.py"), str(tmp_path)]


def test_one_of_several_processes_checks_and_the_others_read(command, tmp_path):
    running = [subprocess.Popen([*command, str(n)]) for n in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    asked = [file.read_text().split() for file in tmp_path.glob("asked-*")]
    assert [sorted(map(int, rows)) for rows in asked] == [[*range(20)]]


def test_a_check_that_is_killed_is_made_again(command, tmp_path):
    for name in ("ready-a", "ready-b"):  # it waits for nobody
        (tmp_path / name).touch()
    process = subprocess.Popen([*command, "0"])
    while not (tmp_path / "asked-0").exists():
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert not [*(tmp_path / "usable").glob("*.arrow")]
    subprocess.run([*command, "0"], check=True)
    assert len([*(tmp_path / "usable").glob("*.arrow")]) == 1
