"""python -m pytest tests/test_evaluate.py      play, keep, go on, measure: evaluate.py"""

import base64
import io
import itertools
import json
import re
import shutil
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import ANSWER, FAIL, IMAGE, LOOK, RULES, SEARCH, SHORT
from conftest import copied, json_lines, scripted, together
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import evaluate as module
from data import USUAL_TEXTURE, Sample, toy_questions
from evaluate import curves, evaluate, fingerprint, judges_of, load_bench, load_toy, main, measure
from evaluate import read_trajectories, table, write_trajectories
from kit.records import file_of
from kit.tables import Lazy
from rewards import BoxJudge, ChatJudge, Reward
from rollout import Trajectory, Turn
from sandbox import Observation
from test_benchmarks import ROWS, write_tsv

ROOT = Path(module.__file__).parent
FILE = "trajectories.jsonl"
COLD = replace(RULES, temperature=0.0)


def write(trajectories, rewards, folder):
    write_trajectories(folder / FILE, trajectories, rewards)


TARGET = (76, 140, 120, 184)
SAMPLE = replace(SEARCH, id="one", boxes=(TARGET,))


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


def looked(box=(64, 128, 128, 192)):
    seen = Observation(images=[IMAGE.crop(box)], boxes=[box], sources=["crop"])
    return LOOK, "image.crop(...)", seen


def worked_example():
    """One of each: a good look, an error and a picture that is no crop, and a guess."""
    figure = Observation(text="12\n", images=[IMAGE.resize((40, 30))], boxes=[None])
    figure.sources.append("figure")
    error = Observation(error="ValueError: outside", red_lines=["invalid_coords"])
    answered = (ANSWER, None, None)
    lettered = replace(SAMPLE, id="two", options=("checker", "diagonal"), kind="neutral")
    pairs = [
        episode(SAMPLE, looked(), answered, scores=(1.0,)),
        episode(lettered, (FAIL, "1/0", error), ("<code>\nplot()\n</code>", "plot()", figure),
                answer=None, scores=(-1.0, None), right=0.0),
        episode(SAMPLE, answered),
    ]  # fmt: skip
    return tuple(zip(*pairs))


@pytest.fixture(autouse=True)
def asked(monkeypatch):
    """The ids of the samples that were played, in order."""
    ids, play = [], module.play

    def counted(policy, samples, *more):
        ids.extend(sample.id for sample in samples)
        return play(policy, samples, *more)

    monkeypatch.setattr(module, "play", counted)
    return ids


# --- play and measure ------------------------------------------------------------------------


def test_the_toy_has_half_as_many_questions_against_its_prior_and_repeats_exactly():
    samples, again, other = load_toy(n=12, seed=3), load_toy(n=12, seed=3), load_toy(n=12, seed=4)
    against = [s for s in samples if s.against_prior]
    assert len(against) == 6 and len({s.id for s in samples}) == len(samples) == 18
    assert all(s.answer != USUAL_TEXTURE[s.question.split()[5]] for s in against)
    assert [s.answer for s in samples] == [s.answer for s in again] != [s.answer for s in other]


def test_sampling_repeats_with_its_seed_and_leaves_the_random_numbers_of_training_alone(
    policy, samples
):
    def sampled(seed):
        rules = replace(RULES, max_new_tokens=8, turns=1)
        played = evaluate(policy, samples[:2], BoxJudge(), rules=rules, seed=seed)[1]
        return [trajectory.ids for trajectory in played]

    with pytest.raises(ValueError, match="at least one sample"):
        evaluate(policy, [], BoxJudge())
    before = torch.random.get_rng_state()
    assert sampled(1) == sampled(1) != sampled(2)
    assert torch.equal(before, torch.random.get_rng_state())


def test_questions_against_the_prior_count_for_one_number_only():
    against = replace(SAMPLE, against_prior=True)
    good = dict(scores=(1.0,))
    pairs = [episode(SAMPLE, looked(), **good), episode(SAMPLE, right=0.0)]
    pairs += [episode(against, right=0.0)] * 3 + [episode(against, looked(), **good)]
    metrics = measure(*zip(*pairs))
    assert metrics["n"] == 2 and metrics["accuracy"] == metrics["faithful"] == 0.5
    assert metrics["ood_accuracy"] == 0.25 and metrics["ood_given_faithful"] == 1.0
    assert "ood_accuracy" not in measure(*zip(*pairs[:2]))


