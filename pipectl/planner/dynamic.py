"""The dynamic programme: the best chain of downsets from the empty set to the whole graph.

Over all downsets it is exact (Tarnawski et al., "Efficient algorithms for device placement of DNN
graph operators", NeurIPS 2020, solve the same problem this way); over a sample of them it is the
best among the chains of the sample. Figures are integers, ties go to the smallest start, so the
result is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pipectl.planner.spans import Integers, Spans

UNREACHED = 2**61
"""Above every load; sums of two stay within 64 bits."""

Extend = Callable[[Integers, Spans], Integers]
"""(cost of the best chain to each start by number of stages, spans) -> cost with the span added;
both of shape [starts, stages]."""
Load = Callable[[Spans], Integers]
"""Load of each span as a stage; shape [starts, stages], by the stage's position, or [starts, 1]."""


@dataclass(frozen=True)
class Chains:
    """The best chain to every state with every number of stages.

    Args:
        cost: shape [states, stages + 1].
        before: the state in front of the last stage; same shape.
    """

    cost: Integers
    before: Integers

    def best(self, stages: int) -> int | None:
        """Cost of the best chain of all blocks with so many stages; None if there is none."""
        cost = int(self.cost[-1, stages])
        return cost if cost < UNREACHED else None

    def states(self, stages: int) -> list[int]:
        """The states of the best chain, from the empty to the full one."""
        state, path = len(self.cost) - 1, []
        for count in range(stages, 0, -1):
            path.append(state)
            state = int(self.before[state, count])
        return [0, *path[::-1]]


def best_chains(spans: Sequence[Spans], stages: int, extend: Extend) -> Chains:
    """Extend chains span by span; ``spans[i]`` are those that end at state i."""
    cost = np.full((len(spans), stages + 1), UNREACHED, dtype=np.int64)
    before = np.zeros((len(spans), stages + 1), dtype=np.int64)
    cost[0, 0] = 0
    positions = np.arange(stages)
    for end, ending in enumerate(spans):
        if len(ending.starts):
            extended = extend(cost[ending.starts, :-1], ending)
            choice = extended.argmin(axis=0)
            cost[end, 1:] = np.minimum(extended[choice, positions], UNREACHED)
            before[end, 1:] = ending.starts[choice]
    return Chains(cost, before)


def smallest_bottleneck(spans: Sequence[Spans], stages: int, load: Load) -> Chains:
    """Chains whose most loaded stage has the smallest load."""
    return best_chains(spans, stages, lambda cost, ending: np.maximum(cost, load(ending)))


def smallest_sum(
    spans: Sequence[Spans], stages: int, amount: Load, load: Load, bound: int
) -> Chains:
    """Chains with the smallest sum of ``amount`` among those without a load beyond ``bound``."""

    def extend(cost: Integers, ending: Spans) -> Integers:
        return cost + np.where(load(ending) <= bound, amount(ending), UNREACHED)

    return best_chains(spans, stages, extend)
