"""python -m pytest tests/test_compare.py      about 5 s: runs side by side"""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from conftest import ANSWER, LOOK, RULES, SHORT, scripted
from PIL import Image

from beyond.compare import columns_of, compare
from evaluate import evaluate, main
from rewards import BoxJudge


@pytest.mark.filterwarnings("error::UserWarning")
def test_runs_are_compared_in_one_table_and_one_figure(tmp_path, capsys):
    for name, share in (("a", 0.25), ("b", 0.75)):
        (tmp_path / name).mkdir()
        summary = {"stages": {"sft": {"n": 4, "faithful": share}, "rl": {"n": 4, "calls": None}}}
        (tmp_path / name / "summary.json").write_text(json.dumps(summary))
    a, b = str(tmp_path / "a"), str(tmp_path / "b") + "/"
    main(["--compare", a, b, "--out", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert f"{tmp_path}/a sft" in printed and f"{tmp_path}/b rl" in printed
    assert re.search(r"^faithful +0\.250 +0\.750$", printed, re.MULTILINE)
    assert Image.open(tmp_path / "out" / "compare.png").width == 960
    assert len(columns_of([a, b])) == 4


def test_a_figure_shows_how_sure_a_rate_is(tmp_path):
    def coloured(interval):
        metrics = {"faithful": 0.5, "rates": {"faithful": {"interval": interval}}}
        compare({"a": metrics}, tmp_path / "compare.png")
        pixels = np.asarray(Image.open(tmp_path / "compare.png").convert("RGB"), int)
        return (np.ptp(pixels, axis=-1) > 40).sum()

    none, narrow, wide = map(coloured, (None, (0.45, 0.55), (0.1, 0.9)))
    assert none < narrow < wide


def test_what_is_no_run_is_refused_in_a_sentence(tmp_path, capsys):
    file = tmp_path / "summary.json"
    said = {None: f"No such file or directory: '{file}'"}
    for text, message in (said | dict.fromkeys(["{", "{}"], f"{file} is damaged")).items():
        if text is not None:
            file.write_text(text)
        with pytest.raises(SystemExit) as ended:
            main(["--compare", str(tmp_path)])
        assert ended.value.code == 2 and message in capsys.readouterr().err


def test_runs_are_shown_side_by_side_on_the_samples_they_share(policy, samples, tmp_path, capsys):
    for name, chosen in (("a", samples[:3]), ("b", samples[1:4])):
        with scripted(policy, [[LOOK, ANSWER], [SHORT], [ANSWER]]):
            rules = replace(RULES, temperature=0.0)
            metrics, *_ = evaluate(policy, chosen, BoxJudge(), rules=rules, out=tmp_path / name)
        (tmp_path / name / "summary.json").write_text(json.dumps({"stages": {"toy": metrics}}))
    (tmp_path / "c").mkdir()  # it kept no episodes: only its numbers are there
    (tmp_path / "c" / "summary.json").write_text('{"stages": {"rl": {"n": 3, "accuracy": 0.5}}}')
    runs = [str(tmp_path / name) for name in "abc"]
    main(["--compare", *runs, "--out", str(tmp_path / "out")])
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<article") == 2 and page.count("<section>") == 4
    assert "2 of 2 episodes" in page
    assert page.count('<image id="p') == 2  # one picture for both strips
    assert [page.count(f"<b>{run}</b>") for run in runs] == [2, 2, 0]
    assert f"{runs[2]} rl" in page and '<img alt="compare.png"' in page
    assert 'data-answer="wrong / wrong"' in page
    assert "report.html" in capsys.readouterr().out
