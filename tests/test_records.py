"""python -m pytest tests/test_records.py      at once: JSON lines with pictures beside them"""

import json
from dataclasses import dataclass

import pytest
from PIL import Image

from kit.records import Records, Unusable, file_of, join, opened, waves_left, write


@dataclass
class Seen:
    text: str
    images: list


def test_records_come_back_with_their_pictures_and_those_of_other_shapes_are_others(tmp_path):
    shapes = [Image.new("RGB", (8, 6)), Image.new("RGB", (6, 8)), Image.new("L", (16, 9))]
    file, text = tmp_path / "a" / "x.jsonl", "\u2028 \ud800 \x00 '"
    write(file, [{"seen": Seen(text, shapes)}, {"picture": shapes[0]}])
    one, two = Records(file)
    assert one["seen"]["text"] == text
    assert two["picture"] == one["seen"]["images"][0]  # the same picture is kept once
    assert len([*file.parent.iterdir()]) == 2 and len([*(file.parent / "images").iterdir()]) == 3
    for name, image in zip(one["seen"]["images"], shapes, strict=True):
        back = opened(file.parent, name)
        assert (back.mode, back.size, back.tobytes()) == (image.mode, image.size, image.tobytes())


def test_each_record_is_made_when_it_is_asked_for(tmp_path):
    made = []
    write(tmp_path / "x.jsonl", ({"i": i} for i in range(4)))
    records = Records(tmp_path / "x.jsonl", lambda record, folder: made.append(record["i"]))
    assert len(records) == 4 and made == []
    list(records[1::2])
    assert made == [1, 3]


@pytest.mark.parametrize("line", ["{", "3", "[" * 99_999, '{"j": 1}'])
def test_a_line_that_cannot_be_used_is_named(line, tmp_path):
    (tmp_path / "x.jsonl").write_text('{"i": 1}\n' + line + "\n")
    with pytest.raises(Unusable, match="x.jsonl, line 2: expected an episode as evaluate.py"):
        list(Records(tmp_path / "x.jsonl", lambda record, _: record["i"]))


def test_a_file_that_could_not_be_finished_is_not_there(tmp_path):
    def records():
        yield {"i": 1}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "x.jsonl", records())
    assert not list(tmp_path.glob("*.jsonl"))


def test_waves_are_written_once_and_joined_in_their_order(tmp_path):
    whole = tmp_path / "x.jsonl"
    for wave in (10, 2):
        write(file_of(whole, wave), [{"run": "a", "wave": wave}])
    assert waves_left(whole, "a", 11) == [i for i in range(11) if i not in (2, 10)]
    with pytest.raises(Unusable, match="x-10.jsonl is from another evaluation"):
        waves_left(whole, "b", 11)
    for wave in waves_left(whole, "a", 11):
        write(file_of(whole, wave), [{"run": "a", "wave": wave}])
    join(whole, 11)
    assert [json.loads(line)["wave"] for line in whole.open()] == [*range(11)]
    assert [path.name for path in tmp_path.glob("x*")] == ["x.jsonl"]
    assert waves_left(whole, "a", 11) == []
    with pytest.raises(Unusable, match="x.jsonl is from another evaluation"):
        waves_left(whole, "b", 11)
