"""What the commands of `medusa` share: their options, the two consoles, and how the options become values."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.logging import RichHandler

from infra.environment import default_root

# Piped output has no width of its own; tables then take what they need.
out = Console() if sys.stdout.isatty() else Console(width=120)
err = Console(stderr=True)

Root = Annotated[
    Path | None, typer.Option("--root", help="Where everything lies; default $MEDUSA_ROOT or ./medusa-root.")
]
Config = Annotated[
    str | None, typer.Option("--config", help="A YAML file, or the name of a recipe; default smollm2-135m.")
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="Override a key, e.g. `--set train.epochs=2`. Repeatable.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Model = Annotated[
    str, typer.Option("--model", help="`champion`, `latest`, NAME/VERSION, or a directory that `heads/` lies in.")
]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Draw from the likeliest tokens of this mass.")]
TopK = Annotated[int, typer.Option(min=0, help="Draw from so many of the likeliest tokens; 0: from all.")]
Stop = Annotated[list[str] | None, typer.Option(help="A string that ends the answer; may be given several times.")]
AcceptanceRule = Annotated[
    Literal["exact", "rejection", "typical"],
    typer.Option(help="rejection draws from the same distribution as exact; typical does not."),
]
CompileOption = Annotated[
    Literal["auto", "on", "off"], typer.Option("--compile", help="Whether to compile the engine's steps.")
]


def sampling_params(
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    seed: int,
    stop: list[str] | None,
    acceptance: Literal["exact", "rejection", "typical"],
) -> Any:
    """SamplingParams of the options; InputError for a value that makes no sense."""
    from medusa_core.sampling import SamplingParams

    return SamplingParams(
        max_new_tokens,
        temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=tuple(stop or ()),
        acceptance=acceptance,
    )


def root_of(root: Path | None) -> Path:
    """The root that is meant."""
    return root.absolute() if root else default_root()


def log_to_terminal() -> None:
    """Shows the progress of the packages' loggers on standard error."""
    handler = RichHandler(console=err, show_path=False, rich_tracebacks=False, log_time_format="%H:%M:%S")
    from flows.run_directory import PACKAGES

    for name in PACKAGES:
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.handlers[:] = [handler]
        logger.propagate = False
