"""The registry against a real MLflow on SQLite: what is registered, who is champion, and what is refused."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.errors import UserError
from infra.registry import CHAMPION, REPLACES, Registry, Version
from infra.registry_client import without_password
from infra.registry_files import MANIFEST


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Registry:
    # One for the module: the first use of a SQLite file migrates it for seconds. A name with a space and a percent
    # sign, because the folder travels through a file URI.
    return Registry(tmp_path_factory.mktemp("root 100%"))


@pytest.fixture
def staged(tmp_path: Path) -> Path:
    return stage(tmp_path / "staged", "first")


def stage(directory: Path, content: str) -> Path:
    (directory / "heads").mkdir(parents=True)
    (directory / "heads" / "heads.safetensors").write_text(content)
    (directory / "report.json").write_text("{}")
    return directory


def register(registry: Registry, tmp_path: Path, model: str, count: int) -> list[Version]:
    return [
        registry.register(model, stage(tmp_path / f"{model}-{i}", f"content {i}"), {"artifact_key": f"key-{i}"})
        for i in range(count)
    ]


def test_a_version_comes_back_with_its_files_and_tags(registry: Registry, staged: Path) -> None:
    version = registry.register("roundtrip", staged, {"backbone_digest": "abc", "artifact_key": "k"})
    assert (version.model, version.version, version.ref) == ("roundtrip", 1, "roundtrip/1")
    assert version.tags["backbone_digest"] == "abc"
    assert version.aliases == ()
    folder = registry.download(version)
    assert folder.is_relative_to(registry.directory / "files")
    assert (folder / "heads" / "heads.safetensors").read_text() == "first"
    listed = json.loads((folder / MANIFEST).read_text())["files"]
    assert sorted(listed) == ["heads/heads.safetensors", "report.json"]
    assert "roundtrip" in registry.models()


def test_a_copy_is_made_where_it_is_asked_for(registry: Registry, staged: Path, tmp_path: Path) -> None:
    version = registry.register("copied", staged, {})
    folder = registry.download(version, tmp_path / "there")
    assert folder == tmp_path / "there"
    assert (folder / "heads" / "heads.safetensors").read_text() == "first"


def test_the_same_artifact_key_is_registered_once(registry: Registry, staged: Path, tmp_path: Path) -> None:
    first = registry.register("once", staged, {"artifact_key": "same"})
    again = registry.register("once", stage(tmp_path / "b", "second"), {"artifact_key": "same"})
    other = registry.register("once", stage(tmp_path / "c", "third"), {"artifact_key": "other"})
    assert (first.version, again.version, other.version) == (1, 1, 2)
    assert [version.version for version in registry.versions("once")] == [1, 2]


def test_two_at_once_register_one_version(registry: Registry, tmp_path: Path) -> None:
    registry.check()
    made: list[int] = []

    def work(name: str) -> None:
        made.append(registry.register("race", stage(tmp_path / name, name), {"artifact_key": "one"}).version)

    threads = [threading.Thread(target=work, args=(f"t{i}",)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [1, 1]


def test_champion_moves_and_rolls_back(registry: Registry, tmp_path: Path) -> None:
    one, two, three = register(registry, tmp_path, "lineage", 3)
    assert registry.champion("lineage") is None
    assert registry.promote(one).aliases == (CHAMPION,)
    assert registry.promote(three).tags[REPLACES] == "1"
    assert registry.champion("lineage") == registry.get("lineage/3")
    assert registry.versions("lineage")[0].aliases == ()
    assert registry.rollback("lineage").version == 1
    with pytest.raises(UserError, match="replaced no version"):
        registry.rollback("lineage")
    assert registry.promote(two).tags[REPLACES] == "1"


def test_promoting_the_champion_again_does_not_make_it_replace_itself(registry: Registry, tmp_path: Path) -> None:
    one, two = register(registry, tmp_path, "twice", 2)
    registry.promote(one)
    registry.promote(two)
    assert registry.promote(two).tags[REPLACES] == "1"


def test_references(registry: Registry, tmp_path: Path) -> None:
    one, _ = register(registry, tmp_path, "refs", 2)
    registry.promote(one)
    found = {ref: registry.get(ref, "refs").version for ref in ("champion", "latest", "refs", "refs/2", "refs/latest")}
    assert found == {"champion": 1, "latest": 2, "refs": 1, "refs/2": 2, "refs/latest": 2}


@pytest.mark.parametrize(
    ("ref", "says"),
    [
        ("nobody", "no model 'nobody' is registered"),
        ("crownless/7", r"no version '7'; it has \[1\]"),
        ("crownless", "has no champion"),
        ("../etc/1", "no model name"),
        ("champion", "of which model"),
    ],
)
def test_references_to_nothing(registry: Registry, tmp_path: Path, ref: str, says: str) -> None:
    register(registry, tmp_path, "crownless", 1)
    register(registry, tmp_path, "another", 1)
    with pytest.raises(UserError, match=says):
        registry.get(ref)


@pytest.mark.parametrize("name", ["", "../up", "a/b", "champion", "latest", "a" * 200, "it's", "-x"])
def test_names_that_are_refused(registry: Registry, staged: Path, name: str) -> None:
    with pytest.raises(UserError, match="no model name"):
        registry.register(name, staged, {})


def test_a_changed_file_is_refused(registry: Registry, staged: Path) -> None:
    version = registry.register("tampered", staged, {})
    file = registry.download(version) / "heads" / "heads.safetensors"
    file.write_text("other")
    with pytest.raises(UserError, match="digest differs"):
        registry.download(version)
    file.unlink()
    with pytest.raises(UserError, match="is missing"):
        registry.download(version)


def test_a_changed_manifest_is_refused(registry: Registry, staged: Path) -> None:
    """Without a digest of its own in the database, whoever changes a file could change the manifest to match."""
    version = registry.register("forged", staged, {})
    manifest = registry.download(version) / MANIFEST
    manifest.write_text(manifest.read_text().replace("report.json", "../report.json"))
    with pytest.raises(UserError, match="digest differs"):
        registry.download(version)
    manifest.unlink()
    with pytest.raises(UserError, match=MANIFEST):
        registry.download(version)


def test_pickles_are_refused(registry: Registry, staged: Path) -> None:
    (staged / "heads" / "model.pt").write_bytes(b"")
    with pytest.raises(UserError, match="pickled"):
        registry.register("pickled", staged, {})
    assert registry.versions("pickled") == []


def test_a_root_that_was_moved_keeps_its_versions(tmp_path: Path) -> None:
    before = Registry(tmp_path / "before")
    version = before.register("moved", stage(tmp_path / "staged", "first"), {"artifact_key": "k"})
    (tmp_path / "before").rename(tmp_path / "after")
    after = Registry(tmp_path / "after")
    folder = after.download(after.get(version.ref))
    assert folder.is_relative_to(tmp_path / "after")
    again = after.register("moved", stage(tmp_path / "again", "second"), {"artifact_key": "l"})
    assert after.download(again).is_relative_to(tmp_path / "after")


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that accepts connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("scheme", ["http", "postgresql"])
def test_a_dead_server_is_named_within_ten_seconds(tmp_path: Path, scheme: str) -> None:
    start = time.monotonic()
    with pytest.raises(UserError, match=r"127\.0\.0\.1:9") as caught:
        Registry(tmp_path, f"{scheme}://user:secret@127.0.0.1:9/mlflow").models()
    assert time.monotonic() - start < 10
    assert "secret" not in str(caught.value)


def test_a_server_that_hangs_is_named_within_ten_seconds(tmp_path: Path, silent_port: int) -> None:
    start = time.monotonic()
    with pytest.raises(UserError, match=f"127.0.0.1:{silent_port}"):
        Registry(tmp_path, f"http://127.0.0.1:{silent_port}").check()
    assert time.monotonic() - start < 10


def test_an_address_is_shown_without_its_password() -> None:
    assert without_password("postgresql://me:pass@db:5432/x?token=1") == "postgresql://db:5432/x"
    assert without_password("sqlite:////a/b.db") == "sqlite:////a/b.db"
