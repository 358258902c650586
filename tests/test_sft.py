"""python -m pytest tests/test_sft.py      imitation, and the tiny network"""

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import RULES, copied, fresh_logp
from fixtures.make_fixtures import facts, parquet, picture, png
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import sft
from data import demonstrations
from grpo import group_row, log_probs, micro_batches
from kit.schemas import thyme_fields
from kit.tables import Bad
from rollout import TooLong, encode_prompt
from sft import imitate, load_thyme, mean_logp, replay, replay_all, rows_of, shuffled


@pytest.fixture(scope="module")
def demos():
    found = {d.route: d for d in demonstrations(60, seed=1)}
    assert set(found) == {"right", "whole", "slip", "guess", "neutral"}
    return found


@pytest.fixture(scope="module")
def trajectories(policy, demos):
    return list(replay_all(policy, list(demos.values()), RULES))


def test_a_demonstration_shows_what_its_code_shows(policy, demos):
    """The close-up comes from the sandbox, to the pixel, with the box it recorded."""
    demo, trajectory = demos["right"], replay(policy, demos["right"], replace(RULES, turns=1))
    (seen,) = (turn.observation for turn in trajectory.tool_turns)
    assert seen.images[0].tobytes() == demo.sample.image.crop(seen.boxes[0]).tobytes()
    assert trajectory.ended == "answered" and trajectory.answer == demo.sample.answer


def test_labels_are_the_demonstrators_words_and_nothing_else(policy, demos, trajectories):
    for demo, row in zip(demos.values(), rows_of(policy, trajectories), strict=True):
        said = [policy.encode(text, []).ids for text in demo.turns]
        assert row.labels.tolist() == sum(said, [])  # in order, although sandboxes run in parallel


def test_the_loss_is_the_cross_entropy_of_the_acted_tokens(policy, trajectories):
    expected = -torch.cat([fresh_logp(policy, t) for t in trajectories]).mean().item()
    for row_tokens in (8192, 150, 1):
        batches = list(micro_batches(rows_of(policy, trajectories), row_tokens))
        got = -mean_logp(policy, batches, learn=False)
        assert got == pytest.approx(expected, rel=1e-5)


def test_imitation_is_plain_clipped_steps_at_the_rates_given_until_told(policy, trajectories):
    learner, plain, rates = copied(policy), copied(policy), [0.3, 0.1, 0.2]
    rows, sgd = rows_of(policy, trajectories[:3]), torch.optim.SGD
    optimizer = sgd(learner.model.parameters(), lr=9.0)
    told = lambda i, loss, norm: i == 2  # noqa: E731
    imitate(learner, optimizer, lambda i: [[rows[i]]], range(99), rates.__getitem__, told)
    for row, rate in zip(rows, rates):
        plain.model.zero_grad()
        (-log_probs(plain, [row])[0].mean()).backward()
        weights = [p for p in plain.model.parameters() if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in weights]).norm()
        assert norm > 1  # so that clipping matters
        for p in weights:
            p.data -= rate * p.grad / norm
    for p, q in zip(learner.model.parameters(), plain.model.parameters()):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-5)


@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 5))
def test_every_epoch_visits_everything_once_in_an_order_of_its_own(n, batch, seed):
    batch_of = shuffled(n, batch, seed)
    flat = [k for i in range(max(8, 3 * n)) for k in batch_of(i)]
    for epoch in range(3):
        assert Counter(flat[epoch * n : (epoch + 1) * n]) == Counter(range(n))
    again = shuffled(n, batch, seed)  # a resumed run asks for batch 7 first and gets the same
    assert again(7) == flat[7 * batch : 8 * batch]
    orders = [tuple(shuffled(20, 20, s)(epoch)) for s in (seed, seed + 1) for epoch in range(3)]
    assert len({*orders, tuple(range(20))}) == 7  # each has its own


def test_a_demonstration_is_replayed_if_its_prompt_leaves_room_for_a_turn(policy, demos):
    prompt = len(encode_prompt(policy, demos["guess"].sample).ids)
    for more, fits in ((-1, False), (0, True), (1, True)):
        rules = replace(RULES, max_length=prompt + RULES.max_new_tokens + more)
        with nullcontext() if fits else pytest.raises(TooLong, match="sample demo-1-"):
            assert replay(policy, demos["guess"], rules).ended == "answered"


# Thyme-SFT

SHOWN = ("zero", "<image>", "<image>two<image>", "three")  # by the k-th program


def thyme_turns(n: int) -> list[str]:
    """n programs and an answer, in one long thought."""
    codes = [f"look {k} <code>\n```python\nprint({k})\n```\n</code>" for k in range(n)]
    first, *rest = [*codes, "So 7.</think>\n<answer>7</answer>"]
    return ["<think>" + first, *rest]


def thyme_row(n: int, **changed) -> dict:
    shown = [f"\n<sandbox_output>{word}</sandbox_output>\n" for word in SHOWN[:n]] + ["\n"]
    pictures = [png(picture(k)[0]) for k in range(1 + "".join(SHOWN[:n]).count("<image>"))]
    question = "<image>\nHow many?" + facts(picture(0)[0], "/data/x/a b.png")
    response = "".join(map("".join, zip(thyme_turns(n), shown)))
    return dict(image=pictures, question=question, response=response) | changed


def thyme(policy, row, rounds="all", rules=RULES, pixels=True):
    return sft.thyme_trajectory(policy, "0", thyme_fields(row, None), rounds, rules, pixels)


