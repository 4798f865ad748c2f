"""Every rank of a run in a table: where it is, how much of its time it computes, what it holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from pipectl.cli.console import plain
from pipectl.cli.tables import table
from pipectl.jobs.status import Peak, RunStatus
from pipectl.units import format_bytes, format_time

_HEADS = ("rank", "node", "stage", "busy", "waits", "computes a step", "memory", "predicted")
_LEFT = ("node", "stage", "busy")
_BAR = 10
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def ranks_table(status: RunStatus, rows: int | None = None) -> Table:
    """A row per rank that has been heard of.

    Args:
        rows: at most; None for all.
    """
    peaks = {peak.rank: peak for peak in status.peaks}
    made = table(*_HEADS, left=_LEFT)
    shown = status.ranks if rows is None or len(status.ranks) <= rows else status.ranks[: rows - 1]
    for rank in shown:
        made.add_row(*map(plain, _cells(rank, peaks.get(int(rank["rank"])))))
    if len(shown) < len(status.ranks):
        made.add_row("…", plain(f"{len(status.ranks) - len(shown)} more"))
    return made


def bar(share: float, width: int = _BAR) -> str:
    """A share from 0 to 1 as a bar of so many characters."""
    eighths = round(8 * width * min(1.0, max(0.0, share)))
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(width)


def _cells(rank: Mapping[str, Any], peak: Peak | None) -> tuple[object, ...]:
    waiting = rank.get("waiting")
    busy_s = rank.get("busy_s")
    return (
        rank["rank"],
        rank.get("node", ""),
        ",".join(map(str, rank.get("stages") or ())),
        "" if waiting is None else bar(1 - waiting),
        "" if waiting is None else f"{waiting:.0%}",
        "" if busy_s is None else format_time(busy_s),
        "" if peak is None else format_bytes(peak.measured_bytes),
        "" if peak is None or peak.predicted_bytes is None else format_bytes(peak.predicted_bytes),
    )
