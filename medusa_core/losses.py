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
        labels_P: torch.Tensor,
        chunk: int,
    ) -> torch.Tensor:
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        total = x_PD.new_zeros((), dtype=torch.float32)
        grad_x = torch.zeros_like(x_PD) if needs_x else None
        grad_weight = torch.zeros_like(weight_CD, dtype=torch.float32) if needs_weight else None
        grad_bias = torch.zeros_like(bias_C, dtype=torch.float32) if needs_bias and bias_C is not None else None
        kept_P = (labels_P != IGNORE).nonzero()[:, 0]
        for rows in kept_P.split(chunk):
            x, labels = x_PD[rows], labels_P[rows]
            logits = F.linear(x, weight_CD, bias_C).float()
            lse = logits.logsumexp(-1, keepdim=True)
            total += (lse[:, 0] - logits.gather(-1, labels[:, None])[:, 0]).sum()
            if not any((needs_x, needs_weight, needs_bias)):
                continue
            grad_logits = logits.sub_(lse).exp_()
            grad_logits.scatter_add_(-1, labels[:, None], grad_logits.new_full((len(labels), 1), -1.0))
            grad_low = grad_logits.to(x.dtype)
            if grad_x is not None:
                grad_x[rows] = grad_low @ weight_CD
            if grad_weight is not None:
                grad_weight += grad_low.T @ x
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
        ctx.save_for_backward(grad_x, grad_weight, grad_bias)
        ctx.dtypes = weight_CD.dtype, None if bias_C is None else bias_C.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        grad_x, grad_weight, grad_bias = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        return (
            None if grad_x is None else grad_x * grad.to(grad_x.dtype),
            None if grad_weight is None else (grad_weight * grad).to(weight_dtype),
            None if grad_bias is None else (grad_bias * grad).to(bias_dtype),
            None,
            None,
        )


def linear_cross_entropy(
    x_PD: torch.Tensor,
    weight_CD: torch.Tensor,
    bias_C: torch.Tensor | None,
    labels_P: torch.Tensor,
    chunk: int = 512,
) -> torch.Tensor:
    """Summed cross-entropy (nats, fp32 scalar) of softmax(x Wᵀ + b) against labels_P; IGNORE labels are skipped.

    Rows are dropped before the product, so a batch without labels costs nothing and gives 0.
    """
    total: torch.Tensor = _LinearCrossEntropy.apply(x_PD, weight_CD, bias_C, labels_P, chunk)  # type: ignore[no-untyped-call]
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
