"""`medusa bench decode`: the pipeline's benchmark on a prompt file of one's own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from flows.versions import backbone_of, find_version
from infra.errors import UserError
from medusa_core.engine import CompileMode
from tasks.bench_prompts import read_mt_bench
from tasks.benchmark import BenchmarkConfig, bench_spec, measure
from tasks.engine import EngineConfig
from tasks.stage import Placement, dtype_of


def decode(
    prompts: Path,
    *,
    model: str,
    root: Path,
    max_minutes: float,
    max_new_tokens: int,
    turns: int,
    dtype: str,
    compiled: bool,
    lookup: bool,
    compile: CompileMode,
    lossless_prompts: int,
    threads: int | None,
) -> dict[str, Any]:
    """One `medusa.report/1` for these heads and prompts; raw token ids are left out of it."""
    dtype_of(dtype)
    if max_minutes <= 0:
        raise UserError(f"--max-minutes is {max_minutes}; give a positive number")
    chosen = read_mt_bench(prompts, max_turns=turns)
    served = find_version(model, root)
    config = BenchmarkConfig(
        max_minutes=max_minutes,
        max_new_tokens=max_new_tokens,
        max_turns=turns,
        dtype=dtype,
        compiled=compiled,
        lookup=lookup,
        lossless_prompts=lossless_prompts,
    )
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
