"""Which drafted tokens stay: pure functions of tensors. They know no model, no cache, no text and no random generator.

Three rules, told apart by what they promise:
- `accept_longest`: a node is right if its token is the one the target chose at its parent. With the argmax
  (`choose_greedy`) this is greedy decoding, with a draw (`choose_sampled`) exact sampling: every emitted token is a
  draw from the target, whatever the candidates were.
- `accept_rejection`: exact sampling too, for candidates drawn from the heads by `draw_children`; it accepts more.
- `accept_typical`: the paper's section 2.3.1. It does not keep the target's distribution.

Nothing here waits for the device: shapes follow from the tree alone, so a step can be captured as a graph. Uniforms
are the caller's, in [0, 1), float64 (float32's 24 bits would round a large vocabulary's tail away), and independent.
Legend: B batch, N tree nodes, V vocabulary, K depths, A path length (tree depth + 1), C children of one node, M
parents of one depth, G distributions that children are drawn from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from medusa_core.tree import Tree, TreeTensors

_BLOCK = 256
# Given a depth and the tokens of all nodes down to its parents [B, n]: the distributions that the parents' children are
# drawn from, [B, G, V], where G is 1 (one for all parents) or their number (one for each, in node order).
Distributions = Callable[[int, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Accepted:
    """Result of one step: the node reached, how many nodes of its path are kept (root included), the path (its last
    node repeated), and the token that follows it, which is the next step's root."""

    node_B: torch.Tensor
    length_B: torch.Tensor
    path_BA: torch.Tensor
    next_B: torch.Tensor


# Greedy and exact sampling: the target chooses after every node, then the tree is walked.


def accept_longest(tokens_BN: torch.Tensor, chosen_BN: torch.Tensor, tree: TreeTensors) -> Accepted:
    """Longest path whose every node carries the token chosen at its parent; the root always counts.

    tokens_BN: the drafted tokens; chosen_BN: the target's choice *after* each node. Siblings carry different
    tokens, so at most one path survives.
    """
    right_BN = tokens_BN == chosen_BN[:, tree.parents_N]
    node_B = (_whole_paths(right_BN, tree) * (tree.depths_N + 1)).argmax(-1)
    return _accepted(node_B, chosen_BN.gather(1, node_B[:, None])[:, 0], tree)


def choose_greedy(logits_BNV: torch.Tensor) -> torch.Tensor:
    """The target's greedy choice after each node, [B, N]: the likeliest token, the first of equals.

    Two stages, because an argmax over bf16 runs value by value on a CPU while a maximum is vectorised: the first
    block that holds the maximum, then the first place in it.
    """
    vocabulary = logits_BNV.shape[-1]
    if vocabulary <= _BLOCK:
        return logits_BNV.argmax(-1)
    peaks_BNX = logits_BNV.unfold(-1, _BLOCK, _BLOCK).amax(-1)
    if vocabulary % _BLOCK:
        # The last block overlaps the one before. It is only chosen if its peak beats all before, so lies past them.
        peaks_BNX = torch.cat([peaks_BNX, logits_BNV[..., -_BLOCK:].amax(-1, keepdim=True)], -1)
    start_BN1 = (peaks_BNX.argmax(-1, keepdim=True) * _BLOCK).clamp(max=vocabulary - _BLOCK)
    block_BNX = logits_BNV.gather(-1, start_BN1 + torch.arange(_BLOCK, device=logits_BNV.device))
    return start_BN1[..., 0] + block_BNX.argmax(-1)


def target_probabilities(
    logits_NV: torch.Tensor, *, temperature: float, top_k: int = 0, top_p: float = 1.0
) -> torch.Tensor:
    """The target's distribution: temperature (above 0), then top-k (0 is off), then nucleus; fp32 [N, V].

    The order and meaning of transformers' logits warpers. Top-k removes what is less likely than the k-th, so it
    keeps ties; the nucleus is the smallest set of likeliest tokens whose mass, of what top-k left, reaches top_p.
    """
    scores_NV = logits_NV.float() / temperature
    if top_k > 0:
        least_N1 = scores_NV.topk(min(top_k, scores_NV.shape[-1]), -1).values[:, -1:]
        scores_NV = scores_NV.masked_fill(scores_NV < least_N1, float("-inf"))
    probs_NV = scores_NV.softmax(-1)
    if top_p < 1.0:
        sorted_NV, order_NV = probs_NV.sort(-1, descending=True)
        # A token stays if the mass before it is still short of top_p, so the likeliest always stays.
        keep_NV = sorted_NV.double().cumsum(-1) - sorted_NV < top_p
        probs_NV = torch.zeros_like(probs_NV).scatter_(-1, order_NV, sorted_NV * keep_NV)
        probs_NV = probs_NV / probs_NV.sum(-1, keepdim=True)
    return probs_NV


