"""The engine against transformers' own greedy decoding, on a toy whose tokens are really accepted."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from medusa_core.engine import MedusaEngine
from medusa_core.errors import InputError
from medusa_core.heads import HeadsConfig, MedusaHeads
from medusa_core.portfolio import Portfolio
from medusa_core.sampling import Acceptance, SamplingParams
from medusa_core.tree import OFF, Tree, cartesian, chain
from tests import toys

Prompt = list[int]
TREE = cartesian([3, 2, 1])


@pytest.fixture(scope="module")
def reference(toy_dir: Path) -> LlamaForCausalLM:
    """The toy as transformers loads it: no engine has touched it."""
    model = AutoModelForCausalLM.from_pretrained(toy_dir, dtype=torch.float32)
    assert isinstance(model, LlamaForCausalLM)
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def engine(toy: LlamaForCausalLM, heads_of_any_kind: MedusaHeads) -> Iterator[MedusaEngine]:
    engine = MedusaEngine(toy, heads_of_any_kind, TREE)
    yield engine
    engine.close()


def plain(model: LlamaForCausalLM, prompt: Prompt, budget: int, eos: int | None = toys.END) -> list[int]:
    """transformers' greedy answer."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=budget,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=toys.END,
    )
    return list(out[0, len(prompt) :].tolist())


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    paths: list[tuple[int, ...]] = [()]
    for _ in range(draw(st.integers(0, 14))):
        parent = draw(st.sampled_from(paths))
        child = (*parent, draw(st.sampled_from([0, 0, 0, 1, 2, 5])))
        if len(child) <= 3 and child not in paths:
            paths.append(child)
    return Tree.from_choices(paths[1:])


# Words as in a chat, and tokens in no language at all; 1 token is shorter than K + 2.
chats = st.lists(st.integers(0, toys.WORDS - 1), min_size=1, max_size=4).map(toys.prompt_ids)
noise = st.lists(st.integers(0, toys.VOCAB - 1), min_size=1, max_size=9)


def test_headline_greedy_is_plain_greedy_for_every_tree_prompt_and_batch(
    engine: MedusaEngine, reference: LlamaForCausalLM
) -> None:
    """Catches anything lossy: mask, positions, acceptance, compaction, rows mixed up, cuts. Not vacuous: tokens beyond
    the root must have been accepted."""
    known: dict[tuple[int, ...], list[int]] = {}
    beyond_root, steps = 0, 0

    @settings(max_examples=60, derandomize=True, deadline=None, database=None)
    @given(trees(), st.lists(st.one_of(chats, chats, noise), min_size=1, max_size=4), st.integers(1, 3), st.data())
    def run(tree: Tree, prompts: list[Prompt], batch: int, data: st.DataObject) -> None:
        nonlocal beyond_root, steps
        budgets = [data.draw(st.integers(1, 40)) for _ in prompts]
        engine.portfolio = Portfolio.of(tree)
        answers = engine.generate(prompts, [SamplingParams(b) for b in budgets], batch=batch)
        for prompt, budget, answer in zip(prompts, budgets, answers, strict=True):
            if tuple(prompt) not in known:
                known[tuple(prompt)] = plain(reference, prompt, 40)
            expected = known[tuple(prompt)][:budget]
            assert answer.tokens == expected
            assert answer.finish_reason == ("stop" if expected[-1] == toys.END else "length")
            assert answer.prompt_tokens == len(prompt)
            if tree.depth > 1 and answer.steps:
                beyond_root += len(answer.tokens) - 1 - answer.steps
                steps += answer.steps

    try:
        run()
    finally:
        engine.portfolio = Portfolio.of(TREE)
    assert steps > 100
    assert beyond_root / steps > 0.5


def test_rows_of_different_lengths_finish_apart_and_are_replaced(
    engine: MedusaEngine, reference: LlamaForCausalLM
) -> None:
    """Catches a replaced row that keeps the leaver's cache, root or hidden state, and answers out of order."""
    prompts = [toys.prompt_ids([w] * (1 + w % 5)) for w in range(0, toys.WORDS, 4)]
    budgets = [5 + 7 * (i % 4) for i in range(len(prompts))]
    answers = engine.generate(prompts, [SamplingParams(b) for b in budgets], batch=4)
    assert len({len(answer.tokens) for answer in answers}) > 4
    assert {answer.finish_reason for answer in answers} == {"stop", "length"}
    for prompt, budget, answer in zip(prompts, budgets, answers, strict=True):
        assert answer.tokens == plain(reference, prompt, budget)


