"""The throughput planner against everything there is, on small random graphs."""

from fractions import Fraction
from functools import cache
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipectl.errors import InfeasibleError
from pipectl.planner.throughput import ThroughputRequest, plan_throughput
from pipectl.profile import Operator, Profile, Variant

sizes = st.integers(0, 6)


@st.composite
def workloads(draw):
    """Any DAG; every node with one or two variants at one or two tensor-parallel degrees."""
    count = draw(st.integers(1, 4))
    pairs = list(combinations(range(count), 2))
    edges = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    operators = []
    for index in range(count):
        after = [str(target) for source, target in edges if source == index]
        before = [str(source) for source, target in edges if target == index]
        variants = []
        for degree in draw(st.sampled_from([(1,), (1, 2), (2,)])):
            forth = {name: draw(sizes) for name in before}
            back = {name: draw(sizes) for name in after}
            for recompute in draw(st.sampled_from([(False,), (False, True), (True,)])):
                time_s, weights, kept = float(draw(sizes)), draw(st.integers(0, 2)), draw(sizes)
                fixed = draw(st.integers(0, 3))
                variants.append(
                    Variant(degree, recompute, time_s, weights, kept, fixed, forth, back)
                )
        operators.append(Operator(str(index), "", 0.0, 0.0, 0, 0, 0, variants=tuple(variants)))
    named = tuple((str(source), str(target)) for source, target in sorted(edges))
    moved = {edge: draw(sizes) for edge in named}
    return Profile("any", "test", 1, tuple(operators), named, edge_bytes=moved)


requests = st.builds(
    ThroughputRequest,
    devices=st.integers(1, 7),
    memory_limit_bytes=st.one_of(st.none(), st.integers(0, 40)),
    bandwidth_bytes_per_s=st.one_of(st.none(), st.sampled_from([1.0, 4.0])),
    micro_batches=st.sampled_from([1, 2, 3, 4, 6, 12]),
)


def stage_time(profile, request, chosen, replicas):
    """From the definition, in fractions; ``chosen`` is the variant of every node of the stage."""
    rate = request.bandwidth_bytes_per_s
    compute = sum(Fraction(variant.time_s) for variant in chosen.values())
    moved = Fraction(0)
    for (source, target), size in profile.edge_bytes.items():
        if source in chosen and target not in chosen:
            moved += 2 * (size + chosen[source].sync_bw_bytes[target])
        if target in chosen and source not in chosen:
            moved += 2 * (size + chosen[target].sync_fw_bytes[source])
    weights = sum(variant.parameter_bytes for variant in chosen.values())
    summed = Fraction(4 * (replicas - 1) * weights, replicas * request.micro_batches)
    return compute / replicas + (
        0 if rate is None else (moved / replicas + summed) / Fraction(rate)
    )


def memory(chosen, in_flight):
    return sum(v.mem_per_microbatch_bytes * in_flight + v.mem_fixed_bytes for v in chosen.values())


def fastest_stage(profile, request, nodes, tensor, replicas, in_flight):
    """The least time over all choices of variants that fit; None if none does."""
    options = [
        [v for v in profile.by_id[node].variants if v.tensor_parallel == tensor] for node in nodes
    ]
    times = []
    for variants in product(*options):
        chosen = dict(zip(nodes, variants, strict=True))
        limit = request.memory_limit_bytes
        if limit is None or memory(chosen, in_flight) <= limit:
            times.append(stage_time(profile, request, chosen, replicas))
    return min(times, default=None)


def least_time(profile, request):
    """By trying every chain of stages, every degree of both kinds and every choice of variants."""
    names = [operator.id for operator in profile.operators]
    most = min(request.devices, request.micro_batches)
    fastest = cache(
        lambda nodes, tensor, replicas, in_flight: fastest_stage(
            profile, request, nodes, tensor, replicas, in_flight
        )
    )

    @cache
    def best(left, devices, behind):
        """Stages for the nodes that are left, with so many replicas behind them."""
        if not left:
            return Fraction(0)
        found = []
        for size in range(1, len(left) + 1):
            for nodes in combinations(left, size):
                rest = tuple(node for node in left if node not in nodes)
                if any(a in nodes and b in rest for a, b in profile.edges):
                    continue
                for tensor, replicas in product((1, 2), range(1, most - behind + 1)):
                    if request.micro_batches % replicas or tensor * replicas > devices:
                        continue
                    in_flight = -(-(behind + replicas) // replicas)
                    time = fastest(nodes, tensor, replicas, in_flight)
                    if time is not None:
                        tail = best(rest, devices - tensor * replicas, behind + replicas)
                        found.append(None if tail is None else max(time, tail))
        return min((time for time in found if time is not None), default=None)

    return best(tuple(names), request.devices, 0)


def check_plan(profile, request, plan):
    """What the plan says of itself is so, by the definition."""
    behind, seen, slowest = 0, [], Fraction(0)
    for stage in reversed(plan.stages):
        behind += stage.data_parallel
        assert request.micro_batches % stage.data_parallel == 0
        assert stage.in_flight == -(-behind // stage.data_parallel)
        chosen = {}
        for node in stage.nodes:
            wanted = stage.tensor_parallel, node in stage.recomputed
            variants = profile.by_id[node].variants
            (chosen[node],) = [v for v in variants if (v.tensor_parallel, v.recompute) == wanted]
        assert stage.memory_bytes == memory(chosen, stage.in_flight)
        assert (
            request.memory_limit_bytes is None or stage.memory_bytes <= request.memory_limit_bytes
        )
        time = stage_time(profile, request, chosen, stage.data_parallel)
        assert stage.time_s == pytest.approx(float(time), rel=1e-12)
        slowest = max(slowest, time)
        seen = [*stage.nodes, *seen]
        assert not any(a in stage.nodes and b not in seen for a, b in profile.edges)
    assert sorted(seen) == sorted(operator.id for operator in profile.operators)
    assert behind <= request.micro_batches
    assert plan.devices <= request.devices
    assert plan.value_s == pytest.approx(float(slowest), rel=1e-12)


@settings(max_examples=150, deadline=None)
@given(workloads(), requests)
def test_no_plan_is_faster(profile, request) -> None:
    expected = least_time(profile, request)
    if expected is None:
        with pytest.raises(InfeasibleError):
            plan_throughput(profile, request)
        return
    plan = plan_throughput(profile, request)
    check_plan(profile, request, plan)
    assert plan.exact
    assert plan.value_s == pytest.approx(float(expected), rel=1e-12)
    assert plan.lower_bound_s == plan.value_s


@settings(max_examples=50, deadline=None)
@given(workloads(), requests, st.integers(0, 5))
def test_a_stopped_search_tells_the_truth(profile, request, questions) -> None:
    expected = least_time(profile, request)
    if expected is None:
        return
    asked = iter(range(questions))
    plan = plan_throughput(profile, request, lambda: next(asked, None) is None)
    check_plan(profile, request, plan)
    tolerance = 1e-12 * float(expected)
    assert plan.lower_bound_s - tolerance <= float(expected) <= plan.value_s + tolerance
