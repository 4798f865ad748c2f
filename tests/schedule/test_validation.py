"""Valid programs are proved, and every fault is found."""

import dataclasses

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from validator import check_progress, validate

from pipectl.errors import ScheduleError
from pipectl.graph import TransferKind
from pipectl.plan import StageCost
from pipectl.schedule import Actions, Kind, Program, channels, lower, lower_evaluation


def programs_of(plan):
    return [lower(plan, rank) for rank in range(plan.ranks)]


def changed(programs, rank, change):
    """The programs after ``change`` of the list of one rank's actions."""
    actions = list(programs[rank].body)
    change(actions)
    return [*programs[:rank], Program(Actions.of(actions)), *programs[rank + 1 :]]


def find(actions, kind, micro_batch, channel=None):
    return next(
        position
        for position, action in enumerate(actions)
        if (action.kind, action.micro_batch) == (kind, micro_batch)
        and channel in (None, action.channel)
    )


@example(ranks=[0, 1, 0], falls=[0, 4, 0, 0, 0, 0], micro_batches=5, skip=None, has_gradient=True)
@settings(max_examples=300)
@given(
    ranks=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    falls=st.lists(st.integers(0, 4), min_size=6, max_size=6),
    micro_batches=st.integers(1, 9),
    skip=st.sampled_from([None, (2,), (1, 2), (2, 1), (1, 3, 2)]),
    has_gradient=st.booleans(),
)
def test_no_warm_up_that_never_rises_can_deadlock(
    pipeline, ranks, falls, micro_batches, skip, has_gradient
):
    stages = len(ranks)
    warm_up = [1 + sum(falls[stage:stages]) for stage in range(stages)]
    skips = [(0, skip, has_gradient)] if skip and max(skip) < stages else []
    plan = pipeline(stages, micro_batches, warm_up=warm_up, ranks=ranks, skips=skips)
    proof = validate(plan, programs_of(plan))
    assert proof.peak_in_flight == tuple(min(depth, micro_batches) for depth in warm_up)


def test_fewer_micro_batches_than_planned_are_valid(pipeline):
    plan = pipeline(3, 8)
    validate(plan, [lower(plan, rank, 2) for rank in range(3)], 2)


def test_a_rising_warm_up_deadlocks_and_the_circle_is_told_in_words(pipeline):
    plan = pipeline(3, 4, warm_up=(2, 1, 2))
    with pytest.raises(ScheduleError) as caught:
        validate(plan, programs_of(plan))
    assert caught.value.message == (
        "rank programs: deadlock: rank 1 waits to receive the gradient of stage 2 for stage 1, "
        "micro-batch 0, from rank 2; rank 2 waits to receive the activation of stage 1 for "
        "stage 2, micro-batch 1, from rank 1"
    )
    assert caught.value.exit_code == 3


def test_sends_are_taken_as_rendezvous(pipeline):
    """Each rank ends a send before it starts to receive: it works only while MPI buffers."""
    plan = pipeline(2, 2)

    def send_then_receive(sent, received):
        def change(actions):
            receive = actions.pop(find(actions, Kind.RECEIVE_START, *received))
            wait = actions.pop(find(actions, Kind.SEND_WAIT, *sent))
            place = find(actions, Kind.SEND_START, *sent) + 1
            actions[place:place] = [wait, receive]

        return change

    activation, gradient = (1, 0), (0, 1)  # micro-batch, channel
    one_sided = changed(programs_of(plan), 0, send_then_receive(activation, gradient))
    validate(plan, one_sided)
    with pytest.raises(ScheduleError) as caught:
        validate(plan, changed(one_sided, 1, send_then_receive(gradient, activation)))
    assert caught.value.message == (
        "rank programs: deadlock: rank 0 waits for rank 1 to receive the activation of stage 0 "
        "for stage 1, micro-batch 1; rank 1 waits for rank 0 to receive the gradient of stage 1 "
        "for stage 0, micro-batch 0"
    )


