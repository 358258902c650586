"""python -m pytest tests/test_folder.py      seconds: the folder of a run, and its checkpoints"""

import copy
import json
import math
import os
import resource
import subprocess
import sys
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from conftest import LOOK, RULES, SHORT, copied, json_lines, performed

import kit.folder
from kit.flags import knob
from kit.folder import Run, check_new, read_config, training_state, write_json
from kit.tables import Skipped
from rollout import load_policy, play


@dataclass(frozen=True)
class Settings:
    out: str = knob("runs", "a folder")
    steps: int = knob(200, "how many", least=1)


def run_in(folder, keep=1, config=None):
    return Run(folder, config or {}, timeout=60.0, keep=keep)


def again(run):
    """The same run, in another process: the first was killed."""
    run.log_file.close()
    return run_in(run.folder)


def logged(run, *steps, **more):
    """A line of the log for each step."""
    for step in steps:
        run.log({"stage": "rl", "step": step, "grad_norm": 1.0} | more)


@pytest.fixture
def learner(policy):
    learner = copied(policy)
    return learner, torch.optim.AdamW(learner.model.parameters())


@pytest.mark.parametrize("name, text, message", [
    ("config.json", None, "No such file or directory"),
    ("config.json", "", "config.json is damaged: put a copy back"),
    ("config.json", '{"steps": 0}', "--steps: expected a finite number, least 1; got 0"),
    ("config.json", '{"stops": 5}', "config.json is of another version: .* argument 'stops'"),
    ("state.json", "", "state.json is damaged: put a copy back"),
    ("state.json", "{}", "state.json is damaged: put a copy back"),
    ("checkpoint-sft-2/.metadata", None, "checkpoint-sft-2, which is not there or not whole: put"),
])  # fmt: skip
def test_a_run_is_read_where_it_now_lies_or_what_is_damaged_is_told(name, text, message, tmp_path):
    (tmp_path / "checkpoint-sft-2").mkdir()
    (tmp_path / "checkpoint-sft-2" / ".metadata").touch()
    a_run = run_in(tmp_path, config={"out": "elsewhere", "steps": 7})
    assert read_config(tmp_path, Settings) == Settings(out=str(tmp_path), steps=7)
    check_new(tmp_path)  # a run that did nothing may be begun anew
    a_run.update(kept=["checkpoint-sft-2"], checkpoint="checkpoint-sft-2", seconds={"act": 1.0})
    assert again(a_run).state == a_run.state
    (tmp_path / name).unlink() if text is None else (tmp_path / name).write_text(text)
    with pytest.raises((ValueError, OSError), match=message):
        read_config(tmp_path, Settings)
        run_in(tmp_path)


# The log and the clock
def test_a_log_that_ran_ahead_of_its_checkpoint_is_cut_and_one_that_lost_lines_refused(tmp_path):
    a_run = run_in(tmp_path)
    logged(a_run, 1, 2)
    a_run.update(step=2)
    logged(a_run, 3)
    a_run = again(a_run)
    assert [line["step"] for line in a_run.log_lines("rl")] == [1, 2] and a_run.lines == 2
    (tmp_path / "log.jsonl").write_bytes(b"")
    with pytest.raises(ValueError, match="log.jsonl has 0 bytes, but state.json counts on"):
        again(a_run)


def test_two_runs_never_share_a_folder(tmp_path):
    a_run = run_in(tmp_path)
    before = (tmp_path / "config.json").read_bytes()
    child = subprocess.Popen(["sleep", "60"])  # started while the lock is held, as sandboxes are
    with pytest.raises(ValueError, match="another process is training in .*: wait for it"):
        run_in(tmp_path, config={"seed": 7})
    assert (tmp_path / "config.json").read_bytes() == before
    again(a_run)  # the child must not hold the lock
    child.kill()
    child.wait()


def test_three_skipped_steps_in_a_row_end_the_run(tmp_path):
    a_run = run_in(tmp_path)
    for grad_norm in (None, None, 1.0, None, None):
        logged(a_run, 1, grad_norm=grad_norm)
        a_run.log({"stage": "evaluation", "step": 1})  # is no step
    with pytest.raises(SystemExit, match="three steps in a row"):
        logged(a_run, 9, grad_norm=None)
    assert len(a_run.log_lines("rl")) == 6


