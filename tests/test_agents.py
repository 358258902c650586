"""python -m pytest tests/test_agents.py      seconds: trajectories of any agent are rated alike"""

import json
import re

import pytest
from conftest import GOOD, IMAGE, SEARCH, WRONG
from PIL import Image

import beyond.agents
import evaluate
from beyond.agents import read_foreign
from faithfulness import Rate, count, finding
from rewards import hand_made
from test_faithfulness import scored


@pytest.fixture
def folder(tmp_path):
    IMAGE.save(tmp_path / "map.png")
    Image.new("RGB", (9, 9)).save(tmp_path / "shown.png")
    return tmp_path


BASE = {"question": "Which?", "image": "map.png", "answer": "A", "correct": True, "steps": []}
SMALL, AROUND = [70, 70, 90, 90], {"box": [64, 64, 128, 128]}  # a target, and a step that shows it


def write(folder, *lines):
    texts = [r if isinstance(r, str) else json.dumps(r, ensure_ascii=False) for r in lines]
    (folder / "t.jsonl").write_text("\n".join(texts) + "\n", encoding="utf-8")
    return folder / "t.jsonl"


def run_main(capsys, *argv):
    beyond.agents.main([*map(str, argv)])
    return capsys.readouterr().out


def test_any_agents_steps_are_held_against_the_targets(folder):
    steps = [
        {"box": [70.5, 60, 130, 400], "text": "The line separator \u2028 is text."},
        {"box": [-4, -0.5, 60, 60]},
        {"box": [0, 0, 60, 60], "score": 1},
        {"image": "shown.png"},
        {"image": "shown.png", **AROUND},
        {"error": "NameError"},
        {"code": "print(1)"},
    ]
    line = BASE | {"targets": [[76, 76, 120, 120]], "steps": steps, "id": "q"}
    ((t, reward),) = read_foreign(write(folder, line))
    boxes = [step.observation.boxes for step in t.tool_turns[:2]]
    assert boxes == [[(70, 60, 130, 256)], [(0, 0, 60, 60)]]  # outwards, and cut
    assert reward.scores == (1.0, -2.5 * 60 * 60 / 256**2, 1, None, 1.0, -1.0, 0.0)
    assert t.tool_turns[4].observation.images[0].size == (9, 9)
    f = finding(t, reward)
    assert (f.calls, f.failed, f.correct, f.cluster) == (7, 1, True, "q")


def test_a_judge_that_sees_takes_the_pictures_without_score(folder):
    asked = []
    judge = lambda request, labels: asked.append(request.images[0].size) or 1.0  # noqa: E731
    steps = [{"image": "shown.png"}, {"image": "shown.png", "score": None}, {"code": "print(1)"}]
    ((_, reward),) = read_foreign(write(folder, BASE | {"steps": steps}), judge)
    assert reward.scores == (1.0, None, 0.0) and asked == [(9, 9)]


def test_without_targets_or_scores_there_is_no_verdict(folder):
    lines = [BASE | {"steps": [{"box": [0, 0, 9, 9]}]}, BASE | {"kind": "neutral", "answer": None}]
    findings = [finding(*pair) for pair in read_foreign(write(folder, *lines))]
    assert findings[0].scores == (None,) and not findings[1].search
    assert count(findings)["no_verdict"] == Rate(1, 1)


