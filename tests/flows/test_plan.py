"""Plans: every recipe by its backbone's configuration alone, and what is refused before anything is fetched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file

from flows.config import RECIPES, load_config
from flows.costs import Costs, Workload
from flows.plan import make_plan
from infra.errors import UserError
from infra.fresh_process import FreshProcess
from infra.machine import PrivateMemory
from tasks.backbone import BackboneConfig
from tasks.conversations import Conversation
from tasks.distill import Answerer
from tasks.model_shape import shape_of
from tasks.teacher import Reader
from tests import toys
from tests.flows.conftest import medusa_here, run_medusa


@pytest.mark.parametrize("recipe", sorted(path.stem for path in RECIPES.glob("*.yaml")))
def test_every_recipe_plans_without_a_network(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a recipe with a misspelt key, one that no GPU of its own can carry out, and a plan that wants weights."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    plan = make_plan(load_config(recipe), tmp_path / "root", "publish")
    assert plan["problems"] == []
    costs = {stage["name"]: stage for stage in plan["stages"]}
    stages = {"distill", "teacher", "train-medusa1"} | ({"train-medusa2"} if load_config(recipe).medusa2 else set())
    for name in stages:
        assert all(costs[name][what] > 0 for what in ("tokens", "bytes", "memory", "minutes")), name
    assert not list((tmp_path / "root").glob("**/*.parquet"))


def test_a_model_that_does_not_fit_is_refused_with_the_way_out(tmp_path: Path) -> None:
    """Catches a plan that ends well on a GPU which the stages would fill twice."""
    done = medusa_here("run", "--config", "vicuna-33b", "--set", "plan.gpu=a100-40", "--plan", "--root", tmp_path)
    assert done.returncode == 2
    assert "distill needs" in done.stderr and "lower distill.batch_size" in done.stderr
    assert "medusa2.gradient_checkpointing" in done.stderr
    done = medusa_here("run", "--set", "plan.gpu=a1", "--plan", "--root", tmp_path)
    assert done.returncode == 2 and "plan.gpu is one of" in done.stderr


def test_sources_out_of_reach_need_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="can't be looked up"):
        make_plan(load_config("zephyr-7b", ["prompts.limit=null"]), tmp_path, "publish")


def test_shapes_are_those_that_the_makers_publish() -> None:
    """Parameters as the model cards give them, to the last one; a wrong field of a shipped configuration shows here."""
    published = {
        "lmsys/vicuna-7b-v1.5": 6_738_415_616,
        "lmsys/vicuna-13b-v1.5": 13_015_864_320,
        "HuggingFaceH4/zephyr-7b-beta": 7_241_732_096,
        "meta-llama/Meta-Llama-3-8B-Instruct": 8_030_261_248,
        "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    }
    for model, parameters in published.items():
        assert shape_of(BackboneConfig(model=model)).parameters == parameters
    assert shape_of(BackboneConfig()).parameters == 134_515_008


def test_vicunas_template_is_found_beside_its_recipe_and_says_what_vicuna_was_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a template looked for where one happens to stand, and spaces that the model has never seen."""
    monkeypatch.chdir(tmp_path)
    template = load_config("vicuna-7b-medusa2").backbone.chat_template
    assert template is not None
    talk = [("user", "Hi"), ("assistant", "Hello"), ("user", "Why?")]
    text = toys.tokenizer().apply_chat_template(
        [{"role": role, "content": content} for role, content in talk],
        chat_template=template.replace("bos_token", "'<s>'").replace("eos_token", "'</s>'"),
        add_generation_prompt=True,
        tokenize=False,
    )
    assert text.startswith("<s>A chat between a curious user and an artificial intelligence assistant. ")
    assert text.endswith("the user's questions. USER: Hi ASSISTANT: Hello</s>USER: Why? ASSISTANT:")


