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

from flows.board import Board, show
from flows.config import RunConfig, dump_config
from flows.retraining import Retraining, adjusted, decide
from flows.run_directory import RunDirectory
from flows.stages import Results, Run, Stage, stages_of
from infra.artifacts import Artifact, ArtifactStore
from infra.environment import default_root
from infra.ray_cluster import Cluster
from infra.registry import Registry
from medusa_core.heads import export_obstacle
from tasks.benchmark import read_report
from tasks.publish import publish, serving_of
from tasks.rivals import Rival, rivals_of
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
    run, board = Run(config, Context(ArtifactStore(place), config.placement, cluster)), Board.of_this_run()
    with directory.logging(), board.following():
        try:
            cluster.probe(place)
            report = _run_stages(run, registry, directory, until)
        finally:
            cluster.stop()
    show(board, report)
    return report


def _run_stages(run: Run, registry: Registry, directory: RunDirectory, until: str) -> dict[str, Any]:
    results: dict[str, Artifact] = {}
    records: list[dict[str, Any]] = []
    retraining: Retraining | None = None
    waiting = list(stages_of(run.config))
    if obstacle := export_obstacle(run.config.heads):
        log.info("these heads serve from this engine only: %s", obstacle)
    while waiting:
        stage = waiting.pop(0)
        if stage.name == "benchmark":
            run = replace(run, rivals=_rivals(run, registry, results, retraining))
        built, record = _stage_task.with_options(name=stage.name)(stage, run, results)
        results |= built
        records.append(record)
        log.info("stage %s: %s", stage.name, "cached" if record["cached"] else f"{record['seconds']:.1f} s")
        if stage.name == until:
            return directory.finish(_summary(results, records, retraining))
        if stage.name == "backbone":
            retraining, record = _retrain_task(run, registry, results)
            if retraining is not None:
                records.append(record)
                waiting = list(adjusted(tuple(waiting), retraining))
                if retraining.verdict == "unchanged":
                    return directory.finish(_summary(results, records, retraining))
    published, record = _publish_task(run, registry, results, retraining)
    records.append(record)
    return directory.finish(_summary(results, records, retraining) | {"registry": published})


def _rivals(run: Run, registry: Registry, results: Results, retraining: Retraining | None) -> tuple[Rival, ...]:
    backbone, model = results["backbone"], run.config.publish.model or run.config.name
    adopted = None if retraining is None or retraining.adopted is None else retraining.adopted.path / "heads"
    serving = serving_of(backbone, results.get("original", backbone))
    return rivals_of(registry, model, serving, results["heads"], results["tree"], adopted)


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


@task(name="retrain", cache_policy=NO_CACHE, persist_result=False)
def _retrain_task(run: Run, registry: Registry, results: Results) -> tuple[Retraining | None, dict[str, Any]]:
    start = time.monotonic()
    retraining = decide(run, registry, results["backbone"])
    made = {} if retraining is None else {**retraining.made, "heads": retraining.adopted}
    artifacts = [artifact for artifact in made.values() if artifact is not None]
    return retraining, {
        "name": "retrain",
        "seconds": round(time.monotonic() - start, 3),
        "cached": bool(artifacts) and all(artifact.cached for artifact in artifacts),
        "artifact": " ".join(f"{artifact.kind}/{artifact.key}" for artifact in artifacts),
        "counts": {},
    }


@task(name="publish", cache_policy=NO_CACHE, persist_result=False)
def _publish_task(
    run: Run, registry: Registry, results: Results, retraining: Retraining | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    start = time.monotonic()
    config = run.config
    published = publish(
        run.context.store,
        registry,
        config.publish,
        model=config.name,
        backbone=results["backbone"],
        original=results.get("original", results["backbone"]),
        heads=results["heads"],
        ranks=results["ranks"],
        latency=results["latency"],
        tree=results["tree"],
        benchmark=results["benchmark"],
        run_config=config.model_dump(mode="json"),
        rivals=run.rivals,
        retraining=None if retraining is None else retraining.record,
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


def _summary(results: Results, records: list[dict[str, Any]], retraining: Retraining | None) -> dict[str, Any]:
    """The benchmark's report with the run's stages, or the stages alone if it didn't get that far."""
    report = read_report(results["benchmark"]) if "benchmark" in results else {"schema": "medusa.report/1"}
    decided = {} if retraining is None else {"retraining": retraining.record}
    return report | decided | {"stages": records}
