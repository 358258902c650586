"""python -m pytest tests/test_qwen.py      about 30 s: what Qwen2.5-VL needs. Most tests have the
released checkpoint's file layout, with its real tokenizer, chat template and settings, and a tiny
random network inside."""

import copy
import json
import os
import random
import re
import shutil
import string
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import RULES, SCRIPTS, fresh_logits, scripted
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

import kit.qwen
import rollout
from data import TAGS, Sample, load_rl, parse, toy_questions
from grpo import group_row, log_probs
from kit.adapter import adapted
from kit.grammar import end_of_turn
from kit.qwen import Model, Policy, freeze_vision
from rollout import Rules, check_fits, encode_prompt, load_policy, play
from sft import load_thyme, rows_of

FIXTURES = Path(__file__).resolve().parent / "fixtures"


@pytest.fixture(scope="module")
def standin(standin_folder):
    return load_policy(standin_folder)


@contextmanager
def within(policy, max_pixels):
    """The same policy on another pixel budget, for a while."""
    own = policy.image_processor.size
    policy.image_processor.size = {
        "shortest_edge": own["shortest_edge"],
        "longest_edge": max_pixels,
    }
    yield
    policy.image_processor.size = own


@pytest.fixture(scope="module")
def played(standin, samples):
    with scripted(standin, SCRIPTS) as heard:
        groups = play(standin, samples[:2], 3, RULES)
    return [t for group in groups for t in group], heard


def test_the_checkpoint_is_trained_in_fp32_whatever_it_was_saved_in(standin):
    assert {p.dtype for p in standin.model.parameters()} == {torch.float32}


def test_rollouts_equal_a_fresh_forward(standin, played):
    trajectories, heard = played
    for t in trajectories:
        fresh = fresh_logits(standin, t).log_softmax(-1)
        for turn, said in zip(t.turns, heard[id(t)], strict=True):
            difference = said.log_softmax(-1) - fresh[turn.start - 1 : turn.end - 1]
            assert difference.abs().max() <= 1e-5


def test_windows_of_a_length_in_one_call_are_the_windows_one_by_one(standin, monkeypatch):
    """Photos of odd sizes, two of them alike: in one layer their windows, in one the pictures."""
    grids = torch.tensor([[1, 22, 34], [1, 8, 8], [1, 36, 14], [1, 8, 8], [1, 26, 20]])
    pixels = torch.randn(int(grids.prod(-1).sum()), 1176, generator=torch.manual_seed(0))
    attend, calls, found = torch.nn.functional.scaled_dot_product_attention, [], {}

    def counting(query, *args, **how):
        calls.append(query.shape[0])  # windows in this call
        return attend(query, *args, **how)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counting)
    monkeypatch.setattr(kit.qwen, "scaled_dot_product_attention", counting)
    for way in ("flash_in_windows", "sdpa"):
        tower = copy.deepcopy(standin.model.model.visual)
        assert tower.config._attn_implementation == "flash_in_windows"  # what a Policy takes
        tower.config._attn_implementation = way
        calls.clear()
        seen = tower(pixels, grid_thw=grids).pooler_output
        seen.square().sum().backward()
        found[way] = [*calls], [seen, *(p.grad for p in tower.parameters())]
    (ours, one_call), (theirs, one_by_one) = found.values()
    assert all((a - b).abs().max() <= 1e-6 for a, b in zip(one_call, one_by_one, strict=True))
    assert set(theirs) == {1} and sum(ours) == len(theirs) > 40 and len(ours) <= 13


def test_the_group_row_has_the_gradient_of_one_row_each(standin, played):
    trajectories, weight = played[0][:3], torch.tensor([1.0, -0.5, 2.0])

    def gradient(batches):
        standin.model.zero_grad()
        for batch in batches:
            logp, owner = log_probs(standin, batch)
            (logp * weight[owner]).sum().backward()
        return torch.cat(
            [p.grad.flatten() for p in standin.model.parameters() if p.grad is not None]
        )

    indexed = list(enumerate(trajectories))
    alone = gradient([[group_row(standin, [one])] for one in indexed])
    together = gradient([[group_row(standin, indexed)]])
    assert (together - alone).norm() / alone.norm() <= 1e-5


