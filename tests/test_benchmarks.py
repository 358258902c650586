"""python -m pytest tests/test_benchmarks.py      about 15 s, and 25 s more for the two processes"""

import base64
import csv
import io
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

import pytest
from conftest import ANSWER, LOOK, RULES, SHORT, scripted
from PIL import Image

import evaluate as module
from beyond.film import film
from data import Sample, toy_questions
from evaluate import Episodes, by_rule, evaluate, fingerprint, judges_of, load_bench, main, measure
from kit.benchmarks import BENCHES, picture, published
from kit.usable import Bad
from rewards import BoxJudge, ChatJudge, Reward
from rollout import Trajectory


def encoded(color="red", size=(40, 30)):
    Image.new("RGB", size, color).save(png := io.BytesIO(), "PNG")
    return base64.b64encode(png.getvalue()).decode()


# --- the rows of every schema ----------------------------------------------------------------

IMAGE = encoded()
CHOICE = {"image": IMAGE, "question": "Which one?", "A": "red", "B": "blue", "C": "green", "D": ""}
LABELS = {
    "vstar, tsv": ("vstar", CHOICE | {
        "index": "7", "answer": "B", "category": "relative_position"}),
    "hrbench, tsv": ("hrbench4k", CHOICE | {"index": "12", "answer": "C", "category": "cross",
                                            "cycle_category": "3"}),
    "mme, tsv": ("mme-realworld-lite", CHOICE | {
        "index": "5", "answer": "A", "category": "Perception/OCR", "l2-category": "phone"}),
    "mme, parquet": ("mme-realworld-lite", {
        "index": 5, "bytes": IMAGE, "question": "Which one?", "answer": "B",
        "multi-choice options": ["(A) red", "(B) blue (dark)"], "category": "Reasoning/Map"}),
    "mme, json": ("mme-realworld-lite", {
        "Question_id": "x/1", "Image": IMAGE, "Text": "Which one?", "Ground truth": "A",
        "Answer choices": ["(A) red", "(B) blue"], "Task": "Perception", "Category": "OCR"}),
    "vlmblind, tsv": ("vlmblind", {
        "index": "0", "image": IMAGE, "question": "How many? e.g. {3}", "answers": "4",
        "task": "Nested Squares"}),
    "vlmblind, hub": ("vlmblind", {
        "image": {"bytes": b"x", "path": None}, "prompt": "How many? e.g. {3}",
        "groundtruth": "4", "task": "Nested Squares", "metadata": "{}"}),
    "mathvista, choice": ("mathvista", {
        "pid": "1", "decoded_image": IMAGE, "image": "images/1.jpg", "question": "Larger?",
        "choices": ["yes", "no"], "answer": "no", "question_type": "multi_choice",
        "answer_type": "text", "unit": None, "precision": None,
        "metadata": {"task": "figure question answering"}}),
    "mathvista, float": ("mathvista", {
        "pid": "2", "image": IMAGE, "question": "How long?", "choices": None, "answer": "1.20",
        "question_type": "free_form", "answer_type": "float", "unit": "m", "precision": 1.0,
        "metadata": {"task": "geometry problem solving"}}),
    "mathvista, tsv": ("mathvista", {
        "index": "3", "image": IMAGE, "question": "Hint: ...\nLarger?\nChoices:\n(A) yes\n(B) no",
        "choices": "['yes', 'no']", "answer": "no", "question_type": "multi_choice",
        "answer_type": "text", "task": "textbook question answering"}),
    "mathverse, choice": ("mathverse", {
        "sample_index": "9", "image": IMAGE, "question": "BC is ()\nChoices:\nA:2\nB:2√{3}",
        "answer": "B", "question_type": "multi-choice", "problem_version": "Text Lite"}),
    "mathverse, vision only": ("mathverse", {
        "sample_index": "10", "image": IMAGE, "question": "", "query_wo": "See the image.",
        "answer": "14", "question_type": "free-form", "problem_version": "Vision Only"}),
    "mathverse, tsv": ("mathverse", {
        "index": "11", "image": IMAGE, "question": "x?", "answer": "y=2",
        "metadata": "{'problem_version': 'Vision Dominant'}"}),
    "mathvision": ("mathvision", {
        "id": "4", "image": "images/4.jpg", "decoded_image": IMAGE, "question": "<image1>What?",
        "options": [], "answer": "\\frac{1}{2}", "subject": "algebra", "level": 1}),
    "mathvision, tsv": ("mathvision", {
        "index": "5", "image": IMAGE, "question": "Which?", "choices": "['A', 'B', 'C']",
        "answer": "C", "category": "counting"}),
    "charxiv, hub": ("charxiv", {
        "image": IMAGE, "descriptive_q1": 7, "descriptive_a1": "60", "reasoning_q": "Which falls?",
        "reasoning_a": "the red one", "reasoning_a_type": 1}),
    "charxiv, tsv": ("charxiv", {
        "index": "1", "image": IMAGE, "question": "How many lines?", "answer": "5", "qid": "10",
        "grading_query": "..."}),
    "mmmu, choice": ("mmmu", {
        "id": "validation_Art_Theory_3", "image_1": IMAGE, "image_2": encoded("blue", (20, 50)),
        "image_3": None, "question": "<image 1> or <image 2>?", "options": "['first', 'second']",
        "answer": "B", "question_type": "multiple-choice"}),
    "mmmu, open": ("mmmu", {
        "id": "validation_Math_1", "image_1": IMAGE, "question": "<image 1> How many?",
        "options": "[]", "answer": "['8', 'eight']", "question_type": "open"}),
    "mmmu, tsv": ("mmmu", CHOICE | {
        "index": "1", "answer": "A", "category": "Chemistry", "split": "validation"}),
}  # fmt: skip

