"""Stages with unequal numbers of replicas, which split every micro-batch.

1. For every micro-batch size, the dynamic programme proposes stages and replicas: for a few caps of
   the largest load the shortest way of a micro-batch, or, on very many ranks, for every number of
   stages the least load that the ranks suffice for.
2. The estimate rates them, each on consecutive ranks of an order of all: machine by machine, or
   round the machines.
3. From the best, the best move is made until none is left: borders, replicas, splits and merges.
   Merges and even splits of the best few are improved once more, although they are worse at first.
4. The ranks of the best few are chosen by DAPPLE's policies.

Stages take the next ranks of an order, so few numbers say what a proposal is; each stage counts
with the slowest device and the smallest memory of the cluster until it is rated. That a given load
is a question which needs no ranks in its states is an idea of Tarnawski, Narayanan and Phanishayee
("Piper: Multidimensional Planner for DNN Parallelization", NeurIPS 2021).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from math import inf, isfinite, log
from typing import NamedTuple

import numpy as np

from pipectl.arrays import Floats, Integers
from pipectl.planner.partition.cut_space import CutSpace
from pipectl.planner.partition.cutter import table_of
from pipectl.planner.partition.layout import Layout, Ranks
from pipectl.planner.partition.moves import Draft, kicks, near_partitions, replica_moves
from pipectl.planner.partition.programme import (
    DEVICES,
    LATENCY,
    OVERLAPPED,
    Chains,
    Goal,
    Options,
    best_chains,
)
from pipectl.planner.problem import Problem
from pipectl.schedule.one_f_one_b import policy_a, policy_b

MAX_CUTS = 64
"""Downsets that stages are cut at first: in each part of the work, those that send least."""
SLACKS = (1.03, 1.06, 1.1, 1.15, 1.2, 1.3, 1.5, 1.8, 2.5, 5.0, 1e9)
"""Caps of the load, relative to work that is spread evenly over all ranks."""
MANY_RANKS = 48
"""Beyond, a proposal is the least load for a number of stages, and no moves are made."""
MAX_STAGES = 64
PRECISION = 0.005
"""How far above the least load of a number of stages a proposal may be."""
EVERY_COUNT = 24
"""Up to so many replicas, every number is tried; beyond, about six per doubling."""
DESCENTS, KICKED = 20, 6
"""Proposals that are improved, and that are disturbed and improved again."""
PER_SIZE = 5
"""Proposals of one micro-batch size that are improved, at most."""
BETTER = 1 - 1e-9
"""A move must gain more than rounding."""
DOES_NOT_FIT = 1.5
"""Times that a step counts whose ranks are too full, and more the fuller they are."""

Expired = Callable[[], bool]


class Proposal(NamedTuple):
    """Stages with replicas on their ranks, which share micro-batches of ``size`` samples."""

    step_s: float
    size: int
    layout: Layout


class _Start(NamedTuple):
    """A draft on an order of the ranks."""

    step_s: float
    size: int
    order: tuple[int, ...]
    draft: Draft


class ReplicaSearch:
    """The search of one problem.

    Args:
        sizes: of micro-batches, in samples.
        expired: whether time is up; the best so far is returned then.
    """

    def __init__(
        self, problem: Problem, space: CutSpace, sizes: Sequence[int], expired: Expired
    ) -> None:
        self._problem = problem
        self._space = _thinned(problem, space)
        self._ranks = problem.cluster.ranks
        several = 2 * self._ranks
        self._sizes = sorted(sizes, key=lambda n: abs(log(problem.micro_batches(n) / several)))
        self._expired = expired
        self._fixed = problem.request.fixed_stages
        self._seen: dict[tuple[int, tuple[int, ...], Draft], float] = {}

    def proposals(self, count: int) -> list[Proposal]:
        """The best found, best first."""
        starts = self._starts()
        if self._ranks <= MANY_RANKS:
            chosen: list[_Start] = []
            for start in sorted(starts):
                same = [each.draft for each in chosen if each.size == start.size]
                if start.draft not in same and len(same) < PER_SIZE and len(chosen) < DESCENTS:
                    chosen.append(start)
            found = [self._descend(start) for start in chosen]
            for start in sorted(set(found))[:KICKED]:
                if self._fixed is None:
                    drafts = kicks(start.draft, self._problem.block_times(start.size))
                    kicked = self._rated(drafts, start.size, start.order)
                    found += [self._descend(each) for each in kicked]
            starts = [*found, *starts]
        placed: dict[tuple[int, Layout], Proposal] = {}
        for start in sorted(set(starts))[: 2 * count]:
            proposal = self._placed(start)
            placed.setdefault((proposal.size, proposal.layout), proposal)
        return sorted(placed.values())[:count]

    def near(self, proposal: Proposal) -> list[Proposal]:
        """What is one move of a border away, on the same ranks, best first."""
        _, size, layout = proposal
        loads, graph = self._problem.block_times(size), self._problem.graph
        partitions = dict.fromkeys(near_partitions(layout.partition, graph, loads, ()))
        layouts = [layout._replace(partition=each) for each in partitions]
        steps_s = self._steps_s(layouts, size).tolist() if layouts else []
        pairs = zip(steps_s, layouts, strict=True)
        return sorted(Proposal(step_s, size, near) for step_s, near in pairs)

    def _starts(self) -> list[_Start]:
        """What the programme proposes for every size, rated on every order of the ranks."""
        found: list[_Start] = []
        orders = device_orders(self._problem.cluster.node_of_rank)
        for size in self._sizes:
            if found and self._expired():
                break
            many = self._ranks > MANY_RANKS
            drafts = self._least_loads(size) if many else self._shortest_ways(size)
            drafts = [each for each in drafts if self._fixed in (None, len(each.partition))]
            for order in orders[: 1 if many else 2]:
                found += self._rated(drafts, size, order)
        return found

    def _rated(self, drafts: Iterable[Draft], size: int, order: tuple[int, ...]) -> list[_Start]:
        """Drafts with their estimated steps."""
        by_stages: dict[int, list[Draft]] = {}
        for draft in dict.fromkeys(drafts):
            by_stages.setdefault(len(draft.partition), []).append(draft)
        found = []
        for same in by_stages.values():
            layouts = [Layout(each.partition, consecutive(each.replicas, order)) for each in same]
            steps_s = self._steps_s(layouts, size)
            found += [
                _Start(step_s, size, order, draft)
                for step_s, draft in zip(steps_s.tolist(), same, strict=True)
            ]
        return found

    def _steps_s(self, layouts: Sequence[Layout], size: int) -> Floats:
        """By the better of the two warm-up policies; longer if ranks are too full."""
        problem = self._problem
        given = len(layouts[0].partition), problem.micro_batches(size)
        depths = list(dict.fromkeys([policy_a(*given), policy_b(*given)]))
        steps_s = problem.estimator.steps_s(layouts, size, depths)
        if problem.has_limits:
            excess = problem.estimator.excess(layouts, size, depths)
            steps_s = np.where(excess > 0, steps_s * (DOES_NOT_FIT + excess), steps_s)
        least: Floats = steps_s.min(axis=1)
        return least

    def _descend(self, start: _Start) -> _Start:
        """Make the best move until there is none."""
        loads, graph = self._problem.block_times(start.size), self._problem.graph
        best = start
        while not self._expired():
            key = best.size, best.order, best.draft
            if key in self._seen:
                break
            self._seen[key] = best.step_s
            moves = replica_moves(
                best.draft,
                graph,
                loads,
                self._ranks,
                min(best.size, self._ranks),
                keep_stages=self._fixed is not None,
            )
            rated = self._rated(moves, best.size, best.order)
            nearest = min(rated, default=best)
            if nearest.step_s >= best.step_s * BETTER:
                break
            best = nearest
        return best

    def _placed(self, start: _Start) -> Proposal:
        """A draft on consecutive ranks, or on those that DAPPLE's policies choose."""
        replicas, node_of = start.draft.replicas, self._problem.cluster.node_of_rank
        choices = [consecutive(replicas, start.order)]
        if self._ranks <= MANY_RANKS:
            choices += [placed(node_of, replicas, take) for take in POLICIES.values()]
        layouts = [Layout(start.draft.partition, ranks) for ranks in dict.fromkeys(choices)]
        steps_s = self._steps_s(layouts, start.size)
        best = int(steps_s.argmin())
        return Proposal(float(steps_s[best]), start.size, layouts[best])

    def _shortest_ways(self, size: int) -> Iterator[Draft]:
        """Under every cap of the load the stages that a micro-batch passes fastest."""
        options, work_s = self._options(size), self._problem.block_times(size)
        even_s = sum(work_s) / max(self._problem.speeds) / self._ranks
        table = table_of(self._problem, self._space, size, self._samples(size, options))
        for slack in SLACKS:
            goal = self._goal(size)._replace(objective=LATENCY, cap_s=even_s * slack)
            chains = best_chains(self._space, table, options, goal)
            everywhere = np.arange(len(options.following))
            if self._fixed is not None:
                everywhere = everywhere[everywhere // (self._ranks + 1) == self._fixed]
            if isfinite(chains.value(everywhere)):
                yield self._draft(chains, options, everywhere)

    def _least_loads(self, size: int) -> list[Draft]:
        """For every number of stages, those of about the least load that the ranks suffice for.

        One answer narrows down the least loads of all numbers of stages.
        """
        options = self._options(size, by_stages=True)
        table = table_of(self._problem, self._space, size, self._samples(size, options))
        most = len(options.following) - 1
        low, high = np.zeros(most + 1), np.full(most + 1, inf)
        drafts: list[Draft | None] = [None] * (most + 1)
        cap_s = float(table.work_s[0, 1, -1] + table.stage_s) * 2 / min(self._problem.speeds)
        goal = self._goal(size)._replace(objective=DEVICES, messages=OVERLAPPED)
        while True:
            chains = best_chains(self._space, table, options, goal._replace(cap_s=cap_s))
            for stages in range(1, most + 1):
                if chains.best.value[0, stages] > self._ranks:
                    low[stages] = max(low[stages], min(cap_s, high[stages]))
                elif cap_s < high[stages]:
                    high[stages] = cap_s
                    drafts[stages] = self._draft(chains, options, np.array([stages]))
            open_gap = np.where(np.isfinite(high), 1 - low / high, 0.0)
            widest = int(open_gap.argmax())
            if open_gap[widest] <= PRECISION or self._expired():
                return [draft for draft in drafts if draft is not None]
            cap_s = float(low[widest] + high[widest]) / 2

    def _draft(self, chains: Chains, options: Options, tallies: Integers) -> Draft:
        chain = chains.chain(tallies)
        replicas = tuple(int(options.replicas[option]) for option in chain.options)
        return Draft(self._space.partition(chain.cuts), replicas)

    def _goal(self, size: int) -> Goal:
        """One that minds memory if it is limited and none may recompute; policy A is in flight."""
        if not self._problem.has_limits or self._problem.request.recompute is not False:
            return Goal(LATENCY)
        depths = np.arange(1, MAX_STAGES + 1, dtype=np.float64)
        flying = np.minimum(depths, self._problem.micro_batches(size))
        baseline = self._problem.baseline_bytes
        return Goal(LATENCY, flying=flying, temporary_bytes=float(baseline), entering=0.0)

    def _samples(self, size: int, options: Options) -> list[int]:
        """What the busiest replica gets, by option."""
        return [-(-size // int(count)) for count in options.replicas]

    def _options(self, size: int, *, by_stages: bool = False) -> Options:
        """Every number of replicas, tallies of the ranks in use; or of the stages there are.

        A number of stages that is asked for is counted beside the ranks.
        """
        problem, ranks = self._problem, self._ranks
        counts = np.array(replica_counts(min(ranks, size)), dtype=np.int64)
        links, options = problem.estimator.links, len(counts)
        order = range(ranks)
        late_s, rate, summing = np.zeros(options), np.zeros(options), np.zeros(options)
        for place, count in enumerate(counts.tolist()):
            begins = range(0, max(1, ranks - 2 * count + 1), max(1, ranks // 8))
            pairs = [(order[b : b + count], order[b + count : b + 2 * count]) for b in begins]
            found = [links.transfer_s(2**20, *pair) for pair in pairs if pair[1]]
            if found:
                late_s[place] = sum(each.late_s for each in found) / len(found)
                rate[place] = sum(each.hold_s for each in found) / len(found) / 2**20
            if count > 1:
                sums = [links.reduction_rate(tuple(pair[0]))[1] for pair in pairs]
                summing[place] = sum(sums) / len(sums) / problem.micro_batches(size)
        if by_stages:
            most = min(ranks, len(self._space) - 1, MAX_STAGES)
            after = np.arange(1, most + 2)
            after[-1] = -1
            following = np.repeat(after[:, None], options, axis=1)
        else:
            used = np.arange(ranks + 1)[:, None] + counts
            following = np.where(used <= ranks, used, -1)
            if self._fixed is not None:
                rows = [
                    np.where(following >= 0, following + (ranks + 1) * (stage + 1), -1)
                    for stage in range(self._fixed)
                ]
                following = np.concatenate([*rows, np.full_like(following, -1)])
        return Options.of(
            following,
            row=np.arange(options),
            devices=counts,
            replicas=counts,
            slowness=1.0 / min(problem.speeds),
            limit_bytes=min(problem.kind_limits_bytes),
            state_share=1.0 / counts if problem.request.shard_optimizer else 1.0,
            latency_s=late_s,
            s_per_byte=rate,
            sum_s_per_byte=summing,
        )


def replica_counts(most: int) -> list[int]:
    """Numbers of replicas to try, rising, up to ``most``."""
    counts = list(range(1, min(most, EVERY_COUNT) + 1))
    while counts[-1] < most:
        counts.append(min(most, max(counts[-1] + 1, round(counts[-1] * 1.125))))
    return counts


def _thinned(problem: Problem, space: CutSpace) -> CutSpace:
    """At most about ``MAX_CUTS`` downsets that cover the work evenly, those that send least."""
    if len(space) <= MAX_CUTS:
        return space
    table = table_of(problem, space, problem.profile.micro_batch_size)
    work, moved = table.work_s[0, 1], table.activation_bytes + table.gradient_bytes
    part = np.floor(work / max(work[-1], 1e-30) * (MAX_CUTS / 2 - 1)).astype(np.int64)
    order = np.lexsort((np.arange(len(space)), moved, part))
    rank = np.arange(len(space)) - np.searchsorted(part[order], part[order])
    kept = sorted({0, len(space) - 1, *order[rank < 2].tolist()})
    return CutSpace(space.graph, tuple(space.downsets[place] for place in kept), False)


Take = Callable[[Sequence[list[int]], Sequence[int], int], list[int]]
"""(free ranks of every machine, sizes of the machines, replicas) to ranks, which are taken out."""


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
    found: list[int] = []
    while len(found) < count:
        used = [size - len(row) for row, size in zip(free, sizes, strict=True)]
        open_rows = [index for index, row in enumerate(free) if row]
        found.append(free[min(open_rows, key=lambda index: (used[index], index))].pop(0))
    return sorted(found)


def _take(free: Sequence[list[int]], machines: Sequence[int], count: int) -> list[int]:
    found: list[int] = []
    for machine in machines:
        while free[machine] and len(found) < count:
            found.append(free[machine].pop(0))
    return found


POLICIES: dict[str, Take] = {
    "append": append_first,
    "fresh": fresh_first,
    "scatter": scatter_first,
}
"""DAPPLE's placement policies: which devices a stage takes, given what earlier stages took.

Two machines of four devices, stages of 2, 2, 3 and 1 replicas (digits are stages)::

    fresh first     0 0 2 2 | 1 1 2 3    whole unused machines while there are any
    append first    0 0 1 1 | 2 2 2 3    the machine in use until it is full
    scatter first   0 1 2 2 | 0 1 2 3    one device of every machine in turn

Source: Fan et al., "DAPPLE", PPoPP 2021, section on device placement.
"""


def consecutive(replicas: Sequence[int], order: Sequence[int] | None = None) -> Ranks:
    """The next ranks of an order for every stage; by default of rising ranks."""
    ranks = range(sum(replicas)) if order is None else order
    return tuple(tuple(ranks[a:b]) for a, b in pairwise([0, *accumulate(replicas)]))


def placed(node_of_rank: Sequence[int], replicas: Sequence[int], take: Take) -> Ranks:
    """The ranks of every stage, stages one after another."""
    free: list[list[int]] = [[] for _ in range(1 + max(node_of_rank))]
    for rank, node in enumerate(node_of_rank):
        free[node].append(rank)
    sizes = [len(row) for row in free]
    return tuple(tuple(take(free, sizes, count)) for count in replicas)


def device_orders(node_of_rank: Sequence[int]) -> list[tuple[int, ...]]:
    """Orders whose consecutive runs are stages: machine by machine, and round the machines."""
    by_node = tuple(range(len(node_of_rank)))
    place: dict[int, int] = {}
    turn = []
    for node in node_of_rank:
        turn.append(place.get(node, 0))
        place[node] = turn[-1] + 1
    around = tuple(sorted(by_node, key=lambda rank: (turn[rank], node_of_rank[rank])))
    return list(dict.fromkeys([by_node, around]))
