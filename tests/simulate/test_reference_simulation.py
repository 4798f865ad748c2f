"""The simulator against a second, straightforward one.

Figures are random, so that hardly two things happen at once.
"""

import random
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipectl.cluster import Cluster, Device, Node
from pipectl.link import Link, RowTimes
from pipectl.plan import StageCost
from pipectl.schedule import lower
from pipectl.simulate import network, simulate, simulation
from tests.schedule.random_plans import RANKS, plans
from tests.simulate.reference_simulation import Reference

pytestmark = pytest.mark.slow


def random_link(draw, *, between=False):
    timings = ((1, 0.1), (30, draw.uniform(0.2, 0.6)), (90, draw.uniform(0.7, 2)))
    return Link(
        draw.uniform(0, 0.1),
        draw.uniform(20, 200),
        duplex=draw.random() < 0.5,
        shared=draw.random() < 0.7,
        interface=between and draw.random() < 0.4,
        timings=timings if draw.random() < 0.3 else (),
    )


def random_rows(draw):
    """What rows take; the longer, the larger a message."""
    tables = [((1, draw.uniform(0, 0.1)), (200, draw.uniform(0.1, 0.3))) for _ in range(4)]
    return RowTimes(*tables, *(draw.uniform(0, 0.2) for _ in range(4)))


def random_cluster(draw, sizes):
    """Nodes of the given numbers of ranks, at up to two switches."""
    nodes = tuple(
        Node(
            f"n{index}",
            size,
            draw.randint(1, size),
            Device(
                "cpu",
                draw.uniform(0.5, 2),
                host_link=draw.choice([None, *(random_link(draw) for _ in range(4))]),
                rows=draw.choice([None, random_rows(draw)]),
            ),
            switch=draw.choice(["a", "b"]),
        )
        for index, size in enumerate(sizes)
    )
    links = [random_link(draw), random_link(draw, between=True)]
    switches = draw.choice([None, random_link(draw, between=True)])
    return Cluster("c", "test", nodes, *links, between_switches=switches)


def random_figures(draw, stage):
    byte_counts = [draw.randint(1, 300) for _ in range(4)]
    cost = StageCost(
        draw.uniform(0.5, 2), draw.uniform(1, 4), draw.uniform(0, 1), *byte_counts,
        input_bytes=draw.randint(0, byte_counts[2]), weight_s=draw.choice([None, 0.3]),
    )  # fmt: skip
    segments = stage.segments
    if segments:
        segments = replace(
            segments, backward_s=draw.uniform(2.1, 4), kept_bytes=draw.randint(0, 200)
        )
    return replace(stage, cost=cost, segments=segments)


def random_case(plan, draw):
    """The plan with other figures, on some nodes, and these."""
    sizes = []
    while sum(sizes) < RANKS:
        sizes.append(draw.randint(1, min(3, RANKS - sum(sizes))))
    plan = replace(
        plan,
        stages=tuple(random_figures(draw, stage) for stage in plan.stages),
        transfers=tuple(replace(item, size_bytes=draw.randint(0, 100)) for item in plan.transfers),
        node_of_rank=tuple(node for node, size in enumerate(sizes) for _ in range(size)),
    )
    return plan, random_cluster(draw, sizes)


@pytest.fixture(scope="module", autouse=True)
def small_buckets():
    """The sums of gradients move in several pieces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "BUCKET_BYTES", 60)
        patch.setattr(network, "MAX_PIECES", 3)
        network._exchange.cache_clear()
        yield
    network._exchange.cache_clear()


@settings(max_examples=100, deadline=None)
@given(drawn=plans(), seed=st.integers(0, 10**6))
def test_both_simulators_agree(drawn, seed):
    """Also if Python has its turn after every event."""
    plan, cluster = random_case(drawn, random.Random(seed))
    programs = [lower(plan, rank) for rank in range(plan.ranks)]
    reference = Reference(plan, cluster, programs)
    expected_s = reference.run()
    found = simulate(plan, cluster)
    times = [found.step_time_s, *found.utilisation]
    expected = [expected_s, *(busy / expected_s for busy in reference.busy)]
    agree = times == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assume(agree or not reference.tied)
    assert agree, (times, expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulation, "EVENTS_AT_ONCE", 1)
        assert simulate(plan, cluster, programs) == found
