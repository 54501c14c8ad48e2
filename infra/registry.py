"""Registered versions of trained heads, kept in MLflow as plain files.

One registered model per recipe lineage. A version is a directory of plain files with a `version.json` that lists the
digest of each; it is checked on the way out. The alias `champion` is the only authority on what is served, and moving
it is one call; what it replaced is the tag `replaces` of the new champion, and that is what a rollback follows.

Knows nothing of what the files mean, nor of when a version deserves to be champion. Nothing here pickles, and a
file that would have to be unpickled is refused on the way in.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from infra.errors import UserError
from infra.registry_client import connect, explained, without_password
from infra.registry_files import seal, verify

CHAMPION = "champion"
REPLACES = "replaces"
ARTIFACT_KEY = "artifact_key"
_MANIFEST_DIGEST = "manifest_sha256"
_FOLDER = "version"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_RESERVED = (CHAMPION, "latest")


@dataclass(frozen=True)
class Version:
    """One registered version: `source` is the address of its files, `created` is UTC in ISO 8601."""

    model: str
    version: int
    tags: Mapping[str, str]
    source: str
    created: str
    aliases: tuple[str, ...]

    @property
    def ref(self) -> str:
        """`NAME/VERSION`, as `Registry.get` reads it."""
        return f"{self.model}/{self.version}"


class Registry:
    """The registry of one root directory, or of an MLflow server.

    `tracking_uri` None: $MLFLOW_TRACKING_URI, or SQLite and a folder under `ROOT/registry`. Every method raises
    UserError, within ten seconds, for a server that does not answer.
    """

    def __init__(self, root: Path, tracking_uri: str | None = None) -> None:
        self.directory = root.resolve() / "registry"
        tracking_uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or None
        self.is_local = tracking_uri is None
        self.tracking_uri = tracking_uri or f"sqlite:///{self.directory / 'mlflow.db'}"
        self._connected: Any = None

    @property
    def address(self) -> str:
        """The tracking URI as it may be shown."""
        return without_password(self.tracking_uri)

    def check(self) -> None:
        """Connects: a cheap way to fail before the work instead of after it."""
        self._client()

    def register(self, model: str, files: Path, tags: Mapping[str, str]) -> Version:
        """Stores the directory `files` as a new version of `model`; writes `version.json` into it first.

        With a tag `artifact_key` that one of the model's versions already has, returns that version instead.
        """
        _check_name(model)
        client = self._client()
        with self._lock(), explained(self.tracking_uri):
            key = tags.get(ARTIFACT_KEY)
            if key is not None and (found := self._with_key(model, key)) is not None:
                return found
            tags = {**tags, _MANIFEST_DIGEST: seal(files, model)}
            self._ensure_model(model)
            run = client.create_run(self._experiment(), run_name=model)
            try:
                client.log_artifacts(run.info.run_id, str(files), _FOLDER)
                source = f"{run.info.artifact_uri.rstrip('/')}/{_FOLDER}"
                made = client.create_model_version(
                    model, source, run_id=run.info.run_id, tags=tags, await_creation_for=0
                )
            except BaseException:
                client.set_terminated(run.info.run_id, "FAILED")
                raise
            client.set_terminated(run.info.run_id, "FINISHED")
        return self._one(model, int(made.version))

    def models(self) -> list[str]:
        """Names of the registered models, sorted."""
        client = self._client()
        with explained(self.tracking_uri):
            return sorted(model.name for model in client.search_registered_models(max_results=1000))

    def versions(self, model: str) -> list[Version]:
        """Versions of a model, oldest first; none if there is no such model."""
        _check_name(model)
        client = self._client()
        with explained(self.tracking_uri):
            found = client.search_model_versions(f"name='{model}'")
            if not found:
                return []
            aliases = self._aliases(model)
        return sorted((_version(entry, aliases) for entry in found), key=lambda version: version.version)

    def champion(self, model: str) -> Version | None:
        """The version that carries the alias `champion`, if one does."""
        return next((version for version in self.versions(model) if CHAMPION in version.aliases), None)

    def get(self, ref: str, default_model: str | None = None) -> Version:
        """The version that `ref` names: `champion`, `latest`, `NAME` (its champion), `NAME/VERSION`.

        `champion` and `latest` are those of `default_model`, or of the only model there is.
        """
        name, _, which = ref.partition("/")
        if name in _RESERVED and not which:
            name, which = default_model or self._only_model(ref), name
        _check_name(name)
        versions = self.versions(name)
        if not versions:
            raise UserError(
                f"no model {name!r} is registered at {self.address}; there is {self.models() or 'none yet'}: "
                "run the pipeline first, or name one of these"
            )
        if which == "latest":
            return versions[-1]
        if which in ("", CHAMPION):
            return self._expect_champion(name)
        for version in versions:
            if str(version.version) == which:
                return version
        raise UserError(f"model {name!r} has no version {which!r}; it has {[v.version for v in versions]}")

    def download(self, version: Version, destination: Path | None = None) -> Path:
        """A directory with the version's files, each compared with its digest; UserError for the first that differs.

        Files in a local folder are used where they are unless `destination` asks for a copy; those on a server are
        fetched, to `destination` or to a folder under the root.
        """
        local = self._local_folder(version.source)
        if local is not None:
            _verify(version, local)
            if destination is None:
                return local
            shutil.copytree(local, destination, dirs_exist_ok=True)
        else:
            destination = destination or self.directory / "downloads" / version.model / str(version.version)
            # What was fetched before is used again only if it passes; what a killed download left is fetched anew.
            if not _passes(version, destination):
                self._fetch(version, destination)
        _verify(version, destination)
        return destination

    def promote(self, version: Version) -> Version:
        """Makes it the champion; the one it replaces is noted on it first, so a crash between the two loses nothing."""
        client = self._client()
        with self._lock(), explained(self.tracking_uri):
            previous = self.champion(version.model)
            if previous is not None and previous.version == version.version:
                return previous
            replaces = "" if previous is None else str(previous.version)
            client.set_model_version_tag(version.model, str(version.version), REPLACES, replaces)
            client.set_registered_model_alias(version.model, CHAMPION, str(version.version))
        return self._one(version.model, version.version)

    def rollback(self, model: str) -> Version:
        """Gives `champion` back to the version the present champion replaced."""
        present = self._expect_champion(model)
        replaced = present.tags.get(REPLACES)
        if not replaced:
            raise UserError(f"{present.ref} replaced no version, so there is nothing to roll back to: promote one")
        target = self.get(f"{model}/{replaced}")
        client = self._client()
        with self._lock(), explained(self.tracking_uri):
            client.set_registered_model_alias(model, CHAMPION, replaced)
        return self._one(model, target.version)

    def tag(self, version: Version, tags: Mapping[str, str]) -> Version:
        """Adds or overwrites tags of a version."""
        client = self._client()
        with explained(self.tracking_uri):
            for name, value in tags.items():
                client.set_model_version_tag(version.model, str(version.version), name, value)
        return self._one(version.model, version.version)

    def _client(self) -> Any:
        if self._connected is None:
            if self.is_local:
                self.directory.mkdir(parents=True, exist_ok=True)
                # The first connection creates the database; two at once would both try to.
                with self._lock():
                    self._connected = connect(self.tracking_uri)
            else:
                self._connected = connect(self.tracking_uri)
        return self._connected

    def _experiment(self) -> str:
        """The experiment that versions are logged to. Local ones are named by folder: a moved root gets its own."""
        location = (self.directory / "files").as_uri() if self.is_local else None
        name = "medusa" if location is None else f"medusa {location}"
        client = self._connected
        found = client.get_experiment_by_name(name)
        return str(found.experiment_id if found else client.create_experiment(name, artifact_location=location))

    def _ensure_model(self, model: str) -> None:
        if model not in self.models():
            self._connected.create_registered_model(model)

    def _with_key(self, model: str, key: str) -> Version | None:
        return next((v for v in self.versions(model) if v.tags.get(ARTIFACT_KEY) == key), None)

    def _one(self, model: str, number: int) -> Version:
        with explained(self.tracking_uri):
            return _version(self._connected.get_model_version(model, str(number)), self._aliases(model))

    def _aliases(self, model: str) -> dict[str, int]:
        aliases = self._connected.get_registered_model(model).aliases
        return {name: int(number) for name, number in aliases.items()}

    def _only_model(self, ref: str) -> str:
        models = self.models()
        if len(models) == 1:
            return models[0]
        hint = f"name one of {models} as NAME or NAME/VERSION" if models else "run the pipeline first"
        raise UserError(f"{ref!r} of which model? {len(models)} are registered at {self.address}: {hint}")

    def _expect_champion(self, model: str) -> Version:
        champion = self.champion(model)
        if champion is None:
            numbers = [version.version for version in self.versions(model)]
            raise UserError(f"model {model!r} has no champion; its versions are {numbers}: name or promote one")
        return champion

    def _local_folder(self, source: str) -> Path | None:
        """Where a local version lies, None if it is on a server. Of a root that was moved, the folder it is in now."""
        parts = urlsplit(source)
        if parts.scheme not in ("", "file"):
            return None
        path = Path(unquote(parts.path))
        inside = str(path).rpartition("/registry/files/")[2]
        moved = self.directory / "files" / inside
        return moved if self.is_local and not path.is_dir() and moved.is_dir() else path

    def _fetch(self, version: Version, destination: Path) -> None:
        from mlflow.artifacts import download_artifacts

        destination.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=destination.parent) as folder, explained(self.tracking_uri):
            fetched = download_artifacts(artifact_uri=version.source, dst_path=folder, tracking_uri=self.tracking_uri)
            shutil.copytree(fetched, destination, dirs_exist_ok=True)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """One writer per root, so that two runs of one key make one version; a server's other clients are not seen."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with open(self.directory / ".lock", "w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield


def _check_name(model: str) -> None:
    if not _NAME.fullmatch(model) or model in _RESERVED:
        raise UserError(
            f"{model!r} is no model name: letters, digits, '.', '_' and '-', starting with a letter or a digit, at "
            f"most 128 of them, and not {' or '.join(_RESERVED)}"
        )


def _version(entry: Any, aliases: Mapping[str, int]) -> Version:
    number = int(entry.version)
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(entry.creation_timestamp / 1000))
    carried = tuple(sorted(alias for alias, target in aliases.items() if target == number))
    return Version(entry.name, number, dict(entry.tags), entry.source, created, carried)


def _passes(version: Version, folder: Path) -> bool:
    try:
        _verify(version, folder)
    except UserError:
        return False
    return True


def _verify(version: Version, folder: Path) -> None:
    verify(folder, version.ref, version.tags.get(_MANIFEST_DIGEST))
