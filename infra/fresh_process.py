"""Objects that live in a process of their own, so that what they time or hold shares nothing with the pipeline.

The processes are forked from a server that has done nothing but import: as clean as a new interpreter, without paying
for the imports each time. Knows nothing of what the objects do.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
from collections.abc import Callable
from typing import Any

from infra.environment import quiet
from infra.errors import UserError

# Here, not when a process serves: the server that they are forked from imports this module before any other.
quiet()


class FreshProcess:
    """`make(*arguments)` in a process of its own; `call` runs a method there and hands back its result."""

    def __init__(self, name: str, make: Callable[..., Any], *arguments: Any) -> None:
        """`make` and its arguments travel by pickle; the object itself is made at the first call."""
        self.name = name
        context = mp.get_context("forkserver")
        # Takes effect when the server starts, at the first use; what it lacks later, a child imports itself.
        context.set_forkserver_preload([__name__, make.__module__])
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        self._process.start()
        theirs.close()

    def call(self, method: str, *arguments: Any) -> Any:
        """UserError if the method says its input is wrong, RuntimeError for anything else it raises or if it dies."""
        try:
            self._pipe.send((method, arguments))
            status, value = self._pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self._process.join(5)
            raise RuntimeError(f"the {self.name} process died (exit code {self._process.exitcode})") from None
        if status == "input":
            raise UserError(value)
        if status == "error":
            raise RuntimeError(f"{self.name}: {value}")
        return value

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def close(self) -> None:
        """Ends the process; asked once more, does nothing."""
        if self.alive:
            with contextlib.suppress(OSError):
                self._pipe.send(None)
            self._process.join(10)
            self._process.kill()

    def __enter__(self) -> FreshProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(pipe: Any, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    made = None
    # An interrupt reaches the whole process group; the parent is the one that reports it.
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while (message := pipe.recv()) is not None:
            try:
                made = make(*arguments) if made is None else made
                pipe.send(("ok", getattr(made, message[0])(*message[1])))
            except Exception as error:  # handed to the parent, which raises it
                # These two modules hold the errors that mean wrong input; anything else is a fault.
                own = type(error).__module__ in ("infra.errors", "medusa_core.errors")
                pipe.send(("input", str(error)) if own else ("error", f"{type(error).__name__}: {error}"))
