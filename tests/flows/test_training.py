"""Training in full on the toy: the number of ranks, the source of hidden states and the layout of the heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from medusa_core.checkpoint import read_config, weights_digest
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


STAGE_TWO = (
    "medusa2.lora.rank=8", "medusa2.epochs=2", "medusa2.batch_conversations=4", "medusa2.learning_rate=1e-3",
    "medusa2.warmup_steps=2", "medusa2.dtype=float32", "medusa2.lambda0=0.2",
)  # fmt: skip


def train_jointly(toy_run: Any, root: Path, *settings: str) -> dict[str, Path]:
    """Artifacts of a run up to stage two: the heads of both stages, the backbone before and after."""
    first, config, _, _ = toy_run
    if not root.exists():
        (root / "artifacts").mkdir(parents=True)
        for kind in ("backbone", "prompts", "distill", "teacher", "heads"):
            (root / "artifacts" / kind).mkdir()
            for entry in (first / "artifacts" / kind).iterdir():
                (root / "artifacts" / kind / entry.name).symlink_to(entry)
    flags = [part for setting in (*STAGE_TWO, *settings) for part in ("--set", setting)]
    done = run_medusa("run", "--config", config, "--root", root, "--until", "train-medusa2", "--json", *flags)
    assert done.returncode == 0, done.stderr
    found = {}
    for stage in json.loads(done.stdout)["stages"]:
        for artifact in stage["artifact"].split():
            found[f"{stage['name']} {artifact.split('/')[0]}"] = root / "artifacts" / artifact
    return found


def history(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    curve = [json.loads(line) for line in (path / "curve.jsonl").read_text().splitlines()]
    return curve, json.loads((path / "evaluation.json").read_text())["epochs"]


def test_stage_two_starts_where_stage_one_ended_and_moves_the_backbone_a_little(
    toy_run: Any, tmp_path: Path, toy_dir: Path
) -> None:
    """Catches heads that start anew, a backbone that isn't held to what it said, embeddings changed with the LM head,
    heads bound to the backbone they no longer fit, and a number of ranks that changes the result."""
    two = train_jointly(toy_run, tmp_path / "two", "placement.train_workers=2")
    curve, evaluations = history(two["train-medusa2 heads"])
    _, before = history(two["train-medusa1 heads"])
    assert evaluations[0]["loss"] == pytest.approx(before[-1]["loss"], rel=1e-3)
    assert evaluations[0]["quality"]["kl"]["value"] == pytest.approx(0.0, abs=1e-6)
    assert 0 < evaluations[-1]["quality"]["kl"]["value"] < 0.05
    assert sum(evaluations[-1]["loss"]) < sum(evaluations[0]["loss"])
    assert [row["lambda0"] for row in curve] == sorted(row["lambda0"] for row in curve)
    original, trained = (two[f"{stage} backbone"] for stage in ("backbone", "train-medusa2"))
    tensors = [load_file(path / "model" / "model.safetensors") for path in (original, trained)]
    embedding = "model.embed_tokens.weight"
    assert torch.equal(tensors[0][embedding], tensors[1][embedding])
    assert not torch.equal(tensors[1].get("lm_head.weight", tensors[1][embedding]), tensors[1][embedding])
    described = read_config(two["train-medusa2 heads"] / "heads")
    assert described.backbone_digest == weights_digest(trained / "model") != weights_digest(original / "model")
    assert weights_digest(original / "model") == weights_digest(toy_dir)
    adapter = load_file(two["train-medusa2 heads"] / "adapter" / "adapter_model.safetensors")
    assert adapter and all("lora_" in name for name in adapter)
    one = train_jointly(toy_run, tmp_path / "one", "placement.train_workers=1", "medusa2.lora.dropout=0")
    pair = train_jointly(toy_run, tmp_path / "two", "placement.train_workers=2", "medusa2.lora.dropout=0")
    losses = [[row["heads"] for row in history(path["train-medusa2 heads"])[0]] for path in (one, pair)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2, abs=1e-5)


def test_every_weight_may_train_from_a_cached_teacher(toy_run: Any, tmp_path: Path) -> None:
    """Catches full fine-tuning that trains nothing, and a cached teacher that drives the model away from its own."""
    full = ("medusa2.lora=null", "medusa2.teacher=top_k", "medusa2.learning_rate=1e-4")
    found = train_jointly(toy_run, tmp_path / "full", "medusa2.micro_conversations=2", *full)
    _, evaluations = history(found["train-medusa2 heads"])
    assert 0 < evaluations[-1]["quality"]["kl"]["value"] < 0.05
    assert sum(evaluations[-1]["loss"]) < sum(evaluations[0]["loss"])
    assert not (found["train-medusa2 heads"] / "adapter").exists()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_zero_stage_changes_where_things_lie_and_not_what_is_trained(
    toy_run: Any, tmp_path: Path, stage: int
) -> None:
    """Catches gradients that are not summed over the ranks, heads saved as the part that one rank holds, and
    evaluations that wait for ever for the other ranks' parameters."""
    plain, _ = train(toy_run, tmp_path / "plain", "placement.train_workers=2")
    spread, path = train(toy_run, tmp_path / "spread", "placement.train_workers=2", f"train.zero_stage={stage}")
    assert spread == pytest.approx(plain, rel=2e-3)
    assert all(tensor.numel() for tensor in load_file(path / "heads" / "heads.safetensors").values())
    joint = ("placement.train_workers=2", "medusa2.lora.dropout=0", "medusa2.epochs=1")
    whole = train_jointly(toy_run, tmp_path / "whole", *joint)["train-medusa2 heads"]
    parts = train_jointly(toy_run, tmp_path / "parts", *joint, f"medusa2.zero_stage={stage}")["train-medusa2 heads"]
    losses = [[row["heads"] for row in history(each)[0]] for each in (whole, parts)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2, abs=1e-5)
    kl = [history(each)[1][-1]["quality"]["kl"]["value"] for each in (whole, parts)]
    assert kl[1] == pytest.approx(kl[0], rel=0.2, abs=1e-6)
