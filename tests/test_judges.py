"""python -m pytest tests/test_judges.py      judges that err, TAPO without its parts"""

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import IMAGE, SEARCH, TYPO
from PIL import Image

import beyond.study
import evaluate
from beyond.judges import KINDS, PARTS, NoisyJudge
from beyond.study import COLUMNS, Greedy, Job, named, shown, study_tables
from kit.flags import parse
from kit.perturbations import PERTURBATIONS
from rewards import BoxJudge, Lambdas, crop, hand_made, judge_input, reward_named
from sandbox import Observation
from train import parse_config

ROOT = Path(__file__).resolve().parent.parent
RED, BLUE = (replace(SEARCH, question=f"Which texture is on the {color} square ?", answer="x")
             for color in ("red", "blue"))  # fmt: skip
RIGHT, WRONG, WIDE, A1 = (64, 64, 128, 128), (128, 0, 192, 64), (0, 0, 192, 192), (0, 0, 64, 64)
WHOLE = crop(RED, (0, 0, *IMAGE.size), red_lines=["no_op"])


def said(judge, box, sample=RED):
    return judge(*judge_input(sample, crop(sample, box)))


@pytest.mark.parametrize("kind", ["crop", "call"])
@pytest.mark.parametrize("miss, alarm", [(0, 0), (0.25, 0.5), (1, 1)])
def test_a_judge_errs_as_often_as_it_is_told(kind, miss, alarm):
    """Of many crops that are all useful, or all useless."""
    judge = NoisyJudge(BoxJudge(), miss, alarm, kind, random.Random(0))
    for beside, credited in ((0, 1 - miss), (110, alarm)):
        starts = itertools.product(range(60 + beside, 76 + beside), range(60, 76))
        boxes = [(x, y, x + 60, y + 60) for x, y in starts]
        assert {said(BoxJudge(), box) for box in boxes} == {float(not beside)}
        share = sum(said(judge, box) > 0 for box in boxes) / len(boxes)
        assert share == pytest.approx(credited, abs=0.08)


def test_an_error_by_crop_stays_and_one_by_call_does_not():
    by_crop, by_call = (NoisyJudge(BoxJudge(), 0.5, 0.5, kind, random.Random(0))
                        for kind in ("crop", "call"))  # fmt: skip
    assert len({said(by_crop, RIGHT) for _ in range(40)}) == 1
    assert len({said(by_call, RIGHT) for _ in range(40)}) == 2
    other = replace(RED, image=Image.new("RGB", (256, 256)))
    asked = [(s, box) for s in (RED, BLUE, other) for box in (RIGHT, WIDE, WRONG, A1)]
    draws = [NoisyJudge.drawn(judge_input(s, crop(s, box))[0]) for s, box in asked]
    assert len(set(draws)) == 12 and all(0 <= draw < 1 for draw in draws)  # of all that was shown


def test_silence_and_turns_without_a_picture_are_left_alone():
    always = NoisyJudge(lambda *asked: None, 1.0, 1.0)
    assert said(always, RIGHT) is None
    printed = judge_input(RED, Observation(text="x"))
    assert NoisyJudge(BoxJudge(), 1.0, 1.0)(*printed) == 0.0


@pytest.mark.parametrize("kind, sample, scores", [
    ("size", RED, {WIDE: 1.0, WRONG: 0.0, (0, 0, 256, 256): 0.0}),  # the exact judge: WIDE is 0
    ("color", RED, {RIGHT: 0.0}),
    ("color", BLUE, {RIGHT: 1.0}),
    ("corner", RED, {A1: 1.0, (0, 0, 63, 64): 0.0, RIGHT: 1.0, WRONG: 0.0}),
])  # fmt: skip
def test_a_judge_with_a_system(kind, sample, scores):
    judge = NoisyJudge(BoxJudge(), kind=kind)
    assert {box: said(judge, box, sample) for box in scores} == scores


def paid(name, *shown, answer="x"):
    group = [hand_made(RED, *shown, answer=answer)]
    return reward_named(f"beyond.judges.{name}")(group, BoxJudge(), Lambdas(), random.Random(0))[0]


def test_an_error_is_a_reward_by_its_name():
    right, wrong = crop(RED, RIGHT), crop(RED, WRONG)
    assert paid("crop_0_0", right).total == 1.2 and paid("crop_100_0", right).scores < (0,)
    assert paid("call_0_100", wrong).scores == (1.0,) and paid("color", right).scores < (0,)
    assert paid("crop_0_100", wrong, answer="no").total == pytest.approx(0.2)
    for name in ("crop_1", "crop_a_b", "blurred", "crop_1_2_3"):
        with pytest.raises(ValueError, match="expected a reward"):
            reward_named(f"beyond.judges.{name}")


