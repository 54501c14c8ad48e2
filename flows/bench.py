"""`medusa bench decode`: the pipeline's benchmark on a prompt file of one's own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from flows.versions import backbone_of, find_version
from medusa_core.engine import CompileMode
from tasks.bench_prompts import read_mt_bench
from tasks.benchmark import BenchmarkConfig, bench_spec, measure
from tasks.engine import EngineConfig
from tasks.stage import Placement, dtype_of


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
        champion=None,
    )
    report = measure(spec)
    del report["rows"]
    name, _, version = served.reference.rpartition("/")
    if version.isdigit():
        report["registry"] = {"model": name, "version": int(version), "alias": None}
    return report
