"""From ranks to probabilities to expected tokens per step, which must be what the engine then measures."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from medusa_core.calibration import JointStatistics, RankTable, accepted_lengths, cross_walk, walk
from medusa_core.engine import MedusaEngine
from medusa_core.errors import InputError
from medusa_core.heads import MedusaHeads
from medusa_core.losses import head_labels, path_tokens
from medusa_core.sampling import SamplingParams
from medusa_core.tree import OFF, Tree, cartesian, chain
from tests import toys


def table(ranks: list[list[int]], width: int = 2, conversation: list[int] | None = None) -> RankTable:
    count = len(ranks)
    return RankTable(
        np.array(ranks, np.int64),
        np.array(conversation or [0] * count, np.int64),
        np.arange(count, dtype=np.int64),
        width,
    )


def random_table(seed: int, positions: int = 60, heads: int = 3, width: int = 3) -> RankTable:
    rng = np.random.default_rng(seed)
    ranks = np.minimum(rng.geometric(0.5, size=(positions, heads)) - 1, width)
    # Labels run out head by head, the last first, as they do at the end of an answer.
    for row, missing in enumerate(rng.integers(0, heads + 1, positions) * (rng.random(positions) < 0.3)):
        if missing:
            ranks[row, heads - missing :] = -1
    return RankTable(ranks, np.sort(rng.integers(0, 5, positions)), np.arange(positions), width)


def test_each_head_is_divided_by_its_own_labels() -> None:
    """Catches the reference's single denominator, which under-estimates later heads."""
    ranks = table([[0, 0], [0, 0], [1, 1], [0, -1], [2, -1], [0, -1]])
    assert ranks.accuracy(1) == pytest.approx([4 / 6, 2 / 3])
    assert ranks.accuracy(2) == pytest.approx([5 / 6, 3 / 3])
    product = JointStatistics(ranks, backoff=math.inf)
    assert product.probability((0,)) == pytest.approx(4 / 6)
    assert product.probability((0, 0)) == pytest.approx(4 / 6 * 2 / 3)
    joint = JointStatistics(ranks, backoff=0.0)
    assert joint.probability((0, 0)) == pytest.approx(4 / 6 * 2 / 2)
    assert math.isnan(table([[0, -1]]).accuracy(1)[1])


def test_joint_counts_drop_the_independence_assumption() -> None:
    """Catches statistics that are the product after all: here rank 1 of head 2 comes only after rank 1 of head 1."""
    ranks = table([[0, 0]] * 5 + [[1, 1]] * 5)
    joint, product = JointStatistics(ranks, backoff=0.0), JointStatistics(ranks, backoff=math.inf)
    assert joint.probability((0, 0)) == joint.probability((1, 1)) == pytest.approx(0.5)
    assert joint.probability((0, 1)) == joint.probability((1, 0)) == 0.0
    assert {product.probability(p) for p in itertools.product(range(2), repeat=2)} == {0.25}
    assert joint.best_tree(5).choices == ((0,), (1,), (0, 0), (1, 1))
    blended = JointStatistics(ranks, backoff=5.0)
    assert blended.probability((0, 0)) == pytest.approx(0.5 * (5 + 5 * 0.5) / 10)


@pytest.mark.parametrize("backoff", [0.0, 4.0, math.inf])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_a_path_is_never_likelier_than_its_prefix(seed: int, backoff: float) -> None:
    """Catches statistics under which best-first growth is not optimal, and ranks whose shares exceed 1."""
    statistics = JointStatistics(random_table(seed), backoff=backoff)
    for depth in (1, 2, 3):
        for path in itertools.product(range(3), repeat=depth):
            here, above = statistics.probability(path), statistics.probability(path[:-1])
            assert not here > above
            children = [statistics.probability((*path[:-1], rank)) for rank in range(3)]
            assert not sum(children) > above + 1e-12


def test_accepted_lengths_are_the_longest_right_paths() -> None:
    """Catches a path followed through a rank the tree lacks, a missed rank taken for a hit, and a missing label."""
    tree = Tree.from_choices([[0], [1], [0, 0], [1, 1], [0, 0, 1]])
    ranks = table(
        [[0, 0, 1], [0, 0, 0], [0, 1, 1], [1, 1, 0], [1, 0, 0], [2, 0, 0], [0, -1, -1], [-1, -1, -1], [0, 0, -1]]
    )
    assert accepted_lengths(tree, ranks).tolist() == [3, 2, 1, 2, 1, 0, 1, 0, 2]
    assert accepted_lengths(OFF, ranks).tolist() == [0] * 9


def test_deep_and_wide_paths_are_told_apart() -> None:
    """Catches paths kept as one number that overflows: 20 heads at ranks up to 15 need 80 bits."""
    deep, other = [15, *[0] * 19], [7, *[0] * 19]
    ranks = RankTable(np.array([deep, other]), np.zeros(2, np.int64), np.arange(2), width=16)
    tree = Tree.from_choices([deep[:depth] for depth in range(1, 21)])
    assert accepted_lengths(tree, ranks).tolist() == [20, 0]


def test_a_walk_by_hand() -> None:
    """Catches uniform starts (every position a step), a jump off by one, and a last position that costs a step."""
    tree = chain(2)
    # Positions 0..6: accepted 2, -, -, 0, 1, -, last.  Steps at 0, 3, 4: 6 tokens after the first in 3 steps.
    ranks = table([[0, 0], [2, 2], [2, 2], [2, 0], [0, 2], [2, 2], [-1, -1]])
    walked = walk(tree, ranks)
    assert (walked.tokens_C.tolist(), walked.steps_C.tolist()) == ([6], [3])
    assert walked.tokens_per_step == 2.0
    assert walk(OFF, ranks).tokens_per_step == 1.0


