"""The blocks a report is laid out with, and its two sections that are tables: how it was made, and the settings.

Knows nothing of what the other sections show.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tasks import report_plots as plots
from tasks.report_runs import run_label, runs
from tasks.report_style import MISSING, duration, figure, items, number, part, short, text

Report = Mapping[str, Any]

_SETTINGS = (
    *(("engine", "engine"), ("acceptance", "acceptance"), ("temperature", "temp."), ("dtype", "dtype")),
    *(("batch", "batch"), ("prompts", "prompts"), ("context_tokens", "context tokens"), ("new_tokens", "new tokens")),
    *(("seconds", "seconds"), ("tokens_per_second", "tokens/s"), ("tokens_per_step", "tokens/step")),
    *(("draft_ms", "draft ms"), ("verify_ms", "verify ms"), ("accept_ms", "accept ms")),
    *(("ttft_ms", "first token ms"), ("peak_memory_mb", "peak MB")),
)


def section(title: str, lead: str, body: str) -> str:
    return f'<section><h2>{title}</h2><p class="lead">{lead}</p>{body}</section>' if body else ""


def two(*parts: str) -> str:
    shown = [f"<div>{part}</div>" for part in parts if part]
    return f'<div class="two">{"".join(shown)}</div>' if shown else ""


def titled(title: str, body: str) -> str:
    return f"<h3>{text(title)}</h3>{body}" if body else ""


def facts(rows: Sequence[tuple[str, str]]) -> str:
    """A table of names and values; the values are HTML already."""
    body = "".join(f"<tr><th>{text(name)}</th><td>{value}</td></tr>" for name, value in rows)
    return f'<table style="margin-bottom:18px"><tbody>{body}</tbody></table>' if rows else ""


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: set[int]) -> str:
    classes = [' class="n"' if i in right else "" for i in range(len(head))]
    top = "".join(f"<th{css}>{text(name) if name else ''}</th>" for name, css in zip(head, classes, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{css}>{cell}</td>" for cell, css in zip(row, classes, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def legend(entries: Iterable[tuple[str, str]]) -> str:
    shown = "".join(f'<span><i style="background:var(--{css})"></i>{text(name)}</span>' for css, name in entries)
    return f'<div class="legend">{shown}</div>'


def pipeline(report: Report) -> str:
    stages = [stage for stage in items(report, "stages") if isinstance(stage, Mapping)]
    if not stages:
        return ""
    notes = {str(stage.get("name")): _note(stage) for stage in stages}
    rows = [
        [
            text(stage.get("name")),
            duration(stage.get("seconds")),
            "cached" if stage.get("cached") else "built",
            f"<code>{text(stage.get('artifact'))}</code>",
        ]
        for stage in stages
    ]
    shown = table(("stage", "time", "", "artifact"), rows, right={1})
    lead = "Each stage leaves an artifact that is reused until something it depends on changes (dashed: reused)."
    return section("How it was made", lead, plots.pipeline(notes) + f'<div style="margin-top:14px">{shown}</div>')


def _note(stage: Mapping[str, Any]) -> tuple[str, str]:
    if stage.get("cached"):
        return "done cached", "cached"
    return "done", duration(stage.get("seconds"))


def settings(report: Report) -> str:
    shown = [(key, label) for key, label in _SETTINGS if any(run.get(key) is not None for run in runs(report))]
    rows = [[_cell(run, key) for key, _ in shown] for run in runs(report)]
    right = {i for i, (key, _) in enumerate(shown) if key not in ("engine", "acceptance", "dtype")}
    measured = table([label for _, label in shown], rows, right) if rows else ""
    return section("Settings", "Everything a benchmark must state.", facts(_conditions(report)) + measured)


def _cell(run: Mapping[str, Any], key: str) -> str:
    value = run.get(key)
    if key == "engine":
        return text(run_label(run))
    if key.endswith("_ms") or key == "tokens_per_second" or key == "seconds":
        return figure(value, 1)
    return f"{value:g}" if key == "temperature" and number(value) is not None else text(value)


def _conditions(report: Report) -> list[tuple[str, str]]:
    backbone, device, tree = (part(report, name) for name in ("backbone", "device", "tree"))
    speedup, machine = part(report, "speedup"), part(report, "machine")
    found = [
        ("backbone", f"{text(backbone.get('name'))}, {short(backbone.get('parameters'))} parameters"),
        ("backbone digest", f"<code>{text(backbone.get('digest'))}</code>"),
        ("device", f"{text(device.get('name'))}, {text(device.get('threads'))} threads, {text(device.get('dtype'))}"),
        ("tree", f"{text(tree.get('nodes'))} nodes, depth {text(tree.get('depth'))}" if tree else MISSING),
        ("prompts digest", f"<code>{text(speedup.get('prompts_digest'))}</code>"),
    ]
    found += [(str(name).replace("_", " "), text(value)) for name, value in machine.items() if value is not None]
    return [(name, value) for name, value in found if value.replace(f"<code>{MISSING}</code>", MISSING) != MISSING]
