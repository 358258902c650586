"""
data.py: questions about images, their words, and a small world in which looking is a choice.

Concept     A Sample is one question about one image. This file turns it into the words that
            the policy reads, and turns the policy's words into actions. It also draws the toy
            world: there the answer is invisible in the overview and plain in a close-up, so
            that looking is a choice. Rows of public data sets become Samples in load_rl.
Paper       CodeV, arXiv:2511.19661, Eq. 2 (x, a_t, o_t as text). The toy world is ours.
In          a seed and the dial `shortcut`; or a file, a folder or a hub name
Out         Samples, their prompts, and demonstrations (scripts that sft.replay plays out)
Left out    questions about several images; filters of public data (beyond/filters.py)
Read next   sandbox.py (where the code of a demonstration runs), rollout.py (where it is played)

The toy world is a map of 256 x 256 pixels. Its 4 x 4 cells hold five squares. Each square has
a colour of its own and one of four fine textures. The policy's view of the whole map has 64 x 64
pixels. Each of them averages 4 x 4 pixels of the map, one full period of every texture. So in
the overview all textures are the same flat colour, to the last bit. A crop shows them clearly.

    search   "Which texture is on the red square ?"   needs a close-up, or a guess
    neutral  "What color is the object at b3 ?"       plain in the overview

Every colour has a usual texture, and `shortcut` is the share of squares that wear it. At 1.0 a
policy that never looks is always right. At 0.25 guessing is no better than chance. At 0.0, in
the out-of-prior questions, a guesser is always wrong. With this dial we make two worlds that
differ in nothing else: in one guessing pays, in the other looking pays.
"""

import importlib
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from string import ascii_uppercase as LETTERS

import numpy as np
from PIL import Image

from kit.boxes import Box
from kit.grammar import ending
from kit.schemas import rl_fields
from kit.tables import Usable, blaming, read_rows, upright_rgb
from sandbox import Observation


