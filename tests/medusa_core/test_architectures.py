"""Other architectures, tiny and random: each decodes with a tree as transformers' generate does, or is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as hf
from transformers import PreTrainedConfig, PreTrainedModel

from medusa_core.engine import MedusaEngine
from medusa_core.errors import InputError
from medusa_core.heads import HeadsConfig, MedusaHeads
from medusa_core.session import SamplingParams
from medusa_core.tree import OFF, Tree, cartesian
from tests.medusa_core.chaos import VOCAB, greedy, tiny

BUDGET = 24
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
LLAMA: dict[str, Any] = BASE | {"intermediate_size": 48, "num_key_value_heads": 2}
GPT: dict[str, Any] = {
    "vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip
SLIDING_QWEN2 = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
GEMMA2 = {
    "head_dim": 8, "sliding_window": 8, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 5.0,
    "query_pre_attn_scalar": 8,
}  # fmt: skip

ACCEPTED: dict[str, PreTrainedConfig] = {
    "mistral, window 8": hf.MistralConfig(**LLAMA, sliding_window=8),
    "qwen2": hf.Qwen2Config(**LLAMA),
    "qwen2, one sliding layer": hf.Qwen2Config(**LLAMA, **SLIDING_QWEN2),
    "qwen3": hf.Qwen3Config(**LLAMA, head_dim=8),
    "gemma2, softcap and alternating layers": hf.Gemma2Config(**LLAMA, **GEMMA2),
    "phi, LM-head bias": hf.PhiConfig(**LLAMA | {"num_key_value_heads": 4}),
    "phi3, window 8": hf.Phi3Config(**LLAMA, sliding_window=8),
    "gpt-neox": hf.GPTNeoXConfig(**BASE, intermediate_size=48),
    "gpt2, learned positions": hf.GPT2Config(**GPT),
    "opt, learned positions with an offset": hf.OPTConfig(**BASE, ffn_dim=48, word_embed_proj_dim=32),
}


def random_heads(model: PreTrainedModel) -> MedusaHeads:
    output = model.get_output_embeddings()
    heads = MedusaHeads(
        HeadsConfig(num_heads=3, vocab=None), lm_weight_VD=output.weight, lm_bias_V=getattr(output, "bias", None)
    ).to(output.weight.dtype)
    generator = torch.Generator().manual_seed(0)
    for parameter in heads.blocks.parameters():
        parameter.data.normal_(std=0.05, generator=generator)
    return heads.requires_grad_(False)


@pytest.mark.parametrize("name", ACCEPTED)
def test_an_architecture_decodes_as_generate_does(name: str) -> None:
    """Catches positions, windows, scalings and caps that a model does its own way, plain and with a tree."""
    model = tiny(copy.deepcopy(ACCEPTED[name]))
    # Longer than the window, of one token, and in between.
    prompts = [[3], list(range(5, 18)), [20, 21, 2]]
    expected = [greedy(model, prompt, BUDGET) for prompt in prompts]
    engine = MedusaEngine(model, random_heads(model), cartesian([5, 4, 2]), eos_token_ids=[])
    drafted = engine.generate(prompts, SamplingParams(BUDGET), batch=2)
    assert [answer.tokens for answer in drafted] == expected
    assert sum(len(a.tokens) - 1 - a.steps for a in drafted) > 0, "nothing was accepted, so nothing was tested"
    engine.tree = OFF
    assert [answer.tokens for answer in engine.generate(prompts, SamplingParams(BUDGET), batch=3)] == expected
    assert [greedy(model, prompt, BUDGET) for prompt in prompts] == expected, "the model itself must go on as before"


TINY_T5 = {"vocab_size": VOCAB, "d_model": 32, "num_layers": 1, "num_heads": 4, "d_kv": 8, "d_ff": 32}


def build(name: str) -> PreTrainedModel:
    if name == "t5":
        return hf.T5ForConditionalGeneration(hf.T5Config(**TINY_T5))
    if name == "llama without LM head":
        return hf.LlamaModel(hf.LlamaConfig(**LLAMA))
    config = {
        "mamba": lambda: hf.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4),
        "bloom": lambda: hf.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4),
        "gpt-oss": lambda: hf.GptOssConfig(**LLAMA, head_dim=8, sliding_window=8, num_local_experts=4),
    }[name]()
    return tiny(config, torch.float32)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("t5", "encoder-decoder model"),
        ("mamba", "recurrent state"),
        ("llama without LM head", "no LM head"),
        ("bloom", "does not go through transformers' attention interface"),
        ("gpt-oss", "attention sinks"),
    ],
)
def test_an_unsuitable_model_is_refused_with_the_reason(name: str, reason: str) -> None:
    """Catches a wrong answer, or a traceback from deep inside, where one sentence would do."""
    model = build(name)
    with pytest.raises(InputError, match=reason):
        MedusaEngine(model, None, Tree(())).generate([[1, 2, 3]], SamplingParams(4))
