"""
tiny.py: where tiny/ comes from, a stand-in for "a pretrained vision-language model".

Concept     A reader with two CPU cores needs a small model that sees. This file takes the real
            architecture, Qwen2.5-VL, with two text layers and one vision block, and teaches it to
            see the toy world: which colour is in which cell, and which texture is on a close-up.
            It learns nothing of the game. Stage 1 teaches that.
Paper       nothing: CodeV starts from Qwen2.5-VL-7B-Instruct
In          a seed, and all files of tiny/ but its weights
Out         a Policy; `python train.py --preset tiny-base --out tiny` saves it, in a few minutes
Left out    everything that the toy world does not show
Read next   data.py (the toy world), sft.py (the loop that teaches here too)

The other files of tiny/ say what it is. config.json: 64 dimensions, for which initializer_range's
usual 0.02 is too small. preprocessor_config.json: any image is seen as about 64 x 64 pixels (16
visual tokens), averages of blocks; so the map is seen at 1 : 4, where a texture of period 4
vanishes exactly. tokenizer.json: byte-level, like Qwen's, so that any text becomes tokens and comes
back unchanged; the toy's words (each takes the space before it along) and coordinates are single
tokens. chat_template.jinja: no system prompt and no format block, which it could not read.
"""

import math
import random
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import torch
from PIL import Image
from tqdm import tqdm
from transformers import AutoTokenizer, Qwen2_5_VLConfig

from data import COLORS, GRID, IMAGE, SIZE, TAGS, TEXTURES, Scene, cell_name, draw_scene
from data import neutral_sample, search_sample
from grpo import Row, log_probs, micro_batches
from kit.qwen import ImageProcessor, Model, Policy
from rollout import Trajectory
from sft import imitate, rows_of

