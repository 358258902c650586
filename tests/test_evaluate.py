"""python -m pytest tests/test_evaluate.py      play, keep, go on, measure: evaluate.py"""

import base64
import io
import itertools
import json
import random
import re
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import ANSWER, DRAWN, GOOD, IMAGE, LOOK, RULES, SEARCH, SHORT, TYPO
from conftest import copied, json_lines, scripted, together
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import evaluate as module
from data import USUAL_TEXTURE, Sample, toy_questions
from evaluate import curves, evaluate, judges_of, load_bench, load_toy, main, measure
from evaluate import read_trajectories, table, write_trajectories
from kit.records import file_of
from kit.tables import Lazy
from rewards import BoxJudge, ChatJudge, Lambdas, Reward, hand_made, tapo
from rollout import Trajectory, Turn
from sandbox import Observation
from test_benchmarks import ROWS, write_tsv

ROOT = Path(module.__file__).parent
FILE = "trajectories.jsonl"
COLD = replace(RULES, temperature=0.0)


def write(trajectories, rewards, folder):
    write_trajectories(folder / FILE, trajectories, rewards)


def paid(*plays):
    """Trajectories, and what TAPO pays for them."""
    return plays, tapo(plays, BoxJudge(), Lambdas(), random.Random(0))


def worked_example():
    """One of each: a good look, an error and a picture that is no crop, and a guess."""
    two = hand_made(replace(SEARCH, id="two"), TYPO, DRAWN, answer=None)
    return paid(hand_made(SEARCH, GOOD, answer="checker"), two, hand_made(SEARCH, answer="checker"))


@pytest.fixture(autouse=True)
def asked(monkeypatch):
    """The ids of the samples that were played, in order."""
    ids, play = [], module.play

    def noting(policy, samples, *more):
        ids.extend(sample.id for sample in samples)
        return play(policy, samples, *more)

    monkeypatch.setattr(module, "play", noting)
    return ids


# --- play and measure ------------------------------------------------------------------------
def test_the_toy_has_half_as_many_questions_against_its_prior_and_repeats_exactly():
    samples, again, other = load_toy(n=12, seed=3), load_toy(n=12, seed=3), load_toy(n=12, seed=4)
    against = [s for s in samples if s.against_prior]
    assert len(against) == 6 and len({s.id for s in samples}) == len(samples) == 18
    assert all(s.answer != USUAL_TEXTURE[s.question.split()[5]] for s in against)
    assert [s.answer for s in samples] == [s.answer for s in again] != [s.answer for s in other]
    for s in load_toy(n=12, seed=3, shortcut=0.0):
        assert s.kind == "neutral" or s.answer != USUAL_TEXTURE[s.question.split()[5]]


@pytest.mark.parametrize("rollouts", [1, 2])
def test_sampling_repeats_with_its_seed_and_leaves_the_random_numbers_of_training_alone(
    rollouts, policy, samples, tmp_path, asked
):
    """In waves of any size: those keep nothing in memory."""
    how = dict(rules=replace(RULES, max_new_tokens=8), rollouts=rollouts)
    with pytest.raises(ValueError, match="at least one sample"):
        evaluate(policy, [], BoxJudge(), **how)
    before = torch.random.get_rng_state()
    whole = evaluate(policy, samples[:5], BoxJudge(), **how)
    for wave in (1, 2, 4):
        out = tmp_path / str(wave)
        parts = evaluate(policy, samples[:5], BoxJudge(), out=out, wave=wave, **how)
        assert parts[0] == whole[0] and parts[2] == whole[2] and isinstance(parts[1], Lazy)
        assert [t.ids for t in parts[1]] == [t.ids for t in whole[1]]
    other = evaluate(policy, samples[:1], BoxJudge(), seed=1, **how)[1][0]
    assert other.sample == whole[1][0].sample and other.ids != whole[1][0].ids
    assert asked == [s.id for s in samples[:5]] * 4 + [samples[0].id]
    assert torch.equal(before, torch.random.get_rng_state())


