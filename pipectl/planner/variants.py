"""Plans that offload, run backwards on ranks of their own, or have any schedule.

The search without any of this comes first. From what it finds, with the memory there is and as if
there were enough, proposals are derived; each is simulated as if its stages kept everything, and in
the order of these times gets ways to stay within memory, until no proposal can be better than the
best. What the search found stays if nothing is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf

from pipectl.cluster import Cluster
from pipectl.errors import InfeasibleError, OutOfTimeError
from pipectl.plan import OffloadTarget, Plan
from pipectl.plan import Search as Findings
from pipectl.planner.activations.blocks import BlockPlans
from pipectl.planner.activations.modes import Keeping, ways
from pipectl.planner.activations.proposals import MOST_RANKS, Proposals
from pipectl.planner.assumptions import baseline_bytes
from pipectl.planner.bounds import least_step_s, work_s
from pipectl.planner.judge import PLANNER, TIE, Trials, largest_load_s, out_of_time, preference
from pipectl.planner.request import PlanRequest
from pipectl.planner.schedules.named import SPLIT_GAIN
from pipectl.profile import Profile

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
    limit, baseline = request.memory_limit_bytes, baseline_bytes(profile)
    trials = Trials(cluster, limit, baseline, expired)
    proposals = Proposals(profile, cluster, request, expired)
    allowed = ways(request.recompute_choices, request.offload_choices, request.block_choices)
    keeping = Keeping(allowed, trials, cluster, BlockPlans(profile).of)
    variants = _Variants(proposals, keeping, trials, cluster, request, expired)
    found = variants.found()
    bound_s, finished = work_s(profile, cluster, request), variants.finished
    return [_described(plan, cluster, bound_s, finished=finished) for plan in found]


class _Variants:
    """One search for variants."""

    def __init__(
        self,
        proposals: Proposals,
        keeping: Keeping,
        trials: Trials,
        cluster: Cluster,
        request: PlanRequest,
        expired: Callable[[], bool],
    ) -> None:
        self._proposals = proposals
        self._keeping = keeping
        self._trials = trials
        self._cluster = cluster
        self._request = request
        self._expired = expired
        self._seen: set[Key] = set()
        self._plans: list[Plan] = []
        self._unlimited: list[Plan] = []
        self._is_short = any(trials.limit_of(rank) < inf for rank in range(cluster.ranks))

    def found(self) -> list[Plan]:
        """Plans that fit, the fastest first."""
        plain, reason = self._plain()
        if not self._request.blocks:
            self._plans = [plan for plan in plain if self._is_as_asked(plan)]
        if not self._expired() or (plain and not self._plans and self._request.blocks):
            self._try_all(plain)
        if not self._plans:
            raise out_of_time() if self._expired() else reason or self._nothing()
        return self._ranked(plain[:1])

    def _try_all(self, plain: Sequence[Plan]) -> None:
        """Everything that can be derived from what the search found."""
        offloads = self._is_short and self._request.offload is not False
        again = self._request.recompute is None or self._request.blocks is not False
        saves = offloads or (self._is_short and again)
        start = [*plain, *(self._unlimited if saves else [])]
        self._consider([*start, *(self._proposals.deeper(start) if saves else [])])
        self._consider(self._proposals.elsewhere(start))
        self._consider(self._proposals.split(start), SPLIT_GAIN)
        if offloads:
            self._consider(self._proposals.offloaded.like(start))
            self._consider_sizes()

    @property
    def finished(self) -> bool:
        """Whether all that there was to try was tried."""
        return not self._trials.are_over

    def _plain(self) -> tuple[list[Plan], Exception | None]:
        """What there is without variants, or why there is nothing.

        Memory is not short if the best plan without regard to it fits, and no stage has to save
        any: then that is what there is.
        """
        if self._is_short:
            self._unlimited = self._proposals.unlimited()
            fitting = [plan for plan in self._unlimited if self._trials.fits(plan)]
            saves = self._request.offload or self._request.blocks
            if fitting and fitting[0] is self._unlimited[0] and not saves:
                self._is_short = False
                return fitting, None
        found: list[Plan] = []
        reason: Exception | None = None
        for wanted in self._plain_requests():
            try:
                found += self._proposals.plain(wanted)
            except (InfeasibleError, OutOfTimeError) as error:
                reason = error
        return sorted(found, key=preference), reason

    def _plain_requests(self) -> list[PlanRequest]:
        """Where memory is short, recomputation of some stages also ends the search for plans that
        do with smaller micro-batches; so these are asked for, too."""
        wanted = self._request.without_variants
        if wanted.recompute is None and self._is_short:
            return [replace(wanted, recompute=False), wanted]
        return [wanted]

    def _consider_sizes(self) -> None:
        """Smaller and smaller micro-batches, until something fits."""
        with suppress(InfeasibleError):
            for proposed in self._proposals.offloaded.sizes():
                if self._plans or self._expired():
                    return
                self._consider(proposed)

    def _consider(self, proposed: Iterable[Plan], gain: float = TIE) -> None:
        """Keep what fits and could be best.

        Args:
            gain: share of the fastest step by which others must be faster.
        """
        fresh = [plan for plan in proposed if self._is_new(plan)]
        tried: list[Plan] = []
        for plan in fresh:
            if self._trials.are_over and (self._plans or tried):
                break
            if self._plans and least_step_s(plan, self._cluster) >= self._fastest_s * (1 - gain):
                continue
            tried.append(self._keeping.simplest(plan))
        for plan in sorted(tried, key=preference):
            if self._plans and (self._trials.are_over or not self._can_win(plan, gain)):
                return
            best = self._keeping.within_memory(plan)
            if best is None or not self._is_as_asked(best):
                continue
            if gain == TIE or not self._plans or self._can_win(best, gain):
                self._plans.append(best)

    @property
    def _fastest_s(self) -> float:
        return min(plan.predicted_step_s for plan in self._plans)

    def _can_win(self, plan: Plan, gain: float) -> bool:
        return plan.predicted_step_s < self._fastest_s * (1 - gain)

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

    def _ranked(self, plain: Sequence[Plan]) -> list[Plan]:
        """The best plan of every shape; first what the search found, if that is not slower."""
        shapes: dict[Key, Plan] = {}
        ordered = sorted(self._plans, key=preference)
        kept = [plan for plan in plain if plan in ordered and not self._is_beaten(plan)]
        for plan in [*kept, *ordered]:
            shapes.setdefault(_shape(plan), plan)
        return list(shapes.values())

    def _is_beaten(self, plan: Plan) -> bool:
        return self._fastest_s < plan.predicted_step_s * (1 - TIE)

    def _nothing(self) -> InfeasibleError:
        ranks = self._cluster.ranks
        if self._request.backward_apart and ranks > MOST_RANKS:
            return InfeasibleError(
                f"no feasible plan: of {ranks} ranks; all backwards on other ranks are looked for "
                f"on at most {MOST_RANKS}",
                cure=f"set {self._request.named('backward')} to together, or ask for fewer ranks",
            )
        asked = "all backwards on other ranks"
        key = "backward"
        if self._request.offload:
            asked, key = "all its stages offload", "offload"
        return InfeasibleError(
            f"no feasible plan: none has {asked}",
            cure=f"leave {self._request.named(key)} to the planner (auto), or ask for more ranks",
        )


def _shape(plan: Plan) -> Key:
    stages = tuple(
        (
            *(stage.replicas, bool(stage.backward_ranks), stage.recompute, stage.offload),
            stage.blocks is not None,
        )
        for stage in plan.stages
    )
    return stages, plan.schedule, plan.warm_up, plan.micro_batches, plan.replication


def _described(plan: Plan, cluster: Cluster, bound_s: float, *, finished: bool) -> Plan:
    """With what is known of how good it is, and what it rests on."""
    found = plan.search or Findings(
        planner=PLANNER,
        max_stage_load_s=largest_load_s(plan, cluster),
        lower_bound_s=bound_s / plan.micro_batches,
        exact=False,
        planning_s=0.0,
    )
    found = found.bounded(plan.predicted_step_s, bound_s)
    return replace(
        plan,
        search=replace(found, finished=found.finished and finished),
        assumptions=tuple(dict.fromkeys((*plan.assumptions, *_assumed_host(plan, cluster)))),
    )


def _assumed_host(plan: Plan, cluster: Cluster) -> tuple[str, ...]:
    """Whether stages offload over a link that nobody measured."""
    devices = [cluster.device(r) for stage in plan.stages if stage.offload for r in stage.ranks]
    if not any(device.offload_link(plan.offload_to).assumed for device in devices):
        return ()
    if plan.offload_to is OffloadTarget.DISK:
        return ("the bandwidth of the nodes' disks is assumed, not measured",)
    return ("the link between a device and its host's memory is assumed, not measured",)
