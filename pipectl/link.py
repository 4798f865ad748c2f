"""A connection between ranks: latency, bandwidth, and how long messages take by size."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Annotated

from pipectl.fields import Positive, Rule


def _rises(rows: Sequence[tuple[int, float]]) -> bool:
    return all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(rows))


Timings = Annotated[
    tuple[tuple[int, float], ...],
    Rule(_rises, "of rising sizes, and times that do not fall"),
]
"""(bytes, seconds) of single messages, by rising size."""


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
        return max(0.0, self._measured_s(size_bytes) - self.latency_s)

    def _measured_s(self, size_bytes: float) -> float:
        above = bisect_left(self.timings, (size_bytes,))
        if above == 0:
            return self.timings[0][1]
        low, low_s = self.timings[above - 1]
        if above == len(self.timings):
            return low_s + (size_bytes - low) / self.bandwidth_bytes_per_s
        high, high_s = self.timings[above]
        return low_s + (high_s - low_s) * (size_bytes - low) / (high - low)


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
