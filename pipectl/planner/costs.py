"""What operators, stages and messages cost at a micro-batch size.

Times come from the sizes that were measured: between two sizes and beyond the outermost two they
are affine in the size (a fixed cost and a cost per sample); with one measured size, proportional.
Bytes are proportional to the size, except parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

from pipectl.graph import Route, TransferKind, routes
from pipectl.plan import StageCost, Transfer
from pipectl.planner.stage_memory import Crossing, StageMemories, StageMemory
from pipectl.profile import Operator, OptimizerCost, Profile

Times = list[tuple[float, float]]
"""(forward_s, backward_s) of every operator."""


def operator_times(profile: Profile, size: int) -> Times:
    """Forward and backward time of every operator for ``size`` samples."""
    return [_times(operator, profile.micro_batch_size, size) for operator in profile.operators]


def _times(operator: Operator, measured_size: int, size: int) -> tuple[float, float]:
    points = {**operator.timings, measured_size: (operator.forward_s, operator.backward_s)}
    forward = _interpolate({at: pair[0] for at, pair in points.items()}, size)
    return forward, _interpolate({at: pair[1] for at, pair in points.items()}, size)


def _interpolate(points: dict[int, float], size: int) -> float:
    """A time at ``size`` from times at other sizes.

    Noise can tilt the line through two points. Below the smallest size a time is therefore kept
    between proportional and constant, above the largest it does not fall.
    """
    sizes = sorted(points)
    if len(sizes) == 1:
        return points[sizes[0]] * size / sizes[0]
    low, high = next((pair for pair in pairwise(sizes) if size <= pair[1]), (sizes[-2], sizes[-1]))
    slope = (points[high] - points[low]) / (high - low)
    time = points[low] + slope * (size - low)
    if size < sizes[0]:
        return min(max(time, points[low] * size / low), points[low])
    return max(time, points[high]) if size > sizes[-1] else time


@dataclass(frozen=True)
class Footprint:
    """What a partition into stages needs, at the profile's micro-batch size.

    Args:
        nodes: operator ids of every stage, in graph order.
        members: indices of the same operators.
        parameter_bytes: of every stage.
        memory: of every stage.
        transfers: messages of one micro-batch, one per kind and pair of stages.
    """

    nodes: tuple[tuple[str, ...], ...]
    members: tuple[tuple[int, ...], ...]
    parameter_bytes: tuple[int, ...]
    memory: tuple[StageMemory, ...]
    transfers: tuple[Transfer, ...]

    @property
    def saved_bytes(self) -> tuple[int, ...]:
        """What every stage keeps of one micro-batch."""
        return tuple(memory.saved for memory in self.memory)


class Footprints:
    """Footprints of partitions of one profile; what reads what is looked up once."""

    def __init__(self, profile: Profile) -> None:
        self._operators = profile.operators
        index = {operator.id: number for number, operator in enumerate(profile.operators)}
        readers: dict[int, list[int]] = {}
        for source, target in profile.edges:
            readers.setdefault(index[source], []).append(index[target])
        self._readers = {producer: sorted(found) for producer, found in sorted(readers.items())}
        self._memories = StageMemories(profile, self._readers)

    def of(self, stages: Sequence[Sequence[int]]) -> Footprint:
        """The footprint of stages given as ascending operator indices."""
        operators = self._operators
        crossings = [Crossing() for _ in stages]
        messages: dict[tuple[TransferKind, int, int], int] = {}
        for route, index in self._routes(stages):
            operator = operators[index]
            backward = route.kind is TransferKind.GRADIENT
            size = operator.gradient_bytes if backward else operator.output_bytes
            key = (route.kind, route.source, route.target)
            messages[key] = messages.get(key, 0) + size
            if backward:
                crossings[route.target].returning.add(route.value)
            else:
                storage = self._memories.storage_of(index)
                crossings[route.source].sent.setdefault(storage, size)
                crossings[route.target].received[storage] += size
        return Footprint(
            nodes=tuple(tuple(operators[index].id for index in inside) for inside in stages),
            members=tuple(tuple(inside) for inside in stages),
            parameter_bytes=tuple(_parameter_bytes(operators, inside) for inside in stages),
            memory=tuple(map(self._memories.of, stages, crossings)),
            transfers=tuple(Transfer(*key, size) for key, size in sorted(messages.items())),
        )

    def _routes(self, stages: Sequence[Sequence[int]]) -> Iterator[tuple[Route, int]]:
        """As :func:`pipectl.graph.cut_routes`, but looks only at values that are cut."""
        stage_of = [0] * len(self._operators)
        for stage, inside in enumerate(stages):
            for index in inside:
                stage_of[index] = stage
        for producer, readers in self._readers.items():
            home = stage_of[producer]
            uses = [stage_of[reader] for reader in readers]
            if uses.count(home) < len(uses):
                operator = self._operators[producer]
                gradient = operator.gradient_bytes > 0
                for route in routes(operator.id, home, uses, has_gradient=gradient):
                    yield route, producer


def _parameter_bytes(operators: Sequence[Operator], inside: Sequence[int]) -> int:
    named = dict(pair for index in inside for pair in operators[index].parameters)
    return sum(named.values())


def stage_costs(
    parts: Footprint, times: Times, scale: float, optimizer: OptimizerCost | None
) -> tuple[StageCost, ...]:
    """Cost of every stage.

    Args:
        times: of the operators at the micro-batch size.
        scale: micro-batch size over the profile's.
    """
    given = optimizer or OptimizerCost(0.0, 0.0)
    return tuple(
        StageCost(
            forward_s=sum(times[index][0] for index in inside),
            backward_s=sum(times[index][1] for index in inside),
            update_s=given.step_s_per_byte * parameter_bytes,
            parameter_bytes=parameter_bytes,
            optimizer_bytes=ceil(given.state_bytes_per_parameter_byte * memory.trained_bytes),
            saved_bytes=ceil(memory.saved * scale),
            gradient_bytes=memory.accumulated,
            buffer_bytes=memory.buffers,
            peaks=memory.peaks(scale, optimizer),
        )
        for inside, parameter_bytes, memory in zip(
            parts.members, parts.parameter_bytes, parts.memory, strict=True
        )
    )


def scaled_transfers(parts: Footprint, scale: float) -> tuple[Transfer, ...]:
    """The messages at ``scale`` times the profile's micro-batch size."""
    return tuple(
        Transfer(item.kind, item.source, item.target, ceil(item.size_bytes * scale))
        for item in parts.transfers
    )
