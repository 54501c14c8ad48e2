"""The attention that verifies a tree, plugged into transformers under the name "medusa_tree".

For every model that goes through transformers' attention interface: the Triton kernel where it runs, one masked SDPA
elsewhere, in which query heads that share a key head are folded into the node axis, so that grouped-query models never
repeat their cache. It knows masks, not trees.
Legend: B batch, N query nodes, S cache slots, Hq/Hkv query/key heads, G = Hq / Hkv, D head size.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kernels.ancestor_bits import NO_WINDOW, tree_mask
from kernels.launch_plan import SIZES
from medusa_core.cache import LayerShape
from medusa_core.errors import UnsupportedByTreeAttention
from medusa_core.ops import (
    capped_attention,
    masked_attention,
    materialize,
    recording_gradients,
    tree_attention,
    tree_kernel,
)

NAME = "medusa_tree"


def tree_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query [B, Hq, N, D], key/value [>=B, Hkv, >=S, D], mask [B, 1, N or G*N, S] → ([B, N, Hq, D], None).

    An int64 mask is a tree mask of `kernels.tree_attention`, and that kernel attends. Without a mask this is
    transformers' own SDPA attention, so a model switched to it still generates, and prefills, as before.
    """
    if kwargs.get("s_aux") is not None or kwargs.get("position_bias") is not None:
        raise UnsupportedByTreeAttention("its attention has sinks or a position bias")
    mask = attention_mask
    if mask is None and softcap is None:
        return sdpa_attention_forward(module, query, key, value, None, dropout=dropout, scaling=scaling, **kwargs)
    if mask is None:
        nodes, slots = query.shape[2], key.shape[2]
        mask = torch.ones(1, 1, nodes, slots, dtype=torch.bool, device=query.device).tril(slots - nodes)
    if mask.dtype == torch.int64:
        return tree_kernel(query, key, value, mask, scaling, softcap), None
    if recording_gradients(query, key, value):
        return masked_attention(query, key, value, mask, scaling, softcap), None
    if softcap is None:
        return tree_attention(query, key, value, mask, scaling), None
    return capped_attention(query, key, value, mask, scaling, softcap), None


