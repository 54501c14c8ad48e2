"""The artifact store: whole or not at all, built once, and never mistaken for another configuration's."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.artifacts import (
    MANIFEST,
    Artifact,
    ArtifactStore,
    artifact_key,
    atomic_path,
    digest_json,
    load_artifact,
    remove_partial,
    write_json,
)
from infra.errors import ArtifactError

ROOT = Path(__file__).parents[2]
KIND, KEY = "toy", "abc"


def produce(store: ArtifactStore, files: dict[str, str], key: str = KEY) -> Artifact:
    def build(partial: Path) -> dict[str, Any]:
        for name, text in files.items():
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            (partial / name).write_text(text)
        return {"files": len(files)}

    return store.produce(KIND, key, inputs={"a": "1"}, config={"x": 2}, build=build)


def never(partial: Path) -> dict[str, Any]:
    raise AssertionError("built again")


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path)


# A stage that writes one shard, tells us, and waits to be killed; with a second argument it finishes instead.
STAGE = """
import sys, time
from pathlib import Path
from infra.artifacts import ArtifactStore
root, finish = Path(sys.argv[1]), sys.argv[2] == "finish"
def build(partial):
    shards = [partial / f"shard-{i}" for i in range(3)]
    done = [shard.name for shard in shards if shard.exists()]
    for shard in shards:
        if not shard.exists():
            shard.write_text(f"{shard.name} by {'second' if done else 'first'}")
            if not finish:
                print("written", flush=True)
                time.sleep(60)
    return {"kept": len(done)}
artifact = ArtifactStore(root).produce("toy", "abc", inputs={}, config={}, build=build)
print("kept", artifact.counts["kept"], "cached", artifact.cached, flush=True)
"""


def start(root: Path, mode: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", STAGE, str(root), mode],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_killed_build_leaves_no_artifact_and_is_taken_up_where_it_stopped(store: ArtifactStore) -> None:
    """Catches a half-built directory taken for a whole one, finished shards built again, and a lock that outlives its
    holder."""
    process = start(store.root, "hang")
    assert read_line(process) == "written"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert store.get(KIND, KEY) is None
    assert not store.directory(KIND, KEY).exists()
    second = start(store.root, "finish")
    out, _ = second.communicate(timeout=30)
    assert out.strip() == "kept 1 cached False"
    artifact = store.get(KIND, KEY)
    assert artifact is not None
    assert [artifact.file(f"shard-{i}").read_text() for i in range(3)] == [
        "shard-0 by first",
        "shard-1 by second",
        "shard-2 by second",
    ]
    artifact.verify()
    assert not store.directory(KIND, KEY).with_name(KEY + ".partial").exists()


def test_a_second_process_waits_and_takes_the_result(store: ArtifactStore) -> None:
    """Catches two processes writing one directory, and a waiter that builds it again."""
    go = store.root / "go"
    wait = f"[time.sleep(0.02) for _ in iter(Path({str(go)!r}).exists, True)]"
    code = STAGE.replace("time.sleep(60)", wait)
    first = subprocess.Popen(
        [sys.executable, "-c", code, str(store.root), "hang"], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert read_line(first) == "written"
    waiter = (
        "import sys, logging; from pathlib import Path; from infra.artifacts import ArtifactStore\n"
        "logging.basicConfig()\n"
        "def build(partial): raise SystemExit('built twice')\n"
        f"a = ArtifactStore(Path({str(store.root)!r})).produce('toy', 'abc', inputs={{}}, config={{}}, build=build)\n"
        "print('cached', a.cached, sorted(a.manifest['files']))"
    )
    second = subprocess.Popen(
        [sys.executable, "-c", waiter], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert second.stderr is not None
    warning = second.stderr.readline()
    assert f"process {first.pid} is building toy abc: waiting" in warning
    assert second.poll() is None
    go.touch()
    out, _ = second.communicate(timeout=30)
    first.communicate(timeout=30)
    assert second.returncode == 0
    assert out.strip() == "cached True ['shard-0', 'shard-1', 'shard-2']"


def test_the_same_key_is_built_once(store: ArtifactStore) -> None:
    """Catches a stage that runs again though its artifact is there, and `cached` that says the wrong thing."""
    first = produce(store, {"a.txt": "one"})
    again = store.produce(KIND, KEY, inputs={}, config={}, build=never)
    assert (first.cached, again.cached) == (False, True)
    assert again == first
    assert (again.kind, again.key, dict(again.counts), dict(again.config)) == (KIND, KEY, {"files": 1}, {"x": 2})
    assert produce(store, {"a.txt": "two"}, key="other").path != first.path


def test_a_key_depends_on_everything_it_is_made_of() -> None:
    """Catches a key that ignores the stage's config (or any other part): a stale artifact would be reused."""
    base: dict[str, Any] = {"inputs": {"data": "d1"}, "config": {"temperature": 0.7, "n": {"k": 4}}, "machine": None}
    variants = [
        ("teacher", 1, base),
        ("ranks", 1, base),
        ("teacher", 2, base),
        ("teacher", 1, base | {"inputs": {"data": "d2"}}),
        ("teacher", 1, base | {"inputs": {"other": "d1"}}),
        ("teacher", 1, base | {"config": {"temperature": 0.8, "n": {"k": 4}}}),
        ("teacher", 1, base | {"config": {"temperature": 0.7, "n": {"k": 5}}}),
        ("teacher", 1, base | {"config": {"temperature": 0.7}}),
        ("teacher", 1, base | {"machine": {"threads": 2}}),
    ]
    keys = [artifact_key(kind, version, **parts) for kind, version, parts in variants]
    assert len(set(keys)) == len(keys)
    reordered = {"config": {"n": {"k": 4}, "temperature": 0.7}, "machine": None, "inputs": {"data": "d1"}}
    assert artifact_key("teacher", 1, **reordered) == keys[0]  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        artifact_key("teacher", 1, inputs={}, config={"path": Path("/x")})


