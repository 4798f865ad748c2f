"""The best plans of up to three stages, by trying all on a sample of the states."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise, product

import numpy as np

from pipectl.arrays import Integers
from pipectl.planner.hybrid.model import Model
from pipectl.planner.hybrid.moves import Sketch
from pipectl.planner.hybrid.value import best_row

FEW_DEVICES = 4
MOST_ROWS = 120_000
"""Plans that are tried for each number of stages; where there are more, none."""


def few_stages(model: Model, states: Integers) -> Iterator[Sketch]:
    """The best plan with one, two and three stages each.

    Args:
        states: to cut at, from nothing to everything.
    """
    for count in (1, 2, 3):
        picks = _picks(model, count)
        cuts = _cuts(model, states, count)
        if len(picks) and len(cuts) and len(picks) * len(cuts) <= MOST_ROWS:
            cut_rows = np.repeat(cuts, len(picks), axis=0)
            pick_rows = np.tile(picks, (len(cuts), 1))
            row, _ = best_row(model, cut_rows, pick_rows, np.inf)
            yield tuple(cut_rows[row].tolist()), tuple(pick_rows[row].tolist())


def _picks(model: Model, count: int) -> Integers:
    """Replica counts of every stage: on few devices all, or else those that leave fewer devices
    idle than any stage could use."""
    replicas, devices, most = model.layout.replicas, model.layout.devices, model.most
    found = [
        picks
        for picks in product(range(most + 1), repeat=count)
        if (used := int(replicas[list(picks)].sum())) <= devices
        and (
            devices <= FEW_DEVICES
            or not any(
                pick < most and used - replicas[pick] + replicas[pick + 1] <= devices
                for pick in picks
            )
        )
    ]
    return np.array(found, np.int64).reshape(-1, count)


def _cuts(model: Model, states: Integers, count: int) -> Integers:
    """Chains of states, a row each."""
    inner = [int(state) for state in states[1:-1]]
    found = [
        (int(states[0]), *borders, int(states[-1]))
        for borders in combinations(inner, count - 1)
        if all(model.follows[a, b] for a, b in pairwise(borders))
    ]
    return np.array(found, np.int64).reshape(-1, count + 1)
