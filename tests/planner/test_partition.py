from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipectl.link import Link, measured_link
from pipectl.planner.graphs.bitsets import bits
from pipectl.planner.graphs.condense import condense
from pipectl.planner.graphs.loads import PER_SECOND, Costs, hold_s
from pipectl.planner.machines.mix import Mix
from pipectl.planner.partitions.partition import Partitioner, Space
from pipectl.profile import StageOverhead

LINK = Link(latency_s=0.0, bandwidth_bytes_per_s=1e6)


def compute_s(profile, graph, free=()):
    return [
        sum(
            profile.operators[i].forward_s + profile.operators[i].backward_s
            for i in block.operators
            if i not in free
        )
        for block in graph.blocks
    ]


def costs_of(times, least=None, *, link=LINK, cached=None, overhead=None, speeds=(1.0,)):
    fast = cached or times
    return Costs(
        compute_s=fast,
        uncached_s=times,
        least_s=least or fast,
        least_uncached_s=least or times,
        scale=1.0,
        link=link,
        speeds=speeds,
        overhead=overhead or StageOverhead(),
    )


def partitioner(profile, space, stages, speeds=None):
    """With one device of each speed that stages can use, in any order; or with equal devices."""
    costs = costs_of(
        compute_s(profile, space.graph),
        compute_s(profile, space.graph, space.moved),
        speeds=speeds or (1.0,),
    )
    mix = Mix.free([1] * len(speeds), stages) if speeds else Mix.free([stages], stages)
    return Partitioner(space, costs, mix, fewest=stages, most=stages)


def bottleneck(graph, times, partition, speeds):
    loads = [sum(times[block] for block in bits(stage)) for stage in partition]
    return max(load / speed for load, speed in zip(loads, speeds, strict=True))


def bottleneck_with_messages(graph, times, partition):
    """Every value that crosses a stage's border counts once in that stage."""
    loads = []
    for stage in partition:
        crossing = [v for v in graph.values if v.blocks & stage and v.blocks & ~stage]
        sent = sum(value.size_bytes + value.gradient_bytes for value in crossing)
        loads.append(sum(times[b] for b in bits(stage)) + sent / LINK.bandwidth_bytes_per_s)
    return max(loads)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), stages=st.integers(1, 4))
def test_bottleneck_equals_that_of_trying_every_partition(
    data, stages, profiles, partitions_of
) -> None:
    profile = data.draw(profiles())
    graph = condense(profile)
    times = compute_s(profile, graph)
    speeds = [data.draw(st.sampled_from([1.0, 2.0])) for _ in range(stages)]
    everything = list(partitions_of(graph, stages))
    search = partitioner(profile, Space.of(graph, profile), stages, speeds)
    if not everything:
        assert search.partitions(stages) == []
        return
    best = min(
        bottleneck(graph, times, partition, order)
        for partition in everything
        for order in permutations(speeds)
    )
    bound = search.bound(stages, sorted(speeds, reverse=True))
    assert bound.exact
    assert bound.load_s == pytest.approx(best, abs=1e-11)
    found = search.partitions(stages)
    assert {cut.partition for cut in found} <= set(everything)
    order = [speeds[kind] for kind in found[0].kinds]
    assert sorted(order) == sorted(speeds)
    assert bottleneck(graph, times, found[0].partition, order) == pytest.approx(best, abs=1e-11)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), stages=st.integers(2, 4))
def test_bottleneck_with_messages_equals_that_of_trying_every_partition(
    data, stages, profiles, partitions_of
) -> None:
    profile = data.draw(profiles())
    graph = condense(profile)
    times = compute_s(profile, graph)
    everything = list(partitions_of(graph, stages))
    if everything:
        best = min(bottleneck_with_messages(graph, times, one) for one in everything)
        search = partitioner(profile, Space.of(graph, profile), stages)
        found = [
            bottleneck_with_messages(graph, times, cut.partition)
            for cut in search.partitions(stages)
        ]
        assert min(found) == pytest.approx(best, abs=1e-11)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), stages=st.integers(1, 4), cap=st.integers(2, 30))
