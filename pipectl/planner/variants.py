"""Plans that offload, run backwards on ranks of their own, or have any schedule.

The search without any of this comes first. From what it finds, with the memory there is and as if
there were enough, proposals are derived: deeper warm-ups, looser cuts, backwards elsewhere, other
schedules. Each is simulated as if its stages kept everything, and in the order of these times gets
modes with which it stays within memory, until no proposal can be better than the best. What the
search found stays if nothing is faster.

If some operator takes longer than its share, no cut balances the stages; with the forward on one
rank and the backward on another (PipeFB), what takes longest is the longer of the two, as long as
the saved values of a micro-batch travel in no more time. The dynamic programme cuts stages for that
(:meth:`pipectl.planner.partition.cutter.Cutter.with_backwards_elsewhere`), and the largest stages
of plans that were found without use ranks that are left.

With offload a device holds about two micro-batches of a stage, whatever its warm-up; so stages are
cut for the memory limit as if no more were in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from pipectl.cluster import Cluster, OffloadTarget
from pipectl.errors import InfeasibleError, OutOfTimeError
from pipectl.plan import Plan
from pipectl.planner.bounds import work_s
from pipectl.planner.copies import plain_plans
from pipectl.planner.costs.devices import mixes, one_each, placements
from pipectl.planner.evaluate import TIE, out_of_time, preference, with_findings
from pipectl.planner.explain.what_if import with_enough_memory
from pipectl.planner.partition.cut_space import CutSpace
from pipectl.planner.partition.cutter import Cutter, cut_request
from pipectl.planner.partition.layout import Layout
from pipectl.planner.problem import Problem
from pipectl.planner.request import (
    PLACED,
    PlanRequest,
    micro_batch_sizes,
    open_orders,
    stage_counts,
)
from pipectl.planner.schedules.named import PLACED_GAIN, SPLIT_GAIN, every_schedule
from pipectl.planner.shortlist import Shortlist
from pipectl.profile import Profile

MAX_RANKS = 64
"""With more, backwards elsewhere and several stages per rank are not looked for."""
MICRO_BATCHES = 8
"""Per rank at most, with backwards elsewhere."""
ON_THE_DEVICE = 2
"""Micro-batches of an offloading stage."""

Key = tuple[object, ...]


def varied_plans(
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
    expired: Callable[[], bool] = lambda: False,
) -> list[Plan]:
    """Plans with predictions, the fastest first; of equals, those without variants.

    Raises:
        InfeasibleError, OutOfTimeError: nothing fits, or nothing was found in time.
    """
    search = _VariantSearch(Problem(profile, cluster, request), expired)
    plans, bound_s = search.run(), work_s(profile, cluster, request)
    finished = not search.shortlist.evaluator.is_exhausted
    return [
        replace(
            with_findings(plan, cluster, bound_s, finished=finished),
            assumptions=tuple(dict.fromkeys((*plan.assumptions, *_assumed_host(plan, cluster)))),
        )
        for plan in plans
    ]


class _VariantSearch:
    """One search for variants.

    Args:
        problem: its request says which variants are allowed.
    """

    def __init__(self, problem: Problem, expired: Callable[[], bool]) -> None:
        self._problem = problem
        self._request = problem.request
        self._cluster = problem.cluster
        self._expired = expired
        self.shortlist = Shortlist(
            problem, expired, self._request.offload_choices, self._is_as_asked
        )
        self._cutter = Cutter(problem, CutSpace.plain(problem.graph), self._check)
        self._offloaded_areas: set[tuple[int, int]] = set()
        self._seen: set[Key] = set()
        self._unlimited: list[Plan] = []
        self._is_short = problem.has_limits

    def _check(self) -> None:
        if self._expired():
            raise OutOfTimeError("planning was ended while stages were cut", cure="allow more time")

    def run(self) -> list[Plan]:
        """The best plan of every shape that fits, the fastest first."""
        request, plans = self._request, self.shortlist.plans
        plain, reason = self._plain()
        if not request.blocks:
            plans += [plan for plan in plain if self._is_as_asked(plan)]
        if not self._expired() or (plain and not plans and request.blocks):
            self._try_all(plain)
        if not plans:
            raise out_of_time() if self._expired() else reason or self._nothing()
        ordered = sorted(plans, key=preference)
        # What the search found comes first if it is not slower.
        kept = [
            plan
            for plan in plain[:1]
            if plan in ordered and self.shortlist.fastest_s >= plan.predicted_step_s * (1 - TIE)
        ]
        shapes: dict[Key, Plan] = {}
        for plan in [*kept, *ordered]:
            shapes.setdefault(_shape(plan), plan)
        return list(shapes.values())

    def _plain(self) -> tuple[list[Plan], Exception | None]:
        """What there is without variants, or why there is nothing.

        Memory is not short if the best plan without regard to it fits, and no stage has to save
        any: then that is what there is. If it is short, recomputation of some stages also ends the
        search for plans that do with smaller micro-batches; so these are asked for, too.
        """
        request, wanted = self._request, self._request.without_variants
        requests = [wanted]
        if self._is_short:
            self._unlimited = self._without_limits(wanted)
            fitting = [plan for plan in self._unlimited if self.shortlist.evaluator.fits(plan)]
            saves = request.offload or request.blocks
            if fitting and fitting[0] is self._unlimited[0] and not saves:
                self._is_short = False
                return fitting, None
            if wanted.recompute is None:
                requests = [replace(wanted, recompute=False), wanted]
        plans: list[Plan] = []
        reason: Exception | None = None
        for each in requests:
            try:
                plans += plain_plans(self._problem.profile, self._cluster, each, self._expired)
            except (InfeasibleError, OutOfTimeError) as error:
                reason = error
        return sorted(plans, key=preference), reason

    def _without_limits(self, request: PlanRequest) -> list[Plan]:
        """Plans as if memory were no matter."""
        cluster = with_enough_memory(self._cluster)
        free = replace(request, memory_limit_bytes=None)
        with suppress(InfeasibleError, OutOfTimeError):
            plans = plain_plans(self._problem.profile, cluster, free, self._expired)
            return [replace(plan, memory_limit_bytes=request.memory_limit_bytes) for plan in plans]
        return []

    def _try_all(self, plain: Sequence[Plan]) -> None:
        """Everything that can be derived from what the search found."""
        request = self._request
        offloads = self._is_short and request.offload is not False
        again = request.recompute is None or request.blocks is not False
        saves = offloads or (self._is_short and again)
        start = [*plain, *(self._unlimited if saves else [])]
        one_replica = request.replicas in (None, 1) and self._cluster.ranks <= MAX_RANKS
        self._consider([*start, *(self._deeper(start) if saves else [])])
        if one_replica:
            self._consider(self._elsewhere(start))
            self._consider(self._other_schedules(start, splits_backward=False), PLACED_GAIN)
            self._consider(self._other_schedules(start, splits_backward=True), SPLIT_GAIN)
        if offloads:
            areas = [(len(plan.stages), plan.micro_batch_size) for plan in start]
            self._consider(plan for area in areas for plan in self._offloaded(*area))
            self._offload_smaller_micro_batches()

    def _consider(self, proposed: Iterable[Plan], gain: float = TIE) -> None:
        """Shortlist what is new and could be best."""
        self.shortlist.consider([plan for plan in proposed if self._is_new(plan)], gain)

    def _is_new(self, plan: Plan) -> bool:
        stages = tuple((s.nodes, s.ranks, s.backward_ranks) for s in plan.stages)
        key = (stages, plan.micro_batch_size, plan.schedule, plan.warm_up, plan.replication)
        is_new = key not in self._seen
        self._seen.add(key)
        return is_new

    def _is_as_asked(self, plan: Plan) -> bool:
        """Whether it has what must be everywhere."""
        request, stages = self._request, plan.stages
        return (not request.offload or all(stage.offload for stage in stages)) and (
            not request.backward_apart or all(stage.backward_ranks for stage in stages)
        )

    def _nothing(self) -> InfeasibleError:
        ranks = self._cluster.ranks
        if self._request.backward_apart and ranks > MAX_RANKS:
            return InfeasibleError(
                f"no feasible plan: all backwards on other ranks are planned for at most "
                f"{MAX_RANKS} ranks, not {ranks}",
                cure=f"set {self._request.named('backward')} to together, or ask for fewer ranks",
            )
        asked, key = "all backwards on other ranks", "backward"
        if self._request.offload:
            asked, key = "all its stages offload", "offload"
        return InfeasibleError(
            f"no feasible plan: none has {asked}",
            cure=f"leave {self._request.named(key)} to the planner (auto), or ask for more ranks",
        )

    def _deeper(self, plans: Sequence[Plan]) -> Iterator[Plan]:
        """Other warm-ups of the same stages, which stages that hold less may have room for."""
        for plan in plans if self._request.schedule not in PLACED else ():
            if all(stage.replicas == 1 for stage in plan.stages):
                yield from self._on_ranks(plan, tuple(stage.ranks for stage in plan.stages))

    def _on_ranks(self, plan: Plan, ranks: tuple[tuple[int, ...], ...]) -> Iterator[Plan]:
        """The stages of a plan, or their forwards and backwards, on other ranks."""
        members = self._problem.members_of_plan(plan)
        return self._problem.flushed(members, ranks, plan.micro_batch_size)

    def _elsewhere(self, plans: Sequence[Plan]) -> Iterator[Plan]:
        """With backwards on ranks that plans leave free."""
        request, ranks = self._request, self._cluster.ranks
        if request.backward_apart is not False and request.schedule not in PLACED:
            every = request.backward_apart is True
            for plan in plans:
                for apart in some_apart(plan, self._cluster, every=every):
                    yield from self._on_ranks(plan, ranks_of(apart, self._cluster))
            sizes = micro_batch_sizes(request, MICRO_BATCHES * ranks)
            for size in sizes if request.fixed_stages is None else ():
                if not self._expired():
                    yield from self._cut_for_apart(size, every=every)

    def _cut_for_apart(self, size: int, *, every: bool) -> Iterator[Plan]:
        with suppress(OutOfTimeError):
            again = self._request.recompute
            cut = self._cutter.with_backwards_elsewhere(size, every=every, recompute=again)
            if cut is not None and max(cut.devices) > 1:
                ranks = ranks_of([count > 1 for count in cut.devices], self._cluster)
                members = self._problem.members(cut.partition)
                yield from self._problem.flushed(members, ranks, size)

    def _other_schedules(self, plans: Sequence[Plan], *, splits_backward: bool) -> Iterator[Plan]:
        if self._request.every_schedule:
            yield from every_schedule(
                self._problem, self._cutter, plans, splits_backward=splits_backward
            )

    def _offload_smaller_micro_batches(self) -> None:
        """Smaller and smaller micro-batches, until something fits."""
        problem, request = self._problem, self._request
        with suppress(InfeasibleError):
            counts = stage_counts(request, problem.cluster.ranks, len(problem.graph))
            for size in micro_batch_sizes(request, request.batch_size):
                if self.shortlist.plans or self._expired():
                    return
                self._consider(
                    plan for stages in reversed(counts) for plan in self._offloaded(stages, size)
                )

    def _offloaded(self, stages: int, size: int) -> Iterator[Plan]:
        """Stages cut for the memory there is, if all of them offload."""
        problem = self._problem
        if (stages, size) in self._offloaded_areas or not problem.could_hold(stages):
            return
        self._offloaded_areas.add((stages, size))
        orders = open_orders(self._request, stages, problem.micro_batches(size))
        held = tuple(min(depth, ON_THE_DEVICE) for depth in orders[0][1])
        again = self._request.recompute is not False
        for mix in mixes(problem.devices, len(problem.graph) + 1, stages, stages):
            with suppress(OutOfTimeError):
                for cut in self._cutter.balanced(
                    cut_request(problem, size, held, mix, recompute=again)
                ):
                    for place in placements(problem.cluster, problem.devices, cut.kinds):
                        layout = Layout(cut.partition, one_each(place))
                        for order in orders:
                            yield problem.plan(problem.choice(layout, size, order))


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
    chosen, last = [], 0
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
        chosen.append(tuple(taken))
    return tuple(chosen)


def _shape(plan: Plan) -> Key:
    stages = tuple(
        (
            *(stage.replicas, bool(stage.backward_ranks), stage.recompute, stage.offload),
            stage.blocks is not None,
        )
        for stage in plan.stages
    )
    return stages, plan.schedule, plan.warm_up, plan.micro_batches, plan.replication


def _assumed_host(plan: Plan, cluster: Cluster) -> tuple[str, ...]:
    """Whether stages offload over a link that nobody measured."""
    devices = [cluster.device(r) for stage in plan.stages if stage.offload for r in stage.ranks]
    if not any(device.offload_link(plan.offload_to).assumed for device in devices):
        return ()
    if plan.offload_to is OffloadTarget.DISK:
        return ("the bandwidth of the nodes' disks is assumed, not measured",)
    return ("the link between a device and its host's memory is assumed, not measured",)
