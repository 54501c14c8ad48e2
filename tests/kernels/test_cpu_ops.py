"""The compiled operators against those of `medusa_core.ops` in Python."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from kernels.cpu_ops import load_cpu_ops
from medusa_core import ops
from medusa_core.compiling import cache_directory
from medusa_core.packing import reordered

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")


@pytest.fixture(autouse=True, scope="module")
def loaded() -> None:
    assert load_cpu_ops(cache_directory()) is None
    # Or the tests below would compare Python with itself.
    for name in ("packed_linear", "write_cache", "tree_attention"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"medusa::{name}", "CPU")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_products_over_reordered_weights(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 3, 16, dtype=dtype), torch.randn(24, 16, dtype=dtype)
    added = torch.randn(24, dtype=dtype) if bias else None
    out = ops.packed_linear(x, reordered(weight), added)
    assert torch.equal(out, ops._packed_linear(x, reordered(weight), added))
    torch.testing.assert_close(out, torch.nn.functional.linear(x, weight, added), atol=0.1, rtol=0.05)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("starts", [[4], [4, 4], [0, 9]])
@pytest.mark.parametrize("transposed", [False, True])
def test_new_keys_land_where_python_puts_them(dtype: torch.dtype, starts: list[int], transposed: bool) -> None:
    """Catches a layer, row, head or slot mistaken for another, and new keys read by the strides of a contiguous one."""
    torch.manual_seed(0)
    stores = [torch.randn(3, 4, 2, 12, 5, dtype=dtype) for _ in range(2)]
    expected = [store.clone() for store in stores]
    shape = (len(starts), 3, 2, 5) if transposed else (len(starts), 2, 3, 5)
    new = [torch.randn(shape, dtype=dtype) for _ in range(2)]
    if transposed:
        new = [each.transpose(1, 2) for each in new]
    where = (1, 2, torch.tensor(starts))
    ops.write_cache(*stores, *new, *where)
    ops._write_cache(*expected, *new, *where)
    assert all(torch.equal(store, other) for store, other in zip(stores, expected, strict=True))


def test_values_of_another_width_and_a_last_dimension_with_gaps() -> None:
    keys, values = torch.zeros(1, 1, 1, 4, 6), torch.zeros(1, 1, 1, 4, 2)
    key, value = torch.arange(12.0).view(1, 1, 6, 2).transpose(2, 3), torch.ones(1, 1, 2, 2)
    ops.write_cache(keys, values, key, value, 0, 0, torch.tensor([1]))
    assert torch.equal(keys[0, 0, 0, 1:3], key[0, 0]) and float(values.sum()) == 4


@pytest.mark.parametrize(("start", "row"), [(10, 0), (-1, 0), (0, 4)])
def test_a_store_past_the_cache_is_refused(start: int, row: int) -> None:
    """Catches memory written that isn't the cache's."""
    keys, key = torch.zeros(1, 4, 1, 12, 2), torch.ones(1, 1, 3, 2)
    with pytest.raises(RuntimeError):
        ops.write_cache(keys, keys.clone(), key, key, 0, row, torch.tensor([start]))
    assert not keys.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("boolean", [False, True])
def test_attention_over_a_tree(dtype: torch.dtype, folded: bool, boolean: bool) -> None:
    """Catches rows and slots read past those of the mask, a mask not repeated for its group, a lost scale."""
    torch.manual_seed(0)
    query, keys = torch.randn(2, 6, 5, 8, dtype=dtype), torch.randn(3, 2, 20, 8, dtype=dtype)
    values = torch.randn(3, 2, 20, 4, dtype=dtype)
    seen = torch.rand(2, 1, 5, 16) < 0.6
    seen[..., 0] = True
    seen = seen.repeat(1, 1, 3, 1) if folded else seen
    mask = seen if boolean else torch.where(seen, 0.0, float("-inf")).to(dtype)
    for scale in (None, 0.3):
        out = ops.tree_attention(query, keys, values, mask, scale)
        assert out.shape == (2, 5, 6, 4)
        assert torch.equal(out, ops.masked_attention(query, keys, values, mask, scale))


def test_a_source_that_does_not_compile_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a traceback, or silence, where steps merely stay slower."""
    broken = tmp_path / "broken.cpp"
    broken.write_text("this is not C++")
    monkeypatch.setattr("kernels.cpu_ops._SOURCE", broken)
    why_not = load_cpu_ops(tmp_path / "cache")
    assert why_not is not None and why_not.startswith("the compiler failed on broken.cpp") and "\n" not in why_not
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no-such-compiler" in (load_cpu_ops(tmp_path / "other") or "")
