"""The search for stages, their ranks and replicas, micro-batches and the order of 1F1B or GPipe.

    propose -> estimate -> improve -> judge, for the most promising first

A queue is ordered by lower bounds on the step. Its entries are

- an *area* (:mod:`pipectl.planner.areas`): a micro-batch size with a number of stages of one rank
  each, with any stages and replicas, or with stages that are to be cut for the memory of an order.
  It proposes layouts, which become candidates in every order.
- *candidates*, whose estimates are the times of their steps by the recurrence. The best is improved
  and given to the judge, which simulates it, or rejects it because it does not fit into memory;
  then its stages are cut again for the memory of its order, each time with more memory counted.

With one rank per stage, an estimate is a lower bound; the first candidate is improved by moves of
its borders. With replicas that split micro-batches, an estimate is only about the step, so a number
of candidates is improved and simulated, in every way to share the work. The best of those whose
replicas take whole micro-batches in turn are then improved as such. All these come first, so that
what cannot be better is not tried with one rank per stage.

If the smallest micro-batches that were tried are best, or nothing fits, smaller ones follow; so
does one stage more or less than in the best plan. In the end, the borders of the best plan without
replicas move again, while that makes its simulated step shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop, heappush
from math import inf

from pipectl.errors import OutOfTimeError
from pipectl.plan import Plan, Replication
from pipectl.planner.areas import Area, Areas
from pipectl.planner.bounds import with_findings, work_bound_s
from pipectl.planner.candidates import Candidate, Candidates, in_turn, ways_to_share
from pipectl.planner.choices import micro_batch_sizes, sizes_near, stage_counts, takes
from pipectl.planner.evaluator import TIE
from pipectl.planner.graph.downsets import CutSpace
from pipectl.planner.improve import MAX_MOVE_WORK, MAX_REPLICA_MOVE_WORK, Improver
from pipectl.planner.infeasible import infeasible, least_demanding
from pipectl.planner.judge import MAX_ACTIONS_OF_SEARCH, Judge, Outcome, best_first
from pipectl.planner.partition.cutter import Cutter
from pipectl.planner.partition.layout import Layout
from pipectl.planner.partition.replicated import MAX_UNITS
from pipectl.planner.problem import Problem
from pipectl.planner.request import Expired, out_of_time
from pipectl.planner.simple import even_choices

NEAR = 1.25
"""Factor over the best step up to which a number of stages is tried with more micro-batches."""
MAX_ACTIONS_OF_REPLICAS = 400_000
"""Simulated forwards and backwards of plans with replicas."""
SPREAD = 1.4
"""Factor by which the step of a candidate with replicas may be below its estimate."""
IN_TURN, NEAR_BEST = 8, 1.15
"""Number of candidates to improve whose replicas take whole micro-batches in turn, and the factor
over the best step up to which these are improved or, as alternatives, simulated."""
PER_SIZE, IN_TOTAL = 5, 20
"""Numbers of candidates with replicas to improve and simulate, per micro-batch size and in all."""
FEW_MICRO_BATCHES = 24
"""With more, the step hardly depends on their number, unless memory is limited."""

_Item = Area | tuple[Area, Candidates]


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
        expired: Expired,
    ) -> None:
        self.problem = problem
        self.judge = Judge(problem)
        self.cutter = Cutter(problem, space, expired)
        self._areas = Areas(problem, space, counts, self.cutter)
        self._queue: list[tuple[float, tuple[int, ...], int, _Item]] = []
        self._pushed = 0
        self._queued: set[Area] = set()
        self._judged = False
        self._judged_layouts: set[tuple[int, Layout]] = set()
        self._in_turn: list[Candidate] = []
        self._opened: dict[Area, Candidates] = {}
        self._improver = Improver(problem, self._areas, self.judge, self.cutter.check)

    def run(self) -> None:
        """Find the best plan; the judge has the best so far at any time."""
        if self.problem.request.replicas is None:
            self.judge.evaluator.allow(MAX_ACTIONS_OF_REPLICAS)
            self._improver.allow(MAX_REPLICA_MOVE_WORK)
            self._search(self._areas.replicated)
            self._improver.allow(MAX_REPLICA_MOVE_WORK)
            self._improve_in_turn()
            self.judge.evaluator.allow(MAX_ACTIONS_OF_SEARCH)
        self._improver.allow(MAX_MOVE_WORK)
        self._search(self._areas.all)
        self._try_sizes_near()
        self._improver.finish()

    def _judge_improved(self, candidate: Candidate) -> None:
        if not self.judge.is_beaten(candidate.estimate_s):
            self.judge.examine(candidate, change_modes=candidate.choice.is_replicated)

    def _try_sizes_near(self) -> None:
        """Judge the stages of the best plan with micro-batches of sizes near its own, as only about
        every second number of micro-batches was tried."""
        best = self.judge.best()
        if best is None or best.candidate is None or self.problem.cluster.ranks > MAX_UNITS:
            return
        candidate, found = best.candidate, list[Candidate]()
        if candidate.micro_batches > FEW_MICRO_BATCHES and not self.problem.has_limits:
            return
        way = candidate.choice.replication if candidate.choice.is_replicated else None
        for size in sizes_near(self.problem.request, candidate.micro_batches):
            found += self._candidates_like(candidate, size, way)
        nearest = min(found, key=lambda each: (each.estimate_s, each.simplicity), default=candidate)
        if nearest.estimate_s < best.step_s * (1 - TIE):
            if way is not None:
                nearest = self._improver.descend(nearest, self._areas.classes)
            self._judge_improved(nearest)

    def _candidates_like(
        self, candidate: Candidate, size: int, way: Replication | None
    ) -> list[Candidate]:
        """The stages of a candidate with micro-batches of some size, by estimate.

        Args:
            way: how replicas share the work; None if no stage has replicas.
        """
        problem, layouts = self.problem, [candidate.layout]
        if way is None:
            found = Candidates(problem, layouts, size, only_fitting=True)
            return [each for each in found if each.may_fit]
        if way is Replication.WHOLE:
            return in_turn(problem, layouts, size)
        if not takes(problem.request, size, max(candidate.choice.replicas)):
            return []
        return [*Candidates(problem, layouts, size, with_replicas=True)]

    def _improve_in_turn(self) -> None:
        """Improve and judge the most promising layouts whose replicas take whole micro-batches in
        turn. Those before were improved for replicas that split them, which may be best at another
        size."""
        problem, ranks = self.problem, self.problem.cluster.ranks
        if Replication.WHOLE not in problem.request.replications or ranks > MAX_UNITS:
            return
        judged = dict[int, list[Layout]]()
        for each in self._in_turn:
            judged.setdefault(each.choice.size, []).append(each.layout)
        every = [each.layout for found in self._opened.values() for each in found]
        proposed = {area.size: every for area in self._areas.replicated}
        for layouts, most in ((judged, IN_TURN), (proposed, IN_TURN // 2)):
            starts = [each for size in layouts for each in in_turn(problem, layouts[size], size)]
            starts.sort(key=lambda each: (each.estimate_s, each.simplicity))
            for candidate in starts[:most]:
                if self.judge.is_beaten(candidate.estimate_s / NEAR_BEST):
                    break
                improved = self._improver.descend(candidate, self._areas.classes)
                self._judge_improved(improved)

    def _search(self, areas: Sequence[Area]) -> None:
        """Try areas, and then those that look good beside them, until no other can be better."""
        while areas:
            for area in areas:
                self._push(area)
            while self._queue:
                least_s, _, _, item = heappop(self._queue)
                self.cutter.check()
                if self.judge.is_beaten(least_s):
                    break
                if isinstance(item, Area):
                    self._propose(item)
                else:
                    self._judge_next(*item)
            areas = [*self._smaller_areas(), *self._areas_between()]

    def _smaller_areas(self) -> list[Area]:
        """The next smaller micro-batches: for all numbers of stages if nothing fits, or else for
        those with which the smallest that were tried have the shortest estimate, not far above the
        best step."""
        request, areas = self.problem.request, list[Area]()
        every, some_fit = micro_batch_sizes(request, request.batch_size), bool(self.judge.plans)
        for stages in dict.fromkeys(area.stages for area in self._opened):
            opened = [pair for pair in self._opened.items() if pair[0].stages == stages]
            estimates_s = {area.size: candidates.first_s for area, candidates in opened}
            least = min(self._areas.sizes_known(stages))
            best = min(estimates_s, key=lambda size: (estimates_s[size], size))
            near = best == least and estimates_s[best] < self.judge.fastest_s * NEAR
            if near or not some_fit:
                smaller = [size for size in every if size < least][:1]
                areas += [self._areas.of(stages, size) for size in smaller]
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
        opened = (found for area, found in self._opened.items() if not area.is_replicated)
        options = [each for candidates in opened for each in candidates.best_of_orders()]
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

    def _push(self, area: Area) -> None:
        """Queue an area, so that it proposes its next layouts."""
        if area not in self._queued:
            self._queued.add(area)
            self._pushed += 1
            key = area.stages, 0, sum(area.warm_up), area.micro_batches
            heappush(self._queue, (area.least_s, key, self._pushed, area))

    def _push_candidates(self, area: Area, candidates: Candidates) -> None:
        if candidates.next_s < inf:
            self._pushed += 1
            least_s = candidates.next_s / (SPREAD if area.is_replicated else 1.0)
            item = area, candidates
            heappush(self._queue, (least_s, candidates.simplicity, self._pushed, item))

    def _propose(self, area: Area) -> None:
        """Queue the next candidates of an area."""
        layouts = self._areas.propose(area)
        if layouts is None:
            return
        candidates = Candidates(
            self.problem,
            layouts,
            area.size,
            [area.order] if area.order else None,
            with_replicas=area.is_replicated,
            only_fitting=area.order is not None,
        )
        self._queued.discard(area)
        self._push_candidates(area, candidates)
        if area.order is None:
            self._opened[area] = candidates
        elif candidates.some_left_out:
            self._push(area)

    def _judge_next(self, area: Area, candidates: Candidates) -> None:
        """Improve and judge the most promising candidate; if it does not fit, stages are cut for
        the memory of its order."""
        candidate = candidates.take()
        if area.is_replicated:
            if len(candidates.taken) > PER_SIZE or len(self._judged_layouts) >= IN_TOTAL:
                return
            improved = self._improver.descend(candidate, self._areas.classes)
            if not self._judge_replicated(improved):
                self._judge_replicated(candidate)
        else:
            if not self._judged and not self.problem.has_limits:
                self._improver.polish(candidate)
            self._judged = True
            if self.judge.judge(candidate) is Outcome.DOES_NOT_FIT and self.problem.has_limits:
                choice = candidate.choice
                self._push(replace(area, order=(choice.schedule, choice.warm_up)))
        self._push_candidates(area, candidates)

    def _judge_replicated(self, candidate: Candidate) -> bool:
        """Judge a candidate with replicas with every way to share work, unless it was before; true
        if one of these fits."""
        if (candidate.choice.size, candidate.layout) in self._judged_layouts:
            return False
        self._judged_layouts.add((candidate.choice.size, candidate.layout))
        some_fit = False
        for each in ways_to_share(self.problem, candidate):
            if each.is_in_turn:
                self._in_turn.append(each)
                if self.judge.is_beaten(each.estimate_s / NEAR_BEST):
                    continue
            if not self.judge.gives_up():
                self.cutter.check()
                outcome = self.judge.examine(each, change_modes=True)
                some_fit |= outcome is Outcome.FITS
        return some_fit


def explore(problem: Problem, expired: Expired, alternatives: int) -> list[Plan]:
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
