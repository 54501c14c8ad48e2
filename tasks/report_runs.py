"""Reads the report's runs: which of them the headline is about, what tells them apart, what a step of each costs.

Knows nothing of HTML.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tasks.report_style import items, number, part

Run = Mapping[str, Any]
PARTS = ("draft", "verify", "accept")
_SETTINGS = ("dtype", "batch", "temperature", "acceptance")


def runs(report: Mapping[str, Any]) -> list[Run]:
    """The runs that have a speed."""
    return [
        run
        for run in items(report, "runs")
        if isinstance(run, Mapping) and number(run.get("tokens_per_second")) is not None
    ]


def chosen_run(report: Mapping[str, Any]) -> Run:
    """The Medusa run of the headline's dtype and batch; any Medusa run if none is; empty if there is none."""
    speedup = part(report, "speedup")
    candidates = [run for run in runs(report) if run.get("engine") == "medusa"]
    if not candidates:
        return {}
    return max(candidates, key=lambda run: sum(run.get(name) == speedup.get(name) for name in ("dtype", "batch")))


def peer(report: Mapping[str, Any], engine: str) -> Run:
    """The run of another engine that shares the chosen run's settings, or empty."""
    chosen = chosen_run(report)
    found = [run for run in runs(report) if run.get("engine") == engine and _settings(run) == _settings(chosen)]
    return found[0] if found else {}


def groups(report: Mapping[str, Any]) -> list[tuple[str, list[Run]]]:
    """Runs that can be compared with one another, under what they share; the headline's group first."""
    found: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs(report):
        # Acceptance is the engine's own affair: a lossy run is shown beside what it beats, and labelled.
        found.setdefault(_settings(run)[:3], []).append(run)
    first = _settings(chosen_run(report))[:3]
    ordered = sorted(found.items(), key=lambda group: group[0] != first)
    return [(_title(settings), members) for settings, members in ordered]


def run_label(run: Run) -> str:
    """Engine, and its acceptance rule where that changes what is generated."""
    label = str(run.get("engine") or "unnamed engine")
    if is_lossy(run):
        return f"{label}, {run.get('acceptance')} (changes the output)"
    return label


def is_lossy(run: Run) -> bool:
    """Typical acceptance does not keep the model's distribution; at temperature 0 it is greedy."""
    return str(run.get("acceptance") or "").startswith("typical") and number(run.get("temperature")) != 0


def step_parts(run: Run) -> tuple[float, ...]:
    """Milliseconds of draft, verify and accept; empty if the engine did not measure them apart."""
    found = tuple(number(run.get(f"{name}_ms")) or 0.0 for name in PARTS)
    return found if sum(found) > 0 else ()


def rates(speedup: Mapping[str, Any]) -> list[tuple[str, float, float | None, float | None]]:
    """(key, value, low, high) of each ratio that was measured; transformers first."""
    found = []
    for key in ("vs_transformers", "vs_plain"):
        ratio = part(speedup, key)
        if (value := number(ratio.get("value"))) is not None and value > 0:
            low, high = bounds(ratio.get("ci95"))
            found.append((key, value, low, high))
    return found


def bounds(pair: Any) -> tuple[float | None, float | None]:
    """Both ends of an interval, or neither."""
    if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
        return None, None
    low, high = number(pair[0]), number(pair[1])
    return (None, None) if low is None or high is None else (low, high)


def _settings(run: Run) -> tuple[Any, ...]:
    return tuple(run.get(name) for name in _SETTINGS)


def _title(settings: tuple[Any, ...]) -> str:
    dtype, batch, temperature = settings
    words = [str(dtype) if dtype else "", f"batch {batch}" if batch is not None else ""]
    if (value := number(temperature)) is not None:
        words.append("greedy" if value == 0 else f"temperature {value:g}")
    return " · ".join(word for word in words if word)
