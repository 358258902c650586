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

import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor
from transformers import DynamicCache, LogitsProcessor

from data import TAGS, Sample, crop_turn, messages, observation_text, toy_questions
from kit.grammar import end_of_turn, ending, endings
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
    """Eq. 2: tau = (x, a_1, o_1, a_2, ..., a_T), flat. Before a turn, h is ids[: turn.start].

    tokens           acted   why
    prompt, image    False   the question
    policy's turn    True    thoughts, code and the closing token
    sandbox output   False   the world's reply: training on it would teach the policy to dream it
    """

    sample: Sample
    ids: list[int] = field(default_factory=list)
    acted: list[bool] = field(default_factory=list)
    images: list[Picture] = field(default_factory=list)  # in the order of their pads
    turns: list[Turn] = field(default_factory=list)
    prompt: int = 0  # ids[:prompt] are the prompt, shared by the whole group
    prompt_images: int = 0  # images[:prompt_images] stand in it
    answer: str | None = None
    ended: str = ""  # "answered", "turns", "length" or "no_action"
    seed: str = ""  # what its sampling depends on (class SeededSampling)

    def act(self, ids: list[int]) -> None:
        self.ids += ids
        self.acted += [True] * len(ids)

    def observe(self, piece: Encoded) -> None:
        self.ids += piece.ids
        self.acted += [False] * len(piece.ids)
        self.images += piece.pictures

    @property
    def tool_turns(self) -> list[Turn]:
        """T_tool of Eq. 6: the turns whose code went to the sandbox. Code that failed or was
        refused counts (rewards.tool_reward leaves out failures of the sandbox itself)."""
        return [turn for turn in self.turns if turn.observation is not None]

    @property
    def thinking(self) -> bool:
        """Have the turns so far left a thought open? The next goes on with it."""
        return any(end.thought for end in endings(turn.text for turn in self.turns)[-1:])


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


# One trajectory: what the policy reads, what it says, what it is shown

# A checkpoint folder or a hub name -> a Policy that knows the tags of the game (kit/qwen.py):
# load_policy(name, device="cpu", max_pixels=None, weights=True).
load_policy = partial(load, TAGS)


def encode_prompt(policy: Policy, sample: Sample, pixels: bool = True) -> Encoded:
    """x of Eq. 2. Without pixels this is much faster, and only the ids are of use."""
    text = policy.tokenizer.apply_chat_template(
        messages(sample, policy.neutralise), tokenize=False, add_generation_prompt=True
    )
    picture = policy.pictures([sample.image]) if pixels else [policy.outline(sample.image)]
    return policy.encode(text, picture)


def encode_observation(
    policy: Policy, observation: Observation, pictures: list[Picture], closed: bool, limit: int
) -> Encoded:
    """o_t of Eq. 2 as a new user turn. closed: the policy has ended its message itself.
    limit: how many characters of what the program printed are kept."""
    shown = observation_text(observation, policy.neutralise, limit)
    text = policy.user_turn(f"<sandbox_output>{shown}</sandbox_output>", closed)
    return policy.encode(text, pictures)


class TooLong(ValueError):
    """A question that leaves no room for a turn."""


def check_fits(policy: Policy, sample: Sample, prompt: Encoded, rules: Rules) -> None:
    """Raise TooLong, which names the sample, if its prompt leaves no room for one turn."""
    visual = prompt.ids.count(policy.image_id)
    room = rules.max_length - rules.max_new_tokens
    if len(prompt.ids) > room:
        raise TooLong(
            f"sample {sample.id}: its prompt has {len(prompt.ids)} tokens ({visual} of them for the"
            f" image), but --max-length {rules.max_length} leaves {room} beside a turn of "
            f"{rules.max_new_tokens}. Raise it, lower --max-pixels, or drop the question."
        )


