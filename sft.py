"""
sft.py: learn to speak the game by imitation; and where the tiny model comes from.

Concept     Stage 1 is stage 2 with A = 1 and beta = 0 on demonstrations: the loss is -mean log pi
            of the acted tokens, computed by the same scorer on the same rows. There is no second
            masking. The same loop also makes `tiny/`, a stand-in for "a pretrained VLM" that fits
            in a commit: a Qwen2.5-VL of a few layers that can see the toy world of data.py.
Paper       CodeV, arXiv:2511.19661, stage 1 (cold start), which follows Thyme's: its data
            (load_thyme), 3 epochs, vision tower frozen, only the last turns learnt
In          Trajectories in which a demonstrator acted
Out         a policy that speaks the format and mirrors the mixture of its demonstrations
Left out    Thyme's second, annealing stage; whether the paper ran it is not said
Read next   grpo.py (the rows and the scorer), data.py (what is demonstrated)
"""

from __future__ import annotations

import math
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache, partial
from itertools import zip_longest
from pathlib import Path

import torch
from PIL import Image
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig
from transformers import Qwen2_5_VLForConditionalGeneration as Model
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from data import COLORS, GRID, IMAGE, SIZE, TAGS, TEXTURES, Demonstration, Sample, Scene
from data import Bad, Lazy, Skipped, Usable, plain_question, read_image, read_rows
from data import cell_name, crop_turn, draw_scene, neutral_sample, search_sample
from grpo import Row, apply_gradient, gathered, group_row, level, log_probs, micro_batches
from rollout import Policy, Rules, Trajectory, begin, check_fits, listen, speak
from rewards import format_error
from sandbox import Observation, Sandbox

# One loop for everything that imitates


def replay(policy: Policy, demo: Demonstration, rules: Rules = Rules()) -> Trajectory:
    """A demonstration as a Trajectory: the demonstrator's words are the actions, and what they
    show comes from the same sandbox that the policy will meet."""
    rules = replace(rules, turns=len(demo.turns))
    prompt = policy.encode_prompt(demo.sample)
    check_fits(policy, demo.sample, prompt, rules)
    trajectory = begin(demo.sample, prompt)
    with Sandbox(demo.sample.image, rules.limits, rules.allow_weak_sandbox) as sandbox:
        for text in demo.turns:
            code = speak(policy, trajectory, policy.encode(text, []).ids)
            if code is not None:
                seen = sandbox.run(code)
                listen(policy, trajectory, seen, policy.pictures(seen.images), rules)
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
    """Mean log pi over the acted tokens of some micro-batches, those of other processes included.
    With `learn` the gradients of minus that mean are added to the weights' .grad."""
    tokens = sum(gathered(sum(len(row.labels) for batch in batches for row in batch)))
    total = 0.0
    for batch in level(policy, batches):
        with torch.set_grad_enabled(learn):
            logp, _ = log_probs(policy, batch)
            if learn:
                (-logp.sum() / tokens).backward()
        total += logp.sum().item()
    return sum(gathered(total)) / tokens


def imitate(
    policy: Policy, optimizer: torch.optim.Optimizer, batches_of: Callable[[int], list[list[Row]]],
    steps: range, rate: Callable[[int], float],
    after: Callable[[int, float, float | None], bool | None], title: str = "sft",
) -> None:  # fmt: skip
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
    """i -> the indices of batch i; every epoch has an order of its own. Batches depend on nothing
    but these arguments and i, so that a resumed run meets the same ones."""

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
USER_PATH = re.compile(r'User Image Path\W*"([^"\n]+)"')
OTHER_PATH = re.compile(r"/(?:[\w.+-]+/)+([\w.+-]+\.(?:png|jpe?g|webp|bmp|gif|tiff?))", re.I)


