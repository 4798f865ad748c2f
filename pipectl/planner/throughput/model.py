"""The workload as the throughput planner sees it: ways to run each block, and what crosses cuts.

A stage runs with one tensor-parallel degree t on all its blocks, and each of its blocks plainly or
with recomputation. Profiles that list ``variants`` say what that costs, in the model of Tarnawski,
Narayanan and Phanishayee ("Piper: Multidimensional Planner for DNN Parallelization", NeurIPS 2021).
For other profiles t is 1, and a recomputed block keeps its inputs instead of its saved values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipectl.planner.graphs.condense import Block, Condensed, condense
from pipectl.profile import Operator, Profile, Variant

DIRECTIONS = 2
"""What crosses an edge comes back as a gradient of the same size."""


@dataclass(frozen=True)
class Way:
    """A block on each of t devices.

    Args:
        time_s: forward and backward of one micro-batch.
        parameter_bytes: on each device.
        kept_bytes: for every micro-batch in flight.
        fixed_bytes: whatever is in flight.
        recompute: whether saved values are computed again.
    """

    time_s: float
    parameter_bytes: int
    kept_bytes: int
    fixed_bytes: int
    recompute: bool


@dataclass(frozen=True)
class Crossing:
    """Something that costs every stage that holds one of its ends but not all of them.

    Args:
        producer: block it comes from.
        readers: other blocks.
        leaving_bytes: that a replica of the producer's stage moves, by tensor-parallel degree.
        entering_bytes: that a replica of any other stage moves.
    """

    producer: int
    readers: tuple[int, ...]
    leaving_bytes: dict[int, int]
    entering_bytes: dict[int, int]


@dataclass(frozen=True)
class Workload:
    """Blocks in topological order.

    Args:
        order: ids of all operators, as in the profile.
        names: ids of the operators of every block.
        ways: of every block, by tensor-parallel degree: without and with recomputation, or the
            only one there is.
        crossings: what the cuts may cross.
    """

    graph: Condensed
    order: tuple[str, ...]
    names: tuple[tuple[str, ...], ...]
    ways: tuple[dict[int, tuple[Way, ...]], ...]
    crossings: tuple[Crossing, ...]

    @property
    def tensor_degrees(self) -> list[int]:
        """Every tensor-parallel degree of any block, ascending."""
        return sorted({degree for ways in self.ways for degree in ways})


def workload_of(profile: Profile) -> Workload:
    """The workload of any profile."""
    graph = condense(profile)
    operators = profile.operators
    given = any(operator.variants for operator in operators)
    ways = [
        _summed([operators[index] for index in block.operators], profile)
        if given
        else {1: _assumed(graph, position, profile)}
        for position, block in enumerate(graph.blocks)
    ]
    return Workload(
        graph=graph,
        order=tuple(operator.id for operator in operators),
        names=tuple(tuple(operators[i].id for i in block.operators) for block in graph.blocks),
        ways=tuple(ways),
        crossings=_edges(graph, profile) if given else _values(graph),
    )


def _assumed(graph: Condensed, position: int, profile: Profile) -> tuple[Way, ...]:
    """A block with its own figures, and with its forward repeated where that saves memory."""
    block = graph.blocks[position]
    inside = [profile.operators[index] for index in block.operators]
    forward_s = sum(operator.forward_s for operator in inside)
    plain = _plain(block, inside, profile)
    inputs = sum(
        value.size_bytes
        for value in graph.values
        if value.producer != position and value.blocks >> position & 1
    )
    if inputs >= plain.kept_bytes:
        return (plain,)
    again = Way(
        time_s=plain.time_s + forward_s,
        parameter_bytes=plain.parameter_bytes,
        kept_bytes=inputs,
        fixed_bytes=plain.fixed_bytes + plain.kept_bytes - inputs,
        recompute=True,
    )
    return plain, again


def _plain(block: Block, inside: Sequence[Operator], profile: Profile) -> Way:
    """Parameters, their gradients and the optimizer's state are resident."""
    state = profile.optimizer_cost.state_bytes_per_parameter_byte
    parameters = sum(block.parameters.values())
    return Way(
        time_s=sum(operator.forward_s + operator.backward_s for operator in inside),
        parameter_bytes=parameters,
        kept_bytes=sum(block.saved.values()),
        fixed_bytes=round(parameters * (2 + state)),
        recompute=False,
    )


