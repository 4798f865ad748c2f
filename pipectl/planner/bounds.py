"""A lower bound on the simulated step, to order candidates and to stop early."""

from __future__ import annotations

from collections.abc import Iterable

from pipectl.cluster import Cluster
from pipectl.graph import TransferKind
from pipectl.plan import Plan


def step_bound_s(plan: Plan, cluster: Cluster) -> float:
    """No execution of the plan's schedule on the cluster takes less.

    Each stage waits for its first input, works through all micro-batches, and then its last
    gradient travels back; no node does more work than its cores allow; updates come last.
    """
    speeds = [cluster.device(stage.ranks[0]).speed for stage in plan.stages]
    full = sum(plan.micro_batch_shares)
    costs = [stage.cost for stage in plan.stages]
    forward = [cost.forward_s / speed for cost, speed in zip(costs, speeds, strict=True)]
    backward = [cost.backward_s / speed for cost, speed in zip(costs, speeds, strict=True)]
    work = [full * (ahead + back) for ahead, back in zip(forward, backward, strict=True)]
    first, *_, last = *plan.micro_batch_shares, plan.micro_batch_shares[-1]
    arrival = _delays(plan, cluster, TransferKind.ACTIVATION, forward, first)
    return_s = _delays(plan, cluster, TransferKind.GRADIENT, backward, last)
    spans = (sum(parts) for parts in zip(arrival, work, return_s, strict=True))
    update_s = max(cost.update_s / speed for cost, speed in zip(costs, speeds, strict=True))
    return max(max(spans), _node_bound_s(plan, cluster, work)) + update_s


def _delays(
    plan: Plan, cluster: Cluster, kind: TransferKind, times: Iterable[float], share: float
) -> list[float]:
    """The longest way of one micro-batch through other stages to (or back from) each stage.

    Activations delay the start of later stages; gradients what follows the end of a stage.
    """
    lasts = [share * time for time in times]
    delays = [0.0] * len(plan.stages)
    forward = kind is TransferKind.ACTIVATION
    routes = sorted(
        (item for item in plan.transfers if item.kind is kind),
        key=lambda item: item.source if forward else item.target,
    )
    for item in routes:
        ranks = plan.stages[item.source].ranks[0], plan.stages[item.target].ranks[0]
        link = cluster.link(*ranks)
        transfer_s = link.transfer_s(share * item.size_bytes) if ranks[0] != ranks[1] else 0.0
        if forward:
            through = delays[item.source] + lasts[item.source] + transfer_s
        else:
            through = transfer_s + lasts[item.target] + delays[item.target]
        late = item.target if forward else item.source
        delays[late] = max(delays[late], through)
    return delays


def _node_bound_s(plan: Plan, cluster: Cluster, work: Iterable[float]) -> float:
    """Work of the busiest node's stages over its cores."""
    total = [0.0] * len(cluster.nodes)
    for stage, seconds in zip(plan.stages, work, strict=True):
        total[plan.node_of_rank[stage.ranks[0]]] += seconds
    return max(amount / node.cores for amount, node in zip(total, cluster.nodes, strict=True))
