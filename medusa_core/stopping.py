"""When an answer ends, and its text as tokens come: end-of-text, stop strings, the budget.

Knows token ids and a function that turns them into text; nothing of models, logits or batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from medusa_core.errors import InputError
from medusa_core.sampling import SamplingParams

Decode = Callable[[Sequence[int]], str]

# What decoders show for bytes that are no character, among them the first bytes of one that is still to come.
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class StopHit:
    """Why an answer ended: by the stop token or string in `stop_reason`, or by its budget (then it is None)."""

    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None


class StopChecker:
    """Tells after every emitted token of one request whether its answer ends there.

    The first that holds counts: the token is end-of-text or one of stop_token_ids; the text now holds a stop string;
    the budget is spent. Stop strings that are complete within the first min_new_tokens tokens don't count (the stop
    tokens are kept out there by `processors_for`). `decode` is needed for stop strings (InputError without) and costs
    two short calls per token; where it is given, `text` is the answer's text.
    """

    def __init__(self, params: SamplingParams, eos_token_ids: Iterable[int], decode: Decode | None = None) -> None:
        if params.stop and decode is None:
            raise InputError(f"stop is {list(params.stop)}, but there is no tokenizer: give decode, or stop_token_ids")
        self.hit: StopHit | None = None
        self._ends = frozenset((*eos_token_ids, *params.stop_token_ids))
        self._budget = params.max_new_tokens
        self._stream = TextStream(decode, params) if decode is not None else None
        self._tokens = 0

    def push(self, token: int) -> StopHit | None:
        """Takes the next token; says why the answer ends with it, None if it goes on."""
        assert self.hit is None
        self._tokens += 1
        # Text of an end token is no part of the answer, whether decode skips it or not.
        if token in self._ends:
            self.hit = StopHit("stop", token)
        else:
            if self._stream is not None:
                self._stream.add([token])
            if self._stream is not None and self._stream.stop is not None:
                self.hit = StopHit("stop", self._stream.stop)
            elif self._tokens >= self._budget:
                self.hit = StopHit("length", None)
        if self.hit is not None and self._stream is not None:
            self._stream.rest()
        return self.hit

    @property
    def text(self) -> str | None:
        """The answer's text so far, without the stop token or string that ended it; None without decode."""
        return None if self._stream is None else self._stream.text


class TextStream:
    """Tokens to text as they come, held back where it isn't certain yet: a character that lacks bytes, and text that
    may turn out to be part of a stop string.

    With the parameters of the request, the text ends where the answer does: before the first stop string to be
    complete (of two that end with the same character, the longer), and before any of stop_token_ids. Which string
    that is does not depend on how the text falls into tokens. What `add` and `rest` returned together is `text`.
    """

    def __init__(self, decode: Decode, params: SamplingParams | None = None) -> None:
        self.text = ""
        self.stop: str | None = None
        self._params = params or SamplingParams()
        self._characters = _Characters(decode)
        self._tokens = 0
        self._ended = False
        self._shown = 0

    def add(self, tokens: Sequence[int]) -> str:
        """The text that these tokens add for certain; empty past the end."""
        for token in tokens:
            if self._ended:
                break
            if token in self._params.stop_token_ids:
                self._end()
            else:
                self._append(token)
        return self._show(len(self.text) if self._ended else len(self.text) - self._doubtful())

    def rest(self) -> str:
        """What was held back, as the answer has ended."""
        if not self._ended:
            self._end()
        return self._show(len(self.text))

    def _append(self, token: int) -> None:
        before = len(self.text)
        self.text += self._characters.add(token)
        self._tokens += 1
        if self._tokens <= self._params.min_new_tokens:
            return
        matches = []
        for stop in self._params.stop:
            # Only a string that ends in the new text is new; it may begin before it.
            start = self.text.find(stop, max(0, before - len(stop) + 1))
            if start >= 0:
                matches.append((start + len(stop), start, stop))
        if matches:
            _, start, self.stop = min(matches)
            self.text = self.text[:start]
            self._ended = True

    def _end(self) -> None:
        self.text += self._characters.rest()
        self._ended = True

    def _doubtful(self) -> int:
        """Length of the longest end of the text that is the beginning of a stop string."""
        beginnings = (stop[:size] for stop in self._params.stop for size in range(1, len(stop)))
        return max((len(beginning) for beginning in beginnings if self.text.endswith(beginning)), default=0)

    def _show(self, end: int) -> str:
        start, self._shown = self._shown, end
        return self.text[start:end]


class _Characters:
    """Tokens to whole characters, decoding only a short window of the last tokens.

    The window begins with the tokens that were written last: decoders treat the first token of what they are given
    differently (they drop its space), so a token's own text only shows after another. Where the window begins no
    character is cut apart.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []
        # How many of the window's tokens were written before, and how much of its text.
        self._old = 0
        self._written = 0

    def add(self, token: int) -> str:
        self._window.append(token)
        whole = self._decode(self._window)
        certain = whole.rstrip(_INCOMPLETE)
        new = certain[self._written :]
        if new and certain == whole:
            self._window = self._window[self._old :]
            self._old = len(self._window)
            self._written = len(self._decode(self._window))
        else:
            self._written += len(new)
        return new

    def rest(self) -> str:
        """What the window still holds: bytes that never became a character."""
        return self._decode(self._window)[self._written :]
