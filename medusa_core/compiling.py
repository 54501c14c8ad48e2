"""torch.compile for a step of fixed shapes: which graphs there are, how they are kept apart, where they are cached.

Two graphs serve every tree, context length and number of requests: one for a single node per row (plain decoding), one
for several; and two more where a cache has more than one row. Knows nothing of models.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch.fx.experimental import _config as shape_config

from kernels.cpu_ops import load_cpu_ops
from medusa_core.cache import TreeCache

Step = Callable[..., tuple[torch.Tensor, torch.Tensor]]
Mask = torch.Tensor | dict[str, torch.Tensor]
_log = logging.getLogger(__name__)


class CompiledSteps:
    """Runs a step compiled, or as it is for caches that `may_compile` (one row: True, several: False) says no to.
    `seconds` is what compiling has taken in this process."""

    def __init__(self, run: Step, may_compile: Callable[[bool], bool]) -> None:
        self.seconds = 0.0
        self._run = run
        self._may_compile = may_compile
        self._graphs: dict[tuple[bool, bool], Step] = {}

    def lacks(self, *, rows: int, nodes: int) -> bool:
        """Whether a step of this kind is still to be prepared."""
        return (rows == 1, nodes == 1) not in self._graphs

    def prepare(self, cache: TreeCache, tokens_BN: torch.Tensor, positions_BN: torch.Tensor, mask: Mask) -> None:
        """Compiles, or loads from the cache of compiled steps, the graph for steps of this kind.

        Examples should be the same in every process: sizes that may change are still part of what is cached.
        """
        begin = time.perf_counter()
        kind = (cache.rows == 1, tokens_BN.shape[1] == 1)
        if not self._may_compile(cache.rows == 1):
            self._graphs[kind] = self._run
            return
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache_directory())
        self._mark_dynamic(kind, cache, tokens_BN, positions_BN, mask)
        graph = _compile(self._run, tokens_BN.device)
        # Sizes that happen to be equal in the example are not the same size.
        with shape_config.patch(use_duck_shape=False):  # type: ignore[attr-defined]
            graph(cache, tokens_BN, positions_BN, mask)
        self._graphs[kind] = graph
        self.seconds += time.perf_counter() - begin

    def __call__(
        self, cache: TreeCache, tokens_BN: torch.Tensor, positions_BN: torch.Tensor, mask: Mask
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One step, by the graph of its kind."""
        return self._graphs[cache.rows == 1, tokens_BN.shape[1] == 1](cache, tokens_BN, positions_BN, mask)

    def _mark_dynamic(
        self,
        kind: tuple[bool, bool],
        cache: TreeCache,
        tokens_BN: torch.Tensor,
        positions_BN: torch.Tensor,
        mask: Mask,
    ) -> None:
        """Names the sizes that change from call to call: slots and extent always, rows and nodes unless they are 1."""
        one_row, one_node = kind
        mark = torch._dynamo.mark_dynamic
        for pair in cache.stores:
            for store in pair:
                mark(store, [3] if one_row else [1, 3])
        rows, nodes = ([] if one_row else [0]), ([] if one_node else [1])
        for tensor in (tokens_BN, positions_BN):
            if rows + nodes:
                mark(tensor, rows + nodes)
        if rows:
            mark(cache.start_B, 0)
        for part in [mask] if isinstance(mask, torch.Tensor) else mask.values():
            mark(part, [*rows, *([] if one_node else [2]), 3])


def use_compiled_operators(device: torch.device) -> None:
    """Puts compiled implementations in the place of the operators' own where there are some; says so if that fails."""
    if device.type == "cpu" and (why_not := load_cpu_ops(cache_directory())):
        _log.warning("the operators of a step run in Python: %s", why_not)


def can_compile(device: torch.device) -> str | None:
    """None if a compiler for this device is at hand, else why not."""
    if device.type == "cpu":
        compiler = os.environ.get("CXX", "g++")
        return None if shutil.which(compiler) else f"there is no C++ compiler ({compiler}) for torch.compile"
    if device.type == "cuda":
        return None
    return f"compiled steps are made for cpu and cuda, not {device.type}"


def cache_directory() -> Path:
    """Where compiled steps are kept between processes: TORCHINDUCTOR_CACHE_DIR, or a directory of the user's own."""
    chosen = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    # torch names its own default, which lies in /tmp, in this very variable.
    if chosen and chosen != default_cache_dir():
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "medusa" / "compiled"


def _compile(run: Step, device: torch.device) -> Step:
    options: dict[str, Any] = {"guard_filter_fn": _no_guards}
    if device.type == "cuda":
        options["triton.cudagraphs"] = True
    # dynamo keeps its graphs by code object: a copy of it keeps engines and kinds of step apart, guards or no guards.
    function = getattr(run, "__func__", run)
    own = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    own.__kwdefaults__ = function.__kwdefaults__
    bound = types.MethodType(own, run.__self__) if hasattr(run, "__self__") else own
    compiled: Step = torch.compile(bound, fullgraph=True, dynamic=False, options=options)
    return compiled


def _no_guards(guards: Any) -> list[bool]:
    """What guards would watch for can't happen here: a graph belongs to one model and is picked by its shapes' kind.
    Checking several hundred of them costs a millisecond a step."""
    return [False for _ in guards]