@pytest.mark.parametrize("line, message", [
    ("{", "Expecting property name"), ("[" * 100_000, "recursion"),
    ("[]", r"the line is \[\], no object"),
    ({"question": "?", "image": "map.png"}, "lacks .'answer', 'correct', 'steps'"),
    (BASE | {"target": []}, "has .'target'.; known are question, .*targets"),
    (BASE | {"correct": 1}, "correct 1, which is of another type"),
    (BASE | {"image": "lost.png"}, "no such file.*lost.png"),
    (BASE | {"steps": [{"box": ["0", "0", "9", "9"]}]}, "a box is .x0, y0, x1, y1., not .'0', '0'"),
    (BASE | {"targets": [[9, 9, 0, 0]]}, "has no pixel"),
    (BASE | {"targets": [[0, 0, 9]]}, "has no pixel"),
    (BASE | {"steps": [{}, {"bbox": 1}]}, "step 2 .*'bbox'.; known are box, image"),
    (BASE | {"steps": [{"score": 7}]}, "step 1 has score 7: expected one from 0 to 1"),
    (BASE | {"steps": [{"box": [0.25, 0, 0.5, 1]}]}, "expected pixels"),
])  # fmt: skip
def test_what_does_not_fit_the_schema_is_named_with_its_line(folder, line, message):
    with pytest.raises(ValueError, match=f"line 2.*{message}"):
        list(read_foreign(write(folder, BASE, line)))


@pytest.mark.parametrize("box", [
    [10, 10, 10, 40], [90, 90, 10, 10], [300, 0, 310, 9], [0, 0, 9, float("inf")], None,
    [0, 0, 9], [0, 0, None, 9], [[0, 0, 9, 9]], [],
])  # fmt: skip
def test_a_call_with_a_bad_box_showed_nothing_and_is_counted(folder, capsys, box):
    line, bad = BASE | {"targets": [SMALL]}, {"box": box}
    steps = [bad, bad | {"error": "ValueError"}, bad | {"image": "shown.png"}]
    path = write(folder, line | {"steps": [AROUND]}, line | {"steps": steps})
    _, (t, reward) = read_foreign(path)
    shown = [len(turn.observation.images) for turn in t.tool_turns]
    assert shown == [0, 0, 1] and reward.scores == (0.0, -1.0, None)
    number = 2 if box is None else 3  # beside a picture, null is no box at all
    said = f"{number} calls gave a box that holds nothing of the image (null, "
    assert run_main(capsys, path).startswith(said)
    assert "gave a box" not in run_main(capsys, write(folder, line | {"steps": [AROUND]}))


def test_the_command_prints_rates_intervals_and_tables(folder, capsys):
    hit = BASE | {"targets": [SMALL], "steps": [AROUND]}
    out = run_main(capsys, write(folder, hit, "", hit | {"correct": False}))
    assert re.search(r"faithful_and_correct +0.500 \[0.000, 1.000\] \(1/2\)", out)
    assert re.search(r"correct +1 +0\nwrong +1 +0\n", out)
    assert re.search(r"1 calls +1.000 ", out)
    ours = [hand_made(SEARCH, WRONG, GOOD, answer="checker"), hand_made(SEARCH, answer="x")]
    evaluate.write_trajectories(folder / evaluate.EPISODES, ours, scored(ours))
    out = run_main(capsys, folder / evaluate.EPISODES)
    assert re.search(r"faithful_and_correct +0.500 \(1/2\)", out)  # one question: no interval


@pytest.mark.parametrize("text, message", [("", "is empty"), ("{", "line 1")])
def test_the_command_says_what_is_wrong_with_a_file(folder, capsys, text, message):
    with pytest.raises(SystemExit):
        run_main(capsys, write(folder, text))
    assert message in capsys.readouterr().err


def test_null_says_that_something_is_not_known_and_a_mark_at_the_start_of_a_file_is_no_text(folder):
    """As exporters write that know one set of keys for all."""
    nothing = dict.fromkeys(("box", "image", "text", "code", "error"))
    steps = [nothing, nothing | AROUND | {"score": None}]
    line = BASE | dict.fromkeys(("kind", "text", "id")) | {"targets": [SMALL], "steps": steps}
    path = write(folder, line, BASE | {"targets": None})
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    (t, reward), _ = read_foreign(path)
    assert [len(turn.observation.images) for turn in t.tool_turns] == [0, 1]
    assert reward.scores == (0.0, None) and t.sample.id == "line 1"
    with pytest.raises(ValueError, match="correct None"):  # this has to be known
        list(read_foreign(write(folder, BASE | {"correct": None})))
