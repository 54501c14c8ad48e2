"""Tiny random models whose every token depends on the whole context, and heads that draft for them all the same.

The toy language of tests/toys.py follows from its last token alone, so a wrong position or a stale key need not show
there. Here it does: with weights this large, any change of what is attended to changes the answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel

from medusa_core.heads import MedusaHeads
from medusa_core.request import Generation
from medusa_core.tap import HiddenTap

VOCAB = 40


def tiny(config: PreTrainedConfig, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A random model whose answers vary; float64, so that no tie decides."""
    torch.manual_seed(1)
    # The faster products over experts know no float64.
    return enlarged(AutoModelForCausalLM.from_config(config, experts_implementation="eager"), dtype)


def enlarged(model: PreTrainedModel, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A freshly initialised model with weights so large that its answers vary."""
    model = model.to(dtype).eval()
    # Tied to the LM head, a large embedding drowns the layers: every token would be followed by itself.
    tied = model.get_input_embeddings().weight if model.config.get_text_config().tie_word_embeddings else None
    for parameter in model.parameters():
        if parameter.dim() > 1 and parameter is not tied:
            parameter.data *= 8
    return model.requires_grad_(False)


def chaotic_config(kind: type[PreTrainedConfig] = LlamaConfig, **changes: Any) -> PreTrainedConfig:
    """Two layers, grouped queries."""
    return kind(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "bos_token_id": None,
            "eos_token_id": None,
        }
        | changes
    )


def chaotic_llama(dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A model of `chaotic_config`."""
    return tiny(chaotic_config(), dtype)


def greedy(model: PreTrainedModel, prompt: Sequence[int], budget: int, **options: Any) -> list[int]:
    """transformers' greedy answer, without end-of-text unless options say one; with further options of `generate`."""
    ids = torch.tensor([list(prompt)])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=budget,
        do_sample=False,
        pad_token_id=0,
        **{"eos_token_id": None} | options,
    )
    return list(out[0, len(prompt) :].tolist())


def prompts_of(lengths: Sequence[int], seed: int = 2) -> list[list[int]]:
    """Random prompts."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in lengths]


def beyond_root(answers: Sequence[Generation]) -> int:
    """Tokens that these answers got without a step of their own: 0 means that no tree did anything."""
    return sum(len(answer.tokens) - 1 - answer.steps for answer in answers)


class OracleHeads:
    """Stands in for MedusaHeads: looks a hidden state up among those of known answers and drafts what came next.

    The right token is put at rank 0 at most positions, at another rank at others, and nowhere at some, so that paths
    of every shape and length are accepted.
    """

    vocab_map_C = torch.arange(VOCAB)
    vocab_size = VOCAB
    path = None

    def __init__(
        self, model: PreTrainedModel, answers: Mapping[tuple[int, ...], Sequence[int]], num_heads: int = 3
    ) -> None:
        """answers by prompt; the model is left as it is."""
        self.num_heads = num_heads
        hidden, drafts = [], []
        generator = torch.Generator().manual_seed(0)
        places = [0, 0, 0, 0, 1, 1, 2, VOCAB - 1]
        tap = HiddenTap(model)
        for prompt, answer in answers.items():
            ids = torch.tensor([*prompt, *answer])
            with torch.no_grad():
                model(input_ids=ids[None], use_cache=False)
            states = tap.hidden[0]
            for at in range(len(prompt) - 1, len(ids) - 1 - num_heads):
                ranked = [torch.randperm(VOCAB, generator=generator) for _ in range(num_heads)]
                for head, order in enumerate(ranked):
                    place = places[int(torch.randint(len(places), (), generator=generator))]
                    found = int((order == ids[at + head + 2]).nonzero())
                    order[[place, found]] = order[[found, place]]
                hidden.append(states[at])
                drafts.append(torch.stack(ranked))
        tap.close()
        self.hidden_XD, self.drafts_XKV = torch.stack(hidden), torch.stack(drafts)

    def parameters(self) -> Iterator[torch.Tensor]:
        """What a Drafter reads the dtype of; no tensor of these can be packed."""
        yield self.hidden_XD.double()

    ranked = MedusaHeads.ranked

    def __call__(self, hidden_BD: torch.Tensor, num_heads: int) -> torch.Tensor:
        """As MedusaHeads.forward: logits [K', B, C] that fall with the rank."""
        drafts_BKV = self.drafts_XKV[torch.cdist(hidden_BD, self.hidden_XD).argmin(-1)][:, :num_heads]
        logits_BKV = torch.zeros(drafts_BKV.shape, dtype=hidden_BD.dtype, device=hidden_BD.device)
        falling_V = -0.7 * torch.arange(VOCAB, dtype=hidden_BD.dtype, device=hidden_BD.device)
        return logits_BKV.scatter(-1, drafts_BKV, falling_V.expand(drafts_BKV.shape)).transpose(0, 1)


def oracle(model: PreTrainedModel, answers: Mapping[tuple[int, ...], Sequence[int]], num_heads: int = 3) -> MedusaHeads:
    """OracleHeads where an engine wants MedusaHeads."""
    return cast(MedusaHeads, OracleHeads(model, answers, num_heads))
