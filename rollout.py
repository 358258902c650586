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

Shapes      B rows in play   L slots so far, padding included   P patches   V token ids
"""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from transformers import LogitsProcessor

from data import TAGS, Sample, crop_turn, messages, observation_text, toy_questions
from kit.caches import Kept, apart, left_pad, packed, together
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
    sampled: list[float] = field(default_factory=list)  # log pi of the sampled ids, as sampled

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
    patience: float = 1.0  # seconds until the others go on without those whose code still runs
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


@dataclass(eq=False)
class Player:
    """A trajectory in play, and what its next token needs."""

    t: Trajectory
    sandbox: Sandbox
    kept: Kept = field(default_factory=list)  # the KV cache of the ids that the model has read
    pictures: int = 0  # how many of its images the model has read
    said: list[int] = field(default_factory=list)  # of a turn that has not ended yet
    program: Future | None = None  # that runs now; the player waits for it

    @property
    def read(self) -> int:
        """How many of its ids the model has read."""
        return len(self.kept[0][0]) if self.kept else 0


READ = 8192  # slots of one forward pass that reads, padding included; this sets memory
STRIDE = 128  # tokens until those who have a turn to begin may join those who speak


def read(policy: Policy, players: list[Player], tally: Counter, alike: int = 1) -> None:
    """Let the model read what was shown since it last spoke: prompts, observations, pictures. The
    last id of each stays unread: there `generate` starts. `alike` neighbours share their history:
    it is read once."""

    def width(player: Player) -> int:
        return len(player.t.ids) - player.read

    in_order = sorted(players[::alike], key=width)  # the last of a part is its longest
    for part in packed(in_order, lambda part: len(part) * width(part[-1]), READ):
        old = left_pad([p.t.ids[: p.read] for p in part], policy.pad_id, policy.device)
        new = left_pad([p.t.ids[p.read : -1] for p in part], policy.pad_id, policy.device)
        ids, mask = (torch.cat(pair, 1) for pair in zip(old, new))  # [B, L]
        positions = policy.positions(ids, mask, [x.grid for p in part for x in p.t.images])
        unread = [picture for p in part for picture in p.t.images[p.pictures :]]
        tally["prefilled_tokens"] += sum(p.t.acted[p.read :].count(False) for p in part)
        tally["images"] += len(unread)
        cache = together([p.kept for p in part])
        with stopwatch(tally, "prefill"):
            policy.model.eval()(
                input_ids=new[0],
                attention_mask=mask,
                position_ids=positions[..., old[0].shape[1] :],
                cache=cache,
                use_cache=True,
                logits_to_keep=1,
                **policy.model_images(unread),
            )
        for player, kept in zip(part, apart(cache, mask)):
            player.kept, player.pictures = kept, len(player.t.images)
    for i, player in enumerate(players):
        first = players[i - i % alike]
        player.kept, player.pictures = [*first.kept], first.pictures


class SeededSampling(LogitsProcessor):
    """a_t ~ pi_theta(. | x, h) of Eq. 2, drawn by what belongs to the trajectory alone.

    The sampler of `generate` draws for a whole batch. What a row says would then depend on
    which rows it sits with: on how many there is room for, on the number of processes, on whose
    program was slow. Here turn t of a trajectory has a random stream of its own, made from
    (its seed, t). Token i is the first whose cumulated probability exceeds the i-th number of
    that stream. The scores become 1 from this token on and 0 before it, and greedy `generate`
    takes the first of the highest.
    """

    def __init__(self, policy: Policy, players: list[Player], start: int, rules: Rules) -> None:
        self.start, self.temperature = start, rules.temperature
        draws = []
        for p in players:
            seed = random.Random(f"{p.t.seed} {len(p.t.turns)}").getrandbits(63)
            stream = torch.Generator().manual_seed(seed)  # alike on every machine
            numbers = torch.rand(rules.max_new_tokens, generator=stream)
            draws.append(numbers.roll(-len(p.said)))  # what it has said took the first ones
        self.draws = torch.stack(draws).to(policy.device)  # [B, max_new_tokens]
        self.logp: list[Tensor] = []  # [B] of each token so far

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:  # scores [B, V]
        p = (scores / self.temperature).softmax(-1, dtype=torch.float64)  # [B, V]
        reached = p.cumsum(-1)  # [B, V]
        if not reached[:, -1].isfinite().all():
            raise FloatingPointError("the policy's scores of the next token are not finite")
        # (A draw is at most 1 - 2^-24: far enough from 1 for the rounding of a float64 sum.)
        beyond = reached > self.draws[:, ids.shape[1] - self.start, None] * reached[:, -1:]
        chosen = (beyond & (p > 0)).float()
        self.logp.append(p.gather(-1, chosen.argmax(-1, keepdim=True))[:, 0].log())
        return chosen


def continue_turns(
    policy: Policy, players: list[Player], rules: Rules, tally: Counter
) -> list[bool]:
    """Everyone goes on with its turn, for STRIDE tokens at most: more in `said`, and has the turn
    ended? Rows that stop early have pads behind them, which nobody looks at again."""
    ids, mask = left_pad([p.t.ids + p.said for p in players], policy.pad_id, policy.device)
    L, grids = ids.shape[1], [picture.grid for p in players for picture in p.t.images]
    starts = [L - len(p.said) for p in players]
    stop = end_of_turn(policy.tokenizer, starts, [p.t.thinking for p in players])
    sampling = [SeededSampling(policy, players, L, rules)] if rules.temperature > 0 else []
    cache = together([p.kept for p in players])  # L - 1 slots
    ids = policy.generate(
        min(STRIDE, *(rules.max_new_tokens - len(p.said) for p in players)),
        input_ids=ids,
        attention_mask=mask,
        position_ids=policy.positions(ids, mask, grids),
        cache=cache,
        logits_processor=[*sampling],
        stopping_criteria=[stop],
    )
    new = ids[:, L:]  # [B, at most STRIDE]
    alive = new != policy.pad_id  # forbidden to the policy: generate writes it behind a stop
    ended = stop(ids, None) | ~alive[:, -1] | (new[:, -1] == policy.end_id)
    lengths, kept = alive.sum(1).tolist(), apart(cache, torch.cat([mask, alive], 1))
    for player, row, n, player.kept in zip(players, new.tolist(), lengths, kept):
        player.said += row[:n]
    for own in sampling:
        for player, row, n in zip(players, torch.stack(own.logp, 1).tolist(), lengths):
            player.t.sampled += row[:n]
    tally["generated_tokens"] += sum(lengths)
    full = [len(p.said) == rules.max_new_tokens for p in players]
    return [any(reasons) for reasons in zip(ended.tolist(), full)]


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
    watch: Callable[[Trajectory], object] = lambda t: None,
) -> list[list[Trajectory]]:
    """Eq. 2: `rollouts` trajectories of every sample, one group per sample, in order.

    Sampling takes one number from torch's global generator: seed that to repeat a run. What the
    k-th rollout of a sample draws depends on this number, on the sample's id and on k alone.
    `tally` collects the cost: tokens prefilled and generated, images encoded, seconds of each.
    `watch` is called with each trajectory that was shown something or has answered.
    Raises ValueError if the KV cache has no room for one group, TooLong if a prompt is too long.
    """
    seed = torch.randint(2**62, ()).item()
    groups = []
    for sample in samples:
        prompt = encode_prompt(policy, sample)
        check_fits(policy, sample, prompt, rules)
        seeds = [f"dice {seed} {sample.id} {k}" for k in range(rollouts)]
        groups.append([begin(sample, prompt, own) for own in seeds])
    confine = rules.limits, rules.allow_weak_sandbox
    new_sandbox = lambda t: Sandbox(t.sample.image, *confine)  # noqa: E731
    play_on(policy, sum(groups, []), new_sandbox, rules, rollouts, tally, watch)
    return groups


def rooms(policy: Policy, rules: Rules, rollouts: int) -> int:
    """How many trajectories may play at a time: those of as many groups as the KV cache has room
    for. Raises ValueError if that is none."""
    fit = policy.rows_that_fit(rules.max_length, rules.kv_budget_gb)
    if fit < rollouts:
        raise ValueError(
            f"the KV cache has room for {fit} rows of --max-length {rules.max_length}, but a group "
            f"has {rollouts}: raise --kv-budget-gb, or lower --max-length or --rollouts"
        )
    return fit // rollouts * rollouts


@torch.no_grad()
def play_on(
    policy: Policy,
    waiting: list[Trajectory],
    sandbox_of: Callable[[Trajectory], Sandbox],
    rules: Rules,
    rollouts: int = 1,
    tally: Counter | None = None,
    watch: Callable[[Trajectory], object] = lambda t: None,
) -> None:
    """Eq. 2 from the middle: act, run, observe, until all is over. It is the policy's turn in each,
    `rollouts` neighbours share their history, and the sandboxes, closed at the end, know it."""
    tally, most = Counter() if tally is None else tally, rooms(policy, rules, rollouts)
    pool, playing = ThreadPoolExecutor(rules.sandboxes), []

    def run(player: Player, code: str) -> tuple[Observation, list[Picture]]:
        observation = player.sandbox.run(code)
        return observation, policy.pictures(observation.images)  # other programs run meanwhile

    try:
        while waiting or playing:
            # Who has ended leaves, and whole groups join as soon as there is room.
            for player in playing:
                if player.t.ended:
                    watch(player.t)
                    player.kept.clear()
                    pool.submit(player.sandbox.close)
            playing = [player for player in playing if not player.t.ended]
            room = (most - len(playing)) // rollouts * rollouts
            joining, waiting = [Player(t, sandbox_of(t)) for t in waiting[:room]], waiting[room:]
            playing += joining
            read(policy, joining, tally, alike=rollouts)
            # Observe what the programs showed that have ended.
            back = [player for player in playing if player.program and player.program.done()]
            for player in back:
                listen(policy, player.t, *player.program.result(), rules)
                player.program = None
                watch(player.t)
            read(policy, [player for player in back if not player.t.ended], tally)

            # Act. Code runs when its turn has ended. If it is slow, the others soon go on.
            speaking = [p for p in playing if p.program is None and not p.t.ended]
            if not speaking:
                with stopwatch(tally, "sandbox"):
                    wait([p.program for p in playing if p.program], return_when=FIRST_COMPLETED)
                continue
            with stopwatch(tally, "decode"):
                ended = continue_turns(policy, speaking, rules, tally)
            for player in itertools.compress(speaking, ended):
                code, player.said = speak(policy, player.t, player.said), []
                if code is not None:
                    player.program = pool.submit(run, player, code)
            with stopwatch(tally, "sandbox"):
                wait([p.program for p in speaking if p.program], timeout=rules.patience)
    finally:  # after an error: no program outlives it, and none begins
        for program in filter(None, (player.program for player in playing)):
            program.cancel()
        pool.shutdown()
        for player in playing:
            player.sandbox.close()


if __name__ == "__main__":
    policy, (question,) = load_policy("tiny"), toy_questions(1, seed=0, neutral_share=0)
    t = begin(question, encode_prompt(policy, question))
    look = crop_turn(" I need a closer look .", (0, 64, 64, 128))
    with Sandbox(question.image) as sandbox:
        observation = sandbox.run(speak(policy, t, policy.encode(look, []).ids))
    listen(policy, t, observation, policy.pictures(observation.images), Rules())
    for token, acted in zip(policy.tokenizer.convert_ids_to_tokens(t.ids), t.acted):
        print("policy" if acted else "world ", token)
