"""When a job would be done, as text: `pipectl plan --when`."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta

from rich.console import RenderableType

from pipectl.cli.console import plain, table
from pipectl.jobs.prospects import Prospect, Prospects
from pipectl.units import format_clock, format_long_time, format_time, plural, shorten

_NOW_S = 60.0
"""A start within this time is at once."""
_MARK, _UNKNOWN = "*", "?"
_DAYS_BY_NAME = 6
_YEAR_S = 365.25 * 86400
_FAR_S = 300 * _YEAR_S
"""A calendar ends in the year 9999."""
_MAX_NAMES = 8
_MARGIN, _MINUTE_S = 1.1, 60


def prospects_table(found: Prospects) -> RenderableType:
    """One row per partition or queue and number of nodes; the ends of the best are marked."""
    key = found.system.queue_key or "queue"
    heads = ["nodes", "step", "trains for", "done at", "node-h"]
    if found.has_queue:
        heads[1:3] = ["starts at", "step", "trains for", "requeues"]
    if any(row.queue for row in found.rows):
        heads.insert(0, key)
    rows = []
    for row in found.rows:
        is_soonest, is_cheapest = row is found.soonest, row is found.cheapest
        done = _UNKNOWN if row.done_at is None else format_moment(row.done_at, found.now)
        start = _UNKNOWN if row.starts_at is None else _format_start(row.starts_at, found.now)
        hours = f"{row.node_hours:.3g}"
        cells: dict[str, str] = {
            key: row.queue,
            "nodes": str(row.nodes),
            "starts at": "refused" if row.is_refused else start,
            "step": format_time(row.step_s),
            "trains for": "-" if row.is_refused else format_long_time(row.run_s),
            "requeues": "-" if row.is_refused else str(row.requeues or ""),
            "done at": "-" if row.is_refused else f"{_MARK * is_soonest}{done}",
            "node-h": "-" if row.is_refused else f"{_MARK * is_cheapest}{hours}",
        }
        style = "bold" if is_soonest or is_cheapest else ""
        rows.append([plain(cells[head], style) for head in heads])
    return table(heads, rows, left=(key,), optional=("step", "requeues"))


def _format_start(time: float, now: float) -> str:
    """``now``, or a time; see :func:`format_moment`."""
    return "now" if time < now + _NOW_S else format_moment(time, now)


def format_moment(time: float, now: float) -> str:
    """``14:05``, ``Tue 14:05``, ``24 Dec``, ``Feb 2100`` or ``in 500 years``."""
    if time - now > _FAR_S:
        return f"in {(time - now) / _YEAR_S:.0f} years"
    moment, today = datetime.fromtimestamp(time), datetime.fromtimestamp(now)
    if moment.date() == today.date():
        return f"{moment:%H:%M}"
    if moment - today < timedelta(days=_DAYS_BY_NAME):
        return f"{moment:%a %H:%M}"
    return f"{moment:%d %b}" if moment.year == today.year else f"{moment:%b %Y}"


def prospects_lines(found: Prospects) -> Iterator[str]:
    """What is marked, how it was counted, and what has no row or no start."""
    yield from _choices(found)
    reasons: dict[str, list[str]] = {}
    for row in found.rows:
        if row.reason:
            reasons.setdefault(row.reason, []).append(name_of(row))
    for reason, names in reasons.items():
        yield f"{'; '.join(shorten(names, _MAX_NAMES))}: {reason}"
    for nodes, reason in found.infeasible.items():
        yield f"{plural(nodes, 'node')}: {reason.removeprefix('no feasible plan: ')}"
    faults: dict[str, list[str]] = {}
    for name, fault in found.left_out.items():
        faults.setdefault(fault, []).append(name)
    if faults:
        listed = ((", ".join(shorten(names, _MAX_NAMES)), fault) for fault, names in faults.items())
        parts = (f"{names} ({fault})" for names, fault in listed)
        yield f"left out: {'; '.join(parts)}"
    others = dict.fromkeys(row.queue for row in found.rows if not row.is_like_profile)
    if others:
        yield (
            f"{', '.join(others)}: not the kind of nodes that was profiled: the step time there is "
            "a guess, and the job measures the model first"
        )
    yield from _requeues(found)
    pauses = found.pauses
    if pauses.run:
        yield (
            f"counted besides steps, as in {pauses.run}: {format_time(pauses.start_s)} for each "
            f"start, {format_time(pauses.step_s)} per step for evaluations and checkpoints"
        )
    else:
        yield (
            "not counted: the start of the ranks, evaluations and checkpoints; a run of this job "
            "that is complete shows how long they take"
        )


def _choices(found: Prospects) -> Iterator[str]:
    """The rows that are marked."""
    soonest, cheapest = found.soonest, found.cheapest
    words = {"soonest": soonest, "cheapest": cheapest}
    if soonest is not None and soonest is cheapest:
        words = {"soonest and cheapest": soonest}
    for word, row in words.items():
        if row is not None:
            option = word.partition(" ")[0]
            if found.compared:
                option += f" --compare {','.join(map(str, found.compared))}"
            yield f"{_MARK} {word}: {name_of(row)} (pipectl submit --{option})"
    if not found.rows:
        yield "the job can run nowhere"


def _requeues(found: Prospects) -> Iterator[str]:
    """How requeues are counted, and what would do without."""
    usable = [row for row in found.rows if not row.is_refused]
    if not any(row.requeues for row in usable):
        return
    yield (
        "requeues: a start ends checkpoint.lead_time before its walltime; the next one is taken to "
        "wait as long as the first"
    )
    for row in usable:
        if row.needs_resume:
            allowed = row.allowed_requeues
            yield (
                f"{name_of(row)}: checkpoint.max_requeues allows {plural(allowed, 'requeue')}; "
                "after that, `pipectl resume` goes on"
            )
    best = found.soonest or found.cheapest
    if best is not None and best.requeues:
        enough_s = -(-int(_MARGIN * best.enough_s) // _MINUTE_S) * _MINUTE_S
        if best.limit_s is None or enough_s <= best.limit_s:
            yield f"{name_of(best)}: --set resources.walltime={format_clock(enough_s)} needs none"


def describe(row: Prospect, now: float) -> str:
    """``short, 4 nodes; starts 14:05, done Tue 09:30, 8.7 node-hours``."""
    said = [] if row.starts_at is None else [f"starts {_format_start(row.starts_at, now)}"]
    said += [] if row.done_at is None else [f"done {format_moment(row.done_at, now)}"]
    return f"{name_of(row)}; {', '.join([*said, f'{row.node_hours:.3g} node-hours'])}"


def name_of(row: Prospect) -> str:
    """``short, 4 nodes``."""
    return ", ".join(filter(None, (row.queue, plural(row.nodes, "node"))))
