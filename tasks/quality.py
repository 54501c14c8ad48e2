"""How far a trained backbone has moved from what it was, on held-out conversations: divergence, perplexity, agreement.

Measured per conversation, summarised with a bootstrap over conversations. Knows nothing of training.
Legend: P positions, D hidden, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from medusa_core.losses import divergence

QUALITY = "quality.json"
MEASURES = ("kl", "perplexity_ratio", "greedy_agreement")
_RESAMPLES, _CHUNK = 2000, 256


@dataclass(frozen=True)
class ConversationQuality:
    """Sums over one conversation's positions: divergence from the original (nats), negative log-likelihood of the
    answer under the original and under the trained model, and positions where both have the same likeliest token."""

    positions: int
    divergence: float
    original_nll: float
    trained_nll: float
    agreements: int


@torch.no_grad()
def compare(original_PV: torch.Tensor, trained_PV: torch.Tensor, next_P: torch.Tensor) -> ConversationQuality:
    """Two models' logits at the positions of one conversation, and the tokens that follow there."""
    sums = torch.zeros(4, dtype=torch.float64)
    for part in torch.arange(len(next_P), device=next_P.device).split(_CHUNK):
        was, now, said = original_PV[part].float(), trained_PV[part].float(), next_P[part]
        sums += (
            torch.stack(
                [
                    divergence(was, now).sum(),
                    F.cross_entropy(was, said, reduction="sum"),
                    F.cross_entropy(now, said, reduction="sum"),
                    (was.argmax(-1) == now.argmax(-1)).sum(),
                ]
            )
            .double()
            .cpu()
        )
    apart, original, trained, agreements = sums.tolist()
    return ConversationQuality(len(next_P), apart, original, trained, int(agreements))


def read_quality(directory: Path) -> dict[str, Any] | None:
    """How far the backbone has moved, where heads were trained together with it; None where it was left alone."""
    path = directory / QUALITY
    return json.loads(path.read_text()) if path.is_file() else None


def summarize(measured: Sequence[ConversationQuality], *, seed: int = 0) -> dict[str, Any] | None:
    """KL per token, ratio of perplexities (trained to original) and rate of greedy agreement, each with a 95 %
    interval; None where nothing was compared."""
    if not measured:
        return None
    table = np.array([[m.positions, m.divergence, m.original_nll, m.trained_nll, m.agreements] for m in measured])
    rules: tuple[Callable[[np.ndarray], np.ndarray], ...] = (
        lambda s: s[..., 1] / s[..., 0],
        lambda s: np.exp((s[..., 3] - s[..., 2]) / s[..., 0]),
        lambda s: s[..., 4] / s[..., 0],
    )
    figures = {name: with_interval(table, rule, seed=seed) for name, rule in zip(MEASURES, rules, strict=True)}
    return {"conversations": len(table), "positions": int(table[:, 0].sum())} | figures


def with_interval(table_NM: np.ndarray, rule: Callable[[np.ndarray], np.ndarray], *, seed: int = 0) -> dict[str, Any]:
    """A figure that follows from the sums [M] over N items, with its 95 % bootstrap interval over items."""
    draws = np.random.default_rng(seed).integers(0, len(table_NM), (_RESAMPLES, len(table_NM)))
    low, high = np.quantile(rule(table_NM[draws].sum(1)), [0.025, 0.975]).tolist()
    return {"value": float(rule(table_NM.sum(0))), "ci95": [low, high]}
