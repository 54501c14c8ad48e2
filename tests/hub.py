"""A stub of a model hub, and a fresh process that runs a stage against it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from infra.artifacts import Artifact

ROOT = Path(__file__).parents[1]
TOKEN = "hf_a_secret_of_the_test"
COMMITS = {"main": "a" * 40, "v1": "b" * 40}
_URL = re.compile(r"/(?:api/)?(?:(models|datasets)/)?(\w+/\w+)(?:/(revision|tree|resolve)/(\w+)(?:/(.+))?)?")


class Hub(ThreadingHTTPServer):
    """Serves repositories as the hub client asks for them, and remembers what was asked.

    A repository has a name such as `models/team/toy`, and a flat directory for each of its revisions. A request whose
    method and path contain `silent` is accepted and never answered.
    """

    def __init__(self, repositories: Mapping[str, Mapping[str, Path]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = {
            name: {COMMITS[revision]: path for revision, path in revisions.items()}
            for name, revisions in repositories.items()
        }
        self.requests: list[tuple[str, str | None]] = []
        self.silent: str | None = None
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self.server.requests.append((self.path, self.headers.get("Authorization")))
        if self.server.silent and self.server.silent in f"{self.command} {self.path}":
            self.server.closing.wait()
            return
        match = _URL.fullmatch(self.path.split("?")[0])
        kind, name, call, revision, file = match.groups() if match else (None,) * 5
        commits = self.server.repositories.get(f"{kind or 'models'}/{name}")
        if commits is None:
            return self._refuse("RepoNotFound")
        commit = COMMITS.get(revision or "main", revision)
        if commit not in commits:
            return self._refuse("RevisionNotFound")
        path = commits[commit] / (file or "")
        if not path.exists():
            return self._refuse("EntryNotFound", {"X-Repo-Commit": commit})
        if call == "resolve":
            data = path.read_bytes()
            etag = hashlib.sha256(data).hexdigest()
            return self._send(data, headers={"ETag": f'"{etag}"', "X-Repo-Commit": commit})
        answer = _tree(path) if call == "tree" else {"id": name, "sha": commit}
        self._send(json.dumps(answer).encode())

    do_HEAD = do_GET

    def _refuse(self, code: str, headers: dict[str, str] | None = None) -> None:
        self._send(b"{}", status=404, headers={"X-Error-Code": code, **(headers or {})})

    def _send(self, body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _tree(path: Path) -> list[dict[str, Any]]:
    entries = {file.name: file.stat().st_size for file in path.iterdir()}
    return [{"type": "file", "path": name, "size": size, "oid": "0" * 40} for name, size in entries.items()]


@contextmanager
def serve(repositories: Mapping[str, Mapping[str, Path]]) -> Iterator[Hub]:
    server = Hub(repositories)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


_SCRIPT = """
import logging, sys, time
from pathlib import Path
from infra.artifacts import ArtifactStore
from infra.errors import UserError
{stage}
logging.basicConfig()
start = time.monotonic()
try:
    print(stage(ArtifactStore(Path(sys.argv[1])), Config.model_validate_json(sys.argv[2])).path)
except UserError as error:
    print(f"{{time.monotonic() - start:.1f}} {{error}}")
    sys.exit(2)
"""


def run_apart(stage: str, tmp_path: Path, config: dict[str, Any], **environment: str) -> tuple[int, str, str]:
    """Runs a stage in a fresh process, because the hub client reads its environment when it is imported.

    `stage` imports the stage and its config as `stage` and `Config`. Returns the exit code, the artifact's path or the
    seconds and the text of a UserError, and what went to stderr.
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    env = {**clean, "HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    env |= {"HF_HUB_DISABLE_TELEMETRY": "1", **environment}  # as every command of the project sets it
    command = [sys.executable, "-c", _SCRIPT.format(stage=stage), str(tmp_path / "root"), json.dumps(config)]
    result = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=100)
    lines = result.stdout.strip().splitlines()
    assert lines, result.stderr
    return result.returncode, lines[-1], result.stderr


def load_artifact(path: str) -> Artifact:
    return Artifact(Path(path), json.loads((Path(path) / "manifest.json").read_text()))
