"""Process environment of everything this project starts: no telemetry, no surprises. Import-light on purpose."""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from pathlib import Path

QUIET = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_CLIENT_ENABLE_METRICS": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_ETAG_TIMEOUT": "10",
    "HF_HUB_DOWNLOAD_TIMEOUT": "10",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
}


def quiet(environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets defaults that the user's own environment overrides. Call before importing the libraries they steer."""
    for name, value in QUIET.items():
        environment.setdefault(name, value)
    # transformers imports torchao where it is installed, which looks for CUDA kernels, and registers its enumerations
    # in a way that torch calls out of date: both aloud.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if "CUDA_VISIBLE_DEVICES" not in environment and not os.path.exists("/dev/nvidia0"):
        # Without it DeepSpeed probes for compilers of accelerators that aren't there.
        environment.setdefault("DS_ACCELERATOR", "cpu")


def default_root() -> Path:
    """Where artifacts, runs and the registry lie if nobody says: $MEDUSA_ROOT, or `medusa-root` here."""
    return Path(os.environ.get("MEDUSA_ROOT", "medusa-root")).absolute()
