"""The step time of one hybrid plan, and a bound that is cheaper than it; compiled.

A plan is ``cuts`` (one state more than stages; the first holds nothing, the last everything) and
``picks`` (entries of the replica counts, one a stage). Kernels spell loops out: array expressions
take several times as long to compile.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipectl.arrays import Floats, Integers
from pipectl.compiled import compiled
from pipectl.planner.hybrid.model import Model
from pipectl.planner.partition.recurrence import Stages, Transfers, step_s

DOES_NOT_FIT_S = 1e9
"""Step times of plans that need more memory than there is begin here, and rise with the need."""


class Parts(NamedTuple):
    """Costs of a plan's stages and borders; see :mod:`pipectl.planner.partition.recurrence`.

    Args:
        activation_s, gradient_s: links are held by a micro-batch over each border.
        late_s: latency of each border.
        resident_bytes, saved_bytes: of one replica, the second for one micro-batch in flight.
        summed_bytes: held by one replica while gradients are summed, when nothing is in flight.
        limit_bytes: of the replica with the least memory.
    """

    forward_s: Floats
    backward_s: Floats
    reduce_s: Floats
    update_s: Floats
    activation_s: Floats
    gradient_s: Floats
    late_s: Floats
    resident_bytes: Floats
    saved_bytes: Floats
    summed_bytes: Floats
    limit_bytes: Floats


@compiled
def parts_of(model: Model, cuts: Integers, picks: Integers) -> Parts:
    """The costs of every stage and border of a plan."""
    count = len(picks)
    parts = Parts(
        np.empty(count),
        np.empty(count),
        np.empty(count),
        np.empty(count),
        np.empty(count - 1),
        np.empty(count - 1),
        np.empty(count - 1),
        np.empty(count),
        np.empty(count),
        np.empty(count),
        np.empty(count),
    )
    place = 0
    for stage in range(count):
        begin = place % model.layout.slowness.shape[0]
        _stage(model, cuts, picks, stage, begin, parts)
        if stage < count - 1:
            _border(model, cuts, picks, stage, begin, parts)
        place += model.layout.replicas[picks[stage]]
    return parts


@compiled
def _stage(
    model: Model, cuts: Integers, picks: Integers, stage: int, begin: int, parts: Parts
) -> None:
    """Fill in the costs of a stage that begins at a device."""
    costs, layout = model.costs, model.layout
    start, end, pick = cuts[stage], cuts[stage + 1], picks[stage]
    slow = layout.slowness[begin, pick]
    work = costs.forward_s[pick, end] - costs.forward_s[pick, start]
    parts.forward_s[stage] = (work + costs.stage_s[0]) * slow
    work = costs.backward_s[pick, end] - costs.backward_s[pick, start]
    parts.backward_s[stage] = (work + costs.stage_s[1]) * slow
    size = costs.reduced_bytes[end] - costs.reduced_bytes[start]
    rate, late = layout.reduce_s_per_byte[begin, pick], layout.reduce_late_s[begin, pick]
    parts.reduce_s[stage] = late + size * rate if size > 0.0 else 0.0
    parts.update_s[stage] = (costs.update_s[end] - costs.update_s[start]) * slow
    parts.resident_bytes[stage] = (
        costs.resident_bytes[pick, end] - costs.resident_bytes[pick, start]
    )
    held = costs.saved_bytes[end] - costs.saved_bytes[start]
    replicas = layout.replicas[pick]
    parts.saved_bytes[stage] = held / replicas
    parts.summed_bytes[stage] = size * (2.0 - 1.0 / replicas) if replicas > 1 else 0.0
    parts.limit_bytes[stage] = layout.limit_bytes[begin, pick]


@compiled
def _border(
    model: Model, cuts: Integers, picks: Integers, stage: int, begin: int, parts: Parts
) -> None:
    """Fill in the costs of the border behind a stage that begins at a device."""
    state, pick, after = cuts[stage + 1], picks[stage], picks[stage + 1]
    rate = model.layout.s_per_byte[begin, pick, after]
    parts.activation_s[stage] = model.costs.activation_bytes[state] * rate
    parts.gradient_s[stage] = model.costs.gradient_bytes[state] * rate
    parts.late_s[stage] = model.layout.late_s[begin, pick, after]


@compiled
def bound_s(parts: Parts, micro_batches: int, last_share: float) -> float:
    """No schedule of the parts takes less.

    Every stage and every link waits for its first micro-batch, then at best works without a pause,
    and what it did last goes on to the first stage: through all later stages and back, or back.
    """
    count = len(parts.forward_s)
    first = last_share if micro_batches == 1 else 1.0
    total = micro_batches - 1 + last_share
    through = turned = late = update_s = 0.0
    for stage in range(count):
        through += parts.forward_s[stage]
        turned += parts.backward_s[stage]
        update_s = max(update_s, parts.update_s[stage])
        if stage < count - 1:
            through += parts.activation_s[stage]
            turned += parts.gradient_s[stage]
            late += parts.late_s[stage]
    ahead = behind = late_s = found = 0.0
    for stage in range(count):
        work_s = total * (parts.forward_s[stage] + parts.backward_s[stage])
        back_s = last_share * behind + late_s + parts.reduce_s[0]
        found = max(found, first * ahead + late_s + work_s + max(back_s, parts.reduce_s[stage]))
        ahead += parts.forward_s[stage]
        behind += parts.backward_s[stage]
        if stage < count - 1:
            there, back = parts.activation_s[stage], parts.gradient_s[stage]
            all_late_s = 2 * late + parts.reduce_s[0]
            way_s = first * ahead + last_share * (through - ahead - there + turned)
            found = max(found, way_s + total * there + all_late_s)
            way_s = first * through + last_share * (turned - back)
            found = max(found, way_s + total * back + all_late_s)
            ahead += there
            behind += back
            late_s += parts.late_s[stage]
    return found + update_s


@compiled
def best_row(model: Model, cuts: Integers, picks: Integers, best_s: float) -> tuple[int, float]:
    """The best of several plans that is better than ``best_s``: its row (-1: none), step time."""
    row = -1
    for index in range(len(picks)):
        found_s = value_s(model, cuts[index], picks[index], best_s)
        if found_s < best_s:
            row, best_s = index, found_s
    return row, best_s


@compiled
def value_s(model: Model, cuts: Integers, picks: Integers, best_s: float) -> float:
    """The plan's step time under the better of DAPPLE's warm-up policies.

    Args:
        best_s: of the best plan so far; something above it, perhaps a bound, if this is no better.
    """
    parts = parts_of(model, cuts, picks)
    bound = bound_s(parts, model.micro_batches, model.last_share)
    if bound >= best_s:
        return bound
    found = np.inf
    for slope in range(1, 3):
        if slope == 1 or (found > bound and len(picks) > 1 and model.micro_batches > 2):
            found = min(found, scheduled_s(model, parts, warm_up_of(model, len(picks), slope)))
    return found


@compiled
def warm_up_of(model: Model, count: int, slope: int) -> Integers:
    """Policy A of DAPPLE with slope 1, min(m, p - s), and B with slope 2, min(m, 2(p - s) - 1)."""
    depth = np.empty(count, np.int64)
    for stage in range(count):
        depth[stage] = min(model.micro_batches, slope * (count - stage - 1) + 1)
    return depth


@compiled
def scheduled_s(model: Model, parts: Parts, warm_up: Integers) -> float:
    """The step time under a warm-up, or how far memory falls short."""
    count = len(warm_up)
    excess = 0.0
    for stage in range(count):
        flying = warm_up[stage] * parts.saved_bytes[stage]
        need = parts.resident_bytes[stage] + max(flying, parts.summed_bytes[stage])
        excess = max(excess, need / parts.limit_bytes[stage] - 1.0)
    if excess > 0.0:
        return DOES_NOT_FIT_S * (1.0 + excess)
    lower, upper = np.empty(count - 1, np.int64), np.empty(count - 1, np.int64)
    for border in range(count - 1):
        lower[border], upper[border] = border, border + 1
    return step_s(
        Stages(parts.forward_s, parts.backward_s, parts.reduce_s, parts.update_s, warm_up),
        Transfers(lower, upper, parts.activation_s, parts.late_s),
        Transfers(upper, lower, parts.gradient_s, parts.late_s),
        model.micro_batches,
        model.last_share,
        np.zeros(count, np.float64),
    )
