"""Steps that overlap: the steady one repeats, its pace, versions of weights, and their memory."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipectl.link import Link
from pipectl.plan import StageCost, StagePeaks
from pipectl.schedule import Kind, lower, lower_stretch
from pipectl.schedule.lowering import stretch
from pipectl.schedule.unflushed import steps_apart, versions_kept
from pipectl.simulate import simulate
from pipectl.simulate.memory import stage_peaks_in_flight
from tests.planner.gate.checked_plans import cluster_of
from tests.schedule.random_plans import apart, overlapping_plans
from tests.schedule.validator import validate

pytestmark = pytest.mark.slow

COST = StageCost(1.0, 2.0, 0.5, 1000, 5000, 10, gradient_bytes=900)
SLOW = replace(COST, forward_s=3.0)
ROUND = StageCost(0.1, 0.2, 0.1, 0, 0, 0)
UNEQUAL = [
    StageCost(forward_s, backward_s, 0.0, 100, 0, 20)
    for forward_s, backward_s in [(0.25, 0.5), (0.5, 1.5), (0.75, 1.25)]
]


def simulated(plan, latency_s=0.0, bandwidth_bytes_per_s=1e12):
    link = Link(latency_s, bandwidth_bytes_per_s)
    return simulate(plan, cluster_of(plan.ranks, within=link))


@settings(max_examples=40)
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


@pytest.mark.parametrize("alone", [(False, False, False), (True, False, True)])
@pytest.mark.parametrize(("schedule", "micro_batches"), [("pipedream", 1), ("pipedream-2bw", 4)])
def test_as_many_versions_are_kept_as_are_asked_for(pipeline, schedule, micro_batches, alone):
    plan = apart(pipeline(3, micro_batches, schedule=schedule), alone)
    for index, stage in enumerate(plan.stages):
        rows = lower_stretch(plan, stage.updating_ranks[0], 12)
        begins = Kind.BACKWARD if alone[index] else Kind.FORWARD
        ages = rows.column("weight_version")[rows.column("kind") == begins]
        assert versions_kept(plan, index) == 1 + ages.max()


@pytest.mark.parametrize(
    ("schedule", "micro_batches", "figures", "peaks"),
    [
        ("pipedream", 1, [{}] * 4, [5900 + versions * 1010 for versions in (4, 3, 2, 1)]),
        # Frozen parameters have one version.
        ("pipedream", 1, [{"trained_bytes": 600}] * 4, [6300 + n * 610 for n in (4, 3, 2, 1)]),
        # Every version has casts of its own.
        ("pipedream", 1, [{"cast_bytes": 500}] * 4, [5900 + n * 1510 for n in (4, 3, 2, 1)]),
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
    assert simulated(plan).peak_memory_bytes == tuple(peaks)


def test_a_backwards_rank_holds_the_versions_of_all_steps_in_flight(pipeline):
    """The forward's holds one, and room for the next."""
    plan = apart(pipeline(2, 1, schedule="pipedream", costs=[COST] * 2), (True, True))
    peaks = simulated(plan).peak_memory_bytes
    assert plan.warm_up == (5, 3)
    assert peaks[0::2] == (2 * 1000 + 2 * 10,) * 2
    assert peaks[1::2] == tuple(5000 + w * 1000 + 900 + w * 10 for w in plan.warm_up)


@pytest.mark.parametrize(
    ("schedule", "micro_batches", "costs", "latency_s", "step_s"),
    [
        *[("pipedream", 1, [COST] * stages, 0.0, 3.5) for stages in (1, 2, 4)],
        *[("pipedream-2bw", 4, [COST] * stages, 0.0, 12.5) for stages in (1, 2, 4)],
        ("pipedream", 1, [COST, SLOW, COST], 0.0, 5.5),
        ("pipedream-2bw", 2, [ROUND, ROUND], 0.0, 0.7),  # rounding leaves no bubble below none
        # The first few steps wait longer where messages are slow: 3.08 s a step.
        ("pipedream", 1, UNEQUAL, 1.0, 3.0),
    ],
)
def test_the_slowest_stage_sets_the_pace_and_never_waits(
    pipeline, schedule, micro_batches, costs, latency_s, step_s
):
    plan = pipeline(len(costs), micro_batches, schedule=schedule, costs=costs)
    found = simulated(plan, latency_s)
    assert found.step_time_s == pytest.approx(step_s)
    busy = [micro_batches * (c.forward_s + c.backward_s) + c.update_s for c in costs]
    assert found.utilisation == pytest.approx([busy_s / step_s for busy_s in busy])
    assert found.bubble >= 0


def test_smaller_last_micro_batches_count_in_every_step(pipeline):
    plan = pipeline(1, 2, schedule="pipedream-2bw", costs=[COST], micro_batch_size=4, batch_size=6)
    assert simulated(plan).step_time_s == pytest.approx(1.5 * 3 + 0.5)


@pytest.mark.parametrize(("weights_s", "step_s"), [(0.0, 1.0), (0.3, 1.0), (0.9, 1.0), (1.5, 1.5)])
def test_weights_travel_during_a_forward_or_set_the_pace(pipeline, weights_s, step_s):
    """Every version is a message of its own, of the parameters that an update changes."""
    cost = StageCost(1.0, 1.0, 0.0, 9000, 0, 0, trained_bytes=round(1000 * weights_s))
    plan = apart(pipeline(2, 1, schedule="pipedream", costs=[cost] * 2), (True, True))
    found = simulated(plan, bandwidth_bytes_per_s=1000)
    assert found.step_time_s == pytest.approx(step_s)
    computed = [e for e in found.timeline.events if e.kind in ("forward", "backward")]
    assert len(computed) > 20
    assert all(event.end_s - event.start_s == pytest.approx(1.0) for event in computed)


def test_the_timeline_fills_runs_and_drains(pipeline):
    plan = pipeline(2, 1, schedule="pipedream", costs=[COST] * 2)
    updates = [e for e in simulated(plan).timeline.of_rank(0) if e.kind == "update"]
    assert [event.micro_batch for event in updates] == list(range(len(updates)))
    assert len(updates) > 5
    gaps = {round(last.end_s - first.end_s, 6) for first, last in pairwise(updates[1:5])}
    assert gaps == {3.5}
