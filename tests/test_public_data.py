"""python -m pytest tests/test_public_data.py      about 10 s: public data sets and their filters"""

import base64
import csv
import io
import json
import math
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import pytest
from conftest import RULES
from datasets import Dataset, Features, List, Value
from datasets import Image as ImageCell
from fixtures.make_fixtures import picture, png, rl_rows, sft_rows
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import beyond.filters
import data
import kit.answers
import kit.schemas
import kit.tables
from data import load_rl
from kit.tables import Bad, Lazy, Rows, read_image, read_rows
from rewards import ChatJudge
from rollout import Trajectory

FIXTURES = Path(__file__).parent / "fixtures"
RL, SFT = FIXTURES / "codev_rl.parquet", FIXTURES / "thyme_sft.jsonl"
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
    "base64 without its end": lambda folder: base64.b64encode(PNG).decode().rstrip("="),
    "data URL": lambda folder: "data:image/png;base64," + base64.b64encode(PNG).decode(),
    "list of dicts": lambda folder: [{"bytes": PNG}],
    "list of base64": lambda folder: [base64.b64encode(PNG).decode()],
    "PIL": lambda folder: PICTURE,
    "PIL with a palette": lambda folder: PICTURE.quantize(64),
}


@pytest.mark.parametrize("form", FORMS)
def test_an_image_cell_may_have_any_public_form(form, folder):
    image = read_image(FORMS[form](folder), folder)
    assert image.mode == "RGB" and image.size == PICTURE.size
    if "palette" not in form:
        assert image.tobytes() == PICTURE.tobytes()


BROKEN = {
    "missing file": ("größe.png", "no such file, and no base64: 'größe.png' in /"),
    "missing file of eight letters": ("gone1.png", "no such file, and no base64"),
    "half a JPEG": (jpeg(PICTURE)[:900], "no image that can be read in b'.*: image file is trunc"),
    "text": (b"<html>", "no image that can be read in b'<html>': cannot identify"),
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
    assert list(read_rows(RL)) == rl_rows() and list(read_rows(SFT)) == sft_rows()


# Questions


def test_rows_in_verls_form_become_samples():
    samples = load_rl(RL)
    assert len(samples) == 9 and samples.skipped == []
    assert [s.kind for s in samples[:3]] == ["search", "search", "neutral"]
    first = samples[0]
    assert first.question == "What color is the small sign?\n(A) red\n(B) green"
    assert (first.answer, first.source, first.id) == ("A", "vstar", "vstar-0")
    assert first.image.tobytes() == PICTURE.tobytes()


FLAT = {"image": {"bytes": PNG, "path": None}, "problem": "<image>How many?", "answer": 4}
VERL = rl_rows()[0]
SCHEMAS = {
    "flat": (FLAT, "How many?", "4"),
    "answer in tags": (FLAT | {"answer": "<answer> 4 </answer>"}, "How many?", "4"),
    "no question of its own": (
        {k: v for k, v in VERL.items() if k != "extra_info"},
        "What color is the small sign?\n(A) red\n(B) green", "A",
    ),
    "prompt in parts": (
        FLAT | {"problem": None, "prompt": [{"role": "user", "content": [
            {"type": "image", "text": None}, {"type": "text", "text": "How many?"}]}]},
        "How many?", "4",
    ),
    "options": (FLAT | {"answer": "b", "options": ["one", "two"]}, "How many?", "b"),
}  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS)
def test_public_schemas_differ_in_their_columns_alone(schema, tmp_path):
    row, question, answer = SCHEMAS[schema]
    sample = data.rl_sample(row, 5, tmp_path)
    assert (sample.question, sample.answer) == (question, answer)
    assert sample.image.tobytes() == PICTURE.tobytes()