# --- the file of episodes --------------------------------------------------------------------

WORDS = st.text(max_size=9) | st.just("\u2028 \ud800 \x00 ' \" </script>")  # a lone surrogate too
LISTS, MAYBE = st.lists(WORDS, max_size=2), st.none() | WORDS
BOXES = st.none() | st.sampled_from([(64, 128, 128, 192), (0, 0, 256, 256)])


@st.composite
def episodes(draw):
    """A trajectory with any texts, any looks and any tokens, and its reward."""
    texts = {name: draw(WORDS) for name in ("question", "answer", "source", "part", "cycle")}
    boxes, against = draw(st.sampled_from([(), (TARGET,)])), draw(st.booleans())
    texts["options"] = tuple(draw(LISTS))
    sample = replace(SAMPLE, **texts, boxes=boxes, against_prior=against)
    turns, scores = [], []
    for code in draw(st.lists(MAYBE, max_size=3)):
        boxes = draw(st.lists(BOXES, max_size=2))
        shown = dict(images=[IMAGE.crop(box or (0, 0, 9, 9)) for box in boxes], boxes=boxes)
        shown |= dict(text=draw(WORDS), sources=["crop" if box else "figure" for box in boxes])
        shown |= dict(error=draw(MAYBE), environment=draw(MAYBE), notes=draw(LISTS), seconds=0.25)
        turns.append((draw(WORDS), code, None if code is None else Observation(**shown)))
        scores += [draw(st.sampled_from([None, -1.0, 0.5, 1.0]))] * (code is not None)
    right = draw(st.sampled_from([None, 0.0, 1.0]))
    trajectory, reward = episode(sample, *turns, answer=draw(MAYBE), scores=scores, right=right)
    return replace(trajectory, acted=draw(st.lists(st.booleans(), max_size=9))), reward


@given(st.lists(episodes(), max_size=3))
def test_trajectories_survive_their_file_wherever_its_folder_moves(pairs):
    def plain(image):  # PIL's plain images compare by their pixels
        return Image.frombytes(image.mode, image.size, image.tobytes())

    def in_memory(t):
        for turn in t.tool_turns:
            turn.observation.images = [*map(plain, turn.observation.images)]
        return replace(t, sample=replace(t.sample, image=plain(t.sample.image)))

    trajectories, rewards = [t for t, _ in pairs], [reward for _, reward in pairs]
    with tempfile.TemporaryDirectory() as folder:
        here, there = Path(folder) / "here", Path(folder) / "there"
        write(trajectories, rewards, here)
        here.rename(there)
        back, paid = read_trajectories(there / FILE)
        assert [*map(in_memory, back)] == [*map(in_memory, trajectories)] and paid == rewards
        for line, t, reward in zip(json_lines(there / FILE), trajectories, rewards, strict=True):
            assert line["correct"] is (None if reward.answer is None else reward.answer == 1)
            turns, own = zip(line["steps"], t.turns, strict=True), iter(reward.scores)
            assert all(a["score"] == (b.observation and next(own)) for a, b in turns)
            assert all(a != b for (a, _), (b, _) in itertools.pairwise(line["acted"]))


def test_a_line_holds_what_the_head_of_the_file_promises(tmp_path):
    trajectories, rewards = worked_example()
    trajectories[0].sample = replace(SAMPLE, rule=str.endswith)  # it is code, and is not written
    write(trajectories, rewards, tmp_path)
    first, second, third = json_lines(tmp_path / FILE)
    documented = re.findall(r"^    ([a-z]+)  +", module.__doc__, re.MULTILINE)
    assert set(first) == {*documented, "prompt", "prompt_images"}
    assert first["sample"]["boxes"] == [list(TARGET)] and first["sample"]["answer"] == "checker"
    assert [x["look"] for x in (first, second, third)] == ["faithful", "unfaithful", "no tool"]
    assert [x["failed"] for x in (first, second, third)] == [0, 1, 0]
    named = re.search(r"sample    (.*?)\. Its bench", module.__doc__, re.DOTALL)[1]
    assert set(first["sample"]) <= set(re.findall(r"\w+", named)) and "rule" not in first["sample"]
    assert first["acted"] == [[False, 30], [True, 10], [False, 5], [True, 10], [False, 5]]
    crop = tmp_path / first["steps"][0]["observation"]["images"][0]
    assert Image.open(crop).size == (64, 64)


