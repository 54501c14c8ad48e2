"""What the teacher keeps of a backbone that says nothing usable at some positions."""

from __future__ import annotations

import logging
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoConfig

from infra.errors import UserError
from tasks.teacher import Reader, TeacherConfig, _counts
from tasks.training_data import load_positions
from tests import toys
from tests.tasks.test_training_data import shard

WORD = 7  # whose embedding is broken: an answer that holds it is lost


def read(directory: Path, toy_dir: Path, answers: list[list[int]]) -> tuple[Path, Path]:
    """A distill shard of these answers and its teacher shard, by a backbone that knows nothing of one word."""
    prompt = toys.prompt_ids([3])
    rows = [([*prompt, *answer], [False] * len(prompt) + [True] * len(answer)) for answer in answers]
    source = shard(directory / "distill" / "shard-0.parquet", rows)
    target = directory / "shard-0.parquet"
    reader = Reader(toy_dir, TeacherConfig(top_k=4, dtype="float32"), True, "cpu")
    reader.model.get_input_embeddings().register_forward_hook(
        lambda module, args, output: torch.where((args[0] == WORD)[..., None], torch.nan, output)
    )
    reader.run((source, target))
    return source, target


@pytest.fixture
def clean() -> list[list[int]]:
    return [[1, 2, 3, 4, 5, 6, 8, 9]] * 60


def test_a_position_that_is_not_finite_is_left_out_and_counted(
    tmp_path: Path, toy_dir: Path, clean: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """Catches one NaN that turns every weight of the heads into NaN, and answers that slip when one is left out."""
    caplog.set_level(logging.WARNING, "tasks.teacher")
    source, target = read(tmp_path, toy_dir, [*clean, [1, 2, WORD, 4], clean[0]])
    counts = _counts(tmp_path, [source])
    # Through attention what isn't finite reaches every position of its answer, those before it too (0 · NaN).
    assert counts == {"rows": 62, "positions": 61 * 8, "skipped": 4}
    assert "4 of 492 positions left out" in caplog.text
    assert [len(at) for at in pq.read_table(target)["positions"].to_pylist()] == [8] * 60 + [0, 8]
    hidden = AutoConfig.from_pretrained(toy_dir).hidden_size
    positions = load_positions([(source, target)], num_heads=2, hidden_size=hidden, dtype=torch.float32)
    assert bool(positions.hidden_PD.isfinite().all()) and len(positions) == counts["positions"]
    assert positions.labels_PK[-8:].tolist() == positions.labels_PK[:8].tolist()


def test_a_backbone_that_is_broken_stops_the_run_with_the_reason(
    tmp_path: Path, toy_dir: Path, clean: list[list[int]]
) -> None:
    source, _ = read(tmp_path, toy_dir, [*clean[:2], [WORD, 1, 2, 3, 4]])
    with pytest.raises(UserError, match="not finite at 5 of 21 positions"):
        _counts(tmp_path, [source])


def test_answers_without_a_token_are_named_as_such(tmp_path: Path, toy_dir: Path) -> None:
    source, _ = read(tmp_path, toy_dir, [[]])
    with pytest.raises(UserError, match="every answer is empty"):
        _counts(tmp_path, [source])
