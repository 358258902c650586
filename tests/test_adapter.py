"""python -m pytest tests/test_adapter.py      an adapter learns, the weights stay"""

from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from conftest import ANSWER, LOOK, RULES, SHORT, TWO
from conftest import fresh_logits, json_lines, scripted, trained
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from torch import nn

import kit.processes
import train
from beyond.tiny import tiny_policy
from grpo import LogProbs, Objective, learn, log_probs
from kit.adapter import adapted
from kit.folder import Run, training_state
from kit.processes import actor_of, shard
from kit.qwen import Model, Policy
from rollout import load_policy, play
from sft import mean_logp, rows_of
from train import Config

ROOT = Path(__file__).resolve().parent.parent
A = torch.tensor([[0.75, -0.25, -0.5], [-0.5, 1.0, -0.5]])
ALL = Objective(beta=0.1, max_grad_norm=1e9)


@pytest.fixture(scope="module")
def groups(policy, samples):
    with scripted(policy, [[LOOK, ANSWER], [SHORT], [TWO, SHORT]]):
        return play(policy, samples[:2], 3, RULES)


def fresh() -> Policy:
    """The tiny network with an adapter that has learnt nothing: B is 0."""
    return adapted(tiny_policy(seed=0), 4, "seed")


def lively() -> Policy:
    """One that has learnt something."""
    policy, generator = fresh(), torch.Generator().manual_seed(1)
    for name, p in policy.model.named_parameters():
        if "lora_B" in name:
            p.data = 0.02 * torch.randn(p.shape, generator=generator)
    return policy


def learnt(policy: Policy) -> list[nn.Parameter]:
    return [p for p in policy.model.parameters() if p.requires_grad]


def moved(policy: Policy, groups, steps: int = 2) -> tuple[set[str], list[dict]]:
    """Names of the weights that some steps changed, and what the steps report."""
    before = {name: p.clone() for name, p in policy.model.named_parameters()}
    optimizer = torch.optim.AdamW(learnt(policy), lr=1e-2)
    how = optimizer, groups, A[: len(groups)], policy.base, ALL
    reports = [learn(policy, *how) for _ in range(steps)]
    after = policy.model.named_parameters()
    return {name for name, p in after if not torch.equal(p, before[name])}, reports


# --- what learns -----------------------------------------------------------------------------
def test_the_adapter_moves_and_nothing_else_least_of_all_the_vision_tower(groups):
    policy = fresh()
    base = [p.clone() for p in policy.base.model.parameters()]
    names, _ = moved(policy, groups)
    text = tiny_policy(seed=0).model.model.language_model
    linear = [n for n, module in text.named_modules() if isinstance(module, nn.Linear)]
    assert len(linear) == 14  # q, k, v, o, gate, up and down of two layers
    ends = [f"{layer}.lora_{part}.default.weight" for layer in linear for part in "AB"]
    assert names == {f"model.language_model.{end}" for end in ends}
    assert all(map(torch.equal, base, policy.base.model.parameters()))
    optimizer = torch.optim.AdamW(policy.model.parameters())
    assert training_state(policy, optimizer)["weights"].keys() == names  # a checkpoint is small


def test_the_gradient_of_an_adapter_is_the_chain_rule_through_the_full_gradient(groups):
    """W' = W + s B A with s = 32 / rank: dJ/dB = s dJ/dW' A^T, and dJ/dA = s B^T dJ/dW'."""
    policy = lively()
    full = policy.merged()
    full.model.requires_grad_(True)
    for each in (policy, full):
        learn(each, torch.optim.SGD(learnt(each), lr=0.0), groups, A, policy.base, ALL)
    s, whole, pairs = 32 / 4, dict(full.model.named_parameters()), []
    for name, layer in policy.model.named_modules():
        if isinstance(layer, LoraLayer):
            a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            dW = whole[f"{name}.weight"].grad
            pairs += [(b.grad, s * dW @ a.T), (a.grad, s * b.T @ dW)]
    assert len(pairs) == 28 and all(rule.norm() > 0 for _, rule in pairs)
    found, rule = (torch.cat([g.flatten() for g in gs]) for gs in zip(*pairs))
    assert (found - rule).norm() / rule.norm() <= 1e-6


def test_activations_can_be_recomputed_without_a_backward_pass_through_the_tower(groups):
    seen, gradients = [], []
    for again in (False, True):
        policy = lively()
        tower = policy.model.model.visual
        tower.register_forward_hook(lambda module, inputs, output: seen.append(output[0]))
        if again:
            policy.checkpoint_activations()
        policy.model.train()
        mean_logp(policy, [rows_of(policy, groups[0])], learn=True)
        gradients.append([p.grad for p in learnt(policy)])
    assert all(map(torch.equal, *gradients)) and not any(output.requires_grad for output in seen)


