"""Verifying trees with models that attend in ways of their own: every path of the tree on a copy of the row's cache.

Slower, and right for any decoder whose cache can be copied: nothing is asked of the attention, the mask or the
positions but what the model does in plain decoding. It offers what `backbone.Backbone` offers.
Legend: B rows, N nodes, V vocabulary, D hidden, P paths (leaves of the tree), A path length.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from medusa_core.compiling import CompiledSteps
from medusa_core.tap import HiddenTap
from medusa_core.tree import Tree


@dataclass
class CopiesCache:
    """A cache of its own for each row, and the tokens of the tree that was verified last."""

    owner: CopyingBackbone
    slots: int
    rows: int
    caches: dict[int, DynamicCache] = field(default_factory=dict)
    verified: list[list[int]] = field(default_factory=list)

    def compact(self, start_B: torch.Tensor, path_BA: torch.Tensor) -> None:
        """Runs each row's accepted tokens into its own cache. A path's last node is repeated past its length."""
        for row, path in enumerate(path_BA.tolist()):
            start = int(start_B[row])
            # A path that sticks out past the context belongs to an answer that ends here.
            kept = list(dict.fromkeys(path))[: self.owner.context_length - start]
            tokens = torch.tensor([[self.verified[row][node] for node in kept]], device=self.owner.device)
            self.owner.run(self.caches[row], tokens, start)

    def move_row(self, source: int, target: int, length: int) -> None:
        """Lets one row become another."""
        self.caches[target] = self.caches.pop(source)


class CopyingBackbone:
    """The model behind an engine, unchanged."""

    def __init__(self, model: PreTrainedModel, cache_argument: str, context_length: int) -> None:
        self.model = model
        self.device: torch.device = model.device
        self.context_length = context_length
        self.steps: CompiledSteps | None = None
        self.kernel = False
        self.tap = HiddenTap(model)
        self._cache_argument = cache_argument

    def open(self, *, rows: int, slots: int) -> CopiesCache:
        """A cache for `rows` rows."""
        return CopiesCache(self, slots, rows)

    def prefill(
        self, cache: CopiesCache, first_row: int, prompts: Sequence[Sequence[int]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs prompts one by one: logits [B, V] and hidden state [B, D] after the last token of each."""
        logits, hidden = [], []
        for row, prompt in enumerate(prompts, first_row):
            cache.caches[row] = DynamicCache(config=self.model.config)
            tokens = torch.tensor([list(prompt)], device=self.device)
            logits_1TV, hidden_1TD = self.run(cache.caches[row], tokens, 0)
            logits.append(logits_1TV[:, -1])
            hidden.append(hidden_1TD[:, -1])
        return torch.cat(logits), torch.cat(hidden)

    def verify(
        self, cache: CopiesCache, start_B: torch.Tensor, longest: int, tokens_BN: torch.Tensor, tree: Tree
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Every path of the tree on a copy of its row's cache: logits [B, N, V] and hidden states [B, N, D]."""
        paths_NA = tree.paths_ND.to(self.device)
        parents = set(tree.parents)
        leaves = [node for node in range(tree.nodes) if node not in parents]
        # Each node is read off the first path through it, at its own depth.
        path_of = [next(p for p, leaf in enumerate(leaves) if node in paths_NA[leaf]) for node in range(tree.nodes)]
        cache.verified = tokens_BN.tolist()
        logits, hidden = [], []
        for row, tokens_N in enumerate(tokens_BN):
            copies = copy.deepcopy(cache.caches[row])
            copies.batch_repeat_interleave(len(leaves))
            start = int(start_B[row])
            # Nodes past the context's end can't be run, and are cut by the budget: what is said of them is no matter.
            length = min(tree.depth + 1, self.context_length - start)
            logits_PAV, hidden_PAD = self.run(copies, tokens_N[paths_NA[leaves, :length]], start)
            depths_N = tree.depths_N.clamp(max=length - 1)
            logits.append(logits_PAV[path_of, depths_N])
            hidden.append(hidden_PAD[path_of, depths_N])
        return torch.stack(logits), torch.stack(hidden)

    def run(self, cache: DynamicCache, tokens_BT: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One causal pass after `start` tokens: logits [B, T, V] and hidden states [B, T, D]."""
        end = start + tokens_BT.shape[1]
        options: dict[str, Any] = {self._cache_argument: cache, "use_cache": True}
        options["attention_mask"] = torch.ones(len(tokens_BT), end, dtype=torch.int64, device=self.device)
        assert end <= self.context_length, "requests and paths are cut to the context"
        output: Any = self.model(input_ids=tokens_BT, **options)
        return output.logits, self.tap.hidden

    def close(self) -> None:
        """Detaches from the model."""
        self.tap.close()
