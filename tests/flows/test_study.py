"""The ablation: which cells there are, what each leaves out, and what they measure on the toy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flows.config import RunConfig, load_config
from flows.study import PARTS, as_markdown, heads_cells, recipe_cells
from infra.errors import UserError
from tasks.quality import MEASURES
from tasks.train_medusa2 import JointConfig
from tests.flows.conftest import borrow, medusa_here


def test_every_combination_of_the_parts_is_a_cell_of_one_length() -> None:
    """Catches a cell that leaves out another part than it says, and a schedule that weakens the only loss left."""
    base = RunConfig(medusa2=JointConfig(lambda0=0.05, heads_rate=4))
    first, *rest = recipe_cells(base, steps=30, evaluated_answers=7)
    assert first.name == "Medusa-1" and first.config.medusa2 is None
    assert len(rest) == 8 and rest[0].name == "Medusa-2" and rest[-1].name == "direct fine-tuning"
    assert len({tuple(cell.parts.items()) for cell in rest if cell.parts}) == 8
    for cell in rest:
        parts, joint = cell.parts, cell.config.medusa2
        assert parts is not None and joint is not None and (joint.max_steps, joint.evaluated_answers) == (30, 7)
        assert joint.heads_rate == (4 if parts["differential rates"] else 1)
        assert joint.warm_start == parts["warm start"]
        assert (joint.lm_weight, joint.lambda0) == ((1, 0.05) if parts["combined loss"] else (0, 1))


def test_a_variant_changes_what_it_says_and_nothing_else() -> None:
    """Catches a variant that is laid over the one before it, and a misspelt setting that is left out."""
    first, second, third = heads_cells(None, ["train.epochs=1"], ["heads.vocab=4096 train.decay=0.5", "train.seed=3"])
    assert first.config == load_config(None, ["train.epochs=1"])
    assert second.config == load_config(None, ["train.epochs=1", "heads.vocab=4096", "train.decay=0.5"])
    assert third.config == load_config(None, ["train.epochs=1", "train.seed=3"])
    assert [second.name, third.name] == ["heads.vocab=4096 train.decay=0.5", "train.seed=3"]
    with pytest.raises(UserError, match=r"heads\.voacb"):
        heads_cells(None, [], ["heads.voacb=3"])


def test_the_table_shows_every_figure_with_its_interval() -> None:
    figure = {"value": 1.5, "ci95": [1.25, 1.75]}
    measures: dict[str, Any] = {name: figure for name in (*MEASURES, "tokens_per_step", "vs_first")}
    measures |= {"top1": [0.5, 0.25], "loss": [3.0, 4.0], "minutes": 2.0}
    cells = [
        {"name": "Medusa-1", "parts": None, **measures},
        {"name": "x", "parts": dict.fromkeys(PARTS, True), **measures},
    ]
    table = as_markdown({"nodes": 8, "cells": cells}).splitlines()
    assert "tokens per step, 8 nodes" in table[0]
    short, exact = "1.500 [1.250, 1.750]", "1.5000 [1.2500, 1.7500]"
    assert table[2] == "| " + " | ".join(["Medusa-1", "", "", "", short, short, exact, exact, exact]) + " |"
    assert table[3].startswith("| x | yes | yes | yes |")
    without_parts = as_markdown({"nodes": 8, "cells": cells[:1]}).splitlines()
    assert without_parts[2] == f"| Medusa-1 | {short} | {short} | 3.000 4.000 | 0.500 0.250 | 2.0 |"


@pytest.mark.long
def test_on_the_toy_the_parts_are_worth_what_they_are_for(toy_run: Any, tmp_path: Path) -> None:
    """Catches a combined loss that holds nothing, a cold start that begins with trained heads, and cells that measure
    the backbone as it was."""
    first, config, _, _ = toy_run
    root = borrow(first, tmp_path, "backbone", "prompts", "distill", "teacher", "heads", "ranks")
    joint = {"lora.rank": 8, "batch_conversations": 4, "learning_rate": "3e-3", "dtype": "float32", "warmup_steps": 1}
    flags = [part for key, value in joint.items() for part in ("--set", f"medusa2.{key}={value}")]
    names = ("Medusa-1", "Medusa-2", "011", "direct fine-tuning")
    command = ("study", "recipe", "--config", config, "--root", root, "--steps", 8, "--nodes", 6)
    cells = [part for name in names for part in ("--cell", name)]
    done = medusa_here(*command, "--answers", 12, *cells, *flags, "--json")
    assert done.returncode == 0, done.stderr
    study = json.loads(done.stdout)
    assert (Path(study["directory"]) / "study.md").read_text() == as_markdown(study)
    cells = {cell["name"]: cell for cell in study["cells"]}
    assert set(cells) == set(names)
    assert cells["011"]["parts"] == {"combined loss": False, "differential rates": True, "warm start": True}
    # All else equal, the combined loss holds the backbone.
    assert 0 == cells["Medusa-1"]["kl"]["value"] < cells["Medusa-2"]["kl"]["value"] < cells["011"]["kl"]["value"]
    assert cells["Medusa-1"]["vs_first"] == {"value": 1.0, "ci95": [1.0, 1.0]}
    assert cells["direct fine-tuning"]["vs_first"]["ci95"][1] < 1


def test_a_cell_that_is_none_is_refused(toy_run: Any, tmp_path: Path) -> None:
    """Catches an hour of training after a misspelt name."""
    _, config, _, _ = toy_run
    done = medusa_here("study", "recipe", "--config", config, "--root", tmp_path, "--cell", "medusa-2")
    assert done.returncode == 2 and "no cell ['medusa-2']; there are: Medusa-1, Medusa-2, 110" in done.stderr
