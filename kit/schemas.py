"""
schemas.py: the columns of public data sets, and which field of a question each one holds.

Concept     The columns of public data sets, and which field of a question each one holds.
Paper       nothing
In          
Out         
Left out    
Read next   
"""

from __future__ import annotations

import re
from collections.abc import Iterable

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
