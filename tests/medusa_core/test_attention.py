"""What each node sees, by a naive loop, and the attention against transformers' plain SDPA."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from kernels.ancestor_bits import words_from_parents
from kernels.reference import tree_attention
from medusa_core.attention import masks_for, tree_attention_forward, visibility
from medusa_core.errors import UnsupportedByTreeAttention
from medusa_core.tree import OFF, Tree, cartesian, chain

TREES = [OFF, chain(3), cartesian([2, 2]), Tree.from_choices([[0], [3], [0, 1], [3, 0], [3, 0, 2]])]
MODULE = torch.nn.Module()


def naive(lengths: list[int], tree: Tree, slots: int, window: int | None) -> torch.Tensor:
    seen = torch.zeros(len(lengths), 1, tree.nodes, slots, dtype=torch.bool)
    for b, node in itertools.product(range(len(lengths)), range(tree.nodes)):
        at = {slot: slot for slot in range(lengths[b])}
        here = node
        while here >= 0:
            at[lengths[b] + here] = lengths[b] + int(tree.depths_N[here])
            here = tree.parents[here]
        own = lengths[b] + int(tree.depths_N[node])
        for slot, position in at.items():
            seen[b, 0, node, slot] = window is None or own - position < window
    return seen


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("window", [None, 1, 2, 4, 100])
@pytest.mark.parametrize("lengths", [[0], [5], [1, 6, 3]])
def test_a_node_sees_its_prefix_and_ancestors_within_the_window(
    tree: Tree, window: int | None, lengths: list[int]
) -> None:
    """Catches a visible sibling, another row's prefix length, and a window counted in slots instead of positions."""
    slots = max(lengths) + tree.nodes + 2
    mask = visibility(torch.tensor(lengths), tree.ancestors_NN, tree.depths_N, slots=slots, window=window)
    assert torch.equal(mask, naive(lengths, tree, slots, window))
    assert bool(mask.any(-1).all()), "every node sees itself"


def masks(dtype: torch.dtype = torch.float32, **config: object) -> torch.Tensor | dict[str, torch.Tensor]:
    tree = cartesian([2, 1])
    described = SimpleNamespace(model_type="toy", **config)
    return masks_for(described, torch.tensor([6]), tree.ancestors_NN, tree.depths_N, slots=11, dtype=dtype)


def additive(seen: torch.Tensor) -> torch.Tensor:
    return torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))


def test_each_layer_type_gets_its_own_mask() -> None:
    """Catches full attention on sliding layers, a window applied where the model switches it off, and layers that
    can't be verified on."""
    full, windowed = (additive(naive([6], cartesian([2, 1]), 11, window)) for window in (None, 3))
    assert not torch.equal(full, windowed)
    assert torch.equal(masks(), full)
    assert torch.equal(masks(sliding_window=3), windowed)
    assert torch.equal(masks(sliding_window=3, use_sliding_window=False), full)
    assert torch.equal(masks(sliding_window=3, layer_types=["full_attention"] * 2), full)
    for types in (["full_attention", "sliding_attention"], ["sliding_attention"] * 2):
        both = masks(sliding_window=3, layer_types=types)
        assert isinstance(both, dict)
        assert torch.equal(both["full_attention"], full)
        assert torch.equal(both["sliding_attention"], windowed)
    with pytest.raises(UnsupportedByTreeAttention, match="chunked_attention"):
        masks(layer_types=["full_attention", "chunked_attention"])


@pytest.mark.parametrize(("heads", "kv_heads", "group"), [(6, 2, 3), (4, 4, 1), (4, None, 1), (None, 2, 1), (5, 2, 1)])
def test_masks_are_folded_for_the_queries_that_share_a_key_head(
    heads: int | None, kv_heads: int | None, group: int
) -> None:
    """Catches a mask that is repeated node by node instead of head by head, or made in a dtype that SDPA refuses."""
    full = additive(naive([6], cartesian([2, 1]), 11, None)).double()
    mask = masks(torch.float64, num_attention_heads=heads, num_key_value_heads=kv_heads)
    assert isinstance(mask, torch.Tensor) and mask.dtype == torch.float64
    assert torch.equal(mask, torch.cat([full] * group, 2))


