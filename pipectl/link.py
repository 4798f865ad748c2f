"""Times of messages by size.

A rank can compute during the time that a message takes on a :class:`Link`. It cannot compute during
its :class:`RowTimes`, which are the rank's own time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Annotated

from pipectl.fields import Positive, Rule

Rows = tuple[tuple[int, float], ...]
BySize = Annotated[
    Rows, Rule(lambda rows: all(a[0] < b[0] for a, b in pairwise(rows)), "of rising sizes")
]
"""(bytes, seconds) by ascending size; empty if nothing was measured."""
Timings = Annotated[
    BySize,
    Rule(
        lambda rows: all(a[1] <= b[1] for a, b in pairwise(rows)),
        "of rising sizes, and times that do not fall",
    ),
]
"""(bytes, seconds) of single messages by ascending size."""


@dataclass(frozen=True)
class Observed:
    """Further measurements of a link, which neither the planner nor the simulator uses.

    Args:
        both_ways: time of a message while one travels the other way, relative to its time alone.
        pairs: number of rank pairs that were measured at the same time; 0 if there was only one.
        at_once: time of a message while all these pairs send, relative to its time alone.
        overlap: (bytes, plain, polled): share of a message's time that is hidden while both ranks
            compute, without and with MPI calls in between; ``launch.progress: auto`` depends on it.
    """

    both_ways: float | None = None
    pairs: int = 0
    at_once: float | None = None
    overlap: tuple[tuple[int, float, float], ...] = ()


@dataclass(frozen=True)
class Link:
    """A connection between two ranks or two nodes.

    Args:
        latency_s: time of the smallest message.
        bandwidth_bytes_per_s: bandwidth of large messages, per direction.
        duplex: whether both directions have full bandwidth at the same time.
        shared: whether all ranks of two nodes share a link; within a node, each pair has its own.
        interface: whether all messages that leave a node, and all that enter it, pass one network
            interface, whatever the other node (both together if not ``duplex``); overrides
            ``shared``. For links between switches, read switch instead of node.
        timings: (bytes, seconds) of single messages, one way, by ascending size: linear between two
            sizes, constant below the smallest, the rest at full bandwidth above the largest. If
            empty, a message takes the latency plus bytes / bandwidth.
        assumed: whether the figures are assumptions rather than measurements.
        observed: further measurements, which set ``duplex``, ``shared`` and ``launch.progress:
            auto``.
    """

    latency_s: float
    bandwidth_bytes_per_s: Positive
    duplex: bool = True
    shared: bool = True
    timings: Timings = ()
    assumed: bool = False
    observed: Observed | None = None
    interface: bool = False

    def transfer_s(self, size_bytes: float) -> float:
        """Return the seconds of one message that has the link to itself."""
        return self.latency_s + self.hold_s(size_bytes)

    def hold_s(self, size_bytes: float) -> float:
        """Return the part of :meth:`transfer_s` in which no other message can use the link.

        The transfer time is linear between measured sizes, constant below them, and follows the
        bandwidth above them.
        """
        if not self.timings:
            return size_bytes / self.bandwidth_bytes_per_s
        above = bisect_left(self.timings, (size_bytes,))
        if above == len(self.timings):
            largest, largest_s = self.timings[-1]
            time_s = largest_s + (size_bytes - largest) / self.bandwidth_bytes_per_s
        else:
            time_s = _interpolate(self.timings, above, size_bytes) if above else self.timings[0][1]
        return max(0.0, time_s - self.latency_s)


def measured_link(timings: Sequence[tuple[int, float]]) -> Link:
    """Make a link from times of messages by size (at least one).

    Disturbances only slow messages down, so a message gets at most the time of any larger one.
    """
    times = list(accumulate((time_s for _, time_s in reversed(timings)), min))[::-1]
    rising = tuple((size, time_s) for (size, _), time_s in zip(timings, times, strict=True))
    (small, small_s), (large, large_s) = rising[0], rising[-1]
    bandwidth = (large - small) / (large_s - small_s) if large_s > small_s else large / large_s
    return Link(small_s, bandwidth, timings=rising)


@dataclass(frozen=True)
class RowTimes:
    """Seconds that program rows take on a rank of one kind of node.

    Args:
        send_start, send_wait: on the sender of a message, by its bytes.
        receive_start, receive_wait: on the receiver; ``receive_wait`` counts from the arrival.
        compute: from the end of a forward or backward to the next row.
        begin: from the start of a step to its first row.
        end: of an update, in addition to the optimizer's time for the parameters.
        agree: from the moment the last rank reaches its update until all ranks continue.
    """

    send_start: BySize = ()
    send_wait: BySize = ()
    receive_start: BySize = ()
    receive_wait: BySize = ()
    compute: float = 0.0
    begin: float = 0.0
    end: float = 0.0
    agree: float = 0.0


FREE_ROWS = RowTimes()
"""Row times if none were measured: zero."""


@lru_cache(maxsize=4096)
def seconds_of(rows: BySize, size_bytes: float) -> float:
    """Return the time for a size, linear between measured sizes and beyond the last two."""
    if not rows:
        return 0.0
    if len(rows) == 1 or size_bytes <= rows[0][0]:
        return rows[0][1]
    above = min(max(1, bisect_left(rows, (size_bytes,))), len(rows) - 1)
    return max(0.0, _interpolate(rows, above, size_bytes))


def _interpolate(rows: Rows, above: int, size_bytes: float) -> float:
    """Interpolate linearly between row ``above`` and the row before it."""
    (low, low_s), (high, high_s) = rows[above - 1 : above + 1]
    return low_s + (high_s - low_s) * (size_bytes - low) / (high - low)
