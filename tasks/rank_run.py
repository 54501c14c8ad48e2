"""What the training loops of both stages share: the rank's set-up, DeepSpeed's engine, checkpoints, curve, progress.

Knows nothing of what is trained or on what.
"""

from __future__ import annotations

import json
import logging
import shutil
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infra.artifacts import write_json, write_text
from infra.deepspeed_config import deepspeed_config
from infra.environment import quiet
from infra.errors import UserError
from infra.machine import PrivateMemory
from medusa_core.schedules import cosine_with_warmup
from tasks.stage import dtype_of
from tasks.train_run import MEMORY

log = logging.getLogger(__name__)
CHECKPOINTS, CURVE, EVALUATION = ".checkpoints", "curve.jsonl", "evaluation.json"


def prepare_rank(spec: dict[str, Any]) -> torch.device:
    """Sets this process up as a training rank; the device it trains on. From here on `spec` holds its `memory`."""
    quiet()
    import deepspeed

    # On a CPU DeepSpeed would compile a shared-memory collective with g++ for minutes at first use; gloo does it all.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.set_num_threads(spec["threads"])
    deepspeed.init_distributed(dist_init_required=False)
    torch.manual_seed(spec["config"]["seed"])
    gpu = str(spec["device"]).startswith("cuda")
    spec["memory"] = PrivateMemory()
    return torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")


