"""Drawings of the report as inline SVG, coloured by the style sheet so that they follow light and dark.

Knows nothing of the report: it is given labels and numbers. Labels arrive as plain text and are escaped here. Bars are
laid out in per cent, so that their text keeps its size on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from tasks.report_style import figure

_ROW = 44


@dataclass(frozen=True)
class Bar:
    """One row: `segments` are (length, colour class) laid end to end; `text` stands at the right."""

    label: str
    segments: tuple[tuple[float, str], ...]
    text: str
    strong: bool = False

    @property
    def length(self) -> float:
        return sum(max(length, 0.0) for length, _ in self.segments)


def bars(rows: Sequence[Bar], name: str, most: float | None = None) -> str:
    """Horizontal bars from zero, each under its label. `most` fixes the scale's end, for charts to be compared."""
    if not rows:
        return ""
    scale = 100 / (most or max(row.length for row in rows) or 1.0)
    body = "".join(_bar(row, i * _ROW, scale) for i, row in enumerate(rows))
    return _svg(name, f'width="100%" height="{len(rows) * _ROW}"', body)


def _bar(row: Bar, y: int, scale: float) -> str:
    weight = " strong" if row.strong else ""
    parts = [
        f'<text x="0" y="{y + 14}" class="label{weight}">{escape(row.label)}</text>',
        f'<text x="100%" y="{y + 14}" class="end{weight}">{escape(row.text)}</text>',
        f'<rect x="0" y="{y + 21}" width="100%" height="12" rx="3" class="track"/>',
    ]
    start = 0.0
    for length, colour in row.segments:
        width = min(max(length, 0.0) * scale, 100 - start)
        parts.append(
            f'<rect x="{start:.2f}%" y="{y + 21}" width="{width:.2f}%" height="12" rx="3" class="bar {colour}"/>'
        )
        start += width
    return "".join(parts)


@dataclass(frozen=True)
class Pair:
    """One row of two lengths: `value`, and `other` to be seen against it."""

    label: str
    value: float
    other: float | None
    text: str


def pairs(rows: Sequence[Pair], name: str, most: float | None = None, nested: bool = False) -> str:
    """Bars in twos: the second below the first in grey, or, nested, behind it in a lighter tone."""
    if not rows:
        return ""
    scale = 100 / (most or max(max(row.value, row.other or 0) for row in rows) or 1.0)
    high = 44 if nested else 48
    parts = []
    for i, row in enumerate(rows):
        y = i * high
        other = min(max(row.other or 0.0, 0.0) * scale, 100)
        value = min(max(row.value, 0.0) * scale, 100)
        parts.append(f'<text x="0" y="{y + 14}" class="label">{escape(row.label)}</text>')
        parts.append(f'<text x="100%" y="{y + 14}" class="end soft">{escape(row.text)}</text>')
        if nested:
            parts.append(f'<rect x="0" y="{y + 21}" width="100%" height="12" rx="3" class="track"/>')
            parts.append(f'<rect x="0" y="{y + 21}" width="{other:.2f}%" height="12" rx="3" class="f-five"/>')
            parts.append(f'<rect x="0" y="{y + 21}" width="{value:.2f}%" height="12" rx="3" class="bar f-main"/>')
        else:
            parts.append(f'<rect x="0" y="{y + 20}" width="{value:.2f}%" height="10" rx="3" class="bar f-main"/>')
            parts.append(f'<rect x="0" y="{y + 31}" width="{other:.2f}%" height="5" rx="2" class="f-base"/>')
    return _svg(name, f'width="100%" height="{len(rows) * high}"', "".join(parts))


def interval(rows: Sequence[tuple[str, float, float, float]], name: str) -> str:
    """A dot with its 95 % interval per row (label, value, low, high), against a mark at 1×."""
    if not rows:
        return ""
    least = min(1.0, *(low for _, _, low, _ in rows))
    most = max(1.0, *(high for _, _, _, high in rows))
    margin = max((most - least) * 0.12, 0.05)
    least, span = least - margin, most - least + 2 * margin
    height = len(rows) * 52 + 20

    def at(value: float) -> str:
        return f"{(value - least) / span * 100:.2f}%"

    parts = [
        f'<text x="{at(1)}" y="{height - 4}" class="mid soft small">1×</text>',
    ]
    for i, (label, value, low, high) in enumerate(rows):
        y = i * 52
        colour = "bad" if high < 1 else "base" if low <= 1 else "main"
        parts.append(
            f'<text x="0" y="{y + 14}">{escape(label)}</text>'
            f'<text x="100%" y="{y + 14}" class="end strong">{value:.2f}× [{low:.2f}–{high:.2f}]</text>'
            f'<line x1="0" x2="100%" y1="{y + 31}" y2="{y + 31}" class="grid"/>'
            f'<line x1="{at(1)}" x2="{at(1)}" y1="{y + 21}" y2="{y + 41}" class="mark"/>'
            f'<line x1="{at(low)}" x2="{at(high)}" y1="{y + 31}" y2="{y + 31}" class="s-{colour}"/>'
            f'<line x1="{at(low)}" x2="{at(low)}" y1="{y + 26}" y2="{y + 36}" class="s-{colour}"/>'
            f'<line x1="{at(high)}" x2="{at(high)}" y1="{y + 26}" y2="{y + 36}" class="s-{colour}"/>'
            f'<circle cx="{at(value)}" cy="{y + 31}" r="6" class="f-{colour}"/>'
        )
    return _svg(name, f'width="100%" height="{height}"', "".join(parts))


