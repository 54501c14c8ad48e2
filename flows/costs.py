"""What each stage takes in memory, disk and time, reckoned from the backbone's configuration and the recipe alone.

Memory is what a stage adds to an empty process, per GPU or, on a CPU, per worker. Nothing here runs a model.
Legend: T tokens of a conversation, P positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from tasks.model_shape import ModelShape
from tasks.prompts import Prompt
from tasks.stage import dtype_of
from tasks.teacher import plan_bytes

if TYPE_CHECKING:
    from flows.config import RunConfig

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """As its maker gives it: memory in GiB, dense bf16 TFLOP/s, memory bandwidth in GB/s."""

    memory: int
    tflops: float
    bandwidth: float


GPUS = {
    "rtx3090": Gpu(24, 71, 936),
    "rtx4090": Gpu(24, 165, 1008),
    "l40s": Gpu(48, 362, 864),
    "a100-40": Gpu(40, 312, 1555),
    "a100-80": Gpu(80, 312, 2039),
    "h100-80": Gpu(80, 989, 3350),
    "h200": Gpu(141, 989, 4800),
}


class PlanConfig(BaseModel):
    """The machine that `--plan` reckons with; nothing else reads it. `gpu: null` is a machine like the one that the
    assumed rates were measured on: two CPU cores."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    gpu: str | None = None
    gpus: int = Field(1, ge=1)
    disk_gib: int | None = Field(None, ge=1, description="free disk there; default: what is free here")

    @field_validator("gpu")
    @classmethod
    def _known(cls, value: str | None) -> str | None:
        if value is not None and value not in GPUS:
            raise ValueError(f"plan.gpu is one of {', '.join(GPUS)}")
        return value


# On the CPU: measured with the embedded backbone on two cores (docs/performance.md), scaled by parameters for another.
# On a GPU: shares of what its maker gives, and sizes that are the same for every model.
ASSUMED: dict[str, float] = {
    "tokens per answered turn as a share of max_new_tokens": 0.9,
    "characters per token of a prompt": 4.0,
    "tokens of a prompt that can't be read yet": 400,
    "CPU: distilled tokens per second": 410,
    "CPU: teacher positions per second": 850,
    "CPU: trained positions per second": 1600,
    "CPU: jointly trained positions per second": 105,
    "CPU: jointly evaluated positions per second": 130,
    "GPU: share of peak FLOP/s in training and reading": 0.4,
    "GPU: share of peak bandwidth in answering": 0.5,
    "GPU: GiB of context and fragments": 2.0,
    "minutes to start training": 0.7,
    "minutes of the latency stage": 4.0,
    "minutes of the benchmark beyond its timed part": 4.1,
}
_EMBEDDED_PARAMETERS = 134_515_008


@dataclass(frozen=True)
class Workload:
    """How much text a recipe makes: tokens that are answered for training and for evaluation, answers to train on, the
    tokens that lead to one, and the longest conversation with its answers."""

    train: int
    held_out: int
    train_answers: int
    prompt_tokens: int
    longest: int

    @classmethod
    def of(cls, config: RunConfig, prompts: Mapping[str, list[Prompt]]) -> Workload:
        """From the prompts themselves."""
        most, per_token = config.distill.max_turns, ASSUMED["characters per token of a prompt"]

        def turns(split: str) -> int:
            return sum(min(len(prompt.turns), most) for prompt in prompts[split])

        lengths = [sum(map(len, p.turns[:most])) / per_token for split in prompts.values() for p in split] or [0.0]
        return cls._with(config, turns("train"), turns("calibration"), sum(lengths) / len(lengths), max(lengths))

    @classmethod
    def assumed(cls, config: RunConfig, limit: int) -> Workload:
        """From the number of prompts that a recipe allows, where its sources can't be read here."""
        share, tokens = config.prompts.split, ASSUMED["tokens of a prompt that can't be read yet"]
        # As many turns as the recipe takes: chat sets have more.
        turns = limit * config.distill.max_turns
        return cls._with(config, int(turns * share["train"]), int(turns * share["calibration"]), tokens, 4 * tokens)

    @classmethod
    def _with(cls, config: RunConfig, train: int, held_out: int, mean: float, longest: float) -> Workload:
        distill = config.distill
        per_turn = distill.max_new_tokens * ASSUMED["tokens per answered turn as a share of max_new_tokens"]
        drawn = len(distill.temperatures)
        answers = train * (1 if distill.answers == "source" else drawn)
        return cls(
            train=int(answers * per_turn),
            held_out=int(held_out * drawn * per_turn),
            train_answers=answers,
            prompt_tokens=int(mean),
            longest=int(longest) + distill.max_turns * distill.max_new_tokens,
        )