@contextmanager
def whole(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Within the block every rank holds these parameters whole, where ZeRO-3 keeps only parts of them. All ranks enter
    together."""
    import deepspeed

    parts = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    with deepspeed.zero.GatheredParameters(parts, enabled=bool(parts)):
        yield


def start_engine(
    module: nn.Module,
    groups: Sequence[Mapping[str, Any]],
    config: Mapping[str, Any],
    *,
    micro_batch: int,
    total: int,
    read_directly: Iterable[nn.Parameter],
    checkpoints: Path,
) -> Any:
    """DeepSpeed around a module: AdamW over named parameter groups with rates of their own, cosine with warm-up.

    `read_directly` are parameters that the module's forward reads itself, not through the submodule they belong to:
    ZeRO-3 would not know to gather them. `checkpoints` is the folder that the run will be resumed from.
    """
    import deepspeed

    if config["zero_stage"] == 3:
        for parameter in read_directly:
            deepspeed.zero.register_external_parameter(module, parameter)
    optimizer = _optimizer(groups, config)
    warmup = min(config["warmup_steps"], total // 4)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: cosine_with_warmup(step, total=total, warmup=warmup)
    )
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=optimizer,
        lr_scheduler=schedule,
        config=deepspeed_config(
            micro_batch=micro_batch,
            accumulation=config["accumulation"],
            dtype=config["dtype"],
            clip=config["clip"],
            zero_stage=config["zero_stage"],
            universal=_of_other_world(checkpoints, config),
        ),
    )
    return engine


def _optimizer(groups: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> torch.optim.Optimizer:
    parts = [dict(group) for group in groups]
    if config["optimizer"] == "adamw_8bit":
        from bitsandbytes.optim import AdamW8bit

        optimizer: torch.optim.Optimizer = AdamW8bit(parts, betas=(0.9, 0.999), weight_decay=config["weight_decay"])
        return optimizer
    return torch.optim.AdamW(parts, betas=(0.9, 0.999), weight_decay=config["weight_decay"], fused=True)


def _of_other_world(checkpoints: Path, config: Mapping[str, Any]) -> bool:
    """Whether the newest checkpoint must be read in DeepSpeed's universal format, to which it is then converted: it
    was written by another number of ranks, between which ZeRO had spread the optimizer's state."""
    latest = checkpoints / "latest"
    if not config["zero_stage"] or not latest.exists():
        return False
    tag = latest.read_text().strip()
    if tag.endswith(_tag_end(torch.distributed.get_world_size())):
        return False
    if config["optimizer"] == "adamw_8bit":
        raise UserError(
            f"checkpoint {tag} can't be resumed on {torch.distributed.get_world_size()} ranks: DeepSpeed converts the "
            "states of AdamW, not of its 8-bit kind; train on as many ranks as before"
        )
    # DeepSpeed writes the second when it has written all of the first.
    target, converted = checkpoints / f"universal-{tag}", checkpoints / "latest_universal"
    done = converted.exists() and converted.read_text() == target.name
    if torch.distributed.get_rank() == 0 and not done:
        from deepspeed.checkpoint import ds_to_universal

        log.info("%s was written by another number of ranks: converting it", tag)
        shutil.rmtree(target, ignore_errors=True)
        with redirect_stdout(StringIO()):
            ds_to_universal.main(
                Namespace(
                    input_folder=str(checkpoints / tag),
                    output_folder=str(target),
                    num_extract_workers=1,
                    num_merge_workers=1,
                    keep_temp_folder=False,
                    strict=True,
                    inject_missing_state=True,
                )
            )
    torch.distributed.barrier()
    return True


def _tag_end(world: int) -> str:
    return f"-ranks-{world}"


class RankRun:
    """One run over a DeepSpeed engine: where it stands, and how that is kept, resumed and shown."""

    def __init__(self, engine: Any, spec: Mapping[str, Any], total: int) -> None:
        self.engine, self.spec, self.config, self.total = engine, spec, spec["config"], total
        self.rank, self.world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.directory = Path(spec["directory"])
        self.device, self.dtype = engine.device, dtype_of(self.config["dtype"])
        self.step = 0
        self.curve: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []

    def average(self, values: Sequence[float]) -> list[float]:
        """Means over ranks and accumulation steps of sums over this rank's accumulation steps."""
        total = torch.tensor(values, dtype=torch.float64)
        torch.distributed.all_reduce(total)
        return (total / (self.world * self.config["accumulation"])).tolist()

    def finish_step(self, **record: float) -> None:
        """Counts a step, notes it in the curve, keeps a checkpoint where one is due, and tells the driver."""
        self.step += 1
        self.curve.append({"step": self.step, "lr": self.engine.get_lr()[0], **record})
        if self.step % self.config["checkpoint_steps"] == 0 and self.step < self.total:
            self._checkpoint()
        if self.rank == 0 and (self.step % 10 == 0 or self.step == self.total):
            write_json(self.directory / self.spec["progress"], {"step": self.step, "loss": record["loss"]})

    def resume(self) -> int:
        """Goes back to the newest checkpoint, if there is one; how many steps are done."""
        folder = self.directory / CHECKPOINTS
        if not (folder / "latest").exists():
            return 0
        _, state = self.engine.load_checkpoint(str(folder))
        self.step, self.curve, self.evaluations = state["step"], state["curve"], state["evaluations"]
        log.info("resuming after step %d of %d", self.step, self.total)
        return self.step

    def write_history(self) -> None:
        """The curve and the evaluations as files."""
        (self.directory / CURVE).write_text("".join(json.dumps(row) + "\n" for row in self.curve))
        write_json(self.directory / EVALUATION, {"epochs": self.evaluations, "final": self.evaluations[-1]})
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device) / 2**20
        else:
            peak = self.spec["memory"].peak_mb()
        # Scratch, read into the manifest: it differs between runs that train the same.
        write_json(self.directory / MEMORY, round(peak))

    def _checkpoint(self) -> None:
        folder = self.directory / CHECKPOINTS
        # `iteration` is what DeepSpeed's own conversion wants to know.
        state = {
            "step": self.step,
            "iteration": self.step,
            "curve": self.curve,
            "evaluations": self.evaluations,
        }
        tag = f"step-{self.step:07d}{_tag_end(self.world)}"
        self.engine.save_checkpoint(str(folder), tag=tag, client_state=state, save_latest=False)
        torch.distributed.barrier()
        if self.rank == 0:
            # DeepSpeed truncates this file before it writes it: a rank killed in between would leave nothing to resume.
            write_text(folder / "latest", tag)
            for old in (*folder.glob("step-*"), *folder.glob("universal-*")):
                if old.name != tag:
                    shutil.rmtree(old, ignore_errors=True)
