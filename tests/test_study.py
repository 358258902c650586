"""python -m pytest tests/test_study.py      every reward side by side"""

import itertools
import json
import re
import subprocess
from pathlib import Path
from unittest import mock

import pytest
from PIL import Image

import beyond.study
import evaluate
from beyond.study import REWARDS, WORLDS, Job, draw_study, result, rewards_markdown
from beyond.study import rewards_table, routes
from train import parse_config

HOME = "guessing pays"
ROOT = Path(__file__).resolve().parent.parent


class Process:
    """What stands for a process of train.py: it has ended when it is asked the n-th time."""

    def __init__(self, returncode=0, n=1):
        self.returncode, self.n, self.told, self.waited = returncode, n, False, False

    def poll(self):
        self.n -= 1
        self.told = self.n <= 0
        return self.returncode if self.told else None

    def wait(self):
        self.waited = True


def train_by(monkeypatch, run, cores=1):
    """Let `run(argv, **how)` return what stands for a process of train.py."""
    monkeypatch.setattr(subprocess, "Popen", run)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(cores))
    monkeypatch.setattr("time.sleep", lambda _: None)


def out_of(argv) -> Path:
    return Path(argv[argv.index("--out") + 1])


@pytest.fixture
def study(tmp_path):
    """A folder in which the SFT model of seed 0 is there already."""
    (tmp_path / "sft-guessing-0").mkdir()
    (tmp_path / "sft-guessing-0" / "sft").symlink_to(ROOT / "tiny")
    return tmp_path


@pytest.mark.parametrize("reward", [*REWARDS, "zero-rl", "sft"])
@pytest.mark.parametrize("world", WORLDS)
def test_a_job_is_a_command_that_train_understands(study, monkeypatch, reward, world):
    monkeypatch.chdir(ROOT)
    job = Job(reward, world, 0, ("--lambda-tool", "0.1"))
    config = parse_config(job.command(study)[1:])
    assert config.reward == (reward if reward in REWARDS else "tapo")
    assert (config.seed, config.shortcut, config.lambda_tool) == (0, WORLDS[world], 0.1)
    assert config.out == str(study / job.name)
    assert (config.rl_steps == 0) == (reward == "sft")
    assert (config.sft_steps == 0) == (reward != "sft")  # it takes over what another run learnt
    assert config.model == ("tiny" if job.start is None else f"{study}/sft-guessing-0/sft")
    assert (job.start is None) == (reward in ("sft", "zero-rl"))


def test_names_tell_all_jobs_apart_and_those_of_a_seed_start_from_its_sft_model():
    more = ((), ("--lambda-tool", "0.1"), ("--lambda-tool", "0.4"), ("--lazy", "0"))
    jobs = [Job(*job) for job in itertools.product(REWARDS, WORLDS, (0, 1), more)]
    assert len({job.name for job in jobs}) == len(jobs)
    assert {job.start for job in jobs} == {Job("sft", HOME, 0), Job("sft", HOME, 1)}
    eager = ("--habit", "eager")
    assert Job("tapo", HOME, 0, eager).start == Job("sft", HOME, 0, eager)


@pytest.mark.parametrize("shared, job", [
    (True, Job("accuracy", HOME, 0)), (True, Job("tapo", HOME, 0, ("--lazy", "0"))),
    (False, Job("tapo", "looking pays", 0)), (False, Job("tapo", HOME, 0, ("--shortcut", "0.9"))),
])  # fmt: skip
def test_the_start_is_played_once_where_the_questions_are_the_same(study, monkeypatch, shared, job):
    train_by(monkeypatch, lambda argv, **_: Process())
    (study / "sft-guessing-0" / beyond.study.START).mkdir()
    beyond.study.begin(job, study)
    assert (study / job.name / beyond.study.START).exists() is shared


def test_a_run_that_was_cut_off_goes_on_and_one_that_ended_is_left_alone(study, monkeypatch):
    ran, job = [], Job("tapo", HOME, 0)
    train_by(monkeypatch, lambda argv, **_: ran.append(argv) or Process())
    for file in ("state.json", "summary.json", "log.jsonl"):
        (study / "sft-guessing-0" / "summary.json").write_text("{}")
        beyond.study.run_all([Job("sft", HOME, 0), job], study)
        (study / job.name / file).write_text("{}")
    assert ["--resume" in argv for argv in ran] == [False, True]


def test_all_runs_are_made_once_each_after_the_one_it_starts_from(tmp_path, monkeypatch):
    began, ended = [], {}

    def run(argv, **_):
        out = out_of(argv)
        began.append(out.name)
        if "--model" in argv:
            start = Path(argv[argv.index("--model") + 1]).parent.name
            assert ended[start].told, argv
        stages = dict.fromkeys(("sft", "rl"), METRICS)
        (out / "summary.json").write_text(json.dumps({"stages": stages}))
        (out / "log.jsonl").write_text("")
        ended[out.name] = Process(n=3 if "sft" in out.name else 1)
        return ended[out.name]

    train_by(monkeypatch, run, cores=8)
    monkeypatch.setattr(beyond.study, "draw_study", lambda *_: None)
    beyond.study.study_rewards(tmp_path, quick=True)
    few = {f"{name}-guessing-0" for name in ("sft", "tapo", "blind", "tool_bonus", "accuracy")}
    assert set(began) == few
    beyond.study.study_rewards(tmp_path, quick=False)
    assert len(began) == len(set(began)) == 27
    assert set(json.loads((tmp_path / "study.json").read_text())["runs"]) == set(began)


