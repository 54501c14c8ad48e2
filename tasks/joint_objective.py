"""The joint loss of stage 2, L_LM + λ0 · Σ λ_k L_k (paper section 2.2.2), over conversations of a backbone that learns.

Knows nothing of optimizers, ranks or files.
Legend: B conversations of a micro-batch, T tokens, P positions that train, K heads, D hidden, V vocabulary, J kept ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from peft import PeftModel
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from infra.errors import UserError
from medusa_core.adapters import lm_head_rows
from medusa_core.heads import MedusaHeads
from medusa_core.losses import (
    divergence,
    head_labels,
    head_weights,
    lumped_divergence,
    path_tokens,
    weighted_loss,
)

Teacher = Literal["adapter_off", "top_k", "data"]
# Positions whose logits exist at a time, forward and backward.
_CHUNK = 256


@dataclass(frozen=True)
class Conversation:
    """One distilled answer: the positions [P] that backbone and heads learn from, which are those where the next token
    was generated; what the teacher said there (ids and log-probabilities [P, J], tail [P]); and what it said at the
    places of the heads' labels (ids and shares [P, K, J]), where the heads learn that."""

    input_ids_T: torch.Tensor
    loss_mask_T: torch.Tensor
    position_P: torch.Tensor
    teacher: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    targets: tuple[torch.Tensor, torch.Tensor] | None = None