def test_a_key_is_the_same_on_every_machine_and_version() -> None:
    """Catches a change of the key's recipe, which would throw away every artifact there is."""
    assert artifact_key("k", 1, inputs={"a": "b"}, config={"é": 1.5}) == "5e2b0b2f1d30143b35228c55"
    assert digest_json({"b": 1, "a": [1, 2]}) == digest_json({"a": [1, 2], "b": 1})


def test_digests_go_by_part(store: ArtifactStore) -> None:
    """Catches training data invalidated by a new benchmark prompt, and a prefix that matches another folder."""
    files = {"train.txt": "t", "bench.txt": "b", "model/w": "w", "model2/w": "v"}
    one = produce(store, files)
    two = produce(store, files | {"bench.txt": "changed"}, key="two")
    assert one.digest("train.txt") == two.digest("train.txt")
    assert one.digest("bench.txt") != two.digest("bench.txt")
    assert one.digest() != two.digest()
    assert one.digest("model") == one.digest("model/") == one.digest("model/w")
    assert one.digest("model") != one.digest("model", "model2")
    with pytest.raises(ArtifactError, match=r"holds none of \('mod',\)"):
        one.digest("mod")
    same = produce(store, files, key="same")
    assert same.digest() == one.digest(), "content counts, not the key"


def test_a_file_that_was_tampered_with_is_refused(store: ArtifactStore) -> None:
    """Catches a changed file of the same size, which only its digest tells."""
    artifact = produce(store, {"a.txt": "one", "b/c.txt": "two"})
    artifact.verify()
    artifact.file("b/c.txt").write_text("2wo")
    with pytest.raises(ArtifactError, match=r"b/c.txt is not the file that was written"):
        artifact.verify()
    artifact.file("b/c.txt").unlink()
    with pytest.raises(ArtifactError, match=r"b/c.txt is missing"):
        artifact.verify()
    with pytest.raises(ArtifactError, match="no file 'z'"):
        artifact.file("z")


