"""The engine on models that notice every slip in position, visibility or cache: each token follows from all before."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
import transformers as hf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from medusa_core import backbone as backbone_module
from medusa_core import session as session_module
from medusa_core.backbone import Backbone, context_length
from medusa_core.cache import TreeCache
from medusa_core.engine import MedusaEngine
from medusa_core.errors import InputError
from medusa_core.portfolio import Portfolio
from medusa_core.sampling import SamplingParams
from medusa_core.tree import OFF, Tree, cartesian, chain
from tests.medusa_core.chaos import VOCAB, chaotic_config, chaotic_llama, greedy, oracle, prompts_of, tiny

BUDGET = 40
HEADS = 5
# The prompts have 1 to 20 tokens.
LENGTHS = [*range(1, 21)]
OPT = hf.OPTConfig(
    vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=48, word_embed_proj_dim=32,
    max_position_embeddings=32, eos_token_id=None,
)  # fmt: skip
BUSHY = Tree.from_choices([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0, 1]])


@st.composite
def random_trees(draw: st.DrawFn) -> Tree:
    """Any tree of up to 19 nodes, over the ranks at which the oracle hides the right tokens and others."""
    paths: list[tuple[int, ...]] = [()]
    for _ in range(draw(st.integers(4, 18))):
        child = (*draw(st.sampled_from(paths)), draw(st.sampled_from([0, 0, 1, 2])))
        if len(child) <= HEADS and child not in paths:
            paths.append(child)
    return Tree.from_choices(paths[1:])


trees = st.one_of(
    random_trees(),
    random_trees(),
    st.just(OFF),
    st.integers(1, HEADS).map(chain),
    # Wide: the first ranks of head 1, with or without successors.
    st.builds(lambda width, below: cartesian([width, *below]), st.integers(3, 12), st.lists(st.just(1), max_size=2)),
    # Deep branches from several ranks.
    st.integers(2, HEADS).map(lambda deep: cartesian([2] + [1] * (deep - 1))),
)
Answers = dict[tuple[int, ...], list[int]]


def known_answers(model: PreTrainedModel) -> Answers:
    """Greedy answers of an untouched model to prompts of all lengths."""
    return {tuple(prompt): greedy(model, prompt, BUDGET) for prompt in prompts_of(LENGTHS)}


@pytest.fixture(scope="module")
def answers() -> Answers:
    return known_answers(chaotic_llama())


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return chaotic_llama()


@pytest.fixture(scope="module")
def engine(model: PreTrainedModel, answers: Answers) -> Iterator[MedusaEngine]:
    engine = MedusaEngine(model, oracle(model, answers, HEADS), eos_token_ids=[])
    # A step that is wrong may also show as a model that falls back to copies, where everything is right again.
    assert isinstance(engine.backbone, Backbone)
    yield engine
    engine.close()


def test_the_model_is_worth_testing_on(answers: Answers) -> None:
    """Catches a model that repeats itself, or answers by its last token: then nothing below would prove anything."""
    assert sum(len(set(answer)) for answer in answers.values()) / len(answers) > 8
    successors: dict[int, set[int]] = {}
    for answer in answers.values():
        for here, there in itertools.pairwise(answer):
            successors.setdefault(here, set()).add(there)
    assert sum(len(s) > 1 for s in successors.values()) > 15


def check_many(engine: MedusaEngine, answers: Answers, examples: int) -> None:
    """Random trees, prompts, budgets and batches; tokens must really have been accepted."""
    pool = list(answers)
    cases, tokens, steps = 0, 0, 0
    request = st.tuples(st.integers(0, len(pool) - 1), st.integers(1, BUDGET - HEADS))

    @settings(
        max_examples=examples, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(trees, st.lists(request, min_size=1, max_size=5), st.integers(1, 4))
    def run(tree: Tree, requests: list[tuple[int, int]], batch: int) -> None:
        nonlocal cases, tokens, steps
        engine.portfolio = Portfolio.of(tree)
        params = [SamplingParams(budget) for _, budget in requests]
        generated = engine.generate([pool[index] for index, _ in requests], params, batch=batch)
        for (index, budget), answer in zip(requests, generated, strict=True):
            assert answer.tokens == answers[pool[index]][:budget]
            assert answer.finish_reason == "length"
            tokens += len(answer.tokens) - 1
            steps += answer.steps
        cases += 1

    run()
    assert cases >= examples
    assert tokens / steps > 1.2


def test_greedy_is_plain_greedy_where_every_token_depends_on_the_context(
    engine: MedusaEngine, answers: Answers
) -> None:
    """Catches packed positions, a visible sibling, a cache that isn't compacted or is compacted for another row."""
    check_many(engine, answers, 300)


def test_greedy_is_plain_greedy_in_float32_with_packed_weights_and_a_window() -> None:
    """Catches a packed layer given another's product, and a window that a tree deeper than it is wide gets around;
    float32 is what the packed products take."""
    model = tiny(chaotic_config(hf.MistralConfig, sliding_window=3), torch.float32)
    answers = known_answers(model)
    engine = MedusaEngine(model, oracle(model, answers, HEADS), eos_token_ids=[], pack=True)
    assert isinstance(engine.backbone, Backbone)
    check_many(engine, answers, 60)


