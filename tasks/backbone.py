"""Stage `backbone`: one frozen decoder-only model with its tokenizer and chat template, whatever it was named by.

Output: artifact `backbone` with `model/` (a transformers model directory that loads offline) and `backbone.json`.
`digest` in it is of the weights alone, so heads stay bound to weights and not to where these were found.
Local weights are hard-linked, not copied: rewriting them *in place* would change the artifact too (`verify()` tells).
Knows nothing of heads, prompts or devices.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
)

from infra.artifacts import (
    MANIFEST,
    Artifact,
    ArtifactStore,
    artifact_key,
    digest_file,
    digest_json,
    remove_partial,
    write_json,
)
from infra.errors import UserError
from medusa_core.checkpoint import weights_digest
from tasks.model_sources import (
    check_causal,
    convert_gguf,
    current_commit,
    download_snapshot,
    embedded_gguf,
    in_short,
    model_files,
)
from tasks.quantization import Quantization, loading_options

STAGE_VERSION = 1
KIND = "backbone"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges*", "special_tokens_map*", "added_tokens*", "*.model", "*.tiktoken")

log = logging.getLogger(__name__)


class BackboneConfig(BaseModel):
    """`model`: `embedded:NAME`, a hub id, a model directory, or a `.gguf` file. A plain string means just that."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = "embedded:smollm2-135m"
    revision: str | None = None
    chat_template: str | None = None
    trust_remote_code: bool = False
    quantization: Quantization | None = Field(
        None, description="weights of the frozen backbone in 8 or 4 bits wherever it runs; int4 needs CUDA"
    )

    @model_validator(mode="before")
    @classmethod
    def _from_string(cls, value: Any) -> Any:
        return {"model": value} if isinstance(value, str) else value


class BackboneInfo(BaseModel):
    """What `backbone.json` says. Digests are SHA-256; `vocab_size` counts embedding rows; lengths are in tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    source: str
    revision: str | None
    digest: str
    tokenizer_digest: str
    chat_template_digest: str
    parameters: int
    architecture: str
    vocab_size: int
    hidden_size: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    bos_token_id: int | None
    context_length: int
    tie_word_embeddings: bool


@dataclass(frozen=True)
class _Source:
    """Where the files come from: a model directory, or a GGUF file to convert. `identity` is what the key holds."""

    name: str
    kind: str
    path: Path
    revision: str | None
    identity: Mapping[str, str]


def resolve_backbone(store: ArtifactStore, config: BackboneConfig) -> Artifact:
    """The stage: finds, checks and freezes the backbone. UserError for anything that is no decoder-only chat model."""
    source = _locate(config)
    template = _given_template(config.chat_template)
    semantic = {
        "name": source.name,
        "source": source.kind,
        "revision": source.revision,
        "chat_template": template,
        "trust_remote_code": config.trust_remote_code,
    } | ({"quantization": config.quantization} if config.quantization else {})
    key = artifact_key(KIND, STAGE_VERSION, inputs=source.identity, config=semantic)

    def build(partial: Path) -> Mapping[str, Any]:
        model = partial / "model"
        shutil.rmtree(model, ignore_errors=True)
        _fill(source, model, config.trust_remote_code)
        info = _describe(source, model, template, config.trust_remote_code)
        write_json(partial / "backbone.json", info.model_dump(mode="json"))
        return {"parameters": info.parameters}

    try:
        return store.produce(KIND, key, inputs=source.identity, config=config.model_dump(), build=build)
    except UserError:
        remove_partial(store, KIND, key)  # a refused model would be refused again: nothing in it is worth keeping
        raise


def fingerprint(config: BackboneConfig) -> str:
    """What the files behind a backbone's name are at this moment, without fetching any: a hub's commit, or a digest.
    UserError as `resolve_backbone`."""
    if _is_hub_id(config.model):
        return current_commit(config.model, config.revision)
    return digest_json(dict(_locate(config).identity))


def pinned(config: BackboneConfig, commit: str) -> BackboneConfig:
    """A hub model at the commit that `fingerprint` gave, so that what is trained is what was seen; anything else as it
    is."""
    return config.model_copy(update={"revision": commit}) if _is_hub_id(config.model) else config


def fingerprint_of(artifact: Artifact) -> str:
    """The fingerprint that the artifact's source had when it was made."""
    info = backbone_info(artifact)
    if info.source == "hub" and info.revision:
        return info.revision
    return digest_json(dict(artifact.manifest["inputs"]))


