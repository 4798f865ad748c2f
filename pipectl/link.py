"""What messages take, by size: on a link between ranks, and of the time of the ranks themselves.

How long a message is on its way is a matter of the :class:`Link`. :class:`RowTimes` are seconds of
a rank's own time, which nothing hides.
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
"""(bytes, seconds), by rising size; empty if nothing was measured."""
Timings = Annotated[
    BySize,
    Rule(
        lambda rows: all(a[1] <= b[1] for a, b in pairwise(rows)),
        "of rising sizes, and times that do not fall",
    ),
]
"""(bytes, seconds) of single messages."""


@dataclass(frozen=True)
class Observed:
    """What measuring found besides; neither planner nor simulator reads it.

    Args:
        both_ways: time of a message while one travels the other way, over its time alone.
        pairs: pairs of ranks that were measured at once; 0 if there was only one.
        at_once: time of a message while all these pairs send, over its time alone.
        overlap: (bytes, plain, polled): the share of a message's time that is hidden while both
            ranks compute, without and with calls of MPI in between; ``launch.progress: auto``
            goes by it.
    """

    both_ways: float | None = None
    pairs: int = 0
    at_once: float | None = None
    overlap: tuple[tuple[int, float, float], ...] = ()


@dataclass(frozen=True)
class Link:
    """A connection between two ranks, or two nodes.

    Args:
        latency_s: of the smallest message.
        bandwidth_bytes_per_s: of large messages, in each direction.
        duplex: whether both directions run at once at full bandwidth.
        shared: between nodes, whether all ranks of two nodes share one link; within a node every
            two ranks have their own.
        interface: between nodes, whether all that a node sends, and all that it receives, passes
            one network interface of this link, whatever the other node; goes before ``shared``.
            Both hold between switches, too, with "switch" for "node".
        timings: of single messages by size; without them a message takes the latency and its bytes
            over the bandwidth.
        assumed: whether the figures are guesses rather than measurements.
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
        """Time of one message that has the link to itself."""
        return self.latency_s + self.hold_s(size_bytes)

    def hold_s(self, size_bytes: float) -> float:
        """The part of this time in which no other message can use the link.

        Linear between measured sizes; a smaller message takes as long as the smallest, a larger
        one passes what exceeds the largest at full bandwidth.
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
    """A link from times of messages by size, at least one.

    Disturbances only ever make a message slower, and a smaller one takes no longer than a larger
    one: if it seems to, it gets the larger one's time.
    """
    times = list(accumulate((time_s for _, time_s in reversed(timings)), min))[::-1]
    rising = tuple((size, time_s) for (size, _), time_s in zip(timings, times, strict=True))
    (small, small_s), (large, large_s) = rising[0], rising[-1]
    bandwidth = (large - small) / (large_s - small_s) if large_s > small_s else large / large_s
    return Link(small_s, bandwidth, timings=rising)


@dataclass(frozen=True)
class RowTimes:
    """Seconds that rows take on a rank of one kind of node.

    Args:
        send_start, send_wait: of a message, for its sender, by bytes.
        receive_start, receive_wait: the same for its receiver; ``receive_wait`` counts from when
            the message is there.
        compute: from the end of a forward or backward to the next row.
        begin: from the begin of a step to its first row.
        end: of an update, besides what the optimizer takes for parameters.
        agree: from when the last rank comes to its update until all go on.
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
"""Taken where nobody measured."""


@lru_cache(maxsize=4096)
def seconds_of(rows: BySize, size_bytes: float) -> float:
    """The time for a size: linear between measured sizes, and on beyond the last two of them."""
    if not rows:
        return 0.0
    if len(rows) == 1 or size_bytes <= rows[0][0]:
        return rows[0][1]
    above = min(max(1, bisect_left(rows, (size_bytes,))), len(rows) - 1)
    return max(0.0, _interpolate(rows, above, size_bytes))


def _interpolate(rows: Rows, above: int, size_bytes: float) -> float:
    """The time for a size on the line through a row and the one before it."""
    (low, low_s), (high, high_s) = rows[above - 1 : above + 1]
    return low_s + (high_s - low_s) * (size_bytes - low) / (high - low)
