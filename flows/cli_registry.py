"""`medusa registry …`: what is registered, and which version is the champion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from flows.cli_options import AsJson, Root, out, root_of

app = typer.Typer(no_args_is_help=True, help="Versions of heads and trees; `champion` is what is served.")


@app.command("list")
def registry_list(root: Root = None, as_json: AsJson = False) -> None:
    """List every registered version."""
    from flows.registry_commands import list_versions

    list_versions(open_registry(root), out, as_json)


@app.command("show")
def registry_show(reference: str, root: Root = None, as_json: AsJson = False) -> None:
    """Show one version: its tags, files and figures."""
    from flows.registry_commands import show_version

    show_version(open_registry(root), reference, out, as_json)


@app.command("diff")
def registry_diff(first: str, second: str, root: Root = None, as_json: AsJson = False) -> None:
    """Show what differs between two versions in configuration, accuracy, tree and speed."""
    from flows.registry_commands import diff_versions

    diff_versions(open_registry(root), first, second, out, as_json)


@app.command("promote")
def registry_promote(reference: str, root: Root = None) -> None:
    """Make a version the champion, whatever the gate said."""
    registry = open_registry(root)
    version = registry.promote(registry.get(reference))
    out.print(f"{version.ref} is the champion of {version.model}")


@app.command("rollback")
def registry_rollback(model: str, root: Root = None) -> None:
    """Give the champion back to the version that the present one replaced."""
    version = open_registry(root).rollback(model)
    out.print(f"{version.ref} is the champion of {version.model} again")


def open_registry(root: Path | None) -> Any:
    """The registry of a root, or the one that the environment names."""
    from infra.registry import Registry

    return Registry(root_of(root))
