"""Which tree a step uses, by how many rows are active and how long their context is. Trees only; it measures nothing.

The entries are cells of one machine's latency table (see `tasks/tree.py`); "off" is an entry like any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from medusa_core.errors import InputError
from medusa_core.tree import OFF, Tree


@dataclass(frozen=True)
class Entry:
    """The fastest tree for one measured batch and context."""

    batch: int
    context: int
    tree: Tree


@dataclass(frozen=True)
class Portfolio:
    """Trees by batch and context."""

    entries: tuple[Entry, ...]

    def __post_init__(self) -> None:
        if not self.entries:
            raise InputError("a portfolio needs at least one entry")

    @classmethod
    def of(cls, tree: Tree) -> Portfolio:
        """The same tree always."""
        return cls((Entry(1, 1, tree),))

    @classmethod
    def from_entries(cls, entries: Iterable[Mapping[str, Any]]) -> Portfolio:
        """From the `entries` of a portfolio.json; InputError for a tree that is none."""
        return cls(tuple(Entry(e["batch"], e["context"], Tree.from_choices(e["choices"])) for e in entries))

    @property
    def trees(self) -> tuple[Tree, ...]:
        """The distinct trees."""
        return tuple(dict.fromkeys(entry.tree for entry in self.entries))

    @property
    def nodes(self) -> int:
        """Nodes of the largest tree: the slots a row must keep free."""
        return max(tree.nodes for tree in self.trees)

    def pick(self, batch: int, context: int) -> Tree:
        """The tree of the entry nearest to a batch, and among those to a context; nearest as a ratio, since both are
        measured at powers. Ties go to the entry named first."""
        return self.entries[nearest([(e.batch, e.context) for e in self.entries], batch, context)].tree


def nearest(cells: Sequence[tuple[int, int]], batch: int, context: int) -> int:
    """Index of the measured (batch, context) nearest to one that is asked for, as `Portfolio.pick` says."""
    return min(range(len(cells)), key=lambda i: (_apart(cells[i][0], batch), _apart(cells[i][1], context)))


def _apart(left: int, right: int) -> float:
    left, right = max(left, 1), max(right, 1)
    return max(left, right) / min(left, right)


PLAIN = Portfolio.of(OFF)