def choose_sampled(
    logits_NV: torch.Tensor, *, temperature: float, top_k: int = 0, top_p: float = 1.0, uniform_N: torch.Tensor
) -> torch.Tensor:
    """One draw after each node from `target_probabilities`, [N]."""
    return _draw(target_probabilities(logits_NV, temperature=temperature, top_k=top_k, top_p=top_p), uniform_N)


# Typical acceptance.


def accept_typical(
    tokens_BN: torch.Tensor,
    logits_BNV: torch.Tensor,
    tree: TreeTensors,
    *,
    temperature: float,
    epsilon: float,
    delta: float,
) -> Accepted:
    """Longest path of typical tokens (paper section 2.3.1). NOT distribution-preserving: label every figure with it.

    A token x is typical if p(x) > min(epsilon, delta * exp(-H(p))), with p the target after its parent at this
    temperature and H its entropy in nats; the root always counts. Among the longest paths the likeliest wins, then
    the lower node, and the next root is the argmax, so the result is deterministic. Temperature 0 is greedy. The
    reference's defaults are epsilon 0.09 and delta 0.3.
    """
    if temperature == 0:
        return accept_longest(tokens_BN, choose_greedy(logits_BNV), tree)
    rows_B = torch.arange(len(tokens_BN), device=tokens_BN.device)
    probs_BNV = (logits_BNV.float() / temperature).softmax(-1)
    threshold_BN = (delta * (-torch.special.entr(probs_BNV).sum(-1)).exp()).clamp(max=epsilon)[:, tree.parents_N]
    prob_BN = probs_BNV[rows_B[:, None], tree.parents_N, tokens_BN]
    typical_BN = prob_BN > threshold_BN
    whole_BN = _whole_paths(typical_BN, tree)
    # Only nodes that are typical, the root aside, lie on the paths compared; the others' logarithm may be -inf.
    below_root_BN = typical_BN & (tree.depths_N > 0)
    log_prob_BN = torch.where(below_root_BN, prob_BN.double(), 1.0).log()
    likelihood_BN = (log_prob_BN[:, None, :] * tree.ancestors_NN).sum(-1)
    length_BN = whole_BN * (tree.depths_N + 1)
    longest_BN = length_BN == length_BN.amax(-1, keepdim=True)
    node_B = likelihood_BN.masked_fill(~longest_BN, float("-inf")).argmax(-1)
    return _accepted(node_B, choose_greedy(logits_BNV[rows_B, node_B][:, None])[:, 0], tree)


# Rejection sampling: candidates drawn from the heads, siblings without replacement.


@dataclass(frozen=True)
class Draft:
    """What candidates were drawn from: distributions [B, G, V] over the target's vocabulary, and which of them the
    children of each node come from, [N]."""

    probs_BGV: torch.Tensor
    group_N: torch.Tensor


def draw_children(
    root_B: torch.Tensor, distributions: Distributions, tree: Tree, uniform_BN: torch.Tensor
) -> tuple[torch.Tensor, Draft]:
    """Tokens of every node, [B, N]: the root's, then each node's siblings drawn in order without replacement.

    Every parent's children are drawn independently of other parents'. A tree's ranks only order siblings here. The
    root's uniform is not used.
    """
    families, tokens_BN = _families(tree, root_B.device), root_B[:, None]
    probs = []
    for depth, (children_MC, places_X) in enumerate(zip(families.children, families.places, strict=True)):
        probs.append(distributions(depth, tokens_BN))
        uniform_BMC = uniform_BN.double()[:, children_MC.clamp(min=0)]
        drawn_BGMC = _draw_siblings(probs[-1], uniform_BMC.unflatten(1, (probs[-1].shape[1], -1)))
        tokens_BN = torch.cat([tokens_BN, drawn_BGMC.flatten(1)[:, places_X]], 1)
    if not probs:
        return tokens_BN, Draft(uniform_BN.new_zeros(len(root_B), 1, 1), families.depth_N)
    groups = sum(each.shape[1] for each in probs)
    return tokens_BN, Draft(torch.cat(probs, 1), families.depth_N if groups == tree.depth else families.parent_N)


