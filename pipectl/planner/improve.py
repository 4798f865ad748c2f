"""Moves that improve candidates: before they are simulated, and at the end.

With one rank per stage, a move shifts the border of a stage or exchanges the ranks of two stages.
The first candidate is improved by estimates, best first; the best plan in the end by simulations.
With replicas there are many more moves, of devices as well as of borders
(:mod:`pipectl.planner.partition.layout`), and the best one is made as long as there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from heapq import heappop, heappush
from itertools import count, islice

from pipectl.planner.areas import Area, Areas
from pipectl.planner.candidates import Candidate, Candidates, in_turn
from pipectl.planner.choices import open_orders
from pipectl.planner.costs.devices import exchanges, one_each
from pipectl.planner.judge import Judge
from pipectl.planner.partition.cutter import layouts_of
from pipectl.planner.partition.estimate import ROUNDING
from pipectl.planner.partition.layout import (
    FAR,
    FEW,
    Choice,
    Layout,
    neighbours,
    recompute_moves,
    replica_moves,
)
from pipectl.planner.problem import Problem

MAX_MOVE_WORK, MAX_REPLICA_MOVE_WORK = 2_000_000, 5_000_000
"""Budgets of moves with one rank per stage and with replicas: the sum of operators, actions and
messages over the layouts tried."""
PATIENCE, MAX_AT_ONCE = 80, 8
"""Turns without a better layout after which moves end; turns that are estimated at once, as many
small estimates take longer than a large one."""
BORDER_TURNS = 2
"""Number of turns at first that move the borders of a candidate: FEW and EVERY."""
MIN_GAIN = 1e-6
"""Least share of the step that a move of borders must save."""


class Improver:
    """Improves candidates of one problem, within a budget of moves.

    Args:
        judge: collects the plans.
        check: called repeatedly; raises to end the search.
    """

    def __init__(
        self, problem: Problem, areas: Areas, judge: Judge, check: Callable[[], None]
    ) -> None:
        self._problem = problem
        self._areas = areas
        self._judge = judge
        self._check = check
        self._minima: set[Choice] = set()
        self._seen: set[tuple[bool, int, Layout]] = set()
        self._move_work = 0
        self._exchanges = cache(partial(exchanges, cluster=problem.cluster))

    def allow(self, move_work: int) -> None:
        """Set the budget of moves from now on."""
        self._move_work = move_work

    def polish(self, candidate: Candidate) -> None:
        """Improve the estimate of a candidate by new cuts and by moves, then judge the best.

        Stages that are balanced at one micro-batch size need not be at another. The search is best
        first: the layout with the least estimate is moved next, first by some fractions of the
        load, then by all moves. If no move is better, the search goes on for some turns, because
        several moves together may be.
        """
        area = self._area_of(candidate)
        if area in self._areas.listed or candidate.choice in self._minima:
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
            fresh = self._affordable((each for each in moved if each not in seen), candidate)
            for near in self._candidates(fresh, area).best_of_layouts():
                seen.add(near.layout)
                better = near.estimate_s < candidate.estimate_s * (1 - MIN_GAIN)
                turn_s = near.estimate_s if better else near.estimate_s * (1 + 2 * MIN_GAIN)
                heappush(queue, (turn_s, FEW, next(numbers), near))
                if better:
                    candidate, turns = near, 0
            if turns == BORDER_TURNS:  # no move of a border is better
                self._minima.add(candidate.choice)
                self._judge.judge(candidate)
        self._judge.judge_all(self._candidates([candidate.layout], area))  # simpler orders may tie

    def descend(self, candidate: Candidate, classes: Sequence[Sequence[int]]) -> Candidate:
        """Make the best move of a candidate with replicas until there is none, or until it leads to
        a layout seen before.

        Args:
            candidate: if its replicas take whole micro-batches in turn, so they do afterwards.
            classes: the ranks of every class of devices, the fastest first.
        """
        problem, size, seen = self._problem, candidate.choice.size, self._seen
        whole, fixed = candidate.is_in_turn, problem.request.fixed_stages is not None
        loads = problem.costs.block_times(size)
        most = min(candidate.micro_batches if whole else size, problem.cluster.ranks)
        while (whole, size, candidate.layout) not in seen:
            seen.add((whole, size, candidate.layout))
            moved = replica_moves(
                candidate.layout, problem.graph, loads, classes, most, keep_stages=fixed
            )
            near = self._affordable(filter(problem.may_replicate, moved), candidate)
            if whole:
                best = next(iter(in_turn(problem, near, size)), None)
            else:
                best = next(iter(Candidates(problem, near, size, with_replicas=True)), None)
            if best is None or best.estimate_s >= candidate.estimate_s * (1 - ROUNDING):
                break
            candidate = best
        return candidate

    def finish(self) -> None:
        """Move borders of the best plan while that makes its simulated step shorter."""
        best = self._judge.best()
        if best is None or best.candidate is None or self._judge.gives_up():
            return
        if best.candidate.choice.is_replicated:
            return
        area = self._area_of(best.candidate)
        if area in self._areas.listed:
            return
        if self._problem.has_limits:
            self._judge.judge_all(self._cut_for_size(area))
        else:
            self.polish(best.candidate)
        while not self._judge.gives_up():
            before = self._judge.best()
            assert before is not None
            candidate = before.candidate
            assert candidate is not None
            exact = before.step_s <= candidate.estimate_s * (1 + MIN_GAIN)
            if exact and candidate.choice in self._minima:
                return  # estimates equal the simulation: no neighbour can be better
            area, orders = self._area_of(candidate), [candidate.choice[2:4]]
            if self._problem.has_limits:  # a neighbour may fit only in another order
                orders = open_orders(
                    self._problem.request, area.stages, self._problem.micro_batches(area.size)
                )
            near = self._affordable(self._moves(candidate), candidate)
            fitting = self._problem.has_limits
            self._judge.judge_all(
                Candidates(self._problem, near, area.size, orders, only_fitting=fitting)
            )
            if self._judge.best() is before:
                self._judge.judge_all(self._candidates([candidate.layout], area))
            if self._judge.best() is before:
                return

    def _cut_for_size(self, area: Area) -> Candidates:
        """Good cuts for the size of an area, if stages were first cut for another size."""
        is_other = area.size != self._areas.reference_size
        cuts = self._areas.cuts(area.stages, area.size) if is_other else []
        return self._candidates(layouts_of(self._problem, cuts), area)

    def _moves(self, candidate: Candidate, reach: int = FEW) -> Iterator[Layout]:
        """The layouts one move away from a candidate."""
        times = self._problem.costs.block_times(candidate.choice.size)
        placements = self._exchanges(tuple(rank for (rank,) in candidate.layout.ranks))
        exchanged = list(map(one_each, placements))
        near = neighbours(candidate.layout, self._problem.graph, times, exchanged, reach)
        if self._problem.has_limits and self._problem.request.recompute is None:
            return recompute_moves(candidate.layout, near)
        return near

    def _affordable(self, layouts: Iterable[Layout], near: Candidate) -> list[Layout]:
        """As many layouts near a candidate as the budget of moves suffices for."""
        self._check()
        stages = len(near.layout.partition)
        work = len(self._problem.profile.operators) + 2 * near.micro_batches * stages
        chosen = list(islice(layouts, max(0, self._move_work // work)))
        self._move_work -= max(1, len(chosen)) * work
        return chosen

    def _candidates(self, layouts: Iterable[Layout], area: Area) -> Candidates:
        return Candidates(self._problem, list(layouts), area.size)

    def _area_of(self, candidate: Candidate) -> Area:
        return self._areas.of(len(candidate.layout.ranks), candidate.choice.size)