def begin(sample: Sample, prompt: Encoded, seed: str = "") -> Trajectory:
    """A trajectory that holds its prompt and nothing else. The first turn is the policy's."""
    trajectory = Trajectory(sample, seed=seed)
    trajectory.observe(prompt)
    trajectory.prompt, trajectory.prompt_images = len(prompt.ids), len(prompt.pictures)
    return trajectory


def speak(policy: Policy, t: Trajectory, reply: list[int]) -> str | None:
    """The policy acted: a_t of Eq. 2. Returns the code to run, or None if there is none; then
    the episode is over."""
    start = len(t.ids)
    t.act(reply)
    text = policy.tokenizer.decode(reply, skip_special_tokens=True)
    end = ending(text, reply[-1] == policy.end_id, t.thinking)
    code, t.answer = end[:2] if end else (None, None)
    if code is None:
        t.ended = "answered" if t.answer is not None else "no_action" if end else "length"
    t.turns.append(Turn(text, code, None, start, len(t.ids)))
    return code


def listen(
    policy: Policy, t: Trajectory, observation: Observation, pictures: list[Picture], rules: Rules
) -> Encoded | None:
    """The world replied: o_t of Eq. 2. Returns the piece that was appended, or None if the
    episode is over: this was the last turn, or the piece does not fit. Such a piece is left
    out as a whole, never cut."""
    t.turns[-1].observation = observation
    if len(t.turns) == rules.turns:
        t.ended = "turns"
        return None
    closed = t.ids[-1] == policy.end_id
    piece = encode_observation(policy, observation, pictures, closed, rules.max_log_chars)
    if len(t.ids) + len(piece.ids) + rules.max_new_tokens > rules.max_length:
        t.ended = "length"
        return None
    t.observe(piece)
    return piece


# One turn of many trajectories


class SeededSampling(LogitsProcessor):
    """a_t ~ pi_theta(. | x, h) of Eq. 2, drawn by what belongs to the trajectory alone.

    The sampler of `generate` draws for a whole batch. What a row says would then depend on
    which rows it sits with: on the size of a wave, on the number of processes, on whose
    program was slow. Here turn t of a trajectory has a random stream of its own, made from
    (its seed, t). Token i is the first whose cumulated probability exceeds the i-th number of
    that stream. The scores become 1 from this token on and 0 before it, and greedy `generate`
    takes the first of the highest.
    """

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


@dataclass(eq=False)
class Batch:
    """Rows that speak at the same time, and all that their next turn needs. Of the L slots of
    ids and mask the cache holds the first C < L. The model has yet to read the other slots, and
    the pictures in them. (A tail is what `generate` writes behind a row that stopped early.)"""

    ids: Tensor  # [B, L]
    mask: Tensor  # [B, L] 0 where a slot is padding or a tail
    cache: DynamicCache
    live: list[Trajectory]  # B
    unread: list[Picture] = field(default_factory=list)  # images the cache does not hold yet
    programs: Sequence[Future] = ()  # B that run now; none before the first turn

    def rows(self, keep: list[int], programs: Sequence[Future] = ()) -> Batch:
        """Some rows as a batch of their own, and the programs that they now wait for."""
        if len(keep) == len(self.live):
            return replace(self, programs=programs)  # nobody leaves: no copy
        cache = DynamicCache()
        for i, layer in enumerate(self.cache.layers):
            cache.update(layer.keys[keep], layer.values[keep], i)
        live = [self.live[i] for i in keep]
        return Batch(self.ids[keep], self.mask[keep], cache, live, programs=programs)

    def squeeze(self) -> None:
        """A masked slot is dead: no row looks at it. Once a fifth of the cached slots are dead in
        every row, drop them. Attention does not care where a masked slot stands, so each row's
        dead slots move to the front, where as many are cut off as every row has."""
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


