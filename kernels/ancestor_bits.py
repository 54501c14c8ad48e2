"""Trees as ancestor bitmasks: word w of node n has bit b set where node 64·w + b is n or an ancestor of n.

This is the mask form the tree-attention kernel keeps in registers. Knows nothing of tokens or ranks.
Legend: N tree nodes, W words of 64 bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

WORD_BITS = 64
# A sliding window that no sequence reaches past.
NO_WINDOW = 1 << 30


def words_from_parents(parents: Sequence[int]) -> torch.Tensor:
    """Ancestor words [N, W] int64 of a tree whose node 0 is the root (parent -1) and whose parents come first.

    Bit 63 is the sign bit of an int64, so words may be negative. Raises ValueError for an order in which a
    parent does not come before its child.
    """
    masks: list[int] = []
    for node, parent in enumerate(parents):
        if (node == 0) != (parent == -1) or parent >= node:
            raise ValueError(f"node {node} has parent {parent}: node 0 is the root (-1), every parent comes first")
        masks.append((masks[parent] if parent >= 0 else 0) | 1 << node)
    count = max(1, -(-len(masks) // WORD_BITS))
    words = [[_signed(mask >> (WORD_BITS * w) & (1 << WORD_BITS) - 1) for w in range(count)] for mask in masks]
    return torch.tensor(words, dtype=torch.int64).reshape(len(masks), count)


def mask_from_words(words_NW: torch.Tensor) -> torch.Tensor:
    """Dense visibility [N, N] bool: entry (q, k) is true where node q sees node k."""
    nodes = words_NW.shape[0]
    bits = torch.arange(nodes, device=words_NW.device)
    return (words_NW[:, bits // WORD_BITS] >> (bits % WORD_BITS) & 1).bool()


def parents_from_words(words_NW: torch.Tensor) -> list[int]:
    """The inverse of `words_from_parents`: a node's parent is its deepest ancestor other than itself."""
    mask = mask_from_words(words_NW)
    depth = mask.sum(-1)
    parents = []
    for node in range(mask.shape[0]):
        ancestors = [k for k in mask[node].nonzero().flatten().tolist() if k != node]
        parents.append(max(ancestors, key=lambda k: int(depth[k])) if ancestors else -1)
    return parents


def tree_mask(prefix_len_B: torch.Tensor, ancestor_words_BNW: torch.Tensor, window: int | None = None) -> torch.Tensor:
    """All that the kernel is told of what is visible, in one tensor that is made once a step and read by every layer.

    int64 [B, 1, N, 1 + W]: for each node its sequence's prefix length and its ancestor words. With a sliding window
    [B, 1, N, 2 + W], the window, in positions, in the second column.
    """
    batch, nodes, _ = ancestor_words_BNW.shape
    columns = [prefix_len_B.to(torch.int64)[:, None, None].expand(batch, nodes, 1)]
    if window is not None:
        columns.append(torch.full_like(columns[0], window))
    return torch.cat([*columns, ancestor_words_BNW], -1)[:, None].contiguous()


def _signed(word: int) -> int:
    return word - (1 << WORD_BITS) if word >= 1 << (WORD_BITS - 1) else word
