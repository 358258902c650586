"""
tables.py: every public form of a data set and its pictures, read in one way, and checked once.

Concept     A data set is a file, a folder or a name on the hub: read_rows makes one sequence of
            rows of it. A picture is bytes, text, a path or a dict: read_image opens them all.
            Every row is checked before training starts, its picture included, and none is left out
            in silence. For 300,000 rows this takes minutes. So the findings are kept: a second
            start, a resumed run and the other processes read them, and decode nothing.
Paper       nothing: the forms are those of the public files
In          a path or hub name; a cell of a row; a check of one row, which raises Bad
Out         rows as dicts; upright, opaque RGB pictures; what usable rows become, and the others
Left out    what a column means (schemas.py, benchmarks.py); streaming from the hub
Read next   schemas.py (the fields of a question), data.load_rl (what its rows become)
"""

from __future__ import annotations

import base64
import fcntl
import glob
import hashlib
import inspect
import io
import os
import re
import reprlib
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from kit.pictures import upright_rgb

SUFFIXES = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".tsv": "csv", ".csv": "csv"}
PICTURES = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM")  # PIL may open
# Of a dict's keys the first counts: beside bytes, a path only says where they came from.
CELL_KEYS = ("bytes", "path", "image_url", "image", "url", "base64", "data", "source")


class Lazy(Sequence):
    """make(key) for every key, each time it is asked for: 50,000 pictures fit in no memory."""

    def __init__(self, make: Callable, keys: Sequence) -> None:
        self.make, self.keys = make, keys

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, i):
        chosen = self.keys[i]
        return Lazy(self.make, chosen) if isinstance(i, slice) else self.make(chosen)