def test_questions_against_the_prior_count_for_one_number_only():
    usual, unusual = (
        (hand_made(sample, GOOD, answer="checker"), hand_made(sample, answer="diagonal"))
        for sample in (SEARCH, replace(SEARCH, against_prior=True))
    )
    metrics = measure(*paid(*usual, *unusual, *unusual[1:] * 2))
    assert metrics["n"] == 2 and metrics["accuracy"] == metrics["faithful"] == 0.5
    assert metrics["ood_accuracy"] == 0.25 and metrics["ood_given_faithful"] == 1.0
    assert "ood_accuracy" not in measure(*paid(*usual))


# --- the file of episodes --------------------------------------------------------------------

WORDS = st.text(max_size=9) | st.just("\u2028 \ud800 \x00 ' \" </script>")  # a lone surrogate too
LISTS, MAYBE = st.lists(WORDS, max_size=2), st.none() | WORDS
BOXES = st.sampled_from([None, (64, 128, 128, 192), (0, 0, 256, 256)])


@st.composite
def episodes(draw):
    """A trajectory with any texts, any looks and any tokens, and its reward."""
    fields = {name: draw(WORDS) for name in ("question", "answer", "source", "part", "cycle")}
    fields |= dict(options=tuple(draw(LISTS)), against_prior=draw(st.booleans()))
    sample = replace(SEARCH, **fields, boxes=draw(st.sampled_from([(), SEARCH.boxes])))
    turns, scores, acted = [], [], draw(st.lists(st.booleans(), max_size=9))
    for code in draw(st.lists(MAYBE, max_size=3)):
        boxes = draw(st.lists(BOXES, max_size=2))
        shown = dict(images=[IMAGE.crop(box or (0, 0, 9, 9)) for box in boxes], boxes=boxes)
        shown |= dict(text=draw(WORDS), sources=["crop" if box else "figure" for box in boxes])
        shown |= dict(error=draw(MAYBE), environment=draw(MAYBE), notes=draw(LISTS), seconds=0.25)
        seen = None if code is None else Observation(**shown)
        turns.append(Turn(draw(WORDS), code, seen, start=3, end=9))
        scores += [draw(st.sampled_from([None, -1.0, 0.5, 1.0]))] * (code is not None)
    how = dict(ids=[7] * len(acted), prompt=1, answer=draw(MAYBE), ended="answered")
    right = draw(st.sampled_from([None, 0.0, 1.0]))
    reward = Reward(right, 0.5, -1.0, tuple(scores), right)
    return Trajectory(sample, acted=acted, turns=turns, **how), reward


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
    trajectories[0].sample = replace(SEARCH, rule=str.endswith)  # it is code, and is not written
    write(trajectories, rewards, tmp_path)
    first, second, third = json_lines(tmp_path / FILE)
    documented = re.findall(r"^    ([a-z]+)  +", module.__doc__, re.MULTILINE)
    assert set(first) == {*documented, "prompt", "prompt_images"}
    assert first["sample"]["boxes"] == [[76, 76, 120, 120]]
    assert [x["look"] for x in (first, second, third)] == ["faithful", "unfaithful", "no tool"]
    assert [x["failed"] for x in (first, second, third)] == [0, 1, 0]
    named = re.search(r"sample    (.*?)\. Its bench", module.__doc__, re.DOTALL)[1]
    assert set(first["sample"]) <= set(re.findall(r"\w+", named)) and "rule" not in first["sample"]
    crop = tmp_path / first["steps"][0]["observation"]["images"][0]
    assert Image.open(crop).size == (64, 64)


