"""Putting a plan together: what all plans of one request have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil

from pipectl.cluster import Cluster
from pipectl.plan import Plan, Stage, Transfer
from pipectl.planner.request import Order, PlanRequest
from pipectl.profile import Profile


def new_plan(
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
    stages: Iterable[Stage],
    transfers: Sequence[Transfer],
    order: Order,
    size: int,
    assumptions: Sequence[str],
) -> Plan:
    """A plan without replicas and without prediction.

    Args:
        size: samples of a micro-batch.
    """
    schedule, warm_up = order
    count = ceil(request.batch_size / size)
    return Plan(
        name=request.name,
        fingerprint=profile.fingerprint,
        schedule=schedule,
        warm_up=warm_up,
        batch_size=request.batch_size,
        micro_batch_size=size,
        micro_batches=count,
        stages=tuple(stages),
        transfers=tuple(transfers),
        node_of_rank=cluster.node_of_rank,
        memory_limit_bytes=request.memory_limit_bytes,
        key=request.key,
        offload_to=request.offload_to,
        assumptions=(*assumptions, *other_count(request, count, size)),
    )


def other_count(request: PlanRequest, count: int, size: int) -> tuple[str, ...]:
    """Why there are not as many micro-batches as were asked for."""
    if request.micro_batches in (None, count):
        return ()
    copies = request.replicas or 1
    equally = f" and be shared evenly by {copies} replicas" if copies > 1 else ""
    return (
        f"{request.micro_batches} micro-batches of {request.batch_size} samples cannot be of one "
        f"size with a smaller last one{equally}: {count} of {size} samples instead",
    )
