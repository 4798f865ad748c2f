"""Steps that overlap: one body repeats, every rank's versions are right, memory holds them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from validator import validate

from pipectl.errors import ScheduleError
from pipectl.graph import TransferKind
from pipectl.plan import StageCost, StagePeaks
from pipectl.schedule import (
    Action,
    Actions,
    Kind,
    Program,
    channels,
    default_warm_up,
    lower,
    lower_stretch,
)
from pipectl.schedule.lowering import stretch
from pipectl.schedule.unflushed import steps_apart, versions_kept

SKIPS = [(0, (1, 2, 3), True), (1, (3,), False)]


def programs(plan):
    return [lower(plan, rank) for rank in range(plan.ranks)]


def both(stages, micro_batches):
    return ("pipedream", stages, 1), ("pipedream-2bw", stages, micro_batches)


def apart(plan, alone):
    """With a rank more for the backward of some stages."""
    first = [stage + sum(alone[:stage]) for stage in range(len(plan.stages))]
    held = [
        replace(stage, ranks=(rank,), backward_ranks=(rank + 1,) if two else ())
        for stage, rank, two in zip(plan.stages, first, alone, strict=True)
    ]
    warm_up = default_warm_up(plan.schedule, len(held), plan.micro_batches, apart=alone)
    ranks = (0,) * (len(held) + sum(alone))
    return replace(plan, stages=tuple(held), node_of_rank=ranks, warm_up=warm_up)


@given(
    case=st.builds(both, st.integers(1, 6), st.integers(1, 7)).flatmap(st.sampled_from),
    bodies=st.integers(1, 5),
)
def test_a_program_is_a_stretch_whose_steady_step_repeats(pipeline, case, bodies):
    schedule, stages, micro_batches = case
    plan = pipeline(stages, micro_batches, schedule=schedule, skips=SKIPS if stages > 3 else ())
    steps = bodies + steps_apart(plan)
    for rank in range(stages):
        rows = lower(plan, rank).unrolled(bodies, micro_batches)
        assert rows == lower_stretch(plan, rank, steps)
        parts = [part.shifted(more).rows for part, more in stretch(plan, rank, steps)]
        assert np.array_equal(np.concatenate(parts), rows.rows)


@given(
    case=st.builds(both, st.integers(1, 4), st.integers(1, 7)).flatmap(st.sampled_from),
    bodies=st.integers(1, 4),
    data=st.data(),
)
def test_so_it_is_where_backwards_have_ranks_of_their_own(pipeline, case, bodies, data):
    schedule, stages, micro_batches = case
    alone = data.draw(st.lists(st.booleans(), min_size=stages, max_size=stages))
    plan = pipeline(stages, micro_batches, schedule=schedule, skips=SKIPS if stages > 3 else ())
    again = data.draw(st.booleans())
    plan = replace(plan, stages=tuple(replace(stage, recompute=again) for stage in plan.stages))
    plan = apart(plan, alone)
    for rank in range(plan.ranks):
        rows = lower(plan, rank).unrolled(bodies, micro_batches)
        assert rows == lower_stretch(plan, rank, bodies + steps_apart(plan))
    assert validate(plan, programs(plan)).peak_in_flight == plan.warm_up


@given(
    case=st.builds(both, st.integers(1, 6), st.integers(1, 7)).flatmap(st.sampled_from),
    smaller=st.booleans(),
)
def test_programs_are_proven_whatever_the_shape(pipeline, case, smaller):
    schedule, stages, micro_batches = case
    plan = pipeline(
        stages, micro_batches, schedule=schedule, size_bytes=8, micro_batch_size=3,
        batch_size=3 * micro_batches - smaller, skips=SKIPS if stages > 3 else (),
    )  # fmt: skip
    proof = validate(plan, programs(plan))
    assert proof.peak_in_flight == plan.warm_up


def test_short_stretches_have_no_body(pipeline):
    plan = pipeline(3, schedule="pipedream", micro_batches=1)
    assert [part for part, _ in stretch(plan, 0, 2)] == [lower_stretch(plan, 0, 2)]
    kinds = [action.kind for action in lower_stretch(plan, 0, 2) if action.kind.is_compute]
    assert kinds == [Kind.FORWARD, Kind.FORWARD] + [Kind.BACKWARD, Kind.UPDATE] * 2


def test_a_rank_without_a_stage_still_ends_every_step(pipeline):
    plan = pipeline(2, 3, schedule="pipedream-2bw", node_of_rank=[0, 0, 0])
    assert list(lower_stretch(plan, 2, 2)) == [
        Action(Kind.UPDATE, -1, micro_batch=2),
        Action(Kind.UPDATE, -1, micro_batch=5),
    ]
    validate(plan, programs(plan))


def changed(program, name, row, value):
    rows = program.body.rows.copy()
    rows[row, Action._fields.index(name)] = value
    return replace(program, body=Actions(rows))


def row_of(program, kind):
    return int(np.flatnonzero(program.body.column("kind") == kind)[0])


def test_weights_of_another_age_are_found(pipeline):
    plan = pipeline(3, 1, schedule="pipedream")
    found = programs(plan)
    found[0] = changed(found[0], "weight_version", row_of(found[0], Kind.FORWARD), 1)
    with pytest.raises(ScheduleError, match=r"rank 0 has .* weights of another age"):
        validate(plan, found)


def weights_moved(plan, kind, by):
    """Programs in which one rank starts or awaits the last of its weights elsewhere."""
    (channel,) = (c for c, item in enumerate(channels(plan)) if item.kind is TransferKind.WEIGHT)
    found = programs(plan)
    rank = int(kind is Kind.SEND_START)
    prologue = list(found[rank].prologue)
    at = [i for i, row in enumerate(prologue) if (row.kind, row.channel) == (kind, channel)][-1]
    prologue.insert(at + by, prologue.pop(at))
    found[rank] = replace(found[rank], prologue=Actions.of(prologue))
    return found


@pytest.mark.parametrize(
    ("kind", "by", "message"),
    [
        (Kind.RECEIVE_WAIT, 2, r"rank 0 has .* with weights of another age"),
        (Kind.SEND_START, -1, r"rank 1 has SEND_START of channel .* weights of another version"),
    ],
)
def test_weights_that_come_too_late_or_leave_too_early_are_found(pipeline, kind, by, message):
    plan = apart(pipeline(1, 1, schedule="pipedream"), (True,))
    validate(plan, weights_moved(plan, kind, 0))
    with pytest.raises(ScheduleError, match=message):
        validate(plan, weights_moved(plan, kind, by))


def test_an_update_within_a_step_is_found(pipeline):
    plan = pipeline(2, 3, schedule="pipedream-2bw")
    found = programs(plan)
    rows = list(found[0].body)
    update = next(index for index, action in enumerate(rows) if action.kind is Kind.UPDATE)
    first = next(index for index, action in enumerate(rows) if action.kind is Kind.BACKWARD)
    rows.insert(first, rows.pop(update))
    found[0] = replace(found[0], body=Actions.of(rows))
    with pytest.raises(ScheduleError, match="rank 0 updates stage 0 within a step"):
        validate(plan, found)


def test_a_message_that_nobody_receives_is_found(pipeline):
    plan = pipeline(2, 1, schedule="pipedream")
    found = programs(plan)
    rows = [a for a in found[1].body if a.kind not in (Kind.RECEIVE_START, Kind.RECEIVE_WAIT)]
    found[1] = replace(found[1], body=Actions.of(rows))
    with pytest.raises(ScheduleError):
        validate(plan, found)


COST = StageCost(1.0, 2.0, 0.1, 1000, 5000, 10, gradient_bytes=900)


@pytest.mark.parametrize(
    ("schedule", "micro_batches", "versions"),
    [("pipedream", 1, (4, 3, 2, 1)), ("pipedream-2bw", 4, (2, 2, 2, 2))],
)
def test_memory_holds_the_versions_that_the_papers_say(pipeline, schedule, micro_batches, versions):
    plan = pipeline(4, micro_batches, schedule=schedule, costs=[COST] * 4)
    peaks = validate(plan, programs(plan)).peak_memory_bytes
    held = [round((peak - 5000 - 900) / 1000) for peak in peaks]
    assert held == list(versions)


def test_one_micro_batch_a_step_needs_two_versions_only_where_steps_wait(pipeline):
    plan = pipeline(1, 2, schedule="pipedream-2bw", costs=[COST])
    assert validate(plan, programs(plan)).peak_memory_bytes == (5000 + 2 * 1000 + 900 + 10,)


def test_an_update_holds_its_temporary_values_once(pipeline):
    peaks = StagePeaks(0, 0, 0, update_bytes=7000)
    plan = pipeline(1, 1, schedule="pipedream", costs=[replace(COST, peaks=peaks)])
    assert validate(plan, programs(plan)).peak_memory_bytes == (5000 + 1000 + 900 + 7000,)


def test_a_backwards_rank_holds_the_versions_of_all_steps_in_flight(pipeline):
    """The forward's holds one, and room for the next."""
    plan = apart(pipeline(2, 1, schedule="pipedream", costs=[COST] * 2), (True, True))
    peaks = validate(plan, programs(plan)).peak_memory_bytes
    assert plan.warm_up == (5, 3)
    assert peaks[0::2] == (2 * 1000 + 2 * 10,) * 2
    assert peaks[1::2] == tuple(5000 + w * 1000 + 900 + w * 10 for w in plan.warm_up)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"micro_batches": 2, "batch_size": 2}, "updates after every micro-batch, but a step"),
        ({"schedule": "pipedream-2bw", "warm_up": (3, 1)}, "at most the 1 micro-batches"),
    ],
)
def test_what_has_no_formula_is_refused(pipeline, change, message):
    plan = replace(pipeline(2, 1, schedule="pipedream"), **change)
    with pytest.raises(ScheduleError, match=message):
        lower(plan, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": (0, 2)}, "one stage per rank and one rank per stage"),
        ({"ranks": (1,)}, "one stage per rank and one rank per stage"),
        ({"backward_ranks": (1,)}, "or two if backwards are apart"),
    ],
)
def test_where_it_cannot_run_is_refused(pipeline, change, message):
    plan = pipeline(2, 1, schedule="pipedream", node_of_rank=[0, 0, 0])
    plan = replace(plan, stages=(replace(plan.stages[0], **change), plan.stages[1]))
    with pytest.raises(ScheduleError, match=message):
        lower(plan, 1)


def test_flushed_programs_have_one_part(pipeline):
    program = lower(pipeline(2, 4), 0)
    assert program == Program(program.body)
    assert program.unrolled(1, 4) == program.body


@pytest.mark.parametrize("alone", [(False, False, False), (True, False, True)])
@pytest.mark.parametrize(("schedule", "micro_batches"), [("pipedream", 1), ("pipedream-2bw", 4)])
def test_as_many_versions_are_kept_as_are_asked_for(pipeline, schedule, micro_batches, alone):
    plan = apart(pipeline(3, micro_batches, schedule=schedule), alone)
    for index, stage in enumerate(plan.stages):
        rows = lower_stretch(plan, stage.updating_ranks[0], 12)
        begins = Kind.BACKWARD if alone[index] else Kind.FORWARD
        ages = rows.column("weight_version")[rows.column("kind") == begins]
        assert versions_kept(plan, index) == 1 + ages.max()
