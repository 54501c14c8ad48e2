"""What `medusa generate` and `medusa chat` share: a version's engine on this machine, and how an answer is shown.

Knows directories and terminals; decoding is `medusa_core`'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flows.versions import backbone_of, find_version

if TYPE_CHECKING:
    from medusa_core.engine import CompileMode, MedusaEngine
    from medusa_core.request import Generation
    from medusa_core.sampling import SamplingParams
    from tasks.conversations import ChatFormat


@dataclass(frozen=True)
class Answering:
    """An engine and the conversation format of its backbone. `name` says what was loaded."""

    name: str
    engine: MedusaEngine
    chat: ChatFormat


def open_engine(
    model: str, root: Path, *, backbone: str | None = None, plain: bool = False, compile: CompileMode = "off"
) -> Answering:
    """Loads a version with its trees (`plain` leaves them off); UserError if the reference or backbone is wrong."""
    served = find_version(model, root)
    artifact = backbone_of(served, root, backbone)

    import torch

    from medusa_core.portfolio import PLAIN, Portfolio
    from tasks.backbone import backbone_info, load_tokenizer, model_dir
    from tasks.conversations import ChatFormat
    from tasks.engine import EngineConfig, load_engine
    from tasks.stage import Placement

    info = backbone_info(artifact)
    tokenizer = load_tokenizer(model_dir(artifact))
    engine = load_engine(
        model_dir(artifact),
        dtype=torch.bfloat16,
        device=Placement().resolved_device(),
        engine=EngineConfig(compile=compile),
        eos_token_ids=info.eos_token_ids,
        heads=served.heads,
        backbone_digest=info.digest,
        tree=PLAIN if plain else Portfolio.from_entries(served.entries()["entries"]),
        tokenizer=tokenizer,
    )
    return Answering(served.reference, engine, ChatFormat(tokenizer, info.eos_token_ids))


def show_answer(
    answering: Answering, ids: Sequence[int], params: SamplingParams, write: Callable[[str], None]
) -> tuple[Generation, str]:
    """Streams an answer: `write` gets the text of each group of tokens that one step accepted. The answer, and one
    line of figures about it."""
    from medusa_core.stopping import TextStream

    text = TextStream(answering.engine.decode, params)
    start = time.perf_counter()
    generation = None
    for progress in answering.engine.stream(ids, params):
        generation = progress.generation
        write(text.add(progress.tokens))
    seconds = time.perf_counter() - start
    write(text.rest())
    assert generation is not None
    figures = (
        f"{len(generation.tokens)} tokens in {seconds:.1f} s: {len(generation.tokens) / seconds:.1f} tokens/s, "
        f"{generation.tokens_per_step:.2f} tokens per step, first after {1000 * generation.ttft_s:.0f} ms, "
        f"{generation.usage.prompt_tokens} prompt tokens, ended by {generation.finish_reason}"
    )
    if params.temperature > 0 and params.acceptance == "typical":
        figures += " (typical acceptance: not the model's own distribution)"
    return generation, figures
