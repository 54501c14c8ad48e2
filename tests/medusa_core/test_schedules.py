"""The learning-rate schedule at its corners."""

from __future__ import annotations

import pytest

from medusa_core.schedules import cosine_with_warmup


def test_warmup_is_linear_and_never_zero() -> None:
    """Catches a first step that is wasted at rate 0, and a peak that comes late."""
    assert [cosine_with_warmup(s, total=20, warmup=4) for s in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert cosine_with_warmup(4, total=20, warmup=4) == 1.0


def test_cosine_passes_its_middle_and_ends_at_the_floor() -> None:
    """Catches a decay counted from step 0 instead of from the end of the warm-up."""
    assert cosine_with_warmup(12, total=20, warmup=4) == pytest.approx(0.5)
    assert cosine_with_warmup(12, total=20, warmup=4, floor=0.2) == pytest.approx(0.6)
    assert cosine_with_warmup(20, total=20, warmup=4, floor=0.2) == pytest.approx(0.2)
    assert cosine_with_warmup(500, total=20, warmup=4, floor=0.2) == pytest.approx(0.2)


def test_it_never_rises_after_the_warmup() -> None:
    """Catches a second period past the end."""
    factors = [cosine_with_warmup(s, total=30, warmup=0) for s in range(40)]
    assert factors[0] == 1.0
    assert factors == sorted(factors, reverse=True)


@pytest.mark.parametrize(("total", "warmup"), [(1, 0), (1, 1), (2, 5), (0, 0)])
def test_runs_shorter_than_their_warmup_stay_in_range(total: int, warmup: int) -> None:
    """Catches a division by zero on a tiny run."""
    assert all(0 <= cosine_with_warmup(s, total=total, warmup=warmup) <= 1 for s in range(8))
