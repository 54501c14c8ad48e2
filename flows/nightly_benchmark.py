"""The Prefect flow `medusa-benchmark`: is the champion still as fast, and lossless, as when it was registered?

Drivers and libraries change under a version that does not. It is measured on its prompts again, and the run fails, with
a red artifact, where a ratio has fallen. Knows nothing of how contestants run.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.states import Failed, State

from flows.bench import measure_version
from flows.board import Board
from flows.versions import find_version
from infra.artifacts import write_json
from infra.environment import default_root
from tasks.promotion import number, part

RATIOS = {"vs_transformers": "over transformers generate", "vs_plain": "over the same engine without a tree"}

log = logging.getLogger(__name__)


@flow(name="medusa-benchmark")
def nightly(
    model: str = "champion", root: str | None = None, max_minutes: float = 3.0, max_slowdown: float = 0.05
) -> dict[str, Any] | State[Any]:
    """Measures a version again, notes it in `nightly/` under the root, and fails if it has regressed."""
    place = Path(root).absolute() if root else default_root()
    served = find_version(model, place)
    report = measure_version(served, place, max_minutes=max_minutes)
    folder = place / "nightly" / served.reference.replace("/", "-")
    before = _baseline(folder, served.directory / "report.json", report)
    faults = regressions(before, report, max_slowdown)
    folder.mkdir(parents=True, exist_ok=True)
    found = {"version": served.reference, "faults": faults, "report": report}
    write_json(folder / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}.json", found)
    Board.of_this_run().markdown("nightly", _as_markdown(served.reference, before, report, faults))
    for fault in faults:
        log.error("%s: %s", served.reference, fault)
    return Failed(message=f"{served.reference} has regressed: {'; '.join(faults)}", data=found) if faults else found


def regressions(before: Mapping[str, Any], now: Mapping[str, Any], max_slowdown: float) -> list[str]:
    """What has become worse, in sentences: an answer that changed, a ratio whose whole interval lies below what it was
    by more than `max_slowdown`, fewer tokens per step. Empty if nothing has."""
    faults = []
    mismatched = number(part(now, "lossless").get("mismatched_prompts"))
    if mismatched != 0:
        count = "unknown how many" if mismatched is None else f"{mismatched:.0f}"
        faults.append(f"{count} prompts answered differently")
    for name, words in RATIOS.items():
        was, measured = part(part(before, "speedup"), name), part(part(now, "speedup"), name)
        value, bounds = number(was.get("value")), measured.get("ci95")
        high = number(bounds[1]) if isinstance(bounds, list) and len(bounds) == 2 else None
        if value is None or high is None:
            faults.append(f"no figure {words}")
        elif high < value * (1 - max_slowdown):
            faults.append(f"{number(measured.get('value')):.2f} times {words}, at most {high:.2f}; it was {value:.2f}")
    return faults


def _baseline(folder: Path, registered: Path, report: Mapping[str, Any]) -> dict[str, Any]:
    """What this machine is compared with: the version's own report if it was measured on one like it, else the first
    night here."""
    own: dict[str, Any] = json.loads(registered.read_text())
    if own.get("device") == report["device"]:
        return own
    for earlier in sorted(folder.glob("*.json")):
        noted: dict[str, Any] = json.loads(earlier.read_text())["report"]
        if noted["device"] == report["device"]:
            return noted
    return dict(report)


def _as_markdown(version: str, before: Mapping[str, Any], now: Mapping[str, Any], faults: list[str]) -> str:
    lines = [f"# {'🔴' if faults else '🟢'} {version}", *(f"* **{fault}**" for fault in faults), ""]
    lines += ["| | it was | now |", "|---|---|---|"]
    for name, words in RATIOS.items():
        figures = [part(part(each, "speedup"), name) for each in (before, now)]
        lines.append(f"| {words} | {' | '.join(_figure(each) for each in figures)} |")
    return "\n".join(lines)


def _figure(ratio: Mapping[str, Any]) -> str:
    low, high = ratio.get("ci95", (float("nan"),) * 2)
    return f"{ratio.get('value', float('nan')):.2f} [{low:.2f}, {high:.2f}]"
