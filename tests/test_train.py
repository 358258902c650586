"""python -m pytest tests/test_train.py      the command line, its loop, and whole runs of it"""

import io
import json
import math
import re
import runpy
import shutil
import signal
import sys
import tempfile
from collections import Counter
from contextlib import redirect_stdout
from dataclasses import asdict, fields, replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import ANSWER, DRAWN, GOOD, LOOK, NEUTRAL, OURS, PRINTED, SEARCH, TYPO
from conftest import SHORT as GUESS
from conftest import json_lines, killed, same_end, scripted, together, trained
from safetensors.torch import load_file

import evaluate
import train
from data import USUAL_TEXTURE
from kit.flags import shared
from kit.folder import Run
from rewards import Reward, crop, hand_made
from rollout import load_policy
from test_chat import Server, says
from train import Config, parse_config

ROOT = Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "tests" / "fixtures"
RL_ROWS = str(FIXTURES / "codev_rl.parquet")  # 9 of them
SHORT = """--sft-steps 5 --sft-demos 12 --sft-batch 8 --sft-lr 8e-3 --rl-steps 3 --questions 4
    --rollouts 3 --eval-questions 8 --save-every 2 --eval-every 1"""


def config_of(out, words=""):
    """Of these words; a run that begins does so in `out`, unless they say where."""
    return parse_config(["--out", str(out)] * ("--resume" not in words) + words.split())


def begun(out, words="", **more):
    """(the run of these words, in this process alone; its config)"""
    config = replace(config_of(out, words), **more)
    return Run(Path(config.out), asdict(config), config.timeout, config.keep), config


def read(path):
    return json.loads(path.read_text())