@pytest.mark.parametrize("field", ["reward", "sample", "steps", "acted"])
def test_a_file_is_read_as_far_as_one_asks_and_a_line_that_lacks_a_field_is_named(field, tmp_path):
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}/trajectories.jsonl"):
        read_trajectories(tmp_path / FILE)
    write(*worked_example(), tmp_path)
    trajectories, rewards = read_trajectories(tmp_path / FILE, first=2)
    assert [t.sample.id for t in trajectories] == ["s1", "two"] and len(rewards) == 2
    lines = json_lines(tmp_path / FILE)
    del lines[1][field]
    (tmp_path / FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match=f"jsonl, line 2: expected an .*KeyError: '{field}'"):
        list(read_trajectories(tmp_path / FILE)[0])


# --- table and figures -----------------------------------------------------------------------
def test_the_table_is_aligned_and_leaves_empty_what_was_not_measured():
    sft = {"n": 256, "accuracy": 0.9571, "faithful": 0.33, "ood_accuracy": None}
    tapo = {"n": 256, "accuracy": 1.0, "ood_accuracy": 0.68, "no such row": 1.0}
    assert table({"SFT": sft, "TAPO": tapo}).splitlines() == [
        "                         SFT   TAPO",
        "questions                256    256",
        "accuracy               0.957  1.000",
        "out-of-prior accuracy         0.680",
        "faithful               0.330",
    ]
    assert table({}) == ""


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("log", [
    [], [{"step": 1, "loss": 0.5}], [{"step": 1, "faithful": None}],
    [{"step": 1, "accuracy": 0.5, "answer": 0.5}, {"step": 2, "accuracy": None}],
    [{"step": step, "tool_use": 0.5, "faithful": 0.1, "tools": -0.2} for step in range(40)],
])  # fmt: skip
def test_curves_are_drawn_from_whatever_was_logged(log, tmp_path):
    curves(log, tmp_path / "curves.png")
    assert Image.open(tmp_path / "curves.png").size == (720, 600)
    assert len({*module.MARKERS}) == len({*module.COLORS}) == 7  # told apart without colour, too


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
        return evaluate(policy, samples, judge, out=out, **{"rules": COLD, "wave": 2} | more)[0]


def test_a_killed_evaluation_goes_on_and_ends_as_if_it_had_not_been(
    policy, samples, tmp_path, asked
):
    """Whichever waves are there already, of one process or of several."""
    whole = run(policy, samples[:5], tmp_path / "whole")
    lines = (tmp_path / "whole" / FILE).read_bytes().splitlines(keepends=True)
    for kept in ((), (1,), (0, 2), (0, 1, 2)):
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
    red = [replace(s, options=(), answer="red", question=f"{s.id}?") for s in samples[:4]]
    red[3] = replace(red[3], kind="search", boxes=())
    said = ["red", "scarlet", "navy"]
    scripts = [[f"<think>.</think><answer>{word}</answer>"] for word in said] + [[LOOK, ANSWER]]

    def run(up, scripts=()):
        """(metrics, rewards, which answers a judge was asked about, about how many pictures)"""
        judge = mock.Mock(spec=["same_answer"], return_value=1.0 if up else None)
        judge.same_answer.side_effect = lambda *texts: texts[2] == "scarlet" if up else None
        with scripted(policy, [*scripts]):
            metrics, _, rewards = evaluate(policy, red, judge, rules=COLD, out=tmp_path, wave=1)
        heard = [call.args[0] for call in judge.same_answer.call_args_list]
        return metrics, rewards, heard, judge.call_count

    missing = [[s.question for s in red[1:]], 1]
    metrics, before, *heard = run(False, scripts)
    assert [reward.total for reward in before] == [1.0, None, None, None]
    assert metrics["ungraded"] == 3 and heard == missing
    asked.clear()
    metrics, after, *heard = run(True)
    assert [reward.answer for reward in after] == [1.0, 1.0, 0.0, 0.0] and "ungraded" not in metrics
    assert asked == [] and heard == missing
    assert after[3].scores == (1.0,) and after[0] == before[0]
    assert run(True)[1:] == (after, [], 0)


