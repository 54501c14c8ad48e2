"""Stage `prompts`: seed conversations, cleaned, deduplicated and split for training, calibration and benchmark.

A prompt's side follows from a hash of its own normalised text, so it never changes side, a duplicate never straddles
two, and a prompt added to one split leaves the bytes of the others alone. Rows in = rows kept + rows rejected.
Knows nothing of tokenizers or models: `max_prompt_chars` counts characters.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field, field_validator

from infra.artifacts import Artifact, ArtifactStore, artifact_key, remove_partial
from infra.errors import UserError
from tasks.prompt_sources import TURN_COLUMNS, PromptSource, open_source

STAGE_VERSION = 2
KIND = "prompts"
SPLITS = ("train", "calibration", "benchmark")
SCHEMA = pa.schema(
    [(name, pa.string()) for name in ("prompt_id", "category", "source", "split")]
    + [(name, pa.list_(pa.string())) for name in ("turns", "answers")]
)
REJECTED_SCHEMA = pa.schema(
    [("source", pa.string()), ("row", pa.int64()), ("reason", pa.string()), ("text", pa.string())]
)
# Reasons that blame the row itself; the other two ("duplicate", "beyond limit") say that a good row wasn't needed.
BAD = ("empty", "not text", "role-less", "over-long")
_USER_ROLES, _ANSWER_ROLES = {"user", "human"}, {"assistant", "gpt", "model"}
_EXCERPT = 200

log = logging.getLogger(__name__)


class PromptsConfig(BaseModel):
    """`sources`: "seed", paths of JSONL, JSON or Parquet files, or `hub:NAME[@REVISION][:SPLIT]`.

    `limit` is the most prompts taken per source, shared out by `split` and chosen by hash.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    sources: list[str] = Field(default=["seed"], min_length=1)
    limit: int | None = Field(default=None, ge=1)
    max_prompt_chars: int = Field(default=8000, ge=1)
    split: dict[str, float] = {"train": 0.7, "calibration": 0.15, "benchmark": 0.15}

    @field_validator("split")
    @classmethod
    def _whole(cls, value: dict[str, float]) -> dict[str, float]:
        if set(value) != set(SPLITS) or min(value.values()) < 0 or abs(sum(value.values()) - 1) > 1e-9:
            raise ValueError(f"split {value} must give a share to each of {', '.join(SPLITS)}, adding up to 1")
        return value


@dataclass(frozen=True)
class Prompt:
    """One seed conversation: the user's turns, in order, and the answers that the source itself gives to the first of
    them (all, some or none). `prompt_id` is unique within its split."""

    prompt_id: str
    category: str
    source: str
    turns: tuple[str, ...]
    answers: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Candidate:
    prompt: Prompt
    row: int
    digest: str
    split: str


class _Rejected(Exception):
    """Why a row can't be used: one of BAD."""


def collect_prompts(store: ArtifactStore, config: PromptsConfig) -> Artifact:
    """The stage. UserError if a source is missing, unreadable, or has no row that can be used."""
    sources = [open_source(name, store.root) for name in config.sources]
    inputs = {f"source.{i}": source.digest for i, source in enumerate(sources)}
    # Names label rows that don't say where they come from; the folder a file lies in is in neither rows nor key.
    semantic = {**config.model_dump(exclude={"sources"}), "labels": [source.label for source in sources]}
    key = artifact_key(KIND, STAGE_VERSION, inputs=inputs, config=semantic)
    try:
        return store.produce(KIND, key, inputs=inputs, config=config.model_dump(), build=_builder(sources, config))
    except UserError:
        remove_partial(store, KIND, key)  # rows that were refused would be refused again
        raise


def read_split(artifact: Artifact, split: str) -> list[Prompt]:
    """The prompts of one split, sorted by id."""
    if split not in SPLITS:
        raise UserError(f"there is no split {split!r}; splits are {', '.join(SPLITS)}")
    rows = pq.read_table(artifact.file(f"{split}.parquet")).to_pylist()
    return [Prompt(r["prompt_id"], r["category"], r["source"], tuple(r["turns"]), tuple(r["answers"])) for r in rows]


