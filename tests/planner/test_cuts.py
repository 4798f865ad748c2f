"""Partitions as arrays against their footprints."""

from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipectl.cluster import Cluster, Device, Node
from pipectl.graph import TransferKind
from pipectl.link import Link
from pipectl.planner.costs.footprint import Footprints
from pipectl.planner.costs.stage_costs import operator_times, scaled_transfers, stage_costs
from pipectl.planner.graph.blocks import condense
from pipectl.planner.partition.estimate import PartitionSums
from pipectl.planner.problem import Problem
from pipectl.planner.request import PlanRequest
from pipectl.profile import OperatorMemory, StageOverhead

LINK = Link(1e-4, 1e7)
CLUSTER = Cluster("c", "test", (Node("n", 4, 4, Device("cpu")),), LINK, LINK)
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
def test_arrays_say_the_same_as_footprints(
    data, stages, size, enriched, profiles, partitions_of
) -> None:
    profile = data.draw(measured(profiles) if enriched else profiles())
    problem = Problem(profile, CLUSTER, PlanRequest("job", 16), condense(profile))
    partitions = list(partitions_of(problem.graph, stages))[:5]
    if not partitions:
        return
    scale = size / profile.micro_batch_size
    cuts = PartitionSums(profile, problem.graph).cut(partitions)
    times = cuts.times_s(problem.times.at(size), scale)
    for place, partition in enumerate(partitions):
        members = [problem.graph.operators_of(blocks) for blocks in partition]
        parts = Footprints(profile).of(members)
        costs = stage_costs(parts, operator_times(profile, size), scale, profile)
        sums = cuts.sums.stages[place]
        assert sums["parameter_bytes"].tolist() == [c.parameter_bytes for c in costs]
        assert sums["gradient_bytes"].tolist() == [c.accumulated_bytes for c in costs]
        assert sums["trained_bytes"].tolist() == [m.trained_bytes for m in parts.memory]
        assert sums["saved_bytes"].tolist() == list(parts.saved_bytes)
        assert times[0, place].tolist() == pytest.approx([cost.forward_s for cost in costs])
        assert times[1, place].tolist() == pytest.approx([cost.backward_s for cost in costs])
        assert cuts.update_s()[place].tolist() == pytest.approx([c.update_s for c in costs])
        assert transfers(cuts.sums, place, scale) == {
            (item.kind, item.source, item.target): item.size_bytes
            for item in scaled_transfers(parts, scale)
        }


def transfers(sums, place, scale):
    found = {}
    for offset, kind in enumerate((TransferKind.ACTIVATION, TransferKind.GRADIENT)):
        begin, end = sums.first[2 * place + offset : 2 * place + offset + 2]
        rows = sums.transfers[begin:end].tolist()
        pairs = [(source, target) for source, target, _ in rows]
        assert pairs == sorted(set(pairs))
        for source, target, size in rows:
            found[kind, source, target] = ceil(size * scale)
    return found
