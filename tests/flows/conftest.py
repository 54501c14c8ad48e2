"""A whole run on the toy backbone, made once and looked at by many tests."""

from __future__ import annotations

import io
import json
import logging
import os
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import toys

MEDUSA = Path(sys.executable).parent / "medusa"


def toy_prompts(path: Path, count: int = 90) -> Path:
    """Distinct toy prompts, every fifth with a second turn, in two categories."""
    rng = random.Random(3)
    seen: set[tuple[int, ...]] = set()
    while len(seen) < count:
        seen.add(tuple(rng.randrange(toys.WORDS) for _ in range(rng.randrange(1, 4))))
    rows = []
    for number, words in enumerate(sorted(seen)):
        turns = [" ".join(f"w{word}" for word in words)]
        if number % 5 == 0:
            turns.append(f"w{number % toys.WORDS}")
        rows.append({"category": ("odd", "even")[number % 2], "turns": turns})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def toy_config(directory: Path, toy_dir: Path, **changes: Any) -> Path:
    """A configuration file for a run of seconds."""
    prompts = toy_prompts(directory / "prompts.jsonl")
    values: dict[str, Any] = {
        "name": "toy",
        "backbone": str(toy_dir),
        "prompts": {"sources": [str(prompts)], "split": {"train": 0.5, "calibration": 0.2, "benchmark": 0.3}},
        "distill": {
            "temperatures": [0.0, 0.5],
            "max_new_tokens": 48,
            "dtype": "float32",
            "batch_size": 8,
            "shard_size": 16,
        },
        "teacher": {"top_k": 4, "dtype": "float32"},
        "heads": {"num_heads": 3, "vocab": 62},
        "train": {
            "epochs": 8,
            "batch_positions": 256,
            "learning_rate": 1e-2,
            "warmup_steps": 5,
            "dtype": "float32",
            "checkpoint_steps": 20,
        },
        "ranks": {"max_rank": 4},
        "engine": {"compile": "off"},
        "latency": {"nodes": [1, 2, 4, 8], "contexts": [32], "rounds": 2, "steps": 4, "dtype": "float32"},
        "tree": {"max_nodes": 8},
        "benchmark": {
            "max_minutes": 0.2,
            "max_new_tokens": 40,
            "compiled": False,
            "dtype": "float32",
            "lossless_prompts": 20,
            "lossless_tokens": 40,
        },
    }
    for key, value in changes.items():
        values[key] = {**values[key], **value} if isinstance(value, dict) else value
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def borrow(source: Path, root: Path, *kinds: str) -> Path:
    """A root that finds the artifacts of another, of these kinds, and builds everything else itself."""
    for kind in kinds:
        (root / "artifacts" / kind).mkdir(parents=True, exist_ok=True)
        for entry in (source / "artifacts" / kind).iterdir():
            (root / "artifacts" / kind / entry.name).symlink_to(entry)
    return root


# What a machine's environment holds and nothing that is written may.
SECRETS = {
    "HF_TOKEN": "hf_neverToBeSeen1",
    "AWS_SECRET_ACCESS_KEY": "awsNeverToBeSeen2",
    "PREFECT_API_KEY": "pnu_Never3",
}


def run_medusa(
    *arguments: object, timeout: float = 600, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own, with more in its environment."""
    command: Sequence[str] = [str(MEDUSA), *map(str, arguments)]
    env = {**os.environ, **(environment or {})}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env)


def medusa_here(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The same command line in this process: what is tested is not the start, and a start costs ten seconds."""
    import flows.cli
    from flows.run_directory import PACKAGES

    command = ["medusa", *map(str, arguments)]
    stdout, stderr, code = io.StringIO(), io.StringIO(), 0
    loggers = [logging.getLogger(name) for name in PACKAGES]
    before = [(logger.level, logger.handlers[:], logger.propagate) for logger in loggers]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(stdout), redirect_stderr(stderr):
        patch.setattr(sys, "argv", command)
        try:
            flows.cli.main()
        except SystemExit as ending:
            code = int(ending.code or 0)
    for logger, (level, handlers, propagate) in zip(loggers, before, strict=True):
        logger.level, logger.handlers[:], logger.propagate = level, handlers, propagate
    return subprocess.CompletedProcess(command, code, stdout.getvalue(), stderr.getvalue())


@pytest.fixture(scope="session")
def toy_run(tmp_path_factory: pytest.TempPathFactory, toy_dir: Path) -> tuple[Path, Path, dict[str, Any], str]:
    """(root, configuration, report, terminal output) of a finished run."""
    directory = tmp_path_factory.mktemp("run")
    config, root = toy_config(directory, toy_dir), directory / "root"
    done = run_medusa("run", "--config", config, "--root", root, environment=SECRETS)
    assert done.returncode == 0, done.stderr
    report = json.loads((root / "runs" / "latest" / "report.json").read_text())
    return root, config, report, done.stdout
