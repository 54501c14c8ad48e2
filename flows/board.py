"""What a run shows on a Prefect server: progress of long work, tables, links, an image of the speed plot.

A run without a server shows nothing, and one whose server has gone goes on without it. Knows nothing of stages.
"""

from __future__ import annotations

import base64
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.context import FlowRunContext
from prefect.settings import get_current_settings

from infra.progress import listening
from tasks.report_plots import standing_alone
from tasks.report_sections import speed_plots
from tasks.report_style import CSS

log = logging.getLogger(__name__)


@dataclass
class Board:
    """The artifacts of one flow run; `run` is None where there is no server to show them."""

    run: UUID | None
    _bars: dict[str, UUID] = field(default_factory=dict)

    @classmethod
    def of_this_run(cls) -> Board:
        """Of the flow that is running here."""
        context = FlowRunContext.get()
        has_server = get_current_settings().api.url is not None
        return cls(context.flow_run.id if context and context.flow_run and has_server else None)

    @contextmanager
    def following(self) -> Iterator[None]:
        """Shows the progress of what runs in the block."""
        with listening(self._progress):
            yield

    def table(self, key: str, rows: Sequence[Mapping[str, Any]], description: str) -> None:
        """Rows as a table."""
        self._create(key, "table", json.dumps([dict(row) for row in rows]), description)

    def markdown(self, key: str, text: str) -> None:
        """A text."""
        self._create(key, "markdown", text)

    def link(self, key: str, address: str, words: str) -> None:
        """A link."""
        self._create(key, "markdown", f"[{words}]({address})")

    def drawing(self, key: str, svg: str, description: str) -> None:
        """An SVG as an image."""
        encoded = base64.b64encode(svg.encode()).decode()
        self._create(key, "image", f"data:image/svg+xml;base64,{encoded}", description)

    def _progress(self, label: str, fraction: float, text: str) -> None:
        percent = round(100 * min(1.0, fraction), 1)
        if label not in self._bars:
            made = self._create(label, "progress", percent, text)
            if made is not None:
                self._bars[label] = made
        else:
            bar, change = self._bars[label], ArtifactUpdate(data=percent, description=text)
            self._tell(lambda client: client.update_artifact(bar, change))

    def _create(self, key: str, kind: str, data: Any, description: str | None = None) -> UUID | None:
        # Prefect takes lower-case letters, digits and dashes.
        slug = re.sub(r"[^a-z0-9]+", "-", key.lower()).strip("-")
        wanted = ArtifactCreate(key=slug, type=kind, data=data, description=description, flow_run_id=self.run)
        made = self._tell(lambda client: client.create_artifact(wanted))
        return None if made is None else made.id

    def _tell(self, call: Any) -> Any:
        if self.run is None:
            return None
        try:
            with get_client(sync_client=True) as client:
                return call(client)
        except Exception as error:  # whatever a server says, the run's work is worth more than its picture
            log.warning("the Prefect server doesn't take what there is to show: %s", error)
            return None


def show(board: Board, report: Mapping[str, Any]) -> None:
    """What a run came to, by its report."""
    stages = [
        {"stage": stage["name"], "seconds": stage["seconds"], "cached": stage["cached"], "artifact": stage["artifact"]}
        for stage in report["stages"]
    ]
    board.table("stages", stages, "What every stage took, and made.")
    page = Path(report["directory"]) / ("report.html" if "runs" in report else "report.json")
    board.link("report", page.as_uri(), str(page))
    if "runs" in report:
        engines = [
            {"engine": run["engine"], "tokens/s": round(run["tokens_per_second"], 1)}
            | {"tokens/step": round(run["tokens_per_step"], 2), "memory, MB": run["peak_memory_mb"]}
            for run in report["runs"]
        ]
        board.table("speed", engines, "Engines interleaved in one run on the same prompts.")
        for title, drawing in speed_plots(report)[:1]:
            board.drawing("speed-plot", standing_alone(drawing, 640, CSS), f"Tokens per second: {title}")
    if decided := report.get("retraining"):
        board.markdown("retraining", f"**{decided['verdict']}**: {decided['why']}")
    if registered := report.get("registry", {}).get("version"):
        registry = report["registry"]
        board.markdown("version", f"**{registry['model']}/{registered}**: {registry['decision']}")
