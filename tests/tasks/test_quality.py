"""How far a backbone has moved: the three measures and their intervals."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tasks.quality import MEASURES, ConversationQuality, compare, read_quality, summarize


def test_the_measures_of_two_known_distributions() -> None:
    """Catches the divergence the other way round, and a perplexity of the wrong model on top."""
    was = torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]]).log()
    now = torch.tensor([[0.25, 0.5, 0.25], [0.5, 0.25, 0.25]]).log()
    found = compare(was, now, torch.tensor([1, 0]))
    assert found.positions == 2 and found.agreements == 1
    assert found.divergence == pytest.approx(0.5 * math.log(2) + 0.25 * math.log(0.5))
    assert found.original_nll == pytest.approx(math.log(4) + math.log(2))
    assert found.trained_nll == pytest.approx(2 * math.log(2))
    summary = summarize([found])
    assert summary is not None
    assert summary["perplexity_ratio"]["value"] == pytest.approx(math.exp(-math.log(2) / 2))
    assert summary["greedy_agreement"] == {"value": 0.5, "ci95": [0.5, 0.5]}


def test_intervals_are_over_conversations_weighted_by_their_length() -> None:
    """Catches a mean of means, and an interval over positions, which would be far too narrow."""
    some = [ConversationQuality(10, 1.0, 20.0, 20.0, 10)] * 5 + [ConversationQuality(90, 0.0, 9.0, 9.0, 45)] * 5
    summary = summarize(some)
    assert summary is not None and summary["positions"] == 500
    assert summary["kl"]["value"] == pytest.approx(5 / 500)
    low, high = summary["greedy_agreement"]["ci95"]
    assert summary["greedy_agreement"]["value"] == pytest.approx(0.55)
    assert low < 0.55 < high and high - low > 0.02
    assert all(low <= summary[name]["value"] <= high for name in MEASURES for low, high in [summary[name]["ci95"]])


def test_nothing_measured_is_nothing_claimed(tmp_path: Path) -> None:
    assert summarize([]) is None
    assert read_quality(tmp_path) is None
