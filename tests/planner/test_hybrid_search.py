"""The hybrid search against trying everything, and its promises."""

from itertools import combinations, pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipectl.cluster import Cluster, Device, Node
from pipectl.link import Link
from pipectl.planner.hybrid import ClusterRules, HybridRequest, States, hybrid_plans
from pipectl.planner.hybrid.links import shares
from pipectl.planner.hybrid.model import Model, costs_of, layout_of, replica_counts
from pipectl.planner.hybrid.placing import POLICIES, device_orders, placed
from pipectl.planner.hybrid.value import bound_s, parts_of, value_s


def cluster_of(machines, speeds=None, memory_bytes=None):
    nodes = tuple(
        Node(f"node{i}", ranks, ranks, Device("cpu", (speeds or [1.0] * 9)[i], memory_bytes))
        for i, ranks in enumerate(machines)
    )
    return Cluster("test", "test", nodes, Link(1e-5, 1e8), Link(1e-4, 1e6))


def model_of(profile, states, rules, request):
    size = request.sizes[0]
    replicas = replica_counts(len(rules.machine_of))
    costs = costs_of(profile, states, size, replicas.tolist(), fractions=request.fractions)
    layout = layout_of(rules, range(len(rules.machine_of)), replicas)
    count = request.micro_batches(size)
    return Model(costs, layout, states.follows, len(replicas) - 1, count, request.last_share(size))


def every_plan(states, devices):
    """Cuts and picks of all plans with consecutive devices."""
    last = len(states) - 1
    for stages in range(1, min(devices, last) + 1):
        for inner in combinations(range(1, last), stages - 1):
            cuts = (0, *inner, last)
            if all(states.follows[a, b] for a, b in pairwise(cuts)):
                for replicas in product(range(1, devices + 1), repeat=stages):
                    if sum(replicas) <= devices:
                        yield cuts, tuple(count - 1 for count in replicas)


@settings(max_examples=30, derandomize=True)
@given(data=st.data())
def test_no_plan_of_small_graphs_is_much_better(profiles, data):
    """A search by seeds and moves: nearly always the best plan, never far from it."""
    profile = data.draw(profiles(6))
    machines = data.draw(st.sampled_from([[4], [2, 2], [1, 1, 1], [3, 1]]))
    speeds = data.draw(st.sampled_from([None, [1.0, 3.0, 2.0]]))
    rules = ClusterRules(cluster_of(machines, speeds))
    request = HybridRequest(data.draw(st.sampled_from([8, 24, 44])), (8,), scatter=False)
    states = States.of(profile)
    model = model_of(profile, states, rules, request)
    least_s = min(
        value_s(model, np.array(cuts), np.array(picks), np.inf)
        for cuts, picks in every_plan(states, sum(machines))
    )
    best = hybrid_plans(profile, states, rules, request)[0]
    assert best.step_time_s <= least_s * 1.15
    assert best.lower_bound_s <= least_s * (1 + 1e-9)


def test_sums_take_what_they_take_in_the_simulator():
    """Of the messages between four replicas on two nodes, four share the link at a time."""
    assert ClusterRules(cluster_of([1])).reduce_s(1e6, [0]) == 0.0
    assert ClusterRules(cluster_of([2])).reduce_s(1e6, [0, 1]) == pytest.approx(2 * (1e-5 + 5e-3))
    four = ClusterRules(cluster_of([2, 2])).reduce_s(1e6, range(4))
    assert four == pytest.approx(2 * (1e-4 + 4 * 0.25))


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_the_bound_is_never_above_the_step(profiles, data):
    profile = data.draw(profiles(6))
    rules = ClusterRules(cluster_of([2, 2]))
    request = HybridRequest(data.draw(st.sampled_from([4, 8, 44, 400])), (8,))
    states = States.of(profile)
    model = model_of(profile, states, rules, request)
    for cuts, picks in every_plan(states, 4):
        plan = np.array(cuts), np.array(picks)
        bound = bound_s(parts_of(model, *plan), model.micro_batches, model.last_share)
        assert bound <= value_s(model, *plan, np.inf) * (1 + 1e-9)


