"""What operators, stages and messages cost at a micro-batch size.

Times come from the sizes that were measured: between two sizes and beyond the outermost two they
are affine in the size (a fixed cost and a cost per sample); with one measured size, proportional.
Bytes are proportional to the size, except parameters. A stage takes what its operators take, which
depends on whether its data stays in the cache, and an overhead of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

from pipectl.graph import Route, TransferKind, routes
from pipectl.plan import StageCost, Transfer
from pipectl.planner.stage_memory import Crossing, StageMemories, StageMemory
from pipectl.profile import Operator, OptimizerCost, Profile, StageOverhead

Pairs = list[tuple[float, float]]
"""(forward_s, backward_s) of every operator."""


@dataclass(frozen=True)
class Times:
    """Times of every operator, in a stage with much data and in one that stays in the cache."""

    uncached: Pairs
    cached: Pairs

    def of(self, index: int, share: float) -> tuple[float, float]:
        """Times of one operator, ``share`` of the way from cached to uncached."""
        (slow_f, slow_b), (fast_f, fast_b) = self.uncached[index], self.cached[index]
        return fast_f + (slow_f - fast_f) * share, fast_b + (slow_b - fast_b) * share

    def total(self, members: Iterable[int], share: float) -> tuple[float, float]:
        """Forward and backward of several operators together."""
        found = [self.of(index, share) for index in members]
        return sum(pair[0] for pair in found), sum(pair[1] for pair in found)


def operator_times(profile: Profile, size: int) -> Times:
    """Forward and backward time of every operator for ``size`` samples."""
    own = profile.micro_batch_size
    uncached = [
        _times({**operator.timings, own: (operator.forward_s, operator.backward_s)}, size)
        for operator in profile.operators
    ]
    cached = [
        _times(operator.cached, size) if operator.cached else pair
        for operator, pair in zip(profile.operators, uncached, strict=True)
    ]
    return Times(uncached, cached)


def _times(points: Mapping[int, tuple[float, float]], size: int) -> tuple[float, float]:
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


@dataclass
class Values:
    """How many values enter a stage and leave it in one micro-batch.

    Values without gradient (indices, masks) are not counted: they enter a stage as they are.
    """

    received: int = 0
    sent: int = 0
    gradients_received: int = 0
    gradients_sent: int = 0

    def overhead_s(self, stage: StageOverhead) -> tuple[float, float]:
        """What forward and backward of the stage take besides its operators."""
        forward_s = stage.forward_s + self.received * stage.received_s + self.sent * stage.sent_s
        received_s = self.gradients_received * stage.gradient_received_s
        sent_s = self.gradients_sent * stage.gradient_sent_s
        return forward_s, stage.backward_s + received_s + sent_s


@dataclass(frozen=True)
class Footprint:
    """What a partition into stages needs, at the profile's micro-batch size.

    Args:
        nodes: operator ids of every stage, in graph order.
        members: indices of the same operators.
        parameter_bytes: of every stage.
        memory: of every stage.
        transfers: messages of one micro-batch, one per kind and pair of stages.
        values: how many values enter and leave every stage.
        received_bytes: activations that enter every stage.
    """

    nodes: tuple[tuple[str, ...], ...]
    members: tuple[tuple[int, ...], ...]
    parameter_bytes: tuple[int, ...]
    memory: tuple[StageMemory, ...]
    transfers: tuple[Transfer, ...]
    values: tuple[Values, ...]
    received_bytes: tuple[int, ...]

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
        values = [Values() for _ in stages]
        sent: set[tuple[int, str]] = set()
        for route, index in self._routes(stages):
            operator = operators[index]
            backward = route.kind is TransferKind.GRADIENT
            size = operator.gradient_bytes if backward else operator.output_bytes
            key = (route.kind, route.source, route.target)
            messages[key] = messages.get(key, 0) + size
            if backward:
                crossings[route.target].returning.add(route.value)
                values[route.source].gradients_sent += 1
                values[route.target].gradients_received += 1
                continue
            storage = self._memories.storage_of(index)
            crossings[route.source].sent.setdefault(storage, size)
            crossings[route.target].received[storage] += size
            if operator.gradient_bytes:
                values[route.target].received += 1
                sent.add((route.source, route.value))
        for stage, _ in sent:
            values[stage].sent += 1
        return Footprint(
            nodes=tuple(tuple(operators[index].id for index in inside) for inside in stages),
            members=tuple(tuple(inside) for inside in stages),
            parameter_bytes=tuple(_parameter_bytes(operators, inside) for inside in stages),
            memory=tuple(map(self._memories.of, stages, crossings)),
            transfers=tuple(Transfer(*key, size) for key, size in sorted(messages.items())),
            values=tuple(values),
            received_bytes=tuple(sum(crossing.received.values()) for crossing in crossings),
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
    parts: Footprint, times: Times, scale: float, profile: Profile
) -> tuple[StageCost, ...]:
    """Cost of every stage.

    Args:
        times: of the operators at the micro-batch size.
        scale: micro-batch size over the profile's.
        profile: for what optimizer and stages cost.
    """
    return tuple(
        _stage_cost(parts, index, times, scale, profile) for index in range(len(parts.members))
    )


def _stage_cost(
    parts: Footprint, index: int, times: Times, scale: float, profile: Profile
) -> StageCost:
    optimizer = profile.optimizer or OptimizerCost(0.0, 0.0)
    parameter_bytes, memory = parts.parameter_bytes[index], parts.memory[index]
    forward_s, backward_s = stage_times(parts, index, times, scale, profile.stage)
    return StageCost(
        forward_s=forward_s,
        backward_s=backward_s,
        update_s=optimizer.step_s_per_byte * parameter_bytes,
        parameter_bytes=parameter_bytes,
        optimizer_bytes=ceil(optimizer.state_bytes_per_parameter_byte * memory.trained_bytes),
        saved_bytes=ceil(memory.saved * scale),
        gradient_bytes=memory.accumulated,
        buffer_bytes=memory.buffers,
        input_bytes=ceil(parts.received_bytes[index] * scale),
        peaks=memory.peaks(scale, profile.optimizer),
    )


def stage_times(
    parts: Footprint, index: int, times: Times, scale: float, overhead: StageOverhead
) -> tuple[float, float]:
    """Forward and backward of a stage; a stage without any gradient has no backward."""
    share = overhead.uncached(working_set_bytes(parts, index, scale))
    forward_s, backward_s = times.total(parts.members[index], share)
    more_forward_s, more_backward_s = parts.values[index].overhead_s(overhead)
    return forward_s + more_forward_s, backward_s + more_backward_s if backward_s else 0.0


def working_set_bytes(parts: Footprint, index: int, scale: float) -> float:
    """What a stage touches in a forward and backward: parameters, gradients, saved values."""
    return 2 * parts.parameter_bytes[index] + parts.memory[index].saved * scale


def scaled_transfers(parts: Footprint, scale: float) -> tuple[Transfer, ...]:
    """The messages at ``scale`` times the profile's micro-batch size."""
    return tuple(
        Transfer(item.kind, item.source, item.target, ceil(item.size_bytes * scale))
        for item in parts.transfers
    )
