"""Training losses: label alignment, chunked cross-entropy, the weighted sum (paper equation 2), and divergences.

Knows nothing of batches or epochs.
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


def path_tokens(next_P: torch.Tensor, labels_PK: torch.Tensor) -> torch.Tensor:
    """The tokens t + 1 .. t + K at each position, [P, K]: what head k of kind "hydra" reads the first k of.

    They are the next token and the labels of the heads before. A head with a label has all of its path; where labels
    end the path goes on with token 0, which only heads without one see.
    """
    return torch.cat([next_P[:, None], labels_PK[:, :-1]], 1).clamp(min=0)


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
    """Cross-entropy of K heads through linear layers, a chunk of one head's positions at a time.

    The gradients are formed in the forward pass while a chunk's logits are at hand, so that no more than
    [chunk, C] logits ever exist.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_KPD: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels_PKJ: torch.Tensor,
        shares_PKJ: torch.Tensor,
        chunk: int,
        low_KPR: torch.Tensor | None,
        up_KCR: torch.Tensor | None,
    ) -> torch.Tensor:
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        needs_change = bool(ctx.needs_input_grad[-1])
        heads, own = len(x_KPD), weight.dim() == 3
        total_K = x_KPD.new_zeros(heads, dtype=torch.float32)
        grad_x_KPD = torch.zeros_like(x_KPD) if needs_x else None
        # A gradient for each head even where they share a weight: backward will scale each by a factor of its own.
        grad_weight_KCD = weight.new_zeros(heads, *weight.shape[-2:], dtype=torch.float32) if needs_weight else None
        grad_bias_KC = grad_low_KPR = grad_up_KCR = None
        if needs_bias and bias is not None:
            grad_bias_KC = bias.new_zeros(heads, bias.shape[-1], dtype=torch.float32)
        if needs_change and low_KPR is not None and up_KCR is not None:
            grad_low_KPR, grad_up_KCR = torch.zeros_like(low_KPR), torch.zeros_like(up_KCR, dtype=torch.float32)
        for head, x_PD in enumerate(x_KPD):
            weight_CD = weight[head] if own else weight
            bias_C = bias[head] if own and bias is not None else bias
            labels_PJ, shares_PJ = labels_PKJ[:, head], shares_PKJ[:, head]
            for rows in (labels_PJ != IGNORE).any(-1).nonzero()[:, 0].split(chunk):
                x, labels = x_PD[rows], labels_PJ[rows]
                shares = shares_PJ[rows].masked_fill(labels == IGNORE, 0.0)
                labels, mass = labels.clamp(min=0), shares.sum(-1, keepdim=True)
                logits = F.linear(x, weight_CD, bias_C)
                if low_KPR is not None and up_KCR is not None:
                    logits = logits + low_KPR[head, rows] @ up_KCR[head].T
                logits = logits.float()
                # Everything else happens in place: a chunk's logits are read from memory as seldom as can be.
                logits -= logits.amax(-1, keepdim=True)
                total_K[head] -= (shares * logits.gather(-1, labels)).sum()
                exponentials = logits.exp_()
                sums = exponentials.sum(-1, keepdim=True)
                total_K[head] += (mass * sums.log()).sum()
                if not any((needs_x, needs_weight, needs_bias, needs_change)):
                    continue
                grad_logits = exponentials.mul_(mass / sums).scatter_add_(-1, labels, -shares)
                grad_low = grad_logits.to(x.dtype)
                if grad_x_KPD is not None:
                    grad_x_KPD[head, rows] = grad_low @ weight_CD
                if grad_weight_KCD is not None and grad_low.dtype == grad_weight_KCD.dtype:
                    grad_weight_KCD[head].addmm_(grad_low.T, x)
                elif grad_weight_KCD is not None:
                    grad_weight_KCD[head] += grad_low.T @ x
                if grad_bias_KC is not None:
                    grad_bias_KC[head] += grad_logits.sum(0)
                if low_KPR is not None and up_KCR is not None and grad_low_KPR is not None and grad_up_KCR is not None:
                    grad_low_KPR[head, rows] = grad_low @ up_KCR[head]
                    grad_up_KCR[head] += grad_low.T @ low_KPR[head, rows]
        # Not saved for backward but handed over, so that backward may scale them where they are: together they are as
        # large as the heads' weights.
        ctx.gradients = grad_x_KPD, grad_weight_KCD, grad_bias_KC, grad_low_KPR, grad_up_KCR
        ctx.own, ctx.dtypes = own, [None if each is None else each.dtype for each in (weight, bias, up_KCR)]
        return total_K

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad_K,) = grads
        (grad_x_KPD, grad_weight_KCD, grad_bias_KC, grad_low_KPR, grad_up_KCR), ctx.gradients = ctx.gradients, ()
        weight_dtype, bias_dtype, up_dtype = ctx.dtypes

        def scaled(gradient: torch.Tensor) -> torch.Tensor:
            return gradient.mul_(grad_K.to(gradient.dtype).view(-1, *[1] * (gradient.dim() - 1)))

        def of_layer(gradient: torch.Tensor) -> torch.Tensor:
            return scaled(gradient) if ctx.own else torch.tensordot(grad_K, gradient, 1)

        return (
            None if grad_x_KPD is None else scaled(grad_x_KPD),
            None if grad_weight_KCD is None else of_layer(grad_weight_KCD).to(weight_dtype),
            None if grad_bias_KC is None else of_layer(grad_bias_KC).to(bias_dtype),
            None,
            None,
            None,
            None if grad_low_KPR is None else scaled(grad_low_KPR),
            None if grad_up_KCR is None else scaled(grad_up_KCR).to(up_dtype),
        )


def linear_cross_entropy(
    x_KPD: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    shares_PKJ: torch.Tensor | None = None,
    chunk: int | None = None,
    *,
    change: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Summed cross-entropy (nats, fp32 [K]) of softmax(x Wᵀ + b) against labels [P, K]; IGNORE labels are skipped.

    `weight` is [C, D] for all heads or [K, C, D], `bias` likewise. `change`, low [K, P, R] and up [K, C, R], adds
    low upᵀ to each head's logits. With `shares_PKJ` (fp32) the labels are [P, K, J],
    each with its share of the target's mass; what a position's shares lack of 1 teaches nothing. Positions without a
    label are left out of the product. The gradient can be taken once.
    """
    if shares_PKJ is None:
        labels = labels[..., None]
        shares_PKJ = torch.ones(labels.shape, device=labels.device)
    if chunk is None:
        # Small enough for a core's cache, unless every chunk adds to a gradient as large as the weight.
        adds = weight.requires_grad or change is not None
        chunk = 2048 if x_KPD.is_cuda else 512 if adds else 128
    low_KPR, up_KCR = change or (None, None)
    total_K: torch.Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        x_KPD, weight, bias, labels, shares_PKJ, chunk, low_KPR, up_KCR
    )
    return total_K


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