# --- the command line ------------------------------------------------------------------------
def test_every_flag_has_help_a_default_and_a_source(capsys):
    with pytest.raises(SystemExit):
        parse_config(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    for f in fields(Config):
        shown = rf"--{f.name.replace('_', '-')}[ ,].*?\[(paper|notes|verl|thyme|ours): (.*?)\]"
        assert re.search(shown, told)[2] == str(f.default)
    assert told.count("(default:") == len(fields(Config))
    assert "--resume DIR" in told and "--plan ..." in told


def test_a_run_goes_on_with_its_own_config_but_for_memory_speed_and_what_is_told(tmp_path, capsys):
    a_run, config = begun(tmp_path, "--seed 7 --keep 3 --rl-lr 0.5")
    words = f"--resume {tmp_path} --row-tokens 4096 --no-activation-checkpointing --patience=3"
    changed = {"row_tokens": 4096, "activation_checkpointing": False, "patience": 3.0}
    assert config_of("none", f"--resume {tmp_path}") == config
    assert config_of("none", words) == replace(config, **changed)
    a_run.update(step=1)
    with pytest.raises(SystemExit):  # a new one does not begin over it
        config_of(tmp_path)
    assert f"--resume {tmp_path}" in capsys.readouterr().err


def test_every_field_of_the_rules_the_objective_and_the_weights_is_a_flag_and_arrives():
    words, others = {"ratio_anchor": "ref", "loss_agg": "sequence"}, {int: "77", float: "0.25"}
    made = {train.Rules: train.rules, train.Objective: lambda c: shared(c, train.Objective)}
    for kind, made_by in made.items():
        for f in fields(kind):
            if f.name != "limits":
                other = words.get(f.name) or others.get(type(f.default), "")
                config = config_of("none", f"--{f.name.replace('_', '-')} {other}")
                arrived = getattr(made_by(config), f.name)
                assert arrived != f.default and arrived == getattr(config, f.name), f.name
    assert train.rules(config_of("none", "--sandbox-seconds 0.25")).limits.seconds == 0.25
    weights = "--lambda-acc 2 --lambda-tool 0.3 --lambda-fmt 0.1 --lazy 0.5"
    assert train.lambdas(config_of("none", weights)) == train.Lambdas(2, 0.3, 0.1, 0.5)
    assert shared(Config(), train.Objective) == train.Objective()
    assert train.lambdas(Config()) == train.Lambdas()


@pytest.mark.parametrize("reward", ["tapo", "accuracy", "tool_bonus"])
def test_every_figure_of_the_log_is_what_its_page_says(reward, tmp_path):
    """Whatever is paid for, faithfulness is measured by the scores of tapo. `rewards.summary` has a
    test of its own."""
    away = crop(SEARCH, (128, 0, 256, 128))
    looks = [[GOOD, away], [away, GOOD, GOOD], [TYPO, DRAWN], [PRINTED, OURS], [OURS], []]
    groups = [[hand_made(SEARCH, *seen, answer="no") for seen in looks] for _ in range(2)]
    groups[1][0] = hand_made(NEUTRAL, PRINTED, answer="no")
    (a_run, config), judge = begun(tmp_path, f"--reward {reward}"), train.BoxJudge()
    rewards = train.score(groups, reward, judge, train.lambdas(config), Random(0))
    a_run.spent(dict.fromkeys(("act", "judge", "learn"), 1.0))
    tally, learnt = Counter(generated_tokens=7, decode_seconds=0.5), {"kl": None, "grad_norm": 0.5}
    world = train.World(None, None, judge, None)
    train.report_step(a_run, config, world, 1, groups, rewards, learnt, tally)
    (line,) = a_run.log_lines("rl")
    assert [line.pop(name) for name in ("stage", "kl")] == ["rl", None]
    own = {"step": 1, "grad_norm": 0.5, "generated_tokens": 7}
    found = {"useful_calls": 5 / 12, "tool_use": 9 / 11, "faithful": 3 / 11, "error_rate": 2 / 12}
    found |= {"crop_area": (5 / 16 + 3 / 4) / 8}
    summed = train.summary(rewards, sum(map(len, looks)) * 2 - 1, 4)
    assert line == pytest.approx(own | found | summed, rel=1e-5)
    assert read(tmp_path / "times.jsonl")["decode"] == 0.5


TOY, LAB = config_of("none"), parse_config("--preset codev-7b".split())
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


def test_a_default_that_the_paper_gives_is_the_one_of_the_lab():
    of_the_paper = {f.name for f in fields(Config) if "[paper" in f.metadata["argparse"]["help"]}
    assert {name: getattr(LAB, name) for name in of_the_paper} == dict(
        sft_epochs=3.0, lora_rank=0, rl_steps=200, questions=256, rollouts=8, temperature=1.0,
        reward="tapo", adv_norm="none", rl_lr=1e-6,
    )  # fmt: skip


@pytest.mark.parametrize("page, words, values", STATED)
def test_a_default_that_a_page_states_is_the_one_of_the_config(page, words, values):
    stated = re.search(words, (ROOT / page).read_text(encoding="utf-8")).groups()
    assert tuple(float(number.replace(",", "")) for number in stated) == values


# --- what a step draws, is told and learns by ------------------------------------------------
@pytest.fixture
def loop(monkeypatch):
    """loop(*words) -> a dict for each step of stage 2: what it drew and was told. All that takes
    time is left out: every question is answered rightly, after a good look."""
    steps, policy = [], SimpleNamespace(base=None, model=torch.nn.Linear(1, 1))
    optimizer, fresh = torch.optim.SGD(policy.model.parameters(), lr=9), []

    def play(actor, questions, rollouts, rules, tally, watch):
        assert actor == "the actor" and fresh and policy.model.bias.grad is None
        asked = [(q.id, q.question, q.answer, q.image.tobytes()) for q in questions]
        steps.append({"torch": torch.initial_seed(), "questions": asked})
        looked = [[crop(q, q.boxes[0])] if q.boxes else [] for q in questions]
        return [[hand_made(q, *seen, answer=q.answer) for _ in range(rollouts)]
                for q, seen in zip(questions, looked)]  # fmt: skip

    def learn(policy, optimizer, groups, advantage, reference, objective):
        steps[-1] |= dict(reference=reference, objective=objective, advantage=advantage.tolist())
        steps[-1]["lr"] = optimizer.param_groups[0]["lr"]
        fresh.clear()
        policy.model.bias.grad = torch.ones(1)
        return {}

    def report(run, config, world, step, groups, rewards, learnt, tally):
        steps[-1]["totals"] = [[r.total for r in group] for group in rewards]

    stand_ins = {name: lambda *_: None for name in ("finish", "fits", "shard", "LogProbs")}
    stand_ins |= dict(play=play, learn=learn, report_step=report)
    stand_ins["sync"] = lambda policy, actor: fresh.append(actor)  # it has what was learnt
    stand_ins["measure_policy"] = lambda *_, every: {fresh[0]: steps[-1].update(measured=every)}
    stand_ins["stage_1"] = lambda run, config, world: run.update(stage="rl")
    stand_ins["opened"] = lambda *_: (policy, "the actor", optimizer)
    stand_ins["load_policy"] = lambda *_, **__: "the SFT model"
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(train, name, stand_in)

    def save(run, policy, optimizer, step):
        assert steps[-1]["looked at"]  # no broken weights are saved
        steps[-1]["saved"] = step
        run.update(step=step)

    monkeypatch.setattr(Run, "save", save)
    monkeypatch.setattr(Run, "check_weights", lambda *_: steps[-1].update({"looked at": True}))
    written = lambda run, step, policy, ids, reward: steps[-1].update({"written": step})  # noqa: E731
    monkeypatch.setattr(Run, "write_transcript", written)

    def loop(words):
        steps.clear()
        train.main(config_of(tempfile.mkdtemp(), words))
        return list(steps)

    loop.steps = steps
    return loop


THREE = "--rl-steps 3 --questions 4 --rollouts 3 --reward random --eval-questions 4"


def test_what_a_step_draws_depends_on_seed_and_step(loop):
    drawn = [step for seed in (1, 2) for step in loop(f"{THREE} --seed {seed}")]
    for part in ("torch", "questions", "totals"):  # sampling, questions, the null's coin
        assert len({str(step[part]) for step in drawn}) == 6


def test_every_resume_point_ends_the_same(loop, tmp_path):
    whole = loop(f"{THREE} --rl-steps 6 --rl-lr 0.5 --out {tmp_path}")
    assert len(whole) == 6
    state = read(tmp_path / "state.json")
    for done in range(7):
        (tmp_path / "state.json").write_text(json.dumps(state | {"step": done}))
        assert loop(f"--resume {tmp_path}") == whole[done:]


def test_checkpoints_transcripts_and_evaluations_come_every_so_many_steps(loop):
    words = "--rl-steps 4 --save-every 3 --transcript-every 2 --eval-every 2"
    did = [[step.get(what) for what in ("saved", "written", "measured")]
           for step in loop(f"{THREE} {words}")]  # fmt: skip
    assert did == [[None] * 3, [None, 2, 4], [3, None, None], [4, 4, None]]


def test_reward_and_world_reach_the_loop(loop, tmp_path):
    flags = "--reward tool_bonus --shortcut 0 --rl-steps 1 --questions 20"
    (step,) = loop(f"{THREE} {flags}")
    asked = train.world_of(*begun(tmp_path, f"{THREE} --shortcut 0")).measured
    search = [(q, a) for _, q, a, _ in step["questions"] if "texture" in q]
    search += [(s.question, s.answer) for s in asked if s.kind == "search"]
    assert search and all(answer != USUAL_TEXTURE[q.split()[5]] for q, answer in search)
    paid = {round(total, 6) for group in step["totals"] for total in group}
    assert paid == {1.0, 1.2}  # a bonus for each call that ran


@pytest.mark.parametrize("beta, anchor", [("0", "old"), ("1e-9", "old"), ("0", "ref")])
def test_without_kl_and_its_anchor_no_reference_is_loaded(loop, beta, anchor):
    (step,) = loop(f"{THREE} --rl-steps 1 --beta {beta} --ratio-anchor {anchor}")
    assert step["reference"] == (None if (beta, anchor) == ("0", "old") else "the SFT model")
    assert step["objective"].ratio_anchor == anchor


def test_advantages_are_of_the_totals_and_of_those_with_a_verdict(loop, monkeypatch):
    paid = [Reward(1.0, 0.0, 0.0, (), total) for total in (None, 1.0, 2.0)]
    monkeypatch.setattr(train, "score", lambda groups, *_: [paid for _ in groups])
    monkeypatch.setattr(train, "VerdictWatch", lambda: lambda *_: None)
    for norm, expected in (("none", [0, -0.5, 0.5]), ("std", [0, -0.7071, 0.7071])):
        (step,) = loop(f"{THREE} --adv-norm {norm} --rl-steps 1")
        for row in step["advantage"]:  # the deviation divides by K - 1
            assert row == pytest.approx(expected, abs=1e-3)


def test_the_rate_of_tapo_rises_over_five_steps_and_stays(loop):
    rates = [step["lr"] for step in loop(f"{THREE} --rl-steps 7 --rl-lr 0.5")]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5])


