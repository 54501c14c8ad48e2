"""Content-addressed artifacts: directories that exist whole or not at all.

An artifact is `ROOT/artifacts/<kind>/<key>/` with data files and a `manifest.json`. It is built in
`<key>.partial/` under a lock and renamed at the end, so a killed stage leaves only a partial directory,
which the next run of the same key is handed again to go on from.

Knows nothing of what the files mean, nor of any stage.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from infra.errors import ArtifactError

SCHEMA = "medusa.artifact/1"
MANIFEST = "manifest.json"
_KEY_LENGTH = 24

log = logging.getLogger(__name__)


def digest_json(value: Any) -> str:
    """SHA-256 of a value's canonical JSON (sorted keys, no spaces); raises TypeError for what JSON can't hold."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def digest_file(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def write_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all (temporary name, then rename): a kill leaves what was there before."""
    with atomic_path(path) as temporary:
        temporary.write_text(text)


def write_json(path: Path, value: Any) -> None:
    """`write_text` of a value as JSON."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place if the block succeeds and is removed if it doesn't."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with open(temporary, "rb") as handle:
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@dataclass(frozen=True)
class Artifact:
    """A finished artifact: where it lies and what its manifest says. `cached`: it was there before this run."""

    path: Path
    manifest: Mapping[str, Any]
    cached: bool = field(default=True, compare=False)

    @property
    def kind(self) -> str:
        return str(self.manifest["kind"])

    @property
    def key(self) -> str:
        return str(self.manifest["key"])

    @property
    def counts(self) -> Mapping[str, Any]:
        counts: Mapping[str, Any] = self.manifest["counts"]
        return counts

    @property
    def config(self) -> Mapping[str, Any]:
        config: Mapping[str, Any] = self.manifest["config"]
        return config

    def digest(self, *names: str) -> str:
        """Content digest of the named files, or folders of files (all files if none is named).

        This, not the key, is what a reader's key depends on: a rebuilt input with the same bytes invalidates nothing.
        """
        files: Mapping[str, Mapping[str, Any]] = self.manifest["files"]
        wanted = {
            name: entry["sha256"]
            for name, entry in files.items()
            if not names or any(name == n or name.startswith(n.rstrip("/") + "/") for n in names)
        }
        if not wanted:
            raise ArtifactError(f"{self.path} holds none of {names}; it holds {sorted(files)}")
        return digest_json(wanted)

    def file(self, name: str) -> Path:
        """Path of one file of the artifact; ArtifactError if the manifest does not list it."""
        if name not in self.manifest["files"]:
            raise ArtifactError(f"{self.path} has no file {name!r}; it holds {sorted(self.manifest['files'])}")
        return self.path / name

    def verify(self) -> None:
        """Compares every file with its digest; ArtifactError names the first that differs."""
        for name, entry in self.manifest["files"].items():
            path = self.path / name
            if not path.is_file():
                raise ArtifactError(f"{path} is missing, but {self.path / MANIFEST} lists it: remove {self.path}")
            if digest_file(path) != entry["sha256"]:
                raise ArtifactError(f"{path} is not the file that was written (digest differs): remove {self.path}")


class ArtifactStore:
    """The artifacts under one root directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def directory(self, kind: str, key: str) -> Path:
        return self.root / "artifacts" / kind / key

    def get(self, kind: str, key: str) -> Artifact | None:
        """The artifact if it is there and whole (manifest readable, sizes right), else None."""
        path = self.directory(kind, key)
        if not path.is_dir():
            return None
        artifact = load_artifact(path)
        for name, entry in artifact.manifest["files"].items():
            file = path / name
            if not file.is_file() or file.stat().st_size != entry["bytes"]:
                raise ArtifactError(f"{file} is missing or truncated: remove {path} and run again to rebuild it")
        return artifact

    def produce(
        self,
        kind: str,
        key: str,
        *,
        inputs: Mapping[str, str],
        config: Mapping[str, Any],
        build: Callable[[Path], Mapping[str, Any]],
    ) -> Artifact:
        """Returns the artifact, building it with `build(partial_directory) -> counts` if it isn't there.

        A second process with the same key waits for the first and then takes its result. Whatever `build` raises
        leaves the partial directory for the next attempt, never a finished-looking artifact.
        """
        if (found := self.get(kind, key)) is not None:
            log.info("cached %s %s", kind, key)
            # When it was last of use: clean-up goes by this.
            with suppress(OSError):
                os.utime(found.path)
            return found
        final = self.directory(kind, key)
        partial = final.with_name(key + ".partial")
        with self._lock(kind, key):
            if (found := self.get(kind, key)) is not None:
                return found
            partial.mkdir(parents=True, exist_ok=True)
            # Seconds of earlier, interrupted attempts count too: the figure is what the artifact cost.
            clock = partial / ".seconds"
            before = float(clock.read_text()) if clock.exists() else 0.0
            start = time.monotonic()
            try:
                counts = build(partial)
            finally:
                seconds = before + time.monotonic() - start
                # Bookkeeping only: on a full disk the stage's own error is the one to show.
                with suppress(OSError):
                    write_text(clock, str(seconds))
            clock.unlink(missing_ok=True)
            manifest = {
                "schema": SCHEMA,
                "kind": kind,
                "key": key,
                "inputs": dict(inputs),
                "config": dict(config),
                "counts": dict(counts),
                "files": _list_files(partial),
                "seconds": round(seconds, 3),
                "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "writer": _writer(),
            }
            write_json(partial / MANIFEST, manifest)
            os.replace(partial, final)
        log.info("built %s %s in %.1f s", kind, key, seconds)
        return Artifact(final, manifest, cached=False)

    @contextmanager
    def try_lock(self, kind: str, key: str) -> Iterator[bool]:
        """Whether nobody is building this artifact; within the block nobody will."""
        with self._lock_file(kind, key) as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True

    def _lock_file(self, kind: str, key: str) -> IO[str]:
        path = self.root / "locks" / f"{kind}-{key}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        return open(path, "a+")

    @contextmanager
    def _lock(self, kind: str, key: str) -> Iterator[None]:
        # flock, because the kernel releases it however the holder dies.
        with self._lock_file(kind, key) as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                handle.seek(0)
                log.warning(
                    "process %s is building %s %s: waiting for it", handle.read().strip() or "another", kind, key
                )
                fcntl.flock(handle, fcntl.LOCK_EX)
            handle.seek(0)
            handle.truncate()
            handle.write(str(os.getpid()))
            handle.flush()
            yield


