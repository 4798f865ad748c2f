"""A page of HTML that needs nothing but itself: tables, bars, curves, timelines to zoom into."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Any

from pipectl.report.gantt import LOOKS, drawn_ranks
from pipectl.timeline import Timeline

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
.bar { display: inline-block; height: 10px; min-width: 1px; background: #7fb3d5 }
.bar.predicted { background: var(--line) }
svg text { fill: var(--faint); font: 11px system-ui, sans-serif }
canvas { width: 100%; display: block; cursor: crosshair; touch-action: none }
"""

_PROGRAM = """\
(() => {
  const canvas = document.getElementById("timelines"), about = document.getElementById("about");
  const pen = canvas.getContext("2d"), row = 22, gap = 30, left = 70;
  const end = Math.max(...timelines.map(each => each.end));
  let from = 0, to = end;
  const heights = timelines.map(each => gap + each.ranks.length * row);
  const height = heights.reduce((a, b) => a + b, 0) + 24;
  const ink = name => getComputedStyle(document.body).getPropertyValue(name);
  const seconds = s => s >= 1 ? s.toPrecision(3) + " s" : s >= 1e-3 ?
    (s * 1e3).toPrecision(3) + " ms" : (s * 1e6).toPrecision(3) + " us";
  const place = s => left + (s - from) / (to - from) * (canvas.clientWidth - left);
  const boxes = [];
  function draw() {
    const scale = window.devicePixelRatio || 1;
    canvas.width = canvas.clientWidth * scale;
    canvas.height = height * scale;
    canvas.style.height = height + "px";
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, canvas.clientWidth, height);
    pen.font = "12px system-ui, sans-serif";
    boxes.length = 0;
    let top = 0;
    for (const each of timelines) {
      pen.fillStyle = ink("--ink");
      pen.fillText(each.name + ", " + seconds(each.end), 4, top + 18);
      each.ranks.forEach((rank, index) => drawRank(each, rank, top + gap + index * row));
      top += gap + each.ranks.length * row;
    }
    pen.fillStyle = ink("--faint");
    for (let tick = 0; tick <= 8; tick++) {
      const at = from + (to - from) * tick / 8;
      pen.textAlign = tick === 8 ? "right" : "center";
      pen.fillText(at ? seconds(at) : "0", place(at), height - 6);
    }
    pen.textAlign = "left";
  }
  function drawRank(each, rank, y) {
    pen.fillStyle = ink("--shade");
    pen.fillRect(left, y, canvas.clientWidth - left, row - 4);
    pen.fillStyle = ink("--faint");
    pen.fillText("rank " + rank, 4, y + 13);
    for (const event of each.events[rank]) {
      const [start, stop, kind, stage, batch] = event;
      if (stop < from || start > to) continue;
      const x = Math.max(left, place(start)), wide = Math.max(0.5, place(stop) - x - 0.5);
      pen.fillStyle = colours[kinds[kind]];
      pen.fillRect(x, y, wide, row - 4);
      boxes.push([x, y, wide, rank, event]);
      if (batch >= 0 && wide > 8 * String(batch).length + 2) {
        pen.fillStyle = "#1b1f24";
        pen.fillText(batch, x + 3, y + 13);
      }
    }
  }
  canvas.addEventListener("wheel", event => {
    event.preventDefault();
    const share = Math.max(0, (event.offsetX - left) / (canvas.clientWidth - left));
    const at = from + share * (to - from), factor = event.deltaY < 0 ? 0.8 : 1.25;
    from = Math.max(0, at - (at - from) * factor);
    to = Math.min(end, at + (to - at) * factor);
    draw();
  }, { passive: false });
  canvas.addEventListener("pointermove", event => {
    if (event.buttons) {
      const by = -event.movementX / (canvas.clientWidth - left) * (to - from);
      const shift = Math.min(Math.max(by, -from), end - to);
      from += shift; to += shift;
      draw();
    }
    const found = boxes.find(([x, y, wide]) => event.offsetX >= x && event.offsetX <= x + wide &&
      event.offsetY >= y && event.offsetY <= y + row - 4);
    if (!found) { about.textContent = hint; return; }
    const [, , , rank, [start, stop, kind, stage, batch]] = found;
    about.textContent = "rank " + rank + ": " + kinds[kind].replace("_", " ") +
      (stage >= 0 ? ", stage " + stage : "") + (batch >= 0 ? ", micro-batch " + batch : "") +
      ", from " + seconds(start) + " on, " + seconds(stop - start);
  });
  canvas.addEventListener("dblclick", () => { from = 0; to = end; draw(); });
  const hint = about.textContent;
  new ResizeObserver(draw).observe(canvas.parentElement);
  draw();
})();
"""
_HINT = "wheel: zoom; drag: move; double click: all of the step; point at an action for its times"
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 520, 200, 64, 24, 12
_MAX_POINTS = 1000
Point = tuple[float, float]


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
    """Plain text in cells, without columns that are empty in all rows.

    Args:
        figures: heads of the columns that hold figures.
    """
    texts, right = [[str(cell) for cell in row] for row in rows], set(figures)
    shown = [i for i in range(len(heads)) if not texts or any(row[i] for row in texts)]
    classes = [' class="figure"' if head in right else "" for head in heads]

    def line(tag: str, cells: Sequence[str]) -> str:
        filled = (f"<{tag}{classes[i]}>{escape(cells[i])}</{tag}>" for i in shown)
        return f"<tr>{''.join(filled)}</tr>"

    return f"<table>{line('th', heads)}{''.join(line('td', row) for row in texts)}</table>"