def test_plans_come_best_first_cover_the_graph_and_repeat(chain):
    profile = chain(9)
    states, rules = States.of(profile), ClusterRules(cluster_of([2, 2]))
    request = HybridRequest(64, (4, 8, 16))
    found = hybrid_plans(profile, states, rules, request)
    assert found == hybrid_plans(profile, states, rules, request)
    assert [p.step_time_s for p in found] == sorted(p.step_time_s for p in found)
    for plan in found:
        stages = (states.between(*ends) for ends in pairwise(plan.cuts))
        nodes = [profile.operators[index].id for stage in stages for index in stage]
        assert sorted(nodes) == sorted(o.id for o in profile.operators)
        ranks = [rank for stage in plan.ranks for rank in stage]
        assert len(set(ranks)) == len(ranks)
        assert set(ranks) <= set(range(4))


def test_time_that_is_up_still_gives_a_plan(chain):
    profile = chain(9)
    states, rules = States.of(profile), ClusterRules(cluster_of([2, 2]))
    request = HybridRequest(64, (4, 8, 16))
    early = hybrid_plans(profile, states, rules, request, lambda: True)
    assert early
    assert early[0].step_time_s >= hybrid_plans(profile, states, rules, request)[0].step_time_s


def test_fewer_states_than_devices(chain):
    profile = chain(2)
    rules = ClusterRules(cluster_of([4, 4]))
    best = hybrid_plans(profile, States.of(profile), rules, HybridRequest(64, (8, 16)))[0]
    assert len(best.ranks) <= 2
    assert sum(best.replicas) <= 8


def test_memory_asks_for_stages_and_too_little_for_nothing(chain):
    profile = chain(4, parameter_bytes=1000, parameters=(("p", 1000),))
    states = States.of(profile)
    request = HybridRequest(16, (8,))
    # Parameters, gradients and two of optimizer state: 4000 bytes an operator, 1000 saved. Where
    # two replicas sum gradients, 1500 more.
    roomy = hybrid_plans(profile, states, ClusterRules(cluster_of([4]), 40_000), request)
    tight = hybrid_plans(profile, states, ClusterRules(cluster_of([4]), 11_500), request)
    assert min(len(plan.ranks) for plan in roomy) == 1
    assert min(len(plan.ranks) for plan in tight) == 2
    summing = hybrid_plans(profile, states, ClusterRules(cluster_of([4]), 10_500), request)
    assert all(len(plan.ranks) > 2 or plan.replicas == (1, 1) for plan in summing)
    assert not hybrid_plans(profile, states, ClusterRules(cluster_of([4]), 4_000), request)


def test_placement_policies():
    machine_of = [0] * 4 + [1] * 4
    replicas = (2, 2, 3, 1)
    assert placed(machine_of, replicas, POLICIES["append"]) == ((0, 1), (2, 3), (4, 5, 6), (7,))
    assert placed(machine_of, replicas, POLICIES["fresh"]) == ((0, 1), (4, 5), (2, 3, 6), (7,))
    assert placed(machine_of, replicas, POLICIES["scatter"]) == ((0, 4), (1, 5), (2, 3, 6), (7,))
    assert device_orders(machine_of) == [(0, 1, 2, 3, 4, 5, 6, 7), (0, 4, 1, 5, 2, 6, 3, 7)]
    assert device_orders([0, 1, 2]) == [(0, 1, 2)]


@pytest.mark.parametrize(("left", "right"), [(1, 1), (1, 3), (2, 3), (4, 2), (5, 3)])
def test_messages_between_replicas_carry_the_micro_batch_once(left, right):
    found = list(shares(range(left), range(right)))
    assert sum(share for *_, share in found) == pytest.approx(1.0)
    assert len(found) == left + right - np.gcd(left, right)
    for sender in range(left):
        assert sum(s for a, _, s in found if a == sender) == pytest.approx(1 / left)
