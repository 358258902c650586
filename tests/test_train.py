"""python -m pytest tests/test_train.py      about 60 s: the command line, and whole runs of it"""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, fields
from pathlib import Path

import pytest

import train
from train import Config, parse_config

ROOT = Path(__file__).resolve().parent.parent
SHORT = [
    "--sft-steps", "14", "--sft-demos", "60", "--rl-steps", "5", "--questions", "4",
    "--rollouts", "4", "--eval-questions", "12", "--save-every", "2", "--sft-lr", "8e-3",
]  # fmt: skip


def command(out, *more):
    return [sys.executable, "train.py", "--out", str(out), *SHORT, *more]


def run(*words, **kwargs):
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300, **kwargs)


# --- the command line ------------------------------------------------------------------------


def test_every_flag_has_help_a_default_and_a_source(capsys):
    with pytest.raises(SystemExit):
        parse_config(["--help"])
    out = capsys.readouterr().out
    for f in fields(Config):
        assert f"--{f.name.replace('_', '-')} " in out
        source = re.search(r"\[(paper|verl|thyme|ours): (.*)\]$", f.metadata["help"])
        assert source and source[2] == str(f.default)
    defaults = " ".join(out.split()).count("(default:")
    assert defaults == len(fields(Config))


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
        (["--reward", "money"], "invalid choice: 'money'"),
        (["--preset", "huge"], "invalid choice: 'huge'"),
        (["--adv-norm", "max"], "invalid choice: 'max'"),
        (["--rl-step", "3"], "unrecognized arguments"),
        (["--rl-lr", "fast"], "invalid float value: 'fast'"),
        (["--rollouts", "1"], "--rollouts must be at least 2, got 1"),
        (["--questions", "0"], "--questions must be at least 1, got 0"),
        (["--temperature", "0"], "--temperature must be above 0"),
        (["--shortcut", "1.2"], "between 0 and 1, got 1.2"),
        (["--lambda-tool", "1.0"], "must be below the answer's (Eq. 5), got tools 1.0"),
        (["--lambda-tool", "-1.5"], "must be below the answer's (Eq. 5), got tools -1.5"),
        (["--max-length", "32"], "leaves no room"),
        (["--model", "no/such/folder/at/all"], "no checkpoint"),
        (["--resume", "no-such-run"], "--resume goes alone"),
        (["--max-grad-norm", "-1"], "--max-grad-norm must be at least"),
        (["--rl-lr", "nan"], "--rl-lr must be a finite number"),
        (["--temperature", "inf"], "--temperature must be a finite number"),
        (["--eps", "nan"], "--eps must be a finite number"),
        (["--sft-lr", "0"], "--sft-lr must be at least"),
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


def test_a_run_that_is_not_there_cannot_be_resumed(capsys):
    with pytest.raises(SystemExit):
        parse_config(["--resume", "no-such-run"])
    assert "nothing to resume in no-such-run" in capsys.readouterr().err


def test_every_field_of_the_rules_and_the_objective_is_a_flag_and_arrives(tmp_path):
    other = {int: "77", float: "0.25", bool: None, str: None}
    words = {"ratio_anchor": "ref", "loss_agg": "sequence"}
    named = {f.name for f in fields(Config)}
    for kind, made_by in ((train.Rules, train.rules), (train.Objective, train.objective)):
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
    w = train.weights(parse_config(["--lambda-acc", "2", "--lambda-tool", "0.3", "--lambda-fmt",
                                    "0.1", "--out", str(tmp_path / "x")]))  # fmt: skip
    assert (w.answer, w.tools, w.format) == (2, 0.3, 0.1)


