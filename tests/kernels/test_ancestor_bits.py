"""Ancestor bitmasks: the sign bit, more than one word, and the way back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.ancestor_bits import mask_from_words, parents_from_words, words_from_parents


@st.composite
def parent_lists(draw: st.DrawFn, most: int = 140) -> list[int]:
    nodes = draw(st.integers(1, most))
    return [-1, *(draw(st.integers(0, node - 1)) for node in range(1, nodes))]


def naive_mask(parents: list[int]) -> torch.Tensor:
    mask = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node in range(len(parents)):
        here = node
        while here >= 0:
            mask[node, here] = True
            here = parents[here]
    return mask


@settings(max_examples=60, derandomize=True, deadline=None)
@given(parent_lists())
def test_words_mark_exactly_the_ancestors_and_lead_back(parents: list[int]) -> None:
    """Catches a bit in the wrong word, a sibling's bit, and a parent that can't be recovered."""
    words = words_from_parents(parents)
    assert words.shape == (len(parents), -(-len(parents) // 64))
    assert torch.equal(mask_from_words(words), naive_mask(parents))
    assert parents_from_words(words) == parents


def test_bit_63_is_the_sign_bit() -> None:
    """Catches an overflow on 1 << 63, and a shift that smears the sign over the other bits."""
    words = words_from_parents([-1] + [0] * 63)
    assert words[63].tolist() == [-(1 << 63) + 1]
    assert mask_from_words(words)[63].nonzero().flatten().tolist() == [0, 63]
    assert mask_from_words(words)[62].nonzero().flatten().tolist() == [0, 62]


def test_second_word_begins_at_node_64() -> None:
    """Catches an off-by-one at the word boundary, on the longest chain that crosses it."""
    words = words_from_parents(list(range(-1, 65)))
    assert words[64].tolist() == [-1, 1]
    assert words[65].tolist() == [-1, 3]
    assert words[63].tolist() == [-1, 0]


@pytest.mark.parametrize("parents", [[0], [-1, -1], [-1, 1], [-1, 2, 0], [1, -1]])
def test_an_order_without_parents_first_is_refused(parents: list[int]) -> None:
    """Catches masks built from a node that doesn't exist yet."""
    with pytest.raises(ValueError, match=r"node \d has parent"):
        words_from_parents(parents)


def test_the_root_alone_is_one_word() -> None:
    """Catches zero words for plain decoding."""
    assert words_from_parents([-1]).tolist() == [[1]]
