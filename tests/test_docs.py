"""What the documentation shows runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from flows.config import DEFAULT_RECIPE, RECIPES, load_config
from flows.costs import GIB
from flows.plan import make_plan
from medusa_core.checkpoint import save_heads, weights_digest
from medusa_core.heads import MedusaHeads

DOCS = Path(__file__).parents[1] / "docs"


def test_the_library_page_runs(
    toy_dir: Path, toy_heads: MedusaHeads, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches an example that no longer fits the library."""
    heads = tmp_path / "heads"
    heads.mkdir()
    save_heads(heads, toy_heads, backbone_name="toy", backbone_digest=weights_digest(toy_dir))
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "library.md").read_text(), re.DOTALL)
    assert len(blocks) >= 5
    names = {"MODEL": toy_dir, "HEADS": heads}
    for block in blocks:
        exec(compile(block, "docs/library.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "Usage(prompt_tokens=2, completion_tokens=" in printed and "['w9', 'w9']" in printed
    assert names["fast"].model.dtype == torch.bfloat16  # type: ignore[attr-defined]


def test_the_recipes_page_shows_what_their_plans_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a recipe without its command, and figures that no longer follow from the recipe."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    page = (DOCS / "recipes.md").read_text()
    for recipe in sorted(path.stem for path in RECIPES.glob("*.yaml")):
        assert f"`medusa run --config {recipe}`" in page or recipe == DEFAULT_RECIPE, recipe
        config = load_config(recipe)
        if config.plan.gpu is None:
            continue
        plan = make_plan(config, tmp_path / "root", "publish")
        need = {stage["name"]: stage["memory"] / GIB for stage in plan["stages"] if "memory" in stage}
        size = {stage["name"]: stage["bytes"] / GIB for stage in plan["stages"] if "bytes" in stage}
        joint_memory, joint_size = (
            f"{each['train-medusa2']:.0f}" if "train-medusa2" in each else "" for each in (need, size)
        )
        row = (
            f"| `{recipe}` | {config.plan.gpus} x {config.plan.gpu} | {need['distill']:.0f} | {need['teacher']:.0f} "
            f"| {need['train-medusa1']:.0f} | {joint_memory} "
            f"| {size['teacher']:.0f} | {size['train-medusa1']:.1f} | {joint_size} "
            f"| {plan['minutes'] / 60:.1f} |"
        )
        assert row in page, row
