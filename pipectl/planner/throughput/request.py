"""What is asked of the throughput planner, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from pipectl.errors import InvalidInputError


@dataclass(frozen=True)
class ThroughputRequest:
    """Equal devices that train one model.

    Args:
        devices: how many there are; a plan may leave some idle.
        memory_limit_bytes: of each device; None for no limit.
        bandwidth_bytes_per_s: at which each device sends and receives; None where that is free.
        micro_batches: of one optimizer step, over all replicas. The replicas of a stage take equal
            numbers of them, so a stage has a divisor of it as its number of replicas.

    Raises:
        InvalidInputError: a figure that is out of range.
    """

    devices: int
    memory_limit_bytes: int | None = None
    bandwidth_bytes_per_s: float | None = None
    micro_batches: int = 1

    def __post_init__(self) -> None:
        for name in ("devices", "micro_batches"):
            if getattr(self, name) < 1:
                raise InvalidInputError(
                    f"{name}: {getattr(self, name)} must be at least 1", cure="give 1 or more"
                )
        rate = self.bandwidth_bytes_per_s
        if rate is not None and not (isfinite(rate) and rate > 0):
            raise InvalidInputError(
                f"bandwidth_bytes_per_s: {rate} must be above 0",
                cure="leave it out where transfers take no time",
            )

    @property
    def degrees(self) -> list[int]:
        """The numbers of replicas a stage may have, ascending."""
        most = min(self.devices, self.micro_batches)
        return [count for count in range(1, most + 1) if self.micro_batches % count == 0]

    def seconds(self, size_bytes: float) -> float:
        """How long a device sends or receives so much."""
        rate = self.bandwidth_bytes_per_s
        return 0.0 if rate is None else size_bytes / rate


@dataclass(frozen=True)
class ThroughputStage:
    """Consecutive operators on ``data_parallel`` replicas of ``tensor_parallel`` devices each.

    Args:
        nodes: ids of the operators, in graph order.
        recomputed: ids of those whose saved values are computed again in the backward.
        in_flight: micro-batches whose saved values a replica holds at once.
        time_s: of the stage per micro-batch.
        memory_bytes: of each of its devices.
    """

    nodes: tuple[str, ...]
    data_parallel: int
    tensor_parallel: int
    recomputed: tuple[str, ...]
    in_flight: int
    time_s: float
    memory_bytes: int

    @property
    def devices(self) -> int:
        """Devices of all its replicas."""
        return self.data_parallel * self.tensor_parallel


@dataclass(frozen=True)
class ThroughputPlan:
    """Stages in pipeline order.

    Args:
        value_s: time per micro-batch in the steady state: of the slowest stage.
        lower_bound_s: no plan takes less.
        exact: whether ``value_s`` is proven to be the least possible (to one part in 10^12).
    """

    value_s: float
    lower_bound_s: float
    stages: tuple[ThroughputStage, ...]
    exact: bool

    @property
    def devices(self) -> int:
        """Devices that the plan uses."""
        return sum(stage.devices for stage in self.stages)
