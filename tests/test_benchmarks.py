"""python -m pytest tests/test_benchmarks.py      at once: ten benchmarks, in all their forms"""

import base64
import csv
import io
from pathlib import Path

import pytest
from PIL import Image

from kit.benchmarks import BENCHES, picture, published
from kit.usable import Bad


def encoded(color="red", size=(40, 30)):
    Image.new("RGB", size, color).save(png := io.BytesIO(), "PNG")
    return base64.b64encode(png.getvalue()).decode()


# --- the rows of every schema ----------------------------------------------------------------

IMAGE = encoded()
CHOICE = {"image": IMAGE, "question": "Which one?", "A": "red", "B": "blue", "C": "green", "D": ""}
ROWS = {
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


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_each_published_schema_becomes_a_question(name):
    bench, row = ROWS[name]
    words = BENCHES[bench].read(row)
    got = tuple(words[field] for field in ("id", "question", "options", "answer", "part"))
    assert got == WORDS[name]


def test_the_first_row_has_an_id_too():
    row = ROWS["mme, parquet"][1] | {"index": 0}
    assert BENCHES["mme-realworld-lite"].read(row)["id"] == "0"


def test_every_benchmark_of_the_paper_has_a_row_here():
    assert {bench for bench, _ in ROWS.values()} | {"hrbench8k"} == set(BENCHES)


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("vstar, tsv", {"answer": "E"}, "'E' is neither a letter nor a text of"),
        ("vstar, tsv", {"A": "", "B": "", "C": ""}, "expected options in columns A, B"),
        ("vstar, tsv", {"A": "red", "B": "", "C": "green"}, "without a gap, got A, C"),
        ("vstar, tsv", {"text": "What?"}, r"expected a question and options \(A\)"),
        ("hrbench, tsv", {"category": "triple"}, "expected single or cross, got 'triple'"),
        ("hrbench, tsv", {"cycle_category": ""}, "something in column cycle_category"),
        ("mme, parquet", {"multi-choice options": None}, "options, Answer choices, A, B"),
        ("mathvista, tsv", {"choices": "[yes"}, r"expected a list or dict, got '\[yes'"),
        ("mathverse, tsv", {"metadata": None}, "something in column problem_version"),
        ("charxiv, hub", {"reasoning_a": None}, "something in column answer or reasoning_a"),
        ("mmmu, open", {"id": ""}, "something in column category or id"),
    ],
)
def test_a_row_that_does_not_fit_says_what_is_missing(name, change, message):
    bench, row = ROWS[name]
    with pytest.raises(Bad, match=message):
        BENCHES[bench].read(row | change)


def write_tsv(path, rows):
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0], delimiter="\t")
        writer.writeheader(), writer.writerows(rows)
    return path


def test_several_images_become_one():
    row = ROWS["mmmu, choice"][1]
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
    row = ROWS["vlmblind, tsv"][1] | {"task": task, "answers": reference}
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
    row = ROWS["mathvista, float"][1]
    row = row | {"answer_type": form, "precision": precision, "answer": reference}
    assert BENCHES["mathvista"].read(row)["rule"](answer, reference) is right


def test_one_of_several_references_is_enough():
    rule = BENCHES["mmmu"].read(ROWS["mmmu, open"][1])["rule"]
    assert rule("Eight.", "['8', 'eight']") and not rule("9", "['8', 'eight']")
    assert rule("The answer is eight", "['8', 'eight']")


# --- the published scores --------------------------------------------------------------------


def test_hrbench_is_the_mean_over_its_cycles():
    table = {"FSP": ("1010", "1111"), "FCP": ("0001", "0000")}  # two questions each, four cycles
    answers = [
        (part, str(cycle), correct == "1")
        for part, questions in table.items()
        for question in questions
        for cycle, correct in enumerate(question)
    ]
    assert published(answers) == {"FCP": 1 / 8, "FSP": 6 / 8, "all": 7 / 16}
    # A cycle with fewer rows weighs as much as any other: a mean of means.
    few = [("FSP", "0", 1), ("FSP", "1", 0), ("FSP", "0", 0)]
    assert published(few)["all"] == pytest.approx((0.5 + 0) / 2)


def test_vlms_are_blind_is_the_mean_of_its_tasks():
    answers = [("Circles", "", 1), ("Circles", "", 0), ("Circles", "", 0), ("Squares", "", 1)]
    assert published(answers, mean_of_parts=True)["all"] == pytest.approx(2 / 3)
    assert published(answers)["all"] == 0.5
