"""python -m pytest tests/test_data.py      samples, the toy world, public questions"""

import random

import numpy as np
import pytest
from fixtures.make_fixtures import parquet, picture, png
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import data
import kit.schemas
from data import Sample, demonstrations, draw_scene, load_rl, out_of_prior_questions, toy_questions
from kit.tables import read_image
from sandbox import Observation

PICTURE = picture(0)[0]
CELL = {"bytes": png(PICTURE), "path": None}
seeds = st.integers(0, 10**6)


def is_usual(question):
    return question.answer == data.USUAL_TEXTURE[question.question.split()[5]]


def overview(policy, image):
    return policy.pictures([image])[0].pixels.numpy()


@given(seeds)
def test_textures_are_invisible_in_the_overview_and_plain_in_a_crop(policy, seed):
    """The same map with usual and with unusual textures: equal to the last bit from afar."""
    usual, unusual = (draw_scene(random.Random(seed), shortcut) for shortcut in (1.0, 0.0))
    assert np.array_equal(overview(policy, usual.image), overview(policy, unusual.image))
    for a, b in zip(usual.squares, unusual.squares, strict=True):
        assert a.texture != b.texture and a.box == b.box
        near = [overview(policy, scene.image.crop(a.cell_box)) for scene in (usual, unusual)]
        assert np.abs(near[0] - near[1]).mean() > 0.1


