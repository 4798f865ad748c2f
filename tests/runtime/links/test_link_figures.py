"""From ranks to pairs, and from figures to a cluster, without MPI processes."""

from __future__ import annotations

import pytest

from pipectl.cluster import ASSUMED_BETWEEN
from pipectl.errors import MismatchError
from pipectl.link import Link, measured_link
from pipectl.runtime.links.describe import describe
from pipectl.runtime.links.measure import Figures
from pipectl.runtime.links.one_link import _overlap_sizes
from pipectl.runtime.links.places import Place, pairs_between, pairs_within, ranks_by_node
from pipectl.runtime.links.session import FEWEST, MOST, repeats
from pipectl.runtime.links.sums import rank_counts


def place(node: str, *cores: int) -> Place:
    return Place(node, f"host-of-{node}", frozenset(cores), 16 * 2**30)


def test_ranks_are_grouped_by_node() -> None:
    assert ranks_by_node([place(name) for name in "bbaac"]) == [[0, 1], [2, 3], [4]]
    with pytest.raises(MismatchError, match=r"node b has the ranks \[0, 2\]"):
        ranks_by_node([place(name) for name in "bab"])


@pytest.mark.parametrize(
    ("nodes", "within", "between"),
    [
        ([[0, 1]], [(0, 1)], []),
        ([[0, 1, 2, 3]], [(0, 1), (0, 3)], []),
        ([[0], [1]], [], [(0, 1)]),
        ([[0], [1, 2], [3, 4]], [(1, 2)], [(0, 1), (0, 3)]),
    ],
)
def test_pairs_are_neighbours_and_the_farthest(nodes, within, between) -> None:
    assert pairs_within(nodes) == within
    assert pairs_between(nodes) == between


@pytest.mark.parametrize(
    ("ranks", "counts"), [(2, [2]), (3, [2, 3]), (4, [2, 4]), (12, [2, 4, 8, 12])]
)
def test_sums_are_over_powers_of_two_and_all(ranks: int, counts: list[int]) -> None:
    assert rank_counts(ranks) == counts


def test_repeats_fill_their_share_within_limits() -> None:
    assert repeats(0.01, 0.1) == 10
    assert repeats(1.0, 0.1) == FEWEST
    assert repeats(0.0, 1.0) == MOST


def test_overlap_is_measured_for_sizes_there_is_time_for() -> None:
    fast = measured_link([(4**power, 1e-6 + 4**power / 1e10) for power in range(14)])
    slow = measured_link([(4**power, 1e-6 + 4**power / 1e8) for power in range(13)])
    assert _overlap_sizes(fast, 1.0) == [2**20, 2**24]
    assert _overlap_sizes(slow, 1.0) == [2**20]
    assert _overlap_sizes(measured_link([(1, 1e-6), (4, 2e-6)]), 1.0) == [4]


@pytest.mark.parametrize(("asked", "memory"), [(8 * 2**30, 4 * 2**30), (None, 8 * 2**30)])
def test_nodes_have_the_cores_of_their_ranks_and_their_share_of_memory(asked, memory) -> None:
    figures = Figures(
        places=(place("a", 0, 1), place("a", 2, 3), place("b", 0, 1, 2, 3), place("b", 0, 1, 2, 3)),
        nodes=((0, 1), (2, 3)),
        within_node=Link(1e-6, 1e9),
        between_nodes=ASSUMED_BETWEEN,
        allreduce=((4, 4096, 1e-3),),
    )
    cluster = describe(
        figures,
        name="job",
        library="MPICH Version:      5.0.2\nMPICH Release date: a day",
        key=None,
        cpus_per_task=2,
        memory_per_node=asked,
    )
    assert cluster.source == "measured with MPICH 5.0.2: 4 ranks on 2 hosts"
    assert [(node.name, node.ranks, node.cores) for node in cluster.nodes] == [
        ("a", 2, 2),
        ("b", 2, 2),
    ]
    assert cluster.device(3).memory_bytes == memory
    assert not cluster.assumed


@pytest.mark.parametrize(
    ("library", "words"),
    [
        ("Open MPI v5.0.11, package: Open MPI root@host, ident: 5.0.11", "Open MPI v5.0.11"),
        ("", "an unknown MPI"),
    ],
)
def test_the_source_names_the_library_without_its_dates(library: str, words: str) -> None:
    figures = Figures((place("a", 0),), ((0,),), ASSUMED_BETWEEN, ASSUMED_BETWEEN, ())
    found = describe(
        figures,
        name="j",
        library=library,
        key=None,
        cpus_per_task=1,
        memory_per_node=None,
    )
    assert found.source == f"measured with {words}: 1 ranks on 1 host"
