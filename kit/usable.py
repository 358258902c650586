"""
usable.py: which rows of a data set can be used, found out once.

Concept     Every row is checked before training starts, its picture included, so that training
            meets no surprise; and no row is left out in silence. For 300,000 rows with pictures
            this takes minutes. So the findings are kept: a second start, a resumed run and the
            other processes read them, and decode nothing.
Paper       nothing
In          a check of one row, which raises Bad
Out         Usable: what the usable rows become, made when asked for, and a list of the others
Left out    fields of rows (schemas.py), and files (tables.py)
Read next   tables.py (where rows come from), data.load_rl (a check, and what its rows become)
"""

from __future__ import annotations

import fcntl
import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from kit.tables import Lazy


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
        self,
        rows: Iterable[int],
        check: Callable,
        make: Callable,
        on_bad: str,
        title: str,
        key=None,
    ) -> None:
        if on_bad not in ("skip", "stop"):
            raise ValueError(f"on_bad is 'skip' or 'stop', got {on_bad!r}")
        self.skipped = bad_rows([*rows], check, title, key)
        if self.skipped and on_bad == "stop":
            row, field, reason = self.skipped[0]
            raise ValueError(f"{title}: row {row}, {field}: {reason}")
        bad = {skipped.row for skipped in self.skipped}
        super().__init__(make, [i for i in rows if i not in bad])


def bad_rows(rows: list[int], check: Callable, title: str, key=None) -> list[Skipped]:
    """The rows for which `check` raises Bad, in order (see Usable).

    Dataset.map keeps the field and reason of each row, empty where it is usable, in the cache of
    `datasets`. Its name is a hash of the key, and of the code of kit/ and of the file that `check`
    stands in: other code may find other things.
    """
    import datasets  # here: it takes seconds, which the toy need not spend

    def checked(i: int) -> tuple[str, str]:
        try:
            check(i)
        except Bad as bad:
            return bad.field, bad.reason
        return "", ""

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
