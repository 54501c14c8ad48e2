"""Training positions from the distill and teacher artifacts: hidden states with their labels, in windows of shards.

Where the teacher kept hidden states they are read; otherwise the frozen backbone makes them again, with the same
result. Knows nothing of heads' layouts or optimizers.
Legend: P positions, T tokens, K heads, D hidden, J kept ids.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch

from infra.errors import UserError
from medusa_core.losses import IGNORE, head_labels, path_tokens
from medusa_core.tap import HiddenTap, read_hidden
from tasks.teacher import TOP_K, positions_of, unpack_hidden

Shard = tuple[Path, Path]
HiddenSource = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Positions:
    """Rows that train or evaluate heads. sample_P numbers the answers, position_P their tokens; `targets` are tokens
    [P, K, J] with their shares, where heads learn distributions; path_PK are the true tokens t + 1 .. t + K."""

    hidden_PD: torch.Tensor
    labels_PK: torch.Tensor
    path_PK: torch.Tensor
    sample_P: np.ndarray
    position_P: np.ndarray
    samples: list[dict[str, object]]
    targets: tuple[torch.Tensor, torch.Tensor] | None = None

    def __len__(self) -> int:
        return len(self.labels_PK)


def pair_shards(distill: Sequence[Path], teacher: Sequence[Path]) -> list[Shard]:
    """Shards of both artifacts by name; UserError if they don't belong together."""
    if [p.name for p in distill] != [p.name for p in teacher]:
        raise UserError(f"{distill[0].parent} and {teacher[0].parent} hold different shards: rebuild the teacher")
    return list(zip(distill, teacher, strict=True))


def count_positions(shard: Shard) -> int:
    """Positions of a shard, from its teacher file."""
    return sum(len(row) for row in pq.read_table(shard[1], columns=["tail_logmass"])["tail_logmass"].to_pylist())


def load_positions(
    shards: Sequence[Shard],
    *,
    num_heads: int,
    hidden_size: int,
    dtype: torch.dtype,
    live: HiddenSource | None = None,
    soft: bool = False,
) -> Positions:
    """All positions of the shards in order. `live` computes hidden states where the teacher kept none; `soft` adds what
    the teacher said at the labels' places."""
    hidden, labels, paths, sample, position, samples, targets = [], [], [], [], [], [], []
    columns = ["sample_id", "positions", "hidden", *(TOP_K if soft else ())]
    for distill_path, teacher_path in shards:
        rows = pq.read_table(distill_path).to_pylist()
        table = pq.read_table(teacher_path, columns=columns)
        ids, raw = table["sample_id"].to_pylist(), table["hidden"].to_pylist()
        said = list(zip(*(table[name].to_pylist() for name in TOP_K), strict=True)) if soft else [None] * len(ids)
        for row, teacher_id, at, packed, top in zip(rows, ids, positions_of(table), raw, said, strict=True):
            if row["sample_id"] != teacher_id:
                raise UserError(f"{teacher_path} holds {teacher_id} where {distill_path} holds {row['sample_id']}")
            input_ids_T = torch.tensor(row["input_ids"], dtype=torch.int64)
            at_P = torch.from_numpy(at.astype(np.int64))
            labels_TK = head_labels(input_ids_T, torch.tensor(row["loss_mask"]), num_heads)
            hidden.append(live(input_ids_T, at_P) if live else unpack_hidden(packed, hidden_size, dtype))
            labels.append(labels_TK[at_P])
            # The last token has no next one, and no head a label there.
            paths.append(path_tokens(input_ids_T.roll(-1)[at_P], labels[-1]))
            if top is not None and len(at):
                ids_PJ, logprobs_PJ = (torch.tensor(kept).view(len(at), -1) for kept in top)
                targets.append(teacher_targets(labels[-1], at_P, ids_PJ, logprobs_PJ))
            sample.append(np.full(len(at), len(samples)))
            position.append(at)
            samples.append({name: row[name] for name in ("sample_id", "conversation_id", "temperature")})
    return Positions(
        torch.cat(hidden),
        torch.cat(labels),
        torch.cat(paths),
        np.concatenate(sample),
        np.concatenate(position),
        samples,
        (torch.cat([ids for ids, _ in targets]), torch.cat([shares for _, shares in targets])) if targets else None,
    )


def teacher_targets(
    labels_PK: torch.Tensor, at_P: torch.Tensor, ids_PJ: torch.Tensor, logprobs_PJ: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the teacher said at the place of each label of one answer: tokens [P, K, J] (int32; IGNORE where there is
    no label) and their probabilities.

    The label of head k at position t is token t + k + 1, whose distribution is the teacher's at t + k. Where the
    teacher has nothing there, the label itself has the whole mass.
    """
    count, heads = labels_PK.shape
    wanted_PK = at_P[:, None] + torch.arange(1, heads + 1)
    # Positions ascend, and some may be missing.
    source_PK = torch.searchsorted(at_P, wanted_PK).clamp(max=count - 1)
    found_PK = at_P[source_PK] == wanted_PK
    alone_PKJ = torch.full((count, heads, ids_PJ.shape[1]), IGNORE)
    alone_PKJ[..., 0] = labels_PK
    tokens_PKJ = torch.where(found_PK[..., None], ids_PJ[source_PK], alone_PKJ)
    tokens_PKJ = torch.where(labels_PK[..., None] == IGNORE, IGNORE, tokens_PKJ)
    shares_PKJ = torch.where(found_PK[..., None], logprobs_PJ[source_PK].exp(), 1.0)
    return tokens_PKJ.to(torch.int32), shares_PKJ


def live_hidden(model: torch.nn.Module) -> HiddenSource:
    """Hidden states from the frozen backbone itself."""
    tap = HiddenTap(model)  # type: ignore[arg-type]

    def compute(input_ids_T: torch.Tensor, at_P: torch.Tensor) -> torch.Tensor:
        # A copy, because what is made in inference mode can't be trained on.
        return read_hidden(model, tap, input_ids_T, at_P).to("cpu", copy=True)  # type: ignore[arg-type]

    return compute


def window_plan(shards: Sequence[Shard], counts: Sequence[int], *, limit: int, seed: int) -> list[list[Shard]]:
    """The shards in a seeded order, grouped so that a window holds about `limit` positions (at least one shard)."""
    order = torch.randperm(len(shards), generator=torch.Generator().manual_seed(seed)).tolist()
    windows: list[list[Shard]] = []
    size = limit
    for index in order:
        if size >= limit:
            windows.append([])
            size = 0
        windows[-1].append(shards[index])
        size += counts[index]
    return windows


def batches(positions: int, batch: int, *, seed: int) -> Iterator[torch.Tensor]:
    """Index batches of a window in a seeded order; the last, incomplete one is left out unless it is the only one."""
    order = torch.randperm(positions, generator=torch.Generator().manual_seed(seed))
    for start in range(0, max(1, positions // batch) * batch, batch):
        yield order[start : start + batch]


def frequent_tokens(shards: Sequence[Path], *, size: int, vocab: int) -> torch.Tensor:
    """The `size` tokens that the model generated most, sorted by id; ties and unseen tokens go by id."""
    counter: Counter[int] = Counter()
    for path in shards:
        table = pq.read_table(path, columns=["input_ids", "loss_mask"])
        for ids, mask in zip(table["input_ids"].to_pylist(), table["loss_mask"].to_pylist(), strict=True):
            counter.update(np.asarray(ids)[np.asarray(mask)].tolist())
    ranked = sorted(range(vocab), key=lambda token: (-counter[token], token))
    return torch.tensor(sorted(ranked[:size]))
