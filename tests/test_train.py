"""python -m pytest tests/test_train.py      about 60 s: the command line, and whole runs of it"""

import importlib.util
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import asdict, fields, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import evaluate
import train
from data import USUAL_TEXTURE, toy_questions
from kit.flags import shared
from kit.folder import Run, read_config
from rewards import Reward, crop, hand_made
from rollout import load_policy
from sandbox import Observation
from train import Config, parse_config

ROOT = Path(__file__).resolve().parent.parent
RL_ROWS = str(ROOT / "tests" / "fixtures" / "codev_rl.parquet")  # 9 of them
SHORT = [
    "--sft-steps", "14", "--sft-demos", "60", "--rl-steps", "5", "--questions", "4",
    "--rollouts", "4", "--eval-questions", "12", "--save-every", "2", "--sft-lr", "8e-3",
    "--eval-every", "1",
]  # fmt: skip


def command(out, *more):
    return [sys.executable, "train.py", "--out", str(out), *SHORT, *more]


def run_of(config):
    """The run of a config, in this process alone."""
    return Run(Path(config.out), asdict(config), config.timeout, config.keep)


def run(*words, **kwargs):
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300, **kwargs)


# --- the command line ------------------------------------------------------------------------


def test_every_flag_has_help_a_default_and_a_source(capsys):
    with pytest.raises(SystemExit):
        parse_config(["--help"])
    out = capsys.readouterr().out
    for f in fields(Config):
        assert re.search(rf"  --{f.name.replace('_', '-')}[ ,]", out)
        help = f.metadata["argparse"]["help"]
        source = re.search(r"\[(paper|notes|verl|thyme|ours): (.*)\]$", help)
        assert source and source[2] == str(f.default)
    defaults = " ".join(out.split()).count("(default:")
    assert defaults == len(fields(Config))
    assert "--resume DIR" in out and "--plan ..." in out


def test_the_config_is_the_command_line(tmp_path):
    config = parse_config(["--out", str(tmp_path), "--rl-lr", "0.5", "--mask-truncated"])
    assert (config.rl_lr, config.mask_truncated, config.questions) == (0.5, True, 12)
    words = []
    for name, value in asdict(config).items():
        flag = name.replace("_", "-")
        words += (
            [f"--{'' if value else 'no-'}{flag}"]
            if isinstance(value, bool)
            else [f"--{flag}", str(value)]
        )
    assert parse_config(words) == config