BAD = [
    (FLAT | {"image": None}, "image", "nothing in images or image"),
    (FLAT | {"image": {"bytes": jpeg(PICTURE)[:900]}}, "image", "no image that can be read"),
    (FLAT | {"image": [FLAT["image"]] * 2}, "image", "a list of 2"),
    (FLAT | {"image": {"bytes": png(Image.new("RGB", (400, 2)))}}, "image", "200 times longer"),
    (FLAT | {"problem": " <image> "}, "question", "expected a text, got"),
    (FLAT | {"problem": None, "prompt": [{"role": "system", "content": "x"}]}, "question", "text"),
    (FLAT | {"answer": None}, "answer", "nothing in reward_model.ground_truth or answer"),
    (FLAT | {"answer": ["4", "four"]}, "answer", "expected a text or a number, got"),
    (FLAT | {"answer": "C", "options": ["one", "two"]}, "answer", "neither a letter nor a text"),
    (FLAT | {"answer": "AB", "options": ["one", "two"]}, "answer", "neither a letter nor a text"),
    (FLAT | {"options": "(A) one"}, "options", "expected a list of texts, got '.A. one'"),
    (FLAT | {"options": ["one", None]}, "options", "expected a list of texts"),
    (FLAT | {"answer": "x", "options": ["x", "x"]}, "options", "'x' should name one of options"),
    (FLAT | {"answer": "A", "options": ["red", "red "]}, "options", "that all differ, got"),
    (FLAT | {"answer": "cat", "options": ["cat", "a cat"]}, "options", "should name one of"),
    (FLAT | {"boxes": [1, 2, 3, 4]}, "boxes", "x0, y0, x1, y1"),
    (FLAT | {"boxes": [[1, 2, 3, math.nan]]}, "boxes", "x0, y0, x1, y1"),
    (FLAT | {"boxes": [[1, 2, 3, math.inf]]}, "boxes", "x0, y0, x1, y1"),
    (FLAT | {"boxes": [[1, 2, 3, "4"]]}, "boxes", "x0, y0, x1, y1"),
    (FLAT | {"boxes": [[1, 2, 3, 4], [9, 2, 3, 4]]}, "boxes", "no pixel of the 480x320 image"),
    (FLAT | {"boxes": [[1, 2, 1, 4]]}, "boxes", "no pixel"),
    (FLAT | {"boxes": [[480, 2, 500, 4]]}, "boxes", "no pixel"),
    (FLAT | {"boxes": [[-9, -9, 0, 0]]}, "boxes", "no pixel"),
    (FLAT | {"kind": "chart"}, "kind", "'search' or 'neutral', got 'chart'"),
]


@pytest.mark.parametrize("row, field, words", BAD)
def test_a_bad_row_names_its_field_and_the_reason(row, field, words, tmp_path):
    with pytest.raises(Bad, match=words) as bad:
        data.rl_sample(row, 0, tmp_path)
    assert bad.value.field == field


def test_boxes_are_rounded_outwards_and_cut_at_the_border():
    row = FLAT | {"boxes": [[1.2, 2, 2.5, 4], [-5, 300.5, 9999, 1e300]]}
    assert data.rl_sample(row, 0, Path()).boxes == ((1, 2, 3, 4), (0, 300, 480, 320))


def test_options_may_differ_in_blanks_from_the_answer():
    sample = data.rl_sample(FLAT | {"answer": "red", "options": ["red ", "green"]}, 0, Path())
    assert kit.answers.is_correct("A", sample.answer, sample.options)


def test_nothing_is_lost_silently(tmp_path):
    """Loaded + skipped = total, by row number and field; or the first bad row stops the run."""
    cell = FLAT["image"]
    cells = [cell, None, cell, {"bytes": PNG[:99], "path": None}, {"bytes": None, "path": "a.png"}]
    (tmp_path / "a.png").write_bytes(PNG)
    where = parquet(
        tmp_path / "a.parquet", [{"image": c, "problem": "?", "answer": "!"} for c in cells]
    )
    samples = load_rl(where)
    assert [s.id for s in samples] == ["row-0", "row-2", "row-4"]
    assert [(bad.row, bad.field) for bad in samples.skipped] == [(1, "image"), (3, "image")]
    with pytest.raises(ValueError, match="a.parquet: row 1, image: nothing in images or image"):
        load_rl(where, on_bad="stop")
    with pytest.raises(ValueError, match="'skip' or 'stop', got 'ignore'"):
        load_rl(where, on_bad="ignore")


def test_images_are_decoded_when_asked_for_and_not_kept(monkeypatch):
    samples, seen = load_rl(RL), []
    monkeypatch.setattr(data, "read_image", lambda *cell: seen.append(1) or read_image(*cell))
    few = samples[2:5][1:]
    assert len(few) == 2 and not seen
    assert few[0].id == samples[3].id and len(seen) == 2


def test_a_question_that_does_not_fit_is_left_out_at_the_start(policy):
    def fits(sample):
        if "sign" in sample.question:
            raise ValueError("too long")

    samples = load_rl(RL, fits=fits)
    assert [s.answer for s in samples] == ["4", "4", "4"]
    assert {(bad.field, bad.reason) for bad in samples.skipped} == {("length", "too long")}


