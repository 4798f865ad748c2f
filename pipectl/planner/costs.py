"""What operators, stages and messages cost at a micro-batch size.

Times come from the sizes that were measured: between two sizes and beyond the outermost two they
are affine in the size (a fixed cost and a cost per sample); with one measured size, proportional.
Bytes are proportional to the size, except parameters. A stage takes what its operators take, which
depends on whether its data stays in the cache, and an overhead of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil

import numpy as np
import numpy.typing as npt

from pipectl.graph import Route, TransferKind, routes
from pipectl.plan import StageCost, Transfer
from pipectl.planner.stage_memory import Crossing, StageMemories, StageMemory
from pipectl.profile import Operator, Profile, StageOverhead

Floats = npt.NDArray[np.float64]
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
    return OperatorTimes(profile).at(size)


class OperatorTimes:
    """Times of one profile's operators at any micro-batch size."""

    def __init__(self, profile: Profile) -> None:
        own, operators = profile.micro_batch_size, profile.operators
        uncached = [{**o.timings, own: (o.forward_s, o.backward_s)} for o in operators]
        cached = [o.cached or points for o, points in zip(operators, uncached, strict=True)]
        self._uncached, self._cached = _Points(uncached), _Points(cached)

    def at(self, size: int) -> Times:
        """Forward and backward time of every operator for ``size`` samples."""
        cached, uncached = self.arrays_at(size)
        return Times(_pairs(uncached), _pairs(cached))

    def arrays_at(self, size: int) -> tuple[Floats, Floats]:
        """The same as arrays, cached and uncached; shapes [2, operators]."""
        return self._cached.at(size), self._uncached.at(size)


def _pairs(times: Floats) -> Pairs:
    return [(forward_s, backward_s) for forward_s, backward_s in times.T.tolist()]


class _Points:
    """Times of operators at some sizes each, grouped by these."""

    def __init__(self, points: Sequence[Mapping[int, tuple[float, float]]]) -> None:
        self._count = len(points)
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, known in enumerate(points):
            groups.setdefault(tuple(sorted(known)), []).append(index)
        self._groups = [
            (
                members,
                sizes,
                np.array([[points[i][at] for i in members] for at in sizes]).transpose(0, 2, 1),
            )
            for sizes, members in groups.items()
        ]

    def at(self, size: int) -> Floats:
        found = np.zeros((2, self._count))
        for members, sizes, times in self._groups:
            found[:, members] = _interpolate(sizes, times, size)
        return found


def _interpolate(sizes: Sequence[int], times: Floats, size: int) -> Floats:
    """Times at ``size`` from times at other sizes.

    Noise can tilt the line through two points. Below the smallest size a time is therefore kept
    between proportional and constant, above the largest it does not fall.

    Args:
        sizes: ascending.
        times: by size first.
    """
    first: Floats = times[0]
    last: Floats = times[-1]
    found: Floats = first * size / sizes[0]
    if len(sizes) == 1:
        return found
    low = next((at for at in range(len(sizes) - 1) if size <= sizes[at + 1]), len(sizes) - 2)
    slope = (times[low + 1] - times[low]) / (sizes[low + 1] - sizes[low])
    found = times[low] + slope * (size - sizes[low])
    if size < sizes[0]:
        return np.minimum(np.maximum(found, first * size / sizes[0]), first)
    return np.maximum(found, last) if size > sizes[-1] else found


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
        crossings: what enters and leaves every stage.
    """

    nodes: tuple[tuple[str, ...], ...]
    members: tuple[tuple[int, ...], ...]
    parameter_bytes: tuple[int, ...]
    memory: tuple[StageMemory, ...]
    transfers: tuple[Transfer, ...]
    values: tuple[Values, ...]
    crossings: tuple[Crossing, ...]

    @cached_property
    def received_bytes(self) -> tuple[int, ...]:
        """Activations that enter every stage."""
        return tuple(sum(crossing.received.values()) for crossing in self.crossings)

    @property
    def saved_bytes(self) -> tuple[int, ...]:
        """What every stage keeps of one micro-batch."""
        return tuple(memory.saved for memory in self.memory)


class Footprints:
    """Footprints of partitions of one profile; what reads what is looked up once."""

    def __init__(self, profile: Profile) -> None:
        self._operators = profile.operators
        self._readers = profile.readers
        self._memories = StageMemories(profile)

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
            crossings=tuple(crossings),
        )

    def _routes(self, stages: Sequence[Sequence[int]]) -> Iterator[tuple[Route, int]]:
        """As :func:`pipectl.graph.cut_routes`, but looks only at values that are cut."""
        stage_of = [0] * len(self._operators)
        for stage, inside in enumerate(stages):
            for index in inside:
                stage_of[index] = stage
        for producer, readers in enumerate(self._readers):
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
    optimizer = profile.optimizer_cost
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