def test_what_is_not_finite_is_null_in_the_log_and_a_tracker_gets_numbers_alone(tmp_path):
    a_run = run_in(tmp_path)
    a_run.team = mock.Mock()
    a_run.log({"stage": "rl", "step": 1, "loss": math.nan, "x": -math.inf, "kl": 1 / 7})
    logged(a_run, 2, kl=None)
    (sent,), more = a_run.team.log.call_args
    assert sent.keys() == {"rl/step", "rl/grad_norm", "rl/peak_gb"} and more == {"step": 1}
    line, _ = (tmp_path / "log.jsonl").read_text().splitlines()
    assert line == '{"stage": "rl", "step": 1, "loss": null, "x": null, "kl": 0.142857}'


def test_data_that_changed_since_the_run_began_is_refused(tmp_path):
    run, data, moved = run_in(tmp_path / "run"), tmp_path / "a.jsonl", tmp_path / "moved.jsonl"
    data.write_text('{"a": 1}\n' * 14)
    moved.write_text(data.read_text())
    for where in (data, moved):
        run.check_data("rl_data", str(where))
    run.check_data("sft_data", "")  # the toy's
    run.update(step=3)
    data.write_text('{"a": 1}\n' * 15)
    words = r"--rl-data .*a.jsonl has changed .*: 14 rows \(.*\) then, 15 rows \(.*\) now; put a"
    with pytest.raises(ValueError, match=words):
        again(run).check_data("rl_data", str(data))


def test_seconds_are_kept_for_the_step_and_for_the_run(tmp_path):
    a_run = run_in(tmp_path)
    for step in (1, 2):
        with a_run.phase("act"):
            a_run.spent({"sandbox": 0.25, "decode": 0.5})
        logged(a_run, step, generated_tokens=7)
    times = json_lines(tmp_path / "times.jsonl")
    found = [(t["step"], t["sandbox"], t["tokens_per_second"]) for t in times]
    assert found == [(1, 0.25, 14.0), (2, 0.25, 14.0)]
    assert a_run.state["seconds"]["sandbox"] == 0.5 and a_run.state["seconds"]["act"] >= 0
    now = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    assert 0.5 * now < times[0]["peak_gb"] <= times[1]["peak_gb"] <= now + 0.01


def test_the_peak_of_a_gpu_is_that_of_the_step_alone(monkeypatch):
    cuda = mock.Mock(**{"max_memory_allocated.side_effect": [5.25e9, 3.0e9]})
    monkeypatch.setattr(torch, "cuda", cuda)
    assert [kit.folder.peak_gb() for _ in "ab"] == [5.25, 3.0]
    assert cuda.reset_peak_memory_stats.call_count == 2


def test_an_error_says_whose_it_is_and_where(tmp_path):
    a_run = run_in(tmp_path)
    logged(a_run, 3)
    with pytest.raises(KeyError) as error, a_run.phase("learn"):
        raise KeyError("x")
    (note,) = error.value.__notes__
    assert note.startswith("process 0 of 1, at `learn`, after rl step 3; to go on: ")
    assert note.endswith(f"train.py --resume {tmp_path}")


def test_rows_that_cannot_be_used_are_told_and_listed_and_stay_the_same(tmp_path, capsys):
    """Pictures may lie in files of their own, and the order would be another one in silence."""
    run, lost, name = run_in(tmp_path), Skipped(3, "image", "für uns gone"), "skipped-rl.jsonl"
    run.tell_skipped(13, [lost], name)
    assert capsys.readouterr().out == "13 of 14 rows loaded, 1 skipped (skipped-rl.jsonl)\n"
    line = '{"row": 3, "field": "image", "reason": "für uns gone"}\n'
    assert (tmp_path / name).read_text() == line
    run.tell_skipped(13, [lost._replace(reason="broken")], name)
    for usable, skipped in ((14, []), (13, [lost._replace(row=4)])):
        with pytest.raises(ValueError, match="which rows can be used has changed"):
            run.tell_skipped(usable, skipped, name)
    run.tell_skipped(14, [], "skipped-sft.jsonl")


def test_an_episode_can_be_read(policy, samples, tmp_path):
    (t,) = performed(policy, samples[:1], [[LOOK, SHORT]])
    run_in(tmp_path).write_transcript(7, policy, t.ids, "Reward(1.2)")
    text = (tmp_path / "transcripts" / "step-00007.txt").read_text()
    assert all(part in text for part in (t.sample.question, LOOK, SHORT, "Reward(1.2)")), text
    assert text.count("<picture>") == 2 and "<|image_pad|>" not in text


