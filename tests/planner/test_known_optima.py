"""Proven optima of published profiles, where a directory of them is at hand.

``PIPECTL_WORKLOADS`` names it. Each file lists the best known bottlenecks; those for accelerators
alone are what the planner's own dynamic programme minimises: compute, and every value that crosses
a stage's border once.
"""

import heapq
import json
import os
from pathlib import Path

import pytest

from pipectl.link import Link
from pipectl.planner.condense import bits, condense
from pipectl.planner.loads import Costs
from pipectl.planner.mix import Mix
from pipectl.planner.partition import Partitioner, Space
from pipectl.profile import Operator, Profile

DIRECTORY = os.environ.get("PIPECTL_WORKLOADS")
NAMES = [
    "layer-bert24_inference",
    "layer-resnet50_inference",
    "operator-bert_l-3_inference",
]

pytestmark = pytest.mark.skipif(
    DIRECTORY is None, reason="PIPECTL_WORKLOADS names no directory of published profiles"
)


def load(name):
    return json.loads((Path(DIRECTORY) / f"dnnpart-throughput-{name}.json").read_text())


def profile_of(document):
    nodes = {node["id"]: node for node in document["nodes"]}
    operators = [
        Operator(
            id=node,
            name=node,
            forward_s=nodes[node]["forward_s"],
            backward_s=nodes[node]["backward_s"],
            parameter_bytes=0,
            output_bytes=int(nodes[node]["output_bytes"]),
            gradient_bytes=0,
            group=str(nodes[node]["colocate"]) if "colocate" in nodes[node] else None,
        )
        for node in topological(list(nodes), document["edges"])
    ]
    edges = tuple((source, target) for source, target in document["edges"])
    return Profile("workload", "test", 1, tuple(operators), edges)


def topological(nodes, edges):
    place = {node: index for index, node in enumerate(nodes)}
    after = {node: [v for u, v in edges if u == node] for node in nodes}
    missing = {node: sum(v == node for _, v in edges) for node in nodes}
    ready = [place[node] for node in nodes if not missing[node]]
    order = []
    while ready:
        node = nodes[heapq.heappop(ready)]
        order.append(node)
        for target in after[node]:
            missing[target] -= 1
            if not missing[target]:
                heapq.heappush(ready, place[target])
    return order


def bottleneck(graph, times, partition, bandwidth):
    loads = []
    for stage in partition:
        crossing = [v.size_bytes for v in graph.values if v.blocks & stage and v.blocks & ~stage]
        loads.append(sum(times[b] for b in bits(stage)) + sum(crossing) / bandwidth)
    return max(loads)


@pytest.mark.parametrize("name", NAMES)
def test_proven_optimum_is_found(name) -> None:
    document = load(name)
    profile = profile_of(document)
    graph = condense(profile)
    space = Space.of(graph, profile)
    assert space.complete
    times = [sum(profile.operators[i].forward_s for i in b.operators) for b in graph.blocks]
    for entry in document["best_known"]:
        if not entry.get("proven_optimal") or entry.get("cpus") != 0:
            continue
        link_bytes_per_s = document["cluster"]["transfer_bytes_per_s_effective"]
        bandwidth = link_bytes_per_s / entry.get("comm_scale", 1)
        most = entry["devices"]
        costs = Costs(times, times, times, times, 1.0, Link(0.0, bandwidth), [1.0])
        search = Partitioner(space, costs, Mix.free([most], most), fewest=2, most=most)
        found = min(
            bottleneck(graph, times, cut.partition, bandwidth)
            for stages in range(1, most + 1)
            for cut in search.partitions(stages)
        )
        assert found == pytest.approx(entry["value"], rel=1e-6), entry["devices"]
