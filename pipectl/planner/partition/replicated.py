"""Stages with replicas: how many devices of each class every stage takes, by one programme.

The cluster is seen as *classes* of devices of about equal speed and memory. What a chain of stages
uses of each class is the state of the programme, and an option of a stage is a *use*: so many
devices of each class, with or without recomputation. So a stage has the speed and the memory of the
devices that it really gets, and devices may be left out. Two fast devices and one slow one::

    use (2, 0)   two fast replicas
    use (1, 1)   a fast and a slow one; they share evenly, so both have the slow one's speed
    left out     whatever no stage uses

On many ranks, devices are counted in *units* of several, which keeps the state as small.

Per cap on the load, the chain with the shortest latency of a micro-batch is proposed. To fix the
load, so that stages need not know each other, is an idea of Tarnawski, Narayanan and Phanishayee
("Piper: Multidimensional Planner for DNN Parallelization", NeurIPS 2021). Which ranks of a class
a stage gets is decided afterwards, in the order of the nodes or in turn over them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from math import ceil, inf, isfinite, prod

import numpy as np

from pipectl.arrays import Integers
from pipectl.planner.costs.devices import Pool, Use, merged_pools
from pipectl.planner.graph.downsets import CutSpace, Partition
from pipectl.planner.partition.cutter import GUESSES
from pipectl.planner.partition.programme import (
    KEEP,
    LATENCY,
    MEMORY,
    RECOMPUTE,
    Chains,
    Goal,
    Options,
    best_chains,
)
from pipectl.planner.partition.tables import CostTable, table_of
from pipectl.planner.problem import Problem

MAX_CUTS = 64, 32
"""Downsets to cut at, with devices of one class and of several: in each part of the work, those
that send least."""
CAPS = (1.03, 1.1, 1.2, 1.4, 1.8, 2.5, 1e9)
"""Caps on the largest load, relative to all work spread over all devices by their speed."""
MAX_UNITS = 48
"""With more ranks, devices are counted in units, of a power of two ranks each."""
MAX_TALLIES = 400
"""Largest number of combinations of devices in use; classes are merged until there are no more."""
MAX_USES = 64
"""Largest number of uses of a stage that has devices of several classes."""
MAX_STAGES = 64
"""Stages whose micro-batches in flight are told apart."""
EVERY_COUNT = 24
"""Up to this many replicas, every number is tried; above, about six per doubling."""


@dataclass(frozen=True)
class ReplicatedCut:
    """A partition with the devices that its stages use.

    Args:
        uses: of every stage.
        recompute: which stages recompute, if that is open; empty if none does, or all must.
    """

    partition: Partition
    uses: tuple[Use, ...]
    recompute: tuple[bool, ...] = ()


class ReplicaCutter:
    """Proposes stages with replicas.

    Args:
        check: called repeatedly; raises to end the search.

    Attributes:
        classes: of devices, the fastest first.
        unit: ranks that count as one device.
    """

    def __init__(self, problem: Problem, space: CutSpace, check: Callable[[], None]) -> None:
        ranks = problem.cluster.ranks
        self.unit = 1 << max(0, ceil(ranks / MAX_UNITS) - 1).bit_length()
        self.classes = merged_pools(problem.devices, self.unit, MAX_TALLIES)
        self._problem = problem
        self._check = check
        self._space = self._thinned(space)
        self._messages = cache(self._messages_of)

    def cuts(self, size: int, temporary_bytes: float) -> list[ReplicatedCut]:
        """Distinct good partitions at a micro-batch size that replicas split, short chains first.

        If memory is limited, they are cut for several guesses of what the programme does not know
        (:data:`pipectl.planner.partition.cutter.GUESSES`), and once for the smallest peak.

        Args:
            temporary_bytes: largest allocation of one operator at once, at the profile's size.
        """
        problem, options = self._problem, self._options(size)
        shares = [(int(count) > 1, -(-size // int(count))) for count in options.replicas]
        rows = list(dict.fromkeys([(False, size), *shares]))  # the first is of one replica
        samples = [share for _, share in rows]
        table = table_of(problem, self._space, size, samples)  # times of the busiest replica
        options.each["row"] = [rows.index(each) for each in shares]
        tallies = np.arange(len(options.following))
        if problem.request.fixed_stages is not None:
            tallies = tallies[tallies // self._tally_count == problem.request.fixed_stages]
        speed = sum(pool.speed * len(pool.ranks) for pool in problem.devices)
        even_s = sum(problem.costs.block_times(size)) / speed
        goals = [
            goal._replace(cap_s=even_s * cap)
            for goal in self._goals(size, temporary_bytes)
            for cap in (CAPS if goal.objective == LATENCY else (inf,))
        ]
        cuts = []
        for goal in goals:
            chains = best_chains(self._space, table, options, goal, self._check)
            if isfinite(chains.value(tallies)):
                cuts.append(self._cut(chains, tallies))
        return list(dict.fromkeys(cuts))

    def _goals(self, size: int, temporary_bytes: float) -> Iterator[Goal]:
        """Shortest latency, for every guess of memory if it is limited, and the smallest peak."""
        problem = self._problem
        if not problem.has_limits:
            yield Goal(LATENCY)
            return
        depths = np.arange(1, MAX_STAGES + 1, dtype=np.float64)
        in_flight = np.minimum(depths, problem.micro_batches(size))  # policy A
        temporary_bytes *= problem.scale(size)
        for entering, buffers in GUESSES:
            baseline = problem.baseline_bytes + buffers * temporary_bytes
            goal = Goal(LATENCY, in_flight=in_flight, entering=entering, buffers=buffers)
            yield goal._replace(temporary_bytes=baseline)
        yield goal._replace(objective=MEMORY, temporary_bytes=baseline)

    def _cut(self, chains: Chains, tallies: Integers) -> ReplicatedCut:
        chain = chains.chain(tallies)
        modes, partition = self._modes, self._space.partition(chain.cuts)
        uses, chosen = zip(*(divmod(each, len(modes)) for each in chain.options), strict=True)
        again = tuple(modes[mode] == RECOMPUTE for mode in chosen)
        open_ = self._problem.request.recompute is None and any(again)
        return ReplicatedCut(
            partition, tuple(self._uses[use] for use in uses), again if open_ else ()
        )

    @cached_property
    def _modes(self) -> tuple[int, ...]:
        recompute = self._problem.request.recompute
        if recompute is None:
            return (KEEP, RECOMPUTE) if self._problem.has_limits else (KEEP,)
        return (RECOMPUTE,) if recompute else (KEEP,)

    @cached_property
    def _available(self) -> Use:
        """Units of each class."""
        return tuple(len(pool.ranks) // self.unit for pool in self.classes)

    @cached_property
    def _tally_count(self) -> int:
        return prod(count + 1 for count in self._available)

    @cached_property
    def _uses(self) -> list[Use]:
        """Devices of each class that a stage may use: of one class any number of units or a single
        one, of several some."""
        unit = self.unit
        kinds = range(len(self._available))
        alone = [
            tuple(count if other == kind else 0 for other in kinds)
            for kind in kinds
            for count in replica_counts(self._available[kind])
        ]
        growth, counts = 1.0, [[0, *growing(most, 1.0)] for most in self._available]
        while prod(map(len, counts)) > MAX_USES and growth < max(self._available):
            growth *= 1.25
            counts = [[0, *growing(most, growth)] for most in self._available]
        mixed = [use for use in product(*counts) if sum(map(bool, use)) > 1]
        if len(mixed) > MAX_USES:  # of many classes
            mixed = [use for use in mixed if _are_neighbours(use)]
        single = [tuple(int(other == kind) for other in kinds) for kind in kinds]
        every = {tuple(count * unit for count in use) for use in (*alone, *mixed)} | {*single}
        return sorted(every, key=lambda use: (sum(use), [-count for count in use]))

    def _options(self, size: int) -> Options:
        """Every use in every mode. Tallies are mixed numbers of the units used of each class, and
        also of the stages if the request fixes their number."""
        problem, classes = self._problem, self.classes
        modes, unit, most = len(self._modes), self.unit, self._available
        places = [prod(count + 1 for count in most[kind + 1 :]) for kind in range(len(most))]
        used = np.array(list(product(*(range(count + 1) for count in most))), dtype=np.int64)
        taken = -(-np.array(self._uses, dtype=np.int64) // unit)
        replicas = np.array([*map(sum, self._uses)])
        after = used[:, None, :] + taken[None, :, :]
        may = (after <= np.array(most)).all(axis=2)
        may &= replicas <= size  # each has a sample
        following = np.where(may, (after * np.array(places)).sum(axis=2), -1)
        if (fixed := problem.request.fixed_stages) is not None:
            count = self._tally_count
            rows = [
                np.where(following >= 0, following + count * (stage + 1), -1)
                for stage in range(fixed)
            ]
            following = np.concatenate([*rows, np.full_like(following, -1)])
        counts = replicas.tolist()
        members = [[pool for pool, n in zip(classes, use, strict=True) if n] for use in self._uses]
        late_s, rate, sum_rate = np.array([self._messages(each) for each in counts]).T
        fields = {
            "devices": counts,
            "replicas": counts,
            "slowness": [1.0 / min(pool.speed for pool in each) for each in members],
            "limit_bytes": [min(map(self._limit_bytes, each)) for each in members],
            "latency_s": late_s,
            "s_per_byte": rate,
            "sum_s_per_byte": sum_rate / problem.micro_batches(size),
        }
        options = Options.of(
            np.repeat(following, modes, axis=1),
            mode=np.tile(self._modes, len(counts)),
            **{name: np.repeat(values, modes) for name, values in fields.items()},
        )
        if problem.request.shard_optimizer:
            options.each["state_share"] = 1.0 / options.replicas
        return options

    def _limit_bytes(self, pool: Pool) -> float:
        limit = min(map(self._problem.limit_bytes, pool.ranks))
        return limit if isfinite(limit) else 1e30

    def _messages_of(self, count: int) -> tuple[float, float, float]:
        """Of stages of so many replicas on consecutive ranks, on average: the latency of a message,
        its seconds per byte, and those of a sum of gradients."""
        links, ranks = self._problem.estimator.links, self._problem.cluster.ranks
        begins = range(0, max(1, ranks - 2 * count + 1), max(1, ranks // 8))
        pairs = [
            (range(at, at + count), range(at + count, min(at + 2 * count, ranks))) for at in begins
        ]
        sent = [links.transfer_s(2**20, *pair) for pair in pairs if pair[1]]
        late_s, rate, sum_rate = 0.0, 0.0, 0.0
        if sent:
            late_s = sum(each.late_s for each in sent) / len(sent)
            rate = sum(each.hold_s for each in sent) / len(sent) / 2**20
        if count > 1:
            sum_rate = sum(links.reduction_rate(tuple(one))[1] for one, _ in pairs) / len(pairs)
        return late_s, rate, sum_rate

    def _thinned(self, space: CutSpace) -> CutSpace:
        """At most about ``MAX_CUTS`` downsets that cover the work evenly and send least."""
        most = MAX_CUTS[len(self.classes) > 1]
        if len(space) <= most:
            return space
        table: CostTable = table_of(self._problem, space, self._problem.profile.micro_batch_size)
        work = table.work_s[0, 1]
        moved = table.sums["activation_bytes"] + table.sums["gradient_bytes"]
        part = np.floor(work / max(work[-1], 1e-30) * (most / 2 - 1)).astype(np.int64)
        order = np.lexsort((np.arange(len(space)), moved, part))
        place = np.arange(len(space)) - np.searchsorted(part[order], part[order])
        kept = sorted({0, len(space) - 1, *order[place < 2].tolist()})
        return CutSpace(space.graph, tuple(space.downsets[each] for each in kept), False)


def replica_counts(most: int) -> list[int]:
    """Numbers of replicas to try, ascending, up to ``most``."""
    every = range(1, min(most, EVERY_COUNT) + 1)
    return [*every, *(each for each in growing(most, 1.125) if each > EVERY_COUNT)]


def _are_neighbours(use: Use) -> bool:
    """Whether no class lies between those of which devices are used, which are sorted by speed."""
    used = [kind for kind, count in enumerate(use) if count]
    return used[-1] - used[0] == len(used) - 1


def growing(most: int, growth: float) -> Sequence[int]:
    """From 1 up to ``most``, each about ``growth`` times the one before."""
    counts = [1] if most else []
    while counts and counts[-1] < most:
        counts.append(min(most, max(counts[-1] + 1, round(counts[-1] * growth))))
    return counts
