"""python -m pytest tests/test_tiny.py      the tiny network, and what it was taught"""

import random
from pathlib import Path

import pytest

from beyond.tiny import GATES, PACKS, pack_rows, pack_trajectory, skills_of, tiny_policy
from data import draw_scene
from rollout import load_policy
from sft import rows_of

COMMITTED = Path(__file__).resolve().parent.parent / "tiny"


def test_the_tiny_tokenizer_knows_the_toys_words_and_spells_the_rest(policy):
    spelt = policy.tokenizer.tokenize("image.crop((64,128,128,192)).show() red b3 <code>")
    assert spelt == ["image.crop((", "64", ",", "128", ",", "128", ",", "192", ")).show()", "Ġred",
                     "Ġb3", "Ġ", "<code>"]  # fmt: skip
    assert len(policy.tokenizer("Zürich")["input_ids"]) == 7  # bytes


@pytest.mark.parametrize("kind", list(PACKS))
def test_packs_teach_what_their_map_shows(policy, kind):
    rng = random.Random(0)
    scene = draw_scene(rng, 0.25)
    pack = PACKS[kind](scene, rng)
    learnt = " ".join(part for part, learn in pack if learn)
    assert ("\n", True) not in pack  # what separates lessons is not learnt
    if kind == "reading":
        assert sum(f" {s.color}<answer>{s.texture}" in learnt for s in scene.squares) == 4
    if kind == "grounding":
        text = "".join(part for part, _ in pack if isinstance(part, str))
        pairs = [(f" {s.color} {s.cell}", f" {s.cell} {s.color}") for s in scene.squares]
        assert all(a in text or b in text for a, b in pairs)
    trajectory = pack_trajectory(policy, pack)
    (row,) = rows_of(policy, [trajectory])
    assert policy.tokenizer.decode(row.labels.tolist()) == "".join(p for p, learn in pack if learn)


def test_the_committed_checkpoint_can_see_the_world():
    """The gates that `python train.py --preset tiny-base` had to pass, on other maps."""
    tiny = load_policy(COMMITTED)
    skills = skills_of(tiny, {kind: pack_rows(tiny, kind, 60, "test") for kind in PACKS}, 8192)
    assert all(skills[name] > 0.9 for name in GATES), skills


def test_the_command_writes_the_committed_files_again_and_as_many_weights(tmp_path):
    tiny_policy(seed=2).save(tmp_path)
    for file in COMMITTED.iterdir():
        again, committed = (tmp_path / file.name).read_bytes(), file.read_bytes()
        weights = file.suffix == ".safetensors"
        assert len(again) == len(committed) if weights else again == committed, file
