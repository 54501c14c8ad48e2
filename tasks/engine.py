"""The decoding engine as stages and commands load it: one place that says what is packed, compiled and checked.

Knows directories and configuration; how decoding works is `medusa_core`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator

from medusa_core.backbone import AttentionMode
from medusa_core.checkpoint import load_heads
from medusa_core.engine import CompileMode, MedusaEngine
from medusa_core.portfolio import Portfolio
from medusa_core.tree import OFF, Tree
from tasks.backbone import load_model


class EngineConfig(BaseModel):
    """How the engine runs a step. `compile: auto` compiles it if a subprocess survives doing so, and runs it as it is
    otherwise (no C++ compiler, a compiler that aborts). `attention: auto` verifies trees by the Triton kernel where
    that runs, which is on a GPU, and under a dense mask elsewhere."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    compile: CompileMode = Field("auto", description="auto, on or off")
    attention: AttentionMode = Field("auto", description="auto, kernel or dense")

    @field_validator("compile", mode="before")
    @classmethod
    def _not_a_boolean(cls, value: Any) -> Any:
        # YAML reads a bare on and off as true and false.
        return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value


def load_engine(
    model: Path,
    *,
    dtype: torch.dtype,
    device: str,
    engine: EngineConfig,
    eos_token_ids: Sequence[int],
    heads: Path | None = None,
    backbone_digest: str | None = None,
    tree: Tree | Portfolio = OFF,
    tokenizer: Any = None,
) -> MedusaEngine:
    """An engine over a backbone artifact's model directory; UserError or InputError if parts don't belong together."""
    loaded = load_model(model, dtype, device)
    own = None if heads is None else load_heads(heads, loaded, backbone_digest=backbone_digest)
    return MedusaEngine(
        loaded,
        own,
        tree,
        eos_token_ids=eos_token_ids,
        pack=True,
        compile=engine.compile,
        attention=engine.attention,
        tokenizer=tokenizer,
    )
