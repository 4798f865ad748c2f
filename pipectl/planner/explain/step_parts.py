"""Where the time of a predicted step goes, and which rank the others wait for.

What messages cost is found by simulating the plan once more with messages that take no time: what
is hidden behind computation costs nothing, however long it takes.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipectl.cluster import Cluster
from pipectl.plan import Plan
from pipectl.planner.explain.what_if import with_slower_links
from pipectl.schedule import is_unflushed
from pipectl.schedule.actions import COMPUTE_KINDS
from pipectl.simulate import Simulation, simulate
from pipectl.timeline import Timeline


@dataclass(frozen=True)
class StepParts:
    """The step of the busiest rank, in seconds that add up to the step.

    Args:
        rank: that computes longest; the first of several.
        stages: it holds.
        compute_s: forwards and backwards.
        recompute_s: forwards that run once more before their backward.
        update_s: optimizer step.
        reduction_s: it waits for the sum of the gradients over replicas.
        offload_s: it waits for saved values to leave its memory or to come back.
        communication_s: by how much free messages would shorten the step besides.
        bubble_s: the rest: the rank waits while the pipeline fills and drains, or for a stage
            that is slower at the time.
    """

    rank: int
    stages: tuple[int, ...]
    step_s: float
    compute_s: float
    recompute_s: float
    update_s: float
    reduction_s: float
    offload_s: float
    communication_s: float
    bubble_s: float

    @property
    def busy_s(self) -> float:
        """Time in which the rank computes."""
        return self.compute_s + self.recompute_s + self.update_s


def step_parts(plan: Plan, cluster: Cluster, simulation: Simulation) -> StepParts:
    """How the busiest rank spends a step.

    Args:
        simulation: of the plan on the cluster.
    """
    rank = max(range(plan.ranks), key=lambda each: (simulation.utilisation[each], -each))
    spent, step_s = _spent(simulation.timeline, rank), simulation.step_time_s
    if is_unflushed(plan):
        spent = _of_one_step(spent, simulation.utilisation[rank] * step_s)
    computing_s = sum(spent.get(kind, 0.0) for kind in COMPUTE_KINDS)
    update_s, recompute_s = spent.get("update", 0.0), spent.get("recompute", 0.0)
    reduction_s = spent.get("reduce_wait", 0.0)
    offload_s = spent.get("offload_wait", 0.0) + spent.get("fetch_wait", 0.0)
    idle_s = max(0.0, step_s - computing_s - reduction_s - offload_s)
    free_s = simulate(plan, with_slower_links(cluster, 0.0)).step_time_s
    communication_s = min(idle_s, max(0.0, step_s - free_s - reduction_s))
    return StepParts(
        rank=rank,
        stages=plan.stages_of_rank(rank),
        step_s=step_s,
        compute_s=computing_s - update_s - recompute_s,
        recompute_s=recompute_s,
        update_s=update_s,
        reduction_s=reduction_s,
        offload_s=offload_s,
        communication_s=communication_s,
        bubble_s=idle_s - communication_s,
    )


def _spent(timeline: Timeline, rank: int) -> dict[str, float]:
    """Time of a rank by kind of event."""
    spent: dict[str, float] = {}
    for event in timeline.of_rank(rank):
        spent[event.kind] = spent.get(event.kind, 0.0) + event.end_s - event.start_s
    return spent


def _of_one_step(spent: dict[str, float], busy_s: float) -> dict[str, float]:
    """Its share of what was spent in several that overlap.

    Args:
        busy_s: that the rank computes in one.
    """
    all_s = sum(spent.get(kind, 0.0) for kind in COMPUTE_KINDS)
    share = busy_s / all_s if all_s else 0.0
    return {kind: time_s * share for kind, time_s in spent.items()}
