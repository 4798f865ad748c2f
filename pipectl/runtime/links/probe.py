"""The link probe: ``python -m mpi4py -m pipectl.runtime.links.probe --run DIRECTORY ...``.

Its ranks start as those of a training do, so their measurements hold for it. Rank 0 writes
``cluster.json`` and a picture next to it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpi4py import MPI

from pipectl.cluster import ASSUMED_BETWEEN, ASSUMED_WITHIN, Cluster, Device, Node
from pipectl.control_groups import memory_of_machine
from pipectl.errors import MismatchError, PipectlError
from pipectl.files import write_text
from pipectl.link import RowTimes
from pipectl.report.charts import links_svg
from pipectl.runs import Heartbeat, RunDirectory, start_of_job
from pipectl.runtime.links.measure import measure_link, measure_sharing, measure_sums, run_on
from pipectl.runtime.nodes import grouped, node_name
from pipectl.runtime.rank_process import begin, finish, report
from pipectl.spec import JobSpec, load

Pair = tuple[int, int]
_ROWS_SHARE = 1 / 3
"""Share of the budget to measure the ranks' own time per message; links and sums get all."""


@dataclass(frozen=True)
class RankPlace:
    """The node and machine of a rank.

    Args:
        node: the batch system's name of the node.
        host: the machine's own name; virtual nodes share one.
        cores: that the rank may use.
        memory_bytes: that its node has for the job.
    """

    node: str
    host: str
    cores: frozenset[int]
    memory_bytes: int

    @classmethod
    def here(cls) -> RankPlace:
        """The place of this rank."""
        return cls(
            node=node_name(),
            host=socket.gethostname(),
            cores=frozenset(os.sched_getaffinity(0)),
            memory_bytes=memory_of_machine(),
        )


