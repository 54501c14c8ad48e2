"""`medusa study`: trainings side by side over the same text, each an ordinary run up to its ranks.

`recipe` leaves out one part of stage 2 after another (the ablation that the paper lacks); `heads` tries other settings.
What is there already is not trained again. Knows nothing of how a stage works.
"""

from __future__ import annotations

import itertools
import json
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.config import RunConfig, load_config
from flows.stages import Run, stages_of
from infra.artifacts import Artifact, ArtifactStore, write_json
from infra.errors import UserError
from infra.progress import track
from infra.ray_cluster import Cluster
from medusa_core.calibration import Walk, cross_walk
from tasks.quality import MEASURES
from tasks.ranks import TABLE, conversation_names, read_ranks
from tasks.stage import Context
from tasks.train_medusa2 import JointConfig

PARTS = ("combined loss", "differential rates", "warm start")
STUDY, TABLE_FILE = "study.json", "study.md"
_UNMOVED = {"kl": 0.0, "perplexity_ratio": 1.0, "greedy_agreement": 1.0}


@dataclass(frozen=True)
class Cell:
    """One training of a study; `parts` says what is on and off in it, where the study is about that."""

    name: str
    config: RunConfig
    parts: Mapping[str, bool] | None = None


def recipe_cells(
    config: RunConfig, *, steps: int, evaluated_answers: int | None = None, only: Sequence[str] = ()
) -> list[Cell]:
    """Stage 1 alone, then stage 2 for `steps` steps with every combination of PARTS, or those cells that are named:
    UserError for a name that no cell has."""
    base = config.medusa2 or JointConfig()
    cells = [Cell("Medusa-1", config.model_copy(update={"medusa2": None}))]
    for on in itertools.product((True, False), repeat=len(PARTS)):
        combined, differential, warm = on
        changes: dict[str, Any] = {"max_steps": steps, "warm_start": warm, "evaluated_answers": evaluated_answers}
        changes["heads_rate"] = base.heads_rate if differential else 1.0
        if not combined:
            changes |= {"lm_weight": 0.0, "lambda0": 1.0, "rise": "constant", "backbone_first": 0.0}
        name = (
            "Medusa-2" if all(on) else "direct fine-tuning" if not any(on) else "".join(str(int(part)) for part in on)
        )
        joint = base.model_copy(update=changes)
        cells.append(Cell(name, config.model_copy(update={"medusa2": joint}), dict(zip(PARTS, on, strict=True))))
    if unknown := set(only) - {cell.name for cell in cells}:
        names = ", ".join(cell.name for cell in cells)
        raise UserError(f"the study has no cell {sorted(unknown)}; there are: {names}")
    return [cell for cell in cells if not only or cell.name in only]


def heads_cells(config: str | Path | None, overrides: Sequence[str], variants: Sequence[str]) -> list[Cell]:
    """The configuration, and for every variant (`key=value key=value`) the configuration with that changed. UserError
    for a setting that is none."""
    changed = [(variant, [*overrides, *shlex.split(variant)]) for variant in variants]
    return [Cell(name, load_config(config, settings)) for name, settings in [("as configured", overrides), *changed]]


def run_study(cells: Sequence[Cell], root: Path, *, nodes: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Trains and measures every cell, {name, parts, tokens_per_step, vs_first, kl, perplexity_ratio, greedy_agreement,
    top1, loss, minutes}, each figure with its 95 % interval; written to `studies/` under the root after every one.

    Tokens per step are those of the best tree of `nodes` nodes. `settings` is noted too. UserError as the stages'.
    """
    folder = root / "studies" / time.strftime("%Y%m%d-%H%M%S")
    folder.mkdir(parents=True)
    study: dict[str, Any] = {"schema": "medusa.study/2", "nodes": nodes, **settings, "cells": []}
    placement = cells[0].config.placement
    cluster = Cluster(placement.ray_address)
    context = Context(ArtifactStore(root), placement, cluster)
    first: tuple[list[str], Walk] | None = None
    try:
        with track("study", len(cells), "cells") as progress:
            for cell in cells:
                start = time.monotonic()
                results = _until_ranks(cell.config, context)
                walked = _walked(results["ranks"], nodes)
                first = first or walked
                parts = None if cell.parts is None else dict(cell.parts)
                measured = {"name": cell.name, "parts": parts, **_tokens_per_step(walked, first), **_training(results)}
                study["cells"].append(measured | {"minutes": (time.monotonic() - start) / 60})
                write_json(folder / STUDY, study)
                (folder / TABLE_FILE).write_text(as_markdown(study))
                progress.advance(1, cell.name)
    finally:
        cluster.stop()
    return study | {"directory": str(folder)}


def as_markdown(study: Mapping[str, Any]) -> str:
    """The cells as a table: of the parts and of how far the backbone moved, where that is what was studied."""
    ablation = any(cell["parts"] for cell in study["cells"])
    columns = [f"tokens per step, {study['nodes']} nodes", "times the first"]
    columns += ["KL per token", "perplexity ratio", "agreement"] if ablation else ["loss", "top-1", "minutes"]
    header = ["", *(PARTS if ablation else ()), *columns]
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for cell in study["cells"]:
        row = [cell["name"]]
        if ablation:
            row += ["" if cell["parts"] is None else "yes" if cell["parts"][part] else "no" for part in PARTS]
        row += [_figure(cell["tokens_per_step"], 3), _figure(cell["vs_first"], 3)]
        if ablation:
            row += [_figure(cell[name], 4) for name in MEASURES]
        else:
            row += [*(" ".join(f"{value:.3f}" for value in cell[name]) for name in ("loss", "top1"))]
            row += [f"{cell['minutes']:.1f}"]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def _until_ranks(config: RunConfig, context: Context) -> dict[str, Artifact]:
    run, results = Run(config, context), dict[str, Artifact]()
    for stage in stages_of(config):
        results |= stage.build(run, results)
        if stage.name == "ranks":
            break
    return results


def _walked(ranks: Artifact, nodes: int) -> tuple[list[str], Walk]:
    """The conversations, and the walk through them."""
    path = ranks.file(TABLE)
    return conversation_names(path), cross_walk(read_ranks(path), nodes)


def _tokens_per_step(walked: tuple[list[str], Walk], first: tuple[list[str], Walk]) -> dict[str, Any]:
    """With the ratio to the first cell's, over the conversations that both have."""
    both = sorted(set(walked[0]) & set(first[0]))
    own, others = (walk.select([names.index(name) for name in both]) for names, walk in (walked, first))
    value, interval = own.over(others)
    return {
        "tokens_per_step": {"value": walked[1].tokens_per_step, "ci95": list(walked[1].interval())},
        "vs_first": {"value": value, "ci95": list(interval)},
    }


def _training(results: Mapping[str, Artifact]) -> dict[str, Any]:
    """What the training's own evaluation says: heads' losses and accuracy, and how far the backbone moved."""
    evaluation = json.loads(results["heads"].file("evaluation.json").read_text())["final"]
    quality = evaluation.get("quality") or {
        name: {"value": value, "ci95": [value, value]} for name, value in _UNMOVED.items()
    }
    return {**{name: quality[name] for name in MEASURES}, "top1": evaluation["top1"], "loss": evaluation["loss"]}


def _figure(measured: Mapping[str, Any], digits: int) -> str:
    low, high = measured["ci95"]
    return f"{measured['value']:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"
