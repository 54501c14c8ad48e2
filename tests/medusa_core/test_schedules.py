"""The schedules at their corners."""

from __future__ import annotations

import pytest

from medusa_core.schedules import Rise, cosine_with_warmup, heads_share


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


def test_the_heads_share_rises_as_the_paper_s_schedules_do() -> None:
    """Catches a sine that comes back down, and a rise over the whole run where a part was asked for."""
    total = 100
    assert {heads_share(s, total=total, rise="constant") for s in range(total)} == {1.0}
    assert [heads_share(s, total=total, rise="linear") for s in (0, 50, 100)] == [0.0, 0.5, 1.0]
    assert heads_share(50, total=total, rise="sine") == pytest.approx(2**-0.5)
    assert heads_share(100, total=total, rise="sine") == 1.0
    assert [heads_share(s, total=total, rise="sine", until=0.5) for s in (0, 50, 75, 100)] == [0.0, 1.0, 1.0, 1.0]
    assert heads_share(25, total=total, rise="sine", until=0.5) == pytest.approx(2**-0.5)


@pytest.mark.parametrize("rise", ["constant", "linear", "sine"])
def test_the_backbone_may_go_first(rise: Rise) -> None:
    """Catches a rise that has happened by the time the heads are let in."""
    shares = [heads_share(s, total=40, rise=rise, backbone_first=0.25) for s in range(41)]
    assert shares[:10] == [0.0] * 10 and shares[40] == 1.0
    assert shares == sorted(shares)
    assert shares[11] == (1.0 if rise == "constant" else pytest.approx(1 / 30, rel=0.6))
    assert all(0 <= heads_share(s, total=0, rise=rise) <= 1 for s in range(3))
