"""Toy backbones with non-random behaviour: a tiny Llama trained for seconds on a deterministic language.

The language: 60 words on one fixed cycle. An answer starts at the successor of the user's last word and follows the
cycle until word `w59`, then ends. So every next token is certain, heads can learn it, and token 0 is a real word.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from medusa_core.heads import HeadsConfig, MedusaHeads
from medusa_core.losses import head_labels, head_weights, path_tokens, weighted_loss

WORDS = 60
END, USER, ASSISTANT, UNKNOWN = 60, 61, 62, 63
VOCAB = 64
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|user|> ' if m['role'] == 'user' else '<|assistant|> ' }}{{ m['content'] }} <|end|> "
    "{% endfor %}{% if add_generation_prompt %}<|assistant|> {% endif %}"
)


def _cycle() -> list[int]:
    """Successor of every word: one cycle through all of them."""
    order = list(range(WORDS))
    random.Random(7).shuffle(order)
    successor = [0] * WORDS
    for here, there in zip(order, order[1:] + order[:1], strict=True):
        successor[here] = there
    return successor


SUCCESSOR = _cycle()


def answer_to(last_word: int) -> list[int]:
    """The one right answer, end token included."""
    answer = [SUCCESSOR[last_word]]
    while answer[-1] != WORDS - 1:
        answer.append(SUCCESSOR[answer[-1]])
    return [*answer, END]


def prompt_ids(words: Sequence[int]) -> list[int]:
    return [USER, *words, END, ASSISTANT]


def tokenizer() -> PreTrainedTokenizerFast:
    names = {f"w{i}": i for i in range(WORDS)}
    names |= {"<|end|>": END, "<|user|>": USER, "<|assistant|>": ASSISTANT, "<unk>": UNKNOWN}
    inner = Tokenizer(models.WordLevel(names, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<|end|>",
        pad_token="<|end|>",
        unk_token="<unk>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
        chat_template=CHAT_TEMPLATE,
    )


def _batch(rng: random.Random, rows: int) -> torch.Tensor:
    length = 80
    lines = []
    for _ in range(rows):
        line: list[int] = []
        while len(line) < length:
            words = [rng.randrange(WORDS) for _ in range(rng.randrange(1, 4))]
            line += prompt_ids(words) + answer_to(words[-1])
        lines.append(line[:length])
    return torch.tensor(lines)


def train_toy(seed: int = 0, tie: bool = True, steps: int = 150, hidden: int = 64) -> LlamaForCausalLM:
    """A two-layer grouped-query Llama that speaks the language; deterministic for a seed."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=tie,
        eos_token_id=END,
        bos_token_id=None,
        pad_token_id=END,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=steps)
    rng = random.Random(seed)
    for _ in range(steps):
        batch = _batch(rng, 32)
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.generation_config.eos_token_id = END
    return model.eval().requires_grad_(False)


def toy_directory(cache: Path) -> Path:
    """The toy backbone as a model directory, trained once per version of this file and shared by all test workers."""
    version = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    path = cache / f"toy-{version}"
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            partial = path.with_name(path.name + ".partial")
            train_toy().save_pretrained(partial)
            tokenizer().save_pretrained(partial)
            os.replace(partial, path)
    return path


def perturbed(source: Path, target: Path, *, noise: float, seed: int = 0) -> None:
    """Saves a toy's weights with noise of so many standard deviations of each tensor into another model directory."""
    model = LlamaForCausalLM.from_pretrained(source)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            spread = weight.std() if weight.numel() > 1 else 0.0
            weight.add_(noise * spread * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(target)


def conversations(count: int, seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(input_ids [T], loss_mask [T]) of right answers to random prompts."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        prompt = prompt_ids([rng.randrange(WORDS)])
        answer = answer_to(prompt[1])
        ids = torch.tensor(prompt + answer)
        rows.append((ids, torch.arange(len(ids)) >= len(prompt)))
    return rows


def hidden_states(model: LlamaForCausalLM, input_ids_T: torch.Tensor) -> torch.Tensor:
    """What the LM head reads at every position, [T, D]."""
    with torch.no_grad():
        return model.model(input_ids=input_ids_T[None]).last_hidden_state[0]


def train_heads(
    model: LlamaForCausalLM,
    config: HeadsConfig | None = None,
    *,
    steps: int = 120,
    vocab_map: Sequence[int] | None = None,
) -> MedusaHeads:
    """Heads trained for a second; they draft well but not perfectly."""
    torch.manual_seed(0)
    config = config or HeadsConfig(num_heads=3, vocab=None)
    heads = MedusaHeads.on(model, config, None if vocab_map is None else torch.tensor(vocab_map))
    answers = conversations(60)
    hidden_PD = torch.cat([hidden_states(model, ids) for ids, _ in answers])
    labels_PK = torch.cat([head_labels(ids, mask, config.num_heads) for ids, mask in answers])
    path_PK = path_tokens(torch.cat([ids.roll(-1) for ids, _ in answers]), labels_PK)
    optimizer = torch.optim.AdamW(heads.parameters(), lr=3e-3)
    for _ in range(steps):
        loss = weighted_loss(*heads.losses(hidden_PD, labels_PK, path_PK), head_weights(config.num_heads))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return heads.requires_grad_(False).eval()
