"""Candidates: layouts in an order of work, sorted by the estimates of their steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
    """

    choice: Choice
    micro_batches: int
    estimate_s: float
    may_fit: bool = True

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


def ways_to_share(problem: Problem, candidate: Candidate) -> Iterator[Candidate]:
    """A candidate with replicas, with every allowed way to share work in which all have work.

    Replicas share every micro-batch, or take whole ones in turn, which is the same work on smaller
    micro-batches: of the samples per replica of a split one.
    """
    request, layout = problem.request, candidate.layout
    stages = len(layout.partition)
    for replication in request.replications:
        sizes = {candidate.choice.size}
        if replication is Replication.WHOLE and request.micro_batches is None:
            shares = {ceil(candidate.choice.size / len(ranks)) for ranks in layout.ranks}
            sizes = set(accepted(request, sorted(shares)))
        for size in sorted(sizes, reverse=True):
            if replication is Replication.SPLIT and not takes(
                request, size, max(map(len, layout.ranks))
            ):
                continue
            count = problem.micro_batches(size)
            most = size if replication is Replication.SPLIT else count
            ranks = tuple(each[:most] for each in layout.ranks)
            replicas = tuple(map(len, ranks))
            in_turn = replicas if replication is Replication.WHOLE else None
            if max(replicas) > 1:
                fewer = layout._replace(ranks=ranks)
                for order in open_orders(request, stages, count, in_turn):
                    choice = Choice(fewer, size, *order, replication)
                    yield replace(candidate, choice=choice, micro_batches=count)
