"""Building and loading `cpu_ops.cpp`, once per machine and version of torch. Knows compilers and files, no models."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

import torch
from torch.utils import cpp_extension

_SOURCE = Path(__file__).with_suffix(".cpp")
_outcomes: dict[tuple[str, str], str | None] = {}
_FLAGS = ("-O3", "-std=c++20", "-shared", "-fPIC")


def load_cpu_ops(directory: Path) -> str | None:
    """Lets the CPU's operators run as compiled code in this process, built into `directory` unless they lie there.

    None, or why they stay as they are, in a sentence. What came of it holds for the process.
    """
    compiler = os.environ.get("CXX", "g++")
    key = _key()
    if (key, compiler) not in _outcomes:
        _outcomes[key, compiler] = _load(directory / f"cpu_ops-{key}.so", compiler)
    return _outcomes[key, compiler]


def _load(library: Path, compiler: str) -> str | None:
    try:
        if not library.exists():
            _build(library, compiler)
        torch.ops.load_library(library)
    except subprocess.CalledProcessError as error:
        return (
            f"the compiler failed on {_SOURCE.name}: {(error.stderr.strip() or 'it printed nothing').splitlines()[0]}"
        )
    except OSError as error:
        return f"{_SOURCE.name} can't be built or loaded: {error}"
    return None


def _build(library: Path, compiler: str) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    # Renamed when it is whole, so that a process beside this one never loads half a library.
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        built = Path(scratch) / library.name
        includes = [f"-isystem{path}" for path in cpp_extension.include_paths()]
        libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
        command = [compiler, *_FLAGS, *includes, str(_SOURCE), "-o", str(built), *libraries, "-lc10", "-ltorch_cpu"]
        subprocess.run(command, check=True, capture_output=True, text=True)
        built.replace(library)


def _key() -> str:
    parts = [_SOURCE.read_text(), torch.__version__, *_FLAGS]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
