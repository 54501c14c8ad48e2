"""What stays of a draft: the longest right path under greedy choice, and draws that follow the target exactly."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from medusa_core.acceptance import accept_longest, choose_greedy, choose_sampled, sampling_probabilities
from medusa_core.tree import OFF, Tree

TREE = Tree.from_choices([[0], [1], [0, 0], [1, 0], [1, 1], [1, 1, 0]])
#       root 0;           1    2    3       4       5       6


@pytest.mark.parametrize(
    ("chosen", "node", "path"),
    [
        ([99, 0, 0, 0, 0, 0, 0], 0, [0, 0, 0, 0]),
        ([11, 99, 0, 0, 0, 0, 0], 1, [0, 1, 1, 1]),
        ([11, 13, 15, 0, 0, 16, 0], 3, [0, 1, 3, 3]),
        ([12, 13, 15, 0, 0, 16, 0], 6, [0, 2, 5, 6]),
        ([12, 13, 15, 0, 0, 99, 0], 5, [0, 2, 5, 5]),
        # Below a wrong node nothing counts, however right it looks: 16 follows 15, but 12 was not chosen.
        ([99, 13, 15, 0, 0, 16, 0], 0, [0, 0, 0, 0]),
    ],
)
def test_the_longest_path_of_right_nodes_is_accepted(chosen: list[int], node: int, path: list[int]) -> None:
    """Catches a node accepted under a wrong parent, a node compared with its own choice instead of its parent's, and
    a length off by one."""
    tokens = torch.tensor([[10, 11, 12, 13, 14, 15, 16]])
    accepted = accept_longest(tokens, torch.tensor([chosen]), TREE)
    assert accepted.node_B.tolist() == [node]
    assert accepted.length_B.tolist() == [int(TREE.depths_N[node]) + 1]
    assert accepted.path_BA.tolist() == [path]


def test_token_0_as_a_real_argmax() -> None:
    """Catches the reference's pads of token 0, which are accepted where the argmax is token 0."""
    tokens = torch.tensor([[5, 0, 3, 7, 8, 9, 4], [5, 1, 3, 7, 8, 9, 4]])
    logits = torch.zeros(2, 7, 12)
    logits[:, :, 0] = 1.0
    accepted = accept_longest(tokens, choose_greedy(logits), TREE)
    assert accepted.node_B.tolist() == [1, 0]
    assert accepted.length_B.tolist() == [2, 1]


def test_rows_are_judged_each_by_its_own_choices() -> None:
    """Catches a batch in which one row's acceptance decides for all."""
    tokens = torch.tensor([[10, 11, 12, 13, 14, 15, 16]] * 3)
    chosen = torch.tensor([[12, 0, 14, 0, 0, 0, 0], [11, 13, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0]])
    assert accept_longest(tokens, chosen, TREE).node_B.tolist() == [4, 3, 0]


def test_without_a_tree_only_the_root_counts() -> None:
    """Catches plain decoding that emits nothing."""
    accepted = accept_longest(torch.tensor([[4]]), torch.tensor([[9]]), OFF)
    assert (accepted.node_B.item(), accepted.length_B.item()) == (0, 1)
    assert accepted.path_BA.tolist() == [[0]]


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 1.0), (1.7, 0.8)])
def test_draws_follow_the_target_distribution(temperature: float, top_p: float) -> None:
    """Catches a draw from anything but softmax(logits / T) within its nucleus (chi-square, 200,000 draws)."""
    draws = 200_000
    logits = torch.tensor([0.3, -1.0, 2.0, 1.1, -0.4, 0.9, -2.0])
    probs = (logits.double() / temperature).softmax(-1)
    if top_p < 1:
        order = probs.argsort(descending=True)
        count = int((probs[order].cumsum(0) < top_p).sum()) + 1
        kept = torch.zeros_like(probs)
        kept[order[:count]] = probs[order[:count]]
        assert 1 < count < len(probs)
        probs = kept / kept.sum()
    uniform = torch.rand(draws, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    drawn = choose_sampled(logits.expand(draws, -1), temperature=temperature, top_p=top_p, uniform_N=uniform)
    counts = torch.bincount(drawn, minlength=len(probs))
    possible = probs > 0
    assert not counts[~possible].any()
    _, p_value = stats.chisquare(counts[possible].numpy(), (probs[possible] * draws).numpy())
    assert p_value > 1e-3


def test_the_nucleus_is_the_smallest_set_that_reaches_top_p() -> None:
    """Catches a nucleus one token short, or one too large, and a likeliest token cut away."""
    logits = torch.tensor([[0.1, 0.5, 0.4]]).log()
    assert sampling_probabilities(logits, temperature=1.0, top_p=0.49)[0].tolist() == [0.0, 1.0, 0.0]
    torch.testing.assert_close(
        sampling_probabilities(logits, temperature=1.0, top_p=0.6), torch.tensor([[0.0, 5 / 9, 4 / 9]])
    )
    torch.testing.assert_close(sampling_probabilities(logits, temperature=1.0, top_p=0.95), logits.exp())
    assert sampling_probabilities(logits, temperature=1.0, top_p=1e-9)[0].tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("seed", range(20))
def test_tokens_of_probability_0_are_never_chosen(seed: int) -> None:
    """Catches uniforms at the ends of [0, 1) that land before the first or past the last possible token."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(64, 50, generator=generator)
    logits[:, :3] = logits[:, -3:] = float("-inf")
    logits[torch.rand(64, 50, generator=generator) < 0.3] = float("-inf")
    logits[:, 10] = 0.0
    largest_below_1 = 1.0 - 2.0**-53
    for uniform in (0.0, 2.0**-60, 0.5, largest_below_1):
        drawn = choose_sampled(
            logits, temperature=0.9, top_p=1.0, uniform_N=torch.full((64,), uniform, dtype=torch.float64)
        )
        assert bool(logits.gather(1, drawn[:, None]).isfinite().all())


def test_uniforms_map_to_tokens_in_order() -> None:
    """Catches an inverted or shifted cumulative distribution."""
    logits = torch.tensor([0.25, 0.0, 0.5, 0.25]).log().expand(6, -1)
    uniform = torch.tensor([0.0, 0.2499, 0.2501, 0.7499, 0.7501, 0.9999], dtype=torch.float64)
    drawn = choose_sampled(logits, temperature=1.0, top_p=1.0, uniform_N=uniform)
    assert drawn.tolist() == [0, 0, 2, 2, 3, 3]
