"""Stage `publish`: registers a run's heads, tree, measurements and report, and decides who is champion.

Knows nothing of how anything was measured: it reads `report.json`. The decision is a pure function of it.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field

from infra.artifacts import Artifact, ArtifactStore, artifact_key, digest_json, load_artifact, write_json
from infra.errors import ArtifactError, UserError
from infra.registry import ARTIFACT_KEY, CHAMPION, Registry, Version
from tasks.backbone import as_served
from tasks.quality import MEASURES, QUALITY

STAGE_VERSION = 1

DECISION = "decision"
BACKBONE_DIGEST = "backbone_digest"
CANDIDATE, RIVAL = "candidate_digest", "rival"

log = logging.getLogger(__name__)


class PublishConfig(BaseModel):
    """Where a run's result is registered, how much slower than the champion still counts as noise, and how far a
    trained backbone may have moved: the worse end of each 95 % interval must keep to it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str | None = Field(None, description="registered name; the recipe's name if none is given")
    tracking_uri: str | None = Field(None, description="MLflow tracking URI; SQLite under the root if none is given")
    max_slowdown: float = Field(0.02, ge=0, lt=1, description="share of the champion's tokens/s a candidate may lose")
    max_kl: float = Field(0.1, gt=0, description="nats per token that a trained backbone may lie from its original")
    max_perplexity_ratio: float = Field(1.05, gt=0, description="its perplexity over the original's")
    min_greedy_agreement: float = Field(0.85, ge=0, le=1, description="how often both must have the same first choice")
    max_task_drop: float = Field(0.02, ge=0, description="what a task's measure may lose, if tasks are named")
    max_grade_drop: float = Field(
        0.5, ge=0, description="what a judge's mean grade of 1 to 10 may lose, if there is one"
    )


@dataclass(frozen=True)
class PublishResult:
    """`alias` is `champion` if this version carries it; `decision` says why, or why not, in a sentence."""

    version: int
    alias: str | None
    model: str
    decision: str


def publish(
    store: ArtifactStore,
    registry: Registry,
    config: PublishConfig,
    *,
    model: str,
    backbone: Artifact,
    heads: Artifact,
    ranks: Artifact,
    latency: Artifact,
    tree: Artifact,
    benchmark: Artifact,
    run_config: Mapping[str, Any],
    champion: Mapping[str, str] | None = None,
) -> PublishResult:
    """Registers the run once, however often it is called, and moves `champion` if the report earns it.

    `champion` is what the benchmark measured it against, as `rival_of` gave it. A version is decided on once: a
    run repeated after a rollback does not bring back what was rolled back.
    """
    name = config.model or model
    inputs = (backbone, heads, ranks, latency, tree, benchmark)
    report = json.loads(benchmark.file("report.json").read_text())
    key = artifact_key(
        "publish", STAGE_VERSION, inputs={part.kind: part.digest() for part in inputs}, config={"model": name}
    )
    backbone_digest = as_served(str(_part(report, "backbone").get("digest") or backbone.digest()), backbone)
    with tempfile.TemporaryDirectory(dir=_scratch(store)) as folder:
        staged = Path(folder)
        _stage_files(staged, heads=heads, ranks=ranks, latency=latency, tree=tree, benchmark=benchmark)
        (staged / "config.yaml").write_text(yaml.safe_dump(dict(run_config), sort_keys=False, allow_unicode=True))
        write_json(staged / "lineage.json", lineage(store, inputs))
        tags = {ARTIFACT_KEY: key, BACKBONE_DIGEST: backbone_digest, **summary_tags(report)}
        tags |= {CANDIDATE: candidate_digest(heads, tree), RIVAL: champion["version"] if champion else ""}
        version = registry.register(name, staged, tags)
    result = _settle(registry, version, report, config)
    log.info("%s: %s", version.ref, result.decision)
    return result


def rival_of(
    registry: Registry, model: str, backbone_digest: str, heads: Artifact, tree: Artifact
) -> dict[str, str] | None:
    """Who a candidate is to be measured against: {version, heads, portfolio} of the champion, None if there is none.

    A candidate that is registered already keeps the rival of its first measurement, so that running again what has
    been published measures nothing anew. A champion of another backbone is no rival.
    """
    candidate = candidate_digest(heads, tree)
    known = registry.versions(model) if model in registry.models() else []
    reference = None
    for version in known:
        if version.tags.get(CANDIDATE) == candidate:
            reference = version.tags.get(RIVAL, "")
    if reference is None:
        champion = registry.champion(model) if known else None
        same = champion is not None and champion.tags.get(BACKBONE_DIGEST) == backbone_digest
        reference = champion.ref if champion is not None and same else ""
    if not reference:
        return None
    files = registry.download(registry.get(reference))
    return {
        "version": reference,
        "heads": str(files / "heads"),
        "portfolio": str(files / "tree" / "portfolio.json"),
    }