@dataclass(frozen=True)
class Sample:
    """One question about one image.

    id       unique in its data set; every error names it
    image    what policy, code and judge all speak about: made upright, opaque and RGB here
    question its text, without the options
    answer   the reference: a text or number; if there are options, a letter or the text of one
    options  their texts, without letters
    kind     "search": the evidence must be looked for. "neutral": the overview suffices, and
             tools can only cost (red lines; Eq. 6 by task type, as notes on the paper have it)
    boxes    where the evidence is, in pixels of `image`; empty if nobody labelled it
    source   the name of the data set
    part     the part of a benchmark that its score is split by
    cycle    HR-Bench asks each question in four cycles, each with another order of the options
    rule     a benchmark's own rule(answer, reference) -> bool; None: rewards.grade decides
    against_prior  True for the toy's out-of-prior questions: a guesser is always wrong
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
        if max(width, height) >= 200 * min(width, height):  # the model enlarges small images only
            raise ValueError(
                f"sample {self.id}: its image has {width}x{height} pixels, but Qwen2.5-VL takes no "
                f"picture that is 200 times longer than wide. Crop or pad it, or drop the question."
            )


# The words of the game: a prompt, an observation, and what counts as an action

# The tags, and whether the policy may write them.
TAGS = {"think": True, "code": True, "answer": True, "sandbox_output": False}
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"

SYSTEM_PROMPT = """You are a helpful assistant. Solve the problem about the image step by step.
First reason inside <think> and </think>. If a closer look or a calculation would help, write
Python inside <code> and </code>: crop, zoom, rotate, change the contrast, draw, or compute. The
image is loaded as `image` (PIL), its file is `image_path`. Whatever the code prints, saves or
shows comes back inside <sandbox_output> and </sandbox_output>, and you may go on thinking and
write more code. When you know the answer, give it once inside <answer> and </answer>."""

# These lines have the form of the public training data, odd asterisks included, because public
# checkpoints know it. Only the file name is neutral: names can carry labels.
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


def observation_text(observation: Observation, clean: Callable[[str], str], limit: int) -> str:
    """What the policy reads of an observation: o_t of Eq. 2, with a place for each image.

    What the code printed is cut at `limit` characters. Repairs and errors are told in full,
    because the policy can learn only from what it reads.
    """
    log = observation.text.strip()
    log = log[:limit] + " ..." * (len(log) > limit)
    failed = [observation.error, FIX_IT] if observation.error else []
    lines = (log, *observation.notes, observation.environment, *failed)
    text = "\n".join(line for line in lines if line)
    if not text and not observation.images:
        text = NOTHING_SHOWN
    return clean(text) + IMAGE * len(observation.images)


def parse(text: str, closed: bool) -> tuple[str | None, str | None]:
    """The action in one turn: (code, answer), each None if the turn has none.

    The turn ends where its first code closes, in an open thought too, or where </answer> stands
    outside thoughts and code; what is behind it is not read (kit/grammar.py; so is `closed`).

    >>> parse("<think> an <answer>?</answer> </think><code>\\nprint(1)\\n</code>", closed=False)
    ('\\nprint(1)\\n', None)
    """
    end = ending(text, closed)
    return end[:2] if end else (None, None)


# The toy world

GRID, CELL = 4, 64  # cells in a row or column, pixels in a cell's side
SIZE = GRID * CELL  # pixels in the map's side
PERIOD = 4  # pixels: one period of every texture, and one pixel of the overview
SIDES = (40, 44, 48)  # pixels: of a square
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

# Coloured edges tell rows and columns apart, like the letters and numbers on a map. Without them
# a model this small does not learn to name a cell.
EDGE_COLORS = ((230, 120, 120), (120, 200, 120), (120, 130, 230), (225, 215, 120))
EDGE = 6  # pixels

# Which pixels of the map are dark in each texture, [SIZE, SIZE]: half of every 4 x 4 block.
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
    cell: str  # the name of its cell, and the box of that
    cell_box: Box


@dataclass(frozen=True)
class Scene:
    image: Image.Image
    squares: tuple[Square, ...]


def cell_name(row: int, column: int) -> str:
    return "abcd"[column] + str(row + 1)


def cell_box(row: int, column: int) -> Box:
    return (column * CELL, row * CELL, (column + 1) * CELL, (row + 1) * CELL)


def draw_scene(rng: random.Random, shortcut: float) -> Scene:
    """A map with five squares, each in its colour's usual texture with probability `shortcut`."""
    pixels = np.full((SIZE, SIZE, 3), rng.randint(200, 239), np.uint8)
    for row, column in np.ndindex(GRID, GRID):
        x0, y0, x1, y1 = cell_box(row, column)
        pixels[y0 : y0 + EDGE, x0:x1] = EDGE_COLORS[column]
        pixels[y0:y1, x0 : x0 + EDGE] = EDGE_COLORS[row]

    squares = []
    cells = rng.sample(range(GRID * GRID), 5)
    for cell, color in zip(cells, rng.sample(list(COLORS), 5)):
        row, column = divmod(cell, GRID)
        side = rng.choice(SIDES)
        # On the 4-pixel lattice every pixel of the overview lies wholly inside or outside the
        # square. Off the lattice, the edges of the square would give its texture away.
        x0 = column * CELL + rng.randrange(8, CELL - 4 - side + 1, PERIOD)
        y0 = row * CELL + rng.randrange(8, CELL - 4 - side + 1, PERIOD)
        usual = USUAL_TEXTURE[color]
        unusual = rng.choice([texture for texture in TEXTURES if texture != usual])
        texture = usual if rng.random() < shortcut else unusual

        area = np.s_[y0 : y0 + side, x0 : x0 + side]
        dark = PATTERNS[texture][area][..., None]
        bright = np.array(COLORS[color], np.uint8)
        pixels[area] = np.where(dark, bright // 5, bright)
        box, place = (x0, y0, x0 + side, y0 + side), (row, column)
        squares.append(Square(color, texture, *place, box, cell_name(*place), cell_box(*place)))
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
    samples = toy_questions(n, seed, shortcut=0.0, neutral_share=0.0)
    return [replace(sample, against_prior=True) for sample in samples]


# Demonstrations: what stage 1 imitates

# How a demonstrator treats search questions: a mixed bag, like the agents of the paper's Fig. 2.
# Who has not seen the target answers from the prior. A careless one slips: it looks just beside.
LOOKS = {  # route: the places that it looks at, one a turn; "near" is drawn among the neighbours
    "right": ("target",), "again": ("target", "target"), "twice": ("near", "target"),
    "wrong": ("near",), "slip": ("beside",), "whole": ("whole",), "guess": (),
}  # fmt: skip
HABITS = {
    "careful": {"right": 0.36, "whole": 0.12, "wrong": 0.12, "guess": 0.40},
    "careless": {"right": 0.20, "whole": 0.10, "slip": 0.30, "guess": 0.40},
    "eager": {"right": 0.2, "again": 0.2, "twice": 0.2, "whole": 0.1, "wrong": 0.1, "guess": 0.2},
}


@dataclass(frozen=True)
class Demonstration:
    """A question, and what a demonstrator writes turn by turn. What the sandbox shows in between
    is not stored: it comes from running the code (sft.replay)."""

    sample: Sample
    turns: tuple[str, ...]
    route: str  # a key of LOOKS, or "neutral"


def demonstrations(n: int, seed: int | str, habit: str = "careless") -> list[Demonstration]:
    """`n` demonstrations of the toy task, by one of HABITS. The textures of their maps follow no
    prior (shortcut 0.25): who copies them learns to read a texture, not to assume one."""
    rng = random.Random(f"toy demonstrations {seed}")
    demos = []
    for i in range(n):
        scene = draw_scene(rng, shortcut=0.25)
        square = rng.choice(scene.squares)
        if rng.random() < 0.25:
            route, make = "neutral", neutral_sample
            turns = (answer_turn(f" I can see {square.cell} {square.color} .", square.color),)
            if habit == "eager" and rng.random() < 0.5:  # although the overview would do
                turns = (cell_turn(square.color, square.row, square.column), *turns)
        else:
            mixture, make = HABITS[habit], search_sample
            (route,) = rng.choices(list(mixture), list(mixture.values()))
            turns = _search_turns(square, route, rng)
        demos.append(Demonstration(make(scene, square, f"demo-{seed}-{i}"), turns, route))
    return demos


def _search_turns(square: Square, route: str, rng: random.Random) -> tuple[str, ...]:
    row, column, turns = square.row, square.column, []
    near = ((row, column + 1), (row + 1, column), (row, column - 1), (row - 1, column))
    near = [(r, c) for r, c in near if 0 <= r < GRID and 0 <= c < GRID]
    cells = {"target": (row, column), "beside": (row, column + (1 if column + 1 < GRID else -1))}
    for place in LOOKS[route]:
        if place == "whole":
            turns.append(crop_turn(" I need a closer look .", (0, 0, SIZE, SIZE)))
        else:  # the thought names the cell, also a wrong one: a fluent lie
            turns.append(cell_turn(square.color, *(cells.get(place) or rng.choice(near))))
    answer = square.texture if "target" in LOOKS[route] else USUAL_TEXTURE[square.color]
    return (*turns, answer_turn(" The crop shows it ." if turns else " I can see it .", answer))


def cell_turn(color: str, row: int, column: int) -> str:
    thought = f" I need a closer look at {color} {cell_name(row, column)} ."
    return crop_turn(thought, cell_box(row, column))


def crop_turn(thought: str, box: Box) -> str:
    corners = ",".join(map(str, box))
    return f"<think>{thought}</think><code>\nimage.crop(({corners})).show()\n</code>"


def answer_turn(thought: str, answer: str) -> str:
    return f"<think>{thought}</think><answer>{answer}</answer>"


# Public data sets


def load_rl(
    where: str | Path,
    on_bad: str = "skip",
    fits: Callable[[Sample], object] | None = None,
    fits_key: object = None,
) -> Usable:
    """The rows of a public data set as Samples; `.skipped` lists the rows that cannot be used.
    Every row is checked now, its image included. Images are decoded again when asked for.
    where     a file, a folder or a hub name (kit/tables.py); kit/schemas.py knows the columns
    on_bad    "skip" lists rows that cannot be used; "stop" raises ValueError at the first one
    fits      raises ValueError for a sample that is too long to play (rollout.check_fits)
    fits_key  all that decides what `fits` finds: limits, Policy.version(). Findings are kept for
              the next start (kit/tables.py), but not those of a `fits` without its key
    """
    rows = read_rows(where)

    def sample(i: int) -> Sample:
        with blaming("image"):
            return Sample(**rl_fields(rows[i], i, rows.folder))

    def check(i: int) -> None:
        made = sample(i)
        with blaming("length"):
            if fits:
                fits(made)

    key = (rows.version, fits_key) if fits_key or not fits else None
    return Usable(range(len(rows)), check, sample, on_bad, str(where), key)


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
