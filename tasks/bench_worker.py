"""One benchmark contestant in a process of its own: loads its engine, then answers one prompt at a time on request.

A process each gives every contestant its own memory figure and keeps one's compiler or caches out of another's times;
the parent asks them in turn, so only one works at any moment. Knows nothing of comparisons.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import CompileConfig, StaticCache, StoppingCriteria, StoppingCriteriaList

from infra.fresh_process import FreshProcess
from infra.machine import peak_resident_mb, reset_peak_resident, resident_mb
from medusa_core.request import StepSeconds
from medusa_core.sampling import SamplingParams
from medusa_core.tree import Tree
from tasks.backbone import load_model
from tasks.engine import EngineConfig, load_engine
from tasks.stage import dtype_of

KINDS = ("transformers", "transformers-compiled", "transformers-lookup", "plain", "medusa")
_LOOKUP_TOKENS = 10


@dataclass(frozen=True)
class Contestant:
    """What a worker loads. `name` is shown; `kind` is one of KINDS; heads and choices matter to `medusa` only."""

    name: str
    kind: str
    model: str
    eos_token_ids: tuple[int, ...]
    dtype: str
    device: str
    threads: int
    slots: int = 2048
    heads: str | None = None
    backbone_digest: str | None = None
    choices: tuple[tuple[int, ...], ...] = ()
    engine: EngineConfig = field(default_factory=lambda: EngineConfig(compile="off"))


@dataclass
class Answer:
    """One prompt answered: tokens with end-of-text, seconds from the prompt's ids to the last token, and parts."""

    tokens: list[int]
    seconds: float
    ttft: float
    steps: int
    draft: float = 0.0
    verify: float = 0.0
    accept: float = 0.0


class Worker:
    """The parent's handle on a contestant's process."""

    def __init__(self, contestant: Contestant) -> None:
        self.contestant = contestant
        self.loaded: dict[str, float] = {}
        self._process = FreshProcess(f"benchmark's {contestant.name}", _Runner, contestant)

    def load(self) -> None:
        """Loads and warms up; `loaded` then holds the seconds of both."""
        self.loaded = self._process.call("load")

    def answer(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Answer]:
        answers: list[Answer] = self._process.call("answer", prompts, max_new_tokens)
        return answers

    def gap(self, dtype: str, prefix: Sequence[int], first: int, second: int) -> float:
        """The first token's logit less the second's after `prefix`, by transformers in one pass in a dtype; afterwards
        the worker only does this."""
        return float(self._process.call("gap", dtype, prefix, first, second))

    def memory_mb(self) -> float:
        """Peak growth of resident memory since the imports."""
        return float(self._process.call("memory"))

    def close(self) -> None:
        self._process.close()


def start_workers(contestants: Sequence[Contestant]) -> list[Worker]:
    """Starts every contestant's process, then lets one after the other load, so that no two load at once."""
    with ExitStack() as started:
        workers = [Worker(contestant) for contestant in contestants]
        for worker in workers:
            started.callback(worker.close)
        for worker in workers:
            worker.load()
        started.pop_all()
    return workers


