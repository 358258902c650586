"""python -m pytest tests/test_caches.py      at once: rows of a cache, together and apart"""

import weakref

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

from kit.caches import apart, left_pad, packed, together


def rows_of(lengths, layers=3):
    return [[tuple(torch.randn(2, n, 2, 4)) for _ in range(layers)] for n in lengths]


def test_rows_come_back_as_they_were():
    rows = rows_of([3, 5, 1])
    before = [list(row) for row in rows]
    cache = together(rows)
    assert rows == [[], [], []] and cache.get_seq_length() == 5
    assert cache.layers[0].keys.shape == (3, 2, 5, 4)
    assert torch.equal(cache.layers[2].values[1, :, 4], before[1][2][1][4])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1]])
    for row, was in zip(apart(cache, mask), before, strict=True):  # a sixth slot is not there yet
        for pair, old in zip(row, was, strict=True):
            assert all(map(torch.equal, pair, old))
    assert together([[], []]).get_seq_length() == 0  # rows of which nothing was read


def test_no_more_than_one_layer_is_held_twice(monkeypatch):
    rows, alive, update = rows_of([3, 5], layers=4), [], DynamicCache.update
    each = [[weakref.ref(x) for row in rows for x in row[layer]] for layer in range(4)]

    def noting(cache, *args):
        alive.append([any(x() is not None for x in layer) for layer in each])
        return update(cache, *args)

    monkeypatch.setattr(DynamicCache, "update", noting)
    cache = together(rows)
    assert alive[1] == [False, True, True, True] and alive[3] == [False, False, False, True]
    whole = [weakref.ref(x) for layer in cache.layers for x in (layer.keys, layer.values)]
    apart(cache, torch.ones(2, 5))
    assert not any(x() is not None for x in whole)


def test_rows_share_tensors_but_keep_their_own():
    (row,) = rows_of([4])
    cache = together([[*row], [*row]])
    cache.layers[0].keys[0] = 0.0
    assert row[0][0].abs().sum() > 0 and torch.equal(cache.layers[0].keys[1, :, 0], row[0][0][0])


def test_left_pad():
    ids, mask = left_pad([[5, 6, 7], [8]], 9, torch.device("cpu"))
    assert ids.tolist() == [[5, 6, 7], [9, 9, 8]] and mask.tolist() == [[1, 1, 1], [0, 0, 1]]


@given(st.lists(st.integers(1, 9)), st.integers(1, 20))
def test_parts_are_as_large_as_their_budget_allows_and_nothing_is_cut_or_lost(items, budget):
    parts = [*packed(items, sum, budget)]
    assert sum(parts, []) == items and all(parts)
    assert all(sum(part) <= budget or len(part) == 1 for part in parts)
    assert all(sum(part) + after[0] > budget for part, after in zip(parts, parts[1:]))