@pytest.mark.parametrize("cores", [1, 2, 16])
def test_the_study_starts_anywhere_and_nothing_begins_after_a_failure(
    tmp_path, monkeypatch, cores, capsys
):
    began, failing, others = [], [], []

    def run(argv, cwd, **_):
        out = out_of(argv)
        began.append((Path(cwd) / argv[1], out))
        assert not any(process.told for process in failing)
        assert cores > 1 or all(process.told for process in others)  # one run a core
        if out.name == "sft-guessing-1":
            failing.append(Process(3, n=3))
            return failing[0]
        others.append(Process(n=2 if out.name == "sft-guessing-0" else 9))
        return others[-1]

    monkeypatch.chdir(tmp_path)
    train_by(monkeypatch, run, cores)
    with pytest.raises(RuntimeError, match=r"sft-guessing-1 ended with 3: see .*guessing-1\.txt"):
        beyond.study.study_rewards(Path("study"), quick=False)
    assert began[0] == (ROOT / "train.py", tmp_path / "study" / "sft-guessing-0")
    assert 2 <= len(began) < 27 and all(x.told or x.waited for x in others)
    assert "sft-guessing-1 ended with 3" in capsys.readouterr().out


def test_ctrl_c_ends_the_study_with_the_runs_that_have_begun(tmp_path, monkeypatch, capsys):
    begun = Process(n=9)
    train_by(monkeypatch, mock.Mock(side_effect=[begun, KeyboardInterrupt]), cores=2)
    with pytest.raises(KeyboardInterrupt):
        evaluate.main(["--study", "rewards", "--out", str(tmp_path)])
    assert begun.waited
    assert "stopped. The study ends when the runs that have begun do" in capsys.readouterr().out


METRICS = dict(
    accuracy=0.9, search_accuracy=0.8, ood_accuracy=0.3, tool_use=0.6, faithful=0.4,
    unfaithful=0.2, no_tool=0.4, faithful_given_correct=0.5, unfaithful_given_correct=0.1,
    no_tool_given_correct=0.4, crop_area=0.1, error_rate=0.0,
)  # fmt: skip


def finished(study: Path, job: Job, faithful: float, **more) -> dict:
    """A run of 15 steps whose answers are step / 100."""
    folder = study / job.name
    folder.mkdir(exist_ok=True)
    end = METRICS | dict(faithful=faithful, rates={"left": "out"}) | more
    (folder / "summary.json").write_text(json.dumps({"stages": {"sft": METRICS, "rl": end}}))
    numbers = dict(tools=0.5, format=0.0, tool_use=0.5, generated_tokens=9, calls=1.0)
    lines = [{"stage": "sft", "step": 1, "loss": 2.0}]
    for step in range(1, 16):
        looks = {"faithful": None if step in (1, 7) else 0.25}  # None: no search question
        lines.append({"stage": "rl", "step": step, "answer": step / 100} | looks | numbers)
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return result(job, study)


def test_a_result_is_start_end_and_the_mean_of_every_ten_steps(study):
    found = finished(study, Job("tapo", HOME, 0), faithful=0.7)
    assert [point["step"] for point in found["curve"]] == [10, 15]
    assert [point["answer"] for point in found["curve"]] == pytest.approx([0.055, 0.13])
    assert [point["faithful"] for point in found["curve"]] == [0.25, 0.25]
    assert found["start"]["faithful"] == 0.4 and found["end"]["faithful"] == 0.7
    assert found["reward"] == "tapo"


def test_what_each_route_pays_by_hand():
    """Of 100 search questions 80 are right: 40 of them came by a right crop, which 40 took, 8 by
    a careless one (of 20), 32 by a guess (of 40)."""
    paid = routes(METRICS)
    assert [*paid] == ["right crop", "careless crop", "direct answer"]
    shares, accuracies = zip(*paid.values())
    assert shares == (0.4, 0.2, 0.4) and accuracies == pytest.approx((1.0, 0.4, 0.8))
    assert routes(METRICS | dict(unfaithful=0.0))["careless crop"] == (0.0, None)


def test_the_study_is_drawn_from_its_runs(study):
    runs = [finished(study, Job("accuracy", HOME, 0), 0.1)]
    runs += [finished(study, Job("tapo", HOME, seed), 0.7 + seed / 10) for seed in (0, 1)]
    runs += [finished(study, Job("zero-rl", HOME, 0), 0.0, crop_area=None)]  # it never crops
    table = rewards_table(runs)
    assert table[HOME]["tapo"]["faithful"] == pytest.approx([0.7, 0.8])
    assert table[HOME]["start"]["faithful"] == [0.4, 0.4] and list(table) == [HOME]
    text = rewards_markdown({"runs": dict(enumerate(runs)), "table": table}).splitlines()
    assert any(line.startswith("| **TAPO** | 2") and "0.75 (0.70–0.80)" in line for line in text)
    assert any(line.startswith("| TAPO without SFT | 1 |") and "|  |" in line for line in text)
    assert "| guessing pays | 0.40, 1.00 | 0.20, 0.40 | 0.40, 0.80 |" in text
    told = (ROOT / "docs" / "results.md").read_text(encoding="utf-8").splitlines()
    words = [line for line in text if line and not re.search(r"\d\.\d\d", line)]
    assert len(words) == 6 and set(words) <= set(told)  # the page has it as it is printed
    for panels in (beyond.study.CURVES, {"answer reward": "answer"}):
        draw_study(runs, panels, study / "study.png")
        drawn = Image.open(study / "study.png").convert("RGB")
        shades = {color for _, color in drawn.getcolors(1 << 24)}
        lines = [tuple(bytes.fromhex(c[1:])) for c in (evaluate.COLORS[0], evaluate.COLORS[6])]
        assert set(lines) <= shades  # a line for each of the two rewards
