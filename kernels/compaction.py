"""Moving the accepted path's keys and values to the end of the prefix, in Triton: all layers in one launch.

`reference.compact_cache` is the definition. Imports torch and triton only.
Legend: L layers, R rows of the cache, B rows of the step, H key heads, S slots, D size, A path length, root included.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["heads", "length"])  # type: ignore[untyped-decorator]
def compact(  # type: ignore[no-untyped-def]
    cache_ptr,
    start_ptr,
    path_ptr,
    stride_l,
    stride_r,
    stride_h,
    stride_s,
    stride_p,
    heads,
    length,
    size,
    BLOCK_A: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One head of one layer of one row. Grid (L · H, B)."""
    layer, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    row = tl.program_id(1)
    step, lane = tl.arange(0, BLOCK_A), tl.arange(0, BLOCK_D)
    start = tl.load(start_ptr + row)
    node = tl.load(path_ptr + row * stride_p + step, mask=step < length, other=0)
    base = cache_ptr + layer.to(tl.int64) * stride_l + row.to(tl.int64) * stride_r + head.to(tl.int64) * stride_h
    # The root lies where it belongs.
    mask = ((step > 0) & (step < length))[:, None] & (lane < size)[None, :]
    kept = tl.load(base + (start + node)[:, None] * stride_s + lane[None, :], mask=mask)
    # Sources and targets overlap, and the threads of a program are not in step: all read before any writes.
    tl.debug_barrier()
    tl.store(base + (start + step)[:, None] * stride_s + lane[None, :], kept, mask=mask)


def compact_cache(
    keys_LRHSD: torch.Tensor, values_LRHSD: torch.Tensor, start_B: torch.Tensor, path_BA: torch.Tensor
) -> None:
    """What `reference.compact_cache` defines, in place; one launch for all layers of a tensor. Waits for nothing."""
    batch, length = path_BA.shape
    if keys_LRHSD.stride(-1) != 1 or values_LRHSD.stride(-1) != 1:
        raise ValueError("the last dimension of a cache must be contiguous")
    start_B, path_BA = start_B.contiguous(), path_BA.contiguous()
    # Triton launches on the current device, which need not be the tensors'.
    with torch.cuda.device_of(keys_LRHSD):
        for cache in (keys_LRHSD, values_LRHSD):
            layers, _, heads, _, size = cache.shape
            compact[(layers * heads, batch)](
                cache, start_B, path_BA, *cache.stride()[:4], path_BA.stride(0), heads, length, size,
                triton.next_power_of_2(length), triton.next_power_of_2(size),
            )  # fmt: skip
