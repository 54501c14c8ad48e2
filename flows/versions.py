"""What `--model` names: `champion`, `latest`, NAME/VERSION, or a directory. Finds heads, tree and their backbone.

Knows nothing of what is done with them.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from infra.artifacts import Artifact, ArtifactStore, load_artifact
from infra.errors import ArtifactError, UserError
from infra.registry import Registry
from medusa_core.checkpoint import CONFIG, HeadsFile, read_config
from tasks.backbone import BackboneConfig, backbone_info, resolve_backbone
from tasks.ranks import TABLE
from tasks.tree import read_portfolio
from tasks.version_files import check_version


@dataclass(frozen=True)
class Served:
    """A heads directory with its portfolio, by whatever name it was asked for. `directory` holds `heads/`."""

    reference: str
    directory: Path
    portfolio: Path
    ranks: Path
    config: dict[str, Any]

    @property
    def heads(self) -> Path:
        return self.directory / "heads"

    @property
    def described(self) -> HeadsFile:
        return read_config(self.heads)

    def entries(self) -> dict[str, Any]:
        return read_portfolio(self.portfolio)


def find_version(reference: str, root: Path) -> Served:
    """UserError, naming what there is, if the reference leads nowhere."""
    path = Path(reference)
    if path.is_dir():
        return _directory(path)
    if reference == "latest":
        return _latest(root)
    if os.sep in reference and reference.count("/") > 1:
        raise UserError(
            f"--model {reference!r} is no directory: give `champion`, `latest`, NAME/VERSION, or a directory"
        )
    registry = Registry(root)
    version = registry.get(reference)
    files = registry.download(version)
    check_version(files)
    config = yaml.safe_load((files / "config.yaml").read_text())
    return Served(version.ref, files, files / "tree" / "portfolio.json", files / "ranks" / TABLE, config)


def backbone_of(served: Served, root: Path, other: str | None = None) -> Artifact:
    """The backbone artifact that the heads were trained on, resolved again if it isn't in the store any more.

    `other` asks for another one: UserError if its weights differ.
    """
    store = ArtifactStore(root)
    wanted = served.described.backbone_digest
    named = BackboneConfig.model_validate(served.config.get("backbone") or served.described.backbone_name)
    if other is None:
        for manifest in sorted((root / "artifacts" / "backbone").glob("*/manifest.json")):
            artifact = load_artifact(manifest.parent)
            if manifest.parent.name.endswith(".partial") or backbone_info(artifact).digest != wanted:
                continue
            if artifact.config.get("quantization") == named.quantization:
                return artifact
    artifact = resolve_backbone(store, BackboneConfig.model_validate(other) if other else named)
    info = backbone_info(artifact)
    if info.digest != wanted:
        raise UserError(
            f"{served.reference} holds heads for backbone {served.described.backbone_name} ({wanted[:12]}), not for "
            f"{info.name} ({info.digest[:12]}): train heads for it with `medusa run`, or leave --backbone out"
        )
    return artifact


def _directory(path: Path) -> Served:
    if not (path / "heads" / CONFIG).is_file():
        raise UserError(f"{path} holds no heads: expected {path / 'heads' / CONFIG}")
    for portfolio in (path / "tree" / "portfolio.json", path / "portfolio.json"):
        if portfolio.is_file():
            config = path / "config.yaml"
            values = yaml.safe_load(config.read_text()) if config.is_file() else {}
            return Served(str(path), path, portfolio, path / "ranks" / TABLE, values)
    raise UserError(f"{path} holds no tree: expected {path / 'tree' / 'portfolio.json'}")


def _latest(root: Path) -> Served:
    """What the newest run made, registered or not."""
    made = newest_run(root)
    if "tree" not in made:
        raise UserError("the newest run stopped before its tree: run it to the end")
    # A jointly trained backbone has heads of its own.
    heads = made.get("train-medusa2", made["train-medusa1"])[0]
    config = yaml.safe_load((root / "runs" / "latest" / "config.yaml").read_text())
    return Served("latest", heads.path, made["tree"][0].file("portfolio.json"), made["ranks"][0].file(TABLE), config)


def newest_run(root: Path) -> dict[str, list[Artifact]]:
    """What the stages of the newest finished run made; UserError if there is none, or something of it is gone."""
    try:
        report = json.loads((root / "runs" / "latest" / "report.json").read_text())
    except FileNotFoundError:
        raise UserError(f"{root / 'runs'} holds no finished run: `medusa run` makes one") from None
    places = {stage["name"]: stage["artifact"].split() for stage in report["stages"] if stage["name"] != "publish"}
    try:
        return {name: [load_artifact(root / "artifacts" / place) for place in made] for name, made in places.items()}
    except ArtifactError as error:
        raise UserError(f"what the newest run made is gone ({error})") from None
