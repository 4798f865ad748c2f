"""What ranks do, in words: who waits for whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pipectl.watch.board import NO_ROW, Sight

_HOPS = 4
"""Ranks of a chain that are named."""


class Names(NamedTuple):
    """What numbers on a board stand for.

    Args:
        kinds: of rows, in capitals, such as ``RECEIVE_WAIT``.
        lanes: what messages hold, such as ``activation``.
    """

    kinds: Sequence[str]
    lanes: Sequence[str]


def action(sight: Sight, names: Names) -> str:
    """What the rank does, as error reports have it: ``FORWARD micro-batch 4``, or its phase."""
    if sight.kind == NO_ROW:
        return sight.phase
    return f"{names.kinds[sight.kind]} micro-batch {sight.micro_batch}"


def awaited(sight: Sight, names: Names) -> str:
    """What a waiting rank waits for."""
    kind = "" if sight.kind == NO_ROW else names.kinds[sight.kind]
    if sight.peer < 0:
        where = f"stage {sight.stage}, {_short(sight, names)}" if kind else sight.phase
        return f"waits for the other ranks ({where})"
    number = "s" if sight.micro_batch < 0 else f" {sight.micro_batch}"
    message = f"{names.lanes[sight.lane]}{number}"
    if kind == "SEND_WAIT":
        return f"waits for rank {sight.peer} to take {message} of stage {sight.stage}"
    return f"waits for {message} of stage {sight.peer_stage} from rank {sight.peer}"


def chain(rank: int, sights: Mapping[int, Sight], names: Names, culprit: int | None = None) -> str:
    """Whom a rank waits for, and for whom that one waits, and so on.

    Ranks count that have just begun to wait for a message, or that it is coming in for.

    Args:
        sights: of the ranks that are heard of.
        culprit: does what it does whomever it waits for; the chain ends there.
    """
    if culprit is not None and culprit in sights:
        sights = {**sights, culprit: sights[culprit]._replace(waiting=False, peer=-1)}
    told, text = [rank], f"rank {rank} {_does(sights[rank], names)}"
    while (sight := sights.get(told[-1])) is not None and sight.peer >= 0:
        if sight.peer in told or len(told) == _HOPS:
            return text + (", and so in a circle" if sight.peer in told else ", and so on")
        told.append(sight.peer)
        other = sights.get(sight.peer)
        text += f", which {_does(other, names) if other else 'was never heard of'}"
    return text


def _does(sight: Sight, names: Names) -> str:
    if sight.waiting or sight.peer >= 0:
        return awaited(sight, names)
    return f"is in {_short(sight, names)}" if sight.kind != NO_ROW else f"is {sight.phase}"


def _short(sight: Sight, names: Names) -> str:
    """``backward 4``."""
    name = names.kinds[sight.kind].lower().replace("_", " ")
    return name if sight.micro_batch < 0 else f"{name} {sight.micro_batch}"
