"""The decoding engine for any decoder-only transformers model: a backbone with heads and a tree, and the plain calls.

The decode step itself is `session.DecodingSession.step`. With the tree "off" the same code is plain decoding.
It knows nothing of text.
Legend: B rows, N tree nodes, V vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from medusa_core.attention import masks_for, use_tree_attention
from medusa_core.cache import TreeCache
from medusa_core.checkpoint import load_heads
from medusa_core.errors import InputError
from medusa_core.heads import MedusaHeads
from medusa_core.packing import pack_linears
from medusa_core.session import DecodingSession, Generation, Progress, SamplingParams, StepSeconds
from medusa_core.tap import HiddenTap
from medusa_core.tree import OFF, Tree


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
        model: Any = AutoModelForCausalLM.from_pretrained(str(backbone), dtype=dtype, local_files_only=True)
        model = model.to(device)
        loaded = None if heads is None else load_heads(Path(heads), model, backbone=Path(backbone))
        return cls(model, loaded, tree, pack=pack)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

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
            asked, queue = queue[: session.free], queue[session.free :]
            for added in session.add_requests(asked):
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
        only_B: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One backbone pass over nodes placed after each row's prefix: (logits [B, N, V], hidden [B, N, D]).

        With `only_B`, logits and hidden state of that one node of each row (N = 1 in what is returned).
        Call it under torch.inference_mode, as the session does.
        """
        cache.place(first_row, lengths, tokens_BN.shape[1], self.device)
        lengths_B = torch.tensor(lengths, device=self.device)
        # Nodes past the model's last position are cut by the budget, but their position must still be a legal one.
        positions_BN = (lengths_B[:, None] + depths_N).clamp(max=self.context_length - 1)
        mask: Any = masks_for(self.model.config, lengths_B, ancestors_NN, depths_N, slots=cache.extent)
        with self._tap.only(only_B):
            output = self.model(
                input_ids=tokens_BN, position_ids=positions_BN, attention_mask=mask, cache=cache, use_cache=True
            )
        return output.logits, self._tap.hidden

    def _check_tree(self, tree: Tree) -> None:
        if tree.is_off:
            return
        if self.heads is None:
            raise InputError("a tree needs heads: pass heads, or the empty tree for plain decoding")
        tree.check(num_heads=self.heads.num_heads, max_rank=len(self.heads.vocab_map_C))


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
