"""`medusa notify`: a Prefect automation that posts to a web address whenever a deployed flow fails or crashes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from prefect.automations import Automation
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.client.orchestration import get_client
from prefect.events.actions import SendNotification
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.settings import get_current_settings

from infra.errors import UserError

NAME, BLOCK = "medusa-failures", "medusa-failures"
# The tag that every deployment in prefect.yaml carries.
TAG = "medusa"


def notify_on_failure(address: str) -> str:
    """Posts {"text": ...} (what Slack, Mattermost and Teams take) to the address when a run tagged `medusa` fails; says
    what was set up. Asked for again, with another address, it replaces what there was. UserError without a server."""
    server = get_current_settings().api.url
    if server is None:
        raise UserError("PREFECT_API_URL names no Prefect server, and notifications are sent by one: start it first")
    if not address.startswith(("http://", "https://")):
        raise UserError(f"{address!r} is no web address: give one that starts with https://")
    block: Any = CustomWebhookNotificationBlock(
        name=NAME, url=address, json_data={"text": "{{subject}}\n{{body}}"}, timeout=10
    )
    saved: Any = block.save(BLOCK, overwrite=True)
    action = SendNotification(
        block_document_id=saved,
        subject="{{ flow.name }} {{ flow_run.name }}: {{ flow_run.state.name }}",
        body="{{ flow_run.state.message }}\n{{ flow_run|ui_url }}",
    )
    wanted: Any = Automation(
        name=NAME,
        description="Tells of runs that failed; set up by `medusa notify`.",
        trigger=EventTrigger(
            expect={"prefect.flow-run.Failed", "prefect.flow-run.Crashed"},
            match={"prefect.resource.id": "prefect.flow-run.*"},
            match_related={"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{TAG}"},
            posture=Posture.Reactive,
            threshold=1,
            within=timedelta(0),
        ),
        actions=[action],
    )
    with get_client(sync_client=True) as client:
        for earlier in client.read_automations_by_name(NAME):
            client.delete_automation(earlier.id)
    wanted.create()
    return f"runs tagged {TAG!r} that fail are told to {_shown(address)}, by the automation {NAME!r} at {server}"


def _shown(address: str) -> str:
    """The address without what may be a secret in it: its path."""
    scheme, _, rest = address.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}/…"
