"""`prefect.yaml` with a real server and worker: what a platform team types, and what the server then knows."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from flows.config import DEFAULT_RECIPE, load_config, parse_config
from tests.flows.conftest import borrow

ROOT = Path(__file__).resolve().parents[2]
PREFECT = str(Path(sys.executable).with_name("prefect"))


def deployments() -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]}


def test_the_deployed_recipe_is_the_default_recipe() -> None:
    """Catches a deployment that trains something else than the command line, after one of them was changed."""
    assert parse_config(deployments()["full-pipeline"]["parameters"]["config"]) == load_config(DEFAULT_RECIPE)


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


@pytest.mark.long
def test_server_worker_deploy_run(toy_run: Any, tmp_path: Path) -> None:
    """Catches a deployment whose parameters the flow doesn't take, whose code the worker can't find, or whose run never
    ends."""
    finished, config, _, _ = toy_run
    kinds = [path.name for path in (finished / "artifacts").iterdir()]
    root = borrow(finished, tmp_path / "root", *kinds)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    api = f"http://127.0.0.1:{port}/api"
    environment = {
        **os.environ,
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "PREFECT_API_URL": api,
        "MEDUSA_CHECKOUT": str(ROOT),
    }

    def prefect(*arguments: str) -> str:
        done = subprocess.run([PREFECT, *arguments], env=environment, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    server = [PREFECT, "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    with running(server, environment, tmp_path / "server.log"):
        until(lambda: httpx.get(f"{api}/health").status_code == 200, 120, "the server")
        prefect("work-pool", "create", "medusa", "--type", "process")
        prefect("--no-prompt", "deploy", "--all")
        deployed = httpx.get(f"{api}/deployments/name/medusa/full-pipeline").json()
        schema = deployed["parameter_openapi_schema"]
        assert {"config", "root", "until"} == set(schema["properties"])
        assert {"backbone", "heads", "train", "publish"} <= set(schema["definitions"]["RunConfig"]["properties"])
        assert deployed["global_concurrency_limit"]["limit"] == 1
        worker = [PREFECT, "worker", "start", "--pool", "medusa"]
        with running(worker, environment, tmp_path / "worker.log"):
            parameters = {"config": load_config(config).model_dump(mode="json"), "root": str(root)}
            prefect("deployment", "run", "medusa/full-pipeline", "--params", json.dumps(parameters))

            def ended() -> str | None:
                (run,) = httpx.post(f"{api}/flow_runs/filter", json={}).json()
                return run["state"]["type"] if run["state"]["type"] in ("COMPLETED", "FAILED", "CRASHED") else None

            state = until(ended, 240, "the run's end")
            assert state == "COMPLETED", (tmp_path / "worker.log").read_text()[-3000:]
    report = json.loads((root / "runs" / "latest" / "report.json").read_text())
    assert report["registry"] == report["registry"] | {"model": "toy", "version": 1, "alias": "champion"}
    assert all(stage["cached"] for stage in report["stages"][:-1])
