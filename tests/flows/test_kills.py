"""Runs killed half-way: what is finished is kept, nothing is answered twice, nothing is lost."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
import yaml

from tests.flows.conftest import MEDUSA, run_medusa, toy_config

pytestmark = pytest.mark.long


def wait_until(ready: Any, process: subprocess.Popen[Any], timeout: float = 240) -> None:
    deadline = time.monotonic() + timeout
    while not ready():
        assert process.poll() is None, "the run ended before it could be disturbed"
        assert time.monotonic() < deadline, "the moment to disturb it never came"
        time.sleep(0.02)


def kill_when(command: list[str], ready: Any, timeout: float = 240) -> None:
    """Starts a command in its own process group and kills the driver (only it) when `ready()` holds."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(ready, process, timeout)
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_a_killed_distill_goes_on_where_it_stopped(tmp_path: Path, toy_dir: Path) -> None:
    """Catches shards answered twice, requests lost, and rows that depend on how often the run was killed."""
    small = {"shard_size": 4, "batch_size": 2}
    config, root = toy_config(tmp_path, toy_dir, distill=small), tmp_path / "root"
    command = [str(MEDUSA), "run", "--config", str(config), "--root", str(root), "--until", "distill"]

    def shards() -> list[Path]:
        return sorted((root / "artifacts" / "distill").glob("*.partial/shard-*.parquet"))

    kill_when(command, lambda: len(shards()) >= 3)
    kept = {path.name: path.read_bytes() for path in shards()}
    times = {path.name: path.stat().st_mtime_ns for path in shards()}
    assert kept
    assert run_medusa(*command[1:]).returncode == 0
    finished = next(
        path
        for path in (root / "artifacts" / "distill").iterdir()
        if (path / min(kept)).exists()
        and json.loads((path / "manifest.json").read_text())["config"]["split"] == "train"
    )
    for name, content in kept.items():
        assert (finished / name).read_bytes() == content
        assert (finished / name).stat().st_mtime_ns == times[name]
    ids = [i for path in finished.glob("shard-*.parquet") for i in pq.read_table(path)["sample_id"].to_pylist()]
    assert len(ids) == len(set(ids)) == json.loads((finished / "manifest.json").read_text())["counts"]["requests"]
    undisturbed = tmp_path / "undisturbed"
    assert run_medusa("run", "--config", config, "--root", undisturbed, "--until", "distill").returncode == 0
    again = undisturbed / "artifacts" / "distill" / finished.name
    for path in sorted(finished.glob("shard-*.parquet")):
        assert pq.read_table(path).equals(pq.read_table(again / path.name)), path.name


STAGE_TWO = {"lora": {"rank": 8}, "epochs": 4, "batch_conversations": 4, "dtype": "float32", "checkpoint_steps": 10}


@pytest.mark.parametrize("stage", [1, 2])
def test_a_killed_training_resumes_with_the_same_curve(tmp_path: Path, toy_dir: Path, stage: int) -> None:
    """Catches a checkpoint without optimizer, schedule, place in the data or in the dropout's draws: the curves would
    part at the kill."""
    config = toy_config(tmp_path, toy_dir, train={"epochs": 30 if stage == 1 else 8, "checkpoint_steps": 10})
    config.write_text(
        yaml.safe_dump(yaml.safe_load(config.read_text()) | ({"medusa2": STAGE_TWO} if stage == 2 else {}))
    )
    root, heads = tmp_path / "root", tmp_path / "root" / "artifacts" / "heads"
    options = ["--config", str(config), "--until", f"train-medusa{stage}"]

    def far_enough() -> bool:
        finished = len(list(heads.glob("*/manifest.json")))
        return finished == stage - 1 and any(heads.glob("*.partial/.checkpoints/latest"))

    kill_when([str(MEDUSA), "run", "--root", str(root), *options], far_enough)
    partial = next(heads.glob("*.partial"))
    assert not (partial / "heads").exists()
    assert run_medusa("run", "--root", root, *options).returncode == 0
    resumed = heads / partial.name.removesuffix(".partial")
    undisturbed = tmp_path / "undisturbed"
    for kind in ("backbone", "prompts", "distill", "teacher", "heads"):
        (undisturbed / "artifacts" / kind).mkdir(parents=True)
        for made in (root / "artifacts" / kind).iterdir():
            if made != resumed:
                (undisturbed / "artifacts" / kind / made.name).symlink_to(made)
    assert run_medusa("run", "--root", undisturbed, *options).returncode == 0
    straight = undisturbed / "artifacts" / "heads" / resumed.name
    assert not straight.is_symlink()
    curves = [
        [json.loads(line) for line in (path / "curve.jsonl").read_text().splitlines()] for path in (resumed, straight)
    ]
    assert len(curves[0]) == len(curves[1]) > 20
    assert curves[0] == curves[1]
    assert (resumed / "heads" / "heads.safetensors").read_bytes() == (
        straight / "heads" / "heads.safetensors"
    ).read_bytes()


