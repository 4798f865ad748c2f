"""The search for the best plan that a request allows.

:func:`make_plan` goes one of three ways:

- A named schedule besides 1F1B and GPipe, or a user's own: :mod:`pipectl.planner.other_schedules`.
- :func:`plain_plans`: stages, their ranks and replicas, micro-batches, and 1F1B or GPipe; see
  :mod:`pipectl.planner.explorer`. If every stage has the same number of replicas, these are copies
  of a whole pipeline: one copy is planned for its share of the ranks and samples, and then all
  copies are simulated together. If the numbers of replicas are open, stage by stage, copies are
  planned as well, for the numbers of them that are promising.
- :func:`varied_plans`: for most jobs. Plans that offload, run backwards on separate ranks,
  recompute segment by segment, or have another schedule are derived from plain plans, which are
  searched both within the memory limits and without limits. Proposals have deeper warm-ups, looser
  cuts, backwards on other ranks, or other schedules. Each is simulated as if its stages kept
  everything; in the order of these times, proposals then get modes that stay within memory, until
  no proposal can be better than the best plan. A plain plan stays unless another is faster.

If an operator takes longer than its share, no cut balances the stages. If the forward and backward
of a stage run on two ranks (PipeFB), the bottleneck is only the longer of the two, as long as the
saved values of a micro-batch travel in no more time. The dynamic programme cuts stages for this
(:meth:`pipectl.planner.partition.cutter.Cutter.with_backwards_elsewhere`); in plans cut without it,
the largest stages use the free ranks.

With offload, a device holds about two micro-batches of a stage, whatever its warm-up. So stages are
cut for the memory limit as if two were in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from math import ceil, inf
from time import perf_counter

from pipectl.cluster import Cluster, OffloadTarget
from pipectl.errors import InfeasibleError, OutOfTimeError
from pipectl.plan import Plan, Replication
from pipectl.planner.bounds import PLANNER, copies_bound_s, with_findings, work_bound_s
from pipectl.planner.explain.what_if import with_ranks, with_unlimited_memory
from pipectl.planner.explorer import explore
from pipectl.planner.graph.downsets import CutSpace
from pipectl.planner.infeasible import infeasible, least_demanding
from pipectl.planner.judge import MAX_ACTIONS, TIE, out_of_time, preference
from pipectl.planner.modes import ON_THE_DEVICE, Shortlist
from pipectl.planner.other_schedules import (
    SEVERAL_STAGES_GAIN,
    SPLIT_GAIN,
    UNMEASURED_SPLIT_GAIN,
    named_plan,
    orders_of_schedule,
    propose_other_schedules,
)
from pipectl.planner.partition.cutter import Cutter, cut_request, layouts_of, merged
from pipectl.planner.partition.layout import Choice, Layout, ranks_with_backwards
from pipectl.planner.problem import Problem
from pipectl.planner.replica_search import MAX_ACTIONS_OF_REPLICAS
from pipectl.planner.request import (
    OTHER_SCHEDULES,
    PlanRequest,
    choices,
    micro_batch_sizes,
    open_orders,
    stage_counts,
    takes,
)
from pipectl.planner.simple import promising_copies
from pipectl.profile import Profile
from pipectl.schedule import SCHEDULES
from pipectl.units import plural

MAX_ALTERNATIVES = 5
"""Number of plans besides the best."""
MAX_STARTS = 5
"""Plans besides the best from which others are derived."""
MIN_GAIN_OF_COPIES = 0.01
"""Copies of a pipeline are planned if the lower bound of their step is shorter by this share."""
MAX_RANKS = 64
"""With more, only 1F1B and GPipe are tried, and no backwards on other ranks."""

Expired = Callable[[], bool]
Key = tuple[object, ...]


def make_plan(
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
    expired: Expired = lambda: False,
) -> Plan:
    """The fastest simulated plan that fits into memory, with its prediction.

    Args:
        expired: called repeatedly; once it returns true, the best plan so far is returned, or an
            even cut if there is none.

    Raises:
        InfeasibleError: nothing fits; says how much is missing and what would help.
        OutOfTimeError: time was up before any plan was found, and even cuts do not fit.
    """
    return search_plans(profile, cluster, request, expired, alternatives=0)[0]


def search_plans(
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
    expired: Expired = lambda: False,
    *,
    alternatives: int = MAX_ALTERNATIVES,
) -> list[Plan]:
    """The plan of :func:`make_plan`, then at most ``alternatives`` of the next best.

    These differ from it and from each other in more than their cuts, and are sorted by their steps.
    """
    started_s = perf_counter()
    schedule = SCHEDULES.get(request.schedule or "")
    if request.listed is not None or (schedule is not None and not schedule.flushes):
        plans = [named_plan(profile, cluster, request, expired)]
    elif request.has_variants:  # a job leaves schedules, offload and blocks open by default
        plans = varied_plans(profile, cluster, request, expired)[: 1 + alternatives]
    else:
        plans = plain_plans(profile, cluster, request, expired, alternatives)
    best = plans[0]
    if best.search is not None:
        planning_s = perf_counter() - started_s
        best = replace(best, search=replace(best.search, planning_s=planning_s))
    return [best, *plans[1:]]


def plain_plans(
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
    expired: Expired,
    alternatives: int = MAX_STARTS,
) -> list[Plan]:
    """The best plan, and the next best of other shapes, with predictions.

    Args:
        request: without variants: no offload, no backwards on other ranks, only 1F1B or GPipe.
        expired: called repeatedly; once it returns true, the search ends.
        alternatives: number of plans besides the best.

    Raises:
        InfeasibleError, OutOfTimeError: there is no plan.
    """
    copies = request.replicas
    if copies not in (None, 1):
        return _copied_plans(profile, cluster, request, expired, copies)
    if request.schedule in OTHER_SCHEDULES:
        return [named_plan(profile, cluster, request, expired)]
    if copies == 1:
        return explore(profile, cluster, request, expired, alternatives)
    return _plans_with_copies(profile, cluster, request, expired, alternatives)


def _plans_with_copies(
    profile: Profile, cluster: Cluster, request: PlanRequest, expired: Expired, alternatives: int
) -> list[Plan]:
    """Plans with any number of replicas per stage, and copies of whole pipelines.

    Copies are planned for the numbers of them whose even cuts have the shortest steps, if a lower
    bound says that their steps could be shorter than the best so far.

    Raises:
        InfeasibleError, OutOfTimeError: there is no plan.
    """
    plans, problem, failed = [], Problem(profile, cluster, request), None
    try:
        plans = explore(profile, cluster, request, expired, alternatives)
    except (InfeasibleError, OutOfTimeError) as error:
        failed = error
    for copies in promising_copies(problem):
        fastest_s = min((plan.predicted_step_s for plan in plans), default=inf)
        if copies_bound_s(problem, copies) < fastest_s * (1 - MIN_GAIN_OF_COPIES):
            with suppress(InfeasibleError, OutOfTimeError):
                found = _copied_plans(profile, cluster, request, expired, copies)
                plans += [plan for plan in found if _has_size_asked_for(plan, request)]
    if failed is not None and not plans:
        raise failed
    shapes: dict[Key, Plan] = {}
    for plan in sorted(plans, key=preference):
        shapes.setdefault(_shape(plan), plan)
    return [*shapes.values()][: 1 + alternatives]


def _has_size_asked_for(plan: Plan, request: PlanRequest) -> bool:
    """Whether micro-batches are as many as requested; copies may need a multiple of them."""
    count = request.micro_batches
    return count is None or plan.micro_batch_size == ceil(request.batch_size / count)


def plans_of_choices(
    problem: Problem,
    proposals: Iterable[Choice],
    expired: Expired = lambda: False,
    *,
    planner: str = PLANNER,
) -> list[Plan]:
    """The plans of choices that fit, with predictions, the fastest first.

    Of plans with equal numbers of stages, replicas and micro-batches, only the best is returned.
    Plans that do not fit recompute if they may, as long as that could be faster than the best.

    Args:
        expired: called repeatedly; once it returns true, the plans so far are returned.
        planner: name of the planner that made the choices.
    """
    shortlist = Shortlist(problem, expired, max_actions=MAX_ACTIONS_OF_REPLICAS)
    shortlist.consider(map(problem.plan, proposals))
    shapes: dict[object, Plan] = {}
    for plan in sorted(shortlist.plans, key=preference):
        replicas = tuple(stage.replicas for stage in plan.stages)
        shapes.setdefault((replicas, plan.micro_batches, plan.replication), plan)
    # The only lower bound on the step is the total work.
    bound_s = work_bound_s(problem, shortlist.evaluator.sizes)
    return [
        with_findings(plan, bound_s, finished=shortlist.finished, planner=planner)
        for plan in shapes.values()
    ]


def _copied_plans(
    profile: Profile, cluster: Cluster, request: PlanRequest, expired: Expired, copies: int
) -> list[Plan]:
    """Plans of several copies of a pipeline, with predictions, fastest first.

    Raises:
        InfeasibleError: there are more copies than ranks, or nothing fits.
    """
    if copies > cluster.ranks:
        raise InfeasibleError(
            f"no feasible plan: {copies} replicas of every stage, but only {cluster.ranks} ranks",
            cure="use fewer replicas, or ask for more ranks",
        )
    request = replace(request, replicas=copies)
    alone = plain_plans(*_one_copy(profile, cluster, request, copies), expired)
    problem = Problem(profile, cluster, request)
    copied = [choice for plan in alone for choice in _copied(problem, plan, copies)]
    if request.smallest is not None and not copied:
        raise InfeasibleError(
            f"no feasible plan: {copies} replicas would split a micro-batch of an epoch into "
            f"parts of fewer than {plural(request.smallest.samples, 'sample')}: "
            f"{request.smallest.reason}",
            cure="use fewer replicas or larger micro-batches; data.drop_last: true leaves an "
            "incomplete last batch out",
        )
    plans = plans_of_choices(problem, copied)
    if not plans:
        raise InfeasibleError(
            f"no feasible plan: {copies} replicas of every stage take too much memory",
            cure="use fewer replicas, so that every pipeline has more ranks",
        )
    return plans


def _one_copy(
    profile: Profile, cluster: Cluster, request: PlanRequest, copies: int
) -> tuple[Profile, Cluster, PlanRequest]:
    """The ranks and samples of one of several copies of a pipeline."""
    own = profile
    if request.shard_optimizer:  # each copy holds a share of the optimizer's state
        optimizer = profile.optimizer_cost
        state = optimizer.state_bytes_per_parameter_byte / copies
        own = replace(profile, optimizer=replace(optimizer, state_bytes_per_parameter_byte=state))
    count = request.micro_batches
    one = replace(
        request,
        replicas=1,
        batch_size=ceil(request.batch_size / copies),
        micro_batches=None if count is None else ceil(count / copies),
    )
    return own, with_ranks(cluster, cluster.ranks // copies), one


def _copied(problem: Problem, plan: Plan, copies: int) -> Iterator[Choice]:
    """Choices with the replicas of a stage on neighbouring ranks, and with copy after copy."""
    request, partition = problem.request, problem.partition_of(s.nodes for s in plan.stages)
    firsts = [stage.ranks[0] for stage in plan.stages]
    together = tuple(tuple(first * copies + copy for copy in range(copies)) for first in firsts)
    apart = tuple(tuple(first + copy * plan.ranks for copy in range(copies)) for first in firsts)
    for ranks in (together, apart):
        for replication in request.replications:
            size = plan.micro_batch_size
            if replication is Replication.SPLIT and request.micro_batches is None:
                size *= copies
            elif replication is Replication.SPLIT:
                assert request.micro_batches is not None
                size = max(copies, ceil(request.batch_size / request.micro_batches))
            if not takes(request, size, copies if replication is Replication.SPLIT else 1):
                continue
            count = problem.micro_batches(size)
            in_turn = (copies,) * len(plan.stages) if replication is Replication.WHOLE else None
            if plan.schedule in OTHER_SCHEDULES:
                shape = len(plan.stages), len(set(firsts))
                orders = orders_of_schedule(plan.schedule, *shape, request, count, in_turn)
            else:
                orders = open_orders(request, len(plan.stages), count, in_turn)
            for order in orders:
                yield Choice(Layout(partition, ranks), size, *order, replication)


def varied_plans(
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
    expired: Expired = lambda: False,
) -> list[Plan]:
    """Plans with variants and predictions, fastest first; in ties, those without variants first.

    Raises:
        InfeasibleError, OutOfTimeError: no plan fits, or none was found in time.
    """
    problem = Problem(profile, cluster, request)
    search = VariantSearch(problem, expired)
    plans = search.run()
    sizes = {plan.micro_batch_size for plan in plans}
    bound_s = work_bound_s(problem, sizes | search.shortlist.evaluator.sizes)
    finished = search.shortlist.finished and not expired()
    return [
        replace(
            with_findings(plan, bound_s, finished=finished),
            assumptions=tuple(dict.fromkeys((*plan.assumptions, *_assumed_host(plan, cluster)))),
        )
        for plan in plans
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
        self.shortlist = Shortlist(
            problem, expired, choices(self._request.offload), self._is_as_asked
        )
        self._cutter = Cutter(problem, CutSpace.plain(problem.graph), expired)
        self._offloaded_areas: set[tuple[int, int]] = set()
        self._seen: set[Key] = set()
        self._unlimited: list[Plan] = []
        self._memory_is_short = False

    def run(self) -> list[Plan]:
        """The best plan of every shape that fits, the fastest first."""
        request, shortlist = self._request, self.shortlist
        plain, reason = self._plain()
        if not request.blocks:
            shortlist.add(plain)
        if not self._expired() or (plain and not shortlist.plans and request.blocks):
            self._try_all(plain)
        if not shortlist.plans and not self._expired() and isinstance(reason, InfeasibleError):
            self._try_least_demanding(reason)
        if not shortlist.plans:
            raise out_of_time() if self._expired() else reason or self._nothing()
        ordered = sorted(shortlist.plans, key=preference)
        # Plain plans come first if they are not slower.
        kept = [
            plan
            for plan in plain[:1]
            if plan in ordered and shortlist.fastest_s >= plan.predicted_step_s * (1 - TIE)
        ]
        shapes: dict[Key, Plan] = {}
        for plan in [*kept, *ordered]:
            shapes.setdefault(_shape(plan), plan)
        return list(shapes.values())

    def _plain(self) -> tuple[list[Plan], Exception | None]:
        """Plans without variants, or the error that says why there are none.

        If the best plan without memory limits fits, and no stage has to save memory, plans without
        limits are returned.
        """
        request, wanted = self._request, self._request.without_variants
        if self._problem.has_limits:
            self._unlimited = self._without_limits(wanted)
            fitting = [plan for plan in self._unlimited if self.shortlist.evaluator.fits(plan)]
            saves = request.offload or request.blocks
            if fitting and fitting[0] is self._unlimited[0] and not saves:
                return fitting, None
            self._memory_is_short = True
        try:
            return plain_plans(self._problem.profile, self._cluster, wanted, self._expired), None
        except (InfeasibleError, OutOfTimeError) as error:
            return [], error

    def _without_limits(self, request: PlanRequest) -> list[Plan]:
        cluster = with_unlimited_memory(self._cluster)
        free = replace(request, memory_limit_bytes=None)
        with suppress(InfeasibleError, OutOfTimeError):
            plans = plain_plans(self._problem.profile, cluster, free, self._expired)
            return [replace(plan, memory_limit_bytes=request.memory_limit_bytes) for plan in plans]
        return []

    def _try_all(self, plain: Sequence[Plan]) -> None:
        request = self._request
        offloads = self._memory_is_short and request.offload is not False
        recomputes = request.recompute is None or request.blocks is not False
        saves = offloads or (self._memory_is_short and recomputes)
        start = [*plain, *(self._unlimited if saves else [])]
        one_replica = request.replicas in (None, 1) and self._cluster.ranks <= MAX_RANKS
        self._consider([*start, *(self._with_every_order(start) if saves else [])])
        if one_replica:
            self._consider(self._elsewhere(start))
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
        """Shortlist plans that are new and could be best, with further simulations allowed."""
        self.shortlist.evaluator.extend(MAX_ACTIONS)
        self.shortlist.consider([plan for plan in proposed if self._is_new(plan)], gain)

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
        offload = choices(request.offload)
        more = True in offload or request.blocks is not False
        searched = request.schedule not in OTHER_SCHEDULES and request.replicas in (None, 1)
        if not (problem.has_limits and more and searched) or request.backward_apart:
            raise reason
        counts = stage_counts(request, problem.cluster.ranks, len(problem.graph))
        _, plan = least_demanding(problem, self._cutter, counts, offload)
        if not self.shortlist.evaluator.fits(plan):
            raise infeasible(problem, plan, offload)
        self.shortlist.add([plan])

    def _nothing(self) -> InfeasibleError:
        ranks = self._cluster.ranks
        if self._request.backward_apart and ranks > MAX_RANKS:
            return InfeasibleError(
                f"no feasible plan: all backwards on other ranks are planned for at most "
                f"{MAX_RANKS} ranks, not {ranks}",
                cure="set pipeline.backward to together, or ask for fewer ranks",
            )
        asked, key = "all backwards on other ranks", "backward"
        if self._request.offload:
            asked, key = "all its stages offload", "offload"
        return InfeasibleError(
            f"no feasible plan: none has {asked}",
            cure=f"leave pipeline.{key} to the planner (auto), or ask for more ranks",
        )

    def _with_every_order(self, plans: Sequence[Plan]) -> Iterator[Plan]:
        """The same stages in every order: in other modes, deeper warm-ups may fit."""
        for plan in plans if self._request.schedule not in OTHER_SCHEDULES else ():
            if all(stage.replicas == 1 for stage in plan.stages):
                yield from self._on_ranks(plan, tuple(stage.ranks for stage in plan.stages))

    def _on_ranks(self, plan: Plan, ranks: tuple[tuple[int, ...], ...]) -> Iterator[Plan]:
        """The stages of a plan on other ranks: one, or one each for forward and backward."""
        partition = self._problem.partition_of(stage.nodes for stage in plan.stages)
        return self._problem.in_every_order(partition, ranks, plan.micro_batch_size)

    def _elsewhere(self, plans: Sequence[Plan]) -> Iterator[Plan]:
        request, ranks = self._request, self._cluster.ranks
        if request.backward_apart is not False and request.schedule not in OTHER_SCHEDULES:
            every = request.backward_apart is True
            for plan in plans:
                for apart in choose_backwards_elsewhere(plan, self._cluster, every=every):
                    yield from self._on_ranks(plan, ranks_with_backwards(apart, self._cluster))
            sizes = self._problem.sizes(ranks)
            for size in sizes if request.fixed_stages is None else ():
                if not self._expired():
                    yield from self._cut_for_apart(size, every=every)

    def _cut_for_apart(self, size: int, *, every: bool) -> Iterator[Plan]:
        with suppress(OutOfTimeError):
            cut = self._cutter.with_backwards_elsewhere(
                size, every=every, recompute=self._request.recompute
            )
            if cut is not None and max(cut.devices) > 1:
                ranks = ranks_with_backwards([count > 1 for count in cut.devices], self._cluster)
                yield from self._problem.in_every_order(cut.partition, ranks, size)

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
        return [copies for copies in tried if 1 < copies <= ranks and ranks // copies <= MAX_RANKS]

    def _copies_of_other_schedules(self, copies: int) -> Iterator[Plan]:
        """Copies of pipelines with whole backwards and several stages per rank."""
        problem = self._problem
        shared = _one_copy(problem.profile, self._cluster, self._request, copies)
        one = Problem(*shared, problem.graph)
        cutter = Cutter(one, CutSpace.plain(problem.graph), self._expired)
        for plan in propose_other_schedules(one, cutter, (), splits_backward=False):
            copied = map(problem.plan, _copied(problem, plan, copies))
            asked = problem.request
            yield from (
                each for each in copied if asked.replicas or _has_size_asked_for(each, asked)
            )

    def _offload_smaller_micro_batches(self) -> None:
        """Try smaller and smaller micro-batches, until a plan fits."""
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
        """Plans whose stages are cut for the memory limits if all offload."""
        problem = self._problem
        if (stages, size) in self._offloaded_areas or not problem.could_hold(stages):
            return
        self._offloaded_areas.add((stages, size))
        orders = problem.orders(stages, size)
        on_device = tuple(min(depth, ON_THE_DEVICE) for depth in orders[0][1])
        for mix in self._cutter.mixes(stages):
            with suppress(OutOfTimeError):
                cuts = merged(
                    self._cutter.within_limits(cut_request(problem, size, on_device, mix))
                )
                for layout in layouts_of(problem, cuts):
                    for order in orders:
                        yield problem.plan(Choice(layout, size, *order))


def choose_backwards_elsewhere(
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
    """The assumption to report if stages offload over a link that was not measured."""
    devices = [cluster.device(r) for stage in plan.stages if stage.offload for r in stage.ranks]
    if not any(device.offload_link(plan.offload_to).assumed for device in devices):
        return ()
    if plan.offload_to is OffloadTarget.DISK:
        return ("the bandwidth of the nodes' disks is assumed, not measured",)
    return ("the link between a device and its host's memory is assumed, not measured",)
