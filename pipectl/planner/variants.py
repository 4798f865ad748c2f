"""Plans with variants, derived from plain plans: offload, recomputation by segments, other
schedules, and backwards on other ranks (PipeFB).

Proposals have deeper warm-ups, looser cuts, backwards on other ranks, or other schedules. Each is
simulated as if its stages kept everything; in the order of these times, proposals then get modes
that stay within memory, until no proposal can be better than the best plan.

If an operator takes longer than its share, no cut balances the stages. If the forward and backward
of a stage run on two ranks (PipeFB), the bottleneck is only the longer of the two, as long as the
saved values of a micro-batch travel in no more time. The dynamic programme cuts stages for this
(:meth:`pipectl.planner.partition.cutter.Cutter.with_backwards_apart`); in plans cut without it,
the largest stages use the free ranks.

With offload, a device holds about two micro-batches of a stage, whatever its warm-up. So stages are
cut for the memory limit as if two were in flight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from pipectl.cluster import Cluster, OffloadTarget
from pipectl.errors import InfeasibleError, OutOfTimeError
from pipectl.plan import Plan
from pipectl.planner.bounds import with_findings, work_bound_s
from pipectl.planner.choices import (
    allowed_values,
    micro_batch_sizes,
    open_orders,
    sizes_of_stages,
    stage_counts,
)
from pipectl.planner.evaluator import MAX_ACTIONS, TIE
from pipectl.planner.graph.downsets import CutSpace, Partition
from pipectl.planner.infeasible import infeasible, least_demanding
from pipectl.planner.judge import Judge, best_first
from pipectl.planner.modes import ON_THE_DEVICE
from pipectl.planner.other_schedules import (
    SEVERAL_STAGES_GAIN,
    SPLIT_GAIN,
    UNMEASURED_SPLIT_GAIN,
    propose_other_schedules,
)
from pipectl.planner.partition.cutter import Cutter, cut_request, layouts_of, merged
from pipectl.planner.partition.layout import Choice, Layout, Ranks, ranks_with_backwards
from pipectl.planner.plain import copies_of, has_size_asked_for, one_copy, plain_plans
from pipectl.planner.plans import plan_of
from pipectl.planner.problem import Problem
from pipectl.planner.request import OTHER_SCHEDULES, Expired, PlanRequest, out_of_time
from pipectl.planner.simple import promising_copies
from pipectl.schedule.one_f_one_b import ONE_F_ONE_B

MAX_RANKS_OF_VARIANTS = 64
"""With more, only 1F1B and GPipe are tried, and no backwards on other ranks."""

Key = tuple[object, ...]


def varied_plans(problem: Problem, expired: Expired) -> list[Plan]:
    """Plans with variants and predictions, fastest first; in ties, those without variants first.

    Raises:
        InfeasibleError, OutOfTimeError: no plan fits, or none was found in time.
    """
    search = VariantSearch(problem, expired)
    plans = search.run()
    sizes = {plan.micro_batch_size for plan in plans}
    bound_s = work_bound_s(problem, sizes | search.judge.evaluator.sizes)
    finished = search.judge.finished and not expired()
    assumed = [_assumed_host(plan, problem.cluster) for plan in plans]
    return [
        replace(
            with_findings(plan, bound_s, finished=finished),
            assumptions=tuple(dict.fromkeys((*plan.assumptions, *host))),
        )
        for plan, host in zip(plans, assumed, strict=True)
    ]


class VariantSearch:
    """Derives plans with all allowed variants from the plain plans of the search.

    Args:
        problem: of the condensed graph. The search uses another problem, whose graph may have
            negligible blocks merged; its plans name operators, so they are valid here too.
    """

    def __init__(self, problem: Problem, expired: Expired) -> None:
        self._problem = problem
        self._request = problem.request
        self._cluster = problem.cluster
        self._expired = expired
        self.judge = Judge(
            problem,
            expired,
            offload=allowed_values(self._request.offload),
            accepts=self._is_as_asked,
            max_actions=MAX_ACTIONS,
        )
        self._cutter = Cutter(problem, CutSpace.plain(problem.graph), expired)
        self._offloaded_areas: set[tuple[int, int]] = set()
        self._seen: set[Key] = set()
        self._unlimited: list[Plan] = []
        self._memory_is_short = False

    def run(self) -> list[Plan]:
        """The best plan of every shape that fits, the fastest first."""
        request, judge = self._request, self.judge
        plain, reason = self._plain()
        if not request.segments:
            judge.add(plain)
        # With segments asked for, plain plans are only starts: some are tried even if time is up.
        has_only_starts = bool(plain) and not judge.plans and bool(request.segments)
        if not self._expired() or has_only_starts:
            self._try_all(plain)
        if not judge.plans and not self._expired() and isinstance(reason, InfeasibleError):
            self._try_least_demanding(reason)
        if not judge.plans:
            raise out_of_time() if self._expired() else reason or self._nothing()
        return best_first(judge.plans)

    def _plain(self) -> tuple[list[Plan], Exception | None]:
        """Plans without variants, and none or the error that says why there are no such plans.

        If the best plan without memory limits fits, and no stage has to save memory, plans without
        limits are returned.
        """
        request, wanted = self._request, self._request.without_variants
        if self._problem.has_limits:
            self._unlimited = self._without_limits(wanted)
            fitting = [plan for plan in self._unlimited if self._problem.fits(plan)]
            saves = request.offload or request.segments
            if fitting and fitting[0] is self._unlimited[0] and not saves:
                return fitting, None
            self._memory_is_short = True
        try:
            return plain_plans(self._problem.on(request=wanted), self._expired), None
        except (InfeasibleError, OutOfTimeError) as error:
            return [], error

    def _without_limits(self, request: PlanRequest) -> list[Plan]:
        cluster = self._cluster.with_unlimited_memory()
        free = replace(request, memory_limit_bytes=None)
        with suppress(InfeasibleError, OutOfTimeError):
            plans = plain_plans(self._problem.on(cluster=cluster, request=free), self._expired)
            return [replace(plan, memory_limit_bytes=request.memory_limit_bytes) for plan in plans]
        return []

    def _try_all(self, plain: Sequence[Plan]) -> None:
        request = self._request
        offloads = self._memory_is_short and request.offload is not False
        recomputes = request.recompute is None or request.segments is not False
        saves = offloads or (self._memory_is_short and recomputes)
        start = [*plain, *(self._unlimited if saves else [])]
        one_replica = request.replicas in (None, 1) and self._cluster.ranks <= MAX_RANKS_OF_VARIANTS
        self._consider([*start, *(self._with_every_order(start) if saves else [])])
        if one_replica:
            self._consider(filter(self._problem.can_run, self._with_backwards_apart(start)))
            self._consider(self._other_schedules(start, splits_backward=False), SEVERAL_STAGES_GAIN)
            is_measured = self._problem.profile.split is not None
            gain = SPLIT_GAIN if is_measured else UNMEASURED_SPLIT_GAIN
            self._consider(self._other_schedules(start, splits_backward=True), gain)
        for copies in self._numbers_of_copies():
            self._consider(self._copies_of_other_schedules(copies), SEVERAL_STAGES_GAIN)
        if offloads:
            areas = [(len(plan.stages), plan.micro_batch_size) for plan in start]
            self._consider(plan for area in areas for plan in self._offloaded(*area))
            self._offload_smaller_micro_batches()

    def _consider(self, proposed: Iterable[Plan], gain: float = TIE) -> None:
        """Let the judge consider plans that are new, with further simulations allowed."""
        self.judge.evaluator.extend(MAX_ACTIONS)
        self.judge.consider([plan for plan in proposed if self._is_new(plan)], gain)

    def _is_new(self, plan: Plan) -> bool:
        stages = tuple((s.nodes, s.ranks, s.backward_ranks) for s in plan.stages)
        key = (stages, plan.micro_batch_size, plan.schedule, plan.warm_up, plan.replication)
        is_new = key not in self._seen
        self._seen.add(key)
        return is_new

    def _is_as_asked(self, plan: Plan) -> bool:
        """Whether a plan has the variants that the request requires."""
        request, stages = self._request, plan.stages
        return (not request.offload or all(stage.offload for stage in stages)) and (
            not request.backward_apart or all(stage.backward_ranks for stage in stages)
        )

    def _try_least_demanding(self, reason: InfeasibleError) -> None:
        """Try the plan that needs the least memory, with all allowed variants.

        Raises:
            InfeasibleError: this plan does not fit either; or ``reason``, if it is not memory.
        """
        problem, request = self._problem, self._request
        offload = allowed_values(request.offload)
        more = True in offload or request.segments is not False
        searched = request.schedule not in OTHER_SCHEDULES and request.replicas in (None, 1)
        if not (problem.has_limits and more and searched) or request.backward_apart:
            raise reason
        counts = stage_counts(request, problem.cluster.ranks, len(problem.graph))
        _, plan = least_demanding(problem, self._cutter, counts, offload)
        if not self._problem.fits(plan):
            raise infeasible(problem, plan, offload)
        self.judge.add([plan])

    def _nothing(self) -> InfeasibleError:
        ranks = self._cluster.ranks
        if self._request.backward_apart and ranks > MAX_RANKS_OF_VARIANTS:
            return InfeasibleError(
                f"no feasible plan: all backwards on other ranks are planned for at most "
                f"{MAX_RANKS_OF_VARIANTS} ranks, not {ranks}",
                hint="set pipeline.backward to together, or ask for fewer ranks",
            )
        asked, key = "all backwards on other ranks", "backward"
        if self._request.offload:
            asked, key = "all its stages offload", "offload"
        return InfeasibleError(
            f"no feasible plan: none has {asked}",
            hint=f"leave pipeline.{key} to the planner (auto), or ask for more ranks",
        )

    def _with_every_order(self, plans: Sequence[Plan]) -> Iterator[Plan]:
        """The same stages in every order: in other modes, deeper warm-ups may fit."""
        for plan in plans if self._request.schedule not in OTHER_SCHEDULES else ():
            if all(stage.replicas == 1 for stage in plan.stages):
                yield from self._on_ranks(plan, tuple(stage.ranks for stage in plan.stages))

    def _on_ranks(self, plan: Plan, ranks: tuple[tuple[int, ...], ...]) -> Iterator[Plan]:
        """The stages of a plan on other ranks: one, or one each for forward and backward."""
        partition = self._problem.partition_of(stage.nodes for stage in plan.stages)
        return in_every_order(self._problem, partition, ranks, plan.micro_batch_size)

    def _with_backwards_apart(self, plans: Sequence[Plan]) -> Iterator[Plan]:
        request, ranks = self._request, self._cluster.ranks
        if request.backward_apart is not False and request.schedule not in OTHER_SCHEDULES:
            every = request.backward_apart is True
            for plan in plans:
                for apart in choose_backwards_apart(plan, self._cluster, every=every):
                    yield from self._on_ranks(plan, ranks_with_backwards(apart, self._cluster))
            sizes = sizes_of_stages(self._problem.request, self._problem.profile, ranks)
            for size in sizes if request.fixed_stages is None else ():
                if not self._expired():
                    yield from self._cut_for_apart(size, every=every)

    def _cut_for_apart(self, size: int, *, every: bool) -> Iterator[Plan]:
        with suppress(OutOfTimeError):
            cut = self._cutter.with_backwards_apart(
                size, every=every, recompute=self._request.recompute
            )
            if cut is not None and max(cut.devices) > 1:
                ranks = ranks_with_backwards([count > 1 for count in cut.devices], self._cluster)
                yield from in_every_order(self._problem, cut.partition, ranks, size)

    def _other_schedules(self, plans: Sequence[Plan], *, splits_backward: bool) -> Iterator[Plan]:
        if self._request.every_schedule:
            yield from propose_other_schedules(
                self._problem, self._cutter, plans, splits_backward=splits_backward
            )

    def _numbers_of_copies(self) -> list[int]:
        """Numbers of copies of a pipeline to try with other schedules."""
        request, ranks = self._request, self._cluster.ranks
        if not request.every_schedule or self._expired():
            return []
        tried = promising_copies(self._problem) if request.replicas is None else [request.replicas]
        return [
            copies
            for copies in tried
            if 1 < copies <= ranks and ranks // copies <= MAX_RANKS_OF_VARIANTS
        ]

    def _copies_of_other_schedules(self, copies: int) -> Iterator[Plan]:
        """Copies of pipelines with whole backwards and several stages per rank."""
        problem = self._problem
        one = one_copy(problem, copies)
        cutter = Cutter(one, CutSpace.plain(problem.graph), self._expired)
        for plan in propose_other_schedules(one, cutter, (), splits_backward=False):
            copied = (plan_of(problem, each) for each in copies_of(problem, plan, copies))
            asked = problem.request
            yield from (
                each for each in copied if asked.replicas or has_size_asked_for(each, asked)
            )

    def _offload_smaller_micro_batches(self) -> None:
        """Try smaller and smaller micro-batches, until a plan fits."""
        problem, request = self._problem, self._request
        with suppress(InfeasibleError):
            counts = stage_counts(request, problem.cluster.ranks, len(problem.graph))
            for size in micro_batch_sizes(request, request.batch_size):
                if self.judge.plans or self._expired():
                    return
                self._consider(
                    plan for stages in reversed(counts) for plan in self._offloaded(stages, size)
                )

    def _offloaded(self, stages: int, size: int) -> Iterator[Plan]:
        """Plans whose stages are cut for the memory limits if all offload."""
        problem = self._problem
        if (stages, size) in self._offloaded_areas or not problem.could_hold(stages):
            return
        self._offloaded_areas.add((stages, size))
        orders = open_orders(problem.request, stages, problem.micro_batches(size))
        on_device = tuple(min(depth, ON_THE_DEVICE) for depth in orders[0][1])
        for mix in self._cutter.mixes(stages):
            with suppress(OutOfTimeError):
                cuts = merged(
                    self._cutter.within_limits(cut_request(problem, size, on_device, mix))
                )
                for layout in layouts_of(problem, cuts):
                    for order in orders:
                        yield plan_of(problem, Choice(layout, size, *order))


def in_every_order(
    problem: Problem, partition: Partition, ranks: Ranks, size: int
) -> Iterator[Plan]:
    """Plans with every open schedule and warm-up.

    If the backward of a stage has a rank of its own, one more micro-batch is in flight between
    the two ranks.

    Args:
        ranks: of each stage: one, or one for the forward and one for the backward.
    """
    request = problem.request
    stages, count = len(partition), problem.micro_batches(size)
    orders = open_orders(request, stages, count)
    apart = max(map(len, ranks)) > 1
    if apart and request.warm_up is None and request.schedule in (None, ONE_F_ONE_B.name):
        deeper = tuple(min(count, 2 * (stages - stage)) for stage in range(stages))
        orders = [*orders, (ONE_F_ONE_B.name, deeper)]
    firsts, others = (
        tuple(of_stage[:1] for of_stage in ranks),
        tuple(of_stage[1:] for of_stage in ranks),
    )
    for order in dict.fromkeys(orders):
        choice = Choice(Layout(partition, firsts), size, *order, backward_ranks=others)
        yield plan_of(problem, choice)


def choose_backwards_apart(
    plan: Plan, cluster: Cluster, *, every: bool
) -> Iterator[tuple[bool, ...]]:
    """Which stages use the free ranks of a plan: one or more of the largest."""
    stages, spare = len(plan.stages), cluster.ranks - len(plan.stages)
    loads = [stage.cost.forward_s + stage.cost.backward_s for stage in plan.stages]
    largest = sorted(range(stages), key=lambda index: (-loads[index], index))
    most = min(stages, spare)
    for count in sorted({most, *(1 << power for power in range(most.bit_length()))}):
        if 0 < count <= most and (count == stages or not every):
            chosen = set(largest[:count])
            yield tuple(index in chosen for index in range(stages))


def _assumed_host(plan: Plan, cluster: Cluster) -> tuple[str, ...]:
    """The assumption to report if stages offload over a link that was not measured."""
    devices = [cluster.device(r) for stage in plan.stages if stage.offload for r in stage.ranks]
    if not any(device.offload_link(plan.offload_to).assumed for device in devices):
        return ()
    if plan.offload_to is OffloadTarget.DISK:
        return ("the bandwidth of the nodes' disks is assumed, not measured",)
    return ("the link between a device and its host's memory is assumed, not measured",)
