"""python -m pytest tests/test_evaluate.py      about 25 s, and 25 s more for the two processes"""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ANSWER, FAIL, LOOK, PRINT, RULES, SHORT, scripted
from PIL import Image

import evaluate as module
from data import USUAL_TEXTURE, Sample, toy_questions
from evaluate import (
    curves,
    evaluate,
    fingerprint,
    judges_of,
    load_bench,
    load_toy,
    main,
    measure,
    read_trajectories,
    table,
    write_trajectories,
)
from kit.records import file_of
from kit.tables import Lazy
from rewards import BoxJudge, ChatJudge, Reward, grade
from rollout import Trajectory, Turn
from sandbox import Observation
from test_benchmarks import ROWS, encoded, write_tsv

ROOT = Path(module.__file__).parent
FILE = "trajectories.jsonl"


def write(trajectories, rewards, folder):
    write_trajectories(folder / FILE, trajectories, rewards)


def in_memory(trajectories):
    """Pictures as PIL's plain images, which compare by their pixels."""
    for t in trajectories:
        object.__setattr__(t.sample, "image", plain(t.sample.image))
        for step in t.tool_turns:
            step.observation.images = list(map(plain, step.observation.images))
    return trajectories


def plain(image):
    return Image.frombytes(image.mode, image.size, image.tobytes())


TARGET = (76, 140, 120, 184)
IMAGE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (256, 256, 3), np.uint8))
SAMPLE = Sample("one", IMAGE, "Which texture is on the red square ?", "checker", boxes=(TARGET,))


def episode(sample=SAMPLE, *turns, answer="checker", scores=(), right=1.0):
    """A trajectory of (text, code, observation) turns, and its reward."""
    trajectory = Trajectory(sample, ids=[1] * 30, acted=[False] * 30, prompt=30, ended="answered")
    for text, code, seen in turns:
        start = len(trajectory.ids)
        trajectory.ids += [2] * 10 + [3] * 5
        trajectory.acted += [True] * 10 + [False] * 5
        trajectory.turns.append(Turn(text, code, seen, start, start + 10))
    trajectory.answer = answer
    return trajectory, Reward(right, sum(filter(None, scores)), 0.0, tuple(scores), right)


def looked(box=(64, 128, 128, 192), **more):
    crop = IMAGE.crop(box)
    return (
        LOOK,
        "image.crop(...)",
        Observation(images=[crop], boxes=[box], sources=["crop"], **more),
    )


def worked_example():
    """One of each: a good look, an error and a picture that is no crop, and a guess."""
    figure = Observation(
        text="12\n", images=[IMAGE.resize((40, 30))], boxes=[None], sources=["figure"],
        notes=["plt.show() was kept"], seconds=0.25,
    )  # fmt: skip
    error = Observation(error="ValueError: outside", red_lines=["invalid_coords"])
    answered = (ANSWER, None, None)
    lettered = replace(SAMPLE, id="two", options=("checker", "diagonal"), kind="neutral")
    pairs = [
        episode(SAMPLE, looked(), answered, scores=(1.0,)),
        episode(lettered, (FAIL, "1/0", error), ("<code>\nplot()\n</code>", "plot()", figure),
                answer=None, scores=(-1.0, None), right=0.0),
        episode(SAMPLE, answered),
    ]  # fmt: skip
    return [t for t, _ in pairs], [r for _, r in pairs]


@pytest.fixture(autouse=True)
def asked(monkeypatch):
    """The ids of the samples that were played, in order. (And `scripted` knows a trajectory by its
    id(), so none may make room for another while a test runs.)"""
    ids, alive, play = [], [], module.play

    def counted(policy, samples, *more):
        ids.extend(sample.id for sample in samples)
        alive.append(play(policy, samples, *more))
        return alive[-1]

    monkeypatch.setattr(module, "play", counted)
    return ids


# --- play and measure ------------------------------------------------------------------------


def test_the_toy_has_half_as_many_questions_against_its_prior_and_repeats_exactly():
    samples = load_toy(n=12, seed=3)
    against = [s for s in samples if s.against_prior]
    assert len(samples) == 18 and len(against) == 6
    assert len({s.id for s in samples}) == 18
    usual = [USUAL_TEXTURE[s.question.split()[5]] for s in against]
    assert all(s.answer != texture for s, texture in zip(against, usual))
    assert [s.answer for s in samples] == [s.answer for s in load_toy(n=12, seed=3)]
    assert [s.answer for s in samples] != [s.answer for s in load_toy(n=12, seed=4)]


