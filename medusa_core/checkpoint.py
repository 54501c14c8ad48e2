"""Heads on disk: `heads.safetensors` and a typed, versioned `config.json`. Nothing loads partially.

Knows nothing of training state; that is the trainer's.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from medusa_core.errors import InputError
from medusa_core.heads import HeadsConfig, MedusaHeads

WEIGHTS, CONFIG = "heads.safetensors", "config.json"


class HeadsFile(BaseModel):
    """`config.json` of a heads directory."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["medusa.heads/1"] = "medusa.heads/1"
    heads: HeadsConfig
    hidden_size: int
    vocab_size: int
    backbone_name: str
    backbone_digest: str


def weights_digest(directory: Path) -> str:
    """SHA-256 over the names and contents of a model directory's safetensors files; InputError if it has none."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise InputError(f"{directory} holds no .safetensors weights")
    total = hashlib.sha256()
    for file in files:
        with open(file, "rb") as handle:
            total.update(f"{file.name}:{hashlib.file_digest(handle, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()


def save_heads(directory: Path, heads: MedusaHeads, *, backbone_name: str, backbone_digest: str) -> None:
    """Writes the heads' tensors in their dtype and what they belong to. InputError for an empty tensor, which is what a
    rank holds of a parameter that is spread over several."""
    if empty := sorted(name for name, tensor in heads.state_dict().items() if not tensor.numel()):
        raise InputError(f"{empty[0]} is empty: gather the heads' parameters before they are saved")
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in heads.state_dict().items()}
    save_file(tensors, directory / WEIGHTS)
    described = HeadsFile(
        heads=heads.config,
        hidden_size=heads.hidden_size,
        vocab_size=heads.vocab_size,
        backbone_name=backbone_name,
        backbone_digest=backbone_digest,
    )
    (directory / CONFIG).write_text(described.model_dump_json(indent=2) + "\n")


def read_config(directory: Path) -> HeadsFile:
    """The description of a heads directory; InputError if it is missing, of another format, or misspelt."""
    path = directory / CONFIG
    try:
        return HeadsFile.model_validate(json.loads(path.read_text()))
    except FileNotFoundError:
        raise InputError(f"{directory} holds no heads: {path} is missing") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{path} is not JSON: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{path}: {where}: {first['msg']} (found {first['input']!r})") from None


def load_heads(
    directory: Path, model: PreTrainedModel, *, backbone: Path | None = None, backbone_digest: str | None = None
) -> MedusaHeads:
    """Heads for `model`, in its dtype and on its device.

    InputError if they were trained on another backbone (compared by `backbone_digest`, or the digest of the model
    directory `backbone`), or if any tensor is missing, extra, misshapen or not finite.
    """
    described = read_config(directory)
    digest = backbone_digest or (weights_digest(backbone) if backbone else None)
    if digest is not None and digest != described.backbone_digest:
        raise InputError(
            f"{directory} holds heads for backbone {described.backbone_name} ({described.backbone_digest[:12]}), "
            f"not for this one ({digest[:12]}): train heads for it, or name the backbone they belong to"
        )
    output = model.get_output_embeddings()
    if tuple(output.weight.shape) != (described.vocab_size, described.hidden_size):
        raise InputError(
            f"{directory} is for an LM head of {described.vocab_size} x {described.hidden_size}, "
            f"the model's is {output.weight.shape[0]} x {output.weight.shape[1]}"
        )
    tensors = _read_tensors(directory / WEIGHTS)
    vocab_map = tensors.get("vocab_map_C")
    if vocab_map is not None and (vocab_map.dim() != 1 or vocab_map.dtype != torch.int64):
        raise InputError(
            f"{directory / WEIGHTS}: tensor vocab_map_C is {vocab_map.dtype} of shape {tuple(vocab_map.shape)}, "
            "not a list of token ids (int64)"
        )
    heads = MedusaHeads.on(model, described.heads, vocab_map)
    expected = {name: tuple(tensor.shape) for name, tensor in heads.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise InputError(
                f"{directory / WEIGHTS}: tensor {name} has shape {found.get(name)}, "
                f"but {CONFIG} implies {expected.get(name)}"
            )
        if tensors[name].is_floating_point() and not bool(tensors[name].isfinite().all()):
            raise InputError(f"{directory / WEIGHTS}: tensor {name} holds values that are not finite")
    if not torch.equal(tensors["vocab_map_C"], heads.vocab_map_C.cpu()):
        raise InputError(f"{directory / WEIGHTS}: tensor vocab_map_C is a selection, but {CONFIG} keeps every token")
    heads.load_state_dict(tensors)
    return heads.to(device=model.device, dtype=model.dtype).requires_grad_(False).eval()


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except FileNotFoundError:
        raise InputError(f"{path} is missing") from None
    except SafetensorError as error:
        raise InputError(f"{path} is no readable safetensors file: {error}") from None
