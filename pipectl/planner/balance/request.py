"""What the balance is asked for, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass

TOLERANCE = 1e-11
"""Loads that differ relatively by less count as equal: that much may be lost in sums."""


@dataclass(frozen=True)
class BalanceRequest:
    """The devices to share a graph among.

    Args:
        devices: at most, one per stage.
        memory_limit_bytes: of a device; None for no limit.
        bandwidth_bytes_per_s: of a link, for values without a ``transfer_s`` of their own, which
            cross it once on their way and once as a gradient; None if moving them costs nothing.
        communication_scale: factor of every ``transfer_s``.
    """

    devices: int
    memory_limit_bytes: float | None = None
    bandwidth_bytes_per_s: float | None = None
    communication_scale: float = 1.0


@dataclass(frozen=True)
class BalancedStage:
    """One stage of the answer.

    Args:
        nodes: ids of its operators, in the profile's order.
        load_s: its compute and its transfers.
    """

    nodes: tuple[str, ...]
    load_s: float


@dataclass(frozen=True)
class Balance:
    """Stages with the smallest largest load that was found.

    Args:
        value_s: largest load of a stage.
        lower_bound_s: no admissible partition is below it.
        stages: in the order of the pipeline; none is empty.
        downsets: of the graph that were looked at, at most.
    """

    value_s: float
    lower_bound_s: float
    stages: tuple[BalancedStage, ...]
    downsets: int

    @property
    def exact(self) -> bool:
        """Whether the value is proven to be the smallest."""
        return self.lower_bound_s >= self.value_s * (1 - TOLERANCE)

    @property
    def gap(self) -> float:
        """How far the value may be above the smallest one, relative to the bound."""
        return self.value_s / self.lower_bound_s - 1 if self.lower_bound_s else 0.0
