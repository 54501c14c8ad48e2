"""Medusa heads: from the backbone's last hidden state to logits for the tokens after the next (paper equation 1).

Head k (k = 1..K) reads h_t, the hidden state *after the final norm*, and predicts token t + k + 1. Blocks start as the
identity and own projections as a copy of the LM head, so an untrained head equals the LM head exactly.
Knows nothing of data, optimizers or decoding.
Legend: P positions, K heads, L blocks, D hidden, F block width, V full vocabulary, C head vocabulary (truncated).
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from medusa_core.errors import InputError
from medusa_core.losses import IGNORE, count_labels, linear_cross_entropy


class HeadsConfig(BaseModel):
    """What a set of heads looks like, apart from the backbone it sits on. `vocab: null` keeps the full vocabulary."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["medusa"] = "medusa"
    block: Literal["paper", "mlp"] = "paper"
    lm_head: Literal["own", "shared"] = "own"
    num_heads: int = Field(4, ge=1, le=16)
    num_layers: int = Field(1, ge=1, le=8)
    vocab: int | None = Field(8192, ge=1)
    mlp_width: int = Field(4, ge=1, le=16, description="width of an mlp block, in multiples of the hidden size")


class ResidualBlocks(nn.Module):
    """One block of every head, evaluated as one batched product: x + SiLU(x W^T + b), or x + SiLU(x U^T + b) W^T."""

    weight_out: nn.Parameter | None

    def __init__(self, config: HeadsConfig, hidden: int) -> None:
        super().__init__()
        heads, width = config.num_heads, hidden * config.mlp_width
        if config.block == "paper":
            self.weight = nn.Parameter(torch.zeros(heads, hidden, hidden))
            self.bias = nn.Parameter(torch.zeros(heads, hidden))
            self.weight_out = None
        else:
            self.weight = nn.Parameter(torch.randn(heads, width, hidden) * hidden**-0.5)
            self.bias = nn.Parameter(torch.zeros(heads, width))
            self.weight_out = nn.Parameter(torch.zeros(heads, hidden, width))

    def forward(self, x_KPD: torch.Tensor) -> torch.Tensor:
        heads = x_KPD.shape[0]
        inner = F.silu(torch.baddbmm(self.bias[:heads, None], x_KPD, self.weight[:heads].transpose(1, 2)))
        if self.weight_out is not None:
            inner = inner @ self.weight_out[:heads].transpose(1, 2)
        return x_KPD + inner


class VocabularyProjection(nn.Module):
    """From D to the head vocabulary C: own weights per head, or the backbone's LM head rows, frozen and not saved."""

    weight_CD: torch.Tensor
    bias_C: torch.Tensor | None
    bias: nn.Parameter | None

    def __init__(self, config: HeadsConfig, lm_weight_CD: torch.Tensor, lm_bias_C: torch.Tensor | None) -> None:
        super().__init__()
        self.own = config.lm_head == "own"
        if self.own:
            heads = config.num_heads
            self.weight = nn.Parameter(lm_weight_CD.detach().clone().expand(heads, -1, -1).contiguous())
            self.bias = None
            if lm_bias_C is not None:
                self.bias = nn.Parameter(lm_bias_C.detach().clone().expand(heads, -1).contiguous())
        else:
            # Non-persistent: in the shared layout the backbone's LM head is the only copy; training can't touch it.
            self.register_buffer("weight_CD", lm_weight_CD.detach().clone(), persistent=False)
            self.register_buffer("bias_C", None if lm_bias_C is None else lm_bias_C.detach().clone(), persistent=False)

    def forward(self, x_KPD: torch.Tensor) -> torch.Tensor:
        """Logits [K', P, C] of the first K' heads. The shared projection's weight is read once for all of them."""
        if not self.own:
            return F.linear(x_KPD, self.weight_CD, self.bias_C)
        heads = x_KPD.shape[0]
        logits_KPC = x_KPD @ self.weight[:heads].transpose(1, 2)
        return logits_KPC if self.bias is None else logits_KPC + self.bias[:heads, None]

    def losses(
        self,
        x_KPD: torch.Tensor,
        labels: torch.Tensor,
        shares_PKJ: torch.Tensor | None,
        lm_weight_CD: torch.Tensor | None,
    ) -> torch.Tensor:
        """Summed cross-entropy of every head, [K], without ever holding all logits. `lm_weight_CD` takes the place of
        a shared projection's weight."""
        if self.own:
            return linear_cross_entropy(x_KPD, self.weight, self.bias, labels, shares_PKJ)
        weight_CD = self.weight_CD if lm_weight_CD is None else lm_weight_CD
        return linear_cross_entropy(x_KPD, weight_CD, self.bias_C, labels, shares_PKJ)