@pytest.mark.parametrize(("zero", "ranks"), [(0, (2, 1)), (1, (2, 1)), (2, (1, 2)), (3, (2, 1))])
def test_a_killed_training_goes_on_with_another_number_of_ranks(
    tmp_path: Path, toy_dir: Path, zero: int, ranks: tuple[int, int]
) -> None:
    """Catches optimizer states that are lost or given to the wrong parameters when ZeRO spreads them anew."""
    config = toy_config(tmp_path, toy_dir, train={"epochs": 30, "checkpoint_steps": 10, "zero_stage": zero})
    root, heads = tmp_path / "root", tmp_path / "root" / "artifacts" / "heads"
    options = ["--config", str(config), "--until", "train-medusa1"]

    def on(number: int) -> list[str]:
        return ["--root", str(root), *options, "--set", f"placement.train_workers={number}"]

    kill_when([str(MEDUSA), "run", *on(ranks[0])], lambda: any(heads.glob("*.partial/.checkpoints/latest")))
    done = run_medusa("run", *on(ranks[1]))
    assert done.returncode == 0, done.stderr
    (resumed,) = heads.iterdir()
    undisturbed = tmp_path / "undisturbed"
    for kind in ("backbone", "prompts", "distill", "teacher"):
        (undisturbed / "artifacts").mkdir(parents=True, exist_ok=True)
        (undisturbed / "artifacts" / kind).symlink_to(root / "artifacts" / kind)
    assert run_medusa("run", "--root", undisturbed, *options).returncode == 0
    straight = undisturbed / "artifacts" / "heads" / resumed.name
    losses = [
        [json.loads(line)["loss"] for line in (path / "curve.jsonl").read_text().splitlines()]
        for path in (resumed, straight)
    ]
    assert len(losses[0]) == len(losses[1]) > 20
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)


def test_ranks_on_two_nodes_outlive_the_death_of_one(tmp_path: Path, toy_dir: Path) -> None:
    """A cluster of two nodes with a core each, so a rank on each. Catches a dead rank that ends the run, and a restart
    that begins anew or trains something else."""
    from ray.cluster_utils import Cluster

    config = toy_config(tmp_path, toy_dir, train={"epochs": 40, "checkpoint_steps": 10})
    options = ["--config", str(config), "--until", "train-medusa1", "--set", "placement.train_workers=2"]
    prepared, root = tmp_path / "prepared", tmp_path / "root"
    assert run_medusa("run", "--root", prepared, *options).returncode == 0
    for kind in ("backbone", "prompts", "distill", "teacher"):
        (root / "artifacts").mkdir(parents=True, exist_ok=True)
        (root / "artifacts" / kind).symlink_to(prepared / "artifacts" / kind)
    heads = root / "artifacts" / "heads"
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        nodes.add_node(num_cpus=1)
        command = [str(MEDUSA), "run", "--root", str(root), *options, "--set", f"placement.ray_address={nodes.address}"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        wait_until(lambda: any(heads.glob("*.partial/.checkpoints/latest")), process)
        started = psutil.Process().children(recursive=True)
        ranks = [p for p in started if "RayTrainWorker" in "".join(p.cmdline())]
        assert len({rank.ppid() for rank in ranks}) == 2, "both ranks run under one node's raylet"
        ranks[0].kill()
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    finally:
        nodes.shutdown()
    (trained,) = heads.iterdir()
    undisturbed = prepared / "artifacts" / "heads" / trained.name
    for name in ("curve.jsonl", "heads/heads.safetensors"):
        assert (trained / name).read_bytes() == (undisturbed / name).read_bytes(), name


def test_a_full_disk_is_one_sentence_and_loses_nothing(tmp_path: Path, toy_dir: Path) -> None:
    """Catches a traceback, a finished-looking artifact with half its files, and a run that can't go on afterwards."""
    config, root = toy_config(tmp_path, toy_dir), tmp_path / "small"
    root.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1200k", "none", str(root)]).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        command = ["run", "--config", config, "--root", root, "--until", "train-medusa1"]
        done = run_medusa(*command)
        assert done.returncode == 2, done.stderr
        assert "no space left" in done.stderr and "Traceback" not in done.stderr
        for manifest in root.glob("artifacts/*/*/manifest.json"):
            for name, entry in json.loads(manifest.read_text())["files"].items():
                assert (manifest.parent / name).stat().st_size == entry["bytes"]
        subprocess.run(["mount", "-o", "remount,size=200m", str(root)], check=True)
        assert run_medusa(*command).returncode == 0
    finally:
        subprocess.run(["umount", "-l", str(root)], check=True)


def test_an_interrupted_run_says_so(tmp_path: Path, toy_dir: Path) -> None:
    config, root = toy_config(tmp_path, toy_dir), tmp_path / "root"
    command = [str(MEDUSA), "run", "--config", str(config), "--root", str(root)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list(root.glob("artifacts/distill/*.partial")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 130, errors
    assert "run the same command again" in errors
