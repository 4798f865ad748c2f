"""Cuts of the dynamic programme against trying every partition."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipectl.cluster import Cluster, Device, Node
from pipectl.link import Link, measured_link
from pipectl.planner import PlanRequest
from pipectl.planner.costs.devices import Mix
from pipectl.planner.costs.links import hold_s
from pipectl.planner.graph.blocks import bits, condense
from pipectl.planner.graph.downsets import CutSpace
from pipectl.planner.partition.cutter import Cutter, table_of
from pipectl.planner.partition.programme import LOAD, MEMORY, Goal, Options, best_chains
from pipectl.planner.problem import Problem
from pipectl.profile import StageOverhead

LINK = Link(latency_s=1e-4, bandwidth_bytes_per_s=1e6)


def problem_of(profile, graph, speeds=(1.0,) * 4):
    nodes = tuple(Node(f"n{i}", 1, 1, Device("d", speed)) for i, speed in enumerate(speeds))
    cluster = Cluster("c", "test", nodes, LINK, LINK)
    return Problem(profile, cluster, PlanRequest("job", 8), graph)


def cutter_of(profile, space):
    return Cutter(problem_of(profile, space.graph), space)


def equal(stages):
    return Mix.ordered([0] * stages, 1)


def bottleneck(times, partition):
    return max(sum(times[block] for block in bits(stage)) for stage in partition)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), stages=st.integers(2, 4), cap=st.sampled_from([4, 1000]))
def test_the_first_partition_has_the_least_bottleneck(
    data, stages, cap, profiles, partitions_of
) -> None:
    profile = data.draw(profiles())
    graph = condense(profile)
    everything = list(partitions_of(graph, stages))
    space = CutSpace.of(graph, profile, cap)
    if len(space.graph) < stages or not everything:
        return
    times = problem_of(profile, graph).block_times(8)
    best = min(bottleneck(times, one) for one in everything)
    own_times = problem_of(profile, space.graph).block_times(8)
    found = cutter_of(profile, space).partitions(stages, 8, equal(stages))[0].partition
    assert bottleneck(own_times, found) >= best - 1e-11
    if space.complete and not space.moved:
        assert bottleneck(own_times, found) == pytest.approx(best, abs=1e-11)


def test_blocks_without_edges_are_merged_instead_of_searched(make_profile, make_operator) -> None:
    tiny = {"forward_s": 1e-7, "backward_s": 0.0}
    operators = [make_operator(i, **(tiny if i % 2 else {})) for i in range(60)]
    profile = make_profile(operators, [(i, i + 2) for i in range(0, 58, 2)])
    space = CutSpace.of(condense(profile), profile)
    assert space.complete
    assert len(space.moved) > 20
    found = cutter_of(profile, space).partitions(3, 8, equal(3))[0].partition
    times = problem_of(profile, space.graph).block_times(8)
    assert bottleneck(times, found) == pytest.approx(10 * 3e-3, rel=1e-3)


@pytest.mark.parametrize(("cache_bytes", "load_s"), [(10**9, 3e-3), (1, 6e-3)])
def test_stages_that_stay_in_the_cache_are_faster(chain, cache_bytes, load_s) -> None:
    profile = chain(4, cached={8: (5e-4, 1e-3)})
    profile = replace(profile, stage=StageOverhead(cache_bytes=cache_bytes))
    space = CutSpace.plain(condense(profile))
    table = table_of(problem_of(profile, space.graph), space, 8)
    chains = best_chains(space, table, Options.of(equal(2).following), Goal(LOAD))
    assert chains.value(equal(2).tallies(2)) == pytest.approx(load_s)


@given(
    times=st.lists(st.floats(1e-7, 1e-2), min_size=1, max_size=10),
    sizes=st.lists(st.integers(0, 10**9), min_size=1, max_size=10),
    latency_s=st.sampled_from([0.0, 1e-6, 1e-3]),
)
def test_times_of_many_messages_are_those_of_each(times, sizes, latency_s) -> None:
    link = replace(measured_link([(4**i, t) for i, t in enumerate(times)]), latency_s=latency_s)
    found = hold_s(link, np.array(sizes, dtype=float))
    assert found == pytest.approx([link.hold_s(size) for size in sizes], rel=1e-9, abs=1e-15)


def test_results_are_kept_for_the_same_numbers_only(chain) -> None:
    """1.2 and 12.5 read like 1.21 and 2.5 if one is written after the other."""
    profile = chain(4)
    space = CutSpace.plain(condense(profile))
    table = table_of(problem_of(profile, space.graph), space, 8)
    options = Options.of(equal(2).following, limit_bytes=0.0)
    peaks = [
        best_chains(
            space,
            table,
            options,
            Goal(MEMORY, in_flight=np.ones(2), temporary_bytes=one, buffers=other),
        ).value(equal(2).tallies(2))
        for one, other in ((1.2, 12.5), (1.21, 2.5))
    ]
    assert peaks[0] > peaks[1] + 1000


def test_operators_at_the_end_that_take_no_time_have_a_stage(make_profile, make_operator) -> None:
    """Sums of the same times differ by rounding: that of all operators was the smaller one."""
    times = [(0.0, 0.001), (0.003, 0.0), (0.0, 0.001), (0.0, 0.0), (0.0, 0.0)]
    operators = [
        make_operator(index, forward_s=forward_s, backward_s=backward_s)
        for index, (forward_s, backward_s) in enumerate(times)
    ]
    profile = make_profile(operators, list(pairwise(range(5))))
    graph = condense(profile)
    cutter = cutter_of(profile, CutSpace.of(graph, profile, 100))
    for size in range(1, 20):
        cuts = cutter.partitions(3, size, equal(3))
        assert all(sum(cut.partition) == graph.everything for cut in cuts)
