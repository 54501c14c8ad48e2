"""The attention that verifies a tree, plugged into transformers under the name "medusa_tree".

One masked attention for every model that goes through transformers' attention interface. Query heads that share a
key head are folded into the node axis, so grouped-query models never repeat their cache. It knows masks, not trees.
Legend: B batch, N query nodes, S cache slots, Hq/Hkv query/key heads, G = Hq / Hkv, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from medusa_core.errors import InputError

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
    """query [B, Hq, N, D], key/value [B, Hkv, S, D], additive or boolean mask [B, 1, N, S] → ([B, N, Hq, D], None).

    Without a mask this is transformers' own SDPA attention, so a model switched to it still generates as before.
    """
    if kwargs.get("s_aux") is not None or kwargs.get("position_bias") is not None:
        raise InputError(f"{type(module).__name__} uses attention sinks or a position bias, which medusa_tree lacks")
    if attention_mask is None and softcap is None:
        return sdpa_attention_forward(module, query, key, value, None, dropout=dropout, scaling=scaling, **kwargs)
    batch, heads, nodes, size = query.shape
    kv_heads, slots = key.shape[1], key.shape[2]
    group = heads // kv_heads
    folded = query.reshape(batch, kv_heads, group * nodes, size)
    mask = attention_mask
    if mask is not None and group > 1:
        mask = mask.expand(batch, 1, nodes, slots).repeat(1, 1, group, 1)
    if softcap is None:
        out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling)
    else:
        scale = size**-0.5 if scaling is None else scaling
        scores = torch.tanh(folded @ key.transpose(-1, -2) * scale / softcap) * softcap
        if mask is None:
            mask = torch.ones(nodes, slots, dtype=torch.bool, device=query.device).tril(slots - nodes)
            mask = mask.repeat(group, 1)
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        out = scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value
    out = out.reshape(batch, heads, nodes, value.shape[-1])
    return out.transpose(1, 2).contiguous(), None


def use_tree_attention(model: PreTrainedModel) -> None:
    """Registers the attention with its mask function (else padding is silently lost) and switches the model to it."""
    AttentionInterface.register(NAME, tree_attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:
        raise InputError(f"{type(model).__name__} does not go through transformers' attention interface")


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
    config: Any, lengths_B: torch.Tensor, ancestors_NN: torch.Tensor, depths_N: torch.Tensor, *, slots: int
) -> torch.Tensor | dict[str, torch.Tensor]:
    """The mask argument a model of this configuration takes: one 4-D mask, or one per layer type."""
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    types = set(getattr(config, "layer_types", None) or [])
    if unknown := types - {"full_attention", "sliding_attention"}:
        raise InputError(f"{config.model_type} has layers of type {sorted(unknown)}, which a tree can't be verified on")

    def build(width: int | None) -> torch.Tensor:
        return visibility(lengths_B, ancestors_NN, depths_N, slots=slots, window=width)

    if "sliding_attention" in types:
        return {"full_attention": build(None), "sliding_attention": build(window)}
    return build(None if types else window)
