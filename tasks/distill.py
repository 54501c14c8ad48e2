"""Stage `distill`: the backbone answers the prompts of one split, into Parquet shards over fixed request ranges.

A request is a prompt at one temperature, or a conversation that its source has answered already. A shard is answered by
one actor with a fixed batch size and a seed per request, so it can be made again bit for bit; a finished shard is never
answered twice. Knows nothing of heads.
"""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field

from infra.artifacts import Artifact, artifact_key, write_json
from infra.errors import UserError
from infra.progress import followed, track
from medusa_core.engine import MedusaEngine
from medusa_core.request import Generation
from medusa_core.sampling import SamplingParams
from tasks.backbone import backbone_identity, backbone_info, load_model, load_tokenizer, model_dir
from tasks.conversations import ChatFormat, Conversation, stable_seed
from tasks.prompts import Prompt, read_split
from tasks.stage import Context, dtype_of, write_table

KIND, STAGE_VERSION = "distill", 3
log = logging.getLogger(__name__)

SCHEMA = pa.schema(
    [
        ("sample_id", pa.string()),
        ("conversation_id", pa.string()),
        ("category", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("finish_reason", pa.string()),
        ("temperature", pa.float64()),
        ("seed", pa.int64()),
        ("text", pa.string()),
    ]
)
REJECTED_SCHEMA = pa.schema([("sample_id", pa.string()), ("reason", pa.string())])


class DistillConfig(BaseModel):
    """How the backbone answers. One sample of every prompt is drawn at each temperature (0 is greedy).

    `answers: source` trains on real data instead: what the sources' own conversations answer. The calibration split is
    answered by the backbone all the same, because what it says is what will be drafted.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    answers: Literal["model", "source"] = "model"
    temperatures: tuple[float, ...] = Field((0.0, 0.7), min_length=1)
    top_p: float = Field(1.0, gt=0, le=1)
    max_new_tokens: int = Field(160, ge=1, description="per turn")
    max_turns: int = Field(2, ge=1, description="later user turns of a conversation are left out")
    dtype: str = "bfloat16"
    batch_size: int = Field(64, ge=1, description="requests in flight per actor")
    shard_size: int = Field(64, ge=1, description="requests per shard, at most")
    seed: int = 0


def distill(context: Context, config: DistillConfig, *, backbone: Artifact, prompts: Artifact, split: str) -> Artifact:
    """Answers one split. Every request ends as a row or, with a reason, in `rejected/`."""
    info = backbone_info(backbone)
    from_source = config.answers == "source" and split == "train"
    # Answers that are given depend on nothing that answers are drawn with.
    cut = {"answers", "max_turns", "max_new_tokens", "shard_size"}
    semantic = config.model_dump(mode="json", include=cut if from_source else None) | {"split": split}
    if not from_source:
        del semantic["answers"]
    inputs = {"backbone": backbone_identity(backbone), "prompts": prompts.digest(f"{split}.parquet")}
    key = artifact_key(KIND, STAGE_VERSION, inputs=inputs, config=semantic)

    def build(partial: Path) -> dict[str, Any]:
        requests = (_given if from_source else _requests)(read_split(prompts, split), config)
        shards = _even_parts(requests, config.shard_size)
        if not shards:
            what = "conversations with answers" if from_source else "prompts"
            raise UserError(f"the {split} split has no {what}: add sources, or give the split a larger share")
        pending = [i for i in range(len(shards)) if not _shard_path(partial, i).exists()]
        with track(f"distill {split}", len(requests), "answers") as progress:
            progress.skip(len(requests) - sum(len(shards[i]) for i in pending))
            if pending:
                arguments = {"model": model_dir(backbone), "config": config, "eos_token_ids": info.eos_token_ids}
                if from_source:
                    arguments["context_length"] = info.context_length
                else:
                    arguments["device"] = context.placement.resolved_device()
                # The longest conversations stand last and take longest: begun first, they don't leave one actor alone.
                work = [(_shard_path(partial, i), shards[i]) for i in reversed(pending)]
                finished = progress.done
                for path, _ in work:
                    _progress_path(path).unlink(missing_ok=True)

                def read() -> tuple[float, str]:
                    answers, tokens = _read_progress([path for path, _ in work])
                    return finished + answers, f"{tokens:,} tokens"

                with followed(progress, read):
                    for _ in context.map(Reciter if from_source else Answerer, arguments, work):
                        pass
        return _counts(partial, len(requests))

    return context.store.produce(KIND, key, inputs=inputs, config=semantic, build=build)


def shard_paths(artifact: Artifact) -> list[Path]:
    """Row shards of a distill artifact, in order."""
    return sorted(artifact.path.glob("shard-*.parquet"))


class Answerer:
    """One generation actor: the model loaded once, shards answered one after the other."""

    def __init__(self, model: Path, config: DistillConfig, eos_token_ids: Sequence[int], device: str) -> None:
        self.config = config
        backbone = load_model(model, dtype_of(config.dtype), device)
        self.engine = MedusaEngine(backbone, eos_token_ids=eos_token_ids, pack=True)
        self.chat = ChatFormat(load_tokenizer(model), eos_token_ids)

    def run(self, shard: tuple[Path, list[Conversation]]) -> None:
        """Answers a shard's requests and writes its rejected rows, then its rows: the rows' file means it is done."""
        path, requests = shard
        rows: list[Conversation] = []
        rejected: list[tuple[str, str]] = []
        progress = _ShardProgress(_progress_path(path))
        for conversation, reason in self._answer(requests, progress):
            if reason:
                rejected.append((conversation.sample_id, reason))
            else:
                rows.append(conversation)
        _write_shard(path, rows, rejected, self.chat)

    def _answer(self, requests: list[Conversation], progress: _ShardProgress) -> list[tuple[Conversation, str]]:
        """Keeps `batch_size` turns in flight until every conversation is answered or rejected."""
        results: list[tuple[Conversation, str]] = []
        # Conversations with turns to come go first, so that the last rows in flight end together.
        queue = sorted(requests, key=lambda request: -len(request.turns))
        active: dict[int, Conversation] = {}
        session = self.engine.session(rows=self.config.batch_size, slots=self._slots(requests))
        # Prompts that start together share a pass, so a few free rows are waited for.
        few = max(1, self.config.batch_size // 8)
        while queue or session.active:
            if session.free >= min(few, len(queue)):
                asked: list[tuple[Conversation, list[int]]] = []
                while queue and len(asked) < session.free:
                    conversation = queue.pop(0)
                    prompt = conversation.ask(self.chat)
                    if len(prompt) + self.config.max_new_tokens > self.engine.context_length:
                        results.append((conversation, f"over-long: {len(prompt)} prompt tokens"))
                    else:
                        asked.append((conversation, prompt))
                started = session.add_requests([(prompt, self._params(item)) for item, prompt in asked])
                active |= {new.request: item for new, (item, _) in zip(started, asked, strict=True)}
            else:
                started = []
            for update in [*started, *session.step()]:
                if update.generation.finish_reason and update.request in active:
                    self._finish(active.pop(update.request), update.generation, queue, results)
                    progress.add(len(results), len(update.generation.tokens))
        progress.add(len(results), 0, last=True)
        return results

    def _finish(
        self, conversation: Conversation, generation: Generation, queue: list[Conversation], results: list[Any]
    ) -> None:
        conversation.answer(generation.tokens, generation.finish_reason or "")
        if len(generation.tokens) == 1 and generation.finish_reason == "stop":
            results.append((conversation, "empty answer"))
        elif conversation.done:
            results.append((conversation, ""))
        else:
            queue.insert(0, conversation)

    def _params(self, conversation: Conversation) -> SamplingParams:
        return SamplingParams(
            self.config.max_new_tokens, conversation.temperature, self.config.top_p, conversation.turn_seed()
        )

    def _slots(self, requests: list[Conversation]) -> int:
        """Enough for the longest conversation of the shard, its answers at full length."""
        longest = 0
        for request in requests:
            asked = len(self.chat.first(request.turns[0]))
            for turn in range(1, len(request.turns)):
                asked += len(self.chat.following(request.turns[: turn + 1], answer_ended=False))
            longest = max(longest, asked + self.config.max_new_tokens * len(request.turns))
        return min(longest, self.engine.context_length) + 1


class Reciter:
    """One actor that answers nothing: it takes the answers that the source gives, cut at the budget of a turn."""

    def __init__(self, model: Path, config: DistillConfig, eos_token_ids: Sequence[int], context_length: int) -> None:
        self.most, self.context_length = config.max_new_tokens, context_length
        self.chat = ChatFormat(load_tokenizer(model), eos_token_ids)

    def run(self, shard: tuple[Path, list[Conversation]]) -> None:
        path, requests = shard
        rows: list[Conversation] = []
        rejected: list[tuple[str, str]] = []
        for conversation in requests:
            for answer in conversation.given:
                conversation.ask(self.chat)
                tokens = self.chat.said(answer)
                conversation.answer(tokens[: self.most], "stop" if len(tokens) <= self.most else "length")
            if len(conversation.input_ids) > self.context_length:
                rejected.append((conversation.sample_id, f"over-long: {len(conversation.input_ids)} tokens"))
            else:
                rows.append(conversation)
        _write_shard(path, rows, rejected, self.chat)


def _write_shard(path: Path, rows: list[Conversation], rejected: list[tuple[str, str]], chat: ChatFormat) -> None:
    """The rejected requests first: the rows' file means that the shard is done."""
    rows.sort(key=lambda row: row.sample_id)
    refused = [[r[0] for r in rejected], [r[1] for r in rejected]]
    write_table(path.parent / "rejected" / path.name, pa.table(refused, schema=REJECTED_SCHEMA))
    decode = chat.tokenizer.decode
    columns = {
        "sample_id": [row.sample_id for row in rows],
        "conversation_id": [row.conversation_id for row in rows],
        "category": [row.category for row in rows],
        "input_ids": [row.input_ids for row in rows],
        "loss_mask": [row.loss_mask for row in rows],
        "finish_reason": [row.finish_reason for row in rows],
        "temperature": [row.temperature for row in rows],
        "seed": [row.seed for row in rows],
        "text": [decode([t for t, own in zip(row.input_ids, row.loss_mask, strict=True) if own]) for row in rows],
    }
    write_table(path, pa.table(columns, schema=SCHEMA))


def _even_parts(requests: list[Conversation], most: int) -> list[list[Conversation]]:
    """The requests in order, in as few parts of one size as hold at most `most`: a small last part idles actors."""
    count = -(-len(requests) // most)
    bounds = [len(requests) * part // count for part in range(count + 1)] if count else [0]
    return [requests[start:end] for start, end in itertools.pairwise(bounds)]


class _ShardProgress:
    """Says now and then, in a file, how many of a shard's requests are done."""

    def __init__(self, path: Path) -> None:
        self.path, self.tokens, self._said = path, 0, 0.0

    def add(self, answers: int, tokens: int, *, last: bool = False) -> None:
        self.tokens += tokens
        if last or time.monotonic() - self._said > 2.0:
            self._said = time.monotonic()
            write_json(self.path, {"answers": answers, "tokens": self.tokens})


def _read_progress(shards: Sequence[Path]) -> tuple[int, int]:
    """(requests done, tokens generated) in shards that are being answered, or were by this run."""
    states = [json.loads(path.read_text()) for path in map(_progress_path, shards) if path.exists()]
    return sum(state["answers"] for state in states), sum(state["tokens"] for state in states)


def _progress_path(shard: Path) -> Path:
    return shard.with_name(f".{shard.stem}.progress.json")


def _requests(prompts: list[Prompt], config: DistillConfig) -> list[Conversation]:
    """Every prompt at every temperature, in an order that depends on nothing but the prompts.

    By number of turns and length, so that the conversations of a shard need caches of one size.
    """
    cut = [(prompt, list(prompt.turns[: config.max_turns])) for prompt in prompts]
    cut.sort(key=lambda entry: (len(entry[1]), sum(map(len, entry[1])), entry[0].prompt_id))
    return [
        Conversation(
            sample_id=f"{prompt.prompt_id}#{index}",
            conversation_id=prompt.prompt_id,
            category=prompt.category,
            turns=list(turns),
            temperature=temperature,
            seed=stable_seed(config.seed, prompt.prompt_id, index),
        )
        for prompt, turns in cut
        for index, temperature in enumerate(config.temperatures)
    ]


def _given(prompts: list[Prompt], config: DistillConfig) -> list[Conversation]:
    """Every prompt whose source answers it, as far as it does."""
    answered = [(prompt, min(config.max_turns, len(prompt.answers))) for prompt in prompts if prompt.answers]
    return [
        Conversation(
            sample_id=f"{prompt.prompt_id}#source",
            conversation_id=prompt.prompt_id,
            category=prompt.category,
            turns=list(prompt.turns[:count]),
            temperature=None,
            seed=0,
            given=list(prompt.answers[:count]),
        )
        for prompt, count in answered
    ]


def _counts(partial: Path, requests: int) -> dict[str, Any]:
    rows = tokens = 0
    for path in sorted(partial.glob("shard-*.parquet")):
        table = pq.read_table(path, columns=["loss_mask"])
        rows += table.num_rows
        tokens += sum(sum(mask) for mask in table["loss_mask"].to_pylist())
    rejected = sum(pq.read_metadata(path).num_rows for path in (partial / "rejected").glob("*.parquet"))
    assert rows + rejected == requests, f"{requests} requests, but {rows} rows and {rejected} rejected"
    if not rows:
        raise UserError(f"all {requests} requests were rejected; the reasons stand in {partial / 'rejected'}")
    return {"requests": requests, "rows": rows, "rejected": rejected, "tokens": tokens}


def _shard_path(directory: Path, index: int) -> Path:
    return directory / f"shard-{index:05d}.parquet"
