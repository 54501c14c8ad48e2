"""Reading the hidden state that a model's LM head reads, in any architecture. Knows nothing of heads or trees.

Legend: B rows, N nodes, D hidden, P positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel


class HiddenTap:
    """Keeps what the LM head was last given: by definition h_t, the hidden state after the final norm."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._only_B: torch.Tensor | None = None
        self._without_logits = False
        self._hidden: torch.Tensor | None = None
        self._hook = model.get_output_embeddings().register_forward_pre_hook(self._capture)

    @property
    def hidden(self) -> torch.Tensor:
        """The LM head's input in the last forward, [B, N, D]."""
        assert self._hidden is not None, "no forward has run yet"
        return self._hidden

    @contextmanager
    def only(self, position_B: torch.Tensor | None) -> Iterator[None]:
        """Within the block the LM head is given one position of each row (all of them with None).

        Prompts of several lengths need logits at their own ends; transformers' `logits_to_keep` knows only positions
        that all rows share.
        """
        self._only_B = position_B
        try:
            yield
        finally:
            self._only_B = None

    @contextmanager
    def without_logits(self) -> Iterator[None]:
        """Within the block the LM head is given a single position: what it costs is saved where hidden states are all
        that is wanted."""
        self._without_logits = True
        try:
            yield
        finally:
            self._without_logits = False

    def close(self) -> None:
        self._hook.remove()

    def _capture(self, module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden_BND = args[0]
        if self._only_B is not None:
            rows_B = torch.arange(len(self._only_B), device=hidden_BND.device)
            hidden_BND = hidden_BND[rows_B, self._only_B][:, None]
        self._hidden = hidden_BND
        return (hidden_BND[:1, :1] if self._without_logits else hidden_BND, *args[1:])


@torch.inference_mode()
def read_positions(
    model: PreTrainedModel, tap: HiddenTap, input_ids_T: torch.Tensor, positions_P: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One causal pass over a sequence: hidden states [P, D] and logits [P, V] at the given positions only."""
    output = model(
        input_ids=input_ids_T[None].to(model.device), use_cache=False, logits_to_keep=positions_P.to(model.device)
    )
    return tap.hidden[0], output.logits[0]


@torch.inference_mode()
def read_hidden(
    model: PreTrainedModel, tap: HiddenTap, input_ids_T: torch.Tensor, positions_P: torch.Tensor
) -> torch.Tensor:
    """The hidden states of `read_positions` alone, [P, D], without a product with the vocabulary."""
    with tap.without_logits():
        model(input_ids=input_ids_T[None].to(model.device), use_cache=False)
    return tap.hidden[0, positions_P.to(model.device)]
