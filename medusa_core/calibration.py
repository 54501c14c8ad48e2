"""From ranks measured on held-out conversations to path probabilities and expected tokens per step.

A rank table holds, for every position in order, the rank that the true token t + k + 1 had in head k. Statistics are
joint (no independence assumption); the honest figure is a walk: decode the conversation with a tree, jumping by
accepted + 1. Knows nothing of models or devices.
Legend: P positions, K heads, W ranks kept (rank W means "W or later"), C conversations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from medusa_core.errors import InputError
from medusa_core.tree import Path, Tree, best_first

Int = NDArray[np.int64]


@dataclass(frozen=True)
class RankTable:
    """ranks_PK: 0 = argmax, `width` = missed, -1 = no label; conversation_P and position_P order the rows.

    Rows of one answer are consecutive positions; a gap starts another answer.
    """

    ranks_PK: Int
    conversation_P: Int
    position_P: Int
    width: int

    @property
    def num_heads(self) -> int:
        return int(self.ranks_PK.shape[1])

    def select(self, keep_P: NDArray[np.bool_]) -> RankTable:
        return RankTable(self.ranks_PK[keep_P], self.conversation_P[keep_P], self.position_P[keep_P], self.width)

    def halves(self) -> tuple[RankTable, RankTable]:
        """Two disjoint sets of conversations: one to choose trees on, one to report on."""
        names = np.unique(self.conversation_P)
        if len(names) < 2:
            raise InputError(f"{len(names)} calibration conversation(s); at least 2 are needed to choose and to report")
        first = np.isin(self.conversation_P, names[::2])
        return self.select(first), self.select(~first)

    def accuracy(self, top: int) -> list[float]:
        """Share of labels among the top `top` ranks, each head over its own labels; nan for a head without any."""
        shares = []
        for ranks in self.ranks_PK.T:
            valid = ranks >= 0
            shares.append(float((ranks[valid] < top).mean()) if valid.any() else float("nan"))
        return shares


class JointStatistics:
    """P(path) by the chain rule over joint counts, backing off to each head's own frequencies where counts are few.

    P(i_1..i_l) = Π_j P(i_j | i_1..i_j-1), each factor over the positions that have a label for head j, so no head is
    divided by another's sample count, and a path is never likelier than its prefix.
    """

    def __init__(self, table: RankTable, *, backoff: float = 16.0) -> None:
        """`backoff` is the weight, in observations, of the head's own frequencies; infinity gives their product."""
        self.table, self.backoff = table, backoff
        self._marginal = [self._counts(np.arange(len(table.ranks_PK)), head) for head in range(table.num_heads)]
        self._rows: dict[Path, Int] = {(): np.arange(len(table.ranks_PK))}
        self._probability: dict[Path, float] = {(): 1.0}

    def probability(self, path: Path) -> float:
        """Probability that every rank of the path is right (paper section 2.3.3, without its independence)."""
        if path not in self._probability:
            prefix, rank, head = path[:-1], path[-1], len(path) - 1
            conditional = self._conditional(prefix, head)
            self._probability[path] = self.probability(prefix) * float(conditional[rank])
        return self._probability[path]

    def best_tree(self, nodes: int) -> Tree:
        """The best tree of at most `nodes` nodes (root included) for these statistics."""
        tree, _ = best_first(self.probability, nodes=nodes, num_heads=self.table.num_heads, max_rank=self.table.width)
        return tree

    def _conditional(self, prefix: Path, head: int) -> NDArray[np.float64]:
        own, marginal = self._counts(self._matching(prefix), head), self._marginal[head]
        frequencies = marginal / max(1, marginal.sum())
        if np.isinf(self.backoff):
            return np.asarray(frequencies)
        return np.asarray((own + self.backoff * frequencies) / (own.sum() + self.backoff))

    def _matching(self, path: Path) -> Int:
        if path not in self._rows:
            rows = self._matching(path[:-1])
            self._rows[path] = rows[self.table.ranks_PK[rows, len(path) - 1] == path[-1]]
        return self._rows[path]

    def _counts(self, rows: Int, head: int) -> Int:
        ranks = self.table.ranks_PK[rows, head]
        return np.bincount(ranks[ranks >= 0], minlength=self.table.width + 1)


