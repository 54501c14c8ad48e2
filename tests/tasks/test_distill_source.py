"""Training on answers that the sources give: which are taken, how they are masked, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from infra.artifacts import ArtifactStore
from infra.errors import UserError
from tasks.backbone import BackboneConfig, resolve_backbone
from tasks.conversations import Conversation
from tasks.distill import REJECTED_SCHEMA, SCHEMA, DistillConfig, Reciter, distill
from tasks.prompts import PromptsConfig, collect_prompts
from tasks.stage import Context
from tests import toys
from tests.tasks.test_prompts import write_lines


def conversation(name: str, turns: list[str], given: list[str]) -> Conversation:
    return Conversation(name, name, "c", turns, None, 0, given)


def test_given_answers_become_rows_as_generated_ones_would(toy_dir: Path, tmp_path: Path) -> None:
    """Catches a mask over the prompt, an answer past its budget, and a conversation longer than the model can read."""
    reciter = Reciter(toy_dir, DistillConfig(max_new_tokens=3), [toys.END], context_length=20)
    requests = [
        conversation("b#source", ["w1", "w2"], ["w5", "w6 w7 w8 w9"]),
        conversation("a#source", ["w3"], ["w4"]),
        conversation("c#source", [" ".join(["w1"] * 30)], ["w4"]),
    ]
    path = tmp_path / "shard-00000.parquet"
    reciter.run((path, requests))
    table = pq.read_table(path)
    assert table.schema.equals(SCHEMA)
    short, long = table.to_pylist()
    assert (short["sample_id"], long["sample_id"]) == ("a#source", "b#source")
    assert short["input_ids"] == [*toys.prompt_ids([3]), 4, toys.END]
    assert [t for t, own in zip(short["input_ids"], short["loss_mask"], strict=True) if own] == [4, toys.END]
    assert [t for t, own in zip(long["input_ids"], long["loss_mask"], strict=True) if own] == [5, toys.END, 6, 7, 8]
    assert (short["finish_reason"], long["finish_reason"], long["temperature"]) == ("stop", "length", None)
    refused = pq.read_table(tmp_path / "rejected" / path.name)
    assert refused.schema.equals(REJECTED_SCHEMA)
    assert refused["sample_id"].to_pylist() == ["c#source"] and "over-long" in refused["reason"][0].as_py()


def test_sources_without_answers_are_refused_in_a_sentence(toy_dir: Path, tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path / "root")
    rows = [{"prompt": f"w{i}"} for i in range(9)]
    prompts = collect_prompts(store, PromptsConfig(sources=[str(write_lines(tmp_path / "p.jsonl", rows))]))
    backbone = resolve_backbone(store, BackboneConfig(model=str(toy_dir)))
    with pytest.raises(UserError, match="no conversations with answers"):
        distill(Context(store), DistillConfig(answers="source"), backbone=backbone, prompts=prompts, split="train")