WORDS = {  # id, question, options, answer, part
    "vstar, tsv": ("7", "Which one?", ("red", "blue", "green"), "B", "relative_position"),
    "hrbench, tsv": ("12", "Which one?", ("red", "blue", "green"), "C", "FCP"),
    "mme, tsv": ("5", "Which one?", ("red", "blue", "green"), "A", "Perception"),
    "mme, parquet": ("5", "Which one?", ("red", "blue (dark)"), "B", "Reasoning"),
    "mme, json": ("x/1", "Which one?", ("red", "blue"), "A", "Perception"),
    "vlmblind, tsv": ("0", "How many? e.g. {3}", (), "4", "Nested Squares"),
    "vlmblind, hub": ("", "How many? e.g. {3}", (), "4", "Nested Squares"),
    "mathvista, choice": ("1", "Larger?", ("yes", "no"), "no", "figure question answering"),
    "mathvista, float": ("2", "How long? (Unit: m)\nAnswer with a number with 1 decimals.", (),
                         "1.20", "geometry problem solving"),
    "mathvista, tsv": ("3", "Hint: ...\nLarger?", ("yes", "no"), "no",
                       "textbook question answering"),
    "mathverse, choice": ("9", "BC is ()", ("2", "2√{3}"), "B", "Text Lite"),
    "mathverse, vision only": ("10", "See the image.", (), "14", "Vision Only"),
    "mathverse, tsv": ("11", "x?", (), "y=2", "Vision Dominant"),
    "mathvision": ("4", "What?", (), "\\frac{1}{2}", "algebra"),
    "mathvision, tsv": ("5", "Which?", ("A", "B", "C"), "C", "counting"),
    "charxiv, hub": ("", "Which falls?", (), "the red one", "reasoning"),
    "charxiv, tsv": ("1", "How many lines?", (), "5", "descriptive"),
    "mmmu, choice": (
        "validation_Art_Theory_3",
        "[image 1] or [image 2]?\n(The images stand below each other, image 1 at the top.)",
        ("first", "second"), "B", "Art_Theory"),
    "mmmu, open": ("validation_Math_1", "[image 1] How many?", (), "['8', 'eight']", "Math"),
    "mmmu, tsv": ("1", "Which one?", ("red", "blue", "green"), "A", "Chemistry"),
}  # fmt: skip


@pytest.mark.parametrize("name", LABELS)
def test_a_row_of_each_published_schema_becomes_a_question(name):
    bench, row = LABELS[name]
    words = BENCHES[bench].read(row)
    got = tuple(words[field] for field in ("id", "question", "options", "answer", "part"))
    assert got == WORDS[name]


