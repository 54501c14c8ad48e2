"""`medusa gc`: which artifacts nothing refers to any more, and their removal.

Kept is what a registered version came from, what a recent run made or found (the store touches an artifact that is
found again, so a run under way counts too), and what is being built. Nothing else decides: an artifact that goes costs
the time to build it again, never a version.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from infra.artifacts import ArtifactStore
from infra.registry import Registry
from tasks.publish import ARTIFACTS, artifact_names

_DAY_S = 86400


@dataclass(frozen=True)
class Garbage:
    """A directory below `artifacts/`: the bytes it holds, and when last something happened to it, in epoch seconds."""

    path: Path
    bytes: int
    untouched_since: float

    @property
    def name(self) -> str:
        """kind/key."""
        return f"{self.path.parent.name}/{self.path.name}"

    def as_json(self) -> dict[str, Any]:
        """name, bytes, untouched_since as a date."""
        day = time.strftime("%Y-%m-%d", time.gmtime(self.untouched_since))
        return {"name": self.name, "bytes": self.bytes, "untouched_since": day}


def find_garbage(root: Path, registry: Registry, *, days: float) -> list[Garbage]:
    """Artifacts, and what killed stages left, that no version came from and no run of the last `days` days has used."""
    oldest = time.time() - days * _DAY_S
    kept = set(_of_versions(registry))
    found = []
    for path in sorted((root / "artifacts").glob("*/*")):
        if not path.is_dir() or path.is_symlink():
            continue
        key = path.name.partition(".")[0]
        files = [file.lstat() for file in path.rglob("*") if file.is_file()]
        touched = max([path.lstat().st_mtime, *(file.st_mtime for file in files)])
        if f"{path.parent.name}/{key}" not in kept and touched < oldest:
            found.append(Garbage(path, sum(file.st_size for file in files), touched))
    return found


def remove(root: Path, garbage: list[Garbage]) -> list[Garbage]:
    """Removes what no process is building, and says what went. First renamed: half removed, it is no artifact."""
    store, gone = ArtifactStore(root), []
    for each in garbage:
        with store.try_lock(each.path.parent.name, each.path.name.partition(".")[0]) as mine:
            if not mine:
                continue
            doomed = each.path.with_name(f".{each.path.name}.removed")
            each.path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
        gone.append(each)
    for left in (root / "artifacts").glob("*/.*.removed"):
        shutil.rmtree(left, ignore_errors=True)
    return gone


def _of_versions(registry: Registry) -> Iterator[str]:
    for model in registry.models():
        for version in registry.versions(model):
            if ARTIFACTS in version.tags:
                yield from version.tags[ARTIFACTS].split()
            else:
                # Registered before there was such a tag: its files have to be fetched.
                yield from artifact_names(json.loads((registry.download(version) / "lineage.json").read_text()))


def print_garbage(found: list[Garbage], gone: list[Garbage], deleted: bool, out: Console) -> None:
    """What was found, and what became of it."""
    if not found:
        out.print("nothing to remove: every artifact belongs to a version or a recent run")
        return
    table = Table(box=box.SIMPLE_HEAD)
    for column, justify in (("artifact", "left"), ("MB", "right"), ("untouched since", "left")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for each in found:
        table.add_row(each.name, f"{each.bytes / 1e6:,.1f}", str(each.as_json()["untouched_since"]))
    out.print(table)
    total = sum(each.bytes for each in found) / 1e6
    if not deleted:
        out.print(f"{len(found)} artifacts, {total:,.1f} MB; `medusa gc --delete` removes them")
        return
    freed = sum(each.bytes for each in gone) / 1e6
    out.print(f"removed {len(gone)} of {len(found)} artifacts, {freed:,.1f} MB")
    if len(gone) < len(found):
        out.print("the others are being built at this moment")