def backbone_info(artifact: Artifact) -> BackboneInfo:
    """The facts about a backbone artifact."""
    return BackboneInfo.model_validate_json(artifact.file("backbone.json").read_text())


def backbone_identity(artifact: Artifact) -> str:
    """What answers depend on: weights, in how many bits they are, tokenizer, chat template. The same under another
    name is the same."""
    info, quantization = backbone_info(artifact), artifact.config.get("quantization")
    parts = [info.digest, info.tokenizer_digest, info.chat_template_digest]
    return digest_json(parts if quantization is None else [*parts, quantization])


def as_served(digest: str, artifact: Artifact) -> str:
    """The digest of a backbone's weights, and in how many bits they are served: what versions are compared by."""
    quantization = artifact.config.get("quantization")
    return digest if quantization is None else f"{digest}:{quantization}"


def model_dir(artifact: Artifact) -> Path:
    """The transformers model directory of a backbone artifact."""
    return artifact.path / "model"


def load_model(path: Path, dtype: torch.dtype, device: str = "cpu") -> Any:
    """The frozen model in eval mode, from a model directory, quantized if its artifact was asked for so; UserError if
    any tensor is missing."""
    said = _said_of(path)
    quantization: Quantization | None = said.get("quantization")
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=dtype,
        local_files_only=True,
        trust_remote_code=bool(said.get("trust_remote_code")),
        output_loading_info=True,
        **loading_options(quantization, device),
    )
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise UserError(f"{path} lacks {len(missing)} tensors of its model, the first {missing[0]!r}: get it again")
    if quantization is None:
        model = model.to(device)
    return model.eval().requires_grad_(False)


def load_tokenizer(path: Path) -> Any:
    """The tokenizer with its chat template, from a model directory."""
    return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=_is_trusted(path))


def _is_trusted(path: Path) -> bool:
    """Whether the user trusts the code in a model directory: what was said when its artifact was made, else no."""
    return bool(_said_of(path).get("trust_remote_code"))


def _said_of(path: Path) -> dict[str, Any]:
    """What the user said of a model directory when its artifact was made; nothing of one that is no artifact's."""
    manifest = path.parent / MANIFEST
    return dict(json.loads(manifest.read_text())["config"]) if manifest.is_file() else {}


def _is_hub_id(model: str) -> bool:
    path = Path(model).expanduser()
    named = model.startswith(("embedded:", ".")) or model.endswith(".gguf") or path.exists()
    return not named and _HUB_ID.fullmatch(model) is not None


def _locate(config: BackboneConfig) -> _Source:
    """Finds the files a backbone's name stands for, and digests what its key depends on."""
    model = config.model
    path = Path(model).expanduser()
    if model.startswith("embedded:"):
        name = model.removeprefix("embedded:")
        path, package = embedded_gguf(name)
        return _Source(name, "embedded", path, package, {"package": package})
    if model.endswith(".gguf"):
        if not path.is_file():
            raise UserError(f"backbone {model!r} does not exist: give the path of a .gguf file")
        return _Source(path.stem, "gguf", path, None, {"gguf": digest_file(path)})
    if path.is_dir():
        return _directory_source(path.resolve().name, "directory", path, config.revision, config.trust_remote_code)
    if not _is_hub_id(model):
        raise UserError(
            f"backbone {model!r} is no model directory: give a directory with a config.json, a .gguf file, "
            "a hub id such as NAME/MODEL, or embedded:smollm2-135m"
        )
    snapshot, commit = download_snapshot(model, config.revision, config.trust_remote_code)
    return _directory_source(model, "hub", snapshot, commit, config.trust_remote_code)


