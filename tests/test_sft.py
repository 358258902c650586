"""python -m pytest tests/test_sft.py      about 15 s: imitation, and the tiny network"""

import copy
import random
from collections import Counter

import pytest
import torch
from conftest import RULES, fresh_logits
from hypothesis import given
from hypothesis import strategies as st

import sft
from data import demonstrations
from rollout import Policy, load_policy
from grpo import micro_batches
from sft import imitate, mean_logp, replay, replay_all, rows_of, shuffled


@pytest.fixture(scope="module")
def demos():
    found = {d.route: d for d in demonstrations(60, seed=1)}
    assert set(found) == {"right", "whole", "wrong", "guess", "neutral"}
    return found


@pytest.fixture(scope="module")
def trajectories(policy, demos):
    return list(replay_all(policy, list(demos.values()), RULES))


def test_a_demonstration_shows_what_its_code_shows(policy, demos):
    """The close-up comes from the sandbox, to the pixel, with the box it recorded."""
    demo = demos["right"]
    trajectory = replay(policy, demo, RULES)
    (step,) = trajectory.tool_steps
    (box,) = step.observation.boxes
    assert step.observation.images[0].tobytes() == demo.sample.image.crop(box).tobytes()
    x0, y0, x1, y1 = demo.sample.boxes[0]
    assert box[0] <= x0 and box[1] <= y0 and x1 <= box[2] and y1 <= box[3]
    assert trajectory.ended == "answered" and trajectory.answer == demo.sample.answer


def test_labels_are_the_demonstrators_words_and_nothing_else(policy, demos, trajectories):
    for demo, row in zip(demos.values(), rows_of(policy, trajectories), strict=True):
        said = [
            policy.tokenizer(text, add_special_tokens=False)["input_ids"] for text in demo.turns
        ]
        assert row.labels.tolist() == sum(said, [])


def test_order_is_kept_although_sandboxes_run_in_parallel(demos, trajectories):
    assert [t.sample.id for t in trajectories] == [d.sample.id for d in demos.values()]


def test_the_loss_is_the_cross_entropy_of_the_acted_tokens(policy, trajectories):
    losses = []
    for t in trajectories:
        logits = fresh_logits(policy, t)
        logits[:, policy.forbidden] = float("-inf")
        at = torch.tensor([k for k, acted in enumerate(t.acted) if acted])
        losses.append(torch.nn.functional.cross_entropy(
            logits[at - 1], torch.tensor(t.ids)[at], reduction="none"))  # fmt: skip
    expected = torch.cat(losses).mean().item()
    for row_tokens in (8192, 150, 1):
        batches = list(micro_batches(rows_of(policy, trajectories), row_tokens))
        got = -mean_logp(policy, batches, learn=False)
        assert got == pytest.approx(expected, rel=1e-5)


def test_imitation_learns_and_ends_when_told(policy, trajectories):
    learner = Policy(copy.deepcopy(policy.model), policy.tokenizer, policy.image_processor)
    rows = rows_of(learner, trajectories)
    optimizer = torch.optim.AdamW(learner.model.parameters())
    losses = []

    def after(i, loss, norm):
        losses.append(loss)
        return i == 11

    done = imitate(learner, optimizer, lambda i: [rows], 99, lambda i: 3e-3, after=after)
    assert done == len(losses) == 12
    assert losses[-1] < losses[0] / 2
    assert optimizer.param_groups[0]["lr"] == 3e-3


@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 5))
def test_every_epoch_visits_everything_once(n, batch, seed):
    batch_of = shuffled(n, batch, seed)
    flat = [k for i in range(max(8, 3 * n)) for k in batch_of(i)]
    for epoch in range(3):
        assert Counter(flat[epoch * n : (epoch + 1) * n]) == Counter(range(n))
    again = shuffled(n, batch, seed)  # a resumed run asks for batch 7 first and gets the same
    assert again(7) == flat[7 * batch : 8 * batch]


def test_the_tiny_tokenizer_knows_the_toys_words_and_spells_the_rest(policy):
    spelt = policy.tokenizer.convert_ids_to_tokens(
        policy.tokenizer("image.crop((64,128,128,192)).show() red b3 <code>")["input_ids"]
    )
    assert spelt == [
        "image.crop((", "64", ",", "128", ",", "128", ",", "192", ")).show()", "Ġred", "Ġb3", "Ġ",
        "<code>",
    ]  # fmt: skip
    assert len(policy.tokenizer("Zürich")["input_ids"]) == 7  # bytes


@pytest.mark.parametrize("kind", list(sft.PACKS))
def test_packs_teach_what_their_map_shows(policy, kind):
    rng = random.Random(0)
    scene = sft.draw_scene(rng, 0.25)
    pack = sft.PACKS[kind](scene, rng)
    learnt = " ".join(part for part, learn in pack if learn)
    if kind == "reading":
        assert sum(f" {s.color}<answer>{s.texture}" in learnt for s in scene.squares) == 4
    if kind == "grounding":
        text = "".join(part for part, _ in pack if isinstance(part, str))
        pairs = [(f" {s.color} {s.cell}", f" {s.cell} {s.color}") for s in scene.squares]
        assert all(a in text or b in text for a, b in pairs)
    trajectory = sft.pack_trajectory(policy, pack)
    (row,) = rows_of(policy, [trajectory])
    assert policy.tokenizer.decode(row.labels.tolist()) == "".join(p for p, learn in pack if learn)


def test_the_committed_checkpoint_can_see_the_world():
    """The gates that `python train.py --preset tiny-base` had to pass, on other maps."""
    tiny = load_policy("tiny")
    skills = {
        kind: sft.skill(tiny, sft.pack_rows(tiny, kind, 60, "test"), 8192) for kind in sft.PACKS
    }
    assert skills["grounding"]["cell"] > 0.95 and skills["grounding"]["colour"] > 0.95
    assert skills["reading"]["texture"] > 0.95 and skills["look"]["corner"] > 0.95
    assert skills["colour"]["colour"] > 0.9
