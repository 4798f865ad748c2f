"""What operators, stages and messages cost at a micro-batch size.

Times of operators are interpolated between measured sizes, and extrapolated from the outermost two:
a fixed cost and a cost per sample. If only one size was measured, times are proportional to the
size. Bytes are proportional to the size, except parameters. The time of a stage is the sum of its
operators' times, which depend on whether its data stays in the cache, and an overhead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import NamedTuple

import numpy as np

from pipectl.arrays import Floats, Integers
from pipectl.plan import StageCost, Transfer
from pipectl.planner.costs.footprint import Footprint, Sums
from pipectl.profile import Profile
from pipectl.profile_parts import SplitBackward, StageOverhead


class Times(NamedTuple):
    """Forward and backward time of every operator; shapes [2, operators].

    Cached times are never longer than uncached times: bounds need this, and noise may violate it.

    Args:
        cached: in a stage that stays in the cache.
        uncached: in a stage with much data.
    """

    cached: Floats
    uncached: Floats


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
        self._known: dict[int, Times] = {}

    def at(self, size: int) -> Times:
        """Times of every operator for ``size`` samples."""
        if size not in self._known:
            uncached = self._uncached.at(size)
            self._known[size] = Times(np.minimum(self._cached.at(size), uncached), uncached)
        return self._known[size]


class _Points:
    """Measured times of operators, grouped by the sizes that were measured."""

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
        times_s = np.zeros((2, self._count))
        for members, sizes, times in self._groups:
            times_s[:, members] = _interpolate(sizes, times, size)
        return times_s


def _interpolate(sizes: Sequence[int], times: Floats, size: int) -> Floats:
    """Times at ``size`` from times at other sizes.

    Noise can tilt the line through two points. So below the smallest size, times are kept between
    proportional and constant; above the largest, they do not fall.

    Args:
        sizes: ascending.
        times: shape [sizes, ...].
    """
    first: Floats = times[0]
    last: Floats = times[-1]
    times_s: Floats = first * size / sizes[0]
    if len(sizes) == 1:
        return times_s
    low = next((at for at in range(len(sizes) - 1) if size <= sizes[at + 1]), len(sizes) - 2)
    slope = (times[low + 1] - times[low]) / (sizes[low + 1] - sizes[low])
    times_s = times[low] + slope * (size - sizes[low])
    if size < sizes[0]:
        return np.minimum(np.maximum(times_s, first * size / sizes[0]), first)
    return np.maximum(times_s, last) if size > sizes[-1] else times_s


def stage_costs(
    parts: Footprint, times: Times, scale: float, profile: Profile
) -> tuple[StageCost, ...]:
    """Cost of every stage.

    Args:
        times: at the micro-batch size.
        scale: micro-batch size over the profile's.
        profile: has the costs of the optimizer and of stages.
    """
    optimizer, sums = profile.optimizer_cost, parts.sums
    state = optimizer.state_bytes_per_parameter_byte
    forward_s, backward_s = stage_times(sums, times, scale, profile.stage)[:, 0].tolist()
    parameters, trained, gradients, casts, saved, received = (
        each[0].tolist()
        for each in (
            sums.parameter_bytes,
            sums.trained_bytes,
            sums.gradient_bytes,
            sums.cast_bytes,
            sums.saved_bytes,
            sums.received_bytes,
        )
    )
    costs = []
    for stage, (members, memory) in enumerate(zip(parts.members, parts.memory, strict=True)):
        counts = [profile.operators[member].flops for member in members]
        costs.append(
            StageCost(
                forward_s=forward_s[stage],
                backward_s=backward_s[stage],
                update_s=optimizer.step_s_per_byte * trained[stage],
                parameter_bytes=parameters[stage],
                optimizer_bytes=ceil(state * trained[stage]),
                saved_bytes=ceil(saved[stage] * scale),
                gradient_bytes=gradients[stage],
                buffer_bytes=memory.buffers,
                input_bytes=ceil(received[stage] * scale),
                peaks=memory.peaks(scale, profile.optimizer),
                flops=None if None in counts else round(sum(n or 0 for n in counts) * scale),
                trained_bytes=None if trained[stage] == parameters[stage] else trained[stage],
                cast_bytes=casts[stage],
            )
        )
    return tuple(costs)


def stage_times(sums: Sums, times: Times, scale: float, overhead: StageOverhead) -> Floats:
    """Forward and backward of the stages of partitions in seconds; shape [2, partitions, stages].

    Without gradients there is no backward.

    Args:
        times: at the micro-batch size.
        scale: micro-batch size over the profile's.
    """
    partitions, stages = shape = sums.saved_bytes.shape
    place = sums.stage_of + stages * np.arange(partitions)[:, None]
    part: Floats = np.ones(1)  # of the way from cached to uncached times
    if overhead.cache_bytes:
        weights = sums.parameter_bytes + sums.trained_bytes + sums.cast_bytes
        touched = weights + sums.saved_bytes * scale
        part = np.clip(2 * (touched / overhead.cache_bytes - 1), 0.0, 1.0).ravel()[place]
    times_s = np.zeros((2, *shape))
    for kind, (cached, uncached) in enumerate(zip(*times, strict=True)):
        each = np.broadcast_to(cached + (uncached - cached) * part, place.shape)
        times_s[kind] = np.bincount(place.ravel(), each.ravel(), partitions * stages).reshape(shape)
    forward_s, backward_s = overhead_times(sums.values, overhead)
    times_s[0] += forward_s
    times_s[1] = np.where(times_s[1] > 0, times_s[1] + backward_s, 0.0)
    return times_s


def overhead_times(values: Integers, overhead: StageOverhead) -> tuple[Floats, Floats]:
    """Seconds of forwards and backwards besides the operators.

    Args:
        values: as in the sums of partitions; shape [4, ...].
    """
    received, sent, gradients_received, gradients_sent = values
    forward_s = overhead.forward_s + received * overhead.received_s + sent * overhead.sent_s
    got_s = gradients_received * overhead.gradient_received_s
    return forward_s, overhead.backward_s + got_s + gradients_sent * overhead.gradient_sent_s


def scaled_transfers(parts: Footprint, scale: float) -> tuple[Transfer, ...]:
    """The messages at ``scale`` times the profile's micro-batch size."""
    return tuple(
        Transfer(item.kind, item.source, item.target, ceil(item.size_bytes * scale))
        for item in parts.transfers
    )


