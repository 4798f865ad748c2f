"""From ranks to pairs, and from figures to a cluster, without MPI processes."""

from __future__ import annotations

import pytest

from pipectl.errors import MismatchError
from pipectl.runtime.links.probe import (
    Place,
    describe_node,
    describe_source,
    ranks_by_node,
)


def place(node: str, *cores: int) -> Place:
    return Place(node, f"host-of-{node}", frozenset(cores), 16 * 2**30)


def test_ranks_are_grouped_by_node() -> None:
    assert ranks_by_node([place(name) for name in "bbaac"]) == [[0, 1], [2, 3], [4]]
    with pytest.raises(MismatchError, match=r"node b has the ranks \[0, 2\]"):
        ranks_by_node([place(name) for name in "bab"])


@pytest.mark.parametrize(("asked", "memory"), [(8 * 2**30, 4 * 2**30), (None, 8 * 2**30)])
def test_nodes_have_the_cores_of_their_ranks_and_their_share_of_memory(asked, memory) -> None:
    bound = describe_node([place("a", 0, 1), place("a", 2, 3)], 2, asked)
    free = describe_node([place("b", 0, 1, 2, 3), place("b", 0, 1, 2, 3)], 2, asked)
    assert [(node.name, node.ranks, node.cores) for node in (bound, free)] == [
        ("a", 2, 2),
        ("b", 2, 2),
    ]
    assert free.device.memory_bytes == memory


@pytest.mark.parametrize(
    ("library", "words"),
    [
        ("MPICH Version:      5.0.2\nMPICH Release date: a day", "MPICH 5.0.2"),
        ("Open MPI v5.0.11, package: Open MPI root@host, ident: 5.0.11", "Open MPI v5.0.11"),
        ("", "an unknown MPI"),
    ],
)
def test_the_source_names_the_library_without_its_dates(library: str, words: str) -> None:
    places = [place("a", 0), place("a", 1), place("b", 0)]
    assert describe_source(library, places) == f"measured with {words}: 3 ranks on 2 hosts"