def test_a_batch_is_slower_by_no_step_than_its_rows_alone(engine: MedusaEngine) -> None:
    """Catches a batch that advances at the pace of its worst row."""
    prompts = [toys.prompt_ids([w]) for w in range(10)]
    alone = [answer.steps for answer in engine.generate(prompts, SamplingParams(64), batch=1)]
    together = [answer.steps for answer in engine.generate(prompts, SamplingParams(64), batch=5)]
    assert together == alone


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 5, 6, 7])
def test_budgets_cut_exactly_even_inside_an_accepted_path(
    engine: MedusaEngine, reference: LlamaForCausalLM, budget: int
) -> None:
    """Catches tokens past the budget: chain(3) accepts up to 4 a step, so most of these budgets end inside a path."""
    prompt = next(toys.prompt_ids([w]) for w in range(toys.WORDS) if len(toys.answer_to(w)) > 20)
    engine.portfolio = Portfolio.of(chain(3))
    answer = engine.generate([prompt], SamplingParams(budget))[0]
    engine.portfolio = Portfolio.of(TREE)
    assert answer.tokens == plain(reference, prompt, budget)
    assert len(answer.tokens) == budget
    assert answer.finish_reason == "length"


def test_end_of_text_inside_an_accepted_path_ends_the_answer(engine: MedusaEngine) -> None:
    """Catches tokens kept after end-of-text; each of these words is treated as one, wherever in a path it falls."""
    word = next(w for w in range(toys.WORDS) if len(toys.answer_to(w)) > 20)
    full = toys.answer_to(word)
    inside = 0
    normal, engine.portfolio = engine.eos, Portfolio.of(chain(3))
    for place in range(1, 12):
        engine.eos = frozenset({full[place]})
        session = engine.session(rows=1, slots=100)
        progress = [session.add_request(toys.prompt_ids([word]), SamplingParams(64))]
        while session.active:
            progress += session.step()
        generation = progress[-1].generation
        assert generation.tokens == full[: place + 1]
        assert generation.finish_reason == "stop"
        assert [t for p in progress for t in p.tokens] == generation.tokens
        # A step that would have gone on: the same step without this end-of-text emits more tokens.
        engine.eos = frozenset()
        longer = engine.session(rows=1, slots=100)
        longer.add_request(toys.prompt_ids([word]), SamplingParams(64))
        for _ in range(generation.steps):
            last = longer.step()
        inside += len(last[0].generation.tokens) > len(generation.tokens)
    engine.eos, engine.portfolio = normal, Portfolio.of(TREE)
    assert inside > 3


def test_several_end_of_text_tokens_and_none(engine: MedusaEngine, toy: LlamaForCausalLM) -> None:
    """Catches a model with two end-of-text ids that stops at the first of them only."""
    word = next(w for w in range(toys.WORDS) if len(toys.answer_to(w)) > 20)
    full = toys.answer_to(word)
    both = MedusaEngine(toy, eos_token_ids=[full[9], full[4]])
    assert both.generate([toys.prompt_ids([word])], SamplingParams(64))[0].tokens == full[:5]
    none = MedusaEngine(toy, eos_token_ids=[])
    assert len(none.generate([toys.prompt_ids([word])], SamplingParams(64))[0].tokens) == 64
    both.close()
    none.close()


def test_token_0_is_a_token_like_any_other(engine: MedusaEngine) -> None:
    """Catches pads of token 0 accepted where token 0 is the argmax, and a 0 taken for "nothing"."""
    before = toys.SUCCESSOR.index(0)
    prompt = toys.prompt_ids([before])
    answer = engine.generate([prompt], SamplingParams(64))[0]
    assert answer.tokens[0] == 0
    assert answer.tokens == toys.answer_to(before)
    two_before = toys.SUCCESSOR.index(before)
    assert engine.generate([toys.prompt_ids([two_before])], SamplingParams(64))[0].tokens == toys.answer_to(two_before)


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_prompts_shorter_than_k_plus_2(engine: MedusaEngine, reference: LlamaForCausalLM, length: int) -> None:
    """Catches heads that need more context than there is."""
    prompt = [toys.ASSISTANT, 5, 9, 13][:length]
    assert engine.generate([prompt], SamplingParams(20))[0].tokens == plain(reference, prompt, 20)


