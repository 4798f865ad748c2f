"""Plans on trial: simulated under each rank's memory limit, as many as can be afforded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pipectl.cluster import Cluster
from pipectl.errors import OutOfTimeError
from pipectl.plan import Plan
from pipectl.simulate import simulate

MOST_ACTIONS = 1_000_000
"""Simulated forwards and backwards of all replicas in all."""


def predicted(plan: Plan, cluster: Cluster, baseline_bytes: int) -> Plan:
    """A plan with what the simulator says of it.

    Args:
        baseline_bytes: of a process without a stage.
    """
    found = simulate(plan, cluster, process_baseline_bytes=baseline_bytes)
    return replace(plan, prediction=found.prediction)


def out_of_time() -> OutOfTimeError:
    """The error to raise when time was over before there was any plan."""
    return OutOfTimeError("planning was ended before any plan was found", cure="allow more time")


class Trials:
    """Simulates plans.

    Args:
        limit_bytes: of every rank, besides its device's memory.
        baseline_bytes: of a process without a stage.
        expired: asked now and then; once it is true, no more is tried.
        most_actions: to simulate, forwards and backwards of all replicas in all.
    """

    def __init__(
        self,
        cluster: Cluster,
        limit_bytes: int | None,
        baseline_bytes: int,
        expired: Callable[[], bool] = lambda: False,
        *,
        most_actions: int = MOST_ACTIONS,
    ) -> None:
        self._cluster = cluster
        self._limit_bytes = limit_bytes
        self._baseline_bytes = baseline_bytes
        self._expired = expired
        self._most_actions = most_actions
        self._actions = 0

    @property
    def are_over(self) -> bool:
        """Whether no more should be tried, once there is something."""
        return self._actions > self._most_actions or self.time_is_up

    @property
    def time_is_up(self) -> bool:
        """Whether nothing more should be begun."""
        return self._expired()

    def run(self, plan: Plan) -> Plan:
        """The plan with its prediction."""
        self._actions += 2 * plan.micro_batches * sum(stage.replicas for stage in plan.stages)
        return predicted(plan, self._cluster, self._baseline_bytes)

    def fits(self, tried: Plan) -> bool:
        """Whether every rank of a plan that was run stays within its limit."""
        return all(self.rank_fits(tried, rank) for rank in range(tried.ranks))

    def stage_fits(self, tried: Plan, stage: int) -> bool:
        """Whether the ranks of a stage do."""
        held = tried.stages[stage]
        return all(self.rank_fits(tried, rank) for rank in (*held.ranks, *held.backward_ranks))

    def rank_fits(self, tried: Plan, rank: int) -> bool:
        """Whether one rank does."""
        assert tried.prediction is not None
        return tried.prediction.peak_memory_bytes[rank] <= self.limit_of(rank)

    def limit_of(self, rank: int) -> float:
        """Bytes that a rank may hold."""
        return self._cluster.memory_of(rank, self._limit_bytes)