@pytest.mark.parametrize("tail", ["", "\n", ".", "\n\n", "'", " "])
def test_a_turn_ends_at_its_tag_however_the_tokens_merge(standin, tail):
    words = "x = f(1)</code>" + tail + "never said"
    ids = standin.tokenizer(words, add_special_tokens=False)["input_ids"]
    end = end_of_turn(standin.tokenizer, [0], [""])
    stopped = next(n for n in range(1, len(ids) + 1) if end(torch.tensor([ids[:n]]), None).item())
    said = standin.tokenizer.decode(ids[:stopped])
    assert "</code>" in said and "never" not in said


def test_rows_of_the_embedding_that_are_no_token_are_never_sampled(standin, samples):
    torch.manual_seed(0)
    (group,) = play(standin, samples[:1], 64, Rules(turns=1, max_new_tokens=8, max_length=1024))
    sampled = {i for t in group for i in t.ids[t.prompt :]}
    assert max(sampled) < len(standin.tokenizer) and not sampled & set(standin.forbidden)
    assert 152_063 in standin.forbidden and standin.tokenizer.pad_token_id in standin.forbidden


def test_an_export_keeps_everything_a_reader_needs(standin, samples, tmp_path):
    standin.save(tmp_path)
    again = load_policy(tmp_path)
    assert encode_prompt(again, samples[0]).ids == encode_prompt(standin, samples[0]).ids
    assert again.forbidden == standin.forbidden
    for name in ("config.json", "model.safetensors", "tokenizer.json", "preprocessor_config.json"):
        assert (tmp_path / name).exists()
    play(standin, samples[:1], 1, Rules(turns=1, max_new_tokens=1, max_length=1024))
    standin.save(tmp_path)  # a rollout leaves no trace: whoever generates from the export stops
    assert load_policy(tmp_path).model.generation_config.eos_token_id == [151645, 151643]


@given(st.integers(1, 3000), st.integers(1, 3000), st.sampled_from([20_000, 100_352, 10**6]))
@settings(max_examples=20)
def test_one_budget_counts_tokens_for_the_filter_the_rollout_and_the_loss(standin, w, h, budget):
    assume(max(w, h) < 200 * min(w, h))
    sample = Sample("big", Image.new("RGB", (w, h)), "?", "!")
    with within(standin, budget):
        counted, played = (encode_prompt(standin, sample, pixels) for pixels in (False, True))
    assert counted.ids == played.ids  # the length filter sees what is played and learnt from
    tokens = int(played.pictures[0].grid.prod()) // 4
    assert tokens == counted.ids.count(standin.image_id)
    assert tokens * 784 <= budget or max(w, h) > 8 * min(w, h)  # a strip keeps one token a side


def test_a_budget_travels_with_the_export(standin, tmp_path):
    with within(standin, 100_352):
        standin.save(tmp_path)
    again = load_policy(tmp_path)
    assert again.image_processor.size["longest_edge"] == 100_352
    assert load_policy(tmp_path, max_pixels=784).image_processor.size["longest_edge"] == 784
    picture = again.pictures([Image.new("RGB", (2000, 1500))])[0]
    assert picture.grid.prod() * 14 * 14 <= 100_352


