"""
records.py: JSON lines with pictures beside them, in files that no kill can tear.

Concept     A long job writes its records wave by wave. The file of a wave appears in one motion: a
            job that was killed goes on with those that are not there, and joins all at the end.
Paper       nothing: trajectories.jsonl is written and read in this way
In          records: dicts of what JSON knows, of PIL images, and of objects with fields
Out         NAME.jsonl and images/ beside it; the records again, each made when it is asked for
Left out    a record that is changed after it was written
Read next   evaluate.py (which describes trajectories.jsonl), page.py (which shows its episodes)
"""

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from PIL import Image

from kit.tables import Lazy


class Unusable(ValueError):
    """Records that are there already, and that a job cannot go on from."""


def write(path: Path, records: Iterable[dict]) -> None:
    """Write a file in one motion. An image becomes the name of a PNG file, made of what it shows:
    many records share an image, and an id may hold any character."""
    (path.parent / "images").mkdir(parents=True, exist_ok=True)

    def plain(thing: object) -> object:  # for what json cannot write by itself
        if not isinstance(thing, Image.Image):
            return vars(thing)
        content = hashlib.sha256(repr((thing.mode, thing.size)).encode() + thing.tobytes())
        name = f"images/{content.hexdigest()[:24]}.png"
        if not (png := path.parent / name).exists():
            thing.save(part := f"{png}.{os.getpid()}", "png", compress_level=1)
            os.replace(part, png)
        return name

    with open(part := path.with_suffix(".part"), "w", encoding="utf-8") as file:
        file.writelines(json.dumps(record, default=plain) + "\n" for record in records)
    os.replace(part, path)


def opened(folder: Path, name: str) -> Image.Image:
    """The picture of that name, decoded when first looked at, with no file held open. With empty
    EXIF data set, PIL need not decode it at once in search of some."""
    image = Image.open(io.BytesIO((folder / name).read_bytes()))
    image.info["exif"] = b""
    return image


class Records(Lazy):
    """The records of a file, or what make(record, folder of the file) makes of them, each when it
    is asked for: the lines are in memory, the pictures are not.

    Raises FileNotFoundError, and Unusable for a line that is no record or that `make` cannot use.
    """

    def __init__(self, path: Path, make: Callable = lambda record, folder: record) -> None:
        def read(line: tuple[int, bytes]):
            try:
                return make(json.loads(line[1]), path.parent)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise Unusable(
                    f"{path}, line {line[0]}: expected an episode as evaluate.py describes it, but "
                    f"{type(error).__name__}: {error}; delete the file and play the episodes again"
                ) from error

        super().__init__(read, list(enumerate(path.read_bytes().splitlines(), start=1)))


def file_of(path: Path, wave: int) -> Path:
    return path.with_stem(f"{path.stem}-{wave}")


def waves_left(path: Path, run: str, n: int) -> list[int]:
    """Which of n waves are not written yet. Raises Unusable for records of another run."""
    for there in sorted(path.parent.glob(f"{path.stem}*.jsonl")):
        if any(found != run for found in Records(there, lambda record, _: record["run"])[:1]):
            raise Unusable(
                f"{there} is from another evaluation (another judge, other weights, questions or "
                f"settings): give --out another folder, or delete it"
            )
    return [i for i in range(n) if not (path.exists() or file_of(path, i).exists())]


def join(path: Path, n: int) -> None:
    """Make one file of the n waves, in their order, and delete theirs."""
    if not path.exists():
        with open(part := path.with_suffix(".part"), "wb") as whole:
            whole.writelines(file_of(path, i).read_bytes() for i in range(n))
        os.replace(part, path)
    for file in path.parent.glob(f"{path.stem}-*.jsonl"):
        file.unlink()