@dataclass(frozen=True)
class Batch:
    """Conversations padded to the longest: tokens [B, T], the positions that train as rows and columns [P] each, the
    tokens that follow them [P], the heads' labels [P, K], the teacher's part at each position, and the heads' targets
    (or nothing, where these are the labels)."""

    tokens_BT: torch.Tensor
    row_P: torch.Tensor
    column_P: torch.Tensor
    next_P: torch.Tensor
    labels_PK: torch.Tensor
    teacher: tuple[torch.Tensor, ...]
    targets: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, conversations: Sequence[Conversation], *, num_heads: int, device: torch.device) -> Batch:
        """Padding lies right of everything a causal model could see from a real token."""
        width = max(len(c.input_ids_T) for c in conversations)
        tokens = torch.zeros(len(conversations), width, dtype=torch.int64)
        rows, columns, labels = [], [], []
        for row, conversation in enumerate(conversations):
            ids, at = conversation.input_ids_T, conversation.position_P
            tokens[row, : len(ids)] = ids
            rows.append(torch.full_like(at, row))
            columns.append(at)
            labels.append(head_labels(ids, conversation.loss_mask_T, num_heads)[at])
        row_P, column_P = torch.cat(rows), torch.cat(columns)

        def joined(given: Sequence[tuple[torch.Tensor, ...] | None]) -> tuple[torch.Tensor, ...]:
            kept = [each for each in given if each is not None]
            return tuple(torch.cat(parts).to(device) for parts in zip(*kept, strict=True))

        teacher, targets = joined([c.teacher for c in conversations]), joined([c.targets for c in conversations])
        moved = (t.to(device) for t in (tokens, row_P, column_P, tokens[row_P, column_P + 1], torch.cat(labels)))
        return cls(*moved, teacher, targets)

    @property
    def path_PK(self) -> torch.Tensor:
        """The true tokens t + 1 .. t + K at each position."""
        return path_tokens(self.next_P, self.labels_PK)

    @property
    def learnt(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the heads learn: tokens with their shares [P, K, J], or labels [P, K] and None."""
        if not self.targets:
            return self.labels_PK, None
        tokens_PKJ, shares_PKJ = self.targets
        return tokens_PKJ.long(), shares_PKJ

    def empty(self) -> Batch:
        """The same conversations with nothing to learn."""
        none = slice(0, 0)
        return Batch(
            self.tokens_BT,
            self.row_P[none],
            self.column_P[none],
            self.next_P[none],
            self.labels_PK[none],
            tuple(part[none] for part in self.teacher),
            tuple(part[none] for part in self.targets),
        )


class JointObjective(nn.Module):
    """Backbone and heads as one module, so that DeepSpeed sees every parameter used in its forward."""

    def __init__(
        self, model: Any, heads: MedusaHeads, *, decay: float, teacher: Teacher, lm_weight: float = 1.0
    ) -> None:
        super().__init__()
        self.model, self.heads, self.teacher, self.lm_weight = model, heads, teacher, lm_weight
        self.register_buffer("weights_K", head_weights(heads.num_heads, decay), persistent=False)
        if teacher == "adapter_off" and not isinstance(model, PeftModel):
            raise UserError("the teacher can't be the model with its adapter off: there is no adapter")

    def read_directly(self) -> list[nn.Parameter]:
        """Parameters that the forward reads itself: the heads', and the LM head's with its adapter."""
        return [*self.heads.parameters(), *self.backbone.get_output_embeddings().parameters()]

    @property
    def backbone(self) -> Any:
        """The transformers model, adapters inside."""
        return self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model

    def save_memory(self) -> None:
        """Keeps only what enters each layer of the backbone, and computes the rest again in the backward pass."""
        self.backbone.gradient_checkpointing_enable({"use_reentrant": False})

    def forward(
        self, batch: Batch, *, positions: float, counts_K: torch.Tensor, heads_share: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The loss of a micro-batch and its two parts, L_LM (nan if it has no weight) and Σ λ_k L_k: sums over its
        positions, divided by the numbers of positions and of labels that the caller says."""
        states_BTD = self._states(batch)
        hidden_PD = states_BTD[batch.row_P, batch.column_P]
        # One row through the LM head, times nothing: every rank's backward must reach the same parameters, also where
        # its micro-batch has nothing to learn.
        anchor = self.logits(states_BTD[:1, 0]).float().sum() * 0.0
        lm = anchor
        if self.lm_weight:
            lm = lm + self._lm_sum(hidden_PD, batch) / positions
        rows_CD = None
        if not self.heads.projection.own:
            rows_CD = lm_head_rows(self.backbone.get_output_embeddings(), self.heads.vocab_map_C)
        labels, shares_PKJ = batch.learnt
        sums_K, _ = self.heads.losses(hidden_PD, labels, batch.path_PK, lm_weight_CD=rows_CD, shares_PKJ=shares_PKJ)
        heads = weighted_loss(sums_K, counts_K, self.weights_K.float())
        shown = lm.detach() if self.lm_weight else lm.new_tensor(float("nan"))
        return self.lm_weight * lm + heads_share * heads, shown, heads.detach()

    def hidden(self, batch: Batch) -> torch.Tensor:
        """Hidden states [P, D] after the final norm, of the backbone as it is now."""
        return self._states(batch)[batch.row_P, batch.column_P]

    @torch.no_grad()
    def teacher_hidden(self, batch: Batch) -> torch.Tensor:
        """The same of the model as it was: adapter and dropout off."""
        with self._as_it_was():
            return self.hidden(batch)

    def logits(self, hidden_PD: torch.Tensor, *, as_it_was: bool = False) -> torch.Tensor:
        """Logits [P, V] by the LM head, without its adapter on request; a configured soft cap applied."""
        output = self.backbone.get_output_embeddings()
        logits_PV: torch.Tensor = (getattr(output, "base_layer", output) if as_it_was else output)(hidden_PD)
        cap = getattr(self.backbone.config.get_text_config(), "final_logit_softcapping", None)
        return logits_PV if cap is None else torch.tanh(logits_PV / cap) * cap

    @torch.no_grad()
    def check(self) -> None:
        """UserError if the model's logits are not its LM head's output (scaled, or made in some way of its own)."""
        ids = torch.tensor([[1, 2, 3]], device=self.weights_K.device)
        whole = self.backbone(input_ids=ids, use_cache=False).logits[0].float()
        ours = self.logits(self.backbone.get_decoder()(input_ids=ids, use_cache=False)[0][0]).float()
        if not torch.allclose(whole, ours, rtol=0.02, atol=0.02 * float(whole.std())):
            raise UserError(
                f"{type(self.backbone).__name__} makes its logits in a way of its own (scaled after the LM head?): "
                "joint training would teach it something else; use Medusa-1"
            )

    def _states(self, batch: Batch) -> torch.Tensor:
        states_BTD: torch.Tensor = self.backbone.get_decoder()(input_ids=batch.tokens_BT, use_cache=False)[0]
        return states_BTD

    def _lm_sum(self, hidden_PD: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Summed divergence from the teacher, or cross-entropy, some positions' logits at a time."""
        if self.teacher == "adapter_off":
            target: tuple[torch.Tensor, ...] = (self.teacher_hidden(batch),)
        else:
            target = batch.teacher if self.teacher == "top_k" else (batch.next_P,)
        total = hidden_PD.new_zeros((), dtype=torch.float32)
        for part in torch.arange(len(hidden_PD), device=hidden_PD.device).split(_CHUNK):
            arguments = (hidden_PD[part], *(each[part] for each in target))
            total = total + checkpoint(self._lm_part, *arguments, use_reentrant=False)
        return total

    def _lm_part(self, hidden_PD: torch.Tensor, *target: torch.Tensor) -> torch.Tensor:
        student_PV = self.logits(hidden_PD)
        if self.teacher == "adapter_off":
            return divergence(self.logits(target[0], as_it_was=True), student_PV).sum()
        if self.teacher == "top_k":
            ids_PJ, logprobs_PJ, tail_P = target
            return lumped_divergence(ids_PJ, logprobs_PJ, tail_P, student_PV).sum()
        return F.cross_entropy(student_PV.float(), target[0], reduction="sum")

    @contextmanager
    def _as_it_was(self) -> Any:
        training = self.model.training
        self.model.eval()
        try:
            with self.model.disable_adapter():
                yield
        finally:
            self.model.train(training)
