"""A key-value cache with a length per row, written in place; what transformers sees of it is the `Cache` interface.

Row b holds its committed prefix in slots 0 .. length[b]-1 and, during a step, the tree's nodes right after it.
`compact` keeps an accepted path and forgets the rest. It knows nothing of tokens or acceptance.
Legend: B rows, N nodes of the step, S slots, H key heads, D head size, A path length.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from medusa_core.errors import InputError


class _Layer(CacheLayerMixin):
    """Keys and values of one layer, [B, H, S, D], allocated when their shape is first seen."""

    is_sliding = False

    def __init__(self, owner: TreeCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.owner = owner

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        rows, slots = self.owner.rows, self.owner.slots

        def allocate(like: torch.Tensor) -> torch.Tensor:
            # Zeros, not garbage: masked slots still enter products, and 0 · NaN is NaN.
            return torch.zeros(rows, like.shape[1], slots, like.shape[3], dtype=like.dtype, device=like.device)

        self.keys, self.values = allocate(key_states), allocate(value_states)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = self.stores()
        return self.owner.write(keys, key_states), self.owner.write(values, value_states)

    def stores(self) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.keys is not None and self.values is not None, "no forward has filled this layer yet"
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.extent, 0

    def get_seq_length(self) -> int:
        return self.owner.extent

    def get_max_length(self) -> int:
        return self.owner.slots


class TreeCache(Cache):
    """Cache of `rows` sequences of up to `slots` tokens. `place` says where the next forward's keys go."""

    def __init__(self, *, layers: int, rows: int, slots: int) -> None:
        self.rows, self.slots = rows, slots
        self.extent = 0
        self._window = slice(0, 0)
        self._slot_BN: torch.Tensor | None = None
        self._row_B1: torch.Tensor | None = None
        self._start = 0
        self._own_layers = [_Layer(self) for _ in range(layers)]
        super().__init__(layers=list(self._own_layers))

    def place(self, first_row: int, lengths: list[int], nodes: int, device: torch.device) -> None:
        """Announces a forward over `nodes` tokens of len(lengths) consecutive rows, written after their lengths."""
        if max(lengths) + nodes > self.slots:
            raise InputError(f"the cache has {self.slots} slots, this step needs {max(lengths) + nodes}")
        self._window = slice(first_row, first_row + len(lengths))
        self.extent = max(lengths) + nodes
        self._start = lengths[0]
        same = all(length == lengths[0] for length in lengths)
        # Rows of one length (always so for a batch of 1) are written as a slice, several times cheaper than a scatter.
        steps_N = torch.arange(nodes, device=device)
        self._slot_BN = None if same else torch.tensor(lengths, device=device)[:, None] + steps_N
        self._row_B1 = torch.arange(len(lengths), device=device)[:, None]

    def write(self, store: torch.Tensor, new_BHND: torch.Tensor) -> torch.Tensor:
        """Writes one layer's new keys or values and returns what the rows hold up to the step's extent."""
        rows = store[self._window]
        if self._slot_BN is None:
            rows[:, :, self._start : self._start + new_BHND.shape[2]] = new_BHND
        else:
            # An indexed store, not scatter_: that one copies all of the cache's rows for a handful of new ones.
            rows[self._row_B1, :, self._slot_BN] = new_BHND.transpose(1, 2)
        return rows[:, :, : self.extent]

    def compact(self, lengths: list[int], path_BA: torch.Tensor) -> None:
        """Moves the nodes of each row's path to the slots right after its length (rows 0 .. len(lengths)-1).

        Path entries past a row's accepted length may name any node: their slots are free again after this step.
        """
        depth = path_BA.shape[1]
        steps_A = torch.arange(depth, device=path_BA.device)
        if bool((path_BA == steps_A).all()):
            return
        base_B1 = torch.tensor(lengths, device=path_BA.device)[:, None]
        row_B1 = torch.arange(len(lengths), device=path_BA.device)[:, None]
        for layer in self._own_layers:
            for store in layer.stores():
                # Read as a copy before anything is written, so overlapping source and target slots are safe.
                kept = store[row_B1, :, base_B1 + path_BA]
                store[row_B1, :, base_B1 + steps_A] = kept

    def move_row(self, source: int, target: int, length: int) -> None:
        """Copies a row's committed prefix into another row."""
        for layer in self._own_layers:
            for store in layer.stores():
                store[target, :, :length] = store[source, :, :length]