@pytest.mark.parametrize("source, kind, known", [
    ("vstar", "search", True), ("chart", "search", True), ("ArxivQA", "search", True),
    ("thinklite_eureka", "neutral", True), ("ThinkLite-VL/chart", "neutral", True),
    ("Geometry3K", "neutral", True), ("my photos", "search", False), ("", "search", False),
])  # fmt: skip
def test_the_kind_follows_the_source(source, kind, known):
    assert data.rl_sample(FLAT | {"data_source": source}, 0, Path()).kind == kind
    assert (kit.schemas.named(source, kit.schemas.KINDS) is not None) == known


# Filters


class FakeJudge:
    """Says what it is told about each answer, and counts how often it is asked."""

    concurrency, model = 2, "fake"

    def __init__(self, said: dict) -> None:
        self.said, self.asked = said, []

    def check_label(self, sample):
        self.asked.append(sample.id)
        return self.said.get(sample.id, ("keep", "right"))


def test_sources_of_external_knowledge_are_dropped():
    sources = ["vstar", "OK-VQA", "A-OKVQA/train", "", None]
    rows = [{"data_source": s} for s in sources]
    words = [v.word for v in beyond.filters.by_source(rows, range(5))]
    assert words == ["keep", "drop", "drop", "keep", "keep"]
    assert beyond.filters.by_source(rows, [0], ["vstar"])[0].reason == "source vstar"


def test_labels_are_kept_dropped_or_left_to_a_person(tmp_path):
    samples_of, record = load_rl(RL), tmp_path / "labels.jsonl"
    told = {"chart-1": ("drop", "it says STOP"), "vstar-3": ("unsure", "blurred"), "chart-4": None}
    samples = Lazy(lambda k: samples_of[k % 9], range(10))  # one of them stands there twice
    judge = FakeJudge(told)
    words = {s.id: v for s, v in zip(samples, beyond.filters.by_label(samples, judge, record))}
    assert words["vstar-0"] == beyond.filters.Verdict("keep", "right")
    assert words["chart-1"] == beyond.filters.Verdict("drop", "it says STOP")
    assert words["vstar-3"].word == "unsure" and words["chart-4"].word == "no verdict"
    assert sorted(judge.asked) == sorted(s.id for s in samples_of)

    # A person settles the doubt; what is known is not asked again, what got no verdict is.
    record.write_text(record.read_text().replace('"unsure"', '"keep"'))
    again = FakeJudge({})
    assert [v.word for v in beyond.filters.by_label(samples, again, record)].count("keep") == 9
    assert again.asked == ["chart-4"]


@pytest.mark.parametrize("was, now, said", [
    ('"unsure"', '"Keep"', "line 2: expected a verdict of keep, drop, unsure, got 'Keep'"),
    ('"verdict": "unsure", ', "", "line 2: expected a verdict of keep, drop, unsure, got None"),
    ('"unsure"', '"keep', "line 2 is no JSON: "),
])  # fmt: skip
def test_a_slip_in_an_edited_record_is_named(tmp_path, was, now, said):
    samples, record = load_rl(RL), tmp_path / "labels.jsonl"
    judge = FakeJudge({samples[1].id: ("unsure", "blurred")})
    beyond.filters.by_label(samples, judge, record)
    record.write_text(record.read_text().replace(was, now))
    with pytest.raises(ValueError, match=f"labels.jsonl, {said}"):
        beyond.filters.by_label(samples, judge, record)


def test_the_served_judge_can_be_asked_about_labels():
    judge = ChatJudge("http://127.0.0.1:9/v1", "name")
    assert judge.model == "name" and judge.concurrency > 0 and callable(judge.check_label)


