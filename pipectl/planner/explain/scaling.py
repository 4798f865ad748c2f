"""Strong scaling: the best plan of the same step on different numbers of nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypedDict

from pipectl.cluster import MAX_RANKS, TOO_MANY_RANKS, Cluster
from pipectl.errors import InfeasibleError, OutOfTimeError
from pipectl.plan import Plan
from pipectl.planner.request import Planner, PlanRequest
from pipectl.profile import Profile

PAYS = 0.5
"""More nodes pay if they give at least this share of the ideal speed-up."""
_STEPS = 1000
_SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True)
class Count:
    """The result for one number of nodes.

    Args:
        plan: None if nothing fits.
        reason: why nothing fits; empty if a plan does.
    """

    nodes: int
    ranks: int
    plan: Plan | None
    reason: str = ""

    @property
    def step_s(self) -> float | None:
        """Predicted time of one optimizer step."""
        return None if self.plan is None else self.plan.predicted_step_s

    @property
    def samples_per_s(self) -> float | None:
        """Throughput."""
        return None if self.plan is None or not self.step_s else self.plan.batch_size / self.step_s

    @property
    def node_hours(self) -> float | None:
        """Node-hours that 1000 optimizer steps cost."""
        step_s = self.step_s
        return None if step_s is None else self.nodes * step_s * _STEPS / _SECONDS_PER_HOUR


class CountJson(TypedDict):
    """The best plan for one number of nodes; null if nothing fits.

    Args:
        nodes, ranks: numbers of nodes and ranks.
        feasible, reason: whether a plan fits, and why none does.
        stages, micro_batches, schedule, step_time_s, bubble: of the plan.
        samples_per_s: its throughput.
        efficiency: speed-up per node over the first count that fits.
        node_hours_per_1000_steps: cost of 1000 steps.
    """

    nodes: int
    ranks: int
    feasible: bool
    reason: str | None
    stages: int | None
    micro_batches: int | None
    schedule: str | None
    step_time_s: float | None
    samples_per_s: float | None
    efficiency: float | None
    bubble: float | None
    node_hours_per_1000_steps: float | None


class ScalingJson(TypedDict):
    """Plans for several numbers of nodes.

    Args:
        objective: ``step-time``.
        pays_until_nodes: number of nodes until which more nodes pay; null if nothing fits.
        counts: the result for each number.
    """

    objective: str
    pays_until_nodes: int | None
    counts: list[CountJson]


@dataclass(frozen=True)
class Scaling:
    """All counts, by ascending number of nodes."""

    counts: tuple[Count, ...]

    @property
    def base(self) -> Count | None:
        """The reference of efficiency: the fewest nodes on which the model fits."""
        return next((count for count in self.counts if count.plan is not None), None)

    def efficiency(self, count: Count) -> float | None:
        """Speed-up over :attr:`base` divided by the ratio of nodes; None if nothing fits."""
        base = self.base
        if base is None or base.step_s is None or not count.step_s:
            return None
        return base.step_s * base.nodes / (count.step_s * count.nodes)

    @property
    def pays_until(self) -> Count | None:
        """The last count up to which all additions of nodes pay (:data:`PAYS`)."""
        last = self.base
        for before, after in pairwise(count for count in self.counts if count.plan is not None):
            if _gain(before, after) < PAYS:
                break
            last = after
        return last

    def to_json(self) -> ScalingJson:
        """The documented object."""
        pays = self.pays_until
        return {
            "objective": "step-time",
            "pays_until_nodes": None if pays is None else pays.nodes,
            "counts": [self._count_json(count) for count in self.counts],
        }

    def _count_json(self, count: Count) -> CountJson:
        plan = count.plan
        return {
            "nodes": count.nodes,
            "ranks": count.ranks,
            "feasible": plan is not None,
            "reason": count.reason or None,
            "stages": None if plan is None else len(plan.stages),
            "micro_batches": None if plan is None else plan.micro_batches,
            "schedule": None if plan is None else plan.schedule,
            "step_time_s": count.step_s,
            "samples_per_s": count.samples_per_s,
            "efficiency": self.efficiency(count),
            "bubble": None if plan is None or plan.prediction is None else plan.prediction.bubble,
            "node_hours_per_1000_steps": count.node_hours,
        }


def scaling(
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
    nodes: Sequence[int],
    planner: Planner,
    counted: Callable[[int], None] = lambda _nodes: None,
) -> Scaling:
    """Plan the same step for every number of nodes.

    Args:
        cluster: its first nodes are used; if it has too few, its last is repeated.
        nodes: at least 1 each, in any order.
        counted: called with each number before it is planned.
    """

    counts = []
    for number in sorted(set(nodes)):
        counted(number)
        machines = cluster.with_nodes(number)
        plan, reason = None, ""
        try:
            if machines.ranks > MAX_RANKS:
                raise InfeasibleError(TOO_MANY_RANKS.format(machines.ranks))
            plan = planner(profile, machines, request)
        except (InfeasibleError, OutOfTimeError) as error:
            reason = error.message
        counts.append(Count(number, machines.ranks, plan, reason))
    return Scaling(tuple(counts))


def _gain(before: Count, after: Count) -> float:
    """Share of the ideal speed-up that the added nodes give."""
    assert before.step_s is not None
    assert after.step_s is not None
    speed_up = before.step_s / after.step_s if after.step_s else 1.0
    return (speed_up - 1) / (after.nodes / before.nodes - 1)
