"""Peaks of memory against figures worked out by hand; for a ledger see test_random_plans.py."""

from dataclasses import replace

import pytest

from pipectl.cluster import assumed_cluster
from pipectl.plan import Prediction, StageCost, StagePeaks
from pipectl.simulate import simulate
from pipectl.simulate.memory import copy_bytes, room_bytes

COST = StageCost(1.0, 2.0, 0.0, parameter_bytes=100, optimizer_bytes=50, saved_bytes=10)
RESIDENT, GRADIENTS, PROCESS = 100 + 50, 100, 1000


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({"peaks": StagePeaks(300, 40, 120, 60)}, GRADIENTS + 300),
        ({"peaks": StagePeaks(30, 400, 120, 60)}, GRADIENTS + 10 + 400),
        ({"peaks": StagePeaks(30, 40, 700, 60)}, 10 + 700),
        ({"peaks": StagePeaks(30, 40, 120, 600)}, GRADIENTS + 600),
        ({"gradient_bytes": 0, "buffer_bytes": 5}, 5 + 10),
    ],
)
def test_what_an_action_allocates_for_itself_counts_while_it_runs(pipeline, changes, most):
    """Frozen parameters have no gradient, and buffers stay."""
    plan = pipeline(1, 2, costs=[replace(COST, **changes)], warm_up=[1])
    cluster = assumed_cluster("c", [1], 1, None)
    found = simulate(plan, cluster, process_baseline_bytes=PROCESS)
    assert found.prediction.peak_memory_bytes == (PROCESS + RESIDENT + most,)


@pytest.mark.parametrize(
    ("limit", "room", "copies"), [(64, 49, 40), (16, 1, 0), (10, 0, 0), (None, None, 40)]
)
def test_a_checkpoint_is_copied_if_a_rank_has_room_for_all_of_it(pipeline, limit, room, copies):
    plan = replace(
        pipeline(1, 4, costs=[replace(COST, parameter_bytes=40, optimizer_bytes=0)]),
        prediction=Prediction(1.0, 0.0, (1.0,), (15,)),
    )
    assert room_bytes(plan, 0, limit) == room
    assert copy_bytes(plan, 0, limit) == copies
