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
anti-prior questions) a guesser is always wrong. The dial is how we make "guessing pays" and
"looking pays" two worlds that differ in nothing else.
"""

from __future__ import annotations

import argparse
import base64
import glob
import hashlib
import io
import json
import math
import os
import random
import re
import reprlib
import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from string import ascii_uppercase as LETTERS
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from PIL import Image, ImageOps
from tqdm import tqdm

from sandbox import Observation

if TYPE_CHECKING:
    from rollout import Policy, Rules  # which import this module

Box = tuple[int, int, int, int]  # x0, y0, x1, y1 in pixels; x1 and y1 are exclusive


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
    """

    id: str
    image: Image.Image
    question: str
    answer: str
    options: tuple[str, ...] = ()
    kind: str = "search"
    boxes: tuple[Box, ...] = ()
    source: str = ""

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


def upright_rgb(image: Image.Image) -> Image.Image:
    """EXIF rotation applied, transparency on white, RGB."""
    if image.mode == "RGB" and not (image.getexif() or image.has_transparency_data):
        return image
    image = ImageOps.exif_transpose(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


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


def anti_prior_questions(n: int, seed: int | str) -> list[Sample]:
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


# Part 2: public data and the paper's filters. The toy needs none of it: a first reading stops here

# Files, rows and images

SUFFIXES = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".tsv": "csv", ".csv": "csv"}
PICTURES = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # the formats we let PIL open


class Lazy(Sequence):
    """make(key) for every key, each time it is asked for: the pictures of 50,000 questions fit in
    no memory. A slice is Lazy too."""

    def __init__(self, make: Callable, keys: Sequence) -> None:
        self.make, self.keys = make, keys

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, i):
        chosen = self.keys[i]
        return Lazy(self.make, chosen) if isinstance(i, slice) else self.make(chosen)


class Rows(Lazy):
    """The rows of one or several files, as dicts. Image cells stay as they are stored; `folder` is
    what relative paths in them start from."""

    def __init__(self, tables: Sequence[Sequence[dict]], folder: Path) -> None:
        places = [(table, i) for table in tables for i in range(len(table))]
        super().__init__(lambda place: place[0][place[1]], places)
        self.folder = folder


def read_rows(where: str | Path) -> Rows:
    """A parquet, jsonl, json, tsv or csv file, a folder of them, or a data set on the hub.

    Behind a colon may stand a split: only files (or folders) whose name begins with this word, or
    with one of several, as in "Kwai-Keye/Thyme-SFT:wo_thinking+2round". Files may differ in their
    columns. Where a folder holds several kinds of file, those of the first kind above count. Cells
    of tsv and csv are text, empty ones "".
    """
    where, split = str(where), ""
    if ":" in where and not Path(where).exists():
        where, split = where.rsplit(":", 1)
    root = Path(where) if Path(where).exists() else _download(where, split)
    if root.is_file():
        return Rows([_table(root)], root.parent)
    words = [re.escape(word) + "(?![a-z0-9])" for word in split.split("+") if word]
    begins = re.compile("|".join(words))
    for suffix in SUFFIXES:
        inside = [file.relative_to(root) for file in sorted(root.rglob("*" + suffix))]
        files = [f for f in inside if not f.parts[0].startswith(".")
                 and any(begins.match(part) for part in f.parts)]  # fmt: skip
        if files:
            return Rows([_table(root / file) for file in files], root)
    whose = f" whose name begins with {split!r}" if split else ""
    raise FileNotFoundError(f"no {', '.join(SUFFIXES)} file{whose} in {root}")


def _download(name: str, split: str) -> Path:
    from huggingface_hub import snapshot_download

    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) is None:
        raise FileNotFoundError(f"no data in {name}: neither a file, a folder nor a hub name (a/b)")
    try:
        patterns = [p + word + "*" for word in split.split("+") for p in ("", "*/")]
        return Path(snapshot_download(name, repo_type="dataset", allow_patterns=patterns))
    except OSError as error:
        raise FileNotFoundError(
            f"no data set {name!r}: it is no file or folder here, and the hub does not give it "
            f"({str(error).splitlines()[0]}). Check name, network and licence, or give a local path"
        ) from error