def prefill(policy: Policy, wave: list[Trajectory], rollouts: int, tally: Counter) -> Batch:
    """The batch before the next turn. `rollouts` neighbours share their history. It is encoded
    once, images included, and then the cache is copied. The last token of each history stays
    unread: there `generate` starts."""
    first = wave[::rollouts]
    ids, mask = left_pad([t.ids for t in first], policy.pad_id, policy.device)
    pictures = [picture for t in first for picture in t.images]
    positions = policy.positions(ids, mask, [picture.grid for picture in pictures])
    cache = DynamicCache(config=policy.model.config)
    with stopwatch(tally, "prefill"):
        policy.model.eval()(
            input_ids=ids[:, :-1],
            attention_mask=mask[:, :-1],
            position_ids=positions[..., :-1],
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
            **policy.model_images(pictures),
        )
    tally["prefilled_tokens"] += sum(len(t.ids) for t in first)
    tally["images"] += len(pictures)
    cache.batch_repeat_interleave(rollouts)
    ids, mask = (x.repeat_interleave(rollouts, 0) for x in (ids, mask))
    return Batch(ids, mask, cache, wave)


def next_turn(policy: Policy, batch: Batch, rules: Rules, tally: Counter) -> list[list[int]]:
    """One turn of every row: its new ids. They are appended to the batch. Rows that stopped
    early have pads behind them, and mask 0 hides those from all that follows."""
    grids = [picture.grid for t in batch.live for picture in t.images]
    thoughts = [t.thinking for t in batch.live]
    ids = policy.generate(
        rules.max_new_tokens,
        input_ids=batch.ids,
        attention_mask=batch.mask,
        position_ids=policy.positions(batch.ids, batch.mask, grids),
        cache=batch.cache,
        logits_processor=[SeededSampling(batch, rules)] if rules.temperature > 0 else [],
        stopping_criteria=[end_of_turn(policy.tokenizer, batch.ids.shape[1], thoughts)],
        **policy.model_images(batch.unread),
    )
    new = ids[:, batch.ids.shape[1] :]  # [B, longest turn]
    alive = new != policy.pad_id  # forbidden to the policy: generate writes it behind a stop
    lengths = alive.sum(1).tolist()
    tally["prefilled_tokens"] += sum(len(t.ids) - t.turns[-1].end for t in batch.live if t.turns)
    tally["generated_tokens"] += sum(lengths)
    tally["images"] += len(batch.unread)
    batch.unread = []
    batch.ids, batch.mask = ids, torch.cat([batch.mask, alive.long()], 1)
    return [row[:n] for row, n in zip(new.tolist(), lengths)]


