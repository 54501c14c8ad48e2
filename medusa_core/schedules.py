"""Schedules over a training run, as pure functions of the step."""

from __future__ import annotations

import math
from typing import Literal

Rise = Literal["constant", "linear", "sine"]


def cosine_with_warmup(step: int, *, total: int, warmup: int, floor: float = 0.0) -> float:
    """Learning-rate factor at a step (0-based): linear from 1/warmup to 1, then a half cosine down to `floor`."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


def heads_share(step: int, *, total: int, rise: Rise, until: float = 1.0, backbone_first: float = 0.0) -> float:
    """Factor of λ0, the weight of the heads' loss in a joint training, at a step (0-based), from 0 to 1.

    "constant" is 1; "linear" and "sine" (sin(πt/2T)) rise from 0 to 1 over the fraction `until` of the run and stay
    there. During the fraction `backbone_first` the heads count nothing: the backbone trains alone, and the rise is
    over what follows (paper section 2.2.2 names both ways to warm up).
    """
    begin = backbone_first * total
    if step < begin:
        return 0.0
    if rise == "constant":
        return 1.0
    progress = min(1.0, (step - begin) / max(1.0, until * (total - begin)))
    return progress if rise == "linear" else math.sin(math.pi / 2 * progress)
