"""Cuts for stages that offload: memory is short, but not for values that are elsewhere.

With offload a device holds about two micro-batches of a stage, whatever its warm-up; so stages are
cut for the memory limit as if no more were in flight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

from pipectl.errors import OutOfTimeError
from pipectl.plan import Plan
from pipectl.planner.costs.devices import mixes, one_each, placements
from pipectl.planner.partition.cutter import Cut, Cutter, Fit, plain_fit
from pipectl.planner.partition.estimate import Layout
from pipectl.planner.problem import Problem
from pipectl.planner.request import micro_batch_sizes, open_orders, stage_counts

ON_THE_DEVICE = 2
"""Micro-batches of an offloading stage."""


class OffloadedCuts:
    """Cuts within memory, if all stages offload."""

    def __init__(self, problem: Problem, cutter: Cutter) -> None:
        self._problem = problem
        self._cutter = cutter
        self._known: set[tuple[int, int]] = set()

    def like(self, plans: Sequence[Plan]) -> Iterator[Plan]:
        """With as many stages and as large micro-batches as some plans have."""
        for plan in plans:
            yield from self._plans(len(plan.stages), plan.micro_batch_size)

    def sizes(self) -> Iterator[Iterator[Plan]]:
        """All numbers of stages that are open, for one micro-batch size after the other.

        Raises:
            InfeasibleError: more stages or micro-batches were asked for than there can be.
        """
        problem, request = self._problem, self._problem.request
        counts = stage_counts(request, problem.cluster.ranks, len(problem.graph))
        for size in micro_batch_sizes(request, request.batch_size):
            yield (plan for stages in reversed(counts) for plan in self._plans(stages, size))

    def _plans(self, stages: int, size: int) -> Iterator[Plan]:
        problem, request = self._problem, self._problem.request
        if (stages, size) in self._known or not problem.could_hold(stages):
            return
        self._known.add((stages, size))
        orders = open_orders(request, stages, problem.micro_batches(size))
        for cut in self._cuts(stages, size, orders[0][1]):
            for place in placements(problem.cluster, problem.devices, cut.kinds):
                layout = Layout(cut.partition, one_each(place))
                for order in orders:
                    yield problem.plan(problem.choice(layout, size, order))

    def _cuts(self, stages: int, size: int, warm_up: Sequence[int]) -> Iterator[Cut]:
        problem = self._problem
        held = tuple(min(depth, ON_THE_DEVICE) for depth in warm_up)
        recompute = problem.request.recompute is not False
        for mix in mixes(problem.devices, len(problem.graph) + 1, stages, stages):
            yield from self._balanced(plain_fit(problem, size, held, mix, recompute=recompute))

    def _balanced(self, fit: Fit) -> list[Cut]:
        with suppress(OutOfTimeError):
            return self._cutter.balanced(fit)
        return []
