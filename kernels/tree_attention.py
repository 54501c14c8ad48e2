"""Split-KV decoding attention for a tree of query nodes, in Triton: a kernel that attends and one that merges.

The nodes of a tree see their sequence's whole prefix and, of the tree, their own ancestors. All query heads that share
a key head go through one program together, so a key is read once for all of them and for all nodes. Each program takes
a share of the keys; the shares' results meet by their log-sum-exp (Flash-Decoding). Imports torch and triton only.

What is visible comes as one tensor, `ancestor_bits.tree_mask`.
Legend: B batch, N tree nodes (1 to 128), S cache slots, Hq/Hkv query/key heads, G = Hq / Hkv, D size, M = N·G rows.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.ancestor_bits import NO_WINDOW, WORD_BITS, tree_mask
from kernels.launch_plan import MERGE_AT_ONCE, Device, LaunchPlan, Shape, plan_launch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Triton's default is about to change; a program is the same with every version.
_FUSED = {} if INTERPRETED else {"enable_fp_fusion": True}
DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _ones(word):  # type: ignore[no-untyped-def]
    """Bits that are set in an int64. Shifts are arithmetic: every mask below clears what the sign drags in."""
    word = word - ((word >> 1) & 0x5555555555555555)
    word = (word & 0x3333333333333333) + ((word >> 2) & 0x3333333333333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F0F0F0F0F
    word = word + (word >> 8)
    word = word + (word >> 16)
    word = word + (word >> 32)
    return word & 0x7F


# Sizes that change with trees and caches are no reason to compile anew.
@triton.jit(do_not_specialize=["stride_mb", "stride_mn", "nodes", "words", "group", "kv_heads", "slots"])  # type: ignore[untyped-decorator]
def attend(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    mask_ptr,
    out_ptr,
    part_ptr,
    lse_ptr,
    scale,
    softcap,  # 0 for none
    stride_qb,
    stride_qh,
    stride_qn,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_vb,
    stride_vh,
    stride_vs,
    stride_mb,
    stride_mn,
    stride_ob,
    stride_oh,
    stride_on,
    nodes,
    words,
    group,
    kv_heads,
    slots,
    SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GENERAL: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One share of the keys for up to BLOCK_M rows of one key head of one sequence; row m is node m // G, head m % G.

    Grid (splits, Hkv · row blocks, B). With one split it writes the answer, else a part and its log-sum-exp in base 2;
    a split without keys writes zeros and -inf.
    """
    split, splits = tl.program_id(0), tl.num_programs(0)
    kv_head = tl.program_id(1) % kv_heads
    row = tl.program_id(1) // kv_heads * BLOCK_M + tl.arange(0, BLOCK_M)
    batch = tl.program_id(2).to(tl.int64)
    rows = nodes * group
    alive = row < rows
    node = row // group
    head = kv_head.to(tl.int64) * group + row % group
    lane = tl.arange(0, BLOCK_D)

    mask_base = mask_ptr + batch * stride_mb
    first_word = 2 if GENERAL else 1
    prefix = tl.load(mask_base).to(tl.int32)
    total = tl.minimum(prefix + nodes, slots)  # a length past the cache must not become a read past it
    word0 = tl.load(mask_base + node * stride_mn + first_word, mask=alive, other=0)
    word1 = tl.load(mask_base + node * stride_mn + first_word + 1, mask=row < rows * (words - 1), other=0)
    oldest = 0
    if GENERAL:
        # The window counts positions, and a node's position goes by its depth.
        window = tl.load(mask_base + 1).to(tl.int32)
        depth = (_ones(word0) + _ones(word1)).to(tl.int32) - 1
        oldest = tl.maximum(prefix - window + 1, 0)

    q_offset = batch * stride_qb + head[:, None] * stride_qh + node[:, None] * stride_qn + lane[None, :]
    q_mask = alive[:, None]
    if SIZE != BLOCK_D:
        q_mask = q_mask & (lane < SIZE)[None, :]
    q = tl.load(q_ptr + q_offset, mask=q_mask, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)

    # The split's share, in whole blocks of what this sequence has, whatever the cache could hold.
    origin = oldest // BLOCK_N
    share = tl.cdiv(tl.cdiv(total, BLOCK_N) - origin, splits)
    begin = (origin + split * share) * BLOCK_N
    end = tl.minimum(begin + share * BLOCK_N, total)

    k_base = k_ptr + batch * stride_kb + kv_head.to(tl.int64) * stride_kh
    v_base = v_ptr + batch * stride_vb + kv_head.to(tl.int64) * stride_vh
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    sum_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(begin, end, BLOCK_N):
        slot = start + tl.arange(0, BLOCK_N)
        in_cache = slot < total
        k_mask, v_mask = in_cache[None, :], in_cache[:, None]
        if SIZE != BLOCK_D:
            k_mask = k_mask & (lane < SIZE)[:, None]
            v_mask = v_mask & (lane < SIZE)[None, :]
        # What lies past the tree is never read into a product: it may be NaN.
        k = tl.load(k_base + slot[None, :].to(tl.int64) * stride_ks + lane[:, None], mask=k_mask, other=0.0)
        v = tl.load(v_base + slot[:, None].to(tl.int64) * stride_vs + lane[None, :], mask=v_mask, other=0.0)
        if UPCAST:
            k, v = k.to(tl.float32), v.to(tl.float32)
        score = tl.dot(q, k, input_precision="ieee") * scale
        if GENERAL and softcap > 0:
            # tanh by the exponential: the interpreter and old architectures have no other.
            score = softcap * (2.0 / (1.0 + tl.exp2(score * (-2.0 * _LOG2E) / softcap)) - 1.0)
        score = score * _LOG2E  # exponentials are powers of two here
        # A tile of the prefix needs no mask; only those that reach into the tree, or past the window's end, do.
        edge = start + BLOCK_N > prefix
        if GENERAL:
            edge = edge | (start < oldest + nodes)
        if edge:
            in_tree = slot - prefix
            at = tl.maximum(in_tree, 0)[None, :]
            word = tl.where(at < 64, word0[:, None], word1[:, None])
            seen = (in_tree < 0)[None, :] | (((word >> (at & 63).to(tl.int64)) & 1) != 0)
            seen = seen & in_cache[None, :]
            if GENERAL:
                key = mask_base + at * stride_mn + first_word
                key_alive = (in_tree >= 0)[None, :] & in_cache[None, :]
                key_depth = _ones(tl.load(key, mask=key_alive, other=0))
                key_depth += _ones(tl.load(key + 1, mask=key_alive & (at < nodes * (words - 1)), other=0))
                position = tl.where(key_alive, prefix + key_depth.to(tl.int32) - 1, slot[None, :])
                seen = seen & (position > prefix + depth[:, None] - window)
            score = tl.where(seen, score, float("-inf"))
        above = tl.maximum(top, tl.max(score, 1))
        # A row that has seen nothing yet has no maximum; -inf less -inf would be NaN.
        pivot = tl.where(above == float("-inf"), 0.0, above)
        power = tl.exp2(score - pivot[:, None])
        decay = tl.exp2(top - pivot)
        weight = weight * decay + tl.sum(power, 1)
        sum_MD = sum_MD * decay[:, None] + tl.dot(power.to(v.dtype), v, input_precision="ieee")
        top = above

    empty = weight == 0.0
    sum_MD = sum_MD / tl.where(empty, 1.0, weight)[:, None]
    o_mask = alive[:, None]
    if SIZE != BLOCK_D:
        o_mask = o_mask & (lane < SIZE)[None, :]
    if splits == 1:
        o_offset = batch * stride_ob + head[:, None] * stride_oh + node[:, None] * stride_on + lane[None, :]
        tl.store(out_ptr + o_offset, sum_MD.to(out_ptr.dtype.element_ty), mask=o_mask)
    else:
        batches = tl.num_programs(2).to(tl.int64)
        part = ((split * batches + batch) * kv_heads * group + head) * nodes + node
        tl.store(part_ptr + part[:, None] * SIZE + lane[None, :], sum_MD, mask=o_mask)
        lse = tl.where(empty, float("-inf"), top + tl.log2(tl.where(empty, 1.0, weight)))
        tl.store(lse_ptr + part, lse, mask=alive)


