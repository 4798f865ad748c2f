"""Candidates of one number of stages and micro-batch size, the most promising first.

There can be many thousands, and few of them are ever looked at: their bounds are computed together,
and a candidate is made when it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from pipectl.planner.partition.estimate import Layout
from pipectl.planner.partition.plans import Choice
from pipectl.planner.problem import Problem
from pipectl.planner.request import Order

Simplicity = tuple[int, int, int, int]


@dataclass(frozen=True)
class Candidate:
    """A choice and the least its step can take.

    Args:
        micro_batches: of a step.
    """

    choice: Choice
    layout: Layout
    micro_batches: int
    bound_s: float

    @property
    def simplicity(self) -> Simplicity:
        """Stages, recomputed stages, micro-batches in flight, micro-batches: fewer are better
        where times tie."""
        choice = self.choice
        again = sum(choice.recompute)
        return len(choice.ranks), again, sum(choice.warm_up), self.micro_batches


class Candidates:
    """Every layout in every order, by bound and then by simplicity.

    Args:
        layouts: of equally many stages.

    Attributes:
        taken: those that were asked for.
    """

    def __init__(
        self, problem: Problem, layouts: Sequence[Layout], size: int, orders: Sequence[Order]
    ) -> None:
        self._problem = problem
        self._layouts = list(dict.fromkeys(layouts))
        self._size = size
        self._orders = orders
        self._micro_batches = problem.micro_batches(size)
        self.taken: list[Candidate] = []
        self._bounds_s: list[float] = []
        self._ranking: list[int] = []
        if self._layouts:
            self._rank(problem)

    def _rank(self, problem: Problem) -> None:
        bounds = problem.estimates_s(self._layouts, self._size, self._orders).ravel()
        again = [sum(layout.recompute) for layout in self._layouts]
        depth = [sum(warm_up) for _, warm_up in self._orders]
        keys = np.tile(depth, len(again)), np.repeat(again, len(depth)), bounds
        self._bounds_s = bounds.tolist()
        self._ranking = np.lexsort(keys).tolist()

    @property
    def next_s(self) -> float:
        """The bound of the next; infinite if all are taken."""
        place = len(self.taken)
        return self._bounds_s[self._ranking[place]] if place < len(self._ranking) else inf

    @property
    def simplicity(self) -> Simplicity:
        """Of the next; there must be one."""
        return self._candidate(self._ranking[len(self.taken)]).simplicity

    def take(self) -> Candidate:
        """The next; there must be one."""
        candidate = self._candidate(self._ranking[len(self.taken)])
        self.taken.append(candidate)
        return candidate

    def __iter__(self) -> Iterator[Candidate]:
        """All of them; takes none."""
        return map(self._candidate, self._ranking)

    def best_of_orders(self) -> Iterator[Candidate]:
        """The most promising layout in every order; takes none."""
        seen: set[int] = set()
        for number in self._ranking:
            order = number % len(self._orders)
            if order not in seen:
                seen.add(order)
                yield self._candidate(number)

    def _candidate(self, number: int) -> Candidate:
        layout, order = divmod(number, len(self._orders))
        chosen = self._layouts[layout]
        choice = self._problem.choice(chosen, self._size, self._orders[order])
        return Candidate(choice, chosen, self._micro_batches, self._bounds_s[number])
