"""Plain torch definitions of what the kernels compute; every kernel is tested against these, and nothing else.

Legend: B batch, N tree nodes, S cache slots, Hq/Hkv query/key heads, D head size, W words of 64 ancestor bits.
"""

from __future__ import annotations

import torch

from kernels.ancestor_bits import mask_from_words


def tree_attention(
    q_BHND: torch.Tensor,
    k_cache_BHSD: torch.Tensor,
    v_cache_BHSD: torch.Tensor,
    prefix_len_B: torch.Tensor,
    ancestor_words_BNW: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention of N tree nodes over their sequence's prefix and their own ancestors, in fp32: out [B, Hq, N, D].

    Node j's key and value lie in slot prefix_len[b] + j; node q sees slots below prefix_len[b] and the slots of its
    ancestors, itself included (paper section 2.1.2). Query head h reads key head h // (Hq / Hkv).
    """
    batch, heads, nodes, _ = q_BHND.shape
    group = heads // k_cache_BHSD.shape[1]
    slots = torch.arange(k_cache_BHSD.shape[2], device=q_BHND.device)
    out = torch.empty_like(q_BHND)
    for b in range(batch):
        prefix = int(prefix_len_B[b])
        visible_NS = (slots < prefix).expand(nodes, -1).clone()
        visible_NS[:, prefix : prefix + nodes] = mask_from_words(ancestor_words_BNW[b])
        keys = k_cache_BHSD[b].float().repeat_interleave(group, 0)
        values = v_cache_BHSD[b].float().repeat_interleave(group, 0)
        scores = q_BHND[b].float() @ keys.transpose(-1, -2) * scale
        weights = scores.masked_fill(~visible_NS, float("-inf")).softmax(-1)
        # Slots past the tree may hold anything, NaN included: they must not leak through a product with zero.
        out[b] = (weights @ values.masked_fill(~visible_NS.any(0)[:, None], 0.0)).to(out.dtype)
    return out