TINY = Path(__file__).parents[1] / "tiny"
CELLS = [cell_name(r, c) for r in range(GRID) for c in range(GRID)]
CORNERS = [str(x) for x in range(0, SIZE + 1, SIZE // GRID)]


def tiny_policy(seed: int) -> Policy:
    """tiny/ with random weights."""
    torch.manual_seed(seed)
    model = Model(Qwen2_5_VLConfig.from_pretrained(TINY))
    tokenizer, images = AutoTokenizer.from_pretrained(TINY), ImageProcessor.from_pretrained(TINY)
    for name in ("is_local", "local_files_only"):  # how it was found, which is not to be saved
        del tokenizer.init_kwargs[name]
    return Policy(model, tokenizer, images, TAGS)


def random_policy(shape: Qwen2_5_VLConfig, device: str = "cpu") -> Policy:
    """Real shapes and random weights. The tokenizer is the tiny one, whose few hundred tokens are
    all it can say: sizes and speeds do not depend on which. Changes the ids of shape."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    for mark in ("image_pad", "video_pad", "vision_start"):
        name = f"{mark.removesuffix('_pad')}_token_id"
        setattr(shape, name, tokenizer.convert_tokens_to_ids(f"<|{mark}|>"))
    with torch.device(device):
        model = Model._from_config(shape, attn_implementation="sdpa", dtype=torch.float32)
    size = {"shortest_edge": 3136, "longest_edge": 3_211_264}
    return Policy(model.eval(), tokenizer, ImageProcessor(patch_size=14, size=size), TAGS)


# What tiny/ is pretrained on

Pack = list[tuple[str | Image.Image, bool]]  # one lesson: texts and images; True: to be learnt


def user(*parts: str | Image.Image) -> Pack:
    """A user turn and the header of the reply to it."""
    turn = ("<|im_start|>user\n", *parts, "<|im_end|>\n<|im_start|>assistant\n")
    return [(part, False) for part in turn]


def grounding_pack(scene: Scene, rng: random.Random) -> Pack:
    """All squares, from colour to cell or from cell to colour. One direction a pack: with
    both, the second half could be copied from the first."""
    squares, pack = list(scene.squares), user(scene.image)
    rng.shuffle(squares)
    step = 1 if rng.random() < 0.6 else -1  # from colour to cell, or back
    for square in squares:
        given, asked = (f" {square.color}", f" {square.cell}")[::step]
        pack += [(given, False), (asked, True)]
    return pack


def reading_pack(scene: Scene, rng: random.Random) -> Pack:
    """Four close-ups, each with its colour and texture: the quickest way to learn to read them."""
    pack: Pack = []
    for square in rng.sample(scene.squares, 4):
        words = f" {square.color}<answer>{square.texture}"
        pack += [(scene.image.crop(square.cell_box), False), (words, True), ("\n", False)]
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
    """Which colour is in this cell, as the game asks it."""
    square = rng.choice(scene.squares)
    words = user(scene.image, neutral_sample(scene, square, "").question)
    return [*words, (f"<answer>{square.color}</answer><|im_end|>", True)]


PACKS = dict(grounding=grounding_pack, reading=reading_pack, look=look_pack, colour=colour_pack)


def pack_trajectory(policy: Policy, pack: Pack) -> Trajectory:
    """A pack in the form that rows are made of: what is to be learnt counts as acted."""
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


def skills_of(policy: Policy, rows: dict[str, list[Row]], row_tokens: int) -> dict[str, float]:
    """Kind of pack and kind of word -> the share of these words, on the rows of these packs, whose
    tokens have a probability above 1/2. "look corner": the corners of boxes, on look packs."""
    words = {"cell": CELLS, "corner": CORNERS, "texture": TEXTURES, "colour": COLORS}
    kind_of = {word: kind for kind, same in words.items() for word in same}
    hits: dict[str, list[bool]] = defaultdict(list)
    for pack, its_rows in rows.items():
        for batch in micro_batches(its_rows, row_tokens):
            with torch.no_grad():
                sure = log_probs(policy, batch)[0] > math.log(0.5)
            labels = torch.cat([row.labels for row in batch])
            for label, hit in zip(labels.tolist(), sure.tolist()):
                word = policy.tokenizer.decode([label]).strip()
                hits[f"{pack} {kind_of.get(word, 'other')}"].append(hit)
    return {name: fmean(found) for name, found in sorted(hits.items())}


# The skills that the finished model must have: on which packs, of which words
GATES = "grounding cell, grounding colour, reading texture, look corner, colour colour".split(", ")


def pretrain_tiny(seed: int, row_tokens: int, say: Callable[[str], None]) -> Policy:
    """The base checkpoint, from random weights, in a few minutes. Phase 1 reads close-ups and
    names places until both are learnt. Phase 2 adds the two question formats while the
    learning rate falls. Raises ValueError if some skill of the result is below 0.95."""
    phase_1, phase_2, peak = 500, 450, 4e-3  # steps (at most, exactly), highest learning rate
    policy = tiny_policy(seed)
    rows = {kind: pack_rows(policy, kind, 3000, seed) for kind in PACKS}
    small = {kind: pack_rows(policy, kind, 80, "check") for kind in PACKS}
    held_out = {kind: pack_rows(policy, kind, 300, "held out") for kind in PACKS}
    mixtures = dict(reading=16, grounding=48), dict(reading=8, grounding=20, look=20, colour=16)
    optimizer = torch.optim.AdamW(policy.model.parameters(), betas=(0.9, 0.98), weight_decay=0)
    began: int | None = None  # the step at which phase 2 began

    def measured(when: str, rows: dict[str, list[Row]]) -> dict[str, float]:
        skills = skills_of(policy, rows, row_tokens)
        say("  ".join([when, *(f"{name} {share:.3f}" for name, share in skills.items())]))
        return skills

    def batches_of(i: int) -> list[list[Row]]:
        rng = random.Random(f"pretrain {seed} {i}")
        mixture = mixtures[began is not None]  # packs of one step
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
            now = measured(f"step {i + 1}  loss {loss:.3f}", small)
            learnt = min(now["grounding cell"], now["reading texture"]) >= 0.95
            if began is None and (learnt or i + 1 >= phase_1):
                began = i + 1
        return began is not None and i + 1 - began >= phase_2

    imitate(policy, optimizer, batches_of, range(phase_1 + phase_2), rate, after, "tiny")
    now = measured("held out", held_out)
    if missed := [name for name in GATES if now[name] < 0.95]:
        raise ValueError(f"expected 0.95 of each skill, got less of {missed}: try another --seed")
    return policy