def test_bound_holds_where_only_a_part_of_the_downsets_is_searched(
    data, stages, cap, profiles, partitions_of
) -> None:
    profile = data.draw(profiles())
    graph = condense(profile)
    times = compute_s(profile, graph)
    everything = list(partitions_of(graph, stages))
    space = Space.of(graph, profile, cap)
    if len(space.graph) < stages or not everything:
        return
    best = min(bottleneck(graph, times, one, [1.0] * stages) for one in everything)
    search = partitioner(profile, space, stages)
    bound = search.bound(stages, [1.0] * stages)
    assert bound.load_s <= best + 1e-11
    own_times = compute_s(profile, space.graph)
    found = search.partitions(stages)[0].partition
    load = bottleneck(space.graph, own_times, found, [1.0] * stages)
    assert load >= best - 1e-11
    if bound.exact:
        assert bound.load_s == pytest.approx(best, abs=1e-11)


def test_among_equal_bottlenecks_the_least_sent_wins(make_profile, make_operator) -> None:
    sizes = (9000, 1000, 9000, 9000)
    operators = [make_operator(i, output_bytes=size) for i, size in enumerate(sizes)]
    operators[1] = make_operator(1, output_bytes=1000, forward_s=0.0, backward_s=0.0)
    profile = make_profile(operators, [(0, 1), (1, 2), (2, 3)])
    search = partitioner(profile, Space.of(condense(profile), profile), 3)
    assert search.partitions(3)[0].partition[0] == 0b0011


def test_blocks_without_edges_are_merged_instead_of_searched(make_profile, make_operator) -> None:
    tiny = {"forward_s": 1e-7, "backward_s": 0.0}
    operators = [make_operator(i, **(tiny if i % 2 else {})) for i in range(60)]
    profile = make_profile(operators, [(i, i + 2) for i in range(0, 58, 2)])
    space = Space.of(condense(profile), profile)
    assert space.complete
    assert len(space.moved) > 20
    bound = partitioner(profile, space, 3).bound(3, [1.0] * 3)
    assert bound.load_s == pytest.approx(10 * 3e-3, rel=1e-3)


def test_the_bound_holds_if_stages_that_stay_in_the_cache_are_faster(chain) -> None:
    profile = chain(4)
    space = Space.of(condense(profile), profile)
    slow_s = compute_s(profile, space.graph)
    fast_s = [time / 2 for time in slow_s]
    cached = costs_of(slow_s, cached=fast_s, overhead=StageOverhead(cache_bytes=10**9))
    never = costs_of(slow_s, cached=fast_s, overhead=StageOverhead(cache_bytes=1))
    found = [
        Partitioner(space, costs, Mix.free([2], 2), fewest=2, most=2).bound(2, [1.0, 1.0])
        for costs in (cached, never)
    ]
    assert [bound.load_s for bound in found] == pytest.approx([sum(fast_s) / 2, sum(slow_s) / 2])
    assert all(bound.exact for bound in found)


def test_messages_count_with_what_was_measured_for_their_size(chain) -> None:
    """The middle of three stages has two borders; only the time of so many bytes can tell."""
    profile = chain(3)
    graph = condense(profile)
    crossing = 2 * max(value.size_bytes + value.gradient_bytes for value in graph.values)
    loads = []
    for time_s in (0.0, 5.0):
        link = Link(0.0, 1e6, timings=((1, 0.0), (crossing, time_s), (crossing + 1, 9.0)))
        times_s = compute_s(profile, graph)
        costs, mix = costs_of(times_s, link=link), Mix.free([3], 3)
        search = Partitioner(Space.of(graph, profile), costs, mix, fewest=3, most=3)
        loads.append(search._bottlenecks_with_messages.best(3) / PER_SECOND)
    assert loads[1] - loads[0] == pytest.approx(5.0)


@given(
    times=st.lists(st.floats(1e-7, 1e-2), min_size=1, max_size=10),
    sizes=st.lists(st.integers(0, 10**9), min_size=1, max_size=10),
    latency_s=st.sampled_from([0.0, 1e-6, 1e-3]),
)
def test_times_of_many_messages_are_those_of_each(times, sizes, latency_s) -> None:
    link = replace(measured_link([(4**i, t) for i, t in enumerate(times)]), latency_s=latency_s)
    found = hold_s(link, np.array(sizes, dtype=float))
    assert found == pytest.approx([link.hold_s(size) for size in sizes], rel=1e-9, abs=1e-15)
