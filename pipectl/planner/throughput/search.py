"""The throughput planner: the plan with the least time per micro-batch in the steady state."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pipectl.errors import InfeasibleError
from pipectl.planner.graphs.ideals import all_downsets, prefix_downsets
from pipectl.planner.throughput.bisection import Bisection
from pipectl.planner.throughput.cost import stage_memory_bytes, stage_time_s
from pipectl.planner.throughput.decision import Cut, Decision
from pipectl.planner.throughput.model import Workload, workload_of
from pipectl.planner.throughput.request import (
    ThroughputPlan,
    ThroughputRequest,
    ThroughputStage,
)
from pipectl.planner.throughput.tables import tables_of
from pipectl.profile import Profile

MOST_DOWNSETS = 3000


def plan_throughput(
    profile: Profile, request: ThroughputRequest, expired: Callable[[], bool] = lambda: False
) -> ThroughputPlan:
    """The stages, with their replicas, that minimise the time per micro-batch.

    Objective and memory are those of Tarnawski, Narayanan and Phanishayee ("Piper", NeurIPS 2021),
    see ``docs/planner.md``. Over all downsets the result is the least possible; of a graph with
    more than 3,000 the prefixes of several orders are searched.

    Args:
        expired: asked every now and then; once it says yes, the best plan so far is returned.

    Raises:
        InfeasibleError: no plan fits the memory, or some operator needs more devices.
    """
    work = workload_of(profile)
    _check_devices(work, request)
    downsets = all_downsets(work.graph, MOST_DOWNSETS)
    complete = downsets is not None
    if downsets is None:
        downsets = prefix_downsets(work.graph, MOST_DOWNSETS)
    tables, borders = tables_of(work, request)
    decision = Decision(downsets, tables, borders)
    least = Bisection(decision, expired).run()
    if least.cuts is None:
        raise InfeasibleError(
            f"no feasible plan: no split over {request.devices} devices fits into "
            f"{request.memory_limit_bytes} bytes each",
            cure="raise the memory limit, or use more devices",
        )
    stages = tuple(_stage(work, request, cut, int(tables.tensor[cut.row])) for cut in least.cuts)
    value_s = max(stage.time_s for stage in stages)
    exact = complete and least.lower_ticks == least.ticks
    lower_ticks = least.lower_ticks if complete else decision.least_ticks
    lower_bound_s = value_s if exact else min(value_s, (lower_ticks - 1) * tables.tick_s)
    return ThroughputPlan(value_s, lower_bound_s, stages, exact)


def _stage(
    work: Workload, request: ThroughputRequest, cut: Cut, tensor_parallel: int
) -> ThroughputStage:
    """A stage of the answer, with its costs as they are defined."""
    ways = {
        block: (*work.ways[block][tensor_parallel], *work.ways[block][tensor_parallel])[column]
        for block, column in zip(cut.blocks, cut.columns, strict=True)
    }
    recomputed = [block for block in cut.blocks if ways[block].recompute]
    return ThroughputStage(
        nodes=_in_order(work, cut.blocks),
        data_parallel=cut.replicas,
        tensor_parallel=tensor_parallel,
        recomputed=_in_order(work, recomputed),
        in_flight=cut.in_flight,
        time_s=stage_time_s(work, request, ways, tensor_parallel, cut.replicas),
        memory_bytes=stage_memory_bytes(ways.values(), cut.in_flight),
    )


def _in_order(work: Workload, blocks: Iterable[int]) -> tuple[str, ...]:
    """Ids of the operators of some blocks, in the order of the profile."""
    members = {name for block in blocks for name in work.names[block]}
    return tuple(name for name in work.order if name in members)


def _check_devices(work: Workload, request: ThroughputRequest) -> None:
    """Every block can run on some number of devices that there is."""
    for names, ways in zip(work.names, work.ways, strict=True):
        if not ways or min(ways) > request.devices:
            needed = f"at least {min(ways)}" if ways else "different numbers"
            raise InfeasibleError(
                f"no feasible plan: operator {names[0]!r} takes {needed}, of {request.devices}",
                cure="use more devices, or give the operator a variant with fewer",
            )
