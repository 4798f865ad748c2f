"""What operators take at any size, and what stages take, send and hold, by hand."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipectl.lanes import TransferKind, routes
from pipectl.plan import Transfer
from pipectl.planner.costs.footprint import Footprints
from pipectl.planner.costs.stage_costs import (
    operator_times,
    scaled_transfers,
    stage_costs,
    stage_times,
)
from pipectl.planner.graph.blocks import condense
from pipectl.profile_parts import OperatorMemory, OptimizerCost, StageOverhead, StepMemory
from tests.planner.gate.graphs import chain, make_operator, make_profile, partitions_of, profiles


def costs(profile, stages, size=8):
    scale = size / profile.micro_batch_size
    return stage_costs(
        Footprints(profile).of(stages), operator_times(profile, size), scale, profile
    )


@pytest.mark.parametrize(
    ("timings", "size", "time_s"),
    [
        pytest.param({}, 2, 1.5e-3, id="in proportion to one size"),
        *((({4: (4e-3, 0.0)}), *known) for known in ((2, 3e-3), (4, 4e-3), (6, 5e-3), (16, 10e-3))),
        pytest.param({4: (1e-3, 0.0)}, 2, 0.5e-3, id="too steep: not below proportional"),
        pytest.param({4: (9e-3, 0.0)}, 2, 9e-3, id="falling: at most what the smallest took"),
        pytest.param({4: (9e-3, 0.0)}, 16, 6e-3, id="falling: at least what the largest took"),
    ],
)
def test_sizes_that_were_not_measured_follow_from_those_that_were(timings, size, time_s) -> None:
    profile = chain(1, forward_s=6e-3, timings=timings)
    assert operator_times(profile, size).uncached[0, 0] == pytest.approx(time_s)


def test_two_stages_take_send_and_hold_what_their_operators_do() -> None:
    """Only the gradient of the first operator is returned."""
    operators = [make_operator(0), make_operator(1, gradient_bytes=0), make_operator(2)]
    profile = replace(
        make_profile(operators, [(0, 2), (1, 2)]),
        stage=StageOverhead(1.0, 10.0, 100.0, 2.0, 20.0, 200.0),
        optimizer=OptimizerCost(2.0, 1e-6),
    )
    assert scaled_transfers(Footprints(profile).of([[0, 1], [2]]), 0.5) == (
        Transfer(TransferKind.ACTIVATION, 0, 1, 1000),
        Transfer(TransferKind.GRADIENT, 1, 0, 500),
    )
    first, second = costs(profile, [[0, 1], [2]], size=4)
    assert (first.forward_s, second.forward_s) == pytest.approx((1e-3 + 101, 0.5e-3 + 11))
    assert (first.backward_s, second.backward_s) == pytest.approx((2e-3 + 22, 1e-3 + 202))
    assert (first.update_s, second.update_s) == pytest.approx((200e-6, 100e-6))
    assert (first.parameter_bytes, first.optimizer_bytes) == (200, 400)
    assert (first.saved_bytes, second.saved_bytes, second.input_bytes) == (1000, 1500, 1000)
    assert costs(replace(profile, optimizer=None), [[0, 1], [2]])[0].optimizer_bytes == 0


@pytest.mark.parametrize(("cache_bytes", "time_s"), [(1000, 1.0), (800, 2.0), (666, 3.0)])
def test_a_stage_that_stays_in_the_cache_is_faster(cache_bytes, time_s) -> None:
    """It touches 1000 bytes; a cache two thirds as large is as good as none."""
    held = {"saved": (("a", 600),), "parameters": (("w", 200),), "cached": {8: (1.0, 1.0)}}
    profile = chain(1, forward_s=3.0, backward_s=0.0, **held)
    profile = replace(profile, stage=StageOverhead(cache_bytes=cache_bytes, backward_s=2.0))
    (cost,) = costs(profile, [[0]])
    assert cost.forward_s == pytest.approx(time_s, rel=0.01)
    assert cost.backward_s == 0.0, "without gradients there is no backward"


# What is alive in every operator, forward and backward


def test_a_stage_touches_the_gradients_of_trained_parameters_only() -> None:
    """It touches 1000 bytes if its weight is trained, 800 if not: then a cache is large enough."""
    held = {"saved": (("a", 600),), "parameters": (("w", 200),), "cached": {8: (1.0, 1.0)}}
    frozen = {"memory": OperatorMemory(600, "a", 600, 0, ())}
    for changes, time_s in (({}, 2.0), (frozen, 1.0)):
        profile = chain(1, forward_s=3.0, backward_s=0.0, **held, **changes)
        (cost,) = costs(replace(profile, stage=StageOverhead(cache_bytes=800)), [[0]])
        assert cost.forward_s == pytest.approx(time_s, rel=0.01)


def peaks(profile, stages, size=8):
    return [cost.peaks for cost in costs(with_state(profile), stages, size)]


def with_state(profile):
    return replace(profile, optimizer=OptimizerCost(2.0, 0.0, StepMemory(2.0, 1.0, 0.0)))


@pytest.fixture
def views():
    """x -> a (weight, saves x) -> b (a view of a) -> c (saves its result) -> loss."""
    weight = (("w", 40),)
    each = [
        {
            "saved": (("x", 50),),
            "memory": OperatorMemory(100, "n0", 130, 60, weight),
            "parameters": weight,
        },
        {"saved": (), "memory": OperatorMemory(0, "n0", 0, 0, (("n0", 0),))},
        {"saved": (("n2", 100),), "memory": OperatorMemory(100, "n2", 100, 110, (("n1", 100),))},
        {
            "saved": (("n3:0", 8),),
            "memory": OperatorMemory(4, "n3", 12, 100, (("n2", 100),)),
            "output_bytes": 4,
        },
    ]
    return chain(each, parameters=(), output_bytes=100, gradient_bytes=100)


def test_views_live_in_the_memory_of_what_they_show(views) -> None:
    (cost,) = costs(with_state(views), [[0, 1, 2, 3]])
    assert cost.saved_bytes == 50 + 100 + 8
    # x 50, a 100 with 30 more; then c beside a: a dies behind its view's reader
    assert cost.peaks.forward_bytes == 50 + 100 + 100
    assert cost.peaks.left_bytes == 100  # a, when c is made
    # backward of c: the gradient of c, and 110 of its own, while 8 is gone
    assert cost.peaks.backward_bytes == cost.peaks.first_backward_bytes == 100 - 8 + 110
    assert cost.peaks.update_bytes == 2 * 40


def test_an_evaluation_keeps_nothing_for_a_backward(views) -> None:
    """Of a submodule that is kept whole, only the largest of what it saves counts."""
    whole = {
        "saved": (("n0:0", 60), ("n0:1", 40)),
        "memory": OperatorMemory(10, "n0", 110, 0),
        "output_bytes": 10,
    }
    for profile, stages, expected in (
        (views, [[0, 1, 2, 3]], [50 + 100 + 100]),  # as in the forward, without what stays
        (views, [[0, 1], [2, 3]], [50 + 130, 100 + 12]),
        (chain([whole]), [[0]], [110 - 40]),
    ):
        memory = Footprints(profile).of(stages).memory
        assert [stage.evaluation_bytes(1.0) for stage in memory] == expected
        assert [stage.evaluation_bytes(3.0) for stage in memory] == [3 * e for e in expected]


def test_what_is_sent_or_received_stays_and_parameters_do_not_grow(views) -> None:
    first, second = costs(with_state(views), [[0, 1], [2, 3]])
    assert (first.saved_bytes, second.saved_bytes) == (50 + 100, 100 + 100 + 8)
    assert first.peaks.forward_bytes == 50 + 130
    assert first.peaks.backward_bytes == 60  # of which the weight's 40 are added and dropped
    assert second.peaks.forward_bytes == 100 + 12
    assert (first.peaks.left_bytes, second.peaks.left_bytes) == (0, 4)
    assert second.peaks.backward_bytes == 100 - 8 + 110
    first, second = peaks(views, [[0, 1], [2, 3]], size=16)
    assert first.backward_bytes == 2 * 20 + 40
    assert second.forward_bytes == 2 * (100 + 12)


def test_what_a_reader_saves_stays_until_its_backward() -> None:
    each = [
        {"memory": OperatorMemory(100, "n0", 100, 0), "saved": ()},
        {"memory": OperatorMemory(10, "n1", 10, 100, (("n0", 100),)), "saved": (("n0", 100),)},
        {"memory": OperatorMemory(130, "n2", 130, 10, (("n1", 10),)), "saved": ()},
    ]
    (peak,) = peaks(chain(each, parameters=()), [[0, 1, 2]])
    assert peak.forward_bytes == 100 + 10 + 130
    each[0]["memory"] = None
    assert peaks(chain(each, parameters=()), [[0, 1, 2]]) == [None], "one is not known"


def test_two_uses_of_a_value_share_or_add_gradients() -> None:
    """y = x + f(x): the sum passes one gradient to both, so that of x is a new tensor."""
    uses = [((), 0), ((("n0", 100),), 100), ((("n0", 0), ("n1", 0)), 0), ((("n2", 100),), 100)]
    operators = [
        make_operator(
            index,
            memory=OperatorMemory(100, f"n{index}", 100, backward, gradients),
            parameters=(),
            saved=(),
            output_bytes=100,
        )
        for index, (gradients, backward) in enumerate(uses)
    ]
    (peak,) = peaks(make_profile(operators, [(0, 1), (0, 2), (1, 2), (2, 3)]), [[0, 1, 2, 3]])
    assert peak.backward_bytes == 300  # shared, that of f, and their sum


def test_gradients_are_of_every_use_and_not_of_frozen_parameters() -> None:
    first, second = costs(chain(3, parameters=(("w", 100),)), [[0, 1], [2]])
    assert (first.parameter_bytes, first.gradient_bytes) == (100, 200)
    assert (second.parameter_bytes, second.gradient_bytes) == (100, 100)
    memory = OperatorMemory(1000, "n0", 1000, 0, (), (("table", 7),))
    (cost,) = costs(chain(1, memory=memory), [[0]])
    assert (cost.gradient_bytes, cost.optimizer_bytes, cost.buffer_bytes) == (0, 0, 7)
    assert (cost.update_s, cost.parameter_bytes, cost.changed_bytes) == (0.0, 100, 0)


def test_every_use_of_a_parameter_is_updated_if_one_of_them_has_a_gradient() -> None:
    """The second stage reads a weight without a gradient of its own that the first one trains."""
    trained, read = (
        OperatorMemory(1000, f"n{index}", 1000, 0, gradients)
        for index, gradients in enumerate([(("w", 100),), ()])
    )
    each = [{"parameters": (("w", 100),), "memory": memory} for memory in (trained, read)]
    first, second = costs(chain(each), [[0], [1]])
    assert (first.gradient_bytes, second.gradient_bytes) == (100, 0)
    for cost in (first, second):
        assert (cost.update_s, cost.optimizer_bytes) == (pytest.approx(100e-9), 200)
    assert second.peaks.update_bytes == 2 * 100  # the gradient from the first, and its sum


def test_temporaries_of_a_step() -> None:
    loop, together = StepMemory(2.0, 1.0), StepMemory(0.0, 0.0, 1.5)
    assert [loop.peak_bytes(sizes) for sizes in ((10, 10, 4), (10, 1, 10), ())] == [30, 21, 0]
    assert together.peak_bytes((10, 10, 4)) == 36


# The sums of partitions, all at once, against those of every stage by hand

OVERHEAD = StageOverhead(1e-4, 2e-4, 3e-4, 4e-4, 5e-4, 6e-4, cache_bytes=4000)


@st.composite
def measured(draw):
    """A profile in which values share memory, and stages cost something of their own."""
    profile = draw(profiles(most=6))
    operators = []
    for place, operator in enumerate(profile.operators):
        storage = f"n{draw(st.integers(0, place))}"
        made = draw(st.sampled_from([0, 700]))
        memory = OperatorMemory(made, storage, made, 0, ())
        cached = {8: (operator.forward_s / 2, operator.backward_s / 4)}
        casts = tuple((f"{name}:half", size // 2) for name, size in operator.parameters)
        operators.append(replace(operator, memory=memory, cached=cached, casts=casts))
    return replace(profile, operators=tuple(operators), stage=OVERHEAD)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), stages=st.integers(1, 4), size=st.integers(1, 16), enriched=st.booleans())
def test_sums_of_many_partitions_are_those_of_their_stages(data, stages, size, enriched) -> None:
    profile = data.draw(measured() if enriched else profiles())
    graph = condense(profile)
    partitions = list(partitions_of(graph, stages))[:5]
    if not partitions:
        return
    scale, times = size / profile.micro_batch_size, operator_times(profile, size)
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
        alone_s = stage_times(alone.sums, times, scale, OVERHEAD)[:, 0]
        assert alone_s == pytest.approx(times_s[:, place])


def sums_by_hand(profile, stage_of, members):
    """Bytes by stage, and of the messages that the runtime sends, by their definition."""
    home = {operator.id: stage for operator, stage in zip(profile.operators, stage_of, strict=True)}
    received, saved = [Counter() for _ in members], [{} for _ in members]
    lanes = Counter()
    for operator in profile.operators:
        uses = [home[reader] for producer, reader in profile.edges if producer == operator.id]
        for lane in routes(home[operator.id], uses, has_gradient=operator.gradient_bytes > 0):
            if lane.kind is TransferKind.GRADIENT:
                lanes[lane] += operator.gradient_bytes
                continue
            lanes[lane] += operator.output_bytes
            storage = operator.allocations.storage
            received[lane.target][storage] += operator.output_bytes
            made = profile.by_id[storage].allocations.made_bytes
            saved[lane.source].setdefault(storage, made or operator.output_bytes)
    inside = [[profile.operators[index] for index in indices] for indices in members]
    for kept, arrived, operators in zip(saved, received, inside, strict=True):
        kept |= dict(pair for each in operators for pair in each.saved) | arrived
    arriving = {"received_bytes": TransferKind.ACTIVATION, "returned_bytes": TransferKind.GRADIENT}
    found = {
        name: [
            sum(size for lane, size in lanes.items() if (lane.kind, lane.target) == (kind, stage))
            for stage in range(len(members))
        ]
        for name, kind in arriving.items()
    }
    held = [dict(p for each in own for p in each.parameters) for own in inside]
    trained = {name for each in profile.operators for name, _ in each.parameter_gradients}
    found["parameter_bytes"] = [sum(sizes.values()) for sizes in held]
    found["trained_bytes"] = [
        sum(size for name, size in sizes.items() if name in trained) for sizes in held
    ]
    found["gradient_bytes"] = [
        sum(size for each in own for _, size in each.parameter_gradients) for own in inside
    ]
    casts = [dict(pair for each in own for pair in each.casts) for own in inside]
    found["cast_bytes"] = [sum(sizes.values()) for sizes in casts]
    found["saved_bytes"] = [sum(sizes.values()) for sizes in saved]
    return found, lanes


def transfers(sent, place):
    found = {}
    for offset, kind in enumerate((TransferKind.ACTIVATION, TransferKind.GRADIENT)):
        some = slice(*sent.first[2 * place + offset : 2 * place + offset + 2])
        rows = zip(sent.source[some], sent.target[some], sent.size_bytes[some], strict=True)
        for source, target, size in rows:
            assert (kind, source, target) not in found
            found[kind, int(source), int(target)] = int(size)
    return found
