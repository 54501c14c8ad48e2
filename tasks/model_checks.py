"""Stage `quality`: a trained backbone against its original on tasks and under a judge, where the user names any.

Both are asked the same; every figure is paired, with an interval over items. Knows nothing of heads or trees.
Legend: N items (a task's documents, a judge's questions).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from infra.artifacts import Artifact, artifact_key, digest_file, digest_json, write_json
from infra.errors import UserError
from infra.progress import track
from medusa_core.engine import MedusaEngine
from medusa_core.sampling import SamplingParams
from tasks.backbone import backbone_identity, backbone_info, load_model, load_tokenizer, model_dir
from tasks.bench_prompts import BenchPrompt, read_mt_bench
from tasks.conversations import ChatFormat, Conversation
from tasks.judge import Answered, JudgeConfig, grade
from tasks.quality import with_interval
from tasks.stage import Context, dtype_of

KIND, STAGE_VERSION = "quality", 1
CHECKS = "checks.json"
_ROWS = 8
log = logging.getLogger(__name__)


class TasksConfig(BaseModel):
    """Tasks of lm_eval by name; `include_path` is a folder with definitions of one's own."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tasks: tuple[str, ...] = Field(min_length=1)
    include_path: str | None = None
    limit: int | None = Field(None, ge=1, description="documents per task")
    few_shot: int = Field(0, ge=0)


class QualityConfig(BaseModel):
    """What a trained backbone is asked besides held-out conversations: nothing, unless it is named here."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lm_eval: TasksConfig | None = None
    judge: JudgeConfig | None = None
    dtype: str = "bfloat16"

    @property
    def wanted(self) -> bool:
        return self.lm_eval is not None or self.judge is not None


def quality(context: Context, config: QualityConfig, *, original: Artifact, trained: Artifact) -> Artifact:
    """Measures both backbones; the artifact holds every paired figure."""
    semantic = config.model_dump(mode="json")
    if config.judge:
        # The questions count by content; how fast they are asked changes nothing.
        path = Path(config.judge.prompts)
        read_mt_bench(path, max_turns=1)
        semantic["judge"] |= {"prompts": digest_file(path)}
        for name in ("parallel", "timeout", "key_variable"):
            del semantic["judge"][name]
    if config.lm_eval and config.lm_eval.include_path:
        folder = Path(config.lm_eval.include_path)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        semantic["lm_eval"]["include_path"] = digest_json([digest_file(path) for path in files])
    inputs = {"original": backbone_identity(original), "trained": backbone_identity(trained)}
    key = artifact_key(KIND, STAGE_VERSION, inputs=inputs, config=semantic)

    def build(partial: Path) -> dict[str, Any]:
        context.cluster.stop()
        found: dict[str, Any] = {}
        device = context.placement.resolved_device()
        with track("quality", 4, "passes") as progress:
            if config.lm_eval:
                scores = []
                for backbone in (original, trained):
                    scores.append(run_tasks(config.lm_eval, model_dir(backbone), config.dtype, device))
                    progress.advance(1)
                found["lm_eval"] = compare_tasks(*scores)
            if config.judge:
                grades = []
                for backbone in (original, trained):
                    grades.append(grade(config.judge, answer(config, backbone, device)))
                    progress.advance(1)
                found["judge"] = compare_grades(*grades) | {
                    "model": config.judge.model,
                    "repeats": config.judge.repeats,
                }
        write_json(partial / CHECKS, found)
        return {"checks": len(found)}

    return context.store.produce(KIND, key, inputs=inputs, config=semantic, build=build)


def read_checks(artifact: Artifact | None) -> dict[str, Any]:
    """What the stage found; nothing if it did not run."""
    return {} if artifact is None else dict(json.loads(artifact.file(CHECKS).read_text()))


def paired(original_N: Sequence[float], trained_N: Sequence[float], *, seed: int = 0) -> dict[str, Any]:
    """Means of both and of trained minus original, each with a 95 % bootstrap interval over items."""
    table = np.column_stack([original_N, trained_N, np.subtract(trained_N, original_N)]).astype(np.float64)
    figures = {
        name: with_interval(table[:, [column]], lambda sums: sums[..., 0] / len(table), seed=seed)
        for column, name in enumerate(("original", "trained", "difference"))
    }
    return figures | {"items": len(table)}


def run_tasks(config: TasksConfig, model: Path, dtype: str, device: str) -> dict[str, dict[str, Any]]:
    """lm_eval's figures of every document: task → {measures: {name: [N]}, higher_is_better: {name: bool}}."""
    if find_spec("lm_eval") is None:
        raise UserError("quality.lm_eval needs the package lm_eval: pip install 'medusa-pipeline[eval]'")
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=config.include_path)
    if unknown := sorted(set(config.tasks) - set(manager.all_tasks)):
        raise UserError(f"lm_eval knows no task {', '.join(unknown)}: check quality.lm_eval.tasks and include_path")
    served = HFLM(
        pretrained=load_model(model, dtype_of(dtype), device),
        tokenizer=load_tokenizer(model),
        batch_size=_ROWS,
        device=device,
    )
    try:
        found = simple_evaluate(
            served,
            tasks=list(config.tasks),
            task_manager=manager,
            limit=config.limit,
            num_fewshot=config.few_shot,
            log_samples=True,
            bootstrap_iters=0,
        )
    except (OSError, ConnectionError) as error:
        raise UserError(f"a task's documents can't be loaded ({type(error).__name__}: {error})") from error
    assert found is not None, "only ranks beyond the first get nothing"
    return {task: _means(task, samples, found) for task, samples in found["samples"].items()}


