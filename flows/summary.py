"""Tables for a terminal. Reads reports and portfolios; measures nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.tree import Tree as Drawing

from tasks.promotion import ROLES


def print_summary(report: Mapping[str, Any], out: Console) -> None:
    """What a run did: seconds and counts per stage, then the figures, then where everything lies."""
    table = _table("stage", ">seconds", "what", "artifact", title="stages")
    for stage in report["stages"]:
        seconds = "cached" if stage["cached"] else f"{stage['seconds']:,.1f}"
        table.add_row(stage["name"], seconds, _counts(stage["counts"]), _short(stage["artifact"]))
    total = sum(stage["seconds"] for stage in report["stages"])
    table.add_row("total", f"{total:,.1f}", "", "", style="bold")
    out.print(table)
    if "runs" in report:
        print_report(report, out)
    registry = report.get("registry") or {}
    if registry.get("version"):
        alias = f", {registry['alias']}" if registry.get("alias") else ""
        out.print(f"registered  {registry['model']}/{registry['version']}{alias} ({registry['decision']})")
    out.print(
        f"report      {report['directory']}/{'report.html' if 'runs' in report else 'report.json'}", soft_wrap=True
    )
    if registry.get("version"):
        out.print('try it      medusa generate "Why is the sky blue?"')


def print_training(report: Mapping[str, Any], out: Console) -> None:
    """The contestants of `medusa bench train`."""
    table = _table("contestant", ">tokens/s", ">times obvious", ">memory", ">share of obvious", title="training heads")
    for name in ("obvious", "live", "cached", "cached_amortised"):
        speedup, share = report["speedup"].get(name, 1.0), report["memory_share"].get(name, 1.0)
        own = report[name]
        table.add_row(
            name, f"{own['tokens_per_second']:.1f}", f"{speedup:.2f}x", f"{own['peak_memory_mb']:,} MB", f"{share:.0%}"
        )
    out.print(table)
    out.print(
        f"{report['tokens']:,} tokens that train in {report['config']['steps']} steps, {report['config']['dtype']}, "
        f"{report['threads']} threads; the pass that stores hidden states took {report['caching_seconds']:.1f} s, "
        f"spread over {report['config']['epochs']} epochs; losses of obvious and live differ by at most "
        f"{report['largest_loss_difference']:.1e}"
    )


def print_report(report: Mapping[str, Any], out: Console) -> None:
    """Heads, tree, engines and what was proven."""
    heads, tree = report["heads"], report["tree"]
    table = _table("head", *(f">{k + 1}" for k in range(heads["num_heads"])), title="heads, held-out accuracy")
    for name in ("top1", "top5"):
        if heads[name]:
            table.add_row(name, *(f"{100 * value:.1f} %" for value in heads[name]))
    out.print(table)
    low, high = tree["expected_ci95"]
    out.print(
        f"tree        {tree['mode']}, {tree['nodes']} nodes, {tree['depth']} deep: "
        f"{tree['expected_tokens_per_step']:.2f} tokens per step expected [{low:.2f}, {high:.2f}]"
    )
    columns = (">tokens/s", ">tokens/step", ">weights", ">first token", ">draft", ">verify", ">accept", ">memory")
    table = _table("engine", *columns, title=_title(report))
    for run in report["runs"]:
        own = run["engine"] in ("plain", "medusa", *ROLES)
        parts = [f"{run[name]:.1f} ms" if own else "" for name in ("draft_ms", "verify_ms", "accept_ms")]
        table.add_row(
            run["engine"],
            f"{run['tokens_per_second']:.1f}",
            f"{run['tokens_per_step']:.2f}",
            f"{run['weights_gbps']:.1f} GB/s",
            f"{run['ttft_ms']:.0f} ms",
            *parts,
            f"{run['peak_memory_mb']:,} MB",
        )
    out.print(table)
    names = {
        "vs_transformers": "speedup over transformers generate",
        "vs_transformers_compiled": "speedup over transformers, compiled static cache",
        "vs_plain": "speedup over this engine with the tree off",
    }
    for key, label in names.items():
        if key in report["speedup"]:
            out.print(f"{label:50} {_ratio(report['speedup'][key])}")
    for role, words in ROLES.items():
        if role in report:
            label = f"over {report[role]['version']}, {words}"
            out.print(f"{label:50} {_ratio(report[role]['ratio'])}")
    out.print(_lossless(report["lossless"]))


def print_portfolio(portfolio: Mapping[str, Any], out: Console) -> None:
    """What was chosen for every batch and context of a machine."""
    columns = (">batch", ">context", "mode", ">nodes", ">depth", ">tokens/step", ">step", ">expected speedup")
    table = _table(*columns, title=f"trees for {portfolio['machine']['device']}")
    for entry in portfolio["entries"]:
        table.add_row(
            str(entry["batch"]),
            str(entry["context"]),
            entry["mode"],
            str(entry["nodes"]),
            str(entry["depth"]),
            f"{entry['expected_tokens_per_step']:.2f}",
            f"{entry['step_ms']:.1f} ms",
            f"{entry['expected_speedup']:.2f}",
        )
    out.print(table)


def print_tree(entry: Mapping[str, Any], out: Console) -> None:
    """A tree as a drawing of ranks, with what it is expected to give."""
    drawing = Drawing("root (the model's own next token)")
    branches: dict[tuple[int, ...], Drawing] = {(): drawing}
    for choice in entry["choices"]:
        path = tuple(choice)
        branches[path] = branches[path[:-1]].add(f"head {len(path)}, rank {path[-1]}")
    out.print(drawing)
    low, high = entry["ci95"]
    out.print(
        f"{entry['mode']}, {entry['nodes']} nodes, {entry['depth']} deep: "
        f"{entry['expected_tokens_per_step']:.2f} tokens per step expected [{low:.2f}, {high:.2f}]"
    )


def _table(*columns: str, title: str) -> Table:
    """A plain table; a column whose name starts with > is right-aligned."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, title_style="bold")
    for column in columns:
        table.add_column(column.lstrip(">"), justify="right" if column.startswith(">") else "left")
    return table


def _title(report: Mapping[str, Any]) -> str:
    run, device = report["runs"][0], report["device"]
    return (
        f"{run['prompts']} prompts, greedy, {run['dtype']}, batch 1, up to {run['max_new_tokens']} new tokens, "
        f"{device['threads']} threads, {device['name']}"
    )


def _counts(parts: Mapping[str, Mapping[str, Any]]) -> str:
    """The counts that say how much was done, summed over a stage's splits."""
    shown = ("rows", "tokens", "positions", "parameters", "cells", "nodes", "prompts")
    totals: dict[str, int] = {}
    for counts in parts.values():
        for name in shown:
            if isinstance(counts.get(name), int):
                totals[name] = totals.get(name, 0) + counts[name]
    return ", ".join(f"{value:,} {name}" for name, value in totals.items())


def _short(artifact: str) -> str:
    return " ".join(part if "/" not in part else part[: part.index("/") + 9] for part in artifact.split())


def _ratio(ratio: Mapping[str, Any]) -> str:
    low, high = ratio["ci95"]
    return f"{ratio['value']:.2f}x [{low:.2f}, {high:.2f}]"


def _lossless(lossless: Mapping[str, Any]) -> str:
    verdict = "not one token changed" if lossless["mismatched_prompts"] == 0 else "TOKENS CHANGED"
    return (
        f"{verdict}: {lossless['prompts']} prompts, {lossless['tokens']:,} tokens compared in {lossless['dtype']}, "
        f"{lossless['mismatched_prompts']} mismatches, {lossless['ties']} ties"
    )
