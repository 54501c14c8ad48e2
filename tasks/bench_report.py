"""From measurements to `medusa.report/1`: rates, paired intervals, shares. Pure functions of what was measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from infra.machine import device_name
from medusa_core.checkpoint import WEIGHTS, read_config
from tasks.bench_run import COMPILED, LOOKUP, MEDUSA, PLAIN, REFERENCE, TIE_GAP
from tasks.quality import MEASURES
from tasks.tree import pick_entry, read_portfolio

SCHEMA = "medusa.report/1"
# Logits of models in these dtypes are off by this much from one way of computing them to another (docs/performance.md).
NOISE = {"bfloat16": 0.25, "float16": 0.05}
Row = dict[str, Any]


def build_report(spec: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """The report without what only the pipeline knows (stages, registry), and the raw `rows`."""
    rows, config = measured["rows"], spec["config"]
    entry = pick_entry(read_portfolio(Path(spec["portfolio"])))
    names = list(dict.fromkeys(row["engine"] for row in rows))
    report = {
        "schema": SCHEMA,
        "backbone": spec["backbone"],
        "device": {"name": device_name(spec["device"]), "threads": spec["threads"], "dtype": config["dtype"]},
        "heads": _heads(spec),
        "tree": {
            "mode": entry["mode"],
            "nodes": entry["nodes"],
            "depth": entry["depth"],
            "choices": entry["choices"],
            "expected_tokens_per_step": entry["expected_tokens_per_step"],
            "expected_ci95": entry["ci95"],
            "curve": entry["curve"],
        },
        "runs": [_run(name, rows, measured["workers"][name], spec) for name in names],
        "speedup": {
            "dtype": config["dtype"],
            "batch": 1,
            "threads": spec["threads"],
            "prompts_digest": spec["prompts_digest"],
            "vs_transformers": ratio(rows, MEDUSA, REFERENCE),
            "vs_plain": ratio(rows, MEDUSA, PLAIN),
            "plain_vs_transformers": ratio(rows, PLAIN, REFERENCE),
        },
        "lossless": measured["lossless"],
        "bf16_divergence": _divergence(config["dtype"], rows, measured["divergences"]),
        "quality": spec["quality"] or dict.fromkeys(MEASURES),
        "machine": {"memcpy_gbps": measured["copy_gbps"]},
        "stages": [],
        "registry": {"model": "", "version": None, "alias": None},
        "rows": rows,
    }
    if COMPILED in names:
        report["speedup"]["vs_transformers_compiled"] = ratio(rows, MEDUSA, COMPILED)
        report["speedup"]["plain_vs_transformers_compiled"] = ratio(rows, PLAIN, COMPILED)
    if LOOKUP in names:
        report["speedup"]["vs_transformers_lookup"] = ratio(rows, MEDUSA, LOOKUP)
    for rival in spec["rivals"]:
        registered = json.loads(Path(rival["report"]).read_text()).get("heads", {})
        report[rival["role"]] = {
            "version": rival["version"],
            "ratio": ratio(rows, MEDUSA, rival["role"]),
            "same_data": rival["same_data"],
            "heads": {name: value for name, value in registered.items() if name != "curve"},
        }
    return report


def ratio(rows: Sequence[Row], over: str, under: str, *, draws: int = 2000, seed: int = 0) -> dict[str, Any]:
    """Tokens per second of one contestant over another's, with a 95 % bootstrap interval over prompts (paired)."""
    prompts = sorted({row["prompt_id"] for row in rows})
    index = {prompt: i for i, prompt in enumerate(prompts)}
    sums = {name: np.zeros((2, len(prompts))) for name in (over, under)}
    for row in rows:
        if row["engine"] in sums:
            sums[row["engine"]][:, index[row["prompt_id"]]] += (row["new_tokens"], row["seconds"])

    def rate(name: str, picks: np.ndarray) -> np.ndarray:
        tokens, seconds = sums[name]
        return np.asarray(tokens[picks].sum(-1) / seconds[picks].sum(-1))

    picks = np.random.default_rng(seed).integers(len(prompts), size=(draws, len(prompts)))
    everything = np.arange(len(prompts))[None]
    low, high = np.quantile(rate(over, picks) / rate(under, picks), [0.025, 0.975])
    value = float((rate(over, everything) / rate(under, everything))[0])
    return {"value": value, "ci95": [float(low), float(high)]}


