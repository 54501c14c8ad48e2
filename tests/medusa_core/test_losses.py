"""Labels go to the right positions, and the chunked cross-entropy is the plain one."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from medusa_core.heads import HeadsConfig, MedusaHeads
from medusa_core.losses import IGNORE, head_labels, head_weights, linear_cross_entropy, weighted_loss


def test_only_the_right_shift_can_be_learnt() -> None:
    """Catches labels shifted by one in either direction.

    In a de Bruijn-like stream of random tokens, the hidden state of position t is a one-hot code of exactly token
    t+k+1 for one k; a head trained on any other shift sees noise that it can't predict.
    """
    torch.manual_seed(0)
    vocab, heads_count = 8, 3
    tokens = torch.randint(vocab, (600,))
    labels = head_labels(tokens, torch.ones(600, dtype=torch.bool), heads_count)
    for k in range(1, heads_count + 1):
        hidden = torch.zeros(600, vocab)
        hidden[: 600 - k - 1] = F.one_hot(tokens[k + 1 :], vocab).float()
        heads = MedusaHeads(HeadsConfig(num_heads=heads_count, vocab=None), lm_weight_VD=torch.zeros(vocab, vocab))
        optimizer = torch.optim.Adam(heads.parameters(), lr=0.1)
        for _ in range(30):
            sums, counts = heads.losses(hidden[:400], labels[:400])
            optimizer.zero_grad()
            (sums / counts).sum().backward()
            optimizer.step()
        sums, counts = heads.losses(hidden[400:], labels[400:])
        held_out = sums / counts
        for other in range(heads_count):
            assert bool(held_out[other] < 0.1) is (other == k - 1), (k, held_out.tolist())


@settings(max_examples=80, derandomize=True, deadline=None)
@given(st.lists(st.booleans(), max_size=14), st.integers(1, 5))
def test_labels_exist_exactly_where_the_whole_span_was_generated(mask: list[bool], heads: int) -> None:
    """Catches a prompt token trained on, a span across a user's turn, and a short sequence that raises."""
    tokens = torch.arange(100, 100 + len(mask))
    labels = head_labels(tokens, torch.tensor(mask, dtype=torch.bool), heads)
    assert labels.shape == (len(mask), heads)
    for t, k in itertools.product(range(len(mask)), range(1, heads + 1)):
        inside = t + k + 1 < len(mask) and all(mask[t + 1 : t + k + 2])
        assert int(labels[t, k - 1]) == (100 + t + k + 1 if inside else IGNORE)


def test_prompt_tokens_are_never_labels() -> None:
    """Catches the reference's prompt mask, which is always true."""
    labels = head_labels(torch.arange(8), torch.tensor([0, 0, 0, 1, 1, 1, 0, 0], dtype=torch.bool), 2)
    assert labels.tolist() == [
        [IGNORE, IGNORE],
        [IGNORE, IGNORE],
        [4, 5],
        [5, IGNORE],
        *[[IGNORE, IGNORE]] * 4,
    ]


@pytest.mark.parametrize("length", range(6))
def test_samples_shorter_than_k_plus_2_have_fewer_labels_and_no_error(length: int) -> None:
    """Catches a negative slice that wraps round."""
    labels = head_labels(torch.arange(length), torch.ones(length, dtype=torch.bool), 4)
    counts = (labels != IGNORE).sum(0).tolist()
    assert counts == [max(0, length - k - 1) for k in range(1, 5)]


def test_the_weights_and_the_weighted_sum_are_the_papers() -> None:
    """Catches λ starting at 1, and a sum over positions instead of a mean per head."""
    torch.testing.assert_close(head_weights(3), torch.tensor([0.8, 0.64, 0.512]))
    loss = weighted_loss(torch.tensor([6.0, 8.0, 0.0]), torch.tensor([2, 4, 0]), head_weights(3))
    torch.testing.assert_close(loss, torch.tensor(0.8 * 3 + 0.64 * 2))


