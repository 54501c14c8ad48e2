"""What `infra/deploy` says, checked as far as it can be without Docker or Kubernetes."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.config import RECIPES
from infra.ray_cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "infra" / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
KINDS = {
    "PersistentVolumeClaim": "v1", "Deployment": "apps/v1", "RayCluster": "ray.io/v1", "RayJob": "ray.io/v1",
}  # fmt: skip


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return found


def pods(value: Any) -> list[dict[str, Any]]:
    """Every pod's spec within a manifest."""
    if isinstance(value, list):
        return [pod for each in value for pod in pods(each)]
    if not isinstance(value, dict):
        return []
    return [value] if "containers" in value else [pod for each in value.values() for pod in pods(each)]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_a_manifest_is_whole(path: Path) -> None:
    """Catches a kind under the wrong API, a volume that is mounted and not there, a tag that moves, and a secret."""
    manifest = yaml.safe_load(path.read_text())
    assert KINDS[manifest["kind"]] == manifest["apiVersion"]
    assert re.fullmatch(r"[a-z0-9-]{1,63}", manifest["metadata"]["name"]) and manifest["spec"]
    for pod in pods(manifest):
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        claims = [v["persistentVolumeClaim"]["claimName"] for v in volumes.values() if "persistentVolumeClaim" in v]
        assert claims == ["medusa-root"]
        for container in pod["containers"]:
            mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
            assert set(mounts) == set(volumes) and mounts["root"] == "/data/medusa"
            assert container["image"] == "medusa:VERSION"
            for variable in container["env"]:
                is_secret = any(word in variable["name"] for word in ("TOKEN", "PASSWORD", "SECRET"))
                assert ("valueFrom" in variable) == is_secret


def test_the_cluster_runs_the_ray_that_is_pinned() -> None:
    """Catches a KubeRay that starts another Ray than the image holds: the two refuse each other."""
    (pin,) = re.findall(r"^ray==(.*)$", (ROOT / "constraints.txt").read_text(), re.M)
    specs = [yaml.safe_load(path.read_text())["spec"] for path in MANIFESTS]
    versions = [spec.get("rayVersion") or spec.get("rayClusterSpec", {}).get("rayVersion") for spec in specs]
    assert {version for version in versions if version} == {pin}


def test_what_a_job_runs_is_a_command() -> None:
    (job,) = (yaml.safe_load(path.read_text()) for path in MANIFESTS if path.stem == "rayjob")
    words = job["spec"]["entrypoint"].split()
    assert words[:2] == ["medusa", "run"] and (RECIPES / f"{words[words.index('--config') + 1]}.yaml").is_file()
    assert "placement.ray_address=auto" in words and Cluster("auto").address == "auto"


def test_compose_listens_on_loopback_and_holds_no_secret() -> None:
    """Catches a port that the whole network can reach, and a password in the file."""
    services = compose()["services"]
    assert {"postgres", "prefect", "mlflow", "objects", "worker"} <= set(services)
    for name, service in services.items():
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), f"{name} publishes {port}"
        image = service["image"]
        assert re.search(r":(\$\{|[^:]*\d)", image) and not image.endswith("latest"), image
        for variable, value in service.get("environment", {}).items():
            if any(word in variable for word in ("PASSWORD", "TOKEN", "SECRET")):
                assert value.startswith("${"), f"{name}: {variable}"
    text = (DEPLOY / "compose.yaml").read_text()
    asked = set(re.findall(r"(?<!\$)\$\{([A-Z_]+)", text))
    given = set(re.findall(r"^([A-Z_]+)=", (DEPLOY / "example.env").read_text(), re.M))
    assert asked == given
    (prefect,) = re.findall(r"prefecthq/prefect:([\d.]+)-", text)
    assert f"prefect=={prefect}" in (ROOT / "constraints.txt").read_text()


def test_compose_is_what_docker_takes(tmp_path: Path) -> None:
    if not shutil.which("docker") or subprocess.run(["docker", "compose", "version"], capture_output=True).returncode:
        pytest.skip("there is no docker compose here")
    filled = (DEPLOY / "example.env").read_text().replace("=\n", "=x\n")
    (tmp_path / "filled.env").write_text(filled)
    command = ["docker", "compose", "--env-file", str(tmp_path / "filled.env"), "config", "--quiet"]
    done = subprocess.run(command, cwd=DEPLOY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_image_copies_what_the_package_is() -> None:
    """Catches a package that was added and is not in the image, and an extra that there is not."""
    text = (DEPLOY / "Dockerfile").read_text()
    copied = set(re.findall(r"^COPY (\w+) \1$", text, re.M))
    pyproject = (ROOT / "pyproject.toml").read_text()
    (packages,) = re.findall(r'^packages = \[("flows.*)\]$', pyproject, re.M)
    assert copied == {name.strip('"').partition(".")[0] for name in packages.split(", ")}
    (extras,) = re.findall(r"^ARG EXTRAS=(.*)$", text, re.M)
    for extra in extras.split(","):
        assert re.search(rf"^{extra} = ", pyproject, re.M)
