"""
processes.py: several processes: each plays its own questions, and they meet in the gradient.

Concept     Several processes: each plays its own questions, and they meet in the gradient.
Paper       nothing
In          
Out         
Left out    
Read next   
"""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from kit.qwen import Policy


def processes() -> tuple[int, int]:
    """(which one this is, how many there are)"""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def gathered(value) -> list:
    """`value` of every process, in their order."""
    values = [value] * processes()[1]
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def mine(items: list) -> list:
    """This process's share of a global batch."""
    rank, n = processes()
    return items[rank::n]


def merged(shares: list[list]) -> list:
    """`mine` undone: the global batch again, from the shares of all processes."""
    items = [None] * sum(map(len, shares))
    for rank, share in enumerate(shares):
        items[rank :: len(shares)] = share
    return items


def parts(items: list) -> list[list]:
    """What may share a micro-batch. A process among several has one part, its share. One process
    alone has two, the shares that two processes would have: so it sums in the same order as they
    do. Another order of floats changes the last bit, and hundreds of steps make that visible."""
    return [items[0::2], items[1::2]] if processes()[1] == 1 else [items]


def shard(policy: Policy, log_probs: nn.Module) -> None:
    """Cut weights, gradients and optimiser state evenly over the processes (FSDP2; ZeRO-3). Every
    layer is fetched as a whole when its turn comes. Lambdas stay fp32: at a learning rate of 1e-6
    a bf16 weight would never move. On a GPU they are fetched, and compute, in bf16; gradients are
    added up in fp32. One process on a CPU has nothing to cut and is left as it is."""
    kind, n = policy.device.type, processes()[1]
    if n == 1 and kind == "cpu":
        return
    if not dist.is_initialized():  # one GPU: the same path, with nobody to meet
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    how = dict(mesh=init_device_mesh(kind, (n,)), reshard_after_forward=True)
    if kind != "cpu":
        # Inputs are not cast: that would round the vision tower's rotary angles, and the policy
        # would no longer be the actor to the last bit.
        how["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    policy.sharded = log_probs
    inner = policy.model.model
    for module in (*inner.visual.blocks, *inner.language_model.layers, policy.sharded):
        fully_shard(module, **how)
        module.set_gradient_divide_factor(1.0)  # a sum over processes: see `learn`
        module.set_force_sum_reduction_for_comms(True)


def actor_of(policy: Policy) -> Policy:
    """Who plays: a whole copy of the policy on every process, in the precision it computes in, so
    that generate needs no other process. Before `shard`. On one CPU the policy itself plays."""
    kind, n = policy.device.type, processes()[1]
    if n == 1 and kind == "cpu":
        return policy
    dtype = torch.float32 if kind == "cpu" else torch.bfloat16
    # deepcopy takes what its memo holds already: no second copy in fp32, and buffers stay fp32.
    memo = {id(p): nn.Parameter(p.detach().to(dtype, copy=True), requires_grad=False)
            for p in policy.model.parameters()}  # fmt: skip
    actor = copy.copy(policy)
    actor.model = copy.deepcopy(policy.model, memo)
    return actor


@torch.no_grad()
def sync(policy: Policy, actor: Policy) -> None:
    """Give the actor the policy's weights: once a step, before it plays."""
    if actor is not policy:
        for p, q in zip(policy.model.parameters(), actor.model.parameters()):
            q.copy_(whole(p.detach().to(q.dtype)))


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
