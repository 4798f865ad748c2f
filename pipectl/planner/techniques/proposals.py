"""What plans could become: deeper warm-ups, looser cuts, backwards elsewhere, several chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from pipectl.cluster import Cluster
from pipectl.errors import InfeasibleError, OutOfTimeError
from pipectl.plan import Plan
from pipectl.planner.activations.pipefb import ranks_of, some_apart
from pipectl.planner.graph.blocks import condense
from pipectl.planner.partition.cut_space import CutSpace
from pipectl.planner.partition.cutter import Cutter
from pipectl.planner.partition.plans import Members, PlanBuilder
from pipectl.planner.problem import Problem
from pipectl.planner.request import PLACED, PlanRequest, micro_batch_sizes
from pipectl.planner.techniques.interleaving import interleaved_proposals
from pipectl.planner.techniques.offloaded import OffloadedCuts
from pipectl.profile import Profile

Search = Callable[[Profile, Cluster, PlanRequest, Callable[[], bool]], Sequence[Plan]]
"""Plans for a request without variants, the best first.

Raises:
    InfeasibleError, OutOfTimeError: there is none.
"""

MOST_RANKS = 64
"""With more, backwards elsewhere and several chunks a rank are not looked for."""
MICRO_BATCHES = 8
"""A rank at most, with backwards elsewhere."""


class Proposals:
    """Plans without predictions, which the simulator has yet to judge.

    Args:
        request: with the variants that are allowed.
        search: finds the plans they are derived from.
    """

    def __init__(
        self,
        search: Search,
        profile: Profile,
        cluster: Cluster,
        request: PlanRequest,
        expired: Callable[[], bool],
    ) -> None:
        self._search = search
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
        if request.interleave:
            yield from interleaved_proposals(self._problem, self._cutter, self._builder, found)

    def plain(self, request: PlanRequest) -> Sequence[Plan]:
        """What the search finds for a request without variants."""
        return self._search(self._profile, self._cluster, request, self._expired)

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
            found = self._search(self._profile, cluster, free, self._expired)
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
