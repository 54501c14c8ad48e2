"""Reads prompt files and named sets, row by row, as they are.

Local files and hub sets both go through `datasets`, with its caches under the store's root and its reports home
switched off. Knows nothing of splits, duplicates or what makes a row usable.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from huggingface_hub import HfApi, constants

from infra.artifacts import digest_file, digest_json
from infra.errors import UserError
from infra.hub_client import SILENCE_SECONDS, limit_silence

# Where a row's turns may stand, in this order. The last ones are what chat sets at the hub use.
TURN_COLUMNS = ("turns", "prompt", "conversations", "messages")
SEED_FILE = Path(__file__).parent / "data" / "seed_prompts.jsonl"
_HUB_NAME = re.compile(r"hub:(?P<name>[\w.-]+(?:/[\w.-]+)?)(?:@(?P<revision>[\w./-]+))?(?::(?P<split>\w+))?")


class SourceUnreachable(UserError):
    """A hub that doesn't answer, or doesn't know the set."""


@dataclass(frozen=True)
class PromptSource:
    """`name` as the user wrote it, `label` for rows that don't name theirs, `digest` of the content."""

    name: str
    label: str
    digest: str
    rows: Callable[[], Iterator[Any]]


def open_source(name: str, root: Path) -> PromptSource:
    """Finds a source and digests it, without reading rows; UserError if it is missing or of an unknown kind."""
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # else even a local file is reported to the hub
    cache = root / "cache" / "datasets"
    if name.startswith("hub:"):
        return _hub_source(name, cache)
    path = SEED_FILE if name == "seed" else Path(name).expanduser()
    if not path.is_file():
        raise UserError(
            f"prompt source {name!r} does not exist: give 'seed', a JSONL, JSON or Parquet file, or hub:NAME"
        )
    readers = {".jsonl": _read_lines, ".json": _read_array, ".parquet": _read_parquet}
    if (reader := readers.get(path.suffix)) is None:
        raise UserError(f"prompt source {name!r} must end with one of {', '.join(readers)}, not {path.suffix!r}")
    return PromptSource(name, path.stem, digest_file(path), lambda: reader(path, cache))


def _read_lines(path: Path, cache: Path) -> Iterator[Any]:
    """Rows of a JSONL file; a line that isn't JSON comes as its text, and an empty one not at all.

    Read as text, because the JSON loader wants every row to have the same types and fails the file for one bad row.
    """
    for row in _stream("text", path, cache):
        if line := row["text"].strip():
            try:
                yield json.loads(line)
            except ValueError:
                yield line


def _read_array(path: Path, cache: Path) -> Iterator[Any]:
    text = "\n".join(row["text"] for row in _stream("text", path, cache))
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UserError(f"prompt source {path} is not JSON: {error}") from error
    if not isinstance(value, list):
        raise UserError(f"prompt source {path} must hold a JSON array of rows (or be JSONL, one row a line)")
    yield from value


def _read_parquet(path: Path, cache: Path) -> Iterator[Any]:
    yield from _stream("parquet", path, cache)


def _stream(kind: str, path: Path, cache: Path) -> Iterator[Any]:
    try:
        yield from datasets.load_dataset(
            kind, data_files=str(path.resolve()), split="train", streaming=True, cache_dir=str(cache)
        )
    except (UnicodeDecodeError, OSError, ValueError) as error:  # pyarrow's errors are ValueErrors
        raise UserError(f"prompt source {path} can't be read as {kind}: {error}") from error


def _hub_source(name: str, cache: Path) -> PromptSource:
    match = _HUB_NAME.fullmatch(name)
    if match is None:
        raise UserError(f"prompt source {name!r} must look like hub:NAME, hub:OWNER/NAME@REVISION or hub:NAME:SPLIT")
    dataset, split = match["name"], match["split"] or "train"
    limit_silence()
    commit = _dataset_commit(name, dataset, match["revision"])

    def rows() -> Iterator[Any]:
        try:
            builder = datasets.load_dataset_builder(dataset, revision=commit, cache_dir=str(cache))
            # `datasets` prefers a local folder of that name, and falls back to whatever revision it has cached.
            if builder.hash != commit:
                raise UserError(f"prompt source {name!r}: commit {commit} can't be had from the hub now")
            builder.download_and_prepare()
            yield from builder.as_dataset(split=split)
        except UserError:
            raise
        except Exception as error:  # hub, HTTP and builder errors share no base class
            raise UserError(f"prompt source {name!r} can't be loaded ({type(error).__name__}): {error}") from error

    return PromptSource(name, dataset, digest_json([dataset, commit, split]), rows)


def _dataset_commit(name: str, dataset: str, revision: str | None) -> str:
    """The commit that pins a hub set; a full commit given by the user needs no answer from the hub."""
    if revision and re.fullmatch("[0-9a-f]{40}", revision):
        return revision
    endpoint = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
    try:
        info = HfApi(endpoint=endpoint).dataset_info(dataset, revision=revision, timeout=SILENCE_SECONDS)
    except Exception as error:  # as above
        raise SourceUnreachable(
            f"prompt source {name!r} can't be looked up at {endpoint} ({type(error).__name__}): set HF_ENDPOINT to a "
            "mirror, check the name and HF_TOKEN, or give a local JSONL or Parquet file"
        ) from error
    return str(info.sha)
