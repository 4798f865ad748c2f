"""Every policy gives a whole plan, and is optimal for what it minimises on small chains."""

from itertools import combinations

import numpy as np
import pytest
from published import DappleRules

from pipectl.cluster import Cluster, Device, Node
from pipectl.link import Link
from pipectl.planner.baselines import NAMES, POLICIES, Work
from pipectl.planner.baselines.dapple import _Sums
from pipectl.planner.baselines.pipedream import antichain_states
from pipectl.planner.baselines.policy import balanced
from pipectl.planner.costs.links import Links


def rules_of(machines):
    nodes = tuple(Node(f"node{i}", n, n, Device("cpu")) for i, n in enumerate(machines))
    return Links(Cluster("test", "test", nodes, Link(1e-5, 1e9), Link(1e-4, 1e8)))


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("machines", [[1], [4], [2, 2], [1, 1, 1]])
def test_plans_are_whole(chain, name, machines):
    profile = chain(6)
    rules = rules_of(machines)
    found = POLICIES[name](profile, rules, Work(64, 8))
    members = [found.states.graph.operators_of(blocks) for blocks in found.partition]
    nodes = [profile.operators[index].id for inside in members for index in inside]
    ranks = [rank for stage in found.ranks for rank in stage]
    assert nodes == [operator.id for operator in profile.operators]
    assert len(found.ranks) == len(found.cuts) - 1
    assert sorted(set(ranks)) == sorted(ranks)
    assert set(ranks) <= set(range(sum(machines)))
    assert found.cuts == POLICIES[name](profile, rules, Work(64, 8)).cuts


@pytest.mark.parametrize("name", POLICIES)
def test_fewer_operators_than_devices(chain, name):
    profile = chain(2)
    found = POLICIES[name](profile, rules_of([4, 4]), Work(64, 8))
    assert found.partition == (0b01, 0b10)


def test_names():
    assert set(NAMES) == {
        "pipectl",
        "dapple",
        "pipedream",
        "antichain",
        "gpipe-balance",
        "uniform",
        "parameters",
        "hash",
    }


def test_blocks_are_balanced_as_well_as_possible():
    random = np.random.default_rng(0)
    for _ in range(50):
        times = np.concatenate([[0.0], random.integers(1, 9, 7).cumsum()]).astype(float)
        for count in range(1, 8):
            cuts, largest = balanced(times, count)
            least = min(
                np.diff(times[[0, *inner, 7]]).max()
                for inner in combinations(range(1, 7), count - 1)
            )
            assert np.diff(times[list(cuts)]).max() == largest == least


def test_antichain_states_of_a_diamond(make_operator, make_profile):
    """0 feeds 1 and 2, which feed 3: the second branch is left out or in."""
    profile = make_profile([make_operator(i) for i in range(4)], [(0, 1), (0, 2), (1, 3), (2, 3)])
    states = antichain_states(profile)
    inside = [frozenset(np.flatnonzero(row).tolist()) for row in states.operators]
    assert inside[0] == frozenset()
    assert inside[1] == {0}
    assert set(inside[2:-2]) == {frozenset({0, 1}), frozenset({0, 2})}
    assert inside[-2:] == [frozenset({0, 1, 2}), frozenset({0, 1, 2, 3})]


def test_antichain_states_of_a_chain_are_its_prefixes(chain):
    inside = [set(np.flatnonzero(row).tolist()) for row in antichain_states(chain(5)).operators]
    assert inside == [set(range(count)) for count in range(6)]


def test_dapple_counts_of_a_sum_what_earlier_stages_do_not_hide():
    sums = _Sums().with_stage(2.0, 0.0, 0.0).with_stage(1.0, 0.5, 3.0)
    assert sums.latency_s(4, 3.0) == 3 * 2.0 + 3.0 + 0.5 + (3.0 - 2.0)


def test_dapple_links():
    """Worked by hand: 1 MB over 1, 3 and 25 GB/s."""
    rules = DappleRules([2, 2])
    assert rules.transfer_s(1e6, [0], [1]).hold_s == pytest.approx(1e6 / 25e9)
    assert rules.transfer_s(1e6, [0], [2]).hold_s == pytest.approx(1e-3)
    assert rules.transfer_s(1e6, [1, 2], [3]).hold_s == pytest.approx(0.5e-3)
    assert rules.transfer_s(1e6, [0], [1, 2]).hold_s == pytest.approx(1e6 / 3e9)
    assert rules.reduce_s(1e6, [0]) == 0.0
    assert rules.reduce_s(1e6, [0, 1]) == pytest.approx(1e6 / 25e9)
    assert rules.reduce_s(1e6, [1, 2]) == pytest.approx(1e6 / 3e9)


@pytest.mark.parametrize("name", POLICIES)
def test_links_whose_time_is_all_latency_are_no_fault(chain, name):
    link = Link(1e-3, 1e9, timings=((1, 1e-3), (2_000_000, 1e-3)))
    nodes = tuple(Node(f"node{i}", 2, 2, Device("cpu")) for i in range(2))
    rules = Links(Cluster("test", "test", nodes, link, link))
    assert POLICIES[name](chain(6), rules, Work(64, 8)).ranks
