"""The files of a registered version: `version.json` with the digest of each, written on the way in, checked on the
way out. Knows nothing of MLflow, nor of what the files mean.
"""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Any

from infra.artifacts import digest_file, write_json
from infra.errors import UserError

SCHEMA = "medusa.version/1"
MANIFEST = "version.json"
_PICKLED = (".pkl", ".pickle", ".pt", ".pth", ".bin", ".joblib", ".ckpt")


def seal(files: Path, model: str) -> str:
    """Writes `version.json` into a staged directory and returns its digest; refuses what would be unpickled."""
    if not files.is_dir():
        raise UserError(f"{files} is no directory to register")
    listed: dict[str, dict[str, Any]] = {}
    for path in sorted(files.rglob("*")):
        name = path.relative_to(files).as_posix()
        if path.suffix in _PICKLED:
            raise UserError(f"{path} may hold pickled code: only safetensors, JSON, Parquet and text are registered")
        if path.is_file() and name != MANIFEST:
            listed[name] = {"sha256": digest_file(path), "bytes": path.stat().st_size}
    if not listed:
        raise UserError(f"{files} is empty: there is nothing to register")
    write_json(files / MANIFEST, {"schema": SCHEMA, "model": model, "files": listed})
    return digest_file(files / MANIFEST)


def verify(folder: Path, ref: str, digest: str | None) -> None:
    """Compares the files with `version.json`, and that with `digest`; UserError names the first that differs."""
    for name, entry in _read(folder / MANIFEST, ref, digest)["files"].items():
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise UserError(f"{folder / MANIFEST} of {ref} names {name!r}, outside of its directory")
        path = folder / name
        if not path.is_file():
            raise UserError(f"{path} is missing, but {ref} was registered with it: restore it or publish again")
        if digest_file(path) != entry["sha256"]:
            raise UserError(f"{path} is not the file that {ref} was registered with (digest differs): publish again")


def _read(manifest: Path, ref: str, digest: str | None) -> dict[str, Any]:
    if not manifest.is_file():
        raise UserError(f"{ref} has no {manifest}: its files were removed, or it was registered by something else")
    if digest is not None and digest_file(manifest) != digest:
        raise UserError(f"{manifest} is not the file that {ref} was registered with (digest differs): publish again")
    try:
        content: dict[str, Any] = json.loads(manifest.read_text())
    except json.JSONDecodeError as error:
        raise UserError(f"{manifest} of {ref} is not JSON ({error})") from None
    if content.get("schema") != SCHEMA:
        raise UserError(f"{manifest} of {ref} has schema {content.get('schema')!r}, this version reads {SCHEMA!r}")
    return content
