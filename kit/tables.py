"""
tables.py: public data sets: their rows, the pictures in these, and which rows can be used.

Concept     A data set is a file, a folder or a name on the hub; read_rows makes one sequence of
            rows of it. A picture is bytes, text, a path or a dict; read_image opens them all.
            Usable checks every row before training starts, its picture included, and leaves none
            out in silence. For 300,000 rows this takes minutes, so the findings are kept.
Paper       nothing: the forms are those of the public files
In          a path or hub name; a cell of a row; a check of one row, which raises Bad
Out         rows as dicts; upright, opaque RGB pictures; what the usable rows become
Left out    what a column means (schemas.py, benchmarks.py); streaming from the hub
Read next   schemas.py (the fields of a question), data.load_rl (a check, and what rows become)
"""

import base64
import fcntl
import glob
import hashlib
import inspect
import io
import json
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

SUFFIXES = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".tsv": "csv", ".csv": "csv"}
PICTURES = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # the formats we let PIL open


class Lazy(Sequence):
    """make(key) for every key, each time it is asked for and not kept: the pictures of 50,000
    questions fit in no memory. A slice is Lazy too."""

    def __init__(self, make: Callable, keys: Sequence) -> None:
        self.make, self.keys = make, keys

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, i):
        chosen = self.keys[i]
        return Lazy(self.make, chosen) if isinstance(i, slice) else self.make(chosen)


class Rows(Lazy):
    """The rows of one or several files, as dicts. Image cells stay as they are stored; `folder`
    is what relative paths in them start from. `version` is another one when a file is."""

    def __init__(self, files: Sequence[Path], folder: Path) -> None:
        tables = [*map(_table, files)]
        places = [(table, i) for table in tables for i in range(len(table))]
        super().__init__(lambda place: place[0][place[1]], places)
        facts = [(str(file.absolute()), file.stat()) for file in files]
        self.version = [(path, fact.st_mtime_ns, fact.st_size) for path, fact in facts]
        self.folder = folder


def read_rows(where: str | Path) -> Rows:
    """A parquet, jsonl, json, tsv or csv file, a folder of them, or a data set on the hub.

    Behind a colon may stand a split: only files (or folders) whose name begins with this word, or
    with one of several, as in "Kwai-Keye/Thyme-SFT:wo_thinking+2round". Files may differ in their
    columns. Where a folder holds several kinds of file, those of the first kind above count. Cells
    of tsv and csv are text, empty ones "". Raises FileNotFoundError if there is no such data, what
    the hub says (an OSError), and ValueError for a file that cannot be read or has no rows.
    """
    where, split = str(where), ""
    if ":" in where and not Path(where).exists():
        where, split = where.rsplit(":", 1)
    words, root = [word for word in split.split("+") if word], Path(where)
    if not root.exists():
        if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", where) is None:
            raise FileNotFoundError(f"no data in {where}: no file, no folder, no hub name (a/b)")
        from huggingface_hub import snapshot_download

        patterns = [folder + word + "*" for word in words for folder in ("", "*/")] or None
        root = Path(snapshot_download(where, repo_type="dataset", allow_patterns=patterns))
    if root.is_file():
        return Rows([root], root.parent)
    begins = "|".join(re.escape(word) + "(?![a-z0-9])" for word in words)
    path = re.compile(rf"(?!\.)(.*/)?({begins})")  # not in a hidden folder
    for suffix in SUFFIXES:
        files = sorted(root.rglob("*" + suffix))
        if files := [file for file in files if path.match(file.relative_to(root).as_posix())]:
            return Rows(files, root)
    raise FileNotFoundError(f"no {', '.join(SUFFIXES)} in {root} whose name begins with {split!r}")


