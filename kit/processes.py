"""
processes.py: several processes: each plays its own questions, and they meet in the gradient.

Concept     A process plays with a whole copy of the policy, the actor, and learns with its part of
            the weights. The loss is a sum over tokens and gradients are added up, so that nothing
            else needs to know how many processes there are.
Paper       nothing: how many GPUs train is not part of the method
In          a Policy, and lists of which every process takes its share
Out         a policy cut over the processes, its actor, and values of all processes
Left out    tensor and pipeline parallelism
Read next   grpo.py (what is learnt together), folder.py (how processes wait for each other)
"""

import copy
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator, InitProcessGroupKwargs
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from tqdm import tqdm
from transformers.utils.logging import disable_progress_bar

from kit.qwen import Policy


def assemble(folder: Path, config: dict, timeout: float, tracker: str) -> Accelerator:
    """The processes of this run, as `torchrun` or `accelerate launch` started them. Only process 0
    speaks; errors of the others are still heard."""
    if tracker != "none" and importlib.util.find_spec(tracker) is None:
        raise SystemExit(f"--tracker {tracker} needs a package: pip install {tracker}")
    wait = InitProcessGroupKwargs(timeout=timedelta(seconds=timeout))
    cpu = "WORLD_SIZE" in os.environ and not torch.cuda.is_available()  # else each would be alone
    disable_progress_bar()  # of transformers, which would show one for every small checkpoint
    # torch warns of checkpoints that are written without other processes: here that is intended.
    warnings.filterwarnings("ignore", message=".*is not initialized.*|.*single process.*")
    log = None if tracker == "none" else tracker
    team = Accelerator(cpu=cpu, log_with=log, project_dir=folder, kwargs_handlers=[wait])
    team.init_trackers("codev", config)
    if not team.is_main_process:
        sys.stdout = open(os.devnull, "w")
        bar = tqdm.__init__  # also of those that say themselves when they are shown
        tqdm.__init__ = lambda self, *args, **more: bar(self, *args, **more | {"disable": True})
    return team


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
    """The shares of a batch that micro-batches may not mix. They keep a promise: two processes
    learn what one learns, to the last bit (with several micro-batches a share, up to rounding). A
    sum of floats depends on its order, and over hundreds of steps a last bit becomes visible. So
    one process that is alone adds up as two would: first one share, then the other."""
    return [items[0::2], items[1::2]] if processes()[1] == 1 else [items]


def level(policy: Policy, batches: list[list], blank_row: Callable[[Policy], object]) -> list[list]:
    """The same number of micro-batches (lists of rows) for every process, each with a picture in
    it: all fetch a layer together, and a process that made fewer passes, or none through the vision
    tower, would leave the others waiting for ever. What is missing is made up by
    blank_row(policy): a row with a picture, and nothing to learn."""
    if policy.sharded is None:
        return batches
    blank = blank_row(policy)
    with_picture = [b if any(row.pictures for row in b) else [*b, blank] for b in batches]
    return with_picture + [[blank]] * (max(gathered(len(batches))) - len(batches))


AS_ON_A_GPU = False  # tests and beyond/simulate.py set this: a CPU then takes the way of a GPU


def on_gpu(policy: Policy) -> bool:
    return AS_ON_A_GPU or policy.device.type != "cpu"


def precision(policy: Policy) -> torch.dtype:
    """What layers compute in. Weights are fp32: at a learning rate of 1e-6 bf16 would not move."""
    return torch.bfloat16 if on_gpu(policy) else torch.float32


def shard(policy: Policy, log_probs: nn.Module) -> None:
    """Cut weights, gradients and optimiser state evenly over the processes (FSDP2; ZeRO-3), all in
    fp32. Every layer is fetched as a whole when its turn comes. log_probs: the module whose forward
    pass uses the policy's model; its calls fetch what belongs to no layer. One process on a CPU has
    nothing to cut, and its policy is left as it is; so is one of which only an adapter learns."""
    n = processes()[1]
    if policy.base or n == 1 and not on_gpu(policy):
        return
    if not dist.is_initialized():  # one GPU: the same path, with nobody to meet
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    # Inputs are not cast: that would round the vision tower's rotary angles, and the policy
    # would no longer be the actor to the last bit.
    cast = MixedPrecisionPolicy(precision(policy), torch.float32, cast_forward_inputs=False)
    policy.sharded, mesh = log_probs, init_device_mesh(policy.device.type, (n,))
    for module in (*policy.layers, log_probs):
        fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=cast)
        module.set_gradient_divide_factor(1.0)  # a sum over processes, not their mean
        module.set_force_sum_reduction_for_comms(True)


def actor_of(policy: Policy) -> Policy:
    """Who plays: a whole copy of the policy on every process, in the precision it computes in, so
    that generate needs no other process. Before `shard`. A policy that stays whole plays itself:
    that on one CPU, and one of which only an adapter learns."""
    if policy.base or processes()[1] == 1 and not on_gpu(policy):
        return policy
    return twin(policy, {
        id(p): nn.Parameter(p.detach().to(precision(policy), copy=True), requires_grad=False)
        for p in policy.model.parameters()
    })  # fmt: skip


def twin(policy: Policy, weights: dict[int, nn.Parameter]) -> Policy:
    """Another policy, with weights[id(p)] where this one has p. What a memo holds is not copied by
    deepcopy: so there is no second copy in fp32, buffers stay fp32, and tied weights stay tied."""
    other = copy.copy(policy)
    other.model = copy.deepcopy(policy.model, weights)
    return other


@torch.no_grad()
def sync(policy: Policy, actor: Policy) -> None:
    """Give the actor the policy's weights: once a step, before it plays."""
    if actor is not policy:
        for p, q in zip(policy.model.parameters(), actor.model.parameters()):
            q.copy_(whole(p.detach().to(q.dtype)))


def clip_gradient(model: nn.Module, largest: float) -> float:
    """Sum the gradients over the processes, and shorten their sum to the norm `largest` if it is
    longer. Returns its norm before. The gradients of a policy that is cut are sums already."""
    learnt = [p for p in model.parameters() if p.requires_grad]
    if any(gathered(any(p.grad is not None for p in learnt))):
        for p in learnt:
            if not isinstance(p, DTensor) and processes()[1] > 1:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(p.grad)
    gradients = [p.grad for p in learnt if p.grad is not None]
    # Of whole gradients: the same number on any number of processes.
    norms = [torch.linalg.vector_norm(whole(g)) for g in gradients] or [torch.zeros(())]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    scale = (largest / (norm + 1e-6)).clamp(max=1.0).item()
    for gradient in gradients:
        gradient.mul_(scale)
    return norm.item()


def whole(tensor: Tensor) -> Tensor:
    """The full tensor on every process; a tensor that is not cut comes back as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
