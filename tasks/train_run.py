"""Starting a training loop on its ranks through Ray Train, and following it. Knows nothing of what is trained."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from infra.artifacts import Artifact
from infra.progress import followed, track
from medusa_core.checkpoint import WEIGHTS
from tasks.backbone import backbone_identity
from tasks.stage import dtype_of

PROGRESS, MEMORY = ".progress.json", ".memory.json"
log = logging.getLogger(__name__)
Optimizer = Literal["adamw", "adamw_8bit"]


def data_inputs(
    backbone: Artifact, *, distill: Artifact, teacher: Artifact, held_out_distill: Artifact, held_out_teacher: Artifact
) -> dict[str, str]:
    """What both stages' keys depend on: the backbone and the data they train and evaluate on."""
    return {
        "backbone": backbone_identity(backbone),
        "distill": distill.digest(),
        "teacher": teacher.digest(),
        "held_out_distill": held_out_distill.digest(),
        "held_out_teacher": held_out_teacher.digest(),
    }


def run_training(
    loop: Callable[[dict[str, Any]], None], spec: dict[str, Any], total: int, *, workers: int, threads: int
) -> None:
    """Runs a loop of `total` steps on `workers` ranks: gloo on CPUs, NCCL on GPUs; a failed rank restarts the group."""
    import ray.train
    from ray.train.torch import TorchConfig, TorchTrainer

    # What an interrupted attempt left would be shown as this one's.
    (spec["directory"] / PROGRESS).unlink(missing_ok=True)
    gpu = spec["device"].startswith("cuda")
    dtype_of(spec["config"]["dtype"])
    storage = spec["directory"] / ".ray"
    trainer = TorchTrainer(
        loop,
        train_loop_config=spec | {"threads": threads},
        torch_config=TorchConfig(backend="nccl" if gpu else "gloo"),
        scaling_config=ray.train.ScalingConfig(
            num_workers=workers,
            use_gpu=gpu,
            resources_per_worker={"CPU": threads} | ({"GPU": 1} if gpu else {}),
        ),
        run_config=ray.train.RunConfig(
            name="train",
            storage_path=str(storage.resolve()),
            failure_config=ray.train.FailureConfig(max_failures=2),
        ),
    )
    progress_file = spec["directory"] / PROGRESS
    with track("train", total, "steps") as progress:

        def read() -> tuple[float, str]:
            if not progress_file.exists():
                return 0.0, "starting"
            state = json.loads(progress_file.read_text())
            return state["step"], f"loss {state['loss']:.3f}"

        with followed(progress, read):
            trainer.fit()


def trained_counts(partial: Path, positions: int) -> dict[str, Any]:
    """What a manifest says of trained heads."""
    evaluation = json.loads((partial / "evaluation.json").read_text())
    size = (partial / "heads" / WEIGHTS).stat().st_size
    peak = json.loads((partial / MEMORY).read_text())
    return {"positions": positions, "bytes": size, "peak_memory_mb": peak, **evaluation["final"]}


def optimizer_here(name: Optimizer, device: str) -> Optimizer:
    """The optimizer that a recipe's becomes on this device: 8 bits need bitsandbytes, which needs CUDA."""
    if name == "adamw_8bit" and not (device.startswith("cuda") and find_spec("bitsandbytes")):
        log.warning("adamw_8bit needs a CUDA device and bitsandbytes (pip install bitsandbytes): training with AdamW")
        return "adamw"
    return name