SPLIT = {
    *("linear", "addmm", "mm", "matmul", "conv1d", "conv2d", "conv3d"),
    *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
}
"""Operators whose backward is split: their ids in captured graphs, without the number at the end.
All others compute the gradients of their parameters in the first half."""
ASSUMED = (
    "backwards are split: either half is taken as half of the backward of operators that multiply "
    "by parameters"
)


class SplitOperators(NamedTuple):
    """The operators of a stage whose backward is split.

    Args:
        indices: in the profile.
        share: of the stage's backward that is theirs.
    """

    indices: Sequence[int]
    share: float


def split_operators(stage: Sequence[int], profile: Profile) -> SplitOperators:
    """The operators of a stage that multiply by parameters.

    Args:
        stage: indices of its operators.
    """
    is_captured, operators = profile.fingerprint is not None, profile.operators
    indices = [
        index
        for index in stage
        if operators[index].parameters
        and (not is_captured or operators[index].id.rstrip("0123456789").rstrip("_") in SPLIT)
    ]
    total_s = sum(operators[index].backward_s for index in stage)
    own_s = sum(operators[index].backward_s for index in indices)
    return SplitOperators(indices, own_s / total_s if total_s else 0.0)


def with_halves(
    costs: Sequence[StageCost], parts: Footprint, scale: float, profile: Profile
) -> tuple[StageCost, ...]:
    """The costs of stages whose backwards are split, with those of both halves.

    Args:
        scale: micro-batch size over the profile's.
    """
    times, halves = profile.split or SplitBackward(), []
    for members, crossing, cost in zip(parts.members, parts.crossings, costs, strict=True):
        indices, share = split_operators(members, profile)
        operators, count = [profile.operators[index] for index in indices], len(indices)
        whole_s = share * cost.backward_s
        weight_s = times.weight_share * whole_s + times.weight_s * count
        input_s = times.input_share * whole_s + times.input_s * count
        # Values that are kept between the halves; one that several operators read counts once.
        inputs = dict(pair for operator in operators for pair in operator.saved)
        gradients = {operator.id: operator.gradient_bytes for operator in operators}
        deferred = sum(inputs.values()) + sum(gradients.values())
        computed = [size for id_, size in gradients.items() if id_ not in crossing.returning]
        halves.append(
            replace(
                cost,
                forward_s=cost.forward_s + times.forward_s * count,
                backward_s=cost.backward_s - whole_s + input_s + weight_s,
                weight_s=weight_s,
                deferred_bytes=ceil(deferred * scale),
                deferred_block_bytes=ceil(max(computed, default=0) * scale),
            )
        )
    return tuple(halves)
