"""Stage `benchmark`: contestants answer the same prompts in turn, interleaved in one run; then nothing lost is proven.

Every contestant has a process of its own, and Ray is shut down. Its report is what `publish` decides on.
Knows how contestants are compared, not how they work.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field

from infra.artifacts import Artifact, artifact_key, digest_json, write_json
from infra.machine import machine_facts
from tasks.backbone import backbone_identity, backbone_info, model_dir
from tasks.bench_prompts import BenchPrompt, from_prompts
from tasks.bench_report import build_report
from tasks.bench_run import run_benchmark
from tasks.engine import EngineConfig
from tasks.model_checks import read_checks
from tasks.prompts import read_split
from tasks.quality import read_quality
from tasks.report_html import render_report
from tasks.rivals import Rival
from tasks.stage import Context

KIND, STAGE_VERSION = "benchmark", 4
REPORT, REPORT_HTML, ROWS = "report.json", "report.html", "rows.parquet"


class BenchmarkConfig(BaseModel):
    """How much is measured. Prompts are taken round-robin over categories until they or the minutes run out."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_minutes: float = Field(3.0, gt=0, description="for the timed part, loading and compiling left out")
    max_new_tokens: int = Field(128, ge=2)
    max_turns: int = Field(1, ge=1)
    prompts: int | None = Field(None, ge=1)
    compiled: bool = Field(True, description="also transformers with a compiled static cache (a minute to compile)")
    lookup: bool = Field(False, description="also transformers with prompt lookup, 10 tokens")
    dtype: str = "bfloat16"
    lossless_prompts: int = Field(24, ge=1)
    lossless_tokens: int = Field(80, ge=2, description="new tokens per prompt of the float32 comparison")


def benchmark(
    context: Context,
    config: BenchmarkConfig,
    engine: EngineConfig,
    *,
    backbone: Artifact,
    prompts: Artifact,
    heads: Artifact,
    tree: Artifact,
    quality: Artifact | None = None,
    rivals: Sequence[Rival] = (),
) -> Artifact:
    """Benchmarks heads and tree on the benchmark split; `rivals` compete too."""
    placement = context.placement
    semantic = config.model_dump(mode="json") | {
        "rivals": {rival.role: rival.version for rival in rivals},
        "engine": engine.model_dump(),
    }
    inputs = {
        "backbone": backbone_identity(backbone),
        "prompts": prompts.digest("benchmark.parquet"),
        "heads": heads.digest("heads"),
        "tree": tree.digest(),
    } | ({"quality": quality.digest()} if quality else {})
    machine = machine_facts(device=placement.resolved_device(), threads=placement.thread_count, dtype=config.dtype)
    key = artifact_key(KIND, STAGE_VERSION, inputs=inputs, config=semantic, machine=machine)

    def build(partial: Path) -> dict[str, Any]:
        context.cluster.stop()
        chosen = from_prompts(read_split(prompts, "benchmark"), max_turns=config.max_turns, limit=config.prompts)
        spec = bench_spec(
            config,
            engine,
            backbone=backbone,
            heads=heads.path,
            portfolio=tree.path / "portfolio.json",
            prompts=chosen,
            device=placement.resolved_device(),
            threads=placement.thread_count,
            rivals=rivals,
            quality=quality,
        )
        report = measure(spec)
        rows = report.pop("rows")
        write_rows(partial / ROWS, rows)
        write_json(partial / REPORT, report)
        (partial / REPORT_HTML).write_text(render_report(report))
        return {"prompts": len(chosen), "rows": len(rows)}

    return context.store.produce(KIND, key, inputs=inputs, config=semantic | {"machine": machine}, build=build)


def bench_spec(
    config: BenchmarkConfig,
    engine: EngineConfig,
    *,
    backbone: Artifact,
    heads: Path,
    portfolio: Path,
    prompts: list[BenchPrompt],
    device: str,
    threads: int,
    rivals: Sequence[Rival] = (),
    quality: Artifact | None = None,
) -> dict[str, Any]:
    """Everything `measure` needs. `heads` is a directory that holds `heads/`, `quality` what else a trained backbone
    was asked."""
    info = backbone_info(backbone)
    return {
        "config": config.model_dump(mode="json"),
        "engine": engine.model_dump(),
        "model": str(model_dir(backbone)),
        "backbone": {"name": info.name, "digest": info.digest, "parameters": info.parameters},
        "eos_token_ids": list(info.eos_token_ids),
        "heads": str(heads / "heads"),
        "evaluation": _evaluation(heads),
        "quality": (read_quality(heads) or {}) | read_checks(quality),
        "portfolio": str(portfolio),
        "prompts": [prompt.to_json() for prompt in prompts],
        "prompts_digest": digest_json([[p.prompt_id, list(p.turns)] for p in prompts]),
        "device": device,
        "threads": threads,
        "rivals": [asdict(rival) for rival in rivals],
    }


def read_report(artifact: Artifact) -> dict[str, Any]:
    """The report of a finished benchmark."""
    report: dict[str, Any] = json.loads(artifact.file(REPORT).read_text())
    return report


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """The raw measurements, one row per contestant and prompt."""
    import pyarrow as pa

    pq.write_table(pa.Table.from_pylist(rows), path)


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """A `medusa.report/1` with its raw `rows`."""
    return build_report(spec, run_benchmark(spec))


def _evaluation(heads: Path) -> dict[str, Any]:
    """Training curve and held-out accuracy, where they lie beside the heads."""
    curve, evaluation = heads / "curve.jsonl", heads / "evaluation.json"
    result: dict[str, Any] = {}
    if curve.exists():
        result["curve"] = [json.loads(line) for line in curve.read_text().splitlines()]
    if evaluation.exists():
        result["final"] = json.loads(evaluation.read_text())["final"]
    return result
