"""The backbone changes: what is measured about it, what is decided, and what then runs. On toys, to the end."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from infra.registry import Registry
from tasks.retrain import RetrainConfig, judge
from tests import toys
from tests.flows.conftest import borrow, medusa_here


def measured(low: float, high: float, kept: float) -> dict[str, Any]:
    figure = {"value": 2.0, "ci95": [1.9, 2.1]}
    return {"was": figure, "now": figure, "ratio": {"value": (low + high) / 2, "ci95": [low, high]}, "kept": kept}


@pytest.mark.parametrize(
    ("low", "high", "kept", "verdict"),
    [
        (0.99, 1.01, 1.0, "keep"),
        (1.05, 1.1, 1.2, "keep"),
        (0.96, 1.0, 0.97, "keep"),
        (0.9, 0.99, 0.9, "warm start"),
        (0.7, 0.8, 0.5, "warm start"),
        (0.7, 0.8, 0.49, "scratch"),
        # So few conversations that nothing can be said is no reason to keep heads that lost most of it.
        (0.2, 1.4, 0.3, "scratch"),
    ],
)
def test_the_verdict(low: float, high: float, kept: float, verdict: str) -> None:
    found, why = judge(measured(low, high, kept), RetrainConfig(min_kept=0.5))
    assert found == verdict and f"{low:.3f} to {high:.3f}" in why


def backbone(toy_dir: Path, path: Path, *, noise: float = 0.0, words: str = "w") -> Path:
    """The toy with noise in its weights (in standard deviations of each tensor), or with its words spelt otherwise."""
    shutil.copytree(toy_dir, path)
    if noise:
        toys.perturbed(toy_dir, path, noise=noise)
    if words != "w":
        spelt = json.loads((path / "tokenizer.json").read_text())
        vocabulary = spelt["model"]["vocab"]
        spelt["model"]["vocab"] = {
            words + name[1:] if name.startswith("w") else name: number for name, number in vocabulary.items()
        }
        (path / "tokenizer.json").write_text(json.dumps(spelt))
        assert AutoTokenizer.from_pretrained(path).convert_tokens_to_ids(f"{words}7") == 7
    return path


class Team:
    """A root with a registered champion for the toy, and what its next run, on another backbone, did."""

    def __init__(self, toy_run: Any, root: Path) -> None:
        finished, self.config, _, _ = toy_run
        kinds = [path.name for path in (finished / "artifacts").iterdir()]
        self.root = borrow(finished, root, *kinds)
        shutil.copytree(finished / "registry", root / "registry")
        self.registry = Registry(root)

    def run(self, path: Path, *settings: str) -> dict[str, Any]:
        flags = [part for setting in settings for part in ("--set", setting)]
        done = medusa_here(
            "run", "--config", self.config, "--root", self.root, "--set", f"backbone={path}", *flags, "--json"
        )
        assert done.returncode == 0, done.stderr
        report: dict[str, Any] = json.loads((self.root / "runs" / "latest" / "report.json").read_text())
        return report

    def made(self, kind: str) -> set[str]:
        """Artifacts of a kind that are not borrowed."""
        return {path.name for path in (self.root / "artifacts" / kind).iterdir() if not path.is_symlink()}


def seconds_of(report: Mapping[str, Any]) -> dict[str, Any]:
    return {stage["name"]: stage for stage in report["stages"]}


def test_the_same_weights_under_a_new_name_are_a_tag(toy_run: Any, toy_dir: Path, tmp_path: Path) -> None:
    """Catches a model directory that was moved, and everything made again for it; and a tag set at every run."""
    team = Team(toy_run, tmp_path / "root")
    renamed = backbone(toy_dir, tmp_path / "renamed")
    report = team.run(renamed)
    assert report["retraining"]["verdict"] == "unchanged" and "toy/1" in report["retraining"]["why"]
    assert [stage["name"] for stage in report["stages"]] == ["backbone", "retrain"]
    (version,) = team.registry.versions("toy")
    assert json.loads(version.tags["serves"]) == [toy_dir.name, "renamed"]
    again = team.run(renamed)
    assert "retraining" not in again and all(stage["cached"] for stage in again["stages"][:-1])
    assert [v.tags for v in team.registry.versions("toy")] == [version.tags]


@pytest.mark.long
def test_a_small_change_keeps_the_heads(toy_run: Any, toy_dir: Path, tmp_path: Path) -> None:
    """Catches training text distilled for heads that are kept, and heads that the new backbone refuses."""
    team = Team(toy_run, tmp_path / "root")
    moved = backbone(toy_dir, tmp_path / "toy-2", noise=0.1)
    report = team.run(moved)
    decided = report["retraining"]
    assert decided["verdict"] == "keep" and decided["champion"] == "toy/1"
    assert decided["measured"]["kept"] > 0.9 and decided["limits"] == {"mode": "decide", "min_kept": 0.5}
    # The calibration split alone was answered.
    assert len(team.made("distill")) == len(team.made("teacher")) == 1
    assert report["champion"]["version"] == "toy/1", "both are measured on the new backbone"
    assert report["lossless"]["mismatched_prompts"] == 0
    version = team.registry.versions("toy")[-1]
    assert (version.version, version.tags["retraining"], version.tags["strength"]) == (2, "keep", "1.0000")
    files = team.registry.download(version)
    assert json.loads((files / "retraining.json").read_text()) == decided
    old = team.registry.download(team.registry.get("toy/1"))
    weights = "heads/heads.safetensors"
    assert (files / weights).read_bytes() == (old / weights).read_bytes()
    # Run again: the same decision, nothing new.
    again = team.run(moved)
    assert again["retraining"] == decided
    assert all(stage["cached"] for stage in again["stages"][:-1]) and len(team.registry.versions("toy")) == 2


@pytest.mark.long
def test_a_moderate_change_begins_with_the_old_heads(toy_run: Any, toy_dir: Path, tmp_path: Path) -> None:
    """Catches a warm start that is a cold one: after one epoch old heads are ahead of new ones."""
    team = Team(toy_run, tmp_path / "root")
    moved = backbone(toy_dir, tmp_path / "toy-2", noise=0.5)
    warm = team.run(moved, "train.epochs=1", "retrain.min_kept=0.2")
    assert warm["retraining"]["verdict"] == "warm start", warm["retraining"]
    assert warm["retraining"]["measured"]["ratio"]["ci95"][1] < 1
    assert warm["heads"]["curve"][0]["loss"] < 0.8 * toy_run[2]["heads"]["curve"][0]["loss"]
    assert warm["registry"]["version"] == 2 and len(team.made("distill")) == 2


@pytest.mark.long
def test_a_large_change_starts_from_scratch(toy_run: Any, toy_dir: Path, tmp_path: Path) -> None:
    """Catches old heads that are given up without having been measured, and a candidate that need not beat them."""
    team = Team(toy_run, tmp_path / "root")
    report = team.run(backbone(toy_dir, tmp_path / "toy-2", noise=0.8))
    assert report["retraining"]["verdict"] == "scratch" and report["retraining"]["measured"]["kept"] < 0.5
    assert report["champion"]["version"] == "toy/1"
    assert report["registry"]["version"] == 2


@pytest.mark.long
def test_another_vocabulary_starts_from_scratch_unmeasured(toy_run: Any, toy_dir: Path, tmp_path: Path) -> None:
    """Catches heads tried on tokens that mean something else."""
    team = Team(toy_run, tmp_path / "root")
    report = team.run(backbone(toy_dir, tmp_path / "toy-2", words="v"))
    assert report["retraining"]["verdict"] == "scratch" and report["retraining"]["measured"] is None
    assert "tokenizer" in report["retraining"]["why"] and "champion" not in report
