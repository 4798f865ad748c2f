"""What limits a plan: where the busiest rank's time goes, and which link carries messages longest.

The cost of messages is the difference to a second simulation in which messages take no time:
messages that overlap with computation cost nothing, however long they take.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipectl.cluster import Cluster
from pipectl.lanes import TransferKind
from pipectl.link import Link
from pipectl.plan import Plan
from pipectl.schedule import Channel, channels, is_unflushed, messages
from pipectl.schedule.actions import COMPUTE_KINDS
from pipectl.simulate import Simulation, simulate
from pipectl.simulate.network import Place, way_between
from pipectl.timeline import Timeline

End = int | str | None
_KINDS = {"within": "rank", "nodes": "node", "switches": "switch"}
"""What the shared parts of a route connect."""
SLOWEST_ASSUMED = 4.0, 10.0
"""Factors by which assumed links within and between nodes may be slower: 1 Gbit/s, not 10."""
_MIN_RANGE = 0.05
"""Share of a step; a narrower range is shown as a point."""


@dataclass(frozen=True)
class StepParts:
    """The step of the busiest rank, in seconds that add up to the step.

    Args:
        rank: the busiest rank; the first of several.
        stages: that the rank holds.
        compute_s: forwards and backwards.
        recompute_s: forwards that run again before their backward.
        update_s: optimizer step.
        reduction_s: waits for the sum of the gradients over replicas.
        offload_s: waits for saved values to leave its memory or to come back.
        communication_s: by how much free messages would shorten the step further.
        bubble_s: the rest: waits while the pipeline fills and drains, or for a slower stage.
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
    free_s = simulate(plan, cluster.with_slower_links(0.0)).step_time_s
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
    """Seconds of a rank by kind of event."""
    spent: dict[str, float] = {}
    for event in timeline.of_rank(rank):
        spent[event.kind] = spent.get(event.kind, 0.0) + event.end_s - event.start_s
    return spent


def _of_one_step(spent: dict[str, float], busy_s: float) -> dict[str, float]:
    """The share of one step in the time of several steps that overlap.

    Args:
        busy_s: computing time of the rank in one step.
    """
    all_s = sum(spent.get(kind, 0.0) for kind in COMPUTE_KINDS)
    share = busy_s / all_s if all_s else 0.0
    return {kind: time_s * share for kind, time_s in spent.items()}


@dataclass(frozen=True)
class LinkLoad:
    """The busiest link in one direction, or in both if they share it.

    Args:
        between: what it connects: ``rank``, ``node`` or ``switch``.
        source, target: numbers of ranks or nodes, or names of switches. Without a target, the link
            carries all that leaves the source; without a source, all that enters the target; if
            one link carries both, source and target are the same.
        busy_s: time per step in which it carries messages.
    """

    between: str
    source: End
    target: End
    busy_s: float
    bytes_per_step: float


def busiest_link(plan: Plan, cluster: Cluster) -> LinkLoad | None:
    """The link that carries messages longest; None if there are no messages.

    Messages take the same routes as in the simulator.
    """
    busy: dict[Place, tuple[float, float]] = {}
    links: dict[Place, Link] = {}
    for channel in channels(plan):
        if channel.is_local:
            continue
        ends, sizes = (channel.source_rank, channel.target_rank), list(_sizes(plan, channel))
        moved = sum(number * size for size, number in sizes)
        for key, link in way_between(cluster, plan.node_of_rank, *ends):
            before_s, before = busy.get(key, (0.0, 0.0))
            time_s = sum(number * link.hold_s(size) for size, number in sizes)
            busy[key], links[key] = (before_s + time_s, before + moved), link
    if not busy:
        return None
    key = max(busy, key=busy.__getitem__)
    return LinkLoad(*_ends(key, links[key]), *busy[key])


def _sizes(plan: Plan, channel: Channel) -> Iterator[tuple[float, int]]:
    """(bytes, number per step) of the messages of a channel."""
    if channel.kind is TransferKind.WEIGHT:
        yield channel.size_bytes, 1
        return
    sent = messages(plan, channel, plan.micro_batches)
    if isinstance(sent.start, int):
        parts = np.array(plan.micro_batch_shares)[sent.micro_batches]
    else:
        parts = (sent.stop - sent.start) / plan.micro_batch_size
    for part, number in zip(*np.unique(parts, return_counts=True), strict=True):
        yield channel.size_bytes * float(part), int(number)


def _ends(key: tuple[Any, ...], link: Link) -> tuple[str, End, End]:
    """What a part of a route connects; see :func:`pipectl.simulate.network.way_between`."""
    where, ends, *side = key
    kind = _KINDS[where]
    if side:
        return kind, None if side == ["in"] else ends, None if side == ["out"] else ends
    source, target = ends if link.duplex else sorted(ends, key=str)
    return kind if link.shared else "rank", source, target


def step_range(plan: Plan, cluster: Cluster) -> tuple[float, float] | None:
    """Seconds of a step if messages on assumed links are free, and if they take far longer.

    Returns:
        None if no link is assumed, or if that makes little difference.
    """
    fast_s, slow_s = (
        simulate(plan, cluster.with_slower_assumed_links(*factors)).step_time_s
        for factors in ((0.0, 0.0), SLOWEST_ASSUMED)
    )
    return (fast_s, slow_s) if slow_s > (1 + _MIN_RANGE) * fast_s else None
