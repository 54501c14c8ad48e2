"""Training in full on the toy: the number of ranks, the source of hidden states and the layout of the heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from medusa_core.checkpoint import weights_digest
from tests.flows.conftest import run_medusa

pytestmark = pytest.mark.long


def train(toy_run: Any, root: Path, *settings: str) -> tuple[list[float], Path]:
    """Losses and heads artifact of a training that reuses the finished run's answers."""
    first, config, _, _ = toy_run
    if not root.exists():
        (root / "artifacts").mkdir(parents=True)
        for kind in ("backbone", "prompts", "distill"):
            (root / "artifacts" / kind).symlink_to(first / "artifacts" / kind)
    flags = [part for setting in settings for part in ("--set", setting)]
    done = run_medusa("run", "--config", config, "--root", root, "--until", "train-medusa1", "--json", *flags)
    assert done.returncode == 0, done.stderr
    key = next(s["artifact"] for s in json.loads(done.stdout)["stages"] if s["name"] == "train-medusa1")
    path = root / "artifacts" / key
    return [json.loads(line)["loss"] for line in (path / "curve.jsonl").read_text().splitlines()], path


def test_one_rank_and_two_train_the_same_heads(toy_run: Any, tmp_path: Path) -> None:
    """Catches a loss that is a mean of the ranks' means, and ranks that see the same micro-batches."""
    two, _ = train(toy_run, tmp_path / "two", "placement.train_workers=2")
    one, _ = train(toy_run, tmp_path / "one", "placement.train_workers=1")
    accumulated, _ = train(toy_run, tmp_path / "acc", "placement.train_workers=1", "train.accumulation=4")
    assert len(one) == len(two) == len(accumulated) > 20
    assert one == pytest.approx(two, rel=2e-3)
    assert one == pytest.approx(accumulated, rel=2e-3)
    assert one[-1] < 0.2 * one[0]


def test_hidden_states_made_live_train_the_same_heads(toy_run: Any, tmp_path: Path) -> None:
    cached, _ = train(toy_run, tmp_path / "cached")
    live, _ = train(toy_run, tmp_path / "live", "teacher.hidden=live")
    assert cached == pytest.approx(live, rel=2e-3)


def test_every_layout_trains_and_leaves_the_backbone_alone(toy_run: Any, tmp_path: Path, toy_dir: Path) -> None:
    """Catches the reference's fault: with the shared layout it trains the LM head and throws that away."""
    before = weights_digest(toy_dir)
    for settings in (
        ["heads.lm_head=shared", "heads.block=mlp"],
        ["heads.lm_head=shared", "heads.num_layers=2"],
        ["heads.lm_head=own", "heads.block=mlp", "heads.vocab=null"],
    ):
        losses, path = train(toy_run, tmp_path / "root", *settings)
        assert losses[-1] < 0.5 * losses[0], settings
        evaluation = json.loads((path / "evaluation.json").read_text())
        assert len(evaluation["epochs"]) == 8
        assert min(evaluation["final"]["top1"]) > 0.3, settings
    assert weights_digest(toy_dir) == before
    (artifact,) = (tmp_path / "root" / "artifacts" / "backbone").glob("*/model")
    assert weights_digest(artifact) == before
