"""A page of HTML that needs nothing but itself: no network, no other file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

_STYLE = """\
:root { color-scheme: light dark; --ink: #1f2328; --faint: #59636e; --line: #d1d9e0;
  --page: #ffffff; --shade: #f0f3f6; --bad: #b42318 }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --faint: #9198a1; --line: #3d444d;
  --page: #0d1117; --shade: #161b22; --bad: #ff7b72 } }
body { margin: 0 auto; max-width: 1100px; padding: 24px; background: var(--page);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif }
h1 { font-size: 24px; margin: 0 0 4px } h2 { font-size: 18px; margin: 36px 0 8px }
p { margin: 6px 0 } .faint { color: var(--faint) } .bad { color: var(--bad) }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: 3px 18px 3px 0; border-bottom: 1px solid var(--line);
  vertical-align: top }
td.figure, th.figure { text-align: right }
.scroll { overflow: auto; border: 1px solid var(--line); border-radius: 6px }
.bar { display: inline-block; height: 10px; min-width: 1px; background: #7fb3d5 }
.mark { display: inline-block; width: 11px; height: 11px; margin: 0 5px 0 12px }
.bar.predicted { background: var(--line) }
svg text { fill: var(--faint); font: 11px system-ui, sans-serif }
canvas { width: 100%; display: block; cursor: crosshair; touch-action: none }
"""


def page(title: str, parts: Iterable[str]) -> str:
    """The whole document.

    Args:
        parts: HTML.
    """
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:\">\n"
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def heading(text: str) -> str:
    """Of a section."""
    return f"<h2>{escape(text)}</h2>"


def paragraph(text: str, kind: str = "") -> str:
    """Plain text.

    Args:
        kind: ``faint`` or ``bad``.
    """
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], figures: Iterable[str]) -> str:
    """Plain text in cells.

    Args:
        figures: heads of the columns that hold figures.
    """
    right = set(figures)
    kinds = [' class="figure"' if head in right else "" for head in heads]
    head = _row("th", heads, kinds)
    return f"<table>{head}{''.join(_row('td', row, kinds) for row in rows)}</table>"


def bars(rows: Iterable[tuple[str, Sequence[tuple[str, float, str]]]]) -> str:
    """Named bars side by side.

    Args:
        rows: a name, and bars of a kind (``predicted`` or another), a share from 0 to 1, and what
            is written behind them.
    """
    drawn = "".join(
        f"<tr><td>{escape(name)}</td><td>{''.join(_bar(*each) for each in found)}</td></tr>"
        for name, found in rows
    )
    return f"<table>{drawn}</table>"


def script(text: str, **data: Any) -> str:
    """A program, and what it reads as constants of these names."""
    constants = "".join(f"const {name} = {safe_json(value)};\n" for name, value in data.items())
    return f"<script>\n{constants}{text}</script>"


def safe_json(value: Any) -> str:
    """JSON that no text in it can end a script with."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _row(tag: str, cells: Sequence[object], kinds: Sequence[str]) -> str:
    filled = (
        f"<{tag}{kind}>{escape(str(cell))}</{tag}>" for cell, kind in zip(cells, kinds, strict=True)
    )
    return f"<tr>{''.join(filled)}</tr>"


def _bar(kind: str, share: float, text: str) -> str:
    width = 360 * min(1.0, max(0.0, share))
    return (
        f'<div><span class="bar {escape(kind)}" style="width:{width:.0f}px"></span> '
        f"{escape(text)}</div>"
    )
