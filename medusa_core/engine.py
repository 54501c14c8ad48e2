"""The decoding engine: draft, verify, accept, compact, emit, for any decoder-only transformers model.

`DecodingSession` holds the state of a batch whose rows come and go; `MedusaEngine` owns the model and the heads and
offers the plain calls. With the tree "off" the same code is plain decoding. It knows nothing of text.
Legend: B rows, N tree nodes, K heads, V vocabulary, D hidden.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from medusa_core import acceptance
from medusa_core.attention import masks_for, use_tree_attention
from medusa_core.cache import TreeCache
from medusa_core.checkpoint import load_heads
from medusa_core.errors import InputError
from medusa_core.heads import MedusaHeads
from medusa_core.packing import pack_linears
from medusa_core.tap import HiddenTap
from medusa_core.tree import OFF, Tree

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


class MedusaEngine:
    """A backbone with heads and a tree. `heads=None` or the empty tree decode plainly."""

    def __init__(
        self,
        model: PreTrainedModel,
        heads: MedusaHeads | None = None,
        tree: Tree = OFF,
        *,
        eos_token_ids: Sequence[int] | None = None,
        pack: bool = False,
    ) -> None:
        """Switches `model` to tree attention (it still generates as before). `pack` reorders the linear layers'
        weights once (CPU only): faster, at the price of a second copy. InputError for an unsuitable model or tree."""
        _refuse_unsuitable(model)
        use_tree_attention(model)
        self.model = model.eval()
        self.heads = heads
        self.tree = tree
        self._check_tree(tree)
        if pack:
            pack_linears(model)
        self.eos = frozenset(eos_token_ids if eos_token_ids is not None else _eos_of(model))
        self.seconds = StepSeconds()
        self._tap = HiddenTap(model)

    @classmethod
    def from_pretrained(
        cls,
        backbone: str | Path,
        heads: str | Path | None = None,
        *,
        tree: Tree = OFF,
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cpu",
        pack: bool = False,
    ) -> MedusaEngine:
        """Loads a local model directory and, if given, a heads directory; InputError if they don't belong together."""
        model = AutoModelForCausalLM.from_pretrained(str(backbone), dtype=dtype, local_files_only=True).to(device)
        loaded = None if heads is None else load_heads(Path(heads), model, backbone=Path(backbone))
        return cls(model, loaded, tree, pack=pack)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def context_length(self) -> int:
        return int(getattr(self.model.config, "max_position_embeddings", None) or 1 << 30)

    def close(self) -> None:
        """Detaches the engine from the model."""
        self._tap.close()

    def session(self, *, rows: int, slots: int, tree: Tree | None = None) -> DecodingSession:
        """State for up to `rows` concurrent requests of up to `slots` tokens each, tree included."""
        tree = self.tree if tree is None else tree
        self._check_tree(tree)
        return DecodingSession(self, rows=rows, slots=slots, tree=tree)

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams], *, batch: int = 1
    ) -> list[Generation]:
        """Answers of all prompts (token ids), in their order, at most `batch` of them at a time."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise InputError(f"{len(prompts)} prompts, but {len(each)} sets of parameters")
        if not prompts:
            return []
        session = self.session(rows=batch, slots=self.slots_for(prompts, each))
        done: dict[int, Generation] = {}
        queue = list(zip(prompts, each, strict=True))
        order: list[int] = []
        while queue or session.active:
            while queue and session.free:
                added = session.add_request(*queue.pop(0))
                order.append(added.request)
                done[added.request] = added.generation
            session.step()
        return [done[request] for request in order]

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> Iterator[Progress]:
        """One answer as it arrives: each item carries the tokens one step accepted."""
        session = self.session(rows=1, slots=self.slots_for([prompt], [params]))
        yield session.add_request(prompt, params)
        while session.active:
            yield from session.step()

    def slots_for(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> int:
        """Cache slots that hold each of these requests: prompt + budget + tree, never the model's maximum."""
        return max(len(p) + s.max_new_tokens for p, s in zip(prompts, params, strict=True)) + self.tree.nodes

    def forward(
        self,
        cache: TreeCache,
        first_row: int,
        lengths: list[int],
        tokens_BN: torch.Tensor,
        ancestors_NN: torch.Tensor,
        depths_N: torch.Tensor,
        *,
        logits_to_keep: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One backbone pass over nodes placed after each row's prefix: (logits [B, N, V], hidden [B, N, D]).

        Call it under torch.inference_mode, as the session does."""
        nodes = tokens_BN.shape[1]
        cache.place(first_row, lengths, nodes, self.device)
        lengths_B = torch.tensor(lengths, device=self.device)
        # Nodes past the model's last position are cut by the budget, but their position must still be a legal one.
        positions_BN = (lengths_B[:, None] + depths_N).clamp(max=self.context_length - 1)
        mask: Any = masks_for(self.model.config, lengths_B, ancestors_NN, depths_N, slots=cache.extent)
        output = self.model(
            input_ids=tokens_BN,
            position_ids=positions_BN,
            attention_mask=mask,
            cache=cache,
            use_cache=True,
            logits_to_keep=logits_to_keep,
        )
        return output.logits, self._tap.hidden

    def _check_tree(self, tree: Tree) -> None:
        if tree.is_off:
            return
        if self.heads is None:
            raise InputError("a tree needs heads: pass heads, or the empty tree for plain decoding")
        tree.check(num_heads=self.heads.num_heads, max_rank=len(self.heads.vocab_map_C))


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

    @torch.inference_mode()
    def add_request(self, prompt: Sequence[int], params: SamplingParams) -> Progress:
        """Runs the prompt and emits the first token. InputError if no row is free or the prompt doesn't fit."""
        start = time.perf_counter()
        context = self.engine.context_length
        if not self.free:
            raise InputError(f"all {self.capacity} rows are in use: step until one finishes, or open more rows")
        if not prompt:
            raise InputError("the prompt has no tokens; give at least one, for example the start-of-text token")
        if len(prompt) >= context:
            raise InputError(f"the prompt has {len(prompt)} tokens, the model's context is {context}: shorten it")
        params = _within_context(params, context - len(prompt))
        if len(prompt) + params.max_new_tokens + self.tree.nodes > self.cache.slots:
            raise InputError(
                f"prompt ({len(prompt)}) + max_new_tokens ({params.max_new_tokens}) + tree ({self.tree.nodes}) "
                f"exceed the session's {self.cache.slots} slots"
            )
        row = _Row(
            self._next_request,
            params,
            len(prompt),
            Generation(len(prompt)),
            torch.Generator().manual_seed(params.seed),
        )
        self._next_request += 1
        hidden_D, root = self._prefill(prompt, row)
        index = len(self.rows)
        if self._hidden_BD is None:
            self._hidden_BD = hidden_D.new_zeros(self.capacity, hidden_D.shape[0])
        self._hidden_BD[index], self._root_B[index] = hidden_D, root
        self.rows.append(row)
        row.generation.ttft_s = time.perf_counter() - start
        progress = self._emit(row, [root])
        self._drop_finished()
        return progress

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
        chosen_BN = self._choose(logits_BNV)
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

    def _prefill(self, prompt: Sequence[int], row: _Row) -> tuple[torch.Tensor, int]:
        device, length = self.engine.device, len(prompt)
        causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        logits_1NV, hidden_1ND = self.engine.forward(
            self.cache,
            len(self.rows),
            [0],
            torch.tensor([list(prompt)], device=device),
            causal,
            torch.arange(length, device=device),
            logits_to_keep=1,
        )
        return hidden_1ND[0, -1], int(_choose_row(logits_1NV[0, -1:], row)[0])

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

    def _choose(self, logits_BNV: torch.Tensor) -> torch.Tensor:
        chosen_BN = acceptance.choose_greedy(logits_BNV)
        for index, row in enumerate(self.rows):
            if row.params.temperature > 0:
                chosen_BN[index] = _choose_row(logits_BNV[index], row)
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


def _choose_row(logits_NV: torch.Tensor, row: _Row) -> torch.Tensor:
    if row.params.temperature == 0:
        return acceptance.choose_greedy(logits_NV[None])[0]
    uniform_N = torch.rand(logits_NV.shape[0], generator=row.uniforms, dtype=torch.float64).to(logits_NV.device)
    return acceptance.choose_sampled(
        logits_NV, temperature=row.params.temperature, top_p=row.params.top_p, uniform_N=uniform_N
    )


def _within_context(params: SamplingParams, room: int) -> SamplingParams:
    if params.max_new_tokens <= room:
        return params
    return SamplingParams(room, params.temperature, params.top_p, params.seed)


def _eos_of(model: PreTrainedModel) -> list[int]:
    eos = getattr(model.generation_config, "eos_token_id", None)
    if eos is None:
        eos = model.config.eos_token_id
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


def _refuse_unsuitable(model: PreTrainedModel) -> None:
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(f"{type(model).__name__} is an encoder-decoder model; trees need a decoder-only one")
    if model.get_output_embeddings() is None:
        raise InputError(f"{type(model).__name__} has no LM head; load it as a causal language model")
    if getattr(model, "_is_stateful", False):
        raise InputError(f"{type(model).__name__} keeps a recurrent state, which can't be rolled back to a tree's path")
