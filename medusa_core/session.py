"""A batch in flight: rows of requests that come and go, advanced together by draft, verify, accept, compact, emit.

Knows how the decode step is put together; the backbone's forward is the engine's, what is accepted is decided in
`acceptance`, and text is nobody's business here.
Legend: B rows, N tree nodes, K heads, V vocabulary, D hidden, A path length.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import torch

from medusa_core import acceptance
from medusa_core.cache import TreeCache
from medusa_core.errors import InputError
from medusa_core.tree import Tree

if TYPE_CHECKING:
    from medusa_core.engine import MedusaEngine

# Prompts share a pass up to this many tokens, padding included: beyond it a larger product gains nothing.
_PREFILL_TOKENS = 1024

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class SamplingParams:
    """How one request is answered. temperature 0 is greedy; otherwise every token is an exact draw from the target."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise InputError(f"max_new_tokens is {self.max_new_tokens}; ask for at least 1")
        if self.temperature < 0:
            raise InputError(f"temperature is {self.temperature}; use 0 for greedy or a positive number")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p is {self.top_p}; it must lie in (0, 1]")


@dataclass
class Generation:
    """An answer so far: token ids (end-of-text included), why it ended, and how many forward passes it took."""

    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    steps: int = 0
    ttft_s: float = 0.0

    @property
    def tokens_per_step(self) -> float:
        """Tokens emitted per verification; the first token comes from the prompt's own pass and is left out."""
        return (len(self.tokens) - 1) / self.steps if self.steps else 1.0


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
class _Row:
    request: int
    params: SamplingParams
    length: int
    generation: Generation
    uniforms: torch.Generator


