"""`ROOT/runs/<run-id>/`: the resolved configuration, the log and the report of one run.

Knows nothing of stages beyond what the report says.
"""

from __future__ import annotations

import json
import logging
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.artifacts import write_json
from tasks.report_html import render_report

PACKAGES = ("flows", "tasks", "medusa_core", "infra")


@dataclass(frozen=True)
class RunDirectory:
    """One run's directory; `ROOT/runs/latest` points to the newest."""

    path: Path

    @classmethod
    def create(cls, root: Path, config_yaml: str) -> RunDirectory:
        name = time.strftime("%Y%m%d-%H%M%S-", time.gmtime()) + uuid.uuid4().hex[:6]
        path = root / "runs" / name
        path.mkdir(parents=True)
        (path / "config.yaml").write_text(config_yaml)
        link = path.parent / f".latest-{name}"
        link.symlink_to(name)
        os.replace(link, path.parent / "latest")
        return cls(path)

    @contextmanager
    def logging(self) -> Iterator[None]:
        """Everything the project logs in the block also goes to `log.jsonl`."""
        handler = logging.FileHandler(self.path / "log.jsonl")
        handler.setFormatter(_JsonLines())
        loggers = [logging.getLogger(name) for name in PACKAGES]
        for logger in loggers:
            logger.addHandler(handler)
            logger.setLevel(logging.INFO)
        try:
            yield
        finally:
            for logger in loggers:
                logger.removeHandler(handler)
            handler.close()

    def finish(self, report: dict[str, Any]) -> dict[str, Any]:
        """Writes the report and returns it with the place it lies at."""
        write_json(self.path / "report.json", report)
        if "runs" in report:
            (self.path / "report.html").write_text(render_report(report))
        return report | {"directory": str(self.path)}


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)
