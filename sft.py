"""
sft.py: learn to speak the game by imitation.

Concept     Stage 1 is stage 2 with A = 1 and beta = 0 on demonstrations: the loss is -mean log pi
            of the acted tokens, computed by the same function on the same rows. There is no second
            masking. A demonstration of the toy is replayed in the sandbox; one of Thyme's brings
            along what its programs showed.
Paper       CodeV, arXiv:2511.19661, stage 1 (cold start): 3 epochs on Thyme's data, "following
            Thyme". From Thyme: the frozen vision tower, and that only the last turns are learnt
In          Trajectories in which a demonstrator acted
Out         a policy that speaks the format and mirrors the mixture of its demonstrations
Left out    Thyme's second, annealing stage; whether the paper ran it is not said
Read next   grpo.py (the rows and log_probs), data.py (what is demonstrated)
"""

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path

import torch
from tqdm import tqdm

from data import Demonstration, Sample, demonstrations
from grpo import Row, apply_gradient, blank_row, group_row, log_probs
from kit.processes import gathered, level
from kit.qwen import Policy
from kit.schemas import Demonstrated, thyme_fields
from kit.tables import Bad, Lazy, Skipped, Usable, blaming, read_rows
from rewards import format_error
from rollout import Rules, Trajectory, begin, check_fits, encode_observation, encode_prompt
from rollout import listen, load_policy, speak
from sandbox import Observation, Sandbox

# One loop for everything that imitates


def replay(policy: Policy, demo: Demonstration, rules: Rules = Rules()) -> Trajectory:
    """A demonstration as a Trajectory. The demonstrator's words are the actions, and what they show
    comes from the same sandbox that the policy will meet. Raises TooLong, as rollout.play does."""
    rules = replace(rules, turns=len(demo.turns))
    prompt = encode_prompt(policy, demo.sample)
    check_fits(policy, demo.sample, prompt, rules)
    trajectory = begin(demo.sample, prompt)
    with Sandbox(demo.sample.image, rules.limits, rules.allow_weak_sandbox) as sandbox:
        for text in demo.turns:
            code = speak(policy, trajectory, policy.encode(text, []).ids)
            if code is not None:
                shown = sandbox.run(code)
                listen(policy, trajectory, shown, policy.pictures(shown.images), rules)
            if trajectory.ended:
                break
    return trajectory


def replay_all(
    policy: Policy, demos: list[Demonstration], rules: Rules = Rules()
) -> Iterator[Trajectory]:
    """In order, several sandboxes at a time."""
    with ThreadPoolExecutor(rules.sandboxes) as pool:
        yield from pool.map(lambda demo: replay(policy, demo, rules), demos)


def rows_of(policy: Policy, trajectories: Sequence[Trajectory]) -> Sequence[Row]:
    """Each demonstration is a group of one. The rows of Lazy trajectories are lazy as well."""

    def row(trajectory: Trajectory) -> Row:
        return group_row(policy, [(0, trajectory)])

    return Lazy(row, trajectories) if isinstance(trajectories, Lazy) else [*map(row, trajectories)]


def mean_logp(policy: Policy, batches: list[list[Row]], learn: bool) -> float:
    """Mean log pi over the acted tokens of some micro-batches, those of other processes
    included. With `learn` the gradients of minus that mean are added to the weights' .grad."""
    tokens = sum(gathered(sum(len(row.labels) for batch in batches for row in batch)))
    total = 0.0
    for batch in level(policy, batches, blank_row):
        with torch.set_grad_enabled(learn):
            logp, _ = log_probs(policy, batch)
            if learn:
                (-logp.sum() / tokens).backward()
        total += logp.sum().item()
    return sum(gathered(total)) / tokens


def imitate(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    batches_of: Callable[[int], list[list[Row]]],
    steps: range,
    rate: Callable[[int], float],
    after: Callable[[int, float, float | None], bool | None],
    title: str = "sft",
) -> None:
    """Gradient steps on -mean log pi. Step i takes the micro-batches batches_of(i) and the learning
    rate rate(i), then calls after(i, loss, grad_norm); if that returns True, the loop ends."""
    policy.model.train()
    bar = tqdm(steps, title, initial=steps.start, total=steps.stop, mininterval=5)
    for i in bar:
        for group in optimizer.param_groups:
            group["lr"] = rate(i)
        optimizer.zero_grad()
        loss = -mean_logp(policy, batches_of(i), learn=True)
        norm = apply_gradient(policy.model, optimizer, max_grad_norm=1.0)
        bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
        if after(i, loss, norm):
            break


