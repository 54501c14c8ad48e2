"""What a run does about a backbone that has changed: looked up if this was decided before, else measured and decided.

Only the calibration split is answered by the new backbone for it. Wiring; what is measured stands in `tasks.retrain`.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from typing import Any

from flows.stages import Build, Results, Run, Stage, stages_of
from infra.artifacts import Artifact
from infra.registry import Registry, Version
from tasks.backbone import backbone_identity, backbone_info
from tasks.publish import RECIPE, RETRAINING, made_for, met_again, recipe_digest, served_name, served_names, serving_of
from tasks.ranks import TABLE
from tasks.retrain import SCHEMA, adopt, compare, judge, why_unfit
from tasks.rivals import IDENTITY
from tasks.tree import pick_entry, read_portfolio

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Retraining:
    """`record` is what the report says of it; `adopted` are the champion's heads as heads of the new backbone, if they
    can be that; `made` what was built on the way."""

    record: dict[str, Any]
    adopted: Artifact | None
    made: Results

    @property
    def verdict(self) -> str:
        return str(self.record["verdict"])


def decide(run: Run, registry: Registry, backbone: Artifact) -> Retraining | None:
    """None where nothing has changed: no champion, or one on this backbone. A version made for this backbone by this
    recipe keeps what was decided for it, so that a run repeated later does the same again."""
    config, model = run.config, run.config.publish.model or run.config.name
    versions = registry.versions(model) if model in registry.models() else []
    identity, recipe = backbone_identity(backbone), recipe_digest(config.model_dump(mode="json"))
    made = [v for v in versions if (v.tags.get(IDENTITY), v.tags.get(RECIPE)) == (identity, recipe)]
    if made and served_name(backbone) not in served_names(made[-1]):
        return _unchanged(registry, made[-1], backbone)
    if made:
        return _repeated(run, registry, made[-1], backbone)
    champion = registry.champion(model) if versions else None
    if champion is None or _was_named(backbone, champion):
        return None
    return _decided(run, registry, champion, backbone)


def _was_named(backbone: Artifact, version: Version) -> bool:
    """Whether the version came from this backbone, trained together with its heads or not."""
    if IDENTITY in version.tags:
        return version.tags[IDENTITY] == backbone_identity(backbone)
    return serving_of(backbone, backbone).is_that_of(version)


def _unchanged(registry: Registry, version: Version, backbone: Artifact) -> Retraining:
    """The same weights under another name: the version says so from now on, and nothing runs."""
    registry.tag(version, met_again(version, backbone))
    name, first = served_name(backbone), (served_names(version) or ["another"])[0]
    why = f"{name} has the weights, tokenizer and template that {version.ref} was made for as {first}"
    log.info("nothing to do: %s", why)
    return Retraining(_record("unchanged", why, version, backbone), None, {})


def _repeated(run: Run, registry: Registry, version: Version, backbone: Artifact) -> Retraining | None:
    path = registry.download(version) / RETRAINING
    if not path.is_file():
        return None
    record = json.loads(path.read_text())
    champion = registry.get(record["champion"])
    if record["measured"] is None:
        return Retraining(record, None, {})
    made = _answers(run, backbone)
    return Retraining(record, _adopted(run, registry, champion, made), made)


def _decided(run: Run, registry: Registry, champion: Version, backbone: Artifact) -> Retraining:
    config, info = run.config, backbone_info(backbone)
    files = registry.download(champion)
    reason = None
    if config.retrain.mode == "scratch":
        reason = "the recipe says so (retrain.mode)"
    elif config.medusa2 is not None:
        reason = "the champion's heads were made for a backbone that was trained with them (medusa2)"
    else:
        reason = why_unfit(files, made_for(champion), info, config.heads)
    if reason is not None:
        log.info("the backbone has changed; trained from scratch: %s", reason)
        return Retraining(_record("scratch", reason, champion, backbone), None, {})
    made = dict(_answers(run, backbone))
    adopted = _adopted(run, registry, champion, made)
    (ranked,) = (stage for stage in stages_of(config) if stage.name == "ranks")
    ranks = ranked.parts["ranks"](run, {**made, "heads": adopted})
    nodes = pick_entry(read_portfolio(files / "tree" / "portfolio.json"))["nodes"]
    measured = compare(files / "ranks" / TABLE, ranks.file(TABLE), max(nodes, 2))
    verdict, why = judge(measured, config.retrain)
    log.info("the backbone has changed; verdict: %s; %s", verdict, why)
    record = _record(verdict, why, champion, backbone, measured=measured, limits=config.retrain.model_dump(mode="json"))
    return Retraining(record, adopted, {**made, "ranks": ranks})


def _answers(run: Run, backbone: Artifact) -> Results:
    """The new backbone's answers to the calibration prompts, with its distributions."""
    results: dict[str, Artifact] = {"backbone": backbone}
    for stage in stages_of(run.config):
        wanted = [name for name in stage.parts if name == "prompts" or name.endswith("/calibration")]
        if stage.name in ("prompts", "distill", "teacher"):
            results |= {name: stage.parts[name](run, results) for name in wanted}
    return results


def _adopted(run: Run, registry: Registry, champion: Version, made: Results) -> Artifact:
    return adopt(
        run.context,
        registry.download(champion),
        backbone=made["backbone"],
        held_out_distill=made["distill/calibration"],
        held_out_teacher=made["teacher/calibration"],
    )


def _record(verdict: str, why: str, champion: Version, backbone: Artifact, **more: Any) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "verdict": verdict,
        "why": why,
        "champion": champion.ref,
        "backbone": {"was": served_names(champion), "is": served_name(backbone)},
        "measured": None,
        "limits": None,
    } | more


def adjusted(stages: tuple[Stage, ...], retraining: Retraining | None) -> tuple[Stage, ...]:
    """The stages of a run after the verdict: heads that are kept need no training text, heads that begin a training
    are given to it."""
    if retraining is None or retraining.adopted is None or retraining.verdict not in ("keep", "warm start"):
        return stages
    adopted, kept = retraining.adopted, retraining.verdict == "keep"
    changed = []
    for stage in stages:
        if stage.name == "train-medusa1" and kept:
            stage = replace(stage, reads=(), parts={"heads": lambda run, got: adopted})
        elif stage.name == "train-medusa1":
            stage = replace(stage, parts={"heads": _begun_with(adopted, stage.parts["heads"])})
        elif kept and stage.name in ("distill", "teacher"):
            stage = replace(
                stage, parts={name: make for name, make in stage.parts.items() if not name.endswith("/train")}
            )
        changed.append(stage)
    return tuple(changed)


def _begun_with(adopted: Artifact, train: Build) -> Build:
    return lambda run, got: train(run, {**got, "initial": adopted})
