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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import inf

from pipectl.errors import OutOfTimeError
from pipectl.plan import Plan
from pipectl.planner.areas import Area, Areas
from pipectl.planner.bounds import with_findings, work_bound_s
from pipectl.planner.candidates import Candidate, Candidates
from pipectl.planner.graph.downsets import CutSpace
from pipectl.planner.improve import Improver
from pipectl.planner.infeasible import infeasible, least_demanding
from pipectl.planner.judge import MAX_ACTIONS_OF_SEARCH, Judge, Outcome, best_first
from pipectl.planner.partition.cutter import Cutter, cut_request, layouts_of
from pipectl.planner.partition.replicated import MAX_UNITS
from pipectl.planner.problem import Problem
from pipectl.planner.replica_search import ReplicaSearch
from pipectl.planner.request import (
    micro_batch_sizes,
    open_orders,
    out_of_time,
    stage_counts,
)
from pipectl.planner.simple import even_choices

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
        self._opened: dict[Area, Candidates] = {}
        self._improver = Improver(problem, self._areas, self.judge, self.cutter.check)

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
        self._improver.finish()

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
            opened = [pair for pair in self._opened.items() if pair[0].stages == stages]
            estimates_s = {area.size: candidates.first_s for area, candidates in opened}
            best = min(estimates_s, key=lambda size: (estimates_s[size], size), default=0)
            smaller = [size for size in every if size < best][:1]
            near = smaller and estimates_s[best] < self.judge.fastest_s * NEAR
            if near and best == min(self._areas.sizes_known(stages)):
                areas.append(self._areas.of(stages, smaller[0]))
        return areas

    def _areas_between(self) -> list[Area]:
        """One stage more and one less than in the best plan, if not tried yet at its size."""
        best, ranks = self.judge.best(), self.problem.cluster.ranks
        choice = best.candidate.choice if best is not None and best.candidate is not None else None
        if choice is None or choice.is_replicated or ranks > MAX_UNITS:
            return []
        if self.problem.request.fixed_stages is not None:
            return []
        stages, size = len(choice.layout.ranks), choice.size
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
            if area in self._areas.listed:
                opened = self._opened[area]
                bounds_s += [opened.next_s, *map(self.judge.least_s, opened.taken)]
            else:
                bounds_s.append(area.least_s)
        return min(bounds_s)

    def look_at_other_shapes(self, most: int) -> None:
        """Simulate plans of other shapes than the best; most were not because they are beaten."""
        options = [each for opened in self._opened.values() for each in opened.best_of_orders()]
        known = self.judge.families()
        for candidate in sorted(options, key=lambda each: (each.estimate_s, each.simplicity)):
            if len(known) > most:
                break
            if candidate.family not in known and candidate.may_fit:
                self.judge.examine(candidate)
                known = self.judge.families()

    def last_resort(self, *, finished: bool) -> None:
        """Judge the plan that needs the least memory or, if time is up, even cuts.

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
        if self.judge.best() is None:
            raise infeasible(problem, plan) if plan else out_of_time()

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
                _Recut(
                    each,
                    *open_orders(
                        self.problem.request, each.stages, self.problem.micro_batches(each.size)
                    )[0],
                )
                for each in tried
            ]
            for recut in recuts:
                if recut not in self._recuts:
                    self._recuts.add(recut)
                    self._try_recut(recut)
            if self._is_hopeless(recuts[-1]):
                return
        candidates = Candidates(self.problem, self._areas.layouts(area), area.size)
        self._opened[area] = candidates
        self._push_candidates(candidates)
        if not self._memory_is_short and not any(each.may_fit for each in candidates):
            self._memory_is_short = self.problem.has_limits

    def _judge_next(self, candidates: Candidates) -> None:
        """Judge the most promising candidate; if it does not fit, queue a recut."""
        candidate = candidates.take()
        if not self._judged and not self.problem.has_limits:
            self._improver.polish(candidate)
        self._judged = True
        outcome = self.judge.judge(candidate)
        if outcome is Outcome.DOES_NOT_FIT and self.problem.has_limits:
            choice, area = candidate.choice, self._area_of(candidate)
            recut = _Recut(area, choice.schedule, choice.warm_up)
            if recut not in self._recuts:
                self._recuts.add(recut)
                self._push(area.least_s, candidate.simplicity, recut)
        self._push_candidates(candidates)

    def _try_recut(self, recut: _Recut) -> None:
        """Cut stages again, within the memory limit."""
        if self._is_hopeless(recut):
            return
        if self._recut_count == MAX_RECUTS:
            self.judge.finished = False
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
                    outcomes = self.judge.judge_all(candidates)
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
                    self._judge_recut(
                        _Recut(
                            area,
                            *open_orders(
                                self.problem.request, stages, self.problem.micro_batches(size)
                            )[0],
                        )
                    )

    def _area_of(self, candidate: Candidate) -> Area:
        choice = candidate.choice
        return self._areas.of(len(choice.layout.ranks), choice.size)


def explore(problem: Problem, expired: Callable[[], bool], alternatives: int) -> list[Plan]:
    """The best plan, and the next best of other shapes, with predictions.

    Args:
        problem: with one rank per stage, or with open numbers of replicas.
        expired: called repeatedly; once it returns true, the search ends.
        alternatives: number of plans besides the best.

    Raises:
        InfeasibleError: nothing fits; says how much is missing and what would help.
        OutOfTimeError: time was up before any plan was found, and even cuts do not fit.
    """
    graph, request = problem.graph, problem.request
    counts = stage_counts(request, problem.cluster.ranks, len(graph))
    if counts[-1] == 1:
        space = CutSpace(graph, (0, graph.everything), True)
    else:
        space = CutSpace.of(graph, problem.profile)
    if len(space.graph) < counts[-1]:  # too few blocks for the stages: do not merge small ones
        space = CutSpace.sample(graph)
    if space.graph is not graph:
        problem = problem.on(graph=space.graph)
    explorer, finished = Explorer(problem, space, counts, expired), True
    judge = explorer.judge
    try:
        explorer.run()
    except OutOfTimeError:
        finished = False
    if not judge.plans:
        explorer.last_resort(finished=finished)
    if alternatives and finished:
        explorer.look_at_other_shapes(alternatives)
    # With replicas, the only lower bound on the step is the total work.
    least_s = (
        work_bound_s(problem, judge.evaluator.sizes)
        if request.replicas is None
        else explorer.least_step_s()
    )
    plans = best_first(judge.plans)[: 1 + alternatives]
    return [with_findings(each, least_s, finished=finished and judge.finished) for each in plans]
