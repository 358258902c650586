"""python -m pytest tests/test_benchmarks.py      ten benchmarks, in all their forms"""

import base64
import io
import json

import pandas
import pytest
from PIL import Image

from data import Sample
from evaluate import load_bench
from evaluate import main as evaluate_main
from kit.benchmarks import BENCHES, pictures, published, sheet
from kit.tables import read_image
from rewards import grade


def encoded(color="red", size=(40, 30)):
    Image.new("RGB", size, color).save(png := io.BytesIO(), "PNG")
    return base64.b64encode(png.getvalue()).decode()


IMAGE = encoded()
ASKED = {"image": IMAGE, "question": "Which one? {3}", "index": "7"}
CHOICE = ASKED | {"A": "red", "B": "blue", "C": "green", "D": "", "answer": "B"}
THREE = ("red", "blue", "green")
BELOW = "\n(The images stand below each other, image 1 at the top.)"
TABLE = [  # benchmark, form; a row; its id, question, options, answer, part
    ("vstar, tsv", CHOICE | {"category": "relative_position"},
     ("7", "Which one? {3}", THREE, "B", "relative_position")),
    ("hrbench4k, tsv", CHOICE | {"category": "cross", "cycle_category": "3"},
     ("7", "Which one? {3}", THREE, "B", "FCP")),
    ("mme-realworld-lite, tsv", CHOICE | {"category": "Perception/OCR", "l2-category": "phone"},
     ("7", "Which one? {3}", THREE, "B", "Perception")),
    ("mme-realworld-lite, parquet", {
        "index": 0, "bytes": IMAGE, "question": "Which one?", "answer": "B",
        "multi-choice options": ["(A) red", "(B) blue (dark)"], "category": "Reasoning/Map"},
     ("0", "Which one?", ("red", "blue (dark)"), "B", "Reasoning")),
    ("mme-realworld-lite, json", {
        "Question_id": "x/1", "Image": IMAGE, "Text": "Which one?", "Ground truth": "A",
        "Answer choices": ["(A) red", "(B) blue"], "Task": "Perception", "Category": "OCR"},
     ("x/1", "Which one?", ("red", "blue"), "A", "Perception")),
    ("vlmblind, tsv", ASKED | {"answers": "4", "task": "Nested Squares"},
     ("7", "Which one? {3}", (), "4", "Nested Squares")),
    ("vlmblind, hub", {"image": {"bytes": b"x", "path": None}, "prompt": "How many? e.g. {3}",
                       "groundtruth": "4", "task": "Nested Squares", "metadata": "{}"},
     ("", "How many? e.g. {3}", (), "4", "Nested Squares")),
    ("mathvista, choice", {
        "pid": "1", "decoded_image": IMAGE, "image": "images/1.jpg", "question": "Larger?",
        "choices": ["yes", "no"], "answer": "no", "question_type": "multi_choice",
        "answer_type": "text", "unit": None, "precision": None, "metadata": {"task": "figures"}},
     ("1", "Larger?", ("yes", "no"), "no", "figures")),
    ("mathvista, float", {
        "pid": "2", "image": IMAGE, "question": "How long?", "choices": None, "answer": "1.20",
        "question_type": "free_form", "answer_type": "float", "unit": "m", "precision": 1.0,
        "metadata": {"task": "geometry"}},
     ("2", "How long? (Unit: m)\nAnswer with a number with 1 decimals.", (), "1.20", "geometry")),
    ("mathvista, tsv", ASKED | {
        "question": "Hint: ...\nLarger?\nChoices:\n(A) yes\n(B) no", "choices": "['yes', 'no']",
        "answer": "no", "question_type": "multi_choice", "answer_type": "text", "task": "books"},
     ("7", "Hint: ...\nLarger?", ("yes", "no"), "no", "books")),
    ("mathverse, choice", {
        "sample_index": "9", "image": IMAGE, "question": "BC is ()\nChoices:\nA:2\nB:2√{3}",
        "answer": "B", "question_type": "multi-choice", "problem_version": "Text Lite"},
     ("9", "BC is ()", ("2", "2√{3}"), "B", "Text Lite")),
    ("mathverse, vision only", {
        "sample_index": "10", "image": IMAGE, "question": "", "query_wo": "See the image.",
        "answer": "14", "question_type": "free-form", "problem_version": "Vision Only"},
     ("10", "See the image.", (), "14", "Vision Only")),
    ("mathverse, tsv", ASKED | {"answer": "y=2", "metadata": "{'problem_version': 'Vision'}"},
     ("7", "Which one? {3}", (), "y=2", "Vision")),
    ("mathvision, hub", {
        "id": "4", "image": "images/4.jpg", "decoded_image": IMAGE, "question": "<image1>What?",
        "options": [], "answer": "\\frac{1}{2}", "subject": "algebra", "level": 1},
     ("4", "What?", (), "\\frac{1}{2}", "algebra")),
    ("mathvision, tsv",
     ASKED | {"answer": "C", "choices": "['A', 'B', 'C']", "category": "counting"},
     ("7", "Which one? {3}", ("A", "B", "C"), "C", "counting")),
    ("charxiv, hub", {
        "image": IMAGE, "descriptive_q1": 7, "descriptive_a1": "60", "reasoning_q": "Which falls?",
        "reasoning_a": "the red one", "reasoning_a_type": 1},
     ("", "Which falls?", (), "the red one", "reasoning")),
    ("charxiv, tsv", ASKED | {"answer": "5", "qid": "10", "grading_query": "..."},
     ("7", "Which one? {3}", (), "5", "descriptive")),
    ("mmmu, choice", {
        "id": "validation_Art_Theory_3", "image_1": IMAGE, "image_2": encoded("blue", (20, 50)),
        "image_3": None, "question": "Which is it?", "options": "['<image 1>', '<image 2>']",
        "answer": "B", "question_type": "multiple-choice"},
     ("validation_Art_Theory_3", "Which is it?" + BELOW, ("[image 1]", "[image 2]"), "B",
      "Art_Theory")),
    ("mmmu, open", {
        "id": "validation_Math_1", "image_1": IMAGE, "question": "<image 1> As many as <image 1>?",
        "options": "[]", "answer": "['8', 'eight']", "question_type": "open"},
     ("validation_Math_1", "[image 1] As many as [image 1]?", (), "['8', 'eight']", "Math")),
    ("mmmu, tsv", CHOICE | {"index": "1", "category": "Chemistry", "split": "validation"},
     ("1", "Which one? {3}", THREE, "B", "Chemistry")),
]  # fmt: skip
ROWS = {name.replace("4k", ""): (name.split(",")[0], row) for name, row, _ in TABLE}


