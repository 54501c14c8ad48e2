"""Heads: from the backbone's last hidden state to logits for the tokens after the next (paper equation 1).

Head k (k = 1..K) reads h_t, the hidden state *after the final norm*, and predicts token t + k + 1. Heads of kind
"medusa" see nothing else; heads of kind "hydra" (arXiv 2402.05109) also see the tokens t + 1 .. t + k on the path to
what they predict, by the backbone's own input embeddings. Blocks start as the identity and projections as the LM head,
so an untrained head equals the LM head exactly. Knows nothing of data, optimizers or decoding.
Legend: P positions, K heads, L blocks, D hidden, E embedding, F block width, R rank, V full vocabulary, C head
vocabulary (truncated), J tokens that share a target's mass.
"""

from __future__ import annotations

from typing import Literal, cast

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

    kind: Literal["medusa", "hydra"] = Field(
        "medusa", description="medusa: heads see the hidden state alone; hydra: and the tokens drafted before theirs"
    )
    block: Literal["paper", "mlp"] = "paper"
    lm_head: Literal["own", "shared", "low_rank"] = Field(
        "own", description="projections of their own; the backbone's LM head; or that and a low-rank change of it"
    )
    num_heads: int = Field(4, ge=1, le=16)
    num_layers: int = Field(1, ge=1, le=8)
    vocab: int | None = Field(8192, ge=1)
    mlp_width: int = Field(4, ge=1, le=16, description="width of an mlp block, in multiples of the hidden size")
    rank: int = Field(64, ge=1, description="rank of the change where lm_head is low_rank")

    def inner_width(self, hidden: int) -> int:
        """Width F of a block's inner layer."""
        return hidden if self.block == "paper" else hidden * self.mlp_width


def export_obstacle(config: HeadsConfig) -> str | None:
    """Why no other server can load such heads, or None: vLLM, TGI and TensorRT-LLM know those of the paper."""
    if config.kind != "medusa":
        return f"heads.kind {config.kind}: other servers draft all heads from the hidden state alone"
    if config.block != "paper":
        return f"heads.block {config.block}: other servers know the paper's block alone"
    if config.lm_head == "low_rank":
        return "heads.lm_head low_rank: other servers know an LM head that is shared or the heads' own"
    return None


class ResidualBlocks(nn.Module):
    """One block of every head, evaluated as one batched product: x + SiLU(x W^T + b), or x + SiLU(x U^T + b) W^T."""

    weight_out: nn.Parameter | None

    def __init__(self, config: HeadsConfig, hidden: int) -> None:
        super().__init__()
        heads, width = config.num_heads, config.inner_width(hidden)
        if config.block == "paper":
            self.weight = nn.Parameter(torch.zeros(heads, hidden, hidden))
            self.bias = nn.Parameter(torch.zeros(heads, hidden))
            self.weight_out = None
        else:
            self.weight = nn.Parameter(torch.randn(heads, width, hidden) * hidden**-0.5)
            self.bias = nn.Parameter(torch.zeros(heads, width))
            self.weight_out = nn.Parameter(torch.zeros(heads, hidden, width))

    def forward(self, x_KPD: torch.Tensor, path_KPF: torch.Tensor | None = None) -> torch.Tensor:
        """`path_KPF` is what a drafted path adds before the SiLU."""
        heads = x_KPD.shape[0]
        inner = torch.baddbmm(self.bias[:heads, None], x_KPD, self.weight[:heads].transpose(1, 2))
        inner = F.silu(inner if path_KPF is None else inner + path_KPF)
        if self.weight_out is not None:
            inner = inner @ self.weight_out[:heads].transpose(1, 2)
        return x_KPD + inner


