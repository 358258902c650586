"""python -m pytest tests/test_schemas.py      rows of public sets become fields"""

from pathlib import Path

import pytest
from fixtures.make_fixtures import facts, picture, png, rl_rows

from kit.schemas import KINDS, named, rl_fields, thyme_fields
from kit.tables import Bad

PICTURE = picture(0)[0]
PNG = png(PICTURE)

FLAT = {"image": {"bytes": PNG, "path": None}, "problem": "<image>How many?", "answer": 4}
VERL = rl_rows()[0]
PARTS = [{"type": "image", "text": None}, {"type": "text", "text": "How many?"}]
TALK = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "?"},
        {"role": "user", "content": "How many?"}]  # fmt: skip
SIGN = "What color is the small sign?\n(A) red\n(B) green"
SCHEMAS = {
    "flat": (FLAT | {"question": float("nan"), "answer": 0}, "How many?", "0"),
    "in tags": (FLAT | {"answer": "so <answer> 4 </answer>", "image": "a.png"}, "How many?", "4"),
    "verl": (VERL | {"prompt": "Other?", "image": "gone.png", "answer": "B"}, SIGN, "A"),
    "verl without extra_info": ({k: VERL[k] for k in VERL if k != "extra_info"}, SIGN, "A"),
    "prompt in parts": (
        FLAT | {"problem": None, "prompt": [{"role": "user", "content": PARTS}]}, "How many?", "4"),
    "the last of several messages": (FLAT | {"problem": None, "messages": TALK}, "How many?", "4"),
    "options": (FLAT | {"answer": "b", "options": ["one", "two"]}, "How many?", "b"),
}  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS)
def test_public_schemas_differ_in_their_columns_alone(schema, tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    row, question, answer = SCHEMAS[schema]
    fields = rl_fields({"boxes": [[1, 2.5, 3, 999]]} | row, 5, tmp_path)
    told = (fields["question"], fields["answer"], fields["boxes"])
    assert told == (question, answer, ((1, 2, 3, 320),))
    assert fields["image"].tobytes() == PICTURE.tobytes()


TWO = ["one", "two"]
BAD = [  # what is changed in a flat row, the reason
    (dict(image=None), "nothing in images or image"),
    (dict(image={"bytes": PNG[:99]}), "no image that can be read"),
    (dict(problem=" <image> "), "expected a text, got"),
    (dict(problem=None, prompt=[{"role": "system", "content": "x"}]), "text"),
    (dict(answer=None), "nothing in reward_model.ground_truth or answer"),
    *((dict(answer=a), "expected a text or a number, got") for a in (["4", "four"], True)),
    (dict(answer="C", options=TWO), "should name one of the options"),
    (dict(answer="A", options=["red", "red "]), "options that differ"),
    *((dict(options=value), "expected a list of texts") for value in ("(A) one", ["one", None])),
    *((dict(boxes=boxes), "x0, y0, x1, y1") for boxes in
      ([1, 2, 3, 4], [[1, 2, 3, "4"]], [[1, 2, 3, 4, 5]])),
    (dict(boxes=[[1, 2, 3, 4], [9, 2, 3, 4]]), "no pixel of an image of 480x320"),
    (dict(boxes=[[480, 2, 500, 4]]), "no pixel"),
    (dict(kind="chart"), "'search' or 'neutral', got 'chart'"),
]  # fmt: skip


@pytest.mark.parametrize("change, words", BAD)
def test_a_bad_row_names_its_field_and_the_reason(change, words, tmp_path):
    with pytest.raises(Bad, match=words) as bad:
        rl_fields(FLAT | change, 0, tmp_path)
    assert bad.value.field == next(iter(change)).replace("problem", "question")


def test_what_programs_showed_comes_back_in_its_order_and_paths_are_ours():
    shown = [picture(k)[0] for k in range(4)]
    said = ("/d/9.png /mnt/b/c.png<sandbox_output>1<image>2<image></sandbox_output>b"
            "<sandbox_output><image></sandbox_output>c")  # fmt: skip
    asked = "<image>How many?" + facts(PICTURE, "/d/9.png")
    row = {"image": [*map(png, shown)], "question": asked, "response": said}
    fields = thyme_fields(row, Path())
    assert fields.turns == ["image.png c.png", "b", "c"] and fields.question == "How many?"
    assert [text for text, _ in fields.outputs] == ["12", ""]
    pictures = [fields.image, *(image for _, images in fields.outputs for image in images)]
    assert [image.tobytes() for image in pictures] == [image.tobytes() for image in shown]


SOURCES = [  # name of a source, kind, does a word of KINDS stand in it?
    ("vstar", "search", True), ("chart", "search", True), ("ArxivQA", "search", True),
    ("thinklite_eureka", "neutral", True), ("ThinkLite-VL/chart", "neutral", True),
    ("Geometry3K", "neutral", True), ("my photos", "search", False), ("", "search", False),
]  # fmt: skip


@pytest.mark.parametrize("source, kind, known", SOURCES)
def test_the_kind_follows_the_source(source, kind, known):
    fields = rl_fields(FLAT | {"data_source": source}, 7, Path())
    assert (fields["kind"], fields["source"]) == (kind, source)
    assert (named(source, KINDS) is not None) == known
    assert fields["id"] == f"{source or 'row'}-7"
