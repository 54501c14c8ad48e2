"""The report's sections below the headline, each from the part of the report it shows; empty where that is missing.

Knows nothing of the page around them, nor of how the drawings are made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks import report_plots as plots
from tasks.promotion import ROLES
from tasks.report_plots import Bar
from tasks.report_runs import PARTS, bounds, chosen_run, groups, peer, rates, run_label, runs, step_parts
from tasks.report_style import MISSING, figure, items, number, part, short, text
from tasks.report_tables import facts, legend, pipeline, section, settings, table, titled, two

Report = Mapping[str, Any]

_AGAINST = {"vs_transformers": "vs transformers generate", "vs_plain": "vs plain, same engine"}


def all_sections(report: Report) -> list[str]:
    """In reading order: result, why, proof, parts, settings."""
    results = (_speed, _step, _categories, _lossless, _heads, _kinds, _tree, _rivals, _retraining, _quality)
    return [maker(report) for maker in (*results, pipeline, settings)]


def speed_plots(report: Report) -> list[tuple[str, str]]:
    """(title, drawing) of tokens per second for every group of runs that can be compared, the headline's first."""
    chosen, drawn = chosen_run(report), []
    for title, members in groups(report):
        rows = [
            Bar(
                run_label(run),
                ((number(run["tokens_per_second"]) or 0.0, "f-main" if run.get("engine") == "medusa" else "f-base"),),
                f"{figure(run['tokens_per_second'], 1)} tokens/s",
                strong=run is chosen,
            )
            for run in members
        ]
        drawn.append((title, plots.bars(rows, f"tokens per second, {title}")))
    return drawn


def _speed(report: Report) -> str:
    charts = [titled(title, drawing) for title, drawing in speed_plots(report)]
    measured = [
        (_AGAINST[key], value, low, high)
        for key, value, low, high in rates(part(report, "speedup"))
        if low is not None and high is not None
    ]
    ratio = titled("speedup with its 95 % interval", plots.interval(measured, "speedup"))
    lead = "Engines interleaved in one run on the same prompts. Longer is faster."
    return section("Speed", lead, two(*charts[:1], ratio, *charts[1:]))


def _step(report: Report) -> str:
    timed = [(run, step_parts(run)) for run in runs(report) if step_parts(run)]
    rows = [
        Bar(
            f"{run_label(run)} · {run.get('dtype') or MISSING} · batch {run.get('batch') or MISSING}",
            tuple(zip(times, ("f-draft", "f-verify", "f-accept"), strict=True)),
            f"{sum(times):.1f} ms",
            strong=run is chosen_run(report),
        )
        for run, times in timed
    ]
    if not rows:
        return ""
    key = legend((name, name) for name in PARTS)
    lead = "Milliseconds of one decoding step: draft the candidates, verify them in one forward, accept a path."
    return section("Where a step's time goes", lead, plots.bars(rows, "milliseconds per step") + key + _account(report))


def _account(report: Report) -> str:
    """Speedup = rate / overhead, worked out, because it says which of the two to work on."""
    medusa, plain = chosen_run(report), peer(report, "plain")
    rate, step, single = number(medusa.get("tokens_per_step")), sum(step_parts(medusa)), sum(step_parts(plain))
    if rate is None or not step or not single:
        return ""
    overhead = step / single
    return (
        f'<p class="note" style="margin-top:14px">{rate:.2f} tokens per step ÷ {overhead:.2f} overhead '
        f"({step:.1f} ms against {single:.1f} ms for a plain step) = {rate / overhead:.2f}× expected over plain "
        "decoding. First tokens and prompts are in the measured ratio, not in this one.</p>"
    )


def _categories(report: Report) -> str:
    medusa, other = part(chosen_run(report), "by_category"), peer(report, "transformers")
    engine, base = "transformers", part(other, "by_category")
    if not base:
        engine, base = "plain", part(peer(report, "plain"), "by_category")
    speeds = {name: number(part(medusa, name).get("tokens_per_second")) for name in medusa}
    base_speeds = {name: number(part(base, name).get("tokens_per_second")) for name in medusa}
    most = max((speed for speed in (*speeds.values(), *base_speeds.values()) if speed), default=None)
    known = sorted(((speed, name) for name, speed in speeds.items() if speed is not None), reverse=True)
    charts = [_category(name, speed, base_speeds[name], part(medusa, name)) for speed, name in known]
    half = (len(charts) + 1) // 2
    key = legend([("main", "medusa"), *([("base", engine)] if any(base_speeds.values()) else [])])
    columns = [plots.pairs(column, "tokens per second by category", most) for column in (charts[:half], charts[half:])]
    lead = (
        "Tokens per second by kind of prompt, fastest first (in brackets: prompts). They are few, so take it as a hint."
    )
    return section("By category", lead, two(*columns) + key if charts else "")


