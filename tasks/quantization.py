"""Loading a frozen backbone with its weights in 8 or 4 bits: bitsandbytes on CUDA, torchao on a CPU.

The LM head stays as it is, because heads start as copies of it. Knows nothing of artifacts.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Literal

from infra.errors import UserError

Quantization = Literal["int8", "int4"]


def loading_options(quantization: Quantization | None, device: str) -> dict[str, Any]:
    """Arguments for `from_pretrained`; UserError where the device or a missing package rules it out."""
    if quantization is None:
        return {}
    if device.startswith("cuda"):
        _need("bitsandbytes", quantization)
        import torch
        from transformers import BitsAndBytesConfig

        four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
        eight = BitsAndBytesConfig(load_in_8bit=True)  # type: ignore[no-untyped-call]
        return {"quantization_config": four if quantization == "int4" else eight, "device_map": {"": device}}
    if quantization == "int4":
        raise UserError("backbone.quantization int4 needs a CUDA device; on a CPU int8 works")
    _need("torchao", quantization)
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return {"quantization_config": TorchAoConfig(Int8WeightOnlyConfig()), "device_map": {"": "cpu"}}


def _need(package: str, quantization: str) -> None:
    if find_spec(package) is None:
        raise UserError(f"backbone.quantization {quantization} needs {package} here: pip install {package}")