@settings(max_examples=25, derandomize=True, deadline=None)
@given(random_trees(), st.lists(st.integers(0, len(LENGTHS) - 1), min_size=1, max_size=3), st.integers(1, 5))
def test_the_cache_holds_what_plain_decoding_would_have_written(
    engine: MedusaEngine, answers: Answers, tree: Tree, chosen: list[int], steps: int
) -> None:
    """Catches keys of a refused node, keys rotated by the wrong position, and rows mixed up, though no token differs
    yet."""
    pool = list(answers)
    session = engine.session(rows=3, slots=96, tree=tree)
    for index in chosen:
        session.add_request(pool[index], SamplingParams(BUDGET))
    for _ in range(steps):
        session.step()
    for place, row in enumerate(session.rows):
        prompt = pool[chosen[row.request]]
        tokens = [*prompt, *row.generation.tokens[:-1]]
        assert row.length == len(tokens)
        plain = engine.session(rows=1, slots=len(tokens) + tree.nodes + 1, tree=tree)
        plain.add_request(tokens, SamplingParams(1))
        for ours, theirs in zip(session.cache.stores, plain.cache.stores, strict=True):
            for mine, expected in zip(ours, theirs, strict=True):
                assert len(mine) == 2, "both layers have one shape"
                torch.testing.assert_close(mine[:, place, :, : row.length], expected[:, 0, :, : row.length])


# Long prompts.

LONG = prompts_of([29, 3, 16, 9, 8, 1], seed=5)


@pytest.mark.parametrize("piece", [1, 7, 8, 24])
@pytest.mark.parametrize("name", ["llama", "mistral", "opt"])
def test_a_long_prompt_in_pieces_is_one_pass(name: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches logits or hidden states of a row taken from a piece it doesn't end in, positions that begin again, and
    keys of a later piece that don't see the ones before. A piece of several rows is narrower: six share the size."""
    config = {"llama": chaotic_config(), "mistral": chaotic_config(hf.MistralConfig, sliding_window=6), "opt": OPT}[
        name
    ]
    backbone = MedusaEngine(tiny(config)).backbone
    assert isinstance(backbone, Backbone)
    passes: list[tuple[int, ...]] = []
    run = backbone.model.forward

    def counted(**inputs: torch.Tensor) -> object:
        passes.append(tuple(inputs["input_ids"].shape))
        return run(**inputs)

    monkeypatch.setattr(backbone.model, "forward", counted)
    results = []
    for size in (1024, piece):
        monkeypatch.setattr(backbone_module, "PREFILL_TOKENS", size)
        cache = backbone.open(rows=7, slots=40)
        with torch.inference_mode():
            alone = backbone.prefill(cache, 0, [LONG[0]])
            several = backbone.prefill(cache, 1, LONG)
        results.append((*alone, *several, cache))
    width = max(1, piece // 6)
    expected = [(1, 29), (6, 29)]
    expected += [(1, min(piece, 29 - at)) for at in range(0, 29, piece)]
    expected += [(6, min(width, 29 - at)) for at in range(0, 29, width)]
    assert passes == expected
    (*whole, whole_cache), (*pieces, pieces_cache) = results
    for one, other in zip(whole, pieces, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)
    for row, length in enumerate([29, *map(len, LONG)]):
        for one, other in zip(whole_cache.stores, pieces_cache.stores, strict=True):
            for kept, again in zip(one, other, strict=True):
                torch.testing.assert_close(again[:, row, :, :length], kept[:, row, :, :length], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [8, 40])
def test_answers_to_prompts_in_pieces_are_the_same(
    engine: MedusaEngine, answers: Answers, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches rows of a batch in flight that a prompt's later pieces overwrite, and prompts grouped past the limit."""
    monkeypatch.setattr(backbone_module, "PREFILL_TOKENS", size)
    monkeypatch.setattr(session_module, "PREFILL_TOKENS", size)
    pool = [list(answers)[index] for index in (19, 0, 7, 12, 3, 18)]
    budgets = [30, 9, 22, 14, 25, 18]
    groups: list[list[int]] = []
    run = engine.backbone.prefill

    def recorded(cache: TreeCache, first_row: int, prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        groups.append([len(prompt) for prompt in prompts])
        return run(cache, first_row, prompts)

    monkeypatch.setattr(engine.backbone, "prefill", recorded)
    engine.portfolio = Portfolio.of(BUSHY)
    generated = engine.generate(pool, [SamplingParams(budget) for budget in budgets], batch=3)
    assert [answer.tokens for answer in generated] == [
        answers[prompt][:budget] for prompt, budget in zip(pool, budgets, strict=True)
    ]
    assert [length for group in groups for length in group] == [len(prompt) for prompt in pool]
    assert all(len(group) == 1 or len(group) * max(group) <= size for group in groups)
    assert (len(groups) < len(pool)) == (size == 40)


# The context's end.


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_the_context_limit_ends_answers_exactly(name: str) -> None:
    """Catches positions past the model's last (learned positions have none there), tokens lost short of it, and a row
    at its end that takes the others of its batch along."""
    context = 32
    config = {"llama": chaotic_config(max_position_embeddings=context), "opt": OPT}[name]
    model = tiny(config)
    assert context_length(model) == context
    prompts = prompts_of([31, 30, 12, 1, 26, 28])
    expected = [greedy(model, prompt, context - len(prompt)) for prompt in prompts]
    heads = oracle(model, {tuple(p): a for p, a in zip(prompts, expected, strict=True)}, HEADS)
    engine = MedusaEngine(model, heads, BUSHY, eos_token_ids=[])
    for batch in (1, 3):
        for asked in (1 << 20, 31):
            generated = engine.generate(prompts, SamplingParams(asked, min_new_tokens=2), batch=batch)
            assert [answer.tokens for answer in generated] == expected
            assert {answer.finish_reason for answer in generated} == {"length"}
    with pytest.raises(InputError, match="32 tokens, the model's context is 32"):
        engine.generate([prompts[0] + [1]], SamplingParams(1))
