"""Kernels that cut one topological order into stages."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipectl.arrays import Floats, Integers
from pipectl.compiled import compiled
from pipectl.planner.exact.arrays import Moves


class Cuts(NamedTuple):
    """The best cuts of every prefix of an order.

    Args:
        best_s: [blocks + 1, accelerators + 1, CPUs + 1] smallest largest load; infinite where
            there is no way.
        before: start of the last stage, or -1 less it if it is on a CPU.
    """

    best_s: Floats
    before: Integers


@compiled
def _note(cuts: Cuts, start: int, end: int, load_s: float, on_cpu: int) -> None:
    """Enter a stage wherever it makes a prefix better."""
    for a in range(cuts.best_s.shape[1] - 1 + on_cpu):
        for c in range(cuts.best_s.shape[2] - on_cpu):
            through = max(cuts.best_s[start, a, c], load_s)
            if through < cuts.best_s[end, a + 1 - on_cpu, c + on_cpu]:
                cuts.best_s[end, a + 1 - on_cpu, c + on_cpu] = through
                cuts.before[end, a + 1 - on_cpu, c + on_cpu] = -1 - start if on_cpu else start


@compiled
def _crossing(moves: Moves, block: int, count: Integers) -> float:
    """What transfers across the border of a stage grow by when a block comes in."""
    grown = 0.0
    for place in range(moves.values_at[block], moves.values_at[block + 1]):
        value = moves.values[place]
        count[value] += 1
        if count[value] == 1:
            grown += moves.transfer_s[value]
        if count[value] == moves.users_at[value + 1] - moves.users_at[value]:
            grown -= moves.transfer_s[value]
    return grown


@compiled
def cut_order(
    order: Integers, bound_s: float, costs: Floats, limit_bytes: float, moves: Moves, cuts: Cuts
) -> None:
    """Find the best cuts of every prefix of an order.

    Args:
        order: blocks.
        bound_s: stages of this load or more are of no interest.
        costs: [blocks, 3] seconds on an accelerator and on a CPU, bytes.
        cuts: out.
    """
    cuts.best_s[:] = np.inf
    cuts.best_s[0] = 0.0
    for end in range(1, len(order) + 1):
        count = np.zeros(len(moves.transfer_s), dtype=np.int64)
        compute_s, cpu_s, moved_s, bytes_in = 0.0, 0.0, 0.0, 0.0
        for start in range(end - 1, -1, -1):
            block = order[start]
            compute_s += costs[block, 0]
            cpu_s += costs[block, 1]
            bytes_in += costs[block, 2]
            moved_s += _crossing(moves, block, count)
            possible = compute_s < bound_s and bytes_in <= limit_bytes
            if possible and compute_s + moved_s < bound_s:
                _note(cuts, start, end, compute_s + moved_s, 0)
            if cpu_s < bound_s:
                _note(cuts, start, end, cpu_s, 1)
            elif not possible:
                break