def _means(task: str, samples: Sequence[Mapping[str, Any]], found: Mapping[str, Any]) -> dict[str, Any]:
    """One task's measures that are means over its documents, under its first filter. Others (perplexities, scores of a
    whole corpus) can't be paired document by document; UserError if nothing is left."""
    first = samples[0]["filter"]
    ordered = sorted((s for s in samples if s["filter"] == first), key=lambda sample: int(sample["doc_id"]))
    measures, better = {}, {}
    for name, higher in found["higher_is_better"][task].items():
        values = [sample.get(name) for sample in ordered]
        total = found["results"][task].get(f"{name},{first}")
        single = all(isinstance(value, bool | int | float) for value in values)
        if higher is None or not single or total is None or not np.isclose(np.mean(values), total, rtol=1e-6):
            log.info("%s's %s is no mean over its documents: left out", task, name)
            continue
        measures[name], better[name] = [float(value) for value in values], bool(higher)
    if not measures:
        raise UserError(f"task {task} has no measure that is a mean over its documents: leave it out")
    return {"measures": measures, "higher_is_better": better}


def compare_tasks(original: Mapping[str, Any], trained: Mapping[str, Any]) -> dict[str, Any]:
    """task → measure → paired figures, and which way is better."""
    return {
        task: {
            name: paired(values, trained[task]["measures"][name]) | {"higher_is_better": both["higher_is_better"][name]}
            for name, values in both["measures"].items()
        }
        for task, both in original.items()
    }


def compare_grades(original: Sequence[Sequence[float]], trained: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Paired figures of two models' grades, a question's being the mean over its turns and repeats."""
    means = [[float(np.mean(grades)) for grades in each] for each in (original, trained)]
    return paired(*means) | {"judgements": sum(map(len, original)) + sum(map(len, trained))}


def answer(config: QualityConfig, backbone: Artifact, device: str) -> list[Answered]:
    """A backbone's greedy answers to the judge's questions, turn by turn."""
    assert config.judge is not None
    questions: list[BenchPrompt] = read_mt_bench(
        Path(config.judge.prompts), max_turns=config.judge.max_turns, limit=config.judge.limit
    )
    info = backbone_info(backbone)
    engine = MedusaEngine(
        load_model(model_dir(backbone), dtype_of(config.dtype), device), eos_token_ids=info.eos_token_ids, pack=True
    )
    chat = ChatFormat(load_tokenizer(model_dir(backbone)), info.eos_token_ids)
    talks = [Conversation(q.prompt_id, q.prompt_id, q.category, list(q.turns), 0.0, 0) for q in questions]
    said: dict[str, list[str]] = {talk.sample_id: [] for talk in talks}
    while waiting := [talk for talk in talks if not talk.done]:
        params = SamplingParams(config.judge.max_new_tokens)
        for talk, given in zip(
            waiting, engine.generate([talk.ask(chat) for talk in waiting], params, batch=_ROWS), strict=True
        ):
            talk.answer(given.tokens, given.finish_reason or "")
            said[talk.sample_id].append(chat.tokenizer.decode(given.tokens, skip_special_tokens=True))
    return [Answered(tuple(talk.turns), tuple(said[talk.sample_id])) for talk in talks]
