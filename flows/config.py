"""The one configuration of a run: every stage's model composed, read from YAML and `--set key.sub=value`.

Unknown keys are errors. Knows nothing of how stages use it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from flows.costs import PlanConfig
from infra.errors import UserError
from medusa_core.heads import HeadsConfig
from tasks.backbone import BackboneConfig
from tasks.benchmark import BenchmarkConfig
from tasks.distill import DistillConfig
from tasks.engine import EngineConfig
from tasks.latency import LatencyConfig
from tasks.model_checks import QualityConfig
from tasks.promotion import PublishConfig
from tasks.prompts import PromptsConfig
from tasks.ranks import RanksConfig
from tasks.retrain import RetrainConfig
from tasks.stage import Placement
from tasks.teacher import TeacherConfig
from tasks.train_medusa1 import TrainConfig
from tasks.train_medusa2 import JointConfig
from tasks.tree import TreeConfig

RECIPES = Path(__file__).parent / "recipes"
DEFAULT_RECIPE = "smollm2-135m"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class RunConfig(BaseModel):
    """A whole run. `name` is the recipe's lineage in the registry. Without `medusa2` the backbone stays as it is."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = DEFAULT_RECIPE
    backbone: BackboneConfig = Field(default_factory=BackboneConfig)
    prompts: PromptsConfig = Field(default_factory=PromptsConfig)
    distill: DistillConfig = Field(default_factory=DistillConfig)
    teacher: TeacherConfig = Field(default_factory=TeacherConfig)
    heads: HeadsConfig = Field(default_factory=HeadsConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    medusa2: JointConfig | None = None
    quality: QualityConfig = Field(default_factory=QualityConfig)
    ranks: RanksConfig = Field(default_factory=RanksConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    latency: LatencyConfig = Field(default_factory=LatencyConfig)
    tree: TreeConfig = Field(default_factory=TreeConfig)
    benchmark: BenchmarkConfig = Field(default_factory=BenchmarkConfig)
    publish: PublishConfig = Field(default_factory=PublishConfig)
    retrain: RetrainConfig = Field(default_factory=RetrainConfig)
    placement: Placement = Field(default_factory=Placement)
    plan: PlanConfig = Field(default_factory=PlanConfig)

    @model_validator(mode="after")
    def _quantized_teaches_nothing_new(self) -> RunConfig:
        bits = self.backbone.quantization
        if bits and self.medusa2:
            raise ValueError(
                f"medusa2 would train a backbone whose weights are {bits}: what it changes there can't be merged back, "
                "and its teacher would be the quantized model; leave backbone.quantization out"
            )
        if bits and (self.distill.answers == "model" or self.train.targets == "teacher"):
            raise ValueError(
                f"self-distillation on an {bits} backbone would teach what the quantized model says, not what "
                "the model does: leave backbone.quantization out, or train on your own conversations "
                "(distill.answers: source, train.targets: text)"
            )
        return self

    @model_validator(mode="after")
    def _paths_need_fixed_embeddings(self) -> RunConfig:
        if self.heads.kind == "hydra" and self.medusa2 and self.medusa2.lora is None:
            raise ValueError(
                "heads of kind hydra read the backbone's input embeddings, which full fine-tuning moves under them: "
                "train medusa2 with lora, or heads of kind medusa"
            )
        return self

    @field_validator("name")
    @classmethod
    def _plain_name(cls, value: str) -> str:
        if not NAME.fullmatch(value):
            raise ValueError(
                "use 1 to 64 letters, digits, dots, dashes and underscores, starting with a letter or digit"
            )
        return value


def load_config(path: Path | str | None, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration of a YAML file, or of a recipe by name, with `key.sub=value` overrides applied.

    UserError names the key that is unknown or the value that doesn't fit.
    """
    file = _find(path or DEFAULT_RECIPE)
    values = _read(file)
    _find_beside(values, file)
    for override in overrides:
        _apply(values, override)
    return parse_config(values)


def parse_config(values: dict[str, Any]) -> RunConfig:
    """A validated configuration; UserError lists every fault, one per line."""
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise UserError("; ".join(_fault(dict(item)) for item in error.errors())) from None


def dump_config(config: RunConfig) -> str:
    """YAML that `load_config` reads back to the same configuration."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _find(name: Path | str) -> Path:
    path = Path(name)
    if path.is_file():
        return path
    recipe = RECIPES / f"{name}.yaml"
    if path.parent == Path(".") and recipe.is_file():
        return recipe
    known = sorted(file.stem for file in RECIPES.glob("*.yaml"))
    raise UserError(f"there is no configuration {str(name)!r}: give a YAML file, or one of the recipes {known}")


def _read(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(f"{path} holds a {type(values).__name__}, not a mapping of configuration keys")
    return values


def _find_beside(values: dict[str, Any], file: Path) -> None:
    """A chat template named by a file beside the configuration becomes its text, wherever one runs it from."""
    backbone = values.get("backbone")
    name = backbone.get("chat_template") if isinstance(backbone, dict) else None
    if isinstance(name, str) and "{" not in name and (file.parent / name).is_file():
        values["backbone"] = backbone | {"chat_template": (file.parent / name).read_text()}


def _apply(values: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not all(key.split(".")):
        raise UserError(f"--set {override!r} is not of the form key.sub=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"--set {override!r}: the value is not YAML: {error}") from None
    *parents, last = key.split(".")
    for part in parents:
        child = values.setdefault(part, {})
        if isinstance(child, str) and part == "backbone":
            # `backbone: NAME` is short for `backbone: {model: NAME}`.
            child = values[part] = {"model": child}
        if not isinstance(child, dict):
            raise UserError(f"--set {override!r}: {part!r} is {child!r}, which has no keys")
        values = child
    values[last] = value


def _fault(item: dict[str, Any]) -> str:
    where = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        parent = RunConfig.model_fields
        for part in item["loc"][:-1]:
            annotation = parent[str(part)].annotation if str(part) in parent else None
            parent = getattr(annotation, "model_fields", {})
        return f"unknown configuration key {where!r}; allowed here are {sorted(parent)}"
    return f"configuration key {where!r}: {item['msg']} (got {item['input']!r})"
