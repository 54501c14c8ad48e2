"""Connects to MLflow: imported only when asked for, quiet, without telemetry, and quick to say that nobody answers.

Knows nothing of models or versions.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from infra.errors import UserError

PROBE_SECONDS = 3.0

_ALWAYS = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
# MLflow's own defaults keep retrying a server that is gone for minutes. Somebody who sets these means it.
_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "60",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    # It prints addresses to standard output, in the middle of somebody's --json.
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "GIT_PYTHON_REFRESH": "quiet",
}
_PROBE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": str(int(PROBE_SECONDS)), "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
# What a driver calls the seconds that it waits for its server.
_CONNECT = {"postgresql": {"connect_timeout": int(PROBE_SECONDS)}, "mysql": {"connect_timeout": int(PROBE_SECONDS)}}
_PORTS = {"http": 80, "https": 443, "postgresql": 5432, "mysql": 3306, "mssql": 1433}


def connect(tracking_uri: str) -> Any:
    """An MlflowClient that has answered once; UserError within ten seconds if it doesn't."""
    _probe_port(tracking_uri)
    _probe_database(tracking_uri)
    os.environ.update(_ALWAYS)
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with _environment(_PROBE), explained(tracking_uri):
        client = MlflowClient(tracking_uri=tracking_uri, registry_uri=tracking_uri)
        client.search_registered_models(max_results=1)
    return client


@contextmanager
def explained(tracking_uri: str) -> Iterator[None]:
    """Turns what MLflow and the libraries below it raise into one sentence that names the address."""
    import requests
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, SQLAlchemyError, requests.RequestException) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        reason = reason.replace(tracking_uri, without_password(tracking_uri))[:300]
        raise UserError(
            f"the model registry at {without_password(tracking_uri)} refused or did not answer: {reason}. "
            "Check the tracking URI and that the server runs, or leave the URI out to use the local registry"
        ) from error


def without_password(uri: str) -> str:
    """The address as it may be shown: no user name, no password, no query."""
    parts = urlsplit(uri)
    host = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=host, query="").geturl() if parts.netloc else uri


def _probe_port(uri: str) -> None:
    """Fails at once for a host that refuses or ignores us: database drivers would retry for a minute first."""
    parts = urlsplit(uri)
    try:
        port = parts.port or _PORTS.get(parts.scheme.partition("+")[0])
    except ValueError:
        raise UserError(f"the tracking URI {without_password(uri)} has no valid port: use 1 to 65535") from None
    if not parts.hostname or port is None:
        return
    try:
        socket.create_connection((parts.hostname, port), timeout=PROBE_SECONDS).close()
    except OSError as error:
        raise UserError(
            f"nobody answers at {without_password(uri)} ({error}): start the MLflow server or correct the tracking "
            "URI; without one the local registry is used"
        ) from None


def _probe_database(uri: str) -> None:
    """Connects once to a database that is named by its address: MLflow would try a refused one for two minutes."""
    scheme = urlsplit(uri).scheme.partition("+")[0]
    if scheme not in _PORTS or scheme.startswith("http"):
        return
    from sqlalchemy import create_engine
    from sqlalchemy.pool import NullPool

    with explained(uri):
        try:
            engine = create_engine(uri, poolclass=NullPool, connect_args=_CONNECT.get(scheme, {}))
        except ModuleNotFoundError as error:
            raise UserError(
                f"the registry at {without_password(uri)} needs the package {error.name!r}: "
                "pip install 'medusa-pipeline[server]'"
            ) from None
        engine.connect().close()


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