def test_the_context_limit_ends_an_answer(toy_heads: MedusaHeads, reference: LlamaForCausalLM) -> None:
    """Catches positions past the model's last, and tokens lost short of it."""
    model = copy.deepcopy(reference)
    model.config.max_position_embeddings = 24
    engine = MedusaEngine(model, toy_heads, TREE, eos_token_ids=[])
    prompt = toys.prompt_ids([3])
    for room in (1, 2, 17):
        padded = [7] * (24 - room - len(prompt)) + prompt
        answer = engine.generate([padded], SamplingParams(64))[0]
        assert answer.finish_reason == "length"
        assert answer.tokens == plain(reference, padded, room, eos=None)
    with pytest.raises(InputError, match="24 tokens, the model's context is 24"):
        engine.generate([[7] * 24], SamplingParams(1))


def test_streaming_hands_out_every_token_once(engine: MedusaEngine) -> None:
    """Catches a token repeated or swallowed between steps."""
    prompt = toys.prompt_ids([11])
    items = list(engine.stream(prompt, SamplingParams(64)))
    assert [t for item in items for t in item.tokens] == toys.answer_to(11)
    assert items[-1].generation.steps == len(items) - 1
    assert max(len(item.tokens) for item in items) > 1
    assert items[0].generation.ttft_s > 0


def test_sampling_repeats_by_seed_whatever_shares_the_batch(engine: MedusaEngine) -> None:
    """Catches a global generator: a shard could not be made again."""
    prompts = [toys.prompt_ids([w]) for w in range(6)]
    params = [SamplingParams(12, temperature=3.0, top_p=0.95, seed=w) for w in range(6)]
    together = [answer.tokens for answer in engine.generate(prompts, params, batch=3)]
    assert together == [engine.generate([p], s)[0].tokens for p, s in zip(prompts, params, strict=True)]
    other = [SamplingParams(12, temperature=3.0, top_p=0.95, seed=w + 100) for w in range(6)]
    assert [answer.tokens for answer in engine.generate(prompts, other, batch=3)] != together


def test_greedy_and_sampled_requests_share_a_batch(engine: MedusaEngine) -> None:
    """Catches one row's temperature applied to another."""
    prompts = [toys.prompt_ids([w]) for w in range(4)]
    params = [SamplingParams(64), SamplingParams(64, temperature=4.0, seed=1)] * 2
    answers = engine.generate(prompts, params, batch=4)
    for word in (0, 2):
        assert answers[word].tokens == toys.answer_to(word)
    for word in (1, 3):
        assert answers[word].tokens != toys.answer_to(word)


@pytest.mark.parametrize("acceptance", ["exact", "rejection"])
def test_sampling_with_a_tree_follows_the_target_distribution(
    heads_of_any_kind: MedusaHeads, reference: LlamaForCausalLM, acceptance: Acceptance
) -> None:
    """Catches acceptance that favours drafted tokens: triples of tokens against the exact product of conditionals
    (chi-square). A step from the root covers the second and third token, so both accepted and refused ones count."""
    temperature, draws = 1.5, 3000
    model, tree = copy.deepcopy(reference), cartesian([3, 2])
    engine = MedusaEngine(model, heads_of_any_kind, tree, eos_token_ids=[])
    prompt = toys.prompt_ids([8])
    params = [SamplingParams(3, temperature=temperature, seed=seed, acceptance=acceptance) for seed in range(draws)]
    answers = engine.generate([prompt] * draws, params, batch=100)
    accepted = sum(answer.steps == 1 for answer in answers) / draws
    assert 0.1 < accepted < 0.95, accepted

    def conditionals(contexts: list[Prompt]) -> torch.Tensor:
        with torch.no_grad():
            return (model(input_ids=torch.tensor(contexts)).logits[:, -1].double() / temperature).softmax(-1)

    first = conditionals([prompt])[0]
    second = conditionals([[*prompt, a] for a in range(toys.VOCAB)])
    third = conditionals([[*prompt, a, b] for a in range(toys.VOCAB) for b in range(toys.VOCAB)])
    joint = (first[:, None] * second)[..., None] * third.reshape(toys.VOCAB, toys.VOCAB, toys.VOCAB)
    expected = joint.flatten() * draws
    counts = Counter(tuple(answer.tokens) for answer in answers)
    observed = torch.zeros_like(expected)
    for (a, b, c), count in counts.items():
        observed[(a * toys.VOCAB + b) * toys.VOCAB + c] = count
    # Cells too small for chi-square go together.
    large = expected >= 8
    assert int(large.sum()) > 10
    pooled = [torch.cat([t[large], t[~large].sum()[None]]).numpy() for t in (observed, expected)]
    assert stats.chisquare(*pooled).pvalue > 1e-3
    # Every position by itself, so that a fault in one of them isn't averaged away.
    cube, seen = joint * draws, observed.reshape(joint.shape)
    for axes in ((1, 2), (0, 2), (0, 1)):
        want, got = cube.sum(axes), seen.sum(axes)
        big = want >= 8
        rest = [torch.cat([t[big], t[~big].sum()[None]]).numpy() for t in (got, want)]
        assert stats.chisquare(*rest).pvalue > 1e-3


