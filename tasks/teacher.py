"""Stage `teacher`: what the backbone itself says at every position that trains: top-k, tail mass, hidden states.

A row at position t is the distribution of token t+1, so it exists where loss_mask[t+1] holds; the last prompt position,
every answer's first decoding step, is included. Shards are aligned with the distill artifact's. Knows nothing of heads.
Legend: P positions, V vocabulary, D hidden, J kept ids.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pydantic import BaseModel, ConfigDict, Field

from infra.artifacts import Artifact, artifact_key
from infra.errors import UserError
from infra.progress import track
from medusa_core.packing import pack_linears
from medusa_core.tap import HiddenTap, read_positions
from tasks.backbone import backbone_identity, backbone_info, load_model, model_dir
from tasks.distill import shard_paths as distill_shards
from tasks.stage import Context, dtype_of, write_table

KIND, STAGE_VERSION = "teacher", 1
TOP_K = ("topk_ids", "topk_logprobs")
# Share of positions that may be unusable before that is the backbone's fault.
_MOST_SKIPPED = 0.01

log = logging.getLogger(__name__)

SCHEMA = pa.schema(
    [
        ("sample_id", pa.string()),
        ("positions", pa.list_(pa.int32())),
        ("topk_ids", pa.list_(pa.int32())),
        ("topk_logprobs", pa.list_(pa.float32())),
        ("tail_logmass", pa.list_(pa.float32())),
        ("hidden", pa.large_binary()),
    ]
)


class TeacherConfig(BaseModel):
    """What is kept of the backbone's distribution.

    `hidden`: `keep` writes hidden states, `live` leaves them to be made again by training, `auto` keeps what fits.
    (Not on and off: YAML reads those as booleans.)
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    top_k: int = Field(8, ge=1)
    hidden: Literal["auto", "keep", "live"] = "auto"
    dtype: str = "bfloat16"
    disk_share: float = Field(0.5, gt=0, le=1, description="share of the free disk that `auto` may fill")


def plan_bytes(positions: int, *, hidden_size: int, top_k: int, keep_hidden: bool, dtype: torch.dtype) -> int:
    """Bytes of a teacher artifact before compression: ids, log-probabilities, tail and, if kept, hidden states."""
    return positions * (4 + top_k * 8 + 4 + (hidden_size * dtype.itemsize if keep_hidden else 0))


def teacher(context: Context, config: TeacherConfig, *, backbone: Artifact, distill: Artifact) -> Artifact:
    """Runs the backbone once over a distill artifact."""
    info = backbone_info(backbone)
    context.store.root.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(context.store.root).free
    keep = keeps_hidden(config, distill.counts["tokens"], info.hidden_size, free)
    semantic = {"top_k": config.top_k, "hidden": keep, "dtype": config.dtype}
    inputs = {"backbone": backbone_identity(backbone), "distill": distill.digest()}
    key = artifact_key(KIND, STAGE_VERSION, inputs=inputs, config=semantic)
    shards = distill_shards(distill)

    def build(partial: Path) -> dict[str, Any]:
        pending = [path for path in shards if not (partial / path.name).exists()]
        with track("teacher", distill.counts["rows"], "answers") as progress:
            progress.skip(sum(pq.read_metadata(path).num_rows for path in shards if path not in pending))
            if pending:
                arguments = {
                    "model": model_dir(backbone),
                    "config": config,
                    "keep_hidden": keep,
                    "device": context.placement.resolved_device(),
                }
                for done in context.map(Reader, arguments, [(path, partial / path.name) for path in pending]):
                    progress.advance(done["rows"], f"{done['positions']:,} positions in the last shard")
        return _counts(partial, shards)

    return context.store.produce(KIND, key, inputs=inputs, config=semantic, build=build)


def shard_paths(artifact: Artifact) -> list[Path]:
    """Row shards of a teacher artifact, named as the distill shards they belong to."""
    return sorted(artifact.path.glob("shard-*.parquet"))


