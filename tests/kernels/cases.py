"""Calls of the tree-attention kernel in odd shapes, and the check that each must pass, interpreted or on a GPU."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from kernels import reference
from kernels.ancestor_bits import mask_from_words, words_from_parents
from kernels.tree_attention import tree_attention

# Where torch itself happens to be exact to the last bit; of the largest value.
ATOL = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}


@dataclass(frozen=True)
class Case:
    """Prefix lengths make the batch; `spare` slots lie past the longest; `strided`: a slice of a larger cache."""

    prefixes: tuple[int, ...]
    nodes: int
    heads: int
    kv_heads: int
    size: int
    spare: int = 3
    strided: bool = False
    window: int | None = None
    softcap: float | None = None

    def __str__(self) -> str:
        extra = f" strided{self.strided:d} window{self.window} cap{self.softcap}"
        return f"P{self.prefixes} N{self.nodes} H{self.heads}/{self.kv_heads} D{self.size}" + extra


CASES = (
    Case((0,), 1, 1, 1, 64, spare=0),
    Case((39,), 1, 4, 1, 64),
    Case((0, 290, 64), 7, 6, 2, 64, strided=True),
    Case((63,), 64, 2, 1, 80),
    Case((257, 1), 65, 2, 2, 96, strided=True),
    Case((200,), 128, 1, 1, 128, spare=100),
    Case((70, 128), 5, 8, 1, 256),
    Case((515,), 33, 4, 1, 128, spare=600),
    Case((900,), 16, 3, 1, 64, spare=0),
    Case((130, 5), 40, 5, 1, 80, softcap=3.0),
    Case((300, 0, 31), 12, 4, 2, 64, window=40, strided=True),
    Case((40,), 70, 2, 1, 64, window=3),
    Case((90, 200), 9, 2, 2, 128, window=64, softcap=20.0),
    Case((200,), 6, 1, 1, 256, window=1),
)


def random_parents(nodes: int, seed: int, deep: float = 0.3) -> list[int]:
    """A tree of any form; `deep` is how often a node follows the one before it."""
    rng = random.Random(seed)
    return [-1, *(node - 1 if rng.random() < deep else rng.randrange(node) for node in range(1, nodes))]


def check(case: Case, dtype: torch.dtype, device: str, parents: Sequence[Sequence[int]] | None = None) -> None:
    """The kernel against the definition, by the tolerance that torch's own attention in the same dtype sets."""
    generator = torch.Generator().manual_seed(len(str(case)))
    batch, slots = len(case.prefixes), max(case.prefixes) + case.nodes + case.spare

    def random_of(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    if case.strided:
        whole = [random_of(batch + 2, case.kv_heads + 1, slots + 5, case.size) for _ in range(2)]
        keys, values = (each[1 : 1 + batch, 1:, 2 : 2 + slots] for each in whole)
        query = random_of(batch, case.nodes, case.heads, case.size).transpose(1, 2)
    else:
        keys, values = (random_of(batch, case.kv_heads, slots, case.size) for _ in range(2))
        query = random_of(batch, case.heads, case.nodes, case.size)
    # Attention that picks few of many keys: else a long prefix's mean would drown the tree, and one wrong tile.
    query *= 3
    for b, prefix in enumerate(case.prefixes):
        for cache in (keys, values):
            cache[b, :, prefix + case.nodes :] = float("nan")
    parents = parents or [random_parents(case.nodes, seed) for seed in range(batch)]
    words = torch.stack([words_from_parents(each) for each in parents]).to(device)
    lengths, scale = torch.tensor(case.prefixes, device=device), case.size**-0.5
    options = {"window": case.window, "softcap": case.softcap}
    with _nan_for_uninitialized():
        out = tree_attention(query, keys, values, lengths, words, scale, **options)  # type: ignore[arg-type]
    exact = reference.tree_attention(
        query.float(), keys.float(), values.float(), lengths, words, scale, **options  # type: ignore[arg-type]
    )  # fmt: skip
    assert out.shape == query.shape and out.dtype == dtype
    apart = (out.float() - exact).abs()
    usual = float((_same_dtype(case, query, keys, values, words, exact) - exact).abs().max())
    worst = [int(i) for i in torch.unravel_index(apart.nan_to_num(float("inf")).argmax(), apart.shape)]
    allowed = 2 * usual + ATOL[dtype] * max(1.0, float(exact.abs().max()))
    assert bool((apart <= allowed).all()), f"{case} {dtype}: {float(apart.max())} > {allowed} at [b, h, n, d] = {worst}"


def _same_dtype(
    case: Case, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, words: torch.Tensor, exact: torch.Tensor
) -> torch.Tensor:
    """torch's SDPA in the inputs' own dtype, in fp32 for comparison; the exact result rounded where it has none."""
    if case.window or case.softcap:
        return exact.to(query.dtype).float()
    group, rows = case.heads // case.kv_heads, []
    for b, prefix in enumerate(case.prefixes):
        end = prefix + case.nodes
        seen = torch.ones(case.nodes, end, dtype=torch.bool, device=query.device)
        seen[:, prefix:] = mask_from_words(words[b])
        k, v = (cache[b, :, :end].repeat_interleave(group, 0)[None] for cache in (keys, values))
        rows.append(F.scaled_dot_product_attention(query[b][None], k, v, attn_mask=seen[None, None]))
    return torch.cat(rows).float()


class _nan_for_uninitialized:
    """torch fills memory that it doesn't initialize with NaN, so that what a kernel fails to write shows."""

    def __enter__(self) -> None:
        self._before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[assignment]

    def __exit__(self, *_: object) -> None:
        enabled, fill = self._before
        torch.use_deterministic_algorithms(enabled)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[assignment]
