"""Candidate trees: which ranks of which heads are verified together (paper sections 2.1.2 and 2.3.3).

A tree is a set of paths (i_1, ..., i_l), where i_j is a rank in head j. It knows nothing of tokens, models or devices.
Legend: N nodes (the choices plus the root), M nodes of one depth that have children, X their children, A path length.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from kernels.ancestor_bits import mask_from_words, words_from_parents
from medusa_core.errors import InputError

Path = tuple[int, ...]


@dataclass(frozen=True)
class Level:
    """The parents of one depth and their children, all of the next depth, in node order.

    The nodes on the way from the root to each parent, [M, A]; of each child its parent's place among these and its
    rank, [X]; and how many ranks are in use.
    """

    paths_MA: torch.Tensor
    parents_X: torch.Tensor
    ranks_X: torch.Tensor
    width: int


@dataclass(frozen=True)
class TreeTensors:
    """A tree's layout on one device, which is all that drafting, verifying and accepting read.

    Depth, rank and parent of each node (the root's parent is itself), visibility [N, N] bool, the same as ancestor
    words [N, W] int64, and the node at each depth on the way to each node, [N, A] with A = depth + 1; and the same tree
    as one level for each depth of parents.
    """

    depths_N: torch.Tensor
    ranks_N: torch.Tensor
    parents_N: torch.Tensor
    ancestors_NN: torch.Tensor
    words_NW: torch.Tensor
    paths_NA: torch.Tensor
    levels: tuple[Level, ...]


@dataclass(frozen=True)
class Tree:
    """A validated candidate tree. Node 0 is the root (the token the LM head chose); nodes follow by depth, then path.

    Build one with `Tree.from_choices`; the empty tree is plain decoding.
    """

    choices: tuple[Path, ...]

    @classmethod
    def from_choices(cls, choices: Iterable[Sequence[int]]) -> Tree:
        """Orders the paths and checks them; InputError names the path that has no prefix, repeats, or is empty."""
        paths = [tuple(int(rank) for rank in path) for path in choices]
        seen: set[Path] = set()
        for path in sorted(paths, key=lambda p: (len(p), p)):
            if not path:
                raise InputError(
                    "a tree lists an empty path; the root is implied, list only paths of length 1 and more"
                )
            if min(path) < 0:
                raise InputError(f"tree path {list(path)} has a negative rank; ranks count from 0")
            if path in seen:
                raise InputError(f"tree path {list(path)} is listed twice")
            if len(path) > 1 and path[:-1] not in seen:
                raise InputError(f"tree path {list(path)} lacks its prefix {list(path[:-1])}; list every prefix too")
            seen.add(path)
        return cls(tuple(sorted(seen, key=lambda p: (len(p), p))))

    def check(self, *, num_heads: int, max_rank: int) -> None:
        """InputError if the tree is deeper than the heads or asks for a rank that the heads don't offer."""
        if self.depth > num_heads:
            raise InputError(f"the tree is {self.depth} deep, but there are {num_heads} heads: prune it or add heads")
        if self.width > max_rank:
            raise InputError(f"the tree uses rank {self.width - 1}, but ranks stop at {max_rank - 1}: prune it")

    @property
    def nodes(self) -> int:
        return len(self.choices) + 1

    @property
    def depth(self) -> int:
        return max((len(path) for path in self.choices), default=0)

    @property
    def width(self) -> int:
        """Number of ranks a head must offer: the largest rank used plus one (0 for the empty tree)."""
        return max((max(path) + 1 for path in self.choices), default=0)

    @property
    def is_off(self) -> bool:
        return not self.choices

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """Parent node of each node, -1 for the root."""
        index: dict[Path, int] = {(): 0} | {path: node for node, path in enumerate(self.choices, 1)}
        return (-1, *(index[path[:-1]] for path in self.choices))

    @cached_property
    def depths_N(self) -> torch.Tensor:
        """Depth of each node, int64; the root's is 0."""
        return torch.tensor([0, *(len(path) for path in self.choices)])

    @cached_property
    def ranks_N(self) -> torch.Tensor:
        """Rank of each node in the head of its depth, int64; the root's is 0 and means nothing."""
        return torch.tensor([0, *(path[-1] for path in self.choices)])

    @cached_property
    def ancestors_NN(self) -> torch.Tensor:
        """Visibility [N, N] bool: row q marks q itself and its ancestors."""
        return mask_from_words(self.words_NW)

    @cached_property
    def words_NW(self) -> torch.Tensor:
        """Visibility as the kernel reads it (`kernels.ancestor_bits`)."""
        return words_from_parents(self.parents)

    @cached_property
    def paths_ND(self) -> torch.Tensor:
        """[N, depth + 1] int64: node at each depth on the way from the root to each node, the node itself repeated
        past its own depth."""
        rows = []
        for node in range(self.nodes):
            line = [node]
            while self.parents[line[0]] >= 0:
                line.insert(0, self.parents[line[0]])
            rows.append(line + [node] * (self.depth + 1 - len(line)))
        return torch.tensor(rows)

    def on(self, device: torch.device | str = "cpu") -> TreeTensors:
        """The layout on a device, made once per tree and device."""
        return _tensors(self, torch.device(device))


@lru_cache(maxsize=256)
def _tensors(tree: Tree, device: torch.device) -> TreeTensors:
    parents_N = torch.tensor(tree.parents).clamp(min=0)
    return TreeTensors(
        depths_N=tree.depths_N.to(device),
        ranks_N=tree.ranks_N.to(device),
        parents_N=parents_N.to(device),
        ancestors_NN=tree.ancestors_NN.to(device),
        words_NW=tree.words_NW.to(device),
        paths_NA=tree.paths_ND.to(device),
        levels=tuple(_level(tree, parents_N, depth, device) for depth in range(tree.depth)),
    )


def _level(tree: Tree, parents_N: torch.Tensor, depth: int, device: torch.device) -> Level:
    children = tree.depths_N == depth + 1
    parents_M, parents_X = parents_N[children].unique(return_inverse=True)
    ranks_X = tree.ranks_N[children]
    return Level(
        paths_MA=tree.paths_ND[parents_M, : depth + 1].to(device),
        parents_X=parents_X.to(device),
        ranks_X=ranks_X.to(device),
        width=int(ranks_X.max()) + 1,
    )


OFF = Tree(())


def chain(depth: int) -> Tree:
    """The tree of one path: rank 0 of every head."""
    return Tree.from_choices([(0,) * length for length in range(1, depth + 1)])


def cartesian(widths: Sequence[int]) -> Tree:
    """Every combination of the top widths[k] ranks of head k (paper section 2.1.2); InputError for a width below 1."""
    if any(width < 1 for width in widths):
        raise InputError(f"cartesian widths {list(widths)}: every width must be at least 1")
    levels = [range(width) for width in widths]
    return Tree.from_choices(
        path for length in range(1, len(levels) + 1) for path in itertools.product(*levels[:length])
    )


def best_first(
    probability: Callable[[Path], float], *, nodes: int, num_heads: int, max_rank: int
) -> tuple[Tree, list[float]]:
    """The `nodes - 1` likeliest paths, which always form a tree, and each path's probability in order of choice.

    Exactly optimal for every size when a path is never likelier than its prefix (the sum over nodes of
    P(path right) is the expected number of accepted tokens), and later siblings are tried too: all `max_rank`
    children of a chosen path are candidates. Ties: shorter path first, then lower ranks, so a prefix always comes
    before what it leads to. Paths of probability 0 are never chosen.
    """
    heap: list[tuple[float, int, Path]] = []

    def push_children(path: Path) -> None:
        if len(path) < num_heads:
            for rank in range(max_rank):
                child = (*path, rank)
                if (p := probability(child)) > 0.0:
                    heapq.heappush(heap, (-p, len(child), child))

    push_children(())
    chosen: list[Path] = []
    values: list[float] = []
    while heap and len(chosen) < nodes - 1:
        negative, _, path = heapq.heappop(heap)
        chosen.append(path)
        values.append(-negative)
        push_children(path)
    return Tree.from_choices(chosen), values
