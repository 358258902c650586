"""
data.py: questions about images, their words, and a small world in which looking is a choice.

Concept     A Sample is one question about one image. How it becomes words, and how words become
            actions, is here too. The toy world makes samples whose answer is invisible in the
            overview and plain in a close-up, so that looking is a choice. Part 2 makes Samples
            of public data sets and holds the paper's filters: a first reading may stop before it.
Paper       CodeV, arXiv:2511.19661, Eq. 2 (x, a_t, o_t as text). The toy world is ours.
In          a seed and the dial `shortcut`; or a file, a folder or a hub name
Out         Samples, their prompts, and demonstrations (scripts that sft.replay plays out)
Left out    questions about several images
Read next   sandbox.py (where the code of a demonstration runs), rollout.py (where it is played)

The toy world, 256 x 256 pixels. A map of 4 x 4 cells holds five squares, each with a colour of its
own and one of four fine textures. The policy's view of the whole map is 64 x 64 pixels: each of its
pixels averages 4 x 4 pixels of the map, one full period of every texture, so in the overview all
textures are the same flat colour, to the last bit. A crop of one cell shows them clearly.

    search   "Which texture is on the red square ?"   needs a close-up, or a guess
    neutral  "What color is the object at b3 ?"       plain in the overview

Every colour has a usual texture. `shortcut` is the share of squares that wear it: at 1.0 a policy
that never looks is always right, at 0.25 guessing is no better than chance, and at 0.0 (the
out-of-prior questions) a guesser is always wrong. The dial is how we make "guessing pays" and
"looking pays" two worlds that differ in nothing else.
"""

from __future__ import annotations

import importlib
import math
import random
import re
import reprlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from string import ascii_uppercase as LETTERS

import numpy as np
from PIL import Image

from kit.answers import read_choice
from kit.boxes import Box
from kit.schemas import COLUMNS, KINDS, cell_of, named, plain_question
from kit.tables import Bad, Usable, read_image, read_rows, upright_rgb
from sandbox import Observation


@dataclass(frozen=True)
class Sample:
    """One question about one image.

    id       unique in its data set; named in every error
    image    what policy, code and judge all speak about: made upright, opaque and RGB here
    answer   the reference: a text or number; if there are options, a letter or the text of one
    options  their texts, without letters
    kind     "search": the evidence must be looked for; "neutral": the overview suffices, and tools
             can only cost (red lines; Eq. 6 by task type, as notes on the paper have it)
    boxes    where the evidence is, in pixels of `image`; empty if nobody labelled it
    source   the data set
    part     the part of a benchmark that its score is split by
    cycle    HR-Bench asks each question in four cycles, its options in another order each time
    rule     the benchmark's own rule, rule(answer, reference) -> bool; None: rewards.grade
    against_prior  on the toy: out of prior, so that a guesser is wrong
    """

    id: str
    image: Image.Image
    question: str
    answer: str
    options: tuple[str, ...] = ()
    kind: str = "search"
    boxes: tuple[Box, ...] = ()
    source: str = ""
    part: str = ""
    cycle: str = ""
    rule: Callable[[str, str], bool] | None = None
    against_prior: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("search", "neutral"):
            raise ValueError(f"sample {self.id}: kind is 'search' or 'neutral', got {self.kind!r}")
        object.__setattr__(self, "image", upright_rgb(self.image))  # the class is frozen
        width, height = self.image.size
        if max(width, height) >= 200 * min(width, height):  # small ones are enlarged, these not
            raise ValueError(
                f"sample {self.id}: its image has {width}x{height} pixels, but Qwen2.5-VL takes no "
                f"picture that is 200 times longer than wide. Crop or pad it, or drop the question."
            )


# The words of the game: a prompt, an observation, and what counts as an action

TAGS = ("think", "code", "answer", "sandbox_output")
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"