def _run(name: str, rows: Sequence[Row], worker: dict[str, float], spec: dict[str, Any]) -> dict[str, Any]:
    own = [row for row in rows if row["engine"] == name]
    steps = max(1, sum(row["steps"] for row in own))
    return {
        "engine": name,
        "acceptance": "greedy",
        "temperature": 0.0,
        "dtype": spec["config"]["dtype"],
        "batch": 1,
        "prompts": len({row["prompt_id"] for row in own}),
        "context_tokens": sum(row["context_tokens"] for row in own),
        "new_tokens": sum(row["new_tokens"] for row in own),
        "max_new_tokens": spec["config"]["max_new_tokens"],
        "seconds": sum(row["seconds"] for row in own),
        "tokens_per_second": _rate(own),
        "tokens_per_step": _per_step(own),
        "weights_gbps": _weights_gbps(own, worker["weight_bytes"]),
        "draft_ms": 1000 * sum(row["draft"] for row in own) / steps,
        "verify_ms": 1000 * sum(row["verify"] for row in own) / steps,
        "accept_ms": 1000 * sum(row["accept"] for row in own) / steps,
        "ttft_ms": 1000 * float(np.median([row["ttft"] for row in own])),
        "peak_memory_mb": round(worker["peak_memory_mb"]),
        "load_s": worker["load_s"],
        "compile_s": worker["compile_s"],
        "warmup_s": worker["warmup_s"],
        "by_category": {
            category: {
                "tokens_per_second": _rate([row for row in own if row["category"] == category]),
                "tokens_per_step": _per_step([row for row in own if row["category"] == category]),
                "prompts": len({row["prompt_id"] for row in own if row["category"] == category}),
            }
            for category in sorted({row["category"] for row in own})
        },
    }


def _rate(rows: Sequence[Row]) -> float:
    return float(sum(row["new_tokens"] for row in rows) / sum(row["seconds"] for row in rows))


def _weights_gbps(rows: Sequence[Row], weight_bytes: float) -> float:
    """Bytes of weights read per second of decoding, in GB/s: every step reads all of them once."""
    decoding = sum(row["seconds"] - row["ttft"] for row in rows)
    return float(weight_bytes * sum(row["steps"] for row in rows) / decoding / 1e9) if decoding else 0.0


def _per_step(rows: Sequence[Row]) -> float:
    """Tokens per verification; each answer's first token comes from its prompt's own pass and is left out."""
    steps = sum(row["steps"] for row in rows)
    return float(sum(row["new_tokens"] - 1 for row in rows) / steps) if steps else 1.0


def _heads(spec: dict[str, Any]) -> dict[str, Any]:
    directory = Path(spec["heads"])
    described = read_config(directory)
    final = spec["evaluation"].get("final", {})
    heads = described.heads
    from safetensors import safe_open

    with safe_open(directory / WEIGHTS, "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in sorted(file.keys())}
    return {
        "kind": heads.kind,
        "block": heads.block,
        "lm_head": heads.lm_head,
        "num_heads": heads.num_heads,
        "num_layers": heads.num_layers,
        "vocab": heads.vocab or described.vocab_size,
        "parameters": int(sum(np.prod(shape) for name, shape in shapes.items() if name != "vocab_map_C")),
        "bytes": (directory / WEIGHTS).stat().st_size,
        "positions": final.get("held_out_positions", 0),
        "top1": final.get("top1", []),
        "top5": final.get("top5", []),
        "curve": [{"step": row["step"], "loss": row["loss"]} for row in spec["evaluation"].get("curve", [])],
    }


def _divergence(dtype: str, rows: Sequence[Row], parted: Sequence[Row]) -> dict[str, Any]:
    """Which timed answers differ between transformers and this engine, and how far apart the two tokens' logits are
    there in float64: within the dtype's noise it is a near-tie that rounding decided, beyond it a failure.

    The noise is what this dtype is known to have, or what transformers' own gaps have here, which depends on the
    machine's products: two computations part only where one of them is off by half the gap or more.
    """
    off = [row["rounding"] for row in parted if row["rounding"] is not None]
    bound = max(NOISE.get(dtype, TIE_GAP), 2 * max(off, default=0.0))
    gaps = [row["gap"] for row in parted if row["gap"] is not None]
    failures = sum(row["gap"] is None or row["gap"] > bound for row in parted)
    return {
        "prompts": sum(row["engine"] == REFERENCE for row in rows),
        "diverged": len(parted),
        "max_gap": max(gaps, default=None),
        "noise_bound": bound,
        "ties": len(parted) - failures,
        "failures": failures,
        "first": list(parted),
    }
