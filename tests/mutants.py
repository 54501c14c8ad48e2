"""Seeded faults, each of which the suite must catch: `python -m tests.mutants [--list] [--only NAME]`.

Every fault is put into a copy of the repository, and the tests that are named for it run there. A fault survives if
they pass, and also if they could not run at all: only a failed test counts as caught.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("medusa_core", "kernels", "tasks", "infra", "flows", "tests")
PASSED, FAILED = 0, 1  # pytest's exit codes; 2 and up mean that tests could not be run
TIMEOUT_S = 300
WHOLE = "whole"

ENGINE = "tests/medusa_core/test_engine.py"
CONTEXT = "tests/medusa_core/test_engine_context.py"
KERNEL = "tests/kernels/test_tree_attention.py::test_the_kernel_computes_what_is_defined"
HEADLINE = f"{CONTEXT}::test_greedy_is_plain_greedy_where_every_token_depends_on_the_context"


@dataclass(frozen=True)
class Mutant:
    """One fault: the text it replaces (must occur exactly once) and the tests that must fail with it."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTANTS = (
    Mutant(
        "label shifted by one",
        "medusa_core/losses.py",
        "        shift = k + 1\n",
        "        shift = k\n",
        ("tests/medusa_core/test_losses.py::test_only_the_right_shift_can_be_learnt",),
    ),
    Mutant(
        "a sibling made visible",
        "medusa_core/attention.py",
        "    tree_BNS = ancestors_NN[:, node_BS]",
        "    ancestors_NN = ancestors_NN | (depths_N[:, None] == depths_N[None]) & (depths_N[-1] < nodes - 1)\n"
        "    tree_BNS = ancestors_NN[:, node_BS]",
        (HEADLINE,),
    ),
    Mutant(
        "packed instead of depth positions",
        "medusa_core/backbone.py",
        "(start_B[:, None] + layout.depths_N)",
        "(start_B[:, None] + torch.arange(tree.nodes, device=self.device))",
        (HEADLINE,),
    ),
    Mutant(
        "KV not compacted",
        "medusa_core/session.py",
        "        self.cache.compact(self._length_B[: self.active], accepted.path_BA)\n",
        "",
        (HEADLINE,),
    ),
    Mutant(
        "prompt tokens trained on",
        "medusa_core/losses.py",
        "    length = input_ids_T.shape[0]\n",
        "    length = input_ids_T.shape[0]\n    loss_mask_T = torch.ones_like(loss_mask_T)\n",
        ("tests/medusa_core/test_losses.py::test_prompt_tokens_are_never_labels",),
    ),
    Mutant(
        "tail mass dropped",
        "tasks/teacher.py",
        "top_PJ - total_P[:, None], tail_P - total_P",
        'top_PJ - total_P[:, None], torch.full_like(total_P, float("-inf"))',
        ("tests/tasks/test_teacher_math.py",),
    ),
    Mutant(
        "tree tie broken wrongly",
        "medusa_core/tree.py",
        "heapq.heappush(heap, (-p, len(child), child))",
        "heapq.heappush(heap, (-p, -len(child), child))",
        ("tests/medusa_core/test_tree.py::test_ties_take_the_shorter_path_then_the_lower_rank",),
    ),
    Mutant(
        "end-of-text not cut",
        "medusa_core/session.py",
        "hit.finish_reason, hit.stop_reason\n                break\n",
        "hit.finish_reason, hit.stop_reason\n"
        '                if hit.finish_reason == "length":\n                    break\n',
        (f"{ENGINE}::test_end_of_text_inside_an_accepted_path_ends_the_answer",),
    ),
    Mutant(
        "wrong vocabulary map",
        "medusa_core/heads.py",
        "return self.vocab_map_C[top_KBW].transpose(0, 1)",
        "return self.vocab_map_C.sort().values[top_KBW].transpose(0, 1)",
        (
            "tests/medusa_core/test_heads.py::test_a_truncated_vocabulary_names_the_right_tokens",
            f"{ENGINE}::test_a_truncated_vocabulary_drafts_real_tokens",
        ),
    ),
    Mutant(
        "a rejected draw that leaves the target as it was",
        "medusa_core/acceptance.py",
        "torch.where(rejected_B1, _residual(p_BV, q_BV), p_BV)",
        "p_BV",
        ("tests/medusa_core/test_acceptance_exact.py",),
    ),
    Mutant(
        "processors that don't see a node's path",
        "medusa_core/sampling.py",
        "torch.cat([context_T.expand(len(below_nd), -1), below_nd], 1)",
        "context_T.expand(len(below_nd), -1)",
        ("tests/medusa_core/test_sampling.py",),
    ),
    Mutant(
        "new keys stored at the start of the row",
        "kernels/cpu_ops.cpp",
        "h * cache_LRHSD.stride(2) + start_B[b] * cache_LRHSD.stride(3);",
        "h * cache_LRHSD.stride(2);",
        ("tests/kernels/test_cpu_ops.py::test_new_keys_land_where_python_puts_them",),
    ),
    Mutant(
        "a sliding window that is believed",
        "medusa_core/backbone.py",
        "config.sliding_window = min(window, 2)",
        "config.sliding_window = window",
        ("tests/medusa_core/test_architectures.py::test_an_unsuitable_model_is_refused_with_the_reason",),
    ),
    Mutant(
        "an LM head without an adapter",
        "medusa_core/adapters.py",
        "if isinstance(module, nn.Linear)]",
        'if isinstance(module, nn.Linear) and name != "lm_head"]',
        ("tests/medusa_core/test_adapters.py::test_every_linear_layer_is_adapted_and_nothing_else_trains",),
    ),
    Mutant(
        "a divergence without its tail",
        "medusa_core/losses.py",
        "return top_P + torch.where(",
        "return top_P + 0 * torch.where(",
        ("tests/medusa_core/test_divergence.py",),
    ),
    Mutant(
        "distributions of the place before the label's",
        "tasks/training_data.py",
        "wanted_PK = at_P[:, None] + torch.arange(1, heads + 1)",
        "wanted_PK = at_P[:, None] + torch.arange(heads)",
        ("tests/tasks/test_training_data.py::test_targets_are_what_the_teacher_said_where_the_label_stands",),
    ),
    Mutant(
        "a grade made up where the judge gave none",
        "tasks/judge.py",
        "return value if value is not None and 1 <= value <= 10 else None",
        "return value if value is not None and 1 <= value <= 10 else 5.0",
        ("tests/tasks/test_model_checks.py::test_judgements_without_a_grade_are_never_made_up",),
    ),
    Mutant(
        "a shared projection that stays behind the LM head",
        "tasks/joint_objective.py",
        "lm_weight_CD=rows_CD, shares_PKJ=shares_PKJ)",
        "lm_weight_CD=None, shares_PKJ=shares_PKJ)",
        ("tests/tasks/test_joint_objective.py::test_a_shared_projection_learns_with_the_lm_head",),
    ),
    Mutant(
        "a path gathered from another branch",
        "medusa_core/drafting.py",
        "tokens_BN[:, level.paths_MA]",
        "tokens_BN[:, level.paths_MA.flip(0)]",
        ("tests/medusa_core/test_path_heads.py::test_a_draft_is_what_the_heads_say_along_every_path",),
    ),
    Mutant(
        "a path that shows a head its own label",
        "medusa_core/losses.py",
        "torch.cat([next_P[:, None], labels_PK[:, :-1]], 1)",
        "labels_PK",
        (
            "tests/medusa_core/test_path_heads.py::test_the_path_in_training_is_the_tokens_that_came",
            "tests/medusa_core/test_calibration.py::test_the_walk_is_what_the_engine_measures",
        ),
    ),
    Mutant(
        "children judged by what another parent's came from",
        "medusa_core/acceptance.py",
        "draft.group_N[node_B]",
        "draft.group_N[node_B].clamp(max=1)",
        (
            "tests/medusa_core/test_acceptance_exact.py::"
            "test_rejection_sampling_is_exact_where_drafts_see_the_path[False]",
        ),
    ),
    Mutant(
        "a change of low rank that learns half",
        "medusa_core/losses.py",
        "grad_low_KPR[head, rows] = grad_low @ up_KCR[head]",
        "grad_low_KPR[head, rows] = grad_low @ up_KCR[0]",
        ("tests/medusa_core/test_losses.py::test_a_change_of_low_rank_is_the_plain_one",),
    ),
    Mutant(
        "kinds compared that learnt from other data",
        "tasks/rivals.py",
        "        and version.tags.get(TRAINED_ON) == data\n",
        "",
        ("tests/tasks/test_publish.py::test_heads_of_another_kind_from_the_same_data_compete",),
    ),
    Mutant(
        "the second word of ancestors left out",
        "kernels/tree_attention.py",
        "word = tl.where(at < 64, word0[:, None], word1[:, None])",
        "word = tl.where(at < 64, word0[:, None], word0[:, None])",
        (KERNEL,),
    ),
    Mutant(
        "shares merged without their weights",
        "kernels/tree_attention.py",
        "share = tl.exp2(lse - pivot)",
        "share = tl.where(lse > float('-inf'), 1.0, 0.0)",
        (KERNEL,),
    ),
    Mutant(
        "a path compacted in the first row only",
        "kernels/compaction.py",
        "row.to(tl.int64) * stride_r",
        "0 * row.to(tl.int64) * stride_r",
        ("tests/kernels/test_tree_attention.py::test_compaction_moves_what_is_defined",),
    ),
    Mutant(
        "a stage key that ignores its config",
        "infra/artifacts.py",
        '"inputs": dict(inputs), "config": dict(config), "machine": machine}',
        '"inputs": dict(inputs), "config": {}, "machine": machine}',
        ("tests/infra/test_artifacts.py::test_a_key_depends_on_everything_it_is_made_of",),
    ),
    Mutant(
        "DeepSpeed names the newest checkpoint itself",
        "tasks/rank_run.py",
        "save_latest=False)",
        "save_latest=True)",
        ("tests/tasks/test_rank_run.py::test_a_kill_while_a_checkpoint_is_named_leaves_the_earlier_name",),
    ),
    Mutant(
        "the gate forgets the best so far",
        "tasks/promotion.py",
        "        if not holds:\n",
        "        if False:\n",
        ("tests/tasks/test_publish.py::test_decision",),
    ),
    Mutant(
        "heads kept whatever they lost",
        "tasks/retrain.py",
        "    if high >= 1:\n",
        "    if high >= 0:\n",
        ("tests/flows/test_retraining.py::test_the_verdict",),
    ),
    Mutant(
        "tree support judged by its worst row",
        "medusa_core/backbone.py",
        "apart_BN.median(0).values.max()",
        "apart_BN.max()",
        ("tests/medusa_core/test_copies.py::test_the_check_tells_rounding_from_a_wrong_mask",),
    ),
)


