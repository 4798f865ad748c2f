"""Plans with replicas on unequal devices against the best of a long random search

    python tests/benchmarks/planner_uneven.py [FIRST COUNT] [--seconds S] [--stages]

Random graphs of 12 to 30 operators on 4 to 8 ranks of two or three speeds, or of
as many as there are nodes, with open replicas. The
search anneals the simulated step from the plans that the planner knows and from even cuts: blocks
cross borders, single ranks move, are exchanged, left out or used, stages are split, merged and
exchanged, and micro-batches get other sizes, orders and ways to be shared. It has no other limit
than its time, and what it finds is no proof: the ratio says how much is missed at least.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import exp, inf, log
from random import Random
from time import process_time

from pipectl.cluster import Cluster
from pipectl.plan import Plan, Replication
from pipectl.planner import PlanRequest, search_plans
from pipectl.planner.choices import micro_batch_sizes, open_orders
from pipectl.planner.graph.blocks import bits
from pipectl.planner.partition.layout import Choice, Layout
from pipectl.planner.plans import plan_of
from pipectl.planner.problem import Problem
from pipectl.planner.simple import even_copies
from pipectl.profile import Profile
from pipectl.simulate import simulate
from tests.benchmarks.jobs import print_table
from tests.planner.gate.gate_corpus import GRAPHS, nodes, profile_of

MACHINES = (
    *((1, 1, 1, 1), (2, 2), (1, 1, 1, 1, 1), (3, 3), (2, 2, 2), (1,) * 6, (2, 3, 2), (4, 4)),
    *((2, 2, 2, 2), (1,) * 8),
)
SPEEDS = ((1.0, 0.5), (0.3, 1.0, 1.0), (1.0, 0.7, 0.4), (1.0, 0.8), (0.25, 1.0, 0.6))
WARM, COLD = 0.03, 0.001
"""Shares of the step by which a change may be slower, at first and in the end."""
STARTS = 3


def problem_of(number: int, *, fixed: bool) -> tuple[Profile, Cluster, PlanRequest]:
    """A random problem, all of whose ranks have enough memory."""
    draw = Random(f"uneven-{number}")
    graph, count = draw.choice([*GRAPHS]), draw.randint(12, 30)
    profile = profile_of(f"uneven-{graph}-{number}", count)
    ranks, speeds = draw.choice(MACHINES), draw.choice(SPEEDS)
    if number % 2:  # every node has a speed of its own
        speeds = tuple(round(draw.uniform(0.2, 1.0), 2) for _ in ranks)
    cluster = nodes(*ranks, between=draw.choice([1.2e8, 3e8, 1.1e9]), speeds=speeds)
    way = draw.choice([*Replication, None])
    batch = draw.choice([32, 48, 64])
    stages = draw.randint(2, min(5, sum(ranks))) if fixed else None
    return (
        profile,
        cluster,
        PlanRequest(f"uneven-{number}", batch, stages=stages, replicas=None, replication=way),
    )


class Annealing:
    """A random search among all choices of a problem.

    Args:
        seconds: of the processor, for all starts together.

    Attributes:
        best, best_s: the fastest choice and its simulated step.
    """

    def __init__(self, problem: Problem, seed: int, seconds: float) -> None:
        self._problem = problem
        self._draw = Random(seed)
        self._seconds = seconds
        self._steps_s: dict[Choice, float] = {}
        self.best: Choice | None = None
        self.best_s = inf
        self._sizes = micro_batch_sizes(problem.request, problem.request.batch_size)

    def run(self, starts: Sequence[Choice]) -> None:
        """Anneal from every start, and spend an equal time on each."""
        for start in starts:
            began, given = process_time(), self._seconds / len(starts)
            choice, step_s = start, self._step_s(start)
            while (spent := (process_time() - began) / given) < 1:
                moved = self._move(choice)
                if moved is None:
                    continue
                moved_s = self._step_s(moved)
                bearable = WARM * (COLD / WARM) ** spent * step_s
                if moved_s <= step_s or self._draw.random() < exp((step_s - moved_s) / bearable):
                    choice, step_s = moved, moved_s

    def _step_s(self, choice: Choice) -> float:
        if choice not in self._steps_s:
            plan = plan_of(self._problem, choice)
            step_s = simulate(plan, self._problem.cluster).step_time_s
            self._steps_s[choice] = step_s
            if step_s < self.best_s:
                self.best, self.best_s = choice, step_s
        return self._steps_s[choice]

    def _move(self, choice: Choice) -> Choice | None:
        """A random choice near one; None if the move is not possible."""
        draw, layout, fixed = self._draw, choice.layout, self._problem.request.fixed_stages
        moves = [self._border] * 6 + [self._rank] * 5 + [self._exchange] * 3 + [self._stages]
        if fixed is None:
            moves += [self._split, self._merge]
        size, way = choice.size, choice.replication
        kind = draw.random()
        if kind < 0.1:
            near = self._sizes.index(size) + draw.choice((-1, 1)) if size in self._sizes else 0
            size = self._sizes[min(max(near, 0), len(self._sizes) - 1)]
        elif kind < 0.15:
            way = draw.choice(self._problem.request.replications)
            size = draw.choice(self._sizes)
        elif kind > 0.2:
            for _ in range(draw.choice((1, 1, 1, 2, 3))):
                changed = draw.choice(moves)(layout)
                if changed is None:
                    return None
                layout = changed
        replicas = tuple(map(len, layout.ranks))
        count = self._problem.micro_batches(size)
        if max(replicas) > (size if way is Replication.SPLIT else count):
            return None
        whole = replicas if way is Replication.WHOLE else None
        order = draw.choice(open_orders(self._problem.request, len(replicas), count, whole))
        return Choice(layout, size, *order, way)

    def _border(self, layout: Layout) -> Layout | None:
        """A block without successors (or predecessors) in its stage, or several, moves on."""
        stages, graph, draw = list(layout.partition), self._problem.graph, self._draw
        source = draw.randrange(len(stages))
        target = source + draw.choice((-1, 1))
        if not 0 <= target < len(stages):
            return None
        onward = graph.successors if target > source else graph.predecessors
        for _ in range(draw.choice((1, 1, 2, 4))):
            free = [block for block in bits(stages[source]) if not onward[block] & stages[source]]
            if len([*bits(stages[source])]) < 2:
                break
            moved = 1 << draw.choice(free)
            stages[source] &= ~moved
            stages[target] |= moved
        return layout._replace(partition=tuple(stages))

    def _rank(self, layout: Layout) -> Layout | None:
        """A rank goes to another stage, or is left out, or is used."""
        ranks, draw = [list(each) for each in layout.ranks], self._draw
        spare = [*{*range(self._problem.cluster.ranks)}.difference(*ranks)]
        places = [*ranks, spare]
        source, target = draw.sample(range(len(places)), 2)
        if len(places[source]) <= (source < len(ranks)):
            return None
        moved = draw.choice(places[source])
        places[source].remove(moved)
        places[target].insert(draw.randint(0, len(places[target])), moved)
        return layout._replace(ranks=tuple(map(tuple, ranks)))

    def _exchange(self, layout: Layout) -> Layout | None:
        """Two ranks of different stages exchange their places, or of one."""
        ranks, draw = [list(each) for each in layout.ranks], self._draw
        places = [*ranks, [*{*range(self._problem.cluster.ranks)}.difference(*ranks)]]
        every = [(row, at) for row in range(len(places)) for at in range(len(places[row]))]
        (a, b), (c, d) = draw.sample(every, 2)
        places[a][b], places[c][d] = places[c][d], places[a][b]
        return layout._replace(ranks=tuple(map(tuple, ranks)))

    def _stages(self, layout: Layout) -> Layout | None:
        """Two stages exchange all their ranks."""
        if len(layout.ranks) < 2:
            return None
        ranks = list(layout.ranks)
        a, b = self._draw.sample(range(len(ranks)), 2)
        ranks[a], ranks[b] = ranks[b], ranks[a]
        return layout._replace(ranks=tuple(ranks))

    def _split(self, layout: Layout) -> Layout | None:
        """A stage in two, whose ranks are its own, and spare ones if it has a single one."""
        draw, partition, ranks = self._draw, list(layout.partition), list(layout.ranks)
        stage = draw.randrange(len(partition))
        blocks, own = [*bits(partition[stage])], list(ranks[stage])
        spare = [*{*range(self._problem.cluster.ranks)}.difference(*ranks)]
        if spare and (len(own) == 1 or draw.random() < 0.5):
            own.append(draw.choice(spare))
        if len(blocks) < 2 or len(own) < 2:
            return None
        draw.shuffle(own)
        first, at = sum(1 << block for block in blocks[: draw.randint(1, len(blocks) - 1)]), 0
        at = draw.randint(1, len(own) - 1)
        partition[stage : stage + 1] = first, partition[stage] & ~first
        ranks[stage : stage + 1] = tuple(own[:at]), tuple(own[at:])
        return Layout(tuple(partition), tuple(ranks))

    def _merge(self, layout: Layout) -> Layout | None:
        """Two neighbours as one."""
        if len(layout.ranks) < 2:
            return None
        at = self._draw.randrange(len(layout.ranks) - 1)
        partition, ranks = list(layout.partition), list(layout.ranks)
        partition[at : at + 2] = [partition[at] | partition[at + 1]]
        ranks[at : at + 2] = [ranks[at] + ranks[at + 1]]
        return Layout(tuple(partition), tuple(ranks))


def choice_of(problem: Problem, plan: Plan) -> Choice:
    """The choice that a plan was made from."""
    partition = problem.partition_of(stage.nodes for stage in plan.stages)
    layout = Layout(partition, tuple(stage.ranks for stage in plan.stages))
    return Choice(layout, plan.micro_batch_size, plan.schedule, plan.warm_up, plan.replication)


def even_starts(problem: Problem, draw: Random, count: int) -> Iterator[Choice]:
    """Some even cuts."""
    every = [*even_copies(problem)]
    for size, layout in draw.sample(every, min(count, len(every))):
        way = draw.choice(problem.request.replications)
        replicas = tuple(map(len, layout.ranks))
        whole = way is Replication.WHOLE
        size = -(-size // max(replicas)) if whole else size
        micro_batches = problem.micro_batches(size)
        if whole and max(replicas) > micro_batches:
            continue
        stages = len(replicas)
        order = open_orders(problem.request, stages, micro_batches, replicas if whole else None)[0]
        yield Choice(layout, size, *order, way)


def words_of(choice: Choice) -> str:
    """A choice in short."""
    stages = ", ".join(
        f"{'.'.join(map(str, bits(blocks)))}@{','.join(map(str, ranks))}"
        for blocks, ranks in zip(*choice.layout[:2], strict=True)
    )
    return f"{choice.replication} {choice.size} {choice.warm_up} [{stages}]"


def main() -> None:
    parser = ArgumentParser()
    parser.add_argument("numbers", nargs="*", type=int, default=[0, 20])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--stages", action="store_true", help="fix the number of stages")
    parser.add_argument("-v", action="store_true", dest="verbose")
    asked = parser.parse_args()
    first, count = asked.numbers
    rows: list[Sequence[object]] = []
    ratios = []
    for number in range(first, first + count):
        profile, cluster, request = problem_of(number, fixed=asked.stages)
        began = process_time()
        plans = search_plans(profile, cluster, request)
        planning_s = process_time() - began
        problem = Problem(profile, cluster, replace(request))
        search = Annealing(problem, number, asked.seconds)
        starts = [choice_of(problem, plan) for plan in plans[:STARTS]]
        search.run([*starts, *even_starts(problem, Random(number), STARTS)])
        assert search.best is not None
        ratio = plans[0].predicted_step_s / search.best_s
        ratios.append(ratio)
        row = (number, f"{ratio:.4f}", f"{planning_s:.2f}")
        rows.append(row)
        if asked.verbose:
            print(*row, profile.name, [n.ranks for n in cluster.nodes], request, file=sys.stderr)
            print("  planned", words_of(starts[0]), file=sys.stderr)
            print("  found  ", words_of(search.best), file=sys.stderr, flush=True)
    print_table(("problem", "planned / found", "planning s"), rows)
    mean = exp(sum(map(log, ratios)) / len(ratios))
    above = sum(ratio > 1.03 for ratio in ratios)
    print(f"mean {mean:.4f}, worst {max(ratios):.4f}, {above} above 1.03")


if __name__ == "__main__":
    main()
