"""Training in full on the toy: the number of ranks, the source of hidden states and the layout of the heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from medusa_core.checkpoint import read_config, weights_digest
from tests.flows.conftest import borrow, medusa_here

pytestmark = pytest.mark.long


class Trainings:
    """Trains on top of a finished run's answers. A root for every number of ranks, which is no part of an artifact's
    key: what one test has trained with it, another one finds."""

    def __init__(self, toy_run: Any, directory: Path) -> None:
        self.finished, self.config, _, _ = toy_run
        self.directory = directory

    def __call__(self, until: str, *settings: str, ranks: int = 2) -> dict[str, Path]:
        """Artifacts by "stage kind"."""
        root = self.directory / f"ranks-{ranks}"
        if not root.exists():
            borrow(self.finished, root, "backbone", "prompts", "distill", "teacher")
        flags = [part for each in (*settings, f"placement.train_workers={ranks}") for part in ("--set", each)]
        done = medusa_here("run", "--config", self.config, "--root", root, "--until", until, "--json", *flags)
        assert done.returncode == 0, done.stderr
        return {
            f"{stage['name']} {artifact.split('/')[0]}": root / "artifacts" / artifact
            for stage in json.loads(done.stdout)["stages"]
            for artifact in stage["artifact"].split()
        }

    def heads(self, *settings: str, ranks: int = 2) -> tuple[list[float], Path]:
        """Losses and artifact of a stage one."""
        path = self("train-medusa1", *settings, ranks=ranks)["train-medusa1 heads"]
        return [row["loss"] for row in history(path)[0]], path

    def jointly(self, *settings: str, ranks: int = 2) -> dict[str, Path]:
        """Artifacts up to stage two, from heads that have something left to learn."""
        return self("train-medusa2", "train.epochs=2", *STAGE_TWO, *settings, ranks=ranks)


STAGE_TWO = (
    "medusa2.lora.rank=8", "medusa2.epochs=2", "medusa2.batch_conversations=4", "medusa2.learning_rate=1e-3",
    "medusa2.warmup_steps=2", "medusa2.dtype=float32", "medusa2.lambda0=0.2",
)  # fmt: skip


def history(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Curve and evaluations of a training."""
    curve = [json.loads(line) for line in (path / "curve.jsonl").read_text().splitlines()]
    return curve, json.loads((path / "evaluation.json").read_text())["epochs"]


@pytest.fixture(scope="module")
def trainings(toy_run: Any, tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    return Trainings(toy_run, tmp_path_factory.mktemp("trainings"))


def test_one_rank_and_two_train_the_same_heads(trainings: Trainings) -> None:
    """Catches a loss that is a mean of the ranks' means, and ranks that see the same micro-batches."""
    two, _ = trainings.heads()
    one, _ = trainings.heads(ranks=1)
    accumulated, _ = trainings.heads("train.accumulation=4", ranks=1)
    assert len(one) == len(two) == len(accumulated) > 20
    assert one == pytest.approx(two, rel=2e-3)
    assert one == pytest.approx(accumulated, rel=2e-3)
    assert one[-1] < 0.2 * one[0]


def test_hidden_states_made_live_train_the_same_heads(trainings: Trainings) -> None:
    cached, _ = trainings.heads()
    live, _ = trainings.heads("teacher.hidden=live")
    assert cached == pytest.approx(live, rel=2e-3)


def test_every_layout_trains_and_leaves_the_backbone_alone(trainings: Trainings, toy_dir: Path) -> None:
    """Catches the reference's fault: with the shared layout it trains the LM head and throws that away."""
    before = weights_digest(toy_dir)
    for settings in (
        ["heads.lm_head=shared", "heads.block=mlp"],
        ["heads.lm_head=shared", "heads.num_layers=2"],
        ["heads.lm_head=own", "heads.block=mlp", "heads.vocab=null"],
    ):
        losses, path = trainings.heads(*settings)
        assert losses[-1] < 0.5 * losses[0], settings
        evaluation = json.loads((path / "evaluation.json").read_text())
        assert len(evaluation["epochs"]) == 8
        assert min(evaluation["final"]["top1"]) > 0.3, settings
    assert weights_digest(toy_dir) == before
    (artifact,) = (path.parents[1] / "backbone").glob("*/model")
    assert weights_digest(artifact) == before


def test_stage_two_starts_where_stage_one_ended_and_moves_the_backbone_a_little(
    trainings: Trainings, toy_dir: Path
) -> None:
    """Catches heads that start anew, a backbone that isn't held to what it said, embeddings changed with the LM head,
    heads bound to the backbone they no longer fit, and a number of ranks that changes the result."""
    two = trainings.jointly()
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
    # A rank draws dropout of its own: without it the number of ranks must not show.
    plain = [trainings.jointly("medusa2.lora.dropout=0", ranks=ranks)["train-medusa2 heads"] for ranks in (1, 2)]
    losses = [[row["heads"] for row in history(path)[0]] for path in plain]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2, abs=1e-5)


def test_every_weight_may_train_from_a_cached_teacher(trainings: Trainings) -> None:
    """Catches full fine-tuning that trains nothing, and a cached teacher that drives the model away from its own."""
    full = ("medusa2.lora=null", "medusa2.teacher=top_k", "medusa2.learning_rate=1e-4")
    found = trainings.jointly("medusa2.micro_conversations=2", *full)
    _, evaluations = history(found["train-medusa2 heads"])
    assert 0 < evaluations[-1]["quality"]["kl"]["value"] < 0.05
    assert sum(evaluations[-1]["loss"]) < sum(evaluations[0]["loss"])
    assert not (found["train-medusa2 heads"] / "adapter").exists()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_zero_stage_changes_where_things_lie_and_not_what_is_trained(trainings: Trainings, stage: int) -> None:
    """Catches gradients that are not summed over the ranks, heads saved as the part that one rank holds, and
    evaluations that wait for ever for the other ranks' parameters."""
    plain, _ = trainings.heads()
    spread, path = trainings.heads(f"train.zero_stage={stage}")
    assert spread == pytest.approx(plain, rel=2e-3)
    assert all(tensor.numel() for tensor in load_file(path / "heads" / "heads.safetensors").values())
    whole = trainings.jointly("medusa2.lora.dropout=0")["train-medusa2 heads"]
    parts = trainings.jointly("medusa2.lora.dropout=0", f"medusa2.zero_stage={stage}")["train-medusa2 heads"]
    losses = [[row["heads"] for row in history(each)[0]] for each in (whole, parts)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2, abs=1e-5)
    kl = [history(each)[1][-1]["quality"]["kl"]["value"] for each in (whole, parts)]
    assert kl[1] == pytest.approx(kl[0], rel=0.2, abs=1e-6)
