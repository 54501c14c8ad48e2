"""The model card of a version: what it is, what it was made from, what it gives, and what it was not tried on.

Reads the report, the configuration and the lineage; measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.report_style import figure, number, part

MODEL_CARD = "README.md"
_RATIOS = {
    "vs_transformers": "transformers `generate`",
    "vs_transformers_compiled": "transformers, compiled static cache",
    "vs_plain": "this engine without a tree",
}


def model_card(model: str, report: Mapping[str, Any], config: Mapping[str, Any], lineage: Mapping[str, Any]) -> str:
    """Markdown."""
    backbone, heads, tree, device = (part(report, name) for name in ("backbone", "heads", "tree", "device"))
    speedup, lossless = part(report, "speedup"), part(report, "lossless")
    lines = [
        f"# {model}: heads for {backbone.get('name')}",
        "",
        "MEDUSA heads (arXiv 2401.10774): they guess tokens ahead, the backbone verifies them. They are no model of "
        "their own, and say nothing that the backbone wouldn't.",
        "",
        f"* Backbone: {backbone.get('name')}, weights `{backbone.get('digest')}`; no other will do",
        f"* Heads: {heads.get('num_heads')} of kind {heads.get('kind')}, block {heads.get('block')}, LM head "
        f"{heads.get('lm_head')}, {figure(heads.get('vocab'))} tokens, {figure(heads.get('parameters'))} parameters",
        f"* Held-out accuracy: {_shares(heads.get('top1'))} (first choice), {_shares(heads.get('top5'))} (in five)",
        f"* Tree: {tree.get('mode')}, {tree.get('nodes')} nodes, for {device.get('name')}; other machines: "
        "`medusa calibrate`",
        "",
        "## What it gives",
        "",
        f"Greedy, batch 1, {speedup.get('dtype')}, {device.get('name')}, {device.get('threads')} threads, one "
        "interleaved run, 95 % intervals over prompts:",
        "",
        "| against | times as fast |",
        "|---|---|",
        *(f"| {label} | {_ratio(part(speedup, name))} |" for name, label in _RATIOS.items() if name in speedup),
        "",
        f"Lossless: {figure(lossless.get('prompts'))} prompts, {figure(lossless.get('tokens'))} tokens compared in "
        f"{lossless.get('dtype')}, {figure(lossless.get('mismatched_prompts'))} mismatches, "
        f"{figure(lossless.get('ties'))} ties.",
        "",
        "## What it was made from",
        "",
        *(f"* {label.partition(' ')[0]} `{entry['key']}`" for label, entry in lineage.items()),
        "",
        f"By recipe `{config.get('name')}` (`config.yaml`); `lineage.json` has the digests.",
        "",
        "## What it was not tried on",
        "",
        "Speed was measured on the recipe's own kind of prompts, and depends on the text: text unlike what the heads "
        "were trained on is drafted worse, never answered otherwise. Drawn answers, larger batches and longer contexts "
        "than the tree's portfolio names were not timed.",
    ]
    return "\n".join(lines) + "\n"


def _shares(values: Any) -> str:
    found = [number(value) for value in values or []]
    return ", ".join(f"{100 * value:.1f} %" for value in found if value is not None) or "not measured"


def _ratio(ratio: Mapping[str, Any]) -> str:
    low, high = ratio.get("ci95", (None, None))
    return f"{figure(ratio.get('value'))} [{figure(low)}, {figure(high)}]"
