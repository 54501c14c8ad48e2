"""`medusa run --plan`: what would run, what is cached, and what it would cost, without running anything.

Keys follow from content, so a stage is known to be cached only if all it reads is. Estimates state their assumptions.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from flows.config import RunConfig
from flows.costs import ASSUMED, GIB, GPUS, Costs, Workload
from flows.stages import Run, Stage, stages_of
from infra.artifacts import Artifact, ArtifactStore
from medusa_core.heads import export_obstacle
from tasks.model_shape import shape_of
from tasks.model_sources import local_path
from tasks.prompt_sources import SourceUnreachable
from tasks.prompts import SPLITS, Prompt, collect_prompts, read_split
from tasks.stage import Context
from tasks.teacher import keeps_hidden

_BITS = "choose a larger GPU"
_WAYS_OUT = {
    "distill": "choose a larger GPU, or lower distill.batch_size or distill.max_new_tokens",
    "train-medusa1": "choose a larger GPU, more of them with train.zero_stage 1 to 3, or train.optimizer adamw_8bit",
    "train-medusa2": "choose a larger GPU, more with medusa2.zero_stage 1 to 3, or medusa2.gradient_checkpointing",
}


class _NotBuilt(Exception):
    """Raised instead of building."""


class _PlanStore(ArtifactStore):
    """A store that finds artifacts and builds none."""

    def produce(self, kind: str, key: str, **unused: Any) -> Artifact:
        found = self.get(kind, key)
        if found is None:
            raise _NotBuilt
        return found


def make_plan(config: RunConfig, root: Path, until: str) -> dict[str, Any]:
    """{stages: [{name, state, tokens, minutes, bytes, memory}], problems, export_obstacle, assumptions, totals}; a
    state is cached/run.

    The prompts are read (that takes a second and writes nothing into the root's artifacts) to count requests, and of
    the backbone its configuration alone. `problems` says in sentences why the plan can't be carried out.
    """
    run = Run(config, Context(_PlanStore(root), config.placement))
    results: dict[str, Artifact] = {}
    states: dict[str, str] = {}
    for stage in stages_of(config):
        states[stage.name] = _state(run, stage, results)
        if stage.name == until:
            break
    else:
        states["publish"] = "run"
    work, prompts = _workload(config, results.get("prompts"))
    shape = shape_of(config.backbone)
    free = config.plan.disk_gib * GIB if config.plan.disk_gib else _free(root)
    tokens = work.train + work.held_out
    keep = keeps_hidden(config.teacher, tokens, shape.hidden, free)
    costs = Costs(config, shape, work, keep_hidden=keep).stages()
    stages = [
        {"name": name, "state": state} | (costs.get(name, {}) if state == "run" else {})
        for name, state in states.items()
    ]
    return {
        "stages": stages,
        "backbone": {"model": config.backbone.model, "parameters": shape.parameters},
        "machine": config.plan.model_dump(),
        "prompts": prompts,
        "minutes": sum(stage.get("minutes", 0.0) for stage in stages),
        "bytes": sum(stage.get("bytes", 0) for stage in stages),
        "free_bytes": free,
        "problems": list(_problems(config, stages, free)),
        "export_obstacle": export_obstacle(config.heads),
        "assumptions": ASSUMED,
    }


def _problems(config: RunConfig, stages: list[dict[str, Any]], free: int) -> Iterator[str]:
    """Why the plan can't be carried out: each generating or training GPU holds its model whole."""
    if config.plan.gpu:
        most = GPUS[config.plan.gpu].memory
        for stage in stages:
            need = stage.get("memory", 0) / GIB
            if need > most:
                yield (
                    f"{stage['name']} needs {need:,.0f} GiB of memory on one {config.plan.gpu}, which has {most}, and "
                    f"a model is not split over GPUs here: {_WAYS_OUT.get(stage['name'], _BITS)}"
                )
    if (need := sum(stage.get("bytes", 0) for stage in stages)) > free:
        yield (
            f"the artifacts take {need / GIB:,.0f} GiB, the disk has {free / GIB:,.0f} free: give another --root, or "
            "leave hidden states to be made live (--set teacher.hidden=live)"
        )


def print_plan(plan: Mapping[str, Any], out: Console) -> None:
    """The plan as a table, its assumptions below it."""
    table = Table(title="plan (nothing has been run)", title_justify="left", box=box.SIMPLE_HEAD, title_style="bold")
    where = f"memory per {'GPU' if plan['machine']['gpu'] else 'worker'}"
    for column in ("stage", "", "tokens", "on disk", where, "min"):
        table.add_column(column, justify="left" if column in ("stage", "") else "right")
    for stage in plan["stages"]:
        tokens = f"{stage['tokens']:,}" if "tokens" in stage else ""
        size, memory = (_size(stage[each]) if each in stage else "" for each in ("bytes", "memory"))
        minutes = f"{stage['minutes']:.1f}" if "minutes" in stage else ""
        table.add_row(stage["name"], stage["state"], tokens, size, memory, minutes)
    minutes = plan["minutes"]
    total = f"{minutes:.1f}" if minutes < 120 else f"{minutes / 60:.1f} hours"
    table.add_row("total", "", "", _size(plan["bytes"]), "", total, style="bold")
    out.print(table)
    machine = plan["machine"]
    kind = f"{machine['gpus']} x {machine['gpu']}" if machine["gpu"] else "two CPU cores"
    out.print(f"{plan['backbone']['model']} ({plan['backbone']['parameters']:,} parameters) on {kind}")
    out.print(f"free on the disk: {_size(plan['free_bytes'])}; prompts: {plan['prompts']}")
    if plan["export_obstacle"]:
        out.print(f"these heads serve from this engine only: {plan['export_obstacle']}", soft_wrap=True)
    other = "CPU: " if machine["gpu"] else "GPU: "
    assumed = {name: value for name, value in plan["assumptions"].items() if not name.startswith(other)}
    out.print("assumed: " + "; ".join(f"{name} {value:g}" for name, value in assumed.items()))


def _state(run: Run, stage: Stage, results: dict[str, Artifact]) -> str:
    if stage.name == "backbone" and local_path(run.config.backbone.model) is None:
        return "run"  # to know more, its weights would have to be fetched
    if any(name not in results for name in stage.reads):
        return "run"
    state = "cached"
    for name, build in stage.parts.items():
        try:
            results[name] = build(run, results)
        except (_NotBuilt, KeyError, SourceUnreachable):  # not there, or it reads what isn't
            state = "run"
            # What an earlier stage gave under this name is not what later ones will read.
            results.pop(name, None)
    return state


def _workload(config: RunConfig, artifact: Artifact | None) -> tuple[Workload, dict[str, Any]]:
    """How much there is to do, and the prompts it follows from; a hub that can't be reached leaves the limit."""
    try:
        prompts = _read_prompts(config, artifact)
    except SourceUnreachable:
        if config.prompts.limit is None:
            raise
        most = config.prompts.limit * len(config.prompts.sources)
        return Workload.assumed(config, most), {"assumed, for the sources can't be read here": most}
    return Workload.of(config, prompts), {split: len(rows) for split, rows in prompts.items()}


def _read_prompts(config: RunConfig, prompts: Artifact | None) -> dict[str, list[Prompt]]:
    if prompts is None:
        with tempfile.TemporaryDirectory() as scratch:
            return _read_prompts(config, collect_prompts(ArtifactStore(Path(scratch)), config.prompts))
    return {split: read_split(prompts, split) for split in SPLITS}


def _size(count: float) -> str:
    return f"{count / GIB:,.1f} GiB" if count >= 10 * GIB else f"{count / 2**20:,.0f} MiB"


def _free(root: Path) -> int:
    place = root
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free