@dataclass(frozen=True)
class Walk:
    """Tokens and steps of every conversation when decoded with one tree."""

    tokens_C: Int
    steps_C: Int

    @property
    def tokens_per_step(self) -> float:
        return float(self.tokens_C.sum() / max(1, self.steps_C.sum()))

    def interval(self, *, draws: int = 1000, seed: int = 0) -> tuple[float, float]:
        """95 % bootstrap interval of tokens per step, resampling conversations."""
        picks = np.random.default_rng(seed).integers(len(self.steps_C), size=(draws, len(self.steps_C)))
        ratios = self.tokens_C[picks].sum(1) / np.maximum(1, self.steps_C[picks].sum(1))
        low, high = np.quantile(ratios, [0.025, 0.975])
        return float(low), float(high)

    def select(self, index_C: Sequence[int]) -> Walk:
        """The walk through some of the conversations."""
        return Walk(self.tokens_C[list(index_C)], self.steps_C[list(index_C)])

    def over(self, other: Walk, *, draws: int = 1000, seed: int = 0) -> tuple[float, tuple[float, float]]:
        """Tokens per step of this walk over those of another through the same conversations, with the 95 % interval
        of a bootstrap that draws the same conversations for both."""
        if len(self.steps_C) != len(other.steps_C):
            raise InputError(
                f"walks through {len(self.steps_C)} and {len(other.steps_C)} conversations can't be paired"
            )
        picks = np.random.default_rng(seed).integers(len(self.steps_C), size=(draws, len(self.steps_C)))
        own, others = (w.tokens_C[picks].sum(1) / np.maximum(1, w.steps_C[picks].sum(1)) for w in (self, other))
        low, high = np.quantile(own / others, [0.025, 0.975])
        return self.tokens_per_step / other.tokens_per_step, (float(low), float(high))


def cross_walk(table: RankTable, nodes: int) -> Walk:
    """Every conversation decoded with the best tree of so many nodes for the half that it is not in: no figure comes
    from what its tree was chosen on, and every conversation counts."""
    halves = table.halves()
    walks = [walk(JointStatistics(other).best_tree(nodes), own) for own, other in (halves, halves[::-1])]
    count = sum(len(each.steps_C) for each in walks)
    tokens_C, steps_C = np.zeros(count, np.int64), np.zeros(count, np.int64)
    for start, each in enumerate(walks):
        # `halves` deals conversations out in turn.
        tokens_C[start::2], steps_C[start::2] = each.tokens_C, each.steps_C
    return Walk(tokens_C, steps_C)


def walk(tree: Tree, table: RankTable) -> Walk:
    """Decodes every answer of the table with the tree: from its first position, jumping by accepted + 1.

    An answer's last position holds the state that predicts its last token, which needs no further step.
    """
    tree.check(num_heads=table.num_heads, max_rank=table.width)
    accepted_P = accepted_lengths(tree, table)
    conversations, index_P = np.unique(table.conversation_P, return_inverse=True)
    tokens_C, steps_C = np.zeros(len(conversations), np.int64), np.zeros(len(conversations), np.int64)
    breaks = (np.diff(table.position_P) != 1) | (np.diff(table.conversation_P) != 0)
    starts = np.concatenate([[0], np.flatnonzero(breaks) + 1])
    ends = np.concatenate([starts[1:], [len(accepted_P)]])
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        here, steps, last = start, 0, end - 1
        while here < last:
            here += 1 + int(accepted_P[here])
            steps += 1
        tokens_C[index_P[start]] += last - start
        steps_C[index_P[start]] += steps
    return Walk(tokens_C, steps_C)


def accepted_lengths(tree: Tree, table: RankTable) -> Int:
    """Accepted tokens beyond the root at every position, [P]: the longest path of the tree whose ranks are right."""
    # child_NW[node, rank] is the node that this rank leads to, or -1; its last column is the rank of a miss.
    child_NW = np.full((tree.nodes, table.width + 1), -1)
    for node in range(1, tree.nodes):
        child_NW[tree.parents[node], tree.ranks_N[node]] = node
    node_P = np.zeros(len(table.ranks_PK), np.int64)
    accepted_P = np.zeros(len(table.ranks_PK), np.int64)
    for depth in range(1, tree.depth + 1):
        ranks_P = table.ranks_PK[:, depth - 1]
        node_P = np.where((node_P >= 0) & (ranks_P >= 0), child_NW[node_P, ranks_P], -1)
        accepted_P[node_P >= 0] = depth
    return accepted_P
