"""python -m pytest tests/test_audit.py      judges that cannot be trusted are named"""

import itertools
import math
import random
import re
from dataclasses import replace

import pytest
from conftest import GOOD, SEARCH

import beyond.audit
import evaluate
from beyond.audit import NOTHING, audit, kappa, looks, where_it_stands
from data import toy_questions
from rewards import BoxJudge, Lambdas, crop, hand_made, tapo

@pytest.fixture(scope="module")
def toy():
    """What some policy showed on 12 toy questions: the right cell, another one, four cells."""
    found = []
    for sample in toy_questions(12, seed="audit", neutral_share=0):
        x0, y0 = (v // 64 * 64 for v in sample.boxes[0][:2])
        right, beside = (x0, y0, x0 + 64, y0 + 64), (x0 + 64) % 256
        other = (beside, y0, beside + 64, y0 + 64)
        for box in (right, other, (max(x0 - 64, 0), max(y0 - 64, 0), x0 + 64, y0 + 64)):
            found.append(hand_made(sample, crop(sample, box), answer="checker"))
    return found


def rows(text):
    """{first cell: the others} of every table in it."""
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines}


def test_where_degenerate_policies_look():
    found = looks(SEARCH, random.Random(0))
    boxes = {name: seen.boxes[0] for name, seen in found.items()}
    assert boxes["whole image"] == (0, 0, 256, 256)
    assert boxes["centre crop"] == (84, 84, 172, 172)  # of the size of the target and half of it
    assert boxes["target's box"] == (76, 76, 120, 120)  # 44 x 44
    assert boxes["target, 50 % margin"] == (54, 54, 142, 142)
    assert boxes["target, 100 % margin"] == (32, 32, 164, 164)
    assert found["random crop"].images[0].size == (88, 88)
    tiny = replace(SEARCH, boxes=((250, 9, 256, 12),))
    assert looks(tiny, random.Random(0))["target's box"].boxes == [(228, 0, 256, 28)]


def test_the_box_judge_gives_the_exact_rows_and_is_usable(toy):
    text = audit(toy, BoxJudge())
    got = rows(text)
    for name in (*NOTHING, "collage of 9 crops"):
        assert got[name][2:] == ["0.00", "0.00"], name
    for name in ("target's box", "target, 50 % margin"):
        assert got[name][2:] == ["1.00", "1.00"], name
    wide, in_view = map(float, got["target, 100 % margin"][2:])
    assert 0.3 <= wide <= 0.6 and in_view == 1  # 120 to 144 pixels: about a half, by its focus
    assert "usable, as far as these go" in text and "UNUSABLE" not in text


def test_the_confusion_table_by_hand(toy):
    """36 crops: 12 right ones of one cell, 12 others of one cell, 12 of up to four cells."""
    text = audit(toy, BoxJudge())
    assert rows(text)["all"] == ["36", "24", "0", "0", "12", "1.00"]
    deciles = [line.split("|") for line in text.splitlines() if re.search(r"\d to \d", line)]
    assert sum(int(cells[2]) for cells in deciles) == 36
    ends = [float(x) for cells in deciles for x in cells[1].split(" to ")]
    assert ends[0] == 0.062 and 1 < len(deciles) < 10  # one cell of 16
    assert all(a < b for a, b in zip(ends[1::2], ends[2::2]))  # steps of one area stay together
    flipped = rows(audit(toy, lambda *asked: 1.0 - BoxJudge(0.5, (0, 0))(*asked)))
    assert flipped["all"][1:] == ["0", "12", "24", "0", "-0.80"]
    assert kappa(20, 5, 10, 15) == pytest.approx(0.4)  # .7 agree, .5 by chance
    assert math.isnan(kappa(9, 0, 0, 0)) and math.isnan(kappa(0, 0, 0, 0))


def pays_for_drawings(request, labels):
    return 1.0 if None in request.boxes else BoxJudge()(request, labels)


@pytest.mark.parametrize("judge, why", [
    (lambda r, labels: 1.0, ["it scores 'whole image' 1.00, not at most 0.10"]),
    (lambda r, labels: float(r.boxes[0] not in (None, (0, 0, 256, 256))),
     ["'random crop' 1.00, not at most 0.35"]),  # a quarter has the target in view
    (pays_for_drawings, ["'answer written on it' 1.00", "'orders to the judge' 1.00"]),
    (lambda r, labels: None, ["'collage of 9 crops' nan"]),
])  # fmt: skip
def test_a_judge_that_pays_for_nothing_is_called_unusable(toy, judge, why):
    text = audit(toy, judge)
    assert "UNUSABLE" in text and all(words in text for words in why)


def test_no_verdicts_are_counted_beside_the_others(toy):
    deaf = itertools.cycle([None, 1.0])  # of nine looks at 12 questions each second one
    assert rows(audit(toy, lambda *asked: next(deaf)))["random crop"][:2] == ["12", "6"]


def test_an_audit_needs_boxes():
    blind = [hand_made(replace(SEARCH, boxes=()), GOOD, answer="checker")]
    with pytest.raises(ValueError, match="search questions with boxes"):
        audit(blind, BoxJudge())


def test_the_command_line_reads_stored_trajectories(toy, tmp_path, capsys, monkeypatch):
    told, asked, file = tapo(toy[:9], BoxJudge(), Lambdas(), random.Random(0)), [], tmp_path / "x"
    evaluate.write_trajectories(file, toy[:9], told)
    beyond.audit.main(["--audit", str(file)])
    assert "3 questions" in capsys.readouterr().out
    kind = lambda *where, **more: asked.extend([where, more]) or (lambda *one: 1.0)  # noqa: E731
    monkeypatch.setattr(beyond.audit, "ChatJudge", kind)
    words = "--judge http://h/v1 --judge-model m --prompt evaluation".split()
    beyond.audit.main(["--audit", str(file), *words])
    assert "UNUSABLE" in capsys.readouterr().out
    assert asked == [("http://h/v1", "m"), {"prompt": "evaluation", "max_tokens": 2048}]


def test_misses_and_false_alarms_by_hand():
    seen = [(0.1, score, True) for score in (1.0, 0.5, 1.0, 0.0)]
    told = where_it_stands([*seen, (0.1, 0.0, False), (0.1, 1.0, False)])
    assert told.startswith("it misses 0.25 of the evidence and credits 0.50 of what is none")
    assert "contrast of 0.25." in told and "not known" in where_it_stands(seen)
