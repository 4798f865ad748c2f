"""Whether ranks are on the nodes that their plan counts on."""

import pytest

from pipectl.runtime.agreement import misplaced


@pytest.mark.parametrize(
    ("nodes", "node_of_rank"),
    [
        ([[0, 1], [2, 3]], (0, 0, 1, 1)),
        ([[0]], (0,)),
        ([[0, 1, 2], [3]], (5, 5, 5, 7)),
    ],
)
def test_nothing_is_said_of_ranks_that_are_in_their_places(nodes, node_of_rank) -> None:
    assert misplaced(nodes, node_of_rank) == ""


@pytest.mark.parametrize(
    ("nodes", "node_of_rank", "words"),
    [
        ([[0, 2], [1, 3]], (0, 0, 1, 1), "has the ranks 0, 2, where the plan counts on 0-1"),
        ([[0, 1, 2, 3]], (0, 0, 1, 1), "has the ranks 0-3, where the plan counts on 0-1"),
        ([[0, 1], [2], [3]], (0, 0, 1, 1), "has the ranks 2, where the plan counts on 2-3"),
    ],
)
def test_the_first_node_that_differs_is_named(nodes, node_of_rank, words: str) -> None:
    assert words in misplaced(nodes, node_of_rank)
