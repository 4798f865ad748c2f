"""Requests to the dynamic programme: good stages with one rank each.

The smallest bottleneck is a lower bound, but many partitions have about this bottleneck and differ
in their messages. So several are proposed per number of stages: for a few caps on the largest load,
the one with the shortest latency of a micro-batch; and those with the smallest bottleneck if
messages count as load. If memory is short, the programme considers the memory of every stage, for
the smallest bottleneck within the limits, or for the smallest peak. Stages that recompute keep only
their inputs, hold the rest during one backward at a time, and compute their forward twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, isfinite

import numpy as np

from pipectl.link import Link
from pipectl.planner.costs.devices import Mix, Places, mixes, one_each, placements
from pipectl.planner.costs.links import REFERENCE_BYTES
from pipectl.planner.graph.downsets import CutSpace, Partition
from pipectl.planner.partition.layout import Layout
from pipectl.planner.partition.programme import (
    ADDED,
    KEEP,
    KEEP_APART,
    LATENCY,
    LOAD,
    MEMORY,
    OVERLAPPED,
    RECOMPUTE,
    RECOMPUTE_APART,
    Chain,
    Chains,
    Goal,
    Options,
    best_chains,
)
from pipectl.planner.partition.tables import CostTable, table_of
from pipectl.planner.problem import Problem
from pipectl.planner.request import Expired, out_of_time

CAPS = (1.0, 1.01, 1.02, 1.03, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4)
"""Caps on the largest load, relative to the smallest possible."""
SLACKS = (1.02, 1.1, 1.25)
"""Caps on the largest load within memory limits."""
LOOSE_CAP = 2.0
"""Cap if messages count as load; stages far above the smallest bottleneck are skipped."""
MAX_FITTING = 1500
"""Downsets of a search within memory limits; if there are more, prefixes are searched."""
EQUAL = 1e-12
"""Relative difference of equal loads because of rounding."""
GUESSES = ((0.0, 0.0), (0.0, 0.5), (0.5, 0.5), (1.0, 0.5), (1.0, 1.0))
"""Shares that count as memory of the values that cross the start of a stage, and of messages and
temporary values. The programme does not know them: values may only pass, and not all are held at
once. The first guess counts none, so it excludes no partition that fits; the last one counts all,
so its proposals fit; each guess in between counts one more half."""


@dataclass(frozen=True)
class Cut:
    """A partition with the devices and modes of its stages.

    Args:
        kinds: of device.
        recompute: which stages recompute, if that is open; empty if none does, or all must.
        devices: of every stage: one, or two if its backward has a separate device.
    """

    partition: Partition
    kinds: tuple[int, ...]
    recompute: tuple[bool, ...] = ()
    devices: tuple[int, ...] = ()


@dataclass(frozen=True)
class CutRequest:
    """A request to cut stages within memory limits.

    Args:
        size: samples of a micro-batch.
        warm_up: micro-batches in flight in every stage.
        mix: the devices that stages may use.
        limits_bytes: memory of each kind of device.
        recompute: whether all stages recompute, or none; None leaves it to the programme.
        reserved_bytes: memory that every stage leaves to other stages of its device; may be empty.
    """

    size: int
    warm_up: tuple[int, ...]
    mix: Mix
    limits_bytes: tuple[float, ...]
    recompute: bool | None = False
    reserved_bytes: tuple[float, ...] = ()


class Cutter:
    """Cuts one space; tables and bottlenecks are computed once.

    Args:
        expired: called repeatedly; once it returns true, OutOfTimeError is raised.
    """

    def __init__(self, problem: Problem, space: CutSpace, expired: Expired = lambda: False) -> None:
        self._problem = problem
        self._space = space
        few = len(space) <= MAX_FITTING
        self._fitting_space = space if few else CutSpace.sample(space.graph, MAX_FITTING)
        self._expired = expired
        self._tables: dict[tuple[int, int], CostTable] = {}
        self._bottlenecks: dict[tuple[int, int, int], Chains] = {}

    def check(self) -> None:
        """End the search if time is up.

        Raises:
            OutOfTimeError: it is.
        """
        if self._expired():
            raise out_of_time()

    @property
    def cut_count(self) -> int:
        """Number of cuts between which stages are chosen."""
        return len(self._space)

    def mixes(self, stages: int) -> list[Mix]:
        """Ways in which a number of stages can use the devices."""
        return mixes(self._problem.devices, len(self._space), stages)

    def partitions(self, stages: int, size: int, mix: Mix) -> list[Cut]:
        """Distinct good partitions at a micro-batch size, the best balanced first."""
        tallies, graph = mix.tallies(stages), self._space.graph
        if stages == 1:
            kinds = np.flatnonzero(mix.following[0] >= 0)
            return [Cut((graph.everything,), (int(kind),)) for kind in kinds]
        bottleneck_s = self._least_loaded(size, mix).value(tallies)
        if not isfinite(bottleneck_s) or not len(tallies):
            return []
        mix = mix.up_to(stages)
        tallies = mix.tallies(stages)
        cap_s = bottleneck_s * (1 + EQUAL)
        goals = [Goal(LATENCY, cap_s * cap) for cap in CAPS]
        goals += [Goal(LOAD, cap_s * LOOSE_CAP, messages=each) for each in (ADDED, OVERLAPPED)]
        cuts = []
        for goal in goals:
            chains = self._run(self._space, self._table(self._space, size), mix, goal)
            if isfinite(chains.value(tallies)):
                cuts.append(self._cut(self._space, chains.chain(tallies)))
        return list(dict.fromkeys(cuts))

    def within_limits(self, request: CutRequest) -> Iterator[list[Cut]]:
        """Partitions with small bottlenecks that nearly fit, for one guess of :data:`GUESSES` after
        another; the caller checks exact peaks.

        Includes nearly balanced partitions with the shortest latency.
        """
        return self._within_memory(request, LOAD, request.limits_bytes)

    def smallest_peak(self, request: CutRequest) -> list[Cut]:
        """Partitions whose largest memory of a rank, relative to its limit, is smallest."""
        limits = tuple(limit if isfinite(limit) else 0.0 for limit in request.limits_bytes)
        return merged(self._within_memory(request, MEMORY, limits))

    def _within_memory(
        self, request: CutRequest, objective: int, limits: Sequence[float]
    ) -> Iterator[list[Cut]]:
        """The best cuts by load or by memory, for every guess of :data:`GUESSES`.

        Short stages are tried first; they nearly always suffice for balance.
        """
        space, stages = self._fitting_space, len(request.warm_up)
        mix = request.mix.up_to(stages) if request.mix.kinds == 1 else request.mix
        table, tallies = self._table(space, request.size), mix.tallies(stages)
        modes = {False: (KEEP,), True: (RECOMPUTE,), None: (KEEP, RECOMPUTE)}[request.recompute]
        options = self._options(mix, limits, modes)
        short_s = self._short_s(table, stages, request.size)
        reserved = np.array(request.reserved_bytes[::-1] or (0.0,), dtype=np.float64)
        for entering, buffers in GUESSES:
            temporary = buffers * self._problem.scale(request.size) * self.temporary_bytes
            goal = Goal(
                objective,
                short_s,
                in_flight=np.array(request.warm_up[::-1], dtype=np.float64),
                reserved_bytes=reserved,
                temporary_bytes=self._problem.baseline_bytes + temporary,
                buffers=buffers,
                entering=entering,
            )
            chains = best_chains(space, table, options, goal, self.check)
            least, chain = chains.value(tallies), None
            if isfinite(least):
                chain = chains.chain(tallies)
            if chain is None or objective == MEMORY:
                goal = goal._replace(cap_s=inf, bound=least)
                chains = best_chains(space, table, options, goal, self.check)
                if isfinite(chains.value(tallies)):
                    least, chain = chains.value(tallies), chains.chain(tallies)
            if chain is None:
                break
            cuts = [self._cut(space, chain, modes)]
            for slack in SLACKS if objective == LOAD else ():
                near = goal._replace(objective=LATENCY, cap_s=least * slack)
                best = best_chains(space, table, options, near, self.check)
                cuts.append(self._cut(space, best.chain(tallies), modes))
            yield cuts

    @cached_property
    def temporary_bytes(self) -> int:
        """Largest allocation of one operator at once, in bytes."""
        memory = [operator.allocations for operator in self._problem.profile.operators]
        return max(max(one.forward_bytes - one.made_bytes, one.backward_bytes) for one in memory)

    def _least_loaded(self, size: int, mix: Mix) -> Chains:
        key = size, len(mix), int(mix.used[-1])
        if key not in self._bottlenecks or mix.kinds > 1:
            table, cap_s = self._table(self._space, size), inf
            if mix.kinds == 1:  # suffices for the fewest stages that share this table
                cap_s = self._short_s(table, fewest_of_table(int(mix.used[-1])), size)
            self._bottlenecks[key] = self._run(self._space, table, mix, Goal(LOAD, cap_s))
        return self._bottlenecks[key]

    def _short_s(self, table: CostTable, stages: int, size: int) -> float:
        """A load that balanced stages hardly ever exceed."""
        largest_s = max(self._problem.costs.block_times(size))
        load_s = float(table.work_s[0, 1, -1]) * 2 / stages + largest_s + 2 * table.stage_s
        return load_s / min(self._problem.speeds)

    def _run(self, space: CutSpace, table: CostTable, mix: Mix, goal: Goal) -> Chains:
        """The best chains with one device of any kind per stage, without memory limits."""
        options = self._options(mix, (inf,) * mix.kinds, (KEEP,))
        return best_chains(space, table, options, goal, self.check)

    def _options(self, mix: Mix, limits: Sequence[float], modes: Sequence[int]) -> Options:
        """Options with one device of any kind per stage, and any of these modes."""
        problem, link = self._problem, self._link_between_stages()
        kind = np.repeat(np.arange(mix.kinds), len(modes))
        return Options.of(
            mix.following[:, kind],
            kind=kind,
            mode=np.tile(modes, mix.kinds),
            slowness=np.array([1.0 / speed for speed in problem.speeds])[kind],
            limit_bytes=np.array(limits, dtype=np.float64)[kind],
            latency_s=link.latency_s,
            s_per_byte=link.hold_s(REFERENCE_BYTES) / REFERENCE_BYTES,
        )

    def _link_between_stages(self) -> Link:
        """What messages between stages pass through, if stages are on several nodes."""
        cluster = self._problem.cluster
        most = min(cluster.ranks, len(self._problem.graph))
        several_nodes = cluster.node_of_rank[most - 1] > 0
        return cluster.between_nodes if several_nodes else cluster.within_node

    def _cut(self, space: CutSpace, chain: Chain, modes: Sequence[int] = (KEEP,)) -> Cut:
        kinds, chosen = zip(*(divmod(each, len(modes)) for each in chain.options), strict=True)
        recompute = tuple(map(bool, chosen)) if any(chosen) else ()  # of KEEP, RECOMPUTE
        return Cut(space.partition(chain.cuts), kinds, recompute)

    def with_backwards_apart(self, size: int, *, every: bool, recompute: bool | None) -> Cut | None:
        """The smallest bottleneck if backwards of stages may have separate devices (PipeFB).

        The load of a stage on two devices is the longest of its forward, its backward and the copy
        of its saved values; or, if it recomputes, of forward + backward and the copy of its inputs.
        Memory does not count.

        Args:
            every: whether all backwards have separate devices.
            recompute: whether these stages recompute; None decides stage by stage.

        Returns:
            None if there are too few devices.
        """
        problem, space = self._problem, self._fitting_space
        away = {False: (KEEP_APART,), True: (RECOMPUTE_APART,)}
        apart = (KEEP_APART, RECOMPUTE_APART) if recompute is None else away[recompute]
        modes = apart if every else (KEEP, *apart)
        devices = np.array([1 if mode == KEEP else 2 for mode in modes])
        ranks = problem.cluster.ranks
        tallies = np.arange(ranks + 1)[:, None] + devices
        within = any(node.ranks > 1 for node in problem.cluster.nodes)
        link = problem.cluster.within_node if within else problem.cluster.between_nodes
        options = Options.of(
            np.where(tallies <= ranks, tallies, -1),
            copy_s_per_byte=1.0 / link.bandwidth_bytes_per_s,
            mode=modes,
            devices=devices,
        )
        chains = best_chains(space, self._table(space, size), options, Goal(LOAD), self.check)
        everywhere = np.arange(ranks + 1)
        if not isfinite(chains.value(everywhere)):
            return None
        chain = chains.chain(everywhere)
        chosen = [modes[option] for option in chain.options]
        return Cut(
            space.partition(chain.cuts),
            (0,) * len(chosen),
            devices=tuple(1 if mode == KEEP else 2 for mode in chosen),
        )

    def _table(self, space: CutSpace, size: int) -> CostTable:
        """The table of a micro-batch size."""
        key = len(space), size
        if key not in self._tables:
            self._tables[key] = table_of(self._problem, space, size)
        return self._tables[key]


def merged(guesses: Iterable[list[Cut]]) -> list[Cut]:
    """The distinct cuts for all guesses."""
    return list(dict.fromkeys(cut for cuts in guesses for cut in cuts))


def layouts_of(problem: Problem, cuts: Iterable[Cut]) -> list[Layout]:
    """Cuts with every placement on devices of their kinds."""
    places: dict[tuple[int, ...], list[Places]] = {}
    layouts = []
    for cut in cuts:
        if cut.kinds not in places:
            places[cut.kinds] = placements(problem.cluster, problem.devices, cut.kinds)
        layouts += [
            Layout(cut.partition, one_each(place), cut.recompute) for place in places[cut.kinds]
        ]
    return layouts


def fewest_of_table(stages: int) -> int:
    """The fewest stages whose bottleneck is in the same table: numbers from one power of two to the
    next share a table of the dynamic programme."""
    return 1 << (stages.bit_length() - 1)


def cut_request(problem: Problem, size: int, warm_up: Sequence[int], mix: Mix) -> CutRequest:
    """The request of a problem, within the memory limits of its devices."""
    limits, recompute = problem.kind_limits_bytes, problem.request.recompute
    return CutRequest(size, tuple(warm_up), mix, limits, recompute)
