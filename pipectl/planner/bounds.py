"""Lower bounds on the simulated step, to order candidates and to stop early."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipectl.cluster import Cluster
from pipectl.planner.bound_kernels import longest_ways
from pipectl.planner.loads import Floats, hold_s
from pipectl.planner.tables import Integers, StageTable


def step_bound_s(
    table: StageTable,
    ranks: Sequence[int],
    shares: Sequence[float],
    cluster: Cluster,
    recompute: Sequence[bool] = (),
) -> float:
    """No execution of any schedule of these stages on the cluster takes less.

    Each stage waits for its first input, works through all micro-batches, and then its last
    gradient travels back; no node does more work than its cores allow; updates come last.

    Args:
        ranks: of every stage.
        shares: size of every micro-batch relative to a full one.
        recompute: stages that compute their forward twice.
    """
    speeds = np.array([cluster.device(rank).speed for rank in ranks])
    forward, backward = table.forward_s / speeds, table.backward_s / speeds
    work = sum(shares) * (forward + backward)
    if any(recompute):
        work = work + sum(shares) * forward * np.array(recompute)
    nodes = np.array(cluster.node_of_rank)[list(ranks)]
    arrival = _ways(table, nodes, cluster, shares[0], forward, backward=False)
    return_s = _ways(table, nodes, cluster, shares[-1], backward, backward=True)
    spans = arrival + work + return_s
    busiest = max(float(spans.max()), _node_bound_s(cluster, nodes, work))
    return busiest + float((table.update_s / speeds).max())


def _ways(
    table: StageTable,
    nodes: Integers,
    cluster: Cluster,
    share: float,
    times_s: Floats,
    *,
    backward: bool,
) -> Floats:
    """The longest way of one micro-batch through other stages to (or back from) each stage.

    Activations delay the start of later stages; gradients what follows the end of a stage.
    """
    count = table.activations
    chosen = slice(count, None) if backward else slice(count)
    sources, targets = table.routes[:, chosen]
    seconds = _transfer_s(cluster, share * table.size_bytes[chosen], nodes[sources], nodes[targets])
    ways = np.zeros(len(times_s))
    if backward:
        sources, targets = targets, sources
    longest_ways(sources, targets, seconds, share * times_s, ways)
    return ways


def _transfer_s(cluster: Cluster, sizes: Floats, sources: Integers, targets: Integers) -> Floats:
    """Time of messages that have their link to themselves."""
    within, between = cluster.within_node, cluster.between_nodes
    near = within.latency_s + hold_s(within, sizes)
    return np.where(sources == targets, near, between.latency_s + hold_s(between, sizes))


def _node_bound_s(cluster: Cluster, nodes: Integers, work: Floats) -> float:
    """Work of the busiest node's stages over its cores."""
    total = np.bincount(nodes, weights=work, minlength=len(cluster.nodes))
    return float((total / np.array([node.cores for node in cluster.nodes])).max())
