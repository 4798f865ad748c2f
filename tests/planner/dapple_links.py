"""The links of DAPPLE's planner and of its published evaluation.

Between machines 1 GB/s point to point and 3 GB/s for collectives, within a machine 25 GB/s; every
device as fast as the one the profile was measured on. Source: the constants of the planner
released with Fan et al., "DAPPLE: A Pipelined Data Parallel Approach for Training Large Models",
PPoPP 2021.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipectl.planner.hybrid.links import Message

POINT_TO_POINT = 1e9
"""Bytes per second between machines."""
COLLECTIVE = 3e9
"""Bytes per second of a split, gather or all-reduce over machines."""
WITHIN = 25e9
"""Bytes per second inside a machine."""


class DappleRules:
    """DAPPLE's cost of messages and reductions.

    Args:
        machines: number of devices of every machine.
        memory_bytes: of every device.
    """

    def __init__(self, machines: Sequence[int], memory_bytes: float = float("inf")) -> None:
        self._machine_of = [index for index, size in enumerate(machines) for _ in range(size)]
        self._memory_bytes = memory_bytes

    @property
    def machine_of(self) -> Sequence[int]:
        """The machine of every device."""
        return self._machine_of

    def speed(self, _rank: int) -> float:
        """All devices are equal."""
        return 1.0

    def memory_bytes(self, _rank: int) -> float:
        """All devices are equal."""
        return self._memory_bytes

    def transfer_s(
        self, size_bytes: float, senders: Sequence[int], receivers: Sequence[int]
    ) -> Message:
        """Receivers on several machines: one collective. On one: what comes from elsewhere,
        sender after sender, or a copy inside the machine if nothing does.
        """
        if self._spread(receivers):
            return Message(size_bytes / COLLECTIVE, 0.0)
        home = self._machine_of[receivers[0]]
        remote = sum(self._machine_of[rank] != home for rank in senders)
        if remote:
            return Message(size_bytes / len(senders) * remote / POINT_TO_POINT, 0.0)
        return Message(size_bytes / WITHIN, 0.0)

    def reduce_s(self, size_bytes: float, ranks: Sequence[int]) -> float:
        """A ring; inside a machine half as many rings at once as there are devices."""
        count = len(ranks)
        if count == 1:
            return 0.0
        moved_bytes = 2 * size_bytes * (count - 1) / count
        if self._spread(ranks):
            return moved_bytes / COLLECTIVE
        return moved_bytes / WITHIN / (count // 2)

    def _spread(self, ranks: Sequence[int]) -> bool:
        return len({self._machine_of[rank] for rank in ranks}) > 1