@pytest.mark.parametrize(
    "words, message",
    [
        (["--reward", "money"], "got 'money'"),
        (["--preset", "huge"], "invalid choice: 'huge'"),
        (["--adv-norm", "max"], "invalid choice: 'max'"),
        (["--rl-step", "3"], "unrecognized arguments"),
        (["--rl-lr", "fast"], "invalid float value: 'fast'"),
        (["--rollouts", "1"], "--rollouts: expected a finite number, least 2; got 1"),
        (["--questions", "0"], "--questions: expected a finite number, least 1; got 0"),
        (["--temperature", "0"], "--temperature: expected a finite number, above 0; got 0.0"),
        (["--shortcut", "1.2"], "--shortcut: expected a finite number, least 0, most 1; got 1.2"),
        (["--lambda-tool", "1.0"], "below the answer's (Eq. 5), got Lambdas(answer=1.0, tools=1.0"),
        (
            ["--lambda-tool", "-1.5"],
            "below the answer's (Eq. 5), got Lambdas(answer=1.0, tools=-1.5",
        ),
        (["--resume", "no-such-run"], "so --out cannot stand beside it"),
        (["--max-grad-norm", "-1"], "--max-grad-norm: expected a finite number, above 0; got -1.0"),
        (["--rl-lr", "nan"], "--rl-lr: expected a finite number"),
        (["--temperature", "inf"], "--temperature: expected a finite number"),
        (["--eps", "nan"], "--eps: expected a finite number"),
        (["--sft-lr", "0"], "--sft-lr: expected a finite number, above 0; got 0.0"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_loads(words, message, capsys, tmp_path):
    with pytest.raises(SystemExit) as stopped:
        parse_config(["--out", str(tmp_path / "run"), *words])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_finished_run_is_not_overwritten(tmp_path, capsys):
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(SystemExit):
        parse_config(["--out", str(tmp_path)])
    assert f"--resume {tmp_path}" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--resume", "x", "--seed=3"], ["--resume=x", "--seed=3"]])
def test_a_flag_beside_resume_is_refused_however_it_is_spelt(words, capsys):
    with pytest.raises(SystemExit):
        parse_config([*words, "--keep", "2"])
    told = capsys.readouterr().err
    assert "so --seed cannot stand beside it. These can: --activation" in told and "--keep" in told


def test_what_concerns_memory_alone_can_change_on_resume(tmp_path):
    config = Config(out=str(tmp_path), seed=7, keep=3)
    run_of(config).log_file.close()
    words = f"--resume {tmp_path} --row-tokens 4096 --no-activation-checkpointing --patience=3"
    changed = {"row_tokens": 4096, "activation_checkpointing": False, "patience": 3.0}
    assert parse_config(words.split()) == replace(config, **changed)


@pytest.mark.parametrize("words, message", [
    (["--resume", "no-such-run"], "No such file or directory: 'no-such-run/config.json'"),
    (["--resume", ""], "No such file or directory: 'config.json'"),
    (["--resume="], "No such file or directory: 'config.json'"),
])  # fmt: skip
def test_a_run_that_is_not_there_cannot_be_resumed(words, message, capsys):
    with pytest.raises(SystemExit):
        parse_config(words)
    assert message in capsys.readouterr().err


def test_a_run_goes_on_with_its_own_config(tmp_path):
    config = Config(out=str(tmp_path), seed=7, rl_lr=0.5)
    run_of(config).log_file.close()
    assert parse_config(["--resume", str(tmp_path)]) == config


def test_every_field_of_the_rules_and_the_objective_is_a_flag_and_arrives(tmp_path):
    other = {int: "77", float: "0.25", bool: None, str: None}
    words = {"ratio_anchor": "ref", "loss_agg": "sequence"}
    named = {f.name for f in fields(Config)}

    def objective(config):
        return shared(config, train.Objective)

    for kind, made_by in ((train.Rules, train.rules), (train.Objective, objective)):
        for f in fields(kind):
            if f.name == "limits":
                config = parse_config(["--sandbox-seconds", "0.25", "--out", str(tmp_path / "x")])
                assert made_by(config).limits.seconds == 0.25
                continue
            assert f.name in named, f.name
            value = words.get(f.name) or other[type(f.default)]
            flag = "--" + f.name.replace("_", "-")
            argv = [flag] if value is None else [flag, value]
            config = parse_config([*argv, "--out", str(tmp_path / "x")])
            arrived = getattr(made_by(config), f.name)
            assert arrived != f.default and arrived == getattr(config, f.name), f.name
    w = train.lambdas(parse_config(["--lambda-acc", "2", "--lambda-tool", "0.3", "--lambda-fmt",
                                    "0.1", "--out", str(tmp_path / "x")]))  # fmt: skip
    assert (w.answer, w.tools, w.format) == (2, 0.3, 0.1)


@pytest.mark.parametrize("reward", ["tapo", "accuracy", "tool_bonus"])
def test_every_figure_of_the_log_is_what_its_page_says(reward, tmp_path):
    """Recomputed from the step's trajectories and rewards. Whatever is paid for, faithfulness is
    measured by the scores of tapo."""
    config, rng = Config(out=str(tmp_path), reward=reward), Random(0)
    search, neutral = (
        toy_questions(1, 3, neutral_share=0)[0],
        toy_questions(1, 3, neutral_share=1)[0],
    )
    away = (128, 0, 256, 128) if search.boxes[0][0] < 128 else (0, 0, 128, 128)
    shown = {
        "right": crop(search, search.boxes[0]), "wrong": crop(search, away),
        "wide": crop(search, (0, 0, 250, 200)), "print": Observation(text="1"),
        "typo": Observation(error="NameError", red_lines=["sandbox_error"]),
        "broken": Observation(environment="the sandbox broke"),
    }  # fmt: skip

    def group():
        sample = rng.choice([search, search, neutral])
        said = [sample.answer, "no", None]
        return [hand_made(sample, *(shown[rng.choice([*shown])] for _ in range(rng.randrange(4))),
                          answer=rng.choice(said)) for _ in range(4)]  # fmt: skip

    groups = [*(group() for _ in range(7)), [hand_made(search, answer="no")] * 4]
    world = train.World(None, None, train.BoxJudge(), None)
    rewards = train.score(groups, reward, world.judge, train.lambdas(config), Random(0))
    judged = sum(train.score(groups, "tapo", world.judge, train.lambdas(config), Random(0)), [])
    a_run = run_of(config)
    a_run.spent(dict.fromkeys(("act", "judge", "learn"), 1.0))
    tally, learnt = Counter(generated_tokens=7, decode_seconds=0.5), {"kl": None, "grad_norm": 0.5}
    train.report_step(a_run, config, world, 1, groups, rewards, learnt, tally)

    def mean(values):
        values = [float(value) for value in values]
        return sum(values) / len(values)

    plays, paid = sum(groups, []), sum(rewards, [])
    turns = [[turn.observation for turn in t.tool_turns] for t in plays]
    pairs = [(seen, r.scores) for t, seen, r in zip(plays, turns, judged) if t.sample is search]
    boxes = [box for seen, _ in pairs for o in seen for box in o.boxes]
    (line,) = a_run.log_lines("rl")
    assert [line.pop(name) for name in ("stage", "step", "kl")] == ["rl", 1, None]
    assert line == pytest.approx({
        "grad_norm": 0.5, "generated_tokens": 7,
        "reward": mean(r.total for r in paid),
        "answer": mean(t.answer == t.sample.answer for t in plays),
        "tools": mean(r.tools for r in paid),
        "format": -mean(t.answer is None for t in plays),
        "calls": mean(map(len, turns)),
        "useful_calls": mean(sum(s is not None and s > 0 for s in r.scores) for r in judged),
        "tool_use": mean(bool(seen) for seen, _ in pairs),
        "faithful": mean(1.0 in scores for _, scores in pairs),
        "crop_area": mean((c - a) * (d - b) / 65536 for a, b, c, d in boxes),
        "error_rate": mean(any(o.error for o in seen) for seen in turns),
        "constant_groups": mean(len({r.total for r in group}) == 1 for group in rewards),
        "no_verdict": 0, "environment": sum(bool(o.environment) for seen in turns for o in seen),
    }, rel=1e-5)  # fmt: skip
    assert json.loads((tmp_path / "times.jsonl").read_text())["decode"] == 0.5


TOY, LAB = parse_config(["--out", "no/such/run"]), parse_config("--preset codev-7b".split())
STATED = [
    ("README.md", r"ε, β \| not given \| (\S+) and (\S+) \(on the toy \[(\S+)\]",
     (LAB.eps, LAB.beta, TOY.beta)),
    ("README.md", r"\| (\S+) and (\S+)\. A violation is ref", (LAB.lambda_acc, LAB.lambda_tool)),
    ("README.md", r"λ_fmt = (\S+), ", (LAB.lambda_fmt,)),
    ("README.md", r"for (\d+) TAPO steps", (LAB.rl_steps,)),
    ("README.md", r"\| questions \| (\d+) \|", (TOY.eval_questions,)),
    ("docs/choices.md", r"\| (\d) \(toy (\d)\) in training .*, (\d+) in `evaluate.py`",
     (LAB.turns, TOY.turns, evaluate.GREEDY.turns)),
    ("docs/choices.md", r"On the toy: (\d+) steps", (TOY.sft_steps,)),
    ("docs/choices.md", r"(\d) epochs, Thyme's recipe", (LAB.sft_epochs,)),
    ("docs/lab.md", r"begin with, `--row-tokens (\d+)`", (LAB.row_tokens,)),
    ("docs/lab.md", r"a rollout of (\S+) tokens", (LAB.max_length,)),
]  # fmt: skip


@pytest.mark.parametrize("page, words, values", STATED)
def test_a_default_that_a_page_states_is_the_one_of_the_config(page, words, values):
    stated = re.search(words, (ROOT / page).read_text(encoding="utf-8")).groups()
    assert tuple(float(number.replace(",", "")) for number in stated) == values


def test_the_constants_of_the_objective_and_of_the_reward_are_the_defaults_of_the_flags():
    assert shared(Config(), train.Objective) == train.Objective()
    assert train.lambdas(Config()) == train.Lambdas()


# --- what a step draws, is told and learns by ------------------------------------------------


class Optimizer:
    """Learns nothing; its rate can be read."""

    def __init__(self):
        self.param_groups = [{"lr": None}]

    def zero_grad(self):
        pass


@pytest.fixture
def loop(monkeypatch):
    """loop(*flags) -> a dict for each step of stage 2: what it drew and was told. All that takes
    time is left out: every question is answered rightly, after a good look."""

    def play(actor, questions, rollouts, rules, tally, watch):
        looked = [[crop(q, q.boxes[0])] if q.boxes else [] for q in questions]
        groups = [
            [hand_made(q, *seen, answer=q.answer) for _ in range(rollouts)]
            for q, seen in zip(questions, looked)
        ]
        steps.append({"torch": torch.initial_seed(), "questions": [asked(q) for q in questions]})
        return groups

    def learn(policy, optimizer, groups, advantage, reference, objective):
        told = dict(advantage=advantage, reference=reference, objective=objective)
        steps[-1] |= told | {"lr": optimizer.param_groups[0]["lr"]}
        return {}

    def report(run, config, world, step, groups, rewards, learnt, tally):
        steps[-1]["totals"] = [[r.total for r in group] for group in rewards]

    def asked(q):
        return q.id, q.question, q.answer, q.image.tobytes()

    steps, policy = [], SimpleNamespace(base=None, model=torch.nn.Linear(1, 1))
    for name, stand_in in {
        "stage_1": lambda run, config, world: run.update(stage="rl"),
        "play": play,
        "learn": learn,
        "report_step": report,
        "opened": lambda *_: (policy, policy, Optimizer()),
        "load_policy": lambda *_, **__: "the SFT model",
        "finish": lambda *_: None,
        "fits": lambda *_: None,
        "shard": lambda *_: None,
        "LogProbs": lambda _: None,
    }.items():
        monkeypatch.setattr(train, name, stand_in)
    for name in ("check_weights", "write_transcript"):
        monkeypatch.setattr(Run, name, lambda *_: None)
    monkeypatch.setattr(Run, "save", lambda run, policy, optimizer, step: run.update(step=step))

    def loop(*flags):
        steps.clear()
        given = {"--resume", "--out"} & {*flags}
        train.main(parse_config([*flags, *([] if given else ["--out", tempfile.mkdtemp()])]))
        return list(steps)

    loop.steps = steps
    return loop


THREE = ["--rl-steps", "3", "--questions", "4", "--rollouts", "3", "--reward", "random"]


def test_what_a_step_draws_depends_on_seed_and_step_and_on_nothing_else(loop, tmp_path):
    def drawn(*flags):
        return [(s["torch"], tuple(s["questions"]), str(s["totals"])) for s in loop(*THREE, *flags)]

    first, other = drawn("--seed", "1"), drawn("--seed", "2")
    for part in range(3):  # sampling, questions, the null's coin
        assert len({step[part] for step in first + other}) == 6
    out = tmp_path / "again"
    assert drawn("--seed", "1", "--out", str(out), "--save-every", "1") == first
    state = json.loads((out / "state.json").read_text())
    for done in (2, 1):  # whichever step a run goes on from
        (out / "state.json").write_text(json.dumps(state | {"step": done}))
        again = [(s["torch"], tuple(s["questions"])) for s in loop("--resume", str(out))]
        assert again == [step[:2] for step in first[done:]]


def test_reward_world_norm_and_anchor_reach_the_loop(loop):
    flags = "--reward tool_bonus --adv-norm std --ratio-anchor ref --beta 0 --shortcut 0"
    (step,) = loop(*flags.split(), "--rl-steps", "1", "--rollouts", "3", "--questions", "20")
    assert step["reference"] == "the SFT model" and step["objective"].ratio_anchor == "ref"
    search = [(q, a) for _, q, a, _ in step["questions"] if "texture" in q]
    assert search and all(answer != USUAL_TEXTURE[q.split()[5]] for q, answer in search)
    paid = {round(total, 6) for group in step["totals"] for total in group}
    assert paid == {1.0, 1.2}  # a bonus for each call that ran
    assert step["advantage"].eq(0).all()  # K equal plays


def test_without_kl_and_its_anchor_no_reference_is_loaded(loop):
    for flags, loaded in ((["--beta", "0"], None), (["--beta", "1e-9"], "the SFT model")):
        assert loop(*THREE, *flags)[0]["reference"] == loaded


def test_advantages_are_of_the_totals_and_of_those_with_a_verdict(loop, monkeypatch):
    paid = [Reward(1.0, 0.0, 0.0, (), total) for total in (None, 1.0, 2.0)]
    monkeypatch.setattr(train, "score", lambda groups, *_: [paid for _ in groups])
    monkeypatch.setattr(train, "VerdictWatch", lambda: lambda *_: None)
    for norm, expected in (("none", [0, -0.5, 0.5]), ("std", [0, -0.7071, 0.7071])):
        (step,) = loop("--adv-norm", norm, "--rl-steps", "1", "--rollouts", "3")
        for row in step["advantage"].tolist():  # the deviation divides by K - 1
            assert row == pytest.approx(expected, abs=1e-3)


def test_the_rate_of_tapo_rises_over_five_steps_and_stays(loop):
    rates = [step["lr"] for step in loop(*THREE, "--rl-steps", "7", "--rl-lr", "0.5")]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5])


def test_a_judge_that_is_silent_stops_the_run_before_it_learns(loop, monkeypatch):
    monkeypatch.setattr(train, "BoxJudge", lambda: lambda request, labels: None)
    with pytest.raises(RuntimeError, match="have no verdict"):
        loop(*THREE, "--reward", "tapo", "--questions", "20")
    taught = [step for step in loop.steps if "lr" in step]
    assert not taught


@pytest.fixture
def imitated(monkeypatch, tmp_path):
    """imitated(n, *flags) -> (the batches of every step of stage 1 on n rows, its rates)"""

    def imitated(n, *flags):
        found = {}

        def imitate(policy, optimizer, batches_of, steps, rate, after):
            found["batches"] = [[k for b in batches_of(i) for k in b] for i in steps]
            found["rates"] = [rate(i) for i in steps]

        for name, stand_in in {
            "opened": lambda *_: (None, None, None),
            "demonstration_rows": lambda *_: (list(range(n)), []),
            "micro_batches": lambda rows, most: [rows],
            "imitate": imitate,
            "sync": lambda *_: None,
            "measure_policy": lambda *_, **__: {},
        }.items():
            monkeypatch.setattr(train, name, stand_in)
        monkeypatch.setattr(Run, "end_stage", lambda *_, **__: None)
        config = parse_config(["--out", str(tmp_path / str(flags)), *flags])
        train.stage_1(run_of(config), config, None)
        return found["batches"], found["rates"]

    return imitated


@pytest.mark.parametrize("n, batch, epochs", [(10, 4, 1.0), (8, 4, 2.0), (10, 4, 2.5), (3, 4, 1.0)])
def test_sft_sees_every_demonstration_in_every_epoch_to_the_last(imitated, n, batch, epochs):
    flags = ["--sft-steps", "-1", "--sft-batch", f"{batch}", "--sft-epochs", f"{epochs}"]
    batches, _ = imitated(n, *flags)
    assert {len(b) for b in batches} == {min(batch, n)}
    seen = Counter(k for b in batches for k in b)
    assert set(seen) == set(range(n)) and min(seen.values()) >= int(epochs)
    assert epochs * n <= seen.total() < epochs * n + batch
    other, _ = imitated(n, *flags, "--seed", "1")
    assert other != batches


@pytest.mark.parametrize("steps, warmup", [(10, 0.3), (10, 0.0), (1, 0.05), (320, 0.03)])
def test_the_rate_of_sft_rises_and_falls_to_2_percent_of_its_peak(imitated, steps, warmup):
    flags = ["--sft-steps", f"{steps}", "--sft-lr", "0.5", "--sft-warmup", f"{warmup}"]
    _, rates = imitated(40, *flags)
    up = max(1, round(warmup * steps))
    assert rates == pytest.approx([
        0.5 * min(1, done / up) * (1 - 0.98 * done / steps) for done in range(1, steps + 1)
    ])  # fmt: skip
    assert rates[-1] == pytest.approx(0.02 * 0.5) and len(rates) == steps


@pytest.mark.parametrize("stage, lr, second", [("sft", 4e-3, 0.98), ("rl", 1.5e-4, 0.95)])
def test_a_step_of_the_optimiser_is_adam_in_plain_floats(stage, lr, second, policy, tmp_path):
    """betas (0.9, 0.98) in SFT and (0.9, 0.95) in TAPO, no weight decay: docs/choices.md."""
    config = parse_config(["--out", str(tmp_path)])
    a_run = run_of(config)
    policy.save(tmp_path / "sft")
    learner, actor, optimizer = train.opened(a_run, config, stage)
    assert actor is learner  # on one CPU
    weights = learner.model.lm_head.weight
    w, m, v = weights[3, 5].item(), 0.0, 0.0
    for t, g in enumerate([0.5, -0.25, 2.0], start=1):
        weights.grad = torch.zeros_like(weights)
        weights.grad[3, 5] = g
        optimizer.step()
        m, v = 0.9 * m + 0.1 * g, second * v + (1 - second) * g * g
        w -= lr * m / (1 - 0.9**t) / (math.sqrt(v / (1 - second**t)) + 1e-8)
        assert weights[3, 5].item() == pytest.approx(w, rel=1e-5)


@pytest.mark.parametrize("frozen, in_sft, in_rl", [
    ("none", False, False), ("sft", True, False), ("rl", False, True), ("both", True, True),
])  # fmt: skip
def test_the_vision_tower_learns_in_the_stages_that_do_not_freeze_it(
    frozen, in_sft, in_rl, policy, tmp_path
):
    config = parse_config(["--out", str(tmp_path), "--freeze-vision", frozen])
    a_run = run_of(config)
    policy.save(tmp_path / "sft")
    for stage, still in (("sft", in_sft), ("rl", in_rl)):
        learner, _, optimizer = train.opened(a_run, config, stage)
        learnt = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, p in learner.model.named_parameters():
            assert (id(p) in learnt) == (not (still and ".visual." in name)), name


@pytest.mark.parametrize("rl_data, temperature, wave", [("", 1.0, 512), ("rows", 0.0, 32)])
def test_measuring_asks_the_examiner_under_the_temperature_of_the_world(
    rl_data, temperature, wave, monkeypatch, tmp_path
):
    told = []
    monkeypatch.setattr(
        train, "evaluate", lambda *a, **more: told.append((a, more)) or [{"score": 1.0}]
    )
    config = Config(rl_data=rl_data, out=str(tmp_path), turns=7, temperature=0.6)
    world = train.World(None, list(range(9)), "the judge", "the examiner")
    a_run = run_of(config)  # and what is some of a training set is no benchmark
    assert train.measure_policy(a_run, config, world, "actor", every=4) == {}
    ((actor, asked, judge), more) = told[0]
    assert (actor, asked, judge) == ("actor", [0, 4, 8], "the examiner")
    assert (more["rules"].temperature, more["rules"].turns, more["wave"]) == (temperature, 7, 3)
    assert more["out"] == tmp_path / "evaluation"
    train.measure_policy(a_run, config, world, "actor", out=tmp_path / "sft-episodes")
    assert told[1][1]["wave"] == wave


def test_demonstrations_are_learnt_or_measured_and_never_both(policy, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "rows_of", lambda policy, demos: demos)
    config = parse_config(["--out", str(tmp_path / "toy"), "--sft-demos", "20"])
    rows, held = train.demonstration_rows(run_of(config), config, policy)
    learnt, measured = ({t.sample.id for t in part} for part in (rows, held))
    assert (len(learnt), len(measured), learnt & measured) == (20, 100, set())
    monkeypatch.setattr(train, "load_thyme", lambda *_: (list("abcdefghijklmnopqrstu"), []))
    config = replace(config, sft_data="rows", out=str(tmp_path / "rows"))
    rows, held = train.demonstration_rows(run_of(config), config, policy)
    assert (rows, held) == (list("abcdefghijklmnopqrs"), ["t", "u"])  # a tenth


# --- whole runs ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "whole"
    done = run(*command(out))
    assert done.returncode == 0, done.stderr
    return out, done.stdout


def test_a_run_ends_with_one_table_and_everything_in_its_folder(finished):
    out, stdout = finished
    assert stdout.count("out-of-prior accuracy") == 1
    names = "config.json log.jsonl summary.json curves.png report.html trajectories.jsonl"
    for name in [*names.split(), "sft/model.safetensors", "rl/model.safetensors"]:
        assert (out / name).stat().st_size > 0, name
    summary = json.loads((out / "summary.json").read_text())
    assert summary["config"] == json.loads((out / "config.json").read_text())
    assert {"sft", "act", "judge", "learn", "evaluation"} <= set(summary["seconds"])
    for stage in ("sft", "rl"):
        M = summary["stages"][stage]
        assert {"n", "accuracy", "ood_accuracy", "tool_use", "faithful_and_correct",
                "faithful_given_correct", "calls", "error_rate", "crop_area"} <= set(M)  # fmt: skip
        assert M["faithful"] + M["unfaithful"] + M["no_tool"] == pytest.approx(1)
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [(line["stage"], line["step"]) for line in lines] == [
        *(("sft", i) for i in range(1, 15)),
        *((stage, i) for i in range(1, 5) for stage in ("rl", "evaluation")), ("rl", 5),
    ]  # fmt: skip
    assert [line["n"] for line in lines if line["stage"] == "evaluation"] == [3] * 4  # every 4th
    times = [json.loads(line) for line in (out / "times.jsonl").read_text().splitlines()]
    assert [(t["stage"], t["step"]) for t in times] == [(t["stage"], t["step"]) for t in lines]
    assert {"act", "judge", "learn", "prefill", "decode", "sandbox"} <= set(times[-1])
    assert not list(out.glob("checkpoint-*"))  # only a run that is not over needs one
    last = max(out.glob("*.*"), key=lambda path: path.stat().st_mtime_ns)
    assert last.name == "summary.json"  # where it is, all is


def test_the_log_holds_what_the_optimiser_held(finished):
    lines = [json.loads(line) for line in (finished[0] / "log.jsonl").read_text().splitlines()]
    rl = [line for line in lines if line["stage"] == "rl"]
    assert all(abs(line["loss"]) < 1 and line["skipped"] == 0 for line in rl)
    assert rl[0]["kl"] == 0 and rl[-1]["kl"] > 0  # the reference is the SFT model
    assert all(line["clip_fraction"] == 0 for line in rl)  # one step a batch: ratio 1


def test_every_name_in_the_log_stands_in_its_glossary(finished):
    lines = [json.loads(line) for line in (finished[0] / "log.jsonl").read_text().splitlines()]
    written = set().union(*(line for line in lines if line["stage"] != "evaluation"))
    glossary = (ROOT / "docs" / "log.md").read_text(encoding="utf-8")
    assert written <= set(re.findall(r"\w+", glossary))


def measures_as_before(whole: Path, stage: str, folder: Path) -> bool:
    """Measure a stage's policy where the episodes of the SFT model lie already."""
    shutil.copytree(whole / "sft-episodes", folder / "known")
    config = replace(read_config(whole, Config), out=str(folder))
    actor, a_run = load_policy(whole / stage), run_of(config)
    world = train.world_of(a_run, config)
    found = train.measure_policy(a_run, config, world, actor, out=folder / "known")
    before = json.loads((whole / "summary.json").read_text())["stages"][stage]
    return json.loads(json.dumps(found)) == before


def test_what_was_played_of_a_stage_is_not_played_again(finished, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate, "play", lambda *_: pytest.fail("played"))
    assert measures_as_before(finished[0], "sft", tmp_path)


def test_a_stage_ends_with_a_checkpoint_so_that_its_evaluation_can_go_on(tmp_path, monkeypatch):
    """14 steps, a checkpoint every 4: a run that is killed while it measures does no step again,
    so its weights are to the bit those whose episodes lie there, also on a GPU."""
    words = [*SHORT, "--save-every", "4", "--out", str(tmp_path)]
    monkeypatch.setattr(train, "measure_policy", lambda *_, **__: sys.exit("killed"))
    for imitate in (train.imitate, lambda *x: pytest.fail("again") if len(x[3]) else None):
        monkeypatch.setattr(train, "imitate", imitate)
        with pytest.raises(SystemExit, match="killed"):
            train.main(parse_config(words))
        assert json.loads((tmp_path / "state.json").read_text())["step"] == 14
        words = ["--resume", str(tmp_path)]


def test_a_quarter_of_the_questions_are_those_asked_amid_training(finished):
    amid = [json.loads(x) for x in open(finished[0] / "log.jsonl") if '"evaluation"' in x]
    lines = [json.loads(line) for line in open(finished[0] / "trajectories.jsonl")]
    assert len([x for x in lines[::4] if not x["sample"]["against_prior"]]) == 3
    assert {e["n"] for e in amid} == {3}


DIES_WHILE_SAVING = """
import os, signal, sys, kit.folder, train
whole = kit.folder.dcp.save
def half(state, checkpoint_id):
    whole(state, checkpoint_id=checkpoint_id)
    (checkpoint_id / ".metadata").unlink()  # it is written last
    next(checkpoint_id.glob("*.distcp")).write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
kit.folder.dcp.save = half
sys.argv = ["train.py", "--resume", sys.argv[1]]
train.main(train.parse_config(sys.argv[1:]))
"""


def test_killed_twice_and_resumed_it_ends_the_same(finished, tmp_path):
    """kill -9 in a later pass over the demonstrations, and in the middle of saving; the last part
    under `accelerate launch`: log, weights and results equal the uninterrupted run's."""
    out = tmp_path / "killed"
    process = subprocess.Popen(
        command(out), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    log = out / "log.jsonl"
    deadline = time.time() + 200
    while not (log.exists() and log.read_bytes().count(b"\n") >= 7):
        assert process.poll() is None and time.time() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert json.loads((out / "state.json").read_text())["step"] in (6, 8)
    died = run(sys.executable, "-c", DIES_WHILE_SAVING, out)
    assert died.returncode == -signal.SIGKILL, died.stderr
    launch = ["-m", "accelerate.commands.launch", "--num_processes", "1", "--cpu"]
    done = run(sys.executable, *launch, "train.py", "--resume", str(out))
    assert done.returncode == 0, done.stderr
    whole = finished[0]
    assert (out / "log.jsonl").read_bytes() == (whole / "log.jsonl").read_bytes()
    for stage in ("sft", "rl"):
        a, b = (folder / stage / "model.safetensors" for folder in (out, whole))
        assert a.read_bytes() == b.read_bytes()
    a, b = (json.loads((folder / "summary.json").read_text())["stages"] for folder in (out, whole))
    assert a == b


def test_ctrl_c_says_how_to_go_on(tmp_path):
    words = command(tmp_path / "run", "--sft-steps", "100000", "--save-every", "100000")
    process = subprocess.Popen(words, cwd=ROOT, stdout=-1, stderr=-1, text=True)
    log, deadline = tmp_path / "run" / "log.jsonl", time.time() + 100
    while not (log.exists() and log.stat().st_size):
        assert process.poll() is None and time.time() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err
    assert out.endswith(f"stopped; to go on: python train.py --resume {tmp_path}/run\n")


def test_a_far_too_high_rate_is_told_before_anything_is_saved(tmp_path, finished):
    words = ["--rl-lr", "1e30", "--questions", "2", "--save-every", "1", "--sft-steps", "0"]
    done = run(*command(tmp_path / "run", *words, "--model", str(finished[0] / "sft")))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "after rl step 1): the policy's weights are not finite, or huge" in done.stderr
    assert "(from the stage's start)" in done.stderr
    assert not list(tmp_path.glob("run/checkpoint-rl-*"))


def test_questions_of_a_data_set_depend_on_the_step_alone_in_every_pass(tmp_path, policy):
    config = Config(rl_data=str(ROOT / "tests/fixtures/codev_rl.parquet"), out=str(tmp_path),
                    judge_url="http://127.0.0.1:9/v1", questions=3)  # fmt: skip
    a_run = run_of(config)
    world, again = (train.data_world(a_run, config, policy) for _ in range(2))
    n = 9 - len(world.measured)
    ids = [[s.id for s in world.questions(step)] for step in range(2 * n)]
    flat = [i for step in ids for i in step]
    held = {s.id for s in world.measured}
    assert len(held) == 1 and not held & set(flat)
    for epoch in range(6):
        assert len(set(flat[epoch * n : (epoch + 1) * n])) == n
    assert [s.id for s in again.questions(4)] == ids[4]  # step 4 is in the second pass
    assert (tmp_path / "skipped-rl.jsonl").exists()
    assert (world.judge.prompt, world.examiner.prompt) == ("training", "evaluation")
    other = train.data_world(a_run, replace(config, seed=1), policy)
    assert [s.id for s in other.questions(0)] != ids[0]


@pytest.mark.parametrize("words, message", [
    (["--model", "no/such/folder/at/all"], "no checkpoint"),
    (["--max-length", "40"], "but --max-length 40 leaves 8 beside a turn of 32"),
    (["--preset", "codev-7b"], "give --judge-url"),
    (["--rl-data", "x.parquet"], "give --judge-url"),
    (["--tracker", "wandb"], "pip install wandb"),
    (["--rl-data", "no/such/rows.jsonl", "--judge-url", "http://h/v1"], "no data in no/such"),
    (["--sft-data", "no/such/rows.jsonl"], "no data in no/such"),
    (["--rl-data", RL_ROWS, "--judge-url", "host:8000"], "should look like http://host:8000/v1"),
    (["--rl-data", RL_ROWS, "--judge-url", "http://h/v1"], "give more, or lower --questions 12"),
    (["--out", "README.md"], "File exists: 'README.md'"),
    (["--out", "README.md/runs/toy"], "Not a directory: 'README.md/runs/toy'"),
])  # fmt: skip
def test_what_cannot_be_played_or_judged_is_refused_before_weights_load(
    words, message, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(train, "opened", lambda *_: pytest.fail("loaded"))
    with pytest.raises(SystemExit) as stopped:
        train.main(parse_config(["--out", str(tmp_path / "run"), *words]))
    assert message in capsys.readouterr().err or message in str(stopped.value)


def test_every_process_needs_a_question(tmp_path):
    config = Config(out=str(tmp_path), questions=12)
    a_run = run_of(config)
    a_run.n = 13
    with pytest.raises(ValueError, match="--questions 12 for 13 processes: raise it"):
        train.world_of(a_run, config)


def test_a_run_without_a_demonstration_that_fits_is_refused(policy, tmp_path):
    words = ["--sft-demos", "2", "--max-length", "60", "--max-new-tokens", "8"]
    config = parse_config(["--out", str(tmp_path / "run"), *words])
    with pytest.raises(SystemExit, match="53 usable demonstrations less 100 .* raise --max-length"):
        train.demonstration_rows(run_of(config), config, policy)


def test_demonstrations_of_which_none_can_be_used_are_told(policy, tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text('{"question": "q"}\n' * 3)
    config = Config(sft_data=str(tmp_path / "rows.jsonl"), out=str(tmp_path))
    with pytest.raises(SystemExit, match="^0 usable demonstrations .*, or see .*skipped-sft.jsonl"):
        train.demonstration_rows(run_of(config), config, policy)
    assert "0 of 3 rows loaded, 3 skipped (skipped-sft.jsonl)" in capsys.readouterr().out
    assert (tmp_path / "skipped-sft.jsonl").read_text().count("\n") == 3


# --- the real thing, on a stand-in for its checkpoint, rows in the public schemas and a judge --


class Judge(BaseHTTPRequestHandler):
    """Finds every output useful and every open answer wrong."""

    asked: list[str] = []

    def do_POST(self):
        asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.asked.append(asked)
        verdict = {"reason": "r", "same": False, "score": 1}
        if "candidate" not in asked:
            del verdict["same"]
        else:
            del verdict["score"]
        reply = {"choices": [{"message": {"content": json.dumps(verdict)}}]}
        body = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def test_the_7b_recipe_runs_on_a_stand_in_and_can_be_resumed(tmp_path, standin_folder, capsys):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    out, fixtures = tmp_path / "run", ROOT / "tests" / "fixtures"
    words = f"""train.py --preset codev-7b --model {standin_folder} --out {out}
        --sft-data {fixtures}/thyme_sft.jsonl --rl-data {fixtures}/codev_rl.parquet
        --judge-url http://127.0.0.1:{server.server_port}/v1 --sft-steps 2 --rl-steps 2
        --questions 2 --rollouts 4 --max-pixels 100352 --max-new-tokens 8 --sft-batch 2
        --save-every 2 --kv-budget-gb 1""".split()
    done = run(sys.executable, *words)
    server.shutdown()
    assert done.returncode == 0, done.stderr
    assert "8 of 8 rows loaded, 0 skipped" in done.stdout
    assert "9 of 9 rows loaded, 0 skipped" in done.stdout
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [(line["stage"], line["step"]) for line in lines] == [
        ("sft", 1), ("sft", 2), ("rl", 1), ("rl", 2)
    ]  # fmt: skip
    for name in ("summary.json", "report.html", "rl/model.safetensors", "skipped-sft.jsonl"):
        assert (out / name).stat().st_size >= (name != "skipped-sft.jsonl"), name
    exported = json.loads((out / "rl" / "preprocessor_config.json").read_text())
    assert exported["size"]["longest_edge"] == 100_352
    before, after = (load_file(p / "model.safetensors") for p in (standin_folder, out / "sft"))
    seeing = {name for name in before if "visual" in name}
    assert all(torch.equal(before[name].float(), after[name]) for name in seeing)  # frozen
    assert any(not torch.equal(before[name].float(), after[name]) for name in set(before) - seeing)
    train.main(parse_config(["--resume", str(out)]))
    assert "no tool" in capsys.readouterr().out
    state = json.loads((out / "state.json").read_text())
    for name in ("sft_data", "rl_data"):
        began = state["data"] | {name: "7 rows (of old)"}
        (out / "state.json").write_text(json.dumps(state | {"data": began}))
        with pytest.raises(SystemExit):
            train.main(parse_config(["--resume", str(out)]))
        flag = f"--{name.replace('_', '-')}"
        assert re.search(f"{flag} .* has changed since this run began", capsys.readouterr().err)


def test_a_served_judge_decides_what_tools_are_paid(tmp_path):
    """Squares without their boxes: only the server can say whether a crop showed anything."""
    for i, sample in enumerate(toy_questions(40, "no boxes", 1.0)):
        sample.image.save(tmp_path / f"{i}.png")
        row = {"question": sample.question, "answer": sample.answer, "image": f"{i}.png",
               "kind": sample.kind, "id": f"row {i}"}  # fmt: skip
        with open(tmp_path / "rows.jsonl", "a") as file:
            print(json.dumps(row), file=file)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Judge.asked.clear()
    words = f"""train.py --out {tmp_path}/run --rl-data {tmp_path}/rows.jsonl --sft-steps 60
        --judge-url http://127.0.0.1:{server.server_port}/v1 --sft-demos 250 --rl-steps 2
        --questions 4 --rollouts 4 --eval-questions 4""".split()
    done = run(sys.executable, *words)
    server.shutdown()
    assert done.returncode == 0, done.stderr
    log = [json.loads(line) for line in open(tmp_path / "run" / "log.jsonl")]
    assert sum(line["tools"] for line in log if line["stage"] == "rl") > 0.1
    steps = [words for words in Judge.asked if "data:image" in words]
    assert steps and len(steps) < len(Judge.asked)  # open answers were judged as well
    assert not any("<code>" in words or "<think>" in words for words in steps)
    assert len(set(Judge.asked)) == len(Judge.asked)  # what is known is not asked again


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb", "trackio"])
def test_the_log_also_goes_to_a_tracker(tracker, tmp_path):
    pytest.importorskip(tracker)
    kept_here = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "TRACKIO_DIR": str(tmp_path)}
    words = command(tmp_path / "run", "--sft-steps", "1", "--rl-steps", "1", "--tracker", tracker)
    done = run(*words, env=os.environ | kept_here)
    assert done.returncode == 0, done.stderr
    kept = {"tensorboard": "events.out.tfevents*", "wandb": "*.wandb", "trackio": "*.db"}
    assert any(b"generated_tokens" in file.read_bytes() for file in tmp_path.rglob(kept[tracker]))
