"""What a request may ask for, and that the target's logits are processed as transformers' generate does, at every node
with that node's own context."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from medusa_core.errors import InputError
from medusa_core.sampling import SamplingParams, process_nodes, processors_for
from medusa_core.tree import OFF, Tree

VOCAB, END = 32, 5
BUSHY = Tree.from_choices(
    [[0], [1], [2], [0, 0], [0, 1], [1, 0], [2, 3], [0, 0, 0], [0, 0, 2], [2, 3, 1], [2, 3, 1, 0]]
)


def test_the_first_fields_by_position_and_by_their_old_names() -> None:
    """Catches a new field put before the old ones, which changes what callers' positions mean."""
    assert SamplingParams(64).max_new_tokens == 64
    assert SamplingParams(12, 0.5, 0.9, 7) == SamplingParams(12, temperature=0.5, top_p=0.9, seed=7)


def test_lists_and_a_lone_string_become_tuples() -> None:
    """Catches a lone stop string taken for a sequence of its letters, and parameters that follow the caller's list or
    dict when it changes later."""
    ids, bias = [3], {4: 1.0}
    params = SamplingParams(stop="END", stop_token_ids=ids, logit_bias=bias)
    ids.append(9)
    bias[9] = 2.0
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("END",), (3,), {4: 1.0})
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


def test_parameters_can_be_hashed_replaced_and_sent_to_another_process() -> None:
    """Catches a field that makes parameters useless as a key, or that a worker process can't receive."""
    params = SamplingParams(8, stop="x", logit_bias={1: 2.0}, logits_processor=[NoRepeatNGramLogitsProcessor(2)])
    assert hash(params) == hash(replace(params))
    assert replace(params, max_new_tokens=4).stop == ("x",)
    assert pickle.loads(pickle.dumps(replace(params, logits_processor=None))).logit_bias == {1: 2.0}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": 4, "min_new_tokens": 5}, r"min_new_tokens is 5.*\(4\)"),
        ({"min_new_tokens": -1}, "min_new_tokens is -1"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"n": 0}, "n is 0"),
        ({"n": 2}, "n is 2 at temperature 0"),
        ({"stop": ""}, "stop has ''"),
        ({"stop": ["a", ""]}, "stop has ''"),
        ({"stop_token_ids": [-1]}, "stop_token_ids has -1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"logit_bias": {"7": 1.0}}, "logit_bias has token '7'"),
        ({"logit_bias": {7: math.inf}}, "logit_bias of token 7 is inf"),
        ({"logit_bias": {7: math.nan}}, "logit_bias of token 7 is nan"),
        ({"acceptance": "greedy"}, "acceptance is 'greedy'; choose one of exact, rejection, typical"),
        ({"epsilon": 0.0}, "epsilon is 0.0"),
        ({"delta": -1.0}, "delta is -1.0"),
        ({"logits_processor": NoRepeatNGramLogitsProcessor(2)}, "give a list of processors"),
        ({"logits_processor": [3]}, "give a list of processors"),
    ],
)
def test_what_cant_be_meant_is_refused(fields: dict[str, Any], named: str) -> None:
    """Catches a value that goes through and fails, or means nothing, deep in the decode step."""
    with pytest.raises(InputError, match=named):
        SamplingParams(**fields)


@pytest.mark.parametrize("acceptance", ["rejection", "typical"])
def test_every_acceptance_may_be_asked_for_greedily(acceptance: Any) -> None:
    """Catches a server's default acceptance that makes greedy requests an error."""
    assert SamplingParams(acceptance=acceptance).temperature == 0


def _processors(params: SamplingParams, prompt_tokens: int = 3, eos: tuple[int, ...] = (END,)) -> LogitsProcessorList:
    return processors_for(params, prompt_tokens=prompt_tokens, eos_token_ids=eos, vocab_size=VOCAB, device="cpu")


def test_nothing_asked_is_no_processor_and_untouched_logits() -> None:
    """Catches the plain request paying for processing: a copy to float32 of all nodes' logits."""
    processors = _processors(SamplingParams(stop_token_ids=[3]))
    assert processors == []
    logits = torch.randn(1, VOCAB, dtype=torch.bfloat16)
    context, tokens = torch.tensor([1]), torch.tensor([1])
    assert process_nodes(logits, context_T=context, tokens_N=tokens, tree=OFF, processors=processors) is logits


@pytest.mark.parametrize(("field", "value"), [("logit_bias", {VOCAB: 1.0}), ("stop_token_ids", [VOCAB])])
def test_an_id_past_the_vocabulary_is_refused(field: str, value: Any) -> None:
    """Catches a bias that fails in the middle of the first step, and a stop token that can never come."""
    with pytest.raises(InputError, match=rf"{field} has token 32; the vocabulary's ids are 0 .. 31"):
        _processors(SamplingParams(**{field: value}))


def test_stop_tokens_wait_for_min_new_tokens_as_end_of_text_does() -> None:
    """Catches an answer cut short by a stop token that only end-of-text's rule kept out, a count that includes the
    prompt, and an off-by-one at the first token that may end the answer."""
    processors = _processors(SamplingParams(min_new_tokens=2, stop_token_ids=[9]))
    forbidden = []
    for new in range(4):
        scores = processors(torch.zeros(1, 3 + new, dtype=torch.int64), torch.zeros(1, VOCAB))
        forbidden.append(scores[0].isinf().nonzero()[:, 0].tolist())
    assert forbidden == [[5, 9], [5, 9], [], []]


def test_min_new_tokens_where_nothing_ends_an_answer() -> None:
    """Catches an error for a model without end-of-text."""
    assert _processors(SamplingParams(min_new_tokens=2), eos=()) == []