def fields_of(name, **change):
    bench, row = ROWS[name]
    return BENCHES[bench].read(row | change)


@pytest.mark.parametrize("name, words", [*zip(ROWS, (row[2] for row in TABLE))])
def test_a_row_of_each_published_schema_becomes_a_question(tmp_path, capsys, name, words):
    """And a file of such rows is checked without a model."""
    fields, (bench, row) = fields_of(name), ROWS[name]
    assert tuple(fields[k] for k in ("id", "question", "options", "answer", "part")) == words
    row = row | ({"image": IMAGE} if name == "vlmblind, hub" else {})  # JSON has no bytes
    (file := tmp_path / "rows.json").write_text(json.dumps([row, row]))
    status, out = check(capsys, "--bench", bench, "--data", file)
    assert status == 0 and f"({file}): 2 of 2 rows would be scored" in out.out


def test_every_benchmark_of_the_paper_has_a_row_here():
    assert {bench for bench, _ in ROWS.values()} | {"hrbench8k"} == set(BENCHES)
    assert [n for n, b in BENCHES.items() if b.judged] == ["mathverse", "charxiv", "mmmu"]


@pytest.mark.parametrize("answer, asked", [
    ("0.25", "a number with 2 decimals"), ("2.5%", "a number with 1 decimals"),
    ("3", "a whole number"), ("25%", "a whole number"),
])  # fmt: skip
def test_charxivs_free_numbers_are_asked_for_with_their_decimals(answer, asked):
    fields = fields_of("charxiv, hub", reasoning_a=answer, reasoning_a_type=4)
    assert fields["question"] == f"Which falls?\nAnswer with {asked}."


