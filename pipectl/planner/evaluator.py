"""The evaluation of a plan: simulated, and held against the memory of every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from pipectl.cluster import Cluster
from pipectl.plan import Plan
from pipectl.planner.costs.devices import one_each
from pipectl.planner.costs.footprint import baseline_bytes
from pipectl.planner.partition.layout import Choice, Layout
from pipectl.planner.plans import plan_of
from pipectl.planner.problem import Problem
from pipectl.planner.request import Expired, PlanRequest
from pipectl.profile import Profile
from pipectl.schedule import default_warm_up
from pipectl.schedule.one_f_one_b import ONE_F_ONE_B
from pipectl.simulate import simulate

TIE = 1e-3
"""Step times that differ by less than this share count as equal."""
MAX_ACTIONS = 1_000_000
"""Total of simulated forwards and backwards, over all replicas, per group of derived plans."""


def predicted(plan: Plan, cluster: Cluster, profile: Profile) -> Plan:
    """A plan with the prediction of the simulator.

    Args:
        profile: has the memory of a process besides its stages.
    """
    simulation = simulate(
        plan,
        cluster,
        process_baseline_bytes=baseline_bytes(profile),
        capture_bytes=profile.capture_bytes,
        heap_share=profile.heap_share,
    )
    return replace(plan, prediction=simulation.prediction)


def plan_of_stages(
    profile: Profile, cluster: Cluster, request: PlanRequest, stages: Sequence[Sequence[str]]
) -> Plan:
    """The plan, with its prediction, by 1F1B that runs each stage on the rank of its number.

    Args:
        cluster: with at least as many ranks as there are stages.
        request: if it has no micro-batches, they have the profile's size.
        stages: ids of the operators of each, in the order of the pipeline.
    """
    problem = Problem(profile, cluster, request)
    own = ceil(request.batch_size / profile.micro_batch_size)
    size = ceil(request.batch_size / (request.micro_batches or own))
    warm_up = default_warm_up(ONE_F_ONE_B.name, len(stages), problem.micro_batches(size))
    layout = Layout(problem.partition_of(stages), one_each(tuple(range(len(stages)))))
    plan = plan_of(problem, Choice(layout, size, ONE_F_ONE_B.name, warm_up))
    return predicted(plan, cluster, profile)


class Evaluator:
    """Simulates plans of a problem, within its limits of memory.

    Args:
        expired: called repeatedly; once it returns true, no more plans are tried.
        max_actions: total of simulated forwards and backwards, over all replicas.

    Attributes:
        sizes: micro-batch sizes of the simulated plans.
    """

    def __init__(
        self,
        problem: Problem,
        expired: Expired = lambda: False,
        *,
        max_actions: int = MAX_ACTIONS,
    ) -> None:
        self.problem = problem
        self._expired = expired
        self._max_actions = max_actions
        self._actions = 0
        self.sizes: set[int] = set()

    @property
    def is_exhausted(self) -> bool:
        """Whether no more plans should be tried if there is one."""
        return self._actions > self._max_actions or self._expired()

    def allow(self, max_actions: int) -> None:
        """Set how many more actions may be simulated from now on."""
        self._max_actions = self._actions + max_actions

    def extend(self, max_actions: int) -> None:
        """Raise the limit on simulated actions."""
        self._max_actions += max_actions

    def run(self, plan: Plan) -> Plan:
        """Simulate a plan, in which stages recompute if they need it; returns it with its
        prediction."""
        plan = self.problem.with_needed_recompute(plan)
        self._actions += 2 * plan.micro_batches * sum(stage.replicas for stage in plan.stages)
        self.sizes.add(plan.micro_batch_size)
        return predicted(plan, self.problem.cluster, self.problem.profile)