def _category(name: str, speed: float, base: float | None, entry: Mapping[str, Any]) -> plots.Pair:
    words = [f"{speed:.1f} tok/s"]
    if base:
        words.append(f"{speed / base:.2f}×" + (" slower" if speed < base else ""))
    count = number(entry.get("prompts"))
    of = f" ({count:g})" if count is not None else ""
    steps = number(entry.get("tokens_per_step"))
    per_step = f" · {steps:.2f}/step" if steps is not None else ""
    return plots.Pair(f"{name}{of}", speed, base, " · ".join(words) + per_step)


def _lossless(report: Report) -> str:
    lossless, bf16 = part(report, "lossless"), part(report, "bf16_divergence")
    sentences = []
    if number(lossless.get("tokens")):
        mismatched = number(lossless.get("mismatched_prompts"))
        colour = ' style="color:var(--bad)"' if mismatched else ""
        sentences.append(
            f"<p{colour}>Greedy outputs of {figure(lossless.get('prompts'))} prompts, {figure(lossless.get('tokens'))} "
            f"tokens, were compared one by one with plain decoding in {text(lossless.get('dtype'))}: "
            f"<b>{figure(lossless.get('mismatched_prompts'))} prompts differ</b>. {figure(lossless.get('ties'))} ties: "
            "places where two tokens' logits are closer than 1e-4 in float64, so that either is the model's choice.</p>"
        )
    if bf16:
        diverged, gap = number(bf16.get("diverged")), number(bf16.get("max_gap"))
        within = f", the two tokens' logits at most {gap:.3g} apart there in float64" if diverged and gap else ""
        sentences.append(
            f"<p>In the timed run {figure(bf16.get('diverged'))} of {figure(bf16.get('prompts'))} answers leave those "
            f"of transformers at some token{within}. A product over many rows rounds differently from one over a "
            f"single row; {figure(bf16.get('ties'))} of the differences are within this dtype's noise "
            f"({figure(bf16.get('noise_bound'))}), <b>{figure(bf16.get('failures'))} beyond it</b>.</p>"
        )
    return section("Proof that nothing was lost", "Speed counts only if the answers stay the same.", "".join(sentences))


def _heads(report: Report) -> str:
    heads = part(report, "heads")
    top1, top5 = ([number(value) for value in items(heads, name)] for name in ("top1", "top5"))
    pairs = [
        plots.Pair(f"head {i + 1}", first or 0.0, third, f"{_percent(first)} first · {_percent(third)} in five")
        for i, (first, third) in enumerate(zip(top1, _padded(top5, len(top1)), strict=False))
    ]
    chart = plots.pairs(pairs, "accuracy of each head", 1.0, nested=True)
    chart += legend([("main", "right at the first guess"), ("five", "right within five")]) if pairs else ""
    loss = plots.curve(_points(heads, "step", "loss"), "training loss", "training step")
    setup = (
        f"{text(heads.get('kind'))} heads, {text(heads.get('block'))} block, {text(heads.get('lm_head'))} LM head, "
        f"{figure(heads.get('num_layers'))} layer(s), vocabulary {figure(heads.get('vocab'))}: "
        f"{short(heads.get('parameters'))} parameters. "
        f"Measured on {figure(heads.get('positions'))} held-out positions. Head 1 guesses the token after next."
    )
    return section("Heads", setup, two(chart, titled("training loss", loss)))


def _kinds(report: Report) -> str:
    """This version's heads beside registered ones of another kind, block or LM head that learnt from the same data."""
    own = part(report, "heads")
    rivals = [(role, part(report, role)) for role in ROLES]
    others = [
        (role, rival)
        for role, rival in rivals
        if rival.get("same_data") and _layout(part(rival, "heads")) != _layout(own) and part(rival, "heads")
    ]
    if not others:
        return ""
    rows = [_kind("this version", own, chosen_run(report), "")]
    for role, rival in others:
        ratio = part(rival, "ratio")
        low, high = bounds(ratio.get("ci95"))
        words = f"{figure(ratio.get('value'), 2)}×" + ("" if low is None else f" [{low:.2f}, {high:.2f}]")
        rows.append(_kind(text(rival.get("version")), part(rival, "heads"), peer(report, role), words))
    head = ("", "heads", "parameters", "first choice right", "tokens/step", "draft", "tokens/s", "this one is")
    lead = "Heads of different make that learnt from the same data, decoding the same prompts in the same run."
    return section("Kinds of heads side by side", lead, table(head, rows, right={2, 4, 5, 6, 7}))


