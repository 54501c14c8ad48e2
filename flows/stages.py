"""The DAG: which stage reads what, in order. Wiring only; the logic is in `tasks`.

A stage has one part, or one per split; a part is an artifact. `Results` is what later stages read from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from flows.config import RunConfig
from infra.artifacts import Artifact
from tasks.backbone import resolve_backbone
from tasks.benchmark import benchmark
from tasks.distill import distill
from tasks.latency import latency
from tasks.model_checks import quality
from tasks.prompts import collect_prompts
from tasks.ranks import ranks
from tasks.rivals import Rival
from tasks.stage import Context
from tasks.teacher import teacher
from tasks.train_medusa1 import train_medusa1
from tasks.train_medusa2 import merged_backbone, train_medusa2
from tasks.tree import tree

Results = Mapping[str, Artifact]
Build = Callable[["Run", Results], Artifact]


@dataclass(frozen=True)
class Run:
    """What every stage of one run is given."""

    config: RunConfig
    context: Context
    rivals: tuple[Rival, ...] = ()


@dataclass(frozen=True)
class Stage:
    """`parts` maps result names to what builds them, in order, each reading what came before it; `reads` names the
    results they need. A stage that is not `wanted` is left out of the run."""

    name: str
    reads: tuple[str, ...]
    parts: Mapping[str, Build]
    timed: bool = field(default=False)
    wanted: Callable[[RunConfig], bool] = field(default=lambda config: True)

    def build(self, run: Run, results: Results) -> dict[str, Artifact]:
        """All parts, in order."""
        built: dict[str, Artifact] = {}
        for name, make in self.parts.items():
            built[name] = make(run, dict(results) | built)
        return built


def _distill(split: str) -> Build:
    return lambda run, got: distill(
        run.context, run.config.distill, backbone=got["backbone"], prompts=got["prompts"], split=split
    )


def _teacher(split: str) -> Build:
    return lambda run, got: teacher(
        run.context, run.config.teacher, backbone=got["backbone"], distill=got[f"distill/{split}"]
    )


def _train(run: Run, got: Results) -> Artifact:
    return train_medusa1(
        run.context,
        run.config.train,
        run.config.heads,
        backbone=got["backbone"],
        distill=got["distill/train"],
        teacher=got["teacher/train"],
        held_out_distill=got["distill/calibration"],
        held_out_teacher=got["teacher/calibration"],
        initial=got.get("initial"),
    )


def _train_jointly(run: Run, got: Results) -> Artifact:
    assert run.config.medusa2 is not None, "the stage is wanted only with it"
    return train_medusa2(
        run.context,
        run.config.medusa2,
        backbone=got["backbone"],
        heads=got["heads"],
        distill=got["distill/train"],
        teacher=got["teacher/train"],
        held_out_distill=got["distill/calibration"],
        held_out_teacher=got["teacher/calibration"],
    )


def _ranks(run: Run, got: Results) -> Artifact:
    return ranks(
        run.context,
        run.config.ranks,
        backbone=got["backbone"],
        heads=got["heads"],
        distill=got["distill/calibration"],
        teacher=got["teacher/calibration"],
    )


def _benchmark(run: Run, got: Results) -> Artifact:
    return benchmark(
        run.context,
        run.config.benchmark,
        run.config.engine,
        backbone=got["backbone"],
        prompts=got["prompts"],
        heads=got["heads"],
        tree=got["tree"],
        quality=got.get("quality"),
        rivals=run.rivals,
    )


SPLITS = ("train", "calibration")

STAGES: tuple[Stage, ...] = (
    Stage("backbone", (), {"backbone": lambda run, got: resolve_backbone(run.context.store, run.config.backbone)}),
    Stage("prompts", (), {"prompts": lambda run, got: collect_prompts(run.context.store, run.config.prompts)}),
    Stage("distill", ("backbone", "prompts"), {f"distill/{split}": _distill(split) for split in SPLITS}),
    Stage(
        "teacher",
        ("backbone", *(f"distill/{split}" for split in SPLITS)),
        {f"teacher/{split}": _teacher(split) for split in SPLITS},
    ),
    Stage(
        "train-medusa1",
        ("backbone", *(f"{kind}/{split}" for kind in ("distill", "teacher") for split in SPLITS)),
        {"heads": _train},
    ),
    # A jointly trained backbone is a new model: everything after this reads that one, and its own answers.
    Stage(
        "train-medusa2",
        ("backbone", "heads", *(f"{kind}/{split}" for kind in ("distill", "teacher") for split in SPLITS)),
        {
            "heads": _train_jointly,
            "original": lambda run, got: got["backbone"],
            "backbone": lambda run, got: merged_backbone(run.context, got["heads"], got["backbone"]),
            "distill/calibration": _distill("calibration"),
            "teacher/calibration": _teacher("calibration"),
        },
        wanted=lambda config: config.medusa2 is not None,
    ),
    Stage(
        "quality",
        ("original", "backbone"),
        {
            "quality": lambda run, got: quality(
                run.context, run.config.quality, original=got["original"], trained=got["backbone"]
            )
        },
        wanted=lambda config: config.medusa2 is not None and config.quality.wanted,
    ),
    Stage("ranks", ("backbone", "heads", "distill/calibration", "teacher/calibration"), {"ranks": _ranks}),
    Stage(
        "latency",
        ("backbone", "heads"),
        {
            "latency": lambda run, got: latency(
                run.context, run.config.latency, run.config.engine, backbone=got["backbone"], heads=got["heads"]
            )
        },
        timed=True,
    ),
    Stage(
        "tree",
        ("ranks", "latency"),
        {"tree": lambda run, got: tree(run.context, run.config.tree, ranks=got["ranks"], latency=got["latency"])},
    ),
    Stage("benchmark", ("backbone", "prompts", "heads", "tree"), {"benchmark": _benchmark}, timed=True),
)


def stages_of(config: RunConfig) -> tuple[Stage, ...]:
    """The stages of one run; `publish` closes it, which writes to the registry and not to the store."""
    return tuple(stage for stage in STAGES if stage.wanted(config))