def curve(
    points: Sequence[tuple[float, float]], name: str, x_label: str, colour: str = "main", mark: float | None = None
) -> str:
    """A line through the points, sorted by x; `mark` draws a vertical line where the choice fell."""
    points = sorted(points)
    if len(points) < 2:
        return ""
    width, height, left, right, top, bottom = 360, 200, 44, 12, 10, 36
    (x_low, x_high), y_ticks = (points[0][0], points[-1][0]), ticks([y for _, y in points])
    y_low, y_high = y_ticks[0], y_ticks[-1]

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            left + (x - x_low) / ((x_high - x_low) or 1) * (width - left - right),
            height - bottom - (y - y_low) / ((y_high - y_low) or 1) * (height - top - bottom),
        )

    parts = []
    for tick in y_ticks:
        y = at(x_low, tick)[1]
        parts.append(f'<line x1="{left}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{left - 7}" y="{y + 4:.1f}" class="end soft small">{tick:.4g}</text>')
    if mark is not None and x_low <= mark <= x_high:
        x = at(mark, y_low)[0]
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{height - bottom}" class="mark"/>')
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in points))
    parts.append(f'<polyline points="{line}" class="s-{colour}" stroke-linejoin="round"/>')
    if len(points) <= 40:
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" class="f-{colour}"/>' for x, y in (at(*p) for p in points)]
    base = height - bottom + 15
    parts.append(f'<text x="{left}" y="{base}" class="soft small">{figure(x_low, 0)}</text>')
    parts.append(f'<text x="{width - right}" y="{base}" class="end soft small">{figure(x_high, 0)}</text>')
    middle = (left + width - right) / 2
    parts.append(f'<text x="{middle}" y="{base + 13}" class="mid soft small">{escape(x_label)}</text>')
    return _svg(name, f'viewBox="0 0 {width} {height}" width="100%"', "".join(parts))


def ticks(values: Sequence[float], count: int = 4) -> list[float]:
    """Round numbers that enclose the values."""
    low, high = min(values), max(values)
    raw = (high - low) / count or max(abs(high), 1.0) / count
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    last = max(math.ceil(high / step - 1e-9), first + 1)
    return [round(i * step, 10) for i in range(first, last + 1)]


Path = tuple[int, ...]


