"""Linear layers whose weight is reordered once for the CPU's matrix units, instead of at every call.

oneDNN reorders a plain weight each time a product runs; for a decode step that costs more than the product itself.
Layers that read the same input (query, key and value; gate and up) become one product. Inference only. It knows
nothing of models beyond their nn.Linear modules and the order in which one forward calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional as F

from medusa_core.ops import packed_linear


class PackedLinear(nn.Module):
    """A frozen nn.Linear with a reordered copy of its weight; `weight` stays readable (and tied) as before."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed = reordered(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = packed_linear(x, self.packed, self.bias)
        return out


class FirstOfGroup(nn.Module):
    """The layer of a group that is called first: it computes the products of all and keeps the others' parts."""

    def __init__(self, group: Sequence[nn.Linear]) -> None:
        super().__init__()
        first = group[0]
        self.weight, self.bias = first.weight, first.bias
        self.in_features, self.out_features = first.in_features, first.out_features
        self.sizes = [linear.out_features for linear in group]
        self.packed = reordered(torch.cat([linear.weight.detach() for linear in group]))
        self.packed_bias = None
        if any(linear.bias is not None for linear in group):
            parts = [
                linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias.detach()
                for linear in group
            ]
            self.packed_bias = torch.cat(parts)
        self.read: torch.Tensor | None = None
        self.parts: tuple[torch.Tensor, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own: torch.Tensor
        own, *parts = packed_linear(x, self.packed, self.packed_bias).split(self.sizes, -1)
        self.read, self.parts = x, tuple(parts)
        return own


class LaterOfGroup(nn.Module):
    """A layer whose product the first of its group has computed already, if it is asked about the same input."""

    def __init__(self, first: FirstOfGroup, linear: nn.Linear, place: int, *, last: bool) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        # In a tuple, so that it is no submodule of this one: it has a place of its own in the model.
        self._group = (first,)
        self.place, self.last = place, last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self._group[0]
        if first.read is not x:
            return F.linear(x, self.weight, self.bias)
        own: torch.Tensor = first.parts[self.place]
        if self.last:
            # Nothing may outlive the forward, neither memory nor, in a compiled one, an extra output of the graph.
            first.read, first.parts = None, ()
        return own


def reordered(weight: torch.Tensor) -> torch.Tensor:
    """A copy of a weight [out, in] in the order that oneDNN's products want; only `packed_linear` can read it."""
    with torch.no_grad():
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
    return packed


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this torch build reorders weights of `dtype` on `device`."""
    return device.type == "cpu" and torch.backends.mkldnn.is_available() and dtype in (torch.bfloat16, torch.float32)


def pack_linears(model: nn.Module, groups: Sequence[Sequence[str]] = ()) -> int:
    """Replaces every nn.Linear of a CPU model in place; returns how many. Elsewhere it changes nothing.

    `groups` names layers that read the same input, in the order of their calls (`LinearCalls` finds them).
    """
    linears = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        # A quantized weight is a tensor of a kind of its own.
        and type(module.weight) is nn.Parameter
        and can_pack(module.weight.dtype, module.weight.device)
    }
    count = len(linears)
    for group in groups:
        if len(group) < 2 or not all(name in linears for name in group):
            continue
        members = [linears.pop(name) for name in group]
        first = FirstOfGroup(members)
        model.set_submodule(group[0], first)
        for place, (name, linear) in enumerate(zip(group[1:], members[1:], strict=True)):
            model.set_submodule(name, LaterOfGroup(first, linear, place, last=place == len(group) - 2))
    for name, linear in linears.items():
        model.set_submodule(name, PackedLinear(linear))
    return count


class LinearCalls:
    """Records, while one forward runs, which linear layers of one parent module read the very same tensor in a row."""

    def __init__(self, model: nn.Module) -> None:
        self._calls: list[tuple[str, torch.Tensor]] = []
        self._hooks = [
            module.register_forward_pre_hook(self._recorder(name))
            for name, module in model.named_modules()
            if type(module) is nn.Linear
        ]

    def _recorder(self, name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def record(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            self._calls.append((name, args[0]))

        return record

    def groups(self) -> list[list[str]]:
        """Ends the recording. A layer that was called twice belongs to no group."""
        for hook in self._hooks:
            hook.remove()
        groups: list[list[str]] = []
        read: torch.Tensor | None = None
        for name, x in self._calls:
            same_parent = groups and groups[-1][-1].rpartition(".")[0] == name.rpartition(".")[0]
            if x is read and same_parent:
                groups[-1].append(name)
            else:
                groups.append([name])
            read = x
        self._calls.clear()
        called = [name for group in groups for name in group]
        return [group for group in groups if len(group) > 1 and all(called.count(name) == 1 for name in group)]
