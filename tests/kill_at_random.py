"""`python -m tests.kill_at_random --kills 20`: a run on the toy, killed at random moments, against one left alone.

Killed are the driver, Ray's workers, its raylet and GCS, and the Prefect server that a run starts for itself; each time
the same command is run again. In the end what was made must be what an undisturbed run makes. Prints what was killed
in which stage, and what came of it.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil

from tests.flows.conftest import MEDUSA, toy_config
from tests.toys import toy_directory

DATA = ("prompts", "distill", "teacher", "heads", "ranks")
TIMED = ("latency", "tree", "benchmark")
# By a word of its command line; the driver is the process itself.
VICTIMS = {
    "driver": None,
    "worker": re.compile(r"^ray::(?!\w*Agent)|RayTrainWorker|default_worker\.py"),
    "raylet": re.compile(r"/raylet/raylet"),
    "gcs": re.compile(r"gcs_server"),
    "server": re.compile(r"prefect\.server|uvicorn"),
}
_WEIGHTS = {"driver": 8, "worker": 5, "raylet": 3, "gcs": 2, "server": 2}
_STUCK_S = 240


def kill_at_random(kills: int, seed: int) -> int:
    """Runs, kills, compares; the number of faults found."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="kills-", ignore_cleanup_errors=True) as folder:
        place = Path(folder)
        config = toy_config(place, toy_directory(place / "toy"), distill={"shard_size": 4, "batch_size": 2})
        start = time.monotonic()
        alone = _run(config, place / "alone")
        if alone.returncode:
            print(alone.stderr)
            return 1
        seconds = time.monotonic() - start
        print(f"undisturbed: {seconds:.0f} s", flush=True)
        root, done, faults = place / "killed", 0, 0
        while done < kills:
            if (root / "runs").is_dir() and _finished(root):
                # All of it survived; what is left of the kills is spent on another root.
                faults += _compare(place / "alone", root)
                root = place / f"killed-{done}"
            killed = _disturb(config, root, rng, longest=0.8 * seconds)
            if killed is not None:
                done += 1
                print(f"{done:3d}  {killed}", flush=True)
                faults += "stuck" in killed
        last = _run(config, root)
        if last.returncode:
            print(f"the last run ended with {last.returncode}: {last.stderr[-2000:]}")
            return faults + 1
        return faults + _compare(place / "alone", root)


def _disturb(config: Path, root: Path, rng: random.Random, longest: float) -> str | None:
    """One run with one kill in it: what was killed, in which stage, and how the run went on; None if it ended first."""
    log = root.with_suffix(".log")
    with open(log, "w") as out:
        driver = subprocess.Popen(_command(config, root), stdout=out, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + rng.uniform(5, longest)
        while time.monotonic() < deadline and driver.poll() is None:
            time.sleep(0.05)
        if driver.poll() is not None:
            return None
        tree = [psutil.Process(driver.pid), *psutil.Process(driver.pid).children(recursive=True)]
        name, victim = _choose(tree, rng)
        stage = _stage(log)
        with suppress(psutil.NoSuchProcess):
            victim.kill()
        try:
            code: int | None = driver.wait(5 if name == "driver" else _STUCK_S)
        except subprocess.TimeoutExpired:
            code = None
            driver.kill()
            driver.wait()
    for left in tree:
        with suppress(psutil.NoSuchProcess):
            left.kill()
    came = {0: "went on to its end", None: f"stuck for {_STUCK_S} s", -9: "gone"}.get(code, f"ended with {code}")
    said = "" if code in (0, -9) else f": {_last_line(log)}"
    return f"{name:7} after {stage:15} {came}{said}"


def _choose(tree: list[psutil.Process], rng: random.Random) -> tuple[str, psutil.Process]:
    found: dict[str, list[psutil.Process]] = {"driver": tree[:1]}
    for process in tree[1:]:
        try:
            line = " ".join(process.cmdline())
        except psutil.Error:
            continue
        for name, pattern in VICTIMS.items():
            if pattern and pattern.search(line):
                found.setdefault(name, []).append(process)
    names = list(found)
    name = rng.choices(names, [_WEIGHTS[each] for each in names])[0]
    return name, rng.choice(found[name])


def _stage(log: Path) -> str:
    """The last stage that said it was done."""
    done = re.findall(r"stage ([\w-]+):", log.read_text())
    return done[-1] if done else "nothing"


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text().splitlines() if line.strip()]
    return lines[-1][:160] if lines else ""


def _command(config: Path, root: Path) -> list[str]:
    return [str(MEDUSA), "run", "--config", str(config), "--root", str(root)]


def _run(config: Path, root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(_command(config, root), capture_output=True, text=True, timeout=1200)


def _finished(root: Path) -> bool:
    return any((root / "artifacts" / "benchmark").glob("*/manifest.json"))


def _compare(alone: Path, killed: Path) -> int:
    """Faults: data that is not the undisturbed run's, timed artifacts that are missing, anything half done."""
    faults = 0
    for kind in DATA:
        made = [_digests(root, kind) for root in (alone, killed)]
        same = made[0] == made[1]
        faults += not same
        print(f"     {kind:10} {'identical' if same else 'DIFFERS'}: {sum(made[0].values())} files")
    for kind in TIMED:
        whole = len(list((killed / "artifacts" / kind).glob("*/manifest.json")))
        faults += whole == 0
        print(f"     {kind:10} {'complete' if whole else 'MISSING'}")
    return faults


def _digests(root: Path, kind: str) -> Counter[str]:
    """Digests of the data files; figures of how long something took are no data."""
    found: Counter[str] = Counter()
    for manifest in (root / "artifacts" / kind).glob("*/manifest.json"):
        files = json.loads(manifest.read_text())["files"]
        found.update(entry["sha256"] for name, entry in files.items() if name.endswith((".parquet", ".safetensors")))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    sys.exit(1 if kill_at_random(arguments.kills, arguments.seed) else 0)