def write_tsv(path, rows):
    pandas.DataFrame(rows).to_csv(path, sep="\t", index=False)
    return path


def test_vstar_has_its_boxes_in_corners(tmp_path):
    folder = tmp_path / "direct_attributes"
    folder.mkdir()
    Image.new("RGB", (200, 150)).save(folder / "sa_1.jpg")
    (folder / "sa_1.json").write_text('{"bbox": [[10, 20.5, 30, 5], [0, 0, 1.2, 1]]}')
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
    for labels in ('{"bbox": [[1, 2]]}', '{"target": []}', '{"bbox": [[1, 2', None):
        (folder / "sa_1.json").write_text(labels) if labels else (folder / "sa_1.json").unlink()
        with pytest.raises(ValueError, match="row 0, (bbox: |image: .*(unpack|delim|boxes in))"):
            load_bench("vstar", tmp_path)


def test_several_images_become_one():
    row = ROWS["mmmu, choice"][1]
    joined = sheet([read_image(cell) for cell in pictures(row)])
    assert joined.size == (40, 30 + 16 + 50)
    assert [joined.getpixel((5, y)) for y in (5, 38, 60)] == [(255, 0, 0), (255,) * 3, (0, 0, 255)]
    both = [row["image_1"], row["image_2"]]
    assert pictures({"image": str(both)}) == pictures({"image": both}) == both
    assert pictures({"image": "images/1.jpg", "decoded_image": IMAGE}) == [IMAGE]


# Which rows count, and where their pictures are
def load(tmp_path, name, *changes):
    """The Samples of a file of such a row, once with each of the changes."""
    bench, row = ROWS[name]
    rows = [row | change for change in changes]
    if name.endswith("tsv"):
        return load_bench(bench, write_tsv(tmp_path / "rows.tsv", rows))
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    return load_bench(bench, tmp_path / "rows.json")


@pytest.mark.parametrize("name, change, message", [
    ("vstar, tsv", {"answer": "E"}, "answer: .* name one of the options .*, but is 'E'"),
    ("vstar, tsv", {"A": "", "B": "", "C": ""}, "expected options in options, .*, A, B"),
    ("vstar, tsv", {"A": "red", "B": "", "C": "green"}, "without a gap, got A, C"),
    ("vstar, tsv", {"text": "What?"}, r"text: expected a question and options \(A\)"),
    ("hrbench, tsv", {"category": "triple"}, "expected single or cross, got 'triple'"),
    ("mme-realworld-lite, parquet", {"multi-choice options": None}, "Answer choices, A, B"),
    ("mathvista, tsv", {"choices": "[yes"}, r"expected a list or dict, got '\[yes'"),
    ("mmmu, open", {"id": ""}, "id: expected something in column index or id or pid"),
    ("vstar, tsv", {"question": "  "}, "question: expected something in column question"),
    ("mathvista, float", {"precision": "nan"}, "precision: cannot convert"),
    ("mathvista, float", {"answer": "long"}, "answer: .*'long'"),
    ("mathvista, float", {"answer": "1.25"}, "answer: '1.25' is not right by its own"),
    ("vlmblind, tsv", {"answers": "{4}"}, r"answer: '\{4\}' is not right by its own"),
    *(("vstar, tsv", {"image": cell}, "image: (no such file|no image)") for cell in
      ("b.png", "images/abcd", "9", "['b.png']", "page.png", encoded(size=(900, 900))[:4000])),
])  # fmt: skip
def test_a_row_that_cannot_be_asked_scored_or_shown_is_named(tmp_path, name, change, message):
    (tmp_path / "page.png").write_text("<html>" + "not found " * 1000)
    with pytest.raises(ValueError, match=f"row [01], .*{message}"):
        load(tmp_path, name, {}, change)


def test_rows_of_the_dev_split_do_not_count(tmp_path):
    splits = ["dev", "validation", "dev", "validation"]
    samples = load(tmp_path, "mmmu, tsv", *({"index": i, "split": s} for i, s in enumerate(splits)))
    assert [sample.id for sample in samples] == ["mmmu-1-1", "mmmu-3-3"]
    assert len(load_bench("mmmu", tmp_path / "rows.tsv", first=1)) == 1
    with pytest.raises(ValueError, match="row 3, answer: "):  # its number in the file
        load(tmp_path, "mmmu, tsv", *({"split": s, "answer": a} for s, a in zip(splits, "ZAZZ")))


