"""The steady state of very many devices: stages, replicas, tensor parallelism, recomputation."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from pipectl.errors import InfeasibleError, OutOfTimeError
from pipectl.jobs.deadline import Deadline
from pipectl.jobs.subject import Subject
from pipectl.jobs.wishes import Objective
from pipectl.planner.throughput import (
    ThroughputPlan,
    ThroughputRequest,
    ThroughputStage,
    plan_throughput,
)
from pipectl.units import format_bytes


@dataclass(frozen=True)
class Throughput:
    """The stages with the least time per micro-batch.

    Args:
        micro_batch_size: samples.
        assumptions: what neither profile nor cluster says.
    """

    request: ThroughputRequest
    plan: ThroughputPlan
    micro_batch_size: int
    planning_s: float
    assumptions: tuple[str, ...]

    @property
    def samples_per_s(self) -> float:
        """Of the steady state."""
        return self.micro_batch_size / self.plan.value_s if self.plan.value_s else 0.0

    @property
    def gap(self) -> float:
        """How far the value may be above the least one, relative to the bound."""
        bound_s = self.plan.lower_bound_s
        return self.plan.value_s / bound_s - 1 if bound_s else 0.0

    @property
    def placed(self) -> Iterator[tuple[ThroughputStage, range]]:
        """Stages with the numbers of their devices, one stage after another."""
        counts = [stage.devices for stage in self.plan.stages]
        starts = accumulate(counts, initial=0)
        for stage, start in zip(self.plan.stages, starts, strict=False):
            yield stage, range(start, start + stage.devices)

    def to_json(self) -> dict[str, Any]:
        """The documented object."""
        return {
            "objective": Objective.THROUGHPUT,
            "value_s": self.plan.value_s,
            "lower_bound_s": self.plan.lower_bound_s,
            "gap": self.gap,
            "exact": self.plan.exact,
            "planning_s": self.planning_s,
            "samples_per_s": self.samples_per_s,
            "accelerators": self.request.devices,
            "memory_limit_bytes": self.request.memory_limit_bytes,
            "bandwidth_bytes_per_s": self.request.bandwidth_bytes_per_s,
            "micro_batches": self.request.micro_batches,
            "micro_batch_size": self.micro_batch_size,
            "stages": [
                {
                    "nodes": list(stage.nodes),
                    "replicas": stage.data_parallel,
                    "tensor_parallel": stage.tensor_parallel,
                    "recomputed": list(stage.recomputed),
                    "devices": list(devices),
                    "load_s": stage.time_s,
                    "in_flight": stage.in_flight,
                    "memory_bytes": stage.memory_bytes,
                }
                for stage, devices in self.placed
            ],
            "assumptions": list(self.assumptions),
        }


def find_throughput(subject: Subject, deadline: Deadline) -> Throughput:
    """Search.

    Args:
        subject: as planners of whole steps take it.

    Raises:
        InfeasibleError: nothing fits into the memory.
        OutOfTimeError: planning was ended before anything that fits was found.
    """
    request = _request(subject)
    began = time.perf_counter()
    deadline.restart()
    try:
        plan = plan_throughput(subject.profile, request, deadline)
    except InfeasibleError as error:
        if deadline.cut_short:
            raise OutOfTimeError(
                "planning was ended before any plan was found", cure="allow more time"
            ) from None
        raise _nothing(error, subject, request) from None
    planning_s = time.perf_counter() - began
    profile = subject.profile
    assumptions = (*profile.assumptions, *subject.cluster.assumptions)
    return Throughput(request, plan, profile.micro_batch_size, planning_s, assumptions)


def _request(subject: Subject) -> ThroughputRequest:
    cluster, request, profile = subject.cluster, subject.request, subject.profile
    own = -(-request.batch_size // profile.micro_batch_size)
    return ThroughputRequest(
        devices=cluster.ranks,
        memory_limit_bytes=request.memory_limit_bytes,
        bandwidth_bytes_per_s=cluster.widest_link.bandwidth_bytes_per_s,
        micro_batches=request.micro_batches or own,
    )


def _nothing(
    error: InfeasibleError, subject: Subject, request: ThroughputRequest
) -> InfeasibleError:
    """The same, in the user's words."""
    limit, asked = request.memory_limit_bytes, subject.request
    if limit is None or " operator " in error.message:
        return error
    return InfeasibleError(
        f"no feasible plan: no stages on {request.devices} devices of {format_bytes(limit)} each",
        cure=f"give {asked.named('ranks')}, or a larger {asked.named('memory_limit')}",
    )
