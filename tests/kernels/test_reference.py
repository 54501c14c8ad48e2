"""The definition of tree attention against dense attention over explicitly gathered keys."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from kernels.ancestor_bits import words_from_parents
from kernels.reference import tree_attention


def random_parents(nodes: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [-1, *(int(torch.randint(node, (), generator=generator)) for node in range(1, nodes))]


def ancestors(parents: list[int], node: int) -> list[int]:
    found = []
    while node >= 0:
        found.append(node)
        node = parents[node]
    return found


@pytest.mark.parametrize(
    ("nodes", "heads", "kv_heads", "size", "prefixes", "spare"),
    [(1, 2, 2, 8, [0, 5], 0), (7, 6, 2, 5, [3, 11], 4), (65, 3, 1, 16, [1], 2), (130, 2, 1, 4, [17, 0], 9)],
)
def test_every_node_attends_to_prefix_and_ancestors_only(
    nodes: int, heads: int, kv_heads: int, size: int, prefixes: list[int], spare: int
) -> None:
    """Catches a sibling seen, a prefix slot lost, the wrong key head, and NaN leaking in from slots past the tree."""
    torch.manual_seed(0)
    batch, slots = len(prefixes), max(prefixes) + nodes + spare
    parents = [random_parents(nodes, seed) for seed in range(batch)]
    query = torch.randn(batch, heads, nodes, size)
    keys, values = torch.randn(batch, kv_heads, slots, size), torch.randn(batch, kv_heads, slots, size)
    for b, prefix in enumerate(prefixes):
        keys[b, :, prefix + nodes :] = values[b, :, prefix + nodes :] = float("nan")
    words = torch.stack([words_from_parents(p) for p in parents])
    out = tree_attention(query, keys, values, torch.tensor(prefixes), words, 0.3)
    for b, prefix in enumerate(prefixes):
        for node in range(nodes):
            seen = [*range(prefix), *(prefix + k for k in ancestors(parents[b], node))]
            for head in range(heads):
                kv = head // (heads // kv_heads)
                expected = F.scaled_dot_product_attention(
                    query[b, head, node][None], keys[b, kv, seen], values[b, kv, seen], scale=0.3
                )[0]
                torch.testing.assert_close(out[b, head, node], expected, rtol=1e-5, atol=1e-5)


def test_low_precision_inputs_are_computed_in_fp32() -> None:
    """Catches a definition that is itself as inexact as the kernels compared with it."""
    torch.manual_seed(0)
    query, keys, values = (torch.randn(1, 1, 3, 8).bfloat16() for _ in range(3))
    words = words_from_parents([-1, 0, 0])[None]
    low = tree_attention(query, keys, values, torch.tensor([0]), words, 1.0)
    high = tree_attention(query.float(), keys.float(), values.float(), torch.tensor([0]), words, 1.0)
    assert low.dtype == torch.bfloat16
    assert torch.equal(low, high.bfloat16())