def _table(file: Path):
    """One file as a `datasets.Dataset` (a memory-mapped copy in its cache), nothing decoded."""
    import datasets  # here: it takes seconds, which the toy need not spend

    if (kind := SUFFIXES.get(file.suffix)) is None:
        raise ValueError(f"{file}: expected a file that ends in one of {', '.join(SUFFIXES)}")
    if file.stat().st_size == 0:
        raise ValueError(f"{file} is empty")
    options = {}
    if kind == "csv":  # text throughout: no 007 -> 7, no option "None" -> missing
        import pandas

        options = dict(sep="\t" if file.suffix == ".tsv" else ",", keep_default_na=False)
        names = pandas.read_csv(file, sep=options["sep"], nrows=0).columns
        options["features"] = datasets.Features({n: datasets.Value("string") for n in names})
        options["chunksize"] = 50  # rows in memory: a picture of 8K is 20 MB of base64
    try:
        path = glob.escape(str(file.absolute()))  # a name may hold brackets
        table = datasets.load_dataset(kind, data_files=path, split="train", **options)
    except (datasets.exceptions.DatasetGenerationError, ValueError) as error:
        why = str(error.__cause__ or error)
        if "corresponds to no data" in why or "BatchSize must be greater than 0" in why:
            why = "it has no rows"  # in the words of `datasets`, of text and parquet
        raise ValueError(f"{file} cannot be read as {file.suffix}: {why}") from error

    def leave_undecoded(feature) -> None:
        if isinstance(feature, dict):
            for inner in feature.values():
                leave_undecoded(inner)
        elif isinstance(feature, datasets.Image):
            feature.decode = False
        elif hasattr(feature, "feature"):  # a list
            leave_undecoded(feature.feature)

    leave_undecoded(table.info.features)  # (table.features is a copy)
    return table


def read_image(cell: object, folder: Path | str = ".") -> Image.Image:
    """Any public form of an image cell, made upright, opaque and RGB: a PIL image, bytes, a dict
    with "bytes" or "path", a path (relative to `folder`), base64, a data URL, or a list of one of
    these. ValueError says what came instead.
    """
    encoded = io.BytesIO(image_bytes(cell, folder))
    try:
        image = Image.open(encoded, formats=PICTURES)
        image.load()
        return upright_rgb(image)
    except (OSError, ValueError, TypeError, SyntaxError, EOFError, struct.error,
            Image.DecompressionBombError) as error:  # fmt: skip
        why = re.sub(r" <.*>", "", str(error))  # PIL names an object of ours
        raise ValueError(f"no image that can be read in {reprlib.repr(cell)}: {why}") from error


def image_bytes(cell: object, folder: Path | str = ".") -> bytes:
    """The encoded image that a cell holds or names (see read_image)."""
    if isinstance(cell, Image.Image):
        upright_rgb(cell).save(png := io.BytesIO(), "PNG")
        return png.getvalue()
    if isinstance(cell, dict):  # both may be there: the path then only says where it came from
        cell = cell.get("bytes") or cell.get("path")
    if isinstance(cell, list | tuple):
        if len(cell) != 1:
            raise ValueError(f"expected one image, got a list of {len(cell)}")
        return image_bytes(cell[0], folder)
    if isinstance(cell, bytes) and cell:
        return cell
    if not isinstance(cell, str) or not cell.strip():
        raise ValueError(f"expected an image, got {reprlib.repr(cell)}")
    path = os.path.join(folder, cell.removeprefix("file://"))
    if os.path.isfile(path):  # False also for text that can be no path
        return Path(path).read_bytes()
    text = re.sub(r"^data:[^,]*,|\s", "", cell)
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except ValueError:
        raise ValueError(f"no such file, and no base64: {cell[:200]!r} in {folder}") from None


# Questions for stage 2

