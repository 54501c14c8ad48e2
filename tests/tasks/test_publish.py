"""Publishing: the decision as a table, and one real registration of small artifacts."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from pydantic import ValidationError
from safetensors.torch import save

from infra.artifacts import Artifact, ArtifactStore
from infra.errors import UserError
from infra.registry import Registry
from medusa_core.checkpoint import HeadsFile
from medusa_core.heads import HeadsConfig
from tasks.promotion import BEST, CHAMPION, OTHER_KIND, PublishConfig, decide
from tasks.publish import PublishResult, publish, recipe_digest, serving_of
from tasks.rivals import Rival, Serving, best_of, rivals_of

LOSSLESS = {"mismatched_prompts": 0, "tokens": 1900}


def moved(kl: Any = (0.01, 0.02), ratio: Any = (1.0, 1.02), agreement: Any = (0.93, 0.96)) -> dict[str, Any]:
    """A report whose backbone was trained, by the intervals of its quality."""
    bounds = {"kl": kl, "perplexity_ratio": ratio, "greedy_agreement": agreement}
    return {"lossless": LOSSLESS, "quality": {name: {"value": 1.0, "ci95": list(b)} for name, b in bounds.items()}}


def against(value: Any, low: Any, high: Any, version: str = "m/3") -> dict[str, Any]:
    return {"lossless": LOSSLESS, "champion": {"version": version, "ratio": {"value": value, "ci95": [low, high]}}}


def best(value: float, low: float, high: float) -> dict[str, Any]:
    return {"best": {"version": "m/1", "ratio": {"value": value, "ci95": [low, high]}}}


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
        (against(0.99, 0.985, 0.995) | best(1.0, 0.9, 1.1), "m/3", True, "tokens/s of m/3, 95%"),
        (against(0.99, 0.985, 0.995) | best(0.96, 0.95, 0.97), "m/3", False, "tokens/s of m/1, the best so far"),
        (against(0.80, 0.75, 0.85) | best(1.2, 1.1, 1.3), "m/3", False, "0.800 times the tokens/s of m/3"),
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


BACKBONE = {
    "name": "toy", "source": "directory", "revision": None, "digest": "bb", "tokenizer_digest": "tt",
    "chat_template_digest": "cc", "parameters": 1, "architecture": "LlamaForCausalLM", "vocab_size": 64,
    "hidden_size": 64, "eos_token_ids": [60], "pad_token_id": 60, "bos_token_id": None, "context_length": 512,
    "tie_word_embeddings": True,
}  # fmt: skip


LAYOUT = HeadsConfig(num_heads=1, vocab=None)
HEADS = HeadsFile(heads=LAYOUT, hidden_size=4, vocab_size=8, backbone_name="toy", backbone_digest="bb")
PORTFOLIO = {"schema": "medusa.portfolio/1", "entries": []}


def ranks_file() -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"ranks": [1]}).replace_schema_metadata({b"max_rank": "4"}), file)
    return file.getvalue()


OTHER = Serving("other weights", "other")


class Run:
    """Everything `publish` is given, as small files in a real store."""

    def __init__(self, root: Path) -> None:
        self.store = ArtifactStore(root)
        self.registry = Registry(root)
        self.backbone = self.make_backbone("toy", "bb")
        teacher = self.make("teacher", {"shard-0.parquet": "logits"}, {"backbone": self.backbone.digest()})
        self.heads_files = {
            "heads/heads.safetensors": save({"weight": torch.ones(1)}),
            "heads/config.json": HEADS.model_dump_json(),
            "curve.json": "not published",
        }
        self.heads = self.make("heads", self.heads_files, {"teacher": teacher.digest("shard-0.parquet")})
        self.ranks = self.make("ranks", {"ranks.parquet": ranks_file()}, {"heads": self.heads.key})
        self.latency = self.make("latency", {"latency.json": "{}"}, {})
        trees = {"portfolio.json": json.dumps(PORTFOLIO), "notes.json": "{}"}
        self.tree = self.make("tree", trees, {"ranks": self.ranks.digest()})

    def make(
        self, kind: str, files: Mapping[str, str | bytes], inputs: dict[str, str], key: str = "0123abcd"
    ) -> Artifact:
        def build(folder: Path) -> dict[str, int]:
            for name, content in files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
            return {}

        return self.store.produce(kind, f"{kind}-{key}", inputs=inputs, config={}, build=build)

    def make_backbone(self, name: str, digest: str) -> Artifact:
        info = {**BACKBONE, "name": name, "digest": digest}
        files = {"model/model.safetensors": "weights", "backbone.json": json.dumps(info)}
        return self.make("backbone", files, {}, name)

    def publish(self, report: dict[str, Any], key: str) -> PublishResult:
        report = {"schema": "medusa.report/1", "backbone": {"name": "toy", "digest": "bb"}, **report}
        roles = [role for role in (CHAMPION, BEST) if role in report]
        files = {"report.json": json.dumps(report), "report.html": "<p>report</p>"}
        return publish(
            self.store,
            self.registry,
            PublishConfig(),
            model="toy",
            backbone=self.backbone,
            original=self.backbone,
            heads=self.heads,
            ranks=self.ranks,
            latency=self.latency,
            tree=self.tree,
            benchmark=self.make("benchmark", files, {"tree": self.tree.digest()}, key),
            run_config={"name": "toy", "heads": {"num_heads": 4}},
            rivals=[Rival(role, report[role]["version"], "", "", "", same_data=True) for role in roles],
        )

    @property
    def serving(self) -> Serving:
        return serving_of(self.backbone, self.backbone)

    def tree_of(self, name: str) -> Artifact:
        """A candidate of its own: other trees."""
        return self.make("tree", {"portfolio.json": json.dumps(PORTFOLIO | {"name": name})}, {}, name)


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


def test_small_losses_add_up_to_a_rival(tmp_path: Path) -> None:
    """Catches a gate that only looks at the champion: three versions, each 1.5 % slower than the last, are let through,
    and the fourth has to face the first."""
    run = Run(tmp_path)
    run.publish({"lossless": LOSSLESS}, "a")
    for number, key in enumerate("bc", start=1):
        assert run.publish(against(0.985, 0.981, 0.99, f"toy/{number}"), key).alias == "champion"
    versions = run.registry.versions("toy")
    assert [version.tags["strength"] for version in versions] == ["1.0000", "0.9850", "0.9702"]
    assert best_of(versions, run.serving) == versions[0] and best_of(versions, OTHER) is None
    rivals = rivals_of(run.registry, "toy", run.serving, run.heads, run.tree_of("new"))
    assert [(rival.role, rival.version) for rival in rivals] == [(CHAMPION, "toy/3"), (BEST, "toy/1")]
    assert all(Path(rival.heads, "config.json").is_file() and Path(rival.portfolio).is_file() for rival in rivals)
    # One that is faster than ever becomes the best, and is met once.
    run.publish(against(1.2, 1.1, 1.3, "toy/3") | {"best": {"version": "toy/1", "ratio": ratio_of(1.15)}}, "d")
    assert [r.version for r in rivals_of(run.registry, "toy", run.serving, run.heads, run.tree_of("new"))] == ["toy/4"]


def test_heads_of_another_kind_from_the_same_data_compete(tmp_path: Path) -> None:
    """Catches kinds compared that learnt from different text, a second run of a version that competes already, and a
    candidate that meets its own kind in this role."""
    run = Run(tmp_path)
    run.publish({"lossless": LOSSLESS, "heads": {"kind": "hydra"}}, "a")
    run.publish(against(1.2, 1.1, 1.3, "toy/1") | {"heads": {"kind": "medusa"}}, "b")
    rivals = rivals_of(run.registry, "toy", run.serving, run.heads, run.tree_of("new"))
    assert [(r.role, r.version, r.same_data) for r in rivals] == [
        (CHAMPION, "toy/2", True),
        (OTHER_KIND, "toy/1", True),
    ]
    assert json.loads(Path(rivals[1].report).read_text())["heads"] == {"kind": "hydra"}
    elsewhere = run.make("heads", run.heads_files, {"teacher": "of other text"}, "elsewhere")
    rivals = rivals_of(run.registry, "toy", run.serving, elsewhere, run.tree_of("new"))
    assert [(r.role, r.same_data) for r in rivals] == [(CHAMPION, False)]
    # Where the other kind is the champion it competes as that, once.
    run.publish(against(1.2, 1.1, 1.3, "toy/2") | {"heads": {"kind": "hydra"}}, "c")
    rivals = rivals_of(run.registry, "toy", run.serving, run.heads, run.tree_of("new"))
    assert [(r.role, r.version) for r in rivals] == [(CHAMPION, "toy/3")]


def ratio_of(value: float) -> dict[str, Any]:
    return {"value": value, "ci95": [value - 0.01, value + 0.01]}


def test_what_the_gate_stopped_is_no_rival(tmp_path: Path) -> None:
    """Catches a version that answered wrongly, and fast, as the one to beat."""
    run = Run(tmp_path)
    run.publish({"lossless": LOSSLESS}, "a")
    wrong = {**against(2.0, 1.9, 2.1, "toy/1"), "lossless": {"mismatched_prompts": 1, "tokens": 9}}
    assert run.publish(wrong, "b").alias is None
    assert [r.version for r in rivals_of(run.registry, "toy", run.serving, run.heads, run.tree_of("new"))] == ["toy/1"]


def test_a_champion_of_another_backbone_competes_only_with_adopted_heads(tmp_path: Path) -> None:
    """Catches heads run on a backbone that they were not made for, and a changed backbone that nothing is measured
    against."""
    run = Run(tmp_path)
    run.publish({"lossless": LOSSLESS}, "a")
    new_tree = run.tree_of("new")
    assert rivals_of(run.registry, "toy", OTHER, run.heads, new_tree) == ()
    (rival,) = rivals_of(run.registry, "toy", OTHER, run.heads, new_tree, tmp_path / "adopted")
    assert (rival.role, rival.version, rival.heads) == (CHAMPION, "toy/1", str(tmp_path / "adopted"))


def test_the_same_weights_with_another_tokenizer_are_another_backbone(tmp_path: Path) -> None:
    """Catches heads compared on answers whose tokens mean something else."""
    run = Run(tmp_path)
    run.publish({"lossless": LOSSLESS}, "a")
    (version,) = run.registry.versions("toy")
    assert run.serving.is_that_of(version) and not Serving("bb", "another tokenizer").is_that_of(version)
    older = replace(version, tags={"backbone_digest": "bb"})
    assert Serving("bb", "whatever").is_that_of(older), "a version from before identities were noted"


def test_a_candidate_that_is_registered_keeps_its_rivals(run: Run) -> None:
    """Catches a finished run that measures itself against itself when it is run again."""
    rivals = rivals_of(run.registry, "toy", run.serving, run.heads, run.tree)
    assert [rival.version for rival in rivals] == ["toy/1"]


def test_a_recipe_is_what_changes_results() -> None:
    """Catches a watch that trains again because a run was placed elsewhere, and one that doesn't when heads changed."""
    config = {"name": "a", "backbone": "x", "heads": {"num_heads": 4}, "placement": {"actors": 1}}
    assert recipe_digest(config) == recipe_digest({**config, "name": "b", "backbone": "y", "placement": {}})
    assert recipe_digest(config) != recipe_digest({**config, "heads": {"num_heads": 3}})


