"""Decides which rank is lost, from the reports of all nodes and their age; reads no clock or files.

A frozen rank cannot report itself, but its node's watcher sees that the process is stopped. If the
watcher is silent too, the node is gone. A rank that waits is never to blame, unless all ranks wait.
A rank that computes may only be slow and gets much more time. A rank that saves a checkpoint, or
has not begun to train, may take as long as it needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipectl.units import format_ranges
from pipectl.watch.board import Activity
from pipectl.watch.report import DIED, FAILED, FAILS, RESUME, STOPPED, NodeReport, RankReport

PATIENCE = 20
"""A rank may compute for this many limits without moving on."""
SETTLE_S = 0.3
"""Wait so long after a death: another rank may have died before, or a rank may report its error."""
MAX_WAIT_S = 11.0
"""Wait at most so long after a death: the first node's watcher ends a second later."""
_MISSED, _MISSED_S = 4, 5.0
"""A node whose file is not renewed for so many intervals, and seconds, after a death is gone."""
_FILES_PER_S = 32
"""All watchers together write so many files per second; with more nodes, each writes less often."""
_LOST = 0.9
"""A rank may be stopped or silent for this share of the limit; the rest is for reporting it."""
_CIRCLE = 2
"""All ranks may wait for each other for this many limits."""
_PACES = 3
"""The limit is at least this many steps."""
_MAX_HOPS, _MAX_GROUPS = 6, 6


Lost = tuple[NodeReport, RankReport]
"""The node and the rank because of which the run cannot go on; the rank's message says why."""


def interval_s(nodes: int) -> float:
    """Seconds between two reports of a node, for this number of nodes."""
    return max(1.0, nodes / _FILES_PER_S)


def limit_s(nodes: Iterable[NodeReport], count: int, min_s: float, predicted_s: float) -> float:
    """Seconds for which a rank may make no progress: three steps, predicted or measured.

    Args:
        nodes: those that have reported.
        count: number of all nodes.
        min_s: the least value, however short the steps are.
        predicted_s: time of a step in the plan.
    """
    pace_s = max((rank.activity.pace_s for node in nodes for rank in node.ranks), default=0)
    several_s = _MISSED * interval_s(count) if count > 1 else 0.0
    return max(min_s, several_s, _PACES * max(predicted_s, pace_s))


def is_suspended(nodes: Iterable[NodeReport]) -> bool:
    """Whether all ranks that have not ended are stopped: the run is suspended and will go on."""
    return {r.state for node in nodes for r in node.ranks if not r.is_over} == {STOPPED}


def judge(
    nodes: Sequence[NodeReport], limit: float, ended_s: float | None, *, complete: bool = True
) -> Lost | None:
    """The rank because of which the run cannot go on; None if there is none, or it reports itself.

    Args:
        nodes: ordered by their first ranks.
        limit: see :func:`limit_s`.
        ended_s: seconds since the first end of a rank was noticed; None if no rank has ended.
        complete: whether these are all nodes; if not, a rank of another node may be computing.
    """
    if any(rank.state in (FAILS, FAILED) for node in nodes for rank in node.ranks):
        return None
    if ended_s is not None:
        return _judge_deaths(nodes, ended_s)
    return _judge_living(nodes, limit, complete=complete)


def _judge_living(nodes: Sequence[NodeReport], limit: float, *, complete: bool) -> Lost | None:
    """The lost rank if no rank has ended; None if no rank is lost."""
    living = [(node, rank) for node in nodes for rank in node.ranks if not rank.is_over]
    if not living or is_suspended(nodes):
        return None

    def blame(node: NodeReport, rank: RankReport, message: str, cure: str = RESUME) -> Lost:
        words = describe_waits([rank for _, rank in living], rank.rank)
        return node, rank._replace(message=f"{message}; {words}" if words else message, cure=cure)

    still_s = min(rank.still_s for _, rank in living)
    for node, rank in living:
        if rank.state == STOPPED and rank.still_s >= _LOST * limit:
            words = f"its process is stopped (SIGSTOP), for {rank.still_s:.0f} s now"
            return blame(node, rank, words)
        # If others move on, only the word of a node is lost.
        if node.silent_s >= _LOST * limit and still_s >= limit / 2:
            return blame(node, rank, _describe_silence(node))
    # Otherwise no rank moves on, though all are alive; it may be for a slow disk.
    step = max(rank.activity.step for _, rank in living)
    if not complete or (step and not all(rank.activity.in_program for _, rank in living)):
        return None
    busy = [(node, rank) for node, rank in living if not rank.activity.waiting]
    if busy and step > 1 and still_s >= PATIENCE * limit:
        message = f"has been in {busy[0][1].activity.action} for {still_s:.0f} s"
        cure = "look at what it does (`py-spy dump`); launch.hang_after allows more time"
        return blame(*busy[0], f"{message}, and no rank has moved on", cure)
    if not busy and len(living) > 1 and still_s >= _CIRCLE * limit:
        message = f"all ranks have waited for each other for {still_s:.0f} s"
        cure = "a message was lost: look at the network; launch.hang_after allows more time"
        return blame(*living[0], message, cure)
    return None