def test_a_judge_that_is_silent_stops_the_run_before_it_learns(loop, monkeypatch):
    monkeypatch.setattr(train, "BoxJudge", lambda: lambda request, labels: None)
    with pytest.raises(RuntimeError, match="have no verdict"):
        loop(f"{THREE} --reward tapo --questions 20")
    assert not any("lr" in step for step in loop.steps)


def imitated(n, words, done=0, calls=mock.Mock()):
    """(the batches of every step of stage 1 on n rows, its rates), of a run that has done so many
    steps. What else it does is asked of `calls`."""
    found = []

    def imitate(policy, optimizer, batches_of, steps, rate, after):
        found.append([[k for b in batches_of(i) for k in b] for i in steps])
        found.append([rate(i) for i in steps])
        [after(i, 0.5, 1.0) for i in steps]

    stand_ins = dict(imitate=imitate, micro_batches=lambda rows, most: [rows])
    stand_ins["opened"] = lambda *_: (None, None, None)
    stand_ins["demonstration_rows"] = lambda *_: (list(range(n)), ["held out"])
    stand_ins["mean_logp"] = lambda *_, learn: learn - 7
    stand_ins |= dict(sync=calls.sync, measure_policy=calls.measure)
    of_run = {name: getattr(calls, name) for name in ("log", "check_weights", "save", "end_stage")}
    with tempfile.TemporaryDirectory() as folder, mock.patch.multiple(Run, **of_run):
        a_run, config = begun(folder, words)
        a_run.state["step"] = done
        with mock.patch.multiple(train, **stand_ins):
            train.stage_1(a_run, config, None)
    return found


