"""A judge's grades of answers, through any endpoint that speaks OpenAI's chat protocol (MT-Bench's single answers).

Knows nothing of who gave the answers.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
from pydantic import BaseModel, ConfigDict, Field

from infra.errors import UserError

_VERDICT = re.compile(r"\[\[\s*(\d+(?:\.\d+)?)\s*\]\]")
_TRIES, _MOST_UNREADABLE = 4, 0.1
_INSTRUCTION = (
    "You grade an assistant's answer to a user. Consider helpfulness, relevance, accuracy, depth and level of detail. "
    "Explain your judgement in a few sentences, then give a whole number from 1 (worthless) to 10 (excellent), exactly "
    "in this form: [[5]]."
)


class JudgeConfig(BaseModel):
    """Who judges what. `endpoint` is the address that `/chat/completions` follows; each answer is graded `repeats`
    times."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    endpoint: str
    model: str
    prompts: str = Field(description="JSONL file in MT-Bench's format")
    key_variable: str = Field("OPENAI_API_KEY", description="environment variable that holds the key")
    limit: int | None = Field(None, ge=1, description="questions, spread over the categories")
    max_turns: int = Field(2, ge=1)
    max_new_tokens: int = Field(512, ge=1, description="of an answer's turn")
    repeats: int = Field(3, ge=1)
    temperature: float = Field(0.7, ge=0, description="the judge's own")
    parallel: int = Field(4, ge=1)
    timeout: float = Field(120.0, gt=0, description="seconds for one judgement")


@dataclass(frozen=True)
class Answered:
    """One question's turns with the answers to them."""

    turns: tuple[str, ...]
    answers: tuple[str, ...]


def grade(config: JudgeConfig, answered: Sequence[Answered]) -> list[list[float]]:
    """The grades (1 to 10) of every turn of every question, `repeats` of each, question by question.

    UserError if the endpoint refuses or stays silent, or if more than a tenth of its judgements hold no grade; fewer
    are left out. A question that has no grade at all is an error too.
    """
    requests = [
        (number, _messages(item, turn))
        for number, item in enumerate(answered)
        for turn in range(len(item.answers))
        for _ in range(config.repeats)
    ]
    key = os.environ.get(config.key_variable, "")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with (
        httpx.Client(base_url=config.endpoint.rstrip("/") + "/", headers=headers, timeout=config.timeout) as client,
        ThreadPoolExecutor(config.parallel) as pool,
    ):
        verdicts = list(pool.map(lambda request: _judge(client, config, request[1]), requests))
    unreadable = verdicts.count(None)
    grades: list[list[float]] = [[] for _ in answered]
    for (number, _), verdict in zip(requests, verdicts, strict=True):
        if verdict is not None:
            grades[number].append(verdict)
    if unreadable > _MOST_UNREADABLE * len(verdicts) or not all(grades):
        raise UserError(
            f"{unreadable} of {len(verdicts)} judgements of {config.model!r} hold no grade of the form [[5]]: "
            "choose a judge that follows instructions"
        )
    return grades


def _messages(item: Answered, turn: int) -> list[dict[str, str]]:
    """The conversation up to the graded answer, as one request."""
    parts = []
    for number in range(turn + 1):
        graded = " (to be graded)" if number == turn else ""
        parts += [f"### User\n{item.turns[number]}", f"### Assistant{graded}\n{item.answers[number]}"]
    return [{"role": "system", "content": _INSTRUCTION}, {"role": "user", "content": "\n\n".join(parts)}]


def _judge(client: httpx.Client, config: JudgeConfig, messages: list[dict[str, str]]) -> float | None:
    """One grade; None if the judgement holds none within its range."""
    request = {"model": config.model, "messages": messages, "temperature": config.temperature}
    content = _ask(client, config, request)
    found = _VERDICT.findall(content)
    value = float(found[-1]) if found else None
    return value if value is not None and 1 <= value <= 10 else None


def _ask(client: httpx.Client, config: JudgeConfig, request: dict[str, Any]) -> str:
    """The judge's words. Overload and broken connections are tried again; a refusal is not."""
    for tried in range(_TRIES):
        try:
            response = client.post("chat/completions", json=request)
            if response.status_code != 429 and response.status_code < 500:
                response.raise_for_status()
                return str(response.json()["choices"][0]["message"]["content"])
            why = f"status {response.status_code}"
        except httpx.TransportError as error:
            why = type(error).__name__
        except httpx.HTTPStatusError as error:
            raise UserError(
                f"the judge at {config.endpoint} refuses ({error.response.status_code}: {error.response.text[:200]}): "
                f"check quality.judge.model and the key in {config.key_variable}"
            ) from None
        except (ValueError, LookupError, TypeError) as error:
            raise UserError(f"{config.endpoint} does not speak OpenAI's chat protocol ({error!r})") from None
        if tried + 1 < _TRIES:
            time.sleep(2**tried / 2)
    raise UserError(f"the judge at {config.endpoint} did not answer in {_TRIES} tries ({why})")
