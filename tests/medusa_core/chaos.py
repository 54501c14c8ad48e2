"""Tiny random models whose every token depends on the whole context, and heads that draft for them all the same.

The toy language of tests/toys.py follows from its last token alone, so a wrong position or a stale key need not show
there. Here it does: with weights this large, any change of what is attended to changes the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel

VOCAB = 40


def tiny(config: PreTrainedConfig, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A random model whose answers vary; float64, so that no tie decides."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data *= 8
    return model.requires_grad_(False)


def chaotic_llama() -> PreTrainedModel:
    """Two layers, grouped queries."""
    return tiny(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def greedy(model: PreTrainedModel, prompt: Sequence[int], budget: int) -> list[int]:
    """transformers' greedy answer, without end-of-text."""
    ids = torch.tensor([list(prompt)])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=budget,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return list(out[0, len(prompt) :].tolist())


class OracleHeads:
    """Stands in for MedusaHeads: looks a hidden state up among those of known answers and drafts what came next.

    The right token is put at rank 0 at most positions, at another rank at others, and nowhere at some, so that paths
    of every shape and length are accepted.
    """

    num_heads = 3
    vocab_map_C = torch.arange(VOCAB)

    def __init__(self, model: PreTrainedModel, answers: Mapping[tuple[int, ...], Sequence[int]]) -> None:
        hidden, drafts = [], []
        generator = torch.Generator().manual_seed(0)
        places = [0, 0, 0, 0, 1, 1, 2, VOCAB - 1]
        for prompt, answer in answers.items():
            ids = torch.tensor([*prompt, *answer])
            states = model.model(input_ids=ids[None]).last_hidden_state[0]
            for at in range(len(prompt) - 1, len(ids) - 1 - self.num_heads):
                ranked = [torch.randperm(VOCAB, generator=generator) for _ in range(self.num_heads)]
                for head, order in enumerate(ranked):
                    place = places[int(torch.randint(len(places), (), generator=generator))]
                    found = int((order == ids[at + head + 2]).nonzero())
                    order[[place, found]] = order[[found, place]]
                hidden.append(states[at])
                drafts.append(torch.stack(ranked))
        self.hidden_XD, self.drafts_XKV = torch.stack(hidden), torch.stack(drafts)

    def top_tokens(self, hidden_BD: torch.Tensor, *, num_heads: int, width: int) -> torch.Tensor:
        """As MedusaHeads.top_tokens."""
        nearest = torch.cdist(hidden_BD, self.hidden_XD).argmin(-1)
        return self.drafts_XKV[nearest][:, :num_heads, :width]
