"""Trees verified by the Triton kernel instead of a dense mask: the same logits, the same answers. Without a GPU the
kernel is interpreted, so the models are tiny."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from transformers import PreTrainedModel

from kernels import tree_attention as kernel
from kernels.ancestor_bits import tree_mask
from medusa_core import backbone as backbone_module
from medusa_core import ops
from medusa_core.attention import use_tree_attention
from medusa_core.backbone import Backbone
from medusa_core.engine import MedusaEngine
from medusa_core.errors import InputError
from medusa_core.portfolio import Entry, Portfolio
from medusa_core.sampling import SamplingParams
from medusa_core.tree import OFF, Tree, cartesian, chain
from tests.medusa_core.chaos import VOCAB, chaotic_config, greedy, oracle, prompts_of, tiny

pytestmark = pytest.mark.skipif(not kernel.INTERPRETED, reason="interprets kernels; on a GPU tests/gpu runs them")
TREES = [OFF, chain(3), cartesian([4, 3, 2]), cartesian([70])]
GEMMA2 = {
    "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9, "attn_logit_softcapping": 2.0,
    "query_pre_attn_scalar": 20,
}  # fmt: skip
CONFIGS = {
    "llama": chaotic_config(head_dim=64),
    "mistral, window": chaotic_config(hf.MistralConfig, head_dim=64, sliding_window=7),
    "gemma2, soft-cap and alternating windows": chaotic_config(hf.Gemma2Config, head_dim=64, **GEMMA2),
}


def model_of(name: str) -> PreTrainedModel:
    return tiny(CONFIGS[name], torch.float32)


@torch.inference_mode()
@pytest.mark.parametrize("name", CONFIGS)
def test_the_kernel_gives_the_logits_of_the_dense_mask(name: str) -> None:
    """Catches a mask that loses a layer type's window, a scale or cap of the model's left out, and rows swapped."""
    model, logits = model_of(name), {}
    use_tree_attention(model)
    prompts = prompts_of([30, 3, 1])
    lengths = [len(prompt) for prompt in prompts]
    for attention in ("dense", "kernel"):
        backbone = Backbone(model, pack=False, attention=attention)  # type: ignore[arg-type]
        assert backbone.kernel == (attention == "kernel")
        cache = backbone.open(rows=4, slots=max(lengths) + 80)
        first, _ = backbone.prefill(cache, 0, prompts)
        for tree in TREES:
            generator = torch.Generator().manual_seed(tree.nodes)
            tokens = torch.randint(40, (3, tree.nodes), generator=generator)
            logits[attention, tree], _ = backbone.verify(cache, torch.tensor(lengths), max(lengths), tokens, tree)
        logits[attention, None] = first
        backbone.close()
    for tree in (None, *TREES):
        dense, by_kernel = (logits[attention, tree] for attention in ("dense", "kernel"))
        # Weights eightfold let rounding grow over the layers; a wrong key changes logits by their own size.
        assert float((dense - by_kernel).abs().max()) < 2e-3 * float(dense.std()), tree


def test_greedy_answers_are_the_models_own() -> None:
    """Catches compaction, cache and kernel that disagree on where a node lies."""
    model = model_of("llama")
    answers = {tuple(prompt): greedy(model, prompt, 24) for prompt in prompts_of([1, 9, 17])}
    engine = MedusaEngine(model, oracle(model, answers), cartesian([3, 2, 1]), eos_token_ids=[], attention="kernel")
    assert isinstance(engine.backbone, Backbone) and engine.backbone.kernel
    generated = engine.generate([list(prompt) for prompt in answers], SamplingParams(18), batch=2)
    for answer, expected in zip(generated, answers.values(), strict=True):
        assert answer.tokens == expected[:18]
    assert sum(len(answer.tokens) - 1 for answer in generated) > 1.2 * sum(answer.steps for answer in generated)
    engine.close()


def test_warm_up_meets_every_size_of_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a kernel that is first compiled under a request: its tile depends on the number of nodes."""
    model = model_of("llama")
    trees = Portfolio(tuple(Entry(1, context, tree) for context, tree in zip((8, 16, 32), TREES[:3], strict=True)))
    engine = MedusaEngine(model, oracle(model, {(1, 2): [3] * 8}), trees, eos_token_ids=[], attention="kernel")
    seen = set()

    def recorded(*arguments: Any) -> Any:
        seen.add(arguments[-1].nodes)
        return type(engine.backbone).verify(engine.backbone, *arguments)

    monkeypatch.setattr(engine.backbone, "verify", recorded)
    engine.warm_up()
    assert seen == {tree.nodes for tree in trees.trees}