def probe(directory: RunDirectory, key: str, budget_s: float) -> Cluster:
    """Measure with all ranks of the job, in about ``budget_s`` seconds; the same on all ranks.

    Args:
        key: see :class:`~pipectl.cluster.Cluster`.

    Raises:
        MismatchError: MPI started single processes, or ranks are not numbered node by node.
    """
    communicator = MPI.COMM_WORLD.Dup()
    if communicator.size == 1:
        raise MismatchError(
            "MPI started a single process, so there is no link to measure",
            hint="ask for two ranks at least; if the job has several, the launcher and mpi4py use "
            "different MPIs: set launch.mpi, or use the mpiexec that belongs to mpi4py's MPI",
        )

    def say(what: str, percent: int) -> None:
        if communicator.rank == 0:
            Heartbeat(what, percent, 100).save(start_of_job(directory).heartbeat)

    spec = load(directory.job, check_files=False)
    places = communicator.allgather(RankPlace.here())
    ranks_of = ranks_by_node(places)
    within, between = pairs_within(ranks_of), pairs_between(ranks_of)
    powers = (1 << power for power in range(1, len(places).bit_length()))
    counts = sorted({*powers, len(places)})
    share_s = budget_s / (2 * (len(within) + len(between)) + len(counts))
    within_node, between_nodes = ASSUMED_WITHIN, ASSUMED_BETWEEN
    if within:
        say("measuring links within a node", 0)
        within_node = measure_link(communicator, within, share_s)
    if between:
        say("measuring links between nodes", 40 if within else 0)
        between_nodes = measure_link(communicator, between, share_s)
        between_nodes = measure_sharing(communicator, between_nodes, ranks_of)
    say("measuring what messages take of the ranks' time", 75)
    rows = _measure_rows(communicator, (within or between)[0], directory, spec, budget_s)
    from pipectl.runtime.device import settle_process  # and torch, which links do not need

    settle_process(spec.threads)
    sums: list[tuple[int, int, float]] = []
    for index, count in enumerate(counts):
        say(f"measuring sums over {count} ranks", 80 + 20 * index // len(counts))
        sums += [(count, *row) for row in measure_sums(communicator, count, share_s)]
    return Cluster(
        name=spec.name,
        source=describe_source(MPI.Get_library_version(), places),
        nodes=tuple(
            describe_node(
                [places[rank] for rank in ranks],
                spec.resources.cpus_per_task,
                shares_memory=spec.resources.shares_machine_memory,
            )
            for ranks in ranks_of
        ),
        within_node=within_node,
        between_nodes=between_nodes,
        allreduce=tuple(sums),
        key=key,
    ).with_rows(rows)


def _measure_rows(
    communicator: MPI.Comm, pair: Pair, directory: RunDirectory, spec: JobSpec, budget_s: float
) -> RowTimes | None:
    """Time of rows of programs on two ranks; None on accelerators. Collective over all ranks."""
    if spec.resources.gpus_per_node:
        return None

    def measure(two: MPI.Comm) -> RowTimes:
        from pipectl.runtime.row_probe import measure_rows  # loads torch

        folder = directory.path / "rows"
        rows = measure_rows(two, folder, spec.threads, budget_s * _ROWS_SHARE)
        if two.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        return rows

    return run_on(communicator, pair, measure)


def ranks_by_node(places: Sequence[RankPlace]) -> list[list[int]]:
    """The ranks of every node, nodes by their first rank.

    Raises:
        MismatchError: a node's ranks do not follow each other, which no plan can describe.
    """
    nodes = grouped(place.node for place in places)
    for node, ranks in nodes.items():
        if ranks != list(range(ranks[0], ranks[-1] + 1)):
            raise MismatchError(
                f"node {node} has the ranks {ranks}: they do not follow each other",
                hint="have the launcher fill one node after the other (block distribution)",
            )
    return list(nodes.values())


def pairs_within(nodes: Sequence[Sequence[int]]) -> list[Pair]:
    """Pairs of neighbours, and of the farthest ranks, on the first node with two ranks."""
    for ranks in nodes:
        if len(ranks) > 1:
            return list(dict.fromkeys([(ranks[0], ranks[1]), (ranks[0], ranks[-1])]))
    return []


def pairs_between(nodes: Sequence[Sequence[int]]) -> list[Pair]:
    """The first ranks of neighbouring nodes, and of the nodes farthest apart."""
    if len(nodes) < 2:
        return []
    first, second, last = nodes[0][0], nodes[1][0], nodes[-1][0]
    return list(dict.fromkeys([(first, second), (first, last)]))


def describe_node(
    places: Sequence[RankPlace],
    cpus_per_task: int,
    *,
    shares_memory: bool,
) -> Node:
    """A node, with the cores that its ranks may use together.

    Args:
        places: of its ranks.
        shares_memory: whether each rank gets an equal part of the machine's memory; not if they
            compute in other memory, of unknown size, or if the job says what it needs.
    """
    usable = len(frozenset().union(*(place.cores for place in places)))
    share = places[0].memory_bytes // len(places) if shares_memory else None
    return Node(
        name=places[0].node,
        ranks=len(places),
        cores=max(1, usable // cpus_per_task),
        device=Device("cpu", 1.0, share),
    )


def describe_source(library: str, places: Sequence[RankPlace]) -> str:
    """The source of the measurement: name and version of the MPI library, ranks and hosts."""
    line = library.strip().splitlines()[0] if library.strip() else "an unknown MPI"
    name = " ".join(line.partition(",")[0].replace(" Version:", "").split())
    hosts = len({place.host for place in places})
    return f"measured with {name}: {len(places)} ranks on {hosts} host{'s' if hosts > 1 else ''}"


def main() -> None:
    """Entry point; exits through MPI's abort if this rank fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="the run directory")
    parser.add_argument("--output", type=Path, required=True, help="the cluster description")
    parser.add_argument("--key", required=True, help="what it is measured for")
    parser.add_argument("--budget", type=float, required=True, help="seconds to measure, about")
    arguments = parser.parse_args()
    directory = RunDirectory(arguments.run)
    begin(directory, MPI.COMM_WORLD.rank)
    try:
        cluster = probe(directory, arguments.key, arguments.budget)
        if MPI.COMM_WORLD.rank == 0:
            cluster.save(directory.cluster)
            write_text(arguments.output.with_suffix(".svg"), links_svg(cluster))
            cluster.save(arguments.output)
        finish(directory, MPI.COMM_WORLD)
    except BaseException as error:
        report(directory, MPI.COMM_WORLD.rank, error, action="measuring links")
        sys.exit(error.exit_code if isinstance(error, PipectlError) else 1)


if __name__ == "__main__":
    main()
