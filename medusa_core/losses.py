"""Training losses: label alignment, chunked cross-entropy, the weighted sum (paper equation 2), and divergences.

Knows nothing of batches, epochs or devices.
Legend: T tokens of a conversation, P positions, K heads, D hidden, C head vocabulary, V vocabulary, J kept ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

IGNORE = -100


def head_labels(input_ids_T: torch.Tensor, loss_mask_T: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Labels [T, K]: token t + k + 1 for head k at position t where loss_mask[t+1 .. t+k+1] all hold, else IGNORE.

    loss_mask_T marks tokens that the model generated. Requiring the whole span keeps a head from being trained
    across a turn of the user's.
    """
    length = input_ids_T.shape[0]
    labels_TK = torch.full((length, num_heads), IGNORE, dtype=torch.int64)
    span = torch.zeros(length, dtype=torch.bool)
    span[: length - 1] = loss_mask_T[1:]
    for k in range(1, num_heads + 1):
        shift = k + 1
        if shift >= length:
            break
        span[: length - shift] &= loss_mask_T[shift:]
        span[length - shift :] = False
        labels_TK[: length - shift, k - 1] = torch.where(
            span[: length - shift], input_ids_T[shift:].to(torch.int64), IGNORE
        )
    return labels_TK


def count_labels(labels: torch.Tensor) -> torch.Tensor:
    """How many positions each head has a label at, [K], for labels [P, K] or [P, K, J]."""
    given = labels != IGNORE
    return (given if given.dim() == 2 else given.any(-1)).sum(0)


def head_weights(num_heads: int, decay: float = 0.8) -> torch.Tensor:
    """λ_k = decay^k for k = 1..K (paper section 2.2.1), fp32 [K]."""
    return torch.tensor([decay**k for k in range(1, num_heads + 1)])


def weighted_loss(
    sums_K: torch.Tensor, counts_K: torch.Tensor, weights_K: Sequence[float] | torch.Tensor
) -> torch.Tensor:
    """Σ_k λ_k · mean cross-entropy of head k (paper equation 2); a head without labels adds 0, not NaN."""
    weights_K = torch.as_tensor(weights_K, dtype=torch.float32, device=sums_K.device)
    return (weights_K * sums_K.float() / counts_K.clamp(min=1)).sum()