def _draw_siblings(probs_BGV: torch.Tensor, uniform_BGMC: torch.Tensor) -> torch.Tensor:
    """C draws without replacement for each of M parents that share a distribution, [B, G, M, C].

    A parent for whom there is no further token of non-zero probability gets its first child again: a valid id to run
    through the model, which `accept_rejection` never accepts.
    """
    cumulative_BGV = probs_BGV.double().cumsum(-1)
    vocabulary = cumulative_BGV.shape[-1]
    shape_BGM = uniform_BGMC.shape[:-1]
    # Tokens drawn so far, and the stretch of the cumulative distribution that each took away.
    drawn_BGMC = torch.empty(*shape_BGM, 0, dtype=torch.int64, device=probs_BGV.device)
    begin_BGMC = end_BGMC = cumulative_BGV.new_empty(*shape_BGM, 0)
    for order, uniform_BGM in enumerate(uniform_BGMC.unbind(-1)):
        left_BGM = (cumulative_BGV[..., -1:] - (end_BGMC - begin_BGMC).sum(-1)).clamp(min=0)
        point_BGM = uniform_BGM * left_BGM
        # The point is a place in what is left. From left to right, step over each stretch that lies before it; the
        # maximum keeps rounding from ending inside one.
        begins_BGMC, by_place_BGMC = begin_BGMC.sort(-1)
        ends_BGMC = end_BGMC.gather(-1, by_place_BGMC)
        for begin_BGM, end_BGM in zip(begins_BGMC.unbind(-1), ends_BGMC.unbind(-1), strict=True):
            beyond_BGM = torch.maximum(point_BGM + (end_BGM - begin_BGM), end_BGM)
            point_BGM = torch.where(point_BGM >= begin_BGM, beyond_BGM, point_BGM)
        token_BGM = torch.searchsorted(cumulative_BGV, point_BGM, right=True)
        # With nothing left (or by rounding, once in 1e16) the point is past the last token.
        spent_BGM = token_BGM == vocabulary
        token_BGM = torch.where(spent_BGM, drawn_BGMC[..., 0] if order else vocabulary - 1, token_BGM)
        end_BGM = cumulative_BGV.gather(-1, token_BGM)
        begin_BGM = torch.where(token_BGM > 0, cumulative_BGV.gather(-1, (token_BGM - 1).clamp(min=0)), 0.0)
        drawn_BGMC = torch.cat([drawn_BGMC, token_BGM[..., None]], -1)
        begin_BGMC = torch.cat([begin_BGMC, torch.where(spent_BGM, end_BGM, begin_BGM)[..., None]], -1)
        end_BGMC = torch.cat([end_BGMC, end_BGM[..., None]], -1)
    return drawn_BGMC


def accept_rejection(
    tokens_BN: torch.Tensor,
    target_probs_BNV: torch.Tensor,
    draft: Draft,
    tree: Tree,
    uniform_BN: torch.Tensor,
    uniform_next_B: torch.Tensor,
) -> Accepted:
    """Rejection sampling over the tree: the emitted tokens are distributed exactly as the target's.

    At each node its children are tried in order: child x is accepted with probability min(1, p(x) / q(x)), and
    after a rejection p becomes norm(max(0, p - q)) and q loses x, since siblings are drawn without replacement. If
    none is accepted the next token is drawn from what is left of p; after a leaf, from p.
    tokens_BN and draft must come from `draw_children`; target_probs_BNV is the target *after* each node. The uniforms
    are new ones, not those of the draw; the root's is not used.
    """
    node_B = torch.zeros_like(tokens_BN[:, 0])
    rows_B = torch.arange(len(tokens_BN), device=tokens_BN.device)
    here_B = torch.ones_like(node_B, dtype=torch.bool)
    p_BV = _normalised(target_probs_BNV[:, 0].double())
    families = _families(tree, tokens_BN.device)
    for children_MC in families.children:
        q_BV = _normalised(draft.probs_BGV[rows_B, draft.group_N[node_B]].double())
        waiting_B, moved_B = here_B, torch.zeros_like(here_B)
        parent_B = node_B
        for order in range(children_MC.shape[1]):
            child_B = families.children_NC[parent_B, order]
            exists_B, child_B = child_B >= 0, child_B.clamp(min=0)
            token_B1 = tokens_BN.gather(1, child_B[:, None])
            p_B, q_B = p_BV.gather(1, token_B1)[:, 0], q_BV.gather(1, token_B1)[:, 0]
            # A token that q no longer holds was not drawn from it: the repeated sibling of `draw_children`.
            tried_B = waiting_B & exists_B & (q_B > 0)
            accepted_B = tried_B & (uniform_BN[rows_B, child_B] * q_B < p_B)
            rejected_B1 = (tried_B & ~accepted_B)[:, None]
            p_BV = torch.where(rejected_B1, _residual(p_BV, q_BV), p_BV)
            q_BV = torch.where(rejected_B1, _without(q_BV, token_B1), q_BV)
            node_B = torch.where(accepted_B, child_B, node_B)
            moved_B, waiting_B = moved_B | accepted_B, waiting_B & ~accepted_B
        # Rows that stop here keep what is left of p for their next token.
        here_B = moved_B
        p_BV = torch.where(here_B[:, None], _normalised(target_probs_BNV[rows_B, node_B].double()), p_BV)
    return _accepted(node_B, _draw(p_BV, uniform_next_B), tree.on(tokens_BN.device))


