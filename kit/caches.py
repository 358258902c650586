"""
caches.py: the KV cache of each row by itself; put together for a call, cut apart after it.

Concept     What attention keeps of a row's tokens belongs to that row alone. Held row by row, in
            its true length, it lets rows come and go between two calls of the model. A call wants
            one tensor for all rows, so the shorter ones are padded on the left. Both ways go layer
            by layer: at no time is more than one layer held twice.
Paper       nothing: how many rows speak at a time is not part of the method
In          rows; or a cache of transformers after a call, and which of its slots each row fills
Out         a cache of transformers; or rows again
Left out    pages, caches on disk, sliding windows
Read next   rollout.py (read and continue_turns use them)
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

Kept = list[tuple[Tensor, Tensor]]  # of one row: keys and values [n, heads, width] of each layer


def together(rows: list[Kept]) -> DynamicCache:
    """B rows as one cache, [B, heads, longest, width] a layer, padded on the left. It takes what
    the rows hold: they are empty afterwards. Rows may share tensors, but not lists."""
    cache = DynamicCache()
    for layer in range(len(rows[0])):
        pairs = zip(*[row.pop(0) for row in rows])  # the keys of all rows, then the values
        padded = [pad_sequence(each, batch_first=True, padding_side="left") for each in pairs]
        cache.update(*(each.transpose(1, 2) for each in padded), layer)
    return cache


def apart(cache: DynamicCache, mask: Tensor) -> list[Kept]:
    """The rows of a cache: each has the slots where mask [B, at least all] is 1. Empties it."""
    filled = [row.nonzero()[:, 0] for row in mask[:, : cache.get_seq_length()]]
    rows: list[Kept] = [[] for _ in filled]
    for layer in cache.layers:
        for b, (row, slots) in enumerate(zip(rows, filled)):
            pair = layer.keys[b][:, slots], layer.values[b][:, slots]  # [heads, n, width], copies
            row.append(tuple(each.transpose(0, 1) for each in pair))
        layer.keys = layer.values = None
    return rows


def left_pad(rows: list[list[int]], fill: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Lists of ids -> (ids, mask), both [B, L]. Left: the last column is real for every row."""
    width = max(map(len, rows))
    ids = [[fill] * (width - len(row)) + row for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor([ids, mask], dtype=torch.long, device=device).unbind()


def packed(items: list, size: Callable[[list], int], budget: int) -> Iterator[list]:
    """The items in their order, as many at a time as have a `size` within the budget together.
    One that is above it by itself goes alone."""
    part = []
    for item in items:
        if part and size([*part, item]) > budget:
            yield part
            part = []
        part.append(item)
    if part:
        yield part
