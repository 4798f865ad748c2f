"""What stages with replicas pay for their messages and for the sum of their gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from pipectl.cluster import Cluster
from pipectl.link import Link
from pipectl.simulate.reduction import reduction_s


class Message(NamedTuple):
    """What one micro-batch takes over one border.

    Args:
        hold_s: until the next micro-batch can follow.
        late_s: from then to the arrival.
    """

    hold_s: float
    late_s: float


class LinkRules(Protocol):
    """How long messages and reductions take among the ranks of a cluster."""

    @property
    def machine_of(self) -> Sequence[int]:
        """The machine of every rank; ranks are numbered machine by machine."""
        ...

    def speed(self, rank: int) -> float:
        """Of a rank's device, relative to the one the profile was measured on."""
        ...

    def memory_bytes(self, rank: int) -> float:
        """Of a rank; infinite where unknown."""
        ...

    def transfer_s(
        self, size_bytes: float, senders: Sequence[int], receivers: Sequence[int]
    ) -> Message:
        """A value of one micro-batch, which lies in parts on the senders, to the receivers."""
        ...

    def reduce_s(self, size_bytes: float, ranks: Sequence[int]) -> float:
        """The sum of gradients of ``size_bytes`` on each of the ranks."""
        ...


class ClusterRules:
    """The rules of a described cluster: what the event simulator does, for one border alone.

    Sender i of n holds samples [i/n, (i+1)/n) of the micro-batch, receivers likewise; what two of
    them have in common is one message. Messages on one link follow each other, those on different
    links travel at once. Sums of gradients take what they take in the simulator.

    Args:
        cluster: ranks, devices and links.
        limit_bytes: memory of any rank, if less than its device has.
        taken_bytes: what every process needs of it.
    """

    def __init__(
        self, cluster: Cluster, limit_bytes: float = float("inf"), taken_bytes: float = 0.0
    ) -> None:
        self._cluster = cluster
        self._limit_bytes = limit_bytes
        self._taken_bytes = taken_bytes

    @property
    def machine_of(self) -> Sequence[int]:
        """The node of every rank."""
        return self._cluster.node_of_rank

    def speed(self, rank: int) -> float:
        """Of a rank's device."""
        return self._cluster.device(rank).speed

    def memory_bytes(self, rank: int) -> float:
        """The smaller of the device's memory and the limit, less what a process takes."""
        return max(0.0, self._cluster.memory_of(rank, self._limit_bytes) - self._taken_bytes)

    def transfer_s(
        self, size_bytes: float, senders: Sequence[int], receivers: Sequence[int]
    ) -> Message:
        """The busiest link's time, and the largest latency."""
        busy: dict[tuple[int, ...], float] = {}
        late_s = 0.0
        for sender, receiver, share in shares(senders, receivers):
            if sender != receiver:
                link, key = self._link(sender, receiver)
                busy[key] = busy.get(key, 0.0) + link.hold_s(size_bytes * share)
                late_s = max(late_s, link.latency_s)
        return Message(max(busy.values(), default=0.0), late_s)

    def reduce_s(self, size_bytes: float, ranks: Sequence[int]) -> float:
        """As the simulator prices it."""
        return reduction_s(self._cluster, self.machine_of, ranks, size_bytes)

    def _link(self, sender: int, receiver: int) -> tuple[Link, tuple[int, ...]]:
        """The link between two ranks and what tells it from others."""
        nodes = self.machine_of[sender], self.machine_of[receiver]
        link = self._cluster.link(sender, receiver)
        return link, nodes if nodes[0] != nodes[1] and link.shared else (sender, receiver, 0)


def shares(senders: Sequence[int], receivers: Sequence[int]) -> Iterator[tuple[int, int, float]]:
    """What each sender has for each receiver, as share of the micro-batch."""
    left, right = len(senders), len(receivers)
    sent = received = 0
    done = 0
    while sent < left and received < right:
        until = min((sent + 1) * right, (received + 1) * left)
        yield senders[sent], receivers[received], (until - done) / (left * right)
        done = until
        sent += until == (sent + 1) * right
        received += until == (received + 1) * left