def _table(file: Path):
    """One file as a `datasets.Dataset` (a memory-mapped copy in its cache), nothing decoded."""
    import datasets  # here: it takes seconds, which the toy need not spend

    kind, options = SUFFIXES.get(file.suffix), {}
    if kind is None or file.stat().st_size == 0:
        raise ValueError(f"{file} is empty, or does not end in one of {', '.join(SUFFIXES)}")
    try:
        if kind == "csv":  # text throughout: no 007 -> 7, no option "None" -> missing
            import pandas

            options = dict(sep="\t" if file.suffix == ".tsv" else ",", keep_default_na=False)
            names = pandas.read_csv(file, sep=options["sep"], nrows=0).columns
            options["features"] = datasets.Features({n: datasets.Value("string") for n in names})
            options["chunksize"] = 50  # rows in memory: a picture of 8K is 20 MB of base64
        path = glob.escape(str(file.absolute()))  # a name may hold brackets
        table = datasets.load_dataset(kind, data_files=path, split="train", **options)
    except (datasets.exceptions.DatasetGenerationError, ValueError) as error:
        raise ValueError(f"{file} is broken or has no rows: {error.__cause__ or error}") from error
    features = [table.info.features]  # (table.features is a copy)
    for feature in features:  # pictures stay undecoded, however deep they lie
        if isinstance(feature, datasets.Image):
            feature.decode = False
        inner = feature if isinstance(feature, dict) else {"": getattr(feature, "feature", None)}
        features += filter(None, inner.values())
    return table


# Pictures


def upright_rgb(image: Image.Image) -> Image.Image:
    """EXIF rotation applied, transparency on white, RGB; the same object if it is that already."""
    if image.mode == "RGB" and not (image.getexif() or image.has_transparency_data):
        return image
    image = ImageOps.exif_transpose(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def read_image(cell: object, folder: Path | str = ".") -> Image.Image:
    """Any public form of an image cell, made upright, opaque and RGB: bytes, a dict with "bytes"
    or "path", a path (relative to `folder`), base64, a data URL, or a list of one of these.
    ValueError says what came instead."""
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


# Which rows can be used, found out once


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
    """What the usable ones of `total` rows become; `skipped` lists the others. len(self) and
    len(self.skipped) sum to `total`.

    check   check(i) raises Bad if row i cannot be used
    make    make(i) makes what row i becomes, each time it is asked for
    on_bad  "skip" lists bad rows; "stop" raises ValueError, which names the first of them
    title   the name of the data, for that error and the progress bar
    key     all that decides what `check` finds, in a form that repr shows: Rows.version, limits,
            a tokenizer. With an equal key the findings are read, not made. None: they are not kept
    """

    def __init__(self, total: int, check, make, on_bad: str, title: str, key=None) -> None:
        self.skipped = bad_rows(total, check, title, key)
        if self.skipped and on_bad != "skip":
            row, field, reason = self.skipped[0]
            raise ValueError(f"{title}: row {row}, {field}: {reason}")
        bad = {skipped.row for skipped in self.skipped}
        super().__init__(make, [i for i in range(total) if i not in bad])


def bad_rows(total: int, check: Callable[[int], object], title: str, key=None) -> list[Skipped]:
    """The rows for which `check` raises Bad, in order (see Usable).

    They are kept in the cache of `datasets`. The file's name is a hash of the key, and of the code
    of kit/ and of the file that `check` stands in: other code may find other things.
    """

    def finding(i: int) -> Skipped | None:
        try:
            check(i)
        except Bad as bad:
            return Skipped(i, bad.field, bad.reason)

    def found() -> list[Skipped]:
        with ThreadPoolExecutor(8) as pool:  # decoding a picture lets other threads run
            return [*filter(None, tqdm(pool.map(finding, range(total)), title, total))]

    if key is None:
        return found()
    import datasets  # here: it takes seconds, which the toy need not spend

    files = [*sorted(Path(__file__).parent.glob("*.py")), Path(inspect.getfile(check))]
    code = [file.read_bytes() for file in files]
    name = hashlib.sha256(repr((code, total, key)).encode()).hexdigest()
    file = Path(datasets.config.HF_DATASETS_CACHE) / "usable" / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process checks; the others read what it found
        if not file.exists():
            part = file.with_suffix(".part")
            part.write_text(json.dumps(found()))
            os.replace(part, file)
    kept = [Skipped(*bad) for bad in json.loads(file.read_text())]
    # A picture may lie in a file of its own, and be there by now.
    again = [finding(bad.row) if bad.field == "image" else bad for bad in kept]
    return [*filter(None, again)]
