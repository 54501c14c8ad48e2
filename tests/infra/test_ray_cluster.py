"""A Ray cluster of several nodes, joined by address."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from infra.errors import UserError
from infra.ray_cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]
RAY = str(Path(sys.executable).with_name("ray"))
pytestmark = pytest.mark.long


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.fixture
def address(root: Path) -> Iterator[str]:
    """Two nodes on this machine, the second of which has an empty file system of its own mounted over the root."""
    if os.geteuid() or subprocess.run(["unshare", "-m", "true"]).returncode:
        pytest.skip("a node that doesn't see the root needs a mount namespace, which needs root")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = f"--num-cpus 1 --object-store-memory {100 * 2**20} --disable-usage-stats --block"
    address = f"127.0.0.1:{port}"
    head = f"exec {RAY} start --head --node-ip-address 127.0.0.1 --port {port} --include-dashboard false {flags}"
    second = f"mount -t tmpfs none {root} && exec {RAY} start --address {address} {flags}"
    started = []
    try:
        for command in (["sh", "-c", head], ["unshare", "-m", "sh", "-c", second]):
            # As the process of the test has it, which is not the default of `ray start`; and several nodes, which a
            # cluster of one's own, started before in this process, leaves forbidden.
            environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}
            silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": environment}
            started.append(subprocess.Popen(command, start_new_session=True, **silent))  # type: ignore[call-overload]
            _wait_for(address)
        yield address
    finally:
        for process in started:
            # Asked to end, a node waits half a minute for its work.
            for each in [*psutil.Process(process.pid).children(recursive=True), process]:
                each.kill()
            process.wait()


def _wait_for(address: str) -> None:
    host, _, port = address.partition(":")
    for _ in range(120):
        with socket.socket() as probe:
            if probe.connect_ex((host, int(port))) == 0:
                return
        time.sleep(0.5)
    pytest.fail(f"no Ray node at {address}")


_LISTENING = """
import psutil
from infra.ray_cluster import Cluster
cluster = Cluster(cpus=1)
cluster.start()
me = psutil.Process()
for process in [me, *me.children(recursive=True)]:
    for socket in process.net_connections("inet"):
        if socket.status == psutil.CONN_LISTEN:
            print(process.name(), socket.laddr.ip)
cluster.stop()
"""


def test_a_cluster_of_ones_own_listens_to_nobody_else() -> None:
    """Catches ports that the whole network reaches: who does runs code here."""
    done = subprocess.run([sys.executable, "-c", _LISTENING], cwd=ROOT, capture_output=True, text=True, timeout=120)
    found = [line.split() for line in done.stdout.splitlines()]
    assert {"gcs_server", "raylet"} <= {name for name, _ in found}, done.stderr
    assert {address.removeprefix("::ffff:") for _, address in found} == {"127.0.0.1"}, done.stdout


def test_a_node_that_does_not_see_the_root_is_named_before_any_work(address: str, root: Path, tmp_path: Path) -> None:
    """Catches a worker that would write what it made to a folder that nobody else sees."""
    import ray

    cluster = Cluster(address)
    try:
        cluster.start()
        for _ in range(120):
            if len(ray.nodes()) == 2:
                break
            time.sleep(0.5)
        assert len(ray.nodes()) == 2
        with pytest.raises(UserError, match=r"not every node .* sees the files under .*doesn't see it"):
            cluster.probe(root)
        # What both see is fine, and nothing is left behind.
        other = tmp_path / "shared"
        cluster.probe(other)
        assert list((other / "tmp").iterdir()) == []
    finally:
        cluster.stop()
