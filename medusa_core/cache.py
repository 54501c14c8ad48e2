"""A key-value cache with a length per row, written in place; what transformers sees of it is the `Cache` interface.

Row b holds its committed prefix in slots 0 .. length[b]-1 and, during a step, the tree's nodes right after it.
`compact` keeps an accepted path and forgets the rest. Layers of one shape share one tensor, so that compaction is a
single indexed copy whatever the depth of the model. It knows nothing of tokens or acceptance.
Legend: L layers, R rows, B rows of the step, N nodes, S slots, H key heads, D head size, A path length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from kernels.reference import compact_cache
from medusa_core.errors import InputError
from medusa_core.ops import write_cache


class LayerShape(NamedTuple):
    """What one layer keeps of a token: `heads` keys of `key_size` and values of `value_size`."""

    heads: int
    key_size: int
    value_size: int


class _Layer(CacheLayerMixin):
    """One layer's place in its store; transformers calls `update`."""

    is_sliding = False

    def __init__(self, owner: TreeCache, store: int, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.owner, self.store, self.index = owner, store, index
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        raise AssertionError("the cache is allocated as a whole")

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        owner = self.owner
        keys, values = owner.stores[self.store]
        write_cache(keys, values, key_states, value_states, self.index, owner.first_row, owner.start_B)
        if owner.fresh:
            return key_states, value_states
        # All slots, and all rows from the first: attention reads as many as its mask and its queries have. Were they
        # cut here, a compiled step would be tied to calls in which the same sizes happen to be equal.
        first = owner.first_row
        keys, values = keys[self.index], values[self.index]
        return (keys[first:], values[first:]) if first else (keys, values)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.extent, 0

    def get_seq_length(self) -> int:
        return 0 if self.owner.fresh else self.owner.extent

    def get_max_length(self) -> int:
        return self.owner.slots


class TreeCache(Cache):
    """Cache of `rows` sequences of up to `slots` tokens. `place` says where the next forward's keys go."""

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        *,
        rows: int,
        slots: int,
        dtype: torch.dtype,
        device: torch.device,
        compact: Callable[..., None] = compact_cache,
    ) -> None:
        self._compact = compact
        self.rows, self.slots = rows, slots
        self.first_row, self.extent, self.fresh = 0, 0, False
        self.start_B = torch.zeros(1, dtype=torch.int64, device=device)
        kinds = list(dict.fromkeys(shapes))

        def allocate(count: int, heads: int, size: int) -> torch.Tensor:
            # Zeros, not garbage: masked slots still enter products, and 0 · NaN is NaN.
            return torch.zeros(count, rows, heads, slots, size, dtype=dtype, device=device)

        self.stores = [
            (
                allocate(shapes.count(kind), kind.heads, kind.key_size),
                allocate(shapes.count(kind), kind.heads, kind.value_size),
            )
            for kind in kinds
        ]
        layers: list[Any] = [
            _Layer(self, kinds.index(shape), shapes[:number].count(shape)) for number, shape in enumerate(shapes)
        ]
        super().__init__(layers=layers)

    def place(self, first_row: int, start_B: torch.Tensor, *, end: int, fresh: bool = False) -> None:
        """Announces a forward over consecutive rows whose new keys go to the slots from start_B on, up to `end`.

        `fresh` rows have nothing before these: the new keys are all that is attended to."""
        if end > self.slots:
            raise InputError(f"the cache has {self.slots} slots, this step needs {end}")
        self.first_row, self.start_B, self.fresh = first_row, start_B, fresh

    def compact(self, start_B: torch.Tensor, path_BA: torch.Tensor) -> None:
        """Moves the nodes of each row's path (rows 0 .. B-1) to the slots right after its prefix of start_B tokens.

        Path entries past a row's accepted length may name any node: their slots are free again after this step.
        """
        if path_BA.shape[1] < 2:
            return
        for keys, values in self.stores:
            self._compact(keys, values, start_B, path_BA)

    def move_row(self, source: int, target: int, length: int) -> None:
        """Copies a row's committed prefix into another row."""
        for pair in self.stores:
            for store in pair:
                store[:, target, :, :length] = store[:, source, :, :length]