@pytest.mark.parametrize("field", ["reward", "sample", "steps", "acted"])
def test_a_line_that_lacks_a_field_is_named(field, tmp_path):
    write(*worked_example(), tmp_path)
    lines = json_lines(tmp_path / FILE)
    del lines[1][field]
    (tmp_path / FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match=f"jsonl, line 2: expected an .*KeyError: '{field}'"):
        list(read_trajectories(tmp_path / FILE)[0])


def test_a_file_is_read_as_far_as_one_asks_but_must_be_there(tmp_path):
    write(*worked_example(), tmp_path)
    trajectories, rewards = read_trajectories(tmp_path / FILE, first=2)
    assert [t.sample.id for t in trajectories] == ["one", "two"] and len(rewards) == 2
    with pytest.raises(FileNotFoundError, match="none/trajectories.jsonl"):
        read_trajectories(tmp_path / "none" / FILE)


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


FULL = dict(accuracy=0.9, tool_use=0.5, faithful=0.1, answer=0.9, tools=-0.2, format=0.0)


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("log", [
    [], [{"step": 1, "loss": 0.5}], [{"step": 1, "faithful": None}],
    [{"step": 1, "accuracy": 0.5, "answer": 0.5}, {"step": 2, "accuracy": None}],
    [{"step": step} | FULL for step in range(40)],
])  # fmt: skip
def test_curves_are_drawn_from_whatever_was_logged(log, tmp_path):
    curves(log, tmp_path / "curves.png")
    assert Image.open(tmp_path / "curves.png").size == (720, 600)


def test_every_curve_can_be_told_apart_without_colour():
    styles = list(zip(module.LINES, module.MARKERS))
    assert len(set(module.MARKERS)) == len(module.COLORS) == len(set(styles)) == len(styles)


# --- a benchmark's questions -----------------------------------------------------------------


def test_a_tsv_is_loaded_lazily_and_its_bad_row_is_named(tmp_path):
    Image.effect_noise((400, 400), 90).save(noise := io.BytesIO(), "PNG")
    row, broken = ROWS["hrbench, tsv"][1], base64.b64encode(noise.getvalue())[:100_000].decode()
    rows = [row | {"index": i, "image": cell} for i, cell in enumerate((row["image"], broken))]
    file = write_tsv(tmp_path / "hr.tsv", rows)
    samples = load_bench("hrbench4k", file)
    assert len(samples) == 2  # the broken picture was not looked at
    sample = samples[0]
    assert sample.image.size == (40, 30) and sample.kind == "search" and sample.rule is None
    assert (sample.source, sample.part, sample.cycle) == ("hrbench4k", "FCP", "3")
    with pytest.raises(ValueError, match=r"hrbench4k .*hr\.tsv\): row 1: "):
        samples[1]
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
        assert sample.boxes == ((10, 20, 40, 26), (0, 0, 2, 1)) and sample.answer == "A"
        assert sample.options == ("red (dark)", "blue") and sample.question == "What color?"
        assert (sample.source, sample.part) == ("vstar", "direct_attributes")
    (folder / "sa_1.json").unlink()
    with pytest.raises(ValueError, match=r"row 0, image: expected its boxes in .*sa_1\.json"):
        load_bench("vstar", tmp_path)


def test_the_summary_has_the_benchmarks_own_score_and_leaves_out_what_nobody_graded():
    own = dict(image=Image.new("RGB", (8, 8)), question="?", answer="1", kind="neutral")
    parts = enumerate(("a", "a", "b", "b"))
    trajectories = [Trajectory(Sample(str(i), **own, source="vlmblind", part=p)) for i, p in parts]
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


def run(policy, samples, out, scripts=SCRIPTS, judge=BoxJudge(), **more):
    with scripted(policy, scripts):
        return evaluate(policy, samples, judge, rules=COLD, out=out, wave=2, **more)[0]


@pytest.mark.parametrize("rollouts", [1, 2])
def test_waves_change_no_number_and_keep_nothing_in_memory(
    rollouts, policy, samples, tmp_path, asked
):
    """With sampling."""
    how = dict(rules=replace(RULES, max_new_tokens=8), rollouts=rollouts)
    whole = evaluate(policy, samples[:5], BoxJudge(), **how)
    for wave in (1, 2, 4):
        out = tmp_path / str(wave)
        parts = evaluate(policy, samples[:5], BoxJudge(), out=out, wave=wave, **how)
        assert parts[0] == whole[0] and parts[2] == whole[2] and isinstance(parts[1], Lazy)
        assert [t.ids for t in parts[1]] == [t.ids for t in whole[1]]
    assert asked == [s.id for s in samples[:5]] * 4