def test_a_picture_may_be_that_of_another_row_or_a_file(tmp_path):
    Image.new("RGB", (9, 5)).save(tmp_path / "a.png")
    paths = [{"index": path, "image": "", "image_path": path} for path in ("a.png", "['a.png']")]
    others = [{"index": "8", "image": "7"}, {"index": "9", "image": "a.png", "image_path": ""}]
    samples = load(tmp_path, "vstar, tsv", {}, *paths, *others)
    assert [sample.image.size for sample in samples] == [(40, 30), *[(9, 5)] * 2, (40, 30), (9, 5)]
    listed = {"image": None, "image_path": ["a.png"], "decoded_image": None}
    assert load(tmp_path, "mathvision, hub", listed)[0].image.size == (9, 5)


def check(capsys, *words):
    status = 0
    try:
        evaluate_main([*map(str, words), "--check"])
    except SystemExit as stopped:
        status = stopped.code
    return status, capsys.readouterr()


def test_a_check_says_by_which_rule_rows_are_scored_and_names_all_bad_ones(tmp_path, capsys):
    row = ROWS["mmmu, tsv"][1]
    none = dict.fromkeys("ABCD", "")
    rows = [row, row | {"split": "dev", "answer": "Z"}, row | {"answer": "Z"},
            row | {"image": "x.png"}, row | none | {"answer": "0.286"},
            row | none | {"answer": "blue"}, row | none | {"answer": "\\pi"}]  # fmt: skip
    file = write_tsv(tmp_path / "rows.tsv", rows)
    status, out = check(capsys, "--bench", "mmmu", "--data", file)
    lines = [line.strip() for line in out.out.splitlines()]
    assert status == 1 and lines[0] == f"mmmu ({file}): 4 of 6 rows would be scored"
    assert set(lines[1:6]) == {
        "1 by the option that is named", "1 by the authors' rule: two_decimals",
        "1 in words: by rule, then by the judge", "1 as a number, letter or formula",
        "1 rows more, which do not count (split dev, or beyond --limit)"}  # fmt: skip
    assert lines[6].startswith("row 2, answer: ") and lines[7].startswith("row 3, image: ")
    status, out = check(capsys, "--bench", "toy")
    assert status == 2 and "drawn, not read" in out.err


# The rules of what is right
def blind(task, answer):
    return "vlmblind, tsv", {"task": task, "answers": answer}


def vista(form, precision, answer):
    return "mathvista, float", dict(answer_type=form, precision=precision, answer=answer)


