"""The plans one move away from a plan.

Moves: a border to another state, alone or with a replica to or from the neighbour; a replica from
any stage to any other, to a spare device or from it; the replicas of two stages exchanged; a stage
split at any state with any share of its replicas; two neighbours merged. The last two are for
models with any number of stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from pipectl.arrays import Integers
from pipectl.planner.hybrid.model import Model
from pipectl.planner.hybrid.value import best_row

Sketch = tuple[tuple[int, ...], tuple[int, ...]]
"""A plan while it is searched for: cuts (states) and picks (entries of the replica counts); see
:mod:`pipectl.planner.hybrid.value`."""
Rows = tuple[Integers, Integers]
"""Cuts and picks of several plans with equally many stages, a row each."""

MOST_STATES = 240
"""Up to so many states between two, a border is tried at all of them."""
NEAR = 20
"""Of more, it is tried at so many on each side of where it is, besides an even sample."""
BETTER = 1 - 1e-9
"""A plan must be better by more than rounding."""


def improved(model: Model, plan: Sketch, plan_s: float) -> tuple[Sketch, float]:
    """The best plan within one move and its step time; the plan itself if none is better."""
    best, best_s = plan, plan_s
    for cuts, picks in _neighbours(model, plan):
        row, row_s = best_row(model, cuts, picks, best_s * BETTER)
        if row >= 0:
            best, best_s = (tuple(cuts[row].tolist()), tuple(picks[row].tolist())), row_s
    return best, best_s


def _neighbours(model: Model, plan: Sketch) -> Iterator[Rows]:
    """All plans one move away, by kind of move."""
    yield from _moved_borders(model, plan)
    yield _moved_replicas(model, plan)
    if not model.stages:
        yield from _split(model, plan)
        yield from _merged(model, plan)


def _moved_borders(model: Model, plan: Sketch) -> Iterator[Rows]:
    cuts, picks = plan
    for border in range(1, len(picks)):
        states = _states(model, cuts[border - 1], cuts[border + 1], near=cuts[border])
        for shift in (0, -1, 1):
            shifted = _shifted(model, picks, {border - 1: shift, border: -shift})
            if shifted is not None:
                rows = np.tile(np.array(cuts, np.int64), (len(states), 1))
                rows[:, border] = states
                yield rows, np.tile(np.array(shifted, np.int64), (len(states), 1))


def _states(model: Model, after: int, before: int, near: int | None = None) -> Integers:
    """States strictly between two; of many, an even sample and those next to ``near``."""
    found: Integers = np.flatnonzero(model.follows[after] & model.follows[:, before])
    if len(found) <= MOST_STATES:
        return found
    sample = np.linspace(0, len(found) - 1, MOST_STATES // 4).astype(np.int64)
    place = int(np.searchsorted(found, near)) if near is not None else 0
    around = np.arange(max(0, place - NEAR), min(len(found), place + NEAR) if near else 0)
    chosen: Integers = found[np.union1d(sample, around)]
    return chosen


def _moved_replicas(model: Model, plan: Sketch) -> Rows:
    cuts, picks = plan
    found = []
    for stage in range(len(picks)):
        for other in range(len(picks)):
            found.append(_shifted(model, picks, {other: -1, stage: 1}))
            if other < stage:
                exchanged = list(picks)
                exchanged[stage], exchanged[other] = picks[other], picks[stage]
                found.append(tuple(exchanged))
        found += [_shifted(model, picks, {stage: shift}) for shift in (-1, 1)]
    rows = np.array([p for p in found if p is not None], np.int64).reshape(-1, len(picks))
    return np.tile(np.array(cuts, np.int64), (len(rows), 1)), rows


def _shifted(model: Model, picks: tuple[int, ...], by: dict[int, int]) -> tuple[int, ...] | None:
    """Picks with some stages moved along the replica counts; None if that is impossible."""
    found = tuple(pick + by.get(stage, 0) for stage, pick in enumerate(picks))
    if min(found) < 0 or max(found) > model.most:
        return None
    used = sum(int(model.layout.replicas[pick]) for pick in found)
    return found if used <= model.layout.devices else None


def _split(model: Model, plan: Sketch) -> Iterator[Rows]:
    cuts, picks = plan
    replicas = model.layout.replicas
    spare = model.layout.devices - int(replicas[list(picks)].sum())
    for stage, (start, end) in enumerate(pairwise(cuts)):
        states = _states(model, start, end)
        room = int(replicas[picks[stage]]) + spare
        shares = [(p, _largest(model, room - int(replicas[p]))) for p in range(model.most + 1)]
        pairs = np.array([pair for pair in shares if pair[1] >= 0], np.int64).reshape(-1, 2)
        if len(states) and len(pairs):
            yield _split_rows(plan, stage, states, pairs)


def _split_rows(plan: Sketch, stage: int, states: Integers, pairs: Integers) -> Rows:
    """A stage split at each of the states with each of the pairs of picks."""
    cuts, picks = plan
    count = len(states) * len(pairs)
    cut_rows = np.tile(np.insert(np.array(cuts, np.int64), stage + 1, 0), (count, 1))
    cut_rows[:, stage + 1] = np.repeat(states, len(pairs))
    pick_rows = np.tile(np.insert(np.array(picks, np.int64), stage, 0), (count, 1))
    pick_rows[:, stage : stage + 2] = np.tile(pairs, (len(states), 1))
    return cut_rows, pick_rows


def _merged(model: Model, plan: Sketch) -> Iterator[Rows]:
    cuts, picks = plan
    for stage in range(len(picks) - 1):
        total = int(model.layout.replicas[list(picks[stage : stage + 2])].sum())
        merged = (*picks[:stage], _largest(model, total), *picks[stage + 2 :])
        kept = (*cuts[: stage + 1], *cuts[stage + 2 :])
        yield np.array([kept], np.int64), np.array([merged], np.int64)


def _largest(model: Model, devices: int) -> int:
    """The largest entry of the replica counts that takes at most so many devices; -1 if none."""
    counts = model.layout.replicas[: model.most + 1]
    return int(np.searchsorted(counts, devices, side="right")) - 1


def kicks(model: Model, plan: Sketch) -> list[Sketch]:
    """Every merge of two stages, and every stage split evenly; to start again from."""
    if model.stages:
        return []
    cuts, picks = plan
    rows = list(_merged(model, plan))
    work = model.costs.forward_s[0] + model.costs.backward_s[0]
    for stage, (start, end) in enumerate(pairwise(cuts)):
        states = _states(model, start, end)
        replicas = int(model.layout.replicas[picks[stage]])
        if len(states) and replicas > 1:
            middle = states[np.argmin(np.abs(2 * work[states] - work[start] - work[end]))]
            half = _largest(model, replicas // 2), _largest(model, replicas - replicas // 2)
            pair = np.array([half], np.int64)
            rows.append(_split_rows(plan, stage, np.array([middle], np.int64), pair))
    return [(tuple(c[0].tolist()), tuple(p[0].tolist())) for c, p in rows]
