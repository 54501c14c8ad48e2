"""Who a candidate is measured against in its benchmark: the champion, the fastest version there ever was, and heads of
another kind that learnt from the same data.

Every version carries its `strength`: tokens per second over those of the first version on its backbone, as the product
of the paired ratios that were measured from one champion to the next. It finds the best so far without another run,
however many small losses lie between. Knows nothing of how contestants run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.artifacts import Artifact, digest_json
from infra.registry import Registry, Version
from medusa_core.checkpoint import read_config
from tasks.promotion import BEST, CHAMPION, OTHER_KIND, number, part

# Tags. A backbone is told by the weights that are served, and by what was named: weights, tokenizer and template.
BACKBONE_DIGEST, IDENTITY = "backbone_digest", "backbone_identity"
CANDIDATE, DECISION, STRENGTH = "candidate_digest", "decision", "strength"
# What its heads are, and what they learnt from.
HEADS_KIND, TRAINED_ON = "heads", "trained_on"
# Which version it was measured against in this role, as a tag; empty for none.
MEASURED_AGAINST = {CHAMPION: "rival", BEST: "best_rival", OTHER_KIND: "other_kind_rival"}
_DATA = ("distill", "teacher")


@dataclass(frozen=True)
class Rival:
    """A registered version that competes: `heads` is the directory of its weights, `portfolio` its trees, `report` what
    it was registered with; `same_data` says whether its heads learnt from the candidate's data."""

    role: str
    version: str
    heads: str
    portfolio: str
    report: str
    same_data: bool


@dataclass(frozen=True)
class Serving:
    """The backbone of a version or of a candidate. `identity` is None in versions from before it was noted."""

    digest: str
    identity: str | None

    @classmethod
    def of(cls, version: Version) -> Serving:
        return cls(version.tags.get(BACKBONE_DIGEST, ""), version.tags.get(IDENTITY))

    def is_that_of(self, version: Version) -> bool:
        other = Serving.of(version)
        return self.digest == other.digest and (other.identity is None or self.identity == other.identity)

    @property
    def tags(self) -> dict[str, str]:
        return {BACKBONE_DIGEST: self.digest} | ({IDENTITY: self.identity} if self.identity else {})


def rivals_of(
    registry: Registry,
    model: str,
    serving: Serving,
    heads: Artifact,
    tree: Artifact,
    adopted: Path | None = None,
) -> tuple[Rival, ...]:
    """The champion, the best so far if that is another version, and the newest of another kind that learnt from the
    same data if it is neither.

    A candidate that is registered already keeps the rivals of its first measurement, so that running again what has
    been published measures nothing anew. A champion of another backbone competes with its heads as they were `adopted`
    for this one, or not at all.
    """
    known = registry.versions(model) if model in registry.models() else []
    by_ref = {version.ref: version for version in known}
    candidate = candidate_digest(heads, tree)
    again = next((version for version in reversed(known) if version.tags.get(CANDIDATE) == candidate), None)
    if again is not None:
        chosen = {role: by_ref.get(again.tags.get(tag, "")) for role, tag in MEASURED_AGAINST.items()}
    else:
        champion, best = registry.champion(model) if known else None, best_of(known, serving)
        other = best is not None and champion is not None and best.version != champion.version
        chosen = {CHAMPION: champion, BEST: best if other else None}
        met = {version.ref for version in chosen.values() if version is not None}
        cousin = _of_another_kind(known, serving, heads)
        chosen[OTHER_KIND] = cousin if cousin is not None and cousin.ref not in met else None
    rivals = []
    for role, version in chosen.items():
        if version is None:
            continue
        same = serving.is_that_of(version)
        if not same and adopted is None:
            continue
        files = registry.download(version)
        folder = files / "heads" if same or adopted is None else adopted
        rivals.append(
            Rival(
                role,
                version.ref,
                heads=str(folder),
                portfolio=str(files / "tree" / "portfolio.json"),
                report=str(files / "report.json"),
                same_data=version.tags.get(TRAINED_ON) == trained_on(heads) and same,
            )
        )
    return tuple(rivals)


def trained_on(heads: Artifact) -> str:
    """Digest of what heads learnt from."""
    return digest_json({name: heads.manifest["inputs"].get(name) for name in _DATA})


def _of_another_kind(versions: Sequence[Version], serving: Serving, heads: Artifact) -> Version | None:
    kind, data = read_config(heads.path / "heads").heads.kind, trained_on(heads)
    found = [
        version
        for version in versions
        if serving.is_that_of(version)
        and version.tags.get(TRAINED_ON) == data
        and version.tags.get(HEADS_KIND, kind) != kind
    ]
    return max(found, key=lambda version: version.version, default=None)


def best_of(versions: Sequence[Version], serving: Serving) -> Version | None:
    """The strongest version on a backbone that the gate ever let through; the earliest of equals."""
    passed = [
        version
        for version in versions
        if serving.is_that_of(version) and version.tags.get(DECISION, "").startswith("promoted")
    ]
    return max(passed, key=strength_of, default=None)


def strength_of(version: Version) -> float:
    """Of a version that carries none, which was registered before there was such a tag: that of a first version."""
    return float(version.tags.get(STRENGTH, 1.0))


def strength_after(report: Mapping[str, Any], champion: Version | None, serving: Serving) -> float:
    """A candidate's strength by what its report measured: 1 for the first on its backbone."""
    ratio = number(part(part(report, CHAMPION), "ratio").get("value"))
    if ratio is None or champion is None or not serving.is_that_of(champion):
        return 1.0
    return strength_of(champion) * ratio


def candidate_digest(heads: Artifact, tree: Artifact) -> str:
    """What makes two candidates the same one: their heads and their trees."""
    return digest_json([heads.digest("heads"), tree.digest()])
