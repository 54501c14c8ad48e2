"""The tree stage: ranks that are right, latencies of this machine, and what follows from both."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from infra.errors import UserError
from medusa_core.calibration import RankTable, walk
from medusa_core.errors import InputError
from medusa_core.tree import Tree
from tasks.tree import TreeConfig, build_portfolio, non_decreasing, pick_entry, step_ms


def table(top1: float, conversations: int = 40, positions: int = 50, heads: int = 3, seed: int = 0) -> RankTable:
    """Ranks that are 0 with probability top1, else spread over 1..4 (4 = missed)."""
    rng = np.random.default_rng(seed)
    count = conversations * positions
    ranks = np.where(rng.random((count, heads)) < top1, 0, rng.integers(1, 5, (count, heads)))
    for head in range(heads):
        ranks.reshape(conversations, positions, heads)[:, positions - 1 - head :, head] = -1
    return RankTable(
        ranks, np.repeat(np.arange(conversations), positions), np.tile(np.arange(positions), conversations), 4
    )


def measured(costs: dict[int, float], batch: int = 1, context: int = 256) -> dict[str, Any]:
    cells = [{"nodes": n, "batch": batch, "context": context, "step_ms": ms} for n, ms in costs.items()]
    return {"machine": {"device": "test"}, "cells": cells}


def test_free_nodes_give_the_largest_tree() -> None:
    entry = build_portfolio(TreeConfig(max_nodes=16), table(0.6), measured({1: 10, 16: 10}))["entries"][0]
    assert entry["mode"] == "tree" and entry["nodes"] == 16
    assert entry["expected_speedup"] == pytest.approx(entry["expected_tokens_per_step"])


def test_dear_nodes_give_a_smaller_tree_or_none() -> None:
    """Catches a choice that ignores latency: the same ranks, but nodes that cost."""
    cheap = build_portfolio(TreeConfig(max_nodes=16), table(0.6), measured({1: 10, 16: 14}))["entries"][0]
    dear = build_portfolio(TreeConfig(max_nodes=16), table(0.6), measured({1: 10, 2: 14, 16: 60}))["entries"][0]
    hopeless = build_portfolio(TreeConfig(max_nodes=16), table(0.1), measured({1: 10, 2: 20, 16: 200}))["entries"][0]
    assert cheap["nodes"] > dear["nodes"] > 1
    assert hopeless["mode"] == "off" and hopeless["choices"] == [] and hopeless["expected_tokens_per_step"] == 1.0


def test_heads_that_are_right_at_rank_0_only_give_a_chain() -> None:
    ranks = table(1.0)
    entry = build_portfolio(TreeConfig(max_nodes=16), ranks, measured({1: 10, 16: 11}))["entries"][0]
    assert entry["mode"] == "chain" and entry["choices"] == [[0], [0, 0], [0, 0, 0]]


def test_the_chosen_tree_is_reported_on_conversations_it_was_not_chosen_on() -> None:
    """Catches the optimism of reporting the maximum over the same counts."""
    ranks = table(0.5)
    entry = build_portfolio(TreeConfig(max_nodes=12), ranks, measured({1: 10, 12: 10}))["entries"][0]
    tree = Tree.from_choices(entry["choices"])
    choose, report = ranks.halves()
    assert not set(choose.conversation_P) & set(report.conversation_P)
    assert entry["expected_tokens_per_step"] == walk(tree, report).tokens_per_step
    assert walk(tree, choose).tokens_per_step != walk(tree, report).tokens_per_step
    low, high = entry["ci95"]
    assert low < entry["expected_tokens_per_step"] < high


def test_one_entry_per_batch_and_context_and_the_nearest_is_picked() -> None:
    cells = measured({1: 10, 8: 11})["cells"] + measured({1: 10, 8: 90}, batch=8, context=1024)["cells"]
    portfolio = build_portfolio(TreeConfig(max_nodes=8), table(0.6), {"machine": {}, "cells": cells})
    assert [(e["batch"], e["context"]) for e in portfolio["entries"]] == [(1, 256), (8, 1024)]
    assert pick_entry(portfolio, batch=1)["nodes"] > pick_entry(portfolio, batch=16, context=900)["nodes"]


def test_a_cartesian_tree_still_has_to_beat_plain_decoding() -> None:
    fixed = TreeConfig(cartesian=(2, 2, 1))
    entry = build_portfolio(fixed, table(0.7), measured({1: 10, 16: 11}))["entries"][0]
    assert entry["nodes"] == 1 + 2 + 4 + 4
    assert build_portfolio(fixed, table(0.1), measured({1: 10, 16: 90}))["entries"][0]["mode"] == "off"


def test_trees_deeper_than_the_heads_or_wider_than_the_ranks_are_refused() -> None:
    with pytest.raises(InputError, match="4 deep, but there are 3 heads"):
        build_portfolio(TreeConfig(cartesian=(1, 1, 1, 1)), table(0.5), measured({1: 10, 64: 20}))
    with pytest.raises(InputError, match="rank 4, but ranks stop at 3"):
        build_portfolio(TreeConfig(cartesian=(5,)), table(0.5), measured({1: 10, 64: 20}))
    with pytest.raises(UserError, match="steps were timed from 1 to 4 nodes"):
        step_ms(measured({1: 10, 4: 20})["cells"], 9)


def test_latency_is_linear_between_measured_sizes() -> None:
    assert step_ms(measured({1: 10, 5: 30})["cells"], 3) == pytest.approx(20)


def test_times_that_fall_with_size_are_pooled() -> None:
    """Catches a choice that follows a noisy cell: one that seems cheaper than a smaller tree, or dearer than larger."""
    noisy = measured({1: 50.0, 2: 60.0, 4: 58.0, 8: 89.0, 16: 75.0, 32: 90.0})["cells"]
    assert [step_ms(noisy, n) for n in (1, 2, 4, 8, 16, 32)] == [50.0, 59.0, 59.0, 82.0, 82.0, 90.0]
    assert non_decreasing([3.0, 2.0, 1.0]) == [2.0, 2.0, 2.0]
    assert non_decreasing([1.0, 2.0, 2.0, 5.0]) == [1.0, 2.0, 2.0, 5.0]