def random_case(
    seed: int, dtype: torch.dtype = torch.float64, *, own: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs of two heads, a weight and a bias for both or each, and labels."""
    generator = torch.Generator().manual_seed(seed)
    heads = (2,) if own else ()
    x = torch.randn(2, 23, 6, generator=generator, dtype=dtype)
    weight = torch.randn(*heads, 11, 6, generator=generator, dtype=dtype)
    bias = torch.randn(*heads, 11, generator=generator, dtype=dtype)
    labels = torch.randint(11, (23, 2), generator=generator)
    labels[::4], labels[5, 1] = IGNORE, IGNORE
    return x, weight, bias, labels


@pytest.mark.parametrize("chunk", [1, 4, 17, 1000])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=3)))
def test_chunked_cross_entropy_is_the_plain_one(
    chunk: int, with_bias: bool, own: bool, needs: tuple[bool, bool, bool]
) -> None:
    """Catches a chunk dropped or counted twice, an ignored row that teaches, a gradient left at zero, and heads whose
    factors or gradients are mixed up."""
    x, weight, bias, labels = random_case(0, own=own)
    inputs = [x, weight, bias][: 3 if with_bias else 2]
    ours = [t.clone().requires_grad_(need) for t, need in zip(inputs, needs, strict=False)]
    plain = [t.clone().requires_grad_(need) for t, need in zip(inputs, needs, strict=False)]
    value = linear_cross_entropy(ours[0], ours[1], ours[2] if with_bias else None, labels, chunk=chunk)
    logits = plain[0] @ plain[1].mT + (plain[2][..., None, :] if with_bias else 0.0)
    expected = torch.stack(
        [F.cross_entropy(logits[k], labels[:, k], ignore_index=IGNORE, reduction="sum") for k in range(2)]
    )
    torch.testing.assert_close(value.double(), expected.double(), rtol=1e-6, atol=1e-6)
    assert value.requires_grad == any(t.requires_grad for t in ours)
    if value.requires_grad:
        factors = torch.tensor([0.37, 1.9])
        (value * factors).sum().backward()
        (expected * factors).sum().backward()
    for mine, theirs in zip(ours, plain, strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if mine.grad is not None and theirs.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("chunk", [4, 1000])
def test_shares_of_a_target_are_the_plain_soft_cross_entropy(chunk: int) -> None:
    """Catches a softmax scaled as if every row's shares made 1, and a share that counts though its label is ignored."""
    x, weight, bias, _ = random_case(1)
    generator = torch.Generator().manual_seed(2)
    labels = torch.stack([torch.randperm(11, generator=generator)[:3] for _ in range(46)]).view(23, 2, 3)
    shares = torch.rand(23, 2, 3, generator=generator) / 3
    labels[::5, :, 1], labels[3] = IGNORE, IGNORE
    ours, plain = ([t.clone().requires_grad_() for t in (x, weight, bias)] for _ in range(2))
    value = linear_cross_entropy(*ours, labels, shares, chunk).sum()
    logprobs_PKC = F.linear(*plain).log_softmax(-1).transpose(0, 1)
    expected = -(shares * (labels != IGNORE) * logprobs_PKC.gather(-1, labels.clamp(min=0))).sum()
    assert value.item() == pytest.approx(expected.item(), rel=1e-6)
    (value * 0.37).backward()
    (expected * 0.37).backward()
    for mine, theirs in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("chunk", [4, 1000])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_change_of_low_rank_is_the_plain_one(chunk: int, frozen: bool) -> None:
    """Catches a change left out of the gradient of what it reads, rows or heads mixed up, and a factor lost."""
    x, weight, bias, labels = random_case(3)
    generator = torch.Generator().manual_seed(4)
    low, up = (torch.randn(2, n, 3, generator=generator, dtype=torch.float64) for n in (23, 11))
    ours, plain = ([t.clone().requires_grad_() for t in (x, low, up)] for _ in range(2))
    weights = [weight.clone().requires_grad_(not frozen) for _ in range(2)]
    value = linear_cross_entropy(ours[0], weights[0], bias, labels, chunk=chunk, change=(ours[1], ours[2]))
    logits = plain[0] @ weights[1].T + bias + plain[1] @ plain[2].mT
    expected = torch.stack(
        [F.cross_entropy(logits[k], labels[:, k], ignore_index=IGNORE, reduction="sum") for k in range(2)]
    )
    torch.testing.assert_close(value.double(), expected, rtol=1e-6, atol=1e-6)
    factors = torch.tensor([0.37, 1.9])
    (value * factors).sum().backward()
    (expected * factors).sum().backward()
    for mine, theirs in zip([*ours, weights[0]], [*plain, weights[1]], strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=2e-5, atol=2e-6)


def test_bf16_gradients_come_back_in_the_dtype_of_their_tensors() -> None:
    """Catches a sum accumulated in bf16: 23 rows in chunks of 1 must still be as exact as one product."""
    x, weight, bias, labels = random_case(1, torch.bfloat16)
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    linear_cross_entropy(*leaves, labels, chunk=1).sum().backward()
    wide = [t.float().requires_grad_() for t in (x, weight, bias)]
    logits = F.linear(*wide).transpose(0, 1).flatten(0, 1)
    F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="sum").backward()
    for low, high in zip(leaves, wide, strict=True):
        assert low.grad is not None and high.grad is not None
        assert low.grad.dtype == torch.bfloat16
        torch.testing.assert_close(low.grad.float(), high.grad, rtol=0.03, atol=0.03)