class Costs:
    """Costs of one recipe on one backbone: per stage tokens, minutes, bytes on disk and bytes of memory."""

    def __init__(self, config: RunConfig, shape: ModelShape, work: Workload, *, keep_hidden: bool) -> None:
        self.config, self.shape, self.work, self.keep_hidden = config, shape, work, keep_hidden
        self.gpu = GPUS[config.plan.gpu] if config.plan.gpu else None
        bits = {"int8": 8, "int4": 4}.get(config.backbone.quantization or "", 0)
        self.itemsize = dtype_of(config.teacher.dtype).itemsize
        # Embeddings and LM head keep their bits.
        inner = shape.parameters - shape.vocab * shape.hidden * (1 if shape.tied else 2) if bits else 0
        self.weights = inner * bits // 8 + (shape.parameters - inner) * self.itemsize

    def stages(self) -> dict[str, dict[str, Any]]:
        """By stage name; a stage that isn't in it costs next to nothing."""
        costs = {
            "distill": self._distill(),
            "teacher": self._teacher(),
            "train-medusa1": self._train(),
            "train-medusa2": self._train_jointly(),
            "latency": {"minutes": ASSUMED["minutes of the latency stage"], "memory": self._decoding()},
            "benchmark": {
                "minutes": self.config.benchmark.max_minutes
                + ASSUMED["minutes of the benchmark beyond its timed part"],
                "memory": self._decoding(),
            },
        }
        for cost in costs.values():
            if self.gpu and "memory" in cost:
                cost["memory"] += int(ASSUMED["GPU: GiB of context and fragments"] * GIB)
        return costs

    def heads_parameters(self) -> int:
        """Parameters that stage 1 trains."""
        heads, hidden = self.config.heads, self.shape.hidden
        width = heads.mlp_width * hidden
        block = hidden * (hidden + 1) if heads.block == "paper" else width * (2 * hidden + 1)
        projection = {"own": self._rows() * hidden, "shared": 0, "low_rank": heads.rank * (hidden + self._rows())}
        path = heads.num_heads * (heads.num_heads + 1) // 2 * heads.inner_width(hidden) * hidden
        per_head = heads.num_layers * block + projection[heads.lm_head]
        return heads.num_heads * per_head + (path if heads.kind == "hydra" else 0)

    def _rows(self) -> int:
        return min(self.config.heads.vocab or self.shape.vocab, self.shape.vocab)

    def _heads_bytes(self) -> int:
        """The heads' file: weights in their training dtype, vocabulary map included."""
        return self.heads_parameters() * dtype_of(self.config.train.dtype).itemsize + 8 * self._rows()

    def _distill(self) -> dict[str, Any]:
        tokens, config = self.work.held_out, self.config.distill
        if config.answers == "model":
            tokens += self.work.train
        cache = self.shape.cache_bytes(self.work.longest * config.batch_size, dtype_of(config.dtype).itemsize)
        logits = config.batch_size * self.shape.vocab * 8
        if self.gpu:
            # One step reads all weights and what the cache holds, half full on average.
            bandwidth = self.gpu.bandwidth * 1e9 * ASSUMED["GPU: share of peak bandwidth in answering"]
            step = (self.weights + cache / 2) / bandwidth
            step = max(step, 2 * self.shape.parameters * config.batch_size / self._flops())
            seconds = tokens / (config.batch_size / step) / self.config.plan.gpus
        else:
            seconds = self._on_cpu(tokens, "distilled tokens")
        return {
            "tokens": tokens,
            "bytes": tokens * 8,
            "minutes": seconds / 60,
            "memory": self.weights + cache + logits,
        }

    def _teacher(self) -> dict[str, Any]:
        work, shape = self.work, self.shape
        tokens = work.train + work.held_out
        size = plan_bytes(
            tokens,
            hidden_size=shape.hidden,
            top_k=self.config.teacher.top_k,
            keep_hidden=self.keep_hidden,
            dtype=dtype_of(self.config.teacher.dtype),
        )
        read = tokens + work.prompt_tokens * work.train_answers
        if self.gpu:
            seconds = 2 * shape.parameters * read / self._flops() / self.config.plan.gpus
        else:
            seconds = self._on_cpu(tokens, "teacher positions")
        return {
            "tokens": tokens,
            "bytes": size,
            "minutes": seconds / 60,
            "memory": self.weights + self._reading(work.longest, work.longest),
        }

    def _train(self) -> dict[str, Any]:
        config, tokens = self.config.train, self.work.train * self.config.train.epochs
        ranks = self._ranks()
        rows = config.batch_positions // (ranks * config.accumulation)
        heads = self.config.heads
        width = heads.mlp_width if heads.block == "mlp" else 1
        activations = rows * heads.num_heads * self.shape.hidden * (2 + 2 * width * heads.num_layers) * 2
        targets = 8 * self.config.teacher.top_k if config.targets == "teacher" else 0
        # Beside its hidden state a position has labels, the tokens on its path, and targets.
        position = self.shape.hidden * self.itemsize + (16 + targets) * heads.num_heads
        window = min(config.window_positions, self.work.train) * position
        shared = self._rows() * self.shape.hidden if heads.lm_head != "own" else 0
        embeddings = self.shape.vocab * self.shape.hidden if heads.kind == "hydra" else 0
        # The backbone is read for its LM head, and let go unless hidden states are made live.
        memory = self._trained(self.heads_parameters(), config) + activations + self._cross_entropy()
        memory += (shared + embeddings) * self.itemsize + (0 if self.gpu else window)
        memory = max(memory, self.weights) if self.keep_hidden else memory + self.weights
        if self.gpu:
            flops = 6 * (self.heads_parameters() + heads.num_heads * shared)
            flops += 0 if self.keep_hidden else 2 * self.shape.parameters
            seconds = flops * tokens / self._flops() / ranks
        else:
            seconds = self._on_cpu(tokens, "trained positions")
        return {
            "tokens": tokens,
            "bytes": self._heads_bytes(),
            "minutes": seconds / 60 + ASSUMED["minutes to start training"],
            "memory": int(memory),
        }

    def _train_jointly(self) -> dict[str, Any]:
        """Stage 2, its adapter left out on disk: the merged model, its LM head untied, is most of what it writes."""
        joint, shape, work = self.config.medusa2, self.shape, self.work
        if joint is None:
            return {}
        itemsize = dtype_of(joint.dtype).itemsize
        base = shape.untied_parameters
        trained = (joint.lora.rank * shape.linear if joint.lora else base) + self.heads_parameters()
        # What autograd keeps of a token in one layer, in bf16, adapters and their dropout included (measured).
        kept = 36 * shape.hidden + 10 * shape.inner + 4 * shape.kv_width
        layers = kept + 2 * shape.layers * shape.hidden if joint.gradient_checkpointing else kept * shape.layers
        activations = joint.micro_conversations * work.longest * layers * itemsize // 2
        logits = 256 * shape.vocab * (3 * itemsize + 16)
        frozen = base * itemsize // (self._ranks() if joint.zero_stage == 3 else 1) if joint.lora else 0
        memory = frozen + self._trained(trained, joint) + activations + logits + self._cross_entropy(joint=True)
        if joint.lora is None:
            memory += shape.parameters * itemsize  # as it was, to compare with
        # The share of the text that is gone through, over all epochs.
        share = float(joint.epochs)
        if joint.max_steps:
            share = min(share, joint.max_steps * joint.batch_conversations / max(1, work.train_answers))
        tokens, read = int(work.train * share), (work.train + work.prompt_tokens * work.train_answers) * share
        if self.gpu:
            # Forward, the teacher's forward, and a backward through activations alone; checkpointing adds a forward.
            passes = 8 + (2 if joint.gradient_checkpointing else 0) + (0 if joint.lora else 2)
            seconds = passes * base * read / self._flops() / self.config.plan.gpus
        else:
            # Held-out conversations are looked at before the first epoch and after each, and answered anew at the end.
            seconds = (
                self._on_cpu(tokens, "jointly trained positions")
                + self._on_cpu(work.held_out * (joint.epochs + 1), "jointly evaluated positions")
                + self._on_cpu(work.held_out, "distilled tokens")
                + self._on_cpu(work.held_out, "teacher positions")
            )
        return {
            "tokens": tokens,
            "bytes": base * itemsize,
            "minutes": seconds / 60 + ASSUMED["minutes to start training"],
            "memory": int(memory),
        }

    def _decoding(self) -> int:
        latency = self.config.latency
        tokens = max(latency.contexts) * max(latency.batches) + 256
        return int(self.weights + self._heads_bytes() + self.shape.cache_bytes(tokens, self.itemsize))

    def _cross_entropy(self, *, joint: bool = False) -> int:
        """The heads' loss: a chunk of logits, and in float32 the gradients of what projects them, if it is trained."""
        heads, chunk = self.config.heads, 2048 if self.gpu else 512
        columns = {"own": self.shape.hidden, "shared": 0, "low_rank": heads.rank}[heads.lm_head]
        columns = self.shape.hidden if joint else columns
        return self._rows() * (10 * chunk + heads.num_heads * columns * 4)

    def _reading(self, tokens: int, positions: int) -> int:
        """One pass over a conversation without gradients, logits at some positions and their log-probabilities."""
        widest = max(self.shape.inner * 3, self.shape.hidden * 6)
        return tokens * widest * self.itemsize + positions * self.shape.vocab * (self.itemsize + 8)

    def _trained(self, parameters: int, config: Any) -> int:
        """Weights, gradients and optimizer of what is trained, as DeepSpeed keeps and ZeRO spreads them."""
        ranks = self._ranks()
        spread = {0: (1, 1, 1), 1: (1, 1, ranks), 2: (1, ranks, ranks), 3: (ranks, ranks, ranks)}[config.zero_stage]
        low = dtype_of(config.dtype).itemsize
        moments = 2 if config.optimizer == "adamw_8bit" and self.gpu else 8
        # A master copy in float32 and the gradient brought to it exist beside weights of fewer bits only.
        weights, gradients, states = low, low, moments + (8 if low < 4 else 0)
        return sum(parameters * each // over for each, over in zip((weights, gradients, states), spread, strict=True))

    def _ranks(self) -> int:
        return self.config.plan.gpus if self.gpu else self.config.placement.train_worker_count

    def _flops(self) -> float:
        assert self.gpu is not None
        return self.gpu.tflops * 1e12 * ASSUMED["GPU: share of peak FLOP/s in training and reading"]

    def _on_cpu(self, tokens: int, what: str) -> float:
        return tokens / ASSUMED[f"CPU: {what} per second"] * self.shape.parameters / _EMBEDDED_PARAMETERS