def test_evaluate_plays_each_sample_once_scores_each_step_and_keeps_the_episodes(
    policy, samples, tmp_path
):
    scripts, rules = [[LOOK, ANSWER], [FAIL, PRINT, SHORT], [SHORT]], replace(RULES, turns=2)
    with scripted(policy, scripts):
        metrics, played, _ = evaluate(policy, samples[:3], BoxJudge(), rules=rules, out=tmp_path)
    assert [t.sample.id for t in played] == [s.id for s in samples[:3]]
    assert metrics["n"] == 3
    kept, rewards = read_trajectories(tmp_path / FILE)
    assert [len(r.scores) for r in rewards] == [1, 2, 0]
    assert [t.answer for t in kept] == ["checker", None, "red"]
    assert kept[1].ended == "turns"


def test_sampling_repeats_with_its_seed_and_leaves_the_random_numbers_of_training_alone(
    policy, samples
):
    def sampled(seed):
        rules = replace(RULES, max_new_tokens=8, turns=1)
        played = evaluate(policy, samples[:2], BoxJudge(), rules=rules, seed=seed)[1]
        return [trajectory.ids for trajectory in played]

    before = torch.random.get_rng_state()
    assert sampled(1) == sampled(1) != sampled(2)
    assert torch.equal(before, torch.random.get_rng_state())


def test_evaluating_nothing_is_refused(policy):
    with pytest.raises(ValueError, match="at least one sample"):
        evaluate(policy, [], BoxJudge())


def test_questions_against_the_prior_count_for_one_number_only():
    against = replace(SAMPLE, against_prior=True)
    pairs = [
        episode(SAMPLE, looked(), scores=(1.0,)),
        episode(SAMPLE, right=0.0),
        episode(against, right=0.0),
        episode(against, looked(), scores=(1.0,)),
        episode(against, right=0.0),
        episode(against, right=0.0),
    ]
    metrics = measure([t for t, _ in pairs], [r for _, r in pairs])
    assert metrics["n"] == 2 and metrics["accuracy"] == 0.5 and metrics["faithful"] == 0.5
    assert metrics["ood_accuracy"] == 0.25
    assert "ood_accuracy" not in measure(*map(list, zip(*pairs[:2])))


# --- the file of episodes --------------------------------------------------------------------


def test_trajectories_come_back_as_they_were_written(tmp_path):
    trajectories, rewards = worked_example()
    told = {"source": "hrbench4k", "part": "FSP", "cycle": "2", "against_prior": True}
    trajectories[0].sample = replace(SAMPLE, **told, rule=str.endswith)  # a rule is not written
    trajectories[0].turns[0].text += "\u2028 \ud800 \x00 ' \" </script>"  # lone surrogate and all
    write(trajectories, rewards, tmp_path / "here")
    (tmp_path / "here").rename(tmp_path / "there")  # a folder may be moved, or sent to somebody
    back, rewards_back = read_trajectories(tmp_path / "there" / "trajectories.jsonl")
    trajectories[0].sample = replace(trajectories[0].sample, rule=None)
    assert in_memory(list(back)) == trajectories  # pictures too: PIL compares their pixels
    assert rewards_back == rewards


def test_a_line_holds_what_the_head_of_the_file_promises(tmp_path):
    write(*worked_example(), tmp_path)
    first, second, third = map(json.loads, (tmp_path / FILE).open())
    documented = re.findall(r"^    ([a-z]+)  +", module.__doc__, re.MULTILINE)
    assert set(first) == {*documented, "prompt", "prompt_images"}
    assert first["sample"]["boxes"] == [list(TARGET)] and first["sample"]["answer"] == "checker"
    assert [step["score"] for step in first["steps"]] == [1.0, None]
    assert [step["score"] for step in second["steps"]] == [-1.0, None]
    assert (first["correct"], second["correct"]) == (True, False)
    assert [x["look"] for x in (first, second, third)] == ["faithful", "unfaithful", "no tool"]
    assert [x["failed"] for x in (first, second, third)] == [0, 1, 0]
    named = re.search(r"sample    (.*?)\. Its bench", module.__doc__, re.DOTALL)[1]
    assert set(first["sample"]) <= set(re.findall(r"\w+", named)) and "rule" not in first["sample"]
    assert first["acted"] == [[False, 30], [True, 10], [False, 5], [True, 10], [False, 5]]
    crop = tmp_path / first["steps"][0]["observation"]["images"][0]
    assert Image.open(crop).size == (64, 64)
    assert second["steps"][0]["observation"]["red_lines"] == ["invalid_coords"]


def test_each_trajectory_needs_its_reward(tmp_path):
    trajectories, rewards = worked_example()
    with pytest.raises(ValueError, match="shorter"):
        write(trajectories, rewards[:2], tmp_path)
    assert not (tmp_path / FILE).exists()


def test_a_verdict_that_is_missing_is_null(tmp_path):
    pairs = [episode(right=right) for right in (1.0, 0.0, None)]
    write(*zip(*pairs), tmp_path)
    lines = map(json.loads, (tmp_path / FILE).open())
    assert [line["correct"] for line in lines] == [True, False, None]


