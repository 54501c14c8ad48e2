"""`medusa run --plan`: what would run, what is cached, and what it would cost, without running anything.

Keys follow from content, so a stage is known to be cached only if all it reads is. Estimates state their assumptions.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from flows.config import RunConfig
from flows.stages import Run, Stage, stages_of
from infra.artifacts import Artifact, ArtifactStore
from tasks.backbone import backbone_info
from tasks.prompts import SPLITS, Prompt, collect_prompts, read_split
from tasks.stage import Context, dtype_of
from tasks.teacher import plan_bytes

# Measured with the embedded backbone on two cores (docs/performance.md); other models and machines will differ.
ASSUMED: dict[str, float] = {
    "tokens per answered turn as a share of max_new_tokens": 0.9,
    "distilled tokens per second": 410,
    "teacher positions per second": 850,
    "trained positions per second": 1900,
    "minutes to start training": 0.7,
    "jointly trained positions per second": 105,
    "jointly evaluated positions per second": 130,
    "minutes of the latency stage": 4.0,
    "minutes of the benchmark beyond its timed part": 4.1,
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
    """{stages: [{name, state, seconds, bytes}], assumptions, totals}; `state` is cached or run.

    The prompts are read (that takes a second and writes nothing into the root's artifacts) to count requests.
    """
    run = Run(config, Context(_PlanStore(root), config.placement))
    results: dict[str, Artifact] = {}
    states: dict[str, str] = {}
    original: Artifact | None = None
    for stage in stages_of(config):
        states[stage.name] = _state(run, stage, results)
        original = original or results.get("backbone")
        if stage.name == until:
            break
    else:
        states["publish"] = "run"
    prompts = _read_prompts(config, results.get("prompts"))
    costs = _costs(config, prompts, original)
    stages = [
        {"name": name, "state": state} | (costs.get(name, {}) if state == "run" else {})
        for name, state in states.items()
    ]
    return {
        "stages": stages,
        "prompts": {split: len(rows) for split, rows in prompts.items()},
        "minutes": sum(stage.get("minutes", 0.0) for stage in stages),
        "bytes": sum(stage.get("bytes", 0) for stage in stages),
        "free_bytes": _free(root),
        "assumptions": ASSUMED,
    }


def print_plan(plan: Mapping[str, Any], out: Console) -> None:
    """The plan as a table, its assumptions below it."""
    table = Table(title="plan (nothing has been run)", title_justify="left", box=box.SIMPLE_HEAD, title_style="bold")
    for column, side in (("stage", "left"), ("", "left"), ("tokens", "right"), ("on disk", "right"), ("min", "right")):
        table.add_column(column, justify=side)  # type: ignore[arg-type]
    for stage in plan["stages"]:
        tokens = f"{stage['tokens']:,}" if "tokens" in stage else ""
        size = f"{stage['bytes'] / 2**20:,.0f} MiB" if "bytes" in stage else ""
        minutes = f"{stage['minutes']:.1f}" if "minutes" in stage else ""
        table.add_row(stage["name"], stage["state"], tokens, size, minutes)
    table.add_row("total", "", "", f"{plan['bytes'] / 2**20:,.0f} MiB", f"{plan['minutes']:.1f}", style="bold")
    out.print(table)
    out.print(f"free on the disk: {plan['free_bytes'] / 2**30:,.1f} GiB; prompts: {plan['prompts']}")
    out.print("assumed: " + "; ".join(f"{name} {value:g}" for name, value in plan["assumptions"].items()))


def _state(run: Run, stage: Stage, results: dict[str, Artifact]) -> str:
    if any(name not in results for name in stage.reads):
        return "run"
    state = "cached"
    for name, build in stage.parts.items():
        try:
            results[name] = build(run, results)
        except (_NotBuilt, KeyError):  # not there, or it reads what isn't
            state = "run"
            # What an earlier stage gave under this name is not what later ones will read.
            results.pop(name, None)
    return state


def _read_prompts(config: RunConfig, prompts: Artifact | None) -> dict[str, list[Prompt]]:
    if prompts is None:
        with tempfile.TemporaryDirectory() as scratch:
            return _read_prompts(config, collect_prompts(ArtifactStore(Path(scratch)), config.prompts))
    return {split: read_split(prompts, split) for split in SPLITS}


def _costs(
    config: RunConfig, prompts: Mapping[str, list[Prompt]], backbone: Artifact | None
) -> dict[str, dict[str, Any]]:
    # The embedded backbone, until another one is known.
    hidden, vocab, merged = 576, 49152, 134_515_008 + 49152 * 576
    if backbone is not None:
        info = backbone_info(backbone)
        hidden, vocab = info.hidden_size, info.vocab_size
        merged = info.parameters + (vocab * hidden if info.tie_word_embeddings else 0)

    def answered(split: str) -> int:
        turns = sum(min(len(prompt.turns), config.distill.max_turns) for prompt in prompts[split])
        most = turns * len(config.distill.temperatures) * config.distill.max_new_tokens
        return int(most * ASSUMED["tokens per answered turn as a share of max_new_tokens"])

    train = answered("train")
    tokens = train + answered("calibration")
    dtype = dtype_of(config.teacher.dtype)
    keep = config.teacher.hidden != "live"
    teacher = plan_bytes(tokens, hidden_size=hidden, top_k=config.teacher.top_k, keep_hidden=keep, dtype=dtype)
    heads = _heads_bytes(config, hidden, vocab)
    return {
        "distill": {
            "tokens": tokens,
            "bytes": tokens * 8,
            "minutes": tokens / ASSUMED["distilled tokens per second"] / 60,
        },
        "teacher": {
            "tokens": tokens,
            "bytes": teacher,
            "minutes": tokens / ASSUMED["teacher positions per second"] / 60,
        },
        "train-medusa1": {
            "tokens": train * config.train.epochs,
            "bytes": heads,
            "minutes": train * config.train.epochs / ASSUMED["trained positions per second"] / 60
            + ASSUMED["minutes to start training"],
        },
        **_joint_costs(config, train, answered("calibration"), merged),
        "latency": {"minutes": ASSUMED["minutes of the latency stage"]},
        "benchmark": {
            "minutes": config.benchmark.max_minutes + ASSUMED["minutes of the benchmark beyond its timed part"]
        },
    }


def _joint_costs(config: RunConfig, train: int, held_out: int, merged: int) -> dict[str, dict[str, Any]]:
    """Stage 2, its adapter left out: the merged model, its LM head untied, is most of what it writes."""
    joint = config.medusa2
    if joint is None:
        return {}
    # Held-out conversations are looked at before the first epoch and after each, and answered anew at the end.
    seconds = (
        train * joint.epochs / ASSUMED["jointly trained positions per second"]
        + held_out * (joint.epochs + 1) / ASSUMED["jointly evaluated positions per second"]
        + held_out / ASSUMED["distilled tokens per second"]
        + held_out / ASSUMED["teacher positions per second"]
    )
    return {
        "train-medusa2": {
            "tokens": train * joint.epochs,
            "bytes": merged * dtype_of(joint.dtype).itemsize,
            "minutes": seconds / 60 + ASSUMED["minutes to start training"],
        }
    }


def _heads_bytes(config: RunConfig, hidden: int, vocab: int) -> int:
    """Bytes of the heads' weights in their training dtype, vocabulary map included."""
    heads, rows = config.heads, min(config.heads.vocab or vocab, vocab)
    block = hidden * hidden if heads.block == "paper" else 2 * heads.mlp_width * hidden * hidden
    own = rows * hidden if heads.lm_head == "own" else 0
    return heads.num_heads * (heads.num_layers * block + own) * dtype_of(config.train.dtype).itemsize + 8 * rows


def _free(root: Path) -> int:
    place = root
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free
