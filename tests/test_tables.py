"""python -m pytest tests/test_tables.py      about 5 s: files, rows and pictures of public data"""

import base64
import csv
import io
import json
import os
import subprocess
import sys
import time
from fnmatch import fnmatch
from pathlib import Path

import pytest
from datasets import Dataset, Features, List, Value
from datasets import Image as ImageCell
from fixtures.make_fixtures import picture, png, rl_rows, sft_rows
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, features

import kit.tables
from kit.tables import Bad, Lazy, Rows, Skipped, Usable, read_image, read_rows, upright_rgb

ROOT = Path(__file__).resolve().parent.parent
FIXTURES = Path(__file__).parent / "fixtures"
PICTURE = picture(0)[0]
PNG = png(PICTURE)


def jpeg(image: Image.Image, **more) -> bytes:
    image.save(file := io.BytesIO(), "JPEG", **more)
    return file.getvalue()


def parquet(path: Path, rows: list[dict]) -> Path:
    Dataset.from_list(rows).to_parquet(path)
    return path


# Cells


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    return tmp_path


FORMS = {
    "path": lambda folder: str(folder / "a.png"),
    "relative path": lambda folder: "a.png",
    "file address": lambda folder: f"file://{folder}/a.png",
    "bytes": lambda folder: PNG,
    "dict of bytes": lambda folder: {"bytes": PNG, "path": None},
    "dict of bytes and a path of old": lambda folder: {"bytes": PNG, "path": "/gone/a.png"},
    "dict with path only": lambda folder: {"bytes": None, "path": "a.png"},
    "base64": lambda folder: base64.b64encode(PNG).decode(),
    "base64 in lines": lambda folder: base64.encodebytes(PNG).decode(),
    "base64 of URLs": lambda folder: base64.urlsafe_b64encode(PNG).decode(),
    "base64 without its end": lambda folder: base64.b64encode(PNG).decode().rstrip("="),
    "data URL": lambda folder: "data:image/png;base64," + base64.b64encode(PNG).decode(),
    "part of a message": lambda folder: {
        "type": "image_url",
        "image_url": {"url": "data:image/png;base64," + base64.b64encode(PNG).decode()},
    },
    "address in a part": lambda folder: {"type": "image_url", "image_url": "a.png"},
    "image of a part": lambda folder: {"type": "image", "image": "a.png"},
    "list of dicts": lambda folder: [{"bytes": PNG}],
    "list of base64": lambda folder: [base64.b64encode(PNG).decode()],
}


@pytest.mark.parametrize("form", FORMS)
def test_an_image_cell_may_have_any_public_form(form, folder):
    image = read_image(FORMS[form](folder), folder)
    assert image.mode == "RGB" and image.tobytes() == PICTURE.tobytes()