# Where the public schemas keep what a Sample needs; the first column that holds something counts.
# The form of the RL library verl (CodeV-RL-Data, DeepEyes-47K), flat rows (ThinkLite-VL), our own.
COLUMNS = {
    "image": ("images", "image"),
    "question": ("extra_info.question", "question", "problem", "prompt", "messages"),
    "answer": ("reward_model.ground_truth", "answer", "ground_truth", "solution"),
    "source": ("data_source", "source", "dataset"),
}

# A sample's kind follows from a word in the name of its source. That rewards differ by task type is
# known from notes on the paper; the words are ours. Without one: "search" (--describe: "assumed").
KINDS = {"thinklite": "neutral", "geo": "neutral", "math": "neutral", "tabmwp": "neutral",
         "vstar": "search", "chart": "search", "arxivqa": "search"}  # fmt: skip


class Bad(ValueError):
    """What is wrong with one field of one row."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field, self.reason = field, reason


class Skipped(NamedTuple):
    row: int  # from 0, over all files
    field: str
    reason: str


class Usable(Lazy):
    """What the usable ones of `total` rows become; `skipped` lists the others. Every row is tried
    once, at the start, so that training meets no surprise: check(i) raises Bad if row i cannot be
    used, make(i) makes it. len(self) and len(self.skipped) sum to `total`; on_bad="stop" raises
    ValueError at the first bad row instead."""

    def __init__(
        self, total: int, check: Callable[[int], object], make: Callable, on_bad: str, title: str
    ) -> None:
        if on_bad not in ("skip", "stop"):
            raise ValueError(f"on_bad is 'skip' or 'stop', got {on_bad!r}")
        good, self.skipped = list[int](), list[Skipped]()
        super().__init__(make, good)

        def tried(i: int) -> Skipped | None:
            try:
                check(i)
            except Bad as bad:
                return Skipped(i, bad.field, bad.reason)

        with ThreadPoolExecutor(8) as pool:  # decoding images lets other threads run
            found = pool.map(tried, range(total))
            for i, bad in enumerate(tqdm(found, title, total, mininterval=5, disable=total < 100)):
                if bad and on_bad == "stop":
                    pool.shutdown(cancel_futures=True)
                    raise ValueError(f"{title}: row {i}, {bad.field}: {bad.reason}")
                if bad:
                    self.skipped.append(bad)
                else:
                    good.append(i)


def load_rl(
    where: str | Path, on_bad: str = "skip", fits: Callable[[Sample], object] | None = None
) -> Usable:
    """Rows in one of the public schemas, as Samples whose image is decoded when asked for.

    fits: raises ValueError for a sample that is too long to play, such as
    lambda s: check_fits(policy, s, policy.encode_prompt(s, pixels=False), rules)
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
    from rewards import read_choice  # which imports this module

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


def cell_of(row: dict, field: str):
    """The first cell of COLUMNS[field] that holds something, else None."""
    for column in COLUMNS[field]:
        cell: object = row
        for name in column.split("."):
            cell = cell.get(name) if isinstance(cell, dict) else None
        if cell not in (None, "", []):
            return cell
    return None


def plain_question(text: str) -> str:
    """Without image placeholders and the metadata lines, which `messages` writes anew."""
    facts = r"\n[\s*]*#+ \W*(?:User Image|Output Format)"
    return re.split(facts, text.replace("<image>", ""))[0].strip()


def named(source: str, words: Iterable[str]) -> str | None:
    """The first of `words` in the name of a data source, however that is punctuated."""
    name = re.sub(r"[^a-z0-9]", "", source.lower())
    return next((word for word in words if word in name), None)


# The paper's filters of its RL data: sources, labels, difficulty

EXTERNAL = ("okvqa",)  # sources whose questions need knowledge no image holds (the paper names one)
VERDICTS = ("keep", "drop", "unsure")


class Verdict(NamedTuple):
    word: str  # one of VERDICTS, or "no verdict"
    reason: str


UNASKED = Verdict("no verdict", "not asked yet, or no answer came: run the same command again")


