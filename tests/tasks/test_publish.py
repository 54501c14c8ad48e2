"""Publishing: the decision as a table, and one real registration of small artifacts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from infra.artifacts import Artifact, ArtifactStore
from infra.errors import UserError
from infra.registry import Registry
from tasks.publish import PublishConfig, PublishResult, decide, publish

LOSSLESS = {"mismatched_prompts": 0, "tokens": 1900}


def moved(kl: Any = (0.01, 0.02), ratio: Any = (1.0, 1.02), agreement: Any = (0.93, 0.96)) -> dict[str, Any]:
    """A report whose backbone was trained, by the intervals of its quality."""
    bounds = {"kl": kl, "perplexity_ratio": ratio, "greedy_agreement": agreement}
    return {"lossless": LOSSLESS, "quality": {name: {"value": 1.0, "ci95": list(b)} for name, b in bounds.items()}}


def against(value: Any, low: Any, high: Any, version: str = "m/3") -> dict[str, Any]:
    return {"lossless": LOSSLESS, "champion": {"version": version, "ratio": {"value": value, "ci95": [low, high]}}}


@pytest.mark.parametrize(
    ("report", "champion", "promoted", "says"),
    [
        ({"lossless": LOSSLESS}, None, True, "no champion"),
        (moved(), None, True, "no champion"),
        (moved(kl=(0.05, 0.2)), None, False, "kl may be 0.2, the limit is 0.1"),
        (moved(ratio=(1.0, 1.2)), None, False, "perplexity_ratio may be 1.2"),
        (moved(agreement=(0.8, 0.99)), None, False, "greedy_agreement may be 0.8, the limit is 0.85"),
        (moved(kl=(0.01, float("nan"))), None, False, "no kl with an interval"),
        (moved(agreement=()), None, False, "no greedy_agreement with an interval"),
        ({"lossless": LOSSLESS, "quality": {"kl": None}}, None, True, "no champion"),
        ({"lossless": LOSSLESS, "bf16_divergence": {"failures": 0}}, None, True, "no champion"),
        ({"lossless": LOSSLESS, "bf16_divergence": {"failures": 1}}, None, False, "1 timed answers leave"),
        ({"lossless": LOSSLESS}, "m/3", False, "not measured against the champion m/3"),
        ({"lossless": {"mismatched_prompts": 2, "tokens": 1900}}, None, False, "2 prompts were answered differently"),
        ({"lossless": {"mismatched_prompts": 0, "tokens": 0}}, None, False, "no token was compared"),
        ({"lossless": {"mismatched_prompts": None, "tokens": 5}}, None, False, "does not say"),
        ({}, None, False, "does not say"),
        ({**against(1.2, 1.1, 1.3), "lossless": {"mismatched_prompts": 1, "tokens": 9}}, "m/3", False, "differently"),
        (against(1.10, 1.05, 1.15), "m/3", True, "not slower"),
        (against(1.00, 0.90, 1.10), "m/3", True, "not slower"),
        (against(0.99, 0.985, 0.995), "m/3", True, "within the allowed 2.0%"),
        (against(0.99, 0.98, 1.0), "m/3", True, "within the allowed"),
        (against(0.99, 0.95, 1.03), "m/3", False, "is not excluded"),
        (against(0.80, 0.75, 0.85), "m/3", False, "0.800 times the tokens/s of m/3"),
        (against(1.10, 1.05, 1.15, "m/2"), "m/3", False, "measured against m/2, but the champion is m/3"),
        (against(0.80, 0.75, 0.85), None, False, "is not excluded"),
        (against(None, 1.0, 1.1), "m/3", False, "no ratio"),
        (against(float("nan"), 1.0, 1.1), "m/3", False, "no ratio"),
        ({"lossless": LOSSLESS, "champion": {"version": "m/3", "ratio": {"value": 1.2}}}, "m/3", False, "no ratio"),
    ],
)
def test_decision(report: dict[str, Any], champion: str | None, promoted: bool, says: str) -> None:
    decision, reason = decide(report, PublishConfig(max_slowdown=0.02), champion)
    assert decision is promoted
    assert says in reason
    assert reason.startswith("promoted" if promoted else "not promoted")


@pytest.mark.parametrize("change", [{"max_slowdown": -0.1}, {"max_slowdown": 1.0}, {"max_slow": 0.1}])
def test_configuration_that_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        PublishConfig(**change)


class Run:
    """Everything `publish` is given, as small files in a real store."""

    def __init__(self, root: Path) -> None:
        self.store = ArtifactStore(root)
        self.registry = Registry(root)
        self.backbone = self.make("backbone", {"model/model.safetensors": "weights"}, {})
        teacher = self.make("teacher", {"shard-0.parquet": "logits"}, {"backbone": self.backbone.digest()})
        heads_files = {"heads/heads.safetensors": "x", "heads/config.json": "{}", "curve.json": "not published"}
        self.heads = self.make("heads", heads_files, {"teacher": teacher.digest("shard-0.parquet")})
        self.ranks = self.make("ranks", {"joint/greedy.parquet": "counts"}, {"heads": self.heads.key})
        self.latency = self.make("latency", {"latency.json": "{}"}, {})
        self.tree = self.make("tree", {"portfolio.json": "{}", "notes.json": "{}"}, {"ranks": self.ranks.digest()})

    def make(self, kind: str, files: dict[str, str], inputs: dict[str, str], key: str = "0123abcd") -> Artifact:
        def build(folder: Path) -> dict[str, int]:
            for name, text in files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(text)
            return {}

        return self.store.produce(kind, f"{kind}-{key}", inputs=inputs, config={}, build=build)

    def publish(self, report: dict[str, Any], key: str) -> PublishResult:
        report = {"backbone": {"name": "toy", "digest": "bb"}, **report}
        files = {"report.json": json.dumps(report), "report.html": "<p>report</p>"}
        return publish(
            self.store,
            self.registry,
            PublishConfig(),
            model="toy",
            backbone=self.backbone,
            heads=self.heads,
            ranks=self.ranks,
            latency=self.latency,
            tree=self.tree,
            benchmark=self.make("benchmark", files, {"tree": self.tree.digest()}, key),
            run_config={"heads": {"num_heads": 4}},
        )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("publish"))


def test_a_lineage_of_versions(run: Run) -> None:
    """First one promoted, repeated without effect, a slow one kept but not promoted, a faster one promoted."""
    first = run.publish({"lossless": LOSSLESS, "speedup": {"vs_transformers": {"value": 1.62}}}, "a")
    assert (first.version, first.alias, first.model) == (1, "champion", "toy")
    assert run.publish({"lossless": LOSSLESS, "speedup": {"vs_transformers": {"value": 1.62}}}, "a") == first

    slow = run.publish(against(0.8, 0.7, 0.9, "toy/1"), "b")
    assert (slow.version, slow.alias) == (2, None)
    assert run.registry.get("toy").version == 1

    faster = run.publish(against(1.2, 1.1, 1.3, "toy/1"), "c")
    assert (faster.version, faster.alias) == (3, "champion")

    run.registry.rollback("toy")
    again = run.publish(against(1.2, 1.1, 1.3, "toy/1"), "c")
    assert (again.version, again.alias) == (3, None), "a repeated run must not undo a rollback"
    assert run.registry.get("toy").version == 1


def test_what_a_version_holds(run: Run) -> None:
    version = run.registry.get("toy/1")
    folder = run.registry.download(version)
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} == {
        "heads/heads.safetensors",
        "heads/config.json",
        "tree/portfolio.json",
        "ranks/joint/greedy.parquet",
        "latency/latency.json",
        "report.json",
        "report.html",
        "config.yaml",
        "lineage.json",
        "version.json",
    }
    assert yaml.safe_load((folder / "config.yaml").read_text()) == {"heads": {"num_heads": 4}}
    assert version.tags["backbone_digest"] == "bb"
    assert version.tags["speedup_vs_transformers"] == "1.62"
    assert version.tags["decision"].startswith("promoted")
    assert list((run.store.root / "tmp").iterdir()) == []


def test_lineage_reaches_what_the_inputs_came_from(run: Run) -> None:
    """The teacher is no argument of publish; it is found by the digest that the heads' manifest names."""
    lineage = json.loads((run.registry.download(run.registry.get("toy/1")) / "lineage.json").read_text())
    assert set(lineage) == {"backbone", "heads", "ranks", "latency", "tree", "benchmark", "teacher"}
    assert lineage["heads"]["key"] == run.heads.key
    assert lineage["heads"]["digest"] == run.heads.digest()
    assert lineage["teacher"]["inputs"] == {"backbone": run.backbone.digest()}


def test_a_missing_file_registers_nothing(run: Run) -> None:
    before = run.registry.versions("toy")
    file = run.latency.path / "latency.json"
    file.rename(file.with_suffix(".away"))
    try:
        with pytest.raises(UserError, match=r"latency\.json is missing"):
            run.publish({"lossless": LOSSLESS}, "d")
    finally:
        file.with_suffix(".away").rename(file)
    assert run.registry.versions("toy") == before