class _Runner:
    """Lives in the worker process."""

    def __init__(self, contestant: Contestant) -> None:
        torch.set_num_threads(contestant.threads)
        self.contestant = contestant
        self.baseline = resident_mb()
        self._run: Callable[[Sequence[Sequence[int]], int], list[Answer]]
        self.facts: dict[str, float] = {"compile_s": 0.0}
        self._models: dict[str, Any] = {}

    def load(self) -> dict[str, float]:
        """Loads and warms up; seconds of both."""
        reset_peak_resident()
        start = time.perf_counter()
        self._run = self._engine() if self.contestant.kind in ("plain", "medusa") else self._transformers()
        loaded = time.perf_counter()
        # Twice over two lengths: the first call compiles, the second shows whether another length compiles again.
        for length in (9, 17):
            self._run([list(range(5, 5 + length))], 8)
        return {"load_s": loaded - start, "warmup_s": time.perf_counter() - loaded, **self.facts}

    def answer(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Answer]:
        return self._run(prompts, max_new_tokens)

    def memory(self) -> float:
        return peak_resident_mb() - self.baseline

    def gap(self, dtype: str, prefix: Sequence[int], first: int, second: int) -> float:
        if dtype not in self._models:
            model = load_model(Path(self.contestant.model), torch.float32, self.contestant.device)
            self._models[dtype] = model.double() if dtype == "float64" else model.to(dtype_of(dtype))
        with torch.inference_mode():
            ids = torch.tensor([list(prefix)], device=self.contestant.device)
            logits = self._models[dtype](input_ids=ids, logits_to_keep=1).logits[0, -1]
        return float(logits[first].double() - logits[second].double())

    def _engine(self) -> Callable[[Sequence[Sequence[int]], int], list[Answer]]:
        c = self.contestant
        engine = load_engine(
            Path(c.model),
            dtype=dtype_of(c.dtype),
            device=c.device,
            engine=c.engine,
            eos_token_ids=c.eos_token_ids,
            heads=Path(str(c.heads)) if c.kind == "medusa" and c.choices else None,
            backbone_digest=c.backbone_digest,
            tree=Tree.from_choices(c.choices),
        )

        engine.warm_up()
        modules = [engine.model] if engine.heads is None else [engine.model, engine.heads]
        self.facts = {
            "compile_s": engine.compile_seconds,
            "weight_bytes": float(sum(weight_bytes(module) for module in modules)),
        }

        def run(prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Answer]:
            engine.seconds = StepSeconds()
            start = time.perf_counter()
            done = engine.generate(prompts, SamplingParams(max_new_tokens), batch=len(prompts))
            seconds, parts = time.perf_counter() - start, engine.seconds
            return [Answer(g.tokens, seconds, g.ttft_s, g.steps, parts.draft, parts.verify, parts.accept) for g in done]

        return run

    def _transformers(self) -> Callable[[Sequence[Sequence[int]], int], list[Answer]]:
        c = self.contestant
        model = load_model(Path(c.model), dtype_of(c.dtype), c.device)
        self.facts["weight_bytes"] = float(weight_bytes(model))
        options: dict[str, Any] = {"do_sample": False, "eos_token_id": list(c.eos_token_ids)}
        options["pad_token_id"] = c.eos_token_ids[0]
        if c.kind == "transformers-lookup":
            options["prompt_lookup_num_tokens"] = _LOOKUP_TOKENS
        if c.kind == "transformers-compiled":
            # transformers compiles only the decode step, and on a CPU only when told to.
            compile_config = CompileConfig(fullgraph=False, dynamic=False)
            compile_config._compile_all_devices = True
            options["compile_config"] = compile_config

        class FirstToken(StoppingCriteria):  # type: ignore[misc]
            at: float | None = None

            def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
                self.at = self.at or time.perf_counter()
                return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

        def run(prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Answer]:
            first = FirstToken()
            width = max(len(p) for p in prompts)
            ids = torch.tensor([[c.eos_token_ids[0]] * (width - len(p)) + list(p) for p in prompts], device=c.device)
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=c.device)
            if c.kind == "transformers-compiled":
                # One cache length for all prompts, or every prompt would compile anew.
                options["cache"] = StaticCache(config=model.config, max_cache_len=c.slots)
            start = time.perf_counter()
            with torch.inference_mode():
                out = model.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    max_new_tokens=max_new_tokens,
                    stopping_criteria=StoppingCriteriaList([first]),
                    **options,
                )
            seconds = time.perf_counter() - start
            ttft = (first.at or start) - start
            answers = [_cut(row, c.eos_token_ids) for row in out[:, width:].tolist()]
            return [Answer(tokens, seconds, ttft, len(tokens) - 1) for tokens in answers]

        return run


def weight_bytes(module: torch.nn.Module) -> int:
    """Bytes of a module's parameters, tied ones once."""
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def _cut(tokens: list[int], eos: Sequence[int]) -> list[int]:
    """Tokens up to and including the first end-of-text: what follows in a batch is padding."""
    for index, token in enumerate(tokens):
        if token in eos:
            return tokens[: index + 1]
    return tokens
