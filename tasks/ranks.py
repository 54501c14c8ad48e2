"""Stage `ranks`: at every held-out position, the rank that each head gave to the token that came. Portable: no timing.

One Parquet row per position, in order, so that joint counts and walks both follow from it. Knows nothing of trees.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pydantic import BaseModel, ConfigDict, Field

from infra.artifacts import Artifact, artifact_key
from infra.errors import UserError
from infra.progress import track
from medusa_core.calibration import RankTable
from medusa_core.checkpoint import load_heads
from tasks.backbone import backbone_info, load_model, model_dir
from tasks.distill import shard_paths as distill_shards
from tasks.stage import Context, dtype_of, write_table
from tasks.teacher import shard_paths as teacher_shards
from tasks.training_data import live_hidden, load_positions, pair_shards

KIND, STAGE_VERSION = "ranks", 1
TABLE, WIDTH = "ranks.parquet", b"max_rank"


class RanksConfig(BaseModel):
    """`max_rank` ranks are told apart; a tree can't be wider."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_rank: int = Field(16, ge=1)


def ranks(
    context: Context, config: RanksConfig, *, backbone: Artifact, heads: Artifact, distill: Artifact, teacher: Artifact
) -> Artifact:
    """Ranks of all heads on the calibration split."""
    info = backbone_info(backbone)
    semantic = config.model_dump(mode="json")
    inputs = {"heads": heads.digest("heads"), "distill": distill.digest(), "teacher": teacher.digest()}
    key = artifact_key(KIND, STAGE_VERSION, inputs=inputs, config=semantic)

    def build(partial: Path) -> dict[str, Any]:
        dtype = dtype_of(teacher.config["dtype"])
        device = context.placement.resolved_device()
        model = load_model(model_dir(backbone), dtype, device)
        trained = load_heads(heads.path / "heads", model, backbone_digest=info.digest)
        if config.max_rank > len(trained.vocab_map_C):
            raise UserError(
                f"ranks.max_rank is {config.max_rank}, but the heads know {len(trained.vocab_map_C)} tokens"
            )
        live = None if teacher.config["hidden"] else live_hidden(model)
        tables = []
        shards = pair_shards(distill_shards(distill), teacher_shards(teacher))
        with track("ranks", len(shards), "shards") as progress:
            for shard in shards:
                positions = load_positions(
                    [shard], num_heads=trained.num_heads, hidden_size=info.hidden_size, dtype=dtype, live=live
                )
                rank_PK = trained.ranks(
                    positions.hidden_PD.to(device),
                    positions.labels_PK.to(device),
                    positions.path_PK.to(device),
                    width=config.max_rank,
                )
                tables.append(_table(positions.samples, positions.sample_P, positions.position_P, rank_PK.cpu()))
                progress.advance(1)
        # The file alone travels with a registered version, so it says itself where its ranks stop.
        table = pa.concat_tables(tables).replace_schema_metadata({WIDTH: str(config.max_rank)})
        write_table(partial / TABLE, table)
        return {"positions": table.num_rows, "num_heads": trained.num_heads}

    return context.store.produce(KIND, key, inputs=inputs, config=semantic, build=build)


def read_ranks(path: Path, temperature: float | None = None) -> RankTable:
    """The rank table of one temperature (all if None) from a ranks file; UserError if nothing was measured at it."""
    table = pq.read_table(path)
    temperatures = np.asarray(table["temperature"].to_pylist())
    keep = np.ones(len(temperatures), bool) if temperature is None else temperatures == temperature
    if not keep.any():
        raise UserError(
            f"no ranks were measured at temperature {temperature}; there are {sorted(set(temperatures.tolist()))}: "
            "distill the calibration split at it, or choose one of these"
        )
    _, conversation_P = np.unique(table["conversation_id"].to_pylist(), return_inverse=True)
    return RankTable(
        ranks_PK=np.asarray(table["ranks"].to_pylist(), np.int64),
        conversation_P=conversation_P.astype(np.int64),
        position_P=np.asarray(table["position"].to_pylist(), np.int64),
        width=int(table.schema.metadata[WIDTH]),
    ).select(keep)


def conversation_names(path: Path) -> list[str]:
    """The conversations of a ranks file, in the order of `RankTable`'s numbers."""
    return sorted(set(pq.read_table(path, columns=["conversation_id"])["conversation_id"].to_pylist()))


def _table(
    samples: list[dict[str, object]], sample_P: np.ndarray, position_P: np.ndarray, rank_PK: torch.Tensor
) -> pa.Table:
    columns = {name: [samples[i][name] for i in sample_P.tolist()] for name in ("sample_id", "conversation_id")}
    columns["temperature"] = [samples[i]["temperature"] for i in sample_P.tolist()]
    return pa.table(
        {
            **columns,
            "position": pa.array(position_P, pa.int32()),
            "ranks": pa.array(rank_PK.tolist(), pa.list_(pa.int16())),
        }
    )
