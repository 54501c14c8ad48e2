"""One request and its answer: what is kept of it while it is decoded, and the checks before it may run.

Knows what an engine can hold; nothing of how a batch is advanced.
Legend: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import torch
from transformers import LogitsProcessorList

from medusa_core.errors import InputError
from medusa_core.sampling import SamplingParams, processors_for
from medusa_core.stopping import StopChecker

if TYPE_CHECKING:
    from medusa_core.engine import MedusaEngine

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Usage:
    """Token counts of one answer: an answer's end-of-text token counts, its drafted tokens that were refused don't."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass
class Generation:
    """An answer so far: token ids (end-of-text included), why it ended, and how many forward passes it took.

    `stop_reason` is the token id or the string that ended it; `text` is filled where stop strings were asked for, and
    ends before them.
    """

    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    text: str | None = None
    steps: int = 0
    ttft_s: float = 0.0

    @property
    def tokens_per_step(self) -> float:
        """Tokens emitted per verification; the first token comes from the prompt's own pass and is left out."""
        return (len(self.tokens) - 1) / self.steps if self.steps else 1.0

    @property
    def usage(self) -> Usage:
        return Usage(self.prompt_tokens, len(self.tokens))


@dataclass(frozen=True)
class Progress:
    """What one call added to one request; `generation` is the request's whole answer so far."""

    request: int
    tokens: list[int]
    generation: Generation


@dataclass
class StepSeconds:
    """Seconds spent in each part of the decode step, summed over steps."""

    draft: float = 0.0
    verify: float = 0.0
    accept: float = 0.0
    steps: int = 0


@dataclass
class Row:
    """A request in flight; `length` counts its tokens in the cache."""

    request: int
    params: SamplingParams
    prompt: Sequence[int]
    length: int
    generation: Generation
    processors: LogitsProcessorList
    checker: StopChecker
    uniforms: torch.Generator

    @property
    def chooses(self) -> bool:
        """Whether this row needs more than the argmax of the target."""
        return self.params.temperature > 0 or len(self.processors) > 0

    @property
    def drafts_at_random(self) -> bool:
        return self.params.temperature > 0 and self.params.acceptance == "rejection"

    def draws(self, count: int, device: torch.device) -> torch.Tensor:
        """Uniforms of this request's own generator, [count] float64: no other row changes them."""
        return torch.rand(count, generator=self.uniforms, dtype=torch.float64).to(device)


def new_row(
    engine: MedusaEngine, request: int, prompt: Sequence[int], params: SamplingParams, *, slots: int, nodes: int
) -> Row:
    """A checked request, of that number, for a session of so many slots a row and trees of up to so many nodes.

    Its budget is cut to the model's context; InputError for what can't be run.
    """
    vocabulary, context = engine.vocab_size, engine.context_length
    if params.n > 1:
        raise InputError(f"n is {params.n}; add a request for each sequence, or call the engine's generate")
    if not prompt:
        raise InputError("the prompt has no tokens; give at least one, for example the start-of-text token")
    if wrong := [token for token in prompt if not 0 <= token < vocabulary]:
        raise InputError(f"the prompt has token {wrong[0]}; the vocabulary's ids are 0 .. {vocabulary - 1}")
    if len(prompt) >= context:
        raise InputError(f"the prompt has {len(prompt)} tokens, the model's context is {context}: shorten it")
    room = context - len(prompt)
    if params.max_new_tokens > room:
        params = replace(params, max_new_tokens=room, min_new_tokens=min(params.min_new_tokens, room))
    if len(prompt) + params.max_new_tokens + nodes > slots:
        raise InputError(
            f"prompt ({len(prompt)}) + max_new_tokens ({params.max_new_tokens}) + tree ({nodes}) "
            f"exceed the session's {slots} slots"
        )
    processors = processors_for(
        params,
        prompt_tokens=len(prompt),
        eos_token_ids=engine.eos,
        vocab_size=vocabulary,
        device=engine.device,
    )
    return Row(
        request=request,
        params=params,
        prompt=prompt,
        length=len(prompt),
        generation=Generation(len(prompt)),
        processors=processors,
        checker=StopChecker(params, engine.eos, engine.decode if params.stop and engine.tokenizer else None),
        uniforms=torch.Generator().manual_seed(params.seed),
    )
