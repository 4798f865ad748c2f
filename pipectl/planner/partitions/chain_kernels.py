"""Inner loop of the dynamic programme, compiled; see :mod:`pipectl.planner.partitions.dynamic`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipectl.arrays import Integers
from pipectl.compiled import compiled_in_place, part_of_kernel

UNREACHED = 2**61
"""Above every load; sums of two stay within 64 bits."""


class Choices(NamedTuple):
    """What every span is as a stage.

    Args:
        loads: by kind and mode, the mode running faster; shape [kinds * modes, spans].
        amounts: what is summed over the stages, shape [spans]; if empty, the largest load counts.
        bound: no stage may have a larger load.
        held: by mode, bytes of every span, and those that each micro-batch in flight adds; shape
            [modes * 2, spans], or [0, 0] if memory does not matter.
        flying: micro-batches in flight, in thousandths, by position of a stage.
        limits: bytes by kind; if empty, memory is the load, by position and kind.
        following, used: of the tallies; see :class:`pipectl.planner.machines.mix.Mix`.
    """

    loads: Integers
    amounts: Integers
    bound: int
    held: Integers
    flying: Integers
    limits: Integers
    following: Integers
    used: Integers


class Best(NamedTuple):
    """The best chain to every state with every tally, to be filled in.

    Args:
        reached: range of the tallies that chains to every state have; shape [states, 2].
        cost: largest load, or sum of the amounts; shape [states, tallies].
        before: state in front of the last stage; same shape.
        options: kind and mode of the last stage; same shape.
    """

    reached: Integers
    cost: Integers
    before: npt.NDArray[np.int32]
    options: npt.NDArray[np.int8]


@compiled_in_place
def extend_chains(
    first: Integers, starts: Integers, choices: Choices, best: Best, begin: int, stop: int
) -> None:
    """Extend chains by every span that ends at a state from ``begin`` to ``stop``.

    Args:
        first, starts: of the spans; see :class:`pipectl.planner.graphs.spans.Spans`.
    """
    for end in range(begin, stop):
        for span in range(first[end], first[end + 1]):
            for option in range(choices.loads.shape[0]):
                if choices.loads[option, span] <= choices.bound:
                    _extend_by_span(choices, best, starts[span], end, span, option)


@part_of_kernel
def _extend_by_span(
    choices: Choices, best: Best, start: int, end: int, span: int, option: int
) -> None:
    """Extend the chains that end at one state by one span."""
    modes = choices.loads.shape[0] // choices.following.shape[1]
    kind, mode = option // modes, option % modes
    load = choices.loads[option, span]
    amount = choices.amounts[span] if len(choices.amounts) else -1
    limited, memory_is_load = choices.held.shape[1] > 0, len(choices.limits) == 0
    fixed = choices.held[2 * mode, span] if limited else 0
    growing = choices.held[2 * mode + 1, span] if limited else 0
    limit = choices.limits[kind] if len(choices.limits) else UNREACHED
    for tally in range(best.reached[start, 0], best.reached[start, 1]):
        after = choices.following[tally, kind]
        value = best.cost[start, tally]
        if after < 0 or value >= UNREACHED:
            continue
        taken = fixed
        if growing:
            taken += growing * choices.flying[choices.used[tally]] // 1000
        if taken > limit:
            continue
        own = load + taken if limited and memory_is_load else load
        value = value + amount if amount >= 0 else max(value, own)
        if value < best.cost[end, after]:
            _enter(best, start, end, after, value, option)


@part_of_kernel
def _enter(best: Best, start: int, end: int, tally: int, value: int, option: int) -> None:
    """Enter a chain that is better."""
    best.cost[end, tally] = value
    best.before[end, tally] = start
    best.options[end, tally] = option
    best.reached[end, 0] = min(best.reached[end, 0], tally)
    best.reached[end, 1] = max(best.reached[end, 1], tally + 1)
