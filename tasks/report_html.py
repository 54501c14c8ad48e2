"""The benchmark's report as one self-contained HTML file: what a `medusa.report/1` says, for a person to read.

Asks for nothing over the network; every value is escaped; parts that are missing or null are left out or shown as a
dash. Knows nothing of how anything was measured, and judges nothing beyond saying what the numbers say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks import report_sections as sections
from tasks.report_runs import chosen_run, is_lossy, rates, run_label
from tasks.report_style import CSS, MISSING, duration, figure, items, number, part, short, text

Report = Mapping[str, Any]


def render_report(report: Report) -> str:
    """The whole page. Works with any subset of the schema's keys."""
    backbone = text(part(report, "backbone").get("name") or "report")
    body = (_top(report), *sections.all_sections(report), _footer(report))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>Medusa · {backbone}</title><style>{CSS}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def headline(report: Report) -> str:
    """The result in one line of HTML: how much faster, or that it is slower, or that one can't tell."""
    speedup = part(report, "speedup")
    rate = rates(speedup)
    if not rate:
        return "No speedup was measured"
    name, value, low, high = rate[0]
    against = "transformers generate" if name == "vs_transformers" else "plain decoding with the same engine"
    words = f"{value:.2f}× the speed of {against}"
    if low is not None and high is not None and low <= 1 <= high:
        words += ": no clear difference"
    elif value < 1:
        words += ": slower"
    else:
        words = f"{value:.2f}× faster than {against}"
    if low is None or high is None:
        return words
    return f'{words} <span class="ci">[{low:.2f}–{high:.2f}]</span>'


def _top(report: Report) -> str:
    backbone, device = part(report, "backbone"), part(report, "device")
    where = [text(backbone.get("name")), text(device.get("name"))]
    if number(device.get("threads")) is not None:
        where.append(f"{text(device.get('threads'))} threads")
    if (dtype := part(report, "speedup").get("dtype") or device.get("dtype")) is not None:
        where.append(text(dtype))
    over = " · ".join(word for word in where if word != MISSING)
    return (
        f'<p class="over">Medusa decoding · {over}</p><h1>{headline(report)}</h1>'
        f"{_lossless_verdict(report)}{_doubt(report)}{_registered(report)}{_tiles(report)}"
    )


def _lossless_verdict(report: Report) -> str:
    lossless = part(report, "lossless")
    tokens, mismatches = number(lossless.get("tokens")), number(lossless.get("mismatched_prompts"))
    if not tokens or mismatches is None:
        return _verdict("warn", "Losslessness was not checked: no outputs were compared with plain decoding")
    ties = number(lossless.get("ties")) or 0
    compared = (
        f"{figure(lossless.get('prompts'))} prompts, {tokens:,.0f} tokens compared in {text(lossless.get('dtype'))}, "
        f"{mismatches:g} mismatch{'' if mismatches == 1 else 'es'}, {ties:g} tie{'' if ties == 1 else 's'}"
    )
    if mismatches:
        return _verdict("bad", f"✗ NOT lossless: outputs differ from plain decoding. {compared}")
    return _verdict("good", f"✓ Not one token changed: {compared}")


def _doubt(report: Report) -> str:
    """What the headline must not hide: an interval that includes 1, and an acceptance rule that changes the output."""
    found = ""
    for name, value, low, high in rates(part(report, "speedup"))[:1]:
        if low is None or high is None:
            found += _verdict("warn", "No confidence interval was measured for this ratio")
        elif low <= 1 <= high:
            found += _verdict("warn", "The 95 % interval includes 1: no difference in speed was shown")
        elif value < 1:
            against = "transformers" if name == "vs_transformers" else "plain decoding"
            found += _verdict("bad", f"Slower than {against}: switch the tree off on this machine")
    if is_lossy(chosen_run(report)):
        found += _verdict("warn", "Typical acceptance: this speed is of an output that is not the model's own")
    return found


def _registered(report: Report) -> str:
    registry = part(report, "registry")
    if not registry.get("model"):
        return ""
    alias = f" · {text(registry['alias'])}" if registry.get("alias") else " · not promoted"
    return _verdict("plain", f"Registered as {text(registry['model'])}/{text(registry.get('version'))}{alias}")


def _verdict(colour: str, words: str) -> str:
    return f'<span class="verdict {colour}">{words}</span>'


def _tiles(report: Report) -> str:
    run, tree, heads = chosen_run(report), part(report, "tree"), part(report, "heads")
    tiles = [
        (figure(run.get("tokens_per_second"), 1), f"tokens/s, {text(run_label(run))}" if run else "tokens/s"),
        (figure(run.get("tokens_per_step")), "tokens per decoding step"),
        (figure(tree.get("nodes")), f"tree nodes, {figure(tree.get('depth'))} deep"),
        (short(heads.get("parameters")), f"parameters in {figure(heads.get('num_heads'))} heads"),
    ]
    shown = "".join(f'<div class="tile"><b>{value}</b><span>{label}</span></div>' for value, label in tiles)
    return f'<div class="tiles">{shown}</div>'


def _footer(report: Report) -> str:
    stages = sum(number(stage.get("seconds")) or 0 for stage in items(report, "stages") if isinstance(stage, Mapping))
    whole = f" · {duration(stages)} of work in all stages" if stages else ""
    return f"<footer>{text(report.get('schema'))} · numbers are also in report.json{whole}</footer>"
