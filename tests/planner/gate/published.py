"""The links of DAPPLE's planner and of its published evaluation.

Between machines 1 GB/s point to point and 3 GB/s for collectives, within a machine 25 GB/s; every
device as fast as the one the profile was measured on. Source: the constants of the planner
released with Fan et al., "DAPPLE: A Pipelined Data Parallel Approach for Training Large Models",
PPoPP 2021.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipectl.cluster import Cluster, Device, Node
from pipectl.link import Link
from pipectl.plan import Plan, Replication
from pipectl.planner import PlanRequest
from pipectl.planner.costs.links import Message
from pipectl.planner.graph.imported import pruned_if_pipedream
from pipectl.planner.partition.layout import Choice, Layout, consecutive
from pipectl.planner.plans import plan_of
from pipectl.planner.problem import Problem
from pipectl.profile import Profile
from pipectl.schedule.one_f_one_b import policy_a, policy_b
from tests.benchmarks.literature.pipedream import antichain_states

POINT_TO_POINT = 1e9
"""Bytes per second between machines."""
COLLECTIVE = 3e9
"""Bytes per second of a split, gather or all-reduce over machines."""
WITHIN = 25e9
"""Bytes per second inside a machine."""


class DappleRules:
    """DAPPLE's cost of messages and sums, for machines of one device each."""

    def __init__(self, machines: int) -> None:
        self.node_of_rank = range(machines)

    def speed(self, _rank: int) -> float:
        """All devices are equal."""
        return 1.0

    def memory_bytes(self, _rank: int) -> float:
        """There is enough."""
        return float("inf")

    def transfer_s(
        self, size_bytes: float, senders: Sequence[int], receivers: Sequence[int]
    ) -> Message:
        """To several receivers a collective; to one, what comes from elsewhere in turn."""
        if len(receivers) > 1:
            return Message(size_bytes / COLLECTIVE, 0.0)
        remote = sum(rank != receivers[0] for rank in senders)
        remote_s = size_bytes / len(senders) * remote / POINT_TO_POINT
        return Message(remote_s or size_bytes / WITHIN, 0.0)

    def reduce_s(self, size_bytes: float, ranks: Sequence[int]) -> float:
        """A ring."""
        return 2 * size_bytes * (len(ranks) - 1) / len(ranks) / COLLECTIVE


def half_and_half(path: Path) -> Profile:
    """The profile with equal forward and backward, and gradients as large as activations."""
    profile = pruned_if_pipedream(Profile.load(path))
    operators = tuple(
        replace(
            operator,
            forward_s=(operator.forward_s + operator.backward_s) / 2,
            backward_s=(operator.forward_s + operator.backward_s) / 2,
            gradient_bytes=operator.output_bytes,
        )
        for operator in profile.operators
    )
    return replace(profile, operators=operators)


def cluster_of(machines: Sequence[int]) -> Cluster:
    """Devices and links of DAPPLE's evaluation; sums over machines as fast as its collectives."""
    nodes = tuple(Node(f"n{i}", count, count, Device("gpu")) for i, count in enumerate(machines))
    ranks = sum(machines)
    sums = tuple(
        (count, size, 2 * size * (count - 1) / count / COLLECTIVE)
        for count in range(2, ranks + 1)
        for size in (0, 10**9)
        if count > machines[0]
    )
    within, between = Link(0.0, WITHIN), Link(0.0, POINT_TO_POINT)
    return Cluster("dapple", "published", nodes, within, between, allreduce=sums)


def plans_of(profile: Profile, entry: dict[str, Any], cluster: Cluster) -> Iterator[Plan]:
    """A listed plan with both warm-up policies; its replicas split micro-batches."""
    states = antichain_states(profile)
    cuts = (0, *(state + 1 for state, _ in entry["plan"]))
    size = entry["profile_micro_batch"] * entry["micro_batch_multiple"]
    count = entry["global_batch"] // size
    request = PlanRequest("listed", entry["global_batch"], replicas=None)
    problem, ranks = (
        Problem(profile, cluster, request),
        consecutive([n for _, n in entry["plan"]]),
    )
    for warm_up in (policy_a(len(ranks), count), policy_b(len(ranks), count)):
        layout = Layout(states.partition(cuts), ranks)
        choice = Choice(layout, size, "1f1b", warm_up, Replication.SPLIT)
        yield plan_of(problem, choice)
