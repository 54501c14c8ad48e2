"""What the documentation shows runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

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
