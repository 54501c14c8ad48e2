"""`medusa bench train`: stage 1's training against the obvious way to write it, step by step on the same answers.

Four contestants in processes of their own, asked for a step in turn: `obvious` (backbone run live, every row padded to
the longest, all logits of every head at once), `live` (ours, from the same live backbone, full vocabulary), `cached`
(ours, from stored hidden states, truncated vocabulary), and `cached_amortised`, which is `cached` with the pass that
stores them counted in. Tokens are positions that train. Knows nothing of ranks or DeepSpeed.
Legend: B answers of a step, M longest answer, P positions, K heads, D hidden, V vocabulary, C head vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import nn
from torch.nn import functional as F

from infra.fresh_process import FreshProcess
from infra.machine import peak_resident_mb, reset_peak_resident, resident_mb
from infra.progress import track
from medusa_core.heads import HeadsConfig, MedusaHeads
from medusa_core.losses import IGNORE, head_labels, head_weights, weighted_loss
from medusa_core.tap import HiddenTap, read_hidden
from tasks.backbone import load_model
from tasks.stage import dtype_of

Answer = tuple[list[int], list[bool]]


class TrainBenchConfig(BaseModel):
    """What is compared. `epochs` is over how many the caching pass is spread: as many as the default recipe has."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: int = Field(20, ge=1)
    answers: int = Field(24, ge=1, description="answers per step")
    num_heads: int = Field(4, ge=1)
    vocab: int = Field(8192, ge=1, description="head vocabulary of the cached contestant")
    learning_rate: float = Field(1e-3, gt=0)
    dtype: str = "float32"
    epochs: int = Field(2, ge=1)


def measure_training(
    config: TrainBenchConfig, model: Path, answers: Sequence[Answer], vocab_map: Sequence[int], threads: int
) -> dict[str, Any]:
    """{obvious, live, cached, cached_amortised: {tokens_per_second, peak_memory_mb}, ratios, largest loss difference}.

    Steps alternate between the contestants, so that a busy second falls on all of them.
    """
    wanted = config.steps * config.answers
    batches = [list(answers[i : i + config.answers]) for i in range(0, wanted, config.answers)]
    longest = max(len(ids) for ids, _ in answers[:wanted])
    spec = config.model_dump() | {"model": str(model), "threads": threads, "longest": longest, "map": list(vocab_map)}
    workers = {
        name: FreshProcess(name, make, spec)
        for name, make in (("obvious", _Obvious), ("live", _Live), ("cached", _Cached))
    }
    seconds: dict[str, list[float]] = {name: [] for name in workers}
    losses: dict[str, list[float]] = {name: [] for name in workers}
    tokens = 0
    try:
        for worker in workers.values():
            worker.call("begin")
        caching = workers["cached"].call("cache", batches)
        with track("bench train", config.steps, "steps") as progress:
            for batch in batches:
                for name, worker in workers.items():
                    took, loss, tokens_of_step = worker.call("step", batch)
                    seconds[name].append(took)
                    losses[name].append(loss)
                tokens += tokens_of_step
                progress.advance(1)
        memory = {name: worker.call("memory") for name, worker in workers.items()}
    finally:
        for worker in workers.values():
            worker.close()
    taken = {name: sum(each) for name, each in seconds.items()}
    taken["cached_amortised"] = taken["cached"] + caching / config.epochs
    memory["cached_amortised"] = memory["cached"]
    report: dict[str, Any] = {
        name: {"tokens_per_second": tokens / took, "peak_memory_mb": round(memory[name])}
        for name, took in taken.items()
    }
    obvious = report["obvious"]
    report["tokens"], report["caching_seconds"], report["threads"] = tokens, caching, threads
    report["config"] = config.model_dump()
    report["speedup"] = {
        name: report[name]["tokens_per_second"] / obvious["tokens_per_second"] for name in taken if name != "obvious"
    }
    report["memory_share"] = {name: memory[name] / memory["obvious"] for name in taken if name != "obvious"}
    pairs = zip(losses["obvious"], losses["live"], strict=True)
    report["largest_loss_difference"] = max(abs(left - right) for left, right in pairs)
    return report


