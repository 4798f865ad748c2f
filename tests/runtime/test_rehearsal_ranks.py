"""Rehearsals over a real MPI, with more ranks than cores."""

import dataclasses
import os

import pytest

from pipectl.cluster import Cluster, Device, Node
from pipectl.link import Link
from pipectl.plan import Plan, Replication, StageCost
from pipectl.rehearsal import Rehearsal
from pipectl.runs import RunDirectory, read_metrics
from pipectl.schedule import Kind, lower
from pipectl.simulate.rehearsing import rehearsal_of
from pipectl.timeline import Timeline

WORKER = ["-m", "pipectl.runtime.rehearsal", "--run"]
HERE = Link(1e-4, 1e9)
SLOW = Link(2e-3, 1e8)


def cluster_of(*ranks):
    device = Device("cpu", host_link=Link(1e-3, 1e9))
    nodes = tuple(Node(f"n{index}", count, count, device) for index, count in enumerate(ranks))
    return Cluster("c", "test", nodes, HERE, SLOW)


def cost(forward_s, update_s=0.004):
    return StageCost(forward_s, 2 * forward_s, update_s, 1000, 0, 4_000_000, input_bytes=1000)


@pytest.fixture
def rehearse(tmp_path, launch):
    """A rehearsal of a plan: what was waited for, what it says of the step, and the timeline."""

    def start(plan, cluster):
        for _ in range(2):
            waits, line, timeline = once(plan, cluster)
            close = line.step_time_s == pytest.approx(waits.predicted_s, rel=0.05)
            if close or line.late_s * waits.stretch < waits.late_s:
                return waits, line, timeline
        pytest.skip("the rehearsal says that this machine is too busy for it")

    def once(plan, cluster):
        run = RunDirectory.create(tmp_path, "rehearsal", 0.0)
        plan.save(run.plan)
        crowd = plan.ranks / len(os.sched_getaffinity(0))
        waits = dataclasses.replace(rehearsal_of(plan, cluster, crowd), steps=1)
        waits.save(run.rehearsal)
        assert Rehearsal.load(run.rehearsal) == waits
        done = launch(plan.ranks, *WORKER, run.path)
        assert done.returncode == 0, done.stderr
        timeline = Timeline.load(run.measured_of(1))
        assert timeline.step == 1
        (line,) = read_metrics(run)
        return waits, line, timeline

    return start


@pytest.mark.mpi
def test_16_ranks_take_what_the_simulator_says(pipeline, rehearse):
    plan: Plan = pipeline(
        16,
        8,
        costs=[cost(0.05 + 0.0004 * index) for index in range(16)],
        node_of_rank=[rank // 4 for rank in range(16)],
        size_bytes=1_000_000,
    )
    waits, line, timeline = rehearse(plan, cluster_of(*[4] * 4))
    assert line.step_time_s == pytest.approx(waits.predicted_s, rel=0.05)
    assert timeline.ranks == 16
    assert line.step_time_s == pytest.approx(timeline.end_s, rel=1e-3)


@pytest.mark.mpi
def test_every_kind_of_row_is_rehearsed(pipeline, rehearse):
    plan: Plan = pipeline(
        4,
        6,
        ranks=[0, 1, 2, 3],
        costs=[cost(0.02)] * 4,
        node_of_rank=[0] * 6,
        size_bytes=100_000,
        skips=[(0, (1, 2), True)],
        micro_batch_size=4,
        batch_size=23,
    )
    first, second, third, last = plan.stages
    stages = (
        dataclasses.replace(first, offload=True),
        dataclasses.replace(second, ranks=(1, 4), recompute=True),
        dataclasses.replace(third, ranks=(2,), backward_ranks=(5,)),
        last,
    )
    for replication in Replication:
        asked = dataclasses.replace(plan, stages=stages, replication=replication)
        kinds = {Kind(row[0]) for rank in range(6) for row in lower(asked, rank).rows}
        assert {Kind.OFFLOAD_START, Kind.FETCH_WAIT, Kind.REDUCE_START, Kind.RECOMPUTE} <= kinds
        waits, line, _ = rehearse(asked, cluster_of(6))
        assert line.step_time_s == pytest.approx(waits.predicted_s, rel=0.05)


def test_its_worker_loads_neither_torch_nor_a_compiler(launch):
    code = (
        "import sys; import pipectl.runtime.rehearsal; "
        "print([name for name in ('torch', 'llvmlite', 'pydantic') if name in sys.modules])"
    )
    done = launch(0, "-c", code, fresh=True)
    assert (done.returncode, done.stdout) == (0, "[]\n")
