"""Which rank is lost, by what the files of all nodes say and how old that is: no clock, no files.

A rank that is frozen says nothing of itself; its node's watcher sees that it is stopped. If the
watcher is silent too, the node is gone. Ranks that wait are never to blame, unless all of them do.
A rank that computes may only be slow, and is given much longer; one that saves, or has not begun to
train, all the time it takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from pipectl.watch.board import Activity
from pipectl.watch.files import NodeReport
from pipectl.watch.rank import DIED, FAILED, FAILS, STOPPED, RankReport

RESUME = "pipectl resume goes on from the last checkpoint"
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
_MEMORY = "set pipeline.memory_limit below what a rank gets, and plan again; pipectl resume goes on"
_MAX_HOPS, _MAX_GROUPS = 4, 6
"""Ranks of a chain, and groups of ranks that do the same, that are named."""


class Names(NamedTuple):
    """What numbers on a board stand for.

    Args:
        kinds: of rows, in capitals, such as ``RECEIVE_WAIT``.
        lanes: what messages hold, such as ``activation``.
    """

    kinds: Sequence[str]
    lanes: Sequence[str]

    def kind(self, activity: Activity) -> str:
        """Of the row under way; empty outside of the program."""
        return self.kinds[activity.kind] if 0 <= activity.kind < len(self.kinds) else ""

    def lane(self, activity: Activity) -> str:
        """What the message holds that the row waits for."""
        return self.lanes[activity.lane] if 0 <= activity.lane < len(self.lanes) else "message"


class Node(NamedTuple):
    """What a watcher knows of a node.

    Args:
        report: its last one.
        silent_s: for how long there has been no sign of life.
        stale_s: for how long the report has been the same: a full disk takes no other.
    """

    report: NodeReport
    silent_s: float = 0.0
    stale_s: float = 0.0


class Verdict(NamedTuple):
    """A rank for which the run cannot go on.

    Args:
        rank: how it was when it was last heard of.
        node: the name of its node.
        stack: where it was, if that is known.
        at: seconds since the epoch, when it ended; None if it has not, as far as is known.
    """

    rank: RankReport
    node: str
    message: str
    cure: str = RESUME
    stack: str = ""
    at: float | None = None


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


def judge(
    nodes: Sequence[Node],
    limit: float,
    names: Names,
    ended_s: float | None = None,
    *,
    awake_s: float = math.inf,
    complete: bool = True,
) -> Verdict | None:
    """Why the run cannot go on; None while it can, or if the ranks said so themselves.

    Args:
        nodes: by their first ranks.
        limit: see :func:`limit_s`.
        ended_s: how long ago it was noticed first that a rank has ended; None if none has.
        awake_s: since when not all ranks are stopped: before, none could move on.
        complete: whether these are all nodes, so that nobody else may be computing.
    """
    states = {rank.state for node in nodes for rank in node.report.ranks}
    if states & {FAILS, FAILED}:
        return None
    if ended_s is None:
        return _judge_ranks(nodes, limit, names, awake_s, complete=complete)
    dead = [rank for node in nodes for rank in node.report.ranks if rank.state == DIED]
    if ended_s < SETTLE_S or all(rank.death.is_wanted for rank in dead):
        return None
    # If a node is gone, launchers kill all ranks but those: that it is not heard of is what tells.
    # What was read together with the first death may have been written before it.
    for node in nodes:
        if node.silent_s >= ended_s and not node.report.is_over:
            if ended_s <= min(max(_MISSED * interval_s(len(nodes)), _MISSED_S), MAX_WAIT_S):
                return None
            where = f" on {node.report.node}" if node.report.node else ""
            message = f"nothing is heard of it{where} any more: the node is gone"
            return Verdict(node.report.ranks[0], node.report.node, message)
    # Of each node the rank that its kernel saw end first, and of these the earliest.
    firsts = [
        (min(dead, key=lambda rank: (rank.death.earlier, rank.death.at)), node.report.node)
        for node in nodes
        if (dead := [rank for rank in node.report.ranks if rank.state == DIED])
    ]
    return _judge_death(*min(firsts, key=lambda first: first[0].death.at))


def _judge_death(rank: RankReport, node: str) -> Verdict:
    """How a rank ended that did not say so."""
    death, cure, stack = rank.death, RESUME, ""
    if death.launcher:
        message = f"{death.launcher} that started it is gone"
        cure = "it was killed, or its node is gone; " + RESUME
    elif death.words:
        message, stack = f"its process crashed: {death.words.splitlines()[0]}", death.words
    elif death.for_memory:
        message, cure = "killed by the kernel, for lack of memory on its node", _MEMORY
    elif death.asked:
        message = "its process was sent a signal to end (SIGTERM or SIGINT), by itself"
    else:
        message = "its process was killed (SIGKILL, say), or ended without a word"
        if death.with_launcher:
            message += "; the launcher is gone, too"
    return Verdict(rank, node, message, cure, stack, death.at)


def _judge_ranks(
    nodes: Sequence[Node], limit: float, names: Names, awake_s: float, *, complete: bool
) -> Verdict | None:
    """The rank that is lost though none has ended; None while none is."""
    ranks = _living_ranks(nodes, awake_s)
    node_of = {rank.rank: node for node in nodes for rank in node.report.ranks}

    def blame(rank: RankReport, message: str, cure: str = RESUME) -> Verdict:
        words = describe_waits(ranks, names, rank.rank)
        text = f"{message}; {words}" if words else message
        return Verdict(rank, node_of[rank.rank].report.node, text, cure)

    if not ranks or is_suspended(nodes):
        return None
    for rank in ranks:
        if rank.state == STOPPED and rank.stopped_s >= _LOST * limit:
            return blame(rank, f"its process is stopped (SIGSTOP), for {rank.stopped_s:.0f} s now")
    silent = [rank for rank in ranks if node_of[rank.rank].silent_s >= _LOST * limit]
    if silent and all(rank.still_s >= limit / 2 for rank in ranks):
        node = node_of[silent[0].rank]  # if others move on, only its word is lost
        where = f" on {node.report.node}" if node.report.node else ""
        lost = f"nothing was heard of it{where} for {node.silent_s:.0f} s: the node is gone"
        return blame(silent[0], lost)
    if not complete:
        return None
    # No rank moves on, though all are alive.
    still_s = min(rank.still_s for rank in ranks)
    step = max(rank.activity.step for rank in ranks)
    if step and not all(names.kind(rank.activity) for rank in ranks):  # a slow disk, say
        return None
    busy = [rank for rank in ranks if not rank.activity.waiting]
    if busy and step > 1 and still_s >= PATIENCE * limit:
        doing = f"has been in {action(busy[0].activity, names)} for {still_s:.0f} s"
        cure = "see what it does there, with py-spy dump say; launch.hang_after allows more time"
        return blame(busy[0], f"{doing}, and no rank has moved on", cure)
    if not busy and len(ranks) > 1 and still_s >= _CIRCLE * limit:
        message = f"all ranks have waited for each other for {still_s:.0f} s"
        cure = "a message was lost: look at the network; launch.hang_after allows more time"
        return blame(ranks[0], message, cure)
    return None


def is_suspended(nodes: Iterable[Node]) -> bool:
    """Whether all ranks that have not ended are stopped: the run as a whole, which will go on."""
    states = {rank.state for node in nodes for rank in node.report.ranks if not rank.is_over}
    return states == {STOPPED}


def _living_ranks(nodes: Sequence[Node], awake_s: float) -> list[RankReport]:
    """Those that have not ended; for how long they are still or stopped, as far as is known."""
    return [
        rank._replace(
            still_s=min(rank.still_s + age_s, awake_s),
            stopped_s=min(rank.stopped_s + age_s, awake_s),
        )
        for node in nodes
        for age_s in [max(node.silent_s, node.stale_s)]
        for rank in node.report.ranks
        if not rank.is_over
    ]


def describe_stall(
    nodes: Sequence[Node], limit: float, names: Names, *, awake_s: float = math.inf
) -> tuple[float, str]:
    """For how long no rank has moved on, in seconds, and who waits for whom.

    It is 0 if that is less than the limit, or if a rank has ended.
    """
    ranks = _living_ranks(nodes, awake_s)
    if not ranks or len(ranks) < sum(len(node.report.ranks) for node in nodes):
        return 0.0, ""
    still_s = min(rank.still_s for rank in ranks)
    if still_s < limit:
        return 0.0, ""
    return still_s, f"no rank has moved on for {still_s:.0f} s: {describe_waits(ranks, names)}"


def describe_waits(ranks: Sequence[RankReport], names: Names, culprit: int | None = None) -> str:
    """Who waits for whom: of all chains one that leads to the culprit, if any does.

    Without a culprit, and if no rank waits for a message, what each of them does.
    """
    activities = {rank.rank: rank.activity for rank in ranks}
    if culprit is None:
        starts = [n for n, each in activities.items() if each.waiting and each.peer >= 0]
        if not starts:
            return _describe_all(activities, names)
    else:
        starts = [n for n, each in activities.items() if each.peer == culprit]
        starts += [n for n, each in activities.items() if each.waiting and n != culprit]
        if culprit in activities:  # what it does itself, whomever it waits for, ends the chain
            activities[culprit] = activities[culprit]._replace(waiting=False, peer=-1)
    return _describe_chain(starts[0], activities, names) if starts else ""


def _describe_chain(rank: int, activities: Mapping[int, Activity], names: Names) -> str:
    """For whom a rank waits, and for whom that one waits, and so on.

    Ranks count that have just begun to wait for a message, or that it is coming in for.
    """
    path, text = [rank], f"rank {rank} {_describe(activities[rank], names)}"
    while (activity := activities.get(path[-1])) is not None and activity.peer >= 0:
        if activity.peer in path or len(path) == _MAX_HOPS:
            return text + (", and so in a circle" if activity.peer in path else ", and so on")
        path.append(activity.peer)
        other = activities.get(activity.peer)
        text += f", which {_describe(other, names) if other else 'was never heard of'}"
    return text


def _describe_all(activities: Mapping[int, Activity], names: Names) -> str:
    """What all ranks do, those together that do the same."""
    groups: dict[str, list[int]] = {}
    for rank, activity in sorted(activities.items()):
        groups.setdefault(_describe(activity, names), []).append(rank)
    words = []
    for doing, ranks in list(groups.items())[:_MAX_GROUPS]:
        verb, _, rest = doing.partition(" ")
        many = f"ranks {ranges(ranks)} {'wait' if verb == 'waits' else 'are'} {rest}"
        words.append(many if len(ranks) > 1 else f"rank {ranks[0]} {doing}")
    left = sum(map(len, list(groups.values())[_MAX_GROUPS:]))
    return "; ".join([*words, *([f"{left} more ranks do something else"] if left else [])])


def _describe(activity: Activity, names: Names) -> str:
    """``is in backward 4``, ``waits for activation 5 of stage 2 from rank 2``."""
    kind, micro_batch = names.kind(activity), activity.micro_batch
    doing = activity.phase or "starting"
    if kind:
        number = f" {micro_batch}" if micro_batch >= 0 else ""
        doing = f"{kind.lower().replace('_', ' ')}{number}"
    if not (activity.waiting or activity.peer >= 0):
        return f"is {'in ' if kind else ''}{doing}"
    if activity.peer < 0:
        stage = f"stage {activity.stage}, " if kind and activity.stage >= 0 else ""
        return f"waits for the other ranks ({stage}{doing})"
    message = f"{names.lane(activity)}{'s' if micro_batch < 0 else f' {micro_batch}'}"
    if kind == "SEND_WAIT":
        return f"waits for rank {activity.peer} to take {message} of stage {activity.stage}"
    return f"waits for {message} of stage {activity.peer_stage} from rank {activity.peer}"


def action(activity: Activity, names: Names) -> str:
    """What the rank does, as error reports have it: ``FORWARD micro-batch 4``, or its phase."""
    kind, micro_batch = names.kind(activity), activity.micro_batch
    if not kind:
        return activity.phase
    return kind if micro_batch < 0 else f"{kind} micro-batch {micro_batch}"


def ranges(ranks: Iterable[int]) -> str:
    """``0, 2-5`` for 0, 2, 3, 4, 5."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
