"""Every message of a partition, by its definition: what planner and runtime find out faster."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pipectl.graph import Lane, routes


def cut_routes(
    stage_of: Mapping[str, int],
    edges: Iterable[tuple[str, str]],
    with_gradient: Mapping[str, bool],
) -> list[tuple[str, Lane]]:
    """Every message of a partition, with the node whose value it is of.

    Args:
        stage_of: stage of every node, in graph order (the order of the mapping).
        edges: (producer, consumer) pairs; a pair counts once.
        with_gradient: whether the value of a node has a gradient.
    """
    position = {node: index for index, node in enumerate(stage_of)}
    consumers: dict[str, list[str]] = {}
    for producer, consumer in dict.fromkeys(edges):
        consumers.setdefault(producer, []).append(consumer)
    found: list[tuple[str, Lane]] = []
    for producer in sorted(consumers, key=position.__getitem__):
        users = sorted(consumers[producer], key=position.__getitem__)
        uses = [stage_of[user] for user in users]
        lanes = routes(stage_of[producer], uses, has_gradient=with_gradient[producer])
        found += [(producer, lane) for lane in lanes]
    return found
