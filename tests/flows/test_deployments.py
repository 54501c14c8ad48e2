"""`prefect.yaml` with a real server and worker: what a platform team types, and what the server then knows."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from flows.config import DEFAULT_RECIPE, load_config, parse_config
from infra.registry import Registry
from tests.flows.conftest import MEDUSA, borrow
from tests.toys import perturbed

ROOT = Path(__file__).resolve().parents[2]
PREFECT = str(Path(sys.executable).with_name("prefect"))


def deployments() -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]}


@pytest.mark.parametrize("name", ["full-pipeline", "hourly"])
def test_the_deployed_recipe_is_the_default_recipe(name: str) -> None:
    """Catches a deployment that trains, or watches for, something else than the command line."""
    assert parse_config(deployments()[name]["parameters"]["config"]) == load_config(DEFAULT_RECIPE)


@contextmanager
def running(command: list[str], environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[str]]:
    with open(log, "w") as out:
        process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, text=True)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def until(ready: Any, seconds: float, what: str) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if found := ready():
                return found
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    pytest.fail(f"{what} did not come within {seconds:.0f} s")


@dataclass
class Platform:
    """A server, a worker, and what is deployed there."""

    api: str
    environment: dict[str, str]
    logs: Path

    def prefect(self, *arguments: str) -> str:
        command = [PREFECT, *arguments]
        done = subprocess.run(command, env=self.environment, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def read(self, path: str, **wanted: Any) -> Any:
        return httpx.post(f"{self.api}/{path}/filter", json=wanted, timeout=30).json()

    def runs(self, flow: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.read("flow_runs", flows={"name": {"any_": [flow]}}, sort="START_TIME_ASC")
        return found

    def finished(self, flow: str, count: int, expected: str = "COMPLETED", seconds: float = 240) -> dict[str, Any]:
        """The newest of a flow's runs once so many have ended."""

        def ended() -> list[dict[str, Any]]:
            done = [run for run in self.runs(flow) if run["state"]["type"] in ("COMPLETED", "FAILED", "CRASHED")]
            return done if len(done) >= count else []

        runs = until(ended, seconds, f"the end of run {count} of {flow}")
        last: dict[str, Any] = runs[-1]
        assert last["state"]["type"] == expected, (self.logs / "worker.log").read_text()[-4000:]
        return last

    def run(
        self, deployment: str, parameters: dict[str, Any], count: int, expected: str = "COMPLETED"
    ) -> dict[str, Any]:
        self.prefect("deployment", "run", deployment, "--params", json.dumps(parameters))
        return self.finished(deployment.partition("/")[0], count, expected)