def test_what_a_version_holds(run: Run) -> None:
    version = run.registry.get("toy/1")
    folder = run.registry.download(version)
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} == {
        "heads/heads.safetensors",
        "heads/config.json",
        "tree/portfolio.json",
        "ranks/ranks.parquet",
        "README.md",
        "latency/latency.json",
        "report.json",
        "report.html",
        "config.yaml",
        "lineage.json",
        "version.json",
    }
    assert yaml.safe_load((folder / "config.yaml").read_text()) == {"name": "toy", "heads": {"num_heads": 4}}
    assert (json.loads(version.tags["serves"]), version.tags["architecture"]) == (["toy"], "LlamaForCausalLM")
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


@pytest.mark.parametrize(
    ("kind", "name", "content", "says"),
    [
        ("tree", "portfolio.json", "[1]", "portfolio"),
        ("tree", "portfolio.json", '{"schema": "medusa.report/1"}', "medusa.report/1"),
        ("ranks", "ranks.parquet", "PAR1 and no more", "is not what its name says"),
        ("heads", "heads/config.json", "{}", "config.json"),
        ("heads", "heads/heads.safetensors", "pickle", "is not what its name says"),
        ("latency", "latency.json", "[]", "no mapping"),
    ],
)
def test_a_file_of_another_kind_registers_nothing(
    tmp_path: Path, kind: str, name: str, content: str, says: str
) -> None:
    """Catches a version that nobody can decode with, found out when it is served."""
    run = Run(tmp_path)
    artifact: Artifact = getattr(run, kind)
    (artifact.path / name).write_text(content)
    with pytest.raises(UserError, match=says):
        run.publish({"lossless": LOSSLESS}, "a")
    assert run.registry.models() == []


def test_the_model_card_says_what_it_is_and_what_it_gives(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.publish({"lossless": LOSSLESS, "speedup": {"vs_plain": ratio_of(1.5)}}, "a")
    card = (run.registry.download(run.registry.get("toy")) / "README.md").read_text()
    for expected in ("heads for toy", "this engine without a tree | 1.50 [1.49, 1.51]", "1,900 tokens", run.heads.key):
        assert expected in card


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