def test_a_killed_evaluation_goes_on_and_ends_as_if_it_had_not_been(
    policy, samples, tmp_path, asked
):
    """Whichever waves are there already, of one process or of several."""
    whole = run(policy, samples[:5], tmp_path / "whole")
    lines = (tmp_path / "whole" / FILE).read_bytes().splitlines(keepends=True)
    for kept in itertools.chain(*(itertools.combinations(range(3), n) for n in range(4))):
        cut = tmp_path / str(kept)
        shutil.copytree(tmp_path / "whole", cut)
        (cut / FILE).unlink()
        for wave in kept:
            file_of(cut / FILE, wave).write_bytes(b"".join(lines[2 * wave : 2 * wave + 2]))
        (cut / FILE).with_suffix(".part").write_bytes(lines[0][:40])  # the kill came amid a line
        asked.clear()
        left = [i for i in range(5) if i // 2 not in kept]
        assert run(policy, samples[:5], cut, [SCRIPTS[i] for i in left]) == whole
        assert asked == [samples[i].id for i in left]
        assert episodes_in(cut) == episodes_in(tmp_path / "whole")
        assert [path.name for path in cut.glob("traj*.jsonl")] == [FILE]
    file_of(cut / FILE, 0).write_bytes((cut / FILE).read_bytes())  # killed amid clearing
    asked.clear()
    assert run(policy, samples[:5], cut) == whole and asked == []  # all is there
    assert [path.name for path in cut.glob("traj*")] == [FILE]


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
    said = ["red", "scarlet", "navy"]
    scripts = [[f"<think>.</think><answer>{word}</answer>"] for word in said] + [[LOOK, ANSWER]]

    def run(judge, scripts=()):
        with scripted(policy, [*scripts]):
            return evaluate(policy, red, judge, rules=COLD, out=tmp_path, wave=1)

    down, back, again = Served(), Served(), Served()
    metrics, _, before = run(down, scripts)
    assert [reward.total for reward in before] == [1.0, None, None, None]
    assert metrics["ungraded"] == 3 and down.heard == tuple(s.question for s in (*red[1:], red[3]))
    asked.clear()
    back.up = True
    metrics, _, after = run(back)
    assert asked == [] and back.heard == down.heard
    assert [reward.answer for reward in after] == [1.0, 1.0, 0.0, 0.0] and "ungraded" not in metrics
    assert after[3].scores == (1.0,) and after[0] == before[0]
    assert run(again)[2] == after and again.heard == ()


def test_another_evaluation_does_not_mix_with_this_one(policy, samples, tmp_path):
    run(policy, samples[:3], tmp_path)
    for chosen, other in (((0, 3), {"seed": 1}), ((0, 3), {"rollouts": 2}), ((1, 4), {})):
        with pytest.raises(ValueError, match="from another evaluation .* give --out another"):
            run(policy, samples[slice(*chosen)], tmp_path, **other)
    for name, value in (("model", "another"), ("prompt", "training")):
        judge = type("BoxJudge", (BoxJudge,), {name: value})()
        with pytest.raises(module.Unusable, match="another judge"):
            run(policy, samples[:3], tmp_path, judge=judge)
    (tmp_path / FILE).rename(file_of(tmp_path / FILE, 1))  # one that was killed
    with pytest.raises(ValueError, match="jectories-1.jsonl is from another evaluation"):
        run(policy, samples[:3], tmp_path, seed=1)


def test_a_file_that_lost_lines_is_not_measured(policy, samples, tmp_path):
    run(policy, samples[:3], tmp_path)
    (tmp_path / FILE).write_text("".join((tmp_path / FILE).open().readlines()[:2]))
    with pytest.raises(ValueError, match="jsonl should have 3 lines, but has 2: delete it"):
        run(policy, samples[:3], tmp_path)


def test_other_weights_are_another_evaluation(policy, samples):
    other = copied(policy)
    assert fingerprint(other, samples, 1) == fingerprint(policy, samples, 1)
    next(other.model.parameters()).data.view(-1)[0] += 1
    assert fingerprint(other, samples, 1) != fingerprint(policy, samples, 1)


def the_second_is_late(words):
    play = module.play

    def late(*asked):
        time.sleep(3 * module.processes()[0])
        return play(*asked)

    module.play = late
    main(words)


def test_two_processes_play_what_one_plays_and_nothing_twice(tmp_path, monkeypatch):
    """With sampling. Of the three waves two are the first one's, which makes one file of all."""
    alone, both = tmp_path / "alone", tmp_path / "both"
    words = "--model tiny --limit 4 --wave 2 --turns 2 --max-new-tokens 8 --avg-at 2 --out".split()
    monkeypatch.chdir(ROOT)
    main([*words, str(alone)])
    codes, told = together(2, the_second_is_late, [*words, str(both)])
    assert codes == [0, 0] and " 0/2 [" in told and " 0/3 [" not in told, told
    assert episodes_in(alone) == episodes_in(both)
    assert [p.name for p in both.glob("*.jsonl")] == [FILE]
    stages = [json.loads((f / "summary.json").read_text())["stages"] for f in (alone, both)]
    assert stages[0] == stages[1] and stages[0]["toy"]["rates"]["accuracy"]["denominator"] == 8
    ids = Counter(line["sample"]["id"] for line in json_lines(both / FILE))
    assert len(ids) == 6 and set(ids.values()) == {2}


# --- the command line ------------------------------------------------------------------------


@pytest.fixture
def at_once(policy, monkeypatch):
    """The command line plays with the policy of the tests."""
    monkeypatch.setattr(module, "load_policy", lambda *_: policy)
    monkeypatch.setattr(module, "check_checkpoint", lambda _: None)


def test_without_arguments_it_shows_how_it_is_used(capsys):
    with pytest.raises(SystemExit) as ended:
        main([])
    printed = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0 and "usage" in printed and "(default: 10)" in printed
    for door in ("compare", "film", "study"):
        assert f"--{door} ... {door}.py: " in printed


@pytest.mark.parametrize("words, message", [
    ("--bench toy", "the following arguments are required: --model"),
    ("--model /no/such/folder", "no checkpoint in /no/such/folder: expected a folder"),
    ("--model m --data x", "drop --data x"),
    ("--model m --limit 0", "--limit: expected a finite number, least 1"),
    (f"--model {ROOT}/tiny --out {__file__}/x", "Not a directory"),
    ("--model m --avg-at 2 --temperature 0", "K greedy plays are one play"),
    ("--model m --perturb mask,nois", "perturbations are all, or some of identity, mask, noise"),
    ("--model m --perturb all --avg-at 2", "greedy plays: drop --avg-at and --temperature"),
    ("--model m --judge-url http://x/v1", "a judge needs both --judge-url and --judge-model"),
    (f"--model {ROOT}/tiny --bench vstar --data /no", "no data in /no"),
])  # fmt: skip
def test_a_wrong_command_is_explained_before_any_model_loads(
    words, message, monkeypatch, tmp_path, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", None)
    with pytest.raises(SystemExit) as stop:
        main(words.split())
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_a_benchmark_run_leaves_a_table_a_summary_and_a_page(
    policy, at_once, monkeypatch, tmp_path, capsys
):
    asked, out = {}, tmp_path / "deep" / "out"
    monkeypatch.setattr(module, "evaluate", lambda *a, **k: asked.update(k) or evaluate(*a, **k))
    words = "--model m --limit 2 --turns 2 --temperature 0.5 --seed 7 --max-new-tokens 64"
    with scripted(policy, [[LOOK, ANSWER], [SHORT], [ANSWER]]):
        main([*words.split(), "--out", str(out)])
    told = dict(turns=2, temperature=0.5, max_new_tokens=64, max_length=2048)
    assert asked["rules"] == replace(module.GREEDY, **told) and asked["seed"] == 7
    assert re.search(r"^questions +2$", capsys.readouterr().out, re.MULTILINE)
    summary = json.loads((out / "summary.json").read_text())
    assert set(summary) == {"config", "seconds", "stages"} and set(summary["stages"]) == {"toy"}
    assert summary["config"]["precision"] == "torch.float32"
    assert 0 <= summary["stages"]["toy"]["ood_accuracy"] <= 1
    assert "of 3 episodes" in (out / "report.html").read_text()


def test_what_an_evaluation_refuses_is_told_in_a_sentence(at_once, tmp_path, capsys):
    words = f"--model m --limit 2 --max-new-tokens 2 --max-length 5 --out {tmp_path}".split()
    for message in ("--max-length 5 leaves", "another evaluation"):
        with pytest.raises(SystemExit):
            main(words)
        assert message in capsys.readouterr().err
        write(*worked_example(), tmp_path)


def test_a_benchmark_is_played_from_its_file(policy, at_once, tmp_path, capsys):
    row = ROWS["hrbench, tsv"][1] | {"answer": "B"}
    rows = [row | {"index": i, "cycle_category": i % 4, "category": "single" if i < 4 else "cross"}
            for i in range(8)]  # fmt: skip
    file, out = write_tsv(tmp_path / "hr.tsv", rows), tmp_path / "out"
    words = f"--model m --bench hrbench4k --data {file} --max-new-tokens 32 --max-length 2048"
    said = [["<answer>B</answer>"], ["<answer>red</answer>"]] * 2 + [["<answer>(B)</answer>"]] * 4
    with scripted(policy, said):
        main([*words.split(), "--out", str(out)])
    printed = capsys.readouterr().out
    stage = json.loads((out / "summary.json").read_text())["stages"]["hrbench4k"]
    assert stage["score"] == 0.75 and stage["parts"] == {"FCP": 1.0, "FSP": 0.5}
    assert all(word in printed for word in ("benchmark score", "no_verdict", "decorative"))
    assert len(list((out / "images").iterdir())) == 1  # eight rows share it
    assert (out / "report.html").read_text().count("<article") == 8


def test_lies_and_ablations_are_printed_and_kept(policy, at_once, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "load_toy", lambda *_: toy_questions(2, "lies", neutral_share=0.0))
    words = f"--model m --turns 2 --max-new-tokens 40 --out {tmp_path}".split()
    with scripted(policy, [[LOOK, ANSWER], [ANSWER], [ANSWER, ANSWER]]):
        main([*words, "--perturb", "mask,empty", "--ablation"])
    printed, file = capsys.readouterr().out, tmp_path / "studies.json"
    found = json.loads(file.read_text())
    assert set(found) == {"run", "tool_use", "perturb", "ablation", "evidence"}
    main(words)  # the same evaluation without studies
    assert json.loads(file.read_text()) == found
    file.write_text(json.dumps(found | {"run": "of another"}))
    main(words)
    assert set(json.loads(file.read_text())) == {"run", "tool_use"}
    assert set(found["perturb"]["toy"]) == {"mask", "empty"}
    assert found["perturb"]["toy"]["mask"]["possible"]["denominator"] == 1  # one of two looked
    assert found["ablation"]["with tools"]["denominator"] == 2
    for told in ("after a hit", "tool gain", "evidence value", "decorative crops"):
        assert told in printed


@pytest.mark.parametrize("bench, boxed, url, kinds", [
    ("toy", True, None, (BoxJudge, None)),
    ("vstar", True, None, (BoxJudge, None)),
    ("vstar", True, "http://x/v1", (BoxJudge, ChatJudge)),
    ("vstar", False, "http://x/v1", (ChatJudge, None)),  # its table has no boxes
    ("vstar", False, None, (BoxJudge, None)),
    ("hrbench8k", False, "http://x/v1", (ChatJudge, None)),
    ("charxiv", False, "http://x/v1", (ChatJudge, None)),
    ("vlmblind", False, "http://x/v1", (BoxJudge, None)),
])  # fmt: skip
def test_boxes_judge_where_they_are_labelled_and_a_server_where_not(
    bench, boxed, url, kinds, tmp_path, capsys
):
    flags = dict(judge_url=url, judge_model="m", judge_tokens=99, max_pixels=5_000_000)
    options = module.Options(model="m", bench=bench, out=tmp_path, **flags)
    judge, second = judges_of(options, boxed)
    assert (type(judge), second and type(second)) == kinds
    told = "nobody says what is faithful" in capsys.readouterr().out
    assert told == (bench == "vstar" and not boxed and not url)
    if bench == "vstar" and boxed:
        assert judge.visible == 0.5
    served = second or judge
    if isinstance(served, ChatJudge):
        assert served.options["max_tokens"] == 99 and served.max_pixels == 5_000_000
        assert served.prompt == "evaluation"
