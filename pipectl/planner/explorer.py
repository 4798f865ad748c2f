"""The search for stages, their ranks and replicas, micro-batches and the order of 1F1B or GPipe.

If stages may have replicas, these come first (:mod:`pipectl.planner.replica_search`), so that what
cannot be better is not tried with one rank per stage. Then a queue is ordered by lower bounds on
the step. Its entries are

- an *area*: a number of stages and a micro-batch size. It yields candidates: good partitions from
  the dynamic programme (or all, if there are few) with every schedule, warm-up and placement.
- a *candidate*, with an estimate: the time of its step by the recurrence. The judge simulates it,
  or rejects it because it does not fit into memory.
- a *recut*: stages that did not fit are cut again later, for the memory limit.

The first candidate is improved before it is simulated: its stages are cut again if its micro-batch
size is not the one they were cut for, and their borders move while that lowers its estimate.

If the smallest micro-batches that were tried are best, smaller ones follow; so does one stage more
or less than in the best plan. In the end, the borders of the best plan without replicas move again,
while that makes its simulated step shorter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from heapq import heappop, heappush
from itertools import count, islice
from math import inf

from pipectl.cluster import Cluster
from pipectl.errors import OutOfTimeError
from pipectl.plan import Plan
from pipectl.planner.bounds import with_findings, work_bound_s
from pipectl.planner.candidates import (
    Area,
    Areas,
    Candidates,
    judge_promising,
)
from pipectl.planner.costs.devices import exchanges, one_each
from pipectl.planner.graph.blocks import condense
from pipectl.planner.graph.downsets import CutSpace
from pipectl.planner.infeasible import infeasible, least_demanding
from pipectl.planner.judge import (
    MAX_ACTIONS_OF_SEARCH,
    Candidate,
    Judge,
    Outcome,
    Verdict,
    out_of_time,
)
from pipectl.planner.partition.cutter import Cutter, cut_request, layouts_of
from pipectl.planner.partition.layout import (
    FAR,
    FEW,
    Choice,
    Layout,
    neighbours,
)
from pipectl.planner.partition.replicated import MAX_UNITS
from pipectl.planner.problem import Problem
from pipectl.planner.replica_search import ReplicaSearch
from pipectl.planner.request import (
    PlanRequest,
    micro_batch_sizes,
    stage_counts,
)
from pipectl.planner.simple import even_choices
from pipectl.profile import Profile

MAX_MOVE_WORK = 2_000_000
"""Budget of border moves: the sum of operators, actions and messages over the partitions tried."""
PATIENCE, MAX_AT_ONCE = 80, 8
"""Turns without a better layout after which moves end; most turns that are estimated at once."""
BORDER_TURNS = 2
"""Number of turns at first that move the borders of a candidate: FEW and EVERY."""
MAX_ERROR = 0.01
"""Error of an estimate up to which the search goes on without a better move."""
MIN_GAIN = 1e-6
"""Least share of the step that a move of borders must save."""
NEAR = 1.25
"""Factor over the best step up to which a number of stages is tried with more micro-batches."""
MAX_RECUTS = 24
"""Maximum number of recuts that fit, the most promising first; others make a search unfinished."""


@dataclass(frozen=True)
class _Recut:
    """Stages to be cut for the memory limit."""

    area: Area
    schedule: str
    warm_up: tuple[int, ...]


_Item = Area | Candidates | _Recut


class Explorer:
    """Tries plans in the order of lower bounds on their steps.

    Args:
        counts: numbers of stages to try.
        expired: called repeatedly; once it returns true, OutOfTimeError is raised.
    """

    def __init__(
        self,
        problem: Problem,
        space: CutSpace,
        counts: Sequence[int],
        expired: Callable[[], bool],
    ) -> None:
        self.problem = problem
        self.judge = Judge(problem)
        self.cutter = Cutter(problem, space, expired)
        self._space = space
        self._areas = Areas(problem, space, counts, self.cutter)
        self._queue: list[tuple[float, tuple[int, ...], int, _Item]] = []
        self._pushed = 0
        self._recuts: set[_Recut] = set()
        self._recut_count = 0
        self._hopeless: list[_Recut] = []
        self._memory_is_short = False
        self._judged = False
        self._estimates_s: dict[Area, float] = {}
        self._complete: dict[Area, Candidates] = {}
        self._opened: list[Candidates] = []
        self._minima: set[Choice] = set()
        self._move_work = MAX_MOVE_WORK
        self._exchanges = cache(partial(exchanges, cluster=problem.cluster))

    def run(self) -> None:
        """Find the best plan; the judge has the best so far at any time."""
        if self.problem.request.replicas is None:
            ReplicaSearch(self.problem, self._space, self.cutter, self.judge).run()
            self.judge.evaluator.allow(MAX_ACTIONS_OF_SEARCH)
        areas = self._areas.all
        while areas:
            for area in areas:
                self._push(area.least_s, (area.stages, 0, 0, area.micro_batches), area)
            self._empty_queue()
            areas = [*self._smaller_areas(), *self._areas_between()]
        if self.judge.best() is None:
            self._recut_with_smaller_micro_batches()
        self._improve()

    def _empty_queue(self) -> None:
        """Open areas and judge candidates until no other can be better."""
        while self._queue:
            estimate_s, _, _, item = heappop(self._queue)
            self.cutter.check()
            if self.judge.is_beaten(estimate_s):
                break
            if isinstance(item, Area):
                self._open(item)
            elif isinstance(item, Candidates):
                self._judge_next(item)
            else:
                self._try_recut(item)

    def _smaller_areas(self) -> list[Area]:
        """The next smaller micro-batches for numbers of stages with which the smallest that were
        tried have the shortest estimate, not far above the best step."""
        request, areas = self.problem.request, list[Area]()
        every = micro_batch_sizes(request, request.batch_size)
        for stages in self._areas.counts if self.judge.best() is not None else ():
            estimates_s = {e.size: s for e, s in self._estimates_s.items() if e.stages == stages}
            best = min(estimates_s, key=lambda size: (estimates_s[size], size), default=0)
            smaller = [size for size in every if size < best][:1]
            near = smaller and estimates_s[best] < self.judge.fastest_s * NEAR
            if near and best == min(self._areas.sizes_known(stages)):
                areas.append(self._areas.of(stages, smaller[0]))
        return areas

    def _areas_between(self) -> list[Area]:
        """One stage more and one less than in the best plan, if not tried yet at its size."""
        best, ranks = self.judge.best(), self.problem.cluster.ranks
        several = best is not None and not _is_replicated(best.candidate.choice)
        if not several or self.problem.request.fixed_stages is not None or ranks > MAX_UNITS:
            return []
        assert best is not None
        stages, size = len(best.candidate.layout.ranks), best.candidate.choice.size
        most = min(ranks, len(self.problem.graph))
        return [
            self._areas.of(count, size)
            for count in (stages - 1, stages + 1)
            if 1 <= count <= most and count not in self._areas.counts
            if size not in self._areas.sizes_known(count) and self.problem.could_hold(count)
        ]

    def least_step_s(self) -> float:
        """Lower bound on the step of all plans with the tried numbers of stages and sizes."""
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
        for candidate in sorted(options, key=lambda each: (each.estimate_s, each.simplicity)):
            if len(known) > most:
                break
            if candidate.family not in known and candidate.may_fit:
                self.judge.examine(candidate)
                known = self.judge.families()
        return self.judge.alternatives(best, most)

    def last_resort(self, *, finished: bool) -> Verdict:
        """The plan that needs the least memory or, if time is up, even cuts.

        Raises:
            InfeasibleError, OutOfTimeError: they do not fit.
        """
        problem, counts, plan = self.problem, self._areas.counts, None
        tried = even_choices(problem, counts)
        if finished:
            choice, plan = least_demanding(problem, self.cutter, counts)
            tried = iter((choice,))
        for each in tried:
            self.judge.examine(Candidate(each, problem.micro_batches(each.size), 0.0))
        best = self.judge.best()
        if best is None:
            raise infeasible(problem, plan) if plan else out_of_time()
        return best

    def _push(self, estimate_s: float, simplicity: tuple[int, ...], item: _Item) -> None:
        self._pushed += 1
        heappush(self._queue, (estimate_s, simplicity, self._pushed, item))

    def _push_candidates(self, candidates: Candidates) -> None:
        if candidates.next_s < inf:
            self._push(candidates.next_s, candidates.simplicity, candidates)

    def _open(self, area: Area) -> None:
        """Queue the candidates of an area.

        Once memory is known to be short, stages are first cut for the fewest micro-batches in
        flight, of the smallest size and of the area's; if none of these fit, the area is dropped.
        """
        if self._memory_is_short:
            smallest = min(self._areas.sizes(area.stages))
            tried = [self._areas.of(area.stages, size) for size in (smallest, area.size)]
            recuts = [
                _Recut(each, *self.problem.orders(each.stages, each.size)[0]) for each in tried
            ]
            for recut in recuts:
                if recut not in self._recuts:
                    self._recuts.add(recut)
                    self._try_recut(recut)
            if self._is_hopeless(recuts[-1]):
                return
        everything = self._areas.everything(area)
        if everything is None:
            candidates = self._candidates(
                layouts_of(self.problem, self._areas.cuts(area.stages)), area
            )
        else:
            candidates = self._complete[area] = self._candidates(everything, area)
        self._opened.append(candidates)
        self._estimates_s[area] = candidates.next_s
        self._push_candidates(candidates)
        if not self._memory_is_short and not any(each.may_fit for each in candidates):
            self._memory_is_short = self.problem.has_limits

    def _judge_next(self, candidates: Candidates) -> None:
        """Judge the most promising candidate; if it does not fit, queue a recut."""
        candidate = candidates.take()
        if not self._judged and not self.problem.has_limits:
            self._polish(candidate)
        self._judged = True
        outcome = self.judge.judge(candidate)
        if outcome is Outcome.DOES_NOT_FIT and self.problem.has_limits:
            choice, area = candidate.choice, self._area_of(candidate)
            recut = _Recut(area, choice.schedule, choice.warm_up)
            if recut not in self._recuts:
                self._recuts.add(recut)
                self._push(area.least_s, candidate.simplicity, recut)
        self._push_candidates(candidates)

    def _candidates(self, layouts: Sequence[Layout], area: Area) -> Candidates:
        return Candidates(self.problem, layouts, area.size)

    def _try_recut(self, recut: _Recut) -> None:
        """Cut stages again, within the memory limit."""
        if self._is_hopeless(recut):
            return
        if self._recut_count == MAX_RECUTS:
            self.judge.gave_up = True
        elif self._judge_recut(recut):
            self._recut_count += 1
        else:
            self._hopeless.append(recut)

    def _is_hopeless(self, recut: _Recut) -> bool:
        """Whether a recut with no more samples in a micro-batch and in flight has failed."""
        size = recut.area.size
        return any(
            other.area.stages == recut.area.stages
            and other.area.size <= size
            and all(
                less * other.area.size <= more * size
                for less, more in zip(other.warm_up, recut.warm_up, strict=True)
            )
            for other in self._hopeless
        )

    def _judge_recut(self, recut: _Recut) -> bool:
        """Judge partitions cut without and with recomputation; false if none fits."""
        area, any_fits = recut.area, False
        for mix in self._areas.mixes(area.stages):
            wanted = cut_request(self.problem, area.size, recut.warm_up, mix)
            keeps = [replace(wanted, recompute=False)] if wanted.recompute is None else []
            for each in (*keeps, wanted):
                for cuts in self.cutter.within_limits(each):
                    layouts, order = layouts_of(self.problem, cuts), (recut.schedule, recut.warm_up)
                    candidates = Candidates(
                        self.problem, layouts, area.size, [order], only_fitting=True
                    )
                    outcomes = judge_promising(candidates, self.judge)
                    any_fits |= bool(outcomes - {Outcome.DOES_NOT_FIT})
                    if Outcome.DOES_NOT_FIT not in outcomes:
                        break  # with more memory counted, no stages are balanced better
        return any_fits

    def _recut_with_smaller_micro_batches(self) -> None:
        """Try more micro-batches than are fastest, down to single samples, most stages first.

        If stages fit, balanced stages may need still smaller micro-batches.
        """
        request = self.problem.request
        counts = [count for count in self._areas.counts if self.problem.could_hold(count)]
        for size in micro_batch_sizes(request, request.batch_size):
            for stages in reversed(counts):
                area = self._areas.of(stages, size)
                fresh = size < min(self._areas.sizes(stages))
                if fresh and not self.judge.is_beaten(area.least_s):
                    self._judge_recut(_Recut(area, *self.problem.orders(stages, size)[0]))

    def _improve(self) -> None:
        """Move borders of the best plan while that makes its simulated step shorter."""
        best = self.judge.best()
        if best is None or _is_replicated(best.candidate.choice) or self.judge.is_exhausted():
            return
        area = self._area_of(best.candidate)
        if area in self._complete:
            return
        if self.problem.has_limits:
            judge_promising(self._cut_for_size(area), self.judge)
        else:
            self._polish(best.candidate)
        while not self.judge.is_exhausted():
            before = self.judge.best()
            assert before is not None
            candidate = before.candidate
            exact = before.step_s <= candidate.estimate_s * (1 + MIN_GAIN)
            if exact and candidate.choice in self._minima:
                return  # estimates equal the simulation: no neighbour can be better
            area, orders = self._area_of(candidate), [candidate.choice[2:4]]
            if self.problem.has_limits:  # a neighbour may fit only in another order
                orders = self.problem.orders(area.stages, area.size)
            near = self._affordable(self._moves(candidate), area)
            judge_promising(Candidates(self.problem, near, area.size, orders), self.judge)
            if self.judge.best() is before:
                judge_promising(self._candidates([candidate.layout], area), self.judge)
            if self.judge.best() is before:
                return

    def _polish(self, candidate: Candidate) -> None:
        """Improve the estimate of a candidate by new cuts and by moves, then judge the best.

        Stages that are balanced at one micro-batch size need not be at another. The search is best
        first: the layout with the least estimate is moved next, first by some fractions of the
        load, then by all moves. If no move is better, the search goes on for some turns, because
        several moves together may be, unless the estimate is far from the simulation.
        """
        area = self._area_of(candidate)
        if area in self._complete or candidate.choice in self._minima:
            return
        other = self._cut_for_size(area)
        if other.next_s < candidate.estimate_s:
            candidate = other.take()
        numbers, turns, seen = count(), 0, {candidate.layout}
        queue = [(candidate.estimate_s, FEW, next(numbers), candidate)]
        reserve = self._move_work // 2
        while queue and turns < PATIENCE and self._move_work > reserve:
            at_once = min(max(1, turns // BORDER_TURNS), MAX_AT_ONCE, len(queue))
            starts = [heappop(queue) for _ in range(at_once)]
            turns += at_once
            for estimate_s, reach, _, start in starts:
                if reach < FAR:
                    heappush(queue, (estimate_s, reach + 1, next(numbers), start))
            moved = (each for _, reach, _, start in starts for each in self._moves(start, reach))
            fresh = self._affordable((each for each in moved if each not in seen), area)
            for near in self._candidates(fresh, area).best_of_layouts():
                seen.add(near.layout)
                better = near.estimate_s < candidate.estimate_s * (1 - MIN_GAIN)
                turn_s = near.estimate_s if better else near.estimate_s * (1 + 2 * MIN_GAIN)
                heappush(queue, (turn_s, FEW, next(numbers), near))
                if better:
                    candidate, turns = near, 0
            if turns == BORDER_TURNS:  # no move of a border is better
                self._minima.add(candidate.choice)
                self.judge.judge(candidate)
                if self.judge.least_s(candidate) > candidate.estimate_s * (1 + MAX_ERROR):
                    break
        judge_promising(
            self._candidates([candidate.layout], area), self.judge
        )  # simpler orders may tie

    def _cut_for_size(self, area: Area) -> Candidates:
        """Good cuts for the size of an area, if stages were first cut for another size."""
        is_other = area.size != self._areas.reference_size
        cuts = self._areas.cuts(area.stages, area.size) if is_other else []
        return self._candidates(layouts_of(self.problem, cuts), area)

    def _moves(self, candidate: Candidate, reach: int = FEW) -> Iterator[Layout]:
        """The layouts one move away from a candidate."""
        times = self.problem.block_times(candidate.choice.size)
        placements = self._exchanges(tuple(rank for (rank,) in candidate.layout.ranks))
        exchanged = list(map(one_each, placements))
        return neighbours(candidate.layout, self.problem.graph, times, exchanged, reach)

    def _affordable(self, layouts: Iterable[Layout], area: Area) -> list[Layout]:
        """As many layouts as the budget of moves suffices for."""
        self.cutter.check()
        work = len(self.problem.profile.operators) + 2 * area.micro_batches * area.stages
        near = list(islice(layouts, max(0, self._move_work // work)))
        self._move_work -= max(1, len(near)) * work
        return near

    def _area_of(self, candidate: Candidate) -> Area:
        choice = candidate.choice
        return self._areas.of(len(choice.layout.ranks), choice.size)


def _is_replicated(choice: Choice) -> bool:
    return max(choice.replicas) > 1


def explore(
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
    expired: Callable[[], bool],
    alternatives: int,
) -> list[Plan]:
    """The best plan, and the next best of other shapes, with predictions.

    Args:
        request: with one rank per stage, or with open numbers of replicas.
        expired: called repeatedly; once it returns true, the search ends.
        alternatives: number of plans besides the best.

    Raises:
        InfeasibleError: nothing fits; says how much is missing and what would help.
        OutOfTimeError: time was up before any plan was found, and even cuts do not fit.
    """
    graph = condense(profile)
    counts = stage_counts(request, cluster.ranks, len(graph))
    if counts[-1] == 1:
        space = CutSpace(graph, (0, graph.everything), True)
    else:
        space = CutSpace.of(graph, profile)
    if len(space.graph) < counts[-1]:  # too few blocks for the stages: do not merge small ones
        space = CutSpace.sample(graph)
    problem = Problem(profile, cluster, request, space.graph)
    explorer, finished = Explorer(problem, space, counts, expired), True
    judge = explorer.judge
    try:
        explorer.run()
    except OutOfTimeError:
        finished = False
    best = judge.best() or explorer.last_resort(finished=finished)
    others = explorer.alternatives(best, alternatives) if alternatives and finished else []
    # With replicas, the only lower bound on the step is the total work.
    replicated = request.replicas is None
    least_s = (
        work_bound_s(problem, judge.evaluator.sizes) if replicated else explorer.least_step_s()
    )
    ended = finished and not judge.gave_up
    return [with_findings(each.plan, least_s, finished=ended) for each in (best, *others)]
