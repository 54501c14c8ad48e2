"""What stays of a draft: the longest right path, the choice after each node, typical tokens. That the exact modes
follow the target's distribution is test_acceptance_exact's business."""

from __future__ import annotations

import pytest
import torch
from scipy import stats
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from medusa_core.acceptance import (
    Accepted,
    accept_longest,
    accept_rejection,
    accept_typical,
    choose_greedy,
    choose_sampled,
    draw_children,
    target_probabilities,
)
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
    """Catches a node accepted under a wrong parent, a node compared with its own choice instead of its parent's, a
    length off by one, and a next token that is not the choice after the node reached."""
    tokens = torch.tensor([[10, 11, 12, 13, 14, 15, 16]])
    accepted = accept_longest(tokens, torch.tensor([chosen]), TREE.on())
    assert accepted.next_B.tolist() == [chosen[node]]
    assert accepted.node_B.tolist() == [node]
    assert accepted.length_B.tolist() == [int(TREE.depths_N[node]) + 1]
    assert accepted.path_BA.tolist() == [path]


def test_token_0_as_a_real_argmax() -> None:
    """Catches the reference's pads of token 0, which are accepted where the argmax is token 0."""
    tokens = torch.tensor([[5, 0, 3, 7, 8, 9, 4], [5, 1, 3, 7, 8, 9, 4]])
    logits = torch.zeros(2, 7, 12)
    logits[:, :, 0] = 1.0
    accepted = accept_longest(tokens, choose_greedy(logits), TREE.on())
    assert accepted.node_B.tolist() == [1, 0]
    assert accepted.length_B.tolist() == [2, 1]


def test_rows_are_judged_each_by_its_own_choices() -> None:
    """Catches a batch in which one row's acceptance decides for all."""
    tokens = torch.tensor([[10, 11, 12, 13, 14, 15, 16]] * 3)
    chosen = torch.tensor([[12, 0, 14, 0, 0, 0, 0], [11, 13, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0]])
    assert accept_longest(tokens, chosen, TREE.on()).node_B.tolist() == [4, 3, 0]


def test_without_a_tree_only_the_root_counts() -> None:
    """Catches plain decoding that emits nothing."""
    accepted = accept_longest(torch.tensor([[4]]), torch.tensor([[9]]), OFF.on())
    assert (accepted.node_B.item(), accepted.length_B.item()) == (0, 1)
    assert accepted.path_BA.tolist() == [[0]]
    assert accepted.next_B.tolist() == [9]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("vocabulary", [1, 7, 255, 256, 257, 511, 512, 1000, 1024, 1279])
