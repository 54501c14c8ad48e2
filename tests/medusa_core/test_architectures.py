"""Other architectures, tiny and random: each decodes with a tree as transformers' generate does, or is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as hf
from transformers import PreTrainedConfig, PreTrainedModel

from medusa_core.backbone import Backbone
from medusa_core.copies import CopyingBackbone
from medusa_core.engine import MedusaEngine
from medusa_core.errors import InputError
from medusa_core.heads import HeadsConfig, MedusaHeads
from medusa_core.portfolio import Portfolio
from medusa_core.sampling import SamplingParams
from medusa_core.tree import OFF, Tree, cartesian, chain
from tests.medusa_core.chaos import VOCAB, beyond_root, enlarged, greedy, oracle, tiny

BUDGET = 24
BUSHY = Tree.from_choices([[0], [1], [2], [0, 0], [0, 1], [1, 0], [2, 0], [0, 0, 0], [0, 1, 0], [1, 0, 2]])
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
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
GEMMA = ALTERNATING | {"head_dim": 8, "query_pre_attn_scalar": 8}
GEMMA2 = GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 5.0}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_experts": 4}
SCALED = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = SCALED | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}

FAST: dict[str, PreTrainedConfig] = {
    "llama": hf.LlamaConfig(**LLAMA),
    "llama, tied": hf.LlamaConfig(**LLAMA, tie_word_embeddings=True),
    "llama, biases": hf.LlamaConfig(**LLAMA, attention_bias=True, mlp_bias=True),
    "llama, linear positions": hf.LlamaConfig(**LLAMA, rope_parameters=SCALED | {"rope_type": "linear"}),
    "llama, llama3 positions": hf.LlamaConfig(**LLAMA, rope_parameters=LLAMA3),
    "llama, yarn positions": hf.LlamaConfig(**LLAMA, rope_parameters=SCALED | {"rope_type": "yarn"}),
    "llama, dynamic positions": hf.LlamaConfig(**LLAMA, rope_parameters=SCALED | {"rope_type": "dynamic"}),
    "mistral, window 8": hf.MistralConfig(**LLAMA, sliding_window=8),
    "qwen2, QKV bias": hf.Qwen2Config(**LLAMA),
    "qwen2, one sliding layer": hf.Qwen2Config(**LLAMA, **SLIDING_QWEN2),
    "qwen3, head size of its own": hf.Qwen3Config(**LLAMA, head_dim=16),
    "gemma2, softcap and alternating layers": hf.Gemma2Config(**LLAMA, **GEMMA2),
    "gemma3, alternating layers": hf.Gemma3TextConfig(**LLAMA, **GEMMA),
    "phi, LM-head bias": hf.PhiConfig(**LLAMA | {"num_key_value_heads": 4}),
    "phi3, a window of fewer tokens than the tree is deep": hf.Phi3Config(**LLAMA, sliding_window=2),
    "gpt-neox": hf.GPTNeoXConfig(**BASE, intermediate_size=48),
    "gpt2, learned positions": hf.GPT2Config(**GPT),
    "opt, learned positions with an offset": hf.OPTConfig(**BASE, ffn_dim=48, word_embed_proj_dim=32),
    "mixtral, experts": hf.MixtralConfig(**LLAMA, num_local_experts=4, num_experts_per_tok=2),
    "qwen2-moe, shared expert": hf.Qwen2MoeConfig(**LLAMA, **EXPERTS, shared_expert_intermediate_size=16),
    "qwen3-moe": hf.Qwen3MoeConfig(**LLAMA, **EXPERTS, head_dim=16),
    "gpt-j, its own rotation": hf.GPTJConfig(**GPT, rotary_dim=4),
}


class DistanceAttention(torch.nn.Module):
    """Attention as in a model directory's own code: it ignores positions and mask, and favours what is near."""

    def __init__(self, config: PreTrainedConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.heads = layer, config.num_attention_heads
        self.projections = torch.nn.ModuleList(torch.nn.Linear(config.hidden_size, config.hidden_size) for _ in "qkvo")

    def forward(
        self, hidden_states: torch.Tensor, cache: Any = None, attention_mask: Any = None, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        batch, new, _ = hidden_states.shape
        query, keys, values = (
            project(hidden_states).view(batch, new, self.heads, -1).transpose(1, 2) for project in self.projections[:3]
        )
        if cache is not None:
            keys, values = cache.update(keys, values, self.layer)
        at = torch.arange(keys.shape[2])
        distance = at[-new:, None] - at
        scores = query @ keys.transpose(-1, -2) * query.shape[-1] ** -0.5 - 0.2 * distance
        mixed = scores.masked_fill(distance < 0, float("-inf")).softmax(-1) @ values
        return self.projections[3](mixed.transpose(1, 2).reshape(batch, new, -1)), None


class DistanceLlama(hf.LlamaForCausalLM):
    def __init__(self, config: hf.LlamaConfig) -> None:
        super().__init__(config)
        for layer, block in enumerate(self.model.layers):
            block.self_attn = DistanceAttention(config, layer)


COPIED: dict[str, PreTrainedConfig] = {
    "bloom, alibi": hf.BloomConfig(
        vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4, tie_word_embeddings=False, eos_token_id=None
    ),
    "falcon, alibi": hf.FalconConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True, eos_token_id=None
    ),
    "gpt-oss, sinks and window 8": hf.GptOssConfig(
        **LLAMA, head_dim=8, sliding_window=8, num_local_experts=4, num_experts_per_tok=2
    ),
    "llama with attention of its own": hf.LlamaConfig(**LLAMA, architectures=["DistanceLlama"]),
}
# Longer than the windows and scalings, of one token, and in between; the answers outgrow the windows.
PROMPTS = [[3], list(range(5, 25)), [20, 21, 2]]
BUDGETS = [BUDGET, 13, 17]


def build(config: PreTrainedConfig) -> PreTrainedModel:
    config = copy.deepcopy(config)
    if config.architectures == ["DistanceLlama"]:
        torch.manual_seed(1)
        return enlarged(DistanceLlama(config))
    return tiny(config)


def check_decoding(model: PreTrainedModel, kind: type) -> MedusaEngine:
    """A tree, alone and in a batch whose rows are replaced, and plain decoding, against the model's own generate."""
    whole = [greedy(model, prompt, BUDGET) for prompt in PROMPTS]
    assert len({token for answer in whole for token in answer}) > 4, "too dull to test on"
    expected = [answer[:budget] for answer, budget in zip(whole, BUDGETS, strict=True)]
    heads = oracle(model, {tuple(prompt): answer for prompt, answer in zip(PROMPTS, whole, strict=True)})
    engine = MedusaEngine(model, heads, BUSHY, eos_token_ids=[])
    assert type(engine.backbone) is kind
    params = [SamplingParams(budget) for budget in BUDGETS]
    for tree, batch in ((BUSHY, 1), (BUSHY, 2), (OFF, 3)):
        engine.portfolio = Portfolio.of(tree)
        answers = engine.generate(PROMPTS, params, batch=batch)
        assert [answer.tokens for answer in answers] == expected, (tree, batch)
        assert tree.is_off or beyond_root(answers) > 12, "too little was accepted, so too little was tested"
    assert greedy(model, PROMPTS[1], BUDGET) == whole[1], "the model itself must go on as before"
    return engine


@pytest.mark.parametrize("name", FAST)
def test_an_architecture_decodes_as_generate_does(name: str) -> None:
    """Catches positions, windows, scalings, caps and experts that a model does its own way, and a model that falls
    back to copies though one pass would do."""
    check_decoding(build(FAST[name]), Backbone)


@pytest.mark.parametrize("name", COPIED)
def test_a_model_that_attends_in_a_way_of_its_own_decodes_through_copies(name: str) -> None:
    """Catches biases, sinks and masks lost in a pass over a tree: such a model must not go through one. Also a row's
    copy that is lost, or mistaken for another's, when a request is cancelled and replaced."""
    model = build(COPIED[name])
    engine = check_decoding(model, CopyingBackbone)
    engine.portfolio = Portfolio.of(BUSHY)
    session = engine.session(rows=2, slots=80)
    first, second = (session.add_request(prompt, SamplingParams(BUDGET)) for prompt in PROMPTS[:2])
    session.step()
    session.cancel(first.request)
    third = session.add_request(PROMPTS[2], SamplingParams(BUDGET))
    while session.active:
        session.step()
    for prompt, item in zip(PROMPTS[1:], (second, third), strict=True):
        assert item.generation.tokens == greedy(model, prompt, BUDGET)


def test_where_positions_depend_on_the_longest_row_the_context_ends() -> None:
    """Catches rows, or a tree's nodes, rotated by the tables for long contexts (Phi-3.5 and its like) because another
    row or node of their pass lies past the boundary: answers end there, and longer prompts are refused."""
    longrope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [6.0] * 4}
    config = hf.Phi3Config(
        **LLAMA, original_max_position_embeddings=32, rope_parameters=SCALED | longrope | {
            "original_max_position_embeddings": 32
        }
    )  # fmt: skip
    model = tiny(config)
    prompts = [[3, 7, 1], [token % VOCAB for token in range(5, 25)]]
    expected = [greedy(model, prompt, 32 - len(prompt)) for prompt in prompts]
    heads = oracle(model, {tuple(prompt): answer for prompt, answer in zip(prompts, expected, strict=True)})
    engine = MedusaEngine(model, heads, chain(3), eos_token_ids=[])
    for batch in (1, 2):
        answers = engine.generate(prompts, SamplingParams(64), batch=batch)
        assert [answer.tokens for answer in answers] == expected
        assert {answer.finish_reason for answer in answers} == {"length"}
    with pytest.raises(InputError, match="the model's context is 32"):
        engine.generate([list(range(33))], SamplingParams(1))


