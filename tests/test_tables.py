"""python -m pytest tests/test_tables.py      files, rows and pictures of public data"""

import base64
import io
import json
import os
import tempfile
import time
from fnmatch import fnmatch
from pathlib import Path

import pandas
import pytest
from conftest import FORKS
from datasets import Dataset, Features, List, Value
from datasets import Image as ImageCell
from fixtures.make_fixtures import parquet, picture, png, rl_rows, sft_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from kit.tables import Bad, Lazy, Rows, Skipped, Usable, read_image, read_rows

FIXTURES = Path(__file__).parent / "fixtures"
PICTURE = picture(0)[0]
PNG = png(PICTURE)
TEXT = base64.b64encode(PNG).decode()
URL = "data:image/png;base64," + TEXT


def jpeg(image: Image.Image, **more) -> bytes:
    image.save(file := io.BytesIO(), "JPEG", **more)
    return file.getvalue()


# Cells
FORMS = [
    PNG, "FOLDER/a.png", "a.png", "file://FOLDER/a.png", {"bytes": None, "path": "a.png"},
    {"bytes": PNG, "path": None}, {"bytes": PNG, "path": "/gone/a.png"}, [{"bytes": PNG}],
    TEXT, [TEXT], base64.encodebytes(PNG).decode(), base64.urlsafe_b64encode(PNG).decode(),
    TEXT.rstrip("="), URL, {"type": "image_url", "image_url": {"url": URL}},
    {"type": "image_url", "image_url": "a.png"}, {"type": "image", "image": "a.png"},
]  # fmt: skip


@pytest.mark.parametrize("cell", FORMS, ids=range(len(FORMS)))
def test_an_image_cell_may_have_any_public_form(cell, tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    if isinstance(cell, str):
        cell = cell.replace("FOLDER", str(tmp_path))
    image = read_image(cell, tmp_path)
    assert image.mode == "RGB" and image.tobytes() == PICTURE.tobytes()


@pytest.mark.parametrize("cell, words", [
    ("größe.png", "no such file, and no base64: 'größe.png' in /"),
    ("gone1.png", "no such file, and no base64"),  # eight letters: it could be some
    ("aGVsbG8=", "no image that can be read in 'aGVsbG8=': cannot identify it as one of PNG"),
    (jpeg(PICTURE)[:900], "no image that can be read in b'.*: image file is trunc"),
    (png(Image.new("1", (20_000, 10_000))), "no image that can be read in b.*: Image size .* exc"),
    ([], "expected one image, got a list of 0"),
    ([PNG, PNG], "expected one image, got a list of 2"),
    ({"bytes": None, "path": None}, "expected an image, got None"),
    *((nothing, f"expected an image, got {nothing!r}") for nothing in (None, b"", "", 7)),
])  # fmt: skip
def test_a_broken_cell_says_what_came(cell, words, tmp_path):
    for whole in (True, False):  # the head alone is read of large ones only
        with pytest.raises(ValueError, match=words):
            read_image(cell, tmp_path, whole)


@given(st.sampled_from([PNG, jpeg(PICTURE)]), st.data())
def test_a_damaged_file_is_an_image_or_a_reason(whole, draw):
    damaged = bytearray(whole[: draw.draw(st.integers(1, len(whole)))])
    for _ in range(draw.draw(st.integers(0, 8))):
        damaged[draw.draw(st.integers(0, len(damaged) - 1))] = draw.draw(st.integers(0, 255))
    try:
        assert read_image(bytes(damaged)).mode == "RGB"
    except ValueError as reason:
        assert str(reason).startswith("no image that can be read in b")


# Rows
TEXTS = [
    {"index": "007", "question": "one\ntwo, three", "A": "None", "B": "NA", "C": "", "D": "1.50"},
    {"index": "8", "question": 'say "x"\tnow', "A": "nan", "B": "null", "C": "-", "D": "True"},
]


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".json", ".csv", ".tsv"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path, suffix):
    file = tmp_path / f"a:b [1]{suffix}"  # a name that is a pattern too, and no split
    if suffix == ".parquet":
        parquet(file, TEXTS)
    elif "json" in suffix:
        pandas.DataFrame(TEXTS).to_json(file, orient="records", lines=suffix == ".jsonl")
    else:
        pandas.DataFrame(TEXTS).to_csv(file, sep="\t" if suffix == ".tsv" else ",", index=False)
    assert list(read_rows(file)) == TEXTS


