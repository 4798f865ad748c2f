"""The sums of partitions, all at once, against those of every stage by hand."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from all_routes import cut_routes
from hypothesis import given, settings
from hypothesis import strategies as st

from pipectl.graph import TransferKind
from pipectl.planner.costs.footprint import Footprints
from pipectl.planner.costs.stage_costs import operator_times, stage_times
from pipectl.planner.graph.blocks import condense
from pipectl.profile import OperatorMemory, StageOverhead

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
        expected = sums_by_hand(profile, stage_of[place].tolist(), inside)
        for name, numbers in expected.items():
            assert getattr(sums, name)[place].tolist() == numbers, name
        alone = Footprints(profile).of(inside)
        assert {
            (each.kind, each.source, each.target): each.size_bytes for each in alone.transfers
        } == (transfers(sums.transfers, place))
        assert alone.sums.values[:, 0].tolist() == sums.values[:, place].tolist()
        assert stage_times(alone.sums, times, scale, OVERHEAD)[:, 0] == pytest.approx(
            times_s[:, place]
        )


def sums_by_hand(profile, stage_of, members):
    """Bytes by stage, from the messages that the runtime sends."""
    returning = {operator.id: operator.gradient_bytes > 0 for operator in profile.operators}
    home = {operator.id: stage for operator, stage in zip(profile.operators, stage_of, strict=True)}
    received = [Counter() for _ in members]
    sent = [{} for _ in members]
    returned = [0] * len(members)
    made = {operator.id: operator.allocations.made_bytes for operator in profile.operators}
    for value, lane in cut_routes(home, profile.edges, returning):
        operator = profile.by_id[value]
        if lane.kind is TransferKind.GRADIENT:
            returned[lane.target] += operator.gradient_bytes
            continue
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
    return found


def transfers(sent, place):
    found = {}
    for offset, kind in enumerate((TransferKind.ACTIVATION, TransferKind.GRADIENT)):
        begin, end = sent.first[2 * place + offset : 2 * place + offset + 2]
        rows = [each[begin:end].tolist() for each in (sent.source, sent.target, sent.size_bytes)]
        for source, target, size in zip(*rows, strict=True):
            assert (kind, source, target) not in found
            found[kind, source, target] = size
    return found