ONE = thyme_row(1)["response"]
GOLDEN = {  # rule: the turns whose tokens are learnt, in rows of 0, 1, 2 and 3 programs
    "all": ([0], [0, 1], [0, 1, 2], [0, 1, 2, 3]),
    "last_code_and_answer": ([0], [0, 1], [1, 2], [2, 3]),
    "after_last_obs": ([0], [0, 1], [2], [3]),
}


@pytest.mark.parametrize("n", range(4))
@pytest.mark.parametrize("rounds", GOLDEN)
def test_thymes_tokens_are_learnt_by_rounds_and_never_what_was_shown(policy, rounds, n):
    turns, seen = thyme_turns(n), "<|vision_start|><|image_pad|><|vision_end|>"
    shown = ["zero", seen, "two" + 2 * seen]  # text first, then the pictures
    world = ["<|im_start|>user\n" + seen + "How many?<|im_end|>\n<|im_start|>assistant\n"]
    world += [f"<|im_end|>\n<|im_start|>user\n<sandbox_output>{word}</sandbox_output><|im_end|>\n"
              "<|im_start|>assistant\n" for word in shown[:n]]  # fmt: skip

    def ids(text):
        pads = text.replace("<|image_pad|>", 12 * "<|image_pad|>")  # a picture of 480 x 320
        return policy.tokenizer(pads, add_special_tokens=False)["input_ids"]

    t = thyme(policy, thyme_row(n), rounds)
    assert t.ids == sum((ids(w) + ids(turn) for w, turn in zip(world, turns)), [])
    (row,) = rows_of(policy, [t])
    assert row.labels.tolist() == sum((ids(turns[k]) for k in GOLDEN[rounds][n]), [])
    shown = [image.tobytes() for turn in t.tool_turns for image in turn.observation.images]
    assert shown == [picture(k)[0].tobytes() for k in range(1, len(thyme_row(n)["image"]))]
    assert (t.answer, t.sample.answer, t.ended, len(t.tool_turns)) == ("7", "7", "answered", n)
    fast = thyme(policy, thyme_row(n), rounds, pixels=False)
    assert (fast.ids, fast.acted) == (t.ids, t.acted)


def test_thymes_paths_become_those_of_our_sandbox(policy):
    code = """image = Image.open('/data/x/a b.png')
os.makedirs('/mnt/data/temp_processed_images')
image.save('/mnt/data/temp_processed_images/c_1.jpg')
cv2.imread('/home/u/d-2.PNG')"""
    t = thyme(policy, thyme_row(1, response=ONE.replace("print(0)", code)))
    assert t.turns[0].code.strip().splitlines()[1:-1] == [
        "image = Image.open('image.png')", "os.makedirs('.')", "image.save('./c_1.jpg')",
        "cv2.imread('d-2.PNG')",
    ]  # fmt: skip


@pytest.mark.parametrize("changed, words", [
    ({"image": []}, "image: expected a list"),
    ({"image": thyme_row(2)["image"]}, r"image: 2 pictures for \[1, 0\] places"),
    ({"question": 5}, "question: expected a str, got '5'"),
    ({"response": ""}, "response: expected a str"),
    ({"response": ONE.replace("</code>", "")}, "response: an output follows what is no code"),
    ({"response": ONE.replace("<code>", "</think><answer>1</answer><code>")}, "an output follows"),
    ({"response": ONE.replace("</think>", "")}, "response: its tags do not close in order"),
    ({"response": ONE + "<answer>8</answer>"}, "response: its tags do not close in order"),
    ({"response": ONE.replace("look", "<|im_end|>")}, "response: a turn is empty or holds"),
    ({"response": "<sandbox_output>a</sandbox_output>" + ONE}, "response: a turn is empty"),
])  # fmt: skip
def test_a_thyme_row_that_does_not_parse_names_its_field(policy, changed, words):
    with pytest.raises(Bad, match=words):
        thyme(policy, thyme_row(1, **changed))


def test_thyme_rows_are_counted_listed_and_made_when_asked_for(policy, tmp_path, monkeypatch):
    where = Path(__file__).parent / "fixtures" / "thyme_sft.jsonl"
    trajectories, skipped = load_thyme(policy, where, rules=RULES)
    assert (len(trajectories), skipped) == (8, [])
    lengths = [len(t.ids) for t in trajectories]
    limit = sorted(lengths)[4]  # rows beyond a limit are left out whole, at the start
    short, skipped = load_thyme(policy, where, rules=replace(RULES, max_length=limit))
    assert [len(t.ids) for t in short] == [n for n in lengths if n <= limit]
    assert len(short) + len(skipped) == 8
    assert all(f"tokens, --max-length {limit}" in bad.reason for bad in skipped)
    with pytest.raises(ValueError, match="thyme_sft.jsonl: row 2, response: .* tokens"):
        load_thyme(policy, where, rules=replace(RULES, max_length=limit - 1), on_bad="stop")

    rows, made = rows_of(policy, trajectories)[2:6], []
    monkeypatch.setattr(sft, "group_row", lambda *of: made.append(1) or group_row(*of))
    assert len(rows) == 4 and not made
    logp, _ = log_probs(policy, [rows[0], rows[3]])
    assert len(made) == 2 and torch.isfinite(logp).all()


@pytest.mark.parametrize("k", [0, 1])
def test_a_row_with_a_picture_that_the_model_does_not_take_is_skipped(policy, tmp_path, k):
    rows = [thyme_row(2), thyme_row(2)]
    rows[0]["image"][k] = png(Image.new("RGB", (5700, 28)))
    where = parquet(tmp_path / "thyme.parquet", rows)
    trajectories, ((row, field, reason),) = load_thyme(policy, where, rules=RULES)
    assert (len(trajectories), row, field) == (1, 0, "image") and "200" in reason