class _Contestant:
    """One way to train, in its own process. A step answers with its seconds, its loss and its tokens."""

    # As the pipeline's own optimizer is; the obvious one is torch's default.
    fused = True

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        torch.set_num_threads(spec["threads"])
        self.dtype = dtype_of(spec["dtype"])
        self.baseline = resident_mb()

    def begin(self) -> None:
        """Loads the backbone and makes heads."""
        reset_peak_resident()
        torch.manual_seed(0)
        self.model = load_model(Path(self.spec["model"]), self.dtype)
        self.weights_K = head_weights(self.spec["num_heads"])
        self.heads = self.make_heads()
        self.optimizer = torch.optim.AdamW(
            self.heads.parameters(), lr=self.spec["learning_rate"], weight_decay=0.0, fused=self.fused
        )

    def memory(self) -> float:
        """Peak growth of resident memory, MiB."""
        return peak_resident_mb() - self.baseline

    def step(self, batch: Sequence[Answer]) -> tuple[float, float, int]:
        start = time.perf_counter()
        loss = self.loss(batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - start, float(loss.detach()), sum(sum(mask[1:]) for _, mask in batch)

    def make_heads(self) -> nn.Module:
        raise NotImplementedError

    def loss(self, batch: Sequence[Answer]) -> torch.Tensor:
        """Σ λ_k · mean cross-entropy of head k over the batch."""
        raise NotImplementedError


class _ObviousHead(nn.Module):
    """One head as the paper draws it: a residual block and an LM head of its own."""

    def __init__(self, lm_weight_VD: torch.Tensor) -> None:
        super().__init__()
        vocab, hidden = lm_weight_VD.shape
        self.block = nn.Linear(hidden, hidden, dtype=lm_weight_VD.dtype)
        nn.init.zeros_(self.block.weight)
        nn.init.zeros_(self.block.bias)
        self.out = nn.Linear(hidden, vocab, bias=False, dtype=lm_weight_VD.dtype)
        self.out.weight.data.copy_(lm_weight_VD)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.out(x + F.silu(self.block(x)))
        return logits


class _Obvious(_Contestant):
    """Pad, run the backbone, compute every logit, and let autograd keep them."""

    fused = False

    def make_heads(self) -> nn.Module:
        weight = self.model.get_output_embeddings().weight.detach()
        return nn.ModuleList(_ObviousHead(weight) for _ in range(self.spec["num_heads"]))

    def loss(self, batch: Sequence[Answer]) -> torch.Tensor:
        heads, longest = self.spec["num_heads"], self.spec["longest"]
        ids_BM = torch.zeros(len(batch), longest, dtype=torch.int64)
        labels_BMK = torch.full((len(batch), longest, heads), IGNORE)
        for row, (ids, mask) in enumerate(batch):
            ids_BM[row, : len(ids)] = torch.tensor(ids)
            labels_BMK[row, : len(ids)] = head_labels(torch.tensor(ids), torch.tensor(mask), heads)
        with torch.no_grad():
            hidden_BMD = self.model.get_decoder()(input_ids=ids_BM, use_cache=False)[0]
        logits = [head(hidden_BMD).float() for head in self.heads]  # type: ignore[union-attr]
        parts = [
            F.cross_entropy(each.flatten(0, 1), labels_BMK[..., k].flatten(), ignore_index=IGNORE)
            for k, each in enumerate(logits)
        ]
        return (self.weights_K * torch.stack(parts)).sum()


class _Live(_Contestant):
    """Ours, with the backbone run live on each answer as long as it is, and the full vocabulary."""

    def begin(self) -> None:
        super().begin()
        self.tap = HiddenTap(self.model)

    def make_heads(self) -> MedusaHeads:
        config = HeadsConfig(num_heads=self.spec["num_heads"], vocab=None)
        weight = self.model.get_output_embeddings().weight.detach()
        return MedusaHeads(config, lm_weight_VD=weight).to(self.dtype)

    def hidden(self, batch: Sequence[Answer]) -> torch.Tensor:
        """Hidden states of every position that trains, [P, D]."""
        parts = []
        for ids, mask in batch:
            at = torch.tensor(mask[1:]).nonzero()[:, 0]
            parts.append(read_hidden(self.model, self.tap, torch.tensor(ids), at))
        return torch.cat(parts).clone()

    def loss(self, batch: Sequence[Answer]) -> torch.Tensor:
        heads: Any = self.heads
        labels = []
        for ids, mask in batch:
            at = torch.tensor(mask[1:]).nonzero()[:, 0]
            labels.append(head_labels(torch.tensor(ids), torch.tensor(mask), self.spec["num_heads"])[at])
        sums_K, counts_K = heads.losses(self.hidden(batch), torch.cat(labels))
        return weighted_loss(sums_K, counts_K, self.weights_K)


class _Cached(_Live):
    """Ours, from stored hidden states with a truncated vocabulary."""

    def make_heads(self) -> MedusaHeads:
        config = HeadsConfig(num_heads=self.spec["num_heads"], vocab=self.spec["vocab"])
        weight, kept = self.model.get_output_embeddings().weight.detach(), torch.tensor(self.spec["map"])
        return MedusaHeads(config, lm_weight_VD=weight, vocab_map_C=kept).to(self.dtype)

    def cache(self, batches: Sequence[Sequence[Answer]]) -> float:
        """Runs the backbone over all batches once; seconds. The backbone is not needed after."""
        start = time.perf_counter()
        self._stored = iter([super(_Cached, self).hidden(batch) for batch in batches])
        seconds = time.perf_counter() - start
        del self.model, self.tap
        reset_peak_resident()
        return seconds

    def hidden(self, batch: Sequence[Answer]) -> torch.Tensor:
        return next(self._stored)
