"""Memory by row, against figures worked out by hand; a ledger is in test_random_plans.py."""

from dataclasses import replace

from validator import peak_memory_bytes

from pipectl.plan import StageCost, StagePeaks
from pipectl.planner.costs.stage_costs import StageTable, least_peaks_bytes
from pipectl.schedule import (
    Kind,
    lower,
    one_f_one_b,
    peak_in_flight,
)
from pipectl.simulate.memory import memory_bytes

COST = StageCost(1.0, 2.0, 0.0, parameter_bytes=100, optimizer_bytes=50, saved_bytes=10)
RESIDENT, GRADIENTS = 100 + 50, 100


def test_gpipe_keeps_every_micro_batch(pipeline):
    plan = pipeline(4, 8, schedule="gpipe")
    assert [peak_in_flight(lower(plan, rank), rank) for rank in range(4)] == [8, 8, 8, 8]


def test_1f1b_keeps_its_warm_up(pipeline):
    for warm_up in one_f_one_b.policy_a(4, 8), one_f_one_b.policy_b(4, 8):
        plan = pipeline(4, 8, warm_up=warm_up)
        assert tuple(peak_in_flight(lower(plan, rank), rank) for rank in range(4)) == warm_up


def test_bytes_of_each_row_by_hand(pipeline):
    plan = pipeline(2, 2, costs=[COST] * 2, size_bytes=3)
    last = lower(plan, 1)
    kinds = [action.kind for action in last.body]
    received, saved, gradient = 3, 10, 3
    by_row = [
        (Kind.RECEIVE_START, received),
        (Kind.RECEIVE_START, 2 * received),
        (Kind.RECEIVE_WAIT, 2 * received),
        (Kind.FORWARD, 2 * received + saved),
        (Kind.BACKWARD, GRADIENTS + received + saved + gradient),
        (Kind.SEND_START, GRADIENTS + received + gradient),
        (Kind.RECEIVE_WAIT, GRADIENTS + received + gradient),
        (Kind.FORWARD, GRADIENTS + received + gradient + saved),
        (Kind.BACKWARD, GRADIENTS + gradient + saved + gradient),
        (Kind.SEND_START, GRADIENTS + 2 * gradient),
        (Kind.SEND_WAIT, GRADIENTS + 2 * gradient),
        (Kind.SEND_WAIT, GRADIENTS + gradient),
        (Kind.UPDATE, GRADIENTS),
    ]
    assert kinds == [kind for kind, _ in by_row]
    assert memory_bytes(plan, 1, last).tolist() == [RESIDENT + size for _, size in by_row]
    assert peak_memory_bytes(plan, 1, last, process_baseline_bytes=1000) == 1000 + RESIDENT + 116


def test_the_last_micro_batch_may_be_smaller(pipeline):
    plan = pipeline(1, 2, costs=[COST], schedule="gpipe", micro_batch_size=4, batch_size=6)
    assert plan.micro_batch_shares == (1.0, 0.5)
    assert memory_bytes(plan, 0, lower(plan, 0)).tolist() == [
        RESIDENT + size for size in (10, 15, 115, 105, 100)
    ]


def test_what_an_action_allocates_for_itself_counts_while_it_runs(pipeline):
    peaks = StagePeaks(30, 40, 120, 60)
    plan = pipeline(1, 2, costs=[replace(COST, peaks=peaks)], warm_up=[1])
    assert memory_bytes(plan, 0, lower(plan, 0)).tolist() == [
        RESIDENT + size
        for size in (30, 10 + 120, GRADIENTS + 30, GRADIENTS + 10 + 40, GRADIENTS + 60)
    ]


def test_sums_over_replicas_hold_a_copy_of_the_gradients_and_what_arrives(pipeline):
    for replicas, held in ((2, 150), (3, 166), (4, 175)):
        plan = pipeline(1, replicas, costs=[COST], node_of_rank=[0] * replicas)
        stage = replace(plan.stages[0], ranks=tuple(range(replicas)))
        plan = replace(plan, stages=(stage,))
        program = lower(plan, 0)
        kinds = [action.kind for action in program.body]
        backwards = [Kind.FORWARD, Kind.BACKWARD]
        assert kinds == [*backwards, Kind.REDUCE_START, Kind.REDUCE_WAIT, Kind.UPDATE]
        assert memory_bytes(plan, 0, program).tolist() == [
            RESIDENT + size for size in (10, 10 + GRADIENTS, *[GRADIENTS + held] * 2, GRADIENTS)
        ]


def test_frozen_parameters_have_no_gradient_and_buffers_stay(pipeline):
    cost = replace(COST, gradient_bytes=0, buffer_bytes=5)
    plan = pipeline(1, 1, costs=[cost])
    assert memory_bytes(plan, 0, lower(plan, 0)).tolist() == [
        RESIDENT + 5 + size for size in (10, 10, 0)
    ]


def test_the_lower_bound_is_the_peak_of_a_stage_alone_and_below_it_in_a_pipeline(pipeline):
    for micro_batches, warm_up in ((1, 1), (2, 2), (4, 2), (3, 1)):
        for peaks in (None, StagePeaks(30, 40, 120, 60), StagePeaks(10, 5, 101, 200)):
            costs = [replace(COST, peaks=peaks)] * 2
            for stages, size in ((1, 0), (2, 3)):
                plan = pipeline(
                    stages,
                    micro_batches,
                    costs=costs[:stages],
                    warm_up=[warm_up] * stages,
                    size_bytes=size,
                )
                found = peak_memory_bytes(plan, 0, lower(plan, 0))
                table = StageTable(tuple(costs[:stages]), ())
                least = least_peaks_bytes(table, plan.warm_up, plan.micro_batch_shares)[0]
                assert least <= found
                assert stages == 2 or peaks is None or least == found


def test_a_rank_without_stages_holds_only_its_process(pipeline):
    plan = pipeline(1, 2, node_of_rank=[0, 0])
    assert peak_memory_bytes(plan, 1, lower(plan, 1), process_baseline_bytes=7) == 7
