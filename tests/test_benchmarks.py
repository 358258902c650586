"""python -m pytest tests/test_benchmarks.py      at once: ten benchmarks, in all their forms"""

import base64
import csv
import io
import json

import pytest
from PIL import Image

from evaluate import load_bench
from evaluate import main as evaluate_main
from kit.benchmarks import BENCHES, pictures, published, sheet
from kit.tables import read_image
from kit.tables import Bad
from rewards import grade


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
        ("vstar, tsv", {"answer": "E"}, "name one of the options .*, but is 'E'"),
        ("vstar, tsv", {"A": "", "B": "", "C": ""}, "expected options in options, .*, A, B"),
        ("vstar, tsv", {"A": "red", "B": "", "C": "green"}, "without a gap, got A, C"),
        ("vstar, tsv", {"text": "What?"}, r"expected a question and options \(A\)"),
        ("hrbench, tsv", {"category": "triple"}, "expected single or cross, got 'triple'"),
        ("hrbench, tsv", {"cycle_category": ""}, "something in column cycle_category"),
        ("mme, parquet", {"multi-choice options": None}, "options, Answer choices, A, B"),
        ("mathvista, tsv", {"choices": "[yes"}, r"expected a list or dict, got '\[yes'"),
        ("mathverse, tsv", {"metadata": None}, "something in column problem_version"),
        ("charxiv, hub", {"reasoning_a": None}, "something in column answer or .* or reasoning_a"),
        ("mmmu, open", {"id": ""}, "something in column index or id or pid"),
    ],
)
def test_a_row_that_does_not_fit_says_what_is_missing(name, change, message):
    bench, row = ROWS[name]
    with pytest.raises(Bad, match=message):
        BENCHES[bench].read(row | change)


@pytest.mark.parametrize(
    "answer, right, wrong",
    [
        ("\\frac{1}{3}", ["0.33", "1/3", "\\boxed{0.333}", "33.3%"], ["0.3", "0.34", "3", "third"]),
        ("2\\sqrt{3}", ["3.46", "2√3", "3.4641", "\\sqrt{12}"], ["3.5", "2\\sqrt{5}", "3.47"]),
        ("24", ["24", "24.0", "24.001"], ["24.01", "-24", "B"]),
        ("x+1", ["1+x"], ["x+1.001", "x"]),
        ("(1.234,2)", ["(1.234, 2)"], ["(2, 1.234)", "1.23"]),
    ],
)
def test_mathvisions_open_answers_are_equal_to_two_decimals(answer, right, wrong):
    row = ROWS["mathvision"][1] | {"answer": answer}
    rule = BENCHES["mathvision"].read(row)["rule"]
    assert [text for text in right if not rule(text, answer)] == []
    assert [text for text in wrong if rule(text, answer)] == []


def test_charxivs_free_numbers_are_asked_for_with_their_decimals():
    def asked(answer, kind):
        row = ROWS["charxiv, hub"][1] | {"reasoning_a": answer, "reasoning_a_type": kind}
        return BENCHES["charxiv"].read(row)["question"]

    assert asked("0.25", 4).endswith("?\nAnswer with a number with 2 decimals.")
    assert asked("3", 4).endswith("?\nAnswer with a whole number.")
    assert asked("3", 3).endswith("?")


def write_tsv(path, rows):
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0], delimiter="\t")
        writer.writeheader(), writer.writerows(rows)
    return path


def test_several_images_become_one():
    row = ROWS["mmmu, choice"][1]
    joined = sheet([read_image(cell) for cell in pictures(row)])
    assert joined.size == (40, 30 + 16 + 50)
    assert [joined.getpixel((5, y)) for y in (5, 38, 60)] == [
        (255, 0, 0), (255, 255, 255), (0, 0, 255)]  # fmt: skip
    both = [row["image_1"], row["image_2"]]
    assert pictures({"image": str(both)}) == pictures({"image": both}) == both
    assert pictures({"image": "images/1.jpg", "decoded_image": IMAGE}) == [IMAGE]


# --- references are graded by their own rule, when the row is loaded -------------------------


def load(tmp_path, name, *changes):
    """The Samples of a file of such a row, once with each of the changes."""
    bench, row = ROWS[name]
    rows = [row | change for change in changes]
    if name.endswith("tsv"):
        return load_bench(bench, write_tsv(tmp_path / "rows.tsv", rows))
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    return load_bench(bench, tmp_path / "rows.json")