BROKEN = {
    "missing file": ("größe.png", "no such file, and no base64: 'größe.png' in /"),
    "missing file of eight letters": ("gone1.png", "no such file, and no base64"),
    "half a JPEG": (jpeg(PICTURE)[:900], "no image that can be read in b'.*: image file is trunc"),
    "text": (
        b"<html>",
        "no image that can be read in b'<html>': cannot identify it as one of PNG, JP.*PPM",
    ),
    "empty list": ([], "expected one image, got a list of 0"),
    "two pictures": ([PNG, PNG], "expected one image, got a list of 2"),
    "None": (None, "expected an image, got None"),
    "empty bytes": (b"", "expected an image, got b''"),
    "empty text": ("", "expected an image, got ''"),
    "empty dict": ({"bytes": None, "path": None}, "expected an image, got None"),
    "a number": (7, "expected an image, got 7"),
    "base64 of nothing": ("aGVsbG8=", "no image that can be read in 'aGVsbG8=': cannot identify"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_cell_says_what_came(name, folder):
    cell, words = BROKEN[name]
    with pytest.raises(ValueError, match=words):
        read_image(cell, folder)


@pytest.mark.parametrize("kind", ["AVIF", "JPEG2000", "PPM"])
def test_newer_and_plainer_formats_are_opened_where_pil_can(kind):
    if kind.lower() not in features.get_supported() and kind == "AVIF":
        pytest.skip("PIL has no decoder")
    PICTURE.save(file := io.BytesIO(), kind)
    assert read_image(file.getvalue()).size == PICTURE.size


@given(st.sampled_from([PNG, jpeg(PICTURE)]), st.data())
def test_a_damaged_file_is_an_image_or_a_reason(whole, draw):
    damaged = bytearray(whole[: draw.draw(st.integers(1, len(whole)))])
    for _ in range(draw.draw(st.integers(0, 8))):
        damaged[draw.draw(st.integers(0, len(damaged) - 1))] = draw.draw(st.integers(0, 255))
    try:
        assert read_image(bytes(damaged)).mode == "RGB"
    except ValueError as reason:
        assert str(reason).startswith("no image that can be read in b")


def test_a_photo_is_turned_upright(folder):
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    turned = jpeg(Image.new("RGB", (300, 180)), exif=exif)
    assert read_image(turned).size == (180, 300)


def test_pictures_become_upright_opaque_and_rgb(tmp_path):
    tagged = Image.new("RGB", (300, 180))
    exif = tagged.getexif()
    exif[0x0112] = 6  # rotated by 90 degrees
    tagged.save(tmp_path / "a.jpg", exif=exif)
    assert upright_rgb(Image.open(tmp_path / "a.jpg")).size == (180, 300)
    clear_red = Image.new("RGBA", (5, 5), (255, 0, 0, 0))
    assert upright_rgb(clear_red).getpixel((2, 2)) == (255, 255, 255)
    Image.new("RGB", (5, 5), "red").save(tmp_path / "a.png", transparency=(255, 0, 0))
    assert upright_rgb(Image.open(tmp_path / "a.png")).getpixel((2, 2)) == (255, 255, 255)
    for mode in ("L", "1", "LA", "P", "CMYK", "I;16"):
        assert upright_rgb(Image.new(mode, (5, 5))).mode == "RGB"


# Rows

TEXTS = [
    {"index": "007", "question": "one\ntwo, three", "A": "None", "B": "NA", "C": "", "D": "1.50"},
    {"index": "8", "question": 'say "x"\tnow', "A": "nan", "B": "null", "C": "-", "D": "True"},
]


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".json", ".csv", ".tsv"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path, suffix):
    file = tmp_path / f"a [1]{suffix}"  # a name that is a pattern too
    if suffix == ".parquet":
        parquet(file, TEXTS)
    elif suffix.startswith(".json"):
        lines = [json.dumps(row) for row in TEXTS]
        file.write_text("\n".join(lines) if suffix == ".jsonl" else f"[{','.join(lines)}]")
    else:
        with open(file, "w", newline="") as f:
            writer = csv.DictWriter(f, list(TEXTS[0]), delimiter="\t" if "t" in suffix else ",")
            writer.writeheader()
            writer.writerows(TEXTS)
    assert list(read_rows(file)) == TEXTS


def test_cells_stay_as_they_are_stored(tmp_path):
    """Pictures undecoded, however deep they lie; and cells of one column may differ in kind."""
    cell = {"bytes": PNG, "path": "a.png"}
    features = Features({"image": ImageCell(), "images": List(ImageCell()), "n": Value("int8")})
    row = {"image": cell, "images": [cell, cell], "n": 3}
    Dataset.from_list([row], features=features).to_parquet(tmp_path / "a.parquet")
    assert list(read_rows(tmp_path / "a.parquet")) == [row]
    mixed = [{"a": 1}, {"a": "x"}, {"a": [1, "y"]}, {"a": None}, {"a": {"b": 2}}]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in mixed))
    assert list(read_rows(tmp_path / "b.jsonl")) == mixed


@given(st.lists(st.lists(st.integers(), max_size=4), min_size=1), st.data())
def test_rows_of_several_files_are_one_sequence(tables, draw):
    rows, flat = Rows(tables, Path()), sum(tables, [])
    assert list(rows) == flat and len(rows) == len(flat)
    cut = draw.draw(st.slices(len(flat)))
    assert [*rows[cut]] == flat[cut]
    lazy = Lazy(lambda x: -x, flat)
    assert [*lazy[cut]] == [-x for x in flat[cut]] and len(lazy[cut]) == len(flat[cut])
    i = draw.draw(st.integers(-len(flat) - 2, len(flat) + 1))
    if -len(flat) <= i < len(flat):
        assert rows[i] == flat[i] and lazy[i] == -flat[i]
    else:
        with pytest.raises(IndexError):
            rows[i]


