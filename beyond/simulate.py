"""
simulate.py: is the plan's arithmetic right? torch counts the same memory by itself.

Concept     In torch's fake mode tensors have shapes and no data. The project's own `shard`, actor
            and LogProbs then run at full size on any machine, and torch's tracker adds up what
            lives at the same time: while all is loaded, while rows play, and while we learn.
Paper       nothing: it names no machine
In          the flags of train.py, and --simulate 8x80: 8 GPUs of 80 GB
Out         a table, GB per GPU; exit status 0 if plan and tracker agree (see `simulate`), else 1
Left out    what is no tensor (CUDA itself); memory that is reserved and not used; adapters
Read next   plan.py (the sums), tests/gpu_check.py (the same on a real GPU)
"""

import sys
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
import transformers.models.qwen2_5_vl.modeling_qwen2_5_vl as modeling
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import DynamicCache

import kit.processes
import train
from beyond.plan import CUDA, Planned, geometry, needs, node
from beyond.tiny import random_policy
from kit.flags import parse, refusals
from kit.qwen import Model, Policy
from rollout import READ
from train import Config


@contextmanager
def faked(gpus: int):
    """All tensors are fake, but grids: places of patches hang on their data. A CPU is a GPU."""

    def features(self, pixel_values, image_grid_thw, **others):
        seen = self.visual(pixel_values.type(self.visual.dtype), grid_thw=image_grid_thw)
        seen.pooler_output = (seen.pooler_output,)
        return seen

    in_earnest = unset_fake_temporarily()  # what it decorates sees and makes real tensors
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=gpus)
    mesh = init_device_mesh("cpu", (gpus,))
    with ExitStack() as stack:
        put = lambda *what: stack.enter_context(mock.patch.object(*what))  # noqa: E731
        put(kit.processes, "AS_ON_A_GPU", True)
        put(kit.processes, "init_device_mesh", lambda *_: mesh)
        put(modeling, "torch_compilable_check", lambda *_: None)
        put(modeling.Qwen2_5_VLModel, "get_image_features", features)
        for name in ("vision_position_ids", "vision_attention_seqlens", "vision_window_index"):
            put(modeling, f"get_{name}", in_earnest(getattr(modeling, f"get_{name}")))
        put(modeling, "get_max_seqlen", in_earnest(modeling.get_max_seqlen))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield
    dist.destroy_process_group()


def gigabytes(tracker: MemTracker, when: str) -> dict[str, float]:
    counted = tracker.get_tracker_snapshot(when)[torch.device("cpu")]
    return {getattr(kind, "value", kind): n / 1e9 for kind, n in counted.items()}


def loading(config: Config) -> tuple[Policy, Policy, torch.optim.Optimizer]:
    """As train.main does it, up to the moments of an optimiser that has made its first step."""
    run = SimpleNamespace(folder=Path(), device="cpu", state={"stage": "rl", "checkpoint": None})
    run.phase = lambda name: nullcontext()
    with mock.patch("train.load_policy", lambda *_: random_policy(geometry(config.model))):
        policy, actor, optimizer = train.opened(run, config, "rl")
        for p in optimizer.param_groups[0]["params"]:
            moments = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[p] = {"step": torch.tensor(0.0), **moments}
        reference = train.reference_of(run, config, policy)  # noqa: F841
    return policy, actor, optimizer


def acting(config: Config, actor: Policy, rows: int) -> None:
    """All rows read their last slots, as many as are read at a time."""
    c, full, new = actor.model.config.text_config, config.max_length, READ // rows
    width, heads = c.hidden_size // c.num_attention_heads, c.num_key_value_heads
    cache, ids = DynamicCache(), torch.zeros(rows, new, dtype=torch.long)
    for layer in range(c.num_hidden_layers):
        kept = [torch.empty(rows, heads, full - new, width, dtype=torch.bfloat16) for _ in "kv"]
        cache.update(*kept, layer)
    sees, places = torch.ones(rows, 1, new, full, dtype=torch.bool), ids.expand(3, rows, new)
    how = dict(cache=cache, use_cache=True, logits_to_keep=1)
    actor.model(input_ids=ids, attention_mask=sees, position_ids=places, **how)


def learning(config: Config, policy: Policy, tracker: FSDPMemTracker) -> None:
    """Two micro-batches, the second with the gradients of the first: as many pictures of 3,600
    visual tokens as the slots hold, and every other token was acted."""
    slots, n = config.row_tokens, config.row_tokens // 3600
    with unset_fake_temporarily():
        grid = torch.tensor([[1, 120, 120]] * n)
    acted = torch.zeros(slots - 3600 * n, dtype=torch.long)
    ids, places = (torch.zeros(*shape, 1, slots, dtype=torch.long) for shape in ((), (3,)))
    sees, pixels = torch.ones(1, 1, slots, slots, dtype=torch.bool), torch.zeros(n * 14400, 1176)
    inputs = dict(input_ids=ids, position_ids=places, attention_mask=sees, pixel_values=pixels)
    for _ in range(2):
        how = dict(keep=acted, labels=acted, temperature=1.0, image_grid_thw=grid)
        policy.sharded.train()(**how, **inputs).sum().backward()
        tracker.reset_mod_stats()


def simulate(config: Planned) -> tuple[bool, str]:
    """Do they agree within a tenth, and about peaks within 15 %? With a table of both."""
    gpus, card = node(config.simulate)
    with torch.device("meta"):
        need = needs(config, Model(geometry(config.model)), gpus, card)
    plan = {what: gb for sums in need.sums.values() for what, (gb, _) in sums.items()} | need.peak
    with faked(gpus):
        with MemTracker() as load:
            policy, actor, optimizer = loading(config)
        with MemTracker() as play, torch.no_grad():
            play.track_external(actor.model.requires_grad_())  # its hooks want that
            acting(config, actor, need.rows)
        with FSDPMemTracker(policy.sharded, optimizer) as learn:
            learning(config, policy, learn)
        left, kept = gigabytes(learn, "current"), plan["reference"] + CUDA
        loaded, played, learnt = (gigabytes(t, "peak")["Total"] for t in (load, play, learn))
    counted = dict(weights=left["Sharded Param"], optimiser=left["OptState"])
    counted |= dict(gradients=left["Sharded Grad"], loading=loaded + CUDA)
    counted |= dict(acting=played + kept + plan["weights"] + plan["optimiser"])
    counted |= dict(learning=learnt + kept + plan["actor"])
    text = f"{config.model}, {config.simulate}, {need.rows} rows at a time\n"
    text += "GB per GPU      plan  tracker  ratio"
    for name, gb in counted.items():
        text += f"\n{name:12}{plan[name]:8.1f}{gb:9.1f}{plan[name] / gb:7.2f}"
    off = {name: abs(plan[name] / gb - 1) for name, gb in counted.items()}
    return all(most <= 0.1 + 0.05 * (name in need.peak) for name, most in off.items()), text


def main(argv: list[str]) -> None:
    with refusals():
        agree, text = simulate(parse(Planned, argv, presets=train.PRESETS))
    print(text)
    sys.exit(0 if agree else 1)