def register_tree_attention() -> None:
    """Makes the attention known to transformers, with its mask function, or padding would silently be lost."""
    AttentionInterface.register(NAME, tree_attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def use_tree_attention(model: PreTrainedModel) -> None:
    """Switches the model to tree attention; UnsupportedByTreeAttention if it attends in a way of its own."""
    register_tree_attention()
    try:
        model.set_attn_implementation(NAME)
    except ValueError as error:
        raise UnsupportedByTreeAttention(f"it takes no other attention than its own ({error})") from error
    if model.config._attn_implementation != NAME:
        raise UnsupportedByTreeAttention("it does not go through transformers' attention interface")


def share_rotary_tables(model: PreTrainedModel) -> list[RemovableHandle]:
    """Makes a compiled step compute its cosines and sines once, not once in every layer that reads them; the hooks."""

    def stored(module: torch.nn.Module, args: Any, output: Any) -> Any:
        if torch.compiler.is_compiling() and isinstance(output, tuple):
            return tuple(materialize(table) for table in output)
        return output

    rotary = [module for module in model.modules() if type(module).__name__.endswith("RotaryEmbedding")]
    return [module.register_forward_hook(stored) for module in rotary]


def visibility(
    lengths_B: torch.Tensor, ancestors_NN: torch.Tensor, depths_N: torch.Tensor, *, slots: int, window: int | None
) -> torch.Tensor:
    """Which cache slots each node sees, [B, 1, N, S] bool: the prefix and the node's own ancestors.

    With a sliding window, those of them whose *position* is less than `window` behind the node's: positions of tree
    slots go by depth, not by slot.
    """
    batch, nodes = lengths_B.shape[0], depths_N.shape[0]
    slot_S = torch.arange(slots, device=lengths_B.device)
    offset_BS = slot_S[None] - lengths_B[:, None]
    prefix_BNS = (offset_BS < 0)[:, None].expand(batch, nodes, slots)
    in_tree_BS = (offset_BS >= 0) & (offset_BS < nodes)
    node_BS = offset_BS.clamp(0, nodes - 1)
    tree_BNS = ancestors_NN[:, node_BS].transpose(0, 1) & in_tree_BS[:, None]
    seen_BNS = prefix_BNS | tree_BNS
    if window is not None:
        position_BS = torch.where(in_tree_BS, lengths_B[:, None] + depths_N[node_BS], slot_S[None])
        own_BN = lengths_B[:, None] + depths_N[None]
        seen_BNS = seen_BNS & (position_BS[:, None] > own_BN[..., None] - window)
    return seen_BNS[:, None]


def masks_for(
    config: Any,
    lengths_B: torch.Tensor,
    ancestors_NN: torch.Tensor,
    depths_N: torch.Tensor,
    *,
    slots: int,
    dtype: torch.dtype,
) -> torch.Tensor | dict[str, torch.Tensor]:
    """The mask argument a model of this configuration takes: one additive 4-D mask, or one per layer type.

    Where the configuration tells how many query heads share a key head, masks come folded for them, [B, 1, G*N, S],
    once a step instead of once a layer.
    """
    group = query_group(config)
    zero = torch.zeros((), dtype=dtype, device=lengths_B.device)
    hidden = torch.full((), float("-inf"), dtype=dtype, device=lengths_B.device)

    def build(window: int | None) -> torch.Tensor:
        seen = visibility(lengths_B, ancestors_NN, depths_N, slots=slots, window=window)
        return torch.where(seen, zero, hidden).repeat(1, 1, group, 1)

    return _by_layer_type(config, build)


def kernel_masks_for(
    config: Any, lengths_B: torch.Tensor, words_NW: torch.Tensor
) -> torch.Tensor | dict[str, torch.Tensor]:
    """The same as tree masks, which the kernel reads: a few words a node, whatever the cache's length."""
    words_BNW = words_NW.expand(lengths_B.shape[0], -1, -1)
    # The kernel for a soft-cap always has a window; given here, no layer has to add one.
    widest = NO_WINDOW if getattr(config, "attn_logit_softcapping", None) else None
    return _by_layer_type(config, lambda window: tree_mask(lengths_B, words_BNW, window or widest))


def _by_layer_type(config: Any, build: Callable[[int | None], torch.Tensor]) -> torch.Tensor | dict[str, torch.Tensor]:
    """One mask for all layers, or one for each type, made for the type's sliding window."""
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    types = set(getattr(config, "layer_types", None) or [])
    if unknown := types - {"full_attention", "sliding_attention"}:
        raise UnsupportedByTreeAttention(f"it has layers of type {sorted(unknown)}")
    if "sliding_attention" in types:
        return {"full_attention": build(None), "sliding_attention": build(window)}
    return build(None if types else window)


def why_no_kernel(device: torch.device, dtype: torch.dtype, shapes: Iterable[LayerShape]) -> str | None:
    """Why the kernel can't verify trees of a model whose cache has these layers; None if it can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    from kernels import tree_attention as kernel

    if device.type != "cuda" and not kernel.INTERPRETED:
        return f"it needs a GPU; this model is on {device.type}"
    if dtype not in kernel.DTYPES:
        return f"it has no code for {dtype}"
    for shape in shapes:
        if shape.key_size != shape.value_size or shape.key_size not in SIZES:
            return f"it has no code for keys of {shape.key_size} and values of {shape.value_size}"
    return None


def query_group(config: Any) -> int:
    """Query heads per key head, 1 where a configuration doesn't say."""
    heads, kv_heads = getattr(config, "num_attention_heads", None), getattr(config, "num_key_value_heads", None)
    if isinstance(heads, int) and isinstance(kv_heads, int) and kv_heads and heads % kv_heads == 0:
        return heads // kv_heads
    return 1
