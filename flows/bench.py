"""`medusa bench`: the pipeline's benchmark on a prompt file of one's own, and training against the obvious way."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from flows.versions import Served, backbone_of, find_version, newest_run
from infra.artifacts import ArtifactStore
from infra.errors import UserError
from medusa_core.engine import CompileMode
from tasks.backbone import backbone_info, model_dir
from tasks.bench_prompts import from_prompts, read_mt_bench
from tasks.bench_train import TrainBenchConfig, measure_training
from tasks.benchmark import BenchmarkConfig, bench_spec, measure
from tasks.distill import shard_paths
from tasks.engine import EngineConfig
from tasks.prompts import PromptsConfig, collect_prompts, read_split
from tasks.stage import Placement, dtype_of
from tasks.training_data import frequent_tokens


def decode(
    prompts: Path,
    config: BenchmarkConfig,
    *,
    model: str,
    root: Path,
    compile: CompileMode,
    threads: int | None,
) -> dict[str, Any]:
    """One `medusa.report/1` for these heads and prompts; raw token ids are left out of it."""
    dtype_of(config.dtype)
    chosen = read_mt_bench(prompts, max_turns=config.max_turns)
    served = find_version(model, root)
    spec = bench_spec(
        config,
        EngineConfig(compile=compile),
        backbone=backbone_of(served, root),
        heads=served.directory,
        portfolio=served.portfolio,
        prompts=chosen,
        device=Placement().resolved_device(),
        threads=threads or os.cpu_count() or 1,
    )
    report = measure(spec)
    del report["rows"]
    name, _, version = served.reference.rpartition("/")
    if version.isdigit():
        report["registry"] = {"model": name, "version": int(version), "alias": None}
    return report


def measure_version(served: Served, root: Path, *, max_minutes: float) -> dict[str, Any]:
    """A version measured again as its own run measured it: its prompts, its settings."""
    config = BenchmarkConfig.model_validate(served.config["benchmark"] | {"max_minutes": max_minutes})
    prompts = collect_prompts(ArtifactStore(root), PromptsConfig.model_validate(served.config["prompts"]))
    placement = Placement.model_validate(served.config.get("placement", {}))
    spec = bench_spec(
        config,
        EngineConfig.model_validate(served.config.get("engine", {})),
        backbone=backbone_of(served, root),
        heads=served.directory,
        portfolio=served.portfolio,
        prompts=from_prompts(read_split(prompts, "benchmark"), max_turns=config.max_turns, limit=config.prompts),
        device=placement.resolved_device(),
        threads=placement.thread_count,
    )
    report = measure(spec)
    del report["rows"]
    return report


def train(config: TrainBenchConfig, *, root: Path, threads: int | None) -> dict[str, Any]:
    """Training speed and memory of the contestants on the answers that the newest run distilled."""
    made = newest_run(root)
    if "distill" not in made:
        raise UserError("the newest run distilled no answers: `medusa run --until distill` does")
    backbone, distilled = made["backbone"][0], made["distill"][0]
    answers = [
        (ids, mask)
        for shard in shard_paths(distilled)
        for ids, mask in zip(
            *pq.read_table(shard, columns=["input_ids", "loss_mask"]).to_pydict().values(), strict=True
        )
        if any(mask[1:])
    ]
    wanted = config.steps * config.answers
    if len(answers) < wanted:
        raise UserError(f"{config.steps} steps of {config.answers} answers need {wanted}, the run has {len(answers)}")
    size = min(config.vocab, backbone_info(backbone).vocab_size)
    kept = frequent_tokens(shard_paths(distilled), size=size, vocab=backbone_info(backbone).vocab_size)
    return measure_training(config, model_dir(backbone), answers, kept.tolist(), threads or os.cpu_count() or 1)