@pytest.mark.parametrize("name, change, right, wrong", [
    # MathVista's answer is the text of an option, also where that is a letter.
    ("mathvista, choice", {"choices": ["B", "A", "C"], "answer": "A"},
     ("B", "B. A"), ("A. B", "C")),
    # Options may bring letters of their own.
    ("mathvista, choice", {"choices": ["(A) yes", "(B) no"]}, ("B", "no", "(B) no"), ("yes",)),
    ("mme-realworld-lite, parquet", {"multi-choice options": ["A. red", "B. blue"]},
     ("B", "blue", "B. blue"), ("red", "A. blue")),
    *(("mathverse, choice", {"question": f"Which?\nChoices:\n{listed}"}, ("B", "2"), ("A", "1")) for
      listed in ("A. 1\nB. 2", "(A) 1\n(B) 2", "A：1\nB：2", "A:1\nB:2")),
    # One of MMMU's references is enough; numbers are equal to two decimals.
    ("mmmu, open", {"answer": "[0, 1)"}, ("[0,1)",), ("[0,1]", "0")),
    ("mmmu, open", {"answer": "0.286"}, ("0.29", "0.286", "0.285714"), ("0.28", "0.3", "29")),
    ("mmmu, open", {"answer": "['24/7', '3.429']"}, ("3.43", "24/7"), ("3.44", "24", "7")),
    ("mmmu, open", {"answer": "blue"}, ("blue", "Blue."), ("red",)),
    ("mmmu, open", {}, ("Eight.", "The answer is eight", "8"), ("9",)),
    # MathVision's open answers are equal to two decimals, too.
    ("mathvision, hub", {"answer": "\\frac{1}{3}"}, ("0.33", "1/3", "\\boxed{0.333}", "33.3%"),
     ("0.3", "0.34", "3", "third")),
    ("mathvision, hub", {"answer": "2\\sqrt{3}"}, ("3.46", "2√3", "3.4641", "\\sqrt{12}"),
     ("3.5", "2\\sqrt{5}", "3.47")),
    ("mathvision, hub", {"answer": "24"}, ("24", "24.0", "24.001"), ("24.01", "-24", "B")),
    ("mathvision, hub", {"answer": "x+1"}, ("1+x",), ("x+1.001", "x")),
    ("mathvision, hub", {"answer": "(1.234,2)"}, ("(1.234, 2)",), ("(2, 1.234)", "1.23")),
    # MathVista rounds as it asks for; without a precision, as its reference.
    ("mathvista, float", {"answer": "cyan", "answer_type": "text"},
     ("cyan", "**cyan**"), ("Cyan", "the cyan", "red")),
    (*vista("float", 1.0, "1.2"), ("1.24",), ("1.26 m",)),
    (*vista("float", 2.0, "0.5"), ("0.5",), ("0.52",)),
    (*vista("float", None, "0.5"), ("0.52",), ("0.56",)),
    (*vista("integer", None, "14"), ("14.0",), ("15", "many", "9" * 400)),  # beyond any float
    (*vista("list", None, "[2007, 2008]"), ("[2007,2008]",),
     ("2007 to 2008", "{[2007]: 2008}")),  # no key of a dict
    # VLMs are blind has a rule for each task.
    (*blind("Subway Connections", "3"), ("{3}", "3"), ("There are {2} of 3",)),
    (*blind("Circled Letter", "q"), ("{q}",), ("{Q}",)),
    (*blind("Line Plot Intersections", "1"), ("1",), ("{10}",)),
    (*blind("Touching Circles", "No"), ("no.",), ("Yes",)),
    (*blind("Olympic Counting - Circles", "5"), ("I count 5 circles",), ("6",)),
    (*blind("Counting Grid - Word Grids", "4,5"),
     ("rows={4} columns={5}", "columns={5}, rows={4}", "(4, 5)"), ("(5, 4)", "4")),
])  # fmt: skip
def test_what_is_right_by_the_authors_rule(name, change, right, wrong):
    fields = fields_of(name, **change)
    how = {"options": fields["options"], "rule": fields["rule"]}
    sample = Sample("x", Image.new("RGB", (9, 9)), "?", fields["answer"], **how)
    assert {reply: grade(reply, sample, None) for reply in right} == dict.fromkeys(right, 1.0)
    assert {reply: grade(reply, sample, None) for reply in wrong} == dict.fromkeys(wrong, 0.0)


def test_hrbench_is_the_mean_over_its_cycles():
    table = {"FSP": ("1010", "1111"), "FCP": ("0001", "0000")}  # two questions each, four cycles
    answers = [(part, str(cycle), correct == "1") for part, questions in table.items()
               for question in questions for cycle, correct in enumerate(question)]  # fmt: skip
    assert published(answers) == {"FCP": 1 / 8, "FSP": 6 / 8, "all": 7 / 16}
    # A cycle with fewer rows weighs as much as any other: a mean of means.
    few = [("FSP", "0", 1), ("FSP", "1", 0), ("FSP", "0", 0)]
    assert published(few)["all"] == pytest.approx((0.5 + 0) / 2)


def test_vlms_are_blind_is_the_mean_of_its_tasks():
    answers = [("Circles", "", 1), ("Circles", "", 0), ("Circles", "", 0), ("Squares", "", 1)]
    for bench, score in (("vlmblind", 2 / 3), ("mmmu", 0.5)):
        assert published(answers, BENCHES[bench].mean_of_parts)["all"] == pytest.approx(score)