def tree(choices: Sequence[Path]) -> str:
    """The tree from its root at the left, a column per head, nodes labelled by rank; filled: a head's first choice."""
    paths: list[Path] = sorted({(), *choices}, key=lambda path: (len(path), path))
    parents = {path: _parent(path, set(paths)) for path in paths if path}
    rows = _rows(paths, parents)
    leaves = max(rows.values()) + 1
    depth = max(len(path) for path in paths)
    row = 25.0 if leaves <= 40 else max(900 / leaves, 9.0)
    column, radius = max(110, min(210, 820 // max(depth, 1))), min(10.0, row * 0.44)
    width, height = 70 + depth * column, 34 + leaves * row

    def at(path: Path) -> tuple[float, float]:
        return 34 + len(path) * column, 34 + (rows[path] + 0.5) * row

    parts = [
        f'<text x="{34 + level * column}" y="14" class="mid soft small">{f"head {level}" if level else "root"}</text>'
        for level in range(depth + 1)
    ]
    parts += [_edge(at(parent), at(path)) for path, parent in parents.items()]
    parts += [_node(path, *at(path), radius) for path in paths]
    fit = f"width:100%;min-width:{int(width * 0.75)}px;max-width:{width}px"
    size = f'viewBox="0 0 {width} {height:.0f}" style="{fit}"'
    return f'<div class="scroll">{_svg("Tree of candidates", size, "".join(parts))}</div>'


def _parent(path: Path, present: set[Path]) -> Path:
    """The longest prefix that is there: a broken tree is drawn as it is, not hidden by an error."""
    return next(path[:length] for length in range(len(path) - 1, -1, -1) if path[:length] in present)


def _rows(paths: Sequence[Path], parents: dict[Path, Path]) -> dict[Path, float]:
    """Row of each node: leaves one below the other, a parent in the middle of its children."""
    children: dict[Path, list[Path]] = {path: [] for path in paths}
    for path, parent in parents.items():
        children[parent].append(path)
    rows: dict[Path, float] = {}
    free = 0
    # A child has a larger tuple than its prefix, so sorted order is depth-first order.
    for path in sorted(paths):
        if not children[path]:
            rows[path], free = float(free), free + 1
    for path in sorted(paths, key=len, reverse=True):
        if children[path]:
            rows[path] = (rows[children[path][0]] + rows[children[path][-1]]) / 2
    return rows


def _edge(start: tuple[float, float], end: tuple[float, float]) -> str:
    (x, y), (to_x, to_y) = start, end
    middle = (x + to_x) / 2
    return (
        f'<path d="M{x:.1f} {y:.1f}C{middle:.1f} {y:.1f} {middle:.1f} {to_y:.1f} {to_x:.1f} {to_y:.1f}" class="edge"/>'
    )


def _node(path: Path, x: float, y: float, radius: float) -> str:
    kind = " root" if not path else " top" if path[-1] == 0 else ""
    label = str(path[-1]) if path else ""
    title = f"ranks {', '.join(map(str, path))}" if path else "the model's own next token"
    size = min(11.5, radius * 1.15)
    return (
        f'<g class="node{kind}"><title>{escape(title)}</title><circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}"/>'
        f'<text x="{x:.1f}" y="{y + size * 0.36:.1f}" class="mid" style="font-size:{size:.1f}px">{label}</text></g>'
    )


_STAGES = {
    "backbone": (0.0, 1.0),
    "prompts": (1, 0),
    "distill": (2, 0),
    "teacher": (3, 0),
    "train-medusa1": (4, 0),
    "train-medusa2": (5, 0),
    "ranks": (4, 1),
    "latency": (4, 2),
    "tree": (5, 1.5),
    "benchmark": (6, 1.5),
    "publish": (7, 1.5),
}
_ARROWS = (
    *(("backbone", "prompts"), ("prompts", "distill"), ("distill", "teacher"), ("teacher", "train-medusa1")),
    *(("train-medusa1", "train-medusa2"), ("train-medusa1", "ranks"), ("backbone", "latency")),
    *(("ranks", "tree"), ("latency", "tree"), ("tree", "benchmark"), ("benchmark", "publish")),
)


def pipeline(notes: dict[str, tuple[str, str]]) -> str:
    """The stages and what flows between them; `notes` maps a stage to (class, second line)."""
    wide, high, column, row = 106, 44, 122, 70

    def corner(stage: str) -> tuple[float, float]:
        return 4 + _STAGES[stage][0] * column, 8 + _STAGES[stage][1] * row

    parts = []
    for start, end in _ARROWS:
        (x, y), (to_x, to_y) = corner(start), corner(end)
        parts.append(
            _edge((x + wide, y + high / 2), (to_x, to_y + high / 2))
            if to_x > x
            else _down(x + wide / 2, y + high, to_y)
        )
    for stage in _STAGES:
        x, y = corner(stage)
        colour, line = notes.get(stage, ("absent", "not run"))
        parts.append(
            f'<g class="stage {colour}"><rect x="{x}" y="{y}" width="{wide}" height="{high}" rx="9"/>'
            f'<text x="{x + wide / 2}" y="{y + 19}" class="mid strong">{escape(stage)}</text>'
            f'<text x="{x + wide / 2}" y="{y + 34}" class="mid soft small">{escape(line)}</text></g>'
        )
    size = f'viewBox="0 0 {8 + 7 * column + wide} {8 + 2 * row + high + 8}" style="width:100%;min-width:760px"'
    return f'<div class="scroll">{_svg("Stages of the pipeline", size, "".join(parts))}</div>'


def _down(x: float, y: float, to_y: float) -> str:
    return f'<path d="M{x} {y}V{to_y}" class="edge"/>'


def standing_alone(drawing: str, width: int, style: str) -> str:
    """One of these drawings as a file of its own, `width` pixels wide, with the style sheet of its colours."""
    inside = drawing.replace('width="100%"', f'width="{width}"', 1)
    head = '<svg xmlns="http://www.w3.org/2000/svg" style="font-family:sans-serif"'
    return inside.replace("<svg", head, 1).replace(">", f"><style>{style}</style>", 1)


def _svg(name: str, size: str, body: str) -> str:
    return f'<svg role="img" aria-label="{escape(name)}" {size}>{body}</svg>'
