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
Paper       CodeV, arXiv:2511.19661, Eq. 2 and Sec. 3 (tags, turns)
In          Samples, a Policy
Out         groups of Trajectories
Left out    rewards (rewards.py); a sampler of our own (HF generate does it)
Read next   rewards.py (what a trajectory earns), grpo.py (how it is learnt from)

Shapes      B rows now in play   L slots so far, cut tails and padding included   P patches
"""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn
from transformers import (
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    Qwen2_5_VLForConditionalGeneration,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from data import Sample
from sandbox import Limits, Observation, Sandbox

# ---------------------------------------------------------------------------------------------
# The words of the game: everything that builds text, and the one function that parses it
# ---------------------------------------------------------------------------------------------

TAGS = ("think", "code", "answer", "sandbox_output")
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"

SYSTEM_PROMPT = """You are a helpful assistant. Solve the problem about the image step by step.
First reason inside <think> and </think>. If a closer look or a calculation would help, write
Python inside <code> and </code>: crop, zoom, rotate, change the contrast, draw, or compute. The
image is loaded as `image` (PIL), its file is `image_path`. Whatever the code prints, saves or
shows comes back inside <sandbox_output> and </sandbox_output>, and you may go on thinking and
write more code. When you know the answer, give it once inside <answer> and </answer>."""

# The metadata lines have the form of the public training data, so that public checkpoints see
# what they were trained on (the file name is neutral: names can carry labels).
FACTS = """

### User Image Path:** "{path}"
### User Image Size:** "{width}x{height}"

### **Output Format (strict adherence required):**

