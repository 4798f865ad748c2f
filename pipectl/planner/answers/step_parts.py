"""Where the time of a predicted step goes, and which stage or link the others wait for.

What messages cost is found by simulating the plan once more with messages that take no time: what
is hidden behind computation costs nothing, however long it takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipectl.cluster import Cluster
from pipectl.link import Link
from pipectl.plan import Plan
from pipectl.planner.machines.other_clusters import with_slower_links
from pipectl.schedule import is_unflushed
from pipectl.simulate import COMPUTE_KINDS, Simulation, simulate
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


@dataclass(frozen=True)
class LinkLoad:
    """The busiest connection in one direction.

    Args:
        source, target: two nodes if ``between_nodes``, else two ranks.
        busy_s: time of a step in which it carries messages.
    """

    between_nodes: bool
    source: int
    target: int
    busy_s: float
    bytes_per_step: float


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
    share = busy_s / sum(spent.get(kind, 0.0) for kind in COMPUTE_KINDS)
    return {kind: time_s * share for kind, time_s in spent.items()}


def busiest_link(plan: Plan, cluster: Cluster) -> LinkLoad | None:
    """The connection that carries messages longest; None if there is no message."""
    busy: dict[tuple[bool, int, int], tuple[float, float]] = {}
    for key, link, size in _messages(plan, cluster):
        time_s = sum(link.hold_s(size * share) for share in plan.micro_batch_shares)
        before_s, before = busy.get(key, (0.0, 0.0))
        busy[key] = before_s + time_s, before + size * sum(plan.micro_batch_shares)
    if not busy:
        return None
    key = max(busy, key=lambda each: (busy[each][0], each))
    return LinkLoad(*key, *busy[key])


def _messages(plan: Plan, cluster: Cluster) -> Iterator[tuple[tuple[bool, int, int], Link, float]]:
    """(connection, link, bytes of a full micro-batch) of every message between two ranks.

    A stage with several ranks splits its messages evenly over the pairs it forms.
    """
    for item in plan.transfers:
        sources, targets = plan.stages[item.source].ranks, plan.stages[item.target].ranks
        pairs = [(source, target) for source in sources for target in targets]
        for source, target in pairs:
            if source != target:
                key = _connection(cluster, source, target)
                yield key, cluster.link(source, target), item.size_bytes / len(pairs)


def _connection(cluster: Cluster, source: int, target: int) -> tuple[bool, int, int]:
    """What two ranks share a link with: all ranks of their nodes, or nobody."""
    link = cluster.link(source, target)
    first, second = cluster.node_of_rank[source], cluster.node_of_rank[target]
    shared = first != second and link.shared
    if not shared:
        first, second = source, target
    if not link.duplex:
        first, second = sorted((first, second))
    return shared, first, second
