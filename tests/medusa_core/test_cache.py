"""The cache against a list of tokens per row: what was written, kept and moved."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_core.cache import LayerShape, TreeCache
from medusa_core.errors import InputError

# Layers of two shapes, as in models whose full and sliding layers differ; values and keys of different sizes.
SHAPES = [LayerShape(2, 3, 3), LayerShape(1, 4, 2), LayerShape(2, 3, 3)]


def cache_of(rows: int, slots: int) -> TreeCache:
    return TreeCache(SHAPES, rows=rows, slots=slots, dtype=torch.float32, device=torch.device("cpu"))


def states(tokens: list[list[int]], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [B, H, N, D] that name their token, layer, head and place; values differ from keys."""
    heads, key_size, value_size = SHAPES[layer]
    base = torch.tensor(tokens, dtype=torch.float32)[:, None, :, None] + 10000 * layer
    base = base + 0.25 * torch.arange(heads)[:, None, None]
    return base + 0.01 * torch.arange(key_size), -(base + 0.01 * torch.arange(value_size))


def write(cache: TreeCache, first_row: int, lengths: list[int], tokens: list[list[int]], spare: int = 0) -> None:
    """One forward's keys and values, over an extent that is `spare` slots larger than it needs. What attention is given
    begins with the forward's rows and with slot 0, and may go on past either."""
    end = max(lengths) + len(tokens[0])
    cache.place(first_row, torch.tensor(lengths), end=end)
    cache.extent = end + spare
    for layer, (heads, key_size, value_size) in enumerate(SHAPES):
        keys, values = states(tokens, layer)
        seen_keys, seen_values = cache.update(keys, values, layer)
        assert seen_keys.shape[1::2] == (heads, key_size)
        assert seen_values.shape[1::2] == (heads, value_size)
        assert cache.layers[layer].get_mask_sizes(len(tokens[0])) == (end + spare, 0)
        for row, length in enumerate(lengths):
            there = slice(length, length + len(tokens[row]))
            assert torch.equal(seen_keys[row, :, there], keys[row])
            assert torch.equal(seen_values[row, :, there], values[row])


def check(cache: TreeCache, row: int, tokens: list[int]) -> None:
    for layer in range(len(SHAPES)):
        keys, values = states([tokens], layer)
        stored = cache.layers[layer]
        stored_keys, stored_values = (store[stored.index, row] for store in cache.stores[stored.store])
        assert torch.equal(stored_keys[:, : len(tokens)], keys[0]), (row, layer)
        assert torch.equal(stored_values[:, : len(tokens)], values[0]), (row, layer)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.data())
def test_any_sequence_of_steps_leaves_each_row_its_accepted_tokens(data: st.DataObject) -> None:
    """Catches a path kept for the wrong row or layer, a source overwritten before it was read, rows of different
    lengths written at one place, and rows that take no part written to."""
    rows = data.draw(st.integers(1, 3))
    cache = cache_of(rows, slots=44)
    held = [list(range(100 * r, 100 * r + data.draw(st.integers(1, 6)))) for r in range(rows)]
    for row, tokens in enumerate(held):
        write(cache, row, [0], [tokens])
    fresh = 1000
    for _ in range(data.draw(st.integers(1, 4))):
        nodes, active = data.draw(st.integers(1, 7)), data.draw(st.integers(1, rows))
        lengths = [len(tokens) for tokens in held[:active]]
        drafted = [list(range(fresh + 10 * r, fresh + 10 * r + nodes)) for r in range(active)]
        fresh += 100
        write(cache, 0, lengths, drafted, spare=data.draw(st.integers(0, 3)))
        # Strictly rising node numbers from the root, the last repeated up to the tree's depth, as Tree.paths_ND has.
        kept = [sorted({0, *data.draw(st.sets(st.integers(0, nodes - 1), max_size=4))}) for _ in range(active)]
        depth = max(len(path) for path in kept)
        paths = torch.tensor([path + [path[-1]] * (depth - len(path)) for path in kept])
        cache.compact(torch.tensor(lengths), paths)
        for row in range(active):
            held[row] += [drafted[row][node] for node in kept[row]]
        for row in range(rows):
            check(cache, row, held[row])


