"""`medusa registry list | show | diff`: what is registered, in words. Reads only."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from rich import box
from rich.console import Console
from rich.table import Table

from infra.registry import Registry, Version

SHOWN_TAGS = ("backbone", "heads", "tree_nodes", "speedup_vs_transformers", "speedup_vs_plain", "decision")


def list_versions(registry: Registry, out: Console, as_json: bool) -> None:
    """One row per version, newest first within a model."""
    versions = [version for model in registry.models() for version in reversed(registry.versions(model))]
    if as_json:
        print(json.dumps([_plain(version) for version in versions], indent=2))
        return
    if not versions:
        out.print("nothing is registered yet: `medusa run` registers what it makes")
        return
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("version", "alias", *SHOWN_TAGS):
        table.add_column(column)
    for version in versions:
        values = [_figure(version.tags.get(tag, "")) for tag in SHOWN_TAGS]
        table.add_row(version.ref, ", ".join(version.aliases), *values)
    out.print(table)


def show_version(registry: Registry, reference: str, out: Console, as_json: bool) -> None:
    """Tags and files of one version, its files verified."""
    version = registry.get(reference)
    files = registry.download(version)
    sizes = {str(p.relative_to(files)): p.stat().st_size for p in sorted(files.rglob("*")) if p.is_file()}
    if as_json:
        print(json.dumps(_plain(version) | {"directory": str(files), "files": sizes}, indent=2))
        return
    table = Table(box=box.SIMPLE_HEAD, show_header=False, title=version.ref, title_justify="left")
    for name, value in sorted(version.tags.items()):
        table.add_row(name, value)
    out.print(table)
    out.print(f"in {files}", soft_wrap=True)
    for name, size in sizes.items():
        out.print(f"  {size:>12,}  {name}")


def diff_versions(registry: Registry, first: str, second: str, out: Console, as_json: bool) -> None:
    """Every value of configuration and report that differs between two versions."""
    sides = [_facts(registry.download(registry.get(reference))) for reference in (first, second)]
    names = sorted(sides[0].keys() | sides[1].keys())
    changed = {n: [sides[0].get(n), sides[1].get(n)] for n in names if sides[0].get(n) != sides[1].get(n)}
    if as_json:
        print(json.dumps(changed, indent=2))
        return
    if not changed:
        out.print(f"{first} and {second} do not differ in configuration, accuracy, tree or speed")
        return
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("what", first, second):
        table.add_column(column)
    for name, (left, right) in changed.items():
        table.add_row(name, _figure(left), _figure(right))
    out.print(table)


def _facts(files: Path) -> dict[str, Any]:
    """Configuration and figures of a version as flat names."""
    config = yaml.safe_load((files / "config.yaml").read_text())
    report = json.loads((files / "report.json").read_text())
    facts = dict(_flat("config", config))
    for part in ("backbone", "device", "speedup", "lossless"):
        facts |= dict(_flat(part, report.get(part, {})))
    heads, tree = report.get("heads", {}), report.get("tree", {})
    facts |= dict(_flat("heads", {key: value for key, value in heads.items() if key != "curve"}))
    facts |= dict(_flat("tree", {key: value for key, value in tree.items() if key not in ("curve", "choices")}))
    for run in report.get("runs", []):
        facts[f"{run['engine']}.tokens_per_second"] = run["tokens_per_second"]
        facts[f"{run['engine']}.tokens_per_step"] = run["tokens_per_step"]
    return facts


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{prefix}.{key}", inner)
    else:
        yield prefix, value


def _plain(version: Version) -> dict[str, Any]:
    return {
        "model": version.model,
        "version": version.version,
        "aliases": list(version.aliases),
        "created": str(version.created),
        "tags": dict(version.tags),
    }


def _figure(value: Any) -> str:
    """Short form of a figure; a list of figures element by element."""
    if isinstance(value, list):
        return " ".join(_figure(item) for item in value)
    try:
        number = float(value)
    except (TypeError, ValueError):
        return "" if value is None else str(value)
    return f"{number:g}" if number == int(number) else f"{number:.4g}"
