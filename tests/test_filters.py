"""python -m pytest tests/test_filters.py      the paper's filters of its RL data"""

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from conftest import RULES
from fixtures.make_fixtures import parquet, picture, png, rl_rows
from hypothesis import example, given
from hypothesis import strategies as st

from beyond import filters
from beyond.filters import Options, Verdict
from data import load_rl
from kit.tables import Lazy, read_rows
from rollout import Trajectory

FIXTURES = Path(__file__).parent / "fixtures"
RL, SFT = FIXTURES / "codev_rl.parquet", FIXTURES / "thyme_sft.jsonl"
PNG = png(picture(0)[0])
FLAT = {"image": {"bytes": PNG, "path": None}, "problem": "<image>How many?", "answer": 4}
SAMPLE = load_rl(RL)[0]


def judging(said: dict) -> tuple[SimpleNamespace, list]:
    """A judge who says this of some labels, and calls the others right; whom it is asked about."""

    def check_label(sample):
        asked.append(sample.id)
        return said.get(sample.id, ("keep", "right"))

    asked = []
    return SimpleNamespace(concurrency=2, model="fake", check_label=check_label), asked


def test_sources_of_external_knowledge_are_dropped():
    words = {"vstar": "keep", "OK-VQA": "drop", "A-OKVQA/train": "drop", "": "keep", None: "keep"}
    rows = [{"data_source": source} for source in words]
    assert [v.word for v in filters.by_source(rows, range(5))] == [*words.values()]
    assert filters.by_source(rows, [0], "vstar,chart")[0].reason == "source vstar"


def test_labels_are_kept_dropped_or_left_to_a_person(tmp_path):
    samples_of, record = load_rl(RL), tmp_path / "labels.jsonl"
    told = {"chart-1": ("drop", "it says STOP"), "vstar-3": ("unsure", "blurred"), "chart-4": None}
    samples = Lazy(lambda k: samples_of[k % 9], range(10))  # one of them stands there twice
    judge, asked = judging(told)
    words = {s.id: v for s, v in zip(samples, filters.by_label(samples, judge, record))}
    assert words["vstar-0"] == Verdict("keep", "right")
    assert words["chart-1"] == Verdict("drop", "it says STOP")
    assert words["vstar-3"].word == "unsure" and words["chart-4"].word == "no verdict"
    assert sorted(asked) == sorted(s.id for s in samples_of)

    # A person settles the doubt; what is known is not asked again, what got no verdict is.
    record.write_text(record.read_text().replace('"unsure"', '"keep"'))
    again, asked = judging({})
    assert [v.word for v in filters.by_label(samples, again, record)].count("keep") == 9
    assert asked == ["chart-4"]


@pytest.mark.parametrize("was, now, said", [
    ('"unsure"', '"Keep"', "labels.jsonl, line 2 .* of keep, drop, unsure, got 'Keep'"),
    ('"unsure"', '"keep', "labels.jsonl, line 2 is no finding .*: correct the line"),
    ('"key"', '"k"', "labels.jsonl, line 1 is no finding"),
    ("fake", "other", "was made with {'judge': 'other'}, and this is {'judge': 'fake'}"),
])  # fmt: skip
def test_a_record_with_a_slip_or_of_another_setting_is_not_touched(tmp_path, was, now, said):
    samples, record = load_rl(RL), tmp_path / "labels.jsonl"
    judge, _ = judging({samples[1].id: ("unsure", "blurred")})
    filters.by_label(samples, judge, record)
    record.write_text(edited := record.read_text().replace(was, now))
    with pytest.raises(ValueError, match=said):
        filters.by_label(samples, judge, record)
    assert record.read_text() == edited


def test_a_served_model_is_shown_the_image_the_options_and_the_label(monkeypatch):
    ask = mock.Mock(side_effect=lambda *asked: asked[2]('{"reason": "it is red", "label": "drop"}'))
    monkeypatch.setattr(filters.LabelJudge, "ask", ask)
    judge = filters.LabelJudge("http://127.0.0.1:9/v1", "name")
    sample = replace(SAMPLE, question="Which ?", options=("red", "blue"), answer="A")
    assert tuple(judge.check_label(sample)) == ("drop", "it is red")
    system, (picture, words), _ = ask.call_args.args
    assert "check the label" in system and picture["type"] == "image_url"
    assert words["text"] == "Question: Which ?\nA. red\nB. blue\nLabel: A"
    assert judge.model == "name" and judge.concurrency > 0


