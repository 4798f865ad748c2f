"""Levels of a stage by hand: what is alive in every operator, forward and backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pipectl.planner.costs.footprint import Footprints
from pipectl.planner.costs.liveness import peak_bytes
from pipectl.planner.costs.stage_costs import operator_times, stage_costs
from pipectl.profile import Operator, OperatorMemory, OptimizerCost, Profile, StepMemory


def chain(make_operator: Any, make_profile: Any) -> Profile:
    """x -> a (weight, saves x) -> b (a view of a) -> c (saves its result) -> loss."""

    def operator(index: int, saved: Any, memory: OperatorMemory, **more: Any) -> Operator:
        plain = {"parameters": (), "output_bytes": 100, "gradient_bytes": 100}
        return make_operator(index, saved=saved, memory=memory, **{**plain, **more})

    return make_profile(
        [
            operator(
                0,
                (("x", 50),),
                OperatorMemory(100, "n0", 130, 60, (("w", 40),)),
                parameters=(("w", 40),),
            ),
            operator(1, (), OperatorMemory(0, "n0", 0, 0, (("n0", 0),))),
            operator(2, (("n2", 100),), OperatorMemory(100, "n2", 100, 110, (("n1", 100),))),
            operator(
                3,
                (("n3:0", 8),),
                OperatorMemory(4, "n3", 12, 100, (("n2", 100),)),
                output_bytes=4,
            ),
        ],
        [(0, 1), (1, 2), (2, 3)],
    )


def costs(profile: Profile, stages: list[list[int]], scale: float = 1.0) -> Any:
    parts = Footprints(profile).of(stages)
    optimizer = OptimizerCost(2.0, 0.0, StepMemory(2.0, 1.0, 0.0))
    profile = replace(profile, optimizer=optimizer)
    return stage_costs(parts, operator_times(profile, 8), scale, profile)


def test_one_stage(make_operator: Any, make_profile: Any) -> None:
    (cost,) = costs(chain(make_operator, make_profile), [[0, 1, 2, 3]])
    assert cost.saved_bytes == 50 + 100 + 8
    assert cost.peaks is not None
    # x 50, a 100 with 30 more; then c beside a: a dies behind its view's reader
    assert cost.peaks.forward_bytes == 50 + 100 + 100
    # backward of c: the gradient of c, and 110 of its own, while 8 is gone
    assert cost.peaks.backward_bytes == 100 - 8 + 110
    assert cost.peaks.first_backward_bytes == 100 - 8 + 110
    assert cost.peaks.update_bytes == 2 * 40


def test_what_a_reader_saves_stays_until_its_backward(
    make_operator: Any, make_profile: Any
) -> None:
    memory = [
        OperatorMemory(100, "n0", 100, 0),
        OperatorMemory(10, "n1", 10, 100, (("n0", 100),)),
        OperatorMemory(130, "n2", 130, 10, (("n1", 10),)),
    ]
    saved = [(), (("n0", 100),), ()]
    operators = [
        make_operator(index, saved=saved[index], memory=each, parameters=())
        for index, each in enumerate(memory)
    ]
    (cost,) = costs(make_profile(operators, [(0, 1), (1, 2)]), [[0, 1, 2]])
    assert cost.peaks is not None
    assert cost.peaks.forward_bytes == 100 + 10 + 130


def test_what_is_sent_or_received_stays(make_operator: Any, make_profile: Any) -> None:
    first, second = costs(chain(make_operator, make_profile), [[0, 1], [2, 3]])
    assert (first.saved_bytes, second.saved_bytes) == (50 + 100, 100 + 100 + 8)
    assert first.peaks.forward_bytes == 50 + 130
    assert first.peaks.backward_bytes == 60  # of which the weight's 40 are added and dropped
    assert second.peaks.forward_bytes == 100 + 12
    assert second.peaks.backward_bytes == 100 - 8 + 110


def test_activations_scale_and_gradients_of_parameters_do_not(
    make_operator: Any, make_profile: Any
) -> None:
    first, second = costs(chain(make_operator, make_profile), [[0, 1], [2, 3]], scale=2.0)
    assert first.peaks.backward_bytes == 2 * 20 + 40
    assert second.peaks.forward_bytes == 2 * (100 + 12)
    assert peak_bytes(((10, 0), (6, 9)), 1.0) == 15
    assert peak_bytes(((10, 0), (6, 9)), 4.0) == 40


def test_two_uses_of_a_value_share_or_add_gradients(make_operator: Any, make_profile: Any) -> None:
    """y = x + f(x): the sum passes one gradient to both, so that of x is a new tensor."""
    plain = {"parameters": (), "saved": (), "output_bytes": 100}

    def operator(index: int, gradients: Any, backward: int) -> Operator:
        memory = OperatorMemory(100, f"n{index}", 100, backward, gradients)
        return make_operator(index, memory=memory, **plain)

    profile = make_profile(
        [
            operator(0, (), 0),
            operator(1, (("n0", 100),), 100),
            operator(2, (("n0", 0), ("n1", 0)), 0),
            operator(3, (("n2", 100),), 100),
        ],
        [(0, 1), (0, 2), (1, 2), (2, 3)],
    )
    (cost,) = costs(profile, [[0, 1, 2, 3]])
    assert cost.peaks.backward_bytes == 300  # shared, that of f, and their sum


def test_a_shared_parameter_has_a_gradient_for_each_use(
    make_operator: Any, make_profile: Any
) -> None:
    operators = [make_operator(i, parameters=(("w", 100),)) for i in range(3)]
    first, second = costs(make_profile(operators, [(0, 1), (1, 2)]), [[0, 1], [2]])
    assert (first.parameter_bytes, first.gradient_bytes) == (100, 200)
    assert (second.parameter_bytes, second.gradient_bytes) == (100, 100)


def test_frozen_parameters_have_neither_gradient_nor_optimizer_state(
    make_operator: Any, make_profile: Any
) -> None:
    memory = OperatorMemory(1000, "n0", 1000, 0, (), (("table", 7),))
    (cost,) = costs(make_profile([make_operator(0, memory=memory)], []), [[0]])
    assert (cost.gradient_bytes, cost.optimizer_bytes, cost.buffer_bytes) == (0, 0, 7)


def test_a_profile_without_memory_has_no_peaks(make_operator: Any, make_profile: Any) -> None:
    operators = [make_operator(0), make_operator(1)]
    operators[0] = replace(operators[0], memory=OperatorMemory(1, "n0", 1, 1))
    (cost,) = costs(make_profile(operators, [(0, 1)]), [[0, 1]])
    assert cost.peaks is None


def test_temporaries_of_a_step() -> None:
    loop, together = StepMemory(2.0, 1.0), StepMemory(0.0, 0.0, 1.5)
    assert loop.peak_bytes((10, 10, 4)) == 30
    assert loop.peak_bytes((10, 1, 10)) == 21
    assert together.peak_bytes((10, 10, 4)) == 36
    assert loop.peak_bytes(()) == 0