class DecodingSession:
    """A batch in flight: requests are added while rows are free, `step` advances all of them, finished rows leave.

    Rows 0 .. active-1 are in use; a leaving row is replaced by the last one, so the batch is always a prefix.
    """

    def __init__(self, engine: MedusaEngine, *, rows: int, slots: int, tree: Tree) -> None:
        self.engine = engine
        self.tree = tree
        self.rows: list[_Row] = []
        self.capacity = rows
        layers = engine.model.config.get_text_config().num_hidden_layers
        self.cache = TreeCache(layers=layers, rows=rows, slots=slots)
        device = engine.device
        self._depths_N, self._ranks_N = tree.depths_N.to(device), tree.ranks_N.to(device)
        self._ancestors_NN = tree.ancestors_NN.to(device)
        self._root_B = torch.zeros(rows, dtype=torch.int64, device=device)
        self._hidden_BD: torch.Tensor | None = None
        self._next_request = 0

    @property
    def active(self) -> int:
        return len(self.rows)

    @property
    def free(self) -> int:
        return self.capacity - len(self.rows)

    def add_request(self, prompt: Sequence[int], params: SamplingParams) -> Progress:
        """Runs the prompt and emits the first token. InputError if no row is free or the prompt doesn't fit."""
        return self.add_requests([(prompt, params)])[0]

    @torch.inference_mode()
    def add_requests(self, requests: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[Progress]:
        """Runs several prompts, as many in one pass as are worth their padding; InputError, and nothing run, if there
        are fewer free rows or one of them doesn't fit."""
        if len(requests) > self.free:
            raise InputError(
                f"{len(requests)} more requests, but {self.free} of {self.capacity} rows are free: "
                "step until one finishes, or open more rows"
            )
        queue = [(prompt, self._fitted(prompt, params)) for prompt, params in requests]
        progress = []
        while queue:
            count = 1
            while count < len(queue) and (count + 1) * max(len(p) for p, _ in queue[: count + 1]) <= _PREFILL_TOKENS:
                count += 1
            progress += self._prefill(queue[:count])
            queue = queue[count:]
        self._drop_finished()
        return progress

    def _fitted(self, prompt: Sequence[int], params: SamplingParams) -> SamplingParams:
        """The parameters with their budget cut to the model's context; InputError for a prompt that can't be run."""
        context = self.engine.context_length
        if not prompt:
            raise InputError("the prompt has no tokens; give at least one, for example the start-of-text token")
        if len(prompt) >= context:
            raise InputError(f"the prompt has {len(prompt)} tokens, the model's context is {context}: shorten it")
        room = context - len(prompt)
        if params.max_new_tokens > room:
            params = replace(params, max_new_tokens=room)
        if len(prompt) + params.max_new_tokens + self.tree.nodes > self.cache.slots:
            raise InputError(
                f"prompt ({len(prompt)}) + max_new_tokens ({params.max_new_tokens}) + tree ({self.tree.nodes}) "
                f"exceed the session's {self.cache.slots} slots"
            )
        return params

    @torch.inference_mode()
    def step(self) -> list[Progress]:
        """One draft-verify-accept-compact-emit round over all active rows."""
        if not self.rows:
            return []
        seconds, lengths = self.engine.seconds, [row.length for row in self.rows]
        start = time.perf_counter()
        tokens_BN = self._draft()
        drafted = time.perf_counter()
        logits_BNV, hidden_BND = self.engine.forward(
            self.cache, 0, lengths, tokens_BN, self._ancestors_NN, self._depths_N
        )
        verified = time.perf_counter()
        chosen_BN = self._choose(logits_BNV, self.rows)
        accepted = acceptance.accept_longest(tokens_BN, chosen_BN, self.tree)
        self.cache.compact(lengths, accepted.path_BA)
        kept = self._commit(accepted, tokens_BN, chosen_BN, hidden_BND)
        seconds.draft += drafted - start
        seconds.verify += verified - drafted
        seconds.accept += time.perf_counter() - verified
        seconds.steps += 1
        progress = [self._emit(row, new) for row, new in zip(self.rows, kept, strict=True)]
        self._drop_finished()
        return progress

    @torch.inference_mode()
    def cancel(self, request: int) -> None:
        """Drops a request; InputError if it isn't active."""
        for row in self.rows:
            if row.request == request:
                row.generation.finish_reason = "cancelled"
                self._drop_finished()
                return
        raise InputError(f"request {request} is not active; active are {[row.request for row in self.rows]}")

    def _prefill(self, requests: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[Progress]:
        """One pass over prompts padded to the longest; what the padding leaves in the cache lies past their lengths."""
        start, first = time.perf_counter(), len(self.rows)
        device = self.engine.device
        lengths = [len(prompt) for prompt, _ in requests]
        width = max(lengths)
        tokens_BN = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt, _ in requests], device=device)
        logits_B1V, hidden_B1D = self.engine.forward(
            self.cache,
            first,
            [0] * len(requests),
            tokens_BN,
            torch.ones(width, width, dtype=torch.bool, device=device).tril(),
            torch.arange(width, device=device),
            only_B=torch.tensor(lengths, device=device) - 1,
        )
        for length, (_, params) in zip(lengths, requests, strict=True):
            uniforms = torch.Generator().manual_seed(params.seed)
            self.rows.append(_Row(self._next_request, params, length, Generation(length), uniforms))
            self._next_request += 1
        if self._hidden_BD is None:
            self._hidden_BD = hidden_B1D.new_zeros(self.capacity, hidden_B1D.shape[-1])
        rows = slice(first, len(self.rows))
        root_B = self._choose(logits_B1V, self.rows[rows])[:, 0]
        self._hidden_BD[rows], self._root_B[rows] = hidden_B1D[:, 0], root_B
        seconds = time.perf_counter() - start
        progress = []
        for row, root in zip(self.rows[rows], root_B.tolist(), strict=True):
            row.generation.ttft_s = seconds
            progress.append(self._emit(row, [root]))
        return progress

    def _draft(self) -> torch.Tensor:
        """Tokens of every node, [B, N]: the root, then each node's rank among its head's candidates."""
        active = len(self.rows)
        root_B1 = self._root_B[:active, None]
        if self.tree.is_off:
            return root_B1
        heads, hidden_BD = self.engine.heads, self._hidden_BD
        assert heads is not None and hidden_BD is not None
        top_BKW = heads.top_tokens(hidden_BD[:active], num_heads=self.tree.depth, width=self.tree.width)
        return torch.cat([root_B1, top_BKW[:, self._depths_N[1:] - 1, self._ranks_N[1:]]], 1)

    def _choose(self, logits_BNV: torch.Tensor, rows: Sequence[_Row]) -> torch.Tensor:
        """The target's choice after each node of these rows, [B, N]."""
        chosen_BN = acceptance.choose_greedy(logits_BNV)
        for index, row in enumerate(rows):
            if row.params.temperature > 0:
                nodes = logits_BNV.shape[1]
                uniform_N = torch.rand(nodes, generator=row.uniforms, dtype=torch.float64).to(logits_BNV.device)
                chosen_BN[index] = acceptance.choose_sampled(
                    logits_BNV[index],
                    temperature=row.params.temperature,
                    top_p=row.params.top_p,
                    uniform_N=uniform_N,
                )
        return chosen_BN

    def _commit(
        self,
        accepted: acceptance.Accepted,
        tokens_BN: torch.Tensor,
        chosen_BN: torch.Tensor,
        hidden_BND: torch.Tensor,
    ) -> list[list[int]]:
        """Advances every row past its path; returns each row's new tokens: the path below the root, the next root."""
        active = len(self.rows)
        rows_B = torch.arange(active, device=tokens_BN.device)
        root_B = chosen_BN[rows_B, accepted.node_B]
        assert self._hidden_BD is not None
        self._hidden_BD[:active] = hidden_BND[rows_B, accepted.node_B]
        self._root_B[:active] = root_B
        path_tokens_BA = tokens_BN.gather(1, accepted.path_BA)
        # The step's one read-back: everything the host needs, in one tensor.
        host = torch.cat([accepted.length_B[:, None], root_B[:, None], path_tokens_BA], 1).tolist()
        kept = []
        for row, (length, root, _, *below) in zip(self.rows, host, strict=True):
            row.length += length
            row.generation.steps += 1
            kept.append([*below[: length - 1], root])
        return kept

    def _emit(self, row: _Row, tokens: list[int]) -> Progress:
        """Appends tokens up to end-of-text or the budget, whichever comes first."""
        generation = row.generation
        before = len(generation.tokens)
        for token in tokens:
            generation.tokens.append(token)
            if token in self.engine.eos:
                generation.finish_reason = "stop"
            elif len(generation.tokens) == row.params.max_new_tokens:
                generation.finish_reason = "length"
            if generation.finish_reason:
                break
        return Progress(row.request, generation.tokens[before:], generation)

    def _drop_finished(self) -> None:
        for index in reversed(range(len(self.rows))):
            if self.rows[index].generation.finish_reason is None:
                continue
            last = len(self.rows) - 1
            if index != last:
                assert self._hidden_BD is not None
                self.cache.move_row(last, index, self.rows[last].length)
                self._hidden_BD[index], self._root_B[index] = self._hidden_BD[last].clone(), self._root_B[last].clone()
                self.rows[index] = self.rows[last]
            self.rows.pop()
