"""The interface of planners of the literature, and the simplest of these planners.

These consider at most one cost, and cut contiguous blocks in graph order:

- *uniform*: equally many blocks per stage;
- *parameters*: the smallest largest sum of parameter bytes;
- *hash*: as many blocks in a stage as names hash to it.

The papers on antichains compare with these and with PipeDream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate

import numpy as np

from pipectl.arrays import Floats
from pipectl.planner.costs.links import Links
from pipectl.planner.graph.blocks import condense
from pipectl.planner.graph.downsets import CutSpace, Partition, prefix_downsets
from pipectl.planner.partition.layout import Ranks, consecutive
from pipectl.profile import Operator, Profile


@dataclass(frozen=True)
class Work:
    """One optimizer step.

    Args:
        batch_size: samples.
        micro_batch_size: samples of a micro-batch.
    """

    batch_size: int
    micro_batch_size: int

    @property
    def micro_batches(self) -> float:
        """How many micro-batches a step has."""
        return self.batch_size / self.micro_batch_size


@dataclass(frozen=True)
class PolicyPlan:
    """The stages that a policy chose, and the value of its objective.

    Args:
        cuts: entries of ``states``, one more than stages.
        ranks: of every stage, one per replica.
        value_s: the policy's objective; not comparable with other policies'.
    """

    states: CutSpace
    cuts: tuple[int, ...]
    ranks: Ranks
    value_s: float

    @property
    def partition(self) -> Partition:
        """The blocks of every stage."""
        return self.states.partition(self.cuts)


Policy = Callable[[Profile, Links, Work], PolicyPlan]


@dataclass(frozen=True)
class Prefixes:
    """Sums over the blocks of each state, for one micro-batch on one device.

    Args:
        time_s: forward and backward.
        parameter_bytes: bytes of parameters.
        trained_bytes: of those that are trained, whose gradients replicas sum.
        output_bytes: values that are read after the state.
    """

    time_s: Floats
    parameter_bytes: Floats
    trained_bytes: Floats
    output_bytes: Floats

    @classmethod
    def of(cls, profile: Profile, states: CutSpace, size: float) -> Prefixes:
        """Times and messages in proportion to ``size`` samples."""
        scale = size / profile.micro_batch_size
        inside = states.operators
        members = inside.astype(np.float64)
        read = np.zeros_like(inside)
        for source, target in profile.edge_indices:
            read[:, source] |= ~inside[:, target]
        crossing = (read & inside).astype(np.float64)
        operators = profile.operators
        return cls(
            members @ np.array([o.forward_s + o.backward_s for o in operators]) * scale,
            members @ np.array([float(o.parameter_bytes) for o in operators]),
            members @ np.array([trained_bytes(o) for o in operators]),
            crossing @ np.array([float(o.output_bytes) for o in operators]) * scale,
        )


def trained_bytes(operator: Operator) -> float:
    """The bytes of an operator's parameters without those of which it computes no gradient."""
    trained = {name for name, _ in operator.parameter_gradients}
    frozen = sum(size for name, size in operator.parameters if name not in trained)
    return float(operator.parameter_bytes - frozen)


def chain_states(profile: Profile) -> CutSpace:
    """The prefixes of the graph's own order."""
    graph = condense(profile)
    downsets = prefix_downsets(graph, 0)
    return CutSpace(graph, tuple(downsets), False)


def balanced(sums: Floats, count: int) -> tuple[tuple[int, ...], float]:
    """Cuts into ``count`` parts, none empty, whose largest part is smallest.

    Args:
        sums: ascending; sum before every possible cut; shape [blocks + 1].
    """
    size = len(sums)
    apart = np.where(np.arange(size)[:, None] < np.arange(size)[None, :], 0.0, np.inf)
    block = sums[None, :] - sums[:, None] + apart
    largest = block[0]
    begins = []
    for _ in range(count - 1):
        values = np.maximum(largest[:, None], block)
        begins.append(values.argmin(axis=0))
        largest = values.min(axis=0)
    cuts = [size - 1]
    for begin in reversed(begins):
        cuts.append(int(begin[cuts[-1]]))
    return (0, *cuts[::-1]), float(largest[-1])


def by_count(profile: Profile, links: Links, work: Work) -> PolicyPlan:
    """Equal numbers of blocks; the objective is the largest stage's time."""
    states, count = _states(profile, links)
    cuts = tuple(int(at) for at in np.round(np.linspace(0, len(states) - 1, count + 1)))
    return _plan(profile, states, cuts, work)


def by_parameters(profile: Profile, links: Links, work: Work) -> PolicyPlan:
    """Parameter bytes as even as possible; the objective is the largest sum of a stage."""
    states, count = _states(profile, links)
    sums = Prefixes.of(profile, states, work.micro_batch_size).parameter_bytes
    cuts, largest = balanced(sums, count)
    return PolicyPlan(states, cuts, consecutive((1,) * count), largest)


def by_hash(profile: Profile, links: Links, work: Work) -> PolicyPlan:
    """Per stage as many blocks as names hash to it, at least one."""
    states, count = _states(profile, links)
    names = [profile.operators[b.operators[0]].id for b in condense(profile).blocks]
    spare = len(names) - count
    sizes = [1] * count
    for name in names[:spare]:
        sizes[int.from_bytes(sha256(name.encode()).digest()[:8], "big") % count] += 1
    return _plan(profile, states, (0, *accumulate(sizes)), work)


def by_time(profile: Profile, links: Links, work: Work) -> PolicyPlan:
    """Times as even as possible, as in torchgpipe; messages do not count.

    Source: Kim et al., "torchgpipe: On-the-fly Pipeline Parallelism for Training Giant Models",
    2020, section on automatic balancing, which cites Barany and Grinberg, "Block Partitions of
    Sequences", 2015. Here the smallest largest sum is exact.
    """
    states, count = _states(profile, links)
    times = Prefixes.of(profile, states, work.micro_batch_size).time_s
    cuts, largest_s = balanced(times, count)
    return PolicyPlan(states, cuts, consecutive((1,) * count), largest_s)


def _states(profile: Profile, links: Links) -> tuple[CutSpace, int]:
    """The states to cut at, and the number of stages: one per device if there are enough blocks."""
    states = chain_states(profile)
    return states, min(len(links.node_of_rank), len(states) - 1)


def _plan(profile: Profile, states: CutSpace, cuts: tuple[int, ...], work: Work) -> PolicyPlan:
    times = Prefixes.of(profile, states, work.micro_batch_size).time_s
    largest_s = float(np.diff(times[list(cuts)]).max())
    return PolicyPlan(states, cuts, consecutive((1,) * (len(cuts) - 1)), largest_s)
