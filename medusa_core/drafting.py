"""The heads as a decode step runs them: a tree's tokens depth by depth, only the heads it is deep enough for.

Heads of kind "medusa" are blind to what was drafted, so all of them run at once and every parent of a depth has the
same candidates. Heads of kind "hydra" run depth by depth, head k for all parents of its depth in one product, each
with the tokens on its path. Shapes follow from the tree alone. On a CPU every matrix is reordered once (see
`packing`). Knows nothing of acceptance.
Legend: B rows, K heads, N nodes, M parents of one depth, D hidden, E embedding, C head vocabulary, W ranks, G
distributions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

import torch
from torch.nn import functional as F

from medusa_core.acceptance import Distributions
from medusa_core.heads import MedusaHeads, ResidualBlocks
from medusa_core.ops import packed_linear
from medusa_core.packing import can_pack, reordered
from medusa_core.tree import Tree

_Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


class Drafter:
    """Candidates of a set of heads; `pack` reorders a copy of their weights where that helps."""

    def __init__(self, heads: MedusaHeads, *, pack: bool) -> None:
        self.heads = heads
        parameter = next(heads.parameters())
        pack = pack and can_pack(parameter.dtype, parameter.device)
        self._by_head = _Layers(heads, pack=pack) if pack or heads.path is not None else None

    @torch.inference_mode()
    def likeliest(self, hidden_BD: torch.Tensor, root_B: torch.Tensor, tree: Tree) -> torch.Tensor:
        """Tokens of every node, [B, N]: the root's, then of each node the token of its rank at its parent."""
        layout, tokens_BN = tree.on(hidden_BD.device), root_B[:, None]
        if tree.is_off:
            return tokens_BN
        if self.heads.path is None or self._by_head is None:
            top_BKW = self.heads.ranked(self._all_logits(hidden_BD, tree.depth), tree.width)
            return torch.cat([tokens_BN, top_BKW[:, layout.depths_N[1:] - 1, layout.ranks_N[1:]]], 1)
        for depth, level in enumerate(layout.levels):
            logits_BMC = self._by_head.after(depth, hidden_BD, tokens_BN[:, level.paths_MA])
            top_BMW = self.heads.vocab_map_C[logits_BMC.topk(level.width, -1).indices]
            tokens_BN = torch.cat([tokens_BN, top_BMW[:, level.parents_X, level.ranks_X]], 1)
        return tokens_BN

    @torch.inference_mode()
    def distributions(self, hidden_BD: torch.Tensor, tree: Tree, temperature: float) -> Distributions:
        """What `acceptance.draw_children` draws a tree's tokens from, over the backbone's vocabulary, fp32."""
        by_head, levels = self._by_head, tree.on(hidden_BD.device).levels
        if self.heads.path is None or by_head is None:
            blind_KBC = self._all_logits(hidden_BD, tree.depth)
            return lambda depth, tokens_BN: self._spread(blind_KBC[depth][:, None], temperature)

        def after(depth: int, tokens_BN: torch.Tensor) -> torch.Tensor:
            logits_BMC = by_head.after(depth, hidden_BD, tokens_BN[:, levels[depth].paths_MA])
            return self._spread(logits_BMC, temperature)

        return after

    def _spread(self, logits_BGC: torch.Tensor, temperature: float) -> torch.Tensor:
        probs_BGC = (logits_BGC.float() / temperature).softmax(-1)
        spread_BGV = probs_BGC.new_zeros(*probs_BGC.shape[:2], self.heads.vocab_size)
        spread_BGV[..., self.heads.vocab_map_C] = probs_BGC
        return spread_BGV

    def _all_logits(self, hidden_BD: torch.Tensor, num_heads: int) -> torch.Tensor:
        """Logits [K', B, C] of heads that see the hidden state alone. Without reordered weights one batched product
        does all of them, as in training."""
        if self._by_head is not None:
            return self._by_head.blind(hidden_BD, num_heads)
        logits_KBC: torch.Tensor = self.heads(hidden_BD, num_heads=num_heads)
        return logits_KBC


class _Layers:
    """`MedusaHeads.forward` head by head: a CPU reads each matrix once either way."""

    def __init__(self, heads: MedusaHeads, *, pack: bool) -> None:
        self.heads = heads
        self._linear: _Linear = packed_linear if pack else F.linear
        ready = reordered if pack else torch.Tensor.detach
        self._blocks = [
            [
                (
                    ready(block.weight[head]),
                    block.bias[head].detach(),
                    None if block.weight_out is None else ready(block.weight_out[head]),
                )
                for block in cast(Iterable[ResidualBlocks], heads.blocks)
            ]
            for head in range(heads.num_heads)
        ]
        self._paths = [] if heads.path is None else [ready(weight) for weight in heads.path.weights]
        projection = heads.projection
        self._shared = None if projection.own else (ready(projection.weight_CD), projection.bias_C)
        self._own: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._low: list[tuple[torch.Tensor, torch.Tensor]] = []
        for head in range(heads.num_heads):
            if projection.own:
                bias = None if projection.bias is None else projection.bias[head].detach()
                self._own.append((ready(projection.weight[head]), bias))
            elif projection.down_KRD is not None and projection.up_KCR is not None:
                self._low.append((ready(projection.down_KRD[head]), ready(projection.up_KCR[head])))

    def blind(self, hidden_BD: torch.Tensor, num_heads: int) -> torch.Tensor:
        """Logits over the head vocabulary, [K', B, C]."""
        features = [self._features(head, hidden_BD, None) for head in range(num_heads)]
        if self._shared is not None and not self._low:
            # One product for all heads reads the shared weights once.
            return self._linear(torch.stack(features), *self._shared)
        return torch.stack([self._logits(head, x_BD) for head, x_BD in enumerate(features)])

    def after(self, head: int, hidden_BD: torch.Tensor, path_BMA: torch.Tensor) -> torch.Tensor:
        """Logits [B, M, C] of one head (counted from 0) for each of M paths of head + 1 tokens."""
        assert self.heads.path is not None
        seen_BMF = self._linear(self.heads.path.embedded(path_BMA).flatten(2), self._paths[head], None)
        return self._logits(head, self._features(head, hidden_BD[:, None], seen_BMF))

    def _features(self, head: int, x: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
        """What the projection reads; `seen` is what the path adds to the first block."""
        for weight, bias, weight_out in self._blocks[head]:
            inner = self._linear(x, weight, bias)
            inner = F.silu(inner if seen is None else inner + seen)
            x, seen = x + (inner if weight_out is None else self._linear(inner, weight_out, None)), None
        return x

    def _logits(self, head: int, x: torch.Tensor) -> torch.Tensor:
        if self._shared is None:
            return self._linear(x, *self._own[head])
        logits = self._linear(x, *self._shared)
        if self._low:
            down, up = self._low[head]
            logits = logits + self._linear(self._linear(x, down, None), up, None)
        return logits