def test_bytes_are_those_of_the_files(toy_run: Any) -> None:
    """Catches heads counted without a layer, and hidden states in another dtype."""
    root, path, _, _ = toy_run
    config = load_config(path)
    (heads,) = (root / "artifacts" / "heads").glob("*/heads/heads.safetensors")
    counts = [json.loads(file.read_text()) for file in (root / "artifacts" / "distill").glob("*/manifest.json")]
    tokens = {each["config"]["split"]: each["counts"]["tokens"] for each in counts}
    work = Workload(tokens["train"], tokens["calibration"], 1, 1, 64)
    costs = Costs(config, shape_of(config.backbone), work, keep_hidden=True).stages()
    assert costs["train-medusa1"]["bytes"] == sum(tensor.nbytes for tensor in load_file(heads).values())
    # Before compression, which finds much in a toy's answers and little in a model's; names and offsets come on top.
    teacher = sum(pq.read_table(file).nbytes for file in (root / "artifacts" / "teacher").glob("*/shard-*.parquet"))
    assert costs["teacher"]["bytes"] <= teacher < 1.05 * costs["teacher"]["bytes"]


class Footprint:
    """A worker made and run once in a process of its own; by how many MiB the process grew."""

    def measure(self, make: Any, arguments: dict[str, Any], shard: Any) -> float:
        memory = PrivateMemory()
        make(**arguments).run(shard)
        return memory.peak_mb()


@pytest.mark.long
def test_memory_is_what_the_small_model_takes(tmp_path: Path) -> None:
    """The embedded backbone through every stage that the plan gives a memory for."""
    settings = [
        "prompts.limit=60", "distill.batch_size=16", "distill.max_new_tokens=96", "train.batch_positions=512",
        "medusa2.max_steps=4",
    ]  # fmt: skip
    flags = [part for setting in settings for part in ("--set", setting)]
    command = ["run", "--config", "smollm2-135m-medusa2", "--root", tmp_path, "--until", "train-medusa2", "--json"]
    command += flags
    planned = json.loads(run_medusa(*command, "--plan").stdout)
    memory = {stage["name"]: stage["memory"] / 2**20 for stage in planned["stages"] if "memory" in stage}
    done = run_medusa(*command, timeout=1000)
    assert done.returncode == 0, done.stderr
    made = {stage["name"]: stage["artifact"].split()[0] for stage in json.loads(done.stdout)["stages"]}
    measured = {
        stage: json.loads((tmp_path / "artifacts" / made[stage] / "manifest.json").read_text())["counts"][
            "peak_memory_mb"
        ]
        for stage in ("train-medusa1", "train-medusa2")
    }
    model = tmp_path / "artifacts" / made["backbone"] / "model"
    shards = sorted((tmp_path / "artifacts" / made["distill"]).glob("shard-*.parquet"))
    config = load_config("smollm2-135m-medusa2", settings)
    requests = [Conversation(str(i), str(i), "c", [f"Tell me a story of {i}."], 0.0, i) for i in range(16)]
    workers: dict[str, tuple[Any, dict[str, Any], Any]] = {
        "distill": (
            Answerer,
            {"model": model, "config": config.distill, "eos_token_ids": (2,), "device": "cpu"},
            (tmp_path / "answers" / "shard-00000.parquet", requests),
        ),
        "teacher": (
            Reader,
            {"model": model, "config": config.teacher, "keep_hidden": True, "device": "cpu"},
            (shards[0], tmp_path / "read" / shards[0].name),
        ),
    }
    for folder in ("answers", "read"):
        (tmp_path / folder).mkdir()
    for name, work in workers.items():
        with FreshProcess(name, Footprint) as process:
            measured[name] = process.call("measure", *work)
    print({name: (round(memory[name]), round(measured[name])) for name in measured})
    for name, mb in measured.items():
        # A process of any size has some hundred MiB of its libraries' own beside what grows with the model.
        assert abs(memory[name] - mb) < 0.25 * mb + 100, (name, memory[name], mb)