def unpack_hidden(raw: bytes, hidden_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Hidden states [P, D] of one row, as they were computed."""
    if not raw:
        return torch.empty(0, hidden_size, dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(-1, hidden_size)


class Reader:
    """One teacher actor: the model loaded once, one pass per answer."""

    def __init__(self, model: Path, config: TeacherConfig, keep_hidden: bool, device: str) -> None:
        self.config, self.keep_hidden = config, keep_hidden
        self.model = load_model(model, dtype_of(config.dtype), device)
        pack_linears(self.model)
        self.tap = HiddenTap(self.model)

    def run(self, shard: tuple[Path, Path]) -> dict[str, int]:
        """Reads a distill shard and writes its teacher shard."""
        source, target = shard
        table = pq.read_table(source, columns=["sample_id", "input_ids", "loss_mask"])
        rows = [
            self._row(sample, np.asarray(ids), np.asarray(mask))
            for sample, ids, mask in zip(*(table[name].to_pylist() for name in table.column_names), strict=True)
        ]
        write_table(target, pa.Table.from_pylist(rows, schema=SCHEMA))
        return {"rows": len(rows), "positions": sum(len(row["positions"]) for row in rows)}

    def _row(self, sample_id: str, input_ids: np.ndarray, loss_mask: np.ndarray) -> dict[str, Any]:
        positions_P = torch.from_numpy(np.flatnonzero(loss_mask[1:]))
        hidden_PD, logits_PV = read_positions(self.model, self.tap, torch.from_numpy(input_ids), positions_P)
        ids_PJ, logprobs_PJ, tail_P = top_k_with_tail(logits_PV, self.config.top_k)
        # A position at which the backbone says nothing usable teaches nothing: it is left out, and counted at the end.
        usable_P = ~logprobs_PJ.isnan().any(-1) & hidden_PD.isfinite().all(-1)
        hidden_PD, ids_PJ, logprobs_PJ = hidden_PD[usable_P], ids_PJ[usable_P], logprobs_PJ[usable_P]
        positions_P, tail_P = positions_P[usable_P.cpu()], tail_P[usable_P]
        raw = hidden_PD.cpu().contiguous().view(torch.uint8).numpy().tobytes() if self.keep_hidden else b""
        return {
            "sample_id": sample_id,
            "positions": positions_P.numpy(),
            "topk_ids": ids_PJ.flatten().cpu().numpy(),
            "topk_logprobs": logprobs_PJ.flatten().cpu().numpy(),
            "tail_logmass": tail_P.cpu().numpy(),
            "hidden": raw,
        }


def top_k_with_tail(logits_PV: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Top-k ids and log-probabilities [P, J] and the log mass of everything else [P], in fp32.

    The tail is a log-sum-exp over the complement: log(1 - Σ top) would lose it to rounding exactly where the top
    tokens hold nearly everything. With k = V the tail is -inf.
    """
    rest_PV = logits_PV.to(torch.float32, copy=True)
    top_PJ, ids_PJ = rest_PV.topk(min(k, rest_PV.shape[-1]), dim=-1)
    tail_P = rest_PV.scatter_(-1, ids_PJ, float("-inf")).logsumexp(-1)
    # Both sums share one pass over the vocabulary: the whole is the tail plus the few that were taken out.
    total_P = torch.logaddexp(tail_P, top_PJ.logsumexp(-1))
    return ids_PJ, top_PJ - total_P[:, None], tail_P - total_P


def keeps_hidden(config: TeacherConfig, positions: int, hidden_size: int, free: int) -> bool:
    """Whether hidden states are kept, with so many bytes free."""
    if config.hidden != "auto":
        return config.hidden == "keep"
    need = plan_bytes(
        positions, hidden_size=hidden_size, top_k=config.top_k, keep_hidden=True, dtype=dtype_of(config.dtype)
    )
    return need <= free * config.disk_share


def _counts(partial: Path, answers: Sequence[Path]) -> dict[str, Any]:
    rows = positions = asked = 0
    for path in answers:
        tails = pq.read_table(partial / path.name, columns=["tail_logmass"])["tail_logmass"].to_pylist()
        masks = pq.read_table(path, columns=["loss_mask"])["loss_mask"].to_pylist()
        rows += len(tails)
        positions += sum(map(len, tails))
        asked += sum(sum(mask[1:]) for mask in masks)
    if not asked:
        raise UserError("no position of the distilled answers trains a head: every answer is empty")
    skipped = asked - positions
    if skipped > _MOST_SKIPPED * asked:
        raise UserError(
            f"the backbone's hidden states or logits are not finite at {skipped} of {asked} positions (at most "
            f"{_MOST_SKIPPED:.0%} are left out): look at its weights and dtype, or give another teacher.dtype"
        )
    if skipped:
        log.warning("%d of %d positions left out: the backbone's output there is not finite", skipped, asked)
    return {"rows": rows, "positions": positions, "skipped": skipped}


def positions_of(table: pa.Table) -> Sequence[np.ndarray]:
    """Position arrays of a teacher table's rows."""
    return [np.asarray(row) for row in table["positions"].to_pylist()]
