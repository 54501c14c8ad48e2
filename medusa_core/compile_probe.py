"""Whether a compiled step of a model can be trusted not to take the process down: tried first in one of its own.

A compiler can abort the process that calls it. The subprocess builds a freshly initialised model of the same class and
configuration, compiles and runs its steps, and leaves the compiled artefacts in the cache that the caller then reads.
What came of it is remembered beside them, so that a kind of step is tried once per model, machine and version of torch.
"""

from __future__ import annotations

import hashlib
import json
import logging
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers import __version__ as transformers_version

from medusa_core.compiling import cache_directory, use_compiled_operators

_LIMIT_S = 1800
_log = logging.getLogger(__name__)


def compiles(model: PreTrainedModel, *, pack: bool, one_row: bool, attention: str = "auto") -> str | None:
    """None if a subprocess compiled and ran this model's steps, for caches of one row or of several, else why not, in
    a sentence."""
    verdict = cache_directory() / f"probe-{_key(model, pack=pack, one_row=one_row, attention=attention)}.json"
    if verdict.exists():
        found: dict[str, Any] = json.loads(verdict.read_text())
        return None if found["why_not"] is None else str(found["why_not"])
    _log.info("compiling the decode step of %s for %s, once for this machine", type(model).__name__, _rows(one_row))
    why_not = _try(model, pack=pack, one_row=one_row, attention=attention)
    verdict.parent.mkdir(parents=True, exist_ok=True)
    partial = verdict.with_suffix(".partial")
    partial.write_text(json.dumps({"why_not": why_not}))
    partial.replace(verdict)
    return why_not


def _rows(one_row: bool) -> str:
    return "one row" if one_row else "several rows"


def _try(model: PreTrainedModel, *, pack: bool, one_row: bool, attention: str) -> str | None:
    with tempfile.TemporaryDirectory() as scratch:
        spec = Path(scratch) / "model.pickle"
        try:
            content = pickle.dumps(
                {
                    "class": type(model),
                    "config": model.config,
                    "dtype": model.dtype,
                    "device": str(model.device),
                    "threads": torch.get_num_threads(),
                    "pack": pack,
                    "attention": attention,
                    "rows": 1 if one_row else 2,
                }
            )
        except (pickle.PicklingError, AttributeError) as error:
            return f"its class can't be built in a subprocess ({error})"
        spec.write_bytes(content)
        command = [sys.executable, "-m", "medusa_core.compile_probe", str(spec)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"compiling took more than {_LIMIT_S} seconds in a subprocess"
    if done.returncode == 0:
        return None
    last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    ended = f"ended by signal {-done.returncode}" if done.returncode < 0 else f"failed: {last}"
    return f"compiling for {_rows(one_row)} was tried in a subprocess, which {ended}"


def _key(model: PreTrainedModel, *, pack: bool, one_row: bool, attention: str) -> str:
    """Digest of all that the compiled code depends on, the processor included."""
    parts = [
        torch.__version__,
        transformers_version,
        f"{type(model).__module__}.{type(model).__qualname__}",
        json.dumps(model.config.to_dict(), sort_keys=True, default=str),
        str(model.dtype),
        model.device.type,
        torch.cuda.get_device_name() if model.device.type == "cuda" else torch.backends.cpu.get_cpu_capability(),
        str(torch.get_num_threads()),
        str(pack),
        attention,
        _rows(one_row),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _main(path: str) -> None:
    """The subprocess: a model of the same shape, one step of one node and one of several."""
    from medusa_core.attention import register_tree_attention, use_tree_attention
    from medusa_core.backbone import Backbone
    from medusa_core.tree import OFF, chain

    spec = pickle.loads(Path(path).read_bytes())
    torch.set_num_threads(spec["threads"])
    # The configuration that was pickled names it already.
    register_tree_attention()
    model = spec["class"]._from_config(spec["config"], dtype=spec["dtype"]).to(spec["device"]).eval()
    use_compiled_operators(model.device)
    with torch.inference_mode():
        use_tree_attention(model)
        backbone = Backbone(model, pack=spec["pack"], attention=spec["attention"], may_compile=lambda one_row: True)
        rows = spec["rows"]
        cache = backbone.open(rows=rows, slots=512)
        backbone.prefill(cache, 0, [[1, 2, 3]] * rows)
        start_B = torch.full((rows,), 3, device=model.device)
        for tree in (OFF, chain(3)):
            for _ in range(2):
                tokens = torch.zeros(rows, tree.nodes, dtype=torch.int64, device=model.device)
                logits, _ = backbone.verify(cache, start_B, 3, tokens, tree)
                assert logits.shape[:2] == (rows, tree.nodes)


if __name__ == "__main__":
    _main(sys.argv[1])
