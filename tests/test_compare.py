"""python -m pytest tests/test_compare.py      runs side by side"""

import json
import re

import numpy as np
import pytest
from PIL import Image

from beyond.compare import compare
from evaluate import EPISODES, main, write_trajectories
from rewards import Reward
from rollout import Trajectory


@pytest.mark.filterwarnings("error::UserWarning")
def test_runs_are_compared_in_one_table_one_figure_and_one_page(samples, tmp_path, capsys):
    for name, share in (("a", 0.25), ("b", 0.75), ("c", 0.5)):
        (tmp_path / name).mkdir()
        stages = {"sft": {"n": 4, "faithful": share}, "rl": {"n": 4, "calls": None}}
        (tmp_path / name / "summary.json").write_text(json.dumps({"stages": stages}))
    for name, chosen in (("a", samples[:3]), ("b", samples[1:4])):  # c kept no episodes
        played = [Trajectory(sample, answer="no") for sample in chosen]
        write_trajectories(tmp_path / name / EPISODES, played, [Reward(0.0, 0.0, 0.0)] * 3)
    a, b, c = [f"{tmp_path}/{name}" for name in "abc"]
    main(["--compare", a, f"{b}/", c, "--out", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert f"{a} sft" in printed and f"{b} rl" in printed and "report.html" in printed
    assert re.search(r"^faithful +0\.250 +0\.750 +0\.500$", printed, re.MULTILINE)
    assert Image.open(tmp_path / "out" / "compare.png").width == 960
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<article") == 2 and page.count("<section>") == 4  # on samples of both
    assert f"{c} rl" in page and '<img alt="compare.png"' in page


def test_a_figure_shows_how_sure_a_rate_is(tmp_path):
    def coloured(interval):
        metrics = {"faithful": 0.5, "rates": {"faithful": {"interval": interval}}}
        compare({"a": metrics}, tmp_path / "compare.png")
        pixels = np.asarray(Image.open(tmp_path / "compare.png").convert("RGB"), int)
        return (np.ptp(pixels, axis=-1) > 40).sum()

    none, narrow, wide = map(coloured, (None, (0.45, 0.55), (0.1, 0.9)))
    assert none < narrow < wide


@pytest.mark.parametrize("text", ["{", "{}"])
def test_what_is_no_run_is_refused_in_a_sentence(text, tmp_path, capsys):
    (file := tmp_path / "summary.json").write_text(text)
    with pytest.raises(SystemExit):
        main(["--compare", str(tmp_path)])
    assert f"{file} is damaged" in capsys.readouterr().err