def test_every_benchmark_of_the_paper_has_a_row_here():
    assert {bench for bench, _ in LABELS.values()} | {"hrbench8k"} == set(BENCHES)


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("vstar, tsv", {"answer": "E"}, "'E' is neither a letter nor a text of"),
        ("vstar, tsv", {"A": "", "B": "", "C": ""}, "expected options in columns A, B"),
        ("vstar, tsv", {"A": "red", "B": "", "C": "green"}, "without a gap, got A, C"),
        ("vstar, tsv", {"text": "What?"}, r"expected a question and options \(A\)"),
        ("hrbench, tsv", {"category": "triple"}, "expected single or cross, got 'triple'"),
        ("hrbench, tsv", {"cycle_category": ""}, "something in column cycle_category"),
        ("mme, parquet", {"multi-choice options": None}, "options or Answer choices"),
        ("mathvista, tsv", {"choices": "[yes"}, r"expected a list or dict, got '\[yes'"),
        ("mathverse, tsv", {"metadata": None}, "something in column problem_version"),
        ("charxiv, hub", {"reasoning_a": None}, "something in column answer or reasoning_a"),
        ("mmmu, open", {"id": ""}, "something in column category or id"),
    ],
)
def test_a_row_that_does_not_fit_says_what_is_missing(name, change, message):
    bench, row = LABELS[name]
    with pytest.raises(Bad, match=message):
        BENCHES[bench].read(row | change)


def write_tsv(path, rows):
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0], delimiter="\t")
        writer.writeheader(), writer.writerows(rows)
    return path


def test_a_tsv_is_loaded_lazily_and_its_bad_row_is_named(tmp_path):
    row = LABELS["hrbench, tsv"][1]
    rows = [row | {"index": i, "image": image} for i, image in enumerate((IMAGE, "no image"))]
    samples, rules = load_bench("hrbench4k", write_tsv(tmp_path / "hr.tsv", rows))
    assert len(samples) == 2 and rules == [None, None]  # the broken picture was not looked at
    sample = samples[0]
    assert sample.image.size == (40, 30) and sample.kind == "search"
    assert (sample.id, sample.source) == ("hrbench4k-0-0", "hrbench4k/FCP/3")
    with pytest.raises(ValueError, match=r"hrbench4k .*hr\.tsv\): row 1: "):
        samples[1]
    rows[1]["answer"] = "Z"
    file = write_tsv(tmp_path / "hr2.tsv", rows)
    with pytest.raises(ValueError, match=r"hr2\.tsv\): row 1, answer: 'Z' is neither"):
        load_bench("hrbench4k", file)
    assert len(load_bench("hrbench4k", file, first=1)[0]) == 1


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
        sample = load_bench("vstar", where)[0][0]
        assert sample.boxes == ((10, 20, 40, 26), (0, 0, 2, 1))
        assert sample.options == ("red (dark)", "blue") and sample.question == "What color?"
        assert sample.source == "vstar/direct_attributes" and sample.answer == "A"
    (folder / "sa_1.json").unlink()
    with pytest.raises(ValueError, match=r"row 0, image: expected its boxes in .*sa_1\.json"):
        load_bench("vstar", tmp_path)


def test_several_images_become_one():
    row = LABELS["mmmu, choice"][1]
    sheet = picture(row, Path())
    assert sheet.size == (40, 30 + 16 + 50)
    assert [sheet.getpixel((5, y)) for y in (5, 38, 60)] == [
        (255, 0, 0), (255, 255, 255), (0, 0, 255)]  # fmt: skip
    assert picture({"image": str([row["image_1"], row["image_2"]])}, Path()).size == sheet.size
    assert picture({"image": "images/1.jpg", "decoded_image": IMAGE}, Path()).size == (40, 30)


# --- the rules of what is right --------------------------------------------------------------


@pytest.mark.parametrize(
    "task, answer, reference, right",
    [
        ("Subway Connections", "{3}", "3", True),
        ("Subway Connections", "3", "3", True),
        ("Subway Connections", "There are {2} of 3", "3", False),
        ("Circled Letter", "{q}", "q", True),
        ("Circled Letter", "{Q}", "q", False),
        ("Line Plot Intersections", "{10}", "1", False),
        ("Touching Circles", "no.", "No", True),
        ("Touching Circles", "Yes", "No", False),
        ("Olympic Counting - Circles", "I count 5 circles", "5", True),
        ("Counting Grid - Word Grids", "rows={4} columns={5}", "4,5", True),
        ("Counting Grid - Word Grids", "columns={5}, rows={4}", "4,5", True),
        ("Counting Grid - Blank Grids", "(4, 5)", "4,5", True),
        ("Counting Grid - Blank Grids", "(5, 4)", "4,5", False),
        ("Counting Grid - Blank Grids", "4", "4,5", False),
    ],
)
def test_vlms_are_blind_has_a_rule_for_each_task(task, answer, reference, right):
    row = LABELS["vlmblind, tsv"][1] | {"task": task, "answers": reference}
    assert BENCHES["vlmblind"].read(row)["rule"](answer, reference) is right