def case(heads: int, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tree = TREES[3]
    lengths = [4, 1]
    slots = max(lengths) + tree.nodes
    query = torch.randn(2, heads, tree.nodes, 8, generator=generator)
    keys = torch.randn(2, kv_heads, slots, 8, generator=generator)
    values = torch.randn(2, kv_heads, slots, 8, generator=generator)
    mask = visibility(torch.tensor(lengths), tree.ancestors_NN, tree.depths_N, slots=slots, window=None)
    return query, keys, values, mask


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 2), (5, 1)])
def test_folding_query_heads_equals_repeating_key_heads(heads: int, kv_heads: int) -> None:
    """Catches query heads folded onto the wrong key head, or a mask row that belongs to another node, however the mask
    is given: boolean or additive, for the nodes or folded already."""
    query, keys, values, mask = case(heads, kv_heads)
    group = heads // kv_heads
    out, weights = tree_attention_forward(MODULE, query, keys, values, mask, scaling=0.4)
    plain = F.scaled_dot_product_attention(
        query, keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1), attn_mask=mask, scale=0.4
    )
    assert weights is None
    torch.testing.assert_close(out, plain.transpose(1, 2))
    for given in (additive(mask), mask.repeat(1, 1, group, 1), additive(mask).repeat(1, 1, group, 1)):
        again, _ = tree_attention_forward(MODULE, query, keys, values, given, scaling=0.4)
        torch.testing.assert_close(again, out)
    words = words_from_parents(TREES[3].parents).expand(2, -1, -1)
    defined = tree_attention(query, keys, values, torch.tensor([4, 1]), words, 0.4)
    torch.testing.assert_close(out, defined.transpose(1, 2))


@pytest.mark.parametrize("form", ["boolean", "additive", "folded"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
def test_softcap_bends_the_scores_before_the_mask(heads: int, kv_heads: int, form: str) -> None:
    """Catches a cap applied after the mask (which would let masked slots back in) or without the scale."""
    query, keys, values, mask = case(heads, kv_heads)
    group = heads // kv_heads
    given = {"boolean": mask, "additive": additive(mask), "folded": additive(mask).repeat(1, 1, group, 1)}[form]
    out, _ = tree_attention_forward(MODULE, query, keys, values, given, scaling=0.7, softcap=2.0)
    scores = query @ keys.repeat_interleave(group, 1).transpose(-1, -2) * 0.7
    scores = (2.0 * torch.tanh(scores / 2.0)).masked_fill(~mask, float("-inf"))
    expected = scores.softmax(-1) @ values.repeat_interleave(group, 1)
    torch.testing.assert_close(out, expected.transpose(1, 2))


def test_softcap_without_a_mask_is_causal() -> None:
    """Catches a model that sees the future once transformers leaves its mask out."""
    query, keys, values, _ = case(6, 2)
    keys, values = keys[:, :, :8], values[:, :, :8]
    nodes, slots = query.shape[2], 8
    causal = torch.ones(nodes, slots, dtype=torch.bool).tril(slots - nodes)[None, None].expand(2, 1, -1, -1)
    out, _ = tree_attention_forward(MODULE, query, keys, values, None, softcap=2.0)
    expected, _ = tree_attention_forward(MODULE, query, keys, values, causal, softcap=2.0)
    torch.testing.assert_close(out, expected)


def test_gradients_flow_through_a_model_under_an_engine() -> None:
    """Catches an operator without a gradient in the path of a training step on a model that an engine has had."""
    query, keys, values, mask = case(4, 2)
    query.requires_grad_(True)
    out, _ = tree_attention_forward(MODULE, query, keys, values, mask)
    out.sum().backward()  # type: ignore[no-untyped-call]
    assert query.grad is not None and bool(query.grad.abs().sum() > 0)
    with torch.no_grad():
        torch.testing.assert_close(tree_attention_forward(MODULE, query, keys, values, mask)[0], out)


@pytest.mark.parametrize("extra", ["s_aux", "position_bias"])
def test_attention_it_cannot_compute_is_refused(extra: str) -> None:
    """Catches sinks and biases that would be dropped silently."""
    query, keys, values, mask = case(2, 2)
    with pytest.raises(UnsupportedByTreeAttention, match="has sinks or a position bias"):
        tree_attention_forward(MODULE, query, keys, values, mask, **{extra: torch.zeros(2)})
