"""The search for stages with replicas, and for copies of a whole pipeline.

    sizes -> proposals -> estimates -> moves -> every way to share -> simulated by the judge

For every micro-batch size, the programme proposes stages and the devices of each class that they
use (:mod:`pipectl.planner.partition.replicated`); even copies are proposed besides
(:mod:`pipectl.planner.simple`). All are estimated on the ranks of every class node by node, and
round-robin over the nodes. The best estimates are improved by the best move until there is none.
Replicas share every micro-batch, or take whole ones in turn, which is the same work on smaller
micro-batches. Both are tried if allowed, the second with the samples per replica of a split
micro-batch. As long as the smallest micro-batches seem best, smaller ones follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import ceil

from pipectl.plan import Replication
from pipectl.planner.candidates import Candidate, Candidates
from pipectl.planner.costs.devices import ranks_of_uses
from pipectl.planner.graph.downsets import CutSpace
from pipectl.planner.improve import descend
from pipectl.planner.judge import Judge
from pipectl.planner.partition.cutter import Cutter
from pipectl.planner.partition.layout import Choice, Layout, device_orders
from pipectl.planner.partition.replicated import ReplicaCutter
from pipectl.planner.problem import Problem
from pipectl.planner.request import (
    accepted,
    micro_batch_sizes,
    open_orders,
    sizes_of_stages,
    takes,
)
from pipectl.planner.simple import even_copies

MAX_ACTIONS_OF_REPLICAS = 400_000
"""Simulated forwards and backwards of plans with replicas."""
MAX_SIZES = 8
"""Number of micro-batch sizes to try on very many ranks: the smallest ones."""
PER_SIZE, DESCENTS = 5, 20
"""Number of layouts with replicas to improve, per micro-batch size and in total; twice as many if
there are twice as many orders of the ranks because nodes differ."""
PROPOSALS = 8
"""Number of layouts with replicas to simulate, with every way to share work."""


class ReplicaSearch:
    """Judges the most promising plans with replicas.

    Args:
        cutter: of the same space; it ends the search if time is up.
        judge: collects the plans.
    """

    def __init__(self, problem: Problem, space: CutSpace, cutter: Cutter, judge: Judge) -> None:
        self._problem = problem
        self._judge = judge
        self._check = cutter.check
        self._temporary_bytes = cutter.temporary_bytes
        self._cutter = ReplicaCutter(problem, space, cutter.check)
        orders = device_orders(problem.cluster)
        self._orders = orders if self._cutter.unit == 1 else orders[:1]

    def run(self) -> None:
        """Judge layouts with replicas, with ever smaller micro-batches as long as the smallest are
        estimated to be best."""
        problem, request, ranks = self._problem, self._problem.request, self._problem.cluster.ranks
        every = micro_batch_sizes(request, request.batch_size)
        sizes = every[-MAX_SIZES:]
        if self._cutter.unit == 1:
            sizes = sizes_of_stages(request, problem.profile, ranks)
        while sizes:
            best = self._judge_best(sizes)
            smaller = [size for size in every if size < min(sizes)][:1]
            sizes = smaller if best is not None and best.choice.size == min(sizes) else []

    def _judge_best(self, sizes: Sequence[int]) -> Candidate | None:
        """Judge the layouts of best estimate, with every way to share work.

        Returns:
            The one with the best estimate, if there is one.
        """
        starts, ways = self._proposals(sizes), 1 + (len(self._orders) > 2)
        if self._cutter.unit == 1:
            chosen: list[Candidate] = []
            for start in starts:
                same = [e.layout for e in chosen if e.choice.size == start.choice.size]
                if (
                    start.layout not in same
                    and len(same) < PER_SIZE * ways
                    and len(chosen) < DESCENTS * ways
                ):
                    chosen.append(start)
            seen: set[tuple[int, Layout]] = set()
            classes = [pool.ranks for pool in self._cutter.classes]
            improved = [
                descend(self._problem, start, classes, seen, self._check) for start in chosen
            ]
            starts = _best_first([*improved, *starts])
        self._judge.evaluator.allow(MAX_ACTIONS_OF_REPLICAS)
        for proposal in starts[: PROPOSALS * ways]:
            for changed in self._shared(proposal):
                if not self._judge.is_exhausted():
                    self._check()
                    self._judge.examine(changed, change_modes=True)
        return starts[0] if starts else None

    def _proposals(self, sizes: Sequence[int]) -> list[Candidate]:
        """Proposals of the programme for every size, with estimates on every order of the ranks,
        and copies of even cuts."""
        problem = self._problem
        layouts: dict[int, list[Layout]] = {size: [] for size in sizes}
        for size in sizes:
            cuts = self._cutter.cuts(size, self._temporary_bytes)
            for order in self._orders:
                members = [
                    [*filter(set(pool.ranks).__contains__, order)] for pool in self._cutter.classes
                ]
                layouts[size] += filter(
                    problem.may_replicate,
                    (
                        Layout(cut.partition, ranks_of_uses(cut.uses, members), cut.recompute)
                        for cut in cuts
                    ),
                )
        for size, layout in even_copies(problem):
            if size in layouts:
                layouts[size].append(layout)
        return _best_first([each for size in sizes for each in self._rate(layouts[size], size)])

    def _rate(self, layouts: Iterable[Layout], size: int) -> Iterator[Candidate]:
        return Candidates(self._problem, list(layouts), size, with_replicas=True).best_of_layouts()

    def _shared(self, proposal: Candidate) -> Iterator[Candidate]:
        """A layout with every allowed way to share work in which all replicas have work."""
        request, layout = self._problem.request, proposal.layout
        stages = len(layout.partition)
        for replication in request.replications:
            sizes = {proposal.choice.size}
            if replication is Replication.WHOLE and request.micro_batches is None:
                shares = {ceil(proposal.choice.size / len(ranks)) for ranks in layout.ranks}
                sizes = set(accepted(request, sorted(shares)))
            for size in sorted(sizes, reverse=True):
                if replication is Replication.SPLIT and not takes(
                    request, size, max(map(len, layout.ranks))
                ):
                    continue
                count = self._problem.micro_batches(size)
                most = size if replication is Replication.SPLIT else count
                ranks = tuple(each[:most] for each in layout.ranks)
                replicas = tuple(map(len, ranks))
                in_turn = replicas if replication is Replication.WHOLE else None
                if max(replicas) > 1:
                    fewer = layout._replace(ranks=ranks)
                    for order in open_orders(request, stages, count, in_turn):
                        choice = Choice(fewer, size, *order, replication)
                        yield replace(proposal, choice=choice, micro_batches=count)


def _best_first(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Candidates of layouts with replicas, lowest estimate first; each layout and size once."""
    best: dict[tuple[int, Layout], Candidate] = {}
    for each in sorted(candidates, key=lambda e: (e.estimate_s, e.choice.size, e.layout)):
        best.setdefault((each.choice.size, each.layout), each)
    return list(best.values())