def test_a_folder_is_its_files_of_the_first_kind_and_a_split_is_how_names_begin(tmp_path):
    for name in ("test-0001-of-0002", "test-0000-of-0002", "testmini-0", "train/part"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        parquet(tmp_path / f"{name}.parquet", [{"a": name, name: {"columns": "differ"}}])
    (tmp_path / "other.jsonl").write_text('{"a": 1}\n')
    (tmp_path / ".cache").mkdir()
    parquet(tmp_path / ".cache" / "test.parquet", [{"a": "hidden"}])
    names = lambda where: [row["a"] for row in read_rows(where)]  # noqa: E731
    tests = ["test-0000-of-0002", "test-0001-of-0002"]
    assert names(tmp_path) == [*tests, "testmini-0", "train/part"]
    assert names(f"{tmp_path}:test") == tests
    assert names(f"{tmp_path}:train") == ["train/part"]
    assert names(f"{tmp_path}:train+testmini") == ["testmini-0", "train/part"]
    assert read_rows(tmp_path).folder == tmp_path
    with pytest.raises(FileNotFoundError, match="no .parquet.* begins with 'val' in"):
        read_rows(f"{tmp_path}:val")


def test_a_hub_name_is_downloaded_as_far_as_needed_and_read_like_a_folder(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    for name in ("train-0000", "2round-0000", "test-0000"):
        parquet(tmp_path / "data" / f"{name}.parquet", [{"a": name}])
    asked = []

    def download(name, repo_type, allow_patterns):
        asked.append((name, repo_type))
        for file in tmp_path.rglob("*.parquet"):  # as the hub would
            path = str(file.relative_to(tmp_path))
            if allow_patterns and not any(fnmatch(path, p) for p in allow_patterns):
                file.unlink()
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert len(read_rows("some/set")) == 3
    assert [row["a"] for row in read_rows("some/set:train+2round")] == ["2round-0000", "train-0000"]
    assert len(list(tmp_path.rglob("*.parquet"))) == 2 and set(asked) == {("some/set", "dataset")}


def test_what_cannot_be_read_says_so(tmp_path, monkeypatch):
    for name, text, words in (
        ("a.jsonl", '{"a": 1}\nnot json\n', "a.jsonl cannot be read as .jsonl: JSON parse error"),
        ("b.jsonl", "", "b.jsonl is empty"),
        ("d.csv", "a,b\n", "d.csv cannot be read as .csv: it has no rows"),
        ("e.json", "[]", "e.json cannot be read as .json: it has no rows"),
        ("c.txt", "x", "c.txt: expected a file that ends in one of .parquet, .jsonl"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=words):
            read_rows(tmp_path / name)
    Dataset.from_dict({"a": []}).to_parquet(tmp_path / "f.parquet")  # as if nothing was kept
    with pytest.raises(ValueError, match="f.parquet cannot be read as .parquet: it has no rows"):
        read_rows(tmp_path / "f.parquet")
    with pytest.raises(FileNotFoundError, match="neither a file, a folder nor a hub name"):
        read_rows("gone.parquet")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match="no data set 'no/such': .* the hub does not"):
        read_rows("no/such")


def test_the_committed_fixtures_are_what_their_script_writes():
    assert (
        list(read_rows(FIXTURES / "codev_rl.parquet")) == rl_rows()
        and list(read_rows(FIXTURES / "thyme_sft.jsonl")) == sft_rows()
    )


def test_a_fingerprint_survives_a_copy_and_no_change(tmp_path):
    def known(name, text):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.jsonl").write_text(text)
        return read_rows(tmp_path / name).fingerprint()

    rows = [f'{{"a": {i}}}\n' for i in range(9)]
    first = known("first", "".join(rows))
    os.utime(tmp_path / "first" / "first.jsonl", (1, 1))
    assert first == known("copy", "".join(rows)) and first.startswith("9 rows (")
    assert first != known("turned", "".join(rows[::-1]))
    assert first != known("edited", "".join(rows).replace("4", "3"))
    assert first != known("longer", "".join([*rows, rows[0]]))


def test_a_large_file_is_read_in_parts(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n')
    rows, size = read_rows(tmp_path / "a.jsonl"), 1 << 30
    path = tmp_path / "large"
    with open(path, "wb") as file:
        file.truncate(size)
    rows.version = [(str(path), 0, size)]
    before = rows.fingerprint()
    with open(path, "r+b") as file:
        file.seek(size // 64 * 40)
        file.write(b"x")
    assert rows.fingerprint() != before


# Which rows can be used, found out once


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
