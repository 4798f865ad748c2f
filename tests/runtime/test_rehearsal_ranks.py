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

NODE = Node("n", 3, 3, Device("cpu", host_link=Link(1e-3, 1e9)))
CLUSTER = Cluster("c", "test", (NODE, NODE), Link(1e-4, 1e9), Link(2e-3, 1e8))
COST = StageCost(0.02, 0.04, 0.004, 1000, 0, 4_000_000, input_bytes=1000)


@pytest.mark.mpi
@pytest.mark.parametrize("replication", Replication)
def test_rows_of_every_kind_take_what_the_simulator_says(pipeline, launch, tmp_path, replication):
    plan: Plan = pipeline(
        4,
        6,
        costs=[COST] * 4,
        node_of_rank=[0, 0, 0, 1, 1, 1],
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
    plan = dataclasses.replace(plan, stages=stages, replication=replication)
    kinds = {Kind(row[0]) for rank in range(6) for row in lower(plan, rank).rows}
    assert {Kind.OFFLOAD_START, Kind.FETCH_WAIT, Kind.REDUCE_START, Kind.RECOMPUTE} <= kinds
    crowd = plan.ranks / len(os.sched_getaffinity(0))
    waits = dataclasses.replace(rehearsal_of(plan, CLUSTER, crowd), steps=1)
    for _ in range(2):
        run = RunDirectory.create(tmp_path, "rehearsal", 0.0)
        plan.save(run.plan)
        waits.save(run.rehearsal)
        assert Rehearsal.load(run.rehearsal) == waits
        done = launch(plan.ranks, "-m", "pipectl.runtime.rehearsal", "--run", run.path)
        assert done.returncode == 0, done.stderr
        (line,) = read_metrics(run)
        timeline = Timeline.load(run.measured_of(1))
        assert (timeline.ranks, timeline.step) == (6, 1)
        assert line.step_time_s == pytest.approx(timeline.end_s, rel=1e-3)
        if line.step_time_s == pytest.approx(waits.predicted_s, rel=0.05):
            return
    assert line.late_s * waits.stretch >= waits.late_s
    pytest.skip("the rehearsal says that this machine is too busy for it")


def test_its_worker_loads_neither_torch_nor_a_compiler(launch):
    code = (
        "import sys; import pipectl.runtime.rehearsal; "
        "print([name for name in ('torch', 'llvmlite', 'pydantic') if name in sys.modules])"
    )
    done = launch(0, "-c", code, fresh=True)
    assert (done.returncode, done.stdout) == (0, "[]\n")