def test_the_same_seed_gives_the_same_adapter_and_leaves_other_draws_alone():
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    base = tiny_policy(seed=0)
    torch.manual_seed(7)
    one, same, other = (adapted(base, 4, seed) for seed in ("a", "a", "b"))
    assert torch.equal(torch.rand(1), expected)
    weights = [torch.cat([p.flatten() for n, p in each.model.named_parameters() if "lora_A" in n])
               for each in (one, same, other)]  # fmt: skip
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert adapted(base, 0, "a") is base


# --- the reference and the actor -------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_is_the_policy_without_its_adapter(dtype, groups, tmp_path, monkeypatch):
    """No checkpoint is loaded for it, and no copy plays: there is one set of weights."""
    monkeypatch.setattr(kit.processes, "AS_ON_A_GPU", dtype == torch.bfloat16)
    monkeypatch.setattr(train, "load_policy", lambda *_: pytest.fail("loaded"))
    policy = fresh()
    config = Config(out=str(tmp_path))
    run = Run(tmp_path, asdict(config), 60, 1)
    reference = train.reference_of(run, config, policy)
    shard(policy, LogProbs(policy))
    assert actor_of(policy) is policy and policy.sharded is None
    lent = {p.data_ptr() for p in reference.model.parameters()}
    own = [p for p in policy.model.parameters() if p.data_ptr() not in lent]
    assert {p.dtype for p in own} == {torch.float32} and all(p.requires_grad for p in own)
    assert {p.dtype for p in reference.model.parameters()} == {dtype}
    before = log_probs(reference, rows_of(reference, groups[0]))[0]
    _, reports = moved(policy, groups, steps=3)
    assert reports[0]["kl"] == 0 and reports[-1]["kl"] > 0
    assert torch.equal(log_probs(reference, rows_of(reference, groups[0]))[0], before)
    none = Config(out=str(tmp_path), beta=0.0)
    assert train.reference_of(run, none, policy) is None


# --- exports ---------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_export_is_a_plain_checkpoint_and_the_adapter_lies_beside_it(
    dtype, groups, tmp_path, monkeypatch
):
    monkeypatch.setattr(kit.processes, "AS_ON_A_GPU", dtype == torch.bfloat16)
    policy = lively()
    policy.base.save(tmp_path / "base")
    before = [p.clone() for p in policy.model.parameters()]
    policy.save(tmp_path / "rl")
    assert all(map(torch.equal, before, policy.model.parameters()))  # nothing was merged in place
    how = dict(dtype=torch.float32, output_loading_info=True)
    model, loading = Model.from_pretrained(tmp_path / "rl", **how)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys"))
    assert not hasattr(model, "peft_config")
    stored = load_file(tmp_path / "rl" / "model.safetensors")
    assert {p.dtype for p in stored.values()} == {dtype}
    trajectory = groups[0][0]
    ours = fresh_logits(policy, trajectory).float()
    again = load_policy(tmp_path / "rl")
    wide = 1e-4 if dtype == torch.float32 else 0.2  # W + s B A is rounded
    assert (fresh_logits(again, trajectory) - ours).abs().max() < wide
    assert (fresh_logits(policy.base, trajectory).float() - ours).abs().max() > 0.5
    apart = load_policy(tmp_path / "base")
    apart.model = PeftModel.from_pretrained(apart.model, tmp_path / "rl" / "adapter").model
    assert (fresh_logits(apart, trajectory) - ours).abs().max() < wide


# --- the command line ------------------------------------------------------------------------
def test_each_stage_of_a_run_moves_what_the_adapter_is_merged_into_and_nothing_else(tmp_path):
    words = """--lora-rank 4 --sft-steps 1 --sft-demos 4 --rl-steps 2 --questions 2 --rollouts 3
        --eval-questions 4 --sft-lr 8e-2 --rl-lr 1e-2"""
    trained("--out", tmp_path, *words.split())
    kl = [line["kl"] for line in json_lines(tmp_path / "log.jsonl") if line["stage"] == "rl"]
    assert kl[0] == 0 and kl[-1] > 0  # stage 2 begins as the merged SFT model
    folders = ROOT / "tiny", tmp_path / "sft", tmp_path / "rl"
    stages = [load_file(folder / "model.safetensors") for folder in folders]
    for before, after in zip(stages, stages[1:]):
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert len(changed) == 14 and all(name.startswith("model.layers.") for name in changed)