def _directory_source(name: str, kind: str, path: Path, revision: str | None, trust: bool) -> _Source:
    check_causal(path, name, trust)
    return _Source(name, kind, path, revision, {file.name: digest_file(file) for file in model_files(path, trust)})


def _fill(source: _Source, model: Path, trust: bool) -> None:
    if source.path.is_file():
        convert_gguf(source.path, model)
        check_causal(model, source.name, trust)
        return
    model.mkdir(parents=True)
    for file in model_files(source.path, trust):
        target = model / file.name
        if file.suffix != ".safetensors":
            shutil.copyfile(file, target)
            continue
        try:
            os.link(file.resolve(), target)  # a hub's cache holds links to its blobs
        except OSError:  # another file system
            shutil.copyfile(file, target)


def _given_template(given: str | None) -> str | None:
    """The text of a chat template given as text or as a path."""
    if given is None:
        return None
    if "{" in given:
        return given
    path = Path(given).expanduser()
    if not path.is_file():
        raise UserError(f"backbone.chat_template {given!r} is neither Jinja text nor a file that exists")
    return path.read_text()


def _describe(source: _Source, model: Path, given: str | None, trust: bool) -> BackboneInfo:
    """Reads the facts from a filled model directory, and writes the chat template beside them."""
    config = AutoConfig.from_pretrained(model, local_files_only=True, trust_remote_code=trust)
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True, trust_remote_code=trust)
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise UserError(f"backbone {source.name!r}: its tokenizer can't be loaded: {in_short(error)}") from error
    template = _check_template(source.name, tokenizer, given)
    (model / "chat_template.jinja").write_text(template)
    with torch.device("meta"):
        skeleton: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=trust)
    text = config.get_text_config()
    return BackboneInfo(
        name=source.name,
        source=source.kind,
        revision=source.revision,
        digest=weights_digest(model),
        tokenizer_digest=_digest_files(model, _TOKENIZER_FILES),
        chat_template_digest=digest_json(template),
        parameters=sum(parameter.numel() for parameter in skeleton.parameters()),
        architecture=type(skeleton).__name__,
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        eos_token_ids=_eos_token_ids(source.name, model, text, tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        context_length=text.max_position_embeddings,
        tie_word_embeddings=bool(text.tie_word_embeddings),
    )


def _check_template(name: str, tokenizer: Any, given: str | None) -> str:
    try:
        template = given or tokenizer.get_chat_template()
        probe = [{"role": "user", "content": "probe"}]
        text = tokenizer.apply_chat_template(probe, chat_template=template, add_generation_prompt=True, tokenize=False)
    except ValueError:
        raise UserError(f"backbone {name!r} has no chat template: give one as backbone.chat_template") from None
    except Exception as error:  # whatever Jinja raises, the template is the user's
        raise UserError(f"the chat template of backbone {name!r} can't be rendered: {in_short(error)}") from error
    if "probe" not in text:
        raise UserError(f"the chat template of backbone {name!r} leaves out the user's message: it gives {text!r}")
    return str(template)


def _eos_token_ids(name: str, model: Path, config: Any, tokenizer: Any) -> tuple[int, ...]:
    found = [config.eos_token_id, tokenizer.eos_token_id]
    if (model / "generation_config.json").is_file():
        found.append(GenerationConfig.from_pretrained(model).eos_token_id)
    flat = {i for entry in found if entry is not None for i in (entry if isinstance(entry, list | tuple) else [entry])}
    if not flat:
        raise UserError(f"backbone {name!r} names no end-of-text token, in its config, tokenizer or generation config")
    return tuple(sorted(flat))


def _digest_files(directory: Path, patterns: tuple[str, ...]) -> str:
    files = sorted(f for f in directory.iterdir() if any(fnmatch(f.name, pattern) for pattern in patterns))
    return digest_json({file.name: digest_file(file) for file in files})
