"""Linear layers whose weight is reordered once for the CPU's matrix units, instead of at every call.

oneDNN reorders a plain weight each time a product runs; for a decode step that costs more than the product itself.
Inference only. It knows nothing of models beyond their nn.Linear modules.
"""

from __future__ import annotations

import torch
from torch import nn


class PackedLinear(nn.Module):
    """A frozen nn.Linear with a reordered copy of its weight; `weight` stays readable (and tied) as before."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        with torch.no_grad():
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this torch build reorders weights of `dtype` on `device`."""
    return device.type == "cpu" and torch.backends.mkldnn.is_available() and dtype in (torch.bfloat16, torch.float32)


def pack_linears(model: nn.Module) -> int:
    """Replaces every nn.Linear of a CPU model in place; returns how many. Elsewhere it changes nothing."""
    packed = 0
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and can_pack(module.weight.dtype, module.weight.device):
            model.set_submodule(name, PackedLinear(module))
            packed += 1
    return packed