def by_source(rows: Rows, keys: Sequence[int], external: Sequence[str] = EXTERNAL) -> list[Verdict]:
    """Drop sources of external knowledge. keys: the rows to look at."""
    sources = [str(cell_of(rows[k], "source") or "") for k in keys]
    return [Verdict("drop" if named(s, external) else "keep", f"source {s}") for s in sources]


def by_label(samples: Sequence[Sample], judge, record: Path) -> list[Verdict]:
    """Is the label right? judge: a rewards.ChatJudge, or anything with its check_label. A person
    settles what it left "unsure": edit the word in the record and run the filter again."""

    def ask(asked: list[Sample]) -> list[dict | None]:
        with ThreadPoolExecutor(judge.concurrency) as pool:
            told = pool.map(judge.check_label, asked)
            return [said and dict(zip(("verdict", "reason"), said)) for said in told]

    lines = asked_once(samples, ask, {"judge": judge.model}, record, batch=8 * judge.concurrency)
    return [Verdict(x["verdict"], x["reason"]) if x else UNASKED for x in lines]


def by_difficulty(
    samples: Sequence[Sample], policy: Policy, rules: Rules, record: Path, name: str, n: int = 8,
    max_accuracy: float = 0.9, answer_judge=None, batch: int = 16,
) -> list[Verdict]:  # fmt: skip
    """Drop what the model answers right in more than max_accuracy of n tries: with the paper's 8
    and 0.9, 8 of 8. What it never answers right stays (the paper names no lower cut). name: the
    model's, for the record. answer_judge: a ChatJudge for open answers; else texts are compared."""
    import torch

    from rewards import BoxJudge, Weights, score
    from rollout import play

    def ask(asked: list[Sample]) -> list[dict | None]:
        torch.manual_seed(0)  # play draws from it and the sample's id: batches do not matter
        groups = play(policy, asked, n, rules)
        graded = score(groups, "accuracy", BoxJudge(), Weights(), random.Random(0), answer_judge)
        told = [[reward.answer for reward in group] for group in graded]
        return [None if None in of_one else {"right": int(sum(of_one))} for of_one in told]

    setting = {"model": name, "n": n, "turns": rules.turns, "max_pixels": budget_of(policy),
               "max_new_tokens": rules.max_new_tokens,
               "answer_judge": answer_judge and answer_judge.model}  # fmt: skip

    def verdict(right: int) -> Verdict:
        return Verdict("drop" if right / n > max_accuracy else "keep", f"{right} of {n} right")

    lines = asked_once(samples, ask, setting, record, batch)
    return [verdict(line["right"]) if line else UNASKED for line in lines]


def asked_once(
    samples: Sequence[Sample], ask: Callable[[list[Sample]], list[dict | None]], setting: dict,
    record: Path, batch: int,
) -> list[dict | None]:  # fmt: skip
    """ask(samples) -> what was found of each, or None for nothing. Every finding becomes a line of
    `record` at once, and is not asked for again: neither after a crash, nor by another run.

    Under torchrun or accelerate launch every process asks about its own part, returns that, and
    writes a record of its own; whoever comes later reads them all.
    """
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    own = record.with_suffix(f".{rank}.jsonl") if world > 1 else record
    own.parent.mkdir(parents=True, exist_ok=True)
    known: dict[str, dict] = {}
    for part in {own, record, *record.parent.glob(record.stem + ".*.jsonl")}:
        known |= read_record(part, setting)
    mine, keys = samples[rank::world], []
    with open(own, "ab") as file, tqdm(total=len(mine), desc=own.stem, mininterval=5) as bar:
        file.truncate(len(whole_lines(own)))  # a line that a crash cut short
        for start in range(0, len(mine), batch):
            some = [(fingerprint(sample), sample) for sample in mine[start : start + batch]]
            todo = {key: sample for key, sample in some if key not in known}
            findings = ask([*todo.values()]) if todo else []
            for (key, s), finding in zip(todo.items(), findings):
                if finding is not None:
                    told = dict(id=s.id, question=s.question, answer=s.answer) | finding
                    known[key] = told | dict(setting=setting, key=key)
                    file.write(json.dumps(known[key], ensure_ascii=False).encode() + b"\n")
            file.flush()
            keys += [key for key, _ in some]
            bar.update(len(some))
    return [known.get(key) for key in keys]