@contextmanager
def stopwatch(tally: Counter, name: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    tally[f"{name}_seconds"] += time.perf_counter() - began


# Whole episodes


@torch.no_grad()
def play(
    policy: Policy,
    samples: list[Sample],
    rollouts: int = 1,
    rules: Rules = Rules(),
    tally: Counter | None = None,
) -> list[list[Trajectory]]:
    """Eq. 2: `rollouts` trajectories of every sample, one group per sample, in order.

    Sampling takes one number from torch's global generator: seed that to repeat a run. What the
    k-th rollout of a sample draws depends on this number, on the sample's id and on k alone.
    `tally` collects the cost: tokens prefilled and generated, images encoded, seconds of each.
    Raises ValueError if the KV cache has no room for one group, TooLong if a prompt is too long.
    """
    seed = torch.randint(2**62, ()).item()
    fit = policy.rows_that_fit(rules.max_length, rules.kv_budget_gb)
    if fit < rollouts:
        raise ValueError(
            f"the KV cache has room for {fit} rows of --max-length {rules.max_length}, but a group "
            f"has {rollouts}: raise --kv-budget-gb, or lower --max-length or --rollouts"
        )
    groups: list[list[Trajectory]] = []
    per_wave = fit // rollouts  # a wave: as many groups as fit in memory
    for i in range(0, len(samples), per_wave):
        for sample in samples[i : i + per_wave]:
            prompt = encode_prompt(policy, sample)
            check_fits(policy, sample, prompt, rules)
            seeds = [f"dice {seed} {sample.id} {k}" for k in range(rollouts)]
            groups.append([begin(sample, prompt, own) for own in seeds])
        wave = [t for group in groups[i:] for t in group]
        confine = rules.limits, rules.allow_weak_sandbox
        sandboxes = {id(t): Sandbox(t.sample.image, *confine) for t in wave}
        play_on(policy, wave, sandboxes, rules, rollouts, tally)
    return groups


@torch.no_grad()
def play_on(
    policy: Policy,
    wave: list[Trajectory],
    sandboxes: dict[int, Sandbox],
    rules: Rules,
    rollouts: int = 1,
    tally: Counter | None = None,
) -> None:
    """Eq. 2 from the middle: act, run, observe, until every episode is over. In each
    trajectory it is the policy's turn, and `rollouts` neighbours share their history so far.
    `sandboxes` has one for each id(trajectory), in the state that its code left; it is closed
    at the end. All trajectories must fit in the KV cache at once (Policy.rows_that_fit)."""
    tally = Counter() if tally is None else tally
    pool = ThreadPoolExecutor(rules.sandboxes)

    def run(t: Trajectory, code: str) -> tuple[Observation, list[Picture]]:
        observation = sandboxes[id(t)].run(code)
        return observation, policy.pictures(observation.images)  # other programs run meanwhile

    def close_ended(trajectories: list[Trajectory]) -> None:
        for t in trajectories:
            if t.ended:
                pool.submit(sandboxes[id(t)].close)

    try:
        batches = [prefill(policy, wave, rollouts, tally)]
        while batches:
            batch = take_ready(batches)
            if batch.programs:
                # Observe. Finished rows leave; the others get what their code showed.
                rows = zip(batch.live, batch.programs)
                pieces = [listen(policy, t, *program.result(), rules) for t, program in rows]
                stay = [row for row, piece in enumerate(pieces) if piece is not None]
                close_ended(batch.live)
                if not stay:
                    continue
                batch = batch.rows(stay)
                batch.squeeze()
                batch.observe([pieces[row] for row in stay], policy.pad_id)

            # Act. One turn of every row; code starts to run at once, a thread per program.
            with stopwatch(tally, "decode"):
                replies = next_turn(policy, batch, rules, tally)
            codes = [speak(policy, t, reply) for t, reply in zip(batch.live, replies)]
            close_ended(batch.live)
            acting = [row for row, code in enumerate(codes) if code is not None]
            programs = {row: pool.submit(run, batch.live[row], codes[row]) for row in acting}

            # A slow program delays its own row only: the others go on as a batch of their own.
            with stopwatch(tally, "sandbox"):
                wait(programs.values(), timeout=rules.patience)
            quick = [row for row in acting if programs[row].done()]
            slow = [row for row in acting if row not in quick]
            for part in filter(None, (quick, slow)):
                batches.append(batch.rows(part, [programs[row] for row in part]))
    finally:  # after an error: no program outlives it, and none begins
        pool.shutdown(cancel_futures=not all(t.ended for t in wave))
        for sandbox in sandboxes.values():
            sandbox.close()


def take_ready(batches: list[Batch]) -> Batch:
    """Remove and return the first batch whose programs have all ended; wait until one has."""
    while True:
        running = {program for batch in batches for program in batch.programs if not program.done()}
        for i, batch in enumerate(batches):
            if running.isdisjoint(batch.programs):
                return batches.pop(i)
        wait(running, return_when=FIRST_COMPLETED)


if __name__ == "__main__":
    policy, (question,) = load_policy("tiny"), toy_questions(1, seed=0, neutral_share=0)
    t = begin(question, encode_prompt(policy, question))
    look = crop_turn(" I need a closer look .", (0, 64, 64, 128))
    with Sandbox(question.image) as sandbox:
        observation = sandbox.run(speak(policy, t, policy.encode(look, []).ids))
    listen(policy, t, observation, policy.pictures(observation.images), Rules())
    for token, acted in zip(policy.tokenizer.convert_ids_to_tokens(t.ids), t.acted):
        print("policy" if acted else "world ", token)
