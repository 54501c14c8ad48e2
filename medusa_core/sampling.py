"""How one request is to be answered, and what that does to the target's logits before anything is chosen from them.

Knows transformers' logits processors and which context every node of a tree stands for; neither draws nor accepts
(that is `acceptance`), and decides nothing about when an answer ends (that is `stopping`).
Legend: N tree nodes, V vocabulary, T tokens of a context, A path length (tree depth + 1).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from medusa_core.errors import InputError
from medusa_core.tree import Tree

Acceptance = Literal["exact", "rejection", "typical"]
# Token ids [n, T] and scores [n, V] to scores [n, V], as transformers' processors are called.
LogitsProcessor = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class SamplingParams:
    """How one request is answered. temperature 0 is greedy, whatever `acceptance` says.

    top_k 0 and top_p 1 keep the whole distribution. `stop` takes one string or several (a string is a sequence of
    strings too, hence the type) and is kept as a tuple. `acceptance` is how a drafted token is judged at temperature
    above 0: "exact" and "rejection" leave the target's distribution as it is, "typical" does not (epsilon and delta
    are its thresholds, paper section 2.3.1). `logits_processor` are transformers' processors, applied to the target's
    logits; each is called on drafted contexts too, so it must be a function of its arguments.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    top_k: int = 0
    min_new_tokens: int = 0
    n: int = 1
    stop_token_ids: Sequence[int] = ()
    stop: Sequence[str] = ()
    repetition_penalty: float = 1.0
    # Left out of the hash: neither a dict nor every processor has one.
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    acceptance: Acceptance = "exact"
    epsilon: float = 0.09
    delta: float = 0.3
    logits_processor: Sequence[LogitsProcessor] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        if self.logits_processor is not None:
            if not isinstance(self.logits_processor, Sequence) or not all(map(callable, self.logits_processor)):
                raise InputError(f"logits_processor is {self.logits_processor!r}; give a list of processors")
            object.__setattr__(self, "logits_processor", tuple(self.logits_processor))
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        for allowed, otherwise in self._checks():
            if not allowed:
                raise InputError(otherwise)

    def _checks(self) -> Iterable[tuple[bool, str]]:
        """What must hold, and the message where it doesn't. Comparisons are such that NaN fails them."""
        yield self.max_new_tokens >= 1, f"max_new_tokens is {self.max_new_tokens}; ask for at least 1"
        yield (
            0 <= self.min_new_tokens <= self.max_new_tokens,
            f"min_new_tokens is {self.min_new_tokens}; it must lie in 0 .. max_new_tokens ({self.max_new_tokens})",
        )
        yield (
            0 <= self.temperature < math.inf,
            f"temperature is {self.temperature}; use 0 for greedy or a positive number",
        )
        yield self.top_k >= 0, f"top_k is {self.top_k}; use 0 for no limit or a positive number"
        yield 0 < self.top_p <= 1, f"top_p is {self.top_p}; it must lie in (0, 1]"
        yield -(2**63) <= self.seed < 2**63, f"seed is {self.seed}; it must fit in 64 bits"
        yield self.n >= 1, f"n is {self.n}; ask for at least 1 answer"
        yield (
            self.n == 1 or self.temperature > 0,
            f"n is {self.n} at temperature 0, where all answers are the same: ask for 1, or set a temperature",
        )
        for token in self.stop_token_ids:
            yield isinstance(token, int) and token >= 0, f"stop_token_ids has {token!r}; token ids count from 0"
        for string in self.stop:
            yield isinstance(string, str) and bool(string), f"stop has {string!r}; give strings that are not empty"
        yield (
            0 < self.repetition_penalty < math.inf,
            f"repetition_penalty is {self.repetition_penalty}; use 1 for none or another positive number",
        )
        for token, bias in self.logit_bias.items():
            yield isinstance(token, int) and token >= 0, f"logit_bias has token {token!r}; token ids count from 0"
            yield bias < math.inf, f"logit_bias of token {token} is {bias}; use a number, or -inf to forbid the token"
        rules = get_args(Acceptance)
        yield self.acceptance in rules, f"acceptance is {self.acceptance!r}; choose one of {', '.join(rules)}"
        yield 0 < self.epsilon <= 1, f"epsilon is {self.epsilon}; it must lie in (0, 1]"
        yield 0 < self.delta < math.inf, f"delta is {self.delta}; it must be a positive number"


def processors_for(
    params: SamplingParams,
    *,
    prompt_tokens: int,
    eos_token_ids: Iterable[int],
    vocab_size: int,
    device: torch.device | str,
) -> LogitsProcessorList:
    """The processors of one request, in the order of transformers' `generate`; empty if nothing is asked for.

    Made once per request: some keep what they prepared on their first call. InputError for a token id that the
    vocabulary (the width of the logits) doesn't have.
    """
    for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        if unknown := [token for token in ids if token >= vocab_size]:
            raise InputError(f"{name} has token {unknown[0]}; the vocabulary's ids are 0 .. {vocab_size - 1}")
    own: list[LogitsProcessor] = []
    if params.logit_bias:
        bias = {(token,): float(bias) for token, bias in params.logit_bias.items()}
        own.append(SequenceBiasLogitsProcessor(bias))  # type: ignore[arg-type]  # its docstring allows a dict
    if params.repetition_penalty != 1.0:
        own.append(RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty)))
    ends = sorted({*eos_token_ids, *params.stop_token_ids})
    if params.min_new_tokens and ends:
        ends_tensor = torch.tensor(ends, device=device)
        own.append(MinNewTokensLengthLogitsProcessor(prompt_tokens, params.min_new_tokens, ends_tensor))
    return LogitsProcessorList(_merged(own, params.logits_processor or ()))


def _merged(own: Sequence[LogitsProcessor], custom: Sequence[LogitsProcessor]) -> list[LogitsProcessor]:
    """Ours, then the caller's; one of the caller's takes the place of ours of the same type, as in `generate`."""
    merged = [next((mine for mine in custom if type(mine) is type(default)), default) for default in own]
    return merged + [mine for mine in custom if mine not in merged]


def process_nodes(
    logits_NV: torch.Tensor,
    *,
    context_T: torch.Tensor,
    tokens_N: torch.Tensor,
    tree: Tree,
    processors: LogitsProcessorList,
) -> torch.Tensor:
    """The target's logits after every node as the processors leave them, [N, V] float32 as in `generate`.

    Every node has a context of its own: context_T, which ends with the root's token, and the tokens of its path below
    the root. With the empty tree, that is the context alone: so the prompt's last logits go through here too.
    Without processors the logits come back as they are.
    """
    if not processors:
        return logits_NV
    paths_NA = tree.on(tokens_N.device).paths_NA
    processed = []
    # The nodes of one depth have contexts of one length: one call serves them all.
    for depth, level in enumerate(_levels(tree)):
        below_nd = tokens_N[paths_NA[level, 1 : depth + 1]]
        input_ids_nT = torch.cat([context_T.expand(len(below_nd), -1), below_nd], 1)
        # A copy: processors may write into what they are given.
        scores_nV = logits_NV[level].to(torch.float32, copy=True)
        processed.append(processors(input_ids_nT, scores_nV))  # type: ignore[arg-type]  # no function returns LongTensor
    return torch.cat(processed)


def _levels(tree: Tree) -> list[slice]:
    """The nodes of each depth, known without reading a device; they lie together, as nodes follow by depth."""
    levels = [slice(0, 1)]
    for size in Counter(len(path) for path in tree.choices).values():
        levels.append(slice(levels[-1].stop, levels[-1].stop + size))
    return levels
