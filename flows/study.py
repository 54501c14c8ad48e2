"""`medusa study recipe`: what each part of stage 2 is worth, by leaving it out (the ablation that the paper lacks).

Eight trainings of one length over the same text, in which the combined loss, the heads' own learning rate and the start
from stage 1's heads are each on or off, beside stage 1 alone. Every cell is an ordinary run up to its ranks, so what is
there already is not trained again.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flows.config import RunConfig
from flows.stages import Run, stages_of
from infra.artifacts import Artifact, ArtifactStore, write_json
from infra.errors import UserError
from infra.progress import track
from infra.ray_cluster import Cluster
from medusa_core.calibration import JointStatistics, walk
from tasks.quality import MEASURES
from tasks.ranks import TABLE, read_ranks
from tasks.stage import Context
from tasks.train_medusa2 import JointConfig

PARTS = ("combined loss", "differential rates", "warm start")
STUDY, TABLE_FILE = "study.json", "study.md"


def study_recipe(config: RunConfig, root: Path, *, steps: int, nodes: int, only: Sequence[str] = ()) -> dict[str, Any]:
    """All cells, or those named, each {name, parts, tokens_per_step, kl, perplexity_ratio, greedy_agreement, minutes},
    every figure with its 95 % interval; written to `studies/` under the root too. UserError as the stages' own, and for
    a name that no cell has."""
    cluster = Cluster(config.placement.ray_address)
    context = Context(ArtifactStore(root), config.placement, cluster)
    base = config.medusa2 or JointConfig()
    chosen = [cell for cell in _cells(base, steps) if not only or cell[0] in only]
    if unknown := set(only) - {name for name, _, _ in chosen}:
        names = ", ".join(name for name, _, _ in _cells(base, steps))
        raise UserError(f"the study has no cell {sorted(unknown)}; there are: {names}")
    cells: list[dict[str, Any]] = []
    try:
        with track("study", len(chosen), "cells") as progress:
            for name, parts, joint in chosen:
                start = time.monotonic()
                results = _until_ranks(config.model_copy(update={"medusa2": joint}), context)
                cell = {"name": name, "parts": parts, **_measured(results, nodes)}
                cells.append(cell | {"minutes": (time.monotonic() - start) / 60})
                progress.advance(1, name)
    finally:
        cluster.stop()
    study = {
        "schema": "medusa.study/1",
        "steps": steps,
        "nodes": nodes,
        "medusa2": base.model_dump(mode="json"),
        "cells": cells,
    }
    folder = root / "studies" / time.strftime("%Y%m%d-%H%M%S")
    folder.mkdir(parents=True)
    write_json(folder / STUDY, study)
    (folder / TABLE_FILE).write_text(as_markdown(study))
    return study | {"directory": str(folder)}


def as_markdown(study: Mapping[str, Any]) -> str:
    """The cells as a table."""
    lines = [
        f"| | {' | '.join(PARTS)} | tokens per step, {study['nodes']} nodes | KL per token | perplexity ratio "
        "| agreement |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for cell in study["cells"]:
        marks = ["" if cell["parts"] is None else "yes" if cell["parts"][part] else "no" for part in PARTS]
        figures = [_figure(cell["tokens_per_step"], 3), *(_figure(cell[name], 4) for name in MEASURES)]
        lines.append(f"| {cell['name']} | {' | '.join([*marks, *figures])} |")
    return "\n".join(lines) + "\n"


def _cells(base: JointConfig, steps: int) -> list[tuple[str, dict[str, bool] | None, JointConfig | None]]:
    cells: list[tuple[str, dict[str, bool] | None, JointConfig | None]] = [("Medusa-1", None, None)]
    for on in itertools.product((True, False), repeat=len(PARTS)):
        combined, differential, warm = on
        changes: dict[str, Any] = {"max_steps": steps, "warm_start": warm}
        changes["heads_rate"] = base.heads_rate if differential else 1.0
        if not combined:
            changes |= {"lm_weight": 0.0, "lambda0": 1.0, "rise": "constant", "backbone_first": 0.0}
        name = (
            "Medusa-2" if all(on) else "direct fine-tuning" if not any(on) else "".join(str(int(part)) for part in on)
        )
        cells.append((name, dict(zip(PARTS, on, strict=True)), base.model_copy(update=changes)))
    return cells


def _until_ranks(config: RunConfig, context: Context) -> dict[str, Artifact]:
    run, results = Run(config, context), dict[str, Artifact]()
    for stage in stages_of(config):
        results |= stage.build(run, results)
        if stage.name == "ranks":
            break
    return results


def _measured(results: Mapping[str, Artifact], nodes: int) -> dict[str, Any]:
    """Tokens per step of the best tree of that size, chosen on one half of the conversations and walked on the other;
    how far the backbone moved."""
    choose, report = read_ranks(results["ranks"].file(TABLE)).halves()
    walked = walk(JointStatistics(choose).best_tree(nodes), report)
    heads = results["heads"]
    evaluation = json.loads(heads.file("evaluation.json").read_text())["final"]
    unmoved = {"kl": 0.0, "perplexity_ratio": 1.0, "greedy_agreement": 1.0}
    quality = evaluation.get("quality") or {
        name: {"value": value, "ci95": [value, value]} for name, value in unmoved.items()
    }
    return {
        "tokens_per_step": {"value": walked.tokens_per_step, "ci95": list(walked.interval())},
        **{name: quality[name] for name in MEASURES},
        "top1": evaluation["top1"],
    }


def _figure(measured: Mapping[str, Any], digits: int) -> str:
    low, high = measured["ci95"]
    return f"{measured['value']:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"
