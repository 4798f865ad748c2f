"""The search with one rank per stage: what can be tried, and the queue in which it waits.

Everything waits by the least that its step can take:

- an *area*: a number of stages and a micro-batch size. It becomes candidates: good partitions
  from the dynamic programme (all there are, if they are few) with every schedule, warm-up and
  placement.
- a *candidate*, known by its estimate: the time of its step by the recurrence. The judge simulates
  it, or finds that it does not fit into memory.
- a *fit*: what did not fit is cut once more, for the memory limit, in a later turn.

The first candidate is made better before it is simulated: its stages are cut anew if its
micro-batch size is not the one they were cut for, and their borders move while that lowers its
estimate. When nothing left in the queue can beat the best, the borders of the best move once more,
while that makes its simulated step shorter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice
from math import inf

from pipectl.cluster import Cluster
from pipectl.errors import OutOfTimeError
from pipectl.plan import Plan
from pipectl.planner.areas import Area, Areas, first_choices
from pipectl.planner.graph.blocks import condense
from pipectl.planner.infeasible import infeasible, least_demanding
from pipectl.planner.judge import (
    Candidate,
    Candidates,
    Judge,
    Verdict,
    out_of_time,
    with_findings,
)
from pipectl.planner.partition.cut_space import CutSpace
from pipectl.planner.partition.cutter import Bound, Cutter, plain_fit
from pipectl.planner.partition.layout import Choice, Layout
from pipectl.planner.partition.moves import neighbours
from pipectl.planner.partition.programme import Check
from pipectl.planner.problem import Problem
from pipectl.planner.request import (
    PlanRequest,
    micro_batch_sizes,
    open_orders,
    stage_counts,
)
from pipectl.profile import Profile

MAX_LOOKS = 2_000_000
"""While borders move: partitions times what one costs, in operators, actions and messages."""
MIN_GAIN = 1e-6
"""Share of the step by which a move of borders makes it shorter at least."""
MAX_FITTINGS = 24
"""Memory-limited searches, the most promising first."""


@dataclass(frozen=True)
class _Fit:
    """Stages to be cut for the memory limit."""

    area: Area
    schedule: str
    warm_up: tuple[int, ...]


_Item = Area | Candidates | _Fit


class Explorer:
    """Tries what could be best, in the order of what it could take at least.

    Args:
        counts: numbers of stages to try.
        check: called often; raises to end the search.
    """

    def __init__(
        self, problem: Problem, space: CutSpace, counts: Sequence[int], check: Check
    ) -> None:
        self.problem = problem
        self.judge = Judge(problem)
        self._check = check
        self._areas = Areas(problem, space, counts, check)
        self._cutter = Cutter(problem, space, check)
        self._queue: list[tuple[float, tuple[int, ...], int, _Item]] = []
        self._pushed = 0
        self._fits: set[_Fit] = set()
        self._fitted = 0
        self._hopeless: list[_Fit] = []
        self._memory_is_short = False
        self._complete: dict[Area, Candidates] = {}
        self._opened: list[Candidates] = []
        self._minima: set[Choice] = set()
        self._looks = MAX_LOOKS

    def run(self) -> None:
        """Find the best plan; what is found so far is with the judge at any time."""
        for area in self._areas.all:
            self._push(area.least_s, (area.stages, 0, 0, area.micro_batches), area)
        while self._queue:
            bound_s, _, _, item = heappop(self._queue)
            self._check()
            if self.judge.is_beaten(bound_s):
                break
            if isinstance(item, Area):
                self._open(item)
            elif isinstance(item, Candidates):
                self._judge_next(item)
            else:
                self._fit(item)
        if self.judge.best() is None:
            self._fit_with_smaller_micro_batches()
        self._improve()

    def bound(self, stages: int, size: int, *, finished: bool) -> Bound:
        """What is proven about partitions into so many stages; quickly if time is up."""
        if finished:
            with suppress(OutOfTimeError):
                return self._areas.bound(stages, size)
        return self._areas.quick_bound(stages, size)

    def least_step_s(self) -> float:
        """No plan with the numbers of stages and micro-batch sizes that were tried takes less."""
        bounds_s = [self.judge.fastest_s]
        for area in self._areas.known:
            complete = self._complete.get(area)
            if complete is None:
                bounds_s.append(area.least_s)
            else:
                bounds_s += [complete.next_s, *map(self.judge.least_s, complete.taken)]
        return min(bounds_s)

    def alternatives(self, best: Verdict, most: int) -> list[Verdict]:
        """The next best plans of other shapes; most were not simulated because they are beaten."""
        options = [each for opened in self._opened for each in opened.best_of_orders()]
        known = self.judge.families()
        for candidate in sorted(options, key=lambda each: (each.bound_s, each.simplicity)):
            if len(known) > most:
                break
            if candidate.family not in known and self.judge.may_fit(candidate):
                self.judge.examine(candidate)
                known = self.judge.families()
        return self.judge.alternatives(best, most)

    def _push(self, bound_s: float, simplicity: tuple[int, ...], item: _Item) -> None:
        self._pushed += 1
        heappush(self._queue, (bound_s, simplicity, self._pushed, item))

    def _push_candidates(self, candidates: Candidates) -> None:
        if candidates.next_s < inf:
            self._push(candidates.next_s, candidates.simplicity, candidates)

    def _open(self, area: Area) -> None:
        """From an area to its candidates.

        Once cuts were seen not to fit, stages that fit with the fewest micro-batches in flight are
        judged before other cuts are looked for, and if there are none, no others are.
        """
        if self._memory_is_short:
            fit = _Fit(area, *self._areas.orders(area.stages, area.size)[0])
            if fit not in self._fits:
                self._fits.add(fit)
                self._fit(fit)
            if self._is_hopeless(fit):
                return
        everything = self._areas.everything(area)
        if everything is None:
            candidates = self._candidates(self._areas.layouts(self._areas.cuts(area.stages)), area)
        else:
            candidates = self._complete[area] = self._candidates(everything, area)
        self._opened.append(candidates)
        self._push_candidates(candidates)
        if not self._memory_is_short and not any(map(self.judge.may_fit, candidates)):
            self._memory_is_short = self.problem.has_limits

    def _judge_next(self, candidates: Candidates) -> None:
        """Judge the most promising candidate; what does not fit waits to be cut anew."""
        candidate = candidates.take()
        if self.judge.best() is None and not self.problem.has_limits:
            self.judge.judge(self._polished(candidate))
        if not self.judge.judge(candidate) and self.problem.has_limits:
            choice, area = candidate.choice, self._area_of(candidate)
            fit = _Fit(area, choice.schedule, choice.warm_up)
            if fit not in self._fits:
                self._fits.add(fit)
                self._push(area.least_s, candidate.simplicity, fit)
        self._push_candidates(candidates)

    def _candidates(self, layouts: Sequence[Layout], area: Area) -> Candidates:
        """Layouts of an area in every order."""
        orders = self._areas.orders(area.stages, area.size)
        return Candidates(self.problem, layouts, area.size, orders)

    def _fit(self, fit: _Fit) -> None:
        """Cut anew, within the memory limit."""
        if self._fitted < MAX_FITTINGS and not self._is_hopeless(fit):
            if self._consider_fit(fit):
                self._fitted += 1
            else:
                self._hopeless.append(fit)

    def _is_hopeless(self, fit: _Fit) -> bool:
        """Whether less of everything found no stages that fit."""
        return any(
            other.area.stages == fit.area.stages
            and other.area.size <= fit.area.size
            and all(less <= more for less, more in zip(other.warm_up, fit.warm_up, strict=True))
            for other in self._hopeless
        )

    def _consider_fit(self, fit: _Fit) -> bool:
        """Judge the partitions that fit best, without and with recomputation; are there any?"""
        area, found = fit.area, False
        for mix in self._areas.mixes(area.stages):
            for recompute in self.problem.request.recompute_choices:
                wanted = plain_fit(self.problem, area.size, fit.warm_up, mix, recompute=recompute)
                cuts = self._cutter.balanced(wanted)
                found |= bool(cuts)
                layouts, order = self._areas.layouts(cuts), (fit.schedule, fit.warm_up)
                self.judge.consider(Candidates(self.problem, layouts, area.size, [order]))
        return found

    def _fit_with_smaller_micro_batches(self) -> None:
        """More micro-batches than speed asks for, down to single samples; most stages help most.

        Where stages fit, balance may need smaller ones still.
        """
        request = self.problem.request
        counts = [count for count in self._areas.counts if self.problem.could_hold(count)]
        for size in micro_batch_sizes(request, request.batch_size):
            for stages in reversed(counts):
                area = self._areas.of(stages, size)
                fresh = size < min(self._areas.sizes(stages))
                if fresh and not self.judge.is_beaten(area.least_s):
                    depths = open_orders(request, stages, area.micro_batches)
                    self._consider_fit(_Fit(area, *depths[0]))

    def _improve(self) -> None:
        """Move borders of the best partition while that makes its simulated step shorter."""
        best = self.judge.best()
        if best is None or self._area_of(best.candidate) in self._complete:
            return
        if self.problem.has_limits:
            self.judge.consider(self._recut(self._area_of(best.candidate)))
        else:
            self.judge.judge(self._polished(best.candidate))
        while not self.judge.is_beaten(0.0):
            before = self.judge.best()
            assert before is not None
            candidate = before.candidate
            exact = before.step_s <= candidate.bound_s * (1 + MIN_GAIN)
            if exact and candidate.choice in self._minima:
                return  # the bounds are what is simulated: no neighbour can be better
            self.judge.consider(self._near(candidate))
            if self.judge.best() is before:
                return

    def _polished(self, candidate: Candidate) -> Candidate:
        """The best by its bound that is found by cutting anew and by moving borders.

        Stages that are balanced at one micro-batch size need not be at another.
        """
        area = self._area_of(candidate)
        if area in self._complete or candidate.choice in self._minima:
            return candidate
        recut = self._recut(area)
        if recut.next_s < candidate.bound_s:
            candidate = recut.take()
        every = False
        while self._looks > 0:
            near = self._near(candidate, every=every)
            if near.next_s < candidate.bound_s * (1 - MIN_GAIN):
                candidate, every = near.take(), False
            elif every:
                self._minima.add(candidate.choice)
                break
            else:
                every = True
        return candidate

    def _recut(self, area: Area) -> Candidates:
        """Good cuts for the size of an area, if that is another than all are cut for first."""
        is_other = area.size != self._areas.reference_size
        cuts = self._areas.cuts(area.stages, area.size) if is_other else []
        return self._candidates(self._areas.layouts(cuts), area)

    def _near(self, candidate: Candidate, *, every: bool = False) -> Candidates:
        """The neighbours of a candidate, in every order; none once enough were looked at."""
        self._check()
        area = self._area_of(candidate)
        times = self.problem.block_times(area.size)
        found = neighbours(candidate.layout, self.problem.graph, times, every=every)
        look = len(self.problem.profile.operators) + 2 * area.micro_batches * area.stages
        near = list(islice(found, max(0, self._looks // look)))
        self._looks -= max(1, len(near)) * look
        return self._candidates(near, area)

    def _area_of(self, candidate: Candidate) -> Area:
        choice = candidate.choice
        return self._areas.of(len(choice.ranks), choice.size)


def straight_plans(
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
    expired: Callable[[], bool],
    alternatives: int,
) -> list[Plan]:
    """The best plan with one rank per stage, and the next best of other shapes, with predictions.

    Args:
        expired: asked now and then; once it is true, the search ends.
        alternatives: how many plans besides the best.

    Raises:
        InfeasibleError: nothing fits; says how much is missing and what would help.
        OutOfTimeError: time was over before any plan was found, and even cuts do not fit.
    """
    graph = condense(profile)
    counts = stage_counts(request, cluster.ranks, len(graph))
    space = CutSpace.of(graph, profile)
    if len(space.graph) < counts[-1]:  # too few for the stages: small blocks stay apart
        space = CutSpace.sample(graph)
    problem = Problem(profile, cluster, request, space.graph)

    def check() -> None:
        if expired():
            raise out_of_time()

    explorer, finished = Explorer(problem, space, counts, check), True
    try:
        explorer.run()
    except OutOfTimeError:
        finished = False
    best, demand, cutter = explorer.judge.best(), None, Cutter(problem, space, check)
    if best is None:  # a last resort
        if finished:
            candidate, demand = least_demanding(problem, cutter, counts)
            layouts = [candidate]
        else:
            layouts = list(first_choices(problem, counts))
        for layout, size, order in layouts:
            choice = problem.choice(layout, size, order)
            micro_batches = problem.micro_batches(size)
            explorer.judge.examine(Candidate(choice, layout, micro_batches, 0.0))
        best = explorer.judge.best()
    if best is None:
        raise infeasible(problem, cutter, demand) if demand else out_of_time()
    others = explorer.alternatives(best, alternatives) if alternatives and finished else []
    least_s, plans = explorer.least_step_s(), []
    for plan in (verdict.plan for verdict in (best, *others)):
        bound = explorer.bound(len(plan.stages), plan.micro_batch_size, finished=finished)
        ended = finished and not explorer.judge.gave_up
        plans.append(with_findings(plan, cluster, least_s, load_bound=bound, finished=ended))
    return plans
