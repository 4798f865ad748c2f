"""DAPPLE's planner: synchronous latency by a closed formula, three ways to place every stage.

States are those of PipeDream. A partial plan is completed by one stage on all free devices; for
every state and occupation of the machines, the dynamic programme keeps the partial plan whose
completion has the least latency. Every further stage may be placed fresh, append or scatter first.

    latency = slowest stage x (M - 1) + one micro-batch on one device
              + messages of one micro-batch + reductions that later stages do not hide

M is the number of micro-batches; times of stages and messages are of one micro-batch, those of
stages divided by their replicas. The second term takes fill and drain without replicas, as the
released planner does. Memory is not considered. Source: Fan et al., "DAPPLE: A Pipelined Data
Parallel Approach for Training Large Models", PPoPP 2021, section 4 (planner), and the behaviour of
the planner released with it, without its replication of the whole pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from pipectl.planner.costs.links import Links
from pipectl.planner.partition.layout import Ranks
from pipectl.profile import Profile
from tests.benchmarks.literature.pipedream import antichain_states
from tests.benchmarks.literature.policy import PolicyPlan, Prefixes, Work

MAX_STATES = 32
"""If there are more states, this many are used, which divide the work evenly."""
LARGE_BYTES = 1e6
"""Size of the messages and reductions that give the time per byte."""

Take = Callable[[Sequence[list[int]], Sequence[int], int], list[int]]
"""(free ranks of every machine, sizes of the machines, replicas) to ranks, no longer free."""


def fresh_first(free: Sequence[list[int]], sizes: Sequence[int], count: int) -> list[int]:
    """Ranks of unused machines, then of the others, machine by machine."""
    in_use = [len(row) < size for row, size in zip(free, sizes, strict=True)]
    return _take(free, sorted(range(len(free)), key=in_use.__getitem__), count)


def append_first(free: Sequence[list[int]], sizes: Sequence[int], count: int) -> list[int]:
    """Ranks of machines in use, then of unused ones, machine by machine."""
    unused = [len(row) == size for row, size in zip(free, sizes, strict=True)]
    return _take(free, sorted(range(len(free)), key=unused.__getitem__), count)


def scatter_first(free: Sequence[list[int]], sizes: Sequence[int], count: int) -> list[int]:
    """One rank of the machine with the fewest ranks taken, in turn."""
    taken: list[int] = []
    while len(taken) < count:
        used = [size - len(row) for row, size in zip(free, sizes, strict=True)]
        open_rows = [index for index, row in enumerate(free) if row]
        taken.append(free[min(open_rows, key=lambda index: (used[index], index))].pop(0))
    return sorted(taken)


def _take(free: Sequence[list[int]], machines: Sequence[int], count: int) -> list[int]:
    taken: list[int] = []
    for machine in machines:
        while free[machine] and len(taken) < count:
            taken.append(free[machine].pop(0))
    return taken


PLACEMENTS: dict[str, Take] = {
    "append": append_first,
    "fresh": fresh_first,
    "scatter": scatter_first,
}
"""DAPPLE's placement policies: the devices that a stage takes after earlier stages.

Two machines of four devices, stages of 2, 2, 3 and 1 replicas (digits are stages)::

    fresh first     0 0 2 2 | 1 1 2 3    whole unused machines while there are any
    append first    0 0 1 1 | 2 2 2 3    the machine in use until it is full
    scatter first   0 1 2 2 | 0 1 2 3    one device of every machine in turn

