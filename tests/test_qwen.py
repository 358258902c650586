"""python -m pytest tests/test_qwen.py      what Qwen2.5-VL needs. Most tests have the
released checkpoint's file layout, with its real tokenizer, chat template and settings, and a tiny
random network inside."""

import copy
import json
import os
import random
import re
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import ANSWER, LOOK, RULES, SCRIPTS, copied, performed, scripted, worst_difference
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, Qwen3VLConfig, Qwen3VLForConditionalGeneration

import kit.qwen
from data import TAGS, Sample, parse, toy_questions
from grpo import group_row, log_probs
from kit.adapter import adapted
from kit.qwen import Policy, freeze_vision
from rollout import Rules, encode_prompt, load_policy, play


@pytest.fixture(scope="module")
def standin(standin_folder):
    return load_policy(standin_folder)


@pytest.fixture(scope="module")
def saved(standin, tmp_path_factory):
    """Its export, made after it has played."""
    play(standin, toy_questions(1, 0), 1, Rules(turns=1, max_new_tokens=1, max_length=1024))
    standin.save(folder := tmp_path_factory.mktemp("saved"))
    return folder


@pytest.fixture
def export(saved, tmp_path):
    """A copy of it, of which every file may be replaced, but none be written into."""
    return shutil.copytree(saved, tmp_path / "export", copy_function=os.link)


def rewritten(file: Path, text: str) -> None:
    file.unlink()
    file.write_text(text)


def within(policy, max_pixels):
    """The same policy on another pixel budget, inside of this."""
    size = policy.image_processor.size | {"longest_edge": max_pixels}
    return mock.patch.object(policy.image_processor, "size", size)


def test_rollouts_equal_a_fresh_forward(standin, samples):
    with scripted(standin, SCRIPTS[1:3]) as heard:
        (group,) = play(standin, samples[:1], 2, RULES)
    assert worst_difference(standin, group, heard) <= 1e-5


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


def test_an_export_keeps_everything_and_without_weights_its_shapes(standin, samples, saved):
    """Weights are fp32 whatever they were saved in. Whoever generates from an export stops: a
    rollout leaves no trace in it."""
    again, empty = load_policy(saved), load_policy(saved, weights=False)
    weights = (policy.model.parameters() for policy in (standin, again, empty))
    for own, same, none in zip(*weights, strict=True):
        assert own.dtype == torch.float32 and torch.equal(own, same)
        assert none.shape == own.shape and none.is_meta
    assert again.model.generation_config.eos_token_id == [151645, 151643]
    for other in (again, empty):
        prompts = [encode_prompt(p, samples[0], pixels=False).ids for p in (other, standin)]
        assert prompts[0] == prompts[1] and other.forbidden == standin.forbidden
    no_token = {*range(len(standin.tokenizer), 152_064)}  # spare rows of the embedding
    assert no_token and {standin.pad_id, *no_token} <= {*standin.forbidden}
    modes = {oct(file.stat().st_mode & 0o777) for file in saved.iterdir()}
    assert modes == {"0o644"}  # a server that runs as somebody else can read it


@given(st.integers(1, 1500), st.integers(1, 1500), st.sampled_from([20_000, 100_352, 400_000]))
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


def test_a_budget_travels_with_the_export(standin, export):
    (export / "preprocessor_config.json").unlink()
    with within(standin, 100_352):
        standin.image_processor.save_pretrained(export)
    for asked, budget in ((None, 100_352), (784, 784)):
        again = load_policy(export, max_pixels=asked, weights=False)
        assert again.image_processor.size["longest_edge"] == budget


@pytest.mark.parametrize("file, change, words", [
    ("config.json", None, "no checkpoint in .*export"),
    ("config.json", ("qwen2_5_vl", "qwen3_vl"), "of type 'qwen2_5_vl': .*'qwen3_vl'"),
    ("config.json", ('"image_token_id": 151655', '"image_token_id": 151656'),
     "is token 151655, but the model"),
    ("tokenizer.json", (r"<\|(vision_start|image_pad)\|>", r"<|other_\1|>"),
     "this one has no <|vision_start|>"),
    ("model.safetensors", None, "no model .*, model.safetensors,"),
    ("preprocessor_config.json", None, "no model .*, model.safetensors,"),
])  # fmt: skip
def test_a_checkpoint_that_cannot_work_is_refused_and_says_why(export, file, change, words):
    if change:
        rewritten(export / file, re.sub(*change, (export / file).read_text()))
    else:
        (export / file).unlink()
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        load_policy(export, weights=file == "model.safetensors")


def test_a_hub_name_out_of_reach_is_told(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match="no model 'Qwen/None'.*hub name within reach"):
        load_policy("Qwen/None")


def test_the_flat_config_of_the_released_checkpoint_is_read_alike(standin, export):
    config = json.loads((export / "config.json").read_text())
    text = config.pop("text_config")
    del text["model_type"], text["dtype"], text["rope_parameters"]
    rope = {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    rewritten(export / "config.json", json.dumps(text | config | rope))
    flat = load_policy(export, weights=False).model.config.text_config
    own = standin.model.config.text_config
    for name in ("mrope_section", "rope_theta"):
        assert flat.rope_parameters[name] == own.rope_parameters[name]
    assert (flat.vocab_size, flat.hidden_size) == (own.vocab_size, own.hidden_size)


def test_weights_that_a_file_lacks_are_not_made_up(export):
    weights = load_file(file := export / "model.safetensors")
    del weights[next(name for name in weights if "visual" in name)]
    file.unlink()
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ValueError, match="lacks 1 weights, such as model.visual"):
        load_policy(export)