class _LinearCrossEntropy(torch.autograd.Function):
    """Cross-entropy through a linear layer, a chunk of positions at a time.

    The gradients are formed in the forward pass while a chunk's logits are at hand, so that no more than
    [chunk, C] logits ever exist.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_PD: torch.Tensor,
        weight_CD: torch.Tensor,
        bias_C: torch.Tensor | None,
        labels_PJ: torch.Tensor,
        shares_PJ: torch.Tensor,
        chunk: int,
    ) -> torch.Tensor:
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        total = x_PD.new_zeros((), dtype=torch.float32)
        grad_x = torch.zeros_like(x_PD) if needs_x else None
        grad_weight = torch.zeros_like(weight_CD, dtype=torch.float32) if needs_weight else None
        grad_bias = torch.zeros_like(bias_C, dtype=torch.float32) if needs_bias and bias_C is not None else None
        kept_P = (labels_PJ != IGNORE).any(-1).nonzero()[:, 0]
        for rows in kept_P.split(chunk):
            x, labels = x_PD[rows], labels_PJ[rows]
            shares = shares_PJ[rows].masked_fill(labels == IGNORE, 0.0)
            labels, mass = labels.clamp(min=0), shares.sum(-1, keepdim=True)
            logits = F.linear(x, weight_CD, bias_C).float()
            # Everything else happens in place: a chunk's logits are read from memory as seldom as can be.
            logits -= logits.amax(-1, keepdim=True)
            total -= (shares * logits.gather(-1, labels)).sum()
            exponentials = logits.exp_()
            sums = exponentials.sum(-1, keepdim=True)
            total += (mass * sums.log()).sum()
            if not any((needs_x, needs_weight, needs_bias)):
                continue
            grad_logits = exponentials.mul_(mass / sums).scatter_add_(-1, labels, -shares)
            grad_low = grad_logits.to(x.dtype)
            if grad_x is not None:
                grad_x[rows] = grad_low @ weight_CD
            if grad_weight is not None and grad_low.dtype == grad_weight.dtype:
                grad_weight.addmm_(grad_low.T, x)
            elif grad_weight is not None:
                grad_weight += grad_low.T @ x
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
        # Not saved for backward but handed over, so that backward may scale them where they are: the weight's is as
        # large as the vocabulary.
        ctx.gradients = grad_x, grad_weight, grad_bias
        ctx.dtypes = weight_CD.dtype, None if bias_C is None else bias_C.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        (grad_x, grad_weight, grad_bias), ctx.gradients = ctx.gradients, ()
        weight_dtype, bias_dtype = ctx.dtypes
        return (
            None if grad_x is None else grad_x.mul_(grad.to(grad_x.dtype)),
            None if grad_weight is None else grad_weight.mul_(grad).to(weight_dtype),
            None if grad_bias is None else grad_bias.mul_(grad).to(bias_dtype),
            None,
            None,
            None,
        )


def linear_cross_entropy(
    x_PD: torch.Tensor,
    weight_CD: torch.Tensor,
    bias_C: torch.Tensor | None,
    labels: torch.Tensor,
    shares_PJ: torch.Tensor | None = None,
    chunk: int | None = None,
) -> torch.Tensor:
    """Summed cross-entropy (nats, fp32 scalar) of softmax(x Wᵀ + b) against labels [P]; IGNORE labels are skipped.

    With `shares_PJ` (fp32) the labels are [P, J], each with its share of the target's mass; what a row's shares lack of
    1 teaches nothing. Rows without a label are dropped before the product. Its gradient can be taken once.
    """
    if chunk is None:
        # Small enough for a core's cache, unless every chunk adds to a gradient as large as the weight.
        chunk = 2048 if x_PD.is_cuda else 512 if weight_CD.requires_grad else 128
    if shares_PJ is None:
        labels, shares_PJ = labels[:, None], torch.ones(len(labels), 1, device=labels.device)
    total: torch.Tensor = _LinearCrossEntropy.apply(x_PD, weight_CD, bias_C, labels, shares_PJ, chunk)  # type: ignore[no-untyped-call]
    return total


def divergence(teacher_PV: torch.Tensor, student_PV: torch.Tensor) -> torch.Tensor:
    """KL(teacher ‖ student) of two sets of logits at each position, nats, fp32 [P]."""
    teacher_PV, student_PV = teacher_PV.float().log_softmax(-1), student_PV.float().log_softmax(-1)
    return (teacher_PV.exp() * (teacher_PV - student_PV)).sum(-1)


def lumped_divergence(
    ids_PJ: torch.Tensor, logprobs_PJ: torch.Tensor, tail_P: torch.Tensor, student_PV: torch.Tensor
) -> torch.Tensor:
    """KL(teacher ‖ student) from the teacher's top-k log-probabilities and the log mass of its tail, nats, fp32 [P].

    All tokens outside the top-k count as one: a lower bound of the full divergence, equal to it for k = V.
    """
    student_PV = student_PV.float().log_softmax(-1)
    top_P = (logprobs_PJ.exp() * (logprobs_PJ - student_PV.gather(-1, ids_PJ))).sum(-1)
    if ids_PJ.shape[-1] == student_PV.shape[-1]:
        return top_P
    # The student's tail by log-sum-exp over the complement, as the teacher's was: 1 - Σ would round to nothing.
    student_tail_P = student_PV.scatter(-1, ids_PJ, float("-inf")).logsumexp(-1)
    # A tail without mass adds 0 · (-inf), which is 0 here.
    return top_P + torch.where(tail_P.isinf(), 0.0, tail_P.exp() * (tail_P - student_tail_P).nan_to_num())
