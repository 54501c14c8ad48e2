"""What a changed backbone needs: measured with the champion's own heads on the new backbone's answers, then decided.

Knows nothing of the registry beyond a version's files, nor of how stages are run.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from infra.artifacts import Artifact, artifact_key, digest_file, write_json
from medusa_core.calibration import Walk, cross_walk
from medusa_core.checkpoint import CONFIG, WEIGHTS, load_heads, read_config
from medusa_core.heads import HeadsConfig
from tasks.backbone import BackboneInfo, backbone_identity, backbone_info, load_model, model_dir
from tasks.distill import shard_paths as distill_shards
from tasks.ranks import conversation_names, read_ranks
from tasks.stage import Context, dtype_of
from tasks.teacher import shard_paths as teacher_shards
from tasks.train_loop import evaluation_of, tally_positions
from tasks.training_data import live_hidden, load_positions, pair_shards

KIND, STAGE_VERSION = "heads", 1
SCHEMA = "medusa.retraining/1"

# Same weights under a new name; old heads as they are; training that begins with them; training from nothing.
Verdict = Literal["unchanged", "keep", "warm start", "scratch"]


class RetrainConfig(BaseModel):
    """What happens when the backbone is not the one that the champion's heads were made for."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Literal["decide", "scratch"] = Field(
        "decide", description="measure the champion's heads on the new backbone and then decide; or train from scratch"
    )
    min_kept: float = Field(
        0.5, ge=0, le=1, description="share of the drafted tokens still accepted, for old heads to begin the training"
    )


def why_unfit(files: Path, made_for: Mapping[str, str], info: BackboneInfo, heads: HeadsConfig) -> str | None:
    """Why a version's heads can't be tried on this backbone, or None. `made_for` has its `tokenizer` and
    `architecture`."""
    described = read_config(files / "heads")
    if "tokenizer" not in made_for:
        return "the champion does not say which tokenizer it was made for"
    if made_for.get("tokenizer") != info.tokenizer_digest:
        return "the tokenizer is another one"
    if made_for.get("architecture") != info.architecture:
        return f"the architecture is {info.architecture}, it was {made_for.get('architecture')}"
    if (described.vocab_size, described.hidden_size) != (info.vocab_size, info.hidden_size):
        return (
            f"the LM head is {info.vocab_size} x {info.hidden_size}, it was "
            f"{described.vocab_size} x {described.hidden_size}"
        )
    if described.heads != heads:
        return "the recipe asks for heads of another layout"
    return None


def adopt(
    context: Context, files: Path, *, backbone: Artifact, held_out_distill: Artifact, held_out_teacher: Artifact
) -> Artifact:
    """A version's heads, weights untouched, as heads of another backbone, with what they are worth on its answers.

    `files` is the version's directory. The caller has made sure that they fit.
    """
    info = backbone_info(backbone)
    source = files / "heads"
    inputs = {
        "heads": digest_file(source / WEIGHTS),
        "backbone": backbone_identity(backbone),
        "held_out": held_out_distill.digest(),
        "held_out_teacher": held_out_teacher.digest(),
    }
    key = artifact_key(KIND, STAGE_VERSION, inputs=inputs, config={"adopted": True})

    def build(partial: Path) -> dict[str, Any]:
        target = partial / "heads"
        target.mkdir(exist_ok=True)
        shutil.copyfile(source / WEIGHTS, target / WEIGHTS)
        described = read_config(source).model_copy(update={"backbone_name": info.name, "backbone_digest": info.digest})
        (target / CONFIG).write_text(described.model_dump_json(indent=2) + "\n")
        dtype, device = dtype_of(held_out_teacher.config["dtype"]), context.placement.resolved_device()
        model = load_model(model_dir(backbone), dtype, device)
        heads = load_heads(target, model, backbone_digest=info.digest)
        held_out = load_positions(
            pair_shards(distill_shards(held_out_distill), teacher_shards(held_out_teacher)),
            num_heads=heads.num_heads,
            hidden_size=info.hidden_size,
            dtype=dtype,
            live=None if held_out_teacher.config["hidden"] else live_hidden(model),
        )
        with torch.inference_mode():
            measured = evaluation_of([tally_positions(heads, held_out, device, dtype)])
        write_json(partial / "evaluation.json", {"final": measured, "epochs": []})
        return {"positions": measured["held_out_positions"]}

    return context.store.produce(KIND, key, inputs=inputs, config={"adopted": True}, build=build)


def compare(was: Path, now: Path, nodes: int) -> dict[str, Any]:
    """Tokens per step of the same heads on their own backbone's answers and on the new one's, by two ranks files, over
    the conversations that both have: `was`, `now`, their `ratio`, and the share of accepted drafted tokens that is
    `kept`. Figures are those of the best tree of `nodes` nodes for each, with 95 % intervals."""
    names = [conversation_names(path) for path in (was, now)]
    both = sorted(set(names[0]) & set(names[1]))
    walks = [
        cross_walk(read_ranks(path), nodes).select([own.index(name) for name in both])
        for path, own in zip((was, now), names, strict=True)
    ]
    ratio, interval = walks[1].over(walks[0])
    gained = [walk.tokens_per_step - 1 for walk in walks]
    return {
        "nodes": nodes,
        "conversations": len(both),
        "was": _figure(walks[0]),
        "now": _figure(walks[1]),
        "ratio": {"value": ratio, "ci95": list(interval)},
        "kept": gained[1] / gained[0] if gained[0] > 0 else 1.0,
    }


def judge(measured: Mapping[str, Any], limits: RetrainConfig) -> tuple[Verdict, str]:
    """The verdict on what `compare` measured, and why in a sentence."""
    (low, high), kept = measured["ratio"]["ci95"], measured["kept"]
    said = (
        f"the champion's heads give {measured['now']['value']:.3f} tokens per step on the new backbone and "
        f"{measured['was']['value']:.3f} on their own ({low:.3f} to {high:.3f} times as many)"
    )
    if kept < limits.min_kept:
        return "scratch", f"{said}: {kept:.0%} of what they gained is left, less than {limits.min_kept:.0%}"
    if high >= 1:
        return "keep", f"{said}: no loss beyond noise, so only trees are chosen again"
    return "warm start", f"{said}: a loss, so training begins with them"


def _figure(walk: Walk) -> dict[str, Any]:
    return {"value": walk.tokens_per_step, "ci95": list(walk.interval())}