@pytest.mark.parametrize(
    "form, precision, answer, reference, right",
    [
        ("float", 1.0, "1.24", "1.2", True),
        ("float", 1.0, "1.26 m", "1.2", False),
        ("float", 2.0, "0.52", "0.5", False),
        ("float", None, "0.52", "0.5", True),  # a TSV without precision: that of the reference
        ("integer", None, "14.0", "14", True),
        ("integer", None, "15", "14", False),
        ("integer", None, "many", "14", False),
        ("integer", None, "9" * 400, "14", False),  # more than a float holds
        ("list", None, "[2007,2008]", "[2007, 2008]", True),
        ("list", None, "2007 to 2008", "[2007, 2008]", False),
        ("list", None, "{[2007]: 2008}", "[2007, 2008]", False),  # no key of a dict
    ],
)
def test_mathvista_rounds_as_it_asks_for(form, precision, answer, reference, right):
    row = LABELS["mathvista, float"][1]
    row = row | {"answer_type": form, "precision": precision, "answer": reference}
    assert BENCHES["mathvista"].read(row)["rule"](answer, reference) is right


def test_one_of_several_references_is_enough():
    rule = BENCHES["mmmu"].read(LABELS["mmmu, open"][1])["rule"]
    assert rule("Eight.", "['8', 'eight']") and not rule("9", "['8', 'eight']")
    assert rule("The answer is eight", "['8', 'eight']")


def test_a_rule_of_its_own_replaces_the_answer_and_the_total():
    sample = Sample("x", Image.new("RGB", (8, 8)), "?", "5")
    t = Trajectory(sample, answer="{5}", ended="answered")
    before = Reward(0.0, 0.5, 0.0, (), total=0.1)
    assert by_rule(t, before, lambda answer, reference: answer == f"{{{reference}}}") == replace(
        before, answer=1.0, total=1.1
    )
    assert by_rule(t, before, None) == before
    t.answer = "5" * 2000
    assert by_rule(t, before, lambda *_: True).answer == 0.0
    t.answer, t.ended = None, "turns"
    assert by_rule(t, before, lambda *_: True) == before


# --- the published scores --------------------------------------------------------------------


def test_hrbench_is_the_mean_over_its_cycles():
    table = {"FSP": ("1010", "1111"), "FCP": ("0001", "0000")}  # two questions each, four cycles
    sources, right = [], []
    for part, questions in table.items():
        for question in questions:
            for cycle, correct in enumerate(question):
                sources.append(f"hrbench4k/{part}/{cycle}")
                right.append(correct == "1")
    assert published(sources, right) == {"FCP": 1 / 8, "FSP": 6 / 8, "all": 7 / 16}
    # A cycle with fewer rows weighs as much as any other: a mean of means.
    assert published(sources[:2] + sources[4:5], [1, 0, 0])["all"] == pytest.approx((0.5 + 0) / 2)


def test_vlms_are_blind_is_the_mean_of_its_tasks():
    sources = ["vlmblind/Circles"] * 3 + ["vlmblind/Squares"]
    assert published(sources, [1, 0, 0, 1], mean_of_parts=True)["all"] == pytest.approx(2 / 3)
    assert published(sources, [1, 0, 0, 1])["all"] == 0.5


def test_the_summary_has_the_benchmarks_own_score_and_leaves_out_what_nobody_graded():
    image = Image.new("RGB", (8, 8))
    tasks = ("vlmblind/a", "vlmblind/a", "vlmblind/b", "vlmblind/b")
    trajectories = [Trajectory(Sample(str(i), image, "?", "1", kind="neutral", source=source))
                    for i, source in enumerate(tasks)]  # fmt: skip
    rewards = [Reward(answer, 0.0, 0.0) for answer in (1.0, 0.0, 1.0, None)]
    metrics = measure(trajectories, rewards)
    assert metrics["n"] == 3 and metrics["ungraded"] == 1
    assert metrics["accuracy"] == 2 / 3 and metrics["score"] == 0.75
    assert metrics["parts"] == {"a": 0.5, "b": 1.0}
    assert metrics["rates"]["accuracy"]["numerator"] == 2
    assert measure(trajectories[:3] * 2, rewards[:3] * 2, rollouts=2)["n"] == 3


