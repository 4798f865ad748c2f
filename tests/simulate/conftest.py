"""Random plans and clusters; random figures, so that hardly two things happen at once."""

import dataclasses
import random
from functools import partial

import pytest

from pipectl.cluster import Cluster, Device, Node
from pipectl.link import Link, RowTimes
from pipectl.plan import Blocks, Plan, Replication, Stage, StageCost, StagePeaks


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
                host_link=draw.choice([None, random_link(draw)]),
                rows=draw.choice([None, random_rows(draw)]),
            ),
            switch=draw.choice(["a", "b"]),
        )
        for index, size in enumerate(sizes)
    )
    links = [random_link(draw), random_link(draw, between=True)]
    switches = draw.choice([None, random_link(draw, between=True)])
    return Cluster("c", "test", nodes, *links, between_switches=switches)


def random_cost(draw):
    byte_counts = [draw.randint(1, 300) for _ in range(3)]
    return StageCost(
        draw.uniform(0.5, 2), draw.uniform(1, 4), draw.uniform(0, 1), *byte_counts,
        input_bytes=draw.randint(0, byte_counts[2]),
        weight_s=draw.choice([None, 0.3]), deferred_bytes=draw.choice([None, draw.randint(1, 300)]),
    )  # fmt: skip


def random_stages(draw, plan, ranks):
    """Replicas, backwards elsewhere, recomputation and offload; all stages once round the ranks."""
    stages = []
    for stage in plan.stages:
        chosen = draw.sample(range(ranks), draw.randint(1, min(3, ranks)))
        apart = draw.random() < 0.2
        stages.append(
            Stage(
                stage.nodes,
                tuple(chosen),
                stage.cost,
                backward_ranks=tuple(draw.sample(range(ranks), len(chosen))) if apart else (),
                recompute=draw.random() < 0.3,
                offload=not apart and draw.random() < 0.4,
            )
        )
    return tuple(map(partial(in_blocks, draw), stages))


def in_blocks(draw, stage):
    """With blocks, sometimes, if it recomputes with its backward on its own ranks."""
    if not stage.recompute or stage.backward_ranks or draw.random() < 0.5:
        return stage
    peaks = StagePeaks(*(draw.randint(0, 900) for _ in range(4))) if draw.random() < 0.5 else None
    blocks = Blocks(
        *(("m",), 1.1, 0.4, draw.uniform(2.1, 4)),
        *(draw.randint(0, 200), draw.randint(0, 100), peaks, draw.randint(0, 300)),
    )
    return dataclasses.replace(stage, blocks=blocks)


def disjoint(draw, stages, ranks):
    """The same stages without ranks in common, as far as the ranks go; every rank is used once."""
    left = draw.sample(range(ranks), ranks)
    found = []
    for place, stage in enumerate(stages):
        most = len(left) - (len(stages) - 1 - place)
        count = draw.randint(1, min(3, most))
        found.append(dataclasses.replace(stage, ranks=tuple(left[:count]), backward_ranks=()))
        left = left[count:]
    return tuple(found)


@pytest.fixture(scope="session")
def random_case(pipeline):
    """A function from a seed to a plan and a cluster; a third has one rank a stage only."""

    def make(seed):
        draw = random.Random(seed)
        sizes = [draw.randint(1, 3) for _ in range(draw.randint(1, 4))]
        ranks, stages = sum(sizes), draw.randint(1, 7)
        depth = sorted((draw.randint(1, 6) for _ in range(stages)), reverse=True)
        skips = [(0, (1, 2), True)] if stages > 2 and draw.random() < 0.5 else []
        micro_batches = draw.randint(1, 7)
        plan = pipeline(
            stages,
            micro_batches,
            schedule=draw.choice(["gpipe", "1f1b", "zb-h1"]),
            warm_up=depth,
            ranks=[draw.randrange(ranks) for _ in range(stages)],
            node_of_rank=[node for node, size in enumerate(sizes) for _ in range(size)],
            costs=[random_cost(draw) for _ in range(stages)],
            size_bytes=draw.randint(0, 100),
            skips=skips,
            micro_batch_size=4,
            batch_size=4 * micro_batches - draw.randint(0, 3),
        )
        return _extended(draw, plan, seed % 3), random_cluster(draw, sizes)

    return make


def _extended(draw: random.Random, plan: Plan, extent: int) -> Plan:
    if extent == 0:
        return plan
    stages = random_stages(draw, plan, plan.ranks)
    if extent == 1 and len(stages) <= plan.ranks:
        stages = disjoint(draw, stages, plan.ranks)
    return dataclasses.replace(plan, stages=stages, replication=draw.choice([*Replication]))