def _judge_deaths(nodes: Sequence[NodeReport], ended_s: float) -> Lost | None:
    """The rank that ended first, or the first rank of a node that was gone before."""
    deaths = [(node, rank) for node in nodes for rank in node.ranks if rank.state == DIED]
    if ended_s < SETTLE_S or all(rank.was_asked for _, rank in deaths):
        return None
    # If a node is gone, launchers kill all ranks but those: that it is not heard of is what tells.
    # What was read together with the first death may have been written before it.
    for node in nodes:
        if node.silent_s >= ended_s and not node.is_over:
            if ended_s <= min(max(_MISSED * interval_s(len(nodes)), _MISSED_S), MAX_WAIT_S):
                return None
            return node, node.ranks[0]._replace(message=_describe_silence(node))
    return min(deaths, key=lambda death: death[1].ended_at)


def _describe_silence(node: NodeReport) -> str:
    where = f" on {node.node}" if node.node else ""
    return f"no sign of life from it{where} for {node.silent_s:.0f} s: the node is gone"


def describe_stall(nodes: Sequence[NodeReport], limit: float) -> tuple[float, str]:
    """Seconds for which no rank has moved on, and who waits for whom.

    They are 0 and empty below the limit, or if a rank has ended.
    """
    ranks = [rank for node in nodes for rank in node.ranks]
    still_s = min((rank.still_s for rank in ranks), default=0.0)
    if still_s < limit or any(rank.is_over for rank in ranks):
        return 0.0, ""
    return still_s, f"no rank has moved on for {still_s:.0f} s: {describe_waits(ranks)}"


def describe_waits(ranks: Sequence[RankReport], culprit: int | None = None) -> str:
    """Who waits for whom: one chain of waiting ranks, if possible one that leads to the culprit.

    If no rank waits for a message: what each rank does, grouped by what they do.
    """
    activities = {rank.rank: rank.activity for rank in ranks}
    waiting = [rank for rank, each in activities.items() if each.peer >= 0]
    if not waiting:
        groups: dict[str, list[int]] = {}
        for rank, each in sorted(activities.items()):
            groups.setdefault(_describe(each), []).append(rank)
        words = [
            f"ranks {format_ranges(same)} are {doing}"
            if len(same) > 1
            else f"rank {same[0]} is {doing}"
            for doing, same in groups.items()
        ]
        left = sum(map(len, list(groups.values())[_MAX_GROUPS:]))
        more = [f"{left} more ranks do something else"] if left else []
        return "; ".join([*words[:_MAX_GROUPS], *more])
    # Some have just begun to wait, or their message is coming in.
    waiting.sort(key=lambda rank: (activities[rank].peer != culprit, not activities[rank].waiting))
    path = waiting[:1]
    text = f"rank {path[0]} is {_describe(activities[path[0]])}"
    while (activity := activities.get(path[-1])) is not None and activity.peer >= 0:
        if activity.peer in path or len(path) == _MAX_HOPS:
            return text + (", and so in a circle" if activity.peer in path else ", and so on")
        path.append(activity.peer)
        other = activities.get(activity.peer)
        text += f", which {f'is {_describe(other)}' if other else 'has not reported yet'}"
    return text


def _describe(activity: Activity) -> str:
    """``in BACKWARD micro-batch 4``, or ``waiting for activation 5 of stage 2 from rank 2``."""
    if activity.peer >= 0:
        return f"waiting for {activity.awaited}"
    if activity.waiting:
        stage = f"stage {activity.stage}, " if activity.stage >= 0 else ""
        return f"waiting for the other ranks ({stage}{activity.action})"
    return f"in {activity.action}" if activity.in_program else activity.action
