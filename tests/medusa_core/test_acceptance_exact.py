"""The exact modes emit the target's distribution: chi-square over pairs of consecutive tokens, every draw one row.

The toy target is a Markov table: the distribution after a token depends on that token, so each node's row follows
from its own token, and the distribution of two consecutive tokens is known exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from scipy import stats

from medusa_core import acceptance
from medusa_core.acceptance import (
    Accepted,
    Distributions,
    accept_longest,
    accept_rejection,
    choose_sampled,
    draw_children,
    target_probabilities,
)
from medusa_core.tree import OFF, Tree, chain

VOCABULARY = 8
ROOT = 3
DRAWS = 100_000
# The root has four children, their ranks with a gap; the first of them has three, the second none, the third one.
WIDE = Tree.from_choices([[0], [1], [2], [5], [0, 0], [0, 1], [0, 4], [2, 3]])

Step = Callable[[torch.Tensor], tuple[torch.Tensor, Accepted]]


def table(seed: int = 0) -> torch.Tensor:
    """Logits after each token, [V, V]."""
    return 1.5 * torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def drafts(depth: int) -> torch.Tensor:
    """Head distributions [K, V], unlike the target's: wrong heads may cost speed, never change what is emitted."""
    return torch.randn(depth, VOCABULARY, generator=torch.Generator().manual_seed(77)).softmax(-1)


class Uniforms:
    """A fixed stream of float64 uniforms."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=self.generator, dtype=torch.float64)


def blind(draft_KV: torch.Tensor, rows: int) -> Distributions:
    """Head k's distribution for every parent of depth k."""
    return lambda depth, _: draft_KV[depth].expand(rows, 1, -1)


def rejection_step(tree: Tree, target: torch.Tensor, draft: torch.Tensor, uniforms: Uniforms) -> Step:
    def step(root_B: torch.Tensor) -> tuple[torch.Tensor, Accepted]:
        rows = len(root_B)
        tokens_BN, drawn_from = draw_children(root_B, blind(draft, rows), tree, uniforms(rows, tree.nodes))
        return tokens_BN, accept_rejection(
            tokens_BN, target[tokens_BN], drawn_from, tree, uniforms(rows, tree.nodes), uniforms(rows)
        )

    return step


def two_tokens(step: Step, draws: int = DRAWS) -> torch.Tensor:
    """The first two tokens emitted after ROOT, [draws, 2]; rows whose first step emits just one take another."""
    tokens_BN, accepted = step(torch.full((draws,), ROOT))
    first_B, second_B = emitted(tokens_BN, accepted)
    again = (accepted.length_B == 1).nonzero()[:, 0]
    if len(again):
        second_B[again] = emitted(*step(first_B[again]))[0]
    return torch.stack([first_B, second_B], 1)


def emitted(tokens_BN: torch.Tensor, accepted: Accepted) -> tuple[torch.Tensor, torch.Tensor]:
    """A step's first and second token: the path below the root, then next_B; the second is -1 where there is none."""
    path_BA = tokens_BN.gather(1, accepted.path_BA)
    length_B, next_B = accepted.length_B, accepted.next_B
    first_B = torch.where(length_B > 1, path_BA[:, min(1, path_BA.shape[1] - 1)], next_B)
    second_B = torch.where(length_B > 2, path_BA[:, min(2, path_BA.shape[1] - 1)], next_B)
    return first_B, torch.where(length_B == 1, -1, second_B)


def p_values(pair_B2: torch.Tensor, target: torch.Tensor) -> tuple[float, float]:
    """Chi-square against the target of the first token and of the pair; 0 if anything impossible was emitted."""
    first = target[ROOT].double()
    pair = first[:, None] * target.double()
    codes = pair_B2[:, 0], pair_B2[:, 0] * VOCABULARY + pair_B2[:, 1]
    return chi_square(codes[0], first), chi_square(codes[1], pair.flatten())


def chi_square(codes: torch.Tensor, probs: torch.Tensor) -> float:
    counts = torch.bincount(codes, minlength=len(probs))
    possible = probs > 0
    if bool(counts[~possible].any()):
        return 0.0
    expected = probs[possible].double()
    return float(stats.chisquare(counts[possible].numpy(), (expected / expected.sum() * len(codes)).numpy()).pvalue)


TARGETS = pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0},
        {"temperature": 1.4, "top_p": 0.8},
        {"temperature": 0.9, "top_k": 6, "top_p": 0.9},
    ],
    ids=str,
)


