"""Heads: untrained they are the LM head, and their vocabulary is mapped to the right tokens."""

from __future__ import annotations

import itertools
from typing import Literal

import pytest
import torch
from pydantic import ValidationError
from transformers import LlamaForCausalLM

from medusa_core.errors import InputError
from medusa_core.heads import HeadsConfig, MedusaHeads
from medusa_core.losses import IGNORE
from tests import toys

VOCAB, HIDDEN = 37, 12


def lm_head(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(VOCAB, HIDDEN, generator=generator), torch.randn(VOCAB, generator=generator)


def random_map(size: int, seed: int = 0) -> torch.Tensor:
    """Distinct tokens in no particular order."""
    return torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[:size]


@pytest.mark.parametrize(
    ("lm", "block", "layers", "bias", "vocab"),
    list(itertools.product(["own", "shared"], ["paper", "mlp"], [1, 2], [False, True], [None, 9])),
)
def test_an_untrained_head_is_the_lm_head(lm: str, block: str, layers: int, bias: bool, vocab: int | None) -> None:
    """Catches a random block bias, an LM head not copied (or its bias lost), and rows in another order than the map."""
    weight, lm_bias = lm_head()
    config = HeadsConfig.model_validate(
        {"lm_head": lm, "block": block, "num_layers": layers, "num_heads": 3, "vocab": vocab, "mlp_width": 2}
    )
    mapped = None if vocab is None else random_map(vocab)
    heads = MedusaHeads(config, lm_weight_VD=weight, lm_bias_V=lm_bias if bias else None, vocab_map_C=mapped)
    hidden = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1))
    rows = torch.arange(VOCAB) if mapped is None else mapped
    expected = torch.nn.functional.linear(hidden, weight[rows], lm_bias[rows] if bias else None)
    logits = heads(hidden)
    assert logits.shape == (3, 5, len(rows))
    for head in range(3):
        assert torch.equal(logits[head], expected)


@pytest.mark.parametrize("block", ["paper", "mlp"])
def test_stacked_blocks_are_different_modules(block: str) -> None:
    """Catches the reference's one module repeated L times."""
    weight, _ = lm_head()
    config = HeadsConfig.model_validate({"num_layers": 2, "block": block, "vocab": None})
    heads = MedusaHeads(config, lm_weight_VD=weight)
    first, second = heads.blocks
    assert first is not second
    shared = {p.data_ptr() for p in first.parameters()} & {p.data_ptr() for p in second.parameters()}
    assert not shared


@pytest.mark.parametrize("block", ["paper", "mlp"])
def test_every_head_and_block_has_parameters_of_its_own(block: str) -> None:
    """Catches heads that share a block: moving head 1's must move head 1's logits and no other's, in either block."""
    weight, _ = lm_head()
    config = HeadsConfig.model_validate({"num_layers": 2, "block": block, "vocab": None, "num_heads": 3})
    heads = MedusaHeads(config, lm_weight_VD=weight)
    hidden = torch.randn(4, HIDDEN)
    before = heads(hidden)
    for stacked in heads.blocks:
        last = stacked.weight if stacked.weight_out is None else stacked.weight_out
        with torch.no_grad():
            last[1] += 0.1 * torch.randn_like(last[1])
        after = heads(hidden)
        assert [not torch.equal(a, b) for a, b in zip(after, before, strict=True)] == [False, True, False]
        before = after


def test_a_paper_block_is_the_papers_equation() -> None:
    """Catches SiLU on the wrong side of the product, and a weight used transposed."""
    weight, _ = lm_head()
    heads = MedusaHeads(HeadsConfig(num_heads=2, vocab=None), lm_weight_VD=weight)
    block = heads.blocks[0]
    with torch.no_grad():
        block.weight.normal_()
        block.bias.normal_()
    hidden = torch.randn(4, HIDDEN)
    for k in range(2):
        inner = torch.nn.functional.silu(hidden @ block.weight[k].T + block.bias[k]) + hidden
        torch.testing.assert_close(heads(hidden)[k], inner @ weight.T)


def test_a_truncated_vocabulary_names_the_right_tokens() -> None:
    """Catches head indices handed out as token ids, and a map applied to the wrong axis."""
    weight, _ = lm_head()
    mapped = random_map(9)
    heads = MedusaHeads(HeadsConfig(num_heads=2, vocab=9), lm_weight_VD=weight, vocab_map_C=mapped)
    hidden = torch.randn(6, HIDDEN)
    logits = hidden @ weight.T
    allowed = torch.full((VOCAB,), float("-inf"))
    allowed[mapped] = 0.0
    expected = (logits + allowed).topk(4, dim=-1).indices
    top = heads.ranked(heads(hidden), 4)
    assert top.shape == (6, 2, 4)
    assert torch.equal(top[:, 0], expected)
    assert torch.equal(top[:, 1], expected)


