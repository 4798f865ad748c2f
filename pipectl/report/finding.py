"""Where a measured step departs most from the prediction, in a sentence."""

from __future__ import annotations

from pipectl.report.comparison import (
    BETWEEN,
    COMMUNICATION,
    COMPUTING,
    OFFLOAD,
    OTHERS,
    SUMS,
    Both,
    Comparison,
    Part,
)
from pipectl.units import format_time

_REMARKABLE = 0.02
"""Of the step."""
_BEYOND = 100
"""Times the prediction, from which on the ratio says nothing."""

_WHAT = {
    COMMUNICATION: "exposed communication",
    SUMS: "the wait for sums of gradients",
    OFFLOAD: "the wait for offloaded values",
    BETWEEN: "the time between actions",
}
_CURES = {
    COMPUTING: "the nodes are busier, idler or other than when they were profiled: "
    "`pipectl profile --again` measures anew",
    COMMUNICATION: "`pipectl profile --links` measures what the cluster file assumes",
    SUMS: "`pipectl profile --links` measures what the cluster file assumes",
    OFFLOAD: "look at `disk_link` and `host_link` in the cluster file",
    BETWEEN: "larger micro-batches have fewer actions",
}


def finding(found: Comparison) -> str:
    """What most of the difference comes from.

    Waits for other ranks are left out: they follow from what those ranks do.
    """
    candidates = [
        (abs(both.more_s), rank.rank, name, both)
        for rank in found.ranks
        for name, both in rank.spent.items()
        if name != OTHERS
    ]
    if not candidates:
        return "nothing was recorded"
    more_s, rank, name, both = max(candidates, key=lambda each: (each[0], -each[1]))
    if more_s < _REMARKABLE * found.time.predicted_s:
        return f"no part of any rank's step differs by {_REMARKABLE:.0%} of the step or more"
    parts = [part for part in found.parts if part.rank == rank]
    if name == COMPUTING and parts:
        part = max(parts, key=lambda each: abs(each.time.more_s))
        return f"{_subject(part)} {_times(part.time)} on rank {rank}: {_CURES[name]}{_note(part)}"
    return f"{_WHAT.get(name, name)} {_times(both)} on rank {rank}: {_CURES[name]}"


def _subject(part: Part) -> str:
    kind = part.kind.replace("_", " ")
    return f"{kind} of stage {part.stage}" if part.stage >= 0 else kind


def _note(part: Part) -> str:
    return "; loading the data counts as forward" if part.kind == "forward" else ""


def _times(both: Both) -> str:
    """``takes 1.34 times what was predicted, 12.3 ms a step more``."""
    amount = f"{format_time(abs(both.more_s))} a step {'more' if both.more_s > 0 else 'less'}"
    if both.ratio is None or both.ratio > _BEYOND:
        return f"takes {amount} than predicted"
    return f"takes {both.ratio:.2f} times what was predicted, {amount},"
