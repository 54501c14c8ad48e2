"""`medusa chat`: a conversation in the terminal. Each group of tokens that one step accepted has a shade of its own.

Knows terminals; the engine is `flows/answering.py`'s.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from flows.answering import open_engine, show_answer
from infra.errors import UserError

if TYPE_CHECKING:
    from medusa_core.engine import CompileMode
    from medusa_core.sampling import SamplingParams

_HELP = "/new starts over, /quit (or end of input) leaves; two shades mark what single steps accepted"
_SHADES = ("bold", "cyan")


def converse(
    params: SamplingParams,
    *,
    model: str,
    root: Path,
    plain: bool,
    compile: CompileMode,
    console: Console,
) -> None:
    """Reads questions until the input ends. A question that no longer fits the model's context is refused with a
    sentence, and the conversation goes on."""
    from medusa_core.errors import InputError

    with console.status("loading the engine"):
        answering = open_engine(model, root, plain=plain, compile=compile)
        seconds = answering.engine.warm_up()
    compiled = "compiled" if answering.engine.compiled else "not compiled"
    console.print(f"{answering.name}, steps {compiled}, warm after {seconds:.1f} s. {_HELP}", style="dim")
    turns: list[str] = []
    ids: list[int] = []
    while True:
        try:
            question = console.input("[bold]> [/]").strip()
        except EOFError:
            console.print()
            return
        if question == "/quit":
            return
        if question == "/new":
            turns, ids = [], []
            continue
        if question.startswith("/"):
            console.print(_HELP, style="dim")
            continue
        if not question:
            continue
        asked = [*turns, question]
        if turns:
            prompt = ids + answering.chat.following(asked, ids[-1] in answering.chat.eos)
        else:
            prompt = answering.chat.first(question)
        try:
            generation, figures = show_answer(answering, prompt, params, _shaded(console))
        except (InputError, UserError) as error:
            console.print(f"{error}; /new starts over", style="red", markup=False)
            continue
        turns, ids = asked, [*prompt, *generation.tokens]
        console.print(f"\n{figures}", style="dim", highlight=False)


def _shaded(console: Console) -> Callable[[str], None]:
    """Writes pieces in alternating shades."""
    shades = itertools.cycle(_SHADES)

    def write(piece: str) -> None:
        if piece:
            console.print(Text(piece, next(shades)), end="", soft_wrap=True)

    return write
