"""Compiles every configuration of the launch plan for GPUs that need not be here: `python -m kernels.aot [--json]`.

Says what each takes: shared memory, registers, spills. A configuration that doesn't compile, spills or asks for more
shared memory than its architecture has ends it with exit code 1. Must not run with TRITON_INTERPRET=1: interpreted
functions can't be compiled.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.launch_plan import BYTES, MERGE_AT_ONCE, SIZES, Config, Device, block_of, configs
from kernels.tree_attention import attend, merge

ARCHITECTURES = ("sm80", "sm89", "sm90", "sm100")
_WARP = 32
_CUOBJDUMP = Path(triton.backends.nvidia.compiler.__file__).parent / "bin" / "cuobjdump"


def jobs(arch: str) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Everything that the launch plan can choose on an architecture: its name, what compiles it, from what."""
    for config in configs(Device.of(arch, processors=1)):
        yield str(config), compile_attend, (config, arch)
    for dtype in BYTES:
        for size in SIZES:
            yield _merge_name(dtype, size), compile_merge, (dtype, size, arch)


def compile_all(architectures: Sequence[str], only: str = "", workers: int = 1) -> Iterator[dict[str, Any]]:
    """Rows of the table as they are done, in order."""
    found = [
        (compiler, arguments) for arch in architectures for name, compiler, arguments in jobs(arch) if only in name
    ]
    with ProcessPoolExecutor(workers) as pool:
        yield from pool.map(_run, *zip(*found, strict=True))


def _run(compiler: Any, arguments: tuple[Any, ...]) -> dict[str, Any]:
    compiled: dict[str, Any] = compiler(*arguments)
    return compiled


def _merge_name(dtype: str, size: int) -> str:
    return f"{dtype} d{size} merge"


def compile_attend(config: Config, arch: str) -> dict[str, Any]:
    """One row of the table: {arch, config, shared_bytes, registers, spill_bytes}."""
    pointers = {"q_ptr": config.dtype, "k_ptr": config.dtype, "v_ptr": config.dtype, "out_ptr": config.dtype}
    pointers |= {"mask_ptr": "i64", "part_ptr": "fp32", "lse_ptr": "fp32"}
    constants = {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_D": config.block_d,
        "SIZE": config.size, "GENERAL": config.general, "UPCAST": False,
    }  # fmt: skip
    options = {"num_warps": config.warps, "num_stages": config.stages}
    return {"arch": arch, "config": str(config)} | _compile(
        attend, pointers, {"scale", "softcap"}, constants, options, arch
    )


def compile_merge(dtype: str, size: int, arch: str) -> dict[str, Any]:
    """A row for the kernel that merges."""
    pointers = {"part_ptr": "fp32", "lse_ptr": "fp32", "out_ptr": dtype}
    constants = {"SIZE": size, "BLOCK_S": MERGE_AT_ONCE, "BLOCK_D": block_of(size)}
    compiled = _compile(merge, pointers, set(), constants, {"num_warps": 4, "num_stages": 3}, arch)
    return {"arch": arch, "config": _merge_name(dtype, size)} | compiled


def _compile(
    kernel: Any,
    pointers: dict[str, str],
    floats: set[str],
    constants: dict[str, Any],
    options: dict[str, Any],
    arch: str,
) -> dict[str, Any]:
    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        return f"*{pointers[name]}" if name in pointers else "fp32" if name in floats else "i32"

    signature = {name: kind(name) for name in kernel.arg_names}
    # As at a launch: tensors are aligned, and rows of 64 or more elements keep every stride a multiple of 16.
    aligned = [name for name in kernel.arg_names if name in pointers or _is_row_stride(name)]
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    target = GPUTarget("cuda", int(arch[2:]), _WARP)
    compiled = triton.compile(source, target=target, options=options | {"enable_fp_fusion": True})
    registers, spilled = _resources(compiled.asm["cubin"])
    return {"shared_bytes": compiled.metadata.shared, "registers": registers, "spill_bytes": spilled}


def _is_row_stride(name: str) -> bool:
    return name.startswith("stride_") and not name.startswith("stride_m")


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers a thread, and bytes it keeps in local memory for want of them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_CUOBJDUMP), "--dump-resource-usage", file.name]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+).*?LOCAL:(\d+)", printed)
    stack = re.search(r"STACK:(\d+)", printed)
    if found is None or stack is None:
        raise RuntimeError(f"cuobjdump printed no resources: {printed}")
    return int(found[1]), max(int(found[2]), int(stack[1]))


def problems(row: Mapping[str, Any]) -> list[str]:
    """Why a kernel can't be shipped."""
    limit = Device.of(row["arch"], processors=1).shared_bytes
    found = []
    if row["shared_bytes"] > limit:
        found.append(f"{row['shared_bytes']} bytes of shared memory, {limit} are there")
    if row["spill_bytes"]:
        found.append(f"{row['spill_bytes']} bytes spilled")
    return found


def as_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each configuration: on each architecture, shared KiB and registers."""
    architectures = list(dict.fromkeys(row["arch"] for row in rows))
    lines = [f"| configuration | {' | '.join(architectures)} |", "|---|" + "---|" * len(architectures)]
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        cells.setdefault(row["config"], {})[row["arch"]] = f"{row['shared_bytes'] / 1024:g}, {row['registers']}"
    lines += [
        f"| {config} | " + " | ".join(own.get(a, "") for a in architectures) + " |" for config, own in cells.items()
    ]
    return "\n".join(lines)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m kernels.aot", description=__doc__)
    parser.add_argument("--arch", action="append", choices=ARCHITECTURES, help="default: all")
    parser.add_argument("--only", default="", help="configurations that contain this text")
    parser.add_argument("--workers", type=int, default=1, help="processes that compile")
    parser.add_argument("--json", action="store_true", help="print rows as JSON, not the table of docs/kernels.md")
    flags = parser.parse_args()
    if not any(flags.only in name for arch in ARCHITECTURES for name, *_ in jobs(arch)):
        sys.exit(f"no configuration contains {flags.only!r}: see docs/kernels.md")
    rows = list(compile_all(flags.arch or ARCHITECTURES, flags.only, flags.workers))
    print(json.dumps(rows, indent=1) if flags.json else as_markdown(rows))
    bad = [f"{row['arch']} {row['config']}: {problem}" for row in rows for problem in problems(row)]
    if bad:
        sys.exit("\n".join(bad))


if __name__ == "__main__":
    main()
