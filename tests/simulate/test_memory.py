"""Peaks of memory against figures worked out by hand; for a ledger see test_random_plans.py."""

from dataclasses import replace

import pytest

from pipectl.cluster import assumed_cluster
from pipectl.plan import Prediction, StageCost, StagePeaks
from pipectl.simulate import simulate
from pipectl.simulate.memory import copy_bytes, room_bytes

COST = StageCost(1.0, 2.0, 0.0, parameter_bytes=100, optimizer_bytes=50, saved_bytes=10)
RESIDENT, GRADIENTS = 100 + 50, 100


def peaks_of(plan, process_baseline_bytes=0):
    """The most each rank holds, without what is there from step to step."""
    cluster = assumed_cluster("c", [plan.ranks], plan.ranks, None)
    found = simulate(plan, cluster, process_baseline_bytes=process_baseline_bytes)
    return [peak - RESIDENT for peak in found.peak_memory_bytes]


def test_a_rank_holds_messages_and_saved_values_besides_gradients(pipeline):
    plan = pipeline(2, 2, costs=[COST] * 2, size_bytes=3)
    received, saved, gradient = 3, 10, 3
    kept = 2 * saved  # what is sent is part of it; two receives are posted
    assert peaks_of(plan) == [
        GRADIENTS + kept + 2 * gradient,
        GRADIENTS + received + saved + gradient,
    ]
    assert peaks_of(plan, 1000)[1] == 1000 + 116


@pytest.mark.parametrize(
    ("peaks", "most"),
    [
        (StagePeaks(300, 40, 120, 60), GRADIENTS + 300),
        (StagePeaks(30, 400, 120, 60), GRADIENTS + 10 + 400),
        (StagePeaks(30, 40, 700, 60), 10 + 700),
        (StagePeaks(30, 40, 120, 600), GRADIENTS + 600),
    ],
)
def test_what_an_action_allocates_for_itself_counts_while_it_runs(pipeline, peaks, most):
    assert peaks_of(pipeline(1, 2, costs=[replace(COST, peaks=peaks)], warm_up=[1])) == [most]


def test_frozen_parameters_have_no_gradient_and_buffers_stay(pipeline):
    cost = replace(COST, gradient_bytes=0, buffer_bytes=5)
    assert peaks_of(pipeline(1, 1, costs=[cost])) == [5 + 10]


def test_a_rank_without_stages_holds_only_its_process(pipeline):
    assert peaks_of(pipeline(1, 2, node_of_rank=[0, 0]), 7)[1] == 7 - RESIDENT


# The copy of a checkpoint while it is written


@pytest.mark.parametrize(
    ("limit", "room", "copies"), [(64, 49, 40), (16, 1, 0), (10, 0, 0), (None, None, 40)]
)
def test_a_copy_is_made_if_a_rank_has_room_for_all_of_it(pipeline, limit, room, copies):
    plan = replace(
        pipeline(1, 4, costs=[replace(COST, parameter_bytes=40, optimizer_bytes=0)]),
        prediction=Prediction(1.0, 0.0, (1.0,), (15,)),
    )
    assert room_bytes(plan, 0, limit) == room
    assert copy_bytes(plan, 0, limit) == copies
