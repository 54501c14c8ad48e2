"""`medusa study …`: experiments that say what a part, or a setting, is worth. Parses, calls, prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli_options import AsJson, Config, Overrides, Root, log_to_terminal, out, root_of

if TYPE_CHECKING:
    from flows.study import Cell

app = typer.Typer(no_args_is_help=True, help="Experiments that say what a part, or a setting, is worth.")

_Nodes = Annotated[int, typer.Option(min=1, help="Nodes of the tree that tokens per step are counted with.")]


@app.command("recipe")
def study_recipe(
    config: Annotated[str, typer.Option("--config", help="As of `medusa run`.")] = "smollm2-135m-medusa2",
    overrides: Overrides = None,
    root: Root = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of stage 2 in every cell.")] = 20,
    answers: Annotated[int, typer.Option(min=1, help="Held-out answers on which the backbones are compared.")] = 60,
    nodes: _Nodes = 16,
    cells: Annotated[list[str] | None, typer.Option("--cell", help="Only the cell of this name; repeat.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train stage 2 with and without the combined loss, the heads' own learning rate and the start from stage 1's
    heads, and print what each cell gives beside stage 1 alone."""
    from flows.config import load_config
    from flows.study import recipe_cells

    chosen = load_config(config, overrides or [])
    study = recipe_cells(chosen, steps=steps, evaluated_answers=answers, only=cells or [])
    settings = {"steps": steps, "evaluated_answers": answers, "config": chosen.model_dump(mode="json")}
    _run(study, root, nodes, settings, as_json)


@app.command("heads")
def study_heads(
    vary: Annotated[
        list[str], typer.Option("--vary", help="What to change, e.g. 'heads.vocab=16384 train.epochs=4'; repeat.")
    ],
    config: Config = None,
    overrides: Overrides = None,
    root: Root = None,
    nodes: _Nodes = 16,
    as_json: AsJson = False,
) -> None:
    """Train heads as configured and with other settings, and print how many tokens per step each gives."""
    from flows.study import heads_cells

    study = heads_cells(config, overrides or [], vary)
    _run(study, root, nodes, {"config": study[0].config.model_dump(mode="json")}, as_json)


def _run(cells: list[Cell], root: Path | None, nodes: int, settings: dict[str, Any], as_json: bool) -> None:
    from rich.markdown import Markdown

    from flows.study import as_markdown, run_study

    log_to_terminal()
    found = run_study(cells, root_of(root), nodes=nodes, settings=settings)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        out.print(Markdown(as_markdown(found)))
        out.print(f"written to {found['directory']}")
