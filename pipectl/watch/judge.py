"""Which rank is lost, by what the files of all nodes say and how old that is: no clock, no files.

A rank that is frozen says nothing of itself; its node's watcher sees that it is stopped. If the
watcher is silent too, the node is gone. Ranks that wait are never to blame, unless all of them do.
A rank that computes may only be slow, and is given much longer; one that saves, or has not begun to
train, all the time it takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from pipectl.units import format_ranges
from pipectl.watch.board import Activity
from pipectl.watch.rank import DIED, FAILED, FAILS, RESUME, STOPPED, RankReport

PATIENCE = 20
"""Times the limit that a rank may compute without moving on."""
SETTLE_S = 0.3
"""After a death: others may be older, or a rank may have said why it fails."""
MAX_WAIT_S = 11.0
"""After a death, however many nodes there are: the first node's watcher ends a second later."""
_MISSED, _MISSED_S = 4, 5.0
"""Intervals, and seconds, after a death: a node that is not heard of since then is gone."""
_FILES_PER_S = 32
"""That all watchers together write; with more nodes, each writes more rarely."""
_LOST = 0.9
"""Of the limit: how long a rank may be stopped or silent. The rest is left for reporting it."""
_CIRCLE, _PACES = 2, 3
"""Times the limit that all ranks may wait for each other; steps that a rank may be missed."""
_MAX_HOPS, _MAX_GROUPS = 6, 6


class NodeReport(NamedTuple):
    """How the ranks of one node are.

    Args:
        node: its name.
        ends: whether all ranks are to be killed.
        stalled: who waits for whom, if no rank has moved on for long; the first node's says it.
        silent_s: how long ago it was written, for whoever has read it.
    """

    node: str = ""
    ends: bool = False
    stalled: str = ""
    ranks: tuple[RankReport, ...] = ()
    silent_s: float = 0.0

    @property
    def is_over(self) -> bool:
        """Whether all of its ranks have ended."""
        return all(rank.is_over for rank in self.ranks)

    @property
    def news(self) -> tuple[Any, ...]:
        """What the other watchers should know at once, if it changes."""
        return self.ends, self.stalled, [rank.state for rank in self.ranks]


Lost = tuple[NodeReport, RankReport]
"""A rank for which the run cannot go on, with the reason as its message, and its node."""


def interval_s(nodes: int) -> float:
    """Between two signs of life of one of so many nodes, in seconds."""
    return max(1.0, nodes / _FILES_PER_S)


def limit_s(nodes: Iterable[NodeReport], count: int, min_s: float, predicted_s: float) -> float:
    """How long a rank may be missed: three steps, as they are predicted or as they are.

    Args:
        nodes: those that are heard of, of so many.
        min_s: however short the steps are.
        predicted_s: a step, as the plan has it.
    """
    pace_s = max((rank.activity.pace_s for node in nodes for rank in node.ranks), default=0)
    several_s = _MISSED * interval_s(count) if count > 1 else 0.0
    return max(min_s, several_s, _PACES * max(predicted_s, pace_s))


def is_suspended(nodes: Iterable[NodeReport]) -> bool:
    """Whether all ranks that have not ended are stopped: the run as a whole, which will go on."""
    return {r.state for node in nodes for r in node.ranks if not r.is_over} == {STOPPED}


def judge(
    nodes: Sequence[NodeReport], limit: float, ended_s: float | None, *, complete: bool = True
) -> Lost | None:
    """Why the run cannot go on; None while it can, or if the ranks said why not themselves.

    Args:
        nodes: by their first ranks.
        limit: see :func:`limit_s`.
        ended_s: how long ago it was noticed first that a rank has ended; None if none has.
        complete: whether these are all nodes, so that nobody else may be computing.
    """
    if any(rank.state in (FAILS, FAILED) for node in nodes for rank in node.ranks):
        return None
    if ended_s is not None:
        return _judge_deaths(nodes, ended_s)
    return _judge_living(nodes, limit, complete=complete)


def _judge_living(nodes: Sequence[NodeReport], limit: float, *, complete: bool) -> Lost | None:
    """The rank that is lost though none has ended; None while none is."""
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
        cure = "see what it does there, with py-spy dump say; launch.hang_after allows more time"
        return blame(*busy[0], f"{message}, and no rank has moved on", cure)
    if not busy and len(living) > 1 and still_s >= _CIRCLE * limit:
        message = f"all ranks have waited for each other for {still_s:.0f} s"
        cure = "a message was lost: look at the network; launch.hang_after allows more time"
        return blame(*living[0], message, cure)
    return None


def _judge_deaths(nodes: Sequence[NodeReport], ended_s: float) -> Lost | None:
    """The rank that ended first, or the first of a node that was gone before."""
    dead = [(node, [r for r in node.ranks if r.state == DIED]) for node in nodes]
    if ended_s < SETTLE_S or all(rank.was_asked for _, ranks in dead for rank in ranks):
        return None
    # If a node is gone, launchers kill all ranks but those: that it is not heard of is what tells.
    # What was read together with the first death may have been written before it.
    for node in nodes:
        if node.silent_s >= ended_s and not node.is_over:
            if ended_s <= min(max(_MISSED * interval_s(len(nodes)), _MISSED_S), MAX_WAIT_S):
                return None
            return node, node.ranks[0]._replace(message=_describe_silence(node))
    # Of each node the rank that its kernel saw end first, and of these the earliest.
    firsts = [
        (node, min(ranks, key=lambda rank: (rank.order, rank.ended_at)))
        for node, ranks in dead
        if ranks
    ]
    return min(firsts, key=lambda first: first[1].ended_at)


def _describe_silence(node: NodeReport) -> str:
    where = f" on {node.node}" if node.node else ""
    return f"nothing was heard of it{where} for {node.silent_s:.0f} s: the node is gone"


def describe_stall(nodes: Sequence[NodeReport], limit: float) -> tuple[float, str]:
    """How long no rank has moved on, in seconds, and who waits for whom.

    It is 0 if that is less than the limit, or if a rank has ended.
    """
    ranks = [rank for node in nodes for rank in node.ranks]
    still_s = min((rank.still_s for rank in ranks), default=0.0)
    if still_s < limit or any(rank.is_over for rank in ranks):
        return 0.0, ""
    return still_s, f"no rank has moved on for {still_s:.0f} s: {describe_waits(ranks)}"


def describe_waits(ranks: Sequence[RankReport], culprit: int | None = None) -> str:
    """Who waits for whom: of all chains one that leads to the culprit, if any does.

    If no rank waits for a message, what each of them does; those together that do the same.
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
        text += f", which {f'is {_describe(other)}' if other else 'was never heard of'}"
    return text


def _describe(activity: Activity) -> str:
    """``in BACKWARD micro-batch 4``, or ``waiting for activation 5 of stage 2 from rank 2``."""
    if activity.peer >= 0:
        return f"waiting for {activity.awaited}"
    if activity.waiting:
        stage = f"stage {activity.stage}, " if activity.stage >= 0 else ""
        return f"waiting for the other ranks ({stage}{activity.action})"
    return f"in {activity.action}" if activity.in_program else activity.action
