"""Stage `tree`: for every (batch, context) of this machine the tree that answers fastest, a chain, or "off".

Trees are chosen on one half of the calibration conversations and reported on the other. Portable ranks meet this
machine's latencies only here. Knows nothing of models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from infra.artifacts import Artifact, artifact_key, write_json
from infra.errors import UserError
from medusa_core.calibration import JointStatistics, RankTable, walk
from medusa_core.portfolio import nearest
from medusa_core.tree import OFF, Tree, cartesian, chain
from tasks.latency import TABLE as LATENCY_TABLE
from tasks.ranks import TABLE as RANKS_TABLE
from tasks.ranks import read_ranks
from tasks.stage import Context

KIND, STAGE_VERSION = "tree", 2
PORTFOLIO = "portfolio.json"


class TreeConfig(BaseModel):
    """`cartesian` or `choices` fix the tree's shape; otherwise the best of at most `max_nodes` nodes is found."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_nodes: int = Field(64, ge=1)
    temperature: float = Field(0.0, ge=0, description="which calibration answers count")
    cartesian: tuple[int, ...] | None = None
    choices: tuple[tuple[int, ...], ...] | None = None


def tree(context: Context, config: TreeConfig, *, ranks: Artifact, latency: Artifact) -> Artifact:
    """The portfolio for the machine that `latency` was measured on."""
    semantic = config.model_dump(mode="json")
    inputs = {"ranks": ranks.digest(), "latency": latency.digest()}
    key = artifact_key(KIND, STAGE_VERSION, inputs=inputs, config=semantic)

    def build(partial: Path) -> dict[str, Any]:
        measured = json.loads(latency.file(LATENCY_TABLE).read_text())
        portfolio = build_portfolio(config, read_ranks(ranks.file(RANKS_TABLE), config.temperature), measured)
        write_json(partial / PORTFOLIO, portfolio)
        return {"entries": len(portfolio["entries"]), "nodes": portfolio["entries"][0]["nodes"]}

    return context.store.produce(KIND, key, inputs=inputs, config=semantic, build=build)


def build_portfolio(config: TreeConfig, table: RankTable, measured: Mapping[str, Any]) -> dict[str, Any]:
    """Best entry per (batch, context) cell group of the latency table, with expectation and interval."""
    choose, report = table.halves()
    candidates = _candidates(config, choose)
    rates = [walk(candidate, choose).tokens_per_step for candidate in candidates]
    entries = []
    for batch, context in sorted({(cell["batch"], cell["context"]) for cell in measured["cells"]}):
        cells = [c for c in measured["cells"] if (c["batch"], c["context"]) == (batch, context)]
        curve = [
            _point(candidate, rate, step_ms(cells, candidate.nodes), batch)
            for candidate, rate in zip(candidates, rates, strict=True)
        ]
        best = max(range(len(candidates)), key=lambda i: curve[i]["tokens_per_second"])
        entries.append(_entry(candidates[best], report, curve, best) | {"batch": batch, "context": context})
    return {"schema": "medusa.portfolio/1", "machine": measured["machine"], "entries": entries}


def step_ms(cells: Sequence[Mapping[str, Any]], nodes: int) -> float:
    """Milliseconds of a step with `nodes` nodes; UserError beyond the largest size that was timed.

    Linear between the measured sizes, made non-decreasing first: a larger tree that seems faster than a smaller one is
    noise, and a choice by the largest quotient would follow it.
    """
    ordered = sorted(cells, key=lambda cell: cell["nodes"])
    sizes = [cell["nodes"] for cell in ordered]
    if not sizes[0] <= nodes <= sizes[-1]:
        raise UserError(f"a tree of {nodes} nodes, but steps were timed from {sizes[0]} to {sizes[-1]} nodes")
    return float(np.interp(nodes, sizes, non_decreasing([cell["step_ms"] for cell in ordered])))


def non_decreasing(values: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest to `values` in least squares: neighbours that fall are pooled."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        blocks.append((value, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (left, n), (right, m) = blocks[-2:]
            blocks[-2:] = [((left * n + right * m) / (n + m), n + m)]
    return [value for value, count in blocks for _ in range(count)]


def entry_tree(entry: Mapping[str, Any]) -> Tree:
    """The tree of a portfolio entry."""
    return Tree.from_choices(entry["choices"])


def read_portfolio(path: Path) -> dict[str, Any]:
    """A portfolio file; UserError if it is none."""
    try:
        portfolio: dict[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError) as error:
        raise UserError(f"{path} is no tree portfolio: {error}") from None
    schema = portfolio.get("schema") if isinstance(portfolio, dict) else None
    if schema != "medusa.portfolio/1":
        raise UserError(f"{path} is a portfolio of schema {schema!r}; this version reads 'medusa.portfolio/1'")
    return portfolio


def pick_entry(portfolio: Mapping[str, Any], *, batch: int = 1, context: int = 1) -> dict[str, Any]:
    """The entry that the engine would use for a batch and context."""
    entries = portfolio["entries"]
    return dict(entries[nearest([(entry["batch"], entry["context"]) for entry in entries], batch, context)])


def _candidates(config: TreeConfig, choose: RankTable) -> list[Tree]:
    """Plain decoding and what competes with it; a fixed shape still has to beat "off"."""
    if config.cartesian is not None or config.choices is not None:
        fixed = cartesian(config.cartesian) if config.cartesian is not None else Tree.from_choices(config.choices or ())
        fixed.check(num_heads=choose.num_heads, max_rank=choose.width)
        return [OFF, fixed]
    statistics = JointStatistics(choose)
    largest = statistics.best_tree(config.max_nodes)
    grown = [statistics.best_tree(nodes) for nodes in range(2, largest.nodes + 1)]
    chains = [chain(depth) for depth in range(1, choose.num_heads + 1) if depth < config.max_nodes]
    return list(dict.fromkeys([OFF, *chains, *grown]))


def _point(candidate: Tree, rate: float, ms: float, batch: int) -> dict[str, Any]:
    return {
        "nodes": candidate.nodes,
        "ms": ms,
        "tokens_per_step": rate,
        "tokens_per_second": batch * rate / ms * 1000,
    }


def _entry(best: Tree, report: RankTable, curve: list[dict[str, Any]], index: int) -> dict[str, Any]:
    expected = walk(best, report)
    low, high = expected.interval()
    is_chain = all(set(path) == {0} for path in best.choices)
    return {
        "mode": "off" if best.is_off else "chain" if is_chain else "tree",
        "nodes": best.nodes,
        "depth": best.depth,
        "choices": [list(path) for path in best.choices],
        "expected_tokens_per_step": expected.tokens_per_step,
        "ci95": [low, high],
        "step_ms": curve[index]["ms"],
        "expected_speedup": expected.tokens_per_step * curve[0]["ms"] / curve[index]["ms"],
        "curve": sorted(curve, key=lambda point: (point["nodes"], point["tokens_per_step"])),
    }
