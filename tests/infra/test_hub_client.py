"""The hub client's time limit."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest
from huggingface_hub import set_client_factory
from huggingface_hub.utils import get_session
from huggingface_hub.utils._http import default_client_factory

from infra import hub_client


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(hub_client, "SILENCE_SECONDS", 0.3)
    hub_client.limit_silence()
    yield
    set_client_factory(default_client_factory)


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize("asked", [None, 60.0])
def test_a_silent_hub_is_given_up_however_long_the_caller_would_wait(asked: float | None) -> None:
    """Catches a listing that hangs: the client itself asks for it without any time limit."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        start = time.monotonic()
        with pytest.raises(Exception, match="timed out"):
            get_session().get(f"http://127.0.0.1:{listener.getsockname()[1]}/api/models", timeout=asked)
    assert time.monotonic() - start < 5
