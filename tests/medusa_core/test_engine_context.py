"""The engine on models that notice every slip in position, visibility or cache: each token follows from all before."""

from __future__ import annotations

import itertools
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from medusa_core.engine import MedusaEngine
from medusa_core.heads import MedusaHeads
from medusa_core.session import SamplingParams
from medusa_core.tree import Tree
from tests.medusa_core.chaos import VOCAB, OracleHeads, chaotic_llama, greedy

BUDGET = 40


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Any tree of up to 19 nodes, three deep, over the ranks at which the oracle hides the right tokens and others."""
    paths: list[tuple[int, ...]] = [()]
    for _ in range(draw(st.integers(4, 18))):
        child = (*draw(st.sampled_from(paths)), draw(st.integers(0, 2)))
        if len(child) <= 3 and child not in paths:
            paths.append(child)
    return Tree.from_choices(paths[1:])


@pytest.fixture(scope="module")
def answers() -> dict[tuple[int, ...], list[int]]:
    """Greedy answers of an untouched model to prompts of 1 to 12 tokens."""
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(VOCAB, (1 + i,), generator=generator).tolist() for i in range(12)]
    model = chaotic_llama()
    return {tuple(prompt): greedy(model, prompt, BUDGET) for prompt in prompts}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return chaotic_llama()


@pytest.fixture(scope="module")
def engine(model: PreTrainedModel, answers: dict[tuple[int, ...], list[int]]) -> MedusaEngine:
    heads = cast(MedusaHeads, OracleHeads(model, answers))
    return MedusaEngine(model, heads, eos_token_ids=[])


def test_the_model_is_worth_testing_on(answers: dict[tuple[int, ...], list[int]], model: PreTrainedModel) -> None:
    """Catches a model that repeats itself, or answers by its last token: then nothing below would prove anything."""
    assert sum(len(set(answer)) for answer in answers.values()) / len(answers) > 8
    successors: dict[int, set[int]] = {}
    for answer in answers.values():
        for here, there in itertools.pairwise(answer):
            successors.setdefault(here, set()).add(there)
    assert sum(len(s) > 1 for s in successors.values()) > 15


def test_greedy_is_plain_greedy_where_every_token_depends_on_the_context(
    engine: MedusaEngine, answers: dict[tuple[int, ...], list[int]]
) -> None:
    """Catches packed positions, a visible sibling, a cache that isn't compacted or is compacted for another row."""
    pool = list(answers)
    beyond_root, steps = 0, 0

    @settings(max_examples=50, derandomize=True, deadline=None, database=None)
    @given(trees(), st.lists(st.integers(0, len(pool) - 1), min_size=1, max_size=4), st.integers(1, 3), st.data())
    def run(tree: Tree, chosen: list[int], batch: int, data: st.DataObject) -> None:
        nonlocal beyond_root, steps
        budgets = [data.draw(st.integers(1, BUDGET - 4)) for _ in chosen]
        engine.tree = tree
        params = [SamplingParams(budget) for budget in budgets]
        for index, budget, answer in zip(
            chosen, budgets, engine.generate([pool[i] for i in chosen], params, batch=batch), strict=True
        ):
            assert answer.tokens == answers[pool[index]][:budget]
            assert answer.finish_reason == "length"
            beyond_root += max(0, len(answer.tokens) - 1 - answer.steps)
            steps += answer.steps

    run()
    assert steps > 100
    assert beyond_root / steps > 0.5


@settings(max_examples=25, derandomize=True, deadline=None)
@given(trees(), st.lists(st.integers(0, 11), min_size=1, max_size=3), st.integers(1, 5))
def test_the_cache_holds_what_plain_decoding_would_have_written(
    engine: MedusaEngine, answers: dict[tuple[int, ...], list[int]], tree: Tree, chosen: list[int], steps: int
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
        for ours, theirs in zip(session.cache.layers, plain.cache.layers, strict=True):
            for mine, expected in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
                torch.testing.assert_close(mine[place, :, : row.length], expected[0, :, : row.length])