def test_a_truncated_file_is_refused_when_it_is_looked_up(store: ArtifactStore) -> None:
    """Catches a damaged artifact handed to the next stage."""
    artifact = produce(store, {"a.txt": "one"})
    artifact.file("a.txt").write_text("on")
    with pytest.raises(ArtifactError, match=r"a.txt is missing or truncated: remove"):
        store.get(KIND, KEY)
    with pytest.raises(ArtifactError, match="truncated"):
        store.produce(KIND, KEY, inputs={}, config={}, build=never)


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, f"has no {MANIFEST}"), ("{", "is not JSON"), ('{"schema": "medusa.artifact/9"}', "medusa.artifact/9")],
)
def test_a_directory_without_a_readable_manifest_is_no_artifact(tmp_path: Path, text: str | None, message: str) -> None:
    """Catches a folder of some other version read as if it were ours."""
    if text is not None:
        (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(ArtifactError, match=message):
        load_artifact(tmp_path)


def test_a_build_that_raises_leaves_its_partial_directory_only(store: ArtifactStore) -> None:
    """Catches a finished-looking artifact after an error, and work that is lost with it."""

    def fail(partial: Path) -> dict[str, Any]:
        (partial / "a.txt").write_text("kept")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        store.produce(KIND, KEY, inputs={}, config={}, build=fail)
    partial = store.directory(KIND, KEY).with_name(KEY + ".partial")
    assert store.get(KIND, KEY) is None
    assert (partial / "a.txt").read_text() == "kept"

    def resume(partial: Path) -> dict[str, Any]:
        assert (partial / "a.txt").read_text() == "kept"
        return {}

    assert store.produce(KIND, KEY, inputs={}, config={}, build=resume).file("a.txt").read_text() == "kept"
    remove_partial(store, KIND, KEY)


def test_forgetting_a_partial_directory(store: ArtifactStore) -> None:
    """Catches a fresh start that finds old files."""
    partial = store.directory(KIND, KEY).with_name(KEY + ".partial")
    partial.mkdir(parents=True)
    (partial / "a.txt").touch()
    remove_partial(store, KIND, KEY)
    assert not partial.exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def fill(partial: Path) -> dict[str, Any]:
    if not (partial / "small").exists():
        (partial / "small").write_text("done")
    with atomic_path(partial / "large") as temporary:
        temporary.write_bytes(b"x" * (1 << 20))
    return {}


def test_a_full_disk_leaves_no_artifact_and_loses_nothing(small_disk: Path) -> None:
    """Catches a truncated file in a finished artifact, and an error that hides the disk's."""
    store = ArtifactStore(small_disk)
    with pytest.raises(OSError, match="No space left"):
        store.produce(KIND, KEY, inputs={}, config={}, build=fill)
    assert store.get(KIND, KEY) is None
    partial = store.directory(KIND, KEY).with_name(KEY + ".partial")
    assert (partial / "small").read_text() == "done"
    assert not (partial / "large").exists()
    assert not list(partial.glob(".large*"))


def test_seconds_add_up_over_attempts(store: ArtifactStore) -> None:
    """Catches an artifact that claims to have cost only its last attempt."""

    def slow_then_fail(partial: Path) -> dict[str, Any]:
        time.sleep(0.15)
        raise RuntimeError("stop")

    for _ in range(2):
        with pytest.raises(RuntimeError):
            store.produce(KIND, KEY, inputs={}, config={}, build=slow_then_fail)
    artifact = produce(store, {"a": "b"})
    assert 0.3 <= artifact.manifest["seconds"] < 5


def test_a_kill_while_the_seconds_are_noted_leaves_the_earlier_ones(store: ArtifactStore, tmp_path: Path) -> None:
    """Catches a figure written in place: half-way it would be no number, and no later attempt could begin."""

    def fail(partial: Path) -> dict[str, Any]:
        raise RuntimeError("stop")

    clock = store.directory(KIND, KEY).with_name(KEY + ".partial") / ".seconds"
    earlier = tmp_path / "earlier"
    for attempt in range(2):
        with pytest.raises(RuntimeError):
            store.produce(KIND, KEY, inputs={}, config={}, build=fail)
        if attempt == 0:
            # A second name for the file: it shows what is written into it, and not what takes its place.
            earlier.hardlink_to(clock)
            noted = clock.read_text()
    assert float(clock.read_text()) > float(noted)
    assert earlier.read_text() == noted


def test_scratch_files_are_not_part_of_an_artifact(store: ArtifactStore) -> None:
    """Catches temporary files of killed writers published with the rest."""
    files = {"a.txt": "1", ".a.txt.77.tmp": "x", "sub/.hidden": "x", "sub/b": "2", ".cache/deep/file": "x"}
    artifact = produce(store, files)
    assert sorted(artifact.manifest["files"]) == ["a.txt", "sub/b"]
    left = sorted(p.relative_to(artifact.path).as_posix() for p in artifact.path.rglob("*") if p.is_file())
    assert left == ["a.txt", MANIFEST, "sub/b"]


def test_the_manifest_says_what_an_artifact_is(store: ArtifactStore) -> None:
    """Catches a manifest that can't be traced: what it came from, what made it, what is in it."""
    artifact = produce(store, {"a.txt": "one"})
    written = json.loads((artifact.path / MANIFEST).read_text())
    assert written == artifact.manifest
    assert (written["inputs"], written["config"], written["counts"]) == ({"a": "1"}, {"x": 2}, {"files": 1})
    assert written["files"]["a.txt"]["bytes"] == 3
    assert {"python", "torch", "transformers"} <= set(written["writer"])


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    """Catches an old file lost to an error half-way, and a temporary file left behind."""
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    with pytest.raises(RuntimeError), atomic_path(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_building_and_finding_are_logged(store: ArtifactStore, caplog: pytest.LogCaptureFixture) -> None:
    """Catches a silent store: one line per event."""
    with caplog.at_level(logging.INFO):
        produce(store, {"a": "b"})
        produce(store, {"a": "b"})
    assert [record.message.split(" in ")[0] for record in caplog.records] == ["built toy abc", "cached toy abc"]
