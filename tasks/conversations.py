"""Conversations as token ids: what a chat template puts around turns, without ever re-tokenizing an answer.

Knows nothing of models or sampling.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from infra.errors import UserError

_ANSWER = "MEDUSAANSWERPLACEHOLDER"


class ChatFormat:
    """The token ids around user turns, for one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_token_ids: Iterable[int]) -> None:
        self.tokenizer = tokenizer
        self.eos = frozenset(eos_token_ids)

    def first(self, turn: str) -> list[int]:
        """Ids of the prompt that asks the first turn, up to where the answer begins."""
        return self._encode(self._render([{"role": "user", "content": turn}]))

    def following(self, turns: list[str], answer_ended: bool) -> list[int]:
        """Ids between the end of the last answer and the start of the next, where turns[-1] is the new user turn.

        `answer_ended`: the answer's own ids already hold its end-of-text token, which the template would repeat.
        """
        messages: list[dict[str, str]] = []
        for turn in turns[:-1]:
            messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": _ANSWER}]
        text = self._render([*messages, {"role": "user", "content": turns[-1]}])
        if text.count(_ANSWER) != len(turns) - 1:
            raise UserError(
                "this chat template rewrites earlier answers, so a second turn can't continue from the first one's "
                "token ids: use single-turn prompts, or a template that keeps answers as they are"
            )
        ids = self._encode(text.rsplit(_ANSWER, 1)[1])
        return ids[1:] if answer_ended and ids and ids[0] in self.eos else ids

    def said(self, answer: str) -> list[int]:
        """Ids of an answer that somebody wrote, closed by the token that ends an answer in the template (if it has
        one)."""
        text = self._render([{"role": "user", "content": "."}, {"role": "assistant", "content": _ANSWER}], ask=False)
        ending = self._encode(text.rsplit(_ANSWER, 1)[-1])[:1]
        # What looks like a special token in somebody's text is text.
        ids = self.tokenizer(answer, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return [*ids, *(token for token in ending if token in self.eos)]

    def _render(self, messages: list[dict[str, str]], *, ask: bool = True) -> str:
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask))

    def _encode(self, text: str) -> list[int]:
        # The template writes every special token itself.
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


@dataclass
class Conversation:
    """One request being answered turn by turn: the ids so far and which of them are answers. `given` are answers that
    come from the source and not from the model; they were drawn at no temperature."""

    sample_id: str
    conversation_id: str
    category: str
    turns: list[str]
    temperature: float | None
    seed: int
    given: list[str] = field(default_factory=list)
    input_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    answered: int = 0
    finish_reason: str = ""

    @property
    def done(self) -> bool:
        return self.answered == len(self.turns)

    def ask(self, chat: ChatFormat) -> list[int]:
        """Appends the next user turn and returns the whole prompt for it."""
        if not self.answered:
            new = chat.first(self.turns[0])
        else:
            ended = bool(self.input_ids) and self.input_ids[-1] in chat.eos
            new = chat.following(self.turns[: self.answered + 1], ended)
        self.input_ids += new
        self.loss_mask += [False] * len(new)
        return self.input_ids

    def answer(self, tokens: list[int], finish_reason: str) -> None:
        """Appends an answer, end-of-text included."""
        self.input_ids = self.input_ids + tokens
        self.loss_mask += [True] * len(tokens)
        self.answered += 1
        self.finish_reason = finish_reason

    def turn_seed(self) -> int:
        return stable_seed(self.seed, self.answered)


def stable_seed(*parts: object) -> int:
    """A 63-bit seed that depends only on its parts, the same on every machine."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