def load_artifact(path: Path) -> Artifact:
    """Reads a finished artifact directory; ArtifactError if there is no manifest of a known schema."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except FileNotFoundError:
        raise ArtifactError(f"{path} is no artifact: it has no {MANIFEST}") from None
    except json.JSONDecodeError as error:
        raise ArtifactError(f"{path / MANIFEST} is not JSON ({error}): remove {path}") from None
    if manifest.get("schema") != SCHEMA:
        raise ArtifactError(f"{path / MANIFEST} has schema {manifest.get('schema')!r}, this version reads {SCHEMA!r}")
    return Artifact(path, manifest)


def artifact_key(
    kind: str,
    version: int,
    *,
    inputs: Mapping[str, str],
    config: Mapping[str, Any],
    machine: Mapping[str, Any] | None = None,
) -> str:
    """Key of a stage's output: kind, stage version, content digests read, semantic config, machine if it is timed."""
    parts = {"kind": kind, "version": version, "inputs": dict(inputs), "config": dict(config), "machine": machine}
    return digest_json(parts)[:_KEY_LENGTH]


def remove_partial(store: ArtifactStore, kind: str, key: str) -> None:
    """Forgets what an interrupted attempt left behind."""
    shutil.rmtree(store.directory(kind, key).with_name(key + ".partial"), ignore_errors=True)


def _list_files(directory: Path) -> dict[str, dict[str, Any]]:
    """Every visible file below `directory` with size and digest; names starting with a dot are scratch, and go."""
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if any(part.startswith(".") for part in name.split("/")):
            if path.is_file():
                path.unlink()
        elif path.is_file() and name != MANIFEST:
            files[name] = {"sha256": digest_file(path), "bytes": path.stat().st_size}
    for path in sorted(directory.glob(".*")):
        shutil.rmtree(path, ignore_errors=True)
    return files


def _writer() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in ("medusa-pipeline", "torch", "transformers"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions
