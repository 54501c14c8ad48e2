"""Heads of kind "hydra": head k sees the tokens before its own on the path, in training as in a draft."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from medusa_core.acceptance import draw_children
from medusa_core.drafting import Drafter
from medusa_core.errors import InputError
from medusa_core.heads import HeadsConfig, MedusaHeads
from medusa_core.losses import IGNORE, path_tokens
from medusa_core.packing import can_pack
from medusa_core.tree import OFF, Tree, cartesian, chain
from tests import toys

VOCAB, HIDDEN, EMBEDDING = 23, 12, 10
LOPSIDED = Tree.from_choices([[0], [1], [3], [0, 0], [0, 2], [1, 1], [0, 0, 0], [1, 1, 0], [1, 1, 3], [1, 1, 0, 0]])
TREES = [OFF, chain(4), cartesian([3, 2, 1]), LOPSIDED]
LAYOUTS = [
    {"block": block, "lm_head": lm_head, "num_layers": layers}
    for block, lm_head, layers in [
        ("paper", "own", 1),
        ("mlp", "shared", 2),
        ("mlp", "low_rank", 1),
        ("paper", "low_rank", 2),
    ]
]


def random_heads(*, kind: str = "hydra", vocab: int | None = 15, trained: bool = True, **given: Any) -> MedusaHeads:
    """Heads on random weights that all matter, or untrained ones."""
    generator = torch.Generator().manual_seed(0)
    config = HeadsConfig.model_validate(
        {"kind": kind, "num_heads": 4, "vocab": vocab, "mlp_width": 2, "rank": 3, **given}
    )
    heads = MedusaHeads(
        config,
        lm_weight_VD=torch.randn(VOCAB, HIDDEN, generator=generator),
        lm_bias_V=torch.randn(VOCAB, generator=generator),
        embedding_VE=3 * torch.randn(VOCAB, EMBEDDING, generator=generator),
        vocab_map_C=None if vocab is None else torch.randperm(VOCAB, generator=generator)[:vocab],
    )
    if trained:
        for parameter in heads.parameters():
            parameter.data.normal_(generator=generator).mul_(0.5)
    return heads.eval().requires_grad_(False)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_untrained_heads_are_the_lm_head(layout: dict[str, Any], kind: str) -> None:
    """Catches a path, or a change of low rank, that isn't nothing at first."""
    heads = random_heads(kind=kind, trained=False, **layout)
    hidden = torch.randn(5, HIDDEN)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator)
    bias = torch.randn(VOCAB, generator=generator)
    expected = F.linear(hidden, weight[heads.vocab_map_C], bias[heads.vocab_map_C])
    for logits in heads(hidden, torch.randint(VOCAB, (5, 4))):
        torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_head_sees_the_path_up_to_its_own_token_and_no_further(layout: dict[str, Any]) -> None:
    """Catches a head that reads the token it is to predict, one that misses the nearest, and one that mixes places."""
    heads = random_heads(**layout)
    hidden, path = torch.randn(3, HIDDEN), torch.randint(VOCAB, (3, 4))
    before = heads(hidden, path)
    for place, head in itertools.product(range(4), range(4)):
        other = path.clone()
        other[:, place] = (other[:, place] + 1) % VOCAB
        # Column k - 1 is token t + k, and head k (counted from 1) predicts t + k + 1.
        assert torch.equal(heads(hidden, other)[head], before[head]) is (place > head)
    swapped = path[:, [1, 0, 2, 3]]
    assert not torch.allclose(heads(hidden, swapped)[1], before[1])


def test_the_path_in_training_is_the_tokens_that_came() -> None:
    """Catches a shift by one, which training would not notice and every draft would pay for."""
    ids = torch.arange(100, 108)
    labels = torch.stack([ids.roll(-2), ids.roll(-3), ids.roll(-4)], 1)
    labels[5:, 1] = IGNORE
    path = path_tokens(ids.roll(-1), labels)
    assert path[2].tolist() == [103, 104, 105]
    assert path[5].tolist() == [106, 107, 0]


def test_embeddings_are_frozen_and_not_saved() -> None:
    """Catches training that moves the backbone's embeddings, and a checkpoint that carries them."""
    embedding = torch.randn(VOCAB, EMBEDDING, requires_grad=True)
    config = HeadsConfig(kind="hydra", num_heads=2, block="mlp", lm_head="low_rank", rank=3, vocab=None, mlp_width=1)
    heads = MedusaHeads(config, lm_weight_VD=torch.randn(VOCAB, HIDDEN), embedding_VE=embedding)
    labels = torch.randint(VOCAB, (6, 2))
    sums, _ = heads.losses(torch.randn(6, HIDDEN), labels, path_tokens(labels[:, 0], labels))
    sums.sum().backward()
    assert embedding.grad is None
    assert not any("embedding" in name for name in heads.state_dict())
    for name in ("blocks.0.weight_out", "projection.up_KCR"):
        assert heads.get_parameter(name).grad is not None and heads.get_parameter(name).grad.abs().sum() > 0, name


