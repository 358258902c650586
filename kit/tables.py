"""
tables.py: files, rows and pictures: every public form of a data set, read in one way.

Concept     Files, rows and pictures: every public form of a data set, read in one way.
Paper       nothing
In          
Out         
Left out    
Read next   
"""

from __future__ import annotations

import base64
import glob
import io
import os
import re
import reprlib
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageOps
from tqdm import tqdm


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
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) is None:
        raise FileNotFoundError(f"no data in {name}: neither a file, a folder nor a hub name (a/b)")
    from huggingface_hub import snapshot_download

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
