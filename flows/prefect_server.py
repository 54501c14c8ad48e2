"""The Prefect server behind a run: the one PREFECT_API_URL names, or a temporary one of our own. Import-light."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from infra.errors import UserError

_started: list[Future[None]] = []


def begin_server() -> None:
    """Makes sure of a server, in the background: a run's imports take as long as a temporary server's start.

    UserError within seconds if PREFECT_API_URL is set and nothing answers there.
    """
    url = os.environ.get("PREFECT_API_URL")
    if url:
        _check(url)
        return
    # Imported here and not in the thread: two threads importing one package can see it half made.
    from prefect.server.api.server import SubprocessASGIServer

    def start() -> None:
        # The flow's own client would start the same server, only later; if this fails, that one is left to report it.
        with suppress(Exception):
            SubprocessASGIServer().start()

    executor = ThreadPoolExecutor(1, thread_name_prefix="prefect-server")
    _started.append(executor.submit(start))
    executor.shutdown(wait=False)


def wait_for_server() -> None:
    """Until what `begin_server` began is there."""
    while _started:
        _started.pop().result()


def _check(url: str, timeout: float = 5.0) -> None:
    import httpx

    try:
        httpx.get(url.rstrip("/") + "/health", timeout=timeout)
    except httpx.HTTPError as error:
        raise UserError(
            f"PREFECT_API_URL is {url!r}, but nothing answers there ({error}): start the server, or unset the "
            "variable to run without one"
        ) from None
