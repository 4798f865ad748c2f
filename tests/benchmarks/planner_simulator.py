"""The simulator

    python tests/benchmarks/planner_simulator.py [--small]

1F1B pipelines of one stage per rank, stages of uneven cost, eight ranks per node, messages of 1 MB;
between nodes 10 Gbit/s. A row is a computation, or the start or end of a message. *First* is the
time of ``simulate()``, programs and memory included, when nothing is known; *again* that of a plan
whose programs were made before; *events* that of the event loop alone. Nothing is approximated. The
reference is the plain Python simulator that the tests compare it with (events only); if it would
take minutes, it is left out.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "simulate"))
from reference_simulation import Reference
from tables import print_table

from pipectl.cluster import Cluster, Device, Node
from pipectl.graph import TransferKind
from pipectl.link import Link
from pipectl.plan import Plan, Stage, StageCost, Transfer
from pipectl.schedule import default_warm_up, lower
from pipectl.simulate import simulate
from pipectl.simulate.simulation import Machine

SHAPES = [(4, 8), (4, 16), (64, 512), (1024, 1024), (1024, 4096), (10_000, 1_000)]
SMALL = 3
"""Shapes of ``--small``."""
MOST_REFERENCE_ROWS = 1_000
RANKS_PER_NODE = 8
COLUMNS = (
    *("ranks", "micro-batches", "rows", "step s", "first s", "again s", "events s"),
    *("rows/s first", "rows/s events", "reference rows/s", "memory so far"),
)


def plan_of(stages: int, micro_batches: int) -> Plan:
    costs = [
        StageCost(1e-3 * (1 + s % 7 / 10), 2e-3 * (1 + s % 5 / 10), 1e-3, 10**8, 10**8, 10**7)
        for s in range(stages)
    ]
    ends = [(s, s + 1) for s in range(stages - 1)]
    moves = [Transfer(TransferKind.ACTIVATION, a, b, 10**6) for a, b in ends]
    back = [Transfer(TransferKind.GRADIENT, b, a, 10**6) for a, b in ends]
    return Plan(
        name="benchmark",
        fingerprint=None,
        schedule="1f1b",
        warm_up=default_warm_up("1f1b", stages, micro_batches),
        batch_size=micro_batches,
        micro_batch_size=1,
        micro_batches=micro_batches,
        stages=tuple(Stage((), (rank,), cost) for rank, cost in enumerate(costs)),
        transfers=(*moves, *back),
        node_of_rank=tuple(rank // RANKS_PER_NODE for rank in range(stages)),
    )


def cluster_of(ranks: int) -> Cluster:
    nodes = -(-ranks // RANKS_PER_NODE)
    return Cluster(
        name="benchmark",
        source="given",
        nodes=tuple(
            Node(f"n{i}", RANKS_PER_NODE, RANKS_PER_NODE, Device("cpu")) for i in range(nodes)
        ),
        within_node=Link(1e-6, 1e10),
        between_nodes=Link(2e-5, 1.1e9),
    )


def reference_rows_per_s(plan: Plan, cluster: Cluster) -> str:
    programs = [lower(plan, rank) for rank in range(plan.ranks)]
    rows = sum(len(program) for program in programs)
    if rows > MOST_REFERENCE_ROWS:
        return ""
    start = time.perf_counter()
    Reference(plan, cluster, programs).run()
    return f"{rows / (time.perf_counter() - start):,.0f}"


def row(ranks: int, micro_batches: int) -> tuple[str, ...]:
    plan, cluster = plan_of(ranks, micro_batches), cluster_of(ranks)
    times = [time.perf_counter()]
    step_s = simulate(plan, cluster).step_time_s
    times.append(time.perf_counter())
    again = 100 if ranks < 10 else 1
    for _ in range(again):
        simulate(plan, cluster)
    times.append(time.perf_counter())
    machine = Machine(plan, cluster)
    ranks_table = machine.programs.ranks
    rows = int((ranks_table["end"] - ranks_table["first"]).sum())
    times.append(time.perf_counter())
    machine.run()
    times.append(time.perf_counter())
    first_s, again_s, _, events_s = (end - start for start, end in pairwise(times))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return (
        *(f"{ranks:,}", f"{micro_batches:,}", f"{rows:,}", f"{step_s:.4f}"),
        *(f"{first_s:.4f}", f"{again_s / again:.4f}", f"{events_s:.4f}"),
        *(f"{rows / first_s:,.0f}", f"{rows / events_s:,.0f}"),
        *(reference_rows_per_s(plan, cluster), f"{peak:.1f} GiB"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="leave out what takes minutes")
    small = parser.parse_args().small
    simulate(plan_of(2, 2), cluster_of(2))
    print_table(COLUMNS, (row(*shape) for shape in (SHAPES[:SMALL] if small else SHAPES)))


if __name__ == "__main__":
    main()
