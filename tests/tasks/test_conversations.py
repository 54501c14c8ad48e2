"""Conversations as token ids: what the template adds, and what is never re-tokenized."""

from __future__ import annotations

import pytest

from infra.errors import UserError
from tasks.conversations import ChatFormat, Conversation, stable_seed
from tests import toys


@pytest.fixture
def chat() -> ChatFormat:
    return ChatFormat(toys.tokenizer(), [toys.END])


def conversation(turns: list[str]) -> Conversation:
    return Conversation("p#0", "p", "c", turns, 0.0, 7)


def test_two_turns_are_the_template_around_the_models_own_ids(chat: ChatFormat) -> None:
    """Catches answers that are decoded and tokenized again, and an end-of-text token written twice."""
    talk = conversation(["w1 w2", "w3"])
    assert talk.ask(chat) == toys.prompt_ids([1, 2])
    talk.answer([5, 6, toys.END], "stop")
    assert not talk.done
    assert talk.ask(chat) == [*toys.prompt_ids([1, 2]), 5, 6, toys.END, *toys.prompt_ids([3])]
    talk.answer([8], "length")
    assert talk.done
    assert len(talk.loss_mask) == len(talk.input_ids)
    assert [i for i, own in zip(talk.input_ids, talk.loss_mask, strict=True) if own] == [5, 6, toys.END, 8]


def test_an_answer_cut_by_the_budget_is_closed_by_the_template(chat: ChatFormat) -> None:
    """Catches a second turn that follows an unfinished answer without its end, and a mask that claims that end."""
    talk = conversation(["w1", "w3"])
    talk.ask(chat)
    talk.answer([5, 6], "length")
    ids = talk.ask(chat)
    assert ids == [*toys.prompt_ids([1]), 5, 6, toys.END, *toys.prompt_ids([3])]
    assert not any(talk.loss_mask[len(toys.prompt_ids([1])) + 2 :])


def test_the_ids_equal_the_whole_template(chat: ChatFormat) -> None:
    """Catches a prefix or suffix that differs from what the template gives for the conversation as a whole."""
    messages = [
        {"role": "user", "content": "w1"},
        {"role": "assistant", "content": "w5 w6"},
        {"role": "user", "content": "w3"},
    ]
    text = chat.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    whole = chat.tokenizer(text, add_special_tokens=False)["input_ids"]
    talk = conversation(["w1", "w3"])
    talk.ask(chat)
    talk.answer([5, 6, toys.END], "stop")
    assert talk.ask(chat) == whole


def test_a_template_that_rewrites_answers_is_refused() -> None:
    tokenizer = toys.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }} {% endfor %}"
    with pytest.raises(UserError, match="rewrites earlier answers"):
        ChatFormat(tokenizer, [toys.END]).following(["w1", "w2"], answer_ended=True)


def test_seeds_depend_on_their_parts_only() -> None:
    assert stable_seed(0, "a", 1) == 2567054096787269053
    assert len({stable_seed(0, "a", 1), stable_seed(0, "a", 2), stable_seed(1, "a", 1), stable_seed(0, "a1", "")}) == 4


def test_a_given_answer_is_closed_as_the_template_closes_it(chat: ChatFormat) -> None:
    """Catches heads that never learn to draft the end of an answer, and an end that the template doesn't have."""
    assert chat.said("w5 w6") == [5, 6, toys.END]
    tokenizer = toys.tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("<|end|>", "")
    assert ChatFormat(tokenizer, [toys.END]).said("w5 w6") == [5, 6]
