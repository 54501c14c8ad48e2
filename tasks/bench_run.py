"""Runs the contestants: the timed, interleaved part, and the float32 comparison that proves nothing was lost.

Knows how to measure, not what the figures mean.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from infra.progress import track
from tasks.backbone import load_tokenizer
from tasks.bench_prompts import BenchPrompt
from tasks.bench_worker import Answer, Contestant, Worker, start_workers
from tasks.conversations import ChatFormat
from tasks.engine import EngineConfig
from tasks.tree import pick_entry, read_portfolio

TIE_GAP = 1e-4
REFERENCE, PLAIN, MEDUSA, COMPILED = "transformers", "plain", "medusa", "transformers-compiled"
LOOKUP = "transformers-lookup"
_REFERENCE_BATCH = 8


def run_benchmark(spec: dict[str, Any]) -> dict[str, Any]:
    """Measurements: `rows` (one per contestant, prompt and turn), `workers` (load and warm-up seconds, peak memory),
    `lossless`, `divergences` (where timed answers part, with the logit gap there) and `copy_gbps`."""
    config = spec["config"]
    prompts = [BenchPrompt.from_json(value) for value in spec["prompts"]]
    tokenizer = load_tokenizer(Path(spec["model"]))
    chat = ChatFormat(tokenizer, spec["eos_token_ids"])
    workers = start_workers(_contestants(spec, chat, prompts))
    try:
        rows, contexts = _timed(workers, prompts, chat, config)
        for worker in workers:
            worker.loaded["peak_memory_mb"] = worker.memory_mb()
    finally:
        for worker in workers:
            worker.close()
    lossless, parted = _lossless(spec, chat, prompts, divergences(rows, contexts))
    return {
        "rows": rows,
        "workers": {worker.contestant.name: worker.loaded for worker in workers},
        "lossless": lossless,
        "divergences": parted,
        "copy_gbps": copy_bandwidth(),
    }


def copy_bandwidth(size: int = 1 << 28, repeats: int = 5) -> float:
    """Memory copy of this machine in GB/s, read and write counted: what a step's bytes are to be compared with."""
    source, target = torch.ones(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    target.copy_(source)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - start)
    return 2 * size / best / 1e9


