"""Stage `latency`: this machine's step times over (nodes, batch, context), in a fresh process, whatever the tree says.

Knows nothing of accuracy.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field

from infra.artifacts import Artifact, artifact_key, write_json
from infra.fresh_process import FreshProcess
from infra.machine import machine_facts
from infra.progress import track
from medusa_core.checkpoint import read_config
from medusa_core.engine import MedusaEngine
from medusa_core.sampling import SamplingParams
from medusa_core.tree import OFF, Tree, best_first
from tasks.backbone import backbone_identity, backbone_info, model_dir
from tasks.engine import EngineConfig, load_engine
from tasks.stage import Context, dtype_of

KIND, STAGE_VERSION = "latency", 4
TABLE = "latency.json"


class LatencyConfig(BaseModel):
    """Which steps are timed. Many short rounds over all cells: a busy second of a shared machine then falls on all of
    them, and the medians leave it out, instead of making one size look slow."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    nodes: tuple[int, ...] = Field((1, 2, 4, 8, 16, 24, 32, 48, 64), min_length=1)
    batches: tuple[int, ...] = Field((1,), min_length=1)
    contexts: tuple[int, ...] = Field((256,), min_length=1)
    rounds: int = Field(9, ge=1)
    steps: int = Field(4, ge=1)
    dtype: str = "bfloat16"


def latency(
    context: Context, config: LatencyConfig, engine: EngineConfig, *, backbone: Artifact, heads: Artifact
) -> Artifact:
    """Times the engine with these heads. Only their shape matters, but their files say it."""
    placement = context.placement
    semantic = config.model_dump(mode="json") | {"engine": engine.model_dump()}
    inputs = {"backbone": backbone_identity(backbone), "heads": heads.digest("heads/config.json")}
    machine = machine_facts(device=placement.resolved_device(), threads=placement.thread_count, dtype=config.dtype)
    key = artifact_key(KIND, STAGE_VERSION, inputs=inputs, config=semantic, machine=machine)

    def build(partial: Path) -> dict[str, Any]:
        context.cluster.stop()
        spec = semantic | {
            "model": str(model_dir(backbone)),
            "backbone_digest": backbone_info(backbone).digest,
            "heads": str(heads.path / "heads"),
            "device": placement.resolved_device(),
            "threads": placement.thread_count,
        }
        with FreshProcess("latency", _Timer, spec) as timer:
            cells = timer.call("measure")
        write_json(partial / TABLE, {"schema": "medusa.latency/1", "machine": machine, "cells": cells})
        return {"cells": len(cells)}

    return context.store.produce(KIND, key, inputs=inputs, config=semantic | {"machine": machine}, build=build)


def generic_tree(nodes: int, num_heads: int) -> Tree:
    """A tree of typical shape for its size: ranks halve in likelihood, depths shrink by a third."""
    tree, _ = best_first(
        lambda path: 0.6 ** len(path) * 0.5 ** sum(path), nodes=nodes, num_heads=num_heads, max_rank=nodes
    )
    return tree


class _Timer:
    """Lives in the fresh process."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        torch.set_num_threads(spec["threads"])

    def measure(self) -> list[dict[str, Any]]:
        """Milliseconds of draft, verify, accept and the whole step for every cell (medians)."""
        spec = self.spec
        engine = load_engine(
            Path(spec["model"]),
            dtype=dtype_of(spec["dtype"]),
            device=spec["device"],
            engine=EngineConfig(**spec["engine"]),
            eos_token_ids=[],
            heads=Path(spec["heads"]),
            backbone_digest=spec["backbone_digest"],
        )
        depth = read_config(Path(spec["heads"])).heads.num_heads
        cells = [
            (nodes, batch, context)
            for context in spec["contexts"]
            if context + 64 < engine.context_length
            for batch in spec["batches"]
            for nodes in spec["nodes"]
        ]
        times: dict[tuple[int, int, int], list[tuple[float, float, float]]] = {cell: [] for cell in cells}
        with track("latency", len(cells) * spec["rounds"], "cells") as progress:
            for _ in range(spec["rounds"]):
                for cell in cells:
                    tree = generic_tree(cell[0], depth) if cell[0] > 1 else OFF
                    times[cell] += _time_cell(engine, tree, cell[1], cell[2], spec["steps"])
                    progress.advance(1)
        rows = []
        for (nodes, batch, context), samples in times.items():
            draft, verify, accept = (1000 * statistics.median(part) for part in zip(*samples, strict=True))
            total = 1000 * statistics.median(sum(sample) for sample in samples)
            parts = {"draft_ms": draft, "verify_ms": verify, "accept_ms": accept, "step_ms": total}
            rows.append({"nodes": nodes, "batch": batch, "context": context} | parts)
        return rows


def _time_cell(
    engine: MedusaEngine, tree: Tree, batch: int, context: int, steps: int
) -> list[tuple[float, float, float]]:
    generator = torch.Generator().manual_seed(context)
    warmup = 1
    budget = (steps + warmup + 1) * (tree.depth + 1) + 1
    session = engine.session(rows=batch, slots=context + budget + tree.nodes, tree=tree)
    vocab = engine.model.get_output_embeddings().weight.shape[0]
    for _ in range(batch):
        prompt = torch.randint(vocab, (context,), generator=generator).tolist()
        session.add_request(prompt, SamplingParams(budget))
    samples = []
    for step in range(warmup + steps):
        before = (engine.seconds.draft, engine.seconds.verify, engine.seconds.accept)
        session.step()
        after = (engine.seconds.draft, engine.seconds.verify, engine.seconds.accept)
        if step >= warmup:
            samples.append((after[0] - before[0], after[1] - before[1], after[2] - before[2]))
    return samples
