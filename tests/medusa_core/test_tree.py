"""Trees: what is refused, how nodes are laid out, and that best-first growth is exactly optimal."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_core.errors import InputError
from medusa_core.tree import OFF, Path, Tree, best_first, cartesian, chain


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([[0], []], "empty path"),
        ([[0], [-1]], r"\[-1\] has a negative rank"),
        ([[0], [1], [0]], r"\[0\] is listed twice"),
        ([[0], [1, 2]], r"\[1, 2\] lacks its prefix \[1\]"),
        ([[0, 0, 0], [0]], r"\[0, 0, 0\] lacks its prefix \[0, 0\]"),
    ],
)
def test_a_bad_tree_is_refused_by_the_name_of_its_path(choices: list[list[int]], message: str) -> None:
    """Catches the reference's silent acceptance of duplicates and of paths without a prefix."""
    with pytest.raises(InputError, match=message):
        Tree.from_choices(choices)


def test_a_tree_deeper_than_the_heads_or_wider_than_the_ranks_is_refused() -> None:
    """Catches a rank that reads the next head's candidates, and a bare IndexError for a deep tree."""
    tree = Tree.from_choices([[0], [4], [0, 1]])
    tree.check(num_heads=2, max_rank=5)
    with pytest.raises(InputError, match="2 deep, but there are 1 heads"):
        tree.check(num_heads=1, max_rank=5)
    with pytest.raises(InputError, match="rank 4, but ranks stop at 3"):
        tree.check(num_heads=2, max_rank=4)


def test_nodes_go_by_depth_then_path_whatever_the_order_given() -> None:
    """Catches a layout that depends on how the choices were listed."""
    choices = [(0,), (2,), (0, 1), (2, 0), (0, 1, 0)]
    shuffled = choices[:]
    random.Random(3).shuffle(shuffled)
    tree = Tree.from_choices(shuffled)
    assert tree == Tree.from_choices(choices)
    assert tree.choices == tuple(choices)
    assert tree.parents == (-1, 0, 0, 1, 2, 3)
    assert tree.depths_N.tolist() == [0, 1, 1, 2, 2, 3]
    assert tree.ranks_N.tolist() == [0, 0, 2, 1, 0, 0]
    assert (tree.nodes, tree.depth, tree.width, tree.is_off) == (6, 3, 3, False)


def test_paths_hold_the_node_at_each_depth_and_repeat_the_last() -> None:
    """Catches compaction that keeps the wrong nodes."""
    tree = Tree.from_choices([[0], [2], [0, 1], [2, 0], [0, 1, 0]])
    assert tree.paths_ND.tolist() == [
        [0, 0, 0, 0],
        [0, 1, 1, 1],
        [0, 2, 2, 2],
        [0, 1, 3, 3],
        [0, 2, 4, 4],
        [0, 1, 3, 5],
    ]


def test_a_node_sees_itself_and_its_ancestors_only() -> None:
    """Catches a visible sibling."""
    tree = Tree.from_choices([[0], [1], [0, 0], [0, 1]])
    seen = [row.nonzero().flatten().tolist() for row in tree.ancestors_NN]
    assert seen == [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4]]


def test_the_empty_tree_is_the_root_alone() -> None:
    """Catches plain decoding treated as a special case that then differs."""
    assert (OFF.nodes, OFF.depth, OFF.width, OFF.is_off) == (1, 0, 0, True)
    assert OFF.paths_ND.tolist() == [[0]]
    assert torch.equal(OFF.ancestors_NN, torch.ones(1, 1, dtype=torch.bool))
    OFF.check(num_heads=1, max_rank=1)


def test_cartesian_and_chain() -> None:
    """Catches a product that leaves inner nodes out, or a level too many."""
    tree = cartesian([2, 3])
    assert tree.choices == ((0,), (1,), *itertools.product(range(2), range(3)))
    assert chain(3).choices == ((0,), (0, 0), (0, 0, 0))
    assert cartesian([1, 1, 1]) == chain(3)
    with pytest.raises(InputError, match=r"widths \[2, 0\]"):
        cartesian([2, 0])


HEADS, RANKS = 2, 3
UNIVERSE: list[Path] = [p for depth in (1, 2) for p in itertools.product(range(RANKS), repeat=depth)]


def all_trees() -> list[frozenset[Path]]:
    """Every set of paths that holds the prefix of each of its paths."""
    tops = [(rank,) for rank in range(RANKS)]
    trees = []
    for count in range(RANKS + 1):
        for roots in itertools.combinations(tops, count):
            leaves = [p for p in UNIVERSE if len(p) == 2 and p[:1] in roots]
            for size in range(len(leaves) + 1):
                trees += [frozenset((*roots, *chosen)) for chosen in itertools.combinations(leaves, size)]
    return trees


TREES = all_trees()


@settings(max_examples=25, derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=16, max_size=16).filter(any))
def test_best_first_is_exactly_optimal_for_every_size(counts: list[int]) -> None:
    """Catches the leaf sum and the "highest a_k" rule: against all trees over the same joint counts, every n.

    A count belongs to a pair of ranks (rank 3: missed); small counts make ties and zeros frequent.
    """
    table = dict(zip(itertools.product(range(RANKS + 1), repeat=HEADS), counts, strict=True))
    total = sum(counts)

    def probability(path: Path) -> float:
        return sum(n for ranks, n in table.items() if ranks[: len(path)] == path) / total

    value = {path: probability(path) for path in UNIVERSE}
    best: dict[int, float] = {}
    for paths in TREES:
        best[len(paths)] = max(best.get(len(paths), 0.0), sum(value[p] for p in paths))
    for nodes in range(1, len(UNIVERSE) + 3):
        tree, values = best_first(probability, nodes=nodes, num_heads=HEADS, max_rank=RANKS)
        expected = best[min(nodes - 1, len(UNIVERSE))]
        assert sum(value[p] for p in tree.choices) == pytest.approx(expected, abs=1e-12)
        assert values == sorted(values, reverse=True)
        assert all(v > 0 for v in values)
        assert len(values) == tree.nodes - 1 <= nodes - 1


def test_ties_take_the_shorter_path_then_the_lower_rank() -> None:
    """Catches a tie broken in favour of depth: a deeper tree costs a head more for the same expectation."""

    def probability(path: Path) -> float:
        return 0.25 if all(rank < 2 for rank in path) else 0.0

    def grown(nodes: int) -> tuple[Path, ...]:
        return best_first(probability, nodes=nodes, num_heads=3, max_rank=4)[0].choices

    assert grown(3) == ((0,), (1,))
    assert grown(4) == ((0,), (1,), (0, 0))
    assert grown(7) == ((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1))


def test_paths_of_probability_zero_are_never_chosen() -> None:
    """Catches nodes that cost a step and can't be right."""
    tree, values = best_first(lambda path: 0.5 if path == (1,) else 0.0, nodes=9, num_heads=2, max_rank=3)
    assert tree.choices == ((1,),)
    assert values == [0.5]
