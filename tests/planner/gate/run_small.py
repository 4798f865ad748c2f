"""Plans of small random problems against an enumeration of all cuts, placements, sizes and orders.

    python tests/planner/gate/run_small.py [COUNT]

Problems of 6 to 9 blocks on 2 to 4 ranks. Prints how far plans are above the best there is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import permutations
from random import Random

from gate_corpus import GRAPHS, cluster_of, profile_of

from pipectl.cluster import Cluster
from pipectl.planner import PlanRequest, make_plan
from pipectl.planner.candidates import Candidates, judge_promising
from pipectl.planner.graph.blocks import condense
from pipectl.planner.graph.downsets import Enumeration, all_downsets
from pipectl.planner.judge import Judge
from pipectl.planner.partition.layout import Layout
from pipectl.planner.problem import Problem
from pipectl.planner.request import micro_batch_sizes, open_orders
from pipectl.profile import Profile

TOLERANCE = 0.01


def placements(cluster: Cluster, stages: int) -> Iterator[tuple[int, ...]]:
    """Those that differ in more than the names of ranks of a node."""
    seen = set()
    for ranks in permutations(range(cluster.ranks), stages):
        nodes = tuple(cluster.node_of_rank[rank] for rank in ranks)
        if nodes not in seen:
            seen.add(nodes)
            yield ranks


def best_step_s(profile: Profile, cluster: Cluster, request: PlanRequest) -> float:
    """The shortest step of all plans with one rank per stage."""
    graph = condense(profile)
    problem, downsets = Problem(profile, cluster, request, graph), all_downsets(graph, 10_000)
    assert downsets is not None
    enumeration, judge = Enumeration(downsets), Judge(problem)
    for stages in range(1, min(cluster.ranks, len(graph)) + 1):
        layouts = [
            Layout(partition, tuple((rank,) for rank in place))
            for partition in enumeration.every_partition(stages)
            for place in placements(cluster, stages)
        ]
        for size in micro_batch_sizes(request, 8 * stages):
            orders = open_orders(request, stages, problem.micro_batches(size))
            judge_promising(Candidates(problem, layouts, size, orders), judge)
    return judge.fastest_s


def main(count: int) -> int:
    machines = (cluster_of(2), cluster_of(3), cluster_of(4), cluster_of(2, 2, between=1.2e8))
    mixed = cluster_of(2, 2, speeds=(2.0, 1.0))
    gaps = []
    for number in range(count):
        random = Random(number)
        name = f"tiny-{random.choice(list(GRAPHS))}-{number}"
        profile = profile_of(name, random.randint(6, 9), sizes=(1, 2, 4, 16))
        cluster = random.choice((*machines, mixed))
        request = PlanRequest(name, 32)
        step_s = make_plan(profile, cluster, request).predicted_step_s
        gaps.append(step_s / best_step_s(profile, cluster, request) - 1)
    above = sum(gap > TOLERANCE for gap in gaps)
    print(f"{count} problems: {above} above {TOLERANCE:.0%}, the worst {max(gaps):.2%}")
    return int(above > 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if sys.argv[1:] else 500))