def test_cells_stay_as_they_are_stored(tmp_path):
    """Pictures undecoded, however deep they lie; and cells of one column may differ in kind."""
    cell = {"bytes": PNG, "path": "a.png"}
    features = Features({"image": ImageCell(), "images": List(ImageCell()), "n": Value("int8")})
    row = {"image": cell, "images": [cell, cell], "n": 3}
    Dataset.from_list([row], features=features).to_parquet(tmp_path / "a.parquet")
    assert list(read_rows(tmp_path / "a.parquet")) == [row]
    mixed = [{"a": 1}, {"a": "x"}, {"a": [1, "y"]}, {"a": None}, {"a": {"b": 2}}]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, mixed)))
    assert list(read_rows(tmp_path / "b.jsonl")) == mixed
    assert list(read_rows(FIXTURES / "codev_rl.parquet")) == rl_rows()
    assert list(read_rows(FIXTURES / "thyme_sft.jsonl")) == sft_rows()  # as their script has them


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
    assert read_rows(tmp_path).folder == read_rows(tmp_path / "other.jsonl").folder == tmp_path
    with pytest.raises(FileNotFoundError, match="no .parquet.* begins with 'val' in"):
        read_rows(f"{tmp_path}:val")


def test_a_hub_name_is_downloaded_as_far_as_needed_and_read_like_a_folder(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    for name in ("train-0000", "2round-0000", "test-0000"):
        parquet(tmp_path / "data" / f"{name}.parquet", [{"a": name}])

    def download(name, repo_type, allow_patterns):
        assert (name, repo_type) == ("some/set", "dataset")
        for file in tmp_path.rglob("*.parquet"):  # as the hub would
            if not any(fnmatch(file.relative_to(tmp_path), p) for p in allow_patterns or "*"):
                file.unlink()
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert len(read_rows("some/set")) == 3
    assert [row["a"] for row in read_rows("some/set:train+2round")] == ["2round-0000", "train-0000"]
    assert len(list(tmp_path.rglob("*.parquet"))) == 2


@pytest.mark.parametrize("name, text, words", [
    ("a.jsonl", '{"a": 1}\nnot json\n', "a.jsonl cannot be read as .jsonl: JSON parse error"),
    ("b.jsonl", "", "b.jsonl is empty"),
    ("d.csv", "a,b\n", "d.csv cannot be read as .csv: it has no rows"),
    ("e.json", "[]", "e.json cannot be read as .json: it has no rows"),
    ("c.txt", "x", "c.txt: expected a file that ends in one of .parquet, .jsonl"),
    ("f.parquet", None, "f.parquet cannot be read as .parquet: it has no rows"),
    ("gone.parquet", None, "neither a file, a folder nor a hub name"),
    ("no/such", None, "no data set 'no/such': .* the hub does not"),
])  # fmt: skip
def test_what_cannot_be_read_says_so(tmp_path, name, text, words, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    Dataset.from_dict({"a": []}).to_parquet("f.parquet")  # as if nothing was kept
    if text is not None:
        Path(name).write_text(text)
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        read_rows(name)


def test_a_fingerprint_survives_a_copy_and_no_change(tmp_path):
    def known(name, numbers):
        (file := tmp_path / f"{name}.jsonl").write_text("".join(f'{{"a": {i}}}\n' for i in numbers))
        os.utime(file, (1, len(name)))
        return read_rows(file).fingerprint()

    first = known("first", range(9))
    assert first == known("copy", range(9)) and first.startswith("9 rows (")
    others = range(9)[::-1], [0, 1, 2, 3, 3, 5, 6, 7, 8], [*range(9), 0]  # turned, edited, longer
    assert first not in [known("other", numbers) for numbers in others]
    rows, size = Rows([], Path()), 1 << 30
    with tempfile.NamedTemporaryFile() as file:  # a large one is read in parts
        os.truncate(file.name, size)
        rows.version = [(file.name, 0, size)]
        before = rows.fingerprint()
        file.seek(size // 64 * 40)
        file.write(b"x")
        file.flush()
        assert rows.fingerprint() != before


# Which rows can be used, found out once
@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> None:
    """A cache of its own for each test."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)


def load(bad: dict, total=6, on_bad="skip", key: object = "key", first=0):
    """Squares of the rows that are not bad, and which rows were asked about."""
    asked = []

    def check(i: int) -> None:
        asked.append(i)
        if i in bad:
            raise Bad(*bad[i])

    rows = range(first, first + total)
    return Usable(rows, check, lambda i: i * i, on_bad, "rows.parquet", key), sorted(asked)


FEW = {1: ("answer", "empty"), 4: ("length", "9 tokens")}


@settings(max_examples=15)
@given(st.integers(0, 30), st.sets(st.integers(0, 29)))
def test_loaded_and_skipped_are_all_rows_and_a_second_start_asks_about_none(total, bad):
    bad = {i: ("answer", f"no {i}") for i in sorted(bad) if i < total}
    key = os.urandom(8)
    for questions in ([*range(total)], []):
        usable, asked = load(bad, total, key=key)
        assert [*usable] == [i * i for i in range(total) if i not in bad] and asked == questions
        assert usable.skipped == [Skipped(i, *bad[i]) for i in bad]
        assert len(usable) + len(usable.skipped) == total


def test_the_first_bad_row_can_stop_the_run():
    for _ in range(2):  # found out, and read again
        with pytest.raises(ValueError, match="rows.parquet: row 1, answer: empty"):
            load(FEW, on_bad="stop")
    with pytest.raises(ValueError, match="'skip' or 'stop', got 'ignore'"):
        load({}, on_bad="ignore")


def test_other_rows_limits_or_code_are_asked_about_anew(monkeypatch, tmp_path):
    load(FEW)
    for first, total, key in ((0, 6, "other"), (0, 5, "key"), (1, 6, "key"), *[(0, 6, None)] * 2):
        usable, asked = load({}, total, key=key, first=first)
        assert len(usable) == total and asked == [*range(first, first + total)]
    (tmp_path / "kit").mkdir()
    (tmp_path / "kit" / "schemas.py").write_text("VERSION = 2")
    monkeypatch.setattr("kit.tables.__file__", str(tmp_path / "kit" / "tables.py"))
    usable, asked = load({})
    assert len(usable) == len(asked) == 6


def test_what_was_no_picture_is_looked_at_again():
    """It may lie in a file of its own, which is there by now; the other findings stay."""
    load(FEW | {2: ("image", "no such file"), 3: ("image", "cut off")})
    usable, asked = load({3: ("image", "cut off still")})
    still = Skipped(3, "image", "cut off still")
    assert usable.skipped == [Skipped(1, *FEW[1]), still, Skipped(4, *FEW[4])] and asked == [2, 3]


def process(meet, notes: Path) -> None:
    """One of several that find out together: each notes what it is asked about."""
    meet.wait()

    def check(i: int) -> None:
        with open(notes / f"{os.getpid()}", "a") as file:
            file.write(f"{i}\n")
        time.sleep(0.05)
        if i == 7:
            raise Bad("answer", "empty")

    usable = Usable(range(20), check, int, "skip", "rows", "key")
    assert len(usable) == 19 and usable.skipped[0].row == 7


def begun(n: int, notes: Path) -> list:
    notes.mkdir()
    meet = FORKS.Barrier(n)
    members = [FORKS.Process(target=process, args=(meet, notes)) for _ in range(n)]
    for member in members:
        member.start()
    return members


def test_one_of_several_processes_checks_and_the_others_read(tmp_path):
    """Also after one that was killed amid it: its check is made again, whole."""
    (killed,) = begun(1, tmp_path / "killed")
    while not [*(tmp_path / "killed").iterdir()]:
        time.sleep(0.01)
    killed.kill()
    killed.join()
    members = begun(3, tmp_path / "three")
    for member in members:
        member.join()
    assert [member.exitcode for member in members] == [0, 0, 0]
    asked = [file.read_text().split() for file in (tmp_path / "three").iterdir()]
    assert [sorted(map(int, rows)) for rows in asked] == [[*range(20)]]
