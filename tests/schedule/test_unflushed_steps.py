"""Steps that overlap: the steady one repeats, versions of weights are right, memory holds them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_plans import apart, overlapping_plans
from validator import validate

from pipectl.cluster import assumed_cluster
from pipectl.plan import StageCost, StagePeaks
from pipectl.schedule import Kind, lower, lower_stretch
from pipectl.schedule.lowering import stretch
from pipectl.schedule.unflushed import steps_apart, versions_kept
from pipectl.simulate import simulate
from pipectl.simulate.memory import stage_peaks_in_flight


@settings(max_examples=100)
@given(plan=overlapping_plans(), more=st.integers(-3, 4))
def test_a_stretch_repeats_its_steady_step_and_is_proven(plan, more):
    steps = steps_apart(plan) + more
    whole = [lower_stretch(plan, rank, steps) for rank in range(plan.ranks)]
    for rank, rows in enumerate(whole):
        parts = [part.shifted(later).rows for part, later in stretch(plan, rank, steps)]
        assert len(parts) == max(1, more + 2 if more > 1 else 1)
        assert np.array_equal(np.concatenate(parts), rows.rows)
    validate(plan, whole)
    validate(plan, [lower(plan, rank) for rank in range(plan.ranks)])
    assert stage_peaks_in_flight(plan) == plan.warm_up


COST = StageCost(1.0, 2.0, 0.1, 1000, 5000, 10, gradient_bytes=900)


def peaks_of(plan):
    cluster = assumed_cluster("c", [plan.ranks], plan.ranks, None)
    return simulate(plan, cluster).peak_memory_bytes


@pytest.mark.parametrize(
    ("schedule", "micro_batches", "figures", "peaks"),
    [
        ("pipedream", 1, [{}] * 4, [5900 + versions * 1010 for versions in (4, 3, 2, 1)]),
        ("pipedream-2bw", 4, [{}] * 4, [7940, 7930, 7920, 7910]),
        # A rank whose steps do not wait needs the second version for its update alone.
        ("pipedream-2bw", 2, [{}], [7910]),
        ("pipedream", 1, [{"peaks": StagePeaks(0, 0, 0, update_bytes=7000)}], [6900 + 7000]),
    ],
)
def test_memory_holds_the_versions_that_the_papers_say(
    pipeline, schedule, micro_batches, figures, peaks
):
    costs = [replace(COST, **each) for each in figures]
    plan = pipeline(len(costs), micro_batches, schedule=schedule, costs=costs)
    assert peaks_of(plan) == tuple(peaks)


def test_a_backwards_rank_holds_the_versions_of_all_steps_in_flight(pipeline):
    """The forward's holds one, and room for the next."""
    plan = apart(pipeline(2, 1, schedule="pipedream", costs=[COST] * 2), (True, True))
    peaks = peaks_of(plan)
    assert plan.warm_up == (5, 3)
    assert peaks[0::2] == (2 * 1000 + 2 * 10,) * 2
    assert peaks[1::2] == tuple(5000 + w * 1000 + 900 + w * 10 for w in plan.warm_up)


@pytest.mark.parametrize("alone", [(False, False, False), (True, False, True)])
@pytest.mark.parametrize(("schedule", "micro_batches"), [("pipedream", 1), ("pipedream-2bw", 4)])
def test_as_many_versions_are_kept_as_are_asked_for(pipeline, schedule, micro_batches, alone):
    plan = apart(pipeline(3, micro_batches, schedule=schedule), alone)
    for index, stage in enumerate(plan.stages):
        rows = lower_stretch(plan, stage.updating_ranks[0], 12)
        begins = Kind.BACKWARD if alone[index] else Kind.FORWARD
        ages = rows.column("weight_version")[rows.column("kind") == begins]
        assert versions_kept(plan, index) == 1 + ages.max()