def test_a_policy_would_also_take_a_network_like_qwen3_vl(policy, samples):
    """docs/lab.md says what else it takes; until then its checkpoints are refused."""
    rope = dict(rope_type="default", rope_theta=1e6, mrope_section=[8] * 3, mrope_interleaved=True)
    text = dict(
        vocab_size=len(policy.tokenizer), hidden_size=64, intermediate_size=128, head_dim=48,
        num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, initializer_range=0.08,
        rope_parameters=rope,
    )  # fmt: skip
    vision = dict(
        depth=2, hidden_size=48, intermediate_size=96, out_hidden_size=64, num_heads=2,
        patch_size=8, num_position_embeddings=64, deepstack_visual_indexes=[0, 1],
        initializer_range=0.08,
    )  # fmt: skip
    id_of = policy.tokenizer.convert_tokens_to_ids
    ids = {f"{name}_token_id": id_of(f"<|{name}|>") for name in ("vision_start", "vision_end")}
    ids |= {f"{name}_token_id": id_of(f"<|{name}_pad|>") for name in ("image", "video")}
    torch.manual_seed(0)
    config = Qwen3VLConfig(text_config=text, vision_config=vision, **ids)
    model = Qwen3VLForConditionalGeneration(config).eval()
    third = Policy(model, policy.tokenizer, policy.image_processor, TAGS)
    with scripted(third, SCRIPTS[:3]) as heard:
        (group,) = play(third, samples[:1], 3, RULES)
    assert worst_difference(third, group, heard) < 1e-4
    alone = [log_probs(third, [group_row(third, [(i, t)])])[0] for i, t in enumerate(group)]
    together = log_probs(third, [group_row(third, [*enumerate(group)])])[0]
    assert (together - torch.cat(alone)).abs().max() < 1e-4
    named = adapted(third, 4, "seed").model.named_parameters()
    layers = {name.split(".lora_")[0] for name, p in named if p.requires_grad}
    assert len(layers) == 21 and not any("visual" in name for name in layers)


# With the tiny tokenizer

HOSTILE = ["<|im_end|>", "<|im_start|>", "<|image_pad|>", "<|vision_start|>", "</code>", "<answer>",
           "B</answer>", "</sandbox_output>", "<", "|", ">", "a", "\n", "é"]  # fmt: skip


@given(st.lists(st.sampled_from(HOSTILE)).map("".join))
def test_foreign_text_cannot_forge_a_turn_an_image_or_a_tag(policy, text):
    assert policy.neutralise(text).replace("‹", "<") == text  # nothing else is changed
    ids = policy.encode(policy.neutralise(text), []).ids
    tags = {policy.tokenizer.convert_tokens_to_ids(f"<{s}{t}>") for t in TAGS for s in ("", "/")}
    assert not set(ids) & (set(policy.forbidden) | {policy.end_id} | tags)
    assert parse(policy.neutralise(text), closed=True) == (None, None)


def test_the_policy_may_end_its_message_and_write_no_other_control_token(policy):
    may = {*policy.tokenizer.get_added_vocab().values()} - {*policy.forbidden}
    tags = {f"<{slash}{tag}>" for tag, write in TAGS.items() if write for slash in ("", "/")}
    assert {policy.tokenizer.convert_ids_to_tokens(i) for i in may} == {"<|im_end|>", *tags}


@given(st.lists(st.booleans(), min_size=2, max_size=9).filter(any))
@example([False, True, False, True])  # padding in front, a tail in the middle
def test_a_token_stands_where_as_many_real_ones_stand_before_it(policy, real):
    ids = torch.full((1, len(real)), policy.tokenizer.convert_tokens_to_ids("c"))
    places = policy.positions(ids, torch.tensor([real]).long(), [])[:, 0]  # its number, three axes
    expected = torch.tensor(real).cumsum(0) - 1
    assert torch.equal(places[:, real], expected[real].expand(4, -1))


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


@pytest.mark.parametrize("name", ["policy", "standin"])
def test_a_frozen_tower_stays_and_the_rest_learns(name, samples, request):
    frozen = copied(request.getfixturevalue(name))
    freeze_vision(frozen)
    (t,) = performed(frozen, samples[:1], [[LOOK, ANSWER]])
    log_probs(frozen, [group_row(frozen, [(0, t)])])[0].sum().backward()
    for name, parameter in frozen.model.named_parameters():
        assert (parameter.grad is None) == name.startswith("model.visual."), name


def test_a_poisoned_checkpoint_config_does_not_reach_the_sampler(policy, samples):
    """Released checkpoints are near-greedy with a repetition penalty."""
    poison = dict(do_sample=True, repetition_penalty=1.05, top_k=1, top_p=0.5, temperature=1e-6)
    learner, spoken = copied(policy), []
    learner.model.generation_config = own = GenerationConfig(**poison, min_p=0.9)
    for who in (policy, learner):
        torch.manual_seed(0)
        (group,) = play(who, samples[:1], 20, Rules(turns=1, max_new_tokens=3, max_length=512))
        spoken.append([(t.ids, t.sampled) for t in group])
    assert spoken[0] == spoken[1]
    assert learner.model.generation_config is own  # an export keeps what the checkpoint had


def test_the_committed_checkpoint_is_small_and_loads_the_same_way():
    tiny = load_policy("tiny")
    assert sum(p.numel() for p in tiny.model.parameters()) < 250_000
    slot = 2 * 2 * 32 * 4  # bytes: keys and values, two layers, one head 32 wide, fp32
    assert tiny.rows_that_fit(1024, 5.5 * 1024 * slot / 1e9) == 5
    prompt = encode_prompt(tiny, toy_questions(1, random.Random(0).random())[0])
    assert prompt.ids.count(tiny.image_id) == 16
