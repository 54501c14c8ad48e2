"""Prompts to measure on: a split of the pipeline's, or a file in MT-Bench's format. Knows nothing of engines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from infra.errors import UserError
from tasks.prompts import Prompt


@dataclass(frozen=True)
class BenchPrompt:
    """One conversation to answer turn by turn."""

    prompt_id: str
    category: str
    turns: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> BenchPrompt:
        return cls(value["prompt_id"], value["category"], tuple(value["turns"]))


def from_prompts(prompts: Iterable[Prompt], *, max_turns: int, limit: int | None = None) -> list[BenchPrompt]:
    """A split's prompts in measuring order."""
    return stratified([BenchPrompt(p.prompt_id, p.category, p.turns[:max_turns]) for p in prompts], limit)


def read_mt_bench(path: Path, *, max_turns: int, limit: int | None = None) -> list[BenchPrompt]:
    """A JSONL file with `question_id` (or `prompt_id`), `category`, `turns`; UserError names the line that isn't."""
    if not path.is_file():
        raise UserError(f"prompt file {path} does not exist: give a JSONL file with question_id, category and turns")
    prompts = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            turns = row["turns"]
            name = row.get("question_id", row.get("prompt_id", number))
            if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
                raise ValueError("turns must be a list of non-empty strings")
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise UserError(f"{path}, line {number}: no MT-Bench row ({error}): {line[:80]!r}") from None
        prompts.append(BenchPrompt(str(name), str(row.get("category", "general")), tuple(turns[:max_turns])))
    if not prompts:
        raise UserError(f"{path} holds no prompts")
    return stratified(prompts, limit)


def stratified(prompts: Sequence[BenchPrompt], limit: int | None = None) -> list[BenchPrompt]:
    """Round-robin over categories, so that any first n are spread over them as evenly as can be."""
    by_category: dict[str, list[BenchPrompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    queues = [list(queue) for _, queue in sorted(by_category.items())]
    order: list[BenchPrompt] = []
    while any(queues):
        for queue in queues:
            if queue:
                order.append(queue.pop(0))
    return order[:limit]