@pytest.mark.parametrize("line", ["{", "{}", "[]", "[" * 99_999, '{"sample": 1, "reward": {}}'])
def test_a_line_that_is_no_trajectory_is_named(line, tmp_path):
    write(*worked_example(), tmp_path)
    file = tmp_path / FILE
    file.write_text(file.read_text() + line + "\n")
    with pytest.raises(ValueError, match=r"jsonl, line 4: expected an episode as evaluate.py desc"):
        read_trajectories(file)


@pytest.mark.parametrize("field", ["steps", "acted"])
def test_a_line_that_lacks_a_field_is_named_when_it_is_read(field, tmp_path):
    write(*worked_example(), tmp_path)
    file = tmp_path / FILE
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    del lines[1][field]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match=f"jsonl, line 2: .*KeyError: '{field}'"):
        list(read_trajectories(file)[0])


def test_a_file_is_read_as_far_as_one_asks_and_may_be_empty_but_not_missing(tmp_path):
    write(*worked_example(), tmp_path)
    trajectories, rewards = read_trajectories(tmp_path / FILE, first=2)
    assert [t.sample.id for t in trajectories] == ["one", "two"] and len(rewards) == 2
    write([], [], tmp_path)
    assert list(map(list, read_trajectories(tmp_path / FILE))) == [[], []]
    with pytest.raises(FileNotFoundError, match="none/trajectories.jsonl"):
        read_trajectories(tmp_path / "none" / FILE)


def test_a_turn_without_code_has_no_score_even_between_turns_that_have_one(tmp_path):
    turns = [looked(), ("<think>So.</think>", None, None), looked()]
    trajectory, reward = episode(SAMPLE, *turns, scores=(1.0, 0.5))
    write([trajectory], [reward], tmp_path)
    line = json.loads((tmp_path / FILE).read_text())
    assert [step["score"] for step in line["steps"]] == [1.0, None, 0.5]


def test_runs_of_tokens_unroll_to_the_tokens(tmp_path):
    for acted in ([], [True], [False] * 3, [True, False, False, True, True]):
        write([replace(episode()[0], acted=acted)], [Reward(1.0, 0.0, 0.0)], tmp_path)
        runs = json.loads((tmp_path / FILE).read_text())["acted"]
        assert all(a != b for (a, _), (b, _) in itertools.pairwise(runs))
        assert read_trajectories(tmp_path / FILE)[0][0].acted == acted


# --- table and figures -----------------------------------------------------------------------


def test_the_table_is_aligned_and_leaves_empty_what_was_not_measured():
    columns = {
        "SFT": {"n": 256, "accuracy": 0.9571, "faithful": 0.33, "ood_accuracy": None},
        "TAPO": {"n": 256, "accuracy": 1.0, "ood_accuracy": 0.68, "no such row": 1.0},
    }
    assert table(columns).splitlines() == [
        "                         SFT   TAPO",
        "questions                256    256",
        "accuracy               0.957  1.000",
        "out-of-prior accuracy         0.680",
        "faithful               0.330",
    ]
    assert table({}) == ""


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize(
    "log",
    [
        [],
        [{"step": 1, "loss": 0.5}],
        [{"step": 1, "accuracy": 0.5, "answer": 0.5}, {"step": 2, "accuracy": None}],
        [{"step": 1, "faithful": None}],
        [{"step": s, "accuracy": 0.9, "tool_use": 0.5, "faithful": s / 40, "answer": 0.9,
          "tools": -0.2, "format": 0.0} for s in range(40)],
    ],
)  # fmt: skip
def test_curves_are_drawn_from_whatever_was_logged(log, tmp_path):
    curves(log, tmp_path / "curves.png")
    assert Image.open(tmp_path / "curves.png").size == (720, 600)


def test_every_curve_can_be_told_apart_without_colour():
    styles = list(zip(module.LINES, module.MARKERS))
    assert len(set(module.MARKERS)) == len(module.COLORS) == len(set(styles)) == len(styles)


# --- a benchmark's questions -----------------------------------------------------------------


