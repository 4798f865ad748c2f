"""Proposed cuts and replicas against all there are, and on many ranks."""

from itertools import accumulate, pairwise, product
from operator import or_

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipectl.cluster import Cluster, Device, Node
from pipectl.link import Link
from pipectl.planner.graph.blocks import condense
from pipectl.planner.replication import replica_counts
from pipectl.planner.replication.proposals import PRECISION
from pipectl.simulate.reduction import reduction_s

SIZE, MICRO_BATCHES, OWN_SIZE = 3, 4, 8
RATE = 1e5


def cluster(nodes, ranks, memory_bytes=None, speed=1.0):
    device = Device("cpu", speed, memory_bytes)
    link = Link(0.0, RATE, shared=True)
    members = tuple(Node(f"n{i}", ranks, ranks, device) for i in range(nodes))
    return Cluster("test", "test", members, Link(0.0, 10 * RATE), link)


def load(profile, stage, borders, replicas, nodes, ranks):
    """By definition: times scale with samples, nodes share a link, sums are on the first ranks."""
    part = -(-SIZE // replicas) / OWN_SIZE
    inside = [operator for operator in profile.operators if operator.id in stage]
    rate, beside = (RATE, min(ranks, replicas)) if nodes > 1 else (10 * RATE, 1)
    summed = sum(o.parameter_bytes for o in inside)
    machines = cluster(nodes, ranks)
    reduced_s = reduction_s(machines, machines.node_of_rank, range(replicas), summed)
    compute = sum(o.forward_s + o.backward_s for o in inside) * part
    moved = max(crossing(profile, border) for border in borders)
    moved_s = moved * SIZE / OWN_SIZE * beside / replicas / rate
    return max(compute + reduced_s / MICRO_BATCHES, moved_s)


def crossing(profile, done):
    """Bytes of the longer direction over a cut behind the operators that are done."""
    sent = {a for a, b in profile.edges if a in done and b not in done}
    values = [operator for operator in profile.operators if operator.id in sent]
    return max(sum(o.output_bytes for o in values), sum(o.gradient_bytes for o in values))


def memory(profile, stage, behind, replicas):
    inside = [operator for operator in profile.operators if operator.id in stage]
    saved = sum(size for o in inside for _, size in o.saved) * SIZE / OWN_SIZE
    held = min(behind + 1, MICRO_BATCHES)
    return sum(o.parameter_bytes for o in inside) * 4 + saved * held / replicas


def least_load(profile, partitions, limit, nodes, ranks):
    """Of all cuts and replicas; None if none fits."""
    graph = condense(profile)
    found = []
    for partition in partitions:
        done = [0, *accumulate(partition, or_)]
        names = [{profile.operators[i].id for i in graph.operators_of(d)} for d in done]
        stages = [after - before for before, after in pairwise(names)]
        for replicas in product(range(1, SIZE + 1), repeat=len(stages)):
            behind = range(len(stages) - 1, -1, -1)
            needs = [memory(profile, *x) for x in zip(stages, behind, replicas, strict=True)]
            if sum(replicas) <= nodes * ranks and max(needs) <= limit:
                loads = zip(stages, pairwise(names), replicas, strict=True)
                found.append(max(load(profile, *item, nodes, ranks) for item in loads))
    return min(found, default=None)


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    limit=st.sampled_from([600.0, 1500.0, 1e9]),
    layout=st.sampled_from([(1, 4), (2, 2), (3, 1)]),
)
def test_no_other_cuts_and_replicas_load_less(profiles, partitions_of, data, limit, layout) -> None:
    profile = data.draw(profiles(most=4))
    baseline = profile.process_baseline_bytes
    proposals = replica_counts(
        profile, cluster(*layout), SIZE, MICRO_BATCHES, limit_bytes=limit + baseline
    )
    by_stages = {len(proposal.stages): proposal for proposal in proposals}
    for stages in range(1, min(len(profile.operators), layout[0] * layout[1]) + 1):
        partitions = partitions_of(condense(profile), stages)
        least = least_load(profile, partitions, limit, *layout)
        assert (least is None) == (stages not in by_stages)
        if least is not None:
            proposal = by_stages[stages]
            assert proposal.lower_s <= least * (1 + 1e-12)
            assert least * (1 - 1e-12) <= proposal.load_s
            assert proposal.load_s <= least * (1 + 2 * PRECISION) + 1e-15
            assert sum(proposal.replicas) <= layout[0] * layout[1]


def test_slower_devices_take_longer(chain) -> None:
    profile = chain(4, parameter_bytes=0, parameters=())
    one, half = (
        replica_counts(profile, cluster(1, 4, speed=speed), 8, 8)[0] for speed in (1.0, 0.5)
    )
    assert one.replicas == half.replicas == (4,)
    assert half.load_s == pytest.approx(2 * one.load_s)


def test_devices_with_little_memory_take_more_stages(chain) -> None:
    profile = chain(4)
    whole, split = (
        replica_counts(profile, cluster(1, 4, memory_bytes=limit), 1, 1) for limit in (None, 7000)
    )
    assert len(whole[0].stages) == 1
    assert len(split[0].stages) == 2


def test_thousands_of_ranks(chain) -> None:
    profile = chain(200, output_bytes=10, gradient_bytes=10)
    proposals = replica_counts(profile, cluster(512, 8), 512, 64)
    assert [len(proposal.stages) for proposal in proposals] == list(range(1, 65))
    best = min(proposal.load_s for proposal in proposals)
    even_s = 200 * 3e-3 * 512 / 8 / 4096
    assert even_s <= best <= 1.3 * even_s
    ids = [node for stage in proposals[-1].stages for node in stage]
    assert ids == [operator.id for operator in profile.operators]


def test_a_search_can_be_stopped(chain) -> None:
    stopped = replica_counts(chain(6), cluster(1, 4), 4, 4, expired=lambda: True)
    whole = replica_counts(chain(6), cluster(1, 4), 4, 4)
    assert [len(proposal.stages) for proposal in stopped] == [1, 2, 3, 4]
    for early, late in zip(stopped, whole, strict=True):
        assert early.lower_s <= late.load_s <= early.load_s
