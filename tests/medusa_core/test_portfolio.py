"""Which tree a step uses, and that answers don't depend on it."""

from __future__ import annotations

import itertools

import pytest

from medusa_core.engine import MedusaEngine
from medusa_core.errors import InputError
from medusa_core.portfolio import PLAIN, Entry, Portfolio
from medusa_core.request import Progress
from medusa_core.sampling import SamplingParams
from medusa_core.tree import OFF, Tree, cartesian, chain
from tests.medusa_core.chaos import beyond_root, chaotic_llama, greedy, oracle, prompts_of

BUSHY = Tree.from_choices([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0]])
# One row: deep at first, bushy from about 20 tokens on, a chain later; several rows: smaller, then off.
SWITCHING = Portfolio(
    (
        Entry(1, 8, cartesian([2, 2, 1])),
        Entry(1, 32, BUSHY),
        Entry(1, 64, chain(3)),
        Entry(2, 8, chain(2)),
        Entry(2, 32, cartesian([3])),
        Entry(4, 8, OFF),
        Entry(4, 32, chain(1)),
    )
)


def mapped(*cells: tuple[int, int]) -> dict[tuple[int, int], Tree]:
    """A different tree for every cell."""
    return {cell: cartesian([1 + place]) for place, cell in enumerate(cells)}


@pytest.mark.parametrize(
    ("asked", "cell"),
    [
        ((1, 128), (1, 128)),
        ((8, 1024), (8, 1024)),
        # Between batches 1 and 8 the middle is about 2.8: a ratio, not a difference.
        ((2, 128), (1, 128)),
        ((3, 128), (8, 128)),
        ((100, 128), (8, 128)),
        # Between contexts 128 and 1024 it is about 362.
        ((1, 361), (1, 128)),
        ((1, 363), (1, 1024)),
        ((1, 1), (1, 128)),
        ((1, 10**6), (1, 1024)),
        # The batch decides before the context does.
        ((8, 4096), (8, 1024)),
        # Nothing active, or no context yet.
        ((0, 0), (1, 128)),
    ],
)
def test_the_nearest_batch_decides_then_the_nearest_context(asked: tuple[int, int], cell: tuple[int, int]) -> None:
    """Catches distances by difference, which favour the smaller cells, and a context that outweighs the batch."""
    cells = mapped((1, 128), (1, 1024), (8, 128), (8, 1024))
    portfolio = Portfolio(tuple(Entry(batch, context, tree) for (batch, context), tree in cells.items()))
    assert portfolio.pick(*asked) == cells[cell]


def test_cells_that_were_not_measured_are_covered() -> None:
    """Catches a grid taken for granted: a batch may have been measured at one context only."""
    cells = mapped((1, 128), (4, 1024))
    portfolio = Portfolio(tuple(Entry(batch, context, tree) for (batch, context), tree in cells.items()))
    assert portfolio.pick(1, 4096) == cells[1, 128]
    assert portfolio.pick(16, 1) == cells[4, 1024]


def test_ties_go_to_the_entry_named_first() -> None:
    """Catches a pick that depends on the order of a set: 2 lies as far from 1 as from 4."""
    first, second = Entry(1, 64, chain(1)), Entry(4, 64, chain(2))
    assert Portfolio((first, second)).pick(2, 64) == first.tree
    assert Portfolio((second, first)).pick(2, 64) == second.tree


def test_trees_are_listed_once_and_the_largest_sets_the_slots() -> None:
    """Catches room for the first tree only, which a later step's larger one outgrows."""
    assert SWITCHING.trees == tuple(entry.tree for entry in SWITCHING.entries)
    assert Portfolio((Entry(1, 1, OFF), Entry(2, 1, BUSHY), Entry(4, 1, OFF))).trees == (OFF, BUSHY)
    assert SWITCHING.nodes == cartesian([2, 2, 1]).nodes == 11
    assert PLAIN.trees == (OFF,) and PLAIN.nodes == 1
    assert Portfolio.of(BUSHY).pick(7, 7) == BUSHY


def test_a_portfolio_is_read_from_its_entries() -> None:
    """Catches batch and context read for each other, and choices kept unchecked."""
    read = Portfolio.from_entries(
        [
            {"batch": 1, "context": 512, "choices": [[0], [0, 0]], "seconds": 0.1},
            {"batch": 8, "context": 64, "choices": []},
        ]
    )
    assert read == Portfolio((Entry(1, 512, chain(2)), Entry(8, 64, OFF)))
    with pytest.raises(InputError, match="at least one entry"):
        Portfolio.from_entries([])
    with pytest.raises(InputError, match="lacks its prefix"):
        Portfolio.from_entries([{"batch": 1, "context": 1, "choices": [[0, 0]]}])