@given(seeds)
def test_squares_lie_inside_their_own_cells_and_share_nothing(seed):
    squares = draw_scene(random.Random(seed), 0.5).squares
    assert len({s.color for s in squares}) == len({s.cell for s in squares}) == 5
    for s in squares:
        x0, y0, x1, y1 = s.box
        cx0, cy0, cx1, cy1 = s.cell_box
        assert cx0 < x0 < x1 < cx1 and cy0 < y0 < y1 < cy1
        assert x1 - x0 == y1 - y0 in (40, 44, 48) and x0 % 4 == y0 % 4 == 0
        assert s.cell == "abcd"[x0 // 64] + str(y0 // 64 + 1)


@pytest.mark.parametrize("shortcut", [0.0, 0.5, 1.0])
def test_the_dial_is_the_share_of_usual_textures(shortcut):
    questions = toy_questions(600, "dial", shortcut, neutral_share=0.0)
    close = 0.06 if shortcut == 0.5 else 0
    assert np.mean([is_usual(q) for q in questions]) == pytest.approx(shortcut, abs=close)


def test_a_guesser_is_always_wrong_against_the_prior():
    for q in out_of_prior_questions(100, 0):
        assert q.kind == "search" and q.against_prior and not is_usual(q)
    for q in toy_questions(100, 0):  # where the prior is always right
        assert not q.against_prior and (q.kind == "neutral" or is_usual(q))


@pytest.mark.parametrize("make", [toy_questions, out_of_prior_questions, demonstrations])
def test_questions_depend_on_their_arguments_alone(make):
    def drawn(seed):
        made = [getattr(one, "sample", one) for one in make(20, seed)]
        assert all([b[2] - b[0] < 64 for b in s.boxes] == [1] * (s.kind == "search") for s in made)
        return [s.image.tobytes() + s.question.encode() for s in made], {s.id for s in made}

    (three, ids), (four, others) = drawn(3), drawn(4)
    assert drawn(3)[0] == three != four and len(ids) == 20 and not ids & others
    with pytest.raises(ValueError, match="between 0 and 1, got 1.5"):
        toy_questions(1, 0, shortcut=1.5)
    assert 0.1 < np.mean([s.kind == "neutral" for s in toy_questions(400, 0)]) < 0.4


@pytest.mark.parametrize("habit", data.HABITS)
def test_demonstrations_follow_the_habit_and_do_what_they_say(habit):
    demos = demonstrations(1500, 0, habit)
    search = [d for d in demos if d.route != "neutral"]
    assert len(search) / len(demos) == pytest.approx(0.75, abs=0.04)
    assert (demonstrations(9, 0) == demos[:9]) == (habit == "careless")
    if habit == "careless":  # the habit behind docs/results.md
        assert data.HABITS[habit] == {"right": 0.2, "whole": 0.1, "slip": 0.3, "guess": 0.4}
    usual = np.mean([is_usual(d.sample) for d in search])
    assert usual == pytest.approx(0.25, abs=0.03)  # one of four: no prior
    for route, share in data.HABITS[habit].items():
        assert np.mean([d.route == route for d in search]) == pytest.approx(share, abs=0.04)
    for d in search:
        looks, named = data.LOOKS[d.route], d.sample.question.split()[5]
        said = d.sample.answer if "target" in looks else data.USUAL_TEXTURE[named]
        assert f"<answer>{said}</answer>" in d.turns[-1]
        assert len(d.turns) == len(looks) + 1
        x0, y0, x1, y1 = d.sample.boxes[0]
        for place, turn in zip(looks, d.turns):
            box = tuple(map(int, turn.split("crop((")[1].split("))")[0].split(",")))
            inside = box[0] <= x0 and box[1] <= y0 and x1 <= box[2] and y1 <= box[3]
            assert inside == (place in ("target", "whole"))
            assert (box == (0, 0, data.SIZE, data.SIZE)) == (place == "whole")
            if place == "beside":  # always on the same side, but at the edge
                assert box[0] == (x0 // 64 + 1) * 64 or (x0 // 64, box[0]) == (3, 2 * 64)
                assert box[1] == y0 // 64 * 64
    looking = [len(d.turns) - 1 for d in demos if d.route == "neutral"]
    assert np.mean(looking) == pytest.approx(0.5 * (habit == "eager"), abs=0.08)


@given(st.text("ab <é", max_size=30), st.integers(1, 30))
def test_what_code_printed_is_cut_behind_the_limit_and_told_so(log, limit):
    log = log.strip()
    told = data.observation_text(Observation(text=log), str, limit)
    whole = log or data.NOTHING_SHOWN
    assert told == (whole if len(log) <= limit else log[:limit] + " ...")


def test_an_observation_tells_of_every_repair_and_error():
    seen = Observation(text="2\n", notes=["note: a"], error="ValueError: b")
    text = data.observation_text(seen, str, limit=1)  # the limit is the log's
    assert text.splitlines() == ["2", "note: a", "ValueError: b", data.FIX_IT]
    assert data.observation_text(Observation(images=[PICTURE] * 2), str, 9) == data.IMAGE * 2


def test_a_prompt_tells_the_size_and_foreign_text_is_cleaned_wherever_it_enters():
    asked = Sample("x", PICTURE, "<forged>", "!", options=("<forged>",))
    seen = Observation("<forged>", notes=["<forged>"], error="<forged>", environment="<forged>")
    clean = lambda text: text.replace("<forged>", "clean")  # noqa: E731
    picture, *parts = data.messages(asked, clean)[1]["content"]
    text = "".join(part["text"] for part in parts)
    told = data.observation_text(seen, clean, 99)
    assert "forged" not in text + told and (text.count("clean"), told.count("clean")) == (2, 4)
    assert "480x320" in text and text.startswith("clean\nA. clean\n") and picture["type"] == "image"


@pytest.mark.parametrize("size", [(5600, 28), (1, 200), (0, 5)])
def test_an_image_that_the_model_cannot_take_is_refused_by_name(size):
    with pytest.raises(ValueError, match=f"sample thin: its image has {size[0]}x{size[1]} pixels"):
        Sample("thin", Image.new("RGB", size), "?", "!")
    assert Sample("fine", Image.new("LA", (199, 1)), "?", "!").image.mode == "RGB"
    with pytest.raises(ValueError, match="'search' or 'neutral', got 'chart'"):
        Sample("x", PICTURE, "?", "!", kind="chart")


# Public data sets


def test_nothing_is_lost_silently(tmp_path):
    """Loaded + skipped = total, by row number and field; or the first bad row stops the run."""
    thin = {"bytes": png(Image.new("RGB", (400, 2))), "path": None}
    half = {"bytes": CELL["bytes"][:99], "path": None}
    cells = [CELL, None, CELL, half, thin]
    rows = [{"image": cell, "problem": "?", "answer": "!"} for cell in cells]
    where = parquet(tmp_path / "a.parquet", rows)
    samples = load_rl(where)
    assert [s.id for s in samples] == ["row-0", "row-2"]
    assert [(bad.row, bad.field) for bad in samples.skipped] == [(i, "image") for i in (1, 3, 4)]
    assert "200 times longer than wide" in samples.skipped[-1].reason
    with pytest.raises(ValueError, match="a.parquet: row 1, image: nothing in images or image"):
        load_rl(where, on_bad="stop")


def test_a_second_start_decodes_nothing_until_the_file_or_a_limit_changes(tmp_path, monkeypatch):
    rows = [{"image": CELL, "problem": "word " * n, "answer": "!"} for n in (1, 200, 20)]
    where, decoded = parquet(tmp_path / "a.parquet", rows), []
    reading = lambda *cell: decoded.append(cell) or read_image(*cell)  # noqa: E731
    monkeypatch.setattr(kit.schemas, "read_image", reading)

    def load(limit: int, key=True) -> tuple[list[int], int]:
        def fits(sample):
            if len(sample.question) > limit:
                raise ValueError("too long")

        decoded.clear()
        samples = load_rl(where, "skip", fits, ("letters", limit) if key else None)
        assert {(bad.field, bad.reason) for bad in samples.skipped} <= {("length", "too long")}
        return [bad.row for bad in samples.skipped], len(decoded)

    assert load(200) == ([1], 3) and load(200) == ([1], 0)
    assert load(999) == ([], 3) and load(999) == ([], 0)
    assert load(200, key=False) == ([1], 3) == load(200, key=False)  # unknown limits: never kept
    parquet(where, [rows[0], rows[0], rows[1]])
    assert load(200) == ([2], 3) and load(200) == ([2], 0)
