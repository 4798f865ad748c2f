"""Ends a search for a small problem with the proof that no plan is faster.

Every cut under every layout whose least step is below the best one so far becomes a candidate. In
the order of what they take at least, candidates are bounded by their own costs, and those still
below the best are simulated. When none is left, the best plan is the fastest there is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import pairwise
from math import inf
from typing import Any

import numpy as np

from pipectl.cluster import Cluster
from pipectl.plan import Plan, Search
from pipectl.planner.graphs.condense import condense
from pipectl.planner.graphs.ideals import all_downsets
from pipectl.planner.plans.replica_costs import ReplicaChoice, ReplicaPlans
from pipectl.planner.problem import Choice, Problem
from pipectl.planner.proof.chains import FOUND, VISITED, Promising, explore
from pipectl.planner.proof.costs import LeastCosts
from pipectl.planner.proof.layouts import Arrangement, arrangements, orders_of
from pipectl.planner.proof.links import Ways
from pipectl.planner.proof.plan_bound import plan_bound_s
from pipectl.planner.rating import have_same_least_load, largest_load_s
from pipectl.planner.request import PLACED, Order, PlanRequest
from pipectl.profile import Profile
from pipectl.simulate import simulate

MOST_BLOCKS = 12
MOST_RANKS = 5
MOST_DOWNSETS = 1100
"""Larger problems are not tried: chains of downsets are too many."""
MOST_VISITS = 15_000_000
"""Stages looked at in all, and at once."""
VISITS_AT_ONCE = 300_000
MOST_CANDIDATES = 200_000
MOST_PLANS = 5_000
MOST_SIMULATIONS = 1_000
"""Candidates; those bounded by their own costs; those simulated. Many where ranks share cores."""
SAME = 1e-6
"""Steps are equal if they differ by less than this share: no deeper warm-up for nothing."""


@dataclass(frozen=True)
class _Candidate:
    """A plan that could be better.

    Args:
        order: schedule and warm-up.
        cut: blocks of every stage as bitsets.
    """

    arrangement: Arrangement
    order: Order
    cut: tuple[int, ...]


def proven(
    plan: Plan,
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
    expired: Callable[[], bool] = lambda: False,
) -> Plan:
    """The fastest plan of all, if the problem is small enough, or else the given one.

    What is compared: every cut into convex stages, replicas, ranks and micro-batch sizes as the
    request allows them, 1F1B with the two warm-up policies and GPipe; where replicas split their
    micro-batches every warm-up between the policies. Plans that differ only in the names of equal
    ranks count as one.

    Args:
        plan: a good one, with prediction and search.
        expired: asked now and then; once it is true, what is known so far is returned.
    """
    if cluster.ranks > MOST_RANKS or not _is_known(request):
        return plan
    graph = condense(profile)
    downsets = all_downsets(graph, MOST_DOWNSETS) if len(graph) <= MOST_BLOCKS else None
    if downsets is None:
        return plan
    proof = _Proof(plan, Problem(profile, cluster, request, graph), downsets, expired)
    complete = proof.run()
    return replace(proof.best, search=proof.search(complete=complete))


def _is_known(request: PlanRequest) -> bool:
    """Whether a request is of the kinds that are looked at."""
    known = request.schedule not in PLACED and not request.recompute
    known = known and not request.offload and request.backward_apart is False
    known = known and not request.interleave
    return known and (request.warm_up is None or request.replicas == 1)


class _Proof:
    """Looks for anything better than the best plan so far.

    Args:
        downsets: of the graph, all of them.
    """

    def __init__(
        self, plan: Plan, problem: Problem, downsets: list[int], expired: Callable[[], bool]
    ) -> None:
        self.best, self._given = plan, plan
        self._problem, self._downsets, self._expired = problem, downsets, expired
        profile, cluster, request = problem.profile, problem.cluster, problem.request
        batch_size = request.batch_size
        self._costs = LeastCosts(profile, cluster, problem.graph, downsets, batch_size)
        self._makers = ReplicaPlans(profile, cluster, request, problem.assumptions)
        self._ways = Ways(cluster)
        self._queue: list[tuple[float, int, _Candidate, Plan | None]] = []
        self._pushed = self._visits = self._plans = self._simulations = 0
        self._undecided_s = inf

    def run(self) -> bool:
        """Whether nothing was left out; where the given plan is of a size that is not looked at,
        as for want of memory, others of that size are."""
        problem = self._problem
        blocks = len(problem.graph)
        every = arrangements(problem.profile, problem.cluster, problem.request, blocks)
        if every is None:
            return False
        shapes: set[tuple[tuple[int, ...], int]] = set()
        for arrangement in every:
            shapes.add((arrangement.replicas, arrangement.size))
            if self._costs.least_work_s(arrangement) < self._limit_s:
                if not self._explore(arrangement):
                    return False
                self._take_best()
        while self._queue and self._queue[0][0] < self._limit_s:
            if self._expired() or self._has_enough:
                self._undecided_s = min(self._undecided_s, self._queue[0][0])
                break
            self._take()
        given = self._given
        return (tuple(s.replicas for s in given.stages), given.micro_batch_size) in shapes

    def search(self, *, complete: bool) -> Search:
        """What is known of the best plan now."""
        given, step_s = self._given.search, self.best.predicted_step_s
        assert given is not None
        least_s = given.step_lower_bound_s or 0.0
        if complete:
            least_s = step_s if self._undecided_s >= self._limit_s else self._undecided_s
            least_s = min(step_s, max(least_s, given.step_lower_bound_s or 0.0))
        finished = given.finished or (complete and least_s == step_s)
        found = replace(given.bounded(step_s, least_s), finished=finished)
        return found if self.best is self._given else replace(found, **self._loads())

    @property
    def _has_enough(self) -> bool:
        return self._plans > MOST_PLANS or self._simulations > MOST_SIMULATIONS

    @property
    def _limit_s(self) -> float:
        """Steps from here on are not better."""
        return self.best.predicted_step_s * (1 - SAME)

    def _explore(self, arrangement: Arrangement) -> bool:
        """Queue what could be better; whether everything was looked at."""
        orders = orders_of(self._problem.request, arrangement)
        if not orders:
            return True
        depths = np.array([warm_up for _, warm_up in orders], np.int64)
        graph, shape = self._costs.graph_at(arrangement.size), self._costs.shape(arrangement)
        layout = self._costs.layout(arrangement)
        begin, end = 1, len(self._downsets)
        while begin < end:
            if self._expired() or self._visits > MOST_VISITS:
                return False
            found = _room(depths.shape[1])
            begin = explore(
                graph, shape, layout, depths, self._limit_s, begin, VISITS_AT_ONCE, found
            )
            self._visits += int(found.counts[VISITED])
            if found.counts[FOUND] > len(found.least_s) or self._pushed > MOST_CANDIDATES:
                return False
            self._push(arrangement, orders, found)
        return True

    def _push(self, arrangement: Arrangement, orders: Sequence[Order], found: Promising) -> None:
        for place in range(found.counts[FOUND]):
            chain = [0, *(self._downsets[at] for at in found.chain[place].tolist())]
            cut = tuple(after & ~before for before, after in pairwise(chain))
            candidate = _Candidate(arrangement, orders[found.order[place]], cut)
            self._put(float(found.least_s[place]), candidate, None)

    def _put(self, least_s: float, candidate: _Candidate, plan: Plan | None) -> None:
        self._pushed += 1
        heappush(self._queue, (least_s, self._pushed, candidate, plan))

    def _take_best(self) -> None:
        """Look at the most promising candidate, so that the next layouts have a better limit."""
        before = self._simulations
        while self._queue and self._queue[0][0] < self._limit_s and self._simulations == before:
            self._take()

    def _take(self) -> None:
        """Bound a candidate by its own costs, or simulate one where this was done."""
        least_s, _, candidate, plan = heappop(self._queue)
        if plan is None:
            self._plans += 1
            plan = self._plan(candidate)
            least_s = max(
                least_s, plan_bound_s(plan, self._problem.cluster, self._ways, self._limit_s)
            )
            if least_s < self._limit_s:
                self._put(least_s, candidate, plan)
            return
        self._judge(plan, least_s)

    def _judge(self, plan: Plan, least_s: float) -> None:
        """Simulate a plan, and keep it if it is better and fits."""
        self._simulations += 1
        problem = self._problem
        baseline = problem.baseline_bytes
        simulation = simulate(plan, problem.cluster, process_baseline_bytes=baseline)
        if simulation.step_time_s >= self._limit_s:
            return
        peaks = enumerate(simulation.peak_memory_bytes)
        if all(peak <= problem.limit_bytes(rank) for rank, peak in peaks):
            self.best = replace(plan, prediction=simulation.prediction)
        elif None in (problem.request.recompute, problem.request.offload):
            # It could fit, and be as fast, if it recomputed or offloaded.
            self._undecided_s = min(self._undecided_s, least_s)

    def _plan(self, candidate: _Candidate) -> Plan:
        found, order = candidate.arrangement, candidate.order
        if max(found.replicas) == 1:
            placement = tuple(rank for ranks in found.ranks for rank in ranks)
            return self._problem.plan(Choice(candidate.cut, placement, found.size, *order))
        graph = self._problem.graph
        members = tuple(tuple(graph.operators_of(blocks)) for blocks in candidate.cut)
        return self._makers.plan(
            ReplicaChoice(members, found.ranks, found.size, found.replication, *order)
        )

    def _loads(self) -> dict[str, Any]:
        """Of the best plan's stages: the largest load, and the least that is certain."""
        plan, cluster = self.best, self._problem.cluster
        largest_s = largest_load_s(plan, cluster)
        if have_same_least_load(plan, self._given):
            return {"max_stage_load_s": largest_s}
        times = self._problem.block_times(plan.micro_batch_size, cached=True)
        speed = sum(cluster.device(rank).speed for rank in range(cluster.ranks))
        return {
            "max_stage_load_s": largest_s,
            "lower_bound_s": min(largest_s, sum(times) / speed),
            "exact": False,
        }


def _room(stages: int) -> Promising:
    """Empty arrays."""
    room = 20_000
    return Promising(
        np.zeros(room, np.float64),
        np.zeros((room, stages), np.int64),
        np.zeros(room, np.int64),
        np.zeros(2, np.int64),
    )
