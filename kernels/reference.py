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
    *,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention of N tree nodes over their sequence's prefix and their own ancestors, in fp32: out [B, Hq, N, D].

    Node j's key and value lie in slot prefix_len[b] + j; node q sees slots below prefix_len[b] and the slots of its
    ancestors, itself included (paper section 2.1.2). Query head h reads key head h // (Hq / Hkv). Of these a window
    leaves the keys whose position is less than `window` behind the node's own, a node's position being the prefix's
    length plus its depth. A soft-cap bends scaled scores s to softcap · tanh(s / softcap).
    """
    batch, heads, nodes, _ = q_BHND.shape
    group = heads // k_cache_BHSD.shape[1]
    slots = torch.arange(k_cache_BHSD.shape[2], device=q_BHND.device)
    out = torch.empty_like(q_BHND)
    for b in range(batch):
        prefix = int(prefix_len_B[b])
        visible_NS = (slots < prefix).expand(nodes, -1).clone()
        visible_NS[:, prefix : prefix + nodes] = mask_from_words(ancestor_words_BNW[b])
        if window is not None:
            depths_N = visible_NS[:, prefix : prefix + nodes].sum(-1) - 1
            positions_S = slots.clone()
            positions_S[prefix : prefix + nodes] = prefix + depths_N
            visible_NS &= positions_S > prefix + depths_N[:, None] - window
        keys = k_cache_BHSD[b].float().repeat_interleave(group, 0)
        values = v_cache_BHSD[b].float().repeat_interleave(group, 0)
        scores = q_BHND[b].float() @ keys.transpose(-1, -2) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        weights = scores.masked_fill(~visible_NS, float("-inf")).softmax(-1)
        # Slots past the tree may hold anything, NaN included: they must not leak through a product with zero.
        out[b] = (weights @ values.masked_fill(~visible_NS.any(0)[:, None], 0.0)).to(out.dtype)
    return out


def compact_cache(
    keys_LRHSD: torch.Tensor, values_LRHSD: torch.Tensor, start_B: torch.Tensor, path_BA: torch.Tensor
) -> None:
    """Moves the nodes of each row's path (rows 0 .. B-1) to the slots right after its prefix of start_B tokens, in
    place: slot start + a holds what slot start + path[a] held before. Path entry 0 is the root, which stays.

    Legend besides the above: L layers, R rows of the cache, A path length.
    """
    row_B1 = torch.arange(path_BA.shape[0], device=path_BA.device)[:, None]
    steps_A = torch.arange(1, path_BA.shape[1], device=path_BA.device)
    source_BA, target_BA = start_B[:, None] + path_BA[:, 1:], start_B[:, None] + steps_A
    for cache in (keys_LRHSD, values_LRHSD):
        # Read as a copy before anything is written, so overlapping source and target slots are safe.
        kept = cache[:, row_B1, :, source_BA]
        cache[:, row_B1, :, target_BA] = kept
