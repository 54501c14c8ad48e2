"""What all stages share: where they run, and how their progress and results are handed on. No stage's own logic."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pydantic import BaseModel, ConfigDict, Field

from infra.artifacts import ArtifactStore, atomic_path
from infra.errors import UserError
from infra.ray_cluster import Cluster

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Placement(BaseModel):
    """Where work runs. Nothing here changes a result, so none of it enters a key."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: str = Field("auto", description="cpu, cuda, or auto: cuda if there is one")
    ray_address: str | None = None
    actors: int | None = Field(None, ge=1, description="generation workers; default: one per core or GPU")
    train_workers: int | None = Field(None, ge=1, description="training ranks; default: one per GPU, or one per core")
    threads: int | None = Field(None, ge=1, description="threads of timed stages; default: every core")

    def resolved_device(self) -> str:
        if self.device == "auto":
            return "cuda" if torch.cuda.is_available() else "cpu"
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise UserError(f"placement.device is {self.device!r}, but torch sees no GPU: use 'cpu' or 'auto'")
        return self.device

    def parallel(self) -> int:
        """How many workers fill the machine: its GPUs, else its cores."""
        if self.resolved_device().startswith("cuda"):
            return torch.cuda.device_count()
        return os.cpu_count() or 1

    @property
    def actor_count(self) -> int:
        return self.actors or self.parallel()

    @property
    def train_worker_count(self) -> int:
        return self.train_workers or self.parallel()

    @property
    def thread_count(self) -> int:
        return self.threads or os.cpu_count() or 1


@dataclass(frozen=True)
class Context:
    """What a stage is given besides its configuration and inputs."""

    store: ArtifactStore
    placement: Placement = field(default_factory=Placement)
    cluster: Cluster = field(default_factory=Cluster)

    def map(self, make: Callable[..., Any], arguments: dict[str, Any], shards: Sequence[Any]) -> Iterator[Any]:
        """`make(**arguments).run(shard)` for every shard, as they finish, over actors that share the machine evenly."""
        actors = self.placement.actor_count
        gpus = 1.0 if self.placement.resolved_device().startswith("cuda") else 0.0
        threads = max(1, self.cluster.cpus // actors)
        return self.cluster.map(make, arguments, shards, actors=actors, threads=threads, gpus=gpus)


def write_table(path: Path, table: pa.Table) -> None:
    """Writes Parquet whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def read_tables(paths: Iterable[Path], columns: list[str] | None = None) -> pa.Table:
    """The rows of several Parquet files, in the order given."""
    return pa.concat_tables([pq.read_table(path, columns=columns) for path in paths])


def dtype_of(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise UserError(f"dtype is {name!r}; use one of {sorted(DTYPES)}")
    return DTYPES[name]
