"""The heads as a decode step runs them: only those the tree is deep enough for, their weights read once.

On a CPU every matrix is reordered once (see `packing`); elsewhere all heads' blocks are one batched product, as in
training. Knows nothing of trees beyond how many heads and ranks are asked for.
Legend: B rows, K heads, D hidden, C head vocabulary, W ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch.nn import functional as F

from medusa_core.heads import MedusaHeads, ResidualBlocks
from medusa_core.ops import packed_linear
from medusa_core.packing import can_pack, reordered


class Drafter:
    """Top tokens of a set of heads; `pack` reorders a copy of their weights where that helps."""

    def __init__(self, heads: MedusaHeads, *, pack: bool) -> None:
        self.heads = heads
        parameter = next(heads.parameters())
        self._packed = _PackedHeads(heads) if pack and can_pack(parameter.dtype, parameter.device) else None

    @torch.inference_mode()
    def top_tokens(self, hidden_BD: torch.Tensor, *, num_heads: int, width: int) -> torch.Tensor:
        """The `width` likeliest backbone token ids of the first num_heads heads, [B, K', W], best first."""
        return self.heads.ranked(self._logits(hidden_BD, num_heads), width)

    @torch.inference_mode()
    def probabilities(self, hidden_BD: torch.Tensor, *, num_heads: int, temperature: float) -> torch.Tensor:
        """Each head's distribution over the backbone's vocabulary at a temperature, fp32 [B, K', V]."""
        logits_KBC = self._logits(hidden_BD, num_heads)
        probs_BKC = (logits_KBC.float() / temperature).softmax(-1).transpose(0, 1)
        spread = probs_BKC.new_zeros(*probs_BKC.shape[:2], self.heads.vocab_size)
        spread[..., self.heads.vocab_map_C] = probs_BKC
        return spread

    def _logits(self, hidden_BD: torch.Tensor, num_heads: int) -> torch.Tensor:
        compute = self.heads if self._packed is None else self._packed.logits
        logits_KBC: torch.Tensor = compute(hidden_BD, num_heads)
        return logits_KBC


class _PackedHeads:
    """`MedusaHeads.forward` over reordered weights, head by head: a CPU reads each matrix once either way."""

    def __init__(self, heads: MedusaHeads) -> None:
        self._blocks = [
            [
                (
                    reordered(block.weight[head]),
                    block.bias[head].detach(),
                    None if block.weight_out is None else reordered(block.weight_out[head]),
                )
                for block in cast(Iterable[ResidualBlocks], heads.blocks)
            ]
            for head in range(heads.num_heads)
        ]
        projection = heads.projection
        self._shared = None
        self._own: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        if projection.own:
            for head in range(heads.num_heads):
                bias = None if projection.bias is None else projection.bias[head].detach()
                self._own.append((reordered(projection.weight[head]), bias))
        else:
            self._shared = reordered(projection.weight_CD), projection.bias_C

    def logits(self, hidden_BD: torch.Tensor, num_heads: int) -> torch.Tensor:
        """Logits over the head vocabulary, [K', B, C]."""
        features = []
        for head in range(num_heads):
            x_BD = hidden_BD
            for weight, bias, weight_out in self._blocks[head]:
                inner = F.silu(packed_linear(x_BD, weight, bias))
                x_BD = x_BD + (inner if weight_out is None else packed_linear(inner, weight_out, None))
            features.append(x_BD)
        if self._shared is not None:
            logits_KBC: torch.Tensor = packed_linear(torch.stack(features), *self._shared)
            return logits_KBC
        return torch.stack([packed_linear(x, *own) for x, own in zip(features, self._own[:num_heads], strict=True)])