def load_thyme(
    policy: Policy, where: str | Path, train_rounds: str = "last_code_and_answer",
    rules: Rules = Rules(), on_bad: str = "skip",
) -> tuple[Usable[Trajectory], list[Skipped]]:  # fmt: skip
    """Rows of Thyme-SFT -> Trajectories, made when asked for, and the rows that cannot be used:
    they do not parse, or have more than rules.max_length tokens. No row is ever cut.

    where: as in data.read_rows; a colon picks a split, "Kwai-Keye/Thyme-SFT:wo_thinking_thyme".
    """
    if train_rounds not in TRAIN_ROUNDS:
        raise ValueError(f"train_rounds is one of {', '.join(TRAIN_ROUNDS)}, got {train_rounds!r}")
    rows = read_rows(where)

    def trajectory(i: int, pixels: bool = True) -> Trajectory:
        return thyme_trajectory(policy, rows[i], i, rows.folder, train_rounds, rules, pixels)

    check = partial(trajectory, pixels=False)
    usable = Usable(len(rows), check, trajectory, on_bad, str(where))
    return usable, usable.skipped


def thyme_trajectory(
    policy: Policy, row: dict, number: int, folder: Path, train_rounds: str, rules: Rules,
    pixels: bool = True,
) -> Trajectory:  # fmt: skip
    """One row: `image`, a list of pictures; `question`; `response`, a single message with code and
    what it showed inline. It becomes the game's form: a turn of the policy ends behind </code>, and
    what was shown is a user turn, which is never learnt from. Without pixels it is faster, and only
    ids and mask are of use. Raises Bad, which names the field."""
    for name, kind in (("image", list), ("question", str), ("response", str)):
        if not row.get(name) or not isinstance(row[name], kind):
            raise Bad(name, f"expected a {kind.__name__}, got {str(row.get(name))[:60]!r}")
    try:
        images = [read_image(cell, folder) for cell in row["image"]]
    except ValueError as error:
        raise Bad("image", str(error)) from error
    path = USER_PATH.search(row["question"])
    text = row["response"].strip().replace(path[1] if path else "image.png", "image.png")
    text = text.replace("/mnt/data/temp_processed_images", ".")
    pieces = re.split(r"(?s)<sandbox_output>(.*?)</sandbox_output>", OTHER_PATH.sub(r"\1", text))
    turns, shown = [turn.strip() for turn in pieces[::2]], pieces[1::2]
    places = [row["question"].count("<image>"), *(piece.count("<image>") for piece in shown)]
    if places[0] != 1 or sum(places) != len(images):
        raise Bad("image", f"{len(images)} pictures for {places} places in question and outputs")

    answer = re.findall(r"(?s)<answer>(.*?)</answer>", turns[-1])
    question = plain_question(row["question"])
    sample = Sample(f"thyme-{number}", images[0], question, answer[0] if answer else "",
                    source="thyme")  # fmt: skip
    trajectory, taken = begin(sample, policy.encode_prompt(sample, pixels)), 1
    control = {*policy.forbidden, policy.end_id}
    for turn, output, n in zip_longest(turns, shown, places[1:]):
        ids = policy.tokenizer(turn, add_special_tokens=False)["input_ids"]
        if not ids or "<image>" in turn or control.intersection(ids):
            raise Bad("response", f"a turn is empty or holds an image or a control token: {turn!r}")
        code = speak(policy, trajectory, ids)
        if output is None:
            break
        if code is None or not turn.endswith("</code>"):
            raise Bad("response", f"an output follows what is no code: ...{turn[-60:]!r}")
        seen = Observation(output.replace("<image>", ""), images[taken : taken + n])
        taken += n
        pictures = policy.pictures(seen.images) if pixels else [*map(policy.outline, seen.images)]
        trajectory.steps[-1].observation = seen
        trajectory.observe(policy.encode_observation(seen, pictures, False, rules.max_log_chars))
    if trajectory.answer is None or format_error(trajectory):
        raise Bad("response", f"its tags do not close in order, one answer last: ...{text[-60:]!r}")
    if len(trajectory.ids) > rules.max_length:
        raise Bad("response", f"{len(trajectory.ids)} tokens, --max-length {rules.max_length}")
    rounds = TRAIN_ROUNDS[train_rounds] if len(shown) > 1 else None
    if rounds:  # the turns before are read, like a prompt, and not learnt
        start, end = trajectory.prompt, trajectory.steps[-rounds].start
        trajectory.acted[start:end] = [False] * (end - start)
    return trajectory


