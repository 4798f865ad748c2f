"""The dynamic programme: the best chain of downsets from the empty set to the whole graph.

Over all downsets it is exact (Tarnawski et al., "Efficient algorithms for device placement of DNN
graph operators", NeurIPS 2020, solve the same problem this way); over a sample of them it is the
best among the chains of the sample. It also decides which kind of device takes which stage. Figures
are integers, ties go to the smallest start and then to the first kind, so the result is the same on
every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from pipectl.arrays import Integers
from pipectl.planner.graphs.spans import Spans
from pipectl.planner.machines.mix import Mix
from pipectl.planner.partitions.chain_kernels import UNREACHED, Best, Choices, extend_chains

CHUNK = 10**8
"""Steps of the inner loop between two looks at the time."""

Check = Callable[[], None]
"""Called now and then; raises to end the search."""

_NOTHING: Integers = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class Memory:
    """Memory of every span as a stage.

    Args:
        held: by mode, bytes without and for each micro-batch in flight; shape [modes * 2, spans].
        flying: micro-batches in flight, in thousandths of one of the profile's size, by position.
        limits: bytes of each kind of device; None where the largest memory shall be smallest.
    """

    held: Integers
    flying: Integers
    limits: Integers | None


_NO_MEMORY = Memory(np.zeros((0, 0), dtype=np.int64), _NOTHING, None)


@dataclass(frozen=True)
class Chain:
    """States from the empty to the full one, with kind of device and mode of the stages between."""

    states: tuple[int, ...]
    kinds: tuple[int, ...]
    modes: tuple[int, ...]


@dataclass(frozen=True)
class Chains:
    """The best chain to every state with every tally.

    Args:
        cost: shape [states, tallies].
        before: the state in front of the last stage; same shape.
        options: kind and mode of the last stage; same shape.
        modes: how many there are.
    """

    mix: Mix
    modes: int
    cost: Integers
    before: npt.NDArray[np.int32]
    options: npt.NDArray[np.int8]

    def best(self, stages: int) -> int | None:
        """Cost of the best chain of all blocks with so many stages; None if there is none."""
        cost = int(self.cost[-1, self.mix.tallies(stages)].min(initial=UNREACHED))
        return cost if cost < UNREACHED else None

    def chain(self, stages: int) -> Chain:
        """The best chain with so many stages."""
        tallies = self.mix.tallies(stages)
        tally = int(tallies[self.cost[-1, tallies].argmin()])
        states = [len(self.cost) - 1]
        taken: list[tuple[int, int]] = []
        while len(taken) < stages:
            kind, mode = divmod(int(self.options[states[-1], tally]), self.modes)
            taken.append((kind, mode))
            states.append(int(self.before[states[-1], tally]))
            tally = int(self.mix.preceding[tally, kind])
        kinds, modes = zip(*taken[::-1], strict=True)
        return Chain(tuple(states[::-1]), kinds, modes)


def best_chains(
    spans: Spans,
    mix: Mix,
    loads: Integers,
    *,
    amounts: Integers = _NOTHING,
    bound: int = UNREACHED,
    memory: Memory = _NO_MEMORY,
    check: Check = lambda: None,
) -> Chains:
    """Chains with the smallest largest load, or the smallest sum of ``amounts``.

    Args:
        loads: of every span as a stage by kind and mode; shape [kinds * modes, spans].
        amounts: shape [spans]; if given, their sum is what counts.
        bound: no stage may have a larger load.
    """
    limits = _NOTHING if memory.limits is None else memory.limits
    held = memory.held, memory.flying, limits
    choices = Choices(loads, amounts, bound, *held, mix.following, mix.used)
    best = _no_chains(len(spans.states), len(mix))
    modes = len(loads) // mix.kinds
    for begin, stop in _chunks(spans, CHUNK // (modes * mix.following.size)):
        check()
        extend_chains(spans.first, spans.starts, choices, best, begin, stop)
    return Chains(mix, modes, best.cost, best.before, best.options)


def _no_chains(states: int, tallies: int) -> Best:
    """None but the one to the first state, which has no stages."""
    shape = states, tallies
    cost = np.full(shape, UNREACHED, dtype=np.int64)
    cost[0, 0] = 0
    reached = np.zeros((states, 2), dtype=np.int64)
    reached[:, 0] = tallies
    reached[0] = 0, 1
    return Best(reached, cost, np.zeros(shape, dtype=np.int32), np.zeros(shape, dtype=np.int8))


def _chunks(spans: Spans, most: int) -> list[tuple[int, int]]:
    """Ranges of ends with about as many spans each."""
    count = len(spans.states)
    marks = np.arange(0, len(spans), max(1, most))
    borders = np.unique([0, *np.searchsorted(spans.first, marks[1:]), count])
    return [(a, b) for a, b in pairwise(borders.tolist())]
