"""The Prefect flow `medusa`: every stage of the DAG in order, then the run's report.

Orchestration only: stages are functions of `tasks`, their order stands in `flows.stages`.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from flows.config import RunConfig, dump_config
from flows.run_directory import RunDirectory
from flows.stages import Results, Run, Stage, stages_of
from infra.artifacts import Artifact, ArtifactStore
from infra.environment import default_root
from infra.ray_cluster import Cluster
from infra.registry import Registry
from tasks.backbone import as_served, backbone_info
from tasks.benchmark import read_report
from tasks.publish import publish, rival_of
from tasks.stage import Context

log = logging.getLogger(__name__)


@flow(name="medusa")
def medusa(config: RunConfig, root: str | None = None, until: str = "publish") -> dict[str, Any]:
    """Runs the pipeline up to the stage `until` and returns the run's summary (its report, if it got that far)."""
    place = Path(root).absolute() if root else default_root()
    directory = RunDirectory.create(place, dump_config(config))
    registry = Registry(place, config.publish.tracking_uri)
    registry.check()
    cluster = Cluster(config.placement.ray_address)
    run = Run(config, Context(ArtifactStore(place), config.placement, cluster))
    with directory.logging():
        try:
            return _run_stages(run, registry, directory, until)
        finally:
            cluster.stop()


def _run_stages(run: Run, registry: Registry, directory: RunDirectory, until: str) -> dict[str, Any]:
    results: dict[str, Artifact] = {}
    records: list[dict[str, Any]] = []
    for stage in stages_of(run.config):
        if stage.name == "benchmark":
            model = run.config.publish.model or run.config.name
            digest = as_served(backbone_info(results["backbone"]).digest, results["backbone"])
            run = replace(run, champion=rival_of(registry, model, digest, results["heads"], results["tree"]))
        built, record = _stage_task.with_options(name=stage.name)(stage, run, results)
        results |= built
        records.append(record)
        log.info("stage %s: %s", stage.name, "cached" if record["cached"] else f"{record['seconds']:.1f} s")
        if stage.name == until:
            return directory.finish(_summary(run, results, records))
    published, record = _publish_task(run, registry, results)
    records.append(record)
    return directory.finish(_summary(run, results, records) | {"registry": published})


@task(name="stage", cache_policy=NO_CACHE, persist_result=False)
def _stage_task(stage: Stage, run: Run, results: Results) -> tuple[dict[str, Artifact], dict[str, Any]]:
    start = time.monotonic()
    built = stage.build(run, results)
    record = {
        "name": stage.name,
        "seconds": round(time.monotonic() - start, 3),
        "cached": all(artifact.cached for artifact in built.values()),
        "artifact": " ".join(f"{artifact.kind}/{artifact.key}" for artifact in built.values()),
        "counts": {name: dict(artifact.counts) for name, artifact in built.items()},
    }
    return built, record


@task(name="publish", cache_policy=NO_CACHE, persist_result=False)
def _publish_task(run: Run, registry: Registry, results: Results) -> tuple[dict[str, Any], dict[str, Any]]:
    start = time.monotonic()
    config = run.config
    published = publish(
        run.context.store,
        registry,
        config.publish,
        model=config.name,
        backbone=results["backbone"],
        heads=results["heads"],
        ranks=results["ranks"],
        latency=results["latency"],
        tree=results["tree"],
        benchmark=results["benchmark"],
        run_config=config.model_dump(mode="json"),
        champion=run.champion,
    )
    entry = {
        "model": published.model,
        "version": published.version,
        "alias": published.alias,
        "decision": published.decision,
    }
    reference = f"{published.model}/{published.version}"
    seconds = round(time.monotonic() - start, 3)
    return entry, {"name": "publish", "seconds": seconds, "cached": False, "artifact": reference, "counts": {}}


def _summary(run: Run, results: Results, records: list[dict[str, Any]]) -> dict[str, Any]:
    """The benchmark's report with the run's stages, or the stages alone if it didn't get that far."""
    if "benchmark" in results:
        return read_report(results["benchmark"]) | {"stages": records}
    return {"schema": "medusa.report/1", "stages": records}
