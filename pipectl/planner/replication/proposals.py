"""For every number of stages, the cuts and replicas with about the least bottleneck."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import inf

import numpy as np

from pipectl.arrays import Integers
from pipectl.cluster import Cluster
from pipectl.planner.replication.figures import Figures, States, figures_of, states_of
from pipectl.planner.replication.needs import NONE, fewest_ranks, load_s
from pipectl.profile import Profile

MOST_STAGES = 64
PRECISION = 0.005
"""How far above the least bottleneck a proposal may be, relative to it."""


@dataclass(frozen=True)
class Proposal:
    """Stages for a search to begin with.

    Args:
        stages: ids of every stage's operators, in graph order.
        replicas: of every stage.
        load_s: per micro-batch, of the most loaded stage or border.
        lower_s: no other cuts and replicas with as many stages, at the same states, load less.
    """

    stages: tuple[tuple[str, ...], ...]
    replicas: tuple[int, ...]
    load_s: float
    lower_s: float


@dataclass(frozen=True)
class _Found:
    path: tuple[int, ...] = ()
    places: tuple[int, ...] = ()
    load_s: float = inf
    lower_s: float = 0.0

    @property
    def is_open(self) -> bool:
        return self.load_s - self.lower_s > PRECISION * self.load_s


def replica_counts(
    profile: Profile,
    cluster: Cluster,
    size: int,
    micro_batches: int,
    *,
    limit_bytes: float = inf,
    shard_optimizer: bool = False,
    expired: Callable[[], bool] = lambda: False,
) -> list[Proposal]:
    """The least bottleneck for every number of stages that fits, by rising number of stages.

    A given bottleneck is a yes-or-no question that needs no ranks in its states, see
    :mod:`pipectl.planner.replication.needs`, so the time does not grow with the ranks. One answer
    narrows down the bottlenecks of all numbers of stages.

    Args:
        size: samples of a micro-batch; a stage has at most so many replicas.
        micro_batches: of a step.
        limit_bytes: resident memory of a rank, if less than its device has.
        shard_optimizer: whether replicas share out the optimizer's state.
        expired: asked between two questions; once it says yes, what is known is returned.
    """
    states = states_of(profile)
    given = profile, cluster, states, size, micro_batches, limit_bytes
    figures = figures_of(*given, shard_optimizer=shard_optimizer)
    most = min(cluster.ranks, len(states.downsets) - 1, MOST_STAGES)
    found = _answers(figures, cluster.ranks, [_Found()] * (most + 1), inf)
    found = [_Found(lower_s=inf) if item.load_s == inf else item for item in found]
    while not expired():
        widest = max(found, key=lambda item: 1 - item.lower_s / item.load_s if item.is_open else 0)
        if not widest.is_open:
            break
        found = _answers(figures, cluster.ranks, found, (widest.lower_s + widest.load_s) / 2)
    return [_proposal(profile, states, figures, item) for item in found if item.path]


def _answers(figures: Figures, ranks: int, found: list[_Found], most_s: float) -> list[_Found]:
    """What is known after asking for one more bottleneck."""
    shape = len(found), len(figures.trained_bytes)
    end, count = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    needs = fewest_ranks(figures, most_s, ranks, len(found) - 1, end, count)
    better = []
    for stages, known in enumerate(found):
        if needs[stages, 0] == NONE:
            lower_s = max(known.lower_s, most_s) if most_s < known.load_s else known.lower_s
            better.append(_Found(known.path, known.places, known.load_s, lower_s))
        else:
            read = _read(figures, stages, end, count, known.lower_s)
            better.append(read if read.load_s < known.load_s else known)
    return better


def _read(
    figures: Figures,
    stages: int,
    end: Integers,
    count: Integers,
    lower_s: float,
) -> _Found:
    """The chain of so many stages from the empty state."""
    path, places, load = [0], [], 0.0
    for left in range(stages, 0, -1):
        start = path[-1]
        stop, place = int(end[left, start]), int(count[left, start])
        load = max(load, load_s(figures, start, stop, place))
        path.append(stop)
        places.append(place)
    return _Found(tuple(path), tuple(places), load, lower_s)


def _proposal(profile: Profile, states: States, figures: Figures, found: _Found) -> Proposal:
    downsets = [states.downsets[state] for state in found.path]
    members = [states.graph.operators_of(after & ~before) for before, after in pairwise(downsets)]
    return Proposal(
        stages=tuple(tuple(profile.operators[i].id for i in inside) for inside in members),
        replicas=tuple(int(figures.replicas[place]) for place in found.places),
        load_s=found.load_s,
        lower_s=found.lower_s,
    )