class _Seesaw:
    """A caller's processor that writes into its scores: odd tokens after even ones."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        even = torch.arange(scores.shape[-1]) % 2 == 0
        scores[(input_ids[:, -1:] % 2 == 0) & even] -= 3.0
        return scores


@pytest.mark.parametrize("tree", [OFF, Tree.from_choices([[0], [0, 0]]), BUSHY])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_node_is_processed_with_its_own_context(tree: Tree, dtype: torch.dtype) -> None:
    """Catches a node that sees its siblings' tokens, its own depth off by one (min_new_tokens ends within the tree), a
    penalty that misses drafted tokens, levels put back in another order, and logits changed in place."""
    generator = torch.Generator().manual_seed(0)
    prompt, generated = [1, 2, 3], [4, 6]
    params = SamplingParams(
        min_new_tokens=4,
        stop_token_ids=[8],
        repetition_penalty=1.4,
        logit_bias={2: 1.5, 7: -2.0},
        logits_processor=[NoRepeatNGramLogitsProcessor(2), _Seesaw()],
    )
    processors = _processors(params)
    tokens = torch.randint(0, 10, (tree.nodes,), generator=generator)
    tokens[0] = generated[-1]
    logits = torch.randn(tree.nodes, VOCAB, generator=generator, dtype=torch.float64).to(dtype)
    kept = logits.clone()
    context = torch.tensor(prompt + generated)
    processed = process_nodes(logits, context_T=context, tokens_N=tokens, tree=tree, processors=processors)
    assert torch.equal(logits, kept)
    assert processed.dtype == torch.float32
    for node in range(tree.nodes):
        below, here = [], node
        while here:
            below.insert(0, int(tokens[here]))
            here = tree.parents[here]
        alone = processors(torch.tensor([prompt + generated + below]), logits[node : node + 1].float().clone())
        assert torch.equal(processed[node], alone[0]), node


def test_a_processor_that_writes_into_its_scores_leaves_the_logits_alone() -> None:
    """Catches logits that are processed twice when they are read again, as they are float32 already."""
    logits = torch.zeros(BUSHY.nodes, VOCAB)
    tokens = torch.zeros(BUSHY.nodes, dtype=torch.int64)
    processors = _processors(SamplingParams(logits_processor=[_Seesaw()]))
    processed = process_nodes(logits, context_T=tokens[:1], tokens_N=tokens, tree=BUSHY, processors=processors)
    assert processed.any() and not logits.any()


@pytest.fixture(scope="module")
def tiny() -> LlamaForCausalLM:
    """A random model whose logits are wide enough apart that processors, not rounding, decide."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=END,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "penalty": ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
    "bias": ({"logit_bias": {4: 3.0, 11: -5}}, {"sequence_bias": [[[4], 3.0], [[11], -5.0]]}),
    "at least 5": (
        {"min_new_tokens": 5, "logit_bias": {END: 50.0}},
        {"min_new_tokens": 5, "sequence_bias": [[[END], 50.0]]},
    ),
    "stop token": (
        {"min_new_tokens": 3, "stop_token_ids": [9], "logit_bias": {9: 50.0}},
        {"min_new_tokens": 3, "eos_token_id": [END, 9], "sequence_bias": [[[9], 50.0]]},
    ),
    "the caller's": ({"logits_processor": [_Seesaw()]}, {"logits_processor": [_Seesaw()]}),
    "the caller's penalty for ours": (
        {"repetition_penalty": 5.0, "logits_processor": [RepetitionPenaltyLogitsProcessor(0.5)]},
        {"repetition_penalty": 5.0, "logits_processor": [RepetitionPenaltyLogitsProcessor(0.5)]},
    ),
    "all": (
        {
            "repetition_penalty": 1.3,
            "logit_bias": {4: 6.0, END: 4.0},
            "min_new_tokens": 5,
            "logits_processor": [_Seesaw(), NoRepeatNGramLogitsProcessor(2)],
        },
        {
            "repetition_penalty": 1.3,
            "sequence_bias": [[[4], 6.0], [[END], 4.0]],
            "min_new_tokens": 5,
            "logits_processor": [_Seesaw(), NoRepeatNGramLogitsProcessor(2)],
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_processed_argmax_is_what_generate_emits(tiny: LlamaForCausalLM, case: str) -> None:
    """Catches an order of processors, a sign, a count of tokens or a precedence that differs from transformers'
    generate; the first token after the prompt included."""
    ours, theirs = CASES[case]
    params = SamplingParams(12, **ours)
    ends = {END, *params.stop_token_ids}
    changed = 0
    for prompt in ([7, 3, 20], [1], [30, 30, 2, 9]):
        eos = {"eos_token_id": END} | theirs
        ids = torch.tensor([prompt])
        kwargs: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
        wanted = tiny.generate(ids, **kwargs, **eos)[0, len(prompt) :].tolist()
        plain = tiny.generate(ids, **kwargs)[0, len(prompt) :].tolist()
        processors = _processors(params, prompt_tokens=len(prompt))
        tokens: list[int] = []
        while len(tokens) < 12 and not ends & set(tokens):
            context = torch.tensor(prompt + tokens)
            logits = tiny(input_ids=context[None]).logits[0, -1:]
            scores = process_nodes(logits, context_T=context, tokens_N=context[-1:], tree=OFF, processors=processors)
            tokens.append(int(scores.argmax()))
        assert tokens == wanted, prompt
        changed += tokens != plain
    assert changed, "the case changes nothing, so it tests nothing"
