"""Small graphs, chosen and random, and answers found by trying everything."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

from hypothesis import strategies as st

from pipectl.planner.graph.blocks import BlockGraph, bits
from pipectl.profile import Profile
from pipectl.profile_parts import Operator, OptimizerCost, StageOverhead


def make_operator(index: int, **changes: Any) -> Operator:
    """An operator of 1 ms forward, 2 ms backward and a value of 1000 bytes that it saves."""
    fields: dict[str, Any] = {
        "id": f"n{index}",
        "name": f"layer{index}",
        "forward_s": 1e-3,
        "backward_s": 2e-3,
        "parameter_bytes": 100,
        "output_bytes": 1000,
        "gradient_bytes": 1000,
        "parameters": ((f"p{index}", 100),),
        "saved": ((f"n{index}", 1000),),
    }
    return Operator(**{**fields, **changes})


def make_profile(operators: Sequence[Operator], edges: Sequence[tuple[int, int]]) -> Profile:
    """A profile at micro-batch size 8 with edges between positions."""
    return Profile(
        name="test",
        source="test",
        micro_batch_size=8,
        operators=tuple(operators),
        edges=tuple((operators[u].id, operators[v].id) for u, v in edges),
        optimizer=OptimizerCost(2.0, 1e-9),
        process_baseline_bytes=5000,
    )


def chain(each: int | Sequence[Mapping[str, Any]], **changes: Any) -> Profile:
    """So many equal operators in a row, or those with the properties of each."""
    each = [{}] * each if isinstance(each, int) else each
    operators = [make_operator(index, **{**changes, **own}) for index, own in enumerate(each)]
    return make_profile(operators, list(pairwise(range(len(operators)))))


def hungry(count: int, size: int) -> Profile:
    """A chain of operators that save much more than they receive."""
    return chain([{"saved": ((f"n{i}:own", size),)} for i in range(count)])


DEEP = chain([{"saved": ((f"n{i}", 1000), (f"s{i}", 99_000))} for i in range(32)])
"""A chain that saves a hundred times what it sends."""


@st.composite
def profiles(draw: st.DrawFn, most: int = 7, *, caches: bool = False) -> Profile:
    """Any DAG with few distinct costs, so that ties are common.

    With ``caches``, stages may find their data in one, and noise may have it that they are slower.
    """
    count = draw(st.integers(1, most))
    pairs = list(combinations(range(count), 2))
    edges = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    cache_bytes = draw(st.sampled_from([None, 1000, 3000, 10_000])) if caches else None
    times = st.tuples(*[st.integers(0, 4).map(lambda found: found * 1e-3)] * 2)
    operators = [
        make_operator(
            index,
            forward_s=draw(st.integers(0, 4)) * 1e-3,
            backward_s=draw(st.integers(0, 4)) * 1e-3,
            output_bytes=draw(st.integers(0, 3)) * 1000,
            gradient_bytes=draw(st.integers(0, 1)) * 1000,
            parameters=((f"p{draw(st.integers(0, count))}", 100),),
            saved=((f"n{draw(st.integers(0, index))}", 1000),),
            cached={8: draw(times)} if cache_bytes else {},
        )
        for index in range(count)
    ]
    overhead = StageOverhead(cache_bytes=cache_bytes)
    return replace(make_profile(operators, sorted(edges)), stage=overhead)


def partitions_of(graph: BlockGraph, stages: int) -> Iterator[tuple[int, ...]]:
    """All ways to cut a graph into convex stages, by trying every stage of every block."""

    def extend(done: int, left: int) -> Iterator[tuple[int, ...]]:
        if left == 0:
            if done == graph.everything:
                yield ()
            return
        for subset in next_stages(graph, done):
            for tail in extend(done | subset, left - 1):
                yield (subset, *tail)

    return extend(0, stages)


def next_stages(graph: BlockGraph, done: int) -> Iterator[int]:
    """All stages that can follow some blocks."""
    rest = subset = graph.everything & ~done
    while subset:
        if all(not graph.predecessors[block] & ~(done | subset) for block in bits(subset)):
            yield subset
        subset = (subset - 1) & rest
