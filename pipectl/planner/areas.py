"""Areas of the search: a number of stages and a micro-batch size, with the cuts for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from heapq import nlargest
from itertools import zip_longest

from pipectl.planner.bounds import area_bound_s, longest_path_s, work_bound_s
from pipectl.planner.choices import NamedOrder, micro_batch_sizes, sizes_of_stages
from pipectl.planner.costs.devices import Mix, every_placement, one_each, ranks_of_uses
from pipectl.planner.graph.downsets import CutSpace, Enumeration
from pipectl.planner.partition.cutter import Cut, Cutter, cut_request, fewest_of_table, layouts_of
from pipectl.planner.partition.layout import Layout, device_orders
from pipectl.planner.partition.replicated import ReplicaCutter
from pipectl.planner.problem import Problem
from pipectl.planner.simple import even_copies

MAX_SIZES = 8
"""Number of micro-batch sizes to try with replicas on very many ranks: the smallest ones."""
MAX_LAYOUTS = 300
"""An area with fewer partitions times placements is tried in full."""


@dataclass(frozen=True)
class Area:
    """A micro-batch size, with a number of stages or with replicas.

    Args:
        stages: with one rank each; 0 for any number of stages with any numbers of replicas.
        size: samples of a micro-batch.
        least_s: lower bound on the step.
        order: the schedule and warm-up for whose memory stages are cut; None for all orders, and
            without regard to memory if stages have one rank each.
    """

    stages: int
    size: int
    micro_batches: int
    least_s: float
    order: NamedOrder | None = None

    @property
    def is_replicated(self) -> bool:
        """Whether stages have any numbers of replicas."""
        return self.stages == 0

    @property
    def warm_up(self) -> tuple[int, ...]:
        """Micro-batches in flight that stages are cut for, if any."""
        return self.order[1] if self.order else ()


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
        self._proposals: dict[Area, Iterator[list[Layout]]] = {}
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
            problem = self._problem
            least_s = self._least_s(stages, size) if stages else work_bound_s(problem)
            area = Area(stages, size, problem.micro_batches(size), least_s)
            self._known[stages, size] = area
        return self._known[stages, size]

    def _least_s(self, stages: int, size: int) -> float:
        """Lower bound on the step with one rank per stage."""
        shares, speeds = self._problem.shares(size), self._speeds
        total_s, largest_s, path_s = self._least_work(size)
        bottleneck_s = max(total_s / sum(speeds[:stages]), largest_s / speeds[0])
        least_s = area_bound_s(bottleneck_s, path_s, shares, stages, speeds[0])
        return max(least_s, sum(shares) * total_s / self._capacity)

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

    def propose(self, area: Area) -> list[Layout] | None:
        """The next layouts for an area; None if there are no more."""
        if area not in self._proposals:
            self._proposals[area] = self._proposed(area)
        return next(self._proposals[area], None)

    def _proposed(self, area: Area) -> Iterator[list[Layout]]:
        if area.is_replicated:
            yield self._with_replicas(area.size)
        elif area.order is not None:
            yield from self._within_memory(area)
        elif (every := self._every_layout(area.stages)) is not None:
            self.listed.add(area)
            yield every
        else:
            yield layouts_of(self._problem, self.cuts(area.stages))

    def _within_memory(self, area: Area) -> Iterator[list[Layout]]:
        """Stages without and with recomputation, each time with more of their memory counted."""
        ways = []
        for mix in self.mixes(area.stages):
            wanted = cut_request(self._problem, area.size, area.warm_up, mix)
            keeps = [replace(wanted, recompute=False)] if wanted.recompute is None else []
            ways += [self._cutter.within_limits(each) for each in (*keeps, wanted)]
        for together in zip_longest(*ways, fillvalue=()):
            yield layouts_of(self._problem, (cut for cuts in together for cut in cuts))

    @cached_property
    def replicated(self) -> list[Area]:
        """The areas with replicas. Micro-batches are the smallest on very many ranks."""
        request, ranks = self._problem.request, self._problem.cluster.ranks
        sizes = micro_batch_sizes(request, request.batch_size)[-MAX_SIZES:]
        if self._replicas.unit == 1:
            sizes = sizes_of_stages(request, self._problem.profile, ranks)
        return [self.of(0, size) for size in sizes]

    @cached_property
    def _replicas(self) -> ReplicaCutter:
        return ReplicaCutter(self._problem, self._space, self._cutter.check)

    @property
    def classes(self) -> list[tuple[int, ...]]:
        """The ranks of every class of devices, the fastest first."""
        return [pool.ranks for pool in self._replicas.classes]

    @cached_property
    def _orders(self) -> list[tuple[int, ...]]:
        orders = device_orders(self._problem.cluster)
        return orders if self._replicas.unit == 1 else orders[:1]

    def _with_replicas(self, size: int) -> list[Layout]:
        """Stages of the programme on the ranks of every class, node by node and round-robin over
        the nodes, and copies of even cuts."""
        layouts = []
        cuts = self._replicas.cuts(size, self._cutter.temporary_bytes)
        for order in self._orders:
            members = [[*filter(set(ranks).__contains__, order)] for ranks in self.classes]
            layouts += [
                Layout(cut.partition, ranks_of_uses(cut.uses, members), cut.recompute)
                for cut in cuts
            ]
        layouts = list(filter(self._problem.may_replicate, layouts))
        return layouts + [layout for each, layout in self._even if each == size]

    @cached_property
    def _even(self) -> list[tuple[int, Layout]]:
        return list(even_copies(self._problem))

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