def test_a_batch_without_labels_costs_nothing_and_moves_nothing() -> None:
    """Catches NaN from a mean over nothing: loss 0, gradients 0 and finite."""
    heads = MedusaHeads(HeadsConfig(num_heads=2, vocab=None), lm_weight_VD=torch.randn(11, 6))
    sums, counts = heads.losses(torch.randn(5, 6), torch.full((5, 2), IGNORE))
    loss = weighted_loss(sums, counts, head_weights(2))
    loss.backward()
    assert loss.item() == 0.0
    assert counts.tolist() == [0, 0]
    for parameter in heads.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()


def test_labels_outside_the_head_vocabulary_teach_nothing() -> None:
    """Catches a backbone token id used as an index into the truncated vocabulary."""
    torch.manual_seed(0)
    weight = torch.randn(11, 6)
    vocab_map = torch.tensor([7, 2, 9])
    heads = MedusaHeads(HeadsConfig(num_heads=1, vocab=3), lm_weight_VD=weight, vocab_map_C=vocab_map)
    hidden = torch.randn(4, 6)
    sums, counts = heads.losses(hidden, torch.tensor([[9], [0], [7], [IGNORE]]))
    expected = F.cross_entropy(hidden[[0, 2]] @ weight[vocab_map].T, torch.tensor([2, 0]), reduction="sum")
    assert counts.tolist() == [2]
    torch.testing.assert_close(sums[0], expected)


class LargestTensor(TorchDispatchMode):
    """Records the most elements any floating-point result had."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                self.elements = max(self.elements, tensor.numel())
        return out


def test_logits_of_more_than_one_chunk_never_exist() -> None:
    """Catches [tokens × vocabulary] logits, in the forward or the backward pass."""
    positions, vocab, hidden, chunk = 512, 300, 4, 16
    x = torch.randn(1, positions, hidden, requires_grad=True)
    weight = torch.randn(vocab, hidden, requires_grad=True)
    labels = torch.randint(vocab, (positions, 1))
    with LargestTensor() as largest:
        linear_cross_entropy(x, weight, None, labels, chunk=chunk).sum().backward()
    assert 0 < largest.elements <= chunk * vocab
    with LargestTensor() as plain:
        F.cross_entropy(x[0] @ weight.T, labels[:, 0]).backward()
    assert plain.elements >= positions * vocab, "the recorder sees nothing"