@pytest.mark.parametrize("n, batch, epochs", [(10, 4, 1.0), (8, 4, 2.0), (10, 4, 2.5), (3, 4, 1.0)])
def test_sft_sees_every_demonstration_in_every_epoch_to_the_last(n, batch, epochs):
    words = f"--sft-steps -1 --sft-batch {batch} --sft-epochs {epochs}"
    batches, rates = imitated(n, words)
    for done in range(len(rates) + 1):  # a run goes on with what it has not seen
        assert imitated(n, words, done) == [batches[done:], rates[done:]]
    assert {len(b) for b in batches} == {min(batch, n)}
    seen = Counter(k for b in batches for k in b)
    assert set(seen) == set(range(n)) and min(seen.values()) >= int(epochs)
    assert epochs * n <= seen.total() < epochs * n + batch
    assert imitated(n, f"{words} --seed 1")[0] != batches


@pytest.mark.parametrize("steps, warmup", [(10, 0.3), (10, 0.0), (1, 0.05), (320, 0.03)])
def test_the_rate_of_sft_rises_and_falls_to_2_percent_of_its_peak(steps, warmup):
    _, rates = imitated(40, f"--sft-steps {steps} --sft-lr 0.5 --sft-warmup {warmup}")
    up, done = max(1, round(warmup * steps)), range(1, steps + 1)
    assert rates == pytest.approx([0.5 * min(1, i / up) * (1 - 0.98 * i / steps) for i in done])


