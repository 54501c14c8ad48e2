"""Stage `publish`: registers a run's heads, tree, measurements and report, and moves `champion` if it was earned.

Knows nothing of how anything was measured: it reads `report.json`, on which `promotion` decides.
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from infra.artifacts import Artifact, ArtifactStore, artifact_key, digest_json, load_artifact, write_json
from infra.errors import ArtifactError, UserError
from infra.registry import ARTIFACT_KEY, CHAMPION, Registry, Version
from tasks.backbone import as_served, backbone_identity, backbone_info, fingerprint_of
from tasks.model_card import MODEL_CARD, model_card
from tasks.promotion import PublishConfig, decide, part
from tasks.quality import QUALITY
from tasks.rivals import (
    CANDIDATE,
    DECISION,
    HEADS_KIND,
    MEASURED_AGAINST,
    STRENGTH,
    TRAINED_ON,
    Rival,
    Serving,
    candidate_digest,
    strength_after,
    trained_on,
)
from tasks.version_files import check_version

STAGE_VERSION = 2

RETRAINING = "retraining.json"
# Tags: the names that the backbone was met under, and the fingerprints of the files there, as lists; the recipe; what
# was decided when the backbone had changed; what heads must share with a backbone to be tried on it.
SERVES, FINGERPRINTS, RECIPE, RETRAINED = "serves", "fingerprints", "recipe", "retraining"
# kind/key of everything a version came from: what clean-up has to leave.
ARTIFACTS = "artifacts"
_SHARED = ("tokenizer", "architecture")
_NO_PART_OF_RECIPES = ("backbone", "name", "placement", "plan", "publish")

log = logging.getLogger(__name__)


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
    original: Artifact,
    heads: Artifact,
    ranks: Artifact,
    latency: Artifact,
    tree: Artifact,
    benchmark: Artifact,
    run_config: Mapping[str, Any],
    rivals: Sequence[Rival] = (),
    retraining: Mapping[str, Any] | None = None,
) -> PublishResult:
    """Registers the run once, however often it is called, and moves `champion` if the report earns it.

    `original` is the backbone that was named, `backbone` the one that is served: another where it was trained too.
    `rivals` are those the benchmark measured it against, `retraining` is what was decided when the backbone had
    changed. A version is decided on once: a run repeated after a rollback does not bring back what was rolled back.
    """
    name = config.model or model
    inputs = (backbone, heads, ranks, latency, tree, benchmark)
    report = json.loads(benchmark.file("report.json").read_text())
    # A backbone under another name is the same one.
    contents = {each.kind: each.digest() for each in inputs} | {"backbone": backbone_identity(backbone)}
    key = artifact_key("publish", STAGE_VERSION, inputs=contents, config={"model": name})
    serving = serving_of(backbone, original)
    with tempfile.TemporaryDirectory(dir=_scratch(store)) as folder:
        staged = Path(folder)
        _stage_files(staged, heads=heads, ranks=ranks, latency=latency, tree=tree, benchmark=benchmark)
        (staged / "config.yaml").write_text(yaml.safe_dump(dict(run_config), sort_keys=False, allow_unicode=True))
        came_from = lineage(store, inputs)
        write_json(staged / "lineage.json", came_from)
        (staged / MODEL_CARD).write_text(model_card(name, report, run_config, came_from))
        check_version(staged)
        tags = {ARTIFACT_KEY: key, **serving.tags, **summary_tags(report)}
        tags |= identity_tags(original, run_config) | {CANDIDATE: candidate_digest(heads, tree)}
        tags[TRAINED_ON] = trained_on(heads)
        tags[ARTIFACTS] = " ".join(artifact_names(came_from))
        against = {rival.role: rival.version for rival in rivals}
        tags |= {tag: against.get(role, "") for role, tag in MEASURED_AGAINST.items()}
        champion = registry.get(against[CHAMPION]) if CHAMPION in against else None
        tags[STRENGTH] = f"{strength_after(report, champion, serving):.4f}"
        if retraining is not None:
            write_json(staged / RETRAINING, retraining)
            tags[RETRAINED] = str(retraining["verdict"])
        version = registry.register(name, staged, tags)
    result = _settle(registry, version, report, config)
    log.info("%s: %s", version.ref, result.decision)
    return result


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


def identity_tags(backbone: Artifact, run_config: Mapping[str, Any]) -> dict[str, str]:
    """What a version was made for and by: told apart when a backbone turns up again, under this name or another."""
    info = backbone_info(backbone)
    return {
        SERVES: json.dumps([served_name(backbone)]),
        RECIPE: recipe_digest(run_config),
        FINGERPRINTS: json.dumps([fingerprint_of(backbone)]),
        **dict(zip(_SHARED, (info.tokenizer_digest, info.architecture), strict=True)),
    }


def serving_of(backbone: Artifact, original: Artifact) -> Serving:
    """What a run's heads are for: `backbone` is served, `original` was named."""
    return Serving(as_served(backbone_info(backbone).digest, backbone), backbone_identity(original))


def made_for(version: Version) -> dict[str, str]:
    """What a backbone must share with the version's own for its heads to be tried on it."""
    return {name: version.tags[name] for name in _SHARED if name in version.tags}


def served_names(version: Version) -> list[str]:
    """The names that the version's backbone has been met under."""
    names: list[str] = json.loads(version.tags.get(SERVES, "[]"))
    return names


def fingerprints(version: Version) -> list[str]:
    """What the backbone's files were where they were met."""
    found: list[str] = json.loads(version.tags.get(FINGERPRINTS, "[]"))
    return found


def met_again(version: Version, backbone: Artifact) -> dict[str, str]:
    """The version's tags after its backbone was met under another name."""
    names, files = [*served_names(version), served_name(backbone)], [*fingerprints(version), fingerprint_of(backbone)]
    return {SERVES: json.dumps(list(dict.fromkeys(names))), FINGERPRINTS: json.dumps(list(dict.fromkeys(files)))}


def served_name(backbone: Artifact) -> str:
    """What the backbone was called: NAME, or NAME@REVISION."""
    info = backbone_info(backbone)
    return info.name if info.revision is None else f"{info.name}@{info.revision}"


def recipe_digest(run_config: Mapping[str, Any]) -> str:
    """Of a configuration without the backbone's name and without what changes no result."""
    return digest_json({name: value for name, value in run_config.items() if name not in _NO_PART_OF_RECIPES})


def artifact_names(lineage: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """kind/key of what a version came from, by its lineage. A second artifact of a kind is labelled "kind key"."""
    return [f"{label.partition(' ')[0]}/{entry['key']}" for label, entry in lineage.items()]


def summary_tags(report: Mapping[str, Any]) -> dict[str, str]:
    """What a list of versions shows without opening the files."""
    speedup, tree, heads = (part(report, name) for name in ("speedup", "tree", "heads"))
    values = {
        "backbone": part(report, "backbone").get("name"),
        "device": part(report, "device").get("name"),
        "dtype": speedup.get("dtype"),
        HEADS_KIND: heads.get("kind"),
        "heads_block": heads.get("block"),
        "heads_lm_head": heads.get("lm_head"),
        "tree_nodes": tree.get("nodes"),
        "speedup_vs_transformers": part(speedup, "vs_transformers").get("value"),
        "speedup_vs_plain": part(speedup, "vs_plain").get("value"),
        "mismatched_prompts": part(report, "lossless").get("mismatched_prompts"),
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
    if champion is None or not Serving.of(version).is_that_of(champion):
        return None
    return champion.ref


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
