"""Progress: no set of ranks waits for each other, even if MPI buffers no message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from pipectl.errors import ScheduleError
from pipectl.schedule.actions import Actions, Kind, Program
from pipectl.schedule.channel import Channel

_STARTS = (Kind.SEND_START, Kind.RECEIVE_START, Kind.REDUCE_START)
_WAITS = (Kind.RECEIVE_WAIT, Kind.SEND_WAIT, Kind.REDUCE_WAIT)
"""Each waits for what the other rank must have done: the start in the same place of ``_STARTS``."""

Table = npt.NDArray[np.int64]
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
    from pipectl.schedule.progress_kernel import run  # a compiler: only who validates needs it

    numbers = _Numbers(connections, programs, reducers or {})
    rows = [numbers.of(program.body) for program in programs]
    ends = np.cumsum([len(part) for part in rows])
    position = np.concatenate([[0], ends[:-1]])
    started = np.zeros(numbers.first_sum + len(numbers.sums), dtype=np.int64)
    everything = np.concatenate(rows)
    run(everything, position, ends, started, numbers.first_sum, numbers.sums)
    stopped = np.flatnonzero(position < ends).tolist()
    if stopped:
        begun = {r: everything[ends[r] - len(rows[r]) : position[r]] for r in stopped}
        awaited = {r: ~int(everything[position[r]]) for r in stopped}
        waits = {r: numbers.start(number, begun) for r, number in awaited.items()}
        raise _deadlock(connections, waits)


class _Numbers:
    """A number for everything that is started.

    Messages come by channel, then micro-batch (-1 first), the send before the receive; behind them
    the sums by stage.

    Attributes:
        first_sum: number of the first of these.
        sums: by stage, how many ranks start it.
    """

    def __init__(
        self,
        connections: Sequence[Channel],
        programs: Sequence[Program],
        reducers: Mapping[int, Sequence[int]],
    ) -> None:
        latest = [program.body.column("micro_batch").max(initial=-1) for program in programs]
        self._width = 2 * (2 + int(max(latest, default=-1)))
        self._reducers = reducers
        self.first_sum = len(connections) * self._width
        self.sums = np.zeros(1 + max(reducers, default=-1), dtype=np.int64)
        for stage, ranks in reducers.items():
            self.sums[stage] = len(ranks)

    def of(self, actions: Actions) -> Table:
        """What each row starts, and ``~`` of what it waits for; the other rows are left out."""
        kind = actions.column("kind")
        chosen = np.flatnonzero(_IS_TRANSFER[kind])
        kind = kind[chosen]
        channel, index = (actions.column(n)[chosen] for n in ("channel", "micro_batch"))
        found = channel.astype(np.int64) * self._width + 2 * (index + 1) + _RECEIVES[kind]
        sums = np.flatnonzero(_SUMS[kind])
        found[sums] = self.first_sum + actions.column("stage")[chosen][sums]
        numbers: Table = np.where(_IS_WAIT[kind], ~found, found)
        return numbers

    def start(self, number: int, begun: Mapping[int, Table]) -> Start:
        """What a number means.

        Args:
            begun: rows that stopped ranks have executed.
        """
        if number < self.first_sum:
            channel, place = divmod(number, self._width)
            return int(_STARTS[place % 2]), channel, place // 2 - 1
        stage = number - self.first_sum
        late = (r for r in self._reducers[stage] if r in begun and number not in begun[r])
        return int(Kind.REDUCE_START), stage, next(late)


def _marks(kinds: Sequence[Kind]) -> npt.NDArray[np.bool_]:
    found = np.zeros(len(Kind), dtype=bool)
    found[list(kinds)] = True
    return found


_IS_TRANSFER, _IS_WAIT = _marks([*_STARTS, *_WAITS]), _marks(_WAITS)
_RECEIVES = _marks([Kind.RECEIVE_START, Kind.SEND_WAIT])
_SUMS = _marks([Kind.REDUCE_START, Kind.REDUCE_WAIT])


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