def test_a_prompt_in_pieces_is_a_prompt_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a second piece that doesn't see the first, which went the model's own way."""
    model = model_of("mistral, window")
    use_tree_attention(model)
    backbone = Backbone(model, pack=False)
    whole, _ = backbone.prefill(backbone.open(rows=2, slots=40), 0, prompts_of([31, 12]))
    monkeypatch.setattr(backbone_module, "PREFILL_TOKENS", 10)
    pieces, _ = backbone.prefill(backbone.open(rows=2, slots=40), 0, prompts_of([31, 12]))
    torch.testing.assert_close(whole, pieces, rtol=1e-3, atol=1e-3)


@torch.inference_mode()
def test_a_tree_too_large_for_the_kernel_is_verified_densely() -> None:
    """Catches a tree of 129 nodes that ends a run, compiled steps included: they were compiled with the kernel."""
    model = model_of("llama")
    use_tree_attention(model)
    large, logits = Tree.from_choices([(rank,) for rank in range(130)]), {}
    tokens = torch.arange(large.nodes)[None] % VOCAB
    for attention in ("kernel", "dense"):
        backbone = Backbone(model, pack=False, attention=attention)  # type: ignore[arg-type]
        if attention == "kernel":

            def steps(*arguments: object) -> None:
                raise AssertionError("a compiled step with the kernel was given a dense mask")

            backbone.steps = steps  # type: ignore[assignment]
        cache = backbone.open(rows=1, slots=200)
        backbone.prefill(cache, 0, [[1, 2, 3]])
        logits[attention], _ = backbone.verify(cache, torch.tensor([3]), 3, tokens, large)
        backbone.close()
    torch.testing.assert_close(logits["kernel"], logits["dense"])


def test_without_a_gpu_auto_is_dense_and_asking_for_the_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an engine that starts and fails at its first step, or that quietly does something else than asked."""
    monkeypatch.setattr(kernel, "INTERPRETED", False)
    model = model_of("llama")
    with pytest.raises(InputError, match="needs a GPU"):
        MedusaEngine(model, attention="kernel")
    engine = MedusaEngine(model)
    assert isinstance(engine.backbone, Backbone) and not engine.backbone.kernel
    with pytest.raises(InputError, match="'auto', 'kernel' or 'dense'"):
        MedusaEngine(model, attention="fast")  # type: ignore[arg-type]


def test_heads_that_no_kernel_is_made_for_are_refused() -> None:
    with pytest.raises(InputError, match="keys of 8"):
        MedusaEngine(tiny(chaotic_config(), torch.float32), attention="kernel")


def test_the_operator_can_be_traced() -> None:
    """Catches a fake whose shape or strides differ from what the kernel returns: a compiled step would read garbage."""
    query, cache = torch.randn(2, 4, 3, 64), torch.randn(3, 2, 20, 64)
    words = torch.tensor([[1], [3], [5]]).expand(2, -1, -1)
    mask = tree_mask(torch.tensor([7, 2]), words)
    arguments = (query, cache, cache.clone(), mask, 0.125, None)
    torch.library.opcheck(ops.tree_kernel, arguments, test_utils=("test_schema", "test_faketensor"))
