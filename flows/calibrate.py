"""`medusa calibrate` and `medusa tree`: trees for this machine from ranks that were measured anywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flows.config import load_config
from flows.versions import Served, backbone_of, find_version
from infra.artifacts import Artifact, ArtifactStore, digest_file, write_json
from infra.errors import UserError
from infra.machine import machine_facts
from medusa_core.calibration import JointStatistics, RankTable, walk
from medusa_core.tree import cartesian
from tasks.latency import latency
from tasks.ranks import read_ranks
from tasks.stage import Context
from tasks.tree import build_portfolio, pick_entry


def calibrate_here(
    reference: str, root: Path, overrides: list[str], output: Path | None
) -> tuple[dict[str, Any], Path]:
    """This machine's portfolio for a version, written beside the version's own. Only `latency` and `tree` run."""
    served = find_version(reference, root)
    config = load_config(None, overrides)
    context = Context(ArtifactStore(root), config.placement)
    measured = latency(context, config.latency, config.engine, backbone=backbone_of(served, root), heads=_heads(served))
    cells = json.loads(measured.file("latency.json").read_text())
    portfolio = build_portfolio(config.tree, _ranks(served, config.tree.temperature), cells)
    facts = machine_facts(
        device=config.placement.resolved_device(),
        threads=config.placement.thread_count,
        dtype=config.latency.dtype,
    )
    path = output or root / "portfolios" / f"{digest_file(served.heads / 'heads.safetensors')[:12]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, portfolio | {"version": served.reference, "machine": facts})
    return portfolio, path


def inspect_tree(reference: str, root: Path, nodes: int | None, widths: str | None) -> dict[str, Any]:
    """The chosen tree, or the expectation of another one on the version's calibration answers."""
    served = find_version(reference, root)
    if nodes is None and widths is None:
        return pick_entry(served.entries())
    choose, report = _ranks(served, 0.0).halves()
    if widths is not None:
        try:
            tree = cartesian([int(width) for width in widths.split(",")])
        except ValueError as error:
            raise UserError(f"--cartesian {widths!r}: {error}; give widths such as 4,2,1") from None
    else:
        tree = JointStatistics(choose).best_tree(nodes or 1)
    expected = walk(tree, report)
    return {
        "mode": "tree",
        "nodes": tree.nodes,
        "depth": tree.depth,
        "choices": [list(path) for path in tree.choices],
        "expected_tokens_per_step": expected.tokens_per_step,
        "ci95": list(expected.interval()),
    }


def _ranks(served: Served, temperature: float) -> RankTable:
    if not served.ranks.is_file():
        raise UserError(f"{served.reference} carries no ranks ({served.ranks} is missing): name a registered version")
    return read_ranks(served.ranks, temperature)


def _heads(served: Served) -> Artifact:
    """The version's heads in the shape of an artifact, for the stages that read one."""
    files = {
        f"heads/{path.name}": {"sha256": digest_file(path), "bytes": path.stat().st_size}
        for path in sorted(served.heads.iterdir())
    }
    manifest = {"kind": "heads", "key": served.reference, "files": files, "counts": {}, "config": {}}
    return Artifact(served.directory, manifest)
