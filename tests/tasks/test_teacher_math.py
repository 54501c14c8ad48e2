"""Top-k with tail mass, against float64."""

from __future__ import annotations

import math

import pytest
import torch

from tasks.teacher import top_k_with_tail


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("k", [1, 5, 36])
def test_ids_log_probabilities_and_tail_are_those_of_float64(k: int, scale: float) -> None:
    """Catches a tail that is dropped, computed over the wrong tokens, or log-probabilities of the top only."""
    logits = torch.randn(50, 37, generator=torch.Generator().manual_seed(0)) * scale
    ids, logprobs, tail = top_k_with_tail(logits, k)
    exact = logits.double().log_softmax(-1)
    best, best_ids = exact.topk(k, dim=-1)
    assert torch.equal(ids, best_ids)
    torch.testing.assert_close(logprobs.double(), best, rtol=1e-5, atol=1e-5)
    rest = exact.scatter(-1, best_ids, float("-inf")).logsumexp(-1)
    torch.testing.assert_close(tail.double(), rest, rtol=1e-5, atol=1e-5)
    total = torch.cat([logprobs, tail[:, None]], -1).double().exp().sum(-1)
    torch.testing.assert_close(total, torch.ones_like(total), rtol=1e-5, atol=1e-5)


def test_a_tail_that_rounding_would_lose() -> None:
    """Catches log(1 - sum): with a top token at 1 - e^-40 it gives -inf or noise, not -40 and a bit."""
    logits = torch.zeros(1, 100)
    logits[0, 17] = 40.0
    _, logprobs, tail = top_k_with_tail(logits, 1)
    assert tail.item() == pytest.approx(math.log(99) - 40.0, abs=1e-4)
    assert logprobs.item() == 0.0


@pytest.mark.parametrize("k", [9, 20])
def test_with_every_token_kept_the_tail_is_empty(k: int) -> None:
    """Catches NaN, and a k beyond the vocabulary."""
    ids, logprobs, tail = top_k_with_tail(torch.randn(4, 9), k)
    assert ids.shape == logprobs.shape == (4, 9)
    assert tail.tolist() == [-math.inf] * 4


@pytest.mark.parametrize("offset", [-1e4, 1e4])
def test_extreme_logits_neither_overflow_nor_vanish(offset: float) -> None:
    """Catches exp before the maximum is taken off."""
    logits = torch.tensor([[0.0, 1.0, 2.0, -3.0]])
    _, logprobs, tail = top_k_with_tail(logits + offset, 2)
    _, expected, expected_tail = top_k_with_tail(logits, 2)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=2e-3)
    torch.testing.assert_close(tail, expected_tail, rtol=0, atol=2e-3)


def test_bf16_logits_are_summed_in_fp32() -> None:
    """Catches a log-sum-exp in bf16: 50,000 equal tokens, of which one is kept."""
    _, logprobs, tail = top_k_with_tail(torch.zeros(1, 50_000, dtype=torch.bfloat16), 1)
    assert logprobs.dtype == tail.dtype == torch.float32
    assert logprobs.item() == pytest.approx(-math.log(50_000), abs=1e-4)
    assert tail.item() == pytest.approx(math.log(49_999 / 50_000), abs=1e-6)