# --- killed and resumed, alone and in company ------------------------------------------------

SCRIPTS = [[LOOK, ANSWER], [SHORT], [ANSWER], [LOOK, SHORT], [SHORT]]


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


def episodes_in(folder):
    """The lines of its file, but for what a clock measured."""
    text = (folder / "trajectories.jsonl").read_text()
    return re.sub(r'"seconds": [\d.e-]+', '"seconds": 0', text).splitlines()


def run(policy, samples, out, scripts=None, **more):
    with scripted(policy, scripts or SCRIPTS):
        rules = replace(RULES, temperature=0.0)
        return evaluate(policy, samples, BoxJudge(), rules=rules, out=out, wave=2, **more)[0]


def test_waves_change_no_number_and_keep_nothing_in_memory(policy, samples, tmp_path, asked):
    whole = evaluate(policy, samples[:5], BoxJudge(), rules=replace(RULES, max_new_tokens=8))
    rules = replace(RULES, max_new_tokens=8)
    parts = evaluate(policy, samples[:5], BoxJudge(), rules=rules, out=tmp_path, wave=2)
    assert parts[0] == whole[0] and isinstance(parts[1], Episodes)
    assert [t.ids for t in parts[1]] == [t.ids for t in whole[1]]
    assert asked == [s.id for s in samples[:5]] * 2


