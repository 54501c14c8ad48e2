"""Every option of a request through the engine, with a tree that is really accepted, against transformers' generate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from transformers import (
    LlamaForCausalLM,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from medusa_core.engine import MedusaEngine
from medusa_core.errors import InputError
from medusa_core.heads import MedusaHeads
from medusa_core.portfolio import Portfolio
from medusa_core.request import Generation, Usage
from medusa_core.sampling import SamplingParams
from medusa_core.tree import OFF, Tree, chain
from tests import toys
from tests.medusa_core.chaos import VOCAB, beyond_root, chaotic_llama, greedy, oracle, prompts_of

BUDGET = 32
BUSHY = Tree.from_choices([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0], [0, 0, 1]])
PROMPTS = prompts_of([1, 6, 13, 4, 9, 2, 11, 5])
# Tokens that the plain answers reach early on (checked below).
ENDS = [11, 16, 28, 35]
FORBIDDEN = 20


@dataclass(frozen=True)
class Case:
    """The same request for the engine and for transformers' generate."""

    ours: dict[str, Any] = field(default_factory=dict)
    theirs: dict[str, Any] = field(default_factory=dict)


def bigrams() -> LogitsProcessorList:
    return LogitsProcessorList([NoRepeatNGramLogitsProcessor(2)])