def test_every_tree_of_a_portfolio_is_checked() -> None:
    """Catches a tree that the heads can't draft, found only once the batch is large enough for it."""
    model = chaotic_llama()
    heads = oracle(model, {(1, 2): [3] * 8})
    with pytest.raises(InputError, match="4 deep, but there are 3 heads"):
        MedusaEngine(model, heads, Portfolio((Entry(1, 1, chain(2)), Entry(2, 1, chain(4)))))
    engine = MedusaEngine(model, heads)
    with pytest.raises(InputError, match="4 deep, but there are 3 heads"):
        engine.session(rows=1, slots=50, tree=Portfolio((Entry(1, 1, OFF), Entry(2, 1, chain(4)))))


def test_the_tree_changes_while_a_batch_is_in_flight() -> None:
    """Catches state of one tree that a step with another one reads: cache, root, hidden state, or the room kept free.
    Rows come and go, contexts grow; every answer is the model's own."""
    model = chaotic_llama()
    prompts = prompts_of([3, 2, 5, 1, 14, 6, 9, 11])
    expected = [greedy(model, prompt, 60) for prompt in prompts]
    heads = oracle(model, {tuple(p): a for p, a in zip(prompts, expected, strict=True)})
    engine = MedusaEngine(model, heads, SWITCHING, eos_token_ids=[])
    budgets = [40, 24, 31, 26, 12, 26, 30, 56]
    session = engine.session(rows=4, slots=14 + 56 + SWITCHING.nodes)
    used: list[Tree] = []
    done: list[Progress] = []
    # How many steps to run before each request is added.
    for prompt, budget, wait in zip(prompts, budgets, [0, 1, 1, 1, 2, 4, 2, 9], strict=True):
        for _ in range(wait):
            used.append(session.tree)
            session.step()
        while not session.free:
            used.append(session.tree)
            session.step()
        done.append(session.add_request(prompt, SamplingParams(budget)))
    while session.active:
        used.append(session.tree)
        session.step()
    assert [item.generation.tokens for item in done] == [e[:b] for e, b in zip(expected, budgets, strict=True)]
    assert beyond_root([item.generation for item in done]) > 20
    assert set(used) == set(SWITCHING.trees), "not every tree was used"
    assert sum(one != other for one, other in itertools.pairwise(used)) > 8


def test_the_same_answers_through_generate_whatever_the_portfolio() -> None:
    """Catches a generate that reads the tree once, and slots that are one tree short."""
    model = chaotic_llama()
    prompts = prompts_of([3, 14, 6, 1, 9])
    expected = [greedy(model, prompt, 40) for prompt in prompts]
    heads = oracle(model, {tuple(p): a for p, a in zip(prompts, expected, strict=True)})
    engine = MedusaEngine(model, heads, SWITCHING, eos_token_ids=[])
    for batch in (1, 2, 3, 5):
        answers = engine.generate(prompts, SamplingParams(40), batch=batch)
        assert [answer.tokens for answer in answers] == expected
    assert engine.slots_for(prompts, [SamplingParams(40)] * 5) == 14 + 40 + SWITCHING.nodes
    assert [t for item in engine.stream(prompts[1], SamplingParams(40)) for t in item.tokens] == expected[1]


def test_warm_up_runs_a_step_with_and_without_a_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a kind of step that is first met, and compiled, under the first request; and times left in the sums."""
    model = chaotic_llama()
    engine = MedusaEngine(model, oracle(model, {(1, 2): [3] * 8}), SWITCHING, eos_token_ids=[])
    seen = []
    verify = engine.backbone.verify

    def recorded(cache, start_B, longest, tokens_BN, tree):  # type: ignore[no-untyped-def]
        seen.append((len(tokens_BN), tree.is_off))
        return verify(cache, start_B, longest, tokens_BN, tree)

    monkeypatch.setattr(engine.backbone, "verify", recorded)
    assert engine.warm_up(rows=2) > 0
    assert {(2, True), (2, False)} <= set(seen)
    assert engine.seconds.steps == 0
