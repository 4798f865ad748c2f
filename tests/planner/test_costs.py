from dataclasses import replace

import pytest
from all_routes import cut_routes
from hypothesis import given
from hypothesis import strategies as st

from pipectl.graph import Lane, TransferKind
from pipectl.plan import Transfer
from pipectl.planner.costs.footprint import Footprints
from pipectl.planner.costs.stage_costs import operator_times, scaled_transfers, stage_costs
from pipectl.planner.graph.blocks import condense
from pipectl.profile import OptimizerCost, StageOverhead


def forward_s(make_profile, operator, size):
    return operator_times(make_profile([operator], []), size).uncached[0, 0]


def test_one_measured_size_scales_in_proportion(make_profile, make_operator) -> None:
    assert forward_s(make_profile, make_operator(0, forward_s=8e-3), 2) == pytest.approx(2e-3)


@pytest.mark.parametrize(
    ("size", "time_s"),
    [
        (2, 3e-3),
        (4, 4e-3),
        (6, 5e-3),
        (8, 6e-3),
        (16, 10e-3),
    ],
)
def test_two_measured_sizes_give_a_fixed_cost_and_one_per_sample(
    size, time_s, make_profile, make_operator
) -> None:
    operator = make_operator(0, forward_s=6e-3, timings={4: (4e-3, 0.0)})
    assert forward_s(make_profile, operator, size) == pytest.approx(time_s)


@pytest.mark.parametrize(
    ("small_s", "size", "time_s"),
    [
        (1e-3, 2, 0.5e-3),  # too steep: extrapolation would fall below proportional
        (9e-3, 2, 9e-3),  # falling: no more than the smallest size took
        (9e-3, 16, 6e-3),  # falling: no less than the largest size took
    ],
)
def test_noise_does_not_run_away(small_s, size, time_s, make_profile, make_operator) -> None:
    operator = make_operator(0, forward_s=6e-3, timings={4: (small_s, 0.0)})
    assert forward_s(make_profile, operator, size) == pytest.approx(time_s)


def test_a_stage_keeps_what_it_saves_receives_and_sends_once(make_profile, make_operator) -> None:
    operators = [
        make_operator(0, saved=(("a", 10),), output_bytes=1000),
        make_operator(1, saved=(("n0", 1000), ("b", 20)), output_bytes=500),
        make_operator(2, saved=(("b", 20), ("c", 30))),
    ]
    parts = Footprints(make_profile(operators, [(0, 1), (1, 2)])).of([[0], [1, 2]])
    assert parts.sums.saved_bytes[0].tolist() == [10 + 1000, 1000 + 20 + 30]


def test_shared_parameters_count_once_in_each_stage(make_profile, make_operator) -> None:
    operators = [make_operator(i, parameters=(("w", 100),)) for i in range(3)]
    parts = Footprints(make_profile(operators, [(0, 1), (1, 2)])).of([[0, 1], [2]])
    assert parts.sums.parameter_bytes[0].tolist() == [100, 100]


def test_messages_are_summed_by_kind_and_stages_and_scaled(make_profile, make_operator) -> None:
    operators = [make_operator(0), make_operator(1, gradient_bytes=0), make_operator(2)]
    parts = Footprints(make_profile(operators, [(0, 2), (1, 2)])).of([[0, 1], [2]])
    assert scaled_transfers(parts, 0.5) == (
        Transfer(TransferKind.ACTIVATION, 0, 1, 1000),
        Transfer(TransferKind.GRADIENT, 1, 0, 500),
    )


def test_stage_costs_add_up(make_profile, make_operator) -> None:
    profile = make_profile([make_operator(i) for i in range(2)], [(0, 1)])
    parts = Footprints(profile).of([[0, 1]])
    profile = replace(profile, optimizer=OptimizerCost(2.0, 1e-6))
    (cost,) = stage_costs(parts, operator_times(profile, 4), 0.5, profile)
    assert (cost.forward_s, cost.backward_s) == pytest.approx((1e-3, 2e-3))
    assert cost.update_s == pytest.approx(200e-6)
    assert (cost.parameter_bytes, cost.optimizer_bytes, cost.saved_bytes) == (200, 400, 1000)


