"""The registry on a real Postgres: the same lineage as on SQLite, and two writers that don't know of each other."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.errors import UserError
from infra.registry import Registry

pytestmark = pytest.mark.long


def _programs() -> Path:
    """Where Postgres lies, installed if it isn't there."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not found and not os.geteuid() and shutil.which("apt-get"):
        for command in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", "postgresql"]):
            quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
            subprocess.run(["apt-get", *command], capture_output=True, timeout=300, env=quiet)
        found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not found:
        pytest.skip("there is no Postgres here, and apt gave none")
    return found[-1].parent


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if os.geteuid():
        pytest.skip("the server is started as the user that the package makes, which needs root")
    programs, folder = _programs(), tmp_path_factory.mktemp("postgres")
    # Its user has to reach the folder through everything above it.
    for path in (folder, *folder.parents[:3]):
        path.chmod(path.stat().st_mode | 0o011)
    data = Path("/tmp") / f"medusa-postgres-{os.getpid()}"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def as_postgres(command: str) -> None:
        done = subprocess.run(
            ["su", "postgres", "-c", f"{programs}/{command}"], capture_output=True, text=True, cwd="/"
        )
        assert done.returncode == 0, done.stdout + done.stderr

    try:
        as_postgres(f"initdb -D {data} --auth=trust --username=medusa")
        as_postgres(f"pg_ctl -D {data} -w -o '-p {port} -c listen_addresses=127.0.0.1 -k {data}' -l {data}/log start")
        yield f"postgresql://medusa:a-secret@127.0.0.1:{port}/postgres"
    finally:
        subprocess.run(
            ["su", "postgres", "-c", f"{programs}/pg_ctl -D {data} -m immediate stop"], capture_output=True, cwd="/"
        )
        shutil.rmtree(data, ignore_errors=True)


def staged(directory: Path, content: str) -> Path:
    (directory / "heads").mkdir(parents=True)
    (directory / "heads" / "heads.safetensors").write_text(content)
    return directory


def test_a_lineage_on_postgres(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches what only SQLite allows, and a password that is shown."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    # An experiment's files lie where MLflow puts them by default: here.
    monkeypatch.chdir(tmp_path)
    registry = Registry(tmp_path / "root")
    assert not registry.is_local and "a-secret" not in registry.address
    first = registry.register("toy", staged(tmp_path / "a", "first"), {"artifact_key": "1"})
    # Another machine, with another root.
    other = Registry(tmp_path / "elsewhere")
    assert other.register("toy", staged(tmp_path / "b", "again"), {"artifact_key": "1"}).version == first.version
    second = other.register("toy", staged(tmp_path / "c", "second"), {"artifact_key": "2", "long": "x" * 4000})
    registry.promote(first)
    registry.promote(second)
    assert other.get("toy").ref == "toy/2" and other.get("toy").tags["replaces"] == "1"
    assert (other.download(second) / "heads" / "heads.safetensors").read_text() == "second"
    assert other.rollback("toy").ref == "toy/1"
    with pytest.raises(UserError, match="no version '9'"):
        registry.get("toy/9")


def test_a_database_that_is_gone_is_one_sentence(address: str, tmp_path: Path) -> None:
    nobody = address.rpartition("/")[0] + "/no_such_database"
    start = time.monotonic()
    with pytest.raises(UserError, match="refused or did not answer") as refused:
        Registry(tmp_path, nobody).check()
    assert time.monotonic() - start < 10
    assert "a-secret" not in str(refused.value)
