"""python -m pytest tests/test_checkpoint.py      about 20 s: the released checkpoint's file layout,
with its real tokenizer, chat template and settings, and a tiny random network inside."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import RULES, SCRIPTS, fresh_logits, scripted

import rollout
from grpo import group_row, score
from rollout import Rules, load_policy, play

MAKE = Path(__file__).resolve().parent.parent.parent / "shared" / "standin" / "make_checkpoint.py"
pytestmark = pytest.mark.skipif(not MAKE.exists(), reason="no stand-in checkpoint beside the project")


@pytest.fixture(scope="module")
def standin(tmp_path_factory):
    folder = tmp_path_factory.mktemp("standin")
    subprocess.run([sys.executable, MAKE, folder], check=True, capture_output=True)
    return load_policy(folder)


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
        for step, said in zip(t.steps, heard[id(t)], strict=True):
            difference = said.log_softmax(-1) - fresh[step.start - 1 : step.end - 1]
            assert difference.abs().max() <= 1e-5


def test_the_group_row_has_the_gradient_of_one_row_each(standin, played):
    trajectories, weight = played[0][:3], torch.tensor([1.0, -0.5, 2.0])

    def gradient(batches):
        standin.model.zero_grad()
        for batch in batches:
            logp, owner = score(standin, batch)
            (logp * weight[owner]).sum().backward()
        return torch.cat([p.grad.flatten() for p in standin.model.parameters() if p.grad is not None])

    indexed = list(enumerate(trajectories))
    alone = gradient([[group_row(standin, [one])] for one in indexed])
    together = gradient([[group_row(standin, indexed)]])
    assert (together - alone).norm() / alone.norm() <= 1e-5


@pytest.mark.parametrize("tail", ["", "\n", ".", "\n\n", "'", " "])
def test_a_turn_ends_at_its_tag_however_the_tokens_merge(standin, tail):
    words = "x = f(1)</code>" + tail + "never said"
    ids = standin.tokenizer(words, add_special_tokens=False)["input_ids"]
    end = rollout.EndOfTurn(standin, start=0)
    stopped = next(n for n in range(1, len(ids) + 1) if end(torch.tensor([ids[:n]]), None).item())
    said = standin.tokenizer.decode(ids[:stopped])
    assert "</code>" in said and "never" not in said and end.length == {0: stopped}


def test_rows_of_the_embedding_that_are_no_token_are_never_sampled(standin, samples):
    torch.manual_seed(0)
    (group,) = play(standin, samples[:1], 64, Rules(turns=1, max_new_tokens=8, max_length=1024))
    sampled = {i for t in group for i in t.ids[t.prompt :]}
    assert max(sampled) < len(standin.tokenizer) and not sampled & set(standin.forbidden)
    assert 152_063 in standin.forbidden and standin.tokenizer.pad_token_id in standin.forbidden


def test_an_export_keeps_everything_a_reader_needs(standin, samples, tmp_path):
    standin.save(tmp_path)
    again = load_policy(tmp_path)
    assert again.encode_prompt(samples[0]).ids == standin.encode_prompt(samples[0]).ids
    assert again.forbidden == standin.forbidden
    for name in ("config.json", "model.safetensors", "tokenizer.json", "preprocessor_config.json"):
        assert (tmp_path / name).exists()
