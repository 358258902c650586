"""
rollout.py: one prompt, K futures. Play the game of thinking, running code and looking.

Concept     Two ideas carry this project, and both live here.

            Who chose this token? A Trajectory is one flat list of token ids, and `acted[t]` is
            True exactly where the policy sampled token t, the last token of its turn included:
            ending a turn is a decision too. Everything else (the prompt, what the sandbox showed,
            image pads, role markers) is False. The loss, the KL, the ratio, every token count and
            the labels of stage 1 read this one mask. There are two verbs, `act` and `observe`,
            and ids are never decoded and encoded again, so the mask cannot come out wrong.

            One prompt, K futures. The K rollouts of a question share its prompt and its image. We
            encode them once, repeat the KV cache K times, and keep it over the turns, so that a
            turn costs only its new tokens. grpo.py shares the prompt once more, when it learns.
Paper       CodeV, arXiv:2511.19661, Eq. 2
In          Samples, a Policy
Out         groups of Trajectories
Left out    rewards (rewards.py); a decoding loop of our own (HF generate does it)
Read next   rewards.py (what a trajectory earns), grpo.py (how it is learnt from)

Shapes      B rows in play   L slots so far, padding included (see Batch)   P patches   V token ids
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
)

from data import TAGS, Sample, crop_turn, messages, observation_text, parse, toy_questions
from kit.qwen import Encoded, Picture, Policy, load
from sandbox import Limits, Observation, Sandbox


@dataclass
class Turn:
    """One turn of the policy: an action a_t and, if it was code, its observation o_t (Eq. 2)."""

    text: str
    code: str | None
    observation: Observation | None  # None when no code was run
    start: int  # its tokens are ids[start:end] of the trajectory
    end: int


@dataclass
class Trajectory:
    """Eq. 2: tau = (x, a_1, o_1, a_2, ..., a_T), flat. h before a step is ids[: step.start].

    tokens           acted   why
    prompt, image    False   the question
    policy's turn    True    thoughts, code and the closing token
    sandbox output   False   the world's reply: training on it would teach the policy to dream it
    """

    sample: Sample
    ids: list[int] = field(default_factory=list)
    acted: list[bool] = field(default_factory=list)
    images: list[Picture] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    prompt: int = 0  # ids[:prompt] are the prompt, shared by the whole group
    prompt_images: int = 0  # images[:prompt_images] stand in it
    answer: str | None = None
    ended: str = ""  # "answered", "turns", "length" or "no_action"
    seed: str = ""  # of its sampling (class SeededSampling)

    def act(self, ids: list[int]) -> None:
        self.ids += ids
        self.acted += [True] * len(ids)

    def observe(self, piece: Encoded) -> None:
        self.ids += piece.ids
        self.acted += [False] * len(piece.ids)
        self.images += piece.pictures

    @property
    def tool_turns(self) -> list[Turn]:
        """T_tool of Eq. 6: the steps whose code went to the sandbox; failed and refused ones count
        (rewards.tool_reward leaves out failures of ours)."""
        return [turn for turn in self.turns if turn.observation is not None]


@dataclass(frozen=True)
class Rules:
    turns: int = 5  # T of Eq. 2: how often the policy may speak
    temperature: float = 1.0  # 0: greedy (evaluation only)
    max_new_tokens: int = 1024  # per turn
    max_length: int = 16384  # tokens of a whole trajectory, image pads counted one by one
    max_log_chars: int = 2000  # of what one program printed; repairs and errors are never cut
    kv_budget_gb: float = 0.0  # for the KV cache of all rows in play; 0: most of what is free
    sandboxes: int = 8  # programs that run at the same time
    patience: float = 1.0  # seconds until rows whose code has run go on without the slow ones
    limits: Limits = Limits()
    allow_weak_sandbox: bool = False


def load_policy(
    name: str | Path, device: str | torch.device = "cpu", max_pixels: int | None = None,
    weights: bool = True,
) -> Policy:  # fmt: skip
    """A checkpoint folder or a hub name -> Policy (kit/qwen.py) that knows the tags of the game."""
    return load(name, TAGS, device, max_pixels, weights)


def encode_prompt(policy: Policy, sample: Sample, pixels: bool = True) -> Encoded:
    """x of Eq. 2. Without pixels, only its ids are of use."""
    text = policy.tokenizer.apply_chat_template(
        messages(sample, policy.neutralise), tokenize=False, add_generation_prompt=True
    )
    picture = policy.pictures([sample.image]) if pixels else [policy.outline(sample.image)]
    return policy.encode(text, picture)


def encode_observation(
    policy: Policy, seen: Observation, pictures: list[Picture], closed: bool, limit: int
) -> Encoded:
    """o_t as a new user turn. closed: the policy ended its message itself, we need not."""
    end = "" if closed else "<|im_end|>"
    shown = observation_text(seen, policy.neutralise, limit)
    text = f"{end}\n<|im_start|>user\n<sandbox_output>{shown}</sandbox_output><|im_end|>\n"
    return policy.encode(text + "<|im_start|>assistant\n", pictures)


class EndOfTurn(StoppingCriteria):
    """A row stops when a code or answer block closes (generate itself stops it at the message's
    end). We look at text, not at token ids: in Qwen's vocabulary "</code>" may end in ">", ">\\n",
    ">." and many more. A row is decoded only when its newest token has a ">" in it."""

    def __init__(self, policy: Policy, start: int) -> None:
        self.policy, self.start, self.may_end = policy, start, policy.may_end.to(policy.device)

    def __call__(self, ids: Tensor, scores: Tensor, **kwargs) -> Tensor:
        done = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        for row in self.may_end[ids[:, -1]].nonzero()[:, 0].tolist():
            # "</answer>" has 9 characters, so at most 9 tokens, and a few more for what merged.
            newest = ids[row, max(self.start, ids.shape[1] - 12) :].tolist()
            text = self.policy.tokenizer.decode(newest)
            done[row] = "</code>" in text or "</answer>" in text
        return done


class SeededSampling(LogitsProcessor):
    """Sampling that depends on the trajectory alone. The sampler of `generate` draws for a whole
    batch, so that a row's luck would hang on which rows it happens to sit with: on the size of a
    wave, on the number of processes, on whose program was slow. Here turn t of a trajectory draws
    from (its seed, t): token number i is the first whose cumulated probability exceeds the i-th
    draw. Scores become 1 from there on, else 0; generate takes the first of the highest."""

    def __init__(self, batch: Batch, rules: Rules) -> None:
        self.start, self.temperature = batch.ids.shape[1], rules.temperature
        seeds = [random.Random(f"{t.seed} {len(t.turns)}").getrandbits(63) for t in batch.live]
        streams = [torch.Generator().manual_seed(seed) for seed in seeds]  # alike on every machine
        draws = [torch.rand(rules.max_new_tokens, generator=stream) for stream in streams]
        self.draws = torch.stack(draws).to(batch.ids.device)  # [B, max_new_tokens]

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:  # scores [B, V]
        p = (scores / self.temperature).softmax(-1, dtype=torch.float64)  # [B, V]
        reached = p.cumsum(-1)  # [B, V]
        if not reached[:, -1].isfinite().all():
            raise FloatingPointError("the policy's scores of the next token are not finite")
        # (A draw is at most 1 - 2^-24: far enough from 1 for the rounding of a float64 sum.)
        beyond = reached > self.draws[:, ids.shape[1] - self.start, None] * reached[:, -1:]
        return (beyond & (p > 0)).float()


def left_pad(rows: list[list[int]], fill: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Lists of ids -> (ids, mask), both [B, L]. Left: the last column is real for every row."""
    width = max(map(len, rows))
    ids = [[fill] * (width - len(row)) + row for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


# Playing


@dataclass
class Batch:
    """Rows that speak at the same time, and all that their next turn needs. Of the L slots of ids
    and mask the cache holds the first C < L; the rest, and the pictures in it, are still to be
    read. (A wave is as many groups as fit in memory; it starts as one batch. A tail is what
    generate writes behind a row that stopped early.)"""

    ids: Tensor  # [B, L]
    mask: Tensor  # [B, L] 0 where a slot is padding or a cut tail
    cache: DynamicCache
    live: list[Trajectory]  # B
    unread: list[Picture] = field(default_factory=list)  # images the cache does not hold yet

    def rows(self, keep: list[int]) -> Batch:
        if len(keep) == len(self.live):
            return self  # nobody leaves: no copy
        cache = DynamicCache()
        for i, layer in enumerate(self.cache.layers):
            cache.update(layer.keys[keep], layer.values[keep], i)
        live = [self.live[i] for i in keep]
        return Batch(self.ids[keep], self.mask[keep], cache, live)

    def squeeze(self) -> None:
        """Drop dead cached slots, as many as every row has, once that is a fifth. Attention does
        not care where a masked slot stands, so each row's dead slots move to the front first."""
        C = self.cache.get_seq_length()  # cached slots
        alive = int(self.mask[:, :C].sum(1).max())
        if alive > 0.8 * C:
            return
        order = self.mask[:, :C].argsort(dim=1, stable=True)[:, C - alive :]  # [B, alive]
        self.ids = torch.cat([self.ids.gather(1, order), self.ids[:, C:]], 1)
        self.mask = torch.cat([self.mask.gather(1, order), self.mask[:, C:]], 1)
        for layer in self.cache.layers:  # [B, heads, C, width]
            index = order[:, None, :, None].expand(-1, layer.keys.shape[1], -1, layer.keys.shape[3])
            layer.keys, layer.values = layer.keys.gather(2, index), layer.values.gather(2, index)

    def observe(self, pieces: list[Encoded], pad: int) -> None:
        """Append what each row was shown, padded on the left."""
        ids, mask = left_pad([piece.ids for piece in pieces], pad, self.ids.device)
        self.ids, self.mask = torch.cat([self.ids, ids], 1), torch.cat([self.mask, mask], 1)
        self.unread = [picture for piece in pieces for picture in piece.pictures]


@torch.no_grad()
def play(
    policy: Policy, samples: list[Sample], rollouts: int = 1, rules: Rules = Rules(),
    tally: Counter | None = None,
) -> list[list[Trajectory]]:  # fmt: skip
    """Eq. 2: `rollouts` trajectories of every sample, one group per sample, in order.

    Sampling takes one number from torch's global generator; seed that to repeat a run. From there
    on the k-th rollout of a sample draws by its id and k, wherever and beside whom it is played.
    `tally` collects what it cost: tokens prefilled and generated, images encoded, seconds of each.
    """
    tally = Counter() if tally is None else tally
    groups: list[list[Trajectory]] = []
    seed = torch.randint(2**62, ()).item()
    fit = rows_that_fit(policy, rules)
    if fit < rollouts:
        raise ValueError(
            f"the KV cache has room for {fit} rows of --max-length {rules.max_length}, but a group "
            f"has {rollouts}: raise --kv-budget-gb, or lower --max-length or --rollouts"
        )
    per_wave = fit // rollouts
    confine = (rules.limits, rules.allow_weak_sandbox)
    with ThreadPoolExecutor(rules.sandboxes) as pool:
        for i in range(0, len(samples), per_wave):
            wave: list[Trajectory] = []
            for sample in samples[i : i + per_wave]:
                prompt = encode_prompt(policy, sample)
                check_fits(policy, sample, prompt, rules)
                seeds = [f"dice {seed} {sample.id} {k}" for k in range(rollouts)]
                groups.append([begin(sample, prompt, own) for own in seeds])
                wave += groups[-1]
            sandboxes = {id(t): Sandbox(t.sample.image, *confine) for t in wave}
            try:
                _play_wave(policy, wave, rollouts, sandboxes, rules, pool, tally)
            finally:
                if sandboxes:  # an error is on its way out: let no program outlive it
                    pool.shutdown(cancel_futures=True)
                for sandbox in sandboxes.values():
                    sandbox.close()
    return groups


@torch.no_grad()
def play_on(
    policy: Policy, trajectories: list[Trajectory], sandboxes: dict[int, Sandbox], rules: Rules
) -> None:
    """Eq. 2 from the middle: it is the policy's turn in every trajectory, and each goes on until
    its episode is over, and closes its sandbox. `sandboxes` has one for each id(trajectory), in the
    state its code left. All must fit the KV cache at once (rows_that_fit)."""
    with ThreadPoolExecutor(rules.sandboxes) as pool:
        _play_wave(policy, trajectories, 1, dict(sandboxes), rules, pool, Counter())


def _play_wave(
    policy: Policy, wave: list[Trajectory], rollouts: int, sandboxes: dict[int, Sandbox],
    rules: Rules, pool: ThreadPoolExecutor, tally: Counter,
) -> None:  # fmt: skip
    """Eq. 2 for one wave: act, run, observe, until every episode is over."""

    def run(t: Trajectory, code: str) -> tuple[Observation, list[Picture]]:
        seen = sandboxes[id(t)].run(code)
        return seen, policy.pictures(seen.images)  # here, so that it overlaps with other programs

    def leave(trajectories: list[Trajectory]) -> None:
        for t in trajectories:
            if t.ended:
                pool.submit(sandboxes.pop(id(t)).close)

    # A queue of batches, each with the programs that its rows wait for.
    batches: list[tuple[Batch, list[Future]]] = [(prefill(policy, wave, rollouts, tally), [])]
    while batches:
        done = [all(f.done() for f in programs) for _, programs in batches]
        if not any(done):
            wait([f for _, own in batches for f in own if not f.done()], return_when=FIRST_COMPLETED)
            continue
        batch, programs = batches.pop(done.index(True))
        if programs:
            # Observe. Finished rows leave; the others get what their code showed.
            shown = [program.result() for program in programs]
            pieces = [listen(policy, t, *s, rules) for t, s in zip(batch.live, shown)]
            stay = [row for row, piece in enumerate(pieces) if piece is not None]
            leave(batch.live)
            if not stay:
                continue
            batch = batch.rows(stay)
            batch.squeeze()
            batch.observe([pieces[row] for row in stay], policy.pad_id)

        # Act. One turn of every row; code starts to run at once, a thread per program.
        with stopwatch(tally, "decode"):
            replies = _generate(policy, batch, rules, tally)
        codes = [speak(policy, t, reply) for t, reply in zip(batch.live, replies)]
        leave(batch.live)
        acting = {row: pool.submit(run, batch.live[row], code)
                  for row, code in enumerate(codes) if code is not None}  # fmt: skip

        # A slow program delays its own row only: the quick ones go on as a batch of their own.
        with stopwatch(tally, "sandbox"):
            wait(acting.values(), timeout=rules.patience)
        quick = [row for row, program in acting.items() if program.done()]
        slow = [row for row in acting if row not in quick]
        for part in filter(None, (quick, slow)):
            batches.append((batch.rows(part), [acting[row] for row in part]))


def prefill(policy: Policy, wave: list[Trajectory], rollouts: int, tally: Counter) -> Batch:
    """The batch before the next turn. `rollouts` neighbours share their history: it and its images
    are encoded once, then the cache is copied. Of each history the last token stays unread:
    generate starts there."""
    first = wave[::rollouts]
    ids, mask = left_pad([t.ids for t in first], policy.pad_id, policy.device)
    pictures = [picture for t in first for picture in t.images]
    cache = DynamicCache(config=policy.model.config)
    with stopwatch(tally, "prefill"):
        policy.model.eval()(
            input_ids=ids[:, :-1], attention_mask=mask[:, :-1], cache=cache, use_cache=True,
            position_ids=policy.positions(ids, mask, [p.grid for p in pictures])[..., :-1],
            logits_to_keep=1, **policy.model_images(pictures),
        )  # fmt: skip
    tally["prefilled_tokens"] += sum(len(t.ids) for t in first)
    tally["images"] += len(pictures)
    cache.batch_repeat_interleave(rollouts)
    ids, mask = (x.repeat_interleave(rollouts, 0) for x in (ids, mask))
    return Batch(ids, mask, cache, wave)


def _generate(policy: Policy, batch: Batch, rules: Rules, tally: Counter) -> list[list[int]]:
    """One turn of every row: its new ids. They are appended to the batch; rows that stopped early
    carry pads behind, and mask 0 hides those from all that follows."""
    start = batch.ids.shape[1]
    config = GenerationConfig(
        do_sample=False, repetition_penalty=1.0, use_cache=True,  # sampling: SeededSampling
        suppress_tokens=policy.forbidden, max_new_tokens=rules.max_new_tokens,
        pad_token_id=policy.pad_id, eos_token_id=policy.end_id, return_dict_in_generate=True,
    )  # fmt: skip
    grids = [picture.grid for t in batch.live for picture in t.images]
    # generate() fills what a GenerationConfig leaves unset from the model's own, and released
    # checkpoints carry near-greedy values and a repetition penalty there. So: none of its own.
    own, policy.model.generation_config = policy.model.generation_config, GenerationConfig()
    output = policy.model.generate(
        input_ids=batch.ids, attention_mask=batch.mask, cache=batch.cache,
        position_ids=policy.positions(batch.ids, batch.mask, grids),
        generation_config=config, logits_processor=[SeededSampling(batch, rules)] * (rules.temperature > 0),
        stopping_criteria=StoppingCriteriaList([EndOfTurn(policy, start)]),
        synced_gpus=False, **policy.model_images(batch.unread),
    )  # fmt: skip
    policy.model.generation_config = own  # an export keeps it
    new = output.sequences[:, start:]  # [B, longest turn]
    alive = new != policy.pad_id  # forbidden to the policy: generate writes it behind a stop
    lengths = alive.sum(1).tolist()
    tally["prefilled_tokens"] += sum(len(t.ids) - t.turns[-1].end for t in batch.live if t.turns)
    tally["generated_tokens"] += sum(lengths)
    tally["images"] += len(batch.unread)
    batch.unread = []
    batch.ids, batch.mask = output.sequences, torch.cat([batch.mask, alive.long()], 1)
    return [row[:n] for row, n in zip(new.tolist(), lengths)]


@contextmanager
def stopwatch(tally: Counter, name: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    tally[f"{name}_seconds"] += time.perf_counter() - began


def rows_that_fit(policy: Policy, rules: Rules) -> int:
    """How many rows of max_length slots the KV cache has room for: keys and values of every layer
    (115 kB a slot for the 7B in fp32). Without a budget: 80 % of the memory that is free now."""
    c = policy.model.config.text_config
    width = c.hidden_size // c.num_attention_heads * c.num_key_value_heads
    slot = 2 * c.num_hidden_layers * width * policy.model.dtype.itemsize
    if rules.kv_budget_gb:
        budget = rules.kv_budget_gb * 1e9
    elif policy.device.type == "cuda":
        torch.cuda.empty_cache()  # what the last step has freed is free
        budget = 0.8 * torch.cuda.mem_get_info(policy.device)[0]
    else:
        budget = 0.8 * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(budget // (slot * rules.max_length))


def begin(sample: Sample, prompt: Encoded, seed: str = "") -> Trajectory:
    trajectory = Trajectory(sample, seed=seed)
    trajectory.observe(prompt)
    trajectory.prompt, trajectory.prompt_images = len(prompt.ids), len(prompt.pictures)
    return trajectory


def speak(policy: Policy, trajectory: Trajectory, reply: list[int]) -> str | None:
    """The policy acted: a_t, drawn by SeededSampling. Returns the code to run; None if there is none and the
    episode is over."""
    start = len(trajectory.ids)
    trajectory.act(reply)
    text = policy.tokenizer.decode(reply, skip_special_tokens=True)
    closed = reply[-1] == policy.end_id
    code, answer = parse(text, closed)
    if answer is not None:
        code, trajectory.answer, trajectory.ended = None, answer, "answered"
    elif code is None:
        stopped = closed or "</code>" in text or "</answer>" in text  # by a lone closing tag
        trajectory.ended = "no_action" if stopped else "length"
    trajectory.turns.append(Turn(text, code, None, start, len(trajectory.ids)))
    return code


def listen(
    policy: Policy, trajectory: Trajectory, seen: Observation, pictures: list[Picture], rules: Rules
) -> Encoded | None:
    """The world replied: o_t. Returns the piece that was appended, or None if the episode is over:
    it was the last turn, or the piece would not fit (it is then absent as a whole, never cut)."""
    trajectory.turns[-1].observation = seen
    if len(trajectory.turns) == rules.turns:
        trajectory.ended = "turns"
        return None
    closed = trajectory.ids[-1] == policy.end_id
    piece = encode_observation(policy, seen, pictures, closed, rules.max_log_chars)
    if len(trajectory.ids) + len(piece.ids) + rules.max_new_tokens > rules.max_length:
        trajectory.ended = "length"
        return None
    trajectory.observe(piece)
    return piece


class TooLong(ValueError):
    """A question that leaves no room for a turn."""


def check_fits(policy: Policy, sample: Sample, prompt: Encoded, rules: Rules) -> None:
    """A prompt must leave room for a turn; else say so by name."""
    visual = prompt.ids.count(policy.image_id)
    room = rules.max_length - rules.max_new_tokens
    if len(prompt.ids) > room:
        raise TooLong(
            f"sample {sample.id}: its prompt has {len(prompt.ids)} tokens ({visual} of them for the"
            f" image), but --max-length {rules.max_length} leaves {room} beside a turn of "
            f"{rules.max_new_tokens}. Raise it, lower --max-pixels, or drop the question."
        )


if __name__ == "__main__":
    from data import crop_turn, toy_questions

    policy, (question,) = load_policy("tiny"), toy_questions(1, seed=0, neutral_share=0)
    t = begin(question, encode_prompt(policy, question))
    look = crop_turn(" I need a closer look .", (0, 64, 64, 128))
    with Sandbox(question.image) as sandbox:
        seen = sandbox.run(speak(policy, t, policy.encode(look, []).ids))
    listen(policy, t, seen, policy.pictures(seen.images), Rules())
    for token, acted in zip(policy.tokenizer.convert_ids_to_tokens(t.ids), t.acted):
        print("policy" if acted else "world ", token)