def test_reward_world_norm_and_anchor_reach_the_loop(tmp_path, monkeypatch):
    seen = {}

    def play(policy, questions, rollouts, rules, tally):
        seen["shortcut"] = questions
        return [[None] * rollouts for _ in questions]

    def score(groups, name, judge, weights, rng):
        seen["reward"] = name
        reward = train.score.__globals__["Reward"]
        return [[reward(1.0, 0.0, 0.0, (), None if k == 0 else float(k)) for k, _ in enumerate(g)]
                for g in groups]  # fmt: skip

    def learn(policy, optimizer, groups, advantage, reference, objective):
        seen.update(advantage=advantage, reference=reference, objective=objective)
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "stage_1", lambda run, config, device: run.update(stage="rl"))
    monkeypatch.setattr(train, "play", play)
    monkeypatch.setattr(train, "score", score)
    monkeypatch.setattr(train, "learn", learn)
    monkeypatch.setattr(train.Run, "open", lambda *_: (None, type("O", (), {"param_groups": []})))
    monkeypatch.setattr(train, "load_policy", lambda *_: "the SFT model")
    flags = "--reward tool_bonus --adv-norm std --ratio-anchor ref --beta 0 --shortcut 0"
    argv = ["train.py", *flags.split(), "--rollouts", "3", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", argv)
    train.score.__globals__["Reward"] = importlib.import_module("rewards").Reward
    with pytest.raises(KeyboardInterrupt):
        train.main()
    assert seen["reward"] == "tool_bonus" and seen["reference"] == "the SFT model"
    usual = importlib.import_module("data").USUAL_TEXTURE
    search = [q for q in seen["shortcut"] if q.kind == "search"]
    assert search and all(q.answer != usual[q.question.split()[5]] for q in search)
    # rewards None, 1, 2: the first has no verdict; deviation .7071 with K - 1
    assert seen["advantage"][0].tolist() == pytest.approx([0, -0.7071, 0.7071], abs=1e-3)


def test_a_log_that_lost_lines_is_noticed_at_once(tmp_path):
    a_run = train.Run(Config(out=str(tmp_path)))
    a_run.log({"stage": "sft", "step": 1, "grad_norm": 1.0})
    a_run.update(step=1)
    (tmp_path / "log.jsonl").write_bytes(b"")
    with pytest.raises(SystemExit, match="log.jsonl has 0 bytes, but state.json counts on"):
        train.Run(Config(out=str(tmp_path)))


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
        *(("sft", i) for i in range(1, 15)), *(("rl", i) for i in range(1, 6)),
    ]  # fmt: skip
    times = [json.loads(line) for line in (out / "times.jsonl").read_text().splitlines()]
    assert [(t["stage"], t["step"]) for t in times] == [(t["stage"], t["step"]) for t in lines]
    assert {"act", "judge", "learn", "prefill", "decode", "sandbox"} <= set(times[-1])
    glossary = (ROOT / "README.md").read_text()
    glossary = glossary[glossary.index("## The log") : glossary.index("## How fast")]
    names = {name for line in lines for name in line}
    assert all(re.search(rf"\b{name}\b", glossary) for name in names), names
    assert not list(out.glob("checkpoint-*"))  # only a run that is not over needs one


def test_the_log_holds_what_the_optimiser_held(finished):
    lines = [json.loads(line) for line in (finished[0] / "log.jsonl").read_text().splitlines()]
    rl = [line for line in lines if line["stage"] == "rl"]
    assert all(abs(line["loss"]) < 1 and line["skipped"] == 0 for line in rl)
    assert rl[0]["kl"] == 0 and rl[-1]["kl"] > 0  # the reference is the SFT model
    assert all(line["clip_fraction"] == 0 for line in rl)  # one step a batch: ratio 1


def test_killed_twice_and_resumed_it_ends_the_same(finished, tmp_path):
    """kill -9 in the middle of each stage, the last part under `accelerate launch`: log, weights
    and results equal the uninterrupted run's."""
    out = tmp_path / "killed"
    words = command(out)
    for lines in (7, 17):  # inside SFT, inside TAPO
        process = subprocess.Popen(
            words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        log = out / "log.jsonl"
        deadline = time.time() + 120
        while not (log.exists() and log.read_bytes().count(b"\n") >= lines):
            assert process.poll() is None and time.time() < deadline
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        words = [sys.executable, "train.py", "--resume", str(out)]
    launch = ["-m", "accelerate.commands.launch", "--num_processes", "1", "--cpu"]
    done = run(sys.executable, *launch, *words[1:])
    assert done.returncode == 0, done.stderr
    whole = finished[0]
    assert (out / "log.jsonl").read_bytes() == (whole / "log.jsonl").read_bytes()
    for stage in ("sft", "rl"):
        a, b = (folder / stage / "model.safetensors" for folder in (out, whole))
        assert a.read_bytes() == b.read_bytes()
    a, b = (json.loads((folder / "summary.json").read_text())["stages"] for folder in (out, whole))
    assert a == b


def test_three_skipped_steps_in_a_row_end_the_run(tmp_path):
    a_run = train.Run(Config(out=str(tmp_path)))
    for grad_norm in (None, None, 1.0, None, None):
        a_run.log({"stage": "sft", "step": 1, "grad_norm": grad_norm})
    with pytest.raises(SystemExit, match="three steps in a row"):
        a_run.log({"stage": "sft", "step": 9, "grad_norm": None})
    assert len(a_run.log_lines("sft")) == 6


def test_a_half_written_checkpoint_is_never_used(tmp_path, policy):
    config = Config(out=str(tmp_path))
    a_run = train.Run(config)
    optimizer = train.torch.optim.AdamW(policy.model.parameters())
    a_run.save(policy, optimizer, 2)
    (tmp_path / "checkpoint-sft-4").mkdir()  # the kill came in the middle of writing step 4
    (tmp_path / "checkpoint-sft-4" / "optimizer.pt").write_bytes(b"half")
    again = train.Run(config)
    assert again.state["checkpoint"] == "checkpoint-sft-2"
    again.save(policy, optimizer, 4)
    assert [p.name for p in tmp_path.glob("checkpoint-*")] == ["checkpoint-sft-4"]
    again.open(config, "tiny", 1e-3, (0.9, 0.95), "cpu")
