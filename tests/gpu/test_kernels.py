"""On a GPU: the kernels natively, in all dtypes and captured in graphs; the engine with them. Skipped elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels import compaction, reference
from kernels.ancestor_bits import tree_mask, words_from_parents
from kernels.tree_attention import attend_under
from medusa_core import ops
from medusa_core.engine import CompileMode, MedusaEngine
from medusa_core.sampling import SamplingParams
from medusa_core.tree import cartesian
from tests.kernels.cases import CASES, Case, check, random_parents
from tests.medusa_core.chaos import chaotic_config, greedy, oracle, prompts_of, tiny

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU; its kernels are interpreted elsewhere"
)
LONG = (
    Case((8191, 100), 26, 8, 2, 128),
    Case((33000,), 64, 4, 1, 128, spare=100),
    Case((5000, 0, 4097), 13, 32, 4, 96, strided=True),
    Case((9000,), 128, 8, 8, 64, window=4096),
    Case((6000,), 16, 4, 2, 256, softcap=30.0),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", (*CASES, *LONG), ids=str)
def test_the_kernel_computes_what_is_defined(case: Case, dtype: torch.dtype) -> None:
    """Catches what the interpreter can't: a race, an asynchronous copy read too early, a tile of another layout."""
    check(case, dtype, "cuda")


def test_a_captured_step_follows_lengths_and_trees_that_change() -> None:
    """Catches a launch that reads lengths on the host: a graph would replay the ones it was captured with."""
    query, keys, values = (
        torch.randn(2, heads, length, 128, device="cuda") for heads, length in ((8, 9), (2, 900), (2, 900))
    )
    words = torch.stack([words_from_parents(random_parents(9, seed)) for seed in range(2)]).cuda()
    mask = tree_mask(torch.tensor([10, 700], device="cuda"), words)
    attend_under(query, keys, values, mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend_under(query, keys, values, mask)
    for lengths in ([10, 700], [880, 0], [333, 64]):
        mask.copy_(tree_mask(torch.tensor(lengths, device="cuda"), words.flip(0)))
        graph.replay()
        torch.testing.assert_close(out, attend_under(query, keys, values, mask), rtol=0, atol=0)


def test_torch_compile_takes_the_operator_whole() -> None:
    """Catches a graph break, or a fake that disagrees with the kernel."""
    query, cache = torch.randn(1, 4, 5, 64, device="cuda"), torch.randn(1, 2, 300, 64, device="cuda")
    mask = tree_mask(torch.tensor([250], device="cuda"), words_from_parents([-1, 0, 0, 1, 2])[None].cuda())

    def step() -> torch.Tensor:
        return ops.tree_kernel(query * 2, cache, cache, mask, None, None) + 1  # type: ignore[no-any-return]

    torch.testing.assert_close(torch.compile(step, fullgraph=True)(), step())


def test_the_engine_with_the_kernel_says_what_it_says_without() -> None:
    """Catches an engine that takes another attention on a GPU than it was asked for, and answers that change by it."""
    prompts, answers = prompts_of([29, 3]), {}
    for attention in ("kernel", "dense"):
        model = tiny(chaotic_config(head_dim=64), torch.float32).to("cuda")
        engine = MedusaEngine(model, eos_token_ids=[], attention=attention)  # type: ignore[arg-type]
        assert engine.backbone.kernel == (attention == "kernel")  # type: ignore[attr-defined]
        answers[attention] = [answer.tokens for answer in engine.generate(prompts, SamplingParams(60), batch=2)]
    assert answers["kernel"] == answers["dense"]


@pytest.mark.parametrize("compiling", ["off", "on"])
@pytest.mark.parametrize("batch", [1, 3])
def test_trees_verified_by_the_kernel_give_plain_greedy_answers(batch: int, compiling: CompileMode) -> None:
    """Catches kernel, cache, compaction and compiled steps that disagree natively on where a node lies."""
    torch.backends.cuda.matmul.allow_tf32 = False
    plain = tiny(chaotic_config(head_dim=64), torch.float32)
    answers = {tuple(prompt): greedy(plain, prompt, 40) for prompt in prompts_of([3, 9, 5, 14])}
    heads = oracle(plain, answers)
    for name in ("hidden_XD", "drafts_XKV", "vocab_map_C"):
        setattr(heads, name, getattr(heads, name).to("cuda"))
    model = tiny(chaotic_config(head_dim=64), torch.float32).to("cuda")
    engine = MedusaEngine(model, heads, cartesian([3, 2, 1]), compile=compiling, eos_token_ids=[], attention="kernel")
    done = engine.generate([list(prompt) for prompt in answers], SamplingParams(34), batch=batch)
    assert [answer.tokens for answer in done] == [full[:34] for full in answers.values()]
    assert sum(len(answer.tokens) - 1 for answer in done) > 1.2 * sum(answer.steps for answer in done)


def test_compaction_moves_what_is_defined() -> None:
    """Catches a slot written before another thread has read it, which no interpreter shows."""
    keys, values = (torch.randn(24, 3, 8, 600, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    right = [keys.clone(), values.clone()]
    start = torch.tensor([500, 0, 77], device="cuda")
    path = torch.tensor([[0, 2, 3, 5, 8, 9], [0, 1, 2, 3, 4, 5], [0, 20, 30, 31, 60, 99]], device="cuda")
    for _ in range(20):
        compaction.compact_cache(keys, values, start, path)
        reference.compact_cache(*right, start, path)
        assert torch.equal(keys, right[0]) and torch.equal(values, right[1])


def test_the_benchmark_ends_with_a_table(tmp_path: Path) -> None:
    """Catches a script that fails in the few minutes that somebody has a GPU."""
    command = [sys.executable, "-m", "kernels.bench", "--minutes", "0.2", "--json", str(tmp_path / "bench.json")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).resolve().parents[2])
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "bench.json").read_text())
    assert result["calls"] and all(row["ours_ms"] >= row["floor_ms"] * 0.5 for row in result["calls"])