class Rows(Lazy):
    """The rows of one or several tables, as dicts. Image cells stay as they are stored; `folder`
    is what relative paths in them start from. `version` lists path, time of change and size of
    the tables' files, so it is another one when a file is."""

    def __init__(
        self, tables: Sequence[Sequence[dict]], folder: Path, files: Sequence[Path] = ()
    ) -> None:
        places = [(table, i) for table in tables for i in range(len(table))]
        super().__init__(lambda place: place[0][place[1]], places)
        facts = [(str(file.absolute()), file.stat()) for file in files]
        self.folder = folder
        self.version = [(path, fact.st_mtime_ns, fact.st_size) for path, fact in facts]

    def fingerprint(self) -> str:
        """The number of rows, and a hash of the tables' files in their order: the same for a copy,
        whose path and time are others. Of a file above 64 MB the hash takes its size and 64 parts
        of 1 MB, evenly spread, as a start should not read 100 GB. Files of pictures do not."""
        digest, part = hashlib.sha256(), 1 << 20
        for path, _, size in self.version:
            digest.update(f"{size} ".encode())
            with open(path, "rb") as file:
                for place in range(0, size, max(part, size // 64)):
                    file.seek(place)
                    digest.update(file.read(part))
        return f"{len(self)} rows ({digest.hexdigest()[:16]})"


def read_rows(where: str | Path) -> Rows:
    """A parquet, jsonl, json, tsv or csv file, a folder of them, or a data set on the hub.

    Behind a colon may stand a split: only files (or folders) whose name begins with this word, or
    with one of several, as in "Kwai-Keye/Thyme-SFT:wo_thinking+2round". Files may differ in their
    columns. Where a folder holds several kinds of file, those of the first kind above count. Cells
    of tsv and csv are text, empty ones "". Raises FileNotFoundError if there is no such data, and
    ValueError for a file that cannot be read.
    """
    where, split = str(where), ""
    if ":" in where and not Path(where).exists():
        where, split = where.rsplit(":", 1)
    root = Path(where) if Path(where).exists() else _download(where, split)
    if root.is_file():
        return Rows([_table(root)], root.parent, [root])
    begins = "|".join(re.escape(word) + "(?![a-z0-9])" for word in split.split("+") if word)
    for suffix in SUFFIXES:
        inside = [file.relative_to(root).parts for file in sorted(root.rglob("*" + suffix))]
        visible = [parts for parts in inside if not parts[0].startswith(".")]
        named = [parts for parts in visible if any(re.match(begins, part) for part in parts)]
        if files := [root.joinpath(*parts) for parts in named]:
            return Rows([*map(_table, files)], root, files)
    whose = f" whose name begins with {split!r}" if split else ""
    raise FileNotFoundError(f"no {', '.join(SUFFIXES)} file{whose} in {root}")


def _download(name: str, split: str) -> Path:
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) is None:
        raise FileNotFoundError(f"no data in {name}: neither a file, a folder nor a hub name (a/b)")
    from huggingface_hub import snapshot_download

    patterns = [p + word + "*" for word in split.split("+") for p in ("", "*/")]
    try:
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


def read_image(cell: object, folder: Path | str = ".", whole: bool = True) -> Image.Image:
    """Any public form of an image cell, made upright, opaque and RGB: bytes, a path (relative to
    `folder`), base64, a data URL, a dict with one of CELL_KEYS, or a list of one of these. whole:
    False to read the head alone of one above 64 KB. ValueError says what came instead."""
    encoded = io.BytesIO(image_bytes(cell, folder))
    try:
        image = Image.open(encoded, formats=PICTURES)
        return upright_rgb(image) if whole or encoded.getbuffer().nbytes < 65536 else image
    except (OSError, ValueError, TypeError, SyntaxError, EOFError, struct.error,
            Image.DecompressionBombError) as error:  # fmt: skip
        # PIL names an object of ours, and not the formats.
        why = re.sub("image file <.*>", f"it as one of {', '.join(PICTURES)}", str(error))
        raise ValueError(f"no image that can be read in {reprlib.repr(cell)}: {why}") from error


def image_bytes(cell: object, folder: Path | str = ".") -> bytes:
    """The encoded image that a cell holds or names (see read_image)."""
    if isinstance(cell, dict):
        return image_bytes(next(filter(None, map(cell.get, CELL_KEYS)), None), folder)
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
    text = re.sub(r"(?i)^\s*data:[^,]*,|\s", "", cell).translate(str.maketrans("-_", "+/"))
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except ValueError:
        raise ValueError(f"no such file, and no base64: {cell[:200]!r} in {folder}") from None


# Which rows can be used


class Bad(ValueError):
    """What is wrong with one field of one row."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field, self.reason = field, reason


@contextmanager
def blaming(field: str) -> Iterator[None]:
    """A ValueError inside becomes Bad, with this field to blame; a Bad keeps its own."""
    try:
        yield
    except Bad:
        raise
    except ValueError as error:
        raise Bad(field, str(error)) from error


class Skipped(NamedTuple):
    row: int  # from 0, over all files
    field: str
    reason: str


class Usable(Lazy):
    """What the usable ones of some rows become; `skipped` lists the others.

    rows    their numbers
    check   check(i) raises Bad if row i cannot be used
    make    make(i) makes what row i becomes, each time it is asked for
    on_bad  "skip" lists bad rows; "stop" raises ValueError, which names the first of them
    title   the name of the data, for that error and the progress bar
    key     all that decides what `check` finds, in a form that repr shows: Rows.version, limits,
            a tokenizer. With an equal key the findings are read, not made. None: they are not kept
    """

    def __init__(
        self, rows: Sequence, check: Callable, make: Callable, on_bad: str, title: str, key=None
    ) -> None:
        if on_bad not in ("skip", "stop"):
            raise ValueError(f"on_bad is 'skip' or 'stop', got {on_bad!r}")
        self.skipped = bad_rows([*rows], check, title, key)
        if self.skipped and on_bad == "stop":
            raise ValueError("{}: row {}, {}: {}".format(title, *self.skipped[0]))
        bad = {skipped.row for skipped in self.skipped}
        super().__init__(make, [i for i in rows if i not in bad])


def bad_rows(rows: list[int], check: Callable, title: str, key) -> list[Skipped]:
    """The rows for which `check` raises Bad, in order (see Usable). Dataset.map keeps what it finds
    in the cache of `datasets`, by a hash of the key, of the code of kit/ and of the file that
    `check` stands in: other code may find other things."""
    import datasets  # here: it takes seconds, which the toy need not spend

    def checked(i: int) -> tuple[str, str]:
        try:
            check(i)
        except Bad as bad:
            return bad.field, bad.reason
        return "", ""  # it is usable

    def findings(batch: dict) -> dict:
        fields, reasons = zip(*pool.map(checked, batch["row"]))
        return {"field": [*fields], "reason": [*reasons]}

    files = [*sorted(Path(__file__).parent.glob("*.py")), Path(inspect.getfile(check))]
    code = [file.read_bytes() for file in files]
    name = hashlib.sha256(repr((code, rows, key)).encode()).hexdigest()
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "usable"
    folder.mkdir(parents=True, exist_ok=True)
    file = None if key is None else str(folder / f"{name}.arrow")
    # Threads, as decoding a picture lets others run.
    with ThreadPoolExecutor(8) as pool, open(folder / f"{name}.lock", "w") as lock:
        if file:  # one process checks; the others wait, and then read what it found
            fcntl.flock(lock, fcntl.LOCK_EX)
        found = datasets.Dataset.from_dict({"row": rows}).map(
            findings, batched=True, cache_file_name=file, new_fingerprint=name, desc=title
        )
    skipped = [Skipped(**row) for row in found.to_list() if row.get("field")]
    # A picture may lie in a file of its own, and be there by now.
    again = [(s.row, *checked(s.row)) if s.field == "image" else s for s in skipped]
    return [Skipped(*finding) for finding in again if finding[1]]