Source: Fan et al., "DAPPLE", PPoPP 2021, section on device placement.
"""


@dataclass(frozen=True)
class _Sums:
    """The terms of the formula for the stages so far.

    Args:
        slowest_s: largest stage.
        done_s: one micro-batch through all stages, which hides later stages' reductions.
        messages_s: one micro-batch over all borders.
        exposed_s: reductions that nothing hides.
    """

    slowest_s: float = 0.0
    done_s: float = 0.0
    messages_s: float = 0.0
    exposed_s: float = 0.0

    def with_stage(self, stage_s: float, message_s: float, reduce_s: float) -> _Sums:
        """The terms with one more stage and the border before it."""
        return _Sums(
            max(self.slowest_s, stage_s),
            self.done_s + stage_s,
            self.messages_s + message_s,
            max(self.exposed_s, reduce_s - self.done_s),
        )

    def latency_s(self, micro_batches: float, alone_s: float) -> float:
        """The formula; ``alone_s`` is one micro-batch on one device."""
        steady_s = self.slowest_s * (micro_batches - 1)
        return steady_s + alone_s + self.messages_s + self.exposed_s


@dataclass(frozen=True)
class _Partial:
    """A partial plan.

    Args:
        free: unused ranks of every machine.
        latency_s: if completed by one stage on the free ranks.
    """

    cuts: tuple[int, ...]
    ranks: Ranks
    free: tuple[tuple[int, ...], ...]
    sums: _Sums
    latency_s: float


class _Planner:
    def __init__(self, profile: Profile, links: Links, work: Work) -> None:
        self.states = antichain_states(profile)
        self._prefixes = Prefixes.of(profile, self.states, work.micro_batch_size)
        self._alone_s = float(self._prefixes.time_s[-1])
        self._links = links
        self._micro_batches = work.micro_batches
        self._times = self._prefixes.time_s.tolist()
        self._held = self._prefixes.trained_bytes.tolist()
        self._sizes_out = self._prefixes.output_bytes.tolist()
        # Seconds per byte of large messages and reductions.
        self._message_rate, self._reduce_rate = cache(self._moves), cache(self._sums)
        machines: list[list[int]] = [[] for _ in range(max(links.node_of_rank) + 1)]
        for rank, machine in enumerate(links.node_of_rank):
            machines[machine].append(rank)
        self._sizes = [len(ranks) for ranks in machines]
        self._all_free = tuple(map(tuple, machines))

    def run(self) -> PolicyPlan:
        """The programme over states, in their order."""
        start = _Partial((0,), (), self._all_free, _Sums(), float("inf"))
        best = self._completed(start)
        kept: dict[int, dict[tuple[int, ...], _Partial]] = {0: {(): start}}
        last = len(self.states) - 1
        inner = list(range(1, last))  # states to cut at, without the empty and the full one
        if last > MAX_STATES:
            times = self._prefixes.time_s
            targets = np.linspace(0, times[-1], MAX_STATES + 1)[1:-1]
            near = {int(np.argmin(np.abs(times - target))) for target in targets}
            inner = sorted(near - {0, last})
        for number, state in enumerate([0, *inner]):
            for partial in list(kept.get(state, {}).values()):
                for after in inner[number:]:
                    if not self.states.follows[state, after]:
                        continue
                    for longer in self._longer(partial, after, best.latency_s):
                        known = kept.setdefault(after, {})
                        key = tuple(sorted(map(len, longer.free)))
                        if key not in known or longer.latency_s < known[key].latency_s:
                            known[key] = longer
                        if longer.latency_s < best.latency_s:
                            best = self._completed(longer)
        return PolicyPlan(self.states, best.cuts, best.ranks, best.latency_s)

    def _longer(self, partial: _Partial, after: int, best_s: float) -> Iterator[_Partial]:
        """All plans with one more stage, for all placements and replica counts that leave a device.

        Partial plans that already take ``best_s`` are left out.
        """
        seen = set()
        for count in range(1, sum(map(len, partial.free))):
            for take in PLACEMENTS.values():
                free = [list(ranks) for ranks in partial.free]
                ranks = tuple(take(free, self._sizes, count))
                shape = tuple(map(len, free))
                if shape in seen:
                    continue
                seen.add(shape)
                sums = self._with_stage(partial, after, ranks)
                if sums.latency_s(self._micro_batches, self._alone_s) < best_s:
                    yield self._extended(partial, after, ranks, tuple(map(tuple, free)), sums)

    def _extended(
        self,
        partial: _Partial,
        after: int,
        ranks: tuple[int, ...],
        free: tuple[tuple[int, ...], ...],
        sums: _Sums,
    ) -> _Partial:
        longer = _Partial((*partial.cuts, after), (*partial.ranks, ranks), free, sums, 0.0)
        rest = tuple(rank for inside in free for rank in inside)
        whole = self._with_stage(longer, len(self.states) - 1, rest)
        latency_s = whole.latency_s(self._micro_batches, self._alone_s)
        return _Partial(longer.cuts, longer.ranks, free, sums, latency_s)

    def _completed(self, partial: _Partial) -> _Partial:
        last = len(self.states) - 1
        rest = tuple(rank for inside in partial.free for rank in inside)
        sums = self._with_stage(partial, last, rest)
        latency_s = sums.latency_s(self._micro_batches, self._alone_s)
        none = tuple(() for _ in partial.free)
        return _Partial((*partial.cuts, last), (*partial.ranks, rest), none, sums, latency_s)

    def _with_stage(self, partial: _Partial, after: int, ranks: tuple[int, ...]) -> _Sums:
        before = partial.cuts[-1]
        times, held = self._times, self._held
        message_s = 0.0
        if partial.ranks:
            message_s = self._sizes_out[before] * self._message_rate(partial.ranks[-1], ranks)
        reduce_s = (held[after] - held[before]) * self._reduce_rate(ranks)
        stage_s = (times[after] - times[before]) / len(ranks)
        return partial.sums.with_stage(stage_s, message_s, reduce_s)

    def _sums(self, ranks: tuple[int, ...]) -> float:
        return self._links.reduce_s(LARGE_BYTES, ranks) / LARGE_BYTES

    def _moves(self, senders: tuple[int, ...], receivers: tuple[int, ...]) -> float:
        message = self._links.transfer_s(LARGE_BYTES, senders, receivers)
        return (message.hold_s + message.late_s) / LARGE_BYTES


def plan(profile: Profile, links: Links, work: Work) -> PolicyPlan:
    """The plan with the least latency by the formula."""
    return _Planner(profile, links, work).run()
