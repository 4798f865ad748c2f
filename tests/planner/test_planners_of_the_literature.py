"""Planners of the literature, whose published plans ours are compared with."""

import numpy as np
import pytest

from pipectl.link import Link
from pipectl.planner.costs.links import Links
from tests.benchmarks.literature import dapple
from tests.benchmarks.literature.dapple import PLACEMENTS
from tests.benchmarks.literature.pipedream import antichain_states, solved
from tests.benchmarks.literature.policy import Work
from tests.planner.gate.checked_plans import cluster_of
from tests.planner.gate.graphs import chain, make_operator, make_profile

WORK = Work(batch_size=64, micro_batch_size=8)
LINK = Link(0.0, 1e9)


@pytest.mark.parametrize("machines", [(1, 1, 1, 1), (2, 2), (1,)])
def test_dapple_gives_every_rank_to_one_stage(machines):
    links = Links(cluster_of(*machines, within=LINK))
    found = dapple.plan(chain(8), links, WORK)
    assert sorted(rank for ranks in found.ranks for rank in ranks) == [*range(sum(machines))]
    blocks = [block for stage in found.partition for block in range(8) if stage >> block & 1]
    assert blocks == [*range(8)]


def test_dapple_counts_of_a_sum_what_earlier_stages_do_not_hide():
    sums = dapple._Sums().with_stage(2.0, 0.0, 0.0).with_stage(1.0, 0.5, 3.0)
    assert sums.latency_s(4, 3.0) == 3 * 2.0 + 3.0 + 0.5 + (3.0 - 2.0)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("fresh", "00221123"), ("append", "00112223"), ("scatter", "01220123")],
)
def test_dapple_places_stages_as_drawn(name, expected):
    free, sizes = [[0, 1, 2, 3], [4, 5, 6, 7]], [4, 4]
    stage_of = [""] * 8
    for stage, count in enumerate((2, 2, 3, 1)):
        for rank in PLACEMENTS[name](free, sizes, count):
            stage_of[rank] = str(stage)
    assert "".join(stage_of) == expected


def test_pipedream_gives_the_longest_operator_replicas():
    """Nothing to sum or to send, so only the shares of time count."""
    each = [{"forward_s": s, "backward_s": 2 * s} for s in (1e-3, 9e-3, 1e-3)]
    free = {"parameters": (), "parameter_bytes": 0, "output_bytes": 1, "gradient_bytes": 1}
    found = solved(chain(each, **free), WORK, [4], [1e9], straight=False)
    straight = solved(chain(each, **free), WORK, [3], [1e9], straight=True)
    assert max(map(len, found.ranks)) > 1
    assert found.value_s < straight.value_s
    assert [len(ranks) for ranks in straight.ranks] == [1, 1, 1]


def test_antichain_states_of_a_diamond():
    """0 feeds 1 and 2, which feed 3: the second branch is left out or in."""
    profile = make_profile([make_operator(i) for i in range(4)], [(0, 1), (0, 2), (1, 3), (2, 3)])
    states = antichain_states(profile)
    inside = [frozenset(np.flatnonzero(row).tolist()) for row in states.operators]
    assert inside[0] == frozenset()
    assert inside[1] == {0}
    assert set(inside[2:-2]) == {frozenset({0, 1}), frozenset({0, 2})}
    assert inside[-2:] == [frozenset({0, 1, 2}), frozenset({0, 1, 2, 3})]