def _residual(p_BV: torch.Tensor, q_BV: torch.Tensor) -> torch.Tensor:
    """norm(max(0, p - q)): what the target still owes once a draw from q was rejected."""
    left_BV = (p_BV - q_BV).clamp(min=0)
    # Only p = q leaves nothing, and then the rejection was rounding: p stands.
    return torch.where(left_BV.sum(-1, keepdim=True) > 0, _normalised(left_BV), p_BV)


def _without(q_BV: torch.Tensor, token_B1: torch.Tensor) -> torch.Tensor:
    """q given that its draw is not this token; all zero if it has no other."""
    return _normalised(q_BV.scatter(1, token_B1, 0.0))


def _normalised(weights_BV: torch.Tensor) -> torch.Tensor:
    """Rows that sum to 1; a row of zeros stays one."""
    mass_B1 = weights_BV.sum(-1, keepdim=True)
    return weights_BV / torch.where(mass_B1 > 0, mass_B1, 1.0)


# Shared parts.


def _whole_paths(right_BN: torch.Tensor, tree: TreeTensors) -> torch.Tensor:
    """Nodes on whose path, themselves included, no node but the root is wrong, [B, N] bool."""
    wrong_BN = ~right_BN & (tree.depths_N > 0)
    return ~(wrong_BN[:, None, :] & tree.ancestors_NN).any(-1)


def _accepted(node_B: torch.Tensor, next_B: torch.Tensor, tree: TreeTensors) -> Accepted:
    return Accepted(node_B=node_B, length_B=tree.depths_N[node_B] + 1, path_BA=tree.paths_NA[node_B], next_B=next_B)


def _draw(probs_NV: torch.Tensor, uniform_N: torch.Tensor) -> torch.Tensor:
    """One draw per row by inverting the cumulative distribution; never a token of probability 0."""
    cumulative_NV = probs_NV.double().cumsum(-1)
    # Scaling by the total keeps rounding in the sum from ever pointing past the last token; "right" skips tokens of
    # probability 0 that precede the drawn one.
    target_N1 = (uniform_N.double() * cumulative_NV[:, -1])[:, None]
    index_N = torch.searchsorted(cumulative_NV, target_N1, right=True)[:, 0]
    return index_N.clamp(max=probs_NV.shape[-1] - 1)


@dataclass(frozen=True)
class _Families:
    """Who is whose child, siblings in node order, -1 past the last.

    children: for each depth of parents, those of the nodes that have any, [M, C], and `places`: where among these, read
    row by row, children stand, which is in node order; children_NC: of each node. depth_N is each node's depth and
    parent_N its place among all nodes that have children; both are 0 for a leaf.
    """

    children: tuple[torch.Tensor, ...]
    places: tuple[torch.Tensor, ...]
    children_NC: torch.Tensor
    depth_N: torch.Tensor
    parent_N: torch.Tensor


@lru_cache(maxsize=256)
def _families(tree: Tree, device: torch.device) -> _Families:
    by_depth: list[dict[int, list[int]]] = [{} for _ in range(tree.depth)]
    for node, (parent, path) in enumerate(zip(tree.parents[1:], tree.choices, strict=True), 1):
        by_depth[len(path) - 1].setdefault(parent, []).append(node)
    width = max((len(children) for families in by_depth for children in families.values()), default=0)
    children_NC = torch.full((tree.nodes, width), -1)
    depth_N, parent_N = torch.zeros(tree.nodes, dtype=torch.int64), torch.zeros(tree.nodes, dtype=torch.int64)
    levels, seen = [], 0
    for depth, families in enumerate(by_depth):
        for place, (parent, children) in enumerate(families.items(), seen):
            children_NC[parent, : len(children)] = torch.tensor(children)
            depth_N[parent], parent_N[parent] = depth, place
        seen += len(families)
        most = max(len(children) for children in families.values())
        levels.append(children_NC[list(families), :most])
    places = (torch.flatten(children_MC >= 0).nonzero()[:, 0] for children_MC in levels)
    return _Families(
        children=tuple(children_MC.to(device) for children_MC in levels),
        places=tuple(places_X.to(device) for places_X in places),
        children_NC=children_NC.to(device),
        depth_N=depth_N.to(device),
        parent_N=parent_N.to(device),
    )
