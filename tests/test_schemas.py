"""python -m pytest tests/test_schemas.py      about 3 s: rows of public sets become fields"""

import io
import math
from pathlib import Path

import pytest
from fixtures.make_fixtures import picture, png, rl_rows

from kit.answers import is_correct
from kit.schemas import KINDS, named, rl_fields, thyme_fields
from kit.tables import Bad

PICTURE = picture(0)[0]
PNG = png(PICTURE)
PICTURE.save(file := io.BytesIO(), "JPEG")
HALF_A_JPEG = file.getvalue()[:900]

FLAT = {"image": {"bytes": PNG, "path": None}, "problem": "<image>How many?", "answer": 4}
VERL = rl_rows()[0]
PARTS = [{"type": "image", "text": None}, {"type": "text", "text": "How many?"}]
SIGN = "What color is the small sign?\n(A) red\n(B) green"
SCHEMAS = {
    "flat": (FLAT, "How many?", "4"),
    "answer in tags": (FLAT | {"answer": "<answer> 4 </answer>"}, "How many?", "4"),
    "verl": (VERL, SIGN, "A"),
    "verl without extra_info": ({k: VERL[k] for k in VERL if k != "extra_info"}, SIGN, "A"),
    "prompt in parts": (
        FLAT | {"problem": None, "prompt": [{"role": "user", "content": PARTS}]},
        "How many?",
        "4",
    ),
    "the last of several messages": (
        FLAT
        | {
            "problem": None,
            "messages": [
                {"role": "user", "content": "Hello"},
                {"role": "assistant", "content": "?"},
                {"role": "user", "content": "How many?"},
            ],
        },
        "How many?",
        "4",
    ),  # fmt: skip
    "options": (FLAT | {"answer": "b", "options": ["one", "two"]}, "How many?", "b"),
}


@pytest.mark.parametrize("schema", SCHEMAS)
def test_public_schemas_differ_in_their_columns_alone(schema, tmp_path):
    row, question, answer = SCHEMAS[schema]
    fields = rl_fields(row, 5, tmp_path)
    assert (fields["question"], fields["answer"]) == (question, answer)
    assert fields["image"].tobytes() == PICTURE.tobytes()


BAD = [
    (FLAT | {"image": None}, "image", "nothing in images or image"),
    (FLAT | {"image": {"bytes": HALF_A_JPEG}}, "image", "no image that can be read"),
    (FLAT | {"image": [FLAT["image"]] * 2}, "image", "a list of 2"),
    (FLAT | {"problem": " <image> "}, "question", "expected a text, got"),
    (FLAT | {"problem": None, "prompt": [{"role": "system", "content": "x"}]}, "question", "text"),
    (FLAT | {"answer": None}, "answer", "nothing in reward_model.ground_truth or answer"),
    (FLAT | {"answer": ["4", "four"]}, "answer", "expected a text or a number, got"),
    (FLAT | {"answer": "C", "options": ["one", "two"]}, "answer", "should name one of the options"),
    (
        FLAT | {"answer": "AC", "options": ["one", "two"]},
        "answer",
        "by letter or text, but is 'AC'",
    ),
    (FLAT | {"answer": "1" * 1001}, "answer", "right by its own rule"),
    (FLAT | {"options": "(A) one"}, "options", "expected a list of texts, got '.A. one'"),
    (FLAT | {"options": ["one", None]}, "options", "expected a list of texts"),
    (FLAT | {"answer": "x", "options": ["x", "x"]}, "answer", "options that differ, got"),
    (FLAT | {"answer": "A", "options": ["red", "red "]}, "answer", "options that differ, got"),
    (
        FLAT | {"answer": "a cat", "options": ["a  cat x", "the cat", "cat"]},
        "answer",
        "should name",
    ),
    (FLAT | {"boxes": [1, 2, 3, 4]}, "boxes", "x0, y0, x1, y1"),
    (FLAT | {"boxes": [[1, 2, 3, math.nan]]}, "boxes", "holds NaN or infinity"),
    (FLAT | {"boxes": [[1, 2, 3, math.inf]]}, "boxes", "holds NaN or infinity"),
    (FLAT | {"boxes": [[1, 2, 3, "4"]]}, "boxes", "x0, y0, x1, y1"),
    (FLAT | {"boxes": [[1, 2, 3, 4, 5]]}, "boxes", "x0, y0, x1, y1"),
    (FLAT | {"boxes": [[1, 2, 3, 4], [9, 2, 3, 4]]}, "boxes", "no pixel of an image of 480x320"),
    (FLAT | {"boxes": [[1, 2, 1, 4]]}, "boxes", "no pixel"),
    (FLAT | {"boxes": [[480, 2, 500, 4]]}, "boxes", "no pixel"),
    (FLAT | {"boxes": [[-9, -9, 0, 0]]}, "boxes", "no pixel"),
    (FLAT | {"kind": "chart"}, "kind", "'search' or 'neutral', got 'chart'"),
]


@pytest.mark.parametrize("row, field, words", BAD)
def test_a_bad_row_names_its_field_and_the_reason(row, field, words, tmp_path):
    with pytest.raises(Bad, match=words) as bad:
        rl_fields(row, 0, tmp_path)
    assert bad.value.field == field


def test_what_programs_showed_comes_back_in_its_order():
    shown = [picture(k)[0] for k in range(4)]
    row = {
        "image": [png(image) for image in shown],
        "question": "<image>How many?",
        "response": "a<sandbox_output>1<image>2<image></sandbox_output>b"
        "<sandbox_output><image></sandbox_output>c",
    }
    fields = thyme_fields(row, Path())
    assert fields.turns == ["a", "b", "c"] and [text for text, _ in fields.outputs] == ["12", ""]
    pictures = [fields.image, *(image for _, images in fields.outputs for image in images)]
    assert [image.tobytes() for image in pictures] == [image.tobytes() for image in shown]


def test_boxes_are_rounded_outwards_and_cut_at_the_border():
    row = FLAT | {"boxes": [[1.2, 2, 2.5, 4], [-5, 300.5, 9999, 1e300]]}
    assert rl_fields(row, 0, Path())["boxes"] == ((1, 2, 3, 4), (0, 300, 480, 320))


def test_options_may_differ_in_blanks_from_the_answer():
    fields = rl_fields(FLAT | {"answer": "red", "options": ["red ", "green"]}, 0, Path())
    assert is_correct("A", fields["answer"], fields["options"])


def test_a_reference_may_name_several_options_or_one_that_stands_there_twice():
    for answer, options, right in (("A\nB", ["1", "2", "3"], "B, A"), ("8", ["6", "8", "8"], "C")):
        fields = rl_fields(FLAT | {"answer": answer, "options": options}, 0, Path())
        assert is_correct(right, fields["answer"], fields["options"])
        assert not is_correct("A", fields["answer"], fields["options"])


SOURCES = [
    ("vstar", "search", True),
    ("chart", "search", True),
    ("ArxivQA", "search", True),
    ("thinklite_eureka", "neutral", True),
    ("ThinkLite-VL/chart", "neutral", True),
    ("Geometry3K", "neutral", True),
    ("my photos", "search", False),
    ("", "search", False),
]


@pytest.mark.parametrize("source, kind, known", SOURCES)
def test_the_kind_follows_the_source(source, kind, known):
    fields = rl_fields(FLAT | {"data_source": source}, 7, Path())
    assert (fields["kind"], fields["source"]) == (kind, source)
    assert (named(source, KINDS) is not None) == known
    assert fields["id"] == f"{source or 'row'}-7"