@pytest.mark.parametrize(
    "name, change, right, wrong",
    [
        # The authors compare texts: which of two equal ones was named does not matter.
        ("mathvista, choice", {"choices": ["4", "6", "8", "8"], "answer": "8"},
         ("C", "D", "8", "(D) 8"), ("A", "6", "C. 6", "C or D")),
        # Two of MathVerse's problems have two right options.
        ("mathverse, choice", {"question": "Which hold?\nChoices:\nA:1\nB:2\nC:3\nD:4",
                               "answer": "C\nD"},
         ("C, D", "C and D", "D\nC"), ("C", "D", "B, C, D", "C or D")),
        ("mmmu, open", {"answer": "0.286"}, ("0.29", "0.286", "0.285714"), ("0.28", "0.3", "29")),
        ("mmmu, open", {"answer": "6.333"}, ("6.33", "19/3"), ("6.34", "6")),
        ("mmmu, open", {"answer": "['24/7', '3.429']"}, ("3.43", "24/7"), ("3.44", "24", "7")),
        ("mmmu, open", {"answer": "blue"}, ("blue", "Blue."), ("red",)),
        ("mathvista, float", {"answer": "cyan", "answer_type": "text"},
         ("cyan", "**cyan**"), ("Cyan", "the cyan", "red")),
    ],
)  # fmt: skip
def test_what_is_right_by_the_authors_rule(tmp_path, name, change, right, wrong):
    sample = load(tmp_path, name, change)[0]
    assert {reply: grade(reply, sample, None) for reply in right} == dict.fromkeys(right, 1.0)
    assert {reply: grade(reply, sample, None) for reply in wrong} == dict.fromkeys(wrong, 0.0)


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("mathvista, choice", {"answer": "maybe"}, "row 1, answer: .* one of the options"),
        ("mathvista, choice", {"choices": ["no", "no"]}, "row 1, answer: .* options that differ"),
        ("mathvista, float", {"answer": "long"}, "row 1, answer: .*'long'"),
        ("mathvista, float", {"answer": "1.25"}, "row 1, answer: '1.25' is not right by its own"),
        ("vlmblind, tsv", {"answers": "{4}"}, r"row 1, answer: '\{4\}' is not right by its own"),
        ("mathverse, choice", {"answer": "B\nE"}, "row 1, answer: .* one of the options"),
        ("charxiv, tsv", {"answer": "?" * 1001}, "row 1, answer: .* 1 to 1000 characters"),
    ],
)
def test_a_reference_that_nothing_could_equal_is_named_at_load(tmp_path, name, change, message):
    with pytest.raises(ValueError, match=message):
        load(tmp_path, name, {}, change)


# --- which rows count, and where their pictures are ------------------------------------------


def test_rows_of_the_dev_split_do_not_count(tmp_path):
    splits = ["dev", "validation", "dev", "validation"]
    samples = load(tmp_path, "mmmu, tsv", *({"index": i, "split": s} for i, s in enumerate(splits)))
    assert [sample.id for sample in samples] == ["mmmu-1-1", "mmmu-3-3"]
    assert len(load_bench("mmmu", tmp_path / "rows.tsv", first=1)) == 1
    with pytest.raises(ValueError, match="row 3, answer: "):  # its number in the file
        load(tmp_path, "mmmu, tsv", *({"split": s, "answer": a} for s, a in zip(splits, "ZAZZ")))


@pytest.mark.parametrize(
    "question, options, asked, listed",
    [
        ("Which is a cell?", ["<image 1>", "<image 2>", "none"],
         "Which is a cell?\n(The images stand below each other, image 1 at the top.)",
         ("[image 1]", "[image 2]", "none")),
        ("<image 1> Which is its mirror?", ["<image 2>", "none"],
         "[image 1] Which is its mirror?\n(The images stand below each other, image 1 at the top.)",
         ("[image 2]", "none")),
        ("<image 1> Like <image 1>?", ["<image 1>", "no"], "[image 1] Like [image 1]?",
         ("[image 1]", "no")),
    ],
)  # fmt: skip
def test_markers_of_pictures_also_stand_in_options(question, options, asked, listed):
    row = ROWS["mmmu, choice"][1] | {"question": question, "options": str(options)}
    fields = BENCHES["mmmu"].read(row)
    assert (fields["question"], fields["options"]) == (asked, listed)


def test_a_picture_may_be_that_of_another_row_or_a_file(tmp_path):
    Image.new("RGB", (9, 5)).save(tmp_path / "a.png")
    samples = load(tmp_path, "vstar, tsv", {"index": "7"}, {"index": "8", "image": "7"})
    assert samples[1].image.size == samples[0].image.size == (40, 30)
    paths = [{"image": "", "image_path": path} for path in ("a.png", "['a.png']")]
    samples = load(tmp_path, "vstar, tsv", *paths)
    assert [sample.image.size for sample in samples] == [(9, 5)] * 2
    listed = {"image": None, "image_path": ["a.png"]}
    assert load(tmp_path, "mathvision", listed | {"decoded_image": None})[0].image.size == (9, 5)


@pytest.mark.parametrize("cell", ["b.png", "images/abcd", "9", "['b.png']"])
def test_a_picture_that_is_not_there_is_named_at_load(tmp_path, cell):
    with pytest.raises(ValueError, match="row 1, image: no such file|row 1, image: no image"):
        load(tmp_path, "vstar, tsv", {}, {"image": cell})


# --- the whole file, without a model: --check -------------------------------------------------


def check(capsys, *words):
    status = 0
    try:
        evaluate_main([*map(str, words), "--check"])
    except SystemExit as stopped:
        status = stopped.code
    return status, capsys.readouterr()


@pytest.mark.parametrize("name", ROWS)
def test_a_file_of_each_schema_is_checked_without_a_model(tmp_path, capsys, name):
    row = ROWS[name][1]
    if isinstance(row["image"] if "image" in row else None, dict):
        row = row | {"image": IMAGE}  # JSON has no bytes
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([row, row]))
    status, out = check(capsys, "--bench", ROWS[name][0], "--data", file)
    assert status == 0 and f"({file}): 2 of 2 rows would be scored" in out.out


def test_a_check_says_by_which_rule_rows_are_scored_and_names_all_bad_ones(tmp_path, capsys):
    row = ROWS["mmmu, tsv"][1] | {"split": "validation"}
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
