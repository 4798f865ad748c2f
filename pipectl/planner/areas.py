"""Areas of the search: a number of stages and a micro-batch size, with the cuts for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from heapq import nlargest

from pipectl.planner.bounds import area_bound_s, longest_path_s
from pipectl.planner.costs.devices import Mix, every_placement, one_each
from pipectl.planner.graph.downsets import CutSpace, Enumeration
from pipectl.planner.partition.cutter import Cut, Cutter, fewest_of_table, layouts_of
from pipectl.planner.partition.layout import Layout
from pipectl.planner.problem import Problem
from pipectl.planner.request import sizes_of_stages

MAX_LAYOUTS = 300
"""An area with fewer partitions times placements is tried in full."""


@dataclass(frozen=True)
class Area:
    """A number of stages and a micro-batch size.

    Args:
        size: samples of a micro-batch.
        least_s: lower bound on the step.
    """

    stages: int
    size: int
    micro_batches: int
    least_s: float


class Areas:
    """The areas of a problem, their cuts and layouts, each computed once.

    Args:
        counts: numbers of stages to try, ascending.
        cutter: cuts the search space.

    Attributes:
        listed: areas whose layouts were all proposed.
    """

    def __init__(
        self, problem: Problem, space: CutSpace, counts: Sequence[int], cutter: Cutter
    ) -> None:
        self.counts = counts
        self._problem = problem
        self._space = space
        self._cutter = cutter
        self.listed: set[Area] = set()
        self._known: dict[tuple[int, int], Area] = {}
        self._cuts: dict[tuple[int, int], list[Cut]] = {}
        self.sizes = cache(partial(sizes_of_stages, problem.request, problem.profile))
        self._least_work = cache(self._find_least_work)
        self._every_layout = cache(self._find_every_layout)
        # Speeds of all devices, the fastest first, and the work per second of all cores, however
        # many ranks share them.
        self._speeds = [pool.speed for pool in problem.devices for _ in pool.ranks]
        nodes = problem.cluster.nodes
        self._capacity = sum(
            sum(nlargest(node.cores, (device.speed for device in node.devices))) for node in nodes
        )

    @cached_property
    def all(self) -> list[Area]:
        """Every area whose stages could hold the model."""
        return [
            self.of(stages, size)
            for stages in self.counts
            if self._problem.could_hold(stages)
            for size in self.sizes(stages)
        ]

    @property
    def known(self) -> list[Area]:
        """Every area, and those that :meth:`of` was called with."""
        return list(dict.fromkeys([*self.all, *self._known.values()]))

    def sizes_known(self, stages: int) -> set[int]:
        """Sizes of all areas of a number of stages."""
        return {area.size for area in self.known if area.stages == stages}

    def of(self, stages: int, size: int) -> Area:
        """One area, with its bound."""
        if (stages, size) not in self._known:
            problem, shares = self._problem, self._problem.shares(size)
            total_s, largest_s, path_s = self._least_work(size)
            bottleneck_s = max(total_s / sum(self._speeds[:stages]), largest_s / self._speeds[0])
            least_s = area_bound_s(bottleneck_s, path_s, shares, stages, self._speeds[0])
            least_s = max(least_s, sum(shares) * total_s / self._capacity)
            area = Area(stages, size, problem.micro_batches(size), least_s)
            self._known[stages, size] = area
        return self._known[stages, size]

    @cached_property
    def reference_size(self) -> int:
        """The size that stages are cut for first: the measured one if the request allows it."""
        measured = self._problem.profile.micro_batch_size
        sizes = self.sizes(self.counts[-1])
        return min(sizes, key=lambda size: (abs(size - measured), size))

    def cuts(self, stages: int, size: int | None = None) -> list[Cut]:
        """Good partitions into a number of stages, cut for a micro-batch size."""
        size = size or self.reference_size
        if (stages, size) not in self._cuts:
            mixes = self.mixes(stages)
            cuts = [cut for mix in mixes for cut in self._cutter.partitions(stages, size, mix)]
            self._cuts[stages, size] = list(dict.fromkeys(cuts))
        return self._cuts[stages, size]

    def layouts(self, area: Area) -> list[Layout]:
        """Layouts of an area: all if there are few, otherwise those of good cuts."""
        every = self._every_layout(area.stages)
        if every is not None:
            self.listed.add(area)
            return every
        return layouts_of(self._problem, self.cuts(area.stages))

    def _find_every_layout(self, stages: int) -> list[Layout] | None:
        if self._enumeration is None or self._enumeration.count(stages) > MAX_LAYOUTS:
            return None
        places = every_placement(self._problem.cluster, stages, MAX_LAYOUTS)
        if not places or self._enumeration.count(stages) > MAX_LAYOUTS // len(places):
            return None
        partitions = self._enumeration.every_partition(stages)
        ranks = list(map(one_each, places))
        return [Layout(partition, place) for partition in partitions for place in ranks]

    @cached_property
    def _enumeration(self) -> Enumeration | None:
        """The lister of all partitions; None if there are always too many."""
        few = len(self._space) <= MAX_LAYOUTS * 4
        whole = self._space.complete and not self._space.moved
        return Enumeration(self._space.downsets) if few and whole else None

    def mixes(self, stages: int) -> list[Mix]:
        """Ways in which a number of stages can use the devices."""
        if len(self._problem.devices) == 1:
            fewest = fewest_of_table(stages)
            sharing = [count for count in self.counts if fewest_of_table(count) == fewest]
            return [Mix.ordered([0] * max(stages, *sharing), 1)]
        return self._cutter.mixes(stages)

    def _find_least_work(self, size: int) -> tuple[float, float, float]:
        """Seconds of all blocks, of the largest block, and of the longest path."""
        times = self._problem.costs.block_times(size, self._space.moved, cached=True)
        return sum(times), max(times), longest_path_s(self._problem.graph, times)