SYSTEM_PROMPT = """You are a helpful assistant. Solve the problem about the image step by step.
First reason inside <think> and </think>. If a closer look or a calculation would help, write
Python inside <code> and </code>: crop, zoom, rotate, change the contrast, draw, or compute. The
image is loaded as `image` (PIL), its file is `image_path`. Whatever the code prints, saves or
shows comes back inside <sandbox_output> and </sandbox_output>, and you may go on thinking and
write more code. When you know the answer, give it once inside <answer> and </answer>."""

# The metadata lines have the form of the public training data, odd asterisks included, so that
# public checkpoints see what they know (the file name is neutral: names can carry labels).
FACTS = """

### User Image Path:** "image.png"
### User Image Size:** "{width}x{height}"

### **Output Format (strict adherence required):**

<think>Your reasoning, with any code, goes here.</think>
<answer>Your final answer goes here.</answer>
"""

NOTHING_SHOWN = "The code ran and showed nothing. Print a value or show an image."
FIX_IT = "Fix the code, or answer."


def messages(sample: Sample, clean: Callable[[str], str]) -> list[dict]:
    """The conversation before the first action: x = (image, question) of Eq. 2. Question and
    options are foreign text, so they pass through `clean` (Policy.neutralise)."""
    options = "".join(f"\n{letter}. {o}" for letter, o in zip(LETTERS, sample.options))
    width, height = sample.image.size
    texts = [clean(sample.question + options), FACTS.format(width=width, height=height)]
    content = [{"type": "image"}, *({"type": "text", "text": text} for text in texts)]
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": content}]


def observation_text(seen: Observation, clean: Callable[[str], str], limit: int) -> str:
    """What the next turn reads. What the code printed is cut at `limit` characters; repairs and
    errors are told in full: the policy can learn only from what it sees."""
    log = seen.text.strip()
    log = log[:limit] + " ..." * (len(log) > limit)
    failed = [seen.error, FIX_IT] if seen.error else []
    text = "\n".join(word for word in (log, *seen.notes, seen.environment, *failed) if word)
    if not text and not seen.images:
        text = NOTHING_SHOWN
    return clean(text) + IMAGE * len(seen.images)


def parse(text: str, closed: bool) -> tuple[str | None, str | None]:
    """(code, answer) of one turn; None where there is none. What stands inside a closed <think>
    is thought, not action. closed: the policy ended its message itself; a missing </code> is then
    forgiven. A turn that the length limit cut gets no such favour.

    >>> parse("<think> look </think><code>\\nprint(1)\\n</code>", closed=False)
    ('\\nprint(1)\\n', None)
    """
    text = re.sub(r"<think>.*?</think>", "", text, flags=re.DOTALL)
    if closed and text.count("<code>") == text.count("</code>") + 1:
        text += "</code>"
    words = re.sub(r"<code>.*?(</code>|$)", "", text, flags=re.DOTALL)  # code may print a tag
    answers = re.findall(r"<answer>(.*?)</answer>", words, re.DOTALL)
    blocks = re.findall(r"<code>(.*?)</code>", text, re.DOTALL)
    code = "\n".join(blocks) if blocks else None
    return code, answers[0].strip() if len(answers) == 1 else None


# The toy world

GRID, CELL = 4, 64  # cells in a row, pixels in a cell's side
SIZE = GRID * CELL
PERIOD = 4  # pixels: one period of every texture, and one pixel of the overview
COLORS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 80, 230),
    "yellow": (230, 210, 40),
    "purple": (150, 50, 190),
    "cyan": (40, 200, 210),
}
TEXTURES = ("horizontal", "vertical", "checker", "diagonal")
USUAL_TEXTURE = {color: TEXTURES[i % len(TEXTURES)] for i, color in enumerate(COLORS)}

# Coloured edges tell rows and columns apart, like the letters and numbers on a map. Without them a
# model this small does not learn to name a cell.
EDGE_COLORS = ((230, 120, 120), (120, 200, 120), (120, 130, 230), (225, 215, 120))
EDGE = 6  # pixels