@pytest.mark.parametrize("keep", [0, 1, 2, 3, 4])
def test_a_killed_evaluation_goes_on_and_ends_as_if_it_had_not_been(
    keep, policy, samples, tmp_path, asked
):
    whole = run(policy, samples[:5], tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    file = tmp_path / "cut" / "trajectories.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:keep]) + lines[keep][:40])  # the kill came amid a line
    asked.clear()
    first = keep // 2 * 2  # the wave that the kill tore is played again, its whole lines stay
    assert run(policy, samples[:5], tmp_path / "cut", SCRIPTS[first:]) == whole
    assert asked == [s.id for s in samples[first:5]]
    assert episodes_in(tmp_path / "cut") == episodes_in(tmp_path / "whole")


def test_an_answer_without_verdict_does_not_end_the_evaluation(policy, samples):
    class Mute(BoxJudge):
        def same_answer(self, *asked):
            return None

    asked = [replace(s, options=(), answer="a fish") for s in samples[:2]]
    with scripted(policy, [[ANSWER], [ANSWER]]):
        rules = replace(RULES, temperature=0.0)
        metrics, _ = evaluate(policy, asked, Mute(), rules=rules, wave=1)
    assert metrics["ungraded"] == 2 and metrics["n"] == 0


def test_what_is_finished_is_not_played_again(policy, samples, tmp_path, asked):
    once = run(policy, samples[:3], tmp_path)
    asked.clear()
    assert run(policy, samples[:3], tmp_path) == once and asked == []


def test_another_evaluation_does_not_mix_with_this_one(policy, samples, tmp_path):
    run(policy, samples[:3], tmp_path)
    for other in ({"seed": 1}, {"rollouts": 2}):
        with pytest.raises(ValueError, match="from another evaluation .* give --out another"):
            run(policy, samples[:3], tmp_path, **other)
    with pytest.raises(ValueError, match="from another evaluation"):
        run(policy, samples[1:4], tmp_path)


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
        metrics, played = evaluate(
            policy, samples[:2], BoxJudge(), rules=RULES, out=tmp_path, rollouts=2, wave=1
        )
    assert metrics["n"] == 2 and metrics["rates"]["accuracy"]["denominator"] == 4
    assert [t.sample.id for t in played] == [s.id for s in samples[:2] for _ in range(2)]
    assert [t.answer for t in played] == ["checker", "red", "checker", "checker"]
    assert list(played.lines) == [0, 1, 2, 3]


def one_of(world, rank, folder, seen):
    """A process that does not wait for the others; `seen`: the files wherever it would have."""

    def meet():
        seen.append(sorted(path.name for path in folder.glob("trajectories*")))

    return SimpleNamespace(process_index=rank, num_processes=world, wait_for_everyone=meet)


def test_each_process_plays_its_waves_and_the_first_makes_one_file_of_all(
    policy, samples, tmp_path, asked
):
    whole = run(policy, samples[:5], tmp_path / "whole")
    both, seen = tmp_path / "both", []
    asked.clear()
    with pytest.raises(RuntimeError, match="2 of 5 episodes"):  # the other's are missing
        second = one_of(2, 1, both, seen)
        run(policy, samples[:5], both, SCRIPTS[2:4], processes=second)
    assert asked == [s.id for s in samples[2:4]]
    assert seen == [[], ["trajectories-1.jsonl"], ["trajectories-1.jsonl"]]
    asked.clear(), seen.clear()
    scripts = SCRIPTS[:2] + SCRIPTS[4:]
    assert run(policy, samples[:5], both, scripts, processes=one_of(2, 0, both, seen)) == whole
    assert asked == [samples[i].id for i in (0, 1, 4)]
    two = ["trajectories-1.jsonl", "trajectories.jsonl"]
    assert seen == [two[:1], two, two[1:]]
    assert episodes_in(both) == episodes_in(tmp_path / "whole")


def test_what_a_process_left_counts_when_fewer_go_on_and_its_file_goes(
    policy, samples, tmp_path, asked
):
    whole, cut = run(policy, samples[:5], tmp_path / "whole"), tmp_path / "cut"
    with pytest.raises(RuntimeError):
        run(policy, samples[:5], cut, SCRIPTS[2:4], processes=one_of(3, 1, cut, []))
    (cut / "trajectories-2.jsonl").write_text('{"sample": {"id"')  # killed amid its first line
    asked.clear()
    assert run(policy, samples[:5], cut, SCRIPTS[:2] + SCRIPTS[4:]) == whole
    assert asked == [samples[i].id for i in (0, 1, 4)]
    assert [path.name for path in cut.glob("trajectories*")] == ["trajectories.jsonl"]
    assert episodes_in(cut) == episodes_in(tmp_path / "whole")


def test_several_processes_need_a_folder(policy, samples):
    with pytest.raises(ValueError, match="several processes meet in a folder: expected out="):
        run(policy, samples[:2], None, processes=one_of(2, 0, Path(), []))


FLAGS = ["--model", "tiny", "--bench", "toy", "--limit", "4", "--wave", "2", "--turns", "2"]
FLAGS += ["--max-new-tokens", "12", "--avg-at", "2"]


def test_two_processes_play_what_one_plays_and_nothing_twice(tmp_path):
    """With sampling, and torn lines of a third process that a kill left behind."""
    root = Path(module.__file__).parent
    alone, both = tmp_path / "alone", tmp_path / "both"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        main([*FLAGS, "--out", str(alone)])
    both.mkdir()
    (both / "trajectories-2.jsonl").write_text('{"sample": {"id"')
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launch += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [*launch, "evaluate.py", *FLAGS, "--out", str(both)]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert " 0/2 [" in done.stderr and " 0/3 [" not in done.stderr  # of three waves, two are its
    assert episodes_in(alone) == episodes_in(both)
    assert [p.name for p in both.glob("*.jsonl")] == ["trajectories.jsonl"]
    stages = [json.loads((f / "summary.json").read_text())["stages"] for f in (alone, both)]
    assert stages[0] == stages[1] and stages[0]["toy"]["rates"]["accuracy"]["denominator"] == 8
    ids = Counter(json.loads(line)["sample"]["id"] for line in episodes_in(both))
    assert len(ids) == 6 and set(ids.values()) == {2}


# --- a benchmark from the command line, and pictures ------------------------------------------


def test_a_benchmark_is_played_from_its_file(policy, tmp_path, monkeypatch, capsys):
    rows = [LABELS["hrbench, tsv"][1] | {"index": i, "cycle_category": i % 4, "answer": "B",
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


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--avg-at", "0"], "--avg-at must be at least 1, got 0"),
        (["--avg-at", "4", "--temperature", "0"], "--avg-at 4 of greedy plays is one play"),
        (["--perturb", "mask,nois"], "--perturb is all, or some of identity, .*; got nois"),
        (["--perturb", "all", "--avg-at", "2"], "greedy plays, got temperature 1: drop --avg-at"),
        (["--judge-url", "http://x/v1"], "a judge needs both --judge-url and --judge-model"),
        (["--bench", "vstar", "--data", "/no/such"], "no data in /no/such"),
    ],
)
def test_a_wrong_flag_is_refused_before_a_model_loads(flags, message, monkeypatch, capsys):
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", None)
    with pytest.raises(SystemExit):
        main(["--model", str(Path(module.__file__).parent / "tiny"), *flags])
    assert re.search(message, capsys.readouterr().err)


def test_runs_are_shown_side_by_side_on_the_samples_they_share(policy, samples, tmp_path, capsys):
    for name, chosen in (("a", samples[:3]), ("b", samples[1:4])):
        metrics = run(policy, chosen, tmp_path / name)
        (tmp_path / name / "summary.json").write_text(json.dumps({"stages": {"toy": metrics}}))
    (tmp_path / "c").mkdir()  # it kept no episodes: only its numbers are there
    (tmp_path / "c" / "summary.json").write_text('{"stages": {"rl": {"n": 3, "accuracy": 0.5}}}')
    runs = [str(tmp_path / name) for name in "abc"]
    main(["--compare", *runs, "--out", str(tmp_path / "out")])
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<article") == 2 and page.count("<section>") == 4
    assert "2 of 2 episodes" in page
    assert page.count('<image id="p') == 2  # one picture for both strips
    assert [page.count(f"<b>{run}</b>") for run in runs] == [2, 2, 0]
    assert f'<th scope="col">{runs[2]} rl' in page
    assert 'data-answer="wrong / wrong"' in page
    assert "report.html" in capsys.readouterr().out


@pytest.mark.filterwarnings("error::UserWarning")
def test_an_episode_is_drawn_as_a_film_strip(policy, tmp_path, capsys):
    samples = toy_questions(2, seed="film", neutral_share=0.0)
    run(policy, samples, tmp_path)
    main(["--film", str(tmp_path), "--episode", "1", "--out", str(tmp_path)])
    assert capsys.readouterr().out.strip() == str(tmp_path / "film.png")
    three = Image.open(tmp_path / "film.png").convert("RGB")  # question, look, answer
    main(["--film", str(tmp_path), "--episode", "2", "--out", str(tmp_path)])
    two = Image.open(tmp_path / "film.png")
    assert three.width / two.width == pytest.approx(1.5, abs=0.1)
    upper, lower = ((0, 0, three.width // 3, three.height // 2),
                    (0, three.height // 2, three.width, three.height))  # fmt: skip
    blue = (three.crop(part).getcolors(1 << 20) for part in (upper, lower))
    box, bar = (sum(n for n, color in colors if color == (0, 114, 178)) for colors in blue)
    assert box > 300 and bar > 1000  # where the look was, and what the policy chose
    with pytest.raises(SystemExit):
        main(["--film", str(tmp_path / "none")])
    with pytest.raises(SystemExit):
        main(["--film", str(tmp_path), "--episode", "3"])
    errors = capsys.readouterr().err
    assert "no trajectories.jsonl" in errors and "--episode is 1 to 2, got 3" in errors
    odd = replace(samples[0], question="$\\x$ ^ {", options=("$", "\\frac{", "%"))
    for acted in ([True], []):
        odd_one = Trajectory(odd, acted=acted, answer="$\\x$")
        film(odd_one, Reward(None, 0.0, 0.0), tmp_path / "x.png")


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
    for words in ("after a hit", "solved only with", "evidence value", "decorative crops"):
        assert words in printed


@pytest.mark.parametrize(
    "bench, url, kinds",
    [
        ("toy", None, (BoxJudge, None)),
        ("vstar", None, (BoxJudge, None)),
        ("vstar", "http://x/v1", (BoxJudge, ChatJudge)),
        ("hrbench8k", "http://x/v1", (ChatJudge, None)),
        ("charxiv", "http://x/v1", (ChatJudge, None)),
        ("vlmblind", "http://x/v1", (BoxJudge, None)),
    ],
)
def test_boxes_judge_where_they_are_labelled_and_a_server_where_not(bench, url, kinds, tmp_path):
    args = SimpleNamespace(bench=bench, judge_url=url, judge_model="m", out=tmp_path,
                           judge_prompt="evaluation_original")  # fmt: skip
    judge, second = judges_of(args)
    assert (type(judge), second and type(second)) == kinds
    if bench == "vstar":
        assert judge.visible == 0.5
