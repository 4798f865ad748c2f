"""Timelines one above the other on one axis of time, to zoom into and to point at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipectl.report.gantt import drawn_ranks
from pipectl.report.looks import COLOURS
from pipectl.report.page import script
from pipectl.timeline import Timeline

_MOST_RANKS = 32

_PROGRAM = """\
(() => {
  const canvas = document.getElementById("timelines"), told = document.getElementById("told");
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
    if (!found) { told.textContent = hint; return; }
    const [, , , rank, [start, stop, kind, stage, batch]] = found;
    told.textContent = "rank " + rank + ": " + kinds[kind].replace("_", " ") +
      (stage >= 0 ? ", stage " + stage : "") + (batch >= 0 ? ", micro-batch " + batch : "") +
      ", from " + seconds(start) + " on, " + seconds(stop - start);
  });
  canvas.addEventListener("dblclick", () => { from = 0; to = end; draw(); });
  const hint = told.textContent;
  new ResizeObserver(draw).observe(canvas.parentElement);
  draw();
})();
"""
_HINT = "wheel: zoom; drag: move; double click: all of the step; point at an action for its times"


def timelines_html(timelines: Mapping[str, Timeline]) -> str:
    """A drawing of some timelines; of very many ranks it shows some.

    Args:
        timelines: by name.
    """
    kinds = list(COLOURS)
    ranks = drawn_ranks(timelines.values(), _MOST_RANKS)
    data = [_data(name, timeline, ranks, kinds) for name, timeline in timelines.items()]
    return f'<canvas id="timelines"></canvas><p id="told" class="faint">{_HINT}</p>' + script(
        _PROGRAM, timelines=data, kinds=kinds, colours=COLOURS
    )


def _data(name: str, timeline: Timeline, ranks: Sequence[int], kinds: list[str]) -> dict[str, Any]:
    events: dict[int, list[list[float]]] = {rank: [] for rank in ranks}
    number = {kind: index for index, kind in enumerate(kinds)}
    for event in timeline.events:
        if event.kind in number and event.rank in events:
            times = [round(event.start_s, 9), round(event.end_s, 9)]
            events[event.rank].append([*times, number[event.kind], event.stage, event.micro_batch])
    return {"name": name, "end": timeline.end_s, "ranks": list(ranks), "events": events}