def test_prompts_of_any_lengths_share_a_pass(engine: MedusaEngine, reference: LlamaForCausalLM) -> None:
    """Catches logits, hidden states or keys taken from the padding, and a row that ends at once taking others along."""
    prompts = [toys.prompt_ids([w] * n) for w, n in ((3, 1), (9, 17), (20, 2), (31, 40), (44, 5))]
    ended = toys.prompt_ids([4]) + toys.answer_to(4)[:-1]
    budgets = [30, 1, 30, 12, 30, 30]
    session = engine.session(rows=6, slots=120)
    added = session.add_requests([*zip([*prompts, ended], map(SamplingParams, budgets), strict=True)])
    assert [item.generation.finish_reason for item in added] == [None, "length", None, None, None, "stop"]
    assert session.active == 4
    while session.active:
        session.step()
    for prompt, budget, item in zip([*prompts, ended], budgets, added, strict=True):
        assert item.generation.tokens == plain(reference, prompt, budget)
    assert sum(item.generation.steps for item in added) < sum(len(item.generation.tokens) for item in added) / 1.5


def test_requests_are_taken_all_or_none(engine: MedusaEngine) -> None:
    """Catches a group of which some run before one is refused."""
    session = engine.session(rows=2, slots=40)
    fitting = (toys.prompt_ids([1]), SamplingParams(4))
    with pytest.raises(InputError, match="exceed the session's 40 slots"):
        session.add_requests([fitting, (toys.prompt_ids([1]), SamplingParams(400))])
    with pytest.raises(InputError, match="3 more requests, but 2 of 2 rows are free"):
        session.add_requests([fitting] * 3)
    assert session.active == 0 and session.add_requests([]) == []


def test_cancelling_frees_a_row_and_disturbs_no_other(engine: MedusaEngine) -> None:
    """Catches a cancelled row whose removal shifts another row's state."""
    session = engine.session(rows=3, slots=100)
    added = [session.add_request(toys.prompt_ids([w]), SamplingParams(64)) for w in (1, 2, 4)]
    session.step()
    session.cancel(added[0].request)
    assert added[0].generation.finish_reason == "cancelled"
    assert (session.active, session.free) == (2, 1)
    added.append(session.add_request(toys.prompt_ids([5]), SamplingParams(64)))
    while session.active:
        session.step()
    for word, item in zip((2, 4, 5), added[1:], strict=True):
        assert item.generation.tokens == toys.answer_to(word)
    with pytest.raises(InputError, match="request 0 is not active"):
        session.cancel(added[0].request)


def test_a_session_refuses_what_it_cannot_hold(engine: MedusaEngine) -> None:
    """Catches an overflow found only steps later, with answers half done."""
    session = engine.session(rows=1, slots=24)
    with pytest.raises(InputError, match="the prompt has no tokens"):
        session.add_request([], SamplingParams(4))
    with pytest.raises(InputError, match=r"prompt \(4\) \+ max_new_tokens \(40\).* exceed the session's 24 slots"):
        session.add_request(toys.prompt_ids([1]), SamplingParams(40))
    assert session.step() == []
    session.add_request(toys.prompt_ids([1]), SamplingParams(4))
    with pytest.raises(InputError, match="1 more requests, but 0 of 1 rows are free"):
        session.add_request(toys.prompt_ids([2]), SamplingParams(4))
    with pytest.raises(InputError, match="2 prompts, but 1 sets"):
        engine.generate([[1], [2]], [SamplingParams(4)])
    assert engine.generate([], SamplingParams(4)) == []


def test_a_session_with_the_least_slots_holds_the_longest_answer(engine: MedusaEngine) -> None:
    """Catches a slot count that is one short when the last step starts just below the budget."""
    word = next(w for w in range(toys.WORDS) if len(toys.answer_to(w)) > 30)
    for budget in range(1, 20):
        prompt = toys.prompt_ids([word])
        session = engine.session(rows=1, slots=engine.slots_for([prompt], [SamplingParams(budget)]))
        generation = session.add_request(prompt, SamplingParams(budget)).generation
        while session.active:
            session.step()
        assert generation.tokens == toys.answer_to(word)[:budget]


