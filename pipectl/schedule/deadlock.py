"""Progress: no set of ranks waits for each other, even if MPI buffers no message."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from pipectl.errors import ScheduleError
from pipectl.schedule.actions import Action, Actions, Kind, Program
from pipectl.schedule.channel import Channel

_OTHER_END = {
    int(Kind.SEND_WAIT): int(Kind.RECEIVE_START),
    int(Kind.RECEIVE_WAIT): int(Kind.SEND_START),
    int(Kind.REDUCE_WAIT): int(Kind.REDUCE_START),
}
"""What the other rank must have done before a wait can end."""

Start = tuple[int, int, int]
"""Kind, channel, micro-batch; of a reduction kind, stage, rank."""


def check_progress(
    connections: Sequence[Channel],
    programs: Sequence[Program],
    reducers: Mapping[int, Sequence[int]] | None = None,
) -> None:
    """Execute the transfers of all ranks without time.

    Computations and copies never block, so a rank stops only at a WAIT whose other end has not
    started. If all ranks get to their end in one such execution, they do in every one: what is
    started stays started.

    Args:
        reducers: ranks that sum gradients together, by stage.

    Raises:
        ScheduleError: with the ranks that wait for each other, in a circle, in words.
    """
    transfers = [
        _transfers(program.body, rank, reducers or {}) for rank, program in enumerate(programs)
    ]
    started: set[Start] = set()
    waiting: dict[Start, list[int]] = {}
    able = list(range(len(programs)))
    while able:
        rank = able.pop()
        for start in transfers[rank]:
            awaited = _OTHER_END.get(start[0])
            if awaited is None:
                started.add(start)
                if start in waiting:
                    able += waiting.pop(start)
            elif (awaited, *start[1:]) not in started:
                waiting.setdefault((awaited, *start[1:]), []).append(rank)
                break
    if waiting:
        waits = {rank: start for start, ranks in waiting.items() for rank in ranks}
        raise _deadlock(connections, waits)


def _transfers(rows: Actions, rank: int, reducers: Mapping[int, Sequence[int]]) -> Iterator[Start]:
    """The rows that start a transfer, or wait for its other ends."""
    fields = [Action._fields.index(name) for name in ("kind", "stage", "micro_batch", "channel")]
    chosen = rows.rows[np.isin(rows.column("kind"), [*_OTHER_END, *_OTHER_END.values()])]
    for kind, stage, micro_batch, channel in chosen[:, fields].tolist():
        if kind == Kind.REDUCE_WAIT:
            yield from ((kind, stage, other) for other in reducers[stage])
        elif kind == Kind.REDUCE_START:
            yield kind, stage, rank
        else:
            yield kind, channel, micro_batch


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
    if start[0] == Kind.REDUCE_START:
        return start[2]
    channel = connections[start[1]]
    return channel.source_rank if start[0] == Kind.SEND_START else channel.target_rank


def _sentence(connections: Sequence[Channel], rank: int, start: Start) -> str:
    kind, index, micro_batch = start
    other = _awaited_rank(connections, start)
    if kind == Kind.REDUCE_START:
        return f"rank {rank} waits for rank {other} to sum the gradients of stage {index}"
    what = f"the {connections[index]}"
    if micro_batch >= 0:
        what += f", micro-batch {micro_batch}"
    if kind == Kind.SEND_START:
        return f"rank {rank} waits to receive {what}, from rank {other}"
    return f"rank {rank} waits for rank {other} to receive {what}"
