"""The engine's own operators: what a compiled step calls without looking into it, and eager code calls just the same.

Each is opaque to torch.compile for a reason: oneDNN's reordered weights have no layout that a compiler could read; an
in-place store into the cache would be turned into a copy of the cache per layer; attention over a cache of changing
extent needs no new graph; and a table that every layer reads is better stored than computed again in each. On a CPU
`kernels/cpu_ops.cpp` may take the place of the implementations here; on a GPU Triton's kernel verifies.
Knows nothing of trees or models. An operator has no gradient: `recording_gradients` says when to use plain torch.
Legend: L layers, R rows of the cache, B rows of the step, N nodes, S slots, H heads, D head size, G queries per key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

_LIBRARY = torch.library.Library("medusa", "DEF")


def _define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Registers an operator for every backend that has no implementation of its own."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"medusa::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.medusa, name).default


def _packed_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


packed_linear = _define(
    "packed_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    _packed_linear,
    lambda x, weight, bias: x.new_empty(*x.shape[:-1], weight.shape[0]),
)


def _write_cache(
    keys_LRHSD: torch.Tensor,
    values_LRHSD: torch.Tensor,
    key_BHND: torch.Tensor,
    value_BHND: torch.Tensor,
    layer: int,
    row: int,
    start_B: torch.Tensor,
) -> None:
    batch, nodes = key_BHND.shape[0], key_BHND.shape[2]
    if start_B.device.type == "cpu" and (batch == 1 or bool((start_B == start_B[0]).all())):
        # Rows of one length are a slice, several times cheaper than an indexed store.
        start = int(start_B[0])
        for store, new in ((keys_LRHSD, key_BHND), (values_LRHSD, value_BHND)):
            store[layer].narrow(0, row, batch).narrow(2, start, nodes).copy_(new)
        return
    row_B1 = torch.arange(row, row + batch, device=start_B.device)[:, None]
    slot_BN = start_B[:, None] + torch.arange(nodes, device=start_B.device)
    for store, new in ((keys_LRHSD, key_BHND), (values_LRHSD, value_BHND)):
        # An indexed store, not scatter_: that one copies all of the cache's rows for a handful of new ones.
        store[layer][row_B1, :, slot_BN] = new.transpose(1, 2)


write_cache = _define(
    "write_cache(Tensor(a!) keys, Tensor(b!) values, Tensor key, Tensor value, int layer, int row, Tensor start) -> ()",
    _write_cache,
    lambda *arguments: None,
)


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float | None,
    softcap: float | None = None,
) -> torch.Tensor:
    """query [B, Hq, N, D], key/value [>=B, Hkv, >=S, D], additive or boolean mask [B, 1, N or G*N, S] → [B, N, Hq, D].

    Rows and slots past those of query and mask are not read. Query heads that share a key head are folded into the
    node axis, so the cache is never repeated.
    """
    batch, heads, nodes, size = query.shape
    slots = mask.shape[-1]
    key, value = (whole.narrow(0, 0, batch).narrow(2, 0, slots) for whole in (key, value))
    group = heads // key.shape[1]
    folded = query.reshape(batch, key.shape[1], group * nodes, size)
    if mask.shape[2] != group * nodes:
        mask = mask.expand(batch, 1, nodes, slots).repeat(1, 1, group, 1)
    if softcap is None:
        out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scale)
    else:
        scores = folded @ key.transpose(-1, -2) * (size**-0.5 if scale is None else scale)
        scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        out = scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value
    return out.reshape(batch, heads, nodes, value.shape[-1]).transpose(1, 2).contiguous()


def _like_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


tree_attention = _define(
    "tree_attention(Tensor query, Tensor key, Tensor value, Tensor mask, float? scale) -> Tensor",
    masked_attention,
    _like_attention,
)
capped_attention = _define(
    "capped_attention(Tensor query, Tensor key, Tensor value, Tensor mask, float? scale, float softcap) -> Tensor",
    masked_attention,
    _like_attention,
)

materialize = _define(
    "materialize(Tensor x) -> Tensor",
    lambda x: x.clone(memory_format=torch.contiguous_format),
    lambda x: x.new_empty(x.shape),
)


def _tree_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float | None,
    softcap: float | None,
) -> torch.Tensor:
    from kernels.tree_attention import attend_under

    return attend_under(query, key, value, mask, scale, softcap).transpose(1, 2)


tree_kernel = _define(
    "tree_kernel(Tensor query, Tensor key, Tensor value, Tensor mask, float? scale, float? softcap) -> Tensor",
    _tree_kernel,
    _like_attention,
)


def recording_gradients(*tensors: torch.Tensor) -> bool:
    """Whether a gradient is being recorded through these tensors, so that the operators can't be used."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
