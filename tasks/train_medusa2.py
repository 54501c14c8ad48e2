"""Stage `train-medusa2`: backbone and heads together (paper section 2.2.2), from stage 1's heads.

It gives heads, an adapter and a merged backbone, which is a new model: what comes after the stage measures that one.
Knows nothing of trees or decoding.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Literal

import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field, model_validator

from infra.artifacts import Artifact, artifact_key
from infra.errors import UserError
from tasks.backbone import BackboneConfig, backbone_info, model_dir, resolve_backbone
from tasks.distill import shard_paths as distill_shards
from tasks.stage import Context
from tasks.teacher import shard_paths as teacher_shards
from tasks.train_run import PROGRESS, Optimizer, data_inputs, optimizer_here, run_training, trained_counts
from tasks.training_data import count_positions, pair_shards

KIND, STAGE_VERSION = "heads", 2
_MERGED = "merged"


class LoraSettings(BaseModel):
    """The adapter on every linear layer, LM head included."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int = Field(32, ge=1)
    alpha: int = Field(16, gt=0)
    dropout: float = Field(0.05, ge=0, lt=1)


class JointConfig(BaseModel):
    """The recipe of stage 2. `lora: null` trains every weight. `teacher` is who L_LM is measured against: the model
    with its adapter off, its cached top-k and tail, or (`data`) the text itself by cross-entropy."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lora: LoraSettings | None = Field(default_factory=LoraSettings)
    teacher: Literal["adapter_off", "top_k", "data"] = "adapter_off"
    warm_start: bool = Field(
        True, description="begin with stage 1's heads; if not, with untrained ones of their layout"
    )
    lm_weight: float = Field(1.0, ge=0, description="of L_LM; with 0 nothing holds the backbone to what it said")
    epochs: int = Field(1, ge=1)
    max_steps: int | None = Field(None, ge=1, description="end there, whatever the epochs say")
    batch_conversations: int = Field(8, ge=1, description="conversations per optimizer step, over all ranks")
    micro_conversations: int = Field(1, ge=1, description="conversations per forward pass of a rank")
    learning_rate: float = Field(5e-4, gt=0, description="of the backbone's weights")
    heads_rate: float = Field(4.0, gt=0, description="the heads' learning rate, in multiples of the backbone's")
    lambda0: float = Field(0.01, ge=0, description="weight of the heads' loss: 0.01 for distilled text, 0.2 for real")
    rise: Literal["constant", "linear", "sine"] = "sine"
    rise_until: float = Field(1.0, gt=0, le=1, description="fraction of the run over which the weight rises")
    backbone_first: float = Field(0.0, ge=0, lt=1, description="fraction of the run in which the heads don't count")
    weight_decay: float = Field(0.0, ge=0)
    warmup_steps: int = Field(20, ge=0)
    clip: float = Field(1.0, gt=0)
    decay: float = Field(0.8, gt=0, le=1, description="λ_k = decay^k")
    targets: Literal["teacher", "text"] = Field("teacher", description="what the heads learn, as in stage 1")
    dtype: str = "bfloat16"
    optimizer: Optimizer = "adamw"
    zero_stage: int = 0
    gradient_checkpointing: bool = False
    window_positions: int = Field(400_000, ge=1, description="positions held in memory and shuffled together")
    checkpoint_steps: int = Field(100, ge=1)
    evaluated_answers: int | None = Field(
        None, ge=1, description="held-out answers, evenly spread, that evaluations go through; all if none is given"
    )
    seed: int = 0

    @model_validator(mode="after")
    def _has_a_teacher(self) -> JointConfig:
        if self.lora is None and self.teacher == "adapter_off":
            raise ValueError("without an adapter (lora: null) there is none to switch off: use teacher top_k or data")
        return self


def train_medusa2(
    context: Context,
    config: JointConfig,
    *,
    backbone: Artifact,
    heads: Artifact,
    distill: Artifact,
    teacher: Artifact,
    held_out_distill: Artifact,
    held_out_teacher: Artifact,
) -> Artifact:
    """Trains backbone and heads; the artifact holds heads, adapter, merged model, curve, evaluation and quality."""
    info, device = backbone_info(backbone), context.placement.resolved_device()
    config = config.model_copy(update={"optimizer": optimizer_here(config.optimizer, device)})
    semantic = {"train": config.model_dump(mode="json", exclude={"checkpoint_steps"})}
    inputs = data_inputs(
        backbone,
        distill=distill,
        teacher=teacher,
        held_out_distill=held_out_distill,
        held_out_teacher=held_out_teacher,
    ) | {"heads": heads.digest("heads")}
    key = artifact_key(KIND, STAGE_VERSION, inputs=inputs, config=semantic)

    def build(partial: Path) -> dict[str, Any]:
        paired = pair_shards(distill_shards(distill), teacher_shards(teacher))
        # A shard of empty answers would make a batch of none.
        counted = {shard: count for shard in paired if (count := count_positions(shard))}
        if not counted:
            raise UserError("there is nothing to train on: no distilled answer has a position that trains")
        from tasks.joint_loop import joint_loop, total_steps

        workers = context.placement.train_worker_count
        passes = workers * config.micro_conversations
        if config.batch_conversations % passes:
            raise UserError(
                f"medusa2.batch_conversations is {config.batch_conversations}, which {workers} ranks x "
                f"{config.micro_conversations} conversations a pass don't divide: choose a multiple"
            )
        context.cluster.start()
        context.cluster.free()
        name = f"{info.name}-medusa2"
        spec = {
            "config": config.model_dump() | {"accumulation": config.batch_conversations // passes},
            "shards": list(counted),
            "counts": list(counted.values()),
            "rows": [_rows(shard[1]) for shard in counted],
            "held_out": pair_shards(distill_shards(held_out_distill), teacher_shards(held_out_teacher)),
            "backbone": model_dir(backbone),
            "backbone_digest": info.digest,
            "initial_heads": heads.path / "heads",
            "merged_name": name,
            "model_directory": f"{_MERGED}/{name}",
            "directory": partial,
            "progress": PROGRESS,
            "device": device,
        }
        run_training(
            joint_loop, spec, total_steps(spec), workers=workers, threads=max(1, context.cluster.cpus // workers)
        )
        _complete(model_dir(backbone), partial / _MERGED / name)
        return trained_counts(partial, sum(counted.values()))

    return context.store.produce(KIND, key, inputs=inputs, config=semantic, build=build)


def merged_backbone(context: Context, trained: Artifact, original: Artifact) -> Artifact:
    """The merged model as a backbone of its own."""
    (model,) = (trained.path / _MERGED).iterdir()
    trust = bool(original.config.get("trust_remote_code"))
    return resolve_backbone(context.store, BackboneConfig(model=str(model), trust_remote_code=trust))


def _rows(teacher_shard: Path) -> int:
    """Answers of a shard in which a position trains."""
    return sum(map(bool, pq.read_table(teacher_shard, columns=["positions"])["positions"].to_pylist()))


def _complete(original: Path, merged: Path) -> None:
    """Adds what saving a model leaves out: tokenizer, chat template, generation settings, code."""
    for file in original.iterdir():
        is_weights = file.suffix == ".safetensors" or file.name.endswith(".index.json")
        if file.is_file() and not is_weights and not (merged / file.name).exists():
            shutil.copyfile(file, merged / file.name)
