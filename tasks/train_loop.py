"""What every training rank runs: DeepSpeed around the heads, over windows of positions. Started by Ray Train.

Knows nothing of artifacts' keys; it is told files, and writes into the partial directory it is given.
Legend: P positions of a batch, K heads, D hidden.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infra.artifacts import write_json
from infra.deepspeed_config import deepspeed_config
from infra.environment import quiet
from medusa_core.checkpoint import save_heads
from medusa_core.heads import HeadsConfig, MedusaHeads
from medusa_core.losses import IGNORE, head_weights, weighted_loss
from medusa_core.schedules import cosine_with_warmup
from tasks.backbone import load_model
from tasks.stage import dtype_of
from tasks.training_data import Positions, batches, live_hidden, load_positions, window_plan

log = logging.getLogger(__name__)
TOPS = (1, 3, 5, 10)
CHECKPOINTS, CURVE = ".checkpoints", "curve.jsonl"


class _Objective(nn.Module):
    """The heads with their loss as one module, so that DeepSpeed sees every parameter used in its forward."""

    def __init__(self, heads: MedusaHeads, decay: float) -> None:
        super().__init__()
        self.heads = heads
        self.register_buffer("weights_K", head_weights(heads.num_heads, decay), persistent=False)

    def forward(self, hidden_PD: torch.Tensor, labels_PK: torch.Tensor, counts_K: torch.Tensor) -> torch.Tensor:
        """Σ_k λ_k · (sum over this rank's positions) / counts_K."""
        sums_K, _ = self.heads.losses(hidden_PD, labels_PK)
        return weighted_loss(sums_K, counts_K, self.weights_K.float())


def train_loop(spec: dict[str, Any]) -> None:
    """Trains to the end, resuming from the newest checkpoint, and writes heads, curve and evaluation."""
    quiet()
    import deepspeed
    import torch.distributed as dist

    # On a CPU DeepSpeed would compile a shared-memory collective with g++ for minutes at first use; gloo does it all.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.set_num_threads(spec["threads"])
    config, directory = spec["config"], Path(spec["directory"])
    rank, world = dist.get_rank(), dist.get_world_size()
    deepspeed.init_distributed(dist_init_required=False)
    device = torch.device("cuda", torch.cuda.current_device()) if spec["device"].startswith("cuda") else "cpu"
    dtype = dtype_of(config["dtype"])
    torch.manual_seed(config["seed"])
    backbone = load_model(spec["backbone"], dtype_of(spec["hidden_dtype"]), str(device))
    heads = _new_heads(spec, backbone).to(device=device, dtype=dtype)
    reader = _Reader(spec, backbone)
    if spec["cached"]:
        del backbone
    rows = config["batch_positions"] // (world * config["accumulation"])
    total = total_steps(spec)
    optimizer = torch.optim.AdamW(
        [{"params": list(heads.parameters()), "name": "heads", "lr": config["learning_rate"]}],
        betas=(0.9, 0.999),
        weight_decay=config["weight_decay"],
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: cosine_with_warmup(step, total=total, warmup=min(config["warmup_steps"], total // 4))
    )
    engine, *_ = deepspeed.initialize(
        model=_Objective(heads, config["decay"]),
        optimizer=optimizer,
        lr_scheduler=schedule,
        config=deepspeed_config(
            micro_batch=rows,
            accumulation=config["accumulation"],
            dtype=config["dtype"],
            clip=config["clip"],
            zero_stage=config["zero_stage"],
        ),
    )
    run = _Run(engine, reader, spec, rank=rank, world=world, rows=rows, total=total, directory=directory)
    run.train()
    dist.barrier()


def _new_heads(spec: dict[str, Any], backbone: Any) -> MedusaHeads:
    output = backbone.get_output_embeddings()
    bias = getattr(output, "bias", None)
    return MedusaHeads(
        HeadsConfig.model_validate(spec["heads"]),
        lm_weight_VD=output.weight.detach(),
        lm_bias_V=None if bias is None else bias.detach(),
        vocab_map_C=None if spec["vocab_map"] is None else torch.tensor(spec["vocab_map"]),
    )


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
            )
            self._last = (shards, positions)
        return self._last[1]


class _Run:
    """One run of the loop over a DeepSpeed engine: steps, checkpoints, curve, evaluation."""

    def __init__(
        self,
        engine: Any,
        reader: _Reader,
        spec: dict[str, Any],
        *,
        rank: int,
        world: int,
        rows: int,
        total: int,
        directory: Path,
    ) -> None:
        self.engine, self.reader, self.spec, self.config = engine, reader, spec, spec["config"]
        self.rank, self.world, self.rows, self.total, self.directory = rank, world, rows, total, directory
        self.dtype = dtype_of(self.config["dtype"])
        self.device = engine.device
        self.step = 0
        self.curve: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []

    def train(self) -> None:
        done = self._resume()
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
                    if self.step % self.config["checkpoint_steps"] == 0 and self.step < self.total:
                        self._checkpoint()
                    self._log()
            if self.step == seen and len(self.evaluations) <= epoch:
                self._evaluate(epoch)
        self._finish()

    def _train_step(self, positions: Positions, index_P: torch.Tensor) -> None:
        """One optimizer step over a global batch; this rank takes every `world`-th micro-batch of it."""
        labels_PK = positions.labels_PK[index_P]
        # Every head's mean is over the whole global batch, so the number of ranks and micro-batches cancels out.
        known_PK = (labels_PK != IGNORE) & (self.heads.inverse_V.cpu()[labels_PK.clamp(min=0)] != IGNORE)
        counts_K = known_PK.sum(0).clamp(min=1) / (self.world * self.config["accumulation"])
        loss = 0.0
        parts = list(index_P.split(self.rows))[self.rank :: self.world]
        parts += [index_P[:0]] * (self.config["accumulation"] - len(parts))
        for part in parts:
            hidden_PD = positions.hidden_PD[part].to(self.device, self.dtype)
            value = self.engine(hidden_PD, positions.labels_PK[part].to(self.device), counts_K.to(self.device))
            self.engine.backward(value)
            self.engine.step()
            loss += float(value.detach())
        total = torch.tensor([loss], dtype=torch.float64)
        torch.distributed.all_reduce(total)
        self.step += 1
        mean = float(total) / (self.world * self.config["accumulation"])
        self.curve.append({"step": self.step, "loss": mean, "lr": self.engine.get_lr()[0], "positions": len(index_P)})

    @property
    def heads(self) -> MedusaHeads:
        heads: MedusaHeads = self.engine.module.heads
        return heads

    def _log(self) -> None:
        """Tells the driver, which shows it, how far the run is."""
        if self.rank == 0 and (self.step % 10 == 0 or self.step == self.total):
            state = {"step": self.step, "loss": self.curve[-1]["loss"]}
            write_json(self.directory / self.spec["progress"], state)

    def _checkpoint(self) -> None:
        folder = self.directory / CHECKPOINTS
        tag = f"step-{self.step:07d}"
        state = {"step": self.step, "curve": self.curve, "evaluations": self.evaluations}
        self.engine.save_checkpoint(str(folder), tag=tag, client_state=state)
        torch.distributed.barrier()
        if self.rank == 0:
            for old in sorted(folder.glob("step-*"))[:-1]:
                shutil.rmtree(old, ignore_errors=True)

    def _resume(self) -> int:
        folder = self.directory / CHECKPOINTS
        if not (folder / "latest").exists():
            return 0
        _, state = self.engine.load_checkpoint(str(folder))
        self.step, self.curve, self.evaluations = state["step"], state["curve"], state["evaluations"]
        log.info("resuming after step %d of %d", self.step, self.total)
        return self.step

    @torch.no_grad()
    def _evaluate(self, epoch: int) -> None:
        """Loss and top-n accuracy per head on held-out conversations; the first rank does it, all keep the result."""
        box: list[Any] = [None]
        if self.rank == 0:
            held_out = load_positions(
                self.spec["held_out"],
                num_heads=self.heads.num_heads,
                hidden_size=self.reader.hidden_size,
                dtype=dtype_of(self.spec["hidden_dtype"]),
                live=self.reader.live,
            )
            box[0] = evaluate(self.heads, held_out, self.device, self.dtype) | {"epoch": epoch + 1, "step": self.step}
        torch.distributed.broadcast_object_list(box, src=0)
        self.evaluations.append(box[0])

    def _finish(self) -> None:
        if self.rank:
            return
        save_heads(
            self.directory / "heads",
            self.heads,
            backbone_name=self.spec["backbone_name"],
            backbone_digest=self.spec["backbone_digest"],
        )
        (self.directory / CURVE).write_text("".join(json.dumps(row) + "\n" for row in self.curve))
        write_json(self.directory / "evaluation.json", {"epochs": self.evaluations, "final": self.evaluations[-1]})


@torch.no_grad()
def evaluate(heads: MedusaHeads, positions: Positions, device: Any, dtype: torch.dtype) -> dict[str, Any]:
    """Mean loss per head over in-vocabulary labels, and accuracy per head over *all* labels (others are misses)."""
    sums, counts, ranks = torch.zeros(heads.num_heads), torch.zeros(heads.num_heads), []
    for index in torch.arange(len(positions)).split(4096):
        hidden = positions.hidden_PD[index].to(device, dtype)
        labels = positions.labels_PK[index].to(device)
        part_sums, part_counts = heads.losses(hidden, labels)
        sums += part_sums.float().cpu()
        counts += part_counts.cpu()
        ranks.append(heads.ranks(hidden, labels, width=min(TOPS[-1], len(heads.vocab_map_C))).cpu())
    rank_PK = torch.cat(ranks)
    labelled_K = (rank_PK >= 0).sum(0).clamp(min=1)
    result: dict[str, Any] = {
        f"top{top}": (((rank_PK >= 0) & (rank_PK < top)).sum(0) / labelled_K).tolist() for top in TOPS
    }
    return result | {"loss": (sums / counts.clamp(min=1)).tolist(), "held_out_positions": len(positions)}