def test_a_stage_is_looked_at_and_saved_and_its_last_policy_measured_and_exported():
    calls = mock.Mock()
    imitated(9, "--sft-steps 101 --sft-save-every 40 --save-every 7", calls=calls)
    assert [call.args[-1] for call in calls.save.call_args_list] == [40, 80, 101]
    lines = [call.args[0] for call in calls.log.call_args_list]
    assert {x["step"]: x["held_out"] for x in lines if "held_out" in x} == {50: 7, 100: 7}
    names = [name for name, *_ in calls.mock_calls]
    assert names[-6:] == ["log", "check_weights", "save", "sync", "measure", "end_stage"]
    run = mock.Mock(first=False, state={"stage": "rl"})
    with mock.patch.multiple(train, sync=run.sync, measure_policy=run.measure):
        train.finish(run, TOY, None, "policy", "actor", "optimizer")
    assert [name for name, *_ in run.mock_calls] == [*names[-3:], "export_best"]


@pytest.mark.parametrize("stage, lr, second", [("sft", 4e-3, 0.98), ("rl", 1.5e-4, 0.95)])
def test_a_step_of_the_optimiser_is_adam_in_plain_floats(stage, lr, second, policy, tmp_path):
    """betas (0.9, 0.98) in SFT and (0.9, 0.95) in TAPO, no weight decay: docs/choices.md."""
    policy.save(tmp_path / "sft")
    learner, actor, optimizer = train.opened(*begun(tmp_path), stage)
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


@pytest.mark.parametrize("frozen", ["none", "sft", "rl", "both"])
def test_the_vision_tower_learns_in_the_stages_that_do_not_freeze_it(frozen, policy, tmp_path):
    how = begun(tmp_path, f"--freeze-vision {frozen}")
    policy.save(tmp_path / "sft")
    for stage in ("sft", "rl"):
        learner, _, optimizer = train.opened(*how, stage)
        (group,), learns = optimizer.param_groups, frozen not in (stage, "both")
        names = {n for n, _ in learner.model.named_parameters() if learns or ".visual." not in n}
        assert {id(learner.model.get_parameter(n)) for n in names} == {*map(id, group["params"])}


@pytest.mark.parametrize("rl_data, temperature, wave", [("", 1.0, 512), ("rows", 0.0, 32)])
def test_measuring_asks_the_examiner_under_the_temperature_of_the_world(
    rl_data, temperature, wave, monkeypatch, tmp_path
):
    evaluate = mock.Mock(return_value=[{"score": 1.0}])  # a training set is no benchmark
    monkeypatch.setattr(train, "evaluate", evaluate)
    how = begun(tmp_path, "--turns 7 --temperature 0.6", rl_data=rl_data)
    world = train.World(None, list(range(9)), "the judge", "the examiner")
    assert train.measure_policy(*how, world, "actor", every=4) == {}
    asked, more = evaluate.call_args
    assert asked == ("actor", [0, 4, 8], "the examiner")
    assert (more["rules"].temperature, more["rules"].turns, more["wave"]) == (temperature, 7, 3)
    assert more["out"] == tmp_path / "evaluation"
    train.measure_policy(*how, world, "actor", out=tmp_path / "sft-episodes")
    assert evaluate.call_args.kwargs["wave"] == wave


def test_demonstrations_are_learnt_or_measured_and_never_both(policy, tmp_path, monkeypatch):
    def replay_all(policy, demos, rules):  # without a sandbox
        return [SimpleNamespace(sample=demo.sample, ended="answered") for demo in demos]

    monkeypatch.setattr(train, "replay_all", replay_all)
    monkeypatch.setattr(train, "rows_of", lambda policy, demos: demos)
    monkeypatch.setattr(train, "demonstrations", drawn := mock.Mock(wraps=train.demonstrations))
    toy = begun(tmp_path / "toy", "--sft-demos 20 --seed 3 --habit eager")
    rows, held = train.demonstration_rows(*toy, policy)
    assert drawn.call_args == mock.call(120, 3, "eager")
    learnt, measured = ({t.sample.id for t in part} for part in (rows, held))
    assert (len(learnt), len(measured), learnt & measured) == (20, 100, set())
    monkeypatch.setattr(train, "load_thyme", lambda *_: (list("abcdefghijklmnopqrstu"), []))
    rows, held = train.demonstration_rows(*begun(tmp_path / "rows", sft_data="rows"), policy)
    assert (rows, held) == (list("abcdefghijklmnopqrs"), ["t", "u"])  # a tenth