<think>Your reasoning, with any code, goes here.</think>
<answer>Your final answer goes here.</answer>
"""

NOTHING_SHOWN = "The code ran and showed nothing. Print a value or show an image."
FIX_IT = "Fix the code, or answer."


def messages(sample: Sample, clean: Callable[[str], str]) -> list[dict]:
    """The conversation before the first action: x = (V, Q) of Eq. 2. Question and options come
    from a data set, so they pass through `clean` (Policy.neutralise) like any foreign text."""
    options = "".join(f"\n{chr(ord('A') + i)}. {o}" for i, o in enumerate(sample.options))
    width, height = sample.image.size
    facts = FACTS.format(path="image.png", width=width, height=height)
    return [
        {"role": "system", "content": SYSTEM_PROMPT},
        {
            "role": "user",
            "content": [
                {"type": "image"},
                {"type": "text", "text": clean(sample.question + options)},
                {"type": "text", "text": facts},
            ],
        },
    ]


def observation_text(observation: Observation, clean: Callable[[str], str], limit: int) -> str:
    """What the next turn reads, before image pads are expanded. Every repair is mentioned: the
    policy can learn only from what it sees."""
    words = [observation.text.strip(), *observation.notes]
    if observation.environment:
        words.append(observation.environment)
    if observation.error:
        words += [observation.error, FIX_IT]
    text = "\n".join(word for word in words if word)
    if not text and not observation.images:
        text = NOTHING_SHOWN
    if len(text) > limit:
        text = text[:limit] + " ..."
    return clean(text) + IMAGE * len(observation.images)


def parse(text: str, ended: bool) -> tuple[str | None, str | None]:
    """(code, answer) of one turn; None where there is none. An answer ends the episode even if
    there is code too. What stands inside a closed <think> is thought, not action.

    ended   the policy closed the message by itself: a missing </code> is then forgiven. A turn
            that was cut by the length limit gets no such favour: half a program is not a program.

    >>> parse("<think> look </think><code>\\nprint(1)\\n</code>", ended=False)
    ('\\nprint(1)\\n', None)
    """
    text = re.sub(r"<think>.*?</think>", "", text, flags=re.DOTALL)
    answers = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    if ended and text.count("<code>") == text.count("</code>") + 1:
        text += "</code>"
    blocks = re.findall(r"<code>(.*?)</code>", text, re.DOTALL)
    code = "\n".join(blocks) if blocks else None
    return code, answers[0].strip() if len(answers) == 1 else None


# ---------------------------------------------------------------------------------------------
# Trajectories
# ---------------------------------------------------------------------------------------------


class Picture(NamedTuple):
    """One image as the model takes it."""

    pixels: Tensor  # [P, channels * 2 * patch * patch]
    grid: Tensor  # [3] time, rows and columns of patches; P = their product


class Encoded(NamedTuple):
    """A piece of history that the policy did not choose."""

    ids: list[int]
    pictures: list[Picture]


@dataclass
class Step:
    """One turn of the policy: an action a_t and, if it was code, its observation o_t (Eq. 2)."""

    text: str
    code: str | None
    observation: Observation | None  # None when no code was run
    start: int  # its tokens are ids[start:end] of the trajectory
    end: int


@dataclass
class Trajectory:
    """Eq. 2: tau = (x, a_1, o_1, a_2, ..., a_T), flat.

    tokens           acted   why
    prompt, image    False   the question
    policy's turn    True    thoughts, code and the closing token
    sandbox output   False   the world's reply: training on it would teach the policy to dream it
    """

    sample: Sample
    ids: list[int] = field(default_factory=list)
    acted: list[bool] = field(default_factory=list)
    images: list[Picture] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    prompt: int = 0  # ids[:prompt] are the prompt, shared by the whole group
    prompt_images: int = 0  # images[:prompt_images] stand in it
    answer: str | None = None
    ended: str = ""  # "answered", "turns", "length" or "no_action"

    def act(self, ids: list[int]) -> None:
        self.ids += ids
        self.acted += [True] * len(ids)

    def observe(self, piece: Encoded) -> None:
        self.ids += piece.ids
        self.acted += [False] * len(piece.ids)
        self.images += piece.pictures

    @property
    def tool_steps(self) -> list[Step]:
        """T_tool of Eq. 6: the steps whose code was run, failed runs included."""
        return [step for step in self.steps if step.observation is not None]


@dataclass(frozen=True)
class Rules:
    """The rules of one game."""

    turns: int = 5  # T of Eq. 2: how often the policy may speak
    temperature: float = 1.0  # 0: greedy (evaluation only)
    max_new_tokens: int = 1024  # per turn
    max_length: int = 16384  # tokens of a whole trajectory, image pads counted one by one
    max_log_chars: int = 2000  # of one observation's text
    wave: int = 256  # trajectories in play at once, bounded by KV-cache memory
    sandboxes: int = 8  # programs that run at the same time
    limits: Limits = Limits()
    allow_weak_sandbox: bool = False


# ---------------------------------------------------------------------------------------------
# The policy
# ---------------------------------------------------------------------------------------------


class Policy:
    """A vision-language model with its tokenizer and image processor: pi_theta."""

    def __init__(self, model: nn.Module, tokenizer, image_processor) -> None:
        self.model, self.tokenizer, self.image_processor = model, tokenizer, image_processor
        vocabulary = tokenizer.get_vocab()
        missing = [t for t in ("<|im_end|>", "<|image_pad|>") if t not in vocabulary]
        if missing:
            raise ValueError(
                f"this tokenizer has no {' or '.join(missing)}: a Qwen2.5-VL tokenizer is expected"
            )
        self.image_id = vocabulary["<|image_pad|>"]
        self.end_id = vocabulary["<|im_end|>"]
        self.pad_id = tokenizer.pad_token_id
        # Tokens that would forge a turn or an image. The policy may sample none but the end of
        # its own message, and text from elsewhere may contain none at all.
        added = {token.content: id for id, token in tokenizer.added_tokens_decoder.items()}
        tags = [f"<{slash}{tag}>" for tag in TAGS for slash in ("", "/")]
        sandbox_tags = [t for t in ("<sandbox_output>", "</sandbox_output>") if t in added]
        control = {id for token, id in added.items() if token not in tags}
        control |= {added[t] for t in sandbox_tags}
        control |= set(range(len(tokenizer), model.config.text_config.vocab_size))  # unused rows
        self.forbidden = sorted(control - {self.end_id})
        reserved = sorted({*added, *tags}, key=len, reverse=True)
        self._reserved = re.compile("|".join(map(re.escape, reserved)))
        self._may_end = torch.zeros(model.config.text_config.vocab_size, dtype=torch.bool)
        for token, id in vocabulary.items():
            self._may_end[id] = ">" in token or id == self.end_id

    @property
    def device(self) -> torch.device:
        return self.model.device

    def neutralise(self, text: str) -> str:
        """Break every control token and tag in text that the policy did not write, so that a log
        cannot forge a turn, an image or an answer: "<|im_end|>" becomes "‹|im_end|>"."""
        return self._reserved.sub(lambda match: "‹" + match[0][1:], text)

    def pictures(self, images: list[Image.Image]) -> list[Picture]:
        """The pixel budget is the image processor's: one place, for acting and for learning."""
        if not images:
            return []
        batch = self.image_processor(images=images, return_tensors="pt")
        grids = batch["image_grid_thw"]
        pixels = batch["pixel_values"].split(grids.prod(-1).tolist())
        return [Picture(p, g) for p, g in zip(pixels, grids)]

    def encode(self, text: str, pictures: list[Picture]) -> Encoded:
        """Tokens of trusted text; the i-th <|image_pad|> becomes one pad per visual token of the
        i-th picture."""
        merge = self.image_processor.merge_size**2
        parts = text.split("<|image_pad|>")
        if len(parts) != len(pictures) + 1:
            raise ValueError(f"{len(parts) - 1} image places in a text with {len(pictures)} images")
        pads = ["<|image_pad|>" * (int(p.grid.prod()) // merge) for p in pictures] + [""]
        ids = self.tokenizer(
            "".join(part + pad for part, pad in zip(parts, pads)), add_special_tokens=False
        )["input_ids"]
        return Encoded(ids, pictures)

    def encode_prompt(self, sample: Sample) -> Encoded:
        text = self.tokenizer.apply_chat_template(
            messages(sample, self.neutralise), tokenize=False, add_generation_prompt=True
        )
        return self.encode(text, self.pictures([sample.image]))

    def encode_observation(
        self, observation: Observation, pictures: list[Picture], closed: bool, limit: int
    ) -> Encoded:
        """o_t as a new user turn. closed: the policy ended its message itself, we need not."""
        shown = observation_text(observation, self.neutralise, limit)
        text = (
            ("" if closed else "<|im_end|>")
            + f"\n<|im_start|>user\n<sandbox_output>{shown}</sandbox_output><|im_end|>"
            + "\n<|im_start|>assistant\n"
        )
        return self.encode(text, pictures)

    def positions(self, ids: Tensor, mask: Tensor, grids: list[Tensor]) -> Tensor:
        """[B, L] ids and mask -> [4, B, L]: a text row and the three of multimodal RoPE.

        Always explicit. Left to itself the model takes positions from whatever it saw last: with
        a kept cache, or with other work in between, they are silently wrong. Slots with mask 0
        take no position, so padding and cut tails may stand anywhere. `grids`: every image of
        every row, in order.
        """
        ids, mask = ids.cpu(), mask.cpu()  # get_rope_index loops in Python
        rope, _ = self.model.model.get_rope_index(
            ids,
            mm_token_type_ids=(ids == self.image_id).int(),
            image_grid_thw=torch.stack(grids) if grids else None,
            attention_mask=mask,
        )
        text = (mask.cumsum(-1) - 1).clamp(min=0)
        return torch.cat([text[None], rope]).to(self.device)

    def model_images(self, pictures: list[Picture]) -> dict[str, Tensor]:
        """The keyword arguments of a forward that encodes these pictures; {} for none."""
        if not pictures:
            return {}
        return {
            "pixel_values": torch.cat([p.pixels for p in pictures]).to(self.device),
            "image_grid_thw": torch.stack([p.grid for p in pictures]).to(self.device),
        }

    def save(self, folder: str | Path) -> None:
        """A plain Hugging Face checkpoint: load_policy, transformers and others can read it."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        self.image_processor.save_pretrained(folder)


def load_policy(name: str | Path, device: str | torch.device = "cpu") -> Policy:
    """A folder or a hub name -> Policy in fp32. The tiny model and the 7B take the same path."""
    looks_like_path = Path(name).is_absolute() or str(name).startswith(".") or Path(name).exists()
    if looks_like_path and not (Path(name) / "config.json").is_file():
        raise FileNotFoundError(
            f"no checkpoint in {name}: expected a folder with config.json, model.safetensors, "
            f"tokenizer.json and preprocessor_config.json. `train.py` writes such folders."
        )
    try:
        model = Qwen2_5_VLForConditionalGeneration.from_pretrained(
            name, dtype=torch.float32, attn_implementation="sdpa"
        )
        tokenizer = AutoTokenizer.from_pretrained(name)
        image_processor = Qwen2VLImageProcessorPil.from_pretrained(name)
    except OSError as error:
        raise FileNotFoundError(
            f"no model {str(name)!r}: it is neither a local checkpoint folder nor a hub name that "
            f"can be reached from here. Give --model a folder, or check the name and the network."
        ) from error
    return Policy(model.to(device).eval(), tokenizer, image_processor)


class EndOfTurn(StoppingCriteria):
    """A row stops when its message ends or a code or answer block closes. We look at text, not at
    token ids: in Qwen's vocabulary "</code>" may end in ">", ">\\n", ">." and many more. A row is
    decoded only when its newest token has a ">" in it, so this costs next to nothing."""

    def __init__(self, policy: Policy, start: int) -> None:
        self.policy, self.start = policy, start
        self.may_end = policy._may_end.to(policy.device)
        self.length: dict[int, int] = {}  # row -> tokens of its turn, the stop included

    def __call__(self, ids: Tensor, scores: Tensor, **kwargs) -> Tensor:
        done = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        for row in self.may_end[ids[:, -1]].nonzero()[:, 0].tolist():
            if row in self.length:
                continue
            turn = ids[row, max(self.start, ids.shape[1] - 12) :].tolist()
            text = "" if turn[-1] == self.policy.end_id else self.policy.tokenizer.decode(turn)
            if not text or "</code>" in text or "</answer>" in text:
                self.length[row] = ids.shape[1] - self.start
                done[row] = True
        return done


def left_pad(rows: list[list[int]], fill: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Lists of ids -> (ids, mask), both [B, L]. Left: the last column is real for every row."""
    width = max(map(len, rows))
    ids = [[fill] * (width - len(row)) + row for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


# ---------------------------------------------------------------------------------------------
# Playing
# ---------------------------------------------------------------------------------------------


def play(
    policy: Policy, samples: list[Sample], rollouts: int = 1, rules: Rules = Rules()
) -> list[list[Trajectory]]:
    """Eq. 2: `rollouts` trajectories of every sample, one group per sample, in order.

    Sampling draws from torch's global generator; seed it to repeat a run.
    """
    groups: list[list[Trajectory]] = []
    per_wave = max(1, rules.wave // rollouts)
    with ThreadPoolExecutor(rules.sandboxes) as pool:
        for i in range(0, len(samples), per_wave):
            groups += _play_wave(policy, samples[i : i + per_wave], rollouts, rules, pool)
    return groups


@torch.no_grad()
def _play_wave(
    policy: Policy, samples: list[Sample], rollouts: int, rules: Rules, pool: ThreadPoolExecutor
) -> list[list[Trajectory]]:
    model = policy.model.eval()

    # Prefill: every prompt and every image once. The last token stays out, since generate needs
    # one to start from.
    prompts = [policy.encode_prompt(sample) for sample in samples]
    for sample, prompt in zip(samples, prompts):
        check_fits(policy, sample, prompt, rules)
    ids, mask = left_pad([p.ids for p in prompts], policy.pad_id, policy.device)
    pictures = [picture for p in prompts for picture in p.pictures]
    positions = policy.positions(ids, mask, [p.grid for p in pictures])
    cache = DynamicCache(config=model.config)
    model(
        input_ids=ids[:, :-1],
        attention_mask=mask[:, :-1],
        position_ids=positions[..., :-1],
        cache=cache,
        use_cache=True,
        logits_to_keep=1,
        **policy.model_images(pictures),
    )

    # K futures: the cache is copied, the work is not done again.
    cache.batch_repeat_interleave(rollouts)
    ids, mask = ids.repeat_interleave(rollouts, 0), mask.repeat_interleave(rollouts, 0)
    groups = [[begin(s, p) for _ in range(rollouts)] for s, p in zip(samples, prompts)]
    live = [trajectory for group in groups for trajectory in group]
    fresh: dict[str, Tensor] = {}  # pixels of the images that the cache does not hold yet

    sandboxes = {
        id(t): Sandbox(t.sample.image, rules.limits, rules.allow_weak_sandbox) for t in live
    }
    try:
        for turn in range(1, rules.turns + 1):
            # Act. Rows that stop early carry pads; mask 0 hides them from all that follows.
            replies, ids, alive = _generate(policy, ids, mask, cache, live, fresh, rules)
            mask = torch.cat([mask, alive], dim=1)
            codes = [speak(policy, t, reply) for t, reply in zip(live, replies)]

            # Run. One thread per program; image preparation overlaps with the programs.
            def run(t: Trajectory, code: str | None):
                if code is None:
                    return None
                observation = sandboxes[id(t)].run(code)
                return observation, policy.pictures(observation.images)

            shown = list(pool.map(run, live, codes))
            last = turn == rules.turns
            pieces = [s and listen(policy, t, *s, rules, last) for t, s in zip(live, shown)]
            for t in live:
                if t.ended:
                    pool.submit(sandboxes.pop(id(t)).close)

            # Observe. Finished rows leave; the others get what they saw, padded on the left.
            stay = [row for row, t in enumerate(live) if not t.ended]
            if not stay:
                break
            live, pieces = [live[row] for row in stay], [pieces[row] for row in stay]
            rows = torch.tensor(stay, device=policy.device)
            cache.batch_select_indices(rows)
            new_ids, new_mask = left_pad([p.ids for p in pieces], policy.pad_id, policy.device)
            ids, mask = torch.cat([ids[rows], new_ids], 1), torch.cat([mask[rows], new_mask], 1)
            fresh = policy.model_images([picture for p in pieces for picture in p.pictures])
    finally:
        for sandbox in sandboxes.values():  # only after an error are any left
            sandbox.close()
    return groups


def _generate(
    policy: Policy,
    ids: Tensor,
    mask: Tensor,
    cache: DynamicCache,
    live: list[Trajectory],
    fresh: dict[str, Tensor],
    rules: Rules,
) -> tuple[list[list[int]], Tensor, Tensor]:
    """One turn of every live row -> (its new ids, all ids [B, L'], 1 where a new slot is real)."""
    start = ids.shape[1]
    end = EndOfTurn(policy, start)
    sample = rules.temperature > 0
    # generate() fills what a GenerationConfig leaves unset from the model's own, and released
    # checkpoints carry near-greedy values and a repetition penalty there. So: none of its own.
    policy.model.generation_config = GenerationConfig()
    config = GenerationConfig(
        do_sample=sample,
        temperature=rules.temperature if sample else 1.0,
        top_k=0 if sample else 50,
        top_p=1.0,
        repetition_penalty=1.0,
        max_new_tokens=rules.max_new_tokens,
        suppress_tokens=policy.forbidden,
        pad_token_id=policy.pad_id,
        eos_token_id=policy.end_id,
        use_cache=True,
        return_dict_in_generate=True,
    )
    output = policy.model.generate(
        input_ids=ids,
        attention_mask=mask,
        position_ids=policy.positions(ids, mask, [p.grid for t in live for p in t.images]),
        cache=cache,
        generation_config=config,
        stopping_criteria=StoppingCriteriaList([end]),
        synced_gpus=False,
        **fresh,
    )
    new = output.sequences[:, start:]
    lengths = [end.length.get(row, new.shape[1]) for row in range(len(new))]
    slots = torch.arange(new.shape[1], device=new.device)
    alive = (slots < torch.tensor(lengths, device=new.device)[:, None]).long()
    return [row[:n] for row, n in zip(new.tolist(), lengths)], output.sequences, alive


def begin(sample: Sample, prompt: Encoded) -> Trajectory:
    trajectory = Trajectory(sample)
    trajectory.observe(prompt)
    trajectory.prompt, trajectory.prompt_images = len(prompt.ids), len(prompt.pictures)
    return trajectory


def speak(policy: Policy, trajectory: Trajectory, reply: list[int]) -> str | None:
    """The policy acted. Returns the code to run; None if there is none and the episode is over."""
    start = len(trajectory.ids)
    trajectory.act(reply)
    text = policy.tokenizer.decode(reply, skip_special_tokens=True)
    ended = reply[-1] == policy.end_id
    code, answer = parse(text, ended)
    if answer is not None:
        code, trajectory.answer, trajectory.ended = None, answer, "answered"
    elif code is None:
        trajectory.ended = "no_action" if ended else "length"
    trajectory.steps.append(Step(text, code, None, start, len(trajectory.ids)))
    return code


def listen(
    policy: Policy,
    trajectory: Trajectory,
    observation: Observation,
    pictures: list[Picture],
    rules: Rules,
    last: bool,
) -> Encoded | None:
    """The world replied. Returns the piece that was appended, or None if the episode is over: it
    was the last turn, or the piece would not fit (it is then absent as a whole, never cut)."""
    trajectory.steps[-1].observation = observation
    if last:
        trajectory.ended = "turns"
        return None
    closed = trajectory.ids[-1] == policy.end_id
    piece = policy.encode_observation(observation, pictures, closed, rules.max_log_chars)
    if len(trajectory.ids) + len(piece.ids) + rules.max_new_tokens > rules.max_length:
        trajectory.ended = "length"
        return None
    trajectory.observe(piece)
    return piece


def check_fits(policy: Policy, sample: Sample, prompt: Encoded, rules: Rules) -> None:
    """The prompt must leave room for a turn, and pads must match pixels; else say so by name."""
    merge = policy.image_processor.merge_size**2
    pads = prompt.ids.count(policy.image_id)
    visual = sum(int(p.grid.prod()) // merge for p in prompt.pictures)
    if pads != visual:
        raise ValueError(f"sample {sample.id}: {pads} image pads for {visual} visual tokens")
    room = rules.max_length - rules.max_new_tokens
    if len(prompt.ids) > room:
        raise ValueError(
            f"sample {sample.id}: its prompt has {len(prompt.ids)} tokens ({visual} of them for "
            f"the image), but max_length {rules.max_length} - max_new_tokens "
            f"{rules.max_new_tokens} leaves {room}. Raise --max-length, lower the pixel budget, "
            f"or drop the question."
        )
