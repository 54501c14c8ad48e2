"""Which drafted tokens stay: pure functions of tensors, no model and no state.

A node is right if its token is the one the target chose at its parent; the longest right path is accepted. With the
target's choice the argmax this is greedy decoding; with a draw from the target's own distribution it is exact
sampling (every emitted token is a draw from the target, whatever the candidates were).
Legend: B batch, N tree nodes, V vocabulary, A accepted path length (tree depth + 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from medusa_core.tree import Tree


@dataclass(frozen=True)
class Accepted:
    """Result of one step: the node reached, how many nodes of its path are kept (root included), and the path."""

    node_B: torch.Tensor
    length_B: torch.Tensor
    path_BA: torch.Tensor


def accept_longest(tokens_BN: torch.Tensor, chosen_BN: torch.Tensor, tree: Tree) -> Accepted:
    """Longest path whose every node carries the token chosen at its parent; the root always counts.

    tokens_BN: the drafted tokens; chosen_BN: the target's choice *after* each node. Siblings carry different
    tokens, so at most one path survives.
    """
    parents = torch.tensor(tree.parents, device=tokens_BN.device).clamp(min=0)
    right_BN = tokens_BN == chosen_BN[:, parents]
    right_BN[:, 0] = True
    ancestors_NN = tree.ancestors_NN.to(tokens_BN.device)
    # A path is right if none of its nodes is wrong.
    path_right_BN = ~((~right_BN)[:, None, :] & ancestors_NN).any(-1)
    node_B = (path_right_BN * (tree.depths_N.to(tokens_BN.device) + 1)).argmax(-1)
    return Accepted(
        node_B=node_B,
        length_B=tree.depths_N.to(tokens_BN.device)[node_B] + 1,
        path_BA=tree.paths_ND.to(tokens_BN.device)[node_B],
    )


def choose_greedy(logits_BNV: torch.Tensor) -> torch.Tensor:
    """The target's greedy choice after each node, [B, N]."""
    return logits_BNV.argmax(-1)


def sampling_probabilities(logits_NV: torch.Tensor, *, temperature: float, top_p: float) -> torch.Tensor:
    """The target's distribution after temperature, then nucleus truncation, fp32 [N, V].

    The nucleus is the smallest set of likeliest tokens whose mass reaches top_p; top_p = 1 keeps everything.
    """
    probs_NV = (logits_NV.float() / temperature).softmax(-1)
    if top_p < 1.0:
        sorted_NV, order_NV = probs_NV.sort(-1, descending=True)
        # A token stays if the mass before it is still short of top_p, so the likeliest always stays.
        keep_NV = sorted_NV.cumsum(-1) - sorted_NV < top_p
        probs_NV = torch.zeros_like(probs_NV).scatter_(-1, order_NV, sorted_NV * keep_NV)
        probs_NV = probs_NV / probs_NV.sum(-1, keepdim=True)
    return probs_NV


def choose_sampled(
    logits_NV: torch.Tensor, *, temperature: float, top_p: float, uniform_N: torch.Tensor
) -> torch.Tensor:
    """One draw after each node by inverting the cumulative distribution at uniform_N in [0, 1), [N]."""
    cumulative_NV = sampling_probabilities(logits_NV, temperature=temperature, top_p=top_p).double().cumsum(-1)
    # Scaling by the total keeps rounding in the sum from ever pointing past the last token; "right" skips tokens of
    # probability 0 that precede the drawn one.
    target_N1 = (uniform_N.double() * cumulative_NV[:, -1])[:, None]
    index_N = torch.searchsorted(cumulative_NV, target_N1, right=True)[:, 0]
    return index_N.clamp(max=logits_NV.shape[-1] - 1)
