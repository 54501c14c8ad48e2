"""Progress of long work: a bar in a terminal, a log line now and then elsewhere, and a listener for a server.

Knows nothing of what is being counted.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

log = logging.getLogger(__name__)

Listener = Callable[[str, float, str], None]
_listeners: list[Listener] = []
_INTERVAL_S = 10.0


def add_listener(listener: Listener) -> None:
    """Registers `listener(label, fraction, text)`, called at most every few seconds and at the end."""
    _listeners.append(listener)


@dataclass
class Tracker:
    """Counts done work towards a total; `note` is shown beside it."""

    label: str
    total: float
    unit: str
    done: float = 0.0
    note: str = ""
    start: float = field(default_factory=time.monotonic)
    _baseline: float = 0.0
    _last: float = 0.0

    def skip(self, amount: float) -> None:
        """Counts work that an earlier run did; it doesn't enter the rate."""
        self.done += amount
        self._baseline += amount

    def advance(self, amount: float, note: str = "") -> None:
        self.done += amount
        self.note = note or self.note
        now = time.monotonic()
        if now - self._last >= _INTERVAL_S:
            self._last = now
            self._publish()

    def text(self) -> str:
        rate = (self.done - self._baseline) / max(1e-9, time.monotonic() - self.start)
        left = (self.total - self.done) / rate if rate > 0 else 0.0
        figures = f"{self.done:,.0f}/{self.total:,.0f} {self.unit}, {rate:,.1f} {self.unit}/s, {left:,.0f} s left"
        return f"{figures}, {self.note}" if self.note else figures

    def _publish(self) -> None:
        if not sys.stderr.isatty():
            log.info("%s: %s", self.label, self.text())
        for listener in _listeners:
            listener(self.label, self.done / self.total if self.total else 1.0, self.text())


@contextmanager
def track(label: str, total: float, unit: str) -> Iterator[Tracker]:
    """Shows the progress of the block; the tracker it yields is told what was done."""
    tracker = Tracker(label, total, unit)
    if not sys.stderr.isatty():
        yield tracker
        tracker._publish()
        return
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    with Progress(*columns, TextColumn("{task.fields[text]}"), console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=total, text="")
        plain = tracker.advance

        def advance(amount: float, note: str = "") -> None:
            plain(amount, note)
            bar.update(task, completed=tracker.done, text=tracker.text())

        tracker.advance = advance  # type: ignore[method-assign]
        yield tracker
    tracker._publish()