def test_a_checkpoint_that_cannot_work_is_refused_and_says_why(standin, tmp_path, monkeypatch):
    def spoilt(name, file, change):
        shutil.copytree(tmp_path / "good", tmp_path / name, copy_function=os.link)
        text = change and change((tmp_path / name / file).read_text())
        (tmp_path / name / file).unlink()
        if change:
            (tmp_path / name / file).write_text(text)
        return tmp_path / name

    standin.save(tmp_path / "good")
    no_vision = partial(re.sub, r"<\|(vision_start|image_pad)\|>", r"<|other_\1|>")
    other_image = ('"image_token_id": 151655', '"image_token_id": 151656')
    cases = [
        (tmp_path / "none", "no checkpoint in .*none"),
        (
            spoilt("kind", "config.json", lambda s: s.replace("qwen2_5_vl", "qwen2_vl")),
            "'qwen2_vl'",
        ),
        (spoilt("words", "tokenizer.json", no_vision), "this one has no <|vision_start|>"),
        (
            spoilt("pair", "config.json", lambda s: s.replace(*other_image)),
            "is token 151655, but the model",
        ),
        (spoilt("weights", "model.safetensors", None), "no model .*, model.safetensors,"),
        (spoilt("eyes", "preprocessor_config.json", None), "no model .*, model.safetensors,"),
    ]
    for folder, words in cases:
        with pytest.raises((ValueError, FileNotFoundError), match=words):
            load_policy(folder)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        FileNotFoundError, match="no model 'Qwen/No-Such-Model'.*hub name within reach"
    ):
        load_policy("Qwen/No-Such-Model")
    with pytest.raises(ValueError, match="--max-pixels 100: one visual token takes 784 pixels"):
        load_policy(tmp_path / "good", max_pixels=100)