CASES: dict[str, Case] = {
    "plain": Case(),
    "stop tokens": Case({"stop_token_ids": ENDS}, {"eos_token_id": ENDS}),
    "min_new_tokens": Case(
        {"stop_token_ids": ENDS, "min_new_tokens": 14}, {"eos_token_id": ENDS, "min_new_tokens": 14}
    ),
    "repetition penalty": Case({"repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
    "repetition reward": Case({"repetition_penalty": 0.8}, {"repetition_penalty": 0.8}),
    "logit bias": Case(
        {"logit_bias": {3: 9.0, FORBIDDEN: float("-inf")}},
        {"sequence_bias": {(3,): 9.0, (FORBIDDEN,): float("-inf")}},
    ),
    "a processor of the caller's": Case({"logits_processor": bigrams()}, {"logits_processor": bigrams()}),
    "all at once": Case(
        {"stop_token_ids": ENDS, "min_new_tokens": 9, "repetition_penalty": 1.3, "logit_bias": {5: 6.0},
         "logits_processor": bigrams()},
        {"eos_token_id": ENDS, "min_new_tokens": 9, "repetition_penalty": 1.3, "sequence_bias": {(5,): 6.0},
         "logits_processor": bigrams()},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def expected() -> dict[str, list[list[int]]]:
    """transformers' answers of every case to every prompt."""
    model = chaotic_llama()
    return {name: [greedy(model, prompt, BUDGET, **case.theirs) for prompt in PROMPTS] for name, case in CASES.items()}


def engine_for(answers: Sequence[Sequence[int]], tree: Tree = BUSHY) -> MedusaEngine:
    """An engine whose heads know these answers to PROMPTS."""
    model = chaotic_llama()
    known = {tuple(prompt): answer for prompt, answer in zip(PROMPTS, answers, strict=True)}
    return MedusaEngine(model, oracle(model, known), tree, eos_token_ids=[])


@pytest.fixture(scope="module")
def engine(expected: dict[str, list[list[int]]]) -> MedusaEngine:
    return engine_for(expected["plain"])


def check_ends(answers: Sequence[Generation], params: SamplingParams) -> None:
    """How every answer ended, and what it counts."""
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        last = answer.tokens[-1]
        ended = ("stop", last) if last in params.stop_token_ids else ("length", None)
        assert (answer.finish_reason, answer.stop_reason) == ended
        assert answer.usage == Usage(len(prompt), len(answer.tokens))
        assert answer.usage.total_tokens == len(prompt) + len(answer.tokens)


def test_the_cases_are_worth_testing(expected: dict[str, list[list[int]]]) -> None:
    """Catches options that change nothing: then nothing below would prove anything."""
    plain = expected["plain"]
    for name, answers in expected.items():
        assert name == "plain" or sum(one != other for one, other in zip(answers, plain, strict=True)) > 4, name
    assert len({len(answer) for answer in expected["stop tokens"]}) > 3
    assert min(map(len, expected["stop tokens"])) < 14 <= min(map(len, expected["min_new_tokens"])) < BUDGET
    assert any(FORBIDDEN in answer for answer in plain)


@pytest.mark.parametrize("name", CASES)
def test_an_option_does_what_it_does_in_generate(name: str, expected: dict[str, list[list[int]]]) -> None:
    """Catches an option that only the root, or only the prompt's own pass, regards; a context that lacks the path; a
    minimum counted in steps; a stop inside an accepted path that is overrun. Alone, in batches and without a tree."""
    params = SamplingParams(BUDGET, **CASES[name].ours)
    engine = engine_for(expected[name])
    for tree, batch in ((BUSHY, 1), (BUSHY, 3), (chain(3), 8), (OFF, 3)):
        engine.portfolio = Portfolio.of(tree)
        answers = engine.generate(PROMPTS, params, batch=batch)
        assert [answer.tokens for answer in answers] == expected[name], (tree, batch)
        check_ends(answers, params)
        assert tree.is_off or beyond_root(answers) > 10, "too little was accepted, so too little was tested"


def test_requests_with_different_options_share_a_batch(expected: dict[str, list[list[int]]]) -> None:
    """Catches options of one row applied to another, to greedy rows that need none, or lost when a row moves."""
    answers = [expected[name][at] for at, name in enumerate(CASES)]
    engine = engine_for(answers)
    params = [SamplingParams(BUDGET, **case.ours) for case in CASES.values()]
    sampled = SamplingParams(BUDGET, temperature=2.0, seed=5, top_k=5, repetition_penalty=1.2)
    alone = engine.generate([PROMPTS[2]], sampled)[0].tokens
    for batch in (2, 4, 9):
        mixed = engine.generate([*PROMPTS, PROMPTS[2]], [*params, sampled], batch=batch)
        assert [answer.tokens for answer in mixed[:-1]] == answers
        assert mixed[-1].tokens == alone
        assert beyond_root(mixed) > 10


@pytest.mark.parametrize("name", CASES)
def test_a_stream_is_the_answer_in_pieces(name: str, expected: dict[str, list[list[int]]]) -> None:
    """Catches a token repeated or swallowed between steps, or handed out past a stop."""
    engine = engine_for(expected[name])
    for prompt, answer in zip(PROMPTS[:3], expected[name], strict=False):
        items = list(engine.stream(prompt, SamplingParams(BUDGET, **CASES[name].ours)))
        assert [token for item in items for token in item.tokens] == answer
        assert items[-1].generation.tokens == answer
        assert len(items) == items[-1].generation.steps + 1
        assert all(item.tokens for item in items)


# Sampling.

SAMPLED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 3.0},
    "top-k": {"temperature": 5.0, "top_k": 3},
    "top-p": {"temperature": 5.0, "top_p": 0.7},
    "both": {"temperature": 8.0, "top_k": 6, "top_p": 0.8},
}


@pytest.mark.parametrize("acceptance", ["exact", "rejection"])
@pytest.mark.parametrize("name", SAMPLED)
def test_sampling_through_a_tree_repeats_by_seed_and_keeps_to_its_support(
    name: str, acceptance: Any, engine: MedusaEngine
) -> None:
    """Catches a generator that rows share, draws that depend on the batch, and a top-k or top-p that drafted tokens
    get around."""
    engine.portfolio = Portfolio.of(BUSHY)
    params = [SamplingParams(16, **SAMPLED[name], seed=seed, acceptance=acceptance) for seed in range(8)]
    together = engine.generate(PROMPTS, params, batch=4)
    assert [answer.tokens for answer in together] == [
        engine.generate([prompt], one)[0].tokens for prompt, one in zip(PROMPTS, params, strict=True)
    ]
    other = [replace(one, seed=one.seed + 100) for one in params]
    assert [answer.tokens for answer in engine.generate(PROMPTS, other, batch=4)] != [a.tokens for a in together]
    assert beyond_root(together) > 0
    warpers = [TopKLogitsWarper(params[0].top_k or VOCAB), TopPLogitsWarper(params[0].top_p)]
    for prompt, answer in zip(PROMPTS, together, strict=True):
        ids = torch.tensor([[*prompt, *answer.tokens]])
        with torch.inference_mode():
            scores = engine.model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float() / params[0].temperature
        for warper in warpers:
            scores = warper(ids, scores)
        chosen = scores.gather(1, torch.tensor(answer.tokens)[:, None])
        assert bool(chosen.isfinite().all()), "a token from outside the support"


def test_n_answers_follow_each_other_each_with_a_seed_of_its_own(engine: MedusaEngine) -> None:
    """Catches n equal answers, answers grouped by draw instead of by prompt, and a batch that mixes them up."""
    engine.portfolio = Portfolio.of(BUSHY)
    params = [SamplingParams(12, temperature=4.0, seed=11, n=3), SamplingParams(9, temperature=4.0, seed=11, n=2)]
    expected = [
        engine.generate([prompt], replace(one, n=1, seed=11 + draw))[0].tokens
        for prompt, one in zip(PROMPTS[1:3], params, strict=True)
        for draw in range(one.n)
    ]
    assert len({tuple(tokens) for tokens in expected}) == 5
    for batch in (1, 2, 5):
        answers = engine.generate(PROMPTS[1:3], params, batch=batch)
        assert [answer.tokens for answer in answers] == expected
        assert [answer.usage.prompt_tokens for answer in answers] == [6, 6, 6, 13, 13]
    session = engine.session(rows=4, slots=80)
    with pytest.raises(InputError, match="n is 3; add a request for each sequence"):
        session.add_request(PROMPTS[1], params[0])


@pytest.mark.parametrize("acceptance", ["exact", "rejection", "typical"])
def test_greedy_is_greedy_whatever_the_acceptance(
    acceptance: Any, engine: MedusaEngine, expected: dict[str, list[list[int]]]
) -> None:
    """Catches a lossy or random rule applied at temperature 0."""
    engine.portfolio = Portfolio.of(BUSHY)
    answers = engine.generate(PROMPTS, SamplingParams(BUDGET, acceptance=acceptance, seed=3), batch=3)
    assert [answer.tokens for answer in answers] == expected["plain"]
    assert beyond_root(answers) > 10


@pytest.mark.parametrize("acceptance", ["exact", "rejection", "typical"])
def test_a_forbidden_token_never_comes_however_it_is_accepted(acceptance: Any, engine: MedusaEngine) -> None:
    """Catches rules that look at the model's own logits: the heads draft the token wherever greedy decoding has it."""
    engine.portfolio = Portfolio.of(BUSHY)
    params = [SamplingParams(24, temperature=2.0, seed=seed, acceptance=acceptance) for seed in range(8)]
    free = engine.generate(PROMPTS, params, batch=4)
    assert any(FORBIDDEN in answer.tokens for answer in free)
    bias = {FORBIDDEN: float("-inf")}
    bound = engine.generate(PROMPTS, [replace(one, logit_bias=bias) for one in params], batch=4)
    assert not any(FORBIDDEN in answer.tokens for answer in bound)
    assert beyond_root(bound) > 0


def test_typical_acceptance_is_deterministic_and_accepts_more(
    engine: MedusaEngine, expected: dict[str, list[list[int]]]
) -> None:
    """Catches a draw where the rule has none, epsilon and delta that are not passed on, and the next token after a
    path taken at random: without a tree it is the greedy one."""
    params = SamplingParams(BUDGET, temperature=4.0, acceptance="typical", epsilon=1e-4, delta=1e-3)
    engine.portfolio = Portfolio.of(OFF)
    answers = engine.generate(PROMPTS, params, batch=3)
    assert [answer.tokens for answer in answers] == expected["plain"]
    engine.portfolio = Portfolio.of(BUSHY)
    lenient = engine.generate(PROMPTS, params, batch=3)
    again = engine.generate(PROMPTS, [replace(params, seed=seed) for seed in range(8)], batch=5)
    assert [answer.tokens for answer in lenient] == [answer.tokens for answer in again]
    assert [answer.tokens for answer in lenient] != expected["plain"]
    # At a threshold of 1 nothing is typical: every step keeps its root alone, which is plain greedy decoding.
    strict = engine.generate(PROMPTS, replace(params, epsilon=1.0, delta=1e6), batch=3)
    assert [answer.tokens for answer in strict] == expected["plain"]
    assert beyond_root(strict) == 0
    # The lower threshold counts, so either alone makes the rule lenient.
    for alone in (replace(params, epsilon=1.0), replace(params, delta=1e6)):
        assert beyond_root(engine.generate(PROMPTS, alone, batch=3)) > beyond_root(
            engine.generate(PROMPTS, SamplingParams(BUDGET), batch=3)
        )


# Stop strings, which need text.


@pytest.fixture(scope="module")
def speaking(toy: LlamaForCausalLM, toy_heads: MedusaHeads) -> MedusaEngine:
    return MedusaEngine(toy, toy_heads, chain(3), tokenizer=toys.tokenizer())


@pytest.fixture(scope="module")
def spoken() -> list[int]:
    """A word with a long answer."""
    return toys.answer_to(max(range(toys.WORDS), key=lambda word: len(toys.answer_to(word))))


class TextHas(StoppingCriteria):
    """transformers' own stop strings don't know a tokenizer of whole words."""

    def __init__(self, stop: str, prompt_tokens: int) -> None:
        self.stop, self.prompt_tokens = stop, prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return torch.tensor([self.stop in toys.tokenizer().decode(ids[self.prompt_tokens :]) for ids in input_ids])


def word_before(answer: list[int]) -> int:
    return toys.SUCCESSOR.index(answer[0])


@pytest.mark.parametrize("place", range(4, 12))
def test_a_stop_string_ends_the_answer_as_in_generate(speaking: MedusaEngine, spoken: list[int], place: int) -> None:
    """Catches tokens kept after a stop string that ends inside an accepted path, the string left in the text, and an
    answer that doesn't say what stopped it."""
    prompt, stop = toys.prompt_ids([word_before(spoken)]), f"w{spoken[place]}"
    # A word may be the beginning of another one: w1 stops at w17.
    first = next(at for at, token in enumerate(spoken) if f"w{token}".startswith(stop))
    text_has_stop = StoppingCriteriaList([TextHas(stop, len(prompt))])
    theirs = greedy(speaking.model, prompt, 40, stopping_criteria=text_has_stop)
    answer = speaking.generate([prompt], SamplingParams(40, stop=[stop, "never"]))[0]
    assert answer.tokens == theirs == spoken[: first + 1]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    assert answer.text == "".join(f"w{token} " for token in spoken[:first])
    assert answer.usage.completion_tokens == first + 1
    assert answer.steps < first, "the stop must come inside paths"


def test_a_stop_string_over_several_tokens_in_a_batch_and_a_stream(speaking: MedusaEngine, spoken: list[int]) -> None:
    """Catches text looked at token by token, and one row's text used for another's."""
    words = [f"w{token}" for token in spoken]
    stops = [f"{words[at]} {words[at + 1]} {words[at + 2]}" for at in (3, 6, 8, 13)]
    params = [SamplingParams(40, stop=stop) for stop in stops]
    prompt = toys.prompt_ids([word_before(spoken)])
    answers = speaking.generate([prompt] * 5, [*params, SamplingParams(40)], batch=3)
    for at, stop, answer in zip((3, 6, 8, 13), stops, answers[:4], strict=True):
        assert answer.tokens == spoken[: at + 3]
        assert answer.stop_reason == stop
        assert answer.text == "".join(word + " " for word in words[:at])
    assert answers[4].tokens == spoken[:40] and answers[4].text is None
    items = list(speaking.stream(prompt, params[1]))
    assert [token for item in items for token in item.tokens] == spoken[:9]
    assert items[-1].generation.text == answers[1].text


def test_a_stop_string_waits_for_min_new_tokens(speaking: MedusaEngine, spoken: list[int]) -> None:
    """Catches a minimum that only end-of-text respects."""
    prompt = toys.prompt_ids([word_before(spoken)])
    stop = f"w{spoken[5]} w{spoken[6]}"
    short, long = (
        speaking.generate([prompt], SamplingParams(20, stop=stop, min_new_tokens=least))[0] for least in (6, 7)
    )
    assert short.tokens == spoken[:7] and short.finish_reason == "stop"
    assert long.tokens == spoken[:20] and long.finish_reason == "length"


def test_stop_strings_without_a_tokenizer_are_refused(toy: LlamaForCausalLM, toy_heads: MedusaHeads) -> None:
    """Catches a stop string that is never looked for."""
    engine = MedusaEngine(toy, toy_heads, chain(3))
    with pytest.raises(InputError, match="there is no tokenizer"):
        engine.generate([[1, 2]], SamplingParams(4, stop="w3"))
    with pytest.raises(InputError, match="has no tokenizer"):
        engine.decode([1])


def test_end_of_text_is_no_part_of_the_text(speaking: MedusaEngine) -> None:
    """Catches an end token decoded into the text, and one that doesn't count as a token."""
    answer = speaking.generate([toys.prompt_ids([2])], SamplingParams(64, stop="never"))[0]
    assert answer.tokens == toys.answer_to(2)
    assert answer.text == " ".join(f"w{token}" for token in answer.tokens[:-1])
    assert (answer.finish_reason, answer.stop_reason) == ("stop", toys.END)
    assert answer.usage == Usage(4, len(answer.tokens))
