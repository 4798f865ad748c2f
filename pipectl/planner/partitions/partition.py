"""Good partitions of a graph into a given number of stages: optimal ones and near ties.

The smallest bottleneck is a lower bound on what a pipeline can do, but many partitions share it
or come close, and differ in what they send. So each number of stages gets several partitions: for
a few tolerances, the one that sends least with no stage above the bottleneck by more than that;
and the one with the smallest bottleneck when sending and receiving count as load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from pipectl.arrays import Integers
from pipectl.planner.graphs.condense import Condensed
from pipectl.planner.graphs.ideals import all_downsets, prefix_downsets
from pipectl.planner.graphs.loads import PER_SECOND, Costs, Loads
from pipectl.planner.graphs.negligible import merge_negligible
from pipectl.planner.graphs.spans import Partition, Spans, find_spans
from pipectl.planner.machines.mix import Mix
from pipectl.planner.partitions.dynamic import Chains, Check, best_chains
from pipectl.profile import Profile

MOST_DOWNSETS = 4000
"""Above, only a sample of the downsets is searched."""
FEW_DOWNSETS = 100
"""Up to so many, all spans are looked at."""
NEGLIGIBLE = (0.001, 0.01)
"""Shares of the whole time that small blocks may take to be merged into others."""
TOLERANCES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4)


@dataclass(frozen=True)
class Space:
    """What is searched: the downsets of a graph, all of them or a sample.

    Args:
        moved: operators of negligible blocks that were merged into others to get there.
    """

    graph: Condensed
    downsets: tuple[int, ...]
    complete: bool
    moved: tuple[int, ...] = ()

    @classmethod
    def of(cls, graph: Condensed, profile: Profile, cap: int = MOST_DOWNSETS) -> Space:
        """All downsets if there are at most ``cap``, or else as many as can be.

        That is those which part no negligible block from its neighbour, and if these are still too
        many, prefixes of several topological orders.
        """
        everything = all_downsets(graph, cap)
        if everything is not None:
            return cls(graph, tuple(everything), True)
        for share in NEGLIGIBLE:
            merged = merge_negligible(graph, profile, share)
            everything = all_downsets(merged.graph, cap)
            if everything is not None:
                return cls(merged.graph, tuple(everything), True, merged.moved)
        return cls.sample(graph, cap)

    @classmethod
    def sample(cls, graph: Condensed, cap: int = MOST_DOWNSETS) -> Space:
        """Prefixes of several topological orders."""
        return cls(graph, tuple(prefix_downsets(graph, cap)), False)


@dataclass(frozen=True)
class Bound:
    """What is known of the smallest possible bottleneck.

    Args:
        load_s: no partition has a smaller one.
        exact: whether a partition has this one.
    """

    load_s: float
    exact: bool


@dataclass(frozen=True)
class Cut:
    """A partition, the kind of device of every stage, and which stages recompute (empty: none)."""

    partition: Partition
    kinds: tuple[int, ...]
    recompute: tuple[bool, ...] = ()


class Partitioner:
    """Partitions of one graph under one set of costs.

    Args:
        mix: the devices that stages may use.
        most: largest number of stages that will be asked for.
        fewest: smallest one above 1 that will be asked for.
        check: called now and then; raises to end the search.
    """

    def __init__(
        self,
        space: Space,
        costs: Costs,
        mix: Mix,
        *,
        fewest: int,
        most: int,
        check: Check = lambda: None,
    ) -> None:
        self._graph = space.graph
        self._space = space
        self._costs = costs
        self._mix = mix
        self._fewest = min(max(2, fewest), most)
        self._check = check

    def bound(self, stages: int, speeds: Sequence[float]) -> Bound:
        """The proven lower bound on the bottleneck of so many stages.

        Args:
            speeds: of the fastest devices, one for each stage.
        """
        least_s = self._costs.least_s
        proven = max(sum(least_s) / sum(speeds), max(least_s) / max(speeds)) * PER_SECOND
        best = self._bottlenecks.best(stages) if stages > 1 else None
        if stages == 1:
            best = int(self._whole.min())
        if best is None:
            return Bound(proven / PER_SECOND, False)
        if (self._space.complete and self._mix.complete) or stages == 1:
            proven = max(proven, self._least_bottleneck(stages, speeds, best))
        return Bound(proven / PER_SECOND, self._attained(stages) <= proven + 1)

    def _least_bottleneck(self, stages: int, speeds: Sequence[float], best: int) -> float:
        """The smallest bottleneck if merged negligible blocks take nothing."""
        if not self._space.moved:
            return best
        space = replace(self._space, moved=())
        settings = {"fewest": stages, "most": stages, "check": self._check}
        free = Partitioner(space, self._costs.least, self._mix, **settings)  # type: ignore[arg-type]
        return free.bound(stages, speeds).load_s * PER_SECOND

    def _attained(self, stages: int) -> int:
        """The largest load of the best chain, each stage taken at its most."""
        if stages == 1:
            return int(self._whole.min())
        chain = self._bottlenecks.chain(stages)
        loads = self._most_loads
        found = (self._spans.find(*ends) for ends in pairwise(chain.states))
        return max(int(loads[kind, span]) for kind, span in zip(chain.kinds, found, strict=True))

    def partitions(self, stages: int) -> list[Cut]:
        """Distinct good partitions, the best balanced first."""
        if stages == 1:
            everything = (self._graph.everything,)
            kinds = np.flatnonzero(self._mix.following[0] >= 0)
            return [Cut(everything, (int(kind),)) for kind in kinds]
        best = self._bottlenecks.best(stages)
        if best is None:
            return []
        chains = [self._least_sent(stages, round(best * (1 + extra))) for extra in TOLERANCES]
        chains.append(self._bottlenecks_with_messages)
        if self._links_bind(stages, best):
            chains.append(self._bottlenecks_of_links)
        found = (chain.chain(stages) for chain in chains)
        cut = self._loads.states.cut
        return list(dict.fromkeys(Cut(cut(chain.states), chain.kinds) for chain in found))

    @cached_property
    def _loads(self) -> Loads:
        return Loads(self._graph, self._space.downsets, self._costs)

    @cached_property
    def _whole(self) -> Integers:
        """The load of all blocks in one stage, on each kind of device."""
        loads = Loads(self._graph, [0, self._graph.everything], self._costs)
        return loads.compute(find_spans(loads.states, int(loads.states.compute[-1])))[:, 0]

    @cached_property
    def _spans(self) -> Spans:
        """Spans that no optimum or near tie exceeds: a single order gives an upper bound."""
        window = int(self._longest * (1 + TOLERANCES[-1])) + 1
        return find_spans(self._loads.states, window)

    @cached_property
    def _longest(self) -> float:
        """Compute that no stage exceeds which is balanced, with messages, along the graph's order.

        Only spans up to some length are looked at; it grows until it is seen to be enough. Where
        there are few spans in all, that is more work than it saves.
        """
        if len(self._space.downsets) <= FEW_DOWNSETS:
            return sum(self._costs.compute_s) * PER_SECOND + len(self._graph)
        order = [(1 << place) - 1 for place in range(len(self._graph) + 1)]
        loads, fastest = Loads(self._graph, order, self._costs), max(self._costs.speeds)
        total = int(loads.states.compute[-1])
        length = 2 * total // self._fewest + round(max(self._costs.compute_s) * PER_SECOND) + 1
        while True:
            spans = find_spans(loads.states, length)
            chains = self._chains(spans, loads.compute(spans) + loads.sending(spans))
            needed = (chains.best(self._fewest) or 0) * fastest
            if 0 < needed <= length:
                return needed
            if length >= total:
                return total
            length *= 4

    @cached_property
    def _least_loads(self) -> Integers:
        return self._loads.compute(self._spans)

    @cached_property
    def _most_loads(self) -> Integers:
        exact = not self._costs.cache_matters
        return self._least_loads if exact else self._loads.most_compute(self._spans)

    @cached_property
    def _sending(self) -> Integers:
        return self._loads.sending(self._spans)

    @cached_property
    def _bottlenecks(self) -> Chains:
        return self._chains(self._spans, self._least_loads)

    @cached_property
    def _bottlenecks_with_messages(self) -> Chains:
        return self._chains(self._spans, self._least_loads + self._sending)

    @cached_property
    def _bottlenecks_of_links(self) -> Chains:
        """Messages pass while stages compute: what takes longer counts, a border at a time."""
        return self._chains(self._spans, np.maximum(self._least_loads, self._sending // 2))

    def _links_bind(self, stages: int, best: int) -> bool:
        """Whether balanced stages would wait for their messages."""
        chain = self._bottlenecks.chain(stages)
        found = (self._spans.find(*ends) for ends in pairwise(chain.states))
        return max(int(self._sending[..., span].max()) for span in found) // 2 > best

    def _least_sent(self, stages: int, bound: int) -> Chains:
        mix = self._mix.up_to(stages)
        extra = {"amounts": self._sending, "bound": bound, "check": self._check}
        return best_chains(self._spans, mix, self._least_loads, **extra)  # type: ignore[arg-type]

    def _chains(self, spans: Spans, loads: Integers) -> Chains:
        return best_chains(spans, self._mix, loads, check=self._check)
