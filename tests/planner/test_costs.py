"""What operators take at any size, and what stages take and hold, by hand and from messages."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from all_routes import cut_routes
from hypothesis import given, settings
from hypothesis import strategies as st

from pipectl.graph import TransferKind
from pipectl.plan import Transfer
from pipectl.planner.costs.footprint import Footprints
from pipectl.planner.costs.stage_costs import (
    operator_times,
    scaled_transfers,
    stage_costs,
    stage_times,
)
from pipectl.planner.graph.blocks import condense
from pipectl.profile import OperatorMemory, OptimizerCost, StageOverhead


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


# The sums of partitions, all at once, against those of every stage by hand

OVERHEAD = StageOverhead(1e-4, 2e-4, 3e-4, 4e-4, 5e-4, 6e-4, cache_bytes=4000)


@st.composite
def measured(draw, profiles):
    """A profile in which values share memory, and stages cost something of their own."""
    profile = draw(profiles(most=6))
    operators = []
    for place, operator in enumerate(profile.operators):
        storage = f"n{draw(st.integers(0, place))}"
        made = draw(st.sampled_from([0, 700]))
        memory = OperatorMemory(made, storage, made, 0, ())
        cached = {8: (operator.forward_s / 2, operator.backward_s / 4)}
        operators.append(replace(operator, memory=memory, cached=cached))
    return replace(profile, operators=tuple(operators), stage=OVERHEAD)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), stages=st.integers(1, 4), size=st.integers(1, 16), enriched=st.booleans())
def test_sums_of_many_partitions_are_those_of_their_stages(
    data, stages, size, enriched, profiles, partitions_of
) -> None:
    profile = data.draw(measured(profiles) if enriched else profiles())
    graph = condense(profile)
    partitions = list(partitions_of(graph, stages))[:5]
    if not partitions:
        return
    scale = size / profile.micro_batch_size
    times = operator_times(profile, size)
    members = [[graph.operators_of(blocks) for blocks in partition] for partition in partitions]
    stage_of = np.zeros((len(partitions), len(profile.operators)), dtype=np.int64)
    for row, each in zip(stage_of, members, strict=True):
        for stage, inside in enumerate(each):
            row[inside] = stage
    sums = Footprints(profile).sums(stage_of, stages)
    times_s = stage_times(sums, times, scale, OVERHEAD)
    for place, inside in enumerate(members):
        expected, lanes = sums_by_hand(profile, stage_of[place].tolist(), inside)
        for name, numbers in expected.items():
            assert getattr(sums, name)[place].tolist() == numbers, name
        alone = Footprints(profile).of(inside)
        each_lane = {(t.kind, t.source, t.target): t.size_bytes for t in alone.transfers}
        assert each_lane == lanes == transfers(sums.transfers, place)
        assert alone.sums.values[:, 0].tolist() == sums.values[:, place].tolist()
        assert stage_times(alone.sums, times, scale, OVERHEAD)[:, 0] == pytest.approx(
            times_s[:, place]
        )


def sums_by_hand(profile, stage_of, members):
    """Bytes by stage, and of the messages that the runtime sends."""
    returning = {operator.id: operator.gradient_bytes > 0 for operator in profile.operators}
    home = {operator.id: stage for operator, stage in zip(profile.operators, stage_of, strict=True)}
    received = [Counter() for _ in members]
    sent = [{} for _ in members]
    returned = [0] * len(members)
    made = {operator.id: operator.allocations.made_bytes for operator in profile.operators}
    lanes = Counter()
    for value, lane in cut_routes(home, profile.edges, returning):
        operator = profile.by_id[value]
        if lane.kind is TransferKind.GRADIENT:
            lanes[lane] += operator.gradient_bytes
            returned[lane.target] += operator.gradient_bytes
            continue
        lanes[lane] += operator.output_bytes
        storage = operator.allocations.storage
        received[lane.target][storage] += operator.output_bytes
        sent[lane.source].setdefault(storage, made[storage] or operator.output_bytes)
    found = {"received_bytes": [arrived.total() for arrived in received]}
    found["returned_bytes"] = returned
    for name in ("parameter_bytes", "trained_bytes", "gradient_bytes", "saved_bytes"):
        found[name] = []
    for stage, inside in enumerate(members):
        operators = [profile.operators[index] for index in inside]
        saved = sent[stage] | dict(pair for each in operators for pair in each.saved)
        saved |= received[stage]
        for name, pairs in (
            ("parameter_bytes", dict(p for each in operators for p in each.parameters).items()),
            (
                "trained_bytes",
                dict(p for each in operators for p in each.trained_parameters).items(),
            ),
            ("gradient_bytes", [p for each in operators for p in each.parameter_gradients]),
            ("saved_bytes", saved.items()),
        ):
            found[name].append(sum(size for _, size in pairs))
    return found, lanes


def transfers(sent, place):
    found = {}
    for offset, kind in enumerate((TransferKind.ACTIVATION, TransferKind.GRADIENT)):
        begin, end = sent.first[2 * place + offset : 2 * place + offset + 2]
        rows = [each[begin:end].tolist() for each in (sent.source, sent.target, sent.size_bytes)]
        for source, target, size in zip(*rows, strict=True):
            assert (kind, source, target) not in found
            found[kind, source, target] = size
    return found
