"""The launch plan: what it promises for every shape and device, without either."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.aot import ARCHITECTURES, problems
from kernels.launch_plan import BYTES, SIZES, Device, Shape, configs, plan_launch

ROOT = Path(__file__).resolve().parents[2]
devices = st.builds(Device.of, st.sampled_from(ARCHITECTURES), st.integers(1, 160))
shapes = st.builds(
    lambda batch, kv_heads, group, nodes, size, slots, dtype: Shape(
        batch, kv_heads * group, kv_heads, nodes, size, slots, dtype
    ),
    *(st.integers(1, most) for most in (64, 32, 16, 128)),
    st.sampled_from(SIZES),
    st.integers(1, 1 << 17),
    st.sampled_from(sorted(BYTES)),
)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(shapes, devices, st.booleans())
def test_every_plan_covers_the_rows_with_a_configuration_that_is_listed(
    shape: Shape, device: Device, general: bool
) -> None:
    """Catches rows that no program attends for, a kernel that was never compiled ahead, and shares of no tile."""
    plan = plan_launch(shape, device, general=general)
    assert plan.row_blocks * plan.config.block_m >= shape.rows > (plan.row_blocks - 1) * plan.config.block_m
    assert plan.config in set(configs(device))
    assert plan.config.block_d >= shape.size
    assert plan.splits == 1 or plan.splits * 4 * plan.config.block_n <= shape.slots + plan.config.block_n
    assert plan_launch(shape, device, general=general) == plan


def test_long_prefixes_occupy_the_device_and_full_batches_are_not_split() -> None:
    """Catches one program per head on a hundred processors, and a merge that nobody needs."""
    device = Device.of("sm90", 132)
    alone = plan_launch(Shape(1, 32, 8, 26, 128, 8192, "bf16"), device)
    waves = alone.splits * 8 * alone.row_blocks / 132
    assert waves / -(-alone.splits * 8 * alone.row_blocks // 132) > 0.8
    assert plan_launch(Shape(64, 32, 8, 26, 128, 8192, "bf16"), device).splits == 1
    assert plan_launch(Shape(1, 32, 8, 26, 128, 100, "bf16"), device).splits == 1


def test_less_shared_memory_means_fewer_stages() -> None:
    """Catches a plan that knows one architecture's limit only."""
    small, large = (
        plan_launch(Shape(1, 8, 8, 64, 256, 4096, "bf16"), Device.of(arch, 80)) for arch in ("sm89", "sm90")
    )
    assert small.config.stages < large.config.stages


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(ValueError, match="sm42"):
        Device.of("sm42", 10)


def compiled(*flags: str) -> list[dict[str, object]]:
    """Rows of `python -m kernels.aot --json`, in a process without the interpreter."""
    command = [sys.executable, "-m", "kernels.aot", "--json", "--workers", "2", *flags]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, object]] = json.loads(done.stdout)
    return rows


def compare_with_the_table(rows: list[dict[str, object]]) -> None:
    """The lines of docs/kernels.md are those that were compiled now."""
    lines = (ROOT / "docs" / "kernels.md").read_text().splitlines()
    header = next(line for line in lines if line.startswith("| configuration |"))
    names = [cell.strip() for cell in header.strip("|").split("|")]
    table = {}
    for line in lines:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == len(names):
            table[cells[0]] = dict(zip(names, cells, strict=True))
    for row in rows:
        expected = table[str(row["config"])][str(row["arch"])]
        assert f"{int(str(row['shared_bytes'])) / 1024:g}, {row['registers']}" == expected, row


def test_some_configurations_compile_as_the_table_says() -> None:
    """Catches a kernel that no GPU takes, a spill, more shared memory than there is, and a table of another kernel."""
    rows = [row for arch in ("sm80", "sm90") for row in compiled("--arch", arch, "--only", "bf16 d128 1")]
    assert len(rows) == 4, rows
    assert not [problem for row in rows for problem in problems(row)]
    compare_with_the_table(rows)


@pytest.mark.long
def test_every_configuration_compiles_as_the_table_says() -> None:
    """All that the plan can choose, on every architecture."""
    rows = compiled()
    expected = {(arch, str(config)) for arch in ARCHITECTURES for config in configs(Device.of(arch, 1))}
    assert expected <= {(str(row["arch"]), str(row["config"])) for row in rows}
    compare_with_the_table(rows)