def shuffled(n: int, batch: int, seed: int | str) -> Callable[[int], list[int]]:
    """i -> the indices of batch i; every epoch has an order of its own. Batches depend on
    nothing but these arguments and i, so that a resumed run meets the same ones."""

    @lru_cache(2)  # a batch may lie in two epochs
    def order(epoch: int) -> list[int]:
        return random.Random(f"order {seed} {epoch}").sample(range(n), n)

    def batch_of(i: int) -> list[int]:
        return [order(k // n)[k % n] for k in range(i * batch, (i + 1) * batch)]

    return batch_of


# Thyme-SFT: the public demonstrations

# How many turns, from the end, are learnt of a demonstration that ran two programs or more; others
# are learnt whole. Thyme's finding: who imitates the first turns learns to be wrong at first. Its
# released code keeps the last program too, its paper's text only what follows the last output.
TRAIN_ROUNDS = {"all": None, "last_code_and_answer": 2, "after_last_obs": 1}


def load_thyme(
    policy: Policy,
    where: str | Path,
    train_rounds: str = "last_code_and_answer",
    rules: Rules = Rules(),
    on_bad: str = "skip",
) -> tuple[Usable[Trajectory], list[Skipped]]:
    """Rows of Thyme-SFT -> Trajectories, made when asked for, and the rows that cannot be
    used: they do not parse, or have more than rules.max_length tokens. No row is ever cut.

    where: as in tables.read_rows, "Kwai-Keye/Thyme-SFT:wo_thinking_thyme" for one of its splits.
    """
    rows = read_rows(where)

    def trajectory(i: int, pixels: bool = True) -> Trajectory:
        demo = thyme_fields(rows[i], rows.folder)
        return thyme_trajectory(policy, f"thyme-{i}", demo, train_rounds, rules, pixels)

    def check(i: int) -> None:
        with blaming("image"):  # the model takes no picture that is 200 times longer than wide
            trajectory(i, pixels=False)

    limits = rules.max_length, rules.max_log_chars
    key = rows.version, policy.version(), train_rounds, limits
    usable = Usable(range(len(rows)), check, trajectory, on_bad, str(where), key)
    return usable, usable.skipped


def thyme_trajectory(
    policy: Policy, id: str, demo: Demonstrated, train_rounds: str, rules: Rules, pixels: bool
) -> Trajectory:
    """One row in the game's form. A turn of the policy ends behind </code>, and what was shown
    is a user turn, which is never learnt from. Without pixels this is faster, and only ids and
    mask are of use. Raises Bad, which names the field that is to blame."""
    sample = Sample(id, demo.image, demo.question, "", source="thyme")
    trajectory = begin(sample, encode_prompt(policy, sample, pixels))
    control = {*policy.forbidden, policy.end_id}
    for turn, output in zip_longest(demo.turns, demo.outputs):
        ids = policy.tokenizer(turn, add_special_tokens=False)["input_ids"]
        if not ids or "<image>" in turn or control.intersection(ids):
            raise Bad("response", f"a turn is empty or holds an image or a control token: {turn!r}")
        code = speak(policy, trajectory, ids)
        if output is None:
            break
        if code is None or not turn.endswith("</code>"):
            raise Bad("response", f"an output follows what is no code: ...{turn[-60:]!r}")
        text, images = output
        pictures = policy.pictures(images) if pixels else [*map(policy.outline, images)]
        shown = trajectory.turns[-1].observation = Observation(text, images)
        trajectory.observe(encode_observation(policy, shown, pictures, False, rules.max_log_chars))
    if trajectory.answer is None or format_error(trajectory):
        raise Bad("response", f"its tags do not close in order, one answer last: ...{turn[-60:]!r}")
    trajectory.sample = replace(sample, answer=trajectory.answer)
    if len(trajectory.ids) > rules.max_length:
        raise Bad("response", f"{len(trajectory.ids)} tokens, --max-length {rules.max_length}")
    rounds = TRAIN_ROUNDS[train_rounds] if len(demo.outputs) > 1 else None
    if rounds:  # the turns before are read, like a prompt, and not learnt
        start, end = trajectory.prompt, trajectory.turns[-rounds].start
        trajectory.acted[start:end] = [False] * (end - start)
    return trajectory


if __name__ == "__main__":
    policy = load_policy("tiny")
    trajectories = list(replay_all(policy, demonstrations(6, seed=0)))
    for row in rows_of(policy, trajectories):
        logp = mean_logp(policy, [[row]], learn=False)
        print(f"{logp:8.2f} a token:", repr(policy.tokenizer.decode(row.labels.tolist())))
