"""Whether a candidate becomes champion: a pure function of its report and of the limits in the configuration.

Knows nothing of registries or of how anything was measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from tasks.quality import MEASURES

# Who a candidate is measured against: what is served, and the fastest there ever was on this backbone.
CHAMPION, BEST = "champion", "best"
# And what is shown, but never decided on: heads of another kind that learnt from the same data.
OTHER_KIND = "other_kind"
# As a reader is told.
ROLES = {CHAMPION: "the champion", BEST: "the best so far", OTHER_KIND: "of another kind"}


class PublishConfig(BaseModel):
    """Where a run's result is registered, how much slower than the champion still counts as noise, and how far a
    trained backbone may have moved: the worse end of each 95 % interval must keep to it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str | None = Field(None, description="registered name; the recipe's name if none is given")
    tracking_uri: str | None = Field(
        None, description="MLflow tracking URI; if none is given $MLFLOW_TRACKING_URI, or SQLite under the root"
    )
    max_slowdown: float = Field(0.02, ge=0, lt=1, description="share of the champion's tokens/s a candidate may lose")
    max_kl: float = Field(0.1, gt=0, description="nats per token that a trained backbone may lie from its original")
    max_perplexity_ratio: float = Field(1.05, gt=0, description="its perplexity over the original's")
    min_greedy_agreement: float = Field(0.85, ge=0, le=1, description="how often both must have the same first choice")
    max_task_drop: float = Field(0.02, ge=0, description="what a task's measure may lose, if tasks are named")
    max_grade_drop: float = Field(
        0.5, ge=0, description="what a judge's mean grade of 1 to 10 may lose, if there is one"
    )


def decide(report: Mapping[str, Any], limits: PublishConfig, champion: str | None = None) -> tuple[bool, str]:
    """Whether the report's candidate becomes champion, and why.

    `champion`: reference (NAME/VERSION) of the present champion it has to be measured against; None if there is
    none, or only one of another backbone. Where the report compares it with the best there ever was, it must not be
    slower than that either: many losses too small to see would add up.
    """
    if (fault := _loss(report) or _drift(report, limits)) is not None:
        return False, f"not promoted: {fault}"
    if best := part(report, BEST):
        holds, sentence = _compare(part(best, "ratio"), f"{best.get('version')}, the best so far", limits.max_slowdown)
        if not holds:
            return False, sentence
    compared = part(report, CHAMPION)
    if not compared:
        if champion is None:
            return True, "promoted: lossless, and there is no champion to compare with"
        return False, f"not promoted: it was not measured against the champion {champion} in the same run"
    measured = str(compared.get("version"))
    if champion is not None and measured != champion:
        return False, f"not promoted: it was measured against {measured}, but the champion is {champion}"
    return _compare(part(compared, "ratio"), measured, limits.max_slowdown)


def _loss(report: Mapping[str, Any]) -> str | None:
    """What speaks against calling it lossless, or None."""
    lossless = part(report, "lossless")
    mismatched, tokens = number(lossless.get("mismatched_prompts")), number(lossless.get("tokens"))
    if mismatched is None or tokens is None:
        return "the report does not say whether its outputs equal plain decoding's"
    if mismatched != 0:
        return f"{mismatched:g} prompts were answered differently from plain decoding"
    if tokens <= 0:
        return "no token was compared with plain decoding"
    if beyond := number(part(report, "bf16_divergence").get("failures")):
        return f"{beyond:g} timed answers leave transformers' by more than rounding explains"
    return None


def _drift(report: Mapping[str, Any], limits: PublishConfig) -> str | None:
    """What speaks against a backbone that was trained itself, or None; None for one that was left alone."""
    quality = part(report, "quality")
    if all(quality.get(name) is None for name in MEASURES):
        return None
    allowed = {
        "kl": (limits.max_kl, 1),
        "perplexity_ratio": (limits.max_perplexity_ratio, 1),
        "greedy_agreement": (limits.min_greedy_agreement, 0),
    }
    for name, (limit, worse) in allowed.items():
        bounds = part(quality, name).get("ci95")
        found = number(bounds[worse]) if isinstance(bounds, list) and len(bounds) == 2 else None
        if found is None:
            return f"the backbone was trained, but the report has no {name} with an interval"
        if found > limit if worse else found < limit:
            return f"the trained backbone's {name} may be {found:.3g}, the limit is {limit:g}"
    for what, measured, limit in _asked(quality, limits):
        bounds = part(measured, "difference").get("ci95")
        worse = 0 if measured.get("higher_is_better", True) else 1
        found = number(bounds[worse]) if isinstance(bounds, list) and len(bounds) == 2 else None
        if found is None:
            return f"the report has no interval for {what}"
        if (-found if worse == 0 else found) > limit:
            return f"{what} may be {abs(found):.3g} worse than the original's, the limit is {limit:g}"
    return None


def _asked(quality: Mapping[str, Any], limits: PublishConfig) -> Iterator[tuple[str, Mapping[str, Any], float]]:
    """What the trained backbone was asked besides: name, paired figures, and by how much it may be worse."""
    for task, measures in part(quality, "lm_eval").items():
        for name in measures:
            yield f"{task}'s {name}", part(measures, name), limits.max_task_drop
    if "judge" in quality:
        yield "the judge's grade", part(quality, "judge"), limits.max_grade_drop


def _compare(ratio: Mapping[str, Any], rival: str, max_slowdown: float) -> tuple[bool, str]:
    value = number(ratio.get("value"))
    bounds = ratio.get("ci95")
    low, high = (number(bound) for bound in bounds) if isinstance(bounds, list) and len(bounds) == 2 else (None, None)
    if value is None or low is None or high is None:
        return False, f"not promoted: the report has no ratio with an interval against {rival}"
    measured = f"{value:.3f} times the tokens/s of {rival}, 95% interval {low:.3f} to {high:.3f}"
    if value >= 1:
        return True, f"promoted: lossless, and not slower ({measured})"
    if low >= 1 - max_slowdown:
        return True, f"promoted: lossless, and within the allowed {max_slowdown:.1%} of the champion ({measured})"
    return False, f"not promoted: a slow-down beyond {max_slowdown:.1%} is not excluded ({measured})"


def part(mapping: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """What lies under a name, if that is a mapping; else an empty one."""
    found = mapping.get(name)
    return found if isinstance(found, Mapping) else {}


def number(value: Any) -> float | None:
    """A finite figure, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