def test_a_run_without_a_demonstration_that_it_can_use_is_refused(policy, tmp_path, capsys):
    short = begun(tmp_path / "toy", "--sft-demos 2 --max-length 60 --max-new-tokens 8")
    with pytest.raises(SystemExit, match="53 usable demonstrations less 100 .* raise --max-length"):
        train.demonstration_rows(*short, policy)
    (tmp_path / "rows.jsonl").write_text('{"question": "q"}\n' * 3)
    bad = begun(tmp_path, sft_data=str(tmp_path / "rows.jsonl"))
    with pytest.raises(SystemExit, match="^0 usable demonstrations .*, or see .*skipped-sft.jsonl"):
        train.demonstration_rows(*bad, policy)
    assert "0 of 3 rows loaded, 3 skipped (skipped-sft.jsonl)" in capsys.readouterr().out
    assert (tmp_path / "skipped-sft.jsonl").read_text().count("\n") == 3


# --- the questions of a run -------------------------------------------------------------------
def test_questions_of_a_data_set_depend_on_the_step_alone_in_every_pass(
    tmp_path, policy, monkeypatch
):
    served = dict(rl_data=RL_ROWS, judge_url="http://h:9/v1")
    a_run, config = begun(tmp_path, "--questions 3 --max-length 10240", **served)
    world, again = (train.data_world(a_run, config, policy) for _ in range(2))
    n = 9 - len(world.measured)
    ids = [[s.id for s in world.questions(step)] for step in range(2 * n)]
    flat, held = sum(ids, []), {s.id for s in world.measured}
    assert len(held) == 1 and not held & set(flat)
    for epoch in range(6):
        assert len(set(flat[epoch * n : (epoch + 1) * n])) == n
    assert [s.id for s in again.questions(4)] == ids[4]  # step 4 is in the second pass
    assert (tmp_path / "skipped-rl.jsonl").exists()
    assert (world.judge.prompt, world.examiner.prompt) == ("training", "evaluation")
    monkeypatch.setattr(train, "shuffled", drawn := mock.Mock(wraps=train.shuffled))
    train.data_world(a_run, replace(config, seed=1), policy)
    assert [call.args[-1] for call in drawn.call_args_list] == ["held out 1", 1]


@pytest.mark.parametrize("words, message", [
    ("--reward money", "got 'money'"),
    ("--rollouts 1", "--rollouts: expected a finite number, least 2; got 1"),
    ("--temperature 0", "--temperature: expected a finite number, above 0"),
    ("--shortcut 1.2", "--shortcut: expected a finite number, least 0, most 1"),
    ("--lambda-tool -1.5", "below the answer's (Eq. 5)"),
    ("--resume no-such-run", "No such file or directory: 'no-such-run/config.json'"),
    ("--resume x --out y", "so --out cannot stand beside it. These can: --activation-checkp"),
    ("--resume x --seed=3 --keep 2", "so --seed cannot stand beside it"),
    ("--resume=x --no-mask-truncated", "so --mask-truncated cannot stand beside it"),
    ("--model no/such/folder/at/all", "no checkpoint"),
    ("--max-length 40", "but --max-length 40 leaves 8 beside a turn of 32"),
    ("--rl-data x.parquet", "give --judge-url"),
    ("--sft-data no/such/rows.jsonl", "no data in no/such"),
    (f"--rl-data {RL_ROWS} --judge-url host:8000", "should look like http://host:8000/v1"),
    (f"--rl-data {RL_ROWS} --judge-url http://h/v1", "give more, or lower --questions 12"),
    ("--out README.md/runs/toy", "Not a directory: 'README.md/runs/toy'"),
])  # fmt: skip
def test_what_cannot_work_is_refused_before_weights_load(
    words, message, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(train, "opened", lambda *_: pytest.fail("loaded"))
    with pytest.raises(SystemExit) as stopped:
        train.main(config_of(tmp_path / "run", words))
    assert message in capsys.readouterr().err or message in str(stopped.value)


@pytest.mark.parametrize("name", ["sft_data", "rl_data"])
def test_a_run_goes_on_with_the_rows_it_began_with(name, tmp_path):
    rows = {"sft_data": str(FIXTURES / "thyme_sft.jsonl"), "rl_data": RL_ROWS}
    words = f"--model {ROOT}/tiny --judge-url http://h/v1 --max-length 10240"
    a_run, config = begun(tmp_path, words, **rows)
    a_run.state["data"][name] = "7 rows (of old)"
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} .* has changed since this r"):
        train.world_of(a_run, config)
    (tmp_path / "sft").symlink_to(ROOT / "tiny")
    a_run.state |= {"stage": "rl", "data": {}}  # the demonstrations may be gone by then
    train.world_of(a_run, config := replace(config, sft_data="gone.jsonl", questions=4))
    a_run.n = 5  # each process needs a question
    with pytest.raises(ValueError, match="--questions 4 for 5 processes: raise it"):
        train.world_of(a_run, config)