def test_layers_of_one_shape_share_a_store() -> None:
    """Catches a store per layer, which makes compaction as many copies as the model has layers."""
    cache = cache_of(rows=2, slots=5)
    assert [[tuple(store.shape) for store in pair] for pair in cache.stores] == [
        [(2, 2, 2, 5, 3), (2, 2, 2, 5, 3)],
        [(1, 2, 1, 5, 4), (1, 2, 1, 5, 2)],
    ]
    assert [layer.get_max_length() for layer in cache.layers] == [5, 5, 5]


def test_overlapping_source_and_target_slots_are_safe() -> None:
    """Catches a copy in place that reads what it has just written: nodes 1,2,3 move to 0+1.. one at a time."""
    cache = cache_of(rows=1, slots=12)
    write(cache, 0, [0], [[1, 2]])
    write(cache, 0, [2], [[10, 11, 12, 13, 14]])
    cache.compact(torch.tensor([2]), torch.tensor([[0, 2, 3, 4]]))
    check(cache, 0, [1, 2, 10, 12, 13, 14])


def test_a_path_that_lies_in_place_moves_nothing() -> None:
    """Catches a shortcut taken though only one of two rows lies in place."""
    cache = cache_of(rows=2, slots=12)
    write(cache, 0, [0], [[1]])
    write(cache, 1, [0], [[5]])
    write(cache, 0, [1, 1], [[10, 11, 12], [20, 21, 22]])
    cache.compact(torch.tensor([1, 1]), torch.tensor([[0, 1], [0, 2]]))
    check(cache, 0, [1, 10, 11])
    check(cache, 1, [5, 20, 22])


def test_a_moved_row_carries_its_whole_prefix() -> None:
    """Catches a replaced row that attends to the leaver's keys."""
    cache = cache_of(rows=3, slots=10)
    write(cache, 0, [0], [[1, 2, 3, 4, 5]])
    write(cache, 1, [0], [[6]])
    write(cache, 2, [0], [[7, 8, 9]])
    cache.move_row(2, 0, 3)
    check(cache, 0, [7, 8, 9, 4, 5])
    check(cache, 1, [6])


def test_several_rows_are_written_behind_the_others() -> None:
    """Catches prompts of new requests written over the rows that are in use, of one length and of several."""
    cache = cache_of(rows=4, slots=10)
    write(cache, 0, [0], [[1, 2]])
    write(cache, 1, [0, 0], [[3, 4, 5], [6, 7, 8]])
    write(cache, 1, [3, 2], [[9, 10], [11, 12]])
    check(cache, 0, [1, 2])
    check(cache, 1, [3, 4, 5, 9, 10])
    check(cache, 2, [6, 7, 11, 12])
    assert not any(bool(store[:, 3].any()) for pair in cache.stores for store in pair)


@pytest.mark.parametrize(("lengths", "nodes", "needed"), [([4], 7, 11), ([2, 8], 3, 11)])
def test_a_step_that_does_not_fit_is_refused_before_it_writes(lengths: list[int], nodes: int, needed: int) -> None:
    """Catches the reference's missing overflow check."""
    cache = cache_of(rows=2, slots=10)
    write(cache, 0, [0], [[1]])
    with pytest.raises(InputError, match=f"10 slots, this step needs {needed}"):
        cache.place(0, torch.tensor(lengths), end=max(lengths) + nodes)
    cache.place(0, torch.tensor([10 - nodes]), end=10)


def test_unwritten_slots_are_finite() -> None:
    """Catches memory that was never set: 0 · NaN is NaN, masked or not."""
    cache = cache_of(rows=2, slots=10)
    write(cache, 0, [0], [[1, 2]])
    assert all(bool(store.isfinite().all()) for pair in cache.stores for store in pair)