def test_a_tsv_is_loaded_lazily_and_its_bad_row_is_named(tmp_path):
    row = ROWS["hrbench, tsv"][1]
    broken = encoded(size=(9000, 3000))[:6000]
    rows = [row | {"index": i, "image": cell} for i, cell in enumerate((row["image"], broken))]
    samples = load_bench("hrbench4k", write_tsv(tmp_path / "hr.tsv", rows))
    assert len(samples) == 2  # the broken picture was not looked at
    sample = samples[0]
    assert sample.image.size == (40, 30) and sample.kind == "search" and sample.rule is None
    assert (sample.id, sample.source) == ("hrbench4k-0-0", "hrbench4k")
    assert (sample.part, sample.cycle, sample.against_prior) == ("FCP", "3", False)
    with pytest.raises(ValueError, match=r"hrbench4k .*hr\.tsv\): row 1: "):
        samples[1]
    rows[1]["answer"] = "Z"
    file = write_tsv(tmp_path / "hr2.tsv", rows)
    with pytest.raises(ValueError, match=r"hr2\.tsv\): row 1, answer: .* one of the options"):
        load_bench("hrbench4k", file)
    assert len(load_bench("hrbench4k", file, first=1)) == 1


def test_vstar_has_its_boxes_in_corners(tmp_path):
    folder = tmp_path / "direct_attributes"
    folder.mkdir()
    Image.new("RGB", (200, 150)).save(folder / "sa_1.jpg")
    boxes = {"target_object": ["cup"], "bbox": [[10, 20.5, 30, 5], [0, 0, 1.2, 1]]}
    (folder / "sa_1.json").write_text(json.dumps(boxes))
    text = "What color?\n(A) red (dark)\n(B) blue\nAnswer with the option's letter."
    row = {"image": "direct_attributes/sa_1.jpg", "text": text, "category": "direct_attributes",
           "label": "A", "question_id": 0}  # fmt: skip
    questions = tmp_path / "test_questions.jsonl"
    questions.write_text(json.dumps(row) + "\n")
    for where in (tmp_path, questions):
        sample = load_bench("vstar", where)[0]
        assert sample.boxes == ((10, 20, 40, 26), (0, 0, 2, 1))
        assert sample.options == ("red (dark)", "blue") and sample.question == "What color?"
        assert (sample.source, sample.part) == ("vstar", "direct_attributes")
        assert sample.answer == "A"
    (folder / "sa_1.json").unlink()
    with pytest.raises(ValueError, match=r"row 0, image: expected its boxes in .*sa_1\.json"):
        load_bench("vstar", tmp_path)


def test_a_benchmarks_own_rule_decides_what_is_right(policy, tmp_path):
    row = ROWS["vlmblind, tsv"][1]
    rows = [row | {"index": i, "task": "Touching Circles", "answers": "No"} for i in range(3)]
    samples = load_bench("vlmblind", write_tsv(tmp_path / "blind.tsv", rows))
    assert samples[0].rule("no, they do not", "No")
    assert grade("No", samples[0], BoxJudge()) == 1 and grade("No " * 400, samples[0], None) == 0
    said = ["<answer>no , red</answer>"], ["<answer>red</answer>"], [LOOK, LOOK]
    with scripted(policy, list(said)):
        rules = replace(RULES, turns=2, temperature=0.0)
        metrics, _, rewards = evaluate(policy, samples, BoxJudge(), rules=rules)
    assert [reward.answer for reward in rewards] == [1.0, 0.0, 0.0]
    assert metrics["score"] == pytest.approx(1 / 3)


def test_the_summary_has_the_benchmarks_own_score_and_leaves_out_what_nobody_graded():
    image = Image.new("RGB", (8, 8))
    trajectories = [
        Trajectory(Sample(str(i), image, "?", "1", kind="neutral", source="vlmblind", part=part))
        for i, part in enumerate(("a", "a", "b", "b"))
    ]
    rewards = [Reward(answer, 0.0, 0.0) for answer in (1.0, 0.0, 1.0, None)]
    metrics = measure(trajectories, rewards)
    assert metrics["n"] == 3 and metrics["ungraded"] == 1 and metrics["accuracy"] == 2 / 3
    # The rules accept answers without a judge, so those that lack a verdict are no fair sample.
    assert metrics["score_bounds"] == [0.5, 0.75] and not {"score", "parts"} & {*metrics}
    assert ["benchmark score, at least", "0.500"] in module.lines({"vlmblind": metrics})
    graded = measure(trajectories, [*rewards[:3], Reward(0.0, 0.0, 0.0)])
    assert graded["score"] == 0.5 and graded["parts"] == {"a": 0.5, "b": 0.5}
    assert not {"score_bounds", "ungraded"} & {*graded}
    assert metrics["rates"]["accuracy"]["numerator"] == 2
    assert measure(trajectories[:3] * 2, rewards[:3] * 2, rollouts=2)["n"] == 3


# --- killed and resumed, alone and in company ------------------------------------------------

SCRIPTS = [[LOOK, ANSWER], [SHORT], [ANSWER], [LOOK, SHORT], [SHORT]]  # of waves of two questions


def episodes_in(folder):
    """The lines of its file, but for what a clock measured."""
    text = (folder / FILE).read_text()
    return re.sub(r'"seconds": [\d.e-]+', '"seconds": 0', text).splitlines()


