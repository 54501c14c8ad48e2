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

from tests.flows.conftest import MEDUSA, borrow, medusa_here, run_medusa, toy_config

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


ANSWERED = ("backbone", "prompts", "distill", "teacher")
LONG = ("train.epochs=30", "train.checkpoint_steps=10")
STAGE_TWO = (
    "medusa2.lora.rank=8", "medusa2.epochs=4", "medusa2.batch_conversations=4", "medusa2.dtype=float32",
    "medusa2.checkpoint_steps=10",
)  # fmt: skip


def training(config: Path, root: Path, until: str, *settings: str) -> list[str]:
    flags = [part for setting in settings for part in ("--set", setting)]
    return ["run", "--config", str(config), "--root", str(root), "--until", until, *flags]


@pytest.fixture(scope="module")
def undisturbed(toy_run: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of the long stage one that the tests below disturb."""
    finished, config, _, _ = toy_run
    root = borrow(finished, tmp_path_factory.mktemp("undisturbed"), *ANSWERED)
    done = medusa_here(*training(config, root, "train-medusa1", *LONG))
    assert done.returncode == 0, done.stderr
    (heads,) = (root / "artifacts" / "heads").iterdir()
    return heads


def curve(heads: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (heads / "curve.jsonl").read_text().splitlines()]


def checkpointed(heads: Path) -> bool:
    """Whether a training under way can be killed without losing everything."""
    return any(heads.glob("*.partial/.checkpoints/latest"))


def test_a_killed_training_resumes_with_the_same_curve(toy_run: Any, tmp_path: Path, undisturbed: Path) -> None:
    """Catches a checkpoint without optimizer, schedule or place in the data: the curves would part at the kill."""
    finished, config, _, _ = toy_run
    root = borrow(finished, tmp_path, *ANSWERED)
    heads, command = root / "artifacts" / "heads", training(config, root, "train-medusa1", *LONG)
    kill_when([str(MEDUSA), *command], lambda: checkpointed(heads))
    assert not list(heads.glob("*.partial/heads"))
    assert medusa_here(*command).returncode == 0
    (resumed,) = heads.iterdir()
    assert len(curve(resumed)) > 20
    assert curve(resumed) == curve(undisturbed)
    weights = "heads/heads.safetensors"
    assert (resumed / weights).read_bytes() == (undisturbed / weights).read_bytes()


def test_a_killed_stage_two_resumes_with_the_same_curve(toy_run: Any, tmp_path: Path) -> None:
    """As above; and dropout's draws go on where they were."""
    finished, config, _, _ = toy_run
    roots = [borrow(finished, tmp_path / name, *ANSWERED, "heads") for name in ("killed", "straight")]
    commands = [training(config, root, "train-medusa2", *STAGE_TWO) for root in roots]
    kill_when([str(MEDUSA), *commands[0]], lambda: checkpointed(roots[0] / "artifacts" / "heads"))
    made = []
    for root, command in zip(roots, commands, strict=True):
        assert medusa_here(*command).returncode == 0
        made.append(next(path for path in (root / "artifacts" / "heads").iterdir() if not path.is_symlink()))
    assert len(curve(made[0])) > 20
    assert curve(made[0]) == curve(made[1])
    for weights in ("heads/heads.safetensors", "adapter/adapter_model.safetensors"):
        assert (made[0] / weights).read_bytes() == (made[1] / weights).read_bytes()


@pytest.mark.parametrize(("zero", "ranks"), [(0, (2, 1)), (1, (2, 1)), (2, (1, 2)), (3, (2, 1))])
def test_a_killed_training_goes_on_with_another_number_of_ranks(
    toy_run: Any, tmp_path: Path, undisturbed: Path, zero: int, ranks: tuple[int, int]
) -> None:
    """Catches optimizer states that are lost or given to the wrong parameters when ZeRO spreads them anew."""
    finished, config, _, _ = toy_run
    root = borrow(finished, tmp_path, *ANSWERED)
    heads = root / "artifacts" / "heads"
    before, after = (
        training(config, root, "train-medusa1", *LONG, f"train.zero_stage={zero}", f"placement.train_workers={number}")
        for number in ranks
    )
    kill_when([str(MEDUSA), *before], lambda: checkpointed(heads))
    done = medusa_here(*after)
    assert done.returncode == 0, done.stderr
    (resumed,) = heads.iterdir()
    losses = [[row["loss"] for row in curve(path)] for path in (resumed, undisturbed)]
    assert len(losses[0]) > 20
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)


def test_ranks_on_two_nodes_outlive_the_death_of_one(toy_run: Any, tmp_path: Path) -> None:
    """A cluster of two nodes with a core each, so a rank on each. Catches a dead rank that ends the run, and a restart
    that begins anew or trains something else."""
    from ray.cluster_utils import Cluster

    finished, config, _, _ = toy_run
    roots = [borrow(finished, tmp_path / name, *ANSWERED) for name in ("disturbed", "straight")]
    settings = ("train.epochs=40", "train.checkpoint_steps=10", "placement.train_workers=2")
    assert run_medusa(*training(config, roots[1], "train-medusa1", *settings)).returncode == 0
    heads = roots[0] / "artifacts" / "heads"
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        nodes.add_node(num_cpus=1)
        settings += (f"placement.ray_address={nodes.address}",)
        command = [str(MEDUSA), *training(config, roots[0], "train-medusa1", *settings)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        wait_until(lambda: checkpointed(heads), process)
        started = psutil.Process().children(recursive=True)
        ranks = [p for p in started if "RayTrainWorker" in "".join(p.cmdline())]
        assert len({rank.ppid() for rank in ranks}) == 2, "both ranks run under one node's raylet"
        ranks[0].kill()
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    finally:
        nodes.shutdown()
    made = [path for root in roots for path in (root / "artifacts" / "heads").iterdir()]
    for name in ("curve.jsonl", "heads/heads.safetensors"):
        assert made[0].joinpath(name).read_bytes() == made[1].joinpath(name).read_bytes(), name


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
