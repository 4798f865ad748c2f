"""The places to cut a graph at, if it has more of them than can be searched."""

from pipectl.planner.graph.blocks import condense
from pipectl.planner.graph.downsets import MAX_DOWNSETS, CutSpace
from tests.planner.gate.graphs import make_operator, make_profile


def space_of(alone_s):
    """Of a chain of eight operators, and of twelve without edges that take so many seconds."""
    beside = [make_operator(n, forward_s=alone_s, backward_s=0.0) for n in range(8, 20)]
    profile = make_profile(
        [*(make_operator(n, forward_s=1.0) for n in range(8)), *beside],
        [(n, n + 1) for n in range(7)],
    )
    return CutSpace.of(condense(profile), profile)


def test_operators_that_take_next_to_no_time_are_merged_if_there_are_too_many_cuts():
    """Each operator without edges doubles the number of cuts; all are merged into the last one, so
    9 x 4096 cuts become 9 x 2."""
    space = space_of(1e-6)
    assert space.complete
    assert len(space) == 18
    assert set(space.moved) == set(range(8, 19))


def test_others_are_cut_along_some_orders():
    space = space_of(0.5)
    assert not space.complete
    assert not space.moved
    assert 20 < len(space) <= MAX_DOWNSETS
