from hypothesis import given
from hypothesis import strategies as st

from pipectl.planner.graph.blocks import BlockGraph, bits, condense, contract


def closed_groups(count, edges, labels):
    """Blocks by definition: merge groups, then what lies between two members, until it stops."""
    block = {
        index: frozenset(i for i in range(count) if labels[i] == labels[index])
        for index in range(count)
    }
    changed = True
    while changed:
        changed = False
        below = {members: closure(members, edges, block) for members in set(block.values())}
        for a in below:
            for b in below:
                if a != b and b <= below[a] and a <= below[b]:
                    for index in a | b:
                        block[index] = a | b
                    changed = True
                    break
            if changed:
                break
    return set(block.values())


def closure(members, edges, block):
    """Everything that members reach when blocks are entered as a whole."""
    found = set(members)
    while True:
        more = {t for s, t in edges if s in found}
        more |= {i for index in more for i in block[index]}
        if more <= found:
            return found
        found |= more


@given(data=st.data())
def test_blocks_are_groups_and_all_that_lies_between(data, make_operator) -> None:
    count = data.draw(st.integers(1, 8))
    pairs = [(u, v) for u in range(count) for v in range(u + 1, count)]
    edges = data.draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    labels = data.draw(st.lists(st.integers(0, count), min_size=count, max_size=count))

    graph = contract([make_operator(index) for index in range(count)], edges, labels)

    found = {frozenset(block.operators) for block in graph.blocks}
    assert found == closed_groups(count, edges, labels)
    assert_is_ordered(graph)
    ends = [(graph.block_of[u], graph.block_of[v]) for u, v in edges]
    above: list[set[int]] = []
    for block in range(len(graph)):
        direct = {u for u, v in ends if v == block != u}
        assert {*bits(graph.predecessors[block])} == direct
        above.append(direct.union(*(above[other] for other in direct)))
        assert {*bits(graph.ancestors[block])} == above[block]


def assert_is_ordered(graph: BlockGraph) -> None:
    """Edges lead forward, both directions agree, and values know their users."""
    for position in range(len(graph)):
        assert all(before < position for before in bits(graph.predecessors[position]))
        for after in bits(graph.successors[position]):
            assert graph.predecessors[after] >> position & 1


def test_a_deep_chain_needs_no_recursion(chain) -> None:
    graph = condense(chain(5000))
    assert len(graph) == 5000
    assert [*bits(graph.ancestors[4])] == [0, 1, 2, 3]