def candidate_digest(heads: Artifact, tree: Artifact) -> str:
    """What makes two candidates the same one: their heads and their trees."""
    return digest_json([heads.digest("heads"), tree.digest()])


def decide(report: Mapping[str, Any], limits: PublishConfig, champion: str | None = None) -> tuple[bool, str]:
    """Whether the report's candidate becomes champion, and why.

    `champion`: reference (NAME/VERSION) of the present champion it has to be measured against; None if there is
    none, or only one of another backbone.
    """
    if (fault := _loss(report) or _drift(report, limits)) is not None:
        return False, f"not promoted: {fault}"
    compared = _part(report, "champion")
    if not compared:
        if champion is None:
            return True, "promoted: lossless, and there is no champion to compare with"
        return False, f"not promoted: it was not measured against the champion {champion} in the same run"
    measured = str(compared.get("version"))
    if champion is not None and measured != champion:
        return False, f"not promoted: it was measured against {measured}, but the champion is {champion}"
    return _compare(_part(compared, "ratio"), measured, limits.max_slowdown)


def lineage(store: ArtifactStore, artifacts: tuple[Artifact, ...]) -> dict[str, Any]:
    """Kind → key, digest, inputs of the artifacts and, as far as the store still holds them, of all they came from."""
    known = _by_digest(store)
    found: dict[str, Any] = {}
    waiting = list(artifacts)
    while waiting:
        artifact = waiting.pop(0)
        # Several artifacts of a kind (the splits of distill, say): the later ones carry their key in the name.
        present = [entry["key"] for entry in found.values()]
        if artifact.key in present:
            continue
        label = artifact.kind if artifact.kind not in found else f"{artifact.kind} {artifact.key}"
        inputs = dict(artifact.manifest["inputs"])
        found[label] = {"key": artifact.key, "digest": artifact.digest(), "inputs": inputs}
        waiting += [known[digest] for digest in inputs.values() if digest in known]
    return found


def summary_tags(report: Mapping[str, Any]) -> dict[str, str]:
    """What a list of versions shows without opening the files."""
    speedup, tree, heads = (_part(report, name) for name in ("speedup", "tree", "heads"))
    values = {
        "backbone": _part(report, "backbone").get("name"),
        "device": _part(report, "device").get("name"),
        "dtype": speedup.get("dtype"),
        "heads": heads.get("kind"),
        "tree_nodes": tree.get("nodes"),
        "speedup_vs_transformers": _part(speedup, "vs_transformers").get("value"),
        "speedup_vs_plain": _part(speedup, "vs_plain").get("value"),
        "mismatched_prompts": _part(report, "lossless").get("mismatched_prompts"),
    }
    return {name: str(value) for name, value in values.items() if value is not None}


def _settle(registry: Registry, version: Version, report: Mapping[str, Any], limits: PublishConfig) -> PublishResult:
    champion = registry.champion(version.model)
    if (recorded := version.tags.get(DECISION)) is not None:
        is_champion = champion is not None and champion.version == version.version
        return PublishResult(version.version, CHAMPION if is_champion else None, version.model, recorded)
    if champion is not None and champion.version == version.version:
        # Interrupted between the promotion and the note of it.
        promoted, reason = True, "promoted: it already was the champion"
    else:
        promoted, reason = decide(report, limits, _rival(champion, version))
    if promoted:
        registry.promote(version)
    registry.tag(version, {DECISION: reason})
    return PublishResult(version.version, CHAMPION if promoted else None, version.model, reason)


def _rival(champion: Version | None, version: Version) -> str | None:
    """The champion, if it serves the same backbone: heads of another one can't be run on it."""
    if champion is None or champion.tags.get(BACKBONE_DIGEST) != version.tags.get(BACKBONE_DIGEST):
        return None
    return champion.ref


def _loss(report: Mapping[str, Any]) -> str | None:
    """What speaks against calling it lossless, or None."""
    lossless = _part(report, "lossless")
    mismatched, tokens = _number(lossless.get("mismatched_prompts")), _number(lossless.get("tokens"))
    if mismatched is None or tokens is None:
        return "the report does not say whether its outputs equal plain decoding's"
    if mismatched != 0:
        return f"{mismatched:g} prompts were answered differently from plain decoding"
    if tokens <= 0:
        return "no token was compared with plain decoding"
    if beyond := _number(_part(report, "bf16_divergence").get("failures")):
        return f"{beyond:g} timed answers leave transformers' by more than rounding explains"
    return None