def test_a_tree_that_the_heads_cannot_draft_is_refused(
    toy: LlamaForCausalLM, toy_heads: MedusaHeads, engine: MedusaEngine
) -> None:
    """Catches a bare IndexError from the middle of a step, from the engine's tree and from a session's."""
    with pytest.raises(InputError, match="4 deep, but there are 3 heads"):
        MedusaEngine(toy, toy_heads, chain(4))
    with pytest.raises(InputError, match="rank 64, but ranks stop at 63"):
        MedusaEngine(toy, toy_heads, Tree.from_choices([[64]]))
    with pytest.raises(InputError, match="a tree needs heads"):
        MedusaEngine(toy, None, chain(1))
    with pytest.raises(InputError, match="4 deep"):
        engine.session(rows=1, slots=50, tree=chain(4))
    with pytest.raises(InputError, match="rank 64"):
        engine.session(rows=1, slots=50, tree=Tree.from_choices([[64]]))


@pytest.mark.parametrize("lm_head", ["own", "shared", "low_rank"])
@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_a_truncated_vocabulary_drafts_real_tokens(
    toy: LlamaForCausalLM, reference: LlamaForCausalLM, kind: str, lm_head: str
) -> None:
    """Catches head indices used as token ids: lossless all the same, but then nothing is ever accepted."""
    vocab_map = [*range(toys.WORDS - 1, 9, -1), toys.END]
    config = HeadsConfig.model_validate(
        {
            "num_heads": 3,
            "vocab": len(vocab_map),
            "lm_head": lm_head,
            "block": "paper" if lm_head == "own" else "mlp",
            "kind": kind,
        }
    )
    heads = toys.train_heads(toy, config, vocab_map=vocab_map)
    engine = MedusaEngine(toy, heads, TREE)
    prompts = [toys.prompt_ids([w]) for w in range(0, toys.WORDS, 3)]
    answers = engine.generate(prompts, SamplingParams(64), batch=4)
    engine.close()
    assert [a.tokens for a in answers] == [plain(reference, p, 64) for p in prompts]
    # Every drafted word is a word of the map, so words 0..9 are never drafted, and most others are accepted.
    assert sum(len(a.tokens) - 1 for a in answers) / sum(a.steps for a in answers) > 1.5


def test_packed_layers_answer_the_same(heads_of_any_kind: MedusaHeads, reference: LlamaForCausalLM) -> None:
    """Catches a reordered weight that is read in its old order, or a layer left out."""
    engine = MedusaEngine(copy.deepcopy(reference), heads_of_any_kind, TREE, pack=True)
    prompts = [toys.prompt_ids([w]) for w in range(0, toys.WORDS, 7)]
    answers: Sequence[list[int]] = [a.tokens for a in engine.generate(prompts, SamplingParams(64), batch=3)]
    assert answers == [plain(reference, p, 64) for p in prompts]
    assert not any(type(module) is torch.nn.Linear for module in engine.model.modules())


def test_a_model_still_generates_as_before_under_an_engine(
    engine: MedusaEngine, toy: LlamaForCausalLM, reference: LlamaForCausalLM
) -> None:
    """Catches padding silently lost: left-padded batches go through our attention with transformers' own mask."""
    prompts = [toys.prompt_ids([4, 9, 23]), toys.prompt_ids([17])]
    width = max(len(p) for p in prompts)
    ids = torch.tensor([[toys.END] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    out = [
        model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False, pad_token_id=toys.END)
        for model in (toy, reference)
    ]
    assert toy.config._attn_implementation == "medusa_tree" != reference.config._attn_implementation
    assert torch.equal(*out)


def test_step_seconds_add_up(engine: MedusaEngine) -> None:
    """Catches a part of the step that isn't timed."""
    before = engine.seconds.steps
    answer = engine.generate([toys.prompt_ids([2])], SamplingParams(64))[0]
    assert engine.seconds.steps - before == answer.steps
    assert min(engine.seconds.draft, engine.seconds.verify, engine.seconds.accept) > 0


def test_off_is_one_token_a_step(engine: MedusaEngine) -> None:
    """Catches a tree that is not off when it says so."""
    engine.portfolio = Portfolio.of(OFF)
    answer = engine.generate([toys.prompt_ids([2])], SamplingParams(64))[0]
    engine.portfolio = Portfolio.of(TREE)
    assert answer.tokens == toys.answer_to(2)
    assert answer.tokens_per_step == 1.0
