"""Decoding through copies of a model's own cache, on models that could do without: what one pass over a tree gives
must come out."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from medusa_core.attention import use_tree_attention
from medusa_core.backbone import Backbone, Verifier, cache_argument, check_paths, context_length
from medusa_core.copies import CopiesCache, CopyingBackbone
from medusa_core.engine import MedusaEngine
from medusa_core.errors import InputError, UnsupportedByTreeAttention
from medusa_core.portfolio import Portfolio
from medusa_core.sampling import SamplingParams
from medusa_core.tree import OFF, Tree, cartesian, chain
from tests.medusa_core.chaos import VOCAB, beyond_root, chaotic_config, chaotic_llama, greedy, oracle, prompts_of, tiny

BUDGET = 30
BUSHY = Tree.from_choices([[0], [1], [2], [0, 0], [0, 1], [1, 0], [2, 2], [0, 0, 0], [0, 1, 0], [1, 0, 2]])
TREES = [OFF, chain(3), cartesian([4]), cartesian([2, 2, 1]), BUSHY]
PROMPTS = prompts_of([1, 7, 4, 12, 2, 9])
LINEAR_ATTENTION = hf.Lfm2Config(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, layer_types=["conv", "full_attention"], eos_token_id=None,
)  # fmt: skip
NO_DECODER = hf.BertConfig(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
)
NO_CACHE = hf.OpenAIGPTConfig(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64)
SINKS = hf.GptOssConfig(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
    num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, sliding_window=8, max_position_embeddings=32,
    eos_token_id=None,
)  # fmt: skip


def copying(model: PreTrainedModel) -> CopyingBackbone:
    return CopyingBackbone(model, cache_argument(model), context_length(model))


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    model = chaotic_llama()
    return [greedy(model, prompt, BUDGET) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def fast(expected: list[list[int]]) -> MedusaEngine:
    """An engine that verifies in one pass."""
    model = chaotic_llama()
    heads = oracle(model, {tuple(p): answer for p, answer in zip(PROMPTS, expected, strict=True)})
    engine = MedusaEngine(model, heads, BUSHY, eos_token_ids=[])
    assert isinstance(engine.backbone, Backbone)
    return engine


@pytest.fixture(scope="module")
def engine(fast: MedusaEngine) -> MedusaEngine:
    """The same engine, through copies, on a model of its own."""
    engine = MedusaEngine(chaotic_llama(), fast.heads, BUSHY, eos_token_ids=[])
    engine.backbone = copying(engine.model)
    return engine


@pytest.fixture(scope="module", params=[None, 3, 2], ids=["full attention", "window 3", "window 2"])
def both(request: pytest.FixtureRequest) -> list[Verifier]:
    """The two ways to verify, over models alike; the windows are narrower than the trees are deep."""
    window = request.param
    config = chaotic_config() if window is None else chaotic_config(hf.MistralConfig, sliding_window=window)
    one_pass = MedusaEngine(tiny(config)).backbone
    assert isinstance(one_pass, Backbone)
    return [copying(tiny(config)), one_pass]


@pytest.mark.parametrize("tree", [*TREES, cartesian([2, 2, 1, 1, 1])])
@torch.inference_mode()
def test_a_tree_over_copies_is_a_tree_in_one_pass(both: list[Verifier], tree: Tree) -> None:
    """Catches a node read off another path or another depth, a row verified on another row's cache, and, in the one
    pass, anything a node sees that its path doesn't: in a window, tree slots count by depth."""
    tokens = torch.tensor(prompts_of([tree.nodes] * 2, seed=9))
    prompts = PROMPTS[1:3]
    start_B = torch.tensor([len(prompt) for prompt in prompts])
    results = []
    for backbone in both:
        cache: Any = backbone.open(rows=2, slots=20 + tree.nodes)
        results.append([*backbone.prefill(cache, 0, prompts), *backbone.verify(cache, start_B, 7, tokens, tree)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_only_the_accepted_path_enters_a_row_s_cache(engine: MedusaEngine) -> None:
    """Catches a verification that leaves its nodes behind, a path's repeated last node run twice, and a path given to
    another row."""
    backbone = engine.backbone
    assert isinstance(backbone, CopyingBackbone)
    cache = backbone.open(rows=2, slots=40)
    prompts, tokens = PROMPTS[1:3], torch.tensor(prompts_of([BUSHY.nodes] * 2, seed=9))
    start_B = torch.tensor([len(prompt) for prompt in prompts])
    backbone.prefill(cache, 0, prompts)
    before = [[layer.keys.clone() for layer in cache.caches[row].layers] for row in range(2)]
    backbone.verify(cache, start_B, 7, tokens, BUSHY)
    for row in range(2):
        for layer, keys in zip(cache.caches[row].layers, before[row], strict=True):
            assert torch.equal(layer.keys, keys)
    # Row 0 keeps the root and one node, row 1 a whole path.
    ends = [BUSHY.choices.index((1,)) + 1, BUSHY.choices.index((0, 1, 0)) + 1]
    path_BA = BUSHY.paths_ND[ends]
    cache.compact(start_B, path_BA)
    for row, length in enumerate((2, 4)):
        kept = [*prompts[row], *tokens[row][path_BA[row, :length]].tolist()]
        alone: Any = backbone.open(rows=1, slots=40)
        backbone.prefill(alone, 0, [kept])
        for ours, theirs in zip(cache.caches[row].layers, alone.caches[0].layers, strict=True):
            torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(ours.values, theirs.values, rtol=1e-4, atol=1e-4)


def test_a_moved_row_takes_its_cache_along(engine: MedusaEngine) -> None:
    """Catches two rows that share one cache after the first of them has left."""
    backbone = engine.backbone
    assert isinstance(backbone, CopyingBackbone)
    cache = CopiesCache(backbone, slots=40, rows=3)
    with torch.inference_mode():
        backbone.prefill(cache, 0, PROMPTS[:3])
    last = cache.caches[2]
    cache.move_row(2, 0, len(PROMPTS[2]))
    assert cache.caches[0] is last and sorted(cache.caches) == [0, 1]


def test_decoding_through_copies_is_plain_decoding(engine: MedusaEngine, expected: list[list[int]]) -> None:
    """Catches anything that differs between the two ways to verify, over rows that come and go."""
    tokens, steps = 0, 0

    @settings(max_examples=25, derandomize=True, deadline=None, database=None)
    @given(
        st.sampled_from(TREES),
        st.lists(st.tuples(st.integers(0, 5), st.integers(1, BUDGET - 3)), min_size=1, max_size=4),
        st.integers(1, 3),
    )
    def run(tree: Tree, requests: list[tuple[int, int]], batch: int) -> None:
        nonlocal tokens, steps
        engine.portfolio = Portfolio.of(tree)
        params = [SamplingParams(budget) for _, budget in requests]
        answers = engine.generate([PROMPTS[index] for index, _ in requests], params, batch=batch)
        assert [answer.tokens for answer in answers] == [expected[index][:budget] for index, budget in requests]
        tokens += sum(len(answer.tokens) - 1 for answer in answers)
        steps += sum(answer.steps for answer in answers)

    run()
    assert tokens / steps > 1.2


@pytest.mark.parametrize("acceptance", ["exact", "rejection", "typical"])
def test_sampled_answers_are_the_same_through_copies(engine: MedusaEngine, fast: MedusaEngine, acceptance: Any) -> None:
    """Catches uniforms spent differently, or options that only one of the two ways regards."""
    engine.portfolio = fast.portfolio = Portfolio.of(BUSHY)
    params = [
        SamplingParams(20, temperature=3.0, seed=seed, top_k=8, repetition_penalty=1.2, acceptance=acceptance)
        for seed in range(6)
    ]
    ours, theirs = (each.generate(PROMPTS, params, batch=2) for each in (engine, fast))
    assert [answer.tokens for answer in ours] == [answer.tokens for answer in theirs]
    assert beyond_root(ours) > 0


def test_it_offers_no_compiled_steps(engine: MedusaEngine) -> None:
    """Catches an engine that asks a backbone of copies for what only the other one has."""
    assert not engine.compiled
    assert engine.context_length == 128
    assert engine.warm_up(rows=2) > 0
    model = tiny(SINKS)
    through_copies = MedusaEngine(model, pack=True)
    assert isinstance(through_copies.backbone, CopyingBackbone)
    assert through_copies.generate([[1, 2]], SamplingParams(5))[0].tokens == greedy(model, [1, 2], 5)


def test_the_context_limit_ends_answers_exactly() -> None:
    """Catches a tree that sticks out past the model's last position, which ends the whole batch with an error."""
    model = tiny(chaotic_config(max_position_embeddings=32))
    prompts = prompts_of([20, 30])
    answers = [greedy(model, prompt, 32 - len(prompt)) for prompt in prompts]
    heads = oracle(model, {tuple(prompts[0]): answers[0]})
    engine = MedusaEngine(model, heads, chain(3), eos_token_ids=[])
    engine.backbone = copying(model)
    generated = engine.generate(prompts, SamplingParams(64), batch=2)
    assert [answer.tokens for answer in generated] == answers
    assert {answer.finish_reason for answer in generated} == {"length"}


def test_a_model_that_fell_back_is_left_without_recorders() -> None:
    """Catches hooks that keep the input of every linear layer of every forward, for as long as the model lives."""
    model = tiny(SINKS)
    engine = MedusaEngine(model)
    assert isinstance(engine.backbone, CopyingBackbone)
    hooked = [module for module in model.modules() if module._forward_pre_hooks]
    assert hooked == [model.get_output_embeddings()]
    engine.close()
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(("row", "node", "supported"), [(0, 2, True), (slice(None), 2, False), (slice(None), 0, False)])
def test_the_check_tells_rounding_from_a_wrong_mask(
    monkeypatch: pytest.MonkeyPatch, row: Any, node: int, supported: bool
) -> None:
    """Catches a bf16 model that goes the slow way because one row's logits, for want of digits, are others altogether
    (it happened to a backbone that its own training had damaged); and a node that is wrong in every row let through."""
    model = chaotic_llama()
    use_tree_attention(model)
    backbone = Backbone(model, pack=False)
    verify = backbone.verify

    def noisy(*arguments: Any) -> Any:
        logits, hidden = verify(*arguments)
        logits = logits.clone()
        logits[row, node] = -logits[row, node]
        return logits, hidden

    monkeypatch.setattr(backbone, "verify", noisy)
    with nullcontext() if supported else pytest.raises(UnsupportedByTreeAttention, match="differs from its paths"):
        check_paths(backbone)
    backbone.close()


def test_a_closed_engine_leaves_no_hook_in_the_model() -> None:
    """Catches a model that slows down, or keeps tensors alive, with every engine that was made of it."""
    model = chaotic_llama()
    for _ in range(2):
        engine = MedusaEngine(model)
        assert isinstance(engine.backbone, Backbone)
        engine.close()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    "config", [NO_DECODER, LINEAR_ATTENTION, NO_CACHE], ids=["attends both ways", "layers of other kinds", "no cache"]
)
def test_a_model_that_copies_do_not_serve_is_refused(config: hf.PreTrainedConfig) -> None:
    """Catches a wrong answer (a model that leaves the cache it is given empty) or a traceback at the first step, where
    the engine could have said so at once."""
    model = tiny(config)
    with pytest.raises(InputError, match=type(model).__name__):
        MedusaEngine(model)