def _drift(report: Mapping[str, Any], limits: PublishConfig) -> str | None:
    """What speaks against a backbone that was trained itself, or None; None for one that was left alone."""
    quality = _part(report, "quality")
    if all(quality.get(name) is None for name in MEASURES):
        return None
    allowed = {
        "kl": (limits.max_kl, 1),
        "perplexity_ratio": (limits.max_perplexity_ratio, 1),
        "greedy_agreement": (limits.min_greedy_agreement, 0),
    }
    for name, (limit, worse) in allowed.items():
        bounds = _part(quality, name).get("ci95")
        found = _number(bounds[worse]) if isinstance(bounds, list) and len(bounds) == 2 else None
        if found is None:
            return f"the backbone was trained, but the report has no {name} with an interval"
        if found > limit if worse else found < limit:
            return f"the trained backbone's {name} may be {found:.3g}, the limit is {limit:g}"
    for what, measured, limit in _asked(quality, limits):
        bounds = _part(measured, "difference").get("ci95")
        worse = 0 if measured.get("higher_is_better", True) else 1
        found = _number(bounds[worse]) if isinstance(bounds, list) and len(bounds) == 2 else None
        if found is None:
            return f"the report has no interval for {what}"
        if (-found if worse == 0 else found) > limit:
            return f"{what} may be {abs(found):.3g} worse than the original's, the limit is {limit:g}"
    return None


def _asked(quality: Mapping[str, Any], limits: PublishConfig) -> Iterator[tuple[str, Mapping[str, Any], float]]:
    """What the trained backbone was asked besides: name, paired figures, and by how much it may be worse."""
    for task, measures in _part(quality, "lm_eval").items():
        for name in measures:
            yield f"{task}'s {name}", _part(measures, name), limits.max_task_drop
    if "judge" in quality:
        yield "the judge's grade", _part(quality, "judge"), limits.max_grade_drop


def _compare(ratio: Mapping[str, Any], rival: str, max_slowdown: float) -> tuple[bool, str]:
    value = _number(ratio.get("value"))
    bounds = ratio.get("ci95")
    low, high = (_number(bound) for bound in bounds) if isinstance(bounds, list) and len(bounds) == 2 else (None, None)
    if value is None or low is None or high is None:
        return False, f"not promoted: the report has no ratio with an interval against {rival}"
    measured = f"{value:.3f} times the tokens/s of {rival}, 95% interval {low:.3f} to {high:.3f}"
    if value >= 1:
        return True, f"promoted: lossless, and not slower ({measured})"
    if low >= 1 - max_slowdown:
        return True, f"promoted: lossless, and within the allowed {max_slowdown:.1%} of the champion ({measured})"
    return False, f"not promoted: a slow-down beyond {max_slowdown:.1%} is not excluded ({measured})"


def _stage_files(
    staged: Path, *, heads: Artifact, ranks: Artifact, latency: Artifact, tree: Artifact, benchmark: Artifact
) -> None:
    # Heads lie in a folder of their artifact, beside the training curve; imported ones at its top.
    folder = "heads/" if "heads/config.json" in heads.manifest["files"] else ""
    for name in ("heads.safetensors", "config.json"):
        _copy(heads.file(folder + name), staged / "heads" / name)
    # Held-out accuracy and curve, which imported heads don't have; a later benchmark of the version reports them.
    for name in {"evaluation.json", "curve.jsonl", QUALITY} & heads.manifest["files"].keys():
        _copy(heads.file(name), staged / name)
    for name in heads.manifest["files"]:
        if name.startswith("adapter/"):
            _copy(heads.file(name), staged / name)
    _copy(tree.file("portfolio.json"), staged / "tree" / "portfolio.json")
    for artifact, folder in ((ranks, "ranks"), (latency, "latency")):
        for name in artifact.manifest["files"]:
            _copy(artifact.file(name), staged / folder / name)
    for name in ("report.json", "report.html"):
        _copy(benchmark.file(name), staged / name)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        shutil.copyfile(source, target)
    except FileNotFoundError:
        raise UserError(f"{source} is missing, though its manifest lists it: remove {source.parent}") from None


def _scratch(store: ArtifactStore) -> Path:
    """Beside the store, so that a small /tmp is not filled with heads."""
    folder = store.root / "tmp"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _by_digest(store: ArtifactStore) -> dict[str, Artifact]:
    """Every finished artifact under its key and under the digest of each part (file, folder, whole) read from it."""
    known: dict[str, Artifact] = {}
    for manifest in sorted((store.root / "artifacts").glob("*/*/manifest.json")):
        try:
            artifact = load_artifact(manifest.parent)
        except ArtifactError:
            # Something else's fault, and no reason to lose a finished run.
            continue
        if not manifest.parent.name.endswith(".partial"):
            known.update(dict.fromkeys((artifact.key, *_digests(artifact)), artifact))
    return known


def _digests(artifact: Artifact) -> Iterator[str]:
    hashes = {name: entry["sha256"] for name, entry in artifact.manifest["files"].items()}
    yield digest_json(hashes)
    for name, digest in hashes.items():
        yield digest_json({name: digest})
    for folder in {name.split("/")[0] for name in hashes if "/" in name}:
        yield digest_json({name: digest for name, digest in hashes.items() if name.startswith(folder + "/")})


def _part(mapping: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = mapping.get(name)
    return part if isinstance(part, Mapping) else {}


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
