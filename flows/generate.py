"""`medusa generate`: one answer, streamed as tokens are accepted."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from flows.answering import open_engine, show_answer

if TYPE_CHECKING:
    from medusa_core.sampling import SamplingParams


def stream_answer(
    prompt: str,
    params: SamplingParams,
    *,
    model: str,
    root: Path,
    backbone: str | None,
    plain: bool,
    console: Console,
) -> None:
    """Writes the answer to standard output and one line of figures to `console`."""
    answering = open_engine(model, root, backbone=backbone, plain=plain)

    def write(piece: str) -> None:
        sys.stdout.write(piece)
        sys.stdout.flush()

    _, figures = show_answer(answering, answering.chat.first(prompt), params, write)
    write("\n")
    console.print(f"{figures}, {answering.name}{', tree off' if plain else ''}", style="dim")
