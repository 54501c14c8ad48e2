"""Low-rank adapters on every linear layer of a backbone, the LM head included, through peft (paper section 2.2.2).

Knows nothing of losses or data.
"""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel

from medusa_core.errors import InputError


def untie(model: PreTrainedModel) -> None:
    """Gives the LM head a weight of its own where it shares the embedding's: an adapter merged into a shared weight
    would change the embeddings too. A model that shared none is left as it is."""
    output: Any = model.get_output_embeddings()
    weight: nn.Parameter = output.weight
    if weight is model.get_input_embeddings().weight:
        output.weight = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
    for config in {id(each): each for each in (model.config, model.config.get_text_config())}.values():
        config.tie_word_embeddings = False


def add_lora(model: PreTrainedModel, *, rank: int, alpha: int, dropout: float) -> PeftModel:
    """Wraps every nn.Linear of the model in place, LM head included, and freezes the rest. InputError for a model
    whose LM head shares the embedding's weight."""
    if model.get_output_embeddings().weight is model.get_input_embeddings().weight:
        raise InputError(f"{type(model).__name__}'s LM head shares the embedding's weight: untie it first")
    # By name: peft's own "all-linear" leaves the output layer out.
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=names)
    adapted: PeftModel = get_peft_model(model, config)
    return adapted


def merged(adapted: PeftModel) -> PreTrainedModel:
    """The model with its adapter added to its weights, in the dtype it had; the sum is formed in float32."""
    dtype = adapted.get_base_model().dtype
    whole: Any = adapted.float()
    model: PreTrainedModel = whole.merge_and_unload().to(dtype)
    return model


def lm_head_rows(output: Any, rows_C: torch.Tensor) -> torch.Tensor:
    """Rows of an LM head's weight [C, D] as it is now, an adapter's part included; gradients flow to what trains."""
    base = getattr(output, "base_layer", output)
    weight_CD: torch.Tensor = base.weight[rows_C]
    if base is output:
        return weight_CD
    down, up = output.lora_A["default"].weight, output.lora_B["default"].weight
    adapted_CD: torch.Tensor = weight_CD + (up[rows_C] @ down * output.scaling["default"]).to(weight_CD.dtype)
    return adapted_CD
