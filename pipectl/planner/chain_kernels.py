"""Inner loop of the dynamic programme, compiled; see :mod:`pipectl.planner.dynamic`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pipectl.compiled import compiled
from pipectl.planner.span_kernels import Integers

UNREACHED = 2**61
"""Above every load; sums of two stay within 64 bits."""


@compiled
def _extend_by_span(
    start: int,
    end: int,
    option: int,
    load: int,
    amount: int,
    fixed: int,
    growing: int,
    limit: int,
    memory_is_load: bool,
    flying: Integers,
    following: Integers,
    used: Integers,
    cost: Integers,
    before: npt.NDArray[np.int32],
    options: npt.NDArray[np.int8],
) -> None:
    """Extend the chains that end at one state by one span; see :func:`extend_chains`.

    Args:
        amount: to be summed; if negative, the largest load counts.
        fixed, growing: bytes without and for each micro-batch in flight.
        following: the tally behind each; shape [tallies].
    """
    for tally in range(len(following)):
        after = following[tally]
        value = cost[start, tally]
        if after < 0 or value >= UNREACHED:
            continue
        taken = fixed
        if growing:
            taken += growing * flying[used[tally]] // 1000
        if taken > limit:
            continue
        own = load + taken if memory_is_load else load
        value = value + amount if amount >= 0 else max(value, own)
        if value < cost[end, after]:
            cost[end, after] = value
            before[end, after] = start
            options[end, after] = option


@compiled
def extend_chains(
    first: Integers,
    starts: Integers,
    loads: Integers,
    amounts: Integers,
    bound: int,
    held: Integers,
    flying: Integers,
    limits: Integers,
    following: Integers,
    used: Integers,
    cost: Integers,
    before: npt.NDArray[np.int32],
    options: npt.NDArray[np.int8],
    begin: int,
    stop: int,
) -> None:
    """Extend chains by every span that ends at a state from ``begin`` to ``stop``.

    Args:
        loads: of every span as a stage by kind and mode, the mode running faster; shape
            [kinds * modes, spans].
        amounts: what is summed over the stages, shape [spans]; if empty, the largest load counts.
        bound: no stage may have a larger load.
        held: by mode, bytes of every span, and those that each micro-batch in flight adds; shape
            [modes * 2, spans], or [0, 0] if memory does not matter.
        flying: micro-batches in flight, in thousandths, by position of a stage.
        limits: bytes by kind; if empty, memory is the load, by position and kind.
        cost, before, options: of the best chain to every state with every tally, filled in.
    """
    limited = held.shape[1] > 0
    modes = loads.shape[0] // following.shape[1]
    for end in range(begin, stop):
        for span in range(first[end], first[end + 1]):
            for option in range(loads.shape[0]):
                kind, mode = option // modes, option % modes
                if loads[option, span] > bound:
                    continue
                _extend_by_span(
                    starts[span],
                    end,
                    option,
                    loads[option, span],
                    amounts[span] if len(amounts) else -1,
                    held[2 * mode, span] if limited else 0,
                    held[2 * mode + 1, span] if limited else 0,
                    limits[kind] if len(limits) else UNREACHED,
                    limited and len(limits) == 0,
                    flying,
                    following[:, kind],
                    used,
                    cost,
                    before,
                    options,
                )