# Per texture, which pixels of the map are dark, [SIZE, SIZE]: half of every 4 x 4 block.
_y, _x = np.mgrid[0:SIZE, 0:SIZE]
PATTERNS = {
    "horizontal": _y // 2 % 2 == 1,
    "vertical": _x // 2 % 2 == 1,
    "checker": (_x // 2 + _y // 2) % 2 == 1,
    "diagonal": (_x + _y) // 2 % 2 == 1,
}


@dataclass(frozen=True)
class Square:
    color: str
    texture: str
    row: int
    column: int
    box: Box

    @property
    def cell(self) -> str:
        return cell_name(self.row, self.column)

    @property
    def cell_box(self) -> Box:
        return cell_box(self.row, self.column)


@dataclass(frozen=True)
class Scene:
    image: Image.Image
    squares: tuple[Square, ...]


def cell_name(row: int, column: int) -> str:
    return "abcd"[column] + str(row + 1)


def cell_box(row: int, column: int) -> Box:
    return (column * CELL, row * CELL, (column + 1) * CELL, (row + 1) * CELL)


def draw_scene(rng: random.Random, shortcut: float) -> Scene:
    """A map with five squares, each wearing its colour's usual texture with chance `shortcut`."""
    pixels = np.full((SIZE, SIZE, 3), rng.randint(200, 239), np.uint8)
    for row, column in np.ndindex(GRID, GRID):
        x0, y0, x1, y1 = cell_box(row, column)
        pixels[y0 : y0 + EDGE, x0:x1] = EDGE_COLORS[column]
        pixels[y0:y1, x0 : x0 + EDGE] = EDGE_COLORS[row]

    squares = []
    cells = rng.sample(range(GRID * GRID), 5)
    for cell, color in zip(cells, rng.sample(list(COLORS), 5)):
        row, column = divmod(cell, GRID)
        side = rng.choice((40, 44, 48))
        # On the 4-pixel lattice every pixel of the overview lies wholly inside or outside the
        # square; off it, the edges of the square would give its texture away.
        x0 = column * CELL + rng.randrange(8, CELL - 4 - side + 1, PERIOD)
        y0 = row * CELL + rng.randrange(8, CELL - 4 - side + 1, PERIOD)
        usual = USUAL_TEXTURE[color]
        unusual = rng.choice([t for t in TEXTURES if t != usual])
        texture = usual if rng.random() < shortcut else unusual

        area = np.s_[y0 : y0 + side, x0 : x0 + side]
        dark = PATTERNS[texture][area][..., None]
        bright = np.array(COLORS[color], np.uint8)
        pixels[area] = np.where(dark, bright // 5, bright)
        squares.append(Square(color, texture, row, column, (x0, y0, x0 + side, y0 + side)))
    return Scene(Image.fromarray(pixels), tuple(squares))


def search_sample(scene: Scene, square: Square, id: str) -> Sample:
    question = f"Which texture is on the {square.color} square ?"
    return Sample(id, scene.image, question, square.texture, boxes=(square.box,), source="toy")


def neutral_sample(scene: Scene, square: Square, id: str) -> Sample:
    question = f"What color is the object at {square.cell} ?"
    return Sample(id, scene.image, question, square.color, kind="neutral", source="toy")


def toy_questions(
    n: int, seed: int | str, shortcut: float = 1.0, neutral_share: float = 0.25
) -> list[Sample]:
    """`n` questions about `n` maps. The same arguments always give the same questions."""
    if not 0.0 <= shortcut <= 1.0:
        raise ValueError(f"shortcut is a share between 0 and 1, got {shortcut}")
    rng = random.Random(f"toy questions {seed}")
    samples = []
    for i in range(n):
        scene = draw_scene(rng, shortcut)
        square = rng.choice(scene.squares)
        make = neutral_sample if rng.random() < neutral_share else search_sample
        samples.append(make(scene, square, f"toy-{seed}-{i}"))
    return samples


def out_of_prior_questions(n: int, seed: int | str) -> list[Sample]:
    """Search questions whose answer is never the colour's usual texture: a guesser scores 0."""
    return toy_questions(n, seed, shortcut=0.0, neutral_share=0.0)


# Demonstrations: what stage 1 imitates

# How the demonstrator treats a search question. Like the released agents of the paper's Fig. 2 it
# is a mixed bag: a third looks in the right place, the rest shows nothing of use or does not look,
# and answers from the prior. Stage 1 copies the mixture; stage 2 has to sort it out.
MIXTURE = {"right": 0.36, "whole": 0.12, "wrong": 0.12, "guess": 0.40}


@dataclass(frozen=True)
class Demonstration:
    """A question and what a demonstrator writes, turn by turn. What the sandbox shows in between
    is not part of it: it comes from running the code (sft.replay)."""

    sample: Sample
    turns: tuple[str, ...]
    route: str  # a key of MIXTURE, or "neutral"


def demonstrations(n: int, seed: int | str) -> list[Demonstration]:
    """`n` demonstrations of the toy task, on maps whose textures follow no prior (shortcut 0.25):
    who copies them learns to read a texture, not to assume one."""
    rng = random.Random(f"toy demonstrations {seed}")
    demos = []
    for i in range(n):
        scene = draw_scene(rng, shortcut=0.25)
        square = rng.choice(scene.squares)
        if rng.random() < 0.25:
            route, make = "neutral", neutral_sample
            turns = (answer_turn(f" I can see {square.cell} {square.color} .", square.color),)
        else:
            (route,), make = rng.choices(list(MIXTURE), list(MIXTURE.values())), search_sample
            turns = _search_turns(square, route, rng)
        demos.append(Demonstration(make(scene, square, f"demo-{seed}-{i}"), turns, route))
    return demos


def _search_turns(square: Square, route: str, rng: random.Random) -> tuple[str, ...]:
    guess = USUAL_TEXTURE[square.color]
    if route == "guess":
        return (answer_turn(" I can see it .", guess),)
    if route == "whole":
        look = crop_turn(" I need a closer look .", (0, 0, SIZE, SIZE))
        return (look, answer_turn(" The crop shows it .", guess))
    row, column, seen = square.row, square.column, square.texture
    if route == "wrong":  # a neighbouring cell, named in the thought: a fluent story, wrong place
        steps = ((0, 1), (1, 0), (0, -1), (-1, 0))
        row, column = rng.choice(
            [(row + dr, column + dc) for dr, dc in steps
             if 0 <= row + dr < GRID and 0 <= column + dc < GRID]
        )  # fmt: skip
        seen = guess
    thought = f" I need a closer look at {square.color} {cell_name(row, column)} ."
    look = crop_turn(thought, cell_box(row, column))
    return (look, answer_turn(" The crop shows it .", seen))


def crop_turn(thought: str, box: Box) -> str:
    corners = ",".join(map(str, box))
    return f"<think>{thought}</think><code>\nimage.crop(({corners})).show()\n</code>"


def answer_turn(thought: str, answer: str) -> str:
    return f"<think>{thought}</think><answer>{answer}</answer>"


def load_rl(
    where: str | Path, on_bad: str = "skip", fits: Callable[[Sample], object] | None = None
) -> Usable:
    """Rows in one of the public schemas, as Samples whose image is decoded when asked for.

    fits: raises ValueError for a sample that is too long to play, such as
    lambda s: check_fits(policy, s, encode_prompt(policy, s, pixels=False), rules)
    """
    rows = read_rows(where)

    def sample(i: int) -> Sample:
        return rl_sample(rows[i], i, rows.folder)

    def check(i: int) -> None:
        made = sample(i)
        try:
            if fits:
                fits(made)
        except ValueError as error:
            raise Bad("length", str(error)) from error

    return Usable(len(rows), check, sample, on_bad, str(where))


def rl_sample(row: dict, number: int, folder: Path) -> Sample:
    """One row as a Sample, or Bad, which names the field that is to blame."""
    for field in ("image", "question", "answer"):
        if cell_of(row, field) is None:
            raise Bad(field, f"nothing in {' or '.join(COLUMNS[field])}")
    cell, question, answer, source = (cell_of(row, field) for field in COLUMNS)
    source = str(source or "")
    if isinstance(question, list):  # a conversation: what its user said last
        turns = [turn for turn in question if isinstance(turn, dict) and turn.get("role") == "user"]
        question = turns[-1].get("content") if turns else None
        if isinstance(question, list):
            question = "".join(str(x.get("text") or "") for x in question if isinstance(x, dict))
    if not isinstance(question, str) or not (question := plain_question(question)):
        raise Bad("question", f"expected a text, got {reprlib.repr(question)}")
    if isinstance(answer, bool | list | dict):
        raise Bad("answer", f"expected a text or a number, got {answer!r}")
    answer = re.sub(r"(?s)^.*<answer>(.*)</answer>.*$", r"\1", str(answer)).strip()
    options, boxes = row.get("options") or [], row.get("boxes") or []
    if not isinstance(options, list) or not all(isinstance(o, str) and o for o in options):
        raise Bad("options", f"expected a list of texts, got {reprlib.repr(options)}")
    texts = [option.strip() for option in options]
    choices = [*LETTERS[: len(options)], *map(str.upper, texts)]
    if not answer or options and answer.upper() not in choices:
        raise Bad("answer", f"{answer!r} is neither a letter nor a text of the options {options}")
    if len(set(texts)) < len(texts) or options and read_choice(answer, tuple(options)) is None:
        raise Bad("options", f"the answer {answer!r} should name one of options that all differ, "
                             f"got {reprlib.repr(options)}")  # fmt: skip
    kind = row.get("kind") or KINDS.get(named(source, KINDS), "search")
    if kind not in ("search", "neutral"):
        raise Bad("kind", f"expected 'search' or 'neutral', got {kind!r}")
    id = str(row.get("id") or f"{source or 'row'}-{number}")
    try:
        image = read_image(cell, folder)
        sample = Sample(id, image, question, answer, tuple(options), kind, (), source)
    except ValueError as error:
        raise Bad("image", str(error)) from error
    W, H = image.size
    try:  # rounded outwards, cut at the border
        whole = tuple((max(math.floor(x0), 0), max(math.floor(y0), 0),
                       min(math.ceil(x1), W), min(math.ceil(y1), H))
                      for x0, y0, x1, y1 in boxes)  # fmt: skip
    except (TypeError, ValueError, OverflowError) as error:
        raise Bad("boxes", f"expected [x0, y0, x1, y1] each, got {reprlib.repr(boxes)}") from error
    if any(x0 >= x1 or y0 >= y1 for x0, y0, x1, y1 in whole):
        raise Bad("boxes", f"one has no pixel of the {W}x{H} image: {reprlib.repr(boxes)}")
    return replace(sample, boxes=whole)


def demo() -> str:
    lines = []
    for one in demonstrations(4, seed=0):
        lines.append(f"{one.sample.id}  {one.sample.question}  (answer: {one.sample.answer})")
        lines.append(f"  {one.route}: " + "  ->  ".join(one.turns).replace("\n", "\\n"))
    scenes = [draw_scene(random.Random(1), shortcut) for shortcut in (1.0, 0.0)]
    usual, unusual = (np.asarray(scene.image.reduce(PERIOD), int) for scene in scenes)
    gap = np.abs(usual - unusual).max()
    lines.append(f"the same map with usual and unusual textures differs in the overview by {gap}")
    return "\n".join(lines)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        print(demo())
    else:  # what looks at data sets and filters them stands above this file
        importlib.import_module("beyond.filters").main(sys.argv[1:])