def _summed(inside: Sequence[Operator], profile: Profile) -> dict[int, tuple[Way, ...]]:
    """The variants of operators that share a block: all of them recompute, or none does."""
    tables = [_by_degree(operator, profile) for operator in inside]
    common = set.intersection(*(set(table) for table in tables))
    return {
        degree: tuple(
            _sum_of([table[degree] for table in tables], recompute)
            for recompute in sorted({w.recompute for t in tables for w in t[degree].values()})
        )
        for degree in sorted(common)
    }


def _sum_of(choices: Sequence[dict[bool, Way]], recompute: bool) -> Way:
    """One way of every operator; where it has no such way, its other one."""
    ways = [choice.get(recompute, next(iter(choice.values()))) for choice in choices]
    return Way(
        time_s=sum(way.time_s for way in ways),
        parameter_bytes=sum(way.parameter_bytes for way in ways),
        kept_bytes=sum(way.kept_bytes for way in ways),
        fixed_bytes=sum(way.fixed_bytes for way in ways),
        recompute=recompute,
    )


def _by_degree(operator: Operator, profile: Profile) -> dict[int, dict[bool, Way]]:
    """The operator's variants; one without any runs on one device with its own figures."""
    table: dict[int, dict[bool, Way]] = {}
    for variant in operator.variants:
        table.setdefault(variant.tensor_parallel, {})[variant.recompute] = _way(variant)
    if not table:
        block = Block((0,), dict(operator.parameters), dict(operator.saved))
        table[1] = {False: _plain(block, [operator], profile)}
    return table


def _way(variant: Variant) -> Way:
    return Way(
        time_s=variant.time_s,
        parameter_bytes=variant.parameter_bytes,
        kept_bytes=variant.mem_per_microbatch_bytes,
        fixed_bytes=variant.mem_fixed_bytes,
        recompute=variant.recompute,
    )


def _values(graph: Condensed) -> tuple[Crossing, ...]:
    """Every value counts once in each stage, forward and backward."""
    found = []
    for value in graph.values:
        others = value.blocks & ~(1 << value.producer)
        readers = tuple(block for block in range(len(graph)) if others >> block & 1)
        size = {1: value.size_bytes + value.gradient_bytes}
        found.append(Crossing(value.producer, readers, size, size))
    return tuple(found)


def _edges(graph: Condensed, profile: Profile) -> tuple[Crossing, ...]:
    """Every edge counts, with what the devices of its end's stage exchange among themselves."""
    found = []
    for source, target in profile.edges:
        producer, reader = profile.by_id[source], profile.by_id[target]
        ends = (
            graph.block_of[profile.index_of[source]],
            graph.block_of[profile.index_of[target]],
        )
        if ends[0] == ends[1]:
            continue
        size = profile.edge_bytes.get((source, target), producer.output_bytes)
        leaving = [(v.tensor_parallel, v.sync_bw_bytes.get(target, 0)) for v in producer.variants]
        entering = [(v.tensor_parallel, v.sync_fw_bytes.get(source, 0)) for v in reader.variants]
        found.append(Crossing(ends[0], (ends[1],), _moved(size, leaving), _moved(size, entering)))
    return tuple(found)


def _moved(size: int, exchanged: Sequence[tuple[int, int]]) -> dict[int, int]:
    """Both directions of an edge by degree; the larger of two variants of one degree."""
    most: dict[int, int] = {}
    for degree, more in exchanged or [(1, 0)]:
        most[degree] = max(most.get(degree, 0), DIRECTIONS * (size + more))
    return most
