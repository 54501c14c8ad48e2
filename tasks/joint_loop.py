"""What every rank of stage 2 runs: DeepSpeed around backbone and heads, over whole conversations.

Knows nothing of artifacts' keys; it is told files, and writes into the partial directory it is given.
Legend: P positions, K heads, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

from infra.artifacts import write_json
from medusa_core.adapters import add_lora, lm_head_rows, merged, untie
from medusa_core.checkpoint import load_heads, save_heads, weights_digest
from medusa_core.heads import MedusaHeads
from medusa_core.losses import count_labels, head_labels
from medusa_core.schedules import heads_share
from tasks.backbone import load_model
from tasks.joint_objective import Batch, Conversation, JointObjective
from tasks.quality import QUALITY, ConversationQuality, compare, summarize
from tasks.rank_run import CHECKPOINTS, RankRun, prepare_rank, start_engine, whole
from tasks.stage import dtype_of
from tasks.teacher import TOP_K
from tasks.train_loop import evaluation_of, tally
from tasks.training_data import Shard, batches, teacher_targets, window_plan

ADAPTER, HEADS = "adapter", "heads"
_SAID = (*TOP_K, "tail_logmass")
_HELD_OUT_ROWS = 4


def joint_loop(spec: dict[str, Any]) -> None:
    """Trains to the end, resuming from the newest checkpoint; writes adapter, merged model, heads, curve, evaluation
    and how far the model has moved."""
    device, config = prepare_rank(spec), spec["config"]
    model = load_model(spec["backbone"], dtype_of(config["dtype"]), str(device))
    heads = load_heads(Path(spec["initial_heads"]), model, backbone_digest=spec["backbone_digest"])
    if not config["warm_start"]:
        heads = MedusaHeads.on(model, heads.config, heads.vocab_map_C).to(model.dtype)
    heads.requires_grad_(True).train()
    if config["lora"]:
        untie(model)
        model = add_lora(model, **config["lora"])
    else:
        model.requires_grad_(True)
    objective = JointObjective(
        model, heads, decay=config["decay"], teacher=config["teacher"], lm_weight=config["lm_weight"]
    ).to(device)
    objective.check()
    objective.train()
    if config["gradient_checkpointing"]:
        objective.save_memory()
    total, rate = total_steps(spec), config["learning_rate"]
    groups = [
        {"params": [p for p in model.parameters() if p.requires_grad], "name": "backbone", "lr": rate},
        {"params": list(heads.parameters()), "name": "heads", "lr": rate * config["heads_rate"]},
    ]
    engine = start_engine(
        objective,
        groups,
        config,
        micro_batch=config["micro_conversations"],
        total=total,
        read_directly=objective.read_directly(),
        checkpoints=spec["directory"] / CHECKPOINTS,
    )
    _Run(engine, spec, total).train()
    torch.distributed.barrier()


def total_steps(spec: dict[str, Any]) -> int:
    """Optimizer steps of the whole run."""
    sizes, batch = dict(zip(spec["shards"], spec["rows"], strict=True)), spec["config"]["batch_conversations"]
    windows = [window for epoch in range(spec["config"]["epochs"]) for window in _windows(spec, epoch)]
    steps = sum(max(1, sum(sizes[shard] for shard in window) // batch) for window in windows)
    return min(steps, spec["config"]["max_steps"] or steps)


def _windows(spec: dict[str, Any], epoch: int) -> list[list[Shard]]:
    config = spec["config"]
    seed = config["seed"] * 1009 + epoch
    return window_plan(spec["shards"], spec["counts"], limit=config["window_positions"], seed=seed)


def load_conversations(shards: Sequence[Shard], *, top_k: bool = False, soft_heads: int = 0) -> list[Conversation]:
    """The answers of some shards, with the teacher's top-k if it is asked for, and with targets of some heads. An
    answer without a position that trains is left out."""
    conversations = []
    for distill_path, teacher_path in shards:
        answers = pq.read_table(distill_path, columns=["input_ids", "loss_mask"])
        said = pq.read_table(teacher_path, columns=["positions", *_SAID])
        columns = (*(answers[name] for name in answers.column_names), *(said[name] for name in said.column_names))
        for ids, mask, at, *top, tail in zip(*(column.to_pylist() for column in columns), strict=True):
            if not at:
                continue
            ids_T, mask_T, at_P = torch.tensor(ids), torch.tensor(mask), torch.tensor(at)
            ids_PJ, logprobs_PJ = (torch.tensor(each).view(len(at), -1) for each in top)
            teacher = (ids_PJ, logprobs_PJ, torch.tensor(tail)) if top_k else None
            targets = None
            if soft_heads:
                labels_PK = head_labels(ids_T, mask_T, soft_heads)[at_P]
                targets = teacher_targets(labels_PK, at_P, ids_PJ, logprobs_PJ)
            conversations.append(Conversation(ids_T, mask_T, at_P, teacher, targets))
    return conversations


class _Run(RankRun):
    """The loop over windows of conversations: steps, evaluation, and what is kept in the end."""

    _original: Any = None

    @property
    def objective(self) -> JointObjective:
        objective: JointObjective = self.engine.module
        return objective

    def train(self) -> None:
        config = self.config
        done = self.resume()
        seen = 0
        if not done:
            # The heads as stage 1 left them, on the backbone as it was.
            self._evaluate(0)
        for epoch in range(config["epochs"]):
            for number, window in enumerate(_windows(self.spec, epoch)):
                if seen >= self.total:
                    break
                conversations = load_conversations(
                    sorted(window),
                    top_k=config["teacher"] == "top_k",
                    soft_heads=self.objective.heads.num_heads if config["targets"] == "teacher" else 0,
                )
                seed = config["seed"] * 7919 + epoch * 131 + number
                for index in batches(len(conversations), config["batch_conversations"], seed=seed):
                    seen += 1
                    if done < seen <= self.total:
                        self._train_step([conversations[i] for i in index.tolist()])
            # Not if a resumed run was past it, nor again after its last step.
            if self.step == min(seen, self.total) and len(self.evaluations) <= epoch + 1:
                self._evaluate(epoch + 1)
            if self.step == self.total:
                break
        self._finish()

    def _train_step(self, chosen: list[Conversation]) -> None:
        """One optimizer step over a global batch; this rank takes every `world`-th micro-batch of it."""
        config, heads = self.config, self.objective.heads
        # Dropout follows from the step, so that a resumed run draws what an undisturbed one does.
        torch.manual_seed((config["seed"] * 1_000_003 + self.step) * self.world + self.rank)
        # Conversations of like length share a micro-batch: less padding, the same sum.
        chosen = sorted(chosen, key=lambda c: len(c.input_ids_T))
        size = config["micro_conversations"]
        micro = [
            Batch.of(chosen[i : i + size], num_heads=heads.num_heads, device=self.device)
            for i in range(0, len(chosen), size)
        ]
        # Means are over the whole global batch, so the number of ranks and micro-batches cancels out.
        parts = self.world * config["accumulation"]
        learnt = torch.cat([batch.learnt[0] for batch in micro])
        counts_K = count_labels(heads.known(learnt)).clamp(min=1) / parts
        share = config["lambda0"] * heads_share(
            self.step,
            total=self.total,
            rise=config["rise"],
            until=config["rise_until"],
            backbone_first=config["backbone_first"],
        )
        own = micro[self.rank :: self.world]
        own += [micro[0].empty()] * (config["accumulation"] - len(own))
        sums = torch.zeros(3, dtype=torch.float64)
        for batch in own:
            loss, lm, head = self.engine(
                batch, positions=max(1, len(learnt)) / parts, counts_K=counts_K, heads_share=share
            )
            self.engine.backward(loss)
            self.engine.step()
            sums += torch.tensor([float(loss.detach()), float(lm), float(head)], dtype=torch.float64)
        mean, lm_mean, heads_mean = self.average(sums.tolist())
        measured = {"lm": lm_mean} if config["lm_weight"] else {}
        self.finish_step(loss=mean, **measured, heads=heads_mean, lambda0=share, positions=len(learnt))

    @torch.no_grad()
    def _evaluate(self, epoch: int) -> None:
        """Heads and backbone on held-out conversations, spread over the ranks; all keep the result."""
        self.engine.eval()
        conversations = load_conversations(self.spec["held_out"])
        if (wanted := self.config["evaluated_answers"]) and wanted < len(conversations):
            conversations = [conversations[i * len(conversations) // wanted] for i in range(wanted)]
        conversations.sort(key=lambda c: len(c.input_ids_T))
        groups = [conversations[i : i + _HELD_OUT_ROWS] for i in range(0, len(conversations), _HELD_OUT_ROWS)]
        mine = []
        for first in range(0, len(groups), self.world):
            # All ranks make as many passes, or those of one would wait for the others' parameters for ever.
            number = first + self.rank
            measured = self._measured(groups[number % len(groups)])
            if number < len(groups):
                mine += measured
        output = self.objective.backbone.get_output_embeddings()
        with whole(self.objective.read_directly()):
            # A copy: under ZeRO-3 the heads themselves would ask the other ranks for what they hold.
            heads = self.objective.heads.detached()
            if not heads.projection.own:
                # A shared projection is the LM head's own rows, as they are now.
                heads.projection.weight_CD.copy_(lm_head_rows(output, heads.vocab_map_C))
        own = [
            (tally(heads, hidden_PD, labels_PK, path_PK, self.device, self.dtype), quality)
            for hidden_PD, labels_PK, path_PK, quality in mine
        ]
        # Figures and not hidden states: under NCCL what is gathered goes through the GPU's memory.
        every: list[Any] = [None] * self.world
        torch.distributed.all_gather_object(every, own)
        tallies, qualities = zip(*(pair for pairs in every for pair in pairs), strict=True)
        self.engine.train()
        measured = {"epoch": epoch, "step": self.step, "quality": summarize(qualities)}
        self.evaluations.append(evaluation_of(tallies) | measured)

    def _measured(
        self, group: list[Conversation]
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, ConversationQuality]]:
        """Of every conversation: hidden states [P, D], labels and true tokens [P, K], and how far the backbone has
        moved on it."""
        objective = self.objective
        batch = Batch.of(group, num_heads=objective.heads.num_heads, device=self.device)
        hidden_PD = objective.hidden(batch)
        was_PV, now_PV = self._original_logits(batch), objective.logits(hidden_PD)
        found = []
        for row in range(len(group)):
            own = batch.row_P == row
            quality = compare(was_PV[own], now_PV[own], batch.next_P[own])
            found.append((hidden_PD[own].cpu(), batch.labels_PK[own].cpu(), batch.path_PK[own].cpu(), quality))
        return found

    def _original_logits(self, batch: Batch) -> torch.Tensor:
        """What the backbone said before its training, [P, V]: its adapter off, or the model itself once more."""
        if self.config["lora"]:
            return self.objective.logits(self.objective.teacher_hidden(batch), as_it_was=True)
        if self._original is None:
            self._original = load_model(self.spec["backbone"], self.dtype, str(self.device))
        logits_BTV = self._original(input_ids=batch.tokens_BT, use_cache=False).logits
        return logits_BTV[batch.row_P, batch.column_P]

    def _finish(self) -> None:
        with whole(self.objective.parameters()):
            if self.rank:
                return
            spec = self.spec
            model: Any = self.objective.model
            if self.config["lora"]:
                # Left to decide, peft would add the embeddings and the whole LM head to it.
                model.save_pretrained(self.directory / ADAPTER, save_embedding_layers=False)
                model = merged(model)
            target = self.directory / spec["model_directory"]
            model.save_pretrained(target)
            save_heads(
                self.directory / HEADS,
                self.objective.heads,
                backbone_name=spec["merged_name"],
                backbone_digest=weights_digest(target),
            )
        write_json(self.directory / QUALITY, self.evaluations[-1]["quality"])
        self.write_history()
