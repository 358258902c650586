"""
adapter.py: a low-rank adapter learns, and the weights stay as they are.

Concept     Beside each linear layer W of the language model stand two thin matrices. The layer
            computes (W + s B A) x, and only A and B learn. Weights that stay need no gradient, no
            moments and no second copy: three policies share them. One learns and plays. One is the
            reference, which has no adapter. One is the export, which has W + s B A in place of W.
Paper       nothing: CodeV trains all weights. LoRA is by Hu et al., arXiv:2106.09685. That every
            linear layer should have one is a finding of Schulman et al., "LoRA Without Regret"
In          a Policy, and the rank: how many columns B has
Out         a Policy of which little moves: it plays, learns and is saved as any other
Left out    quantised weights; adapters for the embeddings, lm_head and the vision tower
Read next   processes.py (what full training needs), folder.py (checkpoints and exports)
"""

import random
import warnings
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn

from kit.processes import precision, twin
from kit.qwen import Policy

# s = ALPHA / rank, as in "LoRA Without Regret": one learning rate then serves all ranks.
ALPHA = 32
# The blocks of the vision tower have layers of the same names (gate_proj, up_proj, down_proj).
LAYERS = r"model\.language_model\.layers\..*_proj"


def adapted(policy: Policy, rank: int, seed: str) -> Policy:
    """The policy with a fresh adapter of this rank; at rank 0 the policy itself. The same seed
    gives the same adapter on every process and after a resume."""
    return Adapted(policy, rank, seed) if rank else policy


class Adapted(Policy):
    """A policy that learns its adapter alone. `base`, the policy without it, has the same weights,
    frozen, in the precision that layers compute in. The adapter is fp32, and begins as no change: A
    is random, B is 0."""

    def __init__(self, base: Policy, rank: int, seed: str) -> None:
        for p in base.model.requires_grad_(False).parameters():
            p.data = p.data.to(precision(base))  # one by one: no second copy of all
        vars(self).update(vars(twin(base, {id(p): p for p in base.model.parameters()})))
        self.base = base
        how = LoraConfig(r=rank, lora_alpha=ALPHA, target_modules=LAYERS)
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            torch.manual_seed(random.Random(seed).getrandbits(63))
            warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by an old name
            self.peft = get_peft_model(self.model, how)  # adds to the model, and is there to save

    @torch.no_grad()
    def merged(self) -> Policy:
        """A policy without an adapter, to be saved. W + s B A is rounded to the precision of W, and
        lies in the memory of the host."""
        weights = {id(p): p for p in self.base.model.parameters()}
        for layer in self.model.modules():
            if isinstance(layer, LoraLayer):
                W = layer.base_layer.weight
                moved = (W.float() + layer.get_delta_weight("default")).to("cpu", W.dtype)
                weights[id(W)] = nn.Parameter(moved, requires_grad=False)
        return twin(self.base, weights)

    def save(self, folder: str | Path) -> None:
        """A plain checkpoint, and in its folder `adapter` the adapter alone, as peft reads it."""
        self.merged().save(folder)
        self.peft.save_pretrained(Path(folder) / "adapter")
