"""What the trainer is fed: order, windows, vocabulary."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
import torch

from infra.errors import UserError
from tasks.distill import SCHEMA
from tasks.stage import write_table
from tasks.training_data import (
    batches,
    frequent_tokens,
    load_positions,
    pair_shards,
    teacher_targets,
    window_plan,
)


def shard(path: Path, rows: list[tuple[list[int], list[bool]]]) -> Path:
    table = [
        {
            "sample_id": f"s{i}", "conversation_id": f"c{i}", "category": "x", "input_ids": ids, "loss_mask": mask,
            "finish_reason": "stop", "temperature": 0.0, "seed": 1, "text": "",
        }
        for i, (ids, mask) in enumerate(rows)
    ]  # fmt: skip
    write_table(path, pa.Table.from_pylist(table, schema=SCHEMA))
    return path


def test_batches_cover_a_window_once_in_a_seeded_order() -> None:
    seen = torch.cat(list(batches(100, 20, seed=3)))
    assert sorted(seen.tolist()) == list(range(100))
    assert torch.equal(seen, torch.cat(list(batches(100, 20, seed=3))))
    assert not torch.equal(seen, torch.cat(list(batches(100, 20, seed=4))))
    assert [len(batch) for batch in batches(105, 20, seed=0)] == [20] * 5
    assert [len(batch) for batch in batches(7, 20, seed=0)] == [7]


def test_windows_hold_every_shard_once() -> None:
    shards = [(Path(f"d{i}"), Path(f"t{i}")) for i in range(9)]
    windows = window_plan(shards, [10] * 9, limit=25, seed=0)
    assert [len(window) for window in windows] == [3, 3, 3]
    assert sorted(entry for window in windows for entry in window) == shards
    assert window_plan(shards, [10] * 9, limit=25, seed=1) != windows


def test_the_vocabulary_is_what_the_model_says_not_what_it_is_told(tmp_path: Path) -> None:
    """Catches prompts counted in, and a vocabulary that depends on the order of equally frequent tokens."""
    path = shard(tmp_path / "shard-0.parquet", [([9, 9, 9, 9, 5, 5, 3, 2], [False] * 4 + [True] * 4)])
    assert frequent_tokens([path], size=3, vocab=10).tolist() == [2, 3, 5]
    assert frequent_tokens([path], size=2, vocab=10).tolist() == [2, 5]
    assert frequent_tokens([path], size=5, vocab=10).tolist() == [0, 1, 2, 3, 5]


def test_shards_of_different_artifacts_are_not_paired(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="different shards"):
        pair_shards([tmp_path / "shard-0.parquet"], [tmp_path / "shard-1.parquet"])


def test_labels_belong_to_their_hidden_states(tmp_path: Path) -> None:
    """Catches rows that slip against each other between the two artifacts: position p must carry tokens p + 2, ..."""
    from tasks.teacher import SCHEMA as TEACHER_SCHEMA

    ids = [11, 12, 13, 14, 15, 16]
    mask = [False, False, True, True, True, True]
    distill = shard(tmp_path / "d" / "shard-0.parquet", [(ids, mask)])
    hidden = torch.arange(4 * 2, dtype=torch.float32).reshape(4, 2)
    row = {
        "sample_id": "s0", "positions": [1, 2, 3, 4], "topk_ids": [], "topk_logprobs": [], "tail_logmass": [0.0] * 4,
        "hidden": hidden.numpy().tobytes(),
    }  # fmt: skip
    teacher = tmp_path / "t" / "shard-0.parquet"
    write_table(teacher, pa.Table.from_pylist([row], schema=TEACHER_SCHEMA))
    loaded = load_positions([(distill, teacher)], num_heads=2, hidden_size=2, dtype=torch.float32)
    assert torch.equal(loaded.hidden_PD, hidden)
    assert loaded.labels_PK.tolist() == [[14, 15], [15, 16], [16, -100], [-100, -100]]
    assert loaded.position_P.tolist() == [1, 2, 3, 4]
    row["sample_id"] = "other"
    write_table(teacher, pa.Table.from_pylist([row], schema=TEACHER_SCHEMA))
    with pytest.raises(UserError, match="other"):
        load_positions([(distill, teacher)], num_heads=2, hidden_size=2, dtype=torch.float32)


def test_targets_are_what_the_teacher_said_where_the_label_stands() -> None:
    """Catches distributions of the place before or after, ones taken across a gap, and labels that get one though they
    have none."""
    # Tokens 1 .. 5 of an answer were read; what the teacher had at token 3 could not be used.
    at_P = torch.tensor([1, 2, 4, 5])
    labels_PK = torch.tensor([[12, 13], [13, 14], [15, -100], [-100, -100]])
    ids_PJ = torch.tensor([[100, 101], [200, 201], [400, 401], [500, 501]])
    tokens, shares = teacher_targets(labels_PK, at_P, ids_PJ, torch.tensor([[0.5, 0.2]] * 4).log() - at_P[:, None])
    at_two, at_four, at_five = [[200, 201], [400, 401], [500, 501]]
    assert tokens.tolist() == [
        [at_two, [13, -100]],
        [[13, -100], at_four],
        [at_five, [-100, -100]],
        [[-100, -100], [-100, -100]],
    ]
    torch.testing.assert_close(shares[0, 0], torch.tensor([0.5, 0.2]) * torch.e**-2)
    torch.testing.assert_close(shares[1, 1], torch.tensor([0.5, 0.2]) * torch.e**-4)
    assert shares[0, 1, 0] == shares[1, 0, 0] == 1.0


def test_every_answer_gets_its_own_targets_in_step_with_its_rows(tmp_path: Path) -> None:
    """Catches targets of another answer, or of the row before, in both stages' loaders."""
    from tasks.joint_loop import load_conversations
    from tasks.teacher import SCHEMA as TEACHER_SCHEMA

    rows = [([1, 2, 3, 4], [False, False, True, True]), ([5, 6, 7], [False, False, True])]
    rows.append(([8, 9, 10], [False, True, True]))
    distill = shard(tmp_path / "d" / "shard-0.parquet", rows)
    said = []
    for number, (_, mask) in enumerate(rows):
        at = [i - 1 for i, own in enumerate(mask) if own]
        # What was said at position p of answer n: token 100 n + p, surely, and token 7 hardly.
        ids = [token for p in at for token in (100 * number + p, 7)]
        logprobs = [value for _ in at for value in (-0.1, -5.0)]
        hidden = torch.full((len(at), 2), float(number)).numpy().tobytes()
        said.append({"sample_id": f"s{number}", "positions": at, "topk_ids": ids, "topk_logprobs": logprobs})
        said[-1] |= {"tail_logmass": [-3.0] * len(at), "hidden": hidden}
    teacher = tmp_path / "t" / "shard-0.parquet"
    write_table(teacher, pa.Table.from_pylist(said, schema=TEACHER_SCHEMA))
    loaded = load_positions([(distill, teacher)], num_heads=1, hidden_size=2, dtype=torch.float32, soft=True)
    assert loaded.targets is not None
    tokens, shares = loaded.targets
    # One head's label at p is token p + 2, of which the teacher spoke at p + 1; the last position has none.
    assert tokens[:, 0].tolist() == [[2, 7], [-100, -100], [-100, -100], [201, 7], [-100, -100]]
    torch.testing.assert_close(shares[3, 0], torch.tensor([-0.1, -5.0]).exp())
    talks = load_conversations([(distill, teacher)], soft_heads=1)
    assert all(talk.targets is not None for talk in talks)
    joined = torch.cat([talk.targets[0] for talk in talks if talk.targets])
    assert torch.equal(joined, tokens)
    assert load_conversations([(distill, teacher)])[0].targets is None
