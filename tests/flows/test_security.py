"""What must not be: secrets in what is written, pickles read or written, paths that leave the root."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from flows.config import load_config
from infra.errors import UserError
from infra.registry import Registry
from tests.flows.conftest import SECRETS, medusa_here

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("flows", "tasks", "medusa_core", "kernels", "infra")
SOURCES = [path for name in PACKAGES for path in (ROOT / name).rglob("*.py")]
# Files that hold code once they are loaded.
PICKLED = {".pkl", ".pickle", ".pt", ".pth", ".bin", ".joblib", ".npy"}


def test_no_secret_of_the_environment_is_written(toy_run: Any) -> None:
    """Catches a configuration, log, report or manifest that keeps the environment, and a terminal that shows it."""
    root, _, _, shown = toy_run
    written = [path for path in root.rglob("*") if path.is_file()]
    assert len(written) > 40
    for secret in SECRETS.values():
        assert secret not in shown
        for path in written:
            assert secret.encode() not in path.read_bytes(), path


def test_nothing_that_is_kept_is_a_pickle(toy_run: Any) -> None:
    root, _, _, _ = toy_run
    kept = [path for folder in ("artifacts", "registry", "runs") for path in (root / folder).rglob("*")]
    assert [path for path in kept if path.suffix in PICKLED] == []


# It hands a model's class to a child of its own, in a private directory that is gone a moment later.
HANDED_TO_A_CHILD = ROOT / "medusa_core" / "compile_probe.py"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_unpickles(path: Path) -> None:
    """Catches an import that can only unpickle, and torch.load without `weights_only`."""
    if path == HANDED_TO_A_CHILD:
        pytest.skip("it reads what its own parent wrote for it")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            assert not {"pickle", "cloudpickle", "joblib", "dill", "shelve", "marshal"} & set(names)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load":
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id in ("torch", "np", "numpy"):
                assert any(k.arg == "weights_only" for k in node.keywords) or owner.id != "torch", path
                assert not any(k.arg == "allow_pickle" for k in node.keywords), path


@pytest.mark.parametrize("name", ["../out", "a/../../out", "/etc/x", "..", "", "a b", "a" * 200])
def test_names_stay_under_the_root(tmp_path: Path, name: str) -> None:
    """Catches a recipe or model name that becomes a path of its own."""
    with pytest.raises(UserError, match="name"):
        load_config(None, [f"name={json.dumps(name)}"])
    with pytest.raises(UserError, match="no model name"):
        Registry(tmp_path).register(name, tmp_path, {})


def test_a_version_is_no_path(tmp_path: Path) -> None:
    """Catches `--model` that reads files from where it likes under the cover of a version."""
    done = medusa_here("registry", "show", "../../etc/passwd", "--root", tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr


def test_code_of_a_model_is_not_trusted_unless_the_recipe_says_so() -> None:
    assert load_config(None).backbone.trust_remote_code is False