def test_the_flat_config_of_the_released_checkpoint_is_read_alike(standin, tmp_path):
    standin.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    text = config.pop("text_config")
    rope = {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    kept = {name: value for name, value in text.items() if name not in ("model_type", "dtype")}
    del kept["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(kept | config | rope))
    flat = load_policy(tmp_path).model.config.text_config
    own = standin.model.config.text_config
    assert flat.rope_parameters["mrope_section"] == own.rope_parameters["mrope_section"]
    assert flat.rope_parameters["rope_theta"] == own.rope_parameters["rope_theta"]
    assert (flat.vocab_size, flat.hidden_size) == (own.vocab_size, own.hidden_size)


def test_without_weights_a_policy_counts_all_the_same(standin, samples, tmp_path):
    standin.save(tmp_path)
    empty = load_policy(tmp_path, weights=False)
    count = lambda model: sum(p.numel() for p in model.parameters())  # noqa: E731
    assert count(empty.model) == count(standin.model) and empty.device.type == "meta"
    ids = [encode_prompt(p, samples[0], pixels=False).ids for p in (empty, standin)]
    assert ids[0] == ids[1]


def test_weights_that_a_file_lacks_are_not_made_up(standin, tmp_path):
    standin.save(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights[next(name for name in weights if "visual" in name)]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="lacks 1 weights, such as model.visual"):
        load_policy(tmp_path)


def test_a_frozen_tower_stays_and_the_rest_learns(standin, played):
    frozen = Policy(copy.deepcopy(standin.model), standin.tokenizer, standin.image_processor, TAGS)
    freeze_vision(frozen)
    logp, _ = log_probs(frozen, [group_row(frozen, [(0, played[0][0])])])
    logp.sum().backward()
    for name, parameter in frozen.model.named_parameters():
        assert (parameter.grad is None) == name.startswith("model.visual.")


def test_a_policy_would_also_take_a_network_like_qwen3_vl(policy, samples, tmp_path):
    """docs/lab.md says what else it takes; until then its checkpoints are refused."""
    id_of = policy.tokenizer.convert_tokens_to_ids
    rope = dict(
        rope_type="default", rope_theta=1e6, mrope_section=[8, 8, 8], mrope_interleaved=True
    )
    text = dict(
        vocab_size=len(policy.tokenizer), hidden_size=64, intermediate_size=128, head_dim=48,
        num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, rope_parameters=rope,
        initializer_range=0.08, pad_token_id=policy.pad_id, eos_token_id=policy.end_id,
    )  # fmt: skip
    vision = dict(
        depth=2, hidden_size=48, intermediate_size=96, num_heads=2, patch_size=8,
        out_hidden_size=64, deepstack_visual_indexes=[0, 1], num_position_embeddings=64,
        initializer_range=0.08,
    )  # fmt: skip
    words = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
             "vision_start_token_id": "<|vision_start|>",
             "vision_end_token_id": "<|vision_end|>"}  # fmt: skip
    ids = {name: id_of(token) for name, token in words.items()}
    torch.manual_seed(0)
    config = Qwen3VLConfig(text_config=text, vision_config=vision, **ids)
    model = Qwen3VLForConditionalGeneration(config).eval()
    third = Policy(model, policy.tokenizer, policy.image_processor, TAGS)
    with scripted(third, SCRIPTS[:3]) as heard:
        (group,) = play(third, samples[:1], 3, RULES)
    alone = []
    for i, t in enumerate(group):
        fresh = fresh_logits(third, t).log_softmax(-1)
        for turn, said in zip(t.turns, heard[id(t)]):
            difference = said.log_softmax(-1) - fresh[turn.start - 1 : turn.end - 1]
            assert difference.abs().max() < 1e-4
        alone.append(log_probs(third, [group_row(third, [(i, t)])])[0])
    together = log_probs(third, [group_row(third, [*enumerate(group)])])[0]
    assert (together - torch.cat(alone)).abs().max() < 1e-4
    named = adapted(third, 4, "seed").model.named_parameters()
    layers = {name.split(".lora_")[0] for name, p in named if p.requires_grad}
    assert len(layers) == 21 and not any("visual" in name for name in layers)
    third.save(tmp_path)
    with pytest.raises(ValueError, match="expected a checkpoint of type 'qwen2_5_vl': .*qwen3_vl"):
        load_policy(tmp_path)


def test_public_rows_fit_the_released_tokenizer_and_its_budget(standin):
    """Words merge differently there: what is learnt is still exactly what the demonstrator said."""
    with within(standin, 100_352):
        trajectories, skipped = load_thyme(standin, FIXTURES / "thyme_sft.jsonl", "all")
        fits = lambda s: check_fits(standin, s, encode_prompt(standin, s, False), Rules())  # noqa: E731
        questions = load_rl(FIXTURES / "codev_rl.parquet", fits=fits)
        for t, row in zip(trajectories, rows_of(standin, trajectories), strict=True):
            said = "".join(turn.text for turn in t.turns)
            assert standin.tokenizer.decode(row.labels) == said
            assert t.ids.count(standin.image_id) == sum(int(p.grid.prod()) // 4 for p in t.images)
            assert max(int(p.grid.prod()) * 14 * 14 for p in t.images) <= 100_352
    assert (len(trajectories), skipped, len(questions)) == (8, [], 9)


def test_a_prompt_that_leaves_no_room_names_both_numbers(standin):
    sample = Sample("wide", Image.new("RGB", (1120, 1120)), "?", "!")
    with pytest.raises(ValueError, match=r"\(1600 of them for the image\), but --max-length 1024"):
        check_fits(standin, sample, encode_prompt(standin, sample, False), Rules(max_length=1024))


def test_every_image_gets_as_many_pads_as_its_grid_has_visual_tokens(standin):
    """112 x 112, then 56 x 84 and 140 x 28 from one program: 16 + 6 + 5 visual tokens."""
    sample = Sample("counts", Image.new("RGB", (112, 112)), "?", "!")
    both = (
        "<code>\nImage.new('RGB', (56, 84), 'red').show()\n"
        "Image.new('RGB', (140, 28), 'blue').show()\n</code>"
    )
    with scripted(standin, [[both, "<answer>!</answer>"]]):
        ((t,),) = play(standin, [sample], 1, RULES)
    assert [p.grid.tolist() for p in t.images] == [[1, 8, 8], [1, 6, 4], [1, 2, 10]]
    assert t.ids.count(standin.image_id) == 16 + 6 + 5


def test_coordinates_are_those_of_the_picture_that_code_gets(standin):
    """A 40 x 40 red square at (3000, 2000) of a 4000 x 3000 picture, seen through a small pixel
    budget: the prompt names the full size, and a crop at full-size coordinates is red."""
    picture = Image.new("RGB", (4000, 3000), "white")
    picture.paste("red", (3000, 2000, 3040, 2040))
    look = "<code>\nimage.crop((3000, 2000, 3040, 2040)).show()\n</code>"
    with within(standin, 256 * 28 * 28), scripted(standin, [[look, "<answer>red</answer>"]]):
        ((t,),) = play(standin, [Sample("frame", picture, "?", "red")], 1, RULES)
    prompt = standin.tokenizer.decode(t.ids[: t.prompt])
    assert '"4000x3000"' in prompt and int(t.images[0].grid.prod()) // 4 <= 256
    (shown,) = t.tool_turns[0].observation.images
    assert shown.size == (40, 40) and shown.getcolors() == [(1600, (255, 0, 0))]
    assert t.tool_turns[0].observation.boxes == [(3000, 2000, 3040, 2040)]


ZOO = {
    "Image.new('RGB', (1, 1)).show()": 1,
    "Image.new('RGB', (27, 27)).show()": 1,
    "Image.new('RGB', (300, 27)).show()": 1,
    "Image.new('RGB', (5628, 28)).show()": 0,
    "image.crop((10, 10, 10, 50)).show()": 0,
    "Image.new('L', (64, 64)).show()": 1,
    "Image.new('1', (64, 64)).show()": 1,
    "Image.new('LA', (64, 64)).show()": 1,
    "Image.new('RGBA', (64, 64), (255, 0, 0, 0)).show()": 1,
    "Image.new('CMYK', (64, 64)).show()": 1,
    "Image.fromarray((np.random.rand(64, 64, 3) * 255).astype('uint8')).show()": 1,
    "cv2.imshow('x', np.random.rand(64, 64))": 1,
    "cv2.imshow('x', np.zeros((64, 64), bool))": 1,
}


def test_whatever_code_shows_is_a_valid_image_or_a_reason(standin, samples):
    with scripted(standin, [[f"<code>\n{code}\n</code>", "<answer>!</answer>"] for code in ZOO]):
        (group,) = play(standin, samples[:1], len(ZOO), Rules(max_new_tokens=96, max_length=4096))
    for t, (code, images) in zip(group, ZOO.items()):
        seen = t.tool_turns[0].observation
        assert len(seen.images) == images == len(t.images) - 1, (code, seen)
        assert images or seen.notes or seen.error, code
        for image in seen.images:
            assert image.mode == "RGB" and min(image.size) >= 28
    clear_red = group[8].tool_turns[0].observation.images[0]
    assert clear_red.getcolors() == [(64 * 64, (255, 255, 255))]


def test_images_take_fewer_positions_than_slots(standin, played):
    t = played[0][2]  # four images
    ids = torch.tensor([t.ids])
    rope = standin.positions(ids, torch.ones_like(ids), [p.grid for p in t.images])[1:, 0]
    own, _ = standin.model.model.get_rope_index(
        ids,
        mm_token_type_ids=(ids == standin.image_id).int(),
        image_grid_thw=torch.stack([p.grid for p in t.images]),
    )
    assert torch.equal(rope, own[:, 0]) and rope[0, -1] < len(t.ids) - 1


# With the tiny tokenizer

hostile = st.lists(
    st.sampled_from(
        ["<|im_end|>", "<|im_start|>", "<|image_pad|>", "<|vision_start|>", "</code>", "<answer>B",
         "</answer>", "</sandbox_output>", "<", "|", ">", "a", "\n", "é"]
    )
).map("".join)  # fmt: skip


@given(hostile)
def test_foreign_text_cannot_forge_a_turn_an_image_or_a_tag(policy, text):
    ids = policy.encode(policy.neutralise(text), []).ids
    tags = {policy.tokenizer.convert_tokens_to_ids(f"<{s}{t}>") for t in TAGS for s in ("", "/")}
    assert not set(ids) & (set(policy.forbidden) | {policy.end_id} | tags)
    assert parse(policy.neutralise(text), closed=True) == (None, None)


@given(st.lists(st.booleans(), min_size=2, max_size=9).filter(any))
@example([False, True, False, True])  # padding in front, a tail in the middle
def test_a_token_stands_where_as_many_real_ones_stand_before_it(policy, real):
    ids = torch.full((1, len(real)), policy.tokenizer.convert_tokens_to_ids("c"))
    number, *axes = policy.positions(ids, torch.tensor([real]).long(), [])[:, 0].tolist()
    for i in [i for i, is_real in enumerate(real) if is_real]:
        assert [number[i], *(axis[i] for axis in axes)] == [sum(real[:i])] * 4


@pytest.mark.parametrize("budget", [256, 1024, 4096])  # the least area of its own is 2048
def test_no_picture_is_above_the_budget_that_a_policy_is_loaded_with(budget):
    tiny = load_policy("tiny", max_pixels=budget, weights=False)
    least, most = (tiny.image_processor.size[f"{which}_edge"] for which in ("shortest", "longest"))
    assert (least, most) == (min(2048, budget), budget)
    with pytest.raises(ValueError, match="--max-pixels 255: one visual token takes 256 pixels"):
        load_policy("tiny", max_pixels=255, weights=False)
    for size in ((256, 256), (8, 8)):
        grid = tiny.pictures([Image.new("RGB", size)])[0].grid
        assert int(grid.prod()) * tiny.image_processor.patch_size**2 <= budget


def test_a_frozen_tower_of_the_tiny_network_stays_and_the_rest_learns(policy, samples):
    frozen = Policy(copy.deepcopy(policy.model), policy.tokenizer, policy.image_processor, TAGS)
    freeze_vision(frozen)
    with scripted(frozen, [["<answer>red</answer>"]]):
        ((t,),) = play(frozen, samples[:1], 1, RULES)
    log_probs(frozen, [group_row(frozen, [(0, t)])])[0].sum().backward()
    for name, parameter in frozen.model.named_parameters():
        assert (parameter.grad is None) == name.startswith("model.visual."), name


@given(st.text(string.printable, max_size=40))
def test_harmless_text_is_left_alone_and_round_trips(policy, text):
    if "<" not in text:
        assert policy.neutralise(text) == text
    ids = policy.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert policy.tokenizer.decode(ids) == text


def test_a_missing_checkpoint_says_what_was_expected(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="expected a folder with config.json"):
        load_policy(tmp_path)

    def unreachable(*args, **kwargs):
        raise OSError("we couldn't connect")

    monkeypatch.setattr(Model, "from_pretrained", unreachable)
    with pytest.raises(FileNotFoundError, match="hub name within reach"):
        load_policy("no-such-model-anywhere")


def test_saved_and_loaded_policies_agree(policy, samples, tmp_path):
    policy.save(tmp_path)
    again = load_policy(tmp_path)
    trajectory = rollout.begin(samples[0], encode_prompt(policy, samples[0]))
    assert encode_prompt(again, samples[0]).ids == trajectory.ids
    assert torch.equal(fresh_logits(again, trajectory), fresh_logits(policy, trajectory))


def test_the_committed_checkpoint_is_small_and_loads_the_same_way():
    tiny = load_policy("tiny")
    assert sum(p.numel() for p in tiny.model.parameters()) < 250_000
    prompt = encode_prompt(tiny, toy_questions(1, random.Random(0).random())[0])
    assert prompt.ids.count(tiny.image_id) == 16