def _layout(heads: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(heads.get(name) for name in ("kind", "block", "lm_head"))


def _kind(name: str, heads: Mapping[str, Any], run: Mapping[str, Any], ratio: str) -> list[str]:
    right = " ".join(_percent(number(value)) for value in items(heads, "top1"))
    made = ", ".join(text(part) for part in _layout(heads))
    per_step, draft = figure(run.get("tokens_per_step"), 2), f"{figure(run.get('draft_ms'), 1)} ms"
    return [
        name,
        made,
        short(heads.get("parameters")),
        right,
        per_step,
        draft,
        figure(run.get("tokens_per_second"), 1),
        ratio,
    ]


def _tree(report: Report) -> str:
    tree = part(report, "tree")
    if not tree:
        return ""
    choices = [path for choice in items(tree, "choices") if (path := _path(choice))]
    nodes = number(tree.get("nodes"))
    if not choices:
        return section("Tree", "Off: plain decoding was the fastest on this machine.", _curves(tree, nodes) or " ")
    lead = (
        f"{figure(tree.get('nodes'))} nodes, {figure(tree.get('depth'))} deep, "
        f"{figure(tree.get('expected_tokens_per_step'))} tokens per step expected. A node's number is the rank of the "
        "guess: 0 is its head's favourite (filled). All nodes are verified in one forward, and the longest path that "
        "the model agrees with is kept."
    )
    return section("Tree", lead, plots.tree(choices) + _curves(tree, nodes))


def _curves(tree: Mapping[str, Any], nodes: float | None) -> str:
    wanted = (
        ("ms", "step time, ms", "draft"),
        ("tokens_per_step", "tokens per step", "accept"),
        ("tokens_per_second", "tokens per second: what is maximised", "main"),
    )
    charts = [
        titled(title, plots.curve(_points(tree, "nodes", key), title, "tree nodes", colour, nodes))
        for key, title, colour in wanted
    ]
    return (
        f'<div class="three">{"".join(f"<div>{chart}</div>" for chart in charts if chart)}</div>' if any(charts) else ""
    )


def _rivals(report: Report) -> str:
    rows = []
    for role, words in ROLES.items():
        rival = part(report, role)
        rows += [
            (f"{rival.get('version')}, {words}", value, low, high)
            for _, value, low, high in rates({"vs_plain": rival.get("ratio")})
            if low is not None and high is not None
        ]
    lead = "Tokens per second of this version over other versions', in the same interleaved run."
    return section("Against registered versions", lead, plots.interval(rows, "against registered versions"))


def _retraining(report: Report) -> str:
    retraining = part(report, "retraining")
    measured, limits = part(retraining, "measured"), part(retraining, "limits")
    if not retraining:
        return ""
    rows = [("verdict", text(retraining.get("verdict"))), ("why", text(retraining.get("why")))]
    labels = (("was", "tokens per step before"), ("now", "on the new backbone"), ("ratio", "ratio"))
    for name, label in labels:
        low, high = bounds(part(measured, name).get("ci95"))
        if low is not None:
            value = figure(part(measured, name).get("value"), 3)
            rows.append((label, f"{value} ({figure(low, 3)} to {figure(high, 3)})"))
    rows += [(f"limit: {name}", text(value)) for name, value in limits.items()]
    lead = "The backbone is not the one the champion was made for. What was measured about that, and decided."
    return section("The backbone has changed", lead, facts(rows))


def _quality(report: Report) -> str:
    quality = part(report, "quality")
    names = {
        "kl": "KL divergence, nats",
        "perplexity_ratio": "perplexity ratio",
        "greedy_agreement": "greedy agreement",
    }
    rows = []
    for name, label in names.items():
        measured = part(quality, name)
        low, high = bounds(measured.get("ci95"))
        if number(measured.get("value")) is not None:
            rows.append((label, f"{figure(measured.get('value'), 4)} ({figure(low, 4)} to {figure(high, 4)})"))
    rows += _asked(quality)
    lead = (
        "The backbone itself was trained; this is how far it moved on held-out conversations, with 95 % intervals: "
        "the divergence of its distribution from the original's, its perplexity over the original's on the same "
        "answers, and how often both have the same likeliest token; and what it gained or lost where it was asked more."
    )
    return section("Quality", lead, facts(rows))


def _asked(quality: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Tasks' measures and the judge's grade: the original's, the trained one's, and the difference's interval."""
    found = [
        (f"{task}, {name}", part(measures, name))
        for task, measures in part(quality, "lm_eval").items()
        for name in measures
    ]
    if judge := part(quality, "judge"):
        found.append((f"grade by {judge.get('model')}, 1 to 10", judge))
    rows = []
    for label, measured in found:
        original, trained, difference = (part(measured, name) for name in ("original", "trained", "difference"))
        low, high = bounds(difference.get("ci95"))
        was, now = figure(original.get("value"), 3), figure(trained.get("value"), 3)
        rows.append((label, f"{was} before, {now} after (difference {figure(low, 3)} to {figure(high, 3)})"))
    return rows


def _points(mapping: Mapping[str, Any], x: str, y: str) -> list[tuple[float, float]]:
    found = []
    for entry in items(mapping, "curve"):
        at, value = (number(entry.get(name)) for name in (x, y)) if isinstance(entry, Mapping) else (None, None)
        if at is not None and value is not None:
            found.append((at, value))
    return found


def _path(choice: Any) -> tuple[int, ...]:
    if not isinstance(choice, list) or not all(isinstance(rank, int) for rank in choice):
        return ()
    return tuple(choice)


def _padded(values: list[float | None], length: int) -> list[float | None]:
    return values[:length] + [None] * (length - len(values))


def _percent(share: float | None) -> str:
    return MISSING if share is None else f"{share:.1%}"
