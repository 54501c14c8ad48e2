"""What every training rank sets up: its optimizer, and which checkpoints must be converted."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
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


CHECKPOINTED_TWICE = """
import sys
from pathlib import Path

import torch
from torch import nn

from tasks.rank_run import RankRun, prepare_rank, start_engine

directory = Path(sys.argv[1])
config = {
    "optimizer": "adamw", "weight_decay": 0.0, "warmup_steps": 0, "accumulation": 1, "dtype": "float32", "clip": 1.0,
    "zero_stage": 0, "seed": 0,
}
spec = {"config": config, "directory": directory, "device": "cpu", "threads": 1}
torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/meet", rank=0, world_size=1)
prepare_rank(spec)
layer = nn.Linear(2, 2)
checkpoints = directory / ".checkpoints"
engine = start_engine(
    layer, [{"params": list(layer.parameters()), "lr": 0.1}], config, micro_batch=1, total=4, read_directly=[],
    checkpoints=checkpoints,
)
run = RankRun(engine, spec, 4)
run.step = 1
run._checkpoint()
# A second name for the file: it shows what is written into it, and not what takes its place.
(directory / "earlier").hardlink_to(checkpoints / "latest")
run.step = 2
run._checkpoint()
assert RankRun(engine, spec, 4).resume() == 2
"""


def test_a_kill_while_a_checkpoint_is_named_leaves_the_earlier_name(tmp_path: Path) -> None:
    """Catches a pointer to the newest checkpoint written in place, as DeepSpeed's own is: a rank killed half-way left
    it empty, and the training could not be resumed."""
    # A process of its own, for its process group.
    command = [sys.executable, "-c", CHECKPOINTED_TWICE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"LOCAL_RANK": "0"})
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "earlier").read_text() == "step-0000001-ranks-1"
    assert (tmp_path / ".checkpoints" / "latest").read_text() == "step-0000002-ranks-1"
    assert [path.name for path in (tmp_path / ".checkpoints").glob("step-*")] == ["step-0000002-ranks-1"]


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
