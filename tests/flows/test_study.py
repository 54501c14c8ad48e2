"""The ablation: which cells there are, what each leaves out, and what they measure on the toy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flows.study import PARTS, _cells, as_markdown
from tasks.quality import MEASURES
from tasks.train_medusa2 import JointConfig
from tests.flows.conftest import borrow, medusa_here


def test_every_combination_of_the_parts_is_a_cell_of_one_length() -> None:
    """Catches a cell that leaves out another part than it says, and a schedule that weakens the only loss left."""
    first, *rest = _cells(JointConfig(lambda0=0.05, heads_rate=4), 30)
    assert first[0] == "Medusa-1" and first[2] is None
    assert len(rest) == 8 and rest[0][0] == "Medusa-2" and rest[-1][0] == "direct fine-tuning"
    assert len({tuple(parts.items()) for _, parts, _ in rest if parts}) == 8
    for _, parts, joint in rest:
        assert parts is not None and joint is not None and joint.max_steps == 30
        assert joint.heads_rate == (4 if parts["differential rates"] else 1)
        assert joint.warm_start == parts["warm start"]
        assert (joint.lm_weight, joint.lambda0) == ((1, 0.05) if parts["combined loss"] else (0, 1))


def test_the_table_shows_every_figure_with_its_interval() -> None:
    figure = {"value": 1.5, "ci95": [1.25, 1.75]}
    measures = {name: figure for name in (*MEASURES, "tokens_per_step")}
    cells = [
        {"name": "Medusa-1", "parts": None, **measures},
        {"name": "x", "parts": dict.fromkeys(PARTS, True), **measures},
    ]
    table = as_markdown({"nodes": 8, "cells": cells}).splitlines()
    assert "tokens per step, 8 nodes" in table[0]
    assert table[2] == "| Medusa-1 |  |  |  | 1.500 [1.250, 1.750] |" + " 1.5000 [1.2500, 1.7500] |" * 3
    assert table[3].startswith("| x | yes | yes | yes |")


@pytest.mark.long
def test_on_the_toy_the_parts_are_worth_what_they_are_for(toy_run: Any, tmp_path: Path) -> None:
    """Catches a combined loss that holds nothing, a cold start that begins with trained heads, and cells that measure
    the backbone as it was."""
    first, config, _, _ = toy_run
    root = borrow(first, tmp_path, "backbone", "prompts", "distill", "teacher", "heads", "ranks")
    joint = {"lora.rank": 8, "batch_conversations": 4, "learning_rate": "3e-3", "dtype": "float32", "warmup_steps": 1}
    flags = [part for key, value in joint.items() for part in ("--set", f"medusa2.{key}={value}")]
    names = ("Medusa-1", "Medusa-2", "011", "direct fine-tuning")
    command = ("study", "recipe", "--config", config, "--root", root, "--steps", 8, "--nodes", 6, "--json")
    done = medusa_here(*command, *(part for name in names for part in ("--cell", name)), *flags)
    assert done.returncode == 0, done.stderr
    study = json.loads(done.stdout)
    assert (Path(study["directory"]) / "study.md").read_text() == as_markdown(study)
    cells = {cell["name"]: cell for cell in study["cells"]}
    assert set(cells) == set(names)
    assert cells["011"]["parts"] == {"combined loss": False, "differential rates": True, "warm start": True}
    # All else equal, the combined loss holds the backbone.
    assert 0 == cells["Medusa-1"]["kl"]["value"] < cells["Medusa-2"]["kl"]["value"] < cells["011"]["kl"]["value"]
    assert cells["Medusa-1"]["tokens_per_step"]["value"] > cells["direct fine-tuning"]["tokens_per_step"]["value"]


def test_a_cell_that_is_none_is_refused(toy_run: Any, tmp_path: Path) -> None:
    """Catches an hour of training after a misspelt name."""
    _, config, _, _ = toy_run
    done = medusa_here("study", "recipe", "--config", config, "--root", tmp_path, "--cell", "medusa-2")
    assert done.returncode == 2 and "no cell ['medusa-2']; there are: Medusa-1, Medusa-2, 110" in done.stderr