def test_a_rank_that_waits_for_one_at_its_end_is_told_without_a_circle(pipeline):
    plan = pipeline(2, 1)

    def silent(actions):
        for kind in (Kind.SEND_WAIT, Kind.SEND_START):
            actions.pop(find(actions, kind, 0))

    with pytest.raises(ScheduleError) as caught:
        check_progress(channels(plan), changed(programs_of(plan), 1, silent))
    assert caught.value.message == (
        "rank programs: deadlock: rank 0 waits to receive the gradient of stage 1 for stage 0, "
        "micro-batch 0, from rank 1"
    )


def test_messages_arrive_in_the_order_they_are_sent(pipeline):
    plan = pipeline(2, 3, schedule="gpipe")

    def swap(actions):
        first, second = (find(actions, Kind.RECEIVE_START, index) for index in (1, 2))
        actions[first], actions[second] = actions[second], actions[first]

    programs = programs_of(plan)
    validate(plan, programs)
    with pytest.raises(ScheduleError, match=r"sends micro-batches \[0, 1, 2\].*\[0, 2, 1\]"):
        validate(plan, changed(programs, 1, swap))


def test_gradients_accumulate_in_ascending_order(pipeline):
    plan = pipeline(1, 3, schedule="gpipe")

    def reverse(actions):
        actions[3:6] = actions[5:2:-1]

    with pytest.raises(ScheduleError, match=r"order \[2, 1, 0\], which is not ascending"):
        validate(plan, changed(programs_of(plan), 0, reverse))


def test_a_value_is_read_after_it_arrived(pipeline):
    def swap(actions):
        position = find(actions, Kind.FORWARD, 0)
        actions[position - 1 : position + 1] = actions[position : position - 2 : -1]

    plan = pipeline(2, 2)
    with pytest.raises(ScheduleError, match="FORWARD of stage 1 comes before RECEIVE_WAIT"):
        validate(plan, changed(programs_of(plan), 1, swap))


def test_an_activation_is_sent_before_its_memory_is_released(pipeline):
    def release_early(actions):
        sent = actions.pop(find(actions, Kind.SEND_WAIT, 1))
        actions.insert(-1, sent)

    plan = pipeline(2, 2)
    with pytest.raises(ScheduleError, match="BACKWARD of stage 0 comes before SEND_WAIT"):
        validate(plan, changed(programs_of(plan), 0, release_early))


def test_stages_of_one_rank_compute_in_the_order_of_their_values(pipeline):
    plan = pipeline(2, 1, ranks=[0, 0])

    def swap(actions):
        actions[:2] = actions[1::-1]

    with pytest.raises(ScheduleError, match="FORWARD of stage 1 comes before FORWARD of stage 0"):
        validate(plan, changed(programs_of(plan), 0, swap))


def test_update_is_last(pipeline):
    plan = pipeline(1, 2, schedule="gpipe")
    with pytest.raises(ScheduleError, match=r"rank 0 has \[UPDATE\] beyond"):
        validate(plan, changed(programs_of(plan), 0, lambda rows: rows.insert(0, rows.pop())))


def test_memory_stays_within_the_limit(pipeline):
    cost = StageCost(1, 2, 0, parameter_bytes=0, optimizer_bytes=0, saved_bytes=1024)
    plan = pipeline(2, 8, costs=[cost] * 2, memory_limit_bytes=3072)
    proof = validate(plan, programs_of(plan), process_baseline_bytes=1024)
    assert proof.peak_memory_bytes == (3072, 2048)
    deeper = dataclasses.replace(plan, warm_up=(3, 1))
    with pytest.raises(ScheduleError, match=r"rank 0 would hold 4.00 KiB, above .* 3.00 KiB"):
        validate(deeper, programs_of(deeper), process_baseline_bytes=1024)


@given(
    ranks=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    micro_batches=st.integers(1, 6),
    skip=st.booleans(),
)
def test_evaluation_cannot_deadlock(pipeline, ranks, micro_batches, skip):
    stages = len(ranks)
    skips = [(0, (stages - 1,), False)] if skip and stages > 1 else []
    plan = pipeline(stages, micro_batches, ranks=ranks, skips=skips)
    forward = [item for item in channels(plan) if item.kind is TransferKind.ACTIVATION]
    check_progress(
        forward,
        [
            lower_evaluation(forward, plan.stages_of_rank(rank), rank, micro_batches)
            for rank in range(plan.ranks)
        ],
    )