def normalise(turns: Sequence[str]) -> str:
    """What two prompts must share to be the same: lower case, NFKC, runs of white space as one space, per turn."""
    return "\x1e".join(" ".join(unicodedata.normalize("NFKC", turn).lower().split()) for turn in turns)


def assign_split(digest: str, shares: Mapping[str, float]) -> str:
    """The split of a prompt, from the first 52 bits of its hash alone (as many as a float holds)."""
    point, edge = int(digest[:13], 16) / 2**52, 0.0
    for split in SPLITS:
        edge += shares[split]
        if point < edge:
            return split
    return max(SPLITS, key=lambda split: shares[split])  # only if the shares add up to a hair below 1


def _builder(sources: Sequence[PromptSource], config: PromptsConfig) -> Callable[[Path], Mapping[str, Any]]:
    def build(partial: Path) -> Mapping[str, Any]:
        seen: set[str] = set()
        kept: list[_Candidate] = []
        rejected: list[dict[str, Any]] = []
        total = 0
        for source in sources:
            good, bad, rows = _sift(source, config, seen)
            total += rows
            kept += good
            rejected += bad
        assert total == len(kept) + len(rejected), f"{total} rows in, {len(kept)} kept and {len(rejected)} rejected"
        counts = {"rows": total, "kept": len(kept), "rejected": len(rejected)}
        counts |= {split: _write_split(partial, split, kept) for split in SPLITS}
        (partial / "rejected").mkdir(exist_ok=True)
        _write(partial / "rejected" / "rejected.parquet", rejected, REJECTED_SCHEMA)
        reasons = dict(sorted(Counter(row["reason"] for row in rejected).items()))
        log.info("prompts: %s, rejected for %s", counts, reasons or "nothing")
        return {**counts, "reasons": reasons}

    return build


def _sift(
    source: PromptSource, config: PromptsConfig, seen: set[str]
) -> tuple[list[_Candidate], list[dict[str, Any]], int]:
    """Candidates of one source, its rejected rows, and how many rows it has; adds to `seen` what it keeps."""
    good: list[_Candidate] = []
    bad: list[dict[str, Any]] = []
    columns: set[str] = set()
    rows = 0

    def reject(row: int, reason: str, text: Any) -> None:
        excerpt = str(text)[:_EXCERPT].encode("utf-8", "replace").decode()
        bad.append({"source": source.label, "row": row, "reason": reason, "text": excerpt})

    for row, value in enumerate(source.rows()):
        rows += 1
        columns |= set(value) if isinstance(value, dict) else set()
        try:
            candidate = _read_row(row, value, source.label, config)
        except _Rejected as reason:
            reject(row, str(reason), value)
            continue
        if candidate.digest in seen:
            reject(row, "duplicate", value)
            continue
        seen.add(candidate.digest)
        good.append(candidate)
    _check_usable(source, bad, rows, columns)
    good, surplus = _apply_limit(good, config)
    seen -= {candidate.digest for candidate in surplus}
    for candidate in surplus:
        reject(candidate.row, "beyond limit", candidate.prompt.turns)
    return good, bad, rows


def _check_usable(source: PromptSource, bad: Sequence[Mapping[str, Any]], rows: int, columns: set[str]) -> None:
    counts = Counter(row["reason"] for row in bad)
    if sum(counts[reason] for reason in BAD) < rows:
        return
    if not rows:
        raise UserError(f"prompt source {source.name} has no rows")
    if columns and not columns & set(TURN_COLUMNS):
        found = ", ".join(sorted(columns))
        raise UserError(f"prompt source {source.name} has columns {found}; it needs one of {', '.join(TURN_COLUMNS)}")
    reasons = ", ".join(f"{reason}: {counts[reason]}" for reason in BAD if counts[reason])
    raise UserError(f"prompt source {source.name} has no usable row among {rows} ({reasons})")


