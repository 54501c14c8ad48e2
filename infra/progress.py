"""Progress of long work: a bar in a terminal, a log line now and then elsewhere, and a listener for a server.

Knows nothing of what is being counted.
"""

from __future__ import annotations

import logging
import sys
import threading
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


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """While the block runs, calls `listener(label, fraction, text)` every few seconds of some work and at its end."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


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
        """Counts work that an earlier run did, or that was done while starting up; it doesn't enter the rate."""
        self.done += amount
        self._baseline += amount
        self.start = time.monotonic()

    def advance(self, amount: float, note: str = "") -> None:
        self.done += amount
        self.note = note or self.note
        now = time.monotonic()
        if now - self._last >= _INTERVAL_S:
            self._last = now
            self._publish()

    def text(self) -> str:
        figures = [f"{self.done:,.0f}/{self.total:,.0f} {self.unit}"]
        if (done := self.done - self._baseline) > 0:
            rate = done / max(1e-9, time.monotonic() - self.start)
            figures.append(f"{rate:,.{1 if rate >= 1 else 2}f} {self.unit}/s")
            figures.append(f"{(self.total - self.done) / rate:,.0f} s left")
        return ", ".join(figures + [self.note] * bool(self.note))

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


@contextmanager
def followed(tracker: Tracker, read: Callable[[], tuple[float, str]]) -> Iterator[None]:
    """While the block runs, asks `read` once a second how much is done in all (and a note) and shows it.

    For work in other processes, which say how far they are in files.
    """
    stop = threading.Event()

    def follow() -> None:
        started = False
        while not stop.wait(1.0):
            done, note = read()
            if done > tracker.done and not started:
                started = True
                tracker.skip(done - tracker.done)
            if done > tracker.done:
                tracker.advance(done - tracker.done, note)

    thread = threading.Thread(target=follow, name=f"{tracker.label}-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        done, note = read()
        tracker.advance(max(0.0, done - tracker.done), note)