# Checkpoints
def test_a_half_written_checkpoint_is_never_used_nor_one_of_another_stage(tmp_path, learner):
    a_run = run_in(tmp_path)
    a_run.save(*learner, 2)
    (tmp_path / "checkpoint-sft-4").mkdir()  # the kill came in the middle of writing step 4
    (tmp_path / "checkpoint-sft-4" / "__7_0.distcp").write_bytes(b"half")  # by one of eight
    a_run = again(a_run)
    assert a_run.state["checkpoint"] == "checkpoint-sft-2"
    a_run.save(*learner, 4)
    assert [p.name for p in tmp_path.glob("checkpoint-*")] == ["checkpoint-sft-4"]
    assert not (tmp_path / "checkpoint-sft-4" / "__7_0.distcp").exists()
    a_run.restore(*learner, "checkpoint-sft-4")
    a_run.end_stage(learner[0], {"n": 1}, following="rl")
    now = dict(stage="rl", step=0, checkpoint=None, kept=[], stages={"sft": {"n": 1}})
    assert a_run.state == a_run.state | now and a_run.steps_left(3) == range(3)
    assert not a_run.emptied("sft").exists()  # so that no episode of another policy is read


def test_a_kill_while_state_is_written_leaves_the_old_one(tmp_path, monkeypatch):
    write_json(tmp_path / "state.json", {"step": 1})
    monkeypatch.setattr(os, "replace", lambda *_: sys.exit("killed"))
    with pytest.raises(SystemExit):
        write_json(tmp_path / "state.json", {"step": 2})
    assert json.loads((tmp_path / "state.json").read_text()) == {"step": 1}


def test_the_last_few_checkpoints_are_kept_and_the_best(tmp_path, learner):
    a_run = run_in(tmp_path, keep=2)
    a_run.update(stage="rl")
    for step, reward in enumerate([0.1, 0.9, 1.0, 0.5, 0.75, 0.75, 0.1, 0.1], start=1):
        learner[0].model.lm_head.weight.data[5, 7] = step
        logged(a_run, step, reward=reward)
        if step % 2 == 0:
            a_run.save(*learner, step)
    kept = {f"checkpoint-rl-{step}" for step in (4, 6, 8)}
    assert {p.name for p in tmp_path.glob("checkpoint-*")} == kept
    assert a_run.state["best"]["step"] == 4 and a_run.state["best"]["reward"] == 0.75
    a_run.update(kept=[])
    a_run.export_best(learner[0], *learner, steps=8)
    assert load_policy(tmp_path / "rl-best").model.lm_head.weight[5, 7] == 4
    assert not list(tmp_path.glob("checkpoint-*")) and a_run.state["best"] is None


def test_a_checkpoint_gives_back_weights_and_moments_to_the_bit(tmp_path, learner):
    policy, optimizer = learner
    for p in policy.model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    a_run = run_in(tmp_path)
    a_run.save(policy, optimizer, 2)
    want = copy.deepcopy(training_state(policy, optimizer))
    optimizer.step()
    fresh = torch.optim.AdamW(policy.model.parameters())
    a_run.restore(policy, fresh, "checkpoint-sft-2")
    torch.testing.assert_close(training_state(policy, fresh), want, rtol=0, atol=0)


@pytest.mark.parametrize("weight", [float("nan"), float("-inf"), 1e30])
def test_a_diverged_policy_is_neither_saved_nor_played(weight, tmp_path, learner, samples):
    (policy, _), a_run = learner, run_in(tmp_path)
    a_run.check_weights(policy)
    a_run.update(stage="rl", checkpoint="checkpoint-rl-2")
    logged(a_run, 3)
    words = r"rl step 3\): .* Lower rl_lr .* --resume .* \(from checkpoint-rl-2\)"
    with pytest.MonkeyPatch.context() as patch:  # another process found it in its part
        patch.setattr(kit.folder, "gathered", lambda own: [own, False])
        with pytest.raises(SystemExit, match=words):
            a_run.check_weights(policy)
    policy.model.lm_head.weight.data[5, 7] = weight
    with pytest.raises(SystemExit, match=words):
        a_run.check_weights(policy)
    policy.model.lm_head.weight.data[:] = float("nan")
    words = words.replace(": .*", ".* scores of the next .*")
    with pytest.raises(SystemExit, match=words), a_run.phase("act"):
        play(policy, samples[:1], 2, RULES)
