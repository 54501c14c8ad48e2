"""The report page: the numbers a reader looks for are there, nothing is fetched, nothing missing breaks it."""

from __future__ import annotations

import copy
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from tasks.report_html import render_report
from tasks.report_plots import ticks

CHOICES = [
    *([0], [1], [2], [3], [0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [2, 0], [0, 0, 0], [0, 0, 1]),
    *([0, 1, 0], [1, 0, 0], [0, 0, 0, 0]),
]
CATEGORIES = ["writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"]


def run(engine: str, speed: float, **more: Any) -> dict[str, Any]:
    categories = {
        name: {
            "tokens_per_second": round(speed * (0.82 + 0.06 * i), 1),
            "tokens_per_step": 1.4 + 0.09 * i,
            "prompts": 3,
        }
        for i, name in enumerate(CATEGORIES)
    }
    return {
        **{
            "engine": engine,
            "acceptance": "greedy",
            "temperature": 0.0,
            "dtype": "bfloat16",
            "batch": 1,
            "prompts": 24,
        },
        **{"context_tokens": 96, "new_tokens": 1900, "seconds": 1900 / speed, "tokens_per_second": speed},
        **{"tokens_per_step": 1.0, "ttft_ms": 88.4, "peak_memory_mb": 912, "by_category": categories},
        **more,
    }


def sample() -> dict[str, Any]:
    nodes = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
    steps = (1.0, 1.24, 1.46, 1.66, 1.76, 1.84, 1.9, 1.94, 1.99, 2.02)
    times = (46.2, 46.8, 47.3, 48.9, 50.5, 52.1, 57.6, 63.0, 72.4, 83.9)
    curve = [
        {"nodes": n, "ms": ms, "tokens_per_step": s, "tokens_per_second": 1000 * s / ms}
        for n, s, ms in zip(nodes, steps, times, strict=True)
    ]
    seconds = (3.1, 0.8, 612.4, 181.0, 244.9, 61.2, 48.0, 0.4, 322.7, 4.2)
    names = ["backbone", "prompts", "distill", "teacher", "train-medusa1"]
    names += ["ranks", "latency", "tree", "benchmark", "publish"]
    return {
        "schema": "medusa.report/1",
        "backbone": {"name": "SmolLM2-135M-Instruct", "digest": "9f2c41d07be855aa01", "parameters": 134515008},
        "device": {"name": "Intel Xeon, 2 cores, AMX", "threads": 2, "dtype": "bfloat16"},
        "machine": {"memcpy_gbps": 21.3},
        "heads": {
            **{"kind": "medusa", "block": "paper", "lm_head": "own", "num_heads": 4, "num_layers": 1, "vocab": 8192},
            **{"parameters": 20203776, "bytes": 40407552, "positions": 10412},
            **{"top1": [0.274, 0.163, 0.104, 0.098], "top5": [0.511, 0.352, 0.268, 0.247]},
            "curve": [{"step": 10 * i, "loss": 3.1 + 5.4 / (1 + 0.25 * i) + 0.06 * (i % 3)} for i in range(60)],
        },
        "tree": {
            **{"nodes": len(CHOICES) + 1, "depth": 4, "choices": CHOICES, "expected_tokens_per_step": 1.84},
            "curve": curve,
        },
        "runs": [
            run("transformers", 20.1, tokens_per_step=1.0),
            run("transformers-static-compiled", 24.7),
            run("plain", 21.4, draft_ms=0.0, verify_ms=45.1, accept_ms=0.6),
            run("medusa", 32.6, tokens_per_step=1.87, draft_ms=3.4, verify_ms=50.2, accept_ms=1.1),
            run("transformers", 17.2, dtype="float32"),
            run("medusa", 26.0, dtype="float32", tokens_per_step=1.88, draft_ms=4.4, verify_ms=63.0, accept_ms=1.2),
        ],
        "speedup": {
            **{"dtype": "bfloat16", "batch": 1, "threads": 2, "prompts_digest": "41ce02"},
            "vs_transformers": {"value": 1.62, "ci95": [1.55, 1.69]},
            "vs_plain": {"value": 1.52, "ci95": [1.46, 1.58]},
        },
        "champion": {"version": "smollm2/3", "ratio": {"value": 1.04, "ci95": [0.99, 1.09]}},
        "lossless": {"dtype": "float32", "prompts": 24, "tokens": 1900, "mismatched_prompts": 0, "ties": 2},
        "bf16_divergence": {"prompts": 24, "diverged": 15, "max_gap": 0.125},
        "quality": {"kl": None, "perplexity_ratio": None, "greedy_agreement": None},
        "stages": [
            {"name": name, "seconds": cost, "cached": name in ("backbone", "prompts"), "artifact": f"{name}-9f2c41d07b"}
            for name, cost in zip(names, seconds, strict=True)
        ],
        "registry": {"model": "smollm2", "version": 4, "alias": "champion"},
    }


def changed(**parts: Any) -> dict[str, Any]:
    report = sample()
    for name, values in parts.items():
        report[name] = {**report[name], **values} if isinstance(values, dict) else values
    return report


class Page(HTMLParser):
    """Balanced tags, and what the page would fetch."""

    VOID = frozenset({"meta", "br", "img", "link", "input"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.words: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [f"{name}={value}" for name, value in attrs if name in ("src", "href", "xlink:href")]
        assert tag not in ("script", "link", "iframe")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def test_the_headline_and_the_settings_are_there() -> None:
    words = Page(render_report(sample())).text
    for expected in (
        "1.62× faster than transformers generate",
        "[1.55–1.69]",
        "Not one token changed: 24 prompts, 1,900 tokens compared in float32, 0 mismatches, 2 ties",
        "Registered as smollm2/4 · champion",
        "transformers-static-compiled",
        "1.87 tokens per step ÷ 1.20 overhead (54.7 ms against 45.7 ms for a plain step) = 1.56×",
        "15 of 24 answers leave those of transformers",
        "27.4% first · 51.1% in five",
        "memcpy gbps",
        "first token ms",
        "41ce02",
        "train-medusa1-9f2c41d07b",
    ):
        assert expected in words
    assert "NOT lossless" not in words
    assert "includes 1" not in words


def test_kinds_of_heads_are_shown_side_by_side() -> None:
    """Catches a comparison with heads that learnt from other data, and the figures of one under the other's name."""
    champion = sample()["champion"] | {
        "same_data": True,
        "heads": {
            "kind": "hydra",
            "block": "mlp",
            "lm_head": "shared",
            "parameters": 9_000_000,
            "top1": [0.377, 0.298],
        },
    }
    report = changed(champion=champion)
    report["runs"].append(run("champion", 41.5, tokens_per_step=2.04, draft_ms=7.9, verify_ms=50.0, accept_ms=1.0))
    words = Page(render_report(report)).text
    assert (
        "this version medusa, paper, own 20.2M 27.4% 16.3% 10.4% 9.8% 1.87 3.4 ms 32.6 "
        "smollm2/3 hydra, mlp, shared 9M 37.7% 29.8% 2.04 7.9 ms 41.5 1.04× [0.99, 1.09]"
    ) in words
    for other in ({"same_data": False}, {"heads": sample()["heads"]}, {"heads": {}}):
        assert "side by side" not in Page(render_report(report | {"champion": champion | other})).text


def test_nothing_is_fetched() -> None:
    page = render_report(sample())
    assert Page(page).fetched == []
    assert "http" not in page
    assert "url(" not in page
    assert "@import" not in page


def test_the_tree_has_every_node_and_every_edge() -> None:
    page = render_report(sample())
    assert len(re.findall('<g class="node', page)) == len(CHOICES) + 1
    drawing = page[page.index('aria-label="Tree') :]
    assert drawing[: drawing.index("</svg>")].count('class="edge"') == len(CHOICES)


def test_every_pipeline_stage_is_drawn() -> None:
    page = render_report(sample())
    assert len(re.findall('<g class="stage', page)) == 11
    assert len(re.findall('<g class="stage done', page)) == 10
    assert "not run" in page


@pytest.mark.parametrize(
    ("value", "interval", "says", "never"),
    [
        (1.03, [0.97, 1.09], ["no clear difference", "interval includes 1"], ["faster"]),
        (0.82, [0.78, 0.86], ["slower", "Slower than transformers: switch the tree off"], ["faster than"]),
        (0.98, [0.95, 1.01], ["no clear difference", "interval includes 1"], ["faster than"]),
        (1.40, None, ["1.40× faster", "No confidence interval"], ["includes 1"]),
    ],
)
def test_the_headline_is_honest(value: float, interval: Any, says: list[str], never: list[str]) -> None:
    report = changed(speedup={"vs_transformers": {"value": value, "ci95": interval}})
    words = Page(render_report(report)).text
    top = words[: words.index("tokens per decoding step")]
    assert all(phrase in top for phrase in says)
    assert not any(phrase in top for phrase in never)


def test_a_mismatch_is_shown_in_red() -> None:
    page = render_report(changed(lossless={"mismatched_prompts": 1}))
    assert 'class="verdict bad">✗ NOT lossless' in page
    assert "1 mismatch," in page
    assert "Not one token changed" not in page


def test_unchecked_is_not_called_lossless() -> None:
    page = render_report(changed(lossless={"tokens": 0}))
    assert "Losslessness was not checked" in page
    assert "Not one token changed" not in page


def test_typical_acceptance_is_labelled_wherever_its_speed_is_shown() -> None:
    report = sample()
    report["runs"] = [run("medusa", 41.0, acceptance="typical", temperature=0.7, verify_ms=50.0)]
    page = render_report(report)
    assert page.count("typical (changes the output)") >= 4
    assert "output that is not the model&#x27;s own" in page or "output that is not the model's own" in page


def test_values_are_escaped() -> None:
    evil = "<script>alert('x')</script>&\""
    report = sample()
    for holder in (report["backbone"], report["device"], report["registry"], report["stages"][0], report["runs"][3]):
        holder.update({key: evil for key, value in holder.items() if isinstance(value, str) and key != "engine"})
    report["runs"][0]["engine"] = evil
    report["runs"][3]["by_category"] = {evil: {"tokens_per_second": 3.0, "tokens_per_step": evil, "prompts": evil}}
    report["machine"] = {evil: evil}
    report["lossless"]["dtype"] = evil
    page = render_report(report)
    assert "<script" not in page
    assert "&amp;lt;" not in page, "escaped twice"
    Page(page)


def test_off_is_said() -> None:
    page = render_report(changed(tree={"choices": [], "nodes": 1, "depth": 0}))
    assert "Off: plain decoding was the fastest" in page


@pytest.mark.parametrize("name", sorted(sample()))
@pytest.mark.parametrize("value", [None, {}, []], ids=["null", "object", "list"])
def test_any_part_may_be_missing(name: str, value: Any) -> None:
    report = sample()
    report[name] = value
    Page(render_report(report))
    del report[name]
    Page(render_report(report))


def test_any_value_may_be_null() -> None:
    def blank(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: blank(entry) for key, entry in value.items()}
        return [blank(entry) for entry in value] if isinstance(value, list) else None

    Page(render_report(blank(sample())))
    for key, values in sample().items():
        for name in values if isinstance(values, dict) else ():
            report = copy.deepcopy(sample())
            report[key][name] = None
            Page(render_report(report))


@pytest.mark.parametrize(
    "report",
    [
        {},
        {"tree": {"choices": [[0, 0, 0], [5]], "nodes": 3}},
        {"tree": {"choices": [["a"], 3, None, [0]]}},
        {"heads": {"top1": [0.3], "top5": []}},
        {"heads": {"curve": [{"step": 0, "loss": 1.0}, {"step": 1, "loss": 1.0}]}},
        {"heads": {"curve": [{"step": 0, "loss": float("nan")}]}},
        {"runs": [{"engine": "medusa", "tokens_per_second": 0.0}]},
        {"runs": [None, 3, {"tokens_per_second": 4.0}]},
        {"speedup": {"vs_transformers": {"value": 1.2, "ci95": [1.1]}}},
        {"stages": [{"name": "unknown", "seconds": None}]},
    ],
)
def test_odd_reports_are_drawn_all_the_same(report: dict[str, Any]) -> None:
    Page(render_report(report))


def test_a_large_tree_is_drawn_whole() -> None:
    choices = [[a] for a in range(16)] + [[a, b] for a in range(16) for b in range(12)]
    page = render_report({"tree": {"choices": choices, "nodes": 209, "depth": 2}})
    assert len(re.findall('<g class="node', page)) == 209


@pytest.mark.parametrize("values", [[0.0, 0.0], [3.0], [1.0, 1.0001], [-5.0, 5.0], [20.0, 83.9]])
def test_ticks_enclose_the_values(values: list[float]) -> None:
    found = ticks(values)
    assert found[0] <= min(values)
    assert found[-1] >= max(values)
    assert 2 <= len(found) <= 8
