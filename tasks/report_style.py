"""The report's style sheet, and how its values are read and written: nothing is shown that was not escaped here.

Knows nothing of the report's content.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from typing import Any

MISSING = "–"


def text(value: Any) -> str:
    """A value as escaped text; a dash for what is missing."""
    if value is None or value == "":
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    return escape(str(value)) if number(value) is None else figure(value)


def number(value: Any) -> float | None:
    """The value if it is a finite number, else None: a report may hold nulls, and NaN is no result."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def figure(value: Any, digits: int = 2) -> str:
    """A number for a reader: whole ones with thousands separators, others with `digits` decimals."""
    found = number(value)
    if found is None:
        return MISSING
    whole = found == int(found) and isinstance(value, int)
    return f"{int(found):,}" if whole or abs(found) >= 10_000 else f"{found:,.{digits}f}"


def short(value: Any) -> str:
    """A count in a few characters: 4.2M."""
    found = number(value)
    if found is None:
        return MISSING
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(found) >= limit:
            return f"{found / limit:.3g}{unit}"
    return f"{found:g}"


def duration(value: Any) -> str:
    """Seconds as a reader says them."""
    seconds = number(value)
    if seconds is None:
        return MISSING
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"


def part(mapping: Any, name: str) -> Mapping[str, Any]:
    """A nested object, empty if it is missing or null."""
    found = mapping.get(name) if isinstance(mapping, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def items(mapping: Any, name: str) -> list[Any]:
    """A nested list, empty if it is missing or null."""
    found = mapping.get(name) if isinstance(mapping, Mapping) else None
    return found if isinstance(found, list) else []


CSS = """
:root{color-scheme:light dark;--paper:#fbfbfa;--card:#fff;--ink:#16181d;--soft:#5c6370;--line:#e3e5e8;--grid:#eceef0;
--edge:#c3c9d3;--main:#3454d1;--main-soft:#dfe5fb;--five:#b4c1f4;--base:#a9b0bc;--draft:#e08a2c;--verify:#3454d1;--accept:#1f9d8a;
--good:#0d7a5f;--good-soft:#dcf3ec;--bad:#c0262d;--bad-soft:#fbe3e3;--warn:#8f5b00;--warn-soft:#fbefd5}
@media (prefers-color-scheme:dark){:root{--paper:#111318;--card:#191c23;--ink:#eceef2;--soft:#9aa2b1;--line:#2b303a;
--grid:#262a33;--edge:#454c5a;--main:#8aa2ff;--main-soft:#28315a;--five:#3f4e96;--base:#5d6675;--draft:#f0a95a;--verify:#8aa2ff;--accept:#4fd1bb;
--good:#5fd6b3;--good-soft:#133a30;--bad:#ff8a8a;--bad-soft:#471b20;--warn:#f2c465;--warn-soft:#40310f}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",Arial,sans-serif;-webkit-text-size-adjust:100%}
main{max-width:1000px;margin:0 auto;padding:40px 20px 64px}
h1{font-size:clamp(26px,4.6vw,42px);line-height:1.15;letter-spacing:-.022em;margin:6px 0 12px;font-weight:680;
text-wrap:balance}
h1 .ci{font-size:.58em;font-weight:500;color:var(--soft);letter-spacing:0;white-space:nowrap}
h2{font-size:19px;letter-spacing:-.01em;margin:0 0 2px;font-weight:640}
h3{font-size:13px;margin:0 0 6px;color:var(--soft);font-weight:600}
p{margin:0 0 10px;max-width:94ch}
.over{font-size:13px;color:var(--soft);margin:0}
.note,.lead{color:var(--soft);font-size:14px}
.lead{margin-bottom:16px}
.verdict{display:inline-block;padding:7px 13px;border-radius:9px;font-weight:560;margin:0 8px 8px 0}
.good{background:var(--good-soft);color:var(--good)}.bad{background:var(--bad-soft);color:var(--bad)}
.warn{background:var(--warn-soft);color:var(--warn)}.plain{background:var(--grid);color:var(--soft)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin:20px 0 8px}
.tile{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:13px 16px}
.tile b{display:block;font-size:25px;line-height:1.2;letter-spacing:-.02em;font-weight:650;
font-variant-numeric:tabular-nums}
.tile span{font-size:13px;color:var(--soft)}
section{background:var(--card);border:1px solid var(--line);border-radius:14px;padding:22px 24px;margin-top:18px}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,330px),1fr));gap:24px 36px}
.two>*,.three>*{min-width:0}.three{display:grid;gap:20px 26px;margin-top:22px;
grid-template-columns:repeat(auto-fit,minmax(min(100%,250px),1fr))}
.scroll{overflow-x:auto;margin:0 -4px;padding:0 4px}
svg{display:block}
.scroll code{white-space:nowrap}
svg text{font-size:12.5px;fill:var(--ink);font-family:inherit;font-variant-numeric:tabular-nums}
svg .soft{fill:var(--soft)}svg .strong{font-weight:640}svg .small{font-size:11px}
svg .end{text-anchor:end}svg .mid{text-anchor:middle}
svg .grid{stroke:var(--grid)}svg .axis{stroke:var(--line)}
svg .track{fill:var(--grid)}svg .edge{fill:none;stroke:var(--edge);stroke-width:1.5}
.f-main{fill:var(--main)}.f-base{fill:var(--base)}.f-draft{fill:var(--draft)}.f-verify{fill:var(--verify)}
.f-accept{fill:var(--accept)}.f-five{fill:var(--five)}.f-bad{fill:var(--bad)}
.s-main{stroke:var(--main);fill:none;stroke-width:2}.s-draft{stroke:var(--draft);fill:none;stroke-width:2}
.s-accept{stroke:var(--accept);fill:none;stroke-width:2}.s-bad{stroke:var(--bad);fill:none;stroke-width:2}
.s-base{stroke:var(--base);fill:none;stroke-width:2}
.mark{stroke:var(--ink);stroke-dasharray:3 3;opacity:.5}
.node circle{fill:var(--card);stroke:var(--main);stroke-width:1.6}
.node.root circle{fill:var(--ink);stroke:var(--ink)}.node.root text{fill:var(--card)}
.node.top circle{fill:var(--main)}.node.top text{fill:var(--card)}
.stage rect{fill:var(--card);stroke:var(--line);stroke-width:1.3}
.stage.done rect{fill:var(--main-soft);stroke:var(--main)}.stage.cached rect{stroke:var(--main);stroke-dasharray:4 3}
.stage text{font-size:11.6px}
.stage.absent text{fill:var(--soft)}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;font-size:13px;color:var(--soft);margin:6px 0 0}
.legend i{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:6px}
table{border-collapse:collapse;font-size:13.5px;width:100%;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:6px 14px 6px 0;border-bottom:1px solid var(--line);vertical-align:top}
th{color:var(--soft);font-weight:560}thead th{white-space:nowrap;vertical-align:bottom}
tr:last-child>*{border-bottom:0}
td.n,th.n{text-align:right}
td.n{white-space:nowrap}
code{font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;overflow-wrap:anywhere}
footer{color:var(--soft);font-size:13px;margin-top:22px}
@media (max-width:560px){main{padding:22px 12px 40px}section{padding:17px 15px;border-radius:12px}
.tile b{font-size:21px}.tiles{grid-template-columns:1fr 1fr}}
@media print{section{break-inside:avoid}}
"""
