"""Small random graphs, and answers found by trying everything."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import strategies as st

from pipectl.planner.graph.blocks import BlockGraph, bits
from pipectl.profile import Operator, OptimizerCost, Profile, StageOverhead

Graphs = st.SearchStrategy[Profile]


def operator(index: int, **changes: object) -> Operator:
    """An operator of 1 ms forward, 2 ms backward and a value of 1000 bytes that it saves."""
    fields: dict[str, object] = {
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
    return Operator(**{**fields, **changes})  # type: ignore[arg-type]


def profile(operators: Sequence[Operator], edges: Sequence[tuple[int, int]]) -> Profile:
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


@pytest.fixture(scope="session")
def make_operator() -> Callable[..., Operator]:
    return operator


@pytest.fixture(scope="session")
def make_profile() -> Callable[[Sequence[Operator], Sequence[tuple[int, int]]], Profile]:
    return profile


def chain_of(each: int | Sequence[Mapping[str, object]], **changes: object) -> Profile:
    """A chain of so many equal operators, or of those with the properties of each."""
    each = [{}] * each if isinstance(each, int) else each
    operators = [operator(index, **{**changes, **own}) for index, own in enumerate(each)]
    return profile(operators, list(pairwise(range(len(operators)))))


@pytest.fixture(scope="session")
def chain() -> Callable[..., Profile]:
    """:func:`chain_of`."""
    return chain_of


@pytest.fixture(scope="session")
def hungry() -> Callable[[int, int], Profile]:
    """A chain of operators that save much more than they receive."""
    return lambda count, size: chain_of([{"saved": ((f"n{i}:own", size),)} for i in range(count)])


@pytest.fixture(scope="session")
def deep() -> Profile:
    """A chain that saves a hundred times what it sends."""
    return chain_of([{"saved": ((f"n{i}", 1000), (f"s{i}", 99_000))} for i in range(32)])


@st.composite
def random_profiles(draw: st.DrawFn, most: int = 7, *, caches: bool = False) -> Profile:
    """Any DAG with few distinct costs, so that ties are common.

    With ``caches``, stages may find their data in one, and noise may have it that they are slower.
    """
    count = draw(st.integers(1, most))
    pairs = list(combinations(range(count), 2))
    edges = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    cache_bytes = draw(st.sampled_from([None, 1000, 3000, 10_000])) if caches else None
    times = st.tuples(*[st.integers(0, 4).map(lambda found: found * 1e-3)] * 2)
    operators = [
        operator(
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
    return replace(profile(operators, sorted(edges)), stage=StageOverhead(cache_bytes=cache_bytes))


@pytest.fixture(scope="session")
def profiles() -> Callable[..., Graphs]:
    return random_profiles


def every_partition(graph: BlockGraph, stages: int) -> Iterator[tuple[int, ...]]:
    """All ways to cut a graph into convex stages, by trying every stage of every block."""

    def extend(done: int, left: int) -> Iterator[tuple[int, ...]]:
        if left == 0:
            if done == graph.everything:
                yield ()
            return
        for subset in every_next_stage(graph, done):
            for tail in extend(done | subset, left - 1):
                yield (subset, *tail)

    return extend(0, stages)


def every_next_stage(graph: BlockGraph, done: int) -> Iterator[int]:
    """All stages that can follow some blocks."""
    rest = subset = graph.everything & ~done
    while subset:
        if all(not graph.predecessors[block] & ~(done | subset) for block in bits(subset)):
            yield subset
        subset = (subset - 1) & rest


@pytest.fixture(scope="session")
def partitions_of() -> Callable[[BlockGraph, int], Iterator[tuple[int, ...]]]:
    return every_partition


@pytest.fixture(scope="session")
def next_stages() -> Callable[[BlockGraph, int], Iterator[int]]:
    return every_next_stage
