"""What a registered version consists of, checked on the way in and on the way out: every file is there and of its kind.

Digests are the registry's affair. Knows nothing of what the figures mean.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from safetensors import SafetensorError, safe_open

from infra.errors import UserError
from medusa_core.checkpoint import CONFIG, WEIGHTS, read_config
from medusa_core.errors import InputError
from tasks.latency import TABLE as LATENCY
from tasks.ranks import TABLE as RANKS
from tasks.ranks import WIDTH as RANKS_WIDTH
from tasks.tree import read_portfolio

REPORT_SCHEMA = "medusa.report/1"


def check_version(folder: Path) -> None:
    """UserError that names the first file which is missing or not what its place says."""
    for name, read in _KINDS.items():
        path = folder / name
        if not path.is_file():
            raise UserError(f"{path} is missing: a version has {', '.join(_KINDS)}")
        try:
            read(path)
        except (InputError, UserError) as error:
            raise UserError(str(error)) from None
        except (ValueError, OSError, pa.ArrowException, SafetensorError, yaml.YAMLError) as error:
            raise UserError(f"{path} is not what its name says ({error})") from None


def _is_report(path: Path) -> None:
    found = json.loads(path.read_text())
    if not isinstance(found, dict) or found.get("schema") != REPORT_SCHEMA:
        raise ValueError(f"no {REPORT_SCHEMA}")


def _is_mapping(path: Path) -> None:
    # JSON is YAML.
    if not isinstance(yaml.safe_load(path.read_text()), dict):
        raise ValueError("no mapping")


def _is_ranks(path: Path) -> None:
    if RANKS_WIDTH not in (pq.read_schema(path).metadata or {}):
        raise ValueError("no ranks")


def _is_safetensors(path: Path) -> None:
    with safe_open(path, "pt") as file:
        if not list(file.keys()):
            raise ValueError("no tensor in it")


_KINDS: dict[str, Callable[[Path], Any]] = {
    f"heads/{CONFIG}": lambda path: read_config(path.parent),
    f"heads/{WEIGHTS}": _is_safetensors,
    "tree/portfolio.json": read_portfolio,
    f"ranks/{RANKS}": _is_ranks,
    f"latency/{LATENCY}": _is_mapping,
    "report.json": _is_report,
    "config.yaml": _is_mapping,
    "lineage.json": _is_mapping,
}