def random_heads(model: PreTrainedModel) -> MedusaHeads:
    output = model.get_output_embeddings()
    heads = MedusaHeads(
        HeadsConfig(num_heads=3, vocab=None), lm_weight_VD=output.weight, lm_bias_V=getattr(output, "bias", None)
    ).to(output.weight.dtype)
    generator = torch.Generator().manual_seed(0)
    for parameter in heads.blocks.parameters():
        parameter.data.normal_(std=0.05, generator=generator)
    return heads.requires_grad_(False)


@pytest.mark.parametrize("name", ["phi, LM-head bias", "gemma2, softcap and alternating layers"])
def test_heads_with_the_lm_head_s_own_form_draft(name: str) -> None:
    """Catches heads that lose the LM head's bias or its tie to the embedding; untrained, they guess a repetition."""
    model = build(FAST[name])
    expected = [greedy(model, prompt, BUDGET) for prompt in PROMPTS]
    engine = MedusaEngine(model, random_heads(model), cartesian([5, 4, 2]), eos_token_ids=[])
    answers = engine.generate(PROMPTS, SamplingParams(BUDGET), batch=2)
    assert [answer.tokens for answer in answers] == expected
    assert beyond_root(answers) > 0


TINY_T5 = {"vocab_size": VOCAB, "d_model": 32, "num_layers": 1, "num_heads": 4, "d_kv": 8, "d_ff": 32}
FALCON_H1 = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}
JAMBA = {
    "num_experts": 2, "mamba_d_state": 4, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
    "use_mamba_kernels": False,
}  # fmt: skip
REFUSED: dict[str, Any] = {
    "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**TINY_T5)),
    "llama without LM head": lambda: hf.LlamaModel(hf.LlamaConfig(**LLAMA)),
    "mamba": lambda: tiny(hf.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4)),
    "falcon-h1": lambda: tiny(hf.FalconH1Config(**LLAMA, **FALCON_H1)),
    "jamba": lambda: tiny(hf.JambaConfig(**LLAMA, **JAMBA)),
    "llama that names a window": lambda: tiny(hf.LlamaConfig(**LLAMA, sliding_window=16)),
}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("t5", "T5ForConditionalGeneration is an encoder-decoder model"),
        ("llama without LM head", "LlamaModel has no LM head"),
        ("mamba", "MambaForCausalLM keeps a recurrent state"),
        ("falcon-h1", "FalconH1ForCausalLM keeps a recurrent state"),
        ("jamba", "JambaForCausalLM keeps a recurrent state"),
        # Its attention ignores the window, which only shows once tokens lie past it (Moshi is such a model).
        ("llama that names a window", "a verified tree differs from its paths"),
    ],
)
def test_an_unsuitable_model_is_refused_with_the_reason(name: str, reason: str) -> None:
    """Catches a wrong answer, or a traceback from deep inside, where one sentence would do."""
    with pytest.raises(InputError, match=reason):
        MedusaEngine(REFUSED[name](), None, OFF)
