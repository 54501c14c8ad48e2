"""The cache against a list of tokens per row: what was written, kept and moved."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_core.cache import TreeCache
from medusa_core.errors import InputError

LAYERS, HEADS, SIZE = 2, 2, 3
CPU = torch.device("cpu")


def states(tokens: list[list[int]], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values that name their token, layer and head; values differ from keys."""
    base = torch.tensor(tokens, dtype=torch.float32)[:, None, :, None].expand(-1, HEADS, -1, SIZE)
    keys = base + 1000 * layer + 0.25 * torch.arange(HEADS)[:, None, None]
    return keys.contiguous(), -keys


def write(cache: TreeCache, first_row: int, lengths: list[int], tokens: list[list[int]]) -> None:
    cache.place(first_row, lengths, len(tokens[0]), CPU)
    for layer in range(LAYERS):
        keys, values = states(tokens, layer)
        out_keys, out_values = cache.update(keys, values, layer)
        extent = max(lengths) + len(tokens[0])
        assert out_keys.shape == out_values.shape == (len(lengths), HEADS, extent, SIZE)
        assert cache.layers[layer].get_mask_sizes(len(tokens[0])) == (extent, 0)


def check(cache: TreeCache, row: int, tokens: list[int]) -> None:
    for layer in range(LAYERS):
        keys, values = states([tokens], layer)
        stored = cache.layers[layer]
        assert torch.equal(stored.keys[row, :, : len(tokens)], keys[0]), (row, layer)
        assert torch.equal(stored.values[row, :, : len(tokens)], values[0]), (row, layer)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.data())
def test_any_sequence_of_steps_leaves_each_row_its_accepted_tokens(data: st.DataObject) -> None:
    """Catches a path kept for the wrong row, a source overwritten before it was read, and rows of different lengths
    written at one place."""
    rows, slots = data.draw(st.integers(1, 3)), 40
    cache = TreeCache(layers=LAYERS, rows=rows, slots=slots)
    held = [list(range(100 * r, 100 * r + data.draw(st.integers(1, 6)))) for r in range(rows)]
    for row, tokens in enumerate(held):
        write(cache, row, [0], [tokens])
    fresh = 1000
    for _ in range(data.draw(st.integers(1, 4))):
        nodes = data.draw(st.integers(1, 7))
        lengths = [len(tokens) for tokens in held]
        drafted = [list(range(fresh + 10 * r, fresh + 10 * r + nodes)) for r in range(rows)]
        fresh += 100
        write(cache, 0, lengths, drafted)
        # Strictly rising node numbers from the root, the last repeated up to the tree's depth, as Tree.paths_ND has.
        kept = [sorted({0, *data.draw(st.sets(st.integers(0, nodes - 1), max_size=4))}) for _ in range(rows)]
        depth = max(len(path) for path in kept)
        cache.compact(lengths, torch.tensor([path + [path[-1]] * (depth - len(path)) for path in kept]))
        for row in range(rows):
            held[row] += [drafted[row][node] for node in kept[row]]
            check(cache, row, held[row])


def test_overlapping_source_and_target_slots_are_safe() -> None:
    """Catches a copy in place that reads what it has just written: nodes 1,2,3 move to 0+1.. one at a time."""
    cache = TreeCache(layers=LAYERS, rows=1, slots=12)
    write(cache, 0, [0], [[1, 2]])
    write(cache, 0, [2], [[10, 11, 12, 13, 14]])
    cache.compact([2], torch.tensor([[0, 2, 3, 4]]))
    check(cache, 0, [1, 2, 10, 12, 13, 14])


def test_a_path_that_lies_in_place_moves_nothing() -> None:
    """Catches the shortcut taken though only one of two rows lies in place."""
    cache = TreeCache(layers=LAYERS, rows=2, slots=12)
    write(cache, 0, [0], [[1]])
    write(cache, 1, [0], [[5]])
    write(cache, 0, [1, 1], [[10, 11, 12], [20, 21, 22]])
    cache.compact([1, 1], torch.tensor([[0, 1], [0, 2]]))
    check(cache, 0, [1, 10, 11])
    check(cache, 1, [5, 20, 22])


def test_a_moved_row_carries_its_whole_prefix() -> None:
    """Catches a replaced row that attends to the leaver's keys."""
    cache = TreeCache(layers=LAYERS, rows=3, slots=10)
    write(cache, 0, [0], [[1, 2, 3, 4, 5]])
    write(cache, 1, [0], [[6]])
    write(cache, 2, [0], [[7, 8, 9]])
    cache.move_row(2, 0, 3)
    check(cache, 0, [7, 8, 9, 4, 5])
    check(cache, 1, [6])


@pytest.mark.parametrize(("lengths", "nodes", "needed"), [([4], 7, 11), ([2, 8], 3, 11)])
def test_a_step_that_does_not_fit_is_refused_before_it_writes(lengths: list[int], nodes: int, needed: int) -> None:
    """Catches the reference's missing overflow check."""
    cache = TreeCache(layers=LAYERS, rows=2, slots=10)
    write(cache, 0, [0], [[1]])
    with pytest.raises(InputError, match=f"10 slots, this step needs {needed}"):
        cache.place(0, lengths, nodes, CPU)
    cache.place(0, [10 - nodes], nodes, CPU)


def test_unwritten_slots_are_finite() -> None:
    """Catches memory that was never set: 0 · NaN is NaN, masked or not."""
    cache = TreeCache(layers=LAYERS, rows=2, slots=10)
    write(cache, 0, [0], [[1, 2]])
    assert bool(cache.layers[0].keys.isfinite().all() & cache.layers[0].values.isfinite().all())
