"""The Triton kernels against their definitions: in the interpreter, and natively where there is a GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import compaction, reference
from kernels.tree_attention import attend_under, tree_attention
from tests.kernels.cases import CASES, Case, check
from tests.kernels.test_ancestor_bits import parent_lists

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_computes_what_is_defined(case: Case, dtype: torch.dtype) -> None:
    """Catches a wrong bit, head, stride or length, NaN from past the tree or from a share without keys, and a window or
    soft-cap left out."""
    check(case, dtype, DEVICE)


@settings(max_examples=25, derandomize=True, deadline=None)
@given(parent_lists(128), st.integers(0, 140), st.sampled_from([None, 2, 50]))
def test_any_tree_after_any_prefix(parents: list[int], prefix: int, window: int | None) -> None:
    """Catches a word boundary or a tile boundary that falls in a place which no hand-made case has."""
    check(Case((prefix,), len(parents), 2, 1, 64, window=window), torch.float32, DEVICE, [parents])


def test_a_length_past_the_cache_reads_nothing_past_it() -> None:
    """Catches an address beyond the tensor for a row whose length is nonsense."""
    query, words = torch.randn(1, 1, 2, 64, device=DEVICE), torch.tensor([[[1], [3]]], device=DEVICE)
    cache = torch.randn(1, 1, 8, 64, device=DEVICE)
    out = tree_attention(query, cache, cache, torch.tensor([1000], device=DEVICE), words, 0.1)
    assert bool(out.isfinite().all())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(1, 3, 2, 64)}, "3 query heads do not divide into 2"),
        ({"query": torch.zeros(1, 2, 2, 48), "cache": torch.zeros(1, 2, 9, 48)}, "heads of size 48"),
        ({"query": torch.zeros(1, 2, 2, 80)}, "one head size"),
        ({"query": torch.zeros(1, 2, 2, 64, dtype=torch.float16)}, "one dtype"),
        ({"cache": torch.zeros(1, 2, 64, 9).transpose(2, 3)}, "last dimension"),
        ({"query": torch.zeros(2, 2, 2, 64), "mask": torch.zeros(2, 1, 2, 2, dtype=torch.int64)}, "1 rows for 2"),
        ({"mask": torch.zeros(1, 1, 2, 2)}, "int64"),
        ({"mask": torch.zeros(1, 1, 2, 4, dtype=torch.int64)}, "2 or 3"),
        (
            {"query": torch.zeros(1, 2, 129, 64), "mask": torch.zeros(1, 1, 129, 4, dtype=torch.int64)},
            "a tree of 129 nodes",
        ),
    ],
)
def test_what_no_kernel_is_made_for_is_refused(change: dict[str, torch.Tensor], message: str) -> None:
    """Catches a wrong answer, or an address error, where a sentence belongs."""
    given_ = {
        "query": torch.zeros(1, 2, 2, 64),
        "cache": torch.zeros(1, 2, 9, 64),
        "mask": torch.zeros(1, 1, 2, 2, dtype=torch.int64),
    } | change
    with pytest.raises(ValueError, match=message):
        attend_under(given_["query"], given_["cache"], given_["cache"], given_["mask"])


@settings(max_examples=30, derandomize=True, deadline=None)
@given(st.data())
def test_compaction_moves_what_is_defined(data: st.DataObject) -> None:
    """Catches a source overwritten before it was read, a layer or head left behind, and slots off the path."""
    layers, heads, batch, length = (data.draw(st.integers(1, most)) for most in (3, 3, 3, 6))
    size, nodes = data.draw(st.sampled_from([3, 64, 80])), 12
    starts = torch.tensor([data.draw(st.integers(0, 5)) for _ in range(batch)])
    # Ascending, as along a path; what lies past an accepted length may be anything.
    paths = torch.tensor(
        [[0, *sorted(data.draw(st.lists(st.integers(1, nodes - 1), min_size=length - 1, max_size=length - 1)))]
         for _ in range(batch)]
    )  # fmt: skip
    keys, values = (torch.randn(layers, batch + 1, heads, 20, size) for _ in range(2))
    expected = [each.clone() for each in (keys, values)]
    reference.compact_cache(*expected, starts, paths)
    moved = [each.to(DEVICE) for each in (keys, values)]
    compaction.compact_cache(*moved, starts.to(DEVICE), paths.to(DEVICE))
    for found, right in zip(moved, expected, strict=True):
        assert torch.equal(found.cpu(), right)