def read_record(file: Path, setting: dict) -> dict[str, dict]:
    known: dict[str, dict] = {}
    for number, text in enumerate(whole_lines(file).splitlines(), start=1):
        try:
            line = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{file}, line {number} is no JSON: {error}. Correct the line, or "
                             f"delete it: its question is then asked again") from error  # fmt: skip
        if not isinstance(line, dict) or not {"setting", "key"} <= set(line):
            raise ValueError(f"{file} is no record of a filter: give another --out, or move it")
        if line["setting"] != setting:
            raise ValueError(f"{file} was made with {line['setting']}, and this is {setting}: give "
                             f"another --out, or delete it")  # fmt: skip
        if "right" not in line and line.get("verdict") not in VERDICTS:  # right: by_difficulty's
            raise ValueError(f"{file}, line {number}: expected a verdict of {', '.join(VERDICTS)}, "
                             f"got {line.get('verdict')!r}: correct the word")  # fmt: skip
        known[line["key"]] = line
    return known


def whole_lines(file: Path) -> bytes:
    written = file.read_bytes() if file.exists() else b""
    return written[: written.rfind(b"\n") + 1]


def fingerprint(sample: Sample) -> str:
    asked = repr((sample.question, sample.options, sample.answer, sample.image.size))
    return hashlib.sha256(asked.encode() + sample.image.tobytes()).hexdigest()[:32]


