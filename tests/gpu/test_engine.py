"""The engine on a CUDA device, correctness first: `python -m pytest tests/gpu` there. Skipped where there is none."""

from __future__ import annotations

import pytest
import torch

from medusa_core.engine import CompileMode, MedusaEngine
from medusa_core.sampling import SamplingParams
from medusa_core.tree import OFF, Tree, cartesian
from tests.medusa_core.chaos import chaotic_llama, greedy, oracle, prompts_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("compiling", ["off", "on"])
@pytest.mark.parametrize("tree", [OFF, cartesian([3, 2, 1])], ids=["off", "tree"])
@pytest.mark.parametrize("batch", [1, 3])
def test_greedy_is_plain_greedy_on_a_gpu(tree: Tree, batch: int, compiling: CompileMode) -> None:
    """Catches a step that differs on a GPU, and CUDA graphs that replay stale lengths, masks or caches."""
    torch.backends.cuda.matmul.allow_tf32 = False
    reference = chaotic_llama()
    answers = {tuple(prompt): greedy(reference, prompt, 40) for prompt in prompts_of([3, 9, 5, 14])}
    heads = oracle(reference, answers)
    model = chaotic_llama().to("cuda")
    for name in ("hidden_XD", "drafts_XKV", "vocab_map_C"):
        setattr(heads, name, getattr(heads, name).to("cuda"))
    engine = MedusaEngine(model, heads, tree, compile=compiling, eos_token_ids=[])
    for budgets in ([40] * 4, [7, 31, 1, 18]):
        done = engine.generate(
            [list(prompt) for prompt in answers], [SamplingParams(budget) for budget in budgets], batch=batch
        )
        assert [a.tokens for a in done] == [full[:b] for full, b in zip(answers.values(), budgets, strict=True)]


def test_a_step_waits_for_the_device_once() -> None:
    """Catches a hidden synchronisation: torch raises on each but the read-back at the end of the step."""
    engine = MedusaEngine(chaotic_llama().to("cuda"), eos_token_ids=[])
    session = engine.session(rows=2, slots=64)
    session.add_requests([([1, 2, 3], SamplingParams(20)), ([4, 5], SamplingParams(20))])
    session.step()
    waits = 0
    original = torch.Tensor.tolist

    def counted(tensor: torch.Tensor) -> object:
        nonlocal waits
        torch.cuda.set_sync_debug_mode("default")
        waits += 1
        value = original(tensor)
        torch.cuda.set_sync_debug_mode("error")
        return value

    torch.cuda.set_sync_debug_mode("error")
    torch.Tensor.tolist = counted  # type: ignore[method-assign,assignment]
    try:
        session.step()
    finally:
        torch.Tensor.tolist = original  # type: ignore[method-assign]
        torch.cuda.set_sync_debug_mode("default")
    assert waits == 1
