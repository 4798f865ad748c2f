"""The decision which rank is lost, from the reports of all nodes and their age.

The watcher of a node sees that a process is stopped. If a node's report is not renewed, the node is
lost. A waiting rank is never blamed, unless all ranks wait. A computing rank may just be slow, so
it gets more time. There is no time limit for saving a checkpoint, or before training begins, and
none for computing in the first step of a start.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipectl.units import format_ranges
from pipectl.watch.board import Activity
from pipectl.watch.report import RESUME, NodeReport, RankReport, State

PATIENCE = 20
"""A rank may compute for this many limits without progress."""
SETTLE_S = 0.3
"""Wait this long after a death: another rank may have died first, or may report an error."""
MAX_WAIT_S = 11.0
"""Wait at most this long after a death: the first node's watcher ends a second later."""
_MISSED, _MISSED_S = 4, 5.0
"""After a death, a node is lost if it misses this many reports, for at least this time."""
_FILES_PER_S = 32
"""Most writes per second of all watchers together; with more nodes, each writes less often."""
_LOST = 0.9
"""Share of the limit for which a rank may be stopped or silent; the rest is for reporting it."""
_CIRCLE = 2
"""All ranks may wait for each other for this many limits."""
_PACES = 3
"""The limit is at least the time of this many steps."""
_MAX_HOPS, _MAX_GROUPS = 6, 6


Lost = tuple[NodeReport, RankReport]
"""The lost rank and its node; the rank's message says why the run cannot go on."""


def interval_s(nodes: int) -> float:
    """Return the seconds between two reports of a node, given the number of nodes."""
    return max(1.0, nodes / _FILES_PER_S)


def limit_s(nodes: Iterable[NodeReport], count: int, min_s: float, predicted_s: float) -> float:
    """Return the seconds that a rank may spend without progress: the time of three steps.

    Args:
        nodes: nodes that have reported.
        count: number of all nodes.
        min_s: lower bound.
        predicted_s: predicted time of a step.
    """
    pace_s = max((rank.activity.pace_s for node in nodes for rank in node.ranks), default=0)
    several_s = _MISSED * interval_s(count) if count > 1 else 0.0
    return max(min_s, several_s, _PACES * max(predicted_s, pace_s))


def is_suspended(nodes: Iterable[NodeReport]) -> bool:
    """Return whether all live ranks are stopped: the run is suspended and will continue."""
    return {r.state for node in nodes for r in node.ranks if not r.is_over} == {State.STOPPED}


def judge(
    nodes: Sequence[NodeReport], limit: float, ended_s: float | None, *, complete: bool = True
) -> Lost | None:
    """Return the lost rank; None if no rank is lost, or a rank reports its own error.

    Args:
        nodes: ordered by their first ranks.
        limit: see :func:`limit_s`.
        ended_s: seconds since a rank was first seen to have ended; None if none has.
        complete: whether these are all nodes; otherwise a rank of another node may be computing.
    """
    if any(rank.state in (State.FAILS, State.FAILED) for node in nodes for rank in node.ranks):
        return None
    if ended_s is not None:
        return _judge_deaths(nodes, ended_s)
    return _judge_living(nodes, limit, complete=complete)


def _judge_living(nodes: Sequence[NodeReport], limit: float, *, complete: bool) -> Lost | None:
    """Return the lost rank if no rank has ended."""
    living = [(node, rank) for node in nodes for rank in node.ranks if not rank.is_over]
    if not living or is_suspended(nodes):
        return None

    def blame(node: NodeReport, rank: RankReport, message: str, hint: str = RESUME) -> Lost:
        words = describe_waits([rank for _, rank in living], rank.rank)
        return node, rank._replace(message=f"{message}; {words}" if words else message, hint=hint)

    still_s = min(rank.still_s for _, rank in living)
    for node, rank in living:
        if rank.state == State.STOPPED and rank.still_s >= _LOST * limit:
            words = f"its process is stopped (SIGSTOP), for {rank.still_s:.0f} s now"
            return blame(node, rank, words)
        # If other ranks make progress, only the report of this node is missing.
        if node.silent_s >= _LOST * limit and still_s >= limit / 2:
            return blame(node, rank, _describe_silence(node))
    # No rank makes progress although all are alive; the reason may be a slow disk.
    step = max(rank.activity.step for _, rank in living)
    has_paced = any(rank.activity.pace_s for _, rank in living)  # a step of this start is done
    if not complete or (step and not all(rank.activity.in_program for _, rank in living)):
        return None
    busy = [(node, rank) for node, rank in living if not rank.activity.waiting]
    if busy and has_paced and still_s >= PATIENCE * limit:
        message = f"has been in {busy[0][1].activity.action} for {still_s:.0f} s"
        hint = "look at what it does (`py-spy dump`); launch.hang_after allows more time"
        return blame(*busy[0], f"{message}, and no rank has moved on", hint)
    if not busy and len(living) > 1 and still_s >= _CIRCLE * limit:
        message = f"all ranks have waited for each other for {still_s:.0f} s"
        hint = "a message was lost: look at the network; launch.hang_after allows more time"
        return blame(*living[0], message, hint)
    return None


def _judge_deaths(nodes: Sequence[NodeReport], ended_s: float) -> Lost | None:
    """Return the rank that ended first, or the first rank of a node that was lost before."""
    deaths = [(node, rank) for node in nodes for rank in node.ranks if rank.state == State.DIED]
    if ended_s < SETTLE_S or all(rank.was_asked for _, rank in deaths):
        return None
    # When a node is lost, the launcher kills the ranks of the other nodes: the missing report shows
    # which node it is. A report read together with the first death may be older than that.
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
    """Return the seconds for which no rank made progress, and who waits for whom.

    The result is 0 and empty below the limit, or if a rank has ended.
    """
    ranks = [rank for node in nodes for rank in node.ranks]
    still_s = min((rank.still_s for rank in ranks), default=0.0)
    if still_s < limit or any(rank.is_over for rank in ranks):
        return 0.0, ""
    return still_s, f"no rank has moved on for {still_s:.0f} s: {describe_waits(ranks)}"


def describe_waits(ranks: Sequence[RankReport], culprit: int | None = None) -> str:
    """Describe one chain of waiting ranks, preferably one that leads to the culprit.

    If no rank waits for a message, describe what the ranks do, in groups.
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
    # Some ranks have only begun to wait, or their message is arriving.
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