def write_sieved(out: Path, samples: Usable, rows: Rows, verdicts: list[Verdict]) -> Counter:
    """What to keep as `out`, a parquet file that load_rl reads, with the images' own bytes; and
    beside it, as .txt, a list for people of all that was not kept, and why."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = {name: pa.string() for name in ("id", "question", "answer", "kind", "data_source")}
    lists = {"options": pa.list_(pa.string()), "boxes": pa.list_(pa.list_(pa.int64()))}
    image = {"image": pa.struct({"bytes": pa.binary(), "path": pa.string()})}
    schema = pa.schema(texts | lists | image)

    def line(k: int) -> dict:
        s, row = samples[k], rows[samples.keys[k]]
        image = {"bytes": image_bytes(cell_of(row, "image"), rows.folder)}
        return dict(id=s.id, image=image, question=s.question, answer=s.answer, kind=s.kind,
                    options=s.options, boxes=s.boxes, data_source=s.source)  # fmt: skip

    places: dict[str, list[int]] = {"keep": []}
    for k, verdict in enumerate(verdicts):
        places.setdefault(verdict.word, []).append(k)
    out.parent.mkdir(parents=True, exist_ok=True)
    with pq.ParquetWriter(part := out.with_suffix(".part"), schema) as writer:
        for start in range(0, len(places["keep"]), 50):  # few pictures are in memory at a time
            lines = [line(k) for k in places["keep"][start : start + 50]]
            writer.write_table(pa.Table.from_pylist(lines, schema))
    os.replace(part, out)
    text = f"keep: {len(places.pop('keep'))}\n"
    for word, others in places.items():
        text += f"\n{word}: {len(others)}\n\n"
        for s, verdict in ((samples[k], verdicts[k]) for k in others):
            text += f"{s.id}  {verdict.reason}\n    {s.question!r}  answer: {s.answer!r}\n"
    text += f"\nunusable: {len(samples.skipped)}\n\n"
    text += "".join(f"row {bad.row}, {bad.field}: {bad.reason}\n" for bad in samples.skipped)
    out.with_suffix(".txt").write_text(text)
    return Counter(verdict.word for verdict in verdicts)


# What does a data set hold?


def describe(where: str, policy: Policy | None, rules: Rules) -> str:
    """Rows, sources, kinds, answers, image sizes, lengths, and the rows that would be left out.
    Lengths need a policy, whose image processor holds the pixel budget; not its weights."""
    from rollout import check_fits
    from sft import load_thyme

    columns = list(read_rows(where)[0])
    if "response" in columns:
        if policy is None:
            raise ValueError("demonstrations are read by their tokens: give --model")
        usable, _ = load_thyme(policy, where, "all", rules)
        played = (usable.make(k, pixels=False) for k in usable.keys)
        items = ((t.sample, len(t.ids), len(t.steps) - 1) for t in played)
    else:
        encode = policy and (lambda s: policy.encode_prompt(s, pixels=False))
        fits = policy and (lambda s: check_fits(policy, s, encode(s), rules))
        usable = load_rl(where, fits=fits)
        items = ((s, len(encode(s).ids) if policy else 0, None) for s in usable)

    forms = {r"\(?[A-Z]\)?": "a letter", r"[-+]?[\d.,]+%?": "a number", r"[\s\S]*": "a text"}
    count: dict[str, Counter] = {"source": Counter(), "answers": Counter(), "programs": Counter()}
    tokens, sizes = list[int](), list[tuple[int, str]]()
    for sample, length, ran in tqdm(items, where, len(usable), mininterval=5, leave=False):
        width, height = sample.image.size
        sizes.append((width * height, f"{width}x{height}"))
        tokens.append(length)
        words = "" if named(sample.source, KINDS) or ran is not None else ", assumed"
        words += ", external knowledge" if named(sample.source, EXTERNAL) else ""
        count["source"][f"{sample.source or 'not named'} ({sample.kind}{words})"] += 1
        count["answers"][next(w for p, w in forms.items() if re.fullmatch(p, sample.answer))] += 1
        count["programs"].update([] if ran is None else [f"{ran} in a row"])

    def spread(values: list) -> str:
        at = {"least": 0, "middle": len(values) // 2, "95 %": len(values) * 95 // 100, "most": -1}
        return ", ".join(f"{word} {values[i]}" for word, i in at.items()) if values else "none"

    bad = usable.skipped
    reasons = Counter(f"{x.field}: {x.reason}" for x in bad)
    lines = [
        f"rows      {len(usable)} usable + {len(bad)} left out",
        f"columns   {', '.join(columns)}",
        *(f"{name:<9} {word}: {n}" for name in count for word, n in count[name].most_common()),
        f"images    {spread([name for _, name in sorted(sizes)])}",
        f"tokens    {spread(sorted(tokens))}; an image has at most {budget_of(policy)} pixels"
        if policy else "tokens    give --model (and --max-pixels) to see lengths",
        *(f"left out  row {x.row}, {x.field}: {x.reason}" for x in bad[:20]),
        *(f"          and {n} rows in all for {why}" for why, n in reasons.most_common(5) if n > 1),
    ]  # fmt: skip
    return "\n".join(lines)


def budget_of(policy: Policy) -> int:
    return policy.image_processor.size["longest_edge"]


# The command line


def check_out(out: Path, where: str) -> None:
    """A filter must not write over what it reads."""
    if out.suffix != ".parquet" or out.is_dir():
        raise ValueError(f"--out {out}: expected the name of a file that ends in .parquet")
    source = Path(where if Path(where).exists() else where.rsplit(":", 1)[0]).resolve()
    for file in (out, out.with_suffix(".jsonl"), out.with_suffix(".txt")):
        if file.resolve().is_relative_to(source):  # it is the input, or lies in that folder
            raise ValueError(f"--out {out} would write {file} over its input {where}, or into it: "
                             f"give another --out")  # fmt: skip


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        "data.py", allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        description="Look at a data set, or filter it as the paper does. WHERE is a file, a folder "
        "or a hub name. Filters write OUT.parquet, to be filtered further or trained on, and "
        "OUT.txt, what they left out and why; they keep what they found in OUT.jsonl, and go on "
        "from there when they are run again. Under accelerate launch the difficulty filter uses "
        "every GPU; run it once more without, to write OUT.",
    )  # fmt: skip
    what = parser.add_mutually_exclusive_group(required=True)
    for flag, help in {
        "describe": "rows, kinds, sizes, lengths, and what cannot be used",
        "drop-sources": "drop sources of external knowledge",
        "check-labels": "ask the judge server about labels; settle its doubts by hand",
        "difficulty": "drop what a model (nearly) always answers right",
    }.items():
        what.add_argument("--" + flag, metavar="WHERE", help=help)
    add = parser.add_argument
    add("--out", type=Path, default=Path("filtered.parquet"), help="what a filter writes")
    add("--external", default=",".join(EXTERNAL), help="words in the names of sources to drop")
    add("--judge-url", help="OpenAI-compatible server, such as http://127.0.0.1:8000/v1")
    add("--judge-model", help="its model; the paper checks labels with Qwen2.5-VL-32B")
    add("--model", help="checkpoint that counts tokens or plays; the paper: Qwen2.5-VL-7B-Instruct")
    add("--max-pixels", type=int, help="pixel budget of one image; none: the checkpoint's")
    add("--max-length", type=int, default=16384, help="tokens of a whole trajectory")
    add("--max-new-tokens", type=int, default=1024, help="tokens of one turn")
    add("--turns", type=int, default=5, help="turns of one try; 1: without tools")
    add("--samples", type=int, default=8, help="tries per question")
    add("--max-accuracy", type=float, default=0.9, help="share of right tries that is still kept")
    add("--batch", type=int, default=16, help="questions that are played together")
    add("--allow-weak-sandbox", action="store_true", help="play on a system that cannot confine")
    options = parser.parse_args(argv)
    try:
        print(run(options))
    except (ValueError, FileNotFoundError) as error:
        raise SystemExit(f"data.py: {error}") from error


def run(options: argparse.Namespace) -> str:
    import torch

    from rewards import ChatJudge
    from rollout import Rules, check_fits, load_policy

    if options.check_labels and not (options.judge_url and options.judge_model):
        raise ValueError("--check-labels needs --judge-url and --judge-model")
    if options.difficulty and not options.model:
        raise ValueError("--difficulty needs --model")
    given = (options.describe, options.drop_sources, options.check_labels, options.difficulty)
    where = next(word for word in given if word is not None)
    if not where:
        raise ValueError("WHERE is empty: expected a file, a folder or a hub name")
    for name, number in (("samples", options.samples), ("batch", options.batch)):
        if number < 1:
            raise ValueError(f"--{name} is at least 1, got {number}")
    if not options.describe:
        check_out(options.out, where)
    rules = Rules(turns=options.turns, max_length=options.max_length,
                  max_new_tokens=options.max_new_tokens,
                  allow_weak_sandbox=options.allow_weak_sandbox)  # fmt: skip
    policy = None
    if options.model:
        place = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
        plays = options.difficulty is not None
        policy = load_policy(options.model, place, options.max_pixels, weights=plays)
        if plays and place != "cpu":
            policy.model.to(torch.bfloat16)
    if options.describe:
        return describe(options.describe, policy, rules)
    judge = ChatJudge(options.judge_url, options.judge_model) if options.judge_url else None
    fits = options.difficulty and (
        lambda s: check_fits(policy, s, policy.encode_prompt(s, False), rules)
    )
    samples, rows = load_rl(where, fits=fits), read_rows(where)
    record = options.out.with_suffix(".jsonl")
    if options.drop_sources:
        verdicts = by_source(rows, samples.keys, options.external.split(","))
    elif options.check_labels:
        verdicts = by_label(samples, judge, record)
    else:
        verdicts = by_difficulty(samples, policy, rules, record, options.model, options.samples,
                                 options.max_accuracy, judge, options.batch)  # fmt: skip
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        return f"one part is done: run the same command once more, alone, to write {options.out}"
    counts = write_sieved(options.out, samples, rows, verdicts)
    said = ", ".join(f"{word} {n}" for word, n in counts.most_common())
    return f"{len(rows)} rows: {said}, unusable {len(samples.skipped)}; see {options.out} and .txt"


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
    import data  # the module that the others import too: else there would be two of each class

    print(data.demo()) if len(sys.argv) == 1 else data.main(sys.argv[1:])