def _contestants(spec: dict[str, Any], chat: ChatFormat, prompts: list[BenchPrompt]) -> list[Contestant]:
    config = spec["config"]
    longest = max(len(chat.first(prompt.turns[0])) for prompt in prompts)
    turns = max(len(prompt.turns) for prompt in prompts)
    # Later turns add a question and an answer each; the static cache must hold the longest conversation.
    slots = (longest + config["max_new_tokens"]) * turns + 64
    base = Contestant(
        name=REFERENCE,
        kind=REFERENCE,
        model=spec["model"],
        eos_token_ids=tuple(spec["eos_token_ids"]),
        dtype=config["dtype"],
        device=spec["device"],
        threads=spec["threads"],
        slots=-(-slots // 128) * 128,
        backbone_digest=spec["backbone"]["digest"],
        engine=EngineConfig(**spec["engine"]),
    )
    listed = [base, replace(base, name=PLAIN, kind=PLAIN)]
    listed.append(_with_tree(base, MEDUSA, spec["heads"], spec["portfolio"]))
    listed += [_with_tree(base, rival["role"], rival["heads"], rival["portfolio"]) for rival in spec["rivals"]]
    if config["compiled"]:
        listed.append(replace(base, name=COMPILED, kind=COMPILED))
    if config["lookup"]:
        listed.append(replace(base, name=LOOKUP, kind=LOOKUP))
    return listed


def _with_tree(base: Contestant, name: str, heads: str, portfolio: str) -> Contestant:
    entry = pick_entry(read_portfolio(Path(portfolio)))
    choices = tuple(tuple(path) for path in entry["choices"])
    return replace(base, name=name, kind=MEDUSA, heads=heads, choices=choices)


def _timed(
    workers: list[Worker], prompts: list[BenchPrompt], chat: ChatFormat, config: dict[str, Any]
) -> tuple[list[dict[str, Any]], dict[tuple[str, int], list[int]]]:
    """Every contestant answers a prompt before the next prompt is begun; who starts changes from prompt to prompt.

    Returns the measurements, and the ids that each (prompt, turn) was asked with.
    """
    rows: list[dict[str, Any]] = []
    contexts: dict[tuple[str, int], list[int]] = {}
    deadline = time.monotonic() + 60 * config["max_minutes"]
    with track("benchmark", len(prompts), "prompts") as progress:
        for number, prompt in enumerate(prompts):
            if time.monotonic() > deadline and number >= 2:
                break
            ids: list[int] = []
            for turn in range(len(prompt.turns)):
                if turn:
                    ended = bool(ids) and ids[-1] in chat.eos
                    ids = ids + chat.following(list(prompt.turns[: turn + 1]), ended)
                else:
                    ids = chat.first(prompt.turns[0])
                contexts[prompt.prompt_id, turn] = ids
                order = workers[number % len(workers) :] + workers[: number % len(workers)]
                answers = {w.contestant.name: w.answer([ids], config["max_new_tokens"])[0] for w in order}
                rows += [_row(name, prompt, turn, ids, answer) for name, answer in answers.items()]
                # The next turn's context is the same for all: the reference's answer.
                ids = ids + answers[REFERENCE].tokens
            progress.advance(1, f"stops after {config['max_minutes']:g} min")
    return rows, contexts


@dataclass(frozen=True)
class Divergence:
    """Where the reference's and this engine's timed answers to one prompt part: the ids so far, and the two tokens
    that follow (one, if an answer just ends there)."""

    prompt_id: str
    turn: int
    position: int
    before: list[int]
    both: list[int]


def divergences(rows: list[dict[str, Any]], contexts: dict[tuple[str, int], list[int]]) -> list[Divergence]:
    """First differences of timed answers, at most one per prompt and turn."""
    answers = {(row["engine"], row["prompt_id"], row["turn"]): row["tokens"] for row in rows}
    parted = []
    for (prompt, turn), ids in contexts.items():
        left, right = answers[REFERENCE, prompt, turn], answers[MEDUSA, prompt, turn]
        if (place := first_difference(left, right)) is not None:
            both = left[place : place + 1] + right[place : place + 1]
            parted.append(Divergence(prompt, turn, place, ids + left[:place], both))
    return parted


def _row(name: str, prompt: BenchPrompt, turn: int, ids: list[int], answer: Answer) -> dict[str, Any]:
    return {
        "engine": name,
        "prompt_id": prompt.prompt_id,
        "category": prompt.category,
        "turn": turn,
        "context_tokens": len(ids),
        "new_tokens": len(answer.tokens),
        "seconds": answer.seconds,
        "ttft": answer.ttft,
        "steps": answer.steps,
        "draft": answer.draft,
        "verify": answer.verify,
        "accept": answer.accept,
        "tokens": answer.tokens,
    }


def _lossless(
    spec: dict[str, Any], chat: ChatFormat, prompts: list[BenchPrompt], parted: list[Divergence]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Greedy in float32: transformers' generate against this engine with the tree, token by token.

    Not timed, so both run at once, on half of the threads each. At the first difference the two tokens' logits are
    compared in float64: closer than 1e-4 is a tie, anything else a mismatch. The same comparison says how close the
    two tokens were where the timed answers, in their own dtype, parted, and how far transformers itself is off there.
    """
    config = spec["config"]
    threads = max(1, spec["threads"] // 2)
    base = _contestants(spec, chat, prompts)[0]
    uncompiled = base.engine.model_copy(update={"compile": "off"})
    base = replace(base, dtype="float32", threads=threads, engine=uncompiled)
    pair = [base, _with_tree(base, MEDUSA, spec["heads"], spec["portfolio"])]
    ids = [chat.first(prompt.turns[0]) for prompt in prompts[: config["lossless_prompts"]]]
    # Left-padded batches of similar length keep the reference cheap; it is still transformers' own greedy decoding.
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    groups = [order[i : i + _REFERENCE_BATCH] for i in range(0, len(order), _REFERENCE_BATCH)]
    workers = start_workers(pair)
    expected: dict[int, list[int]] = {}
    found: dict[int, list[int]] = {}
    try:
        with track("lossless", len(ids), "prompts") as progress, ThreadPoolExecutor(1) as pool:

            def reference() -> None:
                for group in groups:
                    answers = workers[0].answer([ids[i] for i in group], config["lossless_tokens"])
                    expected.update({i: answer.tokens for i, answer in zip(group, answers, strict=True)})

            waiting = pool.submit(reference)
            for index in order:
                found[index] = workers[1].answer([ids[index]], config["lossless_tokens"])[0].tokens
                progress.advance(1)
            waiting.result()
        mismatched, ties, worst = 0, 0, 0.0
        for index in order:
            place = first_difference(expected[index], found[index])
            if place is None:
                continue
            both = expected[index][place : place + 1] + found[index][place : place + 1]
            gap = _gap(workers[0], ids[index] + expected[index][:place], both)
            worst = max(worst, gap)
            ties += gap < TIE_GAP
            mismatched += gap >= TIE_GAP
        gaps = [
            {"prompt_id": d.prompt_id, "turn": d.turn, "position": d.position}
            | {"gap": _finite(_gap(workers[0], d.before, d.both))}
            | {"rounding": _finite(_rounding(workers[0], config["dtype"], d))}
            for d in parted
        ]
    finally:
        for worker in workers:
            worker.close()
    return {
        "dtype": "float32",
        "prompts": len(ids),
        "tokens": sum(len(tokens) for tokens in found.values()),
        "mismatched_prompts": mismatched,
        "ties": ties,
        "worst_gap": _finite(worst),
    }, gaps


def _finite(gap: float) -> float | None:
    """JSON has no infinity: None where one of the answers just ended."""
    return None if gap == float("inf") else gap


def _gap(worker: Worker, before: list[int], both: list[int]) -> float:
    """Float64 logit gap of two tokens after `before`; infinite if one of the answers just ends there."""
    return abs(worker.gap("float64", before, both[0], both[1])) if len(both) == 2 else float("inf")


def _rounding(worker: Worker, dtype: str, parted: Divergence) -> float:
    """By how much transformers' own gap of the two tokens, in one pass in this dtype, is off the float64 one."""
    if len(parted.both) < 2:
        return float("inf")
    low, exact = (worker.gap(each, parted.before, *parted.both) for each in (dtype, "float64"))
    return abs(low - exact)


def first_difference(left: list[int], right: list[int]) -> int | None:
    """Index of the first difference of two answers, None if they are equal; a missing token differs too."""
    for index in range(max(len(left), len(right))):
        if left[index : index + 1] != right[index : index + 1]:
            return index
    return None