@pytest.mark.parametrize("part, shown, tools", [
    ("added", (RIGHT, RIGHT), 2.0),
    ("unpunished", (WRONG, TYPO, WHOLE), 0.0), ("unpunished", (RIGHT, TYPO), 0.5),
    ("whole", (WHOLE,), 1.0), ("whole", (RIGHT,), 1.0), ("whole", (WRONG,), -2.5 / 16),
    ("whole", (RIGHT, WHOLE), 0.0), ("whole", (TYPO, WHOLE), 0.0),  # shown again: a red line
])  # fmt: skip
def test_tapo_without_one_of_its_parts(part, shown, tools):
    seen = [crop(RED, box) if isinstance(box, tuple) else box for box in shown]
    assert paid(part, *seen).tools == tools


@pytest.mark.parametrize("quick", [True, False])
def test_every_run_of_the_study_is_a_command_and_begins_after_its_start(
    quick, monkeypatch, tmp_path
):
    asked = []
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(beyond.study, "run_all", lambda jobs, study: asked.extend(jobs))
    text = beyond.study.study_judges(tmp_path, quick)
    assert "| **TAPO** | 0 |  |" in text  # nothing has ended: empty cells
    assert len({job.name for job in asked}) == len(asked)
    (tmp_path / "sft").symlink_to(ROOT / "tiny")
    for job in asked:
        assert job.start is None or asked.index(job.start) < asked.index(job)
        (tmp_path / job.name).mkdir()
        (tmp_path / job.name / "sft").symlink_to(ROOT / "tiny")
        file, *argv = job.command(tmp_path)
        if isinstance(job, Greedy):
            options = parse(evaluate.Options, argv)
            assert file == "evaluate.py" and options.temperature is None
            assert (options.perturb == "all") == (not job.start.seed and "habit" not in job.name)
        else:
            assert file == "train.py" and parse_config(argv).out == f"{tmp_path / job.name}"
    kinds = {job.name.split("-")[0].split("_")[0] for job in asked}
    assert kinds >= ({"crop"} if quick else {*KINDS, *PARTS})


def ended(study, job, **metrics):
    (folder := study / job.name).mkdir()
    own = dict.fromkeys(COLUMNS, 0.5) | metrics
    (folder / "summary.json").write_text(json.dumps({"stages": {"rl": own}}))
    lines = [{"stage": "rl", "step": 20}, {"stage": "evaluation", "step": 20} | own]
    (folder / "log.jsonl").write_text("\n".join(map(json.dumps, lines)))
    looks = [("red", "faithful", A1), ("red", "no tool", None), ("blue", "faithful", WIDE)]
    with open(folder / "trajectories.jsonl", "w") as file:
        for color, look, box in looks:
            sample = {"kind": "search", "question": f"Which texture is on the {color} square ?"}
            steps = [{"observation": box and {"boxes": [box, None, box]}}, {"observation": None}]
            file.write(json.dumps({"sample": sample, "look": look, "steps": steps}) + "\n")


def test_the_tables_and_the_figure_show_what_has_ended(tmp_path):
    ended(tmp_path, Job("tapo"), faithful=0.7)
    ended(tmp_path, Job("tapo", seed=1), faithful=0.6)
    ended(tmp_path, Greedy(Job("tapo")), faithful=0.9)
    ended(tmp_path, named("crop_50_0")[0], faithful=0.2, crop_area=None)
    rates = {lie: {"accuracy_hit": {"numerator": k, "denominator": 4}}
             for k, lie in enumerate(PERTURBATIONS)}  # fmt: skip
    for reward, lied in {"tapo": {"toy, out of prior": rates}, "accuracy": {}}.items():
        file = tmp_path / Greedy(Job(reward)).name / "studies.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps({"perturb": lied}))
    tables = study_tables(quick=False)
    text = shown(tmp_path, tables)
    half = "0.50 (0.50–0.50) | "
    for line in (
        *(f"{title}:" for title in tables),
        f"| **TAPO** | 2 | 0.65 (0.60–0.70) | {half * 6}0.90 (0.90–0.90) | {half}",
        "| `crop_50_0` | 1 | 0.20 | 0.50 | 0.50 | 0.50 | 0.50 |  | 0.50 |  |  |",
        f"| **TAPO** | 20 | 0.65 (0.60–0.70) | {half * 2}",
        "| tapo | 0.50 | 1.00 | 1.00 | 0.00 | 0.50 |",  # half of the crops twice
        "| tapo | 4 | 0.00 | 0.25 | 0.50 | 0.75 | 1.00 |",
        "| accuracy | 0 |  |  |  |  |  |",  # it called no tool
    ):
        assert line.strip() in text.splitlines()
    assert json.loads((tmp_path / "judges.json").read_text())["tapo-guessing-0"]["faithful"] == 0.7
    drawn = Image.open(tmp_path / "judges.png").convert("RGB")
    shades = {color for _, color in drawn.getcolors(1 << 24)}
    assert tuple(bytes.fromhex(evaluate.COLORS[0][1:])) in shades
