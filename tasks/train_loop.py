"""What every training rank runs: DeepSpeed around the heads, over windows of positions. Started by Ray Train.

Knows nothing of artifacts' keys; it is told files, and writes into the partial directory it is given.
Legend: P positions of a batch, K heads, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from medusa_core.checkpoint import load_heads, save_heads
from medusa_core.heads import HeadsConfig, MedusaHeads
from medusa_core.losses import count_labels, head_weights, weighted_loss
from tasks.backbone import load_model
from tasks.rank_run import CHECKPOINTS, RankRun, prepare_rank, start_engine, whole
from tasks.stage import dtype_of
from tasks.training_data import Positions, batches, live_hidden, load_positions, window_plan

TOPS = (1, 3, 5, 10)


class _Objective(nn.Module):
    """The heads with their loss as one module, so that DeepSpeed sees every parameter used in its forward."""

    def __init__(self, heads: MedusaHeads, decay: float) -> None:
        super().__init__()
        self.heads = heads
        self.register_buffer("weights_K", head_weights(heads.num_heads, decay), persistent=False)

    def forward(
        self,
        hidden_PD: torch.Tensor,
        path_PK: torch.Tensor,
        labels: torch.Tensor,
        shares: torch.Tensor | None,
        counts_K: torch.Tensor,
    ) -> torch.Tensor:
        """Σ_k λ_k · (sum over this rank's positions) / counts_K."""
        sums_K, _ = self.heads.losses(hidden_PD, labels, path_PK, shares_PKJ=shares)
        return weighted_loss(sums_K, counts_K, self.weights_K.float())


def train_loop(spec: dict[str, Any]) -> None:
    """Trains to the end, resuming from the newest checkpoint, and writes heads, curve and evaluation."""
    device, config = prepare_rank(spec), spec["config"]
    backbone = load_model(spec["backbone"], dtype_of(spec["hidden_dtype"]), str(device))
    heads = _initial_heads(spec, backbone).to(device=device, dtype=dtype_of(config["dtype"]))
    reader = _Reader(spec, backbone)
    if spec["cached"]:
        del backbone
    rows = config["batch_positions"] // (torch.distributed.get_world_size() * config["accumulation"])
    total = total_steps(spec)
    groups = [{"params": list(heads.parameters()), "name": "heads", "lr": config["learning_rate"]}]
    objective = _Objective(heads, config["decay"])
    engine = start_engine(
        objective,
        groups,
        config,
        micro_batch=rows,
        total=total,
        read_directly=heads.parameters(),
        checkpoints=spec["directory"] / CHECKPOINTS,
    )
    _Run(engine, reader, spec, rows=rows, total=total).train()
    torch.distributed.barrier()


def _initial_heads(spec: dict[str, Any], backbone: Any) -> MedusaHeads:
    if spec["initial"]:
        heads = load_heads(spec["initial"], backbone, backbone_digest=spec["backbone_digest"])
        return heads.requires_grad_(True).train()
    vocab_map = None if spec["vocab_map"] is None else torch.tensor(spec["vocab_map"])
    return MedusaHeads.on(backbone, HeadsConfig.model_validate(spec["heads"]), vocab_map)


def total_steps(spec: dict[str, Any]) -> int:
    """Optimizer steps of the whole run."""
    config, sizes = spec["config"], dict(zip(spec["shards"], spec["counts"], strict=True))
    steps = 0
    for epoch in range(config["epochs"]):
        for window in _windows(spec, epoch):
            steps += max(1, sum(sizes[shard] for shard in window) // config["batch_positions"])
    return steps


def _windows(spec: dict[str, Any], epoch: int) -> list[Any]:
    config = spec["config"]
    seed = config["seed"] * 1009 + epoch
    return window_plan(spec["shards"], spec["counts"], limit=config["window_positions"], seed=seed)


class _Reader:
    """Loads positions, from the cache or by running the backbone, and remembers the last window."""

    def __init__(self, spec: dict[str, Any], backbone: Any) -> None:
        self.spec = spec
        self.live = None if spec["cached"] else live_hidden(backbone)
        self.hidden_size = backbone.config.get_text_config().hidden_size
        self._last: tuple[list[Any], Positions] | None = None

    def load(self, shards: list[Any]) -> Positions:
        # An epoch over one window asks for the same shards again; sorting makes the order of rows depend on the set.
        shards = sorted(shards)
        if self._last is None or self._last[0] != shards:
            self._last = None
            positions = load_positions(
                shards,
                num_heads=self.spec["heads"]["num_heads"],
                hidden_size=self.hidden_size,
                dtype=dtype_of(self.spec["hidden_dtype"]),
                live=self.live,
                soft=self.spec["config"]["targets"] == "teacher",
            )
            self._last = (shards, positions)
        return self._last[1]


class _Run(RankRun):
    """The loop over windows of positions: steps and evaluation."""

    def __init__(self, engine: Any, reader: _Reader, spec: dict[str, Any], *, rows: int, total: int) -> None:
        super().__init__(engine, spec, total)
        self.reader, self.rows = reader, rows

    def train(self) -> None:
        done = self.resume()
        seen = 0
        for epoch in range(self.config["epochs"]):
            for number, window in enumerate(_windows(self.spec, epoch)):
                positions = self.reader.load(window)
                seed = self.config["seed"] * 7919 + epoch * 131 + number
                for index_P in batches(len(positions), self.config["batch_positions"], seed=seed):
                    seen += 1
                    if seen <= done:
                        continue
                    self._train_step(positions, index_P)
            if self.step == seen and len(self.evaluations) <= epoch:
                self._evaluate(epoch)
        self._finish()

    def _train_step(self, positions: Positions, index_P: torch.Tensor) -> None:
        """One optimizer step over a global batch; this rank takes every `world`-th micro-batch of it."""
        labels, shares = positions.targets or (positions.labels_PK, None)
        # Every head's mean is over the whole global batch, so the number of ranks and micro-batches cancels out.
        counts_K = count_labels(self.heads.known(labels[index_P].to(self.device, torch.int64)))
        counts_K = counts_K.clamp(min=1) / (self.world * self.config["accumulation"])
        loss = 0.0
        parts = list(index_P.split(self.rows))[self.rank :: self.world]
        parts += [index_P[:0]] * (self.config["accumulation"] - len(parts))
        for part in parts:
            hidden_PD = positions.hidden_PD[part].to(self.device, self.dtype)
            path_PK = positions.path_PK[part].to(self.device)
            target = labels[part].to(self.device, torch.int64)
            weight = None if shares is None else shares[part].to(self.device)
            value = self.engine(hidden_PD, path_PK, target, weight, counts_K)
            self.engine.backward(value)
            self.engine.step()
            loss += float(value.detach())
        (mean,) = self.average([loss])
        self.finish_step(loss=mean, positions=len(index_P))

    @property
    def heads(self) -> MedusaHeads:
        heads: MedusaHeads = self.engine.module.heads
        return heads

    @torch.no_grad()
    def _evaluate(self, epoch: int) -> None:
        """Loss and top-n accuracy per head on held-out conversations; the first rank does it, all keep the result."""
        box: list[Any] = [None]
        with whole(self.heads.parameters()):
            if self.rank == 0:
                box[0] = self._measured() | {"epoch": epoch + 1, "step": self.step}
        torch.distributed.broadcast_object_list(box, src=0)
        self.evaluations.append(box[0])

    def _measured(self) -> dict[str, Any]:
        held_out = load_positions(
            self.spec["held_out"],
            num_heads=self.heads.num_heads,
            hidden_size=self.reader.hidden_size,
            dtype=dtype_of(self.spec["hidden_dtype"]),
            live=self.reader.live,
        )
        # A copy: under ZeRO-3 the heads themselves would ask the other ranks for what they hold.
        heads = self.heads.detached()
        return evaluation_of([tally_positions(heads, held_out, self.device, self.dtype)])

    def _finish(self) -> None:
        with whole(self.heads.parameters()):
            if self.rank:
                return
            save_heads(
                self.directory / "heads",
                self.heads,
                backbone_name=self.spec["backbone_name"],
                backbone_digest=self.spec["backbone_digest"],
            )
        self.write_history()


@dataclass(frozen=True)
class Tally:
    """Heads on some positions: summed loss and in-vocabulary labels, both [K], and the rank of each label [P, K]."""

    sums_K: torch.Tensor
    counts_K: torch.Tensor
    rank_PK: torch.Tensor


def tally_positions(heads: MedusaHeads, positions: Positions, device: Any, dtype: torch.dtype) -> Tally:
    """`tally` of loaded positions."""
    return tally(heads, positions.hidden_PD, positions.labels_PK, positions.path_PK, device, dtype)


@torch.no_grad()
def tally(
    heads: MedusaHeads,
    hidden_PD: torch.Tensor,
    labels_PK: torch.Tensor,
    path_PK: torch.Tensor,
    device: Any,
    dtype: torch.dtype,
) -> Tally:
    """Runs heads over positions, some thousands at a time."""
    sums, counts, ranks = torch.zeros(heads.num_heads), torch.zeros(heads.num_heads), []
    for index in torch.arange(len(labels_PK)).split(4096):
        hidden = hidden_PD[index].to(device, dtype)
        labels, path = labels_PK[index].to(device), path_PK[index].to(device)
        part_sums, part_counts = heads.losses(hidden, labels, path)
        sums += part_sums.float().cpu()
        counts += part_counts.cpu()
        ranks.append(heads.ranks(hidden, labels, path, width=min(TOPS[-1], len(heads.vocab_map_C))).cpu())
    return Tally(sums, counts, torch.cat(ranks) if ranks else torch.empty(0, heads.num_heads, dtype=torch.int64))


def evaluation_of(tallies: Sequence[Tally]) -> dict[str, Any]:
    """Mean loss per head over in-vocabulary labels, and accuracy per head over *all* labels (others are misses)."""
    rank_PK = torch.cat([each.rank_PK for each in tallies])
    sums_K = torch.stack([each.sums_K for each in tallies]).sum(0)
    counts_K = torch.stack([each.counts_K for each in tallies]).sum(0)
    labelled_K = (rank_PK >= 0).sum(0).clamp(min=1)
    result: dict[str, Any] = {
        f"top{top}": (((rank_PK >= 0) & (rank_PK < top)).sum(0) / labelled_K).tolist() for top in TOPS
    }
    return result | {"loss": (sums_K / counts_K.clamp(min=1)).tolist(), "held_out_positions": len(rank_PK)}