def copy_repository(source: Path, target: Path) -> None:
    """The folders that the named tests need, without caches."""
    for folder in FOLDERS:
        shutil.copytree(source / folder, target / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml",):
        if (source / file).exists():
            shutil.copy(source / file, target / file)


def run_tests(
    directory: Path, tests: tuple[str, ...], toy_cache: Path, timeout: float = TIMEOUT_S
) -> subprocess.CompletedProcess[str]:
    """pytest in the copy, with the toy backbone of a cache that all runs share."""
    environment = {
        **os.environ,
        "MEDUSA_TOY_CACHE": str(toy_cache),
        "PYTHONPATH": str(directory),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    flags = ("-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=line", "--hypothesis-profile", "unshrunk")
    command = [sys.executable, "-m", "pytest", *flags, *tests]
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=timeout)


def last_line(result: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in (result.stdout + result.stderr).splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no output"


def judge(mutant: Mutant, work: Path, toy_cache: Path) -> str:
    """Empty if the fault was caught, else why it counts as a survivor."""
    with tempfile.TemporaryDirectory(dir=work) as name:
        copy = Path(name)
        copy_repository(work / WHOLE, copy)
        file = copy / mutant.file
        text = file.read_text()
        if (found := text.count(mutant.old)) != 1:
            return f"the text to replace occurs {found} times in {mutant.file}: update tests/mutants.py"
        file.write_text(text.replace(mutant.old, mutant.new))
        survivors = []
        # One by one: each test named must catch it by itself.
        for test in mutant.tests:
            try:
                result = run_tests(copy, (test,), toy_cache)
            except subprocess.TimeoutExpired:
                return f"{test} did not end in {TIMEOUT_S} s"
            if result.returncode == PASSED:
                survivors.append(f"{test} passes")
            elif result.returncode != FAILED:
                survivors.append(f"{test} could not run (exit code {result.returncode}): {last_line(result)}")
        return "; ".join(survivors)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--list", action="store_true", help="name the faults and run nothing")
    parser.add_argument("--only", metavar="NAME", help="only the faults whose name contains NAME")
    arguments = parser.parse_args()
    chosen = [m for m in MUTANTS if arguments.only is None or arguments.only in m.name]
    if not chosen:
        parser.error(f"no fault is named {arguments.only!r}; there are: {', '.join(m.name for m in MUTANTS)}")
    if arguments.list:
        print("\n".join(f"{m.name:48} {m.file}" for m in chosen))
        return 0
    with tempfile.TemporaryDirectory(prefix="medusa-mutants-") as name:
        return check(chosen, Path(name))


def check(chosen: list[Mutant], work: Path) -> int:
    """Runs the named tests without any fault, then once per fault; 1 if anything isn't as it must be."""
    toy_cache, whole = work / "toy", work / WHOLE
    # One copy is the base of all: a file edited meanwhile changes nothing.
    copy_repository(ROOT, whole)
    tests = tuple(dict.fromkeys(test for mutant in chosen for test in mutant.tests))
    result = run_tests(whole, tests, toy_cache, timeout=4 * TIMEOUT_S)
    if result.returncode != PASSED:
        print(result.stdout + result.stderr)
        print(f"the tests fail without any fault (exit code {result.returncode}): nothing can be learnt from them")
        return 1

    def timed(mutant: Mutant) -> tuple[str, float]:
        start = time.monotonic()
        return judge(mutant, work, toy_cache), time.monotonic() - start

    failed = 0
    # Each runs on one thread.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for mutant, (reason, seconds) in zip(chosen, pool.map(timed, chosen), strict=True):
            failed += bool(reason)
            verdict = f"SURVIVED: {reason}" if reason else "caught"
            print(f"{mutant.name:48} {mutant.file:28} {seconds:5.1f} s  {verdict}", flush=True)
    print(f"{len(chosen) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
