"""Progress: no set of ranks waits for each other, even if MPI buffers no message."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipectl.errors import ScheduleError
from pipectl.schedule.actions import Action, Actions, Kind, Program
from pipectl.schedule.channel import Channel

_OTHER_END = {
    int(Kind.SEND_WAIT): int(Kind.RECEIVE_START),
    int(Kind.RECEIVE_WAIT): int(Kind.SEND_START),
}
"""What the other rank must have done before a wait can end."""

Start = tuple[int, int, int]
"""Kind, channel, micro-batch."""


def check_progress(connections: Sequence[Channel], programs: Sequence[Program]) -> None:
    """Execute the transfers of all ranks without time.

    Computations never block, so a rank stops only at a WAIT whose other end has not started. If
    all ranks get to their end in one such execution, they do in every one: what is started stays
    started.

    Raises:
        ScheduleError: with the ranks that wait for each other, in a circle, in words.
    """
    transfers = [iter(_transfers(program.body)) for program in programs]
    started: set[Start] = set()
    waiting: dict[Start, int] = {}
    able = list(range(len(programs)))
    while able:
        rank = able.pop()
        for start in transfers[rank]:
            awaited = _OTHER_END.get(start[0])
            if awaited is None:
                started.add(start)
                if start in waiting:
                    able.append(waiting.pop(start))
            elif (awaited, *start[1:]) not in started:
                waiting[awaited, *start[1:]] = rank
                break
    if waiting:
        raise _deadlock(connections, {rank: start for start, rank in waiting.items()})


def _transfers(rows: Actions) -> list[Start]:
    """The rows that start or end a message."""
    fields = [Action._fields.index(name) for name in ("kind", "channel", "micro_batch")]
    chosen = rows.rows[np.isin(rows.column("kind"), [*_OTHER_END, *_OTHER_END.values()])]
    found: list[Start] = [tuple(row) for row in chosen[:, fields].tolist()]
    return found


def _deadlock(connections: Sequence[Channel], waits: dict[int, Start]) -> ScheduleError:
    path = [min(waits)]
    while path[-1] in waits and path[-1] not in path[:-1]:
        path.append(_awaited_rank(connections, waits[path[-1]]))
    circle = path[path.index(path[-1]) : -1] or path[:-1]
    sentences = [_sentence(connections, rank, waits[rank]) for rank in circle]
    return ScheduleError(
        f"rank programs: deadlock: {'; '.join(sentences)}",
        cure="choose a warm_up that does not rise from a stage to the next",
    )


def _awaited_rank(connections: Sequence[Channel], start: Start) -> int:
    channel = connections[start[1]]
    return channel.source_rank if start[0] == Kind.SEND_START else channel.target_rank


def _sentence(connections: Sequence[Channel], rank: int, start: Start) -> str:
    kind, index, micro_batch = start
    what = f"the {connections[index]}, micro-batch {micro_batch}"
    other = _awaited_rank(connections, start)
    if kind == Kind.SEND_START:
        return f"rank {rank} waits to receive {what}, from rank {other}"
    return f"rank {rank} waits for rank {other} to receive {what}"