def test_the_greedy_choice_is_the_first_argmax(vocabulary: int, dtype: torch.dtype) -> None:
    """Catches a block that is off by one, a tail never looked at, a later one of equal maxima (bf16 has many, and
    a coarse grid forces them), and a crash where everything is -inf."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(3, 40, vocabulary, generator=generator).to(dtype)
    logits[1] = (logits[1] * 2).round()
    logits[2] = float("-inf")
    for row in range(38):  # One to three finite entries, equal; rows 38 and 39 stay without any.
        logits[2, row, torch.randint(vocabulary, (1 + row % 3,), generator=generator)] = -4.0
    for views in (logits, torch.cat([logits, logits + 9], -1)[..., :vocabulary]):
        assert torch.equal(choose_greedy(views), logits.float().argmax(-1))


@pytest.mark.parametrize("place", [0, 255, 256, 511, 512, 767, 768, 999])
def test_the_greedy_choice_finds_a_maximum_anywhere(place: int) -> None:
    """Catches a last block, which overlaps the one before, that starts at the wrong token."""
    logits = torch.zeros(1, 1, 1000)
    logits[..., place] = 1.0
    assert choose_greedy(logits).tolist() == [[place]]


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
    assert target_probabilities(logits, temperature=1.0, top_p=0.49)[0].tolist() == [0.0, 1.0, 0.0]
    torch.testing.assert_close(
        target_probabilities(logits, temperature=1.0, top_p=0.6), torch.tensor([[0.0, 5 / 9, 4 / 9]])
    )
    torch.testing.assert_close(target_probabilities(logits, temperature=1.0, top_p=0.95), logits.exp())
    assert target_probabilities(logits, temperature=1.0, top_p=1e-9)[0].tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.8])
@pytest.mark.parametrize("top_k", [0, 1, 5, 40, 1000])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.95, 1.0])
def test_the_target_is_transformers(temperature: float, top_k: int, top_p: float) -> None:
    """Catches another order than temperature, top-k, nucleus, and a nucleus of the mass before top-k."""
    logits = 3 * torch.randn(50, 120, generator=torch.Generator().manual_seed(1))
    ids = torch.zeros(50, 1, dtype=torch.int64)
    scores = TemperatureLogitsWarper(temperature)(ids, logits)
    if top_k:
        scores = TopKLogitsWarper(top_k)(ids, scores)
    expected = TopPLogitsWarper(top_p)(ids, scores).softmax(-1) if top_p < 1 else scores.softmax(-1)
    probs = target_probabilities(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    assert torch.equal(probs > 0, expected > 0)
    torch.testing.assert_close(probs, expected)


def test_top_k_keeps_ties() -> None:
    """Catches a top-k that keeps k tokens where transformers keeps every token as likely as the k-th."""
    logits = torch.tensor([[1.0, 3.0, 1.0, 0.0, 1.0], [4.0, 3.0, 2.0, 1.0, 0.0]])
    probs = target_probabilities(logits, temperature=1.0, top_k=2)
    torch.testing.assert_close(probs, TopKLogitsWarper(2)(torch.zeros(2, 1), logits).softmax(-1))
    assert (probs > 0).tolist() == [[True, True, True, False, True], [True, True, False, False, False]]


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


def typical(
    tokens: list[int], rows: dict[int, list[float]], *, tree: Tree = TREE, temperature: float = 1.0, **thresholds: float
) -> Accepted:
    """accept_typical where node n's target is rows[n]; other nodes put everything on token 7."""
    probs = torch.zeros(1, tree.nodes, 8)
    probs[..., 7] = 1.0
    for node, row in rows.items():
        probs[0, node] = torch.tensor(row + [0.0] * (8 - len(row)))
    thresholds = {"epsilon": 0.09, "delta": 0.3} | thresholds
    return accept_typical(torch.tensor([tokens]), probs.log(), tree.on(), temperature=temperature, **thresholds)


# Entropy 0.571 nats, exp(-H) 0.565: min(0.09, 0.3 * 0.565 = 0.170) = 0.09.
PEAKED = [0.83, 0.07, 0.1]
# Entropy 2.022 nats (2.917 bits), exp(-H) 0.132: min(0.09, 0.3 * 0.132 = 0.040) = 0.040.
FLAT = [0.14, 0.14, 0.14, 0.14, 0.14, 0.14, 0.13, 0.03]


@pytest.mark.parametrize(
    ("row", "token", "kept"),
    [(PEAKED, 2, True), (PEAKED, 1, False), (FLAT, 0, True), (FLAT, 6, True), (FLAT, 7, False), (PEAKED, 3, False)],
)
def test_a_token_is_typical_above_the_paper_s_threshold(row: list[float], token: int, kept: bool) -> None:
    """Catches epsilon and delta swapped (0.07 after PEAKED would pass: min(0.3, 0.051)), max for min (0.1 would
    not: 0.170) and bits for nats (0.03 after FLAT would pass: 0.016)."""
    accepted = typical([5, token], {0: row}, tree=Tree.from_choices([[0]]))
    assert accepted.length_B.tolist() == [2 if kept else 1]
    assert accepted.next_B.tolist() == [7 if kept else row.index(max(row))]


def test_epsilon_caps_the_threshold_and_equality_does_not_pass() -> None:
    """Catches >= for >: four equal tokens have probability 0.25 exactly."""
    row, tree = [0.25] * 4, Tree.from_choices([[0]])
    assert typical([5, 0], {0: row}, tree=tree, epsilon=0.25, delta=9.0).length_B.tolist() == [1]
    assert typical([5, 0], {0: row}, tree=tree, epsilon=0.2499, delta=9.0).length_B.tolist() == [2]


def test_the_threshold_is_taken_after_temperature() -> None:
    """Catches entropy or probability of the untempered target: at T = 0.5 PEAKED's 0.1 falls to
    0.014, at T = 3 its 0.07 rises to 0.227; the threshold stays 0.09."""
    tree = Tree.from_choices([[0]])
    assert typical([5, 2], {0: PEAKED}, tree=tree, temperature=0.5).length_B.tolist() == [1]
    assert typical([5, 1], {0: PEAKED}, tree=tree, temperature=3.0).length_B.tolist() == [2]


