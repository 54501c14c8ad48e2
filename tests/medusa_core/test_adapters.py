"""Adapters: what is wrapped, what stays frozen, and that merging and saving lose nothing."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from medusa_core.adapters import add_lora, lm_head_rows, merged, untie
from medusa_core.errors import InputError
from tests.medusa_core.chaos import VOCAB, chaotic_config, tiny

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9]])


def adapted(tie: bool) -> tuple[PreTrainedModel, PeftModel]:
    """A model as it was, and the same with an adapter that has learnt something."""
    before = tiny(chaotic_config(tie_word_embeddings=tie), torch.float32)
    model = copy.deepcopy(before)
    untie(model)
    wrapped = add_lora(model, rank=4, alpha=8, dropout=0.1).eval()
    torch.manual_seed(0)
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.05)
    return before, wrapped


@pytest.mark.parametrize("tie", [False, True])
def test_merged_and_reloaded_the_model_says_what_the_adapter_says(tie: bool, tmp_path: Path) -> None:
    """Catches an adapter merged into a weight that the embeddings share, and one that is lost in saving."""
    before, wrapped = adapted(tie)
    with torch.no_grad():
        expected = wrapped(input_ids=TOKENS).logits
        assert not torch.allclose(expected, before(input_ids=TOKENS).logits, atol=1e-2)
        with wrapped.disable_adapter():
            assert torch.equal(wrapped(input_ids=TOKENS).logits, before(input_ids=TOKENS).logits)
        merged(wrapped).save_pretrained(tmp_path)
        reloaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        torch.testing.assert_close(reloaded(input_ids=TOKENS).logits, expected, atol=1e-4, rtol=1e-4)
    assert reloaded.config.tie_word_embeddings is False
    assert torch.equal(reloaded.get_input_embeddings().weight, before.get_input_embeddings().weight)


def test_every_linear_layer_is_adapted_and_nothing_else_trains() -> None:
    """Catches peft's "all-linear", which leaves the LM head out."""
    before, wrapped = adapted(tie=True)
    linears = [name for name, module in before.named_modules() if isinstance(module, nn.Linear)]
    trained = {name for name, parameter in wrapped.named_parameters() if parameter.requires_grad}
    assert len(trained) == 2 * len(linears) and all("lora_" in name for name in trained)
    assert hasattr(wrapped.get_base_model().get_output_embeddings(), "lora_A")


def test_a_tied_model_is_refused() -> None:
    with pytest.raises(InputError, match="untie it first"):
        add_lora(tiny(chaotic_config(tie_word_embeddings=True)), rank=2, alpha=4, dropout=0.0)


def test_rows_of_the_lm_head_are_those_of_the_merged_one() -> None:
    """Catches heads in the shared layout that are trained against an LM head which is no longer there."""
    _, wrapped = adapted(tie=False)
    rows = torch.tensor([7, 0, VOCAB - 1])
    found = lm_head_rows(wrapped.get_base_model().get_output_embeddings(), rows)
    assert found.requires_grad
    found.sum().backward()
    output = wrapped.get_base_model().get_output_embeddings()
    assert output.lora_B["default"].weight.grad is not None and output.base_layer.weight.grad is None
    torch.testing.assert_close(found.detach(), merged(wrapped).get_output_embeddings().weight[rows].detach())
    plain = nn.Linear(2, 3, bias=False)
    assert torch.equal(lm_head_rows(plain, torch.tensor([2])), plain.weight[[2]])
