"""From what was measured to a cluster description."""

from __future__ import annotations

from pipectl.cluster import Cluster, Device, Node
from pipectl.runtime.links.measure import Figures


def describe(
    figures: Figures,
    *,
    name: str,
    library: str,
    key: str | None,
    cpus_per_task: int,
    memory_per_node_bytes: int | None,
) -> Cluster:
    """The cluster that was measured.

    Args:
        name: of the cluster.
        library: what MPI says of itself.
        key: see :class:`~pipectl.cluster.Cluster`.
        cpus_per_task: threads of a rank.
        memory_per_node_bytes: the job's share of a node; None takes what the machine has.
    """
    hosts = len({place.host for place in figures.places})
    ranks = len(figures.places)
    return Cluster(
        name=name,
        source=f"measured with {_first_words(library)}: {ranks} ranks on {_count(hosts, 'host')}",
        nodes=tuple(_node(figures, n, cpus_per_task, memory_per_node_bytes) for n in figures.nodes),
        within_node=figures.within_node,
        between_nodes=figures.between_nodes,
        allreduce=figures.allreduce,
        key=key,
    )


def _node(
    figures: Figures, ranks: tuple[int, ...], cpus_per_task: int, memory_bytes: int | None
) -> Node:
    """A node; its cores are those that its ranks may use together."""
    places = [figures.places[rank] for rank in ranks]
    usable = len(frozenset().union(*(place.cores for place in places)))
    whole = places[0].memory_bytes if memory_bytes is None else memory_bytes
    return Node(
        name=places[0].node,
        ranks=len(ranks),
        cores=max(1, usable // cpus_per_task),
        device=Device("cpu", memory_bytes=whole // len(ranks)),
    )


def _first_words(library: str) -> str:
    """Name and version: the first line up to a comma."""
    line = library.strip().splitlines()[0] if library.strip() else "an unknown MPI"
    return " ".join(line.partition(",")[0].replace(" Version:", "").split())


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
