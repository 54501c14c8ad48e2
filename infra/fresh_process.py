"""Runs a module in a process of its own, so that what it times shares nothing with the pipeline around it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infra.environment import quiet
from infra.errors import UserError


def run_fresh(module: str, spec: Mapping[str, Any], scratch: Path, *, threads: int) -> dict[str, Any]:
    """`python -m module SPEC RESULT` with an explicit thread count; returns the JSON it wrote.

    Its standard error goes through. UserError with the module's own sentence if it exits with 2.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    spec_path, result_path = scratch / "spec.json", scratch / "result.json"
    spec_path.write_text(json.dumps(spec))
    result_path.unlink(missing_ok=True)
    environment = dict(os.environ) | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    # Everything a timed stage needs is on disk by now.
    environment |= {"HF_HUB_OFFLINE": "1"}
    quiet(environment)
    done = subprocess.run([sys.executable, "-m", module, str(spec_path), str(result_path)], env=environment)
    if done.returncode == 2 and result_path.exists():
        raise UserError(json.loads(result_path.read_text())["error"])
    if done.returncode:
        raise RuntimeError(f"{module} ended with exit code {done.returncode}; its output stands above")
    result: dict[str, Any] = json.loads(result_path.read_text())
    return result


def fresh_main(run: Any) -> None:
    """Entry point of such a module: `run(spec) -> result`, a wrong input becomes exit code 2 and a sentence."""
    spec_path, result_path = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        result = run(json.loads(spec_path.read_text()))
    except ValueError as error:
        if type(error) is ValueError:
            raise
        result_path.write_text(json.dumps({"error": str(error)}))
        sys.exit(2)
    result_path.write_text(json.dumps(result))
