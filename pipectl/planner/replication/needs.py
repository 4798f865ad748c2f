"""The fewest ranks with which no stage loads more than a given time, for every number of stages.

Stages are put together from the end. With the numbers of the stages behind it, which set how many
micro-batches a stage holds, a state needs to remember only the fewest ranks that do; a stage takes
the fewest replicas that are fast enough and fit:

    needs[n + 1, state] = least over the stage's end of needs[n, end] + its replicas
"""

from __future__ import annotations

import numpy as np

from pipectl.arrays import Integers
from pipectl.compiled import compiled
from pipectl.planner.replication.figures import Figures

NONE = 2**31
"""Of ranks: there is no such chain of stages."""


@compiled
def fewest_ranks(
    figures: Figures, most_s: float, ranks: int, stages: int, end: Integers, count: Integers
) -> Integers:
    """The fewest ranks behind every state by number of stages; shape [stages + 1, states].

    Args:
        ranks: chains that need more are dropped.
        end, count: of the same shape; are filled with the end of the first stage and the place of
            its number of replicas.
    """
    states = len(figures.trained_bytes)
    needs = np.full((stages + 1, states), NONE, dtype=np.int64)
    needs[0, states - 1] = 0
    for start in range(states - 2, -1, -1):
        for stop in range(start + 1, states):
            if figures.follows[start, stop]:
                _extend(figures, start, stop, most_s, ranks, needs, end, count)
    return needs


@compiled
def _extend(
    figures: Figures,
    start: int,
    stop: int,
    most_s: float,
    ranks: int,
    needs: Integers,
    end: Integers,
    count: Integers,
) -> None:
    """One stage in front of the chains behind ``stop``; behind more stages it holds more."""
    place = 0
    for behind in range(len(needs) - 1):
        if needs[behind, stop] == NONE:
            continue
        while place < len(figures.replicas) and not (
            load_s(figures, start, stop, place) <= most_s
            and memory_bytes(figures, start, stop, place, behind) <= figures.limit_bytes
        ):
            place += 1
        if place == len(figures.replicas):
            return
        total = needs[behind, stop] + figures.replicas[place]
        if total <= ranks and total < needs[behind + 1, start]:
            needs[behind + 1, start] = total
            end[behind + 1, start] = stop
            count[behind + 1, start] = place


@compiled
def load_s(figures: Figures, start: int, stop: int, place: int) -> float:
    """Seconds per micro-batch of a stage: the longest of its compute and its two borders."""
    compute = figures.work_s[place, stop] - figures.work_s[place, start] + figures.stage_s
    trained = figures.trained_bytes[stop] - figures.trained_bytes[start]
    compute += trained * figures.reduce_s_per_byte[place]
    moved = max(figures.moved_s[place, start], figures.moved_s[place, stop])
    return float(max(compute, moved))


@compiled
def memory_bytes(figures: Figures, start: int, stop: int, place: int, behind: int) -> float:
    """Memory of a rank of a stage with so many stages behind it."""
    resident = figures.resident_bytes[place, stop] - figures.resident_bytes[place, start]
    saved = figures.saved_bytes[stop] - figures.saved_bytes[start]
    replicas = figures.replicas[place]
    flying = saved * min(behind + 1, figures.micro_batches) / replicas
    trained = figures.trained_bytes[stop] - figures.trained_bytes[start]
    summed = trained * (2.0 - 1.0 / replicas) if replicas > 1 else 0.0
    return float(resident + max(flying, summed))