def test_a_filter_that_was_killed_goes_on_where_it_was(tmp_path):
    samples, record, asked = load_rl(RL), tmp_path / "labels.jsonl", []
    ask = lambda some: [asked.append(s.id) or {"right": s.id} for s in some]  # noqa: E731
    whole = filters.asked_once(samples, ask, {}, record, batch=2)
    written = record.read_bytes()
    for cut in (0, 1, len(written) // 2, len(written) - 1):
        record.write_bytes(written[:cut])
        asked.clear()
        assert filters.asked_once(samples, ask, {}, record, batch=2) == whole
        assert record.read_bytes() == written
        assert len(asked) == 9 - written[:cut].count(b"\n")


def test_what_is_asked_is_told_apart_by_all_that_matters():
    others = dict(id="x", question="x", answer="x", options=("x",), image=picture(1)[0])
    prints = [filters.fingerprint(replace(SAMPLE, **{k: v})) for k, v in others.items()]
    assert prints[0] == filters.fingerprint(SAMPLE) and len({*prints}) == 5


def test_processes_share_the_work_and_a_last_run_joins_it(tmp_path, monkeypatch):
    samples, record, asked = load_rl(RL), tmp_path / "d.jsonl", []
    ask = lambda some: [asked.append(s.id) or {"right": 1} for s in some]  # noqa: E731
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        filters.asked_once(samples, ask, {}, record, batch=4)
        (tmp_path / f"d.{rank}.jsonl").rename(tmp_path / rank)  # they start together: unseen
    assert asked == [samples[k].id for k in (0, 2, 4, 6, 8, 1, 3, 5, 7)]
    for rank in "01":
        (tmp_path / rank).rename(tmp_path / f"d.{rank}.jsonl")
    monkeypatch.delenv("WORLD_SIZE")
    assert None not in filters.asked_once(samples, ask, {}, record, batch=4)
    assert len(asked) == 9  # nobody was asked again


@given(st.lists(st.integers(0, 8), min_size=1, max_size=4), st.floats(0, 1))
@example([0, 7, 8], 7 / 8)  # eight tries drop eight of eight only
def test_what_is_answered_right_too_often_is_dropped(policy, right, most):
    def play(policy, samples, n, rules):
        said = lambda s, k: Trajectory(s, answer="AB"[k >= right[int(s.id)]], ended="answered")  # noqa: E731
        return [[said(s, k) for k in range(n)] for s in samples]

    samples = Lazy(lambda k: replace(SAMPLE, id=str(k), question=str(k)), range(len(right)))
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(filters, "play", play)
        options = Options(out=Path(folder) / "d.parquet", model="model", max_accuracy=most)
        verdicts = filters.by_difficulty(samples, policy, RULES, options)
    words = ["drop" if r > most * 8 else "keep" for r in right]
    assert verdicts == [Verdict(word, f"{r} of 8 right") for word, r in zip(words, right)]


def test_what_a_filter_keeps_can_be_filtered_again(tmp_path):
    """Same ids, kinds, options, boxes and the very bytes of the images; the rest is listed."""
    row = FLAT | {"options": ["one", "4"], "boxes": [[1, 2, 2.5, 4]], "kind": "neutral", "id": "x",
                  "answer": "4"}  # fmt: skip
    rows = [row, row | {"id": "z"}, row | {"answer": "5", "id": "y"}]
    where = parquet(tmp_path / "a.parquet", rows)
    samples, rows = load_rl(where), read_rows(where)
    verdicts = [Verdict("keep", ""), Verdict("unsure", "too dark")]
    counts = filters.write_sieved(tmp_path / "b" / "kept.parquet", samples, rows, verdicts)
    assert counts == {"keep": 1, "unsure": 1}
    (again,) = load_rl(tmp_path / "b")
    assert (again.id, again.kind, again.options) == ("x", "neutral", ("one", "4"))
    assert again.boxes == ((1, 2, 3, 4),)
    assert read_rows(tmp_path / "b")[0]["image"]["bytes"] == PNG
    told = (tmp_path / "b" / "kept.txt").read_text()
    assert "z  too dark\n    'How many?'  answer: '4'" in told
    assert "unusable: 1\n\nrow 2, answer: the answer should name one of" in told


# The command line
def command(*words) -> None:
    filters.main([str(word) for word in words])


def test_describe_tells_what_a_data_set_holds(tmp_path, capsys):
    rows = [*rl_rows(), rl_rows()[0] | {"images": []}, rl_rows()[0] | {"data_source": "OK-VQA"}]
    own = "--model", "tiny", "--max-pixels", 0  # its own
    command("--describe", parquet(tmp_path / "a.parquet", rows), *own)
    told = capsys.readouterr().out
    assert "10 usable + 1 left out" in told and "row 9, image: nothing in images" in told
    assert "vstar (search): 3" in told and "OK-VQA (search, assumed, external knowledge): 1" in told
    assert "a letter: 4" in told and "480x320" in told and "at most 4096 pixels" in told
    command("--describe", SFT, "--model", "tiny")
    told = capsys.readouterr().out
    assert "8 usable + 0 left out" in told and "programs  3 in a row: 2" in told
    assert "at most 3211264 pixels" in told  # as the run


def test_filters_run_one_after_the_other(tmp_path, capsys, monkeypatch):
    command("--drop-sources", RL, "--external", "chart", "--out", tmp_path / "1.parquet")
    judge, _ = judging({"vstar-0": ("drop", "wrong")})
    monkeypatch.setattr("beyond.filters.LabelJudge", lambda url, model, max_tokens: judge)
    address = ("--judge-url", "http://127.0.0.1:9/v1", "--judge-model", "fake")
    command("--check-labels", tmp_path / "1.parquet", *address, "--out", tmp_path / "2.parquet")
    short = "--turns 1 --samples 2 --max-new-tokens 4 --max-length 512 --max-pixels 0".split()
    where = ("--difficulty", tmp_path / "2.parquet", "--out", tmp_path / "3.parquet")
    command(*where, "--model", "tiny", *short)
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("9 rows: keep 6, drop 3, unusable 0")
    assert told[1].startswith("6 rows: keep 5, drop 1, unusable 0")
    assert told[2].startswith("5 rows: keep 5, unusable 0")
    assert len((tmp_path / "3.jsonl").read_text().splitlines()) == 5


@pytest.mark.parametrize("words, said", [
    (f"--check-labels {RL}", "--check-labels needs --judge-url"),
    (f"--difficulty {RL}", "--difficulty needs --model"),
    ("--describe gone.parquet", "no data in gone.parquet"),
    (f"--describe {SFT}", "give --model"),
    ("--drop-sources=", "with a WHERE"),
    (f"--drop-sources {RL} --check-labels {RL}", "expected one of --describe"),
    ("--drop-sources a.jsonl --out b.jsonl", "ends in .parquet"),
    ("--drop-sources a.jsonl --out a.parquet", "a.jsonl would lie over or in the input"),
    ("--drop-sources a.parquet --out dir.parquet/../a.parquet", "would lie over or in"),
    ("--drop-sources link.jsonl --out a.parquet", "would lie over or in"),
    ("--drop-sources . --out b.parquet", "would lie over or in"),
])  # fmt: skip
def test_a_command_that_cannot_work_says_so_and_writes_over_nothing(
    words, said, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text(json.dumps(FLAT | {"image": "a.png"}))
    parquet(tmp_path / "a.parquet", [FLAT])
    (tmp_path / "a.png").write_bytes(PNG)
    (tmp_path / "link.jsonl").symlink_to("a.jsonl")
    (tmp_path / "dir.parquet").mkdir()
    before = {file: file.is_file() and file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(SystemExit, match="2"):
        command(*words.split())
    assert said in capsys.readouterr().err
    assert before == {file: file.is_file() and file.read_bytes() for file in tmp_path.iterdir()}
