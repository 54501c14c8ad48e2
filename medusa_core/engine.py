"""The decoding engine for any decoder-only transformers model: a backbone with heads and trees, and the plain calls.

The decode step itself is `session.DecodingSession.step`. With the tree "off" the same code is plain decoding.
Of text it knows only the tokenizer it may be given, for stop strings.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from medusa_core.attention import use_tree_attention
from medusa_core.backbone import (
    AttentionMode,
    Backbone,
    Verifier,
    cache_argument,
    check_paths,
    check_tree_support,
    context_length,
)
from medusa_core.checkpoint import load_heads
from medusa_core.compile_probe import compiles
from medusa_core.compiling import can_compile, use_compiled_operators
from medusa_core.copies import CopyingBackbone
from medusa_core.drafting import Drafter
from medusa_core.errors import InputError, UnsupportedByTreeAttention
from medusa_core.heads import MedusaHeads
from medusa_core.portfolio import Portfolio
from medusa_core.request import Generation, Progress, StepSeconds
from medusa_core.sampling import SamplingParams
from medusa_core.session import DecodingSession
from medusa_core.tree import OFF, Tree

CompileMode = Literal["auto", "on", "off"]
_log = logging.getLogger(__name__)


class Tokenizer(Protocol):
    """What the engine asks of a tokenizer."""

    def decode(self, token_ids: Any, **kwargs: Any) -> Any: ...


class MedusaEngine:
    """A backbone with heads and trees. `heads=None` or the empty tree decode plainly."""

    def __init__(
        self,
        model: PreTrainedModel,
        heads: MedusaHeads | None = None,
        tree: Tree | Portfolio = OFF,
        *,
        eos_token_ids: Sequence[int] | None = None,
        pack: bool = False,
        compile: CompileMode = "off",
        attention: AttentionMode = "auto",
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """Switches `model` to tree attention (it still generates as before).

        `pack` reorders the linear layers' weights once (CPU only): faster, at the price of a second copy. `compile`
        compiles the step: "on" does, "auto" does if a subprocess survives compiling and running it first. `attention`:
        trees are verified by the Triton "kernel" or under a "dense" mask; "auto" takes the kernel where it runs, which
        is on a GPU. InputError for a model or tree that can't be decoded with.
        """
        _refuse_unsuitable(model)
        self.model = model.eval()
        self.portfolio = tree if isinstance(tree, Portfolio) else Portfolio.of(tree)
        self.heads = heads
        for each in self.portfolio.trees:
            self.check_tree(each)
        self.eos = frozenset(eos_token_ids if eos_token_ids is not None else _eos_of(model))
        self.tokenizer = tokenizer
        self.seconds = StepSeconds()
        self.drafter = None if heads is None else Drafter(heads, pack=pack)
        self.backbone: Verifier = _backbone(model, pack=pack, compile=compile, attention=attention)

    @classmethod
    def from_pretrained(
        cls,
        backbone: str | Path,
        heads: str | Path | None = None,
        *,
        tree: Tree | Portfolio = OFF,
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cpu",
        pack: bool = True,
        compile: CompileMode = "off",
        attention: AttentionMode = "auto",
        trust_remote_code: bool = False,
    ) -> MedusaEngine:
        """Loads a local model directory with its tokenizer, if it has one, and, if given, a heads directory; InputError
        if they don't belong together. Code in the model's directory runs only with `trust_remote_code`."""
        where: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trust_remote_code}
        if not Path(backbone).is_dir():
            raise InputError(f"there is no model directory {str(backbone)!r}")
        model: Any = AutoModelForCausalLM.from_pretrained(str(backbone), dtype=dtype, **where)
        model = model.to(torch.device(device))
        loaded = None if heads is None else load_heads(Path(heads), model, backbone=Path(backbone))
        has_tokenizer = (Path(backbone) / "tokenizer_config.json").exists()
        tokenizer = AutoTokenizer.from_pretrained(str(backbone), **where) if has_tokenizer else None
        return cls(model, loaded, tree, pack=pack, compile=compile, attention=attention, tokenizer=tokenizer)

    @property
    def device(self) -> torch.device:
        return self.backbone.device

    @property
    def context_length(self) -> int:
        return self.backbone.context_length

    @property
    def vocab_size(self) -> int:
        return int(self.model.get_output_embeddings().weight.shape[0])

    @property
    def compiled(self) -> bool:
        """Whether steps are compiled."""
        return self.backbone.steps is not None

    @property
    def compile_seconds(self) -> float:
        """What compiling, or loading compiled steps, has taken so far."""
        return 0.0 if self.backbone.steps is None else self.backbone.steps.seconds

    def close(self) -> None:
        """Detaches the engine from the model."""
        self.backbone.close()

    def session(self, *, rows: int, slots: int, tree: Tree | Portfolio | None = None) -> DecodingSession:
        """State for up to `rows` concurrent requests of up to `slots` tokens each, tree included."""
        portfolio = self.portfolio if tree is None else tree if isinstance(tree, Portfolio) else Portfolio.of(tree)
        for each in portfolio.trees:
            self.check_tree(each)
        return DecodingSession(self, rows=rows, slots=slots, portfolio=portfolio)

    @torch.inference_mode()
    def warm_up(self, *, rows: int = 1) -> float:
        """Runs two steps with every kind of tree of the portfolio, which compiles what is to be compiled; seconds."""
        begin = time.perf_counter()
        # Which kernels are launched depends on the tree's size; all else has two kinds of step.
        kinds = {tree.nodes if self.backbone.kernel else tree.is_off: tree for tree in self.portfolio.trees}
        for tree in kinds.values():
            budget = 2 * (tree.depth + 1) + 1
            session = self.session(rows=rows, slots=1 + budget + tree.nodes, tree=tree)
            # End-of-text is kept out, or the answer could be over before a step has run.
            params = SamplingParams(budget, min_new_tokens=budget)
            session.add_requests([([0], params)] * min(rows, 2))
            for _ in range(2):
                session.step()
        self.seconds = StepSeconds()
        return time.perf_counter() - begin

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams], *, batch: int = 1
    ) -> list[Generation]:
        """Answers of all prompts (token ids), in their order, at most `batch` of them at a time.

        A prompt whose parameters say n gives n answers in a row, drawn with the seeds seed .. seed + n - 1.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise InputError(f"{len(prompts)} prompts, but {len(each)} sets of parameters")
        queue = [
            (prompt, replace(one, n=1, seed=one.seed + draw))
            for prompt, one in zip(prompts, each, strict=True)
            for draw in range(one.n)
        ]
        if not queue:
            return []
        session = self.session(rows=batch, slots=self.slots_for(prompts, each))
        done: dict[int, Generation] = {}
        while queue or session.active:
            asked, queue = queue[: session.free], queue[session.free :]
            for added in session.add_requests(asked):
                done[added.request] = added.generation
            session.step()
        return [done[request] for request in sorted(done)]

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> Iterator[Progress]:
        """One answer as it arrives: each item carries the tokens one step accepted."""
        session = self.session(rows=1, slots=self.slots_for([prompt], [params]))
        yield session.add_request(prompt, params)
        while session.active:
            yield from session.step()

    def slots_for(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> int:
        """Cache slots that hold each of these requests: prompt + budget + tree, never the model's maximum."""
        longest = max(len(p) + s.max_new_tokens for p, s in zip(prompts, params, strict=True))
        return min(longest, self.context_length) + self.portfolio.nodes

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids, special tokens left out; InputError without a tokenizer."""
        if self.tokenizer is None:
            raise InputError("this engine has no tokenizer: pass tokenizer=, or load it with from_pretrained")
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def check_tree(self, tree: Tree) -> None:
        """InputError if the heads can't draft this tree."""
        if tree.is_off:
            return
        if self.heads is None:
            raise InputError("a tree needs heads: pass heads, or the empty tree for plain decoding")
        tree.check(num_heads=self.heads.num_heads, max_rank=len(self.heads.vocab_map_C))


def _backbone(model: PreTrainedModel, *, pack: bool, compile: CompileMode, attention: AttentionMode) -> Verifier:
    """The model behind tree attention, or behind copies of its own cache where that can't be."""
    if compile not in ("auto", "on", "off"):
        raise InputError(f"compile is {compile!r}; it is 'auto', 'on' or 'off'")
    if attention not in ("auto", "kernel", "dense"):
        raise InputError(f"attention is {attention!r}; it is 'auto', 'kernel' or 'dense'")
    own_attention = model.config._attn_implementation
    try:
        use_tree_attention(model)
        attention = _checked(model, attention)
    except UnsupportedByTreeAttention as reason:
        model.set_attn_implementation(own_attention)
        if attention == "kernel":
            raise InputError(f"{type(model).__name__} can't be decoded with as asked: {reason}") from reason
        copies = CopyingBackbone(model, cache_argument(model), context_length(model))
        try:
            check_paths(copies)
        except UnsupportedByTreeAttention as neither:
            copies.close()
            raise InputError(
                f"{type(model).__name__} can't be decoded with. In one pass: {reason}. Through copies: {neither}"
            ) from neither
        _log.warning("%s decodes through copies of its cache, slower: %s", type(model).__name__, reason)
        return copies
    return Backbone(
        model,
        pack=pack,
        attention=attention,
        may_compile=_permission(model, pack=pack, attention=attention, mode=compile),
    )


def _checked(model: PreTrainedModel, attention: AttentionMode) -> AttentionMode:
    """How this model's trees are verified, tried; UnsupportedByTreeAttention if nothing allowed does it right."""
    try:
        check_tree_support(model, attention)
        return attention
    except UnsupportedByTreeAttention as reason:
        if attention != "auto" or model.device.type != "cuda":
            raise
        _log.warning("%s is verified under dense masks: with the kernel, %s", type(model).__name__, reason)
    check_tree_support(model, "dense")
    return "dense"


def _permission(
    model: PreTrainedModel, *, pack: bool, attention: AttentionMode, mode: CompileMode
) -> Callable[[bool], bool] | None:
    """Says for caches of one row (True) or several whether their steps may be compiled; None if none may."""
    if mode == "off":
        return None
    why_not = can_compile(model.device)
    if getattr(model.config, "quantization_config", None) is not None:
        why_not = why_not or "its weights are quantized, which the trial in a process of its own can't stand in for"
    if mode == "on":
        if why_not:
            raise InputError(f"compile is 'on', but {why_not}")
        use_compiled_operators(model.device)
        return lambda one_row: True

    @functools.cache
    def survived(one_row: bool) -> bool:
        reason = why_not or compiles(model, pack=pack, attention=attention, one_row=one_row)
        if reason:
            _log.warning("steps run uncompiled: %s", reason)
        return reason is None

    if not survived(True):
        return None
    use_compiled_operators(model.device)
    return survived


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