def test_the_longest_typical_path_wins_over_the_likelier_one() -> None:
    """Catches likelihood before length, a path with a hole (6 below the untypical 5), and p taken at the node
    itself instead of its parent."""
    after = {0: [0.7, 0.3], 1: [0.0, 0.0, 1.0], 2: [0.0, 0.0, 0.0, 0.5, 0.5]}
    #          root 1  2  3  4  5  6
    accepted = typical([5, 0, 1, 0, 3, 0, 7], after)
    assert accepted.path_BA.tolist() == [[0, 2, 4, 4]]
    assert accepted.length_B.tolist() == [3]
    assert accepted.next_B.tolist() == [7]


def test_ties_go_to_the_likeliest_path_then_to_the_lower_node() -> None:
    """Catches a tie left to the node's number (3 before 4), to the last token's probability alone (0.9 at node 3,
    0.6 at node 4, but 0.18 against 0.48 over the path), or to whatever the device returns."""
    after = {0: [0.2, 0.8], 1: [0.1, 0.0, 0.9], 2: [0.0, 0.0, 0.2, 0.6, 0.2]}
    assert typical([5, 0, 1, 2, 3, 2, 6], after).node_B.tolist() == [4]
    after[0] = [0.45, 0.55]  # 0.405 against 0.33
    assert typical([5, 0, 1, 2, 3, 2, 6], after).node_B.tolist() == [3]
    equal = {0: [0.5, 0.5], 1: [0.5, 0.5], 2: [0.0, 0.0, 0.0, 0.5, 0.5]}
    assert typical([5, 0, 1, 1, 4, 3, 6], equal).node_B.tolist() == [3]


def test_typical_rows_are_judged_each_by_its_own_target() -> None:
    """Catches rows mixed up, and -inf logarithms of other nodes leaking into a path's likelihood."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(9, (40, 7), generator=generator)
    logits = 3 * torch.randn(40, 7, 9, generator=generator)
    logits[torch.rand(40, 7, 9, generator=generator) < 0.3] = float("-inf")
    logits[..., 8] = 0.0
    settings = {"temperature": 0.8, "epsilon": 0.09, "delta": 0.3}
    together = accept_typical(tokens, logits, TREE.on(), **settings)
    alone = [accept_typical(tokens[[row]], logits[[row]], TREE.on(), **settings).node_B.item() for row in range(40)]
    assert together.node_B.tolist() == alone
    assert len(set(alone)) > 3
    reached = logits[torch.arange(40), together.node_B]
    assert torch.equal(together.next_B, reached.argmax(-1))


def test_typical_at_temperature_0_is_greedy() -> None:
    """Catches a division by zero, and a rule that still accepts tokens other than the argmax."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(200, 7, 4, generator=generator)
    tokens = torch.randint(4, (200, 7), generator=generator)
    accepted = accept_typical(tokens, logits, TREE.on(), temperature=0.0, epsilon=0.09, delta=0.3)
    expected = accept_longest(tokens, choose_greedy(logits), TREE.on())
    assert torch.equal(accepted.node_B, expected.node_B)
    assert torch.equal(accepted.next_B, expected.next_B)
    assert int(accepted.length_B.max()) > 2


def test_nothing_waits_for_the_device() -> None:
    """Catches a value read back in the middle of a step: a meta tensor has none, so reading one raises."""
    with torch.device("meta"):
        tokens, logits = torch.zeros(2, 7, dtype=torch.int64), torch.zeros(2, 7, 1000)
        draft, uniform = torch.zeros(2, 3, 1000), torch.zeros(2, 7, dtype=torch.float64)
    tree = TREE.on("meta")
    accept_longest(tokens, choose_greedy(logits), tree)
    choose_sampled(logits[0], temperature=0.7, top_k=5, top_p=0.9, uniform_N=uniform[0])
    accept_typical(tokens, logits, tree, temperature=0.7, epsilon=0.09, delta=0.3)
    drawn, drawn_from = draw_children(tokens[:, 0], lambda depth, _: draft[:, depth, None], TREE, uniform)
    accepted = accept_rejection(drawn, logits, drawn_from, TREE, uniform, uniform[:, 0])
    assert accepted.next_B.shape == (2,)
    with pytest.raises((RuntimeError, NotImplementedError)):
        accepted.next_B.tolist()
