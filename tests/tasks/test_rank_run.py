"""What every training rank sets up: its optimizer, and which checkpoints must be converted."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from torch import nn

from infra.errors import UserError
from tasks import rank_run
from tasks.rank_run import _of_other_world, _optimizer
from tasks.train_run import optimizer_here


def test_an_8_bit_optimizer_is_the_plain_one_where_it_does_not_run(caplog: pytest.LogCaptureFixture) -> None:
    """Catches a recipe for GPUs that can't be tried on a CPU, and a replacement that nobody hears of."""
    with caplog.at_level(logging.WARNING):
        assert optimizer_here("adamw_8bit", "cpu") == "adamw"
    assert "bitsandbytes" in caplog.text
    layer = nn.Linear(2, 2)
    groups = [{"params": [layer.weight], "lr": 0.1}, {"params": [layer.bias], "lr": 0.4}]
    made = _optimizer(groups, {"optimizer": "adamw", "weight_decay": 0.5})
    assert [group["lr"] for group in made.param_groups] == [0.1, 0.4]
    assert {group["weight_decay"] for group in made.param_groups} == {0.5}


@pytest.mark.parametrize(
    ("zero", "tag", "other"),
    [
        (0, "step-0000010-ranks-4", False),
        (1, "step-0000010-ranks-2", False),
        (1, "step-0000010-ranks-12", True),
        (3, "step-0000010-ranks-1", True),
    ],
)
def test_only_spread_states_of_another_number_of_ranks_are_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zero: int, tag: str, other: bool
) -> None:
    """Catches 12 ranks taken for 2, and a conversion of what any number of ranks can read."""
    monkeypatch.setattr(rank_run.torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(rank_run.torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(rank_run.torch.distributed, "barrier", lambda: None)
    config = {"zero_stage": zero, "optimizer": "adamw"}
    assert not _of_other_world(tmp_path, config), "there is no checkpoint yet"
    (tmp_path / "latest").write_text(tag)
    assert _of_other_world(tmp_path, config) == other
    if other:
        with pytest.raises(UserError, match="not of its 8-bit kind"):
            _of_other_world(tmp_path, config | {"optimizer": "adamw_8bit"})
