"""The training benchmark: that its contestants train the same heads, and that its figures are what they claim."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tasks.bench_train import TrainBenchConfig, measure_training
from tests import toys


def answers(count: int) -> list[tuple[list[int], list[bool]]]:
    rng = random.Random(1)
    made = []
    for _ in range(count):
        prompt = toys.prompt_ids([rng.randrange(toys.WORDS) for _ in range(rng.randrange(1, 6))])
        answer = toys.answer_to(prompt[-3])[:30]
        made.append(([*prompt, *answer], [False] * len(prompt) + [True] * len(answer)))
    return made


def test_the_obvious_way_and_ours_train_the_same_heads(toy_dir: Path) -> None:
    """Catches a comparison of two different losses, and tokens counted with their padding."""
    some = answers(40)
    config = TrainBenchConfig(steps=10, answers=4, num_heads=3, vocab=50)
    report = measure_training(config, toy_dir, some, list(range(50)), threads=1)
    assert report["largest_loss_difference"] < 1e-4
    assert report["tokens"] == sum(sum(mask[1:]) for _, mask in some)
    for name in ("obvious", "live", "cached", "cached_amortised"):
        assert report[name]["tokens_per_second"] > 0 and report[name]["peak_memory_mb"] > 0
    cached, amortised = (report[name]["tokens_per_second"] for name in ("cached", "cached_amortised"))
    assert report["tokens"] / amortised == pytest.approx(
        report["tokens"] / cached + report["caching_seconds"] / config.epochs
    )