def _read_row(row: int, value: Any, label: str, config: PromptsConfig) -> _Candidate:
    """A row as a candidate; raises _Rejected with the reason."""
    if not isinstance(value, dict):
        raise _Rejected("not text")
    turns, answers = _turns(value)
    if not turns or not all(turn.strip() for turn in turns):
        raise _Rejected("empty")
    if sum(map(len, turns)) > config.max_prompt_chars:
        raise _Rejected("over-long")
    digest = hashlib.sha256(normalise(turns).encode("utf-8", "surrogatepass")).hexdigest()
    given = next((value[name] for name in ("prompt_id", "question_id", "id") if value.get(name) is not None), None)
    prompt = Prompt(
        prompt_id=str(given) if given is not None else f"p-{digest[:16]}",
        category=str(value.get("category") or "general"),
        source=str(value.get("source") or label),
        turns=turns,
        answers=answers,
    )
    return _Candidate(prompt, row, digest, assign_split(digest, config.split))


def _turns(row: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The user's turns, and the answers to the first of them up to the first turn that has none."""
    turns: list[str] = []
    answers: dict[int, str] = {}
    for is_user, text in _spoken(row):
        if is_user:
            turns.append(text)
        elif turns and text.strip():
            answers.setdefault(len(turns) - 1, text)
    given = itertools.takewhile(answers.__contains__, range(len(turns)))
    return tuple(turns), tuple(answers[turn] for turn in given)


def _spoken(row: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
    """(whether the user says it, text) for what user and model say; other roles are left out."""
    turns: Any = next((row[name] for name in TURN_COLUMNS if row.get(name) is not None), [])
    for turn in [turns] if isinstance(turns, str) else turns if isinstance(turns, list) else [None]:
        role: Any = "user"
        if isinstance(turn, dict):
            role = turn.get("role", turn.get("from"))
            if not isinstance(role, str) or not role:
                raise _Rejected("role-less")
            if role.lower() not in _USER_ROLES | _ANSWER_ROLES:
                continue
            turn = turn.get("content", turn.get("value"))
        if not isinstance(turn, str):
            raise _Rejected("not text")
        if any(0xD800 <= ord(char) <= 0xDFFF for char in turn):  # half a character: no tokenizer or Parquet takes it
            raise _Rejected("not text")
        yield role.lower() in _USER_ROLES, turn


def _apply_limit(good: Sequence[_Candidate], config: PromptsConfig) -> tuple[list[_Candidate], list[_Candidate]]:
    """Splits candidates into those within the limit and the rest.

    Each split has a quota of its own: with one for all, a prompt added to one split would push one out of another.
    """
    if config.limit is None:
        return list(good), []
    quota = _quotas(config.limit, config.split)
    # Bits that the split doesn't depend on, or the limit would favour one split.
    ordered = sorted(good, key=lambda candidate: candidate.digest[16:])
    chosen: set[str] = set()
    for split in SPLITS:
        chosen |= {c.digest for c in [c for c in ordered if c.split == split][: quota[split]]}
    return [c for c in good if c.digest in chosen], [c for c in good if c.digest not in chosen]


def _quotas(limit: int, shares: Mapping[str, float]) -> dict[str, int]:
    """Whole numbers adding up to `limit`, by largest remainder."""
    quota = {split: int(limit * shares[split]) for split in SPLITS}
    by_remainder = sorted(SPLITS, key=lambda split: quota[split] - limit * shares[split])
    for split in by_remainder[: limit - sum(quota.values())]:
        quota[split] += 1
    return quota


def _write_split(partial: Path, split: str, kept: Iterable[_Candidate]) -> int:
    taken: set[str] = set()
    rows: list[dict[str, Any]] = []
    for candidate in (c for c in kept if c.split == split):
        # Two files may both number their rows from 1.
        name = candidate.prompt.prompt_id
        unique = f"{name}-{candidate.digest[:8]}" if name in taken else name
        taken.add(unique)
        rows.append({**asdict(candidate.prompt), "prompt_id": unique, "split": split})
    if not rows:
        log.warning("no prompt fell into the %s split: give more prompts, or change prompts.split", split)
    _write(partial / f"{split}.parquet", sorted(rows, key=lambda row: str(row["prompt_id"])), SCHEMA)
    return len(rows)


def _write(path: Path, rows: list[dict[str, Any]], schema: pa.Schema) -> None:
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)
