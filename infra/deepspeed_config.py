"""DeepSpeed's configuration from what a recipe says. Knows nothing of models."""

from __future__ import annotations

from typing import Any

from infra.errors import UserError


def deepspeed_config(
    *, micro_batch: int, accumulation: int, dtype: str, clip: float, zero_stage: int, universal: bool = False
) -> dict[str, Any]:
    """The JSON that `deepspeed.initialize` takes; the optimizer and schedule are passed beside it. `universal` is
    for a checkpoint in the format that any number of ranks can load.

    UserError for a dtype or ZeRO stage that is not supported.
    """
    if dtype not in ("float32", "bfloat16"):
        raise UserError(f"training dtype is {dtype!r}; use 'float32' or 'bfloat16'")
    if zero_stage not in (0, 1, 2, 3):
        raise UserError(f"zero_stage is {zero_stage}; use 0, 1, 2 or 3")
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "bf16": {"enabled": dtype == "bfloat16"},
        "zero_optimization": {"stage": zero_stage},
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": universal},
        "steps_per_print": 1 << 30,
        "wall_clock_breakdown": False,
    }
    return config
