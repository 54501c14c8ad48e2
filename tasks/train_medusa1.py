"""Stage `train-medusa1`: heads on a frozen backbone (paper section 2.2.1), by Ray Train with DeepSpeed inside.

Global batches, their order and the learning rate depend on the recipe alone, so any number of ranks trains the same
heads up to rounding. Interrupted, it goes on from its last checkpoint. Knows nothing of trees or decoding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from infra.artifacts import Artifact, artifact_key
from infra.errors import UserError
from medusa_core.heads import HeadsConfig
from tasks.backbone import backbone_info, model_dir
from tasks.distill import shard_paths as distill_shards
from tasks.stage import Context
from tasks.teacher import shard_paths as teacher_shards
from tasks.train_run import PROGRESS, Optimizer, data_inputs, optimizer_here, run_training, trained_counts
from tasks.training_data import count_positions, frequent_tokens, pair_shards

KIND, STAGE_VERSION = "heads", 2


class TrainConfig(BaseModel):
    """The recipe of stage 1. Batches are counted in positions, not sequences: there is no padding."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    epochs: int = Field(3, ge=1)
    batch_positions: int = Field(2048, ge=1, description="positions per optimizer step, over all ranks")
    accumulation: int = Field(1, ge=1)
    learning_rate: float = Field(2e-3, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    warmup_steps: int = Field(40, ge=0)
    clip: float = Field(1.0, gt=0)
    decay: float = Field(0.8, gt=0, le=1, description="λ_k = decay^k")
    targets: Literal["teacher", "text"] = Field(
        "teacher", description="learn what the backbone said at each place, its top-k; or only the token that came"
    )
    dtype: str = "bfloat16"
    optimizer: Optimizer = "adamw"
    zero_stage: int = 0
    window_positions: int = Field(400_000, ge=1, description="positions held in memory and shuffled together")
    checkpoint_steps: int = Field(100, ge=1)
    seed: int = 0


def train_medusa1(
    context: Context,
    config: TrainConfig,
    heads: HeadsConfig,
    *,
    backbone: Artifact,
    distill: Artifact,
    teacher: Artifact,
    held_out_distill: Artifact,
    held_out_teacher: Artifact,
    initial: Artifact | None = None,
) -> Artifact:
    """Trains heads and evaluates them on held-out conversations after every epoch. `initial` heads, of this layout and
    for this backbone, begin the training, and the tokens they know stay theirs."""
    info, device = backbone_info(backbone), context.placement.resolved_device()
    config = config.model_copy(update={"optimizer": optimizer_here(config.optimizer, device)})
    # How often checkpoints are written changes nothing in them.
    semantic = {
        "train": config.model_dump(mode="json", exclude={"checkpoint_steps"}),
        "heads": heads.model_dump(mode="json"),
    }
    inputs = data_inputs(
        backbone,
        distill=distill,
        teacher=teacher,
        held_out_distill=held_out_distill,
        held_out_teacher=held_out_teacher,
    )
    if initial is not None:
        inputs["initial"] = initial.digest("heads")
    key = artifact_key(KIND, STAGE_VERSION, inputs=inputs, config=semantic)

    def build(partial: Path) -> dict[str, Any]:
        shards = pair_shards(distill_shards(distill), teacher_shards(teacher))
        counts = [count_positions(shard) for shard in shards]
        if not sum(counts):
            raise UserError("there is nothing to train on: the teacher artifact has no positions")
        vocab_map = None
        if initial is None and heads.vocab is not None and heads.vocab < info.vocab_size:
            vocab_map = frequent_tokens(distill_shards(distill), size=heads.vocab, vocab=info.vocab_size).tolist()
        # Here, and not above: what a configuration needs should not import a trainer.
        from tasks.train_loop import total_steps, train_loop

        workers = context.placement.train_worker_count
        if config.batch_positions % (workers * config.accumulation):
            raise UserError(
                f"train.batch_positions is {config.batch_positions}, which {workers} ranks x {config.accumulation} "
                "accumulation steps don't divide: choose a multiple"
            )
        context.cluster.start()
        context.cluster.free()
        spec = {
            "config": config.model_dump(),
            "heads": heads.model_dump(),
            "vocab_map": vocab_map,
            "initial": None if initial is None else initial.path / "heads",
            "shards": shards,
            "counts": counts,
            "held_out": pair_shards(distill_shards(held_out_distill), teacher_shards(held_out_teacher)),
            "backbone": model_dir(backbone),
            "backbone_name": info.name,
            "backbone_digest": info.digest,
            "cached": bool(teacher.config["hidden"]) and bool(held_out_teacher.config["hidden"]),
            "hidden_dtype": teacher.config["dtype"],
            "directory": partial,
            "progress": PROGRESS,
            "device": device,
        }
        run_training(
            train_loop, spec, total_steps(spec), workers=workers, threads=max(1, context.cluster.cpus // workers)
        )
        return trained_counts(partial, sum(counts))

    return context.store.produce(KIND, key, inputs=inputs, config=semantic, build=build)