class PathProjection(nn.Module):
    """What the tokens on the path to a head's prediction add to its first block: for head k a matrix over the
    embeddings of k tokens. The embeddings are the backbone's, frozen and not saved, each brought to a mean square of 1,
    which is about what a final norm gives the hidden state beside them."""

    embedding_VE: torch.Tensor

    def __init__(self, config: HeadsConfig, hidden: int, embedding_VE: torch.Tensor) -> None:
        super().__init__()
        width, size = config.inner_width(hidden), embedding_VE.shape[1]
        # As a paper block's own weight: nothing at first, so that the block is the identity.
        scale = 0.0 if config.block == "paper" else 1.0
        self.weights = nn.ParameterList(
            torch.randn(width, k * size) * (scale * (k * size) ** -0.5) for k in range(1, config.num_heads + 1)
        )
        self.register_buffer("embedding_VE", embedding_VE.detach(), persistent=False)

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embeddings [..., E] of backbone token ids."""
        return F.rms_norm(self.embedding_VE[tokens], (self.embedding_VE.shape[1],))

    def forward(self, path_PK: torch.Tensor, num_heads: int) -> torch.Tensor:
        """For each of the first K' heads, [K', P, F]; head k reads the first k tokens of the path."""
        embedded_PKE = self.embedded(path_PK[:, :num_heads])
        return torch.stack([F.linear(embedded_PKE[:, : k + 1].flatten(1), self.weights[k]) for k in range(num_heads)])


class VocabularyProjection(nn.Module):
    """From D to the head vocabulary C: own weights per head, or the backbone's LM head rows, frozen and not saved, with
    or without a change of low rank per head that starts as none."""

    weight_CD: torch.Tensor
    bias_C: torch.Tensor | None
    bias: nn.Parameter | None
    down_KRD: nn.Parameter | None
    up_KCR: nn.Parameter | None

    def __init__(self, config: HeadsConfig, lm_weight_CD: torch.Tensor, lm_bias_C: torch.Tensor | None) -> None:
        super().__init__()
        self.own = config.lm_head == "own"
        self.down_KRD = self.up_KCR = None
        heads, (vocab, hidden) = config.num_heads, lm_weight_CD.shape
        if config.lm_head == "low_rank":
            self.down_KRD = nn.Parameter(torch.randn(heads, config.rank, hidden) * hidden**-0.5)
            self.up_KCR = nn.Parameter(torch.zeros(heads, vocab, config.rank))
        if self.own:
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
        heads = x_KPD.shape[0]
        if not self.own:
            logits_KPC = F.linear(x_KPD, self.weight_CD, self.bias_C)
            low_KPR = self._low(x_KPD)
            if low_KPR is None or self.up_KCR is None:
                return logits_KPC
            return logits_KPC + low_KPR @ self.up_KCR[:heads].transpose(1, 2)
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
        low_KPR = self._low(x_KPD)
        change = None if low_KPR is None or self.up_KCR is None else (low_KPR, self.up_KCR)
        return linear_cross_entropy(x_KPD, weight_CD, self.bias_C, labels, shares_PKJ, change=change)

    def _low(self, x_KPD: torch.Tensor) -> torch.Tensor | None:
        return None if self.down_KRD is None else x_KPD @ self.down_KRD[: len(x_KPD)].transpose(1, 2)


class MedusaHeads(nn.Module):
    """K heads of either kind on one backbone. `vocab_map_C` maps head vocabulary entries to backbone token ids.

    Where heads see drafted tokens, `path_PK` holds backbone token ids: column k - 1 is token t + k. Heads of kind
    "medusa" take it and don't look.
    """

    vocab_map_C: torch.Tensor
    inverse_V: torch.Tensor
    path: PathProjection | None

    def __init__(
        self,
        config: HeadsConfig,
        *,
        lm_weight_VD: torch.Tensor,
        lm_bias_V: torch.Tensor | None = None,
        embedding_VE: torch.Tensor | None = None,
        vocab_map_C: torch.Tensor | None = None,
    ) -> None:
        """lm_weight_VD is the backbone's LM head, embedding_VE its input embeddings, which heads of kind "hydra" need.
        vocab_map_C [C] names the tokens the heads may predict; with `config.vocab = None` it is every token.
        InputError if the map disagrees with the configuration, or the embeddings are missing."""
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
        self.path = None
        if config.kind == "hydra":
            if embedding_VE is None:
                raise InputError("heads of kind hydra read the backbone's input embeddings, and none were given")
            self.path = PathProjection(config, hidden, embedding_VE)
        bias_C = None if lm_bias_V is None else lm_bias_V[vocab_map_C]
        self.projection = VocabularyProjection(config, lm_weight_VD[vocab_map_C], bias_C)

    @classmethod
    def on(cls, model: PreTrainedModel, config: HeadsConfig, vocab_map_C: torch.Tensor | None = None) -> MedusaHeads:
        """Untrained heads on a model's LM head."""
        output, embedding = model.get_output_embeddings(), cast(nn.Embedding, model.get_input_embeddings())
        bias = getattr(output, "bias", None)
        return cls(
            config,
            lm_weight_VD=output.weight.detach(),
            lm_bias_V=None if bias is None else bias.detach(),
            embedding_VE=embedding.weight.detach() if config.kind == "hydra" else None,
            vocab_map_C=vocab_map_C,
        )

    @property
    def num_heads(self) -> int:
        return self.config.num_heads

    def features(
        self, hidden_PD: torch.Tensor, path_PK: torch.Tensor | None = None, *, num_heads: int | None = None
    ) -> torch.Tensor:
        """What the projections read, [K', P, D], for the first num_heads heads."""
        heads = num_heads or self.num_heads
        x_KPD, path_KPF = hidden_PD.expand(heads, -1, -1), None
        if self.path is not None:
            if path_PK is None:
                raise InputError("heads of kind hydra need the tokens on the path to what they predict")
            path_KPF = self.path(path_PK, heads)
        for number, block in enumerate(self.blocks):
            x_KPD = block(x_KPD, path_KPF if number == 0 else None)
        return x_KPD

    def forward(
        self, hidden_PD: torch.Tensor, path_PK: torch.Tensor | None = None, *, num_heads: int | None = None
    ) -> torch.Tensor:
        """Logits over the head vocabulary, [K', P, C]."""
        logits_KPC: torch.Tensor = self.projection(self.features(hidden_PD, path_PK, num_heads=num_heads))
        return logits_KPC

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
        path_PK: torch.Tensor | None = None,
        *,
        lm_weight_CD: torch.Tensor | None = None,
        shares_PKJ: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Summed cross-entropy and number of labels of every head, both [K], for backbone token labels [P, K], or
        [P, K, J] with the share of the target's mass that each has.

        Labels of IGNORE, and tokens outside the head vocabulary, teach nothing and are not counted. Where the LM head
        is being trained too, `lm_weight_CD` are its present rows for the head vocabulary: a shared projection is those.
        """
        labels = self.known(labels_PK)
        features_KPD = self.features(hidden_PD, path_PK)
        sums_K = self.projection.losses(features_KPD, labels, shares_PKJ, lm_weight_CD)
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
            embedding_VE=None if self.path is None else self.path.embedding_VE,
            vocab_map_C=self.vocab_map_C,
        )
        copy.load_state_dict(self.state_dict())
        if not projection.own:
            copy.projection.weight_CD.copy_(projection.weight_CD)
            if copy.projection.bias_C is not None and projection.bias_C is not None:
                copy.projection.bias_C.copy_(projection.bias_C)
        return copy.to(dtype=dtype, device=device).requires_grad_(False).eval()

    @torch.no_grad()
    def ranks(
        self,
        hidden_PD: torch.Tensor,
        labels_PK: torch.Tensor,
        path_PK: torch.Tensor | None = None,
        *,
        width: int,
        chunk: int = 512,
    ) -> torch.Tensor:
        """Rank of each label among its head's logits, [P, K]: 0 is the argmax, `width` means width or later (or a
        token outside the head vocabulary), -1 that there is no label. The order is `ranked`'s.

        With the true tokens as the path, ranks are those of a draft whose path was right so far, which is when a
        node counts: a path of ranks is right where all of them are found.
        """
        ranks = []
        for index in torch.arange(len(labels_PK), device=labels_PK.device).split(chunk):
            labels = labels_PK[index]
            tokens = self.ranked(self(hidden_PD[index], None if path_PK is None else path_PK[index]), width)
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