class MedusaHeads(nn.Module):
    """K heads on one backbone. `vocab_map_C` maps head vocabulary entries to backbone token ids."""

    vocab_map_C: torch.Tensor
    inverse_V: torch.Tensor

    def __init__(
        self,
        config: HeadsConfig,
        *,
        lm_weight_VD: torch.Tensor,
        lm_bias_V: torch.Tensor | None = None,
        vocab_map_C: torch.Tensor | None = None,
    ) -> None:
        """lm_weight_VD is the backbone's LM head. vocab_map_C [C] names the tokens the heads may predict; with
        `config.vocab = None` it is every token. InputError if the map disagrees with the configuration."""
        super().__init__()
        vocab, hidden = lm_weight_VD.shape
        self.config = config
        self.hidden_size, self.vocab_size = hidden, vocab
        vocab_map_C = _checked_map(config, vocab_map_C, vocab).to(lm_weight_VD.device)
        inverse_V = torch.full((vocab,), IGNORE, device=lm_weight_VD.device)
        inverse_V[vocab_map_C] = torch.arange(len(vocab_map_C), device=lm_weight_VD.device)
        self.register_buffer("vocab_map_C", vocab_map_C)
        self.register_buffer("inverse_V", inverse_V, persistent=False)
        self.blocks = nn.ModuleList(ResidualBlocks(config, hidden) for _ in range(config.num_layers))
        bias_C = None if lm_bias_V is None else lm_bias_V[vocab_map_C]
        self.projection = VocabularyProjection(config, lm_weight_VD[vocab_map_C], bias_C)

    @classmethod
    def on(cls, model: PreTrainedModel, config: HeadsConfig, vocab_map_C: torch.Tensor | None = None) -> MedusaHeads:
        """Untrained heads on a model's LM head."""
        output = model.get_output_embeddings()
        bias = getattr(output, "bias", None)
        return cls(
            config,
            lm_weight_VD=output.weight.detach(),
            lm_bias_V=None if bias is None else bias.detach(),
            vocab_map_C=vocab_map_C,
        )

    @property
    def num_heads(self) -> int:
        return self.config.num_heads

    def features(self, hidden_PD: torch.Tensor, num_heads: int | None = None) -> torch.Tensor:
        """What the projections read, [K', P, D], for the first num_heads heads."""
        x_KPD = hidden_PD.expand(num_heads or self.num_heads, -1, -1)
        for block in self.blocks:
            x_KPD = block(x_KPD)
        return x_KPD

    def forward(self, hidden_PD: torch.Tensor, num_heads: int | None = None) -> torch.Tensor:
        """Logits over the head vocabulary, [K', P, C]."""
        logits_KPC: torch.Tensor = self.projection(self.features(hidden_PD, num_heads))
        return logits_KPC

    def top_tokens(self, hidden_BD: torch.Tensor, *, num_heads: int, width: int) -> torch.Tensor:
        """The `width` likeliest backbone token ids of the first num_heads heads, [B, K', width], best first."""
        return self.ranked(self(hidden_BD, num_heads), width)

    def ranked(self, logits_KBC: torch.Tensor, width: int) -> torch.Tensor:
        """The backbone token ids of each head's `width` highest logits, [B, K, width], best first."""
        top_KBW = logits_KBC.topk(width, dim=-1).indices
        return self.vocab_map_C[top_KBW].transpose(0, 1)

    def known(self, labels: torch.Tensor) -> torch.Tensor:
        """Backbone token labels as entries of the head vocabulary; IGNORE for those that have none."""
        return torch.where(labels == IGNORE, IGNORE, self.inverse_V[labels.clamp(min=0)])

    def losses(
        self,
        hidden_PD: torch.Tensor,
        labels_PK: torch.Tensor,
        lm_weight_CD: torch.Tensor | None = None,
        shares_PKJ: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Summed cross-entropy and number of labels of every head, both [K], for backbone token labels [P, K], or
        [P, K, J] with the share of the target's mass that each has.

        Labels of IGNORE, and tokens outside the head vocabulary, teach nothing and are not counted. Where the LM head
        is being trained too, `lm_weight_CD` are its present rows for the head vocabulary: a shared projection is those.
        """
        labels = self.known(labels_PK)
        sums_K = self.projection.losses(self.features(hidden_PD), labels, shares_PKJ, lm_weight_CD)
        return sums_K, count_labels(labels)

    @torch.no_grad()
    def detached(self) -> MedusaHeads:
        """A frozen copy, free of the hooks that a trainer may have put on this one."""
        parameter, projection = next(self.parameters()), self.projection
        dtype, device = parameter.dtype, parameter.device
        has_bias = (projection.bias if projection.own else projection.bias_C) is not None
        copy = MedusaHeads(
            self.config,
            lm_weight_VD=torch.zeros(self.vocab_size, self.hidden_size, dtype=dtype, device=device),
            lm_bias_V=torch.zeros(self.vocab_size, dtype=dtype, device=device) if has_bias else None,
            vocab_map_C=self.vocab_map_C,
        )
        copy.load_state_dict(self.state_dict())
        if not projection.own:
            copy.projection.weight_CD.copy_(projection.weight_CD)
            if copy.projection.bias_C is not None and projection.bias_C is not None:
                copy.projection.bias_C.copy_(projection.bias_C)
        return copy.to(dtype=dtype, device=device).requires_grad_(False).eval()

    @torch.no_grad()
    def ranks(self, hidden_PD: torch.Tensor, labels_PK: torch.Tensor, *, width: int, chunk: int = 512) -> torch.Tensor:
        """Rank of each label among its head's logits, [P, K]: 0 is the argmax, `width` means width or later (or a
        token outside the head vocabulary), -1 that there is no label. The same order as `top_tokens`."""
        ranks = []
        for hidden, labels in zip(hidden_PD.split(chunk), labels_PK.split(chunk), strict=True):
            tokens = self.top_tokens(hidden, num_heads=self.num_heads, width=width)
            hit = tokens == labels[..., None]
            rank = torch.where(hit.any(-1), hit.int().argmax(-1), width)
            ranks.append(torch.where(labels == IGNORE, -1, rank))
        return torch.cat(ranks)


def _checked_map(config: HeadsConfig, vocab_map_C: torch.Tensor | None, vocab: int) -> torch.Tensor:
    if config.vocab is None or config.vocab >= vocab:
        return torch.arange(vocab)
    if vocab_map_C is None:
        raise InputError(f"heads.vocab is {config.vocab} of {vocab} tokens, but no vocabulary map was given")
    distinct = vocab_map_C.unique()
    if len(vocab_map_C) != config.vocab or len(distinct) != len(vocab_map_C):
        raise InputError(
            f"the vocabulary map has {len(vocab_map_C)} entries, {len(distinct)} of them distinct; "
            f"heads.vocab asks for {config.vocab}"
        )
    if int(distinct[0]) < 0 or int(distinct[-1]) >= vocab:
        raise InputError(f"the vocabulary map names tokens outside 0..{vocab - 1}")
    return vocab_map_C.to(torch.int64)