def test_no_optimizer_costs_nothing(chain) -> None:
    profile = replace(chain(1), optimizer=None)
    (cost,) = stage_costs(Footprints(profile).of([[0]]), operator_times(profile, 8), 1.0, profile)
    assert (cost.update_s, cost.optimizer_bytes) == (0.0, 0)


def test_a_stage_takes_more_than_its_operators(make_profile, make_operator) -> None:
    operators = [make_operator(0), make_operator(1, gradient_bytes=0), make_operator(2)]
    profile = make_profile(operators, [(0, 2), (1, 2)])
    profile = replace(profile, stage=StageOverhead(1.0, 10.0, 100.0, 2.0, 20.0, 200.0))
    costs = stage_costs(
        Footprints(profile).of([[0, 1], [2]]), measured_times(profile), 1.0, profile
    )
    forward_s, backward_s = operators[0].forward_s, operators[0].backward_s
    assert costs[0].forward_s == pytest.approx(2 * forward_s + 1 + 100)
    assert costs[1].forward_s == pytest.approx(forward_s + 1 + 10)
    assert costs[0].backward_s == pytest.approx(2 * backward_s + 2 + 20)
    assert costs[1].backward_s == pytest.approx(backward_s + 2 + 200)


def test_a_stage_without_gradients_has_no_backward(make_profile, make_operator) -> None:
    profile = make_profile([make_operator(0, backward_s=0.0)], [])
    profile = replace(profile, stage=StageOverhead(backward_s=2.0))
    (cost,) = stage_costs(Footprints(profile).of([[0]]), measured_times(profile), 1.0, profile)
    assert cost.backward_s == 0.0


@pytest.mark.parametrize(("cache_bytes", "time_s"), [(1000, 1.0), (800, 2.0), (666, 3.0)])
def test_a_stage_that_stays_in_the_cache_is_faster(
    cache_bytes, time_s, make_profile, make_operator
) -> None:
    """It touches 1000 bytes; a cache two thirds as large is as good as none."""
    operator = make_operator(0, forward_s=3.0, saved=(("a", 600),), parameters=(("w", 200),))
    profile = make_profile([replace(operator, cached={8: (1.0, 1.0)})], [])
    profile = replace(profile, stage=StageOverhead(cache_bytes=cache_bytes))
    (cost,) = stage_costs(Footprints(profile).of([[0]]), measured_times(profile), 1.0, profile)
    assert cost.forward_s == pytest.approx(time_s, rel=0.01)


def test_nothing_is_slower_in_the_cache(make_profile, make_operator) -> None:
    operator = make_operator(0, forward_s=1.0, backward_s=2.0)
    times = measured_times(make_profile([replace(operator, cached={8: (1.5, 1.5)})], []))
    assert times.cached.T.tolist() == [[1.0, 1.5]]
    assert times.uncached.T.tolist() == [[1.0, 2.0]]


def measured_times(profile):
    return operator_times(profile, profile.micro_batch_size)


@given(data=st.data(), stages=st.integers(1, 3))
def test_messages_are_those_that_the_runtime_sends(data, stages, profiles, partitions_of) -> None:
    profile = data.draw(profiles())
    graph = condense(profile)
    partitions = list(partitions_of(graph, stages))
    if not partitions:
        return
    partition = data.draw(st.sampled_from(partitions))
    parts = Footprints(profile).of([graph.operators_of(blocks) for blocks in partition])
    home = {node: stage for stage, nodes in enumerate(parts.nodes) for node in nodes}
    stage_of = {operator.id: home[operator.id] for operator in profile.operators}
    expected: dict[Lane, int] = {}
    returning = {operator.id: operator.gradient_bytes > 0 for operator in profile.operators}
    for value, lane in cut_routes(stage_of, profile.edges, returning):
        operator = profile.by_id[value]
        forward = lane.kind is TransferKind.ACTIVATION
        size = operator.output_bytes if forward else operator.gradient_bytes
        expected[lane] = expected.get(lane, 0) + size
    assert {(t.kind, t.source, t.target): t.size_bytes for t in parts.transfers} == expected