@TARGETS
def test_exact_sampling_emits_the_target(settings: dict[str, float]) -> None:
    """Catches acceptance that favours drafted tokens, a draw shared between nodes, and a next token drawn again."""
    uniforms, logits, draft = Uniforms(1), table(), drafts(WIDE.depth)
    order = draft.argsort(-1, descending=True)
    tree = WIDE.on()
    below = order[tree.depths_N[1:] - 1, tree.ranks_N[1:]]

    def step(root_B: torch.Tensor) -> tuple[torch.Tensor, Accepted]:
        tokens_BN = torch.cat([root_B[:, None], below.expand(len(root_B), -1)], 1)
        uniform_N = uniforms(tokens_BN.numel())
        chosen_N = choose_sampled(logits[tokens_BN].flatten(0, 1), uniform_N=uniform_N, **settings)
        return tokens_BN, accept_longest(tokens_BN, chosen_N.view_as(tokens_BN), tree)

    assert min(p_values(two_tokens(step), target_probabilities(logits, **settings))) > 1e-3


@TARGETS
def test_rejection_sampling_emits_the_target(settings: dict[str, float]) -> None:
    """Catches every bias of multi-sibling rejection: p or q not updated, a wrong sibling order, a next token drawn
    from p instead of what is left of it, another depth's head."""
    target = target_probabilities(table(), **settings)
    pairs = two_tokens(rejection_step(WIDE, target, drafts(WIDE.depth), Uniforms(2)))
    assert min(p_values(pairs, target)) > 1e-3
    # And the comparison has teeth: a slightly warmer target, or one with another cut, is told apart by far.
    assert max(p_values(pairs, target_probabilities(table(), **settings | {"temperature": 1.1}))) < 1e-12
    assert max(p_values(pairs, target_probabilities(table(), **settings | {"top_k": 3}))) < 1e-12


@pytest.mark.parametrize("fault", [False, True])
def test_rejection_sampling_is_exact_where_drafts_see_the_path(fault: bool) -> None:
    """Catches a distribution of another parent's, in the draw or in the acceptance, which must stand out by far."""
    levels, uniforms = WIDE.on().levels, Uniforms(2)
    seen = torch.randn(2, VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(5)).mul(2).softmax(-1)
    target = target_probabilities(table(), temperature=1.0)

    def after(depth: int, tokens_BN: torch.Tensor) -> torch.Tensor:
        return seen[depth][tokens_BN[:, levels[depth].paths_MA[:, -1]]]

    def step(root_B: torch.Tensor) -> tuple[torch.Tensor, Accepted]:
        rows = len(root_B)
        tokens_BN, draft = draw_children(root_B, after, WIDE, uniforms(rows, WIDE.nodes))
        if fault:
            draft = replace(draft, group_N=draft.group_N.clamp(max=1))
        return tokens_BN, accept_rejection(
            tokens_BN, target[tokens_BN], draft, WIDE, uniforms(rows, WIDE.nodes), uniforms(rows)
        )

    found = p_values(two_tokens(step), target)
    assert min(found) < 1e-12 if fault else min(found) > 1e-3


@pytest.mark.parametrize(
    ("tree", "tokens_with_mass"),
    [(OFF, 8), (chain(2), 8), (Tree.from_choices([[i] for i in range(8)]), 8), (WIDE, 2), (WIDE, 1)],
    ids=["off", "chain", "every token a child", "more children than tokens", "a head that is certain"],
)
def test_rejection_sampling_at_the_edges(tree: Tree, tokens_with_mass: int) -> None:
    """Catches a surplus child that is accepted, 0/0 where q or p runs out, and a tree of no or one child per node."""
    draft = drafts(max(tree.depth, 1))
    draft[:, tokens_with_mass:] = 0.0
    target = target_probabilities(table(1), temperature=1.0, top_k=5)
    pairs = two_tokens(rejection_step(tree, target, draft / draft.sum(-1, keepdim=True), Uniforms(3)), 50_000)
    assert min(p_values(pairs, target)) > 1e-3


