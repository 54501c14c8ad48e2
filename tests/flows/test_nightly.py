"""When a night's measurement is a regression."""

from __future__ import annotations

from typing import Any

import pytest

from flows.nightly_benchmark import regressions


def report(transformers: tuple[float, float], plain: tuple[float, float], mismatched: int | None = 0) -> dict[str, Any]:
    """Ratios as (value, half of the interval)."""
    figures = {
        name: {"value": value, "ci95": [value - half, value + half]}
        for name, (value, half) in {"vs_transformers": transformers, "vs_plain": plain}.items()
    }
    return {"speedup": figures, "lossless": {"mismatched_prompts": mismatched}}


BEFORE = report((2.0, 0.1), (1.5, 0.05))


@pytest.mark.parametrize(
    ("now", "says"),
    [
        (report((2.0, 0.1), (1.5, 0.05)), []),
        (report((2.4, 0.1), (1.8, 0.05)), []),
        # Lower, but so uncertain that it may be what it was.
        (report((1.8, 0.2), (1.4, 0.1)), []),
        (report((1.7, 0.1), (1.5, 0.05)), ["1.70 times over transformers generate, at most 1.80; it was 2.00"]),
        (report((1.7, 0.1), (1.2, 0.1)), ["1.70 times over", "1.20 times over the same engine"]),
        (report((2.0, 0.1), (1.5, 0.05), mismatched=1), ["1 prompts answered differently"]),
        (report((2.0, 0.1), (1.5, 0.05), mismatched=None), ["unknown how many prompts"]),
        ({**BEFORE, "speedup": {}}, ["no figure over transformers", "no figure over the same"]),
    ],
)
def test_what_is_a_regression(now: dict[str, Any], says: list[str]) -> None:
    found = regressions(BEFORE, now, 0.05)
    assert len(found) == len(says)
    for fault, words in zip(found, says, strict=True):
        assert words in fault
