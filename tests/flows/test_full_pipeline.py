"""The whole flow on the toy backbone: what it makes, what it makes again, and what it doesn't."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from flows.config import load_config
from flows.stages import stages_of
from tests.flows.conftest import borrow, medusa_here, run_medusa

ToyRun = tuple[Path, Path, dict[str, Any], str]


def test_every_stage_ran_and_the_run_directory_is_whole(toy_run: ToyRun) -> None:
    root, config, report, output = toy_run
    names = [stage.name for stage in stages_of(load_config(config))]
    assert [stage["name"] for stage in report["stages"]] == [*names, "publish"]
    assert "train-medusa2" not in names and "quality" not in names
    run = root / "runs" / "latest"
    assert {path.name for path in run.iterdir()} == {"config.yaml", "report.json", "report.html", "log.jsonl"}
    assert yaml.safe_load((run / "config.yaml").read_text())["name"] == "toy"
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert any("stage train-medusa1" in line["message"] for line in lines)
    for shown in ("train-medusa1", "tokens/step", "speedup over transformers", "not one token changed", "toy/1"):
        assert shown in output


def test_accepted_tokens_are_real_and_nothing_was_lost(toy_run: ToyRun) -> None:
    """Catches a pipeline in which nothing is ever accepted, so that losslessness means nothing."""
    _, _, report, _ = toy_run
    runs = {run["engine"]: run for run in report["runs"]}
    assert runs["medusa"]["tokens_per_step"] > 1.5
    assert runs["plain"]["tokens_per_step"] == 1.0
    lossless = report["lossless"]
    assert lossless["mismatched_prompts"] == 0
    assert lossless["prompts"] >= 15 and lossless["tokens"] > 300
    assert min(report["heads"]["top1"]) > 0.5
    assert report["bf16_divergence"]["diverged"] == 0
    assert report["registry"] == report["registry"] | {"model": "toy", "version": 1, "alias": "champion"}


def test_the_expected_tokens_per_step_are_what_the_benchmark_finds(toy_run: ToyRun) -> None:
    """Catches an estimate that is off by a token: other conversations of the same kind must agree within a fifth."""
    _, _, report, _ = toy_run
    measured = next(run for run in report["runs"] if run["engine"] == "medusa")["tokens_per_step"]
    assert math.isclose(report["tree"]["expected_tokens_per_step"], measured, rel_tol=0.2)


def test_every_request_ends_as_a_row_or_a_reason(toy_run: ToyRun) -> None:
    root, _, _, _ = toy_run
    for manifest in (root / "artifacts" / "distill").glob("*/manifest.json"):
        counts = json.loads(manifest.read_text())["counts"]
        rows = sum(pq.read_metadata(path).num_rows for path in manifest.parent.glob("shard-*.parquet"))
        rejected = sum(pq.read_metadata(path).num_rows for path in manifest.parent.glob("rejected/*.parquet"))
        assert rows + rejected == counts["requests"] > 0


def test_training_used_exactly_the_positions_of_the_answers(toy_run: ToyRun) -> None:
    """Catches prompts being trained on: a teacher row exists where the *next* token was generated, and only there."""
    root, _, _, _ = toy_run
    distill = sorted((root / "artifacts" / "distill").glob("*/shard-*.parquet"))
    masks = {
        row["sample_id"] + str(row["input_ids"]): row for path in distill for row in pq.read_table(path).to_pylist()
    }
    ids = {row["sample_id"]: row for row in masks.values()}
    for path in (root / "artifacts" / "teacher").glob("*/shard-*.parquet"):
        for row in pq.read_table(path, columns=["sample_id", "positions"]).to_pylist():
            mask = ids[row["sample_id"]]["loss_mask"]
            assert row["positions"] == [t for t in range(len(mask) - 1) if mask[t + 1]]


def test_the_same_run_again_does_nothing_but_report(toy_run: ToyRun) -> None:
    """Catches a stage that runs again, and a benchmark that competes with itself once it is champion."""
    root, config, first, _ = toy_run
    done = medusa_here("run", "--config", config, "--root", root, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert all(stage["cached"] for stage in report["stages"] if stage["name"] != "publish")
    assert report["registry"]["version"] == 1
    assert report["runs"] == first["runs"]
    assert Path(report["directory"]).name == (root / "runs" / "latest").resolve().name


def test_heads_of_another_kind_from_the_same_data_are_compared_with_the_champion(
    toy_run: ToyRun, tmp_path: Path
) -> None:
    """Catches a stage that doesn't know what a path is, distilled text made anew for it, and kinds not compared."""
    borrowed, config, _, _ = toy_run
    root = borrow(borrowed, tmp_path / "root", "backbone", "prompts", "distill", "teacher")
    shutil.copytree(borrowed / "registry", root / "registry")
    kind = ("heads.kind=hydra", "heads.block=mlp", "heads.lm_head=low_rank", "heads.rank=8", "train.epochs=4")
    settings = [part for each in kind for part in ("--set", each)]
    done = medusa_here("run", "--config", config, "--root", root, *settings, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    cached = {stage["name"]: stage["cached"] for stage in report["stages"]}
    assert cached["distill"] and cached["teacher"] and not cached["train-medusa1"]
    assert (report["heads"]["kind"], report["champion"]["heads"]["kind"]) == ("hydra", "medusa")
    assert report["champion"]["same_data"] is True
    assert report["lossless"]["mismatched_prompts"] == 0 and report["lossless"]["tokens"] > 100
    (medusa,) = (run for run in report["runs"] if run["engine"] == "medusa")
    assert medusa["tokens_per_step"] > 1.5
    assert "Kinds of heads side by side" in Path(report["directory"], "report.html").read_text()
    shown = medusa_here("registry", "show", "toy/2", "--root", root, "--json")
    tags = json.loads(shown.stdout)["tags"]
    assert (tags["heads"], tags["heads_block"], tags["heads_lm_head"]) == ("hydra", "mlp", "low_rank")
    assert "these heads serve from this engine only: heads.kind hydra" in done.stderr


def test_another_tree_budget_redoes_only_what_it_changes(toy_run: ToyRun) -> None:
    root, config, _, _ = toy_run
    done = medusa_here(
        "run", "--config", config, "--root", root, "--set", "tree.max_nodes=3", "--until", "tree", "--json"
    )
    assert done.returncode == 0, done.stderr
    cached = {stage["name"]: stage["cached"] for stage in json.loads(done.stdout)["stages"]}
    assert cached.pop("tree") is False
    assert all(cached.values())


def test_the_plan_runs_nothing_and_knows_what_is_cached(toy_run: ToyRun) -> None:
    root, config, _, _ = toy_run
    before = sorted(root.rglob("*"))
    planned = medusa_here("run", "--config", config, "--root", root, "--set", "train.epochs=9", "--plan", "--json")
    assert planned.returncode == 0, planned.stderr
    states = {stage["name"]: stage["state"] for stage in json.loads(planned.stdout)["stages"]}
    assert states["teacher"] == "cached"
    assert states["train-medusa1"] == states["ranks"] == states["publish"] == "run"
    assert sorted(root.rglob("*")) == before


def test_generate_streams_the_right_answer_and_refuses_another_backbone(toy_run: ToyRun, tmp_path: Path) -> None:
    from tests import toys

    root, _, _, _ = toy_run
    done = medusa_here("generate", "w3 w11", "--root", root, "--max-new-tokens", 64)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [f"w{word}" for word in toys.answer_to(11)[:-1]]
    assert "tokens per step" in done.stderr
    other = tmp_path / "other"
    toys.train_toy(seed=1, steps=1).save_pretrained(other)
    toys.tokenizer().save_pretrained(other)
    refused = medusa_here("generate", "w3", "--root", root, "--backbone", other)
    assert refused.returncode == 2
    assert "train heads for it" in refused.stderr and "Traceback" not in refused.stderr


def test_bench_decode_reads_a_file_in_mt_bench_format(toy_run: ToyRun, tmp_path: Path) -> None:
    root, _, _, _ = toy_run
    rows = [{"question_id": 81 + i, "category": "cycle", "turns": [f"w{i}", f"w{i + 7}"]} for i in range(6)]
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = medusa_here(
        "bench", "decode", "--prompts", file, "--root", root, "--dtype", "float32", "--no-compiled", "--json",
        "--max-minutes", "0.2", "--compile", "off",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["schema"] == "medusa.report/1" and report["lossless"]["mismatched_prompts"] == 0
    assert {run["engine"] for run in report["runs"]} == {"transformers", "plain", "medusa", "transformers-lookup"}
    assert all(run["prompts"] >= 2 for run in report["runs"])


def test_calibrate_makes_a_portfolio_without_training(toy_run: ToyRun, tmp_path: Path) -> None:
    root, _, _, _ = toy_run
    heads = sorted((root / "artifacts" / "heads").iterdir())
    settings = ["latency.nodes=[1, 2, 4]", "latency.batches=[1, 2]", "latency.contexts=[32]", "latency.rounds=1"]
    settings += ["tree.max_nodes=4", "latency.dtype=float32", "engine.compile=off"]
    flags = [part for setting in settings for part in ("--set", setting)]
    output = tmp_path / "portfolio.json"
    done = medusa_here("calibrate", "--root", root, "--output", output, *flags)
    assert done.returncode == 0, done.stderr
    entries = json.loads(output.read_text())["entries"]
    assert [(entry["batch"], entry["context"]) for entry in entries] == [(1, 32), (2, 32)]
    assert all(entry["nodes"] <= 4 for entry in entries)
    assert sorted((root / "artifacts" / "heads").iterdir()) == heads


def test_the_registry_commands(toy_run: ToyRun) -> None:
    root, _, _, _ = toy_run
    listed = medusa_here("registry", "list", "--root", root, "--json")
    assert [version["version"] for version in json.loads(listed.stdout)][-1] == 1
    shown = json.loads(medusa_here("registry", "show", "toy/1", "--root", root, "--json").stdout)
    assert {"heads/heads.safetensors", "tree/portfolio.json", "report.json", "config.yaml"} <= set(shown["files"])
    unknown = medusa_here("registry", "show", "toy/77", "--root", root)
    assert unknown.returncode == 2 and "toy" in unknown.stderr


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("train.epohcs=3", "train.epohcs"),
        ("train.epochs=none", "train.epochs"),
        ("backbone=/no/such/model", "/no/such/model"),
        ("prompts.sources=[/no/such/prompts.jsonl]", "/no/such/prompts.jsonl"),
        ("name=../escape", "name"),
        ("nonsense", "nonsense"),
    ],
)
def test_a_wrong_setting_is_one_sentence(toy_run: ToyRun, tmp_path: Path, setting: str, named: str) -> None:
    _, config, _, _ = toy_run
    done = medusa_here("run", "--config", config, "--root", tmp_path / "root", "--set", setting)
    assert done.returncode == 2
    assert named in done.stderr and "Traceback" not in done.stderr


def test_the_exit_code_of_a_wrong_setting(tmp_path: Path) -> None:
    """The real command, as a script sees it."""
    done = run_medusa("run", "--root", tmp_path / "root", "--set", "train.epohcs=3")
    assert (done.returncode, done.stdout) == (2, "")
    assert "train.epohcs" in done.stderr and "Traceback" not in done.stderr
