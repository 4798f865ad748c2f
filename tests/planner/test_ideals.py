from hypothesis import given
from hypothesis import strategies as st

from pipectl.planner.graph.blocks import bits, condense
from pipectl.planner.graph.downsets import all_downsets, prefix_downsets


def is_downset(graph, members: int) -> bool:
    return all(not graph.predecessors[block] & ~members for block in bits(members))


@given(data=st.data())
def test_all_downsets_are_found_once(data, profiles) -> None:
    graph = condense(data.draw(profiles()))
    expected = [members for members in range(graph.everything + 1) if is_downset(graph, members)]
    found = all_downsets(graph, cap=1 << len(graph))
    assert sorted(found) == expected
    assert [members.bit_count() for members in found] == sorted(m.bit_count() for m in expected)


@given(data=st.data())
def test_cap_is_exact(data, profiles) -> None:
    graph = condense(data.draw(profiles()))
    count = len(all_downsets(graph, cap=1 << len(graph)))
    assert all_downsets(graph, cap=count) is not None
    assert all_downsets(graph, cap=count - 1) is None


@given(data=st.data())
def test_prefixes_are_downsets_and_hold_the_graphs_own_order(data, profiles) -> None:
    graph = condense(data.draw(profiles()))
    found = prefix_downsets(graph, cap=1000)
    assert len(set(found)) == len(found)
    assert all(is_downset(graph, members) for members in found)
    assert {(1 << place) - 1 for place in range(len(graph) + 1)} <= set(found)


def test_sample_stays_within_the_cap(make_profile, make_operator) -> None:
    graph = condense(make_profile([make_operator(index) for index in range(40)], []))
    assert all_downsets(graph, cap=1000) is None
    assert len(prefix_downsets(graph, cap=50)) == 41
    assert len(prefix_downsets(graph, cap=1000)) > 41