def test_heads_on_larger_embeddings_see_the_same() -> None:
    """Catches embeddings taken as they are: backbones differ a hundredfold in how large they make them."""
    heads = random_heads(block="mlp", lm_head="shared")
    hidden, path = torch.randn(3, HIDDEN), torch.randint(VOCAB, (3, 4))
    before = heads(hidden, path)
    assert heads.path is not None
    heads.path.embedding_VE.mul_(50.0)
    torch.testing.assert_close(heads(hidden, path), before, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_detached_copy_says_the_same(layout: dict[str, Any]) -> None:
    """Catches a copy without the embeddings, the change of low rank, or the LM head under it."""
    heads = random_heads(**layout)
    hidden, path = torch.randn(3, HIDDEN), torch.randint(VOCAB, (3, 4))
    assert torch.equal(heads.detached()(hidden, path), heads(hidden, path))


def test_what_heads_need_and_lack_is_said() -> None:
    """Catches an AttributeError from inside a step."""
    with pytest.raises(InputError, match="input embeddings, and none were given"):
        MedusaHeads(HeadsConfig(kind="hydra", vocab=None), lm_weight_VD=torch.randn(VOCAB, HIDDEN))
    with pytest.raises(InputError, match="tokens on the path"):
        random_heads()(torch.randn(2, HIDDEN))


def path_of(tree: Tree, node: int) -> list[int]:
    """Nodes from the root to this one."""
    path = [node]
    while tree.parents[path[0]] >= 0:
        path.insert(0, tree.parents[path[0]])
    return path


def along(heads: MedusaHeads, hidden_D: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Logits [C] of the head that predicts what comes after these tokens."""
    padded = torch.tensor([tokens + [0] * (heads.num_heads - len(tokens))])
    logits: torch.Tensor = heads(hidden_D[None], padded)[len(tokens) - 1, 0]
    return logits


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("tree", TREES, ids=["off", "chain", "cartesian", "lopsided"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_a_draft_is_what_the_heads_say_along_every_path(
    kind: str, layout: dict[str, Any], tree: Tree, pack: bool
) -> None:
    """Catches embeddings gathered from another branch, another depth's head, ranks read at the wrong parent, rows mixed
    up, and a reordered weight read in its old order."""
    if pack and not can_pack(torch.float32, torch.device("cpu")):
        pytest.skip("this torch build reorders no weights")
    heads = random_heads(kind=kind, **layout)
    hidden_BD, root_B = torch.randn(3, HIDDEN), torch.tensor([4, 0, 19])
    tokens_BN = Drafter(heads, pack=pack).likeliest(hidden_BD, root_B, tree)
    assert tokens_BN[:, 0].tolist() == root_B.tolist()
    for row, node in itertools.product(range(3), range(1, tree.nodes)):
        before = tokens_BN[row, path_of(tree, node)[:-1]].tolist()
        order = heads.vocab_map_C[along(heads, hidden_BD[row], before).argsort(descending=True)]
        assert int(tokens_BN[row, node]) == int(order[tree.ranks_N[node]])


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_draws_come_from_what_the_heads_say_along_every_path(kind: str) -> None:
    """Catches a distribution of another parent's, which rejection would then hold for the draft's own: exactness would
    be lost without a sign."""
    heads = random_heads(kind=kind, block="mlp", lm_head="low_rank")
    hidden_BD, root_B, temperature = torch.randn(2, HIDDEN), torch.tensor([4, 19]), 0.7
    drafter = Drafter(heads, pack=False)
    uniform = torch.rand(2, LOPSIDED.nodes, dtype=torch.float64)
    tokens_BN, draft = draw_children(root_B, drafter.distributions(hidden_BD, LOPSIDED, temperature), LOPSIDED, uniform)
    for row, node in itertools.product(range(2), sorted(set(LOPSIDED.parents[1:]))):
        logits = along(heads, hidden_BD[row], tokens_BN[row, path_of(LOPSIDED, node)].tolist())
        expected = torch.zeros(VOCAB)
        expected[heads.vocab_map_C] = (logits / temperature).softmax(-1)
        torch.testing.assert_close(draft.probs_BGV[row, draft.group_N[node]], expected)
        for child in (n for n in range(LOPSIDED.nodes) if LOPSIDED.parents[n] == node):
            assert float(expected[tokens_BN[row, child]]) > 0


def test_ranks_hold_along_the_true_path() -> None:
    """Catches a calibration of other candidates than those drafted once the path so far was right."""
    heads = random_heads(block="mlp", lm_head="shared")
    hidden, next_P, labels = torch.randn(40, HIDDEN), torch.randint(VOCAB, (40,)), torch.randint(VOCAB, (40, 4))
    path = path_tokens(next_P, labels)
    ranks = heads.ranks(hidden, labels, path, width=6, chunk=16)
    for p, k in itertools.product(range(40), range(4)):
        order = heads.vocab_map_C[along(heads, hidden[p], path[p, : k + 1].tolist()).argsort(descending=True)].tolist()
        at = order.index(int(labels[p, k])) if int(labels[p, k]) in order else 6
        assert int(ranks[p, k]) == min(at, 6)


def test_seeing_the_path_is_worth_something(toy: LlamaForCausalLM) -> None:
    """Catches embeddings that reach no gradient: in a language where a word's token follows from the one before, heads
    that see it beat heads that don't."""
    torch.manual_seed(0)
    # Hidden states that say nothing: what is learnt is learnt from the path.
    tokens = torch.randint(toys.VOCAB, (2000,))
    follows = torch.randperm(toys.VOCAB)
    labels = torch.stack([follows[tokens], follows[follows[tokens]]], 1)
    right = {}
    for kind in ("medusa", "hydra"):
        config = HeadsConfig.model_validate({"kind": kind, "num_heads": 2, "vocab": None, "block": "mlp"})
        heads = MedusaHeads.on(toy, config)
        hidden = torch.zeros(2000, toy.config.hidden_size)
        optimizer = torch.optim.AdamW(heads.parameters(), lr=3e-3)
        for _ in range(60):
            sums, counts = heads.losses(hidden, labels, path_tokens(tokens, labels))
            optimizer.zero_grad()
            (sums / counts).sum().backward()
            optimizer.step()
        right[kind] = (heads.ranks(hidden, labels, path_tokens(tokens, labels), width=1) == 0).float().mean(0)
    assert float(right["hydra"].min()) > 0.95 and float(right["medusa"].max()) < 0.3
