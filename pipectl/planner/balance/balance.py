"""The partition of a graph with the smallest largest stage load, with a proof.

1. Find the best partition along several topological orders. It is optimal if its largest load is
   the work over the devices.
2. Otherwise enumerate all downsets, and decide whether any partition is better. Repeat with each
   better one, until there is none, which proves the last one optimal.

If there are too many downsets, or time is up, the best partition so far is returned with the bound
of the work, so its gap is proven.

The programme of plans (:mod:`pipectl.planner.partition.programme`) cannot take the place of this:
its costs are differences between two downsets, and a value that skips a stage is not such a one.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np

from pipectl.arrays import Floats, Integers
from pipectl.compiled import compiled
from pipectl.planner.balance.decide import Decider
from pipectl.planner.balance.load_model import (
    TOLERANCE,
    Balance,
    BalancedStage,
    BalanceRequest,
    LoadModel,
    Moves,
    Stages,
    load_model,
)
from pipectl.planner.graph.downsets import enumerate_downsets
from pipectl.planner.request import Expired
from pipectl.profile import Profile


def best_of_orders(
    model: LoadModel, devices: int, bound_s: float, expired: Expired
) -> Stages | None:
    """The best partition below a bound whose stages are parts of one topological order."""
    best: Stages | None = None
    for order in model.orders():
        if best is not None and expired():
            break
        stages = _cut(model, devices, order, bound_s)
        if stages is not None:
            best, bound_s = stages, model.value_s(stages)
    return best


def _cut(model: LoadModel, devices: int, order: Sequence[int], bound_s: float) -> Stages | None:
    shape = (len(order) + 1, devices + 1)
    best_s, before = np.full(shape, inf), np.zeros(shape, dtype=np.int64)
    best_s[0] = 0.0
    blocks, count = np.array(order), np.zeros(len(model.moves.transfer_s), dtype=np.int64)
    costs = model.compute_s, model.memory_bytes
    _cut_order(blocks, bound_s, *costs, model.limit_bytes, model.moves, count, best_s, before)
    if not np.isfinite(best_s[-1].min()):
        return None
    left, end = int(best_s[-1].argmin()), len(order)
    stages: list[tuple[int, ...]] = []
    while end:
        start = int(before[end, left])
        stages.append(tuple(sorted(order[start:end])))
        left, end = left - 1, start
    return tuple(reversed(stages))


@compiled
def _crossing(moves: Moves, block: int, count: Integers) -> float:
    """Seconds that an added block adds to the transfers across the border of a stage."""
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
def _cut_order(
    order: Integers,
    bound_s: float,
    compute_s: Floats,
    memory_bytes: Floats,
    limit_bytes: float,
    moves: Moves,
    count: Integers,
    best_s: Floats,
    before: Integers,
) -> None:
    """Find the best cuts of every prefix of an order.

    Args:
        order: blocks.
        bound_s: stages of this load or more are ignored.
        count: scratch space, one number per value.
        best_s: out; smallest largest load by prefix and devices. Initially infinite (no partition),
            except 0 for no blocks.
        before: out; start of the last stage.
    """
    for end in range(1, len(order) + 1):
        for value in range(len(count)):
            count[value] = 0
        work_s, moved_s, bytes_in = 0.0, 0.0, 0.0
        for start in range(end - 1, -1, -1):
            block = order[start]
            work_s += compute_s[block]
            bytes_in += memory_bytes[block]
            moved_s += _crossing(moves, block, count)
            if work_s >= bound_s or bytes_in > limit_bytes:
                break
            if work_s + moved_s < bound_s:
                for devices in range(best_s.shape[1] - 1):
                    through = max(best_s[start, devices], work_s + moved_s)
                    if through < best_s[end, devices + 1]:
                        best_s[end, devices + 1] = through
                        before[end, devices + 1] = start


MAX_DOWNSETS = 1_000_000


def balance(
    profile: Profile,
    request: BalanceRequest,
    expired: Expired = lambda: False,
    *,
    max_downsets: int = MAX_DOWNSETS,
) -> Balance | None:
    """Partition a graph so that the largest load of a stage is smallest.

    Args:
        profile: prepared (:mod:`pipectl.planner.graph.imported`).
        expired: whether time is up; called every few tenths of a second. The result is then the
            best so far, with its proven gap.
        max_downsets: a graph with more is not searched exhaustively.

    Returns:
        None if no partition fits the devices and their memory, or none was found in time.
    """
    model, devices = load_model(profile, request), request.devices
    bound_s = float(model.compute_s.sum()) / max(devices, 1) * (1 - TOLERANCE)
    stages, value_s, downsets = best_of_orders(model, devices, inf, expired), inf, 0

    def is_proven() -> bool:
        return bound_s >= value_s * (1 - TOLERANCE) or expired()

    if stages is not None:
        value_s = model.value_s(stages)
    arcs = model.neighbours
    lattice = None if is_proven() else enumerate_downsets(*arcs, max_downsets, expired)
    if lattice is not None:
        downsets, decider = len(lattice.sets), Decider(model, devices, lattice)
        try:
            while (better := decider.below(value_s * (1 - TOLERANCE), expired)) is not None:
                if model.value_s(better) >= value_s:
                    break
                stages, value_s = better, model.value_s(better)
            bound_s = value_s
        except TimeoutError:
            pass
    if stages is None:
        return None
    return Balance(value_s, min(bound_s, value_s), _named(profile, model, stages), downsets)


def _named(profile: Profile, model: LoadModel, stages: Stages) -> tuple[BalancedStage, ...]:
    numbers = [[n for block in blocks for n in model.operators[block]] for blocks in stages]
    numbers[0] += model.first
    numbers[-1] += model.last
    ids = [operator.id for operator in profile.operators]
    return tuple(
        BalancedStage(tuple(ids[n] for n in sorted(inside)), model.load_s(blocks))
        for inside, blocks in zip(numbers, stages, strict=True)
    )
