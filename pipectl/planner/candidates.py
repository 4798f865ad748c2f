"""Candidates: layouts in an order of work, sorted by the estimates of their steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, inf

import numpy as np

from pipectl.plan import Replication
from pipectl.planner.choices import (
    NamedOrder,
    accepted,
    open_orders,
    takes,
)
from pipectl.planner.partition.layout import Choice, Layout
from pipectl.planner.partition.replicated import MAX_UNITS
from pipectl.planner.problem import Problem

OVERFULL = 1.5
"""Factor, plus the relative excess, of the estimates of candidates with replicas whose ranks exceed
their memory limit."""
Simplicity = tuple[int, int, int, int]
"""Numbers of stages, recomputed stages, micro-batches in flight, and micro-batches. Lower is better
if times tie."""
Family = tuple[tuple[int, ...], int, str, tuple[int, ...]]
"""Replicas of every stage, micro-batch size, schedule and warm-up."""


@dataclass(frozen=True)
class Candidate:
    """A choice and the estimate of its step, a lower bound with one rank per stage.

    Args:
        micro_batches: of a step.
        may_fit: whether the memory that every schedule needs is within the limits.
        is_in_turn: whether it was estimated as one whose replicas take whole micro-batches in turn;
            then the estimate is a lower bound as well.
    """

    choice: Choice
    micro_batches: int
    estimate_s: float
    may_fit: bool = True
    is_in_turn: bool = False

    @property
    def layout(self) -> Layout:
        """Stages and their ranks."""
        return self.choice.layout

    @property
    def simplicity(self) -> Simplicity:
        """Key by which candidates are preferred if times tie."""
        choice = self.choice
        recomputed = sum(choice.layout.recompute)
        return len(choice.layout.ranks), recomputed, sum(choice.warm_up), self.micro_batches

    @property
    def family(self) -> Family:
        """Key that is equal for candidates that differ only in their cuts."""
        choice = self.choice
        replicas = tuple(map(len, choice.layout.ranks))
        return replicas, choice.size, choice.schedule, choice.warm_up


class Candidates:
    """Every layout in every order, by estimate and then by simplicity.

    Args:
        orders: by default all open orders for the stages of each layout.
        with_replicas: whether stages may have replicas. If so, a layout is a candidate only in the
            more promising of the two orders with the fewest micro-batches in flight, and
            :data:`OVERFULL` applies.
        only_fitting: whether layouts that certainly do not fit in any order are left out.

    Attributes:
        taken: candidates taken so far.
        some_left_out: whether some layouts were left out.
    """

    def __init__(
        self,
        problem: Problem,
        layouts: Sequence[Layout],
        size: int,
        orders: Sequence[NamedOrder] | None = None,
        *,
        with_replicas: bool = False,
        only_fitting: bool = False,
    ) -> None:
        self._micro_batches = problem.micro_batches(size)
        if with_replicas:
            layouts = [_smallest_to_slowest(problem, layout, size) for layout in layouts]
        self._layouts = list(dict.fromkeys(layouts))
        self._size = size
        self._orders: list[NamedOrder] = []
        self.taken: list[Candidate] = []
        self.some_left_out = False
        by_stages: dict[int, list[int]] = {}
        for place, layout in enumerate(self._layouts):
            by_stages.setdefault(len(layout.partition), []).append(place)
        columns = []  # place, order, recomputed stages, micro-batches in flight, estimate
        for stages, places in by_stages.items():
            fresh = orders or open_orders(problem.request, stages, problem.micro_batches(size))
            fresh = fresh[:2] if with_replicas else fresh
            numbers = np.arange(len(self._orders), len(self._orders) + len(fresh))
            self._orders += fresh
            chosen, warm_ups = [self._layouts[place] for place in places], [w for _, w in fresh]
            excess = problem.estimator.excess(chosen, size, warm_ups)
            if only_fitting:
                kept = np.flatnonzero((excess <= 0).any(axis=1)).tolist()
                self.some_left_out |= len(kept) < len(places)
                if not kept:
                    continue
                excess, chosen = excess[kept], [chosen[row] for row in kept]
                places = [places[row] for row in kept]
            steps_s = problem.estimator.steps_s(chosen, size, warm_ups)
            if with_replicas:
                steps_s = np.where(excess > 0, steps_s * (OVERFULL + excess), steps_s)
            columns.append(
                (
                    np.repeat(places, len(fresh)),
                    np.tile(numbers, len(places)),
                    np.repeat([sum(layout.recompute) for layout in chosen], len(fresh)),
                    np.tile(list(map(sum, warm_ups)), len(places)),
                    steps_s.ravel(),
                    excess.ravel() <= 0,
                )
            )
        self._ranking: list[tuple[int, int, float, bool]] = []
        if columns:
            joined = [np.concatenate(column) for column in zip(*columns, strict=True)]
            ranked = np.lexsort((joined[3], joined[2], joined[4]))
            rows = (joined[column][ranked].tolist() for column in (0, 1, 4, 5))
            self._ranking = list(zip(*rows, strict=True))
            if with_replicas:
                self._ranking = self._first_of(0)

    @property
    def next_s(self) -> float:
        """Estimate of the next candidate; infinite if all are taken."""
        place = len(self.taken)
        return self._ranking[place][2] if place < len(self._ranking) else inf

    @property
    def first_s(self) -> float:
        """The smallest estimate; infinite if there are no candidates."""
        return self._ranking[0][2] if self._ranking else inf

    @property
    def simplicity(self) -> Simplicity:
        """Simplicity of the next candidate; there must be one."""
        return self._candidate(*self._ranking[len(self.taken)]).simplicity

    def take(self) -> Candidate:
        """Take the next candidate; there must be one."""
        self.taken.append(self._candidate(*self._ranking[len(self.taken)]))
        return self.taken[-1]

    def __iter__(self) -> Iterator[Candidate]:
        """All candidates; takes none."""
        return (self._candidate(*row) for row in self._ranking)

    def best_of_orders(self) -> Iterator[Candidate]:
        """The most promising layout in every order; takes none."""
        return (self._candidate(*row) for row in self._first_of(1))

    def best_of_layouts(self) -> Iterator[Candidate]:
        """Every layout in its most promising order; takes none."""
        return (self._candidate(*row) for row in self._first_of(0))

    def _first_of(self, column: int) -> list[tuple[int, int, float, bool]]:
        """The first row of the ranking with each value in a column."""
        first: dict[object, tuple[int, int, float, bool]] = {}
        for row in self._ranking:
            first.setdefault(row[column], row)
        return list(first.values())

    def _candidate(self, place: int, number: int, estimate_s: float, may_fit: bool) -> Candidate:
        choice = Choice(self._layouts[place], self._size, *self._orders[number])
        return Candidate(choice, self._micro_batches, estimate_s, may_fit)


def in_turn(problem: Problem, layouts: Sequence[Layout], size: int) -> list[Candidate]:
    """Layouts whose replicas take whole micro-batches in turn, each in the more promising of the
    two orders with the fewest micro-batches in flight, by estimate. :data:`OVERFULL` applies.
    Layouts with more replicas than micro-batches are left out.
    """
    request, count = problem.request, problem.micro_batches(size)
    orders: dict[tuple[int, ...], list[NamedOrder]] = {}
    by_stages: dict[int, list[Layout]] = {}
    for layout in dict.fromkeys(_fastest_first(problem, layout) for layout in layouts):
        replicas = tuple(map(len, layout.ranks))
        if max(replicas) <= count:
            by_stages.setdefault(len(replicas), []).append(layout)
            if replicas not in orders:
                first, *more = open_orders(request, len(replicas), count, replicas)[:2]
                orders[replicas] = [first, *more, first][:2]
    found = []
    for chosen in by_stages.values():
        named = [orders[tuple(map(len, layout.ranks))] for layout in chosen]
        warm_ups = [[warm_up for _, warm_up in each] for each in named]
        steps_s = problem.estimator.steps_in_turn_s(chosen, size, warm_ups)
        excess = problem.estimator.excess(chosen, size, warm_ups, in_turn=True)
        steps_s = np.where(excess > 0, steps_s * (OVERFULL + excess), steps_s)
        for row, best in enumerate(steps_s.argmin(axis=1).tolist()):
            name, warm_up = named[row][best]
            choice = Choice(chosen[row], size, name, warm_up, Replication.WHOLE)
            fits = bool(excess[row, best] <= 0)
            found.append(Candidate(choice, count, float(steps_s[row, best]), fits, True))
    return sorted(found, key=lambda each: (each.estimate_s, each.simplicity))


def _fastest_first(problem: Problem, layout: Layout) -> Layout:
    """The layout, in whose stages the fastest replicas come first: if micro-batches do not divide
    by replicas, the first ones get one more."""
    if len(problem.devices) == 1:
        return layout
    device = problem.cluster.device
    ranks = (sorted(own, key=lambda rank: -device(rank).speed) for own in layout.ranks)
    return layout._replace(ranks=tuple(map(tuple, ranks)))


def _smallest_to_slowest(problem: Problem, layout: Layout, size: int) -> Layout:
    """The layout, in whose stages the slowest replicas get the smallest parts of micro-batches of
    ``size`` samples: seven samples are split among three as 2, 2 and 3."""
    if len(problem.devices) == 1:
        return layout
    device, ranks = problem.cluster.device, list(layout.ranks)
    for stage, own in enumerate(ranks):
        count = len(own)
        if size % count and len({device(rank).speed for rank in own}) > 1:
            ends = [place * size // count for place in range(count + 1)]
            places = sorted(range(count), key=lambda place: ends[place + 1] - ends[place])
            slowest_first = sorted(own, key=lambda rank: device(rank).speed)
            rank_at = dict(zip(places, slowest_first, strict=True))
            ranks[stage] = tuple(rank_at[place] for place in range(count))
    return layout._replace(ranks=tuple(ranks))


def ways_to_share(problem: Problem, candidate: Candidate) -> Iterator[Candidate]:
    """A candidate with replicas, with every allowed way to share work in which all have work.

    Replicas share every micro-batch, or take whole ones in turn, which is the same work on smaller
    micro-batches: of the samples per replica of a split one. Up to ``MAX_UNITS`` ranks, these are
    estimated as such.
    """
    request, layout = problem.request, candidate.layout
    stages = len(layout.partition)
    for replication in request.replications:
        whole, sizes = replication is Replication.WHOLE, {candidate.choice.size}
        if whole and request.micro_batches is None:
            shares = {ceil(candidate.choice.size / len(ranks)) for ranks in layout.ranks}
            sizes = set(accepted(request, sorted(shares)))
        for size in sorted(sizes, reverse=True):
            if not whole and not takes(request, size, max(map(len, layout.ranks))):
                continue
            count = problem.micro_batches(size)
            fewer = _fastest_first(problem, layout) if whole else layout
            ranks = tuple(each[: count if whole else size] for each in fewer.ranks)
            replicas = tuple(map(len, ranks))
            if max(replicas) == 1:
                continue
            fewer = fewer._replace(ranks=ranks)
            orders = open_orders(request, stages, count, replicas if whole else None)
            estimates_s = [candidate.estimate_s] * len(orders)
            if known := whole and problem.cluster.ranks <= MAX_UNITS:
                warm_ups = [warm_up for _, warm_up in orders]
                estimator = problem.estimator
                estimates_s = estimator.steps_in_turn_s([fewer], size, [warm_ups])[0].tolist()
            for order, estimate_s in zip(orders, estimates_s, strict=True):
                choice = Choice(fewer, size, *order, replication)
                yield Candidate(choice, count, estimate_s, candidate.may_fit, known)
