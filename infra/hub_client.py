"""The model hub's client, made to give up on a hub that falls silent. Knows nothing of models or data sets."""

from __future__ import annotations

from typing import Any

from huggingface_hub import set_client_factory
from huggingface_hub.utils._http import default_client_factory

SILENCE_SECONDS = 10.0


def limit_silence() -> None:
    """From now on every request of the hub client ends when nothing arrives for SILENCE_SECONDS.

    The client lists files with an explicit "no time limit", which a limit set on its session doesn't change.
    """

    def limit(request: Any) -> None:
        given = request.extensions["timeout"]
        request.extensions["timeout"] = {
            name: min(seconds or SILENCE_SECONDS, SILENCE_SECONDS) for name, seconds in given.items()
        }

    def client() -> Any:
        made = default_client_factory()
        made.event_hooks["request"].append(limit)
        return made

    set_client_factory(client)