def test_another_evaluation_does_not_mix_with_this_one(policy, samples, tmp_path, asked):
    """Nor is a file measured that lost lines. A copy of the policy is no other one."""
    how, other = dict(policy=policy, samples=samples[:3], out=tmp_path), copied(policy)
    run(**how)
    asked.clear()
    run(**how | {"policy": other})
    next(other.model.parameters()).data.view(-1)[0] += 1
    judges = [type("BoxJudge", (BoxJudge,), {name: "?"})() for name in ("model", "prompt")]
    changes = [dict(policy=other), dict(samples=samples[1:4]), dict(seed=1), dict(rollouts=2),
               dict(wave=1), dict(rules=replace(COLD, turns=3)), dict(samples=samples[:4:2])]
    for change in (*changes, *(dict(judge=judge) for judge in judges)):
        with pytest.raises(module.Unusable, match="from another evaluation .*another judge"):
            run(**how | change)
    (tmp_path / FILE).write_text("".join((tmp_path / FILE).open().readlines()[:2]))
    with pytest.raises(ValueError, match="jsonl should have 3 lines, but has 2: delete it"):
        run(**how)
    assert asked == []


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
    assert len(episodes_in(both)) == 12


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
    others = vars(module.Options(model="m"))
    assert [others[name] for name in module.PRESETS["toy"]] == [None, 1024, 16384, 32]
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
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    assert message in capsys.readouterr().err


def test_a_benchmark_run_leaves_a_table_a_summary_and_a_page(
    policy, at_once, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(module, "evaluate", asked := mock.Mock(side_effect=evaluate))
    monkeypatch.setattr(module, "load_policy", loaded := mock.Mock(return_value=policy))
    row = ROWS["hrbench, tsv"][1] | {"answer": "B"}
    rows = [row | {"index": i, "cycle_category": i % 4, "category": "single" if i < 4 else "cross"}
            for i in range(8)]  # fmt: skip
    file, out = write_tsv(tmp_path / "hr.tsv", rows), tmp_path / "deep" / "out"
    words = f"--model m --bench hrbench4k --data {file} --max-new-tokens 32 --max-length 2048"
    words += f" --turns 2 --temperature 0.5 --seed 7 --max-pixels 9 --out {out}"
    said = [["<answer>B</answer>"], ["<answer>red</answer>"]] * 2 + [["<answer>(B)</answer>"]] * 4
    with scripted(policy, said):
        main(words.split())
    told = dict(turns=2, temperature=0.5, max_new_tokens=32, max_length=2048)
    assert asked.call_args.kwargs["rules"] == replace(module.GREEDY, **told)
    assert asked.call_args.kwargs["seed"] == 7 and loaded.call_args.args[2] == 9
    printed, summary = capsys.readouterr().out, json.loads((out / "summary.json").read_text())
    stage = summary["stages"]["hrbench4k"]
    assert stage["score"] == 0.75 and stage["parts"] == {"FCP": 1.0, "FSP": 0.5}
    assert summary["config"]["precision"] == "torch.float32"
    assert all(word in printed for word in ("benchmark score", "no_verdict", "decorative", "FSP"))
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
    short = f"--max-length 5 --out {tmp_path}/other"
    for more, message in ("--seed 1", "another evaluation"), (short, "--max-length 5 leaves"):
        with pytest.raises(SystemExit, match="2"):
            main([*words, *more.split()])
        assert message in capsys.readouterr().err
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
    judges = judges_of(module.Options(model="m", bench=bench, out=tmp_path, **flags), boxed)
    assert tuple(judge and type(judge) for judge in judges) == kinds
    told = "nobody says what is faithful" in capsys.readouterr().out
    assert told == ((bench, boxed, url) == ("vstar", False, None))
    for judge in judges:
        if isinstance(judge, ChatJudge):
            assert (judge.options["max_tokens"], judge.max_pixels) == (99, 5_000_000)
            assert (judge.prompt, judge.cache) == ("evaluation", tmp_path / "verdicts")
        elif judge:
            assert judge.visible == (0.9 if bench == "toy" else 0.5)