def run(policy, samples, out, scripts=None, **more):
    with scripted(policy, scripts or SCRIPTS):
        rules = replace(RULES, temperature=0.0)
        return evaluate(policy, samples, BoxJudge(), rules=rules, out=out, wave=2, **more)[0]


def test_waves_change_no_number_and_keep_nothing_in_memory(policy, samples, tmp_path, asked):
    rules = replace(RULES, max_new_tokens=8)
    whole = evaluate(policy, samples[:5], BoxJudge(), rules=rules)
    parts = evaluate(policy, samples[:5], BoxJudge(), rules=rules, out=tmp_path, wave=2)
    assert parts[0] == whole[0] and parts[2] == whole[2] and isinstance(parts[1], Lazy)
    assert [t.ids for t in parts[1]] == [t.ids for t in whole[1]]
    assert asked == [s.id for s in samples[:5]] * 2


@pytest.mark.parametrize("kept", [(), (0,), (1,), (0, 2), (0, 1, 2)])
def test_a_killed_evaluation_goes_on_and_ends_as_if_it_had_not_been(
    kept, policy, samples, tmp_path, asked
):
    whole = run(policy, samples[:5], tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    file = tmp_path / "cut" / FILE
    lines = file.read_bytes().splitlines(keepends=True)
    file.unlink()
    for wave in kept:
        file_of(file, wave).write_bytes(b"".join(lines[2 * wave : 2 * wave + 2]))
    file.with_suffix(".part").write_bytes(lines[0][:40])  # the kill came amid a line
    asked.clear()
    left = [i for i in range(5) if i // 2 not in kept]
    assert run(policy, samples[:5], tmp_path / "cut", [SCRIPTS[i] for i in left]) == whole
    assert asked == [samples[i].id for i in left]
    assert episodes_in(tmp_path / "cut") == episodes_in(tmp_path / "whole")
    assert [path.name for path in file.parent.glob("traj*.jsonl")] == [FILE]


def test_an_answer_without_verdict_does_not_end_the_evaluation(policy, samples):
    class Mute(BoxJudge):
        def same_answer(self, *asked):
            return None

    asked = [replace(s, options=(), answer="a fish") for s in samples[:2]]
    with scripted(policy, [[ANSWER], [ANSWER]]):
        rules = replace(RULES, temperature=0.0)
        metrics, *_ = evaluate(policy, asked, Mute(), rules=rules, wave=1)
    assert metrics["ungraded"] == 2 and metrics["n"] == 0


def test_the_same_command_asks_for_missing_verdicts_only(policy, samples, tmp_path, asked):
    """Of answers, and of pictures."""

    class Served(BoxJudge):
        up, heard = False, ()

        def __call__(self, request, labels):
            self.heard += (request.question,)
            return 1.0 if self.up else None

        def same_answer(self, question, reference, reply):
            self.heard += (question,)
            return reply == "scarlet" if self.up else None

    red = [replace(s, options=(), answer="red", question=f"{s.id}?") for s in samples[:4]]
    red[3] = replace(red[3], kind="search", boxes=())
    rules, said = replace(RULES, temperature=0.0), ["red", "scarlet", "navy"]
    scripts = [[f"<think>.</think><answer>{word}</answer>"] for word in said] + [[LOOK, ANSWER]]

    def run(judge, scripts=()):
        with scripted(policy, [*scripts]):
            return evaluate(policy, red, judge, rules=rules, out=tmp_path, wave=1)

    down, back = Served(), Served()
    metrics, _, before = run(down, scripts)
    assert [reward.total for reward in before] == [1.0, None, None, None]
    assert metrics["ungraded"] == 3 and down.heard == tuple(s.question for s in (*red[1:], red[3]))
    asked.clear()
    back.up = True
    metrics, _, after = run(back)
    assert asked == [] and back.heard == down.heard
    assert [reward.answer for reward in after] == [1.0, 1.0, 0.0, 0.0] and "ungraded" not in metrics
    assert after[3].scores == (1.0,) and after[0] == before[0]
    again = Served()
    assert run(again)[2] == after and again.heard == ()


def test_what_is_finished_is_not_played_again(policy, samples, tmp_path, asked):
    once = run(policy, samples[:3], tmp_path)
    asked.clear()
    file_of(tmp_path / FILE, 0).write_bytes((tmp_path / FILE).read_bytes())  # killed amid clearing
    assert run(policy, samples[:3], tmp_path) == once and asked == []
    assert [path.name for path in tmp_path.glob("traj*")] == [FILE]


def test_another_evaluation_does_not_mix_with_this_one(policy, samples, tmp_path):
    run(policy, samples[:3], tmp_path)
    for other in ({"seed": 1}, {"rollouts": 2}):
        with pytest.raises(ValueError, match="from another evaluation .* give --out another"):
            run(policy, samples[:3], tmp_path, **other)
    with pytest.raises(ValueError, match="from another evaluation"):
        run(policy, samples[1:4], tmp_path)
    (tmp_path / FILE).rename(file_of(tmp_path / FILE, 1))  # one that was killed
    with pytest.raises(ValueError, match="jectories-1.jsonl is from another evaluation"):
        run(policy, samples[:3], tmp_path, seed=1)


def test_a_file_that_lost_lines_is_not_measured(policy, samples, tmp_path):
    run(policy, samples[:3], tmp_path)
    (tmp_path / FILE).write_text("".join((tmp_path / FILE).open().readlines()[:2]))
    with pytest.raises(ValueError, match="jsonl should have 3 lines, but has 2: delete it"):
        run(policy, samples[:3], tmp_path)


def test_other_weights_are_another_evaluation(policy, samples):
    before = fingerprint(policy, samples, 1)
    weights = next(policy.model.parameters()).data.view(-1)
    weights[0] += 1
    try:
        assert fingerprint(policy, samples, 1) != before
    finally:
        weights[0] -= 1
    assert fingerprint(policy, samples, 1) == before


def test_k_plays_of_a_question_count_as_one_question(policy, samples, tmp_path):
    scripts = [[ANSWER], [SHORT], [ANSWER], [ANSWER]]
    with scripted(policy, scripts):
        metrics, played, _ = evaluate(
            policy, samples[:2], BoxJudge(), rules=RULES, out=tmp_path, rollouts=2, wave=1
        )
    assert metrics["n"] == 2 and metrics["rates"]["accuracy"]["denominator"] == 4
    assert [t.sample.id for t in played] == [s.id for s in samples[:2] for _ in range(2)]
    assert [t.answer for t in played] == ["checker", "red", "checker", "checker"]


def one_of(world, rank, folder, monkeypatch):
    """Be a process that does not wait for the others. Returns the files wherever it would have."""
    there = []
    monkeypatch.setattr(module, "processes", lambda: (rank, world))
    monkeypatch.setattr(
        module, "gathered", lambda _: there.append(sorted(p.name for p in folder.glob("traj*")))
    )
    return there


def test_each_process_plays_its_waves_and_the_first_makes_one_file_of_all(
    policy, samples, tmp_path, asked, monkeypatch
):
    whole, both = run(policy, samples[:5], tmp_path / "whole"), tmp_path / "both"
    asked.clear()
    there = one_of(2, 1, both, monkeypatch)
    with pytest.raises(FileNotFoundError):  # the first process, which would join, is not there
        run(policy, samples[:5], both, SCRIPTS[2:4])
    assert asked == [s.id for s in samples[2:4]]
    assert there == [["trajectories-1.jsonl"]] * 2
    asked.clear()
    there = one_of(2, 0, both, monkeypatch)
    assert run(policy, samples[:5], both, SCRIPTS[:2] + SCRIPTS[4:]) == whole
    assert asked == [samples[i].id for i in (0, 1, 4)]
    assert there == [[f"trajectories-{i}.jsonl" for i in range(3)], [FILE]]
    assert episodes_in(both) == episodes_in(tmp_path / "whole")


def test_what_a_process_left_counts_when_fewer_go_on(policy, samples, tmp_path, asked, monkeypatch):
    whole, cut = run(policy, samples[:5], tmp_path / "whole"), tmp_path / "cut"
    one_of(3, 1, cut, monkeypatch)
    with pytest.raises(FileNotFoundError):
        run(policy, samples[:5], cut, SCRIPTS[2:4])
    one_of(1, 0, cut, monkeypatch)
    asked.clear()
    assert run(policy, samples[:5], cut, SCRIPTS[:2] + SCRIPTS[4:]) == whole
    assert asked == [samples[i].id for i in (0, 1, 4)]
    assert episodes_in(cut) == episodes_in(tmp_path / "whole")


FLAGS = ["--model", "tiny", "--bench", "toy", "--limit", "4", "--wave", "2", "--turns", "2"]
FLAGS += ["--max-new-tokens", "12", "--avg-at", "2"]


def test_two_processes_play_what_one_plays_and_nothing_twice(tmp_path):
    """With sampling."""
    alone, both = tmp_path / "alone", tmp_path / "both"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        main([*FLAGS, "--out", str(alone)])
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launch += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [*launch, "evaluate.py", *FLAGS, "--out", str(both)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert " 0/2 [" in done.stderr and " 0/3 [" not in done.stderr  # of three waves, two are its
    assert episodes_in(alone) == episodes_in(both)
    assert [p.name for p in both.glob("*.jsonl")] == [FILE]
    stages = [json.loads((f / "summary.json").read_text())["stages"] for f in (alone, both)]
    assert stages[0] == stages[1] and stages[0]["toy"]["rates"]["accuracy"]["denominator"] == 8
    ids = Counter(json.loads(line)["sample"]["id"] for line in episodes_in(both))
    assert len(ids) == 6 and set(ids.values()) == {2}


# --- the command line ------------------------------------------------------------------------


def test_without_arguments_it_shows_how_it_is_used(capsys):
    with pytest.raises(SystemExit) as ended:
        main([])
    printed = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0 and "usage" in printed and "(default: 10)" in printed
    for door in ("compare", "film", "study"):
        assert f"--{door} ... {door}.py: " in printed


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--model", "m", "--bench", "vstar9"], "invalid choice: 'vstar9'"),
        (["--model", "/no/such/folder"], "no checkpoint in /no/such/folder: expected a folder"),
        (["--model", "m", "--data", "x"], "drop --data x"),
        (["--model", "m", "--limit", "0"], "--limit: expected a finite number, least 1; got 0"),
        (["--model", "m", "--turns", "0"], "--turns: expected a finite number, least 1; got 0"),
        (
            ["--model", "m", "--temperature", "-1"],
            "--temperature: expected a finite number, least 0; got -1",
        ),
        (
            ["--model", "m", "--temperature", "nan"],
            "--temperature: expected a finite number, least 0; got nan",
        ),
        (["--model", "m", "--max-new-tokens", "0"], "--max-new-tokens: expected a finite number, "),
        (["--model", f"{ROOT}/tiny", "--out", f"{__file__}/x"], "Not a directory"),
        (["--model", f"{ROOT}/tiny", "--out", __file__], "File exists"),
        (
            ["--model", "m", "--shortcut", "2"],
            "--shortcut: expected a finite number, least 0, most",
        ),
        (["--model", "m", "--avg-at", "0"], "--avg-at: expected a finite number, least 1; got 0"),
        (["--model", "m", "--avg-at", "2", "--temperature", "0"], "K greedy plays are one play"),
        (
            ["--model", "m", "--perturb", "mask,nois"],
            "perturbations are all, or some of identity, mask, noise",
        ),
        (
            ["--model", "m", "--perturb", "all", "--avg-at", "2"],
            "greedy plays: drop --avg-at and --temperature",
        ),
        (["--bench", "toy"], "the following arguments are required: --model"),
        (
            ["--model", "m", "--judge-url", "http://x/v1"],
            "a judge needs both --judge-url and --judge-model",
        ),
        (["--model", f"{ROOT}/tiny", "--bench", "vstar", "--data", "/no"], "no data in /no"),
    ],
)
def test_a_wrong_command_is_explained_before_any_model_loads(
    arguments, message, monkeypatch, tmp_path, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", None)
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_a_benchmark_run_leaves_a_table_a_summary_and_a_page(policy, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(module, "load_policy", lambda name, device, max_pixels: policy)
    small = replace(module.GREEDY, max_new_tokens=64, max_length=2048)
    monkeypatch.setattr(module, "GREEDY", small)
    asked = {}
    monkeypatch.setattr(module, "evaluate", lambda *a, **k: asked.update(k) or evaluate(*a, **k))
    monkeypatch.setattr(module, "check_checkpoint", lambda name: None)
    flags = ["--limit", "2", "--turns", "2", "--temperature", "0.5", "--seed", "7"]
    flags += ["--max-new-tokens", "64", "--max-length", "2048"]
    with scripted(policy, [[LOOK, ANSWER], [SHORT], [ANSWER]]):
        main(["--model", "m", *flags, "--out", str(tmp_path / "deep" / "out")])
    assert asked["rules"] == replace(small, turns=2, temperature=0.5) and asked["seed"] == 7
    assert re.search(r"^questions +2$", capsys.readouterr().out, re.MULTILINE)
    summary = json.loads((tmp_path / "deep" / "out" / "summary.json").read_text())
    assert set(summary) == {"config", "seconds", "stages"}
    assert set(summary["stages"]) == {"toy"} and summary["config"]["precision"] == "torch.float32"
    assert 0 <= summary["stages"]["toy"]["ood_accuracy"] <= 1
    assert "of 3 episodes" in (tmp_path / "deep" / "out" / "report.html").read_text()


@pytest.mark.parametrize(
    "kept, message",
    [
        ('{"sample": 0}\n', "line 1: expected an episode as evaluate.py describes it"),
        ("other", "another evaluation"),
        ("", "--max-length 5 leaves"),
    ],
)
def test_what_an_evaluation_refuses_is_told_in_a_sentence(
    kept, message, policy, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(module, "load_policy", lambda name, device, max_pixels: policy)
    if kept == "other":
        write(*worked_example(), tmp_path)
    elif kept:
        (tmp_path / FILE).write_text(kept)
    with pytest.raises(SystemExit):
        flags = [
            "--model",
            f"{ROOT}/tiny",
            "--limit",
            "2",
            "--max-new-tokens",
            "2",
            "--max-length",
            "5",
        ]
        main([*flags, "--out", str(tmp_path)])
    assert message in capsys.readouterr().err


def test_a_benchmark_is_played_from_its_file(policy, tmp_path, monkeypatch, capsys):
    rows = [ROWS["hrbench, tsv"][1] | {"index": i, "cycle_category": i % 4, "answer": "B",
                                       "category": "single" if i < 4 else "cross"}
            for i in range(8)]  # fmt: skip
    file = write_tsv(tmp_path / "hr.tsv", rows)
    monkeypatch.setattr(module, "load_policy", lambda name, device, max_pixels: policy)
    monkeypatch.setattr(module, "check_checkpoint", lambda name: None)
    said = [["<answer>B</answer>"], ["<answer>red</answer>"]] * 2 + [["<answer>(B)</answer>"]] * 4
    flags = ["--max-new-tokens", "32", "--max-length", "2048", "--out", str(tmp_path / "out")]
    with scripted(policy, said):
        main(["--model", "m", "--bench", "hrbench4k", "--data", str(file), *flags])
    printed = capsys.readouterr().out
    stage = json.loads((tmp_path / "out" / "summary.json").read_text())["stages"]["hrbench4k"]
    assert stage["score"] == 0.75 and stage["parts"] == {"FCP": 1.0, "FSP": 0.5}
    assert "benchmark score" in printed and "no_verdict" in printed and "decorative" in printed
    assert len(list((tmp_path / "out" / "images").iterdir())) == 1  # eight rows share it
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<article") == 8


def test_lies_and_ablations_are_printed_and_kept(policy, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "load_policy", lambda name, device, max_pixels: policy)
    monkeypatch.setattr(module, "check_checkpoint", lambda name: None)
    monkeypatch.setattr(module, "load_toy", lambda *_: toy_questions(2, "lies", neutral_share=0.0))
    flags = ["--perturb", "mask,empty", "--ablation", "--turns", "2", "--max-new-tokens", "40"]
    with scripted(policy, [[LOOK, ANSWER], [ANSWER], [ANSWER, ANSWER]]):
        main(["--model", "m", *flags, "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    found = json.loads((tmp_path / "studies.json").read_text())
    assert set(found) == {"run", "tool_use", "perturb", "ablation", "evidence"}
    file, flags = tmp_path / "studies.json", flags[3:]  # the same evaluation without studies
    main(["--model", "m", *flags, "--out", str(tmp_path)])
    assert json.loads(file.read_text()) == found
    file.write_text(json.dumps(found | {"run": "of another"}))
    main(["--model", "m", *flags, "--out", str(tmp_path)])
    assert set(json.loads(file.read_text())) == {"run", "tool_use"}
    assert set(found["perturb"]["toy"]) == {"mask", "empty"}
    assert found["perturb"]["toy"]["mask"]["possible"]["denominator"] == 1  # one of two looked
    assert found["ablation"]["with tools"]["denominator"] == 2
    for words in ("after a hit", "tool gain", "evidence value", "decorative crops"):
        assert words in printed


@pytest.mark.parametrize(
    "bench, boxed, url, kinds",
    [
        ("toy", True, None, (BoxJudge, None)),
        ("vstar", True, None, (BoxJudge, None)),
        ("vstar", True, "http://x/v1", (BoxJudge, ChatJudge)),
        ("vstar", False, "http://x/v1", (ChatJudge, None)),  # its table has no boxes
        ("vstar", False, None, (BoxJudge, None)),
        ("hrbench8k", False, "http://x/v1", (ChatJudge, None)),
        ("charxiv", False, "http://x/v1", (ChatJudge, None)),
        ("vlmblind", False, "http://x/v1", (BoxJudge, None)),
    ],
)
def test_boxes_judge_where_they_are_labelled_and_a_server_where_not(
    bench, boxed, url, kinds, tmp_path, capsys
):
    args = SimpleNamespace(bench=bench, judge_url=url, judge_model="m", out=tmp_path,
                           judge_tokens=99, max_pixels=5_000_000,
                           judge_prompt="evaluation_original")  # fmt: skip
    judge, second = judges_of(args, boxed)
    assert (type(judge), second and type(second)) == kinds
    told = "nobody says what is faithful" in capsys.readouterr().out
    assert told == (bench == "vstar" and not boxed and not url)
    if bench == "vstar" and boxed:
        assert judge.visible == 0.5
    served = second or judge
    if isinstance(served, ChatJudge):
        assert served.options["max_tokens"] == 99 and served.max_pixels == 5_000_000
