"""KL to the teacher, in full and from a cached top-k."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from medusa_core.losses import divergence, lumped_divergence
from tasks.teacher import top_k_with_tail

VOCAB = 12


def logits(seed: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, VOCAB), st.sampled_from([0.1, 3.0, 30.0]))
def test_lumped_lies_between_zero_and_the_full_divergence(seed: int, k: int, scale: float) -> None:
    """Catches a tail left out (negative values), and one counted token by token."""
    teacher, student = logits(seed, scale), logits(seed + 1, scale)
    full, lumped = divergence(teacher, student), lumped_divergence(*top_k_with_tail(teacher, k), student)
    assert bool((lumped >= -1e-4).all()) and bool((lumped <= full + 1e-3 * (1 + full)).all())
    if k == VOCAB:
        torch.testing.assert_close(lumped, full, atol=1e-4, rtol=1e-4)


def test_the_full_divergence_is_torch_s() -> None:
    teacher, student = logits(0), logits(1)
    expected = F.kl_div(student.log_softmax(-1), teacher.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(divergence(teacher, student), expected)


@pytest.mark.parametrize("k", [1, 4, VOCAB])
def test_a_student_that_is_its_teacher_has_none_and_stays(k: int) -> None:
    """Catches a loss or a gradient at step 0, and NaN where no mass is left for a tail."""
    student = logits(2).requires_grad_()
    loss = divergence(student.detach(), student) + lumped_divergence(*top_k_with_tail(student.detach(), k), student)
    assert float(loss.abs().max()) < 1e-5
    loss.sum().backward()
    assert student.grad is not None and float(student.grad.abs().max()) < 1e-5


def test_a_teacher_without_doubt_teaches_a_finite_gradient() -> None:
    teacher = torch.full((1, VOCAB), -torch.inf)
    teacher[0, 3] = 0.0
    student = logits(3)[:1].requires_grad_()
    lumped = lumped_divergence(*top_k_with_tail(teacher, 1), student)
    torch.testing.assert_close(lumped, -student.log_softmax(-1)[:, 3])
    lumped.sum().backward()
    assert student.grad is not None and bool(student.grad.isfinite().all())
