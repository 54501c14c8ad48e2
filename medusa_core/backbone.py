"""A transformers model made to verify trees: one pass over nodes placed after each row's prefix, eager or compiled.

It looks at the model once, through a forward of two tokens: what its cache keeps per layer, which linear layers read
the same input, and whether a tree verified in one pass gives what the model says of each path on its own.
Knows nothing of heads, acceptance or requests.
Legend: B rows, N nodes, V vocabulary, D hidden, S cache slots.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import torch
from transformers import DynamicCache, PreTrainedModel

from kernels.launch_plan import MAX_NODES
from kernels.reference import compact_cache
from medusa_core.attention import kernel_masks_for, masks_for, share_rotary_tables, why_no_kernel
from medusa_core.cache import LayerShape, TreeCache
from medusa_core.compiling import CompiledSteps
from medusa_core.errors import UnsupportedByTreeAttention
from medusa_core.packing import LinearCalls, pack_linears
from medusa_core.tap import HiddenTap
from medusa_core.tree import OFF, Tree, chain

AttentionMode = Literal["auto", "kernel", "dense"]
# Prompts share a pass up to this many tokens, padding included: beyond it a larger product gains nothing, and longer
# prompts are run in pieces of this size, so that the memory of a pass has a bound.
PREFILL_TOKENS = 1024
# Attention reads the cache up to the longest row, rounded up: fewer shapes, at little cost.
_EXTENT = {"cpu": 64, "cuda": 256}
# How far logits may lie apart, relative to their spread, between one pass over a tree and a pass for each path.
_CHECK_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}
# Rows of that check, half of them with a prefix of one token less.
_CHECK_ROWS = 6


class StepCache(Protocol):
    """What a session asks of a cache; `cache.TreeCache` says what the calls mean."""

    def compact(self, start_B: torch.Tensor, path_BA: torch.Tensor) -> None: ...
    def move_row(self, source: int, target: int, length: int) -> None: ...


class Verifier(Protocol):
    """What a session asks of a backbone: `Backbone`, or `copies.CopyingBackbone`."""

    model: PreTrainedModel
    device: torch.device
    context_length: int
    steps: CompiledSteps | None
    # Whether the Triton kernel verifies its trees.
    kernel: bool

    def open(self, *, rows: int, slots: int) -> StepCache: ...
    def prefill(
        self, cache: Any, first_row: int, prompts: Sequence[Sequence[int]]
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def verify(
        self, cache: Any, start_B: torch.Tensor, longest: int, tokens_BN: torch.Tensor, tree: Tree
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def close(self) -> None: ...


class Backbone:
    """The model behind an engine. `use_tree_attention` was applied; a model keeps generating on its own as before."""

    steps: CompiledSteps | None

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        pack: bool,
        attention: AttentionMode = "auto",
        may_compile: Callable[[bool], bool] | None = None,
    ) -> None:
        """`may_compile` is asked once for caches of one row (True) and once for others, before a step is compiled for
        them; without it nothing is. UnsupportedByTreeAttention for a model, or for the kernel if that is asked for."""
        self.model = model
        self.device: torch.device = model.device
        self.context_length = context_length(model)
        self._config = model.config.get_text_config()
        self._cache_argument = cache_argument(model)
        calls = LinearCalls(model)
        try:
            self.shapes = _layer_shapes(model, self._cache_argument)
        finally:
            groups = calls.groups()
        why_not = (
            "it was not asked for" if attention == "dense" else why_no_kernel(self.device, model.dtype, self.shapes)
        )
        if attention == "kernel" and why_not:
            raise UnsupportedByTreeAttention(f"the kernel can't verify its trees: {why_not}")
        self.kernel = why_not is None
        self._compact = compact_cache
        if self.kernel:
            # Imports triton, which need not be installed.
            from kernels import compaction

            self._compact = compaction.compact_cache
        if pack:
            pack_linears(model, groups)
        # After packing, which replaces the LM head's module.
        self.tap = HiddenTap(model)
        self._rotary_hooks = share_rotary_tables(model)
        self.steps = None if may_compile is None else CompiledSteps(self._run, may_compile)

    def open(self, *, rows: int, slots: int) -> TreeCache:
        """A cache for `rows` rows of `slots` tokens, tree included."""
        return TreeCache(
            self.shapes,
            rows=rows,
            slots=slots,
            dtype=self.model.dtype,
            device=self.device,
            compact=self._compact,
        )

    def prefill(
        self, cache: TreeCache, first_row: int, prompts: Sequence[Sequence[int]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs prompts into consecutive rows: logits [B, V] and hidden state [B, D] after the last token of each.

        They are padded to the longest; what the padding leaves in the cache lies past their lengths and is never seen.
        The first piece of them goes the model's own way, without a mask of ours.
        """
        ends = [len(prompt) for prompt in prompts]
        width, device = max(ends), self.device
        padded_BT = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts], device=device)
        ends_B = torch.tensor(ends, device=device)
        piece = max(1, PREFILL_TOKENS // len(prompts))
        logits_BV = hidden_BD = None
        for begin in range(0, width, piece):
            tokens_BN = padded_BT[:, begin : begin + piece]
            nodes = tokens_BN.shape[1]
            start_B = torch.full_like(ends_B, begin)
            depths_N = torch.arange(nodes, device=device)
            last_B = (ends_B - 1 - begin).clamp(0, nodes - 1)
            cache.place(first_row, start_B, end=begin + nodes, fresh=begin == 0)
            mask = None
            if begin:
                causal = torch.ones(nodes, nodes, dtype=torch.bool, device=device).tril()
                mask = self._masks(start_B, causal, depths_N, begin + nodes)
            with self.tap.only(last_B):
                logits, hidden = self._run(cache, tokens_BN, start_B[:, None] + depths_N, mask)
            if logits_BV is None or hidden_BD is None:
                logits_BV, hidden_BD = logits[:, 0].clone(), hidden[:, 0].clone()
                continue
            reached_B1 = (ends_B > begin)[:, None]
            logits_BV = torch.where(reached_B1, logits[:, 0], logits_BV)
            hidden_BD = torch.where(reached_B1, hidden[:, 0], hidden_BD)
        assert logits_BV is not None and hidden_BD is not None
        return logits_BV, hidden_BD

    def verify(
        self, cache: TreeCache, start_B: torch.Tensor, longest: int, tokens_BN: torch.Tensor, tree: Tree
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass over the nodes of rows 0 .. B-1 after their prefixes, the longest of which has `longest` tokens:
        logits [B, N, V] and hidden states [B, N, D]."""
        rows = len(tokens_BN)
        # What was compiled with the kernel can't take the dense mask of a tree that is too large for it.
        if self.steps is None or (self.kernel and tree.nodes > MAX_NODES):
            return self._run(cache, *self._placed(cache, start_B, longest, tokens_BN, tree))
        if self.steps.lacks(rows=cache.rows, nodes=tree.nodes):
            self._compile(self.steps, one_row=cache.rows == 1, one_node=tree.nodes == 1)
        if rows == 1 < cache.rows:
            # A graph for several rows is none for one: a row that is not in use, or no longer, keeps this one company.
            tokens_BN = torch.cat([tokens_BN, tokens_BN.new_zeros(1, tree.nodes)])
            start_B = torch.cat([start_B, start_B.new_zeros(1)])
        logits_BNV, hidden_BND = self.steps(cache, *self._placed(cache, start_B, longest, tokens_BN, tree))
        return logits_BNV[:rows], hidden_BND[:rows]

    def close(self) -> None:
        """Detaches from the model."""
        self.tap.close()
        for hook in self._rotary_hooks:
            hook.remove()

    def _placed(
        self, cache: TreeCache, start_B: torch.Tensor, longest: int, tokens_BN: torch.Tensor, tree: Tree
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | dict[str, torch.Tensor]]:
        """Announces a tree to the cache; what the model is given: tokens, positions [B, N], masks."""
        layout = tree.on(self.device)
        end = longest + tree.nodes
        step = _EXTENT.get(self.device.type, 256)
        cache.place(0, start_B, end=end)
        # Nodes past the model's last position are cut by the budget, but their position must still be a legal one.
        positions_BN = (start_B[:, None] + layout.depths_N).clamp(max=self.context_length - 1)
        extent = min(-(-end // step) * step, cache.slots)
        if self.kernel and tree.nodes <= MAX_NODES:
            return tokens_BN, positions_BN, kernel_masks_for(self._config, start_B, layout.words_NW)
        return tokens_BN, positions_BN, self._masks(start_B, layout.ancestors_NN, layout.depths_N, extent)

    def _compile(self, steps: CompiledSteps, *, one_row: bool, one_node: bool) -> None:
        """Compiles a kind of step on an example of its own, the same in every process."""
        rows, tree = 1 if one_row else 2, OFF if one_node else chain(15)
        cache = self.open(rows=rows, slots=512)
        tokens_BN = torch.zeros(rows, tree.nodes, dtype=torch.int64, device=self.device)
        start_B = torch.full((rows,), 100, device=self.device)
        steps.prepare(cache, *self._placed(cache, start_B, 100, tokens_BN, tree))

    def _masks(
        self, start_B: torch.Tensor, ancestors_NN: torch.Tensor, depths_N: torch.Tensor, extent: int
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        return masks_for(self._config, start_B, ancestors_NN, depths_N, slots=extent, dtype=self.model.dtype)

    def _run(
        self,
        cache: TreeCache,
        tokens_BN: torch.Tensor,
        positions_BN: torch.Tensor,
        mask: torch.Tensor | dict[str, torch.Tensor] | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What is compiled. The extent comes from the mask's shape: an attribute's value would be frozen into it."""
        one = mask["full_attention"] if isinstance(mask, dict) else mask
        if one is None:
            cache.extent = tokens_BN.shape[1]
        else:
            cache.extent = cache.slots if one.dtype == torch.int64 else one.shape[-1]
        output: Any = self.model(
            input_ids=tokens_BN,
            position_ids=positions_BN,
            attention_mask=mask,
            use_cache=True,
            **{self._cache_argument: cache},
        )
        return output.logits, self.tap.hidden


def check_tree_support(model: PreTrainedModel, attention: AttentionMode) -> None:
    """UnsupportedByTreeAttention unless a tree can be verified in one pass of this model."""
    with _as_unsupported("it can't be run with a cache of keys and values"):
        backbone = Backbone(model, pack=False, attention=attention)
    try:
        check_paths(backbone)
        with _as_unsupported("an accepted path can't be kept"), torch.inference_mode():
            start_B, path_BA = (torch.tensor(each, device=backbone.device) for each in ([1], [[0, 2]]))
            backbone.open(rows=1, slots=8).compact(start_B, path_BA)
    finally:
        backbone.close()


@torch.inference_mode()
def check_paths(backbone: Verifier) -> None:
    """UnsupportedByTreeAttention unless a small tree, verified after two prefixes of different lengths, gives what the
    model says of each of its paths in a pass of its own: a model that adds position biases or masks, or keeps no
    cache, would differ silently.

    Several rows of other tokens: where a model is wrong about a node it is so in every row, while rounding in few
    digits can turn a single row's logits into others altogether.
    """
    model, tree = backbone.model, Tree.from_choices([[0], [1], [0, 0], [1, 0]])
    vocab = int(model.get_output_embeddings().weight.shape[0])
    drawn = torch.Generator().manual_seed(0)
    lengths = [3, 2] * (_CHECK_ROWS // 2)
    prefixes = [torch.randint(vocab, (length,), generator=drawn).tolist() for length in lengths]
    tokens_BN = torch.randint(vocab, (_CHECK_ROWS, tree.nodes), generator=drawn)
    with _as_unsupported("a tree can't be verified"), _narrow_window(model):
        cache = backbone.open(rows=_CHECK_ROWS, slots=max(lengths) + tree.nodes + 3)
        backbone.prefill(cache, 0, prefixes)
        start_B = torch.tensor(lengths, device=backbone.device)
        logits_BNV, _ = backbone.verify(cache, start_B, max(lengths), tokens_BN.to(backbone.device), tree)
        apart_BN = torch.zeros(_CHECK_ROWS, tree.nodes, dtype=torch.float64)
        for leaf in (node for node in range(tree.nodes) if node not in tree.parents):
            path = tree.paths_ND[leaf].tolist()
            for length in set(lengths):
                rows = [row for row in range(_CHECK_ROWS) if lengths[row] == length]
                ids = [[*prefixes[row], *tokens_BN[row, path].tolist()] for row in rows]
                alone = model(input_ids=torch.tensor(ids, device=backbone.device), use_cache=False).logits
                for place, row in enumerate(rows):
                    apart_BN[row, path] = _apart(logits_BNV[row, path], alone[place, length:])
        apart = float(apart_BN.median(0).values.max())
        if not apart < _CHECK_TOLERANCE.get(model.dtype, 0.2):
            raise UnsupportedByTreeAttention(f"a verified tree differs from its paths, by {apart:.2g} of the logits")


def _apart(found_TV: torch.Tensor, expected_TV: torch.Tensor) -> torch.Tensor:
    """How far logits lie from others, in shares of what these spread, [T]; infinite for what is no number."""
    found, expected = found_TV.double(), expected_TV.double()
    spread_T = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1).clamp(min=1e-9)
    apart_T: torch.Tensor = (found - expected).norm(dim=-1) / spread_T
    return apart_T.nan_to_num(nan=float("inf")).cpu()


@contextmanager
def _narrow_window(model: PreTrainedModel) -> Iterator[None]:
    """Narrows a sliding window until the few tokens of a check reach past it: a model may name one it doesn't use."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    if window is None:
        yield
        return
    config.sliding_window = min(window, 2)
    try:
        yield
    finally:
        config.sliding_window = window


@contextmanager
def _as_unsupported(what: str) -> Iterator[None]:
    """Turns whatever a model raises into a reason not to decode with it this way."""
    try:
        yield
    except UnsupportedByTreeAttention:
        raise
    except Exception as error:
        raise UnsupportedByTreeAttention(f"{what} ({type(error).__name__}: {error})") from error


def context_length(model: PreTrainedModel) -> int:
    """Positions the engine decodes: those the model has been made for; very many where its configuration sets no limit.

    A "longrope" model rotates everything by other tables once the longest row of a pass is past its original context.
    Up to there one set of tables serves all rows and trees exactly, so there the engine's context ends.
    """
    config = model.config.get_text_config()
    limit = int(getattr(config, "max_position_embeddings", None) or 1 << 30)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        original = rope.get("original_max_position_embeddings")
        original = original or getattr(config, "original_max_position_embeddings", None)
        return min(limit, int(original or limit))
    return limit


def cache_argument(model: PreTrainedModel) -> str:
    """The name of the forward's cache argument; models older than transformers 5.24 say past_key_values."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


@torch.inference_mode()
def _layer_shapes(model: PreTrainedModel, argument: str) -> list[LayerShape]:
    """What each layer keeps of a token, seen in a forward over two."""
    cache = DynamicCache()
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    model(input_ids=tokens, use_cache=True, **{argument: cache})
    shapes = []
    for layer in cache.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.dim() != 4:
            raise UnsupportedByTreeAttention("its cache keeps something other than keys and values of four dimensions")
        shapes.append(LayerShape(keys.shape[1], keys.shape[3], values.shape[3]))
    if not shapes:
        raise UnsupportedByTreeAttention("it did not use the cache it was given")
    return shapes