@triton.jit(do_not_specialize=["heads", "nodes", "splits"])  # type: ignore[untyped-decorator]
def merge(  # type: ignore[no-untyped-def]
    part_ptr,
    lse_ptr,
    out_ptr,
    stride_ob,
    stride_oh,
    stride_on,
    heads,
    nodes,
    splits,
    SIZE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The parts of one row, weighed by their log-sum-exp. Grid (N, Hq, B)."""
    node, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    rows = tl.num_programs(2).to(tl.int64) * heads * nodes
    row = (batch * heads + head) * nodes + node
    lane = tl.arange(0, BLOCK_D)
    top, weight = float("-inf"), 0.0
    sum_D = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, splits, BLOCK_S):
        split = first + tl.arange(0, BLOCK_S)
        lse = tl.load(lse_ptr + split * rows + row, mask=split < splits, other=float("-inf"))
        above = tl.maximum(top, tl.max(lse, 0))
        pivot = tl.where(above == float("-inf"), 0.0, above)
        share = tl.exp2(lse - pivot)
        decay = tl.exp2(top - pivot)
        part_mask = (share > 0)[:, None] & (lane < SIZE)[None, :]
        part = tl.load(part_ptr + (split * rows + row)[:, None] * SIZE + lane[None, :], mask=part_mask, other=0.0)
        sum_D = sum_D * decay + tl.sum(share[:, None] * part, 0)
        weight = weight * decay + tl.sum(share, 0)
        top = above
    out = sum_D / tl.where(weight == 0.0, 1.0, weight)
    o_offset = batch * stride_ob + head * stride_oh + node * stride_on + lane
    tl.store(out_ptr + o_offset, out.to(out_ptr.dtype.element_ty), mask=lane < SIZE)


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
    """What `reference.tree_attention` defines, in the dtype of q (fp16, bf16, fp32) with fp32 sums: out [B, Hq, N, D].

    Caches may have any strides but the last, more rows than q, and anything in slots past the tree. ValueError for
    shapes that no kernel is made for. Nothing waits for the GPU.
    """
    return attend_under(
        q_BHND, k_cache_BHSD, v_cache_BHSD, tree_mask(prefix_len_B, ancestor_words_BNW, window), scale, softcap
    )


def attend_under(
    q_BHND: torch.Tensor,
    k_cache_BHSD: torch.Tensor,
    v_cache_BHSD: torch.Tensor,
    mask: torch.Tensor,
    scale: float | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """`tree_attention` under a tree mask. The result's memory is in the order [B, N, Hq, D]."""
    batch, heads, nodes, size = q_BHND.shape
    kv_heads, slots = k_cache_BHSD.shape[1:3]
    words = -(-nodes // WORD_BITS)
    windowed = mask.shape[-1] == words + 2
    if mask.dtype != torch.int64 or mask.shape != (batch, 1, nodes, words + 1 + windowed) or mask.stride(-1) != 1:
        raise ValueError(
            f"a tree mask of {nodes} nodes is int64 [B, 1, N, {words + 1} or {words + 2}], not {mask.shape}"
        )
    if k_cache_BHSD.shape != v_cache_BHSD.shape or k_cache_BHSD.shape[-1] != size:
        raise ValueError("queries, keys and values need one head size, keys and values one shape")
    if {k_cache_BHSD.dtype, v_cache_BHSD.dtype} != {q_BHND.dtype} or q_BHND.dtype not in DTYPES:
        raise ValueError("queries, keys and values need one dtype: fp16, bf16 or fp32")
    if k_cache_BHSD.shape[0] < batch:
        raise ValueError(f"a cache of {k_cache_BHSD.shape[0]} rows for {batch} rows of queries")
    if k_cache_BHSD.stride(-1) != 1 or v_cache_BHSD.stride(-1) != 1:
        raise ValueError("the last dimension of a cache must be contiguous")
    if q_BHND.stride(-1) != 1:
        q_BHND = q_BHND.contiguous()
    shape = Shape(batch, heads, kv_heads, nodes, size, slots, DTYPES[q_BHND.dtype])
    plan = plan_launch(shape, _device(q_BHND.device), general=windowed or softcap is not None)
    out = q_BHND.new_empty(batch, nodes, heads, size).transpose(1, 2)
    scale = size**-0.5 if scale is None else scale
    _launch(plan, q_BHND, k_cache_BHSD, v_cache_BHSD, mask, out, scale, softcap or 0.0, windowed)
    return out


def _launch(
    plan: LaunchPlan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    softcap: float,
    windowed: bool,
) -> None:
    batch, heads, nodes, size = q.shape
    kv_heads, slots = k.shape[1:3]
    config = plan.config
    parts = (plan.splits if plan.splits > 1 else 0, batch, heads, nodes)
    part, lse = (q.new_empty(shape, dtype=torch.float32) for shape in ((*parts, size), parts))
    if config.general and not windowed:
        # One kernel has both.
        mask = torch.cat([mask[..., :1], torch.full_like(mask[..., :1], NO_WINDOW), mask[..., 1:]], -1)
    words = mask.shape[-1] - 1 - config.general
    # Triton launches on the current device, which need not be the tensors'.
    with torch.cuda.device_of(q):
        attend[(plan.splits, kv_heads * plan.row_blocks, batch)](
            q, k, v, mask, out, part, lse, scale, softcap,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], mask.stride(0), mask.stride(2), *out.stride()[:3],
            nodes, words, heads // kv_heads, kv_heads, slots,
            size, config.block_m, config.block_n, config.block_d, config.general, INTERPRETED,
            num_warps=config.warps, num_stages=config.stages, **_FUSED,
        )  # fmt: skip
        if plan.splits > 1:
            merge[(nodes, heads, batch)](
                part, lse, out, *out.stride()[:3], heads, nodes, plan.splits, size,
                MERGE_AT_ONCE, config.block_d, num_warps=4, **_FUSED,
            )  # fmt: skip


@functools.lru_cache
def _device(device: torch.device) -> Device:
    if device.type != "cuda":
        return Device.of("sm90", 8)  # the interpreter: few processors, so that small shapes are split too
    properties: Any = torch.cuda.get_device_properties(device)
    arch = f"sm{properties.major}{properties.minor}"
    return Device(arch, properties.multi_processor_count, properties.shared_memory_per_block_optin)
