"""What plans could become: deeper warm-ups, looser cuts, backwards elsewhere, several chunks.

If some operator takes longer than its share, no cut balances the stages; with the forward on one
rank and the backward on another (PipeFB), what takes longest is the longer of the two, as long as
the saved values of a micro-batch travel in no more time. The dynamic programme cuts stages for that
(:meth:`pipectl.planner.partition.cutter.Cutter.with_backwards_elsewhere`), and the largest stages
of plans that were found without use ranks that are left.

With offload a device holds about two micro-batches of a stage, whatever its warm-up; so stages are
cut for the memory limit as if no more were in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from pipectl.cluster import Cluster
from pipectl.errors import InfeasibleError, OutOfTimeError
from pipectl.plan import Plan
from pipectl.planner.costs.devices import mixes, one_each, placements
from pipectl.planner.graph.blocks import condense
from pipectl.planner.partition.cut_space import CutSpace
from pipectl.planner.partition.cutter import Cut, Cutter, Fit, plain_fit
from pipectl.planner.partition.estimate import Layout
from pipectl.planner.partition.plans import Members, PlanBuilder
from pipectl.planner.plain import plain_plans
from pipectl.planner.problem import Problem
from pipectl.planner.request import (
    PLACED,
    PlanRequest,
    micro_batch_sizes,
    open_orders,
    stage_counts,
)
from pipectl.planner.schedules.named import every_schedule
from pipectl.profile import Profile


def some_apart(plan: Plan, cluster: Cluster, *, every: bool) -> Iterator[tuple[bool, ...]]:
    """Stages of a plan that may use ranks it leaves free: the largest, one or more of them."""
    stages, spare = len(plan.stages), cluster.ranks - len(plan.stages)
    loads = [stage.cost.forward_s + stage.cost.backward_s for stage in plan.stages]
    largest = sorted(range(stages), key=lambda index: (-loads[index], index))
    most = min(stages, spare)
    for count in sorted({most, *(1 << power for power in range(most.bit_length()))}):
        if 0 < count <= most and (count == stages or not every):
            chosen = set(largest[:count])
            yield tuple(index in chosen for index in range(stages))


def ranks_of(apart: Sequence[bool], cluster: Cluster) -> tuple[tuple[int, ...], ...]:
    """One rank for each stage, or two, in the same node if one has them."""
    free: list[list[int]] = [[] for _ in cluster.nodes]
    for rank, node in enumerate(cluster.node_of_rank):
        free[node].append(rank)
    found, last = [], 0
    for needs in (1 + alone for alone in apart):
        nodes = [*range(last, len(free)), *range(last)]
        last = next((node for node in nodes if len(free[node]) >= needs), -1)
        if last < 0:  # no node has two
            last = next(node for node in nodes if free[node])
            left = sorted(rank for ranks in free for rank in ranks)
            taken = [free[last][0], next(rank for rank in left if rank != free[last][0])]
        else:
            taken = free[last][:needs]
        free = [[rank for rank in ranks if rank not in taken] for ranks in free]
        found.append(tuple(taken))
    return tuple(found)


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


MOST_RANKS = 64
"""With more, backwards elsewhere and several chunks a rank are not looked for."""
MICRO_BATCHES = 8
"""A rank at most, with backwards elsewhere."""


class Proposals:
    """Plans without predictions, which the simulator has yet to judge.

    Args:
        request: with the variants that are allowed.
    """

    def __init__(
        self,
        profile: Profile,
        cluster: Cluster,
        request: PlanRequest,
        expired: Callable[[], bool],
    ) -> None:
        self._profile = profile
        self._cluster = cluster
        self._request = request
        self._expired = expired
        graph = condense(profile)
        self._problem = Problem(profile, cluster, request.without_variants, graph)
        self._cutter = Cutter(self._problem, CutSpace.plain(graph), self._check)
        self.offloaded = OffloadedCuts(self._problem, self._cutter)
        self._builder = PlanBuilder(profile, cluster, request)

    def elsewhere(self, found: Sequence[Plan]) -> Iterator[Plan]:
        """All that is allowed on other ranks than plans that were found use."""
        request = self._request
        if self._cluster.ranks > MOST_RANKS or request.replicas not in (None, 1):
            return
        if request.backward_apart is not False and self._is_flushed:
            yield from self._apart(found)
        yield from self._other_schedules(found, splits_backward=False)

    def split(self, found: Sequence[Plan]) -> Iterator[Plan]:
        """All that is allowed with split backwards."""
        if self._cluster.ranks <= MOST_RANKS and self._request.replicas in (None, 1):
            yield from self._other_schedules(found, splits_backward=True)

    def _other_schedules(self, found: Sequence[Plan], *, splits_backward: bool) -> Iterator[Plan]:
        if self._request.every_schedule:
            yield from every_schedule(
                self._problem, self._cutter, self._builder, found, splits_backward=splits_backward
            )

    def plain(self, request: PlanRequest) -> Sequence[Plan]:
        """What the search finds for a request without variants."""
        return plain_plans(self._profile, self._cluster, request, self._expired)

    def _check(self) -> None:
        if self._expired():
            raise OutOfTimeError("planning was ended while stages were cut", cure="allow more time")

    @property
    def _is_flushed(self) -> bool:
        return self._request.schedule not in PLACED

    def unlimited(self) -> list[Plan]:
        """Plans as if memory were no matter."""
        nodes = (
            replace(node, device=replace(node.device, memory_bytes=None))
            for node in self._cluster.nodes
        )
        free = replace(self._request.without_variants, memory_limit_bytes=None)
        with suppress(InfeasibleError, OutOfTimeError):
            cluster = replace(self._cluster, nodes=tuple(nodes))
            found = plain_plans(self._profile, cluster, free, self._expired)
            limit = self._request.memory_limit_bytes
            return [replace(plan, memory_limit_bytes=limit) for plan in found]
        return []

    def deeper(self, found: Sequence[Plan]) -> Iterator[Plan]:
        """Other warm-ups of the same stages, which stages that hold less may have room for."""
        for plan in found if self._is_flushed else ():
            if all(stage.replicas == 1 for stage in plan.stages):
                ranks = tuple(stage.ranks for stage in plan.stages)
                size = plan.micro_batch_size
                yield from self._builder.flushed(self._members(plan), ranks, size)

    def _members(self, plan: Plan) -> Members:
        return self._builder.members(stage.nodes for stage in plan.stages)

    def _apart(self, found: Sequence[Plan]) -> Iterator[Plan]:
        every = self._request.backward_apart is True
        for plan in found:
            for apart in some_apart(plan, self._cluster, every=every):
                ranks = ranks_of(apart, self._cluster)
                size = plan.micro_batch_size
                yield from self._builder.flushed(self._members(plan), ranks, size)
        if self._request.fixed_stages is None:
            yield from self._cut_for_apart(every=every)

    def _cut_for_apart(self, *, every: bool) -> Iterator[Plan]:
        for size in micro_batch_sizes(self._request, MICRO_BATCHES * self._cluster.ranks):
            if self._expired():
                return
            recompute = self._request.recompute
            with suppress(OutOfTimeError):
                cut = self._cutter.with_backwards_elsewhere(size, every=every, recompute=recompute)
                if cut is not None and max(cut.devices) > 1:
                    ranks = ranks_of([count > 1 for count in cut.devices], self._cluster)
                    members = self._problem.members(cut.partition)
                    yield from self._builder.flushed(members, ranks, size)