def test_a_filter_that_was_killed_goes_on_where_it_was(tmp_path):
    samples, record, asked = load_rl(RL), tmp_path / "labels.jsonl", []
    ask = lambda some: [asked.append(s.id) or {"right": s.id} for s in some]  # noqa: E731
    whole = beyond.filters.asked_once(samples, ask, {}, record, batch=2)
    written = record.read_bytes()
    for cut in (0, 1, len(written) // 2, len(written) - 1):
        record.write_bytes(written[:cut])
        asked.clear()
        assert beyond.filters.asked_once(samples, ask, {}, record, batch=2) == whole
        assert record.read_bytes() == written
        assert len(asked) == 9 - written[:cut].count(b"\n")


def test_what_is_asked_is_told_apart_by_all_that_matters():
    changes = (
        {},
        {"question": "x"},
        {"answer": "x"},
        {"options": ("x",)},
        {"image": picture(1)[0]},
    )
    assert len({beyond.filters.fingerprint(replace(SAMPLE, **change)) for change in changes}) == 5
    assert beyond.filters.fingerprint(replace(SAMPLE, id="x")) == beyond.filters.fingerprint(SAMPLE)


def test_a_record_of_another_setting_is_not_reused(tmp_path):
    samples, record = load_rl(RL), tmp_path / "d.jsonl"
    beyond.filters.asked_once(samples, lambda some: [{}] * len(some), {"n": 8}, record, 4)
    with pytest.raises(ValueError, match="was made with {'n': 8}, and this is {'n': 4}"):
        beyond.filters.asked_once(samples, lambda some: [{}] * len(some), {"n": 4}, record, 4)


def test_a_file_that_is_no_record_is_not_touched(tmp_path):
    (record := tmp_path / "d.jsonl").write_text(written := '{"problem": "?"}\n[1')
    with pytest.raises(ValueError, match="d.jsonl is no record of a filter"):
        beyond.filters.asked_once(load_rl(RL), lambda some: [{}] * len(some), {}, record, 4)
    assert record.read_text() == written


def test_processes_share_the_work_and_a_last_run_joins_it(tmp_path, monkeypatch):
    samples, record, asked = load_rl(RL), tmp_path / "d.jsonl", []
    ask = lambda some: [asked.append(s.id) or {"right": 1} for s in some]  # noqa: E731
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        beyond.filters.asked_once(samples, ask, {}, record, batch=4)
        (tmp_path / f"d.{rank}.jsonl").rename(tmp_path / rank)  # they start together: unseen
    assert asked == [samples[k].id for k in (0, 2, 4, 6, 8, 1, 3, 5, 7)]
    for rank in "01":
        (tmp_path / rank).rename(tmp_path / f"d.{rank}.jsonl")
    monkeypatch.delenv("WORLD_SIZE")
    assert None not in beyond.filters.asked_once(samples, ask, {}, record, batch=4)
    assert len(asked) == 9  # nobody was asked again


@given(st.integers(1, 12), st.floats(0, 1), st.data())
def test_what_is_answered_right_too_often_is_dropped(policy, n, most, draw):
    samples = Lazy(lambda k: replace(SAMPLE, id=str(k)), range(3))
    right = [draw.draw(st.integers(0, n)) for _ in samples]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(beyond.filters, "asked_once", lambda *a, **k: [{"right": r} for r in right])
        verdicts = beyond.filters.by_difficulty(samples, policy, RULES, Path(), "model", n, most)
    assert [v.word == "drop" for v in verdicts] == [r > most * n for r in right]


SAMPLE = load_rl(RL)[0]


def test_eight_tries_drop_eight_of_eight_only(policy, tmp_path, monkeypatch):
    def play(policy, samples, n, rules):
        said = lambda s, k: Trajectory(s, answer="AB"[k >= RIGHT[s.id]], ended="answered")  # noqa: E731
        return [[said(s, k) for k in range(n)] for s in samples]

    RIGHT = {"zero": 0, "seven": 7, "eight": 8}
    monkeypatch.setattr(beyond.filters, "play", play)
    samples = Lazy(lambda id: replace(SAMPLE, id=id, question=id), list(RIGHT))
    verdicts = beyond.filters.by_difficulty(samples, policy, RULES, tmp_path / "d.jsonl", "model")
    assert [(v.word, v.reason) for v in verdicts] == [
        ("keep", "0 of 8 right"), ("keep", "7 of 8 right"), ("drop", "8 of 8 right")
    ]  # fmt: skip


def test_what_a_filter_keeps_can_be_filtered_again(tmp_path):
    """Same ids, kinds, options, boxes and the very bytes of the images; the rest is listed."""
    row = FLAT | {"options": ["one", "4"], "boxes": [[1, 2, 2.5, 4]], "kind": "neutral", "id": "x"}
    row["answer"] = "4"
    bad = row | {"answer": "5", "id": "y"}
    where = parquet(tmp_path / "a.parquet", [row, row | {"id": "z"}, bad])
    samples, rows = load_rl(where), read_rows(where)
    verdicts = [beyond.filters.Verdict("keep", ""), beyond.filters.Verdict("unsure", "too dark")]
    counts = beyond.filters.write_sieved(tmp_path / "b" / "kept.parquet", samples, rows, verdicts)
    assert counts == {"keep": 1, "unsure": 1}
    kept = load_rl(tmp_path / "b")
    (again,) = kept
    assert (again.id, again.kind, again.options) == ("x", "neutral", ("one", "4"))
    assert again.boxes == ((1, 2, 3, 4),)
    assert read_rows(tmp_path / "b")[0]["image"]["bytes"] == PNG
    told = (tmp_path / "b" / "kept.txt").read_text()
    assert "z  too dark\n    'How many?'  answer: '4'" in told
    assert "unusable: 1\n\nrow 2, answer: '5' is neither" in told


# The command line


def command(*words) -> None:
    beyond.filters.main([str(word) for word in words])


def test_describe_tells_what_a_data_set_holds(tmp_path, capsys):
    rows = [*rl_rows(), rl_rows()[0] | {"images": []}, rl_rows()[0] | {"data_source": "OK-VQA"}]
    command("--describe", parquet(tmp_path / "a.parquet", rows), "--model", "tiny")
    told = capsys.readouterr().out
    assert "10 usable + 1 left out" in told and "row 9, image: nothing in images" in told
    assert "vstar (search): 3" in told and "OK-VQA (search, assumed, external knowledge): 1" in told
    assert "a letter: 4" in told and "480x320" in told and "at most 4096 pixels" in told
    command("--describe", SFT, "--model", "tiny")
    told = capsys.readouterr().out
    assert "8 usable + 0 left out" in told and "programs  3 in a row: 2" in told


def test_filters_run_one_after_the_other(tmp_path, capsys, monkeypatch):
    command("--drop-sources", RL, "--external", "chart", "--out", tmp_path / "1.parquet")
    judge = FakeJudge({"vstar-0": ("drop", "wrong")})
    monkeypatch.setattr("beyond.filters.ChatJudge", lambda url, model: judge)
    address = ("--judge-url", "http://127.0.0.1:9/v1", "--judge-model", "fake")
    command("--check-labels", tmp_path / "1.parquet", *address, "--out", tmp_path / "2.parquet")
    short = ("--turns", 1, "--samples", 2, "--max-new-tokens", 4, "--max-length", 512)
    where = ("--difficulty", tmp_path / "2.parquet", "--out", tmp_path / "3.parquet")
    command(*where, "--model", "tiny", *short)
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("9 rows: keep 6, drop 3, unusable 0")
    assert told[1].startswith("6 rows: keep 5, drop 1, unusable 0")
    assert told[2].startswith("5 rows: keep 5, unusable 0")
    assert len((tmp_path / "3.jsonl").read_text().splitlines()) == 5


@pytest.mark.parametrize("words, said", [
    (("--check-labels", RL), "--check-labels needs --judge-url"),
    (("--difficulty", RL), "--difficulty needs --model"),
    (("--describe", "gone.parquet"), "no data in gone.parquet"),
    (("--describe", SFT), "give --model"),
    (("--describe", ""), "WHERE is empty"),
    (("--drop-sources", ""), "WHERE is empty"),
    (("--difficulty", RL, "--model", "tiny", "--samples", 0), "--samples is at least 1, got 0"),
    (("--difficulty", RL, "--model", "tiny", "--batch", 0), "--batch is at least 1, got 0"),
])  # fmt: skip
def test_a_command_that_cannot_work_says_what_to_do(words, said):
    with pytest.raises(SystemExit, match=said):
        command(*words)


@pytest.mark.parametrize("where, out, said", [
    ("a.jsonl", "b.txt", "ends in .parquet"),
    ("a.jsonl", "b.jsonl", "ends in .parquet"),
    ("a.jsonl", "dir.parquet", "ends in .parquet"),
    ("a.jsonl", "a.parquet", "would write .*a.jsonl over its input"),
    ("a.parquet", "dir.parquet/../a.parquet", "over its input"),
    ("link.jsonl", "a.parquet", "over its input"),
    (".", "b.parquet", "or into it"),
    (".:a", "a.parquet", "or into it"),
])  # fmt: skip
def test_a_filter_does_not_write_over_what_it_reads(tmp_path, where, out, said):
    (tmp_path / "a.jsonl").write_text(json.dumps(FLAT | {"image": "a.png"}))
    parquet(tmp_path / "a.parquet", [FLAT])
    (tmp_path / "a.png").write_bytes(PNG)
    (tmp_path / "link.jsonl").symlink_to("a.jsonl")
    (tmp_path / "dir.parquet").mkdir()
    before = {file: file.is_file() and file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(SystemExit, match=said):
        command("--drop-sources", f"{tmp_path}/{where}", "--out", f"{tmp_path}/{out}")
    assert before == {file: file.is_file() and file.read_bytes() for file in tmp_path.iterdir()}