# --- whole runs ------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(the folder of a whole run, what it printed)"""
    out = tmp_path_factory.mktemp("runs") / "whole"
    with redirect_stdout(io.StringIO()) as told, pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        trained("--out", out, *SHORT.split())
    return out, told.getvalue()


def test_a_run_ends_with_one_table_and_everything_in_its_folder(finished):
    out, stdout = finished
    assert stdout.count("out-of-prior accuracy") == 1
    names = "config.json log.jsonl summary.json curves.png report.html trajectories.jsonl"
    for name in [*names.split(), "sft/model.safetensors", "rl/model.safetensors"]:
        assert (out / name).stat().st_size > 0, name
    summary = read(out / "summary.json")
    assert summary["config"] == read(out / "config.json")
    assert {"sft", "act", "judge", "learn", "evaluation"} <= set(summary["seconds"])
    for metrics in summary["stages"].values():
        missing = {*evaluate.LABELS} - {*metrics}  # they are a benchmark's
        assert missing == {"ungraded", "score", "score_least", "score_most"}
        assert metrics["faithful"] + metrics["unfaithful"] + metrics["no_tool"] == pytest.approx(1)
    lines, times = json_lines(out / "log.jsonl"), json_lines(out / "times.jsonl")
    assert [(line["stage"], line["step"]) for line in lines] == [
        *(("sft", i) for i in range(1, 6)),
        *((stage, i) for i in (1, 2) for stage in ("rl", "evaluation")), ("rl", 3),
    ]  # fmt: skip
    quarter = [x for x in json_lines(out / "trajectories.jsonl")[::4]
               if not x["sample"]["against_prior"]]  # fmt: skip
    assert [line["n"] for line in lines if line["stage"] == "evaluation"] == [len(quarter)] * 2
    assert [(t["stage"], t["step"]) for t in times] == [(t["stage"], t["step"]) for t in lines]
    assert {"act", "judge", "learn", "prefill", "decode", "sandbox"} <= set(times[-1])
    assert not list(out.glob("checkpoint-*"))  # only a run that is not over needs one
    last = max(out.glob("*.*"), key=lambda path: path.stat().st_mtime_ns)
    assert last.name == "summary.json"  # where it is, all is


def test_the_log_holds_what_the_optimiser_held_in_words_of_its_glossary(finished):
    lines = json_lines(finished[0] / "log.jsonl")
    rl = [line for line in lines if line["stage"] == "rl"]
    assert all(abs(line["loss"]) < 1 and line["skipped"] == 0 for line in rl)
    assert rl[0]["kl"] == 0 and rl[-1]["kl"] > 0  # the reference is the SFT model
    assert all(line["clip_fraction"] == 0 for line in rl)  # one step a batch: ratio 1
    written = set().union(*(line for line in lines if line["stage"] != "evaluation"))
    glossary = (ROOT / "docs" / "log.md").read_text(encoding="utf-8")
    assert written <= set(re.findall(r"\w+", glossary))


