"""Nodes with fewer cores than ranks: n computing ranks each run at min(1, cores / n).

Work is measured on a virtual clock that runs at this rate, so a change of n moves the clock and
not the end of every rank's work. Compiled; ``pool`` is the index of such a node.
"""

from __future__ import annotations

from pipectl.compiled import part_of_kernel
from pipectl.simulate.heap import drop_first, push
from pipectl.simulate.tables import Costs, State


@part_of_kernel
def begin_work(costs: Costs, state: State, pool: int, rank: int, work_s: float, now: float) -> None:
    """A rank begins to compute what would take ``work_s`` on a core of its own."""
    elapsed = now - state.pool_time[pool]
    state.pool_clock[pool] += elapsed * _rate(costs, state, pool)
    state.pool_time[pool] = now
    push(
        state.work_end, state.work_number, state.work_rank,
        costs.pool_base[pool], state.pool_size[pool], state.pool_clock[pool] + work_s, rank, rank,
    )  # fmt: skip
    state.pool_size[pool] += 1


@part_of_kernel
def end_work(costs: Costs, state: State, pool: int, now: float) -> int:
    """The rank whose work ends now; of several the lowest."""
    base = costs.pool_base[pool]
    rank = state.work_rank[base]
    state.pool_clock[pool] = state.work_end[base]
    state.pool_time[pool] = now
    drop_first(state.work_end, state.work_number, state.work_rank, base, state.pool_size[pool])
    state.pool_size[pool] -= 1
    return int(rank)


@part_of_kernel
def next_end(costs: Costs, state: State, pool: int) -> float:
    """When the next work ends if none begins before."""
    left_s = max(0.0, float(state.work_end[costs.pool_base[pool]] - state.pool_clock[pool]))
    return float(state.pool_time[pool]) + left_s / _rate(costs, state, pool)


@part_of_kernel
def _rate(costs: Costs, state: State, pool: int) -> float:
    return min(1.0, float(costs.pool_cores[pool] / max(1, state.pool_size[pool])))
