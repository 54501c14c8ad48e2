"""`medusa generate`: one answer, streamed as tokens are accepted."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from flows.versions import backbone_of, find_version


def stream_answer(
    prompt: str,
    *,
    model: str,
    root: Path,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    backbone: str | None,
    plain: bool,
    console: Console,
) -> None:
    """Writes the answer to standard output and one line of figures to `console`."""
    served = find_version(model, root)
    artifact = backbone_of(served, root, backbone)

    import torch

    from medusa_core.checkpoint import load_heads
    from medusa_core.engine import MedusaEngine
    from medusa_core.session import SamplingParams
    from medusa_core.tree import OFF
    from tasks.backbone import backbone_info, load_model, load_tokenizer, model_dir
    from tasks.conversations import ChatFormat
    from tasks.tree import entry_tree, pick_entry

    info = backbone_info(artifact)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = load_model(model_dir(artifact), torch.bfloat16, device)
    heads = load_heads(served.heads, loaded, backbone_digest=info.digest)
    tree = OFF if plain else entry_tree(pick_entry(served.entries()))
    engine = MedusaEngine(loaded, heads, tree, eos_token_ids=info.eos_token_ids, pack=True)
    tokenizer = load_tokenizer(model_dir(artifact))
    ids = ChatFormat(tokenizer, info.eos_token_ids).first(prompt)
    text = _Text(tokenizer)
    start = time.perf_counter()
    generation = None
    for progress in engine.stream(ids, SamplingParams(max_new_tokens, temperature, seed=seed)):
        generation = progress.generation
        sys.stdout.write(text.add(progress.tokens))
        sys.stdout.flush()
    seconds = time.perf_counter() - start
    sys.stdout.write(text.rest() + "\n")
    assert generation is not None
    console.print(
        f"{len(generation.tokens)} tokens in {seconds:.1f} s: {len(generation.tokens) / seconds:.1f} tokens/s, "
        f"{generation.tokens_per_step:.2f} tokens per step, first after {1000 * generation.ttft_s:.0f} ms, "
        f"{served.reference}, {'tree off' if tree.is_off else f'{tree.nodes} nodes'}",
        style="dim",
    )


class _Text:
    """Tokens to text as they come: a piece is held back while its last character is incomplete."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        self.written = ""

    def add(self, tokens: list[int]) -> str:
        self.tokens += tokens
        whole = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
        if whole.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        return self._advance(whole)

    def rest(self) -> str:
        return self._advance(self.tokenizer.decode(self.tokens, skip_special_tokens=True))

    def _advance(self, whole: str) -> str:
        new = whole[len(self.written) :]
        self.written = whole
        return str(new)
