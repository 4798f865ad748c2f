"""Which rank all others wait for, and whether it is lost or only slow. Pure: no clock, no files.

A rank that is frozen says nothing of itself; its node's watcher sees that it is stopped. If the
watcher is silent too, the node is gone. Ranks that wait are never to blame, unless all of them do.
A rank that computes may only be slow, and is given much longer; one that saves, or has not begun to
train, all the time it takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pipectl.watch.board import Sight
from pipectl.watch.rank import Death
from pipectl.watch.words import Names, action, chain, everybody

PATIENCE = 20
"""Times the limit that a rank may compute without moving on."""
_LOST = 0.9
"""Of the limit: how long a rank may be stopped or silent. The rest is left for telling so."""
_CIRCLE = 2.0
"""Times the limit that all ranks may wait for each other: a message may be long on its way."""
_PACES = 3
RESUME = "pipectl resume goes on from the last checkpoint"
_MEMORY = "set pipeline.memory_limit below what a rank gets, and plan again; pipectl resume goes on"


class Seen(NamedTuple):
    """What is known of a rank.

    Args:
        still_s: for how long it has not moved on.
        stopped_s: for how long it has been stopped; 0 if it is not.
        silent_s: for how long nothing was heard from its node's watcher.
    """

    sight: Sight
    node: str
    still_s: float = 0.0
    stopped_s: float = 0.0
    silent_s: float = 0.0


class Verdict(NamedTuple):
    """A rank for which the run cannot go on.

    Args:
        stack: where it was, if that is known.
        at: seconds since the epoch, when it ended; None if it has not, as far as is known.
        earlier: how many ranks of its node had ended before.
    """

    rank: int
    message: str
    cure: str
    stack: str = ""
    at: float | None = None
    earlier: int = 0


def limit_s(min_s: float, predicted_s: float, pace_s: float) -> float:
    """How long a rank may be missed: three steps, as they are predicted or as they are.

    Args:
        min_s: whatever steps take.
        predicted_s: a step, as the plan has it.
        pace_s: the longest last step of any rank.
    """
    return max(min_s, _PACES * max(predicted_s, pace_s))


def judge(seen: Mapping[int, Seen], limit: float, names: Names) -> Verdict | None:
    """The rank that is lost; None while none is.

    Args:
        seen: all ranks that were heard of at least once.
        limit: see :func:`limit_s`.
    """
    stopped = [rank for rank, known in seen.items() if known.stopped_s > 0]
    if stopped and len(stopped) == len(seen):  # suspended as a whole, and will go on
        return None
    late = [rank for rank in stopped if seen[rank].stopped_s >= _LOST * limit]
    if late:
        return _verdict(late[0], seen, names, _stopped(seen[late[0]]), RESUME)
    return _silent(seen, limit, names) or _stuck(seen, limit, names)


def judge_death(rank: int, death: Death) -> Verdict:
    """How a rank ended that did not say so."""
    message, cure, stack = "", RESUME, ""
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
    return Verdict(rank, message, cure, stack, death.at, death.earlier)


def waiting_words(seen: Mapping[int, Seen], names: Names, culprit: int | None = None) -> str:
    """Who waits for whom: of all chains one that leads to the culprit, if any does.

    Without a culprit, and if no rank waits for a message, what each of them does.
    """
    sights = {rank: known.sight for rank, known in seen.items()}
    direct = [rank for rank, sight in sights.items() if sight.peer == culprit]
    if culprit is None:
        direct = [rank for rank, sight in sights.items() if sight.waiting and sight.peer >= 0]
        if not direct:
            return everybody(sights, names)
    waiting = [rank for rank, sight in sights.items() if sight.waiting and rank != culprit]
    first = next(iter(direct or waiting), None)
    return "" if first is None else chain(first, sights, names, culprit)


def _silent(seen: Mapping[int, Seen], limit: float, names: Names) -> Verdict | None:
    """A rank whose node is gone. If others move on, only word of it is lost."""
    lost = [rank for rank, known in seen.items() if known.silent_s >= _LOST * limit]
    heard = [known for rank, known in seen.items() if rank not in lost]
    if not lost or any(known.still_s < limit / 2 for known in heard):
        return None
    known = seen[lost[0]]
    where = f" on {known.node}" if known.node else ""
    message = f"nothing was heard of it{where} for {known.silent_s:.0f} s: the node is gone"
    return _verdict(lost[0], seen, names, message, RESUME)


def _stuck(seen: Mapping[int, Seen], limit: float, names: Names) -> Verdict | None:
    """No rank moves on, though all are alive."""
    still_s = min((known.still_s for known in seen.values()), default=0.0)
    step = max((known.sight.step for known in seen.values()), default=0)
    if step and not all(names.kind(known.sight) for known in seen.values()):  # a slow disk, say
        return None
    busy = [rank for rank, known in seen.items() if not known.sight.waiting]
    if busy and step > 1 and still_s >= PATIENCE * limit:
        message = (
            f"has been in {action(seen[busy[0]].sight, names)} for {still_s:.0f} s, "
            "and no rank has moved on"
        )
        cure = "see what it does there, with py-spy dump say; launch.hang_after allows more time"
        return _verdict(busy[0], seen, names, message, cure)
    if not busy and len(seen) > 1 and still_s >= _CIRCLE * limit:
        message = f"all ranks have waited for each other for {still_s:.0f} s"
        cure = "a message was lost: look at the network; launch.hang_after allows more time"
        return _verdict(min(seen), seen, names, message, cure)
    return None


def _stopped(known: Seen) -> str:
    return f"its process is stopped (SIGSTOP), for {known.stopped_s:.0f} s now"


def _verdict(rank: int, seen: Mapping[int, Seen], names: Names, message: str, cure: str) -> Verdict:
    words = waiting_words(seen, names, rank)
    return Verdict(rank, f"{message}; {words}" if words else message, cure)