def test_heads_that_equal_the_target_are_always_accepted() -> None:
    """Catches p / q inverted, and p lost where p - q is zero everywhere (a rejection by rounding keeps p)."""
    target = target_probabilities(table(), temperature=1.0)[ROOT].expand(VOCABULARY, -1)
    step = rejection_step(WIDE, target, target[: WIDE.depth], Uniforms(4))
    tokens_BN, accepted = step(torch.full((DRAWS,), ROOT))
    assert int(accepted.length_B.min()) == 3
    left = acceptance._residual(target[:2].double(), target[:2].double())
    assert torch.equal(left, target[:2].double())
    assert chi_square(tokens_BN[:, 1], target[0]) > 1e-3
    assert chi_square(accepted.next_B, target[0]) > 1e-3


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("_residual", lambda p_BV, q_BV: p_BV), ("_without", lambda q_BV, token_B1: q_BV)],
    ids=["p unchanged after a rejection", "q as if siblings were drawn with replacement"],
)
def test_the_chi_square_sees_a_wrong_rejection(
    name: str, wrong: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a test without teeth: the known mistakes must stand out by far."""
    monkeypatch.setattr(acceptance, name, wrong)
    target = target_probabilities(table(), temperature=1.0)
    pairs = two_tokens(rejection_step(WIDE, target, drafts(WIDE.depth), Uniforms(2)), 50_000)
    assert max(p_values(pairs, target)) < 1e-12


def test_rejection_accepts_more_than_exact_sampling_of_drawn_candidates() -> None:
    """Catches a rule that is exact but useless: with p close to q nearly every first child is kept."""
    logits = table()
    target = target_probabilities(logits, temperature=1.0)
    draft = target_probabilities(logits[ROOT].expand(WIDE.depth, -1), temperature=1.2)
    uniforms = Uniforms(6)
    root_B = torch.full((20_000,), ROOT)
    tokens_BN, rejection = rejection_step(WIDE, target, draft, uniforms)(root_B)
    chosen_N = choose_sampled(logits[tokens_BN].flatten(0, 1), temperature=1.0, uniform_N=uniforms(tokens_BN.numel()))
    exact = accept_longest(tokens_BN, chosen_N.view_as(tokens_BN), WIDE.on())
    assert rejection.length_B.double().mean() > 1.05 * exact.length_B.double().mean()


def test_siblings_are_drawn_in_order_without_replacement() -> None:
    """Catches children that repeat, a wrong order, a head of another depth, and families that share their draws:
    ordered triples of the first family against q1 q2 / (1 - q1) q3 / (1 - q1 - q2), pairs across families as
    independent."""
    draft = drafts(WIDE.depth).double()
    tokens_BN, _ = draw_children(torch.full((DRAWS,), ROOT), blind(draft, DRAWS), WIDE, Uniforms(5)(DRAWS, WIDE.nodes))
    assert bool((tokens_BN[:, 0] == ROOT).all())
    for first, head in ((1, 0), (5, 1)):  # Nodes 1 to 4 are the root's children, 5 to 7 those of node 1.
        triple_B3 = tokens_BN[:, first : first + 3]
        q = draft[head]
        a, b, c = q[:, None, None], q[None, :, None], q[None, None, :]
        probs = a * b / (1 - a) * c / (1 - a - b).clamp(min=1e-9)
        grid = torch.arange(VOCABULARY)
        x, y, z = grid[:, None, None], grid[None, :, None], grid[None, None, :]
        probs = torch.where((x != y) & (y != z) & (x != z), probs, 0.0)
        assert float(probs.sum()) == pytest.approx(1.0)
        codes = (triple_B3 * torch.tensor([VOCABULARY**2, VOCABULARY, 1])).sum(-1)
        assert chi_square(codes, probs.flatten()) > 1e-3
    independent = draft[0][:, None] * draft[1]
    assert chi_square(tokens_BN[:, 1] * VOCABULARY + tokens_BN[:, 5], independent.flatten()) > 1e-3
    independent = draft[1][:, None] * draft[1]
    assert chi_square(tokens_BN[:, 5] * VOCABULARY + tokens_BN[:, 8], independent.flatten()) > 1e-3


def test_a_surplus_child_repeats_its_first_sibling() -> None:
    """Catches an id the model can't run, and a token the head gives no probability."""
    draft = torch.zeros(500, 1, VOCABULARY)
    draft[:, 0, [2, 5]] = torch.tensor([0.3, 0.7])
    tree = Tree.from_choices([[i] for i in range(5)])
    tokens_BN, _ = draw_children(torch.zeros(500, dtype=torch.int64), lambda *_: draft, tree, Uniforms(8)(500, 6))
    assert set(map(tuple, tokens_BN[:, 1:].tolist())) == {(2, 5, 2, 2, 2), (5, 2, 5, 5, 5)}


def test_uniforms_at_the_ends_draw_tokens_that_exist() -> None:
    """Catches rounding in the stretches cut out that lands in a drawn token, before the first or past the last."""
    generator = torch.Generator().manual_seed(9)
    draft = torch.randn(300, 1, 50, generator=generator).mul(4).softmax(-1)
    draft[torch.rand(300, 1, 50, generator=generator) < 0.3] = 0.0
    tree = Tree.from_choices([[i] for i in range(10)])
    for uniform in (0.0, 2.0**-60, 0.5, 1.0 - 2.0**-53):
        tokens_BN, _ = draw_children(
            torch.zeros(300, dtype=torch.int64),
            lambda *_: draft,
            tree,
            torch.full((300, 11), uniform, dtype=torch.float64),
        )
        tokens_BN = tokens_BN[:, 1:]
        assert bool((draft[:, 0].gather(1, tokens_BN) > 0).all())
        # The largest uniform below 1 may round past the end, which counts as a surplus child.
        surplus = torch.arange(10) * (tokens_BN == tokens_BN[:, :1]) > 0
        assert uniform > 0.5 or not surplus.any()
        told_apart = torch.where(surplus, 100 + torch.arange(10), tokens_BN)
        assert bool((told_apart.sort(-1).values.diff(dim=-1) > 0).all())
