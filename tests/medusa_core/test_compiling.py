"""Compiled steps: the same answers as uncompiled ones, graphs that never mix, and a way back where compiling fails."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from medusa_core import compile_probe
from medusa_core.compiling import can_compile
from medusa_core.engine import MedusaEngine
from medusa_core.errors import InputError
from medusa_core.portfolio import Entry, Portfolio
from medusa_core.sampling import SamplingParams
from medusa_core.tree import OFF, Tree, cartesian, chain
from tests.medusa_core.chaos import VOCAB, chaotic_config, chaotic_llama, greedy, oracle, prompts_of, tiny

TREES = [OFF, chain(3), cartesian([3, 2, 1]), Tree.from_choices([[0], [1], [0, 0]])]


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def engine() -> Iterator[tuple[MedusaEngine, dict[tuple[int, ...], list[int]]]]:
    model = chaotic_llama()
    answers = {tuple(prompt): greedy(model, prompt, 40) for prompt in prompts_of([3, 9, 5, 14])}
    engine = MedusaEngine(model, oracle(model, answers), compile="on", eos_token_ids=[])
    yield engine, answers
    engine.close()


def test_compiled_steps_answer_as_plain_decoding(
    engine: tuple[MedusaEngine, dict[tuple[int, ...], list[int]]],
) -> None:
    """Catches sizes or values of the first call frozen into a graph: trees, contexts, caches and budgets all change
    here, and slots are few enough for the extent to reach them. One graph must serve all trees, another "off"."""
    decoder, answers = engine
    decoder.portfolio = Portfolio((Entry(1, 1, OFF), Entry(1, 64, TREES[2])))
    decoder.warm_up()
    compiled = decoder.compile_seconds
    for tree in TREES:
        for prompt, answer in answers.items():
            for budget in (3, 21, 40):
                session = decoder.session(rows=1, slots=len(prompt) + budget + tree.nodes, tree=tree)
                generation = session.add_request(prompt, SamplingParams(budget)).generation
                while session.active:
                    session.step()
                assert generation.tokens == answer[:budget]
    assert decoder.backbone.steps is not None
    assert len(decoder.backbone.steps._graphs) == 2
    assert decoder.compile_seconds == compiled > 0, "warming up left something to compile"


@pytest.mark.long
def test_compiled_batches_answer_as_their_rows_alone(
    engine: tuple[MedusaEngine, dict[tuple[int, ...], list[int]]],
) -> None:
    """Catches a graph tied to the number of rows: rows start, finish and are replaced, down to one in flight."""
    decoder, answers = engine
    for tree in (TREES[2], OFF):
        session = decoder.session(rows=3, slots=80, tree=tree)
        queue = [(prompt, budget) for budget in (5, 30, 12) for prompt in answers]
        asked, done = {}, {}
        while queue or session.active:
            while queue and session.free:
                prompt, budget = queue.pop(0)
                added = session.add_request(prompt, SamplingParams(budget))
                asked[added.request], done[added.request] = (prompt, budget), added.generation
            session.step()
        for request, (prompt, budget) in asked.items():
            assert done[request].tokens == answers[prompt][:budget]


@pytest.mark.long
def test_two_compiled_engines_in_one_process_keep_their_own_graphs(empty_cache: Path) -> None:
    """Catches a graph of one model answering for another: dynamo finds graphs by code, and ours have no guards."""
    models = [chaotic_llama(), tiny(chaotic_config(num_hidden_layers=1))]
    prompt = [3, 1, 4, 1, 5]
    expected = [greedy(model, prompt, 20) for model in models]
    assert expected[0] != expected[1]
    engines = [MedusaEngine(model, compile="on", eos_token_ids=[]) for model in models]
    for _ in range(2):
        for engine, tokens in zip(engines, expected, strict=True):
            assert engine.generate([prompt], SamplingParams(20))[0].tokens == tokens


def test_without_a_compiler_auto_runs_uncompiled_and_on_says_why(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches an engine that needs a compiler to decode at all."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no-such-compiler" in (can_compile(torch.device("cpu")) or "")
    model = chaotic_llama()
    expected = greedy(model, [1, 2, 3], 5)
    engine = MedusaEngine(model, compile="auto", eos_token_ids=[])
    assert not engine.compiled and "no-such-compiler" in caplog.text
    assert engine.generate([[1, 2, 3]], SamplingParams(5))[0].tokens == expected
    with pytest.raises(InputError, match="no C\\+\\+ compiler"):
        MedusaEngine(model, compile="on")


def test_compile_modes_are_named(toy: PreTrainedModel) -> None:
    """Catches a misspelt mode that silently runs uncompiled."""
    with pytest.raises(InputError, match="'auto', 'on' or 'off'"):
        MedusaEngine(toy, compile="yes")  # type: ignore[arg-type]


class AbortingModel:
    """Stands where a model would: building it again ends the process, as a crashing compiler does."""

    config = SimpleNamespace(to_dict=lambda: {"is": "aborting"})
    dtype, device = torch.float32, torch.device("cpu")

    @classmethod
    def _from_config(cls, config: Any, **kwargs: Any) -> None:
        os.abort()


class Namespace(SimpleNamespace):
    """A configuration that can be pickled."""

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def test_a_compiler_that_aborts_takes_down_the_probe_and_not_the_engine(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a probe in the same process, and one that is made again by every process that follows."""
    model: Any = AbortingModel()
    model.config = Namespace(vocab_size=VOCAB)
    why_not = compile_probe.compiles(model, pack=False, one_row=True)
    assert why_not is not None and "ended by signal 6" in why_not
    monkeypatch.setattr(compile_probe, "_try", lambda *a, **k: pytest.fail("probed twice"))
    assert compile_probe.compiles(model, pack=False, one_row=True) == why_not


def test_where_only_one_row_compiles_several_run_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches steps of a kind that no subprocess has tried compiled all the same, and a kind that is tried twice."""
    asked: list[bool] = []

    def verdict(model: PreTrainedModel, *, pack: bool, attention: str, one_row: bool) -> str | None:
        asked.append(one_row)
        return None if one_row else "it aborts"

    monkeypatch.setattr("medusa_core.engine.compiles", verdict)
    model = chaotic_llama()
    answers = {tuple(prompt): greedy(model, prompt, 12) for prompt in prompts_of([3, 9])}
    decoder = MedusaEngine(model, oracle(model, answers), TREES[2], compile="auto", eos_token_ids=[])
    assert decoder.compiled and asked == [True]
    for tree in (TREES[2], OFF):
        decoder.portfolio = Portfolio.of(tree)
        generated = decoder.generate([list(prompt) for prompt in answers], SamplingParams(12), batch=2)
        assert [answer.tokens for answer in generated] == list(answers.values())
    assert decoder.compile_seconds == 0 and asked == [True, False]