def test_a_walk_does_not_cross_answers() -> None:
    """Catches a jump from one answer into the next, and answers of one conversation counted as another's."""
    ranks = RankTable(
        np.array([[0, 0], [0, 0], [-1, -1], [0, 0], [0, -1], [-1, -1], [2, 2], [-1, -1]], np.int64),
        np.array([4, 4, 4, 4, 4, 4, 9, 9], np.int64),
        # Conversation 4 has two answers (positions 3..5 and 20..22).
        np.array([3, 4, 5, 20, 21, 22, 7, 8], np.int64),
        2,
    )
    walked = walk(chain(2), ranks)
    assert walked.tokens_C.tolist() == [4, 1]
    assert walked.steps_C.tolist() == [2, 1]


def test_halves_share_no_conversation() -> None:
    """Catches a tree reported on the conversations it was chosen on."""
    first, second = random_table(0).halves()
    assert not set(first.conversation_P) & set(second.conversation_P)
    assert len(first.ranks_PK) + len(second.ranks_PK) == 60
    with pytest.raises(InputError, match="1 calibration conversation"):
        table([[0, 0]]).halves()


def test_the_interval_holds_the_estimate_and_repeats() -> None:
    """Catches resampling of positions instead of conversations: one conversation has no spread at all."""
    walked = walk(cartesian([2, 2]), random_table(1, positions=400))
    low, high = walked.interval()
    assert low < walked.tokens_per_step < high
    assert (low, high) == walked.interval()
    single = walk(chain(1), table([[0, 0], [2, 2], [0, 2], [-1, -1]]))
    assert single.interval() == (single.tokens_per_step, single.tokens_per_step)


def test_a_cross_walk_uses_every_conversation_with_a_tree_that_has_not_seen_it() -> None:
    """Catches trees judged on what they were chosen on, and conversations that change places between the halves."""
    # Even conversations are always right at rank 0, odd ones at rank 1: each half's tree is wrong for the other.
    ranks = [[rank, rank] for rank in (0, 1, 0, 1) for _ in range(4 + rank)]
    conversation = [number for number, rank in enumerate((0, 1, 0, 1)) for _ in range(4 + rank)]
    both = cross_walk(table(ranks, conversation=conversation), nodes=2)
    assert both.tokens_C.tolist() == both.steps_C.tolist() == [3, 4, 3, 4]
    assert walk(Tree.from_choices([[0]]), table(ranks, conversation=conversation)).steps_C.tolist() == [2, 4, 2, 4]


def test_a_ratio_of_walks_is_paired() -> None:
    """Catches intervals of a ratio drawn apart: a walk over itself has no spread, whatever its conversations are."""
    one, other = (walk(tree, random_table(3, positions=400)) for tree in (cartesian([2, 2]), chain(1)))
    assert one.over(one) == (1.0, (1.0, 1.0))
    value, (low, high) = one.over(other)
    assert low < value < high and value == one.tokens_per_step / other.tokens_per_step
    first = one.select([0, 2])
    assert first.tokens_C.tolist() == [one.tokens_C[0], one.tokens_C[2]]
    with pytest.raises(InputError, match="2 and 5 conversations"):
        first.over(other)


def test_a_tree_that_the_table_cannot_judge_is_refused() -> None:
    """Catches a rank past the table's width read as a hit."""
    with pytest.raises(InputError, match="rank 2, but ranks stop at 1"):
        walk(Tree.from_choices([[2]]), table([[0, 0]]))
    with pytest.raises(InputError, match="3 deep"):
        walk(chain(3), table([[0, 0]]))


@pytest.mark.parametrize("tree", [OFF, chain(3), cartesian([2, 1]), Tree.from_choices([[0], [1], [2], [1, 0], [0, 1]])])
def test_the_walk_is_what_the_engine_measures(
    toy: LlamaForCausalLM, heads_of_any_kind: MedusaHeads, tree: Tree
) -> None:
    """Catches any shift between labels, ranks, walk and engine: tokens per step must agree exactly, per prompt."""
    rng = random.Random(3)
    prompts = [toys.prompt_ids([rng.randrange(toys.WORDS) for _ in range(rng.randrange(1, 4))]) for _ in range(12)]
    engine = MedusaEngine(toy, heads_of_any_kind, tree)
    answers = engine.generate(prompts, SamplingParams(64), batch=1)
    engine.close()
    ranks, conversation, position = [], [], []
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids = torch.tensor(prompt + answer.tokens)
        mask = torch.arange(len(ids)) >= len(prompt)
        at = mask[1:].nonzero()[:, 0]
        labels = head_labels(ids, mask, heads_of_any_kind.num_heads)[at]
        path, hidden = path_tokens(ids.roll(-1)[at], labels), toys.hidden_states(toy, ids)[at]
        ranks.append(heads_of_any_kind.ranks(hidden, labels, path, width=4).numpy())
        conversation += [index] * len(at)
        position += at.tolist()
    walked = walk(tree, RankTable(np.concatenate(ranks), np.array(conversation), np.array(position), 4))
    assert walked.steps_C.tolist() == [answer.steps for answer in answers]
    assert walked.tokens_C.tolist() == [len(answer.tokens) - 1 for answer in answers]
    measured = sum(len(a.tokens) - 1 for a in answers) / sum(a.steps for a in answers)
    assert walked.tokens_per_step == measured
    assert measured > 1.5 or tree.is_off