def bars(rows: Iterable[tuple[str, Sequence[tuple[str, float, str]]]]) -> str:
    """Named bars side by side.

    Args:
        rows: a name, and bars of a kind (``predicted`` or another), a share from 0 to 1, and what
            is written after them.
    """

    def bar(kind: str, share: float, text: str) -> str:
        width = 360 * min(1.0, max(0.0, share))
        style = f'class="bar {escape(kind)}" style="width:{width:.0f}px"'
        return f"<div><span {style}></span> {escape(text)}</div>"

    drawn = "".join(
        f"<tr><td>{escape(name)}</td><td>{''.join(bar(*each) for each in of_row)}</td></tr>"
        for name, of_row in rows
    )
    return f"<table>{drawn}</table>"


def curve(title: str, points: Sequence[Point]) -> str:
    """Figures by step in SVG, with the least and largest at the axes; nothing without points.

    Args:
        points: steps, ascending, and figures; of very many, means of neighbours are drawn.
    """
    if not points:
        return ""
    drawn = thinned(points, _MAX_POINTS)
    xs, ys = [x for x, _ in drawn], [y for _, y in drawn]
    x0, x1, y0, y1 = min(xs), max(xs), min(ys), max(ys)
    wide, high, bottom = _WIDTH - _LEFT - 8, _HEIGHT - _BOTTOM - _TOP, _HEIGHT - _BOTTOM

    def share(value: float, low: float, high: float) -> float:
        return (value - low) / (high - low) if high > low else 0.5

    line = " ".join(
        f"{_LEFT + wide * share(x, x0, x1):.1f},{_TOP + high * (1 - share(y, y0, y1)):.1f}"
        for x, y in drawn
    )
    end = 'text-anchor="end"'
    parts = [
        f'<text x="{_LEFT + 8}" y="{_TOP + 4}">{escape(title)}</text>',
        f'<text x="{_LEFT - 6}" y="{_TOP + 8}" {end}>{y1:.4g}</text>',
        f'<text x="{_LEFT - 6}" y="{bottom}" {end}>{y0:.4g}</text>',
        f'<text x="{_LEFT}" y="{_HEIGHT - 6}">step {x0:.0f}</text>',
        f'<text x="{_WIDTH - 8}" y="{_HEIGHT - 6}" {end}>{x1:.0f}</text>',
        f'<path d="M{_LEFT} {_TOP}V{bottom}H{_WIDTH - 8}" style="fill:none;stroke:var(--line)"/>',
        f'<polyline points="{line}" style="fill:none;stroke:#2f81f7;stroke-width:1.5"/>',
    ]
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" role="img">'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
    )


def thinned(points: Sequence[Point], max_points: int) -> list[Point]:
    """Points, each the mean of neighbours if there are too many."""
    count = min(len(points), max_points)
    bounds = [index * len(points) // count for index in range(count + 1)]
    groups = (points[start:stop] for start, stop in pairwise(bounds))
    return [
        (sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group))
        for group in groups
    ]


def timelines_html(timelines: Mapping[str, Timeline]) -> str:
    """Timelines one above the other on one axis of time; of very many ranks it shows some.

    Args:
        timelines: by name.
    """
    kinds, colours = list(LOOKS), {kind: look.colour for kind, look in LOOKS.items()}
    number = {kind: index for index, kind in enumerate(kinds)}
    ranks = drawn_ranks(timelines.values())
    data = []
    for name, timeline in timelines.items():
        events: dict[int, list[list[float]]] = {rank: [] for rank in ranks}
        for event in timeline.events:
            if event.kind in number and event.rank in events:
                times = [round(event.start_s, 9), round(event.end_s, 9)]
                what = [number[event.kind], event.stage, event.micro_batch]
                events[event.rank].append([*times, *what])
        data.append({"name": name, "end": timeline.end_s, "ranks": [*ranks], "events": events})
    constants = "".join(
        f"const {name} = {safe_json(value)};\n"
        for name, value in (("timelines", data), ("kinds", kinds), ("colours", colours))
    )
    program = f"<script>\n{constants}{_PROGRAM}</script>"
    return f'<canvas id="timelines"></canvas><p id="about" class="faint">{_HINT}</p>{program}'


def safe_json(value: Any) -> str:
    """JSON that no text in it can end a script with."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
