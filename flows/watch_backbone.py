"""The Prefect flow `medusa-watch`: has the backbone changed? Says so with an event, once, and trains nothing itself.

An automation, deployed with `medusa/full-pipeline`, starts the pipeline on that event. What has been announced is noted
under the root, by the digest of backbone and recipe: restarting, deploying or firing twice announces nothing twice.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any, Literal

from prefect import flow
from prefect.client.orchestration import get_client
from prefect.events import emit_event
from prefect.events.filters import EventFilter, EventIDFilter

from flows.config import RunConfig
from infra.artifacts import ArtifactStore, digest_json, write_json
from infra.environment import default_root
from infra.errors import UserError
from infra.registry import Registry, Version
from tasks.backbone import fingerprint, pinned
from tasks.publish import RECIPE, fingerprints, recipe_digest

EVENT = "medusa.backbone.updated"
Finding = Literal["served", "announced", "announced before"]
_DELIVERY_S = 20.0

log = logging.getLogger(__name__)


@flow(name="medusa-watch")
def watch(config: RunConfig, root: str | None = None, again_after_hours: float = 24.0) -> dict[str, Any]:
    """Compares the backbone's files (a hub revision's commit, or a directory's digests) with what versions were made
    for.

    Returns {finding, fingerprint, version}. What was announced and still has no version after `again_after_hours` is
    announced again: its run may have failed.
    """
    place = Path(root).absolute() if root else default_root()
    found = look(config, place, again_after_hours)
    log.info("%s: %s", config.backbone.model, found["finding"])
    return found


def look(config: RunConfig, root: Path, again_after_hours: float) -> dict[str, Any]:
    """What `watch` does, in any process."""
    now = fingerprint(config.backbone)
    recipe = recipe_digest(config.model_dump(mode="json"))
    version = _made_for(config, root, now, recipe)
    if version is not None:
        return {"finding": "served", "fingerprint": now, "version": version.ref}
    key = digest_json([config.publish.model or config.name, now, recipe])[:24]
    note = root / "watch" / f"{key}.json"
    with ArtifactStore(root).try_lock("watch", key) as mine:
        if not mine or (note.is_file() and time.time() - note.stat().st_mtime < again_after_hours * 3600):
            return {"finding": "announced before", "fingerprint": now, "version": None}
        _announce(config, root, now, key)
        note.parent.mkdir(parents=True, exist_ok=True)
        write_json(note, {"backbone": config.backbone.model, "fingerprint": now, "recipe": recipe})
    return {"finding": "announced", "fingerprint": now, "version": None}


def _made_for(config: RunConfig, root: Path, now: str, recipe: str) -> Version | None:
    registry, model = Registry(root, config.publish.tracking_uri), config.publish.model or config.name
    known = registry.versions(model) if model in registry.models() else []
    return next((v for v in reversed(known) if v.tags.get(RECIPE) == recipe and now in fingerprints(v)), None)


def _announce(config: RunConfig, root: Path, now: str, key: str) -> None:
    """Emits the event and waits until the server has it; UserError if it doesn't get there."""
    payload = {
        "config": config.model_copy(update={"backbone": pinned(config.backbone, now)}).model_dump(mode="json"),
        "root": str(root),
        "fingerprint": now,
    }
    resource = {
        "prefect.resource.id": f"medusa.backbone.{key}",
        "prefect.resource.name": config.backbone.model,
    }
    event = emit_event(EVENT, resource, payload=payload)
    deadline = time.monotonic() + _DELIVERY_S
    with get_client(sync_client=True) as client:
        while event is not None and time.monotonic() < deadline:
            if client.read_events(EventFilter(id=EventIDFilter(id=[event.id])), limit=1).events:
                return
            time.sleep(0.5)
    raise UserError(
        f"the event that {config.backbone.model} has changed did not reach the Prefect server within "
        f"{_DELIVERY_S:.0f} s: is it up, and is PREFECT_API_URL right? Nothing is noted; the next watch tries again"
    )
