"""A batch in flight: rows of requests that come and go, advanced together by draft, verify, accept, compact, emit.

Knows how the decode step is put together; the backbone's forward is `backbone`'s, what is accepted is decided in
`acceptance`, what a request asks for and what is kept of it lies in `request`.
Legend: B rows, N tree nodes, K heads, V vocabulary, D hidden, A path length.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from medusa_core import acceptance
from medusa_core.acceptance import Accepted, Draft
from medusa_core.backbone import PREFILL_TOKENS
from medusa_core.errors import InputError
from medusa_core.portfolio import Portfolio
from medusa_core.request import Progress, Row, new_row
from medusa_core.sampling import SamplingParams, process_nodes
from medusa_core.tree import OFF, Tree

if TYPE_CHECKING:
    from medusa_core.engine import MedusaEngine


class DecodingSession:
    """A batch in flight: requests are added while rows are free, `step` advances all of them, finished rows leave.

    Rows 0 .. active-1 are in use; a leaving row is replaced by the last one, so the batch is always a prefix. Between
    steps a row is its cache, its next token (the root) and the hidden state before it: nothing of a tree, so every
    step may use another one.
    """

    def __init__(self, engine: MedusaEngine, *, rows: int, slots: int, portfolio: Portfolio) -> None:
        if rows < 1:
            raise InputError(f"rows is {rows}; a session needs at least 1")
        self.engine = engine
        self.portfolio = portfolio
        self.rows: list[Row] = []
        self.capacity, self.slots = rows, slots
        self.cache = engine.backbone.open(rows=rows, slots=slots)
        device = engine.device
        # Rows that are not in use hold length 0 and token 0, so that a padded step computes something legal there.
        self._length_B = torch.zeros(rows, dtype=torch.int64, device=device)
        self._root_B = torch.zeros(rows, dtype=torch.int64, device=device)
        self._hidden_BD: torch.Tensor | None = None
        self._next_request = 0

    @property
    def active(self) -> int:
        return len(self.rows)

    @property
    def free(self) -> int:
        return self.capacity - len(self.rows)

    @property
    def tree(self) -> Tree:
        """The tree that the next step uses: the portfolio's for so many rows and so long a context."""
        longest = max((row.length for row in self.rows), default=1)
        return self.portfolio.pick(max(self.active, 1), longest)

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
        queue = [
            new_row(self.engine, number, prompt, params, slots=self.slots, nodes=self.portfolio.nodes)
            for number, (prompt, params) in enumerate(requests, self._next_request)
        ]
        self._next_request += len(queue)
        progress = []
        while queue:
            count = 1
            while count < len(queue) and (count + 1) * max(r.length for r in queue[: count + 1]) <= PREFILL_TOKENS:
                count += 1
            progress += self._prefill(queue[:count])
            queue = queue[count:]
        self._drop_finished()
        return progress

    @torch.inference_mode()
    def step(self) -> list[Progress]:
        """One draft-verify-accept-compact-emit round over all active rows."""
        if not self.rows:
            return []
        tree, seconds, start = self.tree, self.engine.seconds, time.perf_counter()
        tokens_BN, drafts = self._draft(tree)
        drafted = time.perf_counter()
        logits_BNV, hidden_BND = self._verify(tokens_BN, tree)
        verified = time.perf_counter()
        accepted = self._accept(tokens_BN, logits_BNV, self.rows, tree, drafts)
        self.cache.compact(self._length_B[: self.active], accepted.path_BA)
        kept = self._commit(accepted, tokens_BN, hidden_BND)
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

    def _prefill(self, added: Sequence[Row]) -> list[Progress]:
        """Runs new rows' prompts in one pass and emits their first tokens."""
        start, first, device = time.perf_counter(), self.active, self.engine.device
        logits_BV, hidden_BD = self.engine.backbone.prefill(self.cache, first, [row.prompt for row in added])
        self.rows += added
        # The prompt's last token is a tree of one node: what follows it is chosen as everywhere else.
        last_B1 = torch.tensor([[row.prompt[-1]] for row in added], device=device)
        root_B = self._accept(last_B1, logits_BV[:, None], added, OFF, {}).next_B
        if self._hidden_BD is None:
            self._hidden_BD = hidden_BD.new_zeros(self.capacity, hidden_BD.shape[-1])
        rows = slice(first, self.active)
        self._hidden_BD[rows], self._root_B[rows] = hidden_BD, root_B
        self._length_B[rows] = torch.tensor([row.length for row in added], device=device)
        emitted = root_B.tolist()
        seconds = time.perf_counter() - start
        for row in added:
            row.generation.ttft_s = seconds
        return [self._emit(row, [root]) for row, root in zip(added, emitted, strict=True)]

    def _draft(self, tree: Tree) -> tuple[torch.Tensor, dict[int, Draft]]:
        """Tokens of every node, [B, N]: the root, then each node's rank among its head's candidates.

        Rows that accept by rejection get draws from the heads instead; what they were drawn from, by row.
        """
        root_B1 = self._root_B[: self.active, None]
        if tree.is_off:
            return root_B1, {}
        drafter, hidden_BD = self.engine.drafter, self._hidden_BD
        assert drafter is not None and hidden_BD is not None
        tokens_BN = drafter.likeliest(hidden_BD[: self.active], self._root_B[: self.active], tree)
        drafts: dict[int, Draft] = {}
        for index, row in enumerate(self.rows):
            if row.drafts_at_random:
                one = slice(index, index + 1)
                distributions = drafter.distributions(hidden_BD[one], tree, row.params.temperature)
                uniform_1N = row.draws(tree.nodes, tokens_BN.device)[None]
                tokens_BN[one], drafts[index] = acceptance.draw_children(
                    self._root_B[one], distributions, tree, uniform_1N
                )
        return tokens_BN, drafts

    def _verify(self, tokens_BN: torch.Tensor, tree: Tree) -> tuple[torch.Tensor, torch.Tensor]:
        """The backbone's logits [B, N, V] and hidden states [B, N, D] of every node."""
        longest = max(row.length for row in self.rows)
        return self.engine.backbone.verify(self.cache, self._length_B[: self.active], longest, tokens_BN, tree)

    def _accept(
        self,
        tokens_BN: torch.Tensor,
        logits_BNV: torch.Tensor,
        rows: Sequence[Row],
        tree: Tree,
        drafts: dict[int, Draft],
    ) -> Accepted:
        """The path each row keeps: all greedy rows at once, then the others one by one."""
        choosing: dict[int, Accepted] = {}
        for index, row in enumerate(rows):
            if row.chooses:
                one = slice(index, index + 1)
                choosing[index] = self._accept_one(row, tokens_BN[one], logits_BNV[one], tree, drafts.get(index))
        if len(choosing) == len(rows):
            return _stacked(list(choosing.values()))
        greedy = acceptance.accept_longest(tokens_BN, acceptance.choose_greedy(logits_BNV), tree.on(tokens_BN.device))
        if not choosing:
            return greedy
        return _stacked([choosing.get(index) or _row_of(greedy, index) for index in range(len(rows))])

    def _accept_one(
        self, row: Row, tokens_1N: torch.Tensor, logits_1NV: torch.Tensor, tree: Tree, draft: Draft | None
    ) -> Accepted:
        params, device = row.params, tokens_1N.device
        layout = tree.on(device)
        if row.processors:
            context_T = torch.tensor([*row.prompt, *row.generation.tokens], device=device)
            logits_1NV = process_nodes(
                logits_1NV[0], context_T=context_T, tokens_N=tokens_1N[0], tree=tree, processors=row.processors
            )[None]
        if params.temperature == 0:
            return acceptance.accept_longest(tokens_1N, acceptance.choose_greedy(logits_1NV), layout)
        if params.acceptance == "typical":
            return acceptance.accept_typical(
                tokens_1N,
                logits_1NV,
                layout,
                temperature=params.temperature,
                epsilon=params.epsilon,
                delta=params.delta,
            )
        target: dict[str, Any] = {"temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p}
        if draft is not None:
            probs_1NV = acceptance.target_probabilities(logits_1NV[0], **target)[None]
            uniforms = row.draws(tree.nodes + 1, device)
            return acceptance.accept_rejection(
                tokens_1N, probs_1NV, draft, tree, uniforms[None, : tree.nodes], uniforms[tree.nodes :]
            )
        chosen_N = acceptance.choose_sampled(logits_1NV[0], **target, uniform_N=row.draws(tree.nodes, device))
        return acceptance.accept_longest(tokens_1N, chosen_N[None], layout)

    def _commit(self, accepted: Accepted, tokens_BN: torch.Tensor, hidden_BND: torch.Tensor) -> list[list[int]]:
        """Advances every row past its path; returns each row's new tokens: the path below the root, the next root."""
        active = self.active
        rows_B = torch.arange(active, device=tokens_BN.device)
        assert self._hidden_BD is not None
        self._hidden_BD[:active] = hidden_BND[rows_B, accepted.node_B]
        self._root_B[:active] = accepted.next_B
        self._length_B[:active] += accepted.length_B
        path_tokens_BA = tokens_BN.gather(1, accepted.path_BA)
        # The step's one read-back: everything the host needs, in one tensor.
        host = torch.cat([accepted.length_B[:, None], accepted.next_B[:, None], path_tokens_BA], 1).tolist()
        kept = []
        for row, (length, root, _, *below) in zip(self.rows, host, strict=True):
            row.length += length
            row.generation.steps += 1
            kept.append([*below[: length - 1], root])
        return kept

    def _emit(self, row: Row, tokens: list[int]) -> Progress:
        """Appends tokens up to what ends the answer: end-of-text, a stop, or the budget, whichever comes first."""
        generation = row.generation
        before = len(generation.tokens)
        for token in tokens:
            generation.tokens.append(token)
            if hit := row.checker.push(token):
                generation.finish_reason, generation.stop_reason = hit.finish_reason, hit.stop_reason
                break
        generation.text = row.checker.text
        return Progress(row.request, generation.tokens[before:], generation)

    def _drop_finished(self) -> None:
        for index in reversed(range(len(self.rows))):
            if self.rows[index].generation.finish_reason is None:
                continue
            last = len(self.rows) - 1
            if index != last:
                assert self._hidden_BD is not None
                self.cache.move_row(last, index, self.rows[last].length)
                for state in (self._hidden_BD, self._root_B, self._length_B):
                    state[index] = state[last].clone()
                self.rows[index] = self.rows[last]
            self.rows.pop()
            self._length_B[last], self._root_B[last] = 0, 0


def _row_of(accepted: Accepted, index: int) -> Accepted:
    one = slice(index, index + 1)
    return Accepted(accepted.node_B[one], accepted.length_B[one], accepted.path_BA[one], accepted.next_B[one])


def _stacked(rows: Sequence[Accepted]) -> Accepted:
    return Accepted(
        torch.cat([row.node_B for row in rows]),
        torch.cat([row.length_B for row in rows]),
        torch.cat([row.path_BA for row in rows]),
        torch.cat([row.next_B for row in rows]),
    )
