"""The benchmark's arithmetic and its prompt files; the measuring itself is tested by the whole run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infra.errors import UserError
from tasks.bench_prompts import BenchPrompt, read_mt_bench, stratified
from tasks.bench_report import _divergence, ratio
from tasks.bench_run import first_difference
from tasks.bench_worker import Contestant, start_workers


def rows(engine: str, seconds: list[float], tokens: int = 10) -> list[dict[str, object]]:
    return [{"engine": engine, "prompt_id": str(i), "new_tokens": tokens, "seconds": s} for i, s in enumerate(seconds)]


def test_the_ratio_is_of_tokens_per_second_over_the_whole_run() -> None:
    """Catches a mean of ratios, and a ratio turned over."""
    measured = rows("fast", [1.0, 2.0, 3.0]) + rows("slow", [2.0, 4.0, 6.0])
    result = ratio(measured, "fast", "slow")
    assert result["value"] == pytest.approx(2.0)
    assert result["ci95"] == pytest.approx([2.0, 2.0])
    uneven = ratio(rows("fast", [1.0, 1.0]) + rows("slow", [1.0, 3.0]), "fast", "slow")
    assert uneven["value"] == pytest.approx(2.0)
    assert uneven["ci95"] == pytest.approx([1.0, 3.0])


def test_the_ratio_counts_tokens_not_prompts() -> None:
    measured = rows("fast", [1.0, 1.0], tokens=20) + rows("slow", [1.0, 1.0], tokens=10)
    assert ratio(measured, "fast", "slow")["value"] == pytest.approx(2.0)


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_prompts_are_spread_over_categories() -> None:
    prompts = [BenchPrompt(f"{c}{i}", c, ("x",)) for c in "aaabbc" for i in range(1)]
    assert [p.category for p in stratified(prompts)] == ["a", "b", "c", "a", "b", "a"]
    assert [p.category for p in stratified(prompts, 3)] == ["a", "b", "c"]


@pytest.mark.parametrize(
    "line", ["not json", '{"question_id": 1}', '{"turns": "one"}', '{"turns": []}', '{"turns": [" "]}', "[1]"]
)
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, line: str) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text(json.dumps({"question_id": 1, "turns": ["fine"]}) + "\n\n" + line + "\n")
    with pytest.raises(UserError, match="line 3"):
        read_mt_bench(file, max_turns=2)


def test_missing_and_empty_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        read_mt_bench(tmp_path / "none.jsonl", max_turns=1)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UserError, match="holds no prompts"):
        read_mt_bench(tmp_path / "empty.jsonl", max_turns=1)


def test_a_batch_of_the_reference_answers_like_single_prompts(toy_dir: Path) -> None:
    """Catches left padding that leaks into the reference, which would make losslessness look broken or be untested."""
    from tests import toys

    contestant = Contestant(
        name="transformers", kind="transformers", model=str(toy_dir), eos_token_ids=(toys.END,), dtype="float32",
        device="cpu", threads=1,
    )  # fmt: skip
    prompts = [toys.prompt_ids([4]), toys.prompt_ids([9, 23, 31]), toys.prompt_ids([50, 2])]
    (worker,) = start_workers([contestant])
    try:
        together = [answer.tokens for answer in worker.answer(prompts, 70)]
        assert worker.gap("float64", prompts[0], 1, 1) == 0.0
        wide, low = (worker.gap(dtype, prompts[0], 4, 1) for dtype in ("float64", "bfloat16"))
        assert 0 < abs(wide - low) < 0.05 * abs(wide) and worker.gap("float64", prompts[0], 1, 4) == -wide
        assert worker.memory_mb() > 0
    finally:
        worker.close()
    assert together == [toys.answer_to(4), toys.answer_to(31), toys.answer_to(2)]


def test_differences_beyond_the_noise_are_failures() -> None:
    """Catches a divergence that is called a tie whatever the gap, and an answer that just ends called one."""
    found = [{"gap": gap, "rounding": 0.02} for gap in (0.1, 0.25, 0.6, None)]
    report = _divergence("bfloat16", [{"engine": "transformers"}] * 9, found)
    assert (report["prompts"], report["diverged"], report["ties"], report["failures"]) == (9, 4, 2, 2)
    assert report["max_gap"] == 0.6 and report["first"] == found
    exact = _divergence("float32", [], [{"gap": gap, "rounding": 1e-6} for gap in (1e-5, 1e-3)])
    assert (exact["ties"], exact["failures"]) == (1, 1)


def test_the_noise_is_at_least_what_transformers_has_itself() -> None:
    """Catches a lossless version refused on a machine whose products round more than the one this was written on."""
    found = [{"gap": 0.27, "rounding": 0.15}, {"gap": 0.31, "rounding": None}]
    report = _divergence("bfloat16", [], found)
    assert (report["noise_bound"], report["ties"], report["failures"]) == (0.3, 1, 1)