# Stage 1 ends here; the rest of this file makes tiny/ and may be skipped. First the network.

PATCH = 8  # pixels; two by two patches make one visual token
VIEW = 64  # pixels: what the tiny model sees of any image, 16 visual tokens for a square one
CELLS = [cell_name(r, c) for r in range(GRID) for c in range(GRID)]
CORNERS = [str(x) for x in range(0, SIZE + 1, SIZE // GRID)]

# In Jinja; every checkpoint has its own. This one leaves out what so small a model cannot read (the
# system prompt and the format block), and keeps the image and the question.
CHAT_TEMPLATE = """\
{%- for message in messages if message.role == 'user' -%}
<|im_start|>user
{% set seen = namespace(text=false) -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif not seen.text -%}{{ part.text }}{%- set seen.text = true -%}{%- endif -%}
{%- endfor -%}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, like Qwen's: any text becomes tokens and comes back unchanged. The toy's words
    and coordinates are single tokens; everything else is spelt in bytes."""
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
               "<|image_pad|>", "<|video_pad|>"]  # fmt: skip
    tags = [f"<{slash}{tag}>" for tag in TAGS for slash in ("", "/")]
    text = " ".join([
        "Which texture is on the red square ? What color is the object at a1 ? Where is the",
        "I need a closer look at . I can see it . The crop shows it .\nuser\nassistant\n",
        *COLORS, *TEXTURES, *CELLS, *CORNERS, crop_turn("", (0, 0, 0, 0)), "(0,0)",
    ])  # fmt: skip
    # A word takes the space before it along; numbers and all other spaces stand alone.
    split = pre_tokenizers.Split(Regex(r" ?[a-d][1-4](?!\w)| ?[^\s\d]+|\d+|\s"), "isolated")
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    splitter = pre_tokenizers.Sequence([split, spell])
    for tag in tags:
        text = text.replace(tag, "\n")
    words = [word for word, _ in splitter.pre_tokenize_str(text)]
    words += [spell.pre_tokenize_str(w)[0][0] for w in (*COLORS, *TEXTURES, *CELLS)]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = list(dict.fromkeys(control + tags + alphabet + sorted(set(words))))
    ids = {word: i for i, word in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.BPE(ids, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer, tokenizer.decoder = splitter, decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in tags])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|endoftext|>", eos_token="<|im_end|>",
        clean_up_tokenization_spaces=False, padding_side="left",
    )  # fmt: skip
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_policy(seed: int) -> Policy:
    """Two text layers and one vision block of the real architecture, randomly initialised."""
    tokenizer = tiny_tokenizer()
    id_of = tokenizer.convert_tokens_to_ids
    # The usual deviation of initial weights, 0.02, is too small for 64 dimensions.
    start = dict(initializer_range=0.08)
    text = dict(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=4096,
        rope_parameters=dict(rope_type="default", rope_theta=1e6, mrope_section=[4, 6, 6]),
        bos_token_id=None, eos_token_id=id_of("<|im_end|>"), pad_token_id=id_of("<|endoftext|>"),
        tie_word_embeddings=False, **start,
    )  # fmt: skip
    vision = dict(
        depth=1, hidden_size=48, intermediate_size=96, num_heads=2, patch_size=PATCH,
        spatial_merge_size=2, temporal_patch_size=2, window_size=PATCH * 32, out_hidden_size=64,
        fullatt_block_indexes=[0], **start,
    )  # fmt: skip
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=False, **start,
        image_token_id=id_of("<|image_pad|>"), video_token_id=id_of("<|video_pad|>"),
        vision_start_token_id=id_of("<|vision_start|>"),
        vision_end_token_id=id_of("<|vision_end|>"),
    )  # fmt: skip
    torch.manual_seed(seed)
    model = Model(config)
    # BOX averages blocks. The whole map is seen at 1 : 4: a texture of period 4 vanishes exactly.
    processor = Qwen2VLImageProcessorPil(
        resample=Image.Resampling.BOX, patch_size=PATCH, merge_size=2,
        size={"shortest_edge": VIEW * VIEW // 2, "longest_edge": VIEW * VIEW},
    )  # fmt: skip
    return Policy(model, tokenizer, processor)


# What tiny/ is pretrained on

Pack = list[tuple[str | Image.Image, bool]]  # one lesson: texts and images; True: to be learnt


def user(*parts: str | Image.Image) -> Pack:
    """A user turn and the header of the reply to it."""
    turn = ("<|im_start|>user\n", *parts, "<|im_end|>\n<|im_start|>assistant\n")
    return [(part, False) for part in turn]


def grounding_pack(scene: Scene, rng: random.Random) -> Pack:
    """All squares, from colour to cell or from cell to colour. One direction a pack: with both, the
    second half could be copied from the first."""
    squares, pack = list(scene.squares), user(scene.image)
    rng.shuffle(squares)
    colour_first = rng.random() < 0.6
    for square in squares:
        pair = [f" {square.color}", f" {square.cell}"]
        if not colour_first:
            pair.reverse()
        pack += [(pair[0], False), (pair[1], True)]
    return pack


def reading_pack(scene: Scene, rng: random.Random) -> Pack:
    """Four close-ups, each with its colour and texture: the quickest way to learn to read them."""
    pack: Pack = []
    for square in rng.sample(scene.squares, 4):
        close_up = scene.image.crop(square.cell_box)
        words = f" {square.color}<answer>{square.texture}"
        pack += [(close_up, False), (words, True), ("\n", False)]
    return pack


def look_pack(scene: Scene, rng: random.Random) -> Pack:
    """Where is it, as a cell and as a box; then, from the close-up, which texture."""
    square = rng.choice(scene.squares)
    corners = ",".join(map(str, square.cell_box))
    return [
        *user(scene.image, f"Where is the {square.color} square ?"),
        (f" {square.color}", True),
        (f" {square.cell} ({corners})<|im_end|>", True),
        ("\n", False),
        *user(scene.image.crop(square.cell_box), search_sample(scene, square, "").question),
        (f"<answer>{square.texture}</answer><|im_end|>", True),
    ]


def colour_pack(scene: Scene, rng: random.Random) -> Pack:
    square = rng.choice(scene.squares)
    return [
        *user(scene.image, neutral_sample(scene, square, "").question),
        (f"<answer>{square.color}</answer><|im_end|>", True),
    ]


PACKS = {"grounding": grounding_pack, "reading": reading_pack, "look": look_pack,
         "colour": colour_pack}  # fmt: skip


def pack_trajectory(policy: Policy, pack: Pack) -> Trajectory:
    trajectory = Trajectory(sample=None)
    for part, learn in pack:
        text, images = (part, []) if isinstance(part, str) else (IMAGE, [part])
        piece = policy.encode(text, policy.pictures(images))
        if learn:
            trajectory.act(piece.ids)
        else:
            trajectory.observe(piece)
    return trajectory


def pack_rows(policy: Policy, kind: str, n: int, seed: int | str) -> list[Row]:
    """n packs of a kind, on maps whose colours tell nothing of the textures."""
    rng = random.Random(f"packs {kind} {seed}")
    bar = tqdm(range(n), f"{kind} packs", mininterval=5)
    packs = (PACKS[kind](draw_scene(rng, shortcut=0.25), rng) for _ in bar)
    return rows_of(policy, [pack_trajectory(policy, pack) for pack in packs])


def skill(policy: Policy, rows: list[Row], row_tokens: int) -> dict[str, float]:
    """For each kind of word: the share of its tokens that have a probability above 1/2."""
    kinds = {
        "cell": [f" {cell}" for cell in CELLS],
        "corner": CORNERS,
        "texture": TEXTURES,
        "colour": [prefix + c for c in COLORS for prefix in ("", " ")],
    }
    kind_of = {word: kind for kind, words in kinds.items() for word in words}
    hits: dict[str, list[bool]] = defaultdict(list)
    for batch in micro_batches(rows, row_tokens):
        with torch.no_grad():
            sure = log_probs(policy, batch)[0] > math.log(0.5)
        labels = torch.cat([row.labels for row in batch])
        for label, hit in zip(labels.tolist(), sure.tolist()):
            hits[kind_of.get(policy.tokenizer.decode([label]), "other")].append(hit)
    return {kind: sum(hits[kind]) / len(hits[kind]) for kind in kinds if hits[kind]}


def pretrain_tiny(seed: int, row_tokens: int, say: Callable[[str], None]) -> Policy:
    """The base checkpoint, from random weights, in a few minutes.

    Phase 1 reads close-ups and names places until both are learnt; phase 2 adds the two question
    formats while the learning rate falls. ValueError if the result does not pass every gate."""
    phase_1, phase_2, peak = 500, 450, 4e-3  # steps (at most, exactly), highest learning rate
    policy = tiny_policy(seed)
    rows = {kind: pack_rows(policy, kind, 3000, seed) for kind in PACKS}
    small = {kind: pack_rows(policy, kind, 80, "check") for kind in PACKS}
    held_out = {kind: pack_rows(policy, kind, 300, "held out") for kind in PACKS}
    mixtures = (dict(reading=16, grounding=48),
                dict(reading=8, grounding=20, look=20, colour=16))  # fmt: skip
    optimizer = torch.optim.AdamW(policy.model.parameters(), betas=(0.9, 0.98), weight_decay=0)
    began: int | None = None  # the step at which phase 2 began

    def batches_of(i: int) -> list[list[Row]]:
        rng = random.Random(f"pretrain {seed} {i}")
        mixture = mixtures[0 if began is None else 1]
        drawn = [row for kind, n in mixture.items() for row in rng.sample(rows[kind], n)]
        return list(micro_batches(drawn, row_tokens))

    def rate(i: int) -> float:
        if began is None:
            return peak * min(1.0, (i + 1) / 30)
        done = (i - began) / phase_2
        return peak * min(1.0, (i - began + 1) / 10, (1 - done) / 0.6) + 1e-5

    def after(i: int, loss: float, norm: float | None) -> bool:
        nonlocal began
        if (i + 1) % 20 == 0:
            now = {kind: skill(policy, small[kind], row_tokens) for kind in PACKS}
            say(f"step {i + 1}  loss {loss:.3f}  " + show(now))
            learnt = now["grounding"]["cell"] >= 0.95 and now["reading"]["texture"] >= 0.95
            if began is None and (learnt or i + 1 >= phase_1):
                began = i + 1
        return began is not None and i + 1 - began >= phase_2

    imitate(policy, optimizer, batches_of, range(phase_1 + phase_2), rate, after, "tiny")
    now = {kind: skill(policy, held_out[kind], row_tokens) for kind in PACKS}
    say("held out  " + show(now))
    gates = {
        "cell": now["grounding"]["cell"], "colour of a cell": now["grounding"]["colour"],
        "texture": now["reading"]["texture"], "corner": now["look"]["corner"],
        "colour question": now["colour"]["colour"],
    }  # fmt: skip
    missed = {name: value for name, value in gates.items() if value < 0.95}
    if missed:
        raise ValueError(f"expected 0.95 or more of each skill, got {missed}: try another --seed")
    return policy


def show(skills: dict[str, dict[str, float]]) -> str:
    return "  ".join(
        f"{kind}: " + " ".join(f"{name} {value:.3f}" for name, value in s.items())
        for kind, s in skills.items()
    )


if __name__ == "__main__":
    from data import demonstrations
    from rollout import load_policy

    policy = load_policy("tiny")
    trajectories = list(replay_all(policy, demonstrations(6, seed=0)))
    for row in rows_of(policy, trajectories):
        logp = mean_logp(policy, [[row]], learn=False)
        print(f"{logp:8.2f} a token:", repr(policy.tokenizer.decode(row.labels.tolist())))
