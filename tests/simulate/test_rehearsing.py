import dataclasses

import pytest

from pipectl.errors import ScheduleError
from pipectl.link import Link
from pipectl.plan import StageCost
from pipectl.rehearsal import Rehearsal
from pipectl.schedule import Kind
from pipectl.simulate import simulate
from pipectl.simulate.rehearsing import as_rehearsed, rehearsal_of
from tests.planner.gate.checked_plans import cluster_of


def cluster(cores):
    links = {"within": Link(0.0, 1e9, duplex=False), "between": Link(0.0, 1e6)}
    return cluster_of(4, cores=cores, speeds=(2.0,), **links)


def cost(scale):
    return StageCost(scale, 2 * scale, scale / 2, 8, 0, 8)


def plan_of(pipeline, scale=1.0, size_bytes=1000):
    return pipeline(4, 8, costs=[cost(scale)] * 4, size_bytes=size_bytes)


def test_waits_are_what_the_simulator_counts_without_shared_cores_and_links(pipeline):
    plan, seen = plan_of(pipeline), as_rehearsed(cluster(1))
    found = rehearsal_of(plan, cluster(1), 1.0)
    assert found.work_s["FORWARD"] == (1.0,) * 4
    assert found.work_s["BACKWARD"] == (2.0,) * 4
    assert (found.update_s, found.speed) == ((0.5,) * 4, (2.0,) * 4)
    assert found.messages[0].hold_s == pytest.approx(1e-6)
    assert seen.nodes[0].cores == 4
    assert seen.within_node.duplex
    assert not seen.between_nodes.shared
    assert found.predicted_s == simulate(plan, seen).step_time_s
    assert found.predicted_s < simulate(plan, cluster(1)).step_time_s


def test_short_computations_are_stretched_and_ranks_that_share_cores_send_less(pipeline):
    short, large = plan_of(pipeline, 0.001), plan_of(pipeline, size_bytes=2**34)
    assert rehearsal_of(plan_of(pipeline), cluster(4), 1.0).stretch == 1.0
    found, crowded = (rehearsal_of(short, cluster(4), each) for each in (1.0, 64.0))
    average_s = (8 * 3 * 0.001) / (8 * 2) / 2
    assert 0.020 <= found.stretch * average_s < 0.024
    assert crowded.stretch * average_s >= 10 * crowded.pause_s
    assert crowded.pause_s > found.pause_s
    alone, crowded = (rehearsal_of(large, cluster(4), each) for each in (1.0, 32.0))
    assert alone.message_share == 2**30 / 2**34  # no message above 1 GiB
    bytes_per_s = 48 * 2**34 * crowded.message_share / (crowded.predicted_s * crowded.stretch)
    assert bytes_per_s == pytest.approx(256 * 2**20 * 4 / 32, rel=0.01)


def test_a_rehearsal_survives_its_file(pipeline, tmp_path):
    plan = plan_of(pipeline)
    changes = [{"offload": True}, {"ranks": (1, 3)}, {}, {}]
    stages = (dataclasses.replace(s, **c) for s, c in zip(plan.stages, changes, strict=True))
    plan = dataclasses.replace(plan, stages=tuple(stages))
    found = rehearsal_of(plan, cluster(4), 8.0)
    kinds = {(item.rank, item.kind, item.stage): item.ranks for item in found.meetings}
    assert kinds == {
        (0, "OFFLOAD", 0): (0,),
        (0, "FETCH", 0): (0,),
        (1, "REDUCE", 1): (1, 3),
        (3, "REDUCE", 1): (1, 3),
    }
    assert set(found.work_s) == {kind.name for kind in Kind if kind.is_compute}
    found.save(tmp_path / "rehearsal.json")
    assert Rehearsal.load(tmp_path / "rehearsal.json") == found


def test_steps_that_overlap_are_not_rehearsed(pipeline):
    with pytest.raises(ScheduleError, match="schedule pipedream cannot be rehearsed"):
        rehearsal_of(pipeline(2, 1, schedule="pipedream"), None, 1.0)