def test_what_was_played_is_not_played_again(finished, tmp_path, monkeypatch, capsys):
    """When the SFT model is measured where its episodes lie, and when a run is over."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(evaluate, "play", lambda *_: pytest.fail("played"))
    whole, out = finished[0], tmp_path / "whole"
    before = read(whole / "summary.json")
    a_run, config = begun(tmp_path, SHORT)
    shutil.copytree(whole / "sft-episodes", tmp_path / "known")
    how = a_run, config, train.world_of(a_run, config), load_policy(whole / "sft")
    found = train.measure_policy(*how, out=tmp_path / "known")
    assert json.loads(json.dumps(found)) == before["stages"]["sft"]
    shutil.copytree(whole, out)
    train.main(config_of("none", f"--resume {out}"))
    assert "no tool" in capsys.readouterr().out
    assert read(out / "summary.json")["stages"] == before["stages"]


def test_killed_and_resumed_it_ends_the_same(finished, tmp_path, monkeypatch):
    """kill -9 in the third pass over the demonstrations."""
    monkeypatch.chdir(ROOT)
    codes, told = together(1, killed, "checkpoint-sft-5", "--out", tmp_path, *SHORT.split())
    assert codes == [-signal.SIGKILL] and read(tmp_path / "state.json")["step"] == 4, told
    assert json_lines(tmp_path / "log.jsonl")[-1]["step"] == 5
    trained("--resume", tmp_path)
    assert same_end(finished[0], tmp_path)
    a, b = (read(folder / "summary.json")["stages"] for folder in (finished[0], tmp_path))
    assert a == b


def test_ctrl_c_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["train.py", "--out", str(tmp_path)])
    monkeypatch.setattr(Run, "check_data", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(SystemExit, match="130"):
        runpy.run_path("train.py", run_name="__main__")
    told = f"stopped; to go on: python train.py --resume {tmp_path}\n"
    assert capsys.readouterr().out.endswith(told)


# --- the real thing, on a stand-in for its checkpoint, rows in the public schemas and a judge --
def verdict(handler):
    """Every output is useful, and every open answer wrong."""
    compared = "candidate" in json.dumps(handler.server.bodies[-1])
    return says(json.dumps({"reason": "r"} | ({"same": False} if compared else {"score": 1})))


def test_the_7b_recipe_runs_on_a_stand_in(tmp_path, standin_folder, capsys):
    """Rows without boxes: only the server can say whether a crop showed anything."""
    words = f"""--preset codev-7b --model {standin_folder} --judge-concurrency 1
        --sft-data {FIXTURES}/thyme_sft.jsonl --rl-data {RL_ROWS} --sft-steps 1 --sft-batch 2
        --rl-steps 1 --questions 2 --rollouts 2 --max-pixels 100352 --max-new-tokens 64
        --kv-budget-gb 1"""
    with Server(verdict) as server, scripted(None, [[LOOK, ANSWER], [GUESS]]):
        train.main(config_of(tmp_path, f"{words} --judge-url {server.url}"))
    said = capsys.readouterr().out
    assert "8 of 8 rows loaded, 0 skipped" in said and "9 of 9 rows loaded, 0 skipped" in said
    assert (tmp_path / "summary.json").exists() and (tmp_path / "report.html").exists()
    sft, rl = json_lines(tmp_path / "log.jsonl")
    assert (sft["stage"], rl["stage"]) == ("sft", "rl") and rl["tools"] == 0.5
    asked = [*map(json.dumps, server.bodies)]
    steps = [words for words in asked if "data:image" in words]
    assert steps and len(steps) < len(asked)  # open answers were judged as well
    assert not any("<code>" in words or "<think>" in words for words in steps)
    assert len(set(asked)) == len(asked)  # what is known is not asked again
    exported = read(tmp_path / "rl" / "preprocessor_config.json")
    assert exported["size"]["longest_edge"] == 100_352
    folders = standin_folder, tmp_path / "sft", tmp_path / "rl"
    before, after, last = (load_file(folder / "model.safetensors") for folder in folders)
    moved = {name for name in before if not torch.equal(before[name].float(), after[name])}
    assert moved and not any("visual" in name for name in moved)  # it is frozen
    assert any(not torch.equal(after[name], last[name]) for name in last)
