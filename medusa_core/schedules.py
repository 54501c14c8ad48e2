"""Schedules over a training run, as pure functions of the step."""

from __future__ import annotations

import math


def cosine_with_warmup(step: int, *, total: int, warmup: int, floor: float = 0.0) -> float:
    """Learning-rate factor at a step (0-based): linear from 1/warmup to 1, then a half cosine down to `floor`."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