@pytest.fixture
def platform(tmp_path: Path) -> Iterator[Platform]:
    """What docs/operations.md says to type, without the schedules."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    api = f"http://127.0.0.1:{port}/api"
    home = {"PREFECT_HOME": str(tmp_path / "prefect"), "PREFECT_API_URL": api, "MEDUSA_CHECKOUT": str(ROOT)}
    here = Platform(api, {**os.environ, **home}, tmp_path)
    server = [PREFECT, "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    with running(server, here.environment, tmp_path / "server.log"):
        until(lambda: httpx.get(f"{api}/health").status_code == 200, 120, "the server")
        here.prefect("work-pool", "create", "medusa", "--type", "process")
        here.prefect("work-queue", "create", "machine", "--pool", "medusa", "--limit", "1")
        unscheduled = tmp_path / "prefect.yaml"
        unscheduled.write_text((ROOT / "prefect.yaml").read_text().replace("active: true", "active: false"))
        here.prefect("--no-prompt", "deploy", "--all", "--prefect-file", str(unscheduled))
        worker = [PREFECT, "worker", "start", "--pool", "medusa"]
        with running(worker, here.environment, tmp_path / "worker.log"):
            yield here


@pytest.mark.long
def test_a_year_of_a_platform_team(toy_run: Any, toy_dir: Path, platform: Platform, tmp_path: Path) -> None:
    """Deployed; run; watched without and with a change of the backbone.

    Catches a deployment whose parameters the flow doesn't take or whose code the worker can't find; a run that shows
    nothing on the server; a watch that sees changes where there are none; and one change that trains twice.
    """
    finished, config, _, _ = toy_run
    kinds = [path.name for path in (finished / "artifacts").iterdir()]
    root, backbone = borrow(finished, tmp_path / "root", *kinds), tmp_path / toy_dir.name
    shutil.copytree(toy_dir, backbone)
    deployed = httpx.get(f"{platform.api}/deployments/name/medusa/full-pipeline").json()
    schema = deployed["parameter_openapi_schema"]
    assert {"config", "root", "until"} == set(schema["properties"])
    assert {"backbone", "heads", "train", "publish"} <= set(schema["definitions"]["RunConfig"]["properties"])
    assert deployed["global_concurrency_limit"]["limit"] == 1
    assert (deployed["work_queue_name"], deployed["tags"]) == ("machine", ["medusa"])
    assert platform.read("work_queues", work_queues={"name": {"any_": ["machine"]}})[0]["concurrency_limit"] == 1

    parameters = {"config": load_config(config, [f"backbone={backbone}"]).model_dump(mode="json"), "root": str(root)}
    first = platform.run("medusa/full-pipeline", parameters, 1)
    report = json.loads((root / "runs" / "latest" / "report.json").read_text())
    assert report["registry"] == report["registry"] | {"model": "toy", "version": 1, "alias": "champion"}
    assert all(stage["cached"] for stage in report["stages"][:-1])
    shown = platform.read("artifacts", flow_runs={"id": {"any_": [first["id"]]}})
    by_key = {artifact["key"]: artifact for artifact in shown}
    assert {"stages", "speed", "speed-plot", "report", "version"} <= set(by_key)
    assert by_key["speed-plot"]["type"] == "image" and by_key["speed-plot"]["data"].startswith("data:image/svg+xml")
    assert len(json.loads(by_key["stages"]["data"])) == len(report["stages"])

    # Nothing has changed.
    watched = {**parameters, "again_after_hours": 24}
    platform.run("medusa-watch/hourly", watched, 1)
    assert not list((root / "watch").glob("*.json")) and len(platform.runs("medusa")) == 1

    # The weights change on disk: seen by two watches, trained for once.
    perturbed(backbone, backbone, noise=0.1)
    platform.run("medusa-watch/hourly", watched, 2)
    platform.run("medusa-watch/hourly", watched, 3)
    second = platform.finished("medusa", 2)
    assert second["created_by"]["type"] == "AUTOMATION"
    assert len(list((root / "watch").glob("*.json"))) == 1
    progress = platform.read(
        "artifacts", flow_runs={"id": {"any_": [second["id"]]}}, artifacts={"type": {"any_": ["progress"]}}
    )
    assert progress and all(0 <= float(artifact["data"]) <= 100 for artifact in progress)
    # A third watch, after the version is there, and after everything was deployed again.
    platform.prefect("--no-prompt", "deploy", "--all", "--prefect-file", str(tmp_path / "prefect.yaml"))
    platform.run("medusa-watch/hourly", watched, 4)
    time.sleep(3)
    assert len(platform.runs("medusa")) == 2
    versions = Registry(root).versions("toy")
    assert [version.version for version in versions] == [1, 2]
    assert versions[1].tags["retraining"] == "keep"

    # The nightly benchmark, and one with a limit that nothing meets: a failed run, a red artifact, somebody told.
    told: list[str] = []
    with listening_to(told) as address:
        subprocess.run([str(MEDUSA), "notify", address], env=platform.environment, check=True, capture_output=True)
        nightly = {"model": "champion", "root": str(root), "max_minutes": 0.05}
        platform.run("medusa-benchmark/nightly", {**nightly, "max_slowdown": 0.9}, 1)
        assert told == []
        failed = platform.run("medusa-benchmark/nightly", {**nightly, "max_slowdown": -9}, 2, expected="FAILED")
        assert "has regressed" in failed["state"]["message"]
        until(lambda: told, 60, "the notice of the failed run")
    assert "medusa-benchmark" in told[0] and "has regressed" in told[0] and len(told) == 1
    shown = platform.read("artifacts", flow_runs={"id": {"any_": [failed["id"]]}})
    assert "🔴" in next(artifact["data"] for artifact in shown if artifact["key"] == "nightly")
    assert len(list((root / "nightly").glob("toy-*/*.json"))) == 2


@contextmanager
def listening_to(told: list[str]) -> Iterator[str]:
    """A web address that notes what is posted to it."""

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"])
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hook)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/hook"
    finally:
        server.shutdown()
        thread.join()
