"""The sizes of a backbone, from its configuration alone: no weights are read or fetched.

The configurations of the recipes' models lie beside this file, so that planning with them needs no hub.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from infra.errors import UserError
from tasks.backbone import BackboneConfig
from tasks.model_sources import download_snapshot, in_short, local_path

_SHIPPED = Path(__file__).parent / "data" / "model_configs.json"


@dataclass(frozen=True)
class ModelShape:
    """Sizes that memory and time follow from. `linear` is the sum of (inputs + outputs) over all linear layers, LM head
    included, which is what an adapter of rank 1 has as parameters; `kv_width` the key heads times their size."""

    parameters: int
    layers: int
    hidden: int
    inner: int
    kv_width: int
    vocab: int
    linear: int
    tied: bool

    def cache_bytes(self, tokens: int, itemsize: int) -> int:
        """Keys and values of some tokens."""
        return 2 * self.layers * self.kv_width * itemsize * tokens

    @property
    def untied_parameters(self) -> int:
        """Parameters once the LM head has a weight of its own."""
        return self.parameters + (self.vocab * self.hidden if self.tied else 0)


def shape_of(backbone: BackboneConfig) -> ModelShape:
    """The shape of a backbone; UserError if its configuration can't be found or read."""
    try:
        config = _configuration(backbone)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=backbone.trust_remote_code)
    except (ValueError, OSError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise UserError(f"the configuration of backbone {backbone.model!r} can't be read: {in_short(error)}") from error
    text = config.get_text_config()
    named = (getattr(text, name, None) for name in ("num_key_value_heads", "num_kv_heads"))
    heads = next(filter(None, named), text.num_attention_heads)
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return ModelShape(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        inner=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        kv_width=heads * size,
        vocab=text.vocab_size,
        linear=sum(linear.in_features + linear.out_features for linear in linears),
        tied=bool(text.tie_word_embeddings),
    )


def _configuration(backbone: BackboneConfig) -> Any:
    model, trust = backbone.model, backbone.trust_remote_code
    path = local_path(model)
    if path is not None and path.suffix == ".gguf":
        return AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    if path is None:
        shipped: dict[str, Any] = json.loads(_SHIPPED.read_text())
        if model in shipped and backbone.revision is None:
            return AutoConfig.for_model(**shipped[model])
        path, _ = download_snapshot(model, backbone.revision, trust, only=["config.json", *(["*.py"] if trust else [])])
    return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=trust)