def test_ranks_agree_with_the_tokens_drafted() -> None:
    """Catches a rank table that describes other candidates than the engine drafts, a token outside the vocabulary
    taken for a hit, and a missing label taken for a miss."""
    weight, _ = lm_head()
    mapped = random_map(9)
    heads = MedusaHeads(HeadsConfig(num_heads=2, vocab=9), lm_weight_VD=weight, vocab_map_C=mapped)
    with torch.no_grad():
        heads.blocks[0].weight.normal_()
    hidden = torch.randn(700, HIDDEN)
    labels = torch.randint(VOCAB, (700, 2))
    labels[::5, 1] = IGNORE
    ranks = heads.ranks(hidden, labels, width=4, chunk=256)
    top = heads.ranked(heads(hidden), 4)
    known = set(mapped.tolist())
    outcomes = set()
    for p, k in itertools.product(range(700), range(2)):
        label, candidates = int(labels[p, k]), top[p, k].tolist()
        expected = -1 if label == IGNORE else candidates.index(label) if label in candidates else 4
        assert int(ranks[p, k]) == expected
        outcomes.add((expected, label in known))
    assert {(-1, False), (0, True), (3, True), (4, True), (4, False)} <= outcomes


def test_fewer_heads_are_the_first_ones() -> None:
    """Catches a shallow tree that is drafted by the wrong heads."""
    weight, _ = lm_head()
    heads = MedusaHeads(HeadsConfig(num_heads=3, vocab=None), lm_weight_VD=weight)
    with torch.no_grad():
        heads.blocks[0].weight.normal_()
    hidden = torch.randn(4, HIDDEN)
    torch.testing.assert_close(heads(hidden, num_heads=2), heads(hidden)[:2])


def test_training_cannot_touch_a_shared_lm_head() -> None:
    """Catches the reference's shared layout, whose training moved the LM head and then threw the update away."""
    weight, bias = lm_head()
    heads = MedusaHeads(HeadsConfig(num_heads=2, lm_head="shared", vocab=None), lm_weight_VD=weight, lm_bias_V=bias)
    assert not any("projection" in name for name, _ in heads.named_parameters())
    assert not any("projection" in name for name in heads.state_dict())


@pytest.mark.parametrize("lm_head", ["own", "shared"])
def test_a_detached_copy_says_the_same_and_shares_nothing(lm_head: Literal["own", "shared"]) -> None:
    """Catches a shared projection, or a bias, that the copy has as zeros, and hooks that come along."""
    torch.manual_seed(0)
    config = HeadsConfig(num_heads=2, lm_head=lm_head, block="mlp", vocab=5)
    heads = MedusaHeads(
        config, lm_weight_VD=torch.randn(9, 4), lm_bias_V=torch.randn(9), vocab_map_C=torch.tensor([1, 2, 4, 6, 8])
    )
    for parameter in heads.parameters():
        parameter.data.normal_()
    heads.blocks[0].register_forward_hook(lambda *a: pytest.fail("a hook came along"))
    hidden = torch.randn(3, 4)
    copy = heads.detached()
    said = copy(hidden)
    heads.blocks[0]._forward_hooks.clear()
    assert torch.equal(said, heads(hidden))
    heads.blocks[0].bias.data += 1
    assert torch.equal(said, copy(hidden)) and not any(p.requires_grad for p in copy.parameters())


def test_trained_heads_leave_the_backbone_as_it_was(toy: LlamaForCausalLM, toy_heads: MedusaHeads) -> None:
    """Catches own projections that alias the LM head."""
    before = toy.get_output_embeddings().weight.clone()
    heads = toys.train_heads(toy, HeadsConfig(num_heads=2, vocab=None), steps=1)
    assert torch.equal(toy.get_output_embeddings().weight, before)
    assert not torch.equal(heads.projection.weight[0], before)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "no vocabulary map was given"),
        (torch.arange(4), "4 entries, 4 of them distinct; heads.vocab asks for 5"),
        (torch.tensor([0, 1, 2, 3, 3]), "5 entries, 4 of them distinct"),
        (torch.tensor([0, 1, 2, 3, VOCAB]), f"outside 0..{VOCAB - 1}"),
        (torch.tensor([-1, 1, 2, 3, 4]), f"outside 0..{VOCAB - 1}"),
    ],
)
def test_a_bad_vocabulary_map_is_refused(given: torch.Tensor | None, message: str) -> None:
    """Catches heads that would draft tokens that don't exist, or one token twice."""
    weight, _ = lm_head()
    with pytest.raises(InputError, match=message):
        MedusaHeads(HeadsConfig(vocab=5), lm_weight_VD=weight, vocab_map_C=given)


def test_a_vocabulary_as_large_as_the_backbones_needs_no_map() -> None:
    """Catches the default of 8192 failing on a smaller backbone."""
    weight, _ = lm_head()
    heads = MedusaHeads(HeadsConfig(vocab=8192), lm_weight_VD=weight)
    assert heads.vocab_map_C.tolist() == list(range(VOCAB))


@pytest.mark.parametrize("wrong", [{"kind": "eagle"}, {"num_heads": 0}, {"num_layers": 0}, {"blocks": 2}, {"vocab": 0}])
def test_a_bad_configuration_is_refused(wrong: dict[str, object]) -> None:
    """Catches misspelt keys that would silently mean the default."""
    with pytest.raises(ValidationError):
        HeadsConfig.model_validate(wrong)
