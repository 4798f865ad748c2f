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
    memory_per_node: int | None,
) -> Cluster:
    """The cluster that was measured.

    Args:
        name: of the cluster.
        library: what MPI says of itself.
        key: see :class:`~pipectl.cluster.Cluster`.
        cpus_per_task: threads of a rank.
        memory_per_node: as asked for, in bytes; None takes that of each node.
    """
    hosts = len({place.host for place in figures.places})
    ranks = len(figures.places)
    return Cluster(
        name=name,
        source=f"measured with {_first_words(library)}: {ranks} ranks on {_count(hosts, 'host')}",
        nodes=tuple(_node(figures, node, cpus_per_task, memory_per_node) for node in figures.nodes),
        within_node=figures.within_node,
        between_nodes=figures.between_nodes,
        allreduce=figures.allreduce,
        key=key,
    )


def _node(
    figures: Figures, ranks: tuple[int, ...], cpus_per_task: int, memory_per_node: int | None
) -> Node:
    """A node; its cores are those that its ranks may use together.

    Without a memory that was asked for, a rank has its share of the machine's.
    """
    places = [figures.places[rank] for rank in ranks]
    usable = len(frozenset().union(*(place.cores for place in places)))
    whole = places[0].memory_bytes if memory_per_node is None else memory_per_node
    return Node(
        name=places[0].node,
        ranks=len(ranks),
        cores=max(1, usable // cpus_per_task),
        device=Device("cpu", 1.0, whole // len(ranks)),
    )


def _first_words(library: str) -> str:
    """Name and version: the first line up to a comma."""
    line = library.strip().splitlines()[0] if library.strip() else "an unknown MPI"
    return " ".join(line.partition(",")[0].replace(" Version:", "").split())


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
