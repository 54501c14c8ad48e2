"""Clean-up on a finished run's root: what goes, and what must not."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from infra.artifacts import ArtifactStore
from tests.flows.conftest import medusa_here

LONG_AGO = 1_600_000_000


@pytest.fixture
def root(toy_run: Any, tmp_path: Path) -> Path:
    """A copy of the root with one artifact that nothing refers to, old, and what a killed stage left, old too."""
    finished, _, report, _ = toy_run
    copy = tmp_path / "root"
    shutil.copytree(finished, copy, symlinks=True)
    # Other tests leave failed runs there, whose artifacts are garbage too.
    made = {name for stage in report["stages"] for name in stage["artifact"].split()}
    for name in names(copy) - made:
        shutil.rmtree(copy / "artifacts" / name)
    (finished,) = (copy / "artifacts" / "ranks").iterdir()
    shutil.copytree(finished, finished.with_name("0" * 24))
    (copy / "artifacts" / "heads" / ("1" * 24 + ".partial")).mkdir()
    for path in (copy / "artifacts").rglob("*"):
        os.utime(path, (LONG_AGO, LONG_AGO), follow_symlinks=False)
    return copy


def names(root: Path) -> set[str]:
    return {f"{path.parent.name}/{path.name}" for path in (root / "artifacts").glob("*/*")}


def collect(root: Path, *flags: object) -> dict[str, Any]:
    done = medusa_here("gc", "--root", root, "--json", *flags)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_only_what_nothing_refers_to_goes_and_only_when_told(root: Path) -> None:
    """Catches a version's artifacts among the garbage, and a dry run that removes."""
    before = names(root)
    found = collect(root)
    orphans = {"ranks/" + "0" * 24, "heads/" + "1" * 24 + ".partial"}
    assert {each["name"] for each in found["found"]} == orphans
    assert found["removed"] == [] and names(root) == before
    assert {each["untouched_since"] for each in found["found"]} == {"2020-09-13"}
    assert set(collect(root, "--delete")["removed"]) == orphans
    assert names(root) == before - orphans


def test_what_a_run_finds_again_is_of_use(root: Path) -> None:
    """Catches an artifact that goes while a run which has not ended yet reads it: no version, no report names it."""
    store, key = ArtifactStore(root), "0" * 24
    store.produce("ranks", key, inputs={}, config={}, build=lambda _: pytest.fail("it was there"))
    assert [each["name"] for each in collect(root)["found"]] == ["heads/" + "1" * 24 + ".partial"]


def test_what_is_young_or_being_built_stays(root: Path) -> None:
    """Catches a stage whose work is removed under its hands."""
    os.utime(root / "artifacts" / "ranks" / ("0" * 24))
    assert [each["name"] for each in collect(root)["found"]] == ["heads/" + "1" * 24 + ".partial"]
    with ArtifactStore(root).try_lock("heads", "1" * 24) as mine:
        assert mine
        assert collect(root, "--delete")["removed"] == []
    assert "heads/" + "1" * 24 + ".partial" in names(root)
