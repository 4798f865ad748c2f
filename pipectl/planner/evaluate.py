"""The evaluation of plans: simulated, held against the memory of every rank, and compared.

Every plan that the planner returns is simulated here. Of plans that fit, the fastest is best. The
search for plain plans counts steps that differ by less than ``TIE`` as equal, and takes the
simplest; a plan derived from plain plans must be faster by this share to replace the best of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from pipectl.cluster import Cluster
from pipectl.errors import OutOfTimeError
from pipectl.plan import Plan
from pipectl.planner.costs.footprint import baseline_bytes
from pipectl.planner.problem import Problem
from pipectl.planner.request import PlanRequest
from pipectl.profile import Profile
from pipectl.simulate import simulate

TIE = 1e-3
"""Step times that differ by less than this share count as equal."""
MAX_ACTIONS = 1_000_000
"""Total of simulated forwards and backwards, over all replicas."""


def predicted(plan: Plan, cluster: Cluster, baseline_bytes: int) -> Plan:
    """A plan with the prediction of the simulator.

    Args:
        baseline_bytes: of a process without a stage.
    """
    simulation = simulate(plan, cluster, process_baseline_bytes=baseline_bytes)
    return replace(plan, prediction=simulation.prediction)


def plan_of_stages(
    profile: Profile, cluster: Cluster, request: PlanRequest, stages: Sequence[Sequence[str]]
) -> Plan:
    """The plan, with its prediction, that runs each stage on the rank of its number.

    Args:
        cluster: with at least as many ranks as there are stages.
        request: if it has no micro-batches, they have the profile's size.
        stages: ids of the operators of each, in the order of the pipeline.
    """
    plan = Problem(profile, cluster, request).stages_in_turn(stages)
    return predicted(plan, cluster, baseline_bytes(profile))


def out_of_time() -> OutOfTimeError:
    """The error for no plan in time."""
    return OutOfTimeError("planning was ended before any plan was found", cure="allow more time")


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
        expired: Callable[[], bool] = lambda: False,
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
        return self._actions > self._max_actions or self.time_is_up

    @property
    def time_is_up(self) -> bool:
        """Whether nothing more should be started."""
        return self._expired()

    def extend(self, max_actions: int) -> None:
        """Raise the limit on simulated actions."""
        self._max_actions += max_actions

    def run(self, plan: Plan) -> Plan:
        """Simulate a plan; returns it with its prediction."""
        self._actions += 2 * plan.micro_batches * sum(stage.replicas for stage in plan.stages)
        self.sizes.add(plan.micro_batch_size)
        return predicted(plan, self.problem.cluster, self.problem.baseline_bytes)

    def fits(self, tried: Plan) -> bool:
        """Whether every rank of a simulated plan stays within its limit."""
        return self.problem.excess_bytes(tried) <= 0

    def stage_fits(self, tried: Plan, stage: int) -> bool:
        """Whether the ranks of a stage of a simulated plan stay within their limits."""
        assert tried.prediction is not None
        held, peaks = tried.stages[stage], tried.prediction.peak_memory_bytes
        ranks = (*held.ranks, *held.backward_ranks)
        return all(peaks[rank] <= self.problem.limit_bytes(rank) for rank in ranks)


def preference(plan: Plan) -> tuple[float, int, int, int]:
    """Lower is better: the predicted step, then the simpler plan."""
    return plan.predicted_step_s, len(plan.stages), sum(plan.warm_up), plan.micro_batches
