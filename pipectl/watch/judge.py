"""Which rank is lost, by what the files of all nodes say and how old that is: no clock, no files.

A rank that is frozen says nothing of itself; its node's watcher sees that it is stopped. If the
watcher is silent too, the node is gone. Ranks that wait are never to blame, unless all of them do.
A rank that computes may only be slow, and is given much longer; one that saves, or has not begun to
train, all the time it takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pipectl.watch.board import Activity
from pipectl.watch.files import NodeReport
from pipectl.watch.rank import DIED, FAILED, FAILS, RESUME, STOPPED, Death, RankReport

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
_CIRCLE = 2.0
"""Times the limit that all ranks may wait for each other: a message may be long on its way."""
_PACES = 3
_MAX_HOPS, _MAX_GROUPS = 4, 6
"""Ranks of a chain, and groups of ranks that do the same, that are named."""


@dataclass
class Node:
    """What a watcher knows of a node, by its own clock in seconds.

    Attributes:
        report: the last one.
        heard_at: when there was the last sign of life.
        moved_at: by rank, when it was first seen as it is: at the same point of its program, and
            stopped or not. A disk that is full shows the node alive, but no rank of it moving on.
    """

    report: NodeReport
    heard_at: float = 0.0
    moved_at: dict[int, float] = field(default_factory=dict)

    def update(self, report: NodeReport, now: float) -> None:
        """Take note of a report."""
        before = {rank.rank: rank for rank in self.report.ranks}
        for rank in report.ranks:
            if rank.rank not in before or _progress(rank) != _progress(before[rank.rank]):
                self.moved_at[rank.rank] = now
        self.report, self.heard_at = report, now


def _progress(rank: RankReport) -> tuple[object, ...]:
    return rank.state == STOPPED, rank.activity.moves, rank.activity.step


Lost = tuple[Node, RankReport]
"""A rank for which the run cannot go on, with why as its death, and its node."""


def interval_s(nodes: int) -> float:
    """Between two signs of life of one of so many nodes, in seconds."""
    return max(1.0, nodes / _FILES_PER_S)


def limit_s(nodes: Iterable[Node], count: int, min_s: float, predicted_s: float) -> float:
    """How long a rank may be missed: three steps, as they are predicted or as they are.

    Args:
        nodes: those that are heard of, of so many.
        min_s: however short the steps are.
        predicted_s: a step, as the plan has it.
    """
    pace_s = max((rank.activity.pace_s for node in nodes for rank in node.report.ranks), default=0)
    several_s = _MISSED * interval_s(count) if count > 1 else 0.0
    return max(min_s, several_s, _PACES * max(predicted_s, pace_s))


def is_suspended(nodes: Iterable[Node]) -> bool:
    """Whether all ranks that have not ended are stopped: the run as a whole, which will go on."""
    states = {rank.state for node in nodes for rank in node.report.ranks if not rank.is_over}
    return states == {STOPPED}


def judge(
    nodes: Sequence[Node],
    now: float,
    limit: float,
    ended_at: float | None = None,
    *,
    complete: bool = True,
) -> Lost | None:
    """Why the run cannot go on; None while it can, or if the ranks said why not themselves.

    Args:
        nodes: by their first ranks.
        now: of the clock of the nodes.
        limit: see :func:`limit_s`.
        ended_at: when it was noticed first that a rank has ended; None if none has.
        complete: whether these are all nodes, so that nobody else may be computing.
    """
    if any(rank.state in (FAILS, FAILED) for node in nodes for rank in node.report.ranks):
        return None
    if ended_at is None:
        return _judge_living(nodes, now, limit, complete=complete)
    return _judge_deaths(nodes, now, now - ended_at)


def _judge_deaths(nodes: Sequence[Node], now: float, ended_s: float) -> Lost | None:
    """The rank that ended first, or the first of a node that was gone before."""
    dead_of = [[rank for rank in node.report.ranks if rank.state == DIED] for node in nodes]
    if ended_s < SETTLE_S or all(rank.death.is_wanted for dead in dead_of for rank in dead):
        return None
    # If a node is gone, launchers kill all ranks but those: that it is not heard of is what tells.
    # What was read together with the first death may have been written before it.
    for node in nodes:
        if now - node.heard_at >= ended_s and not node.report.is_over:
            if ended_s <= min(max(_MISSED * interval_s(len(nodes)), _MISSED_S), MAX_WAIT_S):
                return None
            return node, node.report.ranks[0]._replace(death=Death(message=_silence(node, now)))
    # Of each node the rank that its kernel saw end first, and of these the earliest.
    firsts = [
        (node, min(dead, key=lambda rank: (rank.death.earlier, rank.death.at)))
        for node, dead in zip(nodes, dead_of, strict=True)
        if dead
    ]
    return min(firsts, key=lambda first: first[1].death.at)


def _judge_living(
    nodes: Sequence[Node], now: float, limit: float, *, complete: bool
) -> Lost | None:
    """The rank that is lost though none has ended; None while none is."""
    living = [(node, rank) for node in nodes for rank in node.report.ranks if not rank.is_over]
    ranks = [rank for _, rank in living]
    if not ranks or is_suspended(nodes):
        return None

    def blame(node: Node, rank: RankReport, message: str, cure: str = RESUME) -> Lost:
        words = describe_waits(ranks, rank.rank)
        death = Death(message=f"{message}; {words}" if words else message, cure=cure)
        return node, rank._replace(death=death)

    still_s = min(now - node.moved_at[rank.rank] for node, rank in living)
    for node, rank in living:
        stopped_s = now - node.moved_at[rank.rank]
        if rank.state == STOPPED and stopped_s >= _LOST * limit:
            return blame(node, rank, f"its process is stopped (SIGSTOP), for {stopped_s:.0f} s now")
        # If others move on, only the word of a node is lost.
        if now - node.heard_at >= _LOST * limit and still_s >= limit / 2:
            return blame(node, rank, _silence(node, now))
    if not complete:
        return None
    # No rank moves on, though all are alive.
    step = max(rank.activity.step for rank in ranks)
    if step and not all(rank.activity.in_program for rank in ranks):  # a slow disk, say
        return None
    busy = [(node, rank) for node, rank in living if not rank.activity.waiting]
    if busy and step > 1 and still_s >= PATIENCE * limit:
        message = f"has been in {busy[0][1].activity.action} for {still_s:.0f} s"
        cure = "see what it does there, with py-spy dump say; launch.hang_after allows more time"
        return blame(*busy[0], f"{message}, and no rank has moved on", cure)
    if not busy and len(ranks) > 1 and still_s >= _CIRCLE * limit:
        message = f"all ranks have waited for each other for {still_s:.0f} s"
        cure = "a message was lost: look at the network; launch.hang_after allows more time"
        return blame(*living[0], message, cure)
    return None


def _silence(node: Node, now: float) -> str:
    where = f" on {node.report.node}" if node.report.node else ""
    return f"nothing was heard of it{where} for {now - node.heard_at:.0f} s: the node is gone"


def describe_stall(nodes: Sequence[Node], now: float, limit: float) -> tuple[float, str]:
    """For how long no rank has moved on, in seconds, and who waits for whom.

    It is 0 if that is less than the limit, or if a rank has ended.
    """
    ranks = [rank for node in nodes for rank in node.report.ranks]
    if any(rank.is_over for rank in ranks):
        return 0.0, ""
    still_s = min((now - at for node in nodes for at in node.moved_at.values()), default=0.0)
    if still_s < limit:
        return 0.0, ""
    return still_s, f"no rank has moved on for {still_s:.0f} s: {describe_waits(ranks)}"


def describe_waits(ranks: Sequence[RankReport], culprit: int | None = None) -> str:
    """Who waits for whom: of all chains one that leads to the culprit, if any does.

    If no rank waits for a message, what each of them does.
    """
    activities = {rank.rank: rank.activity for rank in ranks}
    waiting = [rank for rank, each in activities.items() if each.peer >= 0]
    if not waiting:
        return _describe_all(activities)
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


def _describe_all(activities: Mapping[int, Activity]) -> str:
    """What all ranks do, those together that do the same."""
    groups: dict[str, list[int]] = {}
    for rank, activity in sorted(activities.items()):
        groups.setdefault(_describe(activity), []).append(rank)
    words = [
        f"ranks {ranges(ranks)} are {doing}" if len(ranks) > 1 else f"rank {ranks[0]} is {doing}"
        for doing, ranks in list(groups.items())[:_MAX_GROUPS]
    ]
    left = sum(map(len, list(groups.values())[_MAX_GROUPS:]))
    return "; ".join([*words, *([f"{left} more ranks do something else"] if left else [])])


def _describe(activity: Activity) -> str:
    """``in BACKWARD micro-batch 4``, or ``waiting for activation 5 of stage 2 from rank 2``."""
    if activity.peer >= 0:
        return f"waiting for {activity.awaited}"
    if activity.waiting:
        stage = f"stage {activity.stage}, " if activity.stage >= 0 else ""
        return f"waiting for the other ranks ({stage}{activity.action})"
    return f"in {activity.action}" if activity.in_program else activity.action


def ranges(ranks: Iterable[int]) -> str:
    """``0, 2-5`` for 0, 2, 3, 4, 5."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
