"""Stages that recompute segment by segment: where they are cut, and what they hold.

Job files and plans (``plan.json``) call them ``blocks``; a block of the planner is a group of
operators that share a stage.

Between its forward and its backward, a segment holds its inputs; during recomputation also all
values that its operators save. So few bytes should cross the cuts, and no segment should save
much. For a limit on the saved bytes of a segment, cuts of a stage in graph order follow from::

    least crossing(end) = min over starts of
        least crossing(start) + bytes that cross the end    if the segment is within the limit

Lower limits give more segments; in a model with equal layers, the cuts are between layers.

In the backward, a segment holds its saved values and the inputs of all segments before it.
Gradients of inputs that come from other segments are held until the backward of these. A stage uses
the cut with the least memory for the micro-batches in flight in its plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil

import numpy as np

from pipectl.arrays import Floats
from pipectl.plan import Plan, Replication, Segments, Stage, StagePeaks
from pipectl.planner.costs.footprint import Footprint, Footprints
from pipectl.planner.costs.stage_costs import OperatorTimes, stage_times
from pipectl.profile import Profile
from pipectl.profile_parts import Operator

LIMITS = tuple(0.7**power for power in range(1, 13))
"""Limits on the saved bytes of a segment, relative to the stage."""


class SegmentCuts:
    """Cuts of the stages of one profile."""

    def __init__(self, profile: Profile) -> None:
        self._operators = profile.operators
        self._storages = [operator.allocations.storage for operator in profile.operators]
        self._readers = profile.readers

    def of(self, inside: Sequence[int]) -> list[tuple[int, ...]]:
        """Cuts of a stage, as ascending operator indices, into more and more segments.

        Returns:
            Per cut, the places among the operators at which segments after the first begin.
        """
        places = self._places(inside)
        saved = np.cumsum([0, *self._saved(inside)], dtype=np.float64)
        crossing = self._crossing(inside)
        cuts = (_cut(places, saved, crossing, share * saved[-1]) for share in LIMITS)
        return list(dict.fromkeys(cut for cut in cuts if cut))

    def _places(self, inside: Sequence[int]) -> list[int]:
        """Places that cut no group of operators, with the start and the end of the stage."""
        spans: dict[str, list[int]] = {}
        for place, index in enumerate(inside):
            group = self._operators[index].group
            if group is not None:
                spans.setdefault(group, []).append(place)
        within = np.zeros(len(inside) + 2, dtype=np.int64)
        for span in spans.values():
            within[span[0] + 1] += 1
            within[span[-1] + 1] -= 1
        free = np.cumsum(within)[: len(inside) + 1] == 0
        return [int(place) for place in np.flatnonzero(free)]

    def _saved(self, inside: Sequence[int]) -> Iterator[int]:
        """Bytes that each operator saves and no earlier one does."""
        seen: set[str] = set()
        for index in inside:
            fresh = {name: size for name, size in self._operators[index].saved if name not in seen}
            seen.update(fresh)
            yield sum(fresh.values())

    def _crossing(self, inside: Sequence[int]) -> Floats:
        """Bytes made before each place and read after it."""
        place = {index: number for number, index in enumerate(inside)}
        lives = _lives(self._operators, self._storages, self._readers, place)
        change = np.zeros(len(inside) + 2)
        for first, last, size in lives.values():
            change[first + 1] += size
            change[last + 1] -= size
        return np.cumsum(change)[: len(inside) + 1]


def _lives(
    operators: Sequence[Operator],
    storages: Sequence[str],
    readers: Sequence[Sequence[int]],
    place: Mapping[int, int],
) -> dict[str, tuple[int, int, int]]:
    """First writer, last reader and bytes of the storages that are made and read in a stage."""
    lives: dict[str, tuple[int, int, int]] = {}
    for index, made in place.items():
        read = [place[reader] for reader in readers[index] if reader in place]
        if read:
            first, last, size = lives.get(storages[index], (made, made, 0))
            size = max(size, operators[index].output_bytes)
            lives[storages[index]] = first, max(last, *read), size
    return lives


def _cut(
    places: Sequence[int], saved: Floats, crossing: Floats, most_bytes: float
) -> tuple[int, ...]:
    """The cut with the fewest bytes at borders; an indivisible segment may exceed the limit."""
    before = saved[list(places)]
    costs = 1.0 + crossing[list(places)]  # if bytes are equal, fewer segments
    costs[-1] = 0.0
    least, start = np.zeros(len(places)), np.zeros(len(places), dtype=np.int64)
    firsts = np.searchsorted(before, before - most_bytes)
    for end in range(1, len(places)):
        first = min(int(firsts[end]), end - 1)
        start[end] = first + int(np.argmin(least[first:end]))
        least[end] = least[start[end]] + costs[end]
    cut, end = [], int(start[-1])
    while end > 0:
        cut.append(places[end])
        end = int(start[end])
    return tuple(reversed(cut))


class SegmentPlans:
    """Finds the segments of plans of one profile; equal stages are cut once."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._cuts = SegmentCuts(profile)
        self._footprints = Footprints(profile)
        self._times = OperatorTimes(profile)
        self._known: dict[object, list[list[Segments]]] = {}

    def of(self, plan: Plan) -> list[Segments | None]:
        """The segments of every stage for recomputation; None if segments need no less memory."""
        index_of = self._profile.index_of
        members = tuple(tuple(map(index_of.__getitem__, stage.nodes)) for stage in plan.stages)
        size, split = plan.micro_batch_size, plan.replication is Replication.SPLIT
        # The most samples that a replica computes at once.
        samples = tuple(ceil(size / stage.replicas) if split else size for stage in plan.stages)
        key = members, samples, size
        if key not in self._known:
            self._known[key] = self._candidates(*key)
        rows = zip(plan.stages, plan.warm_up, self._known[key], strict=True)
        return [_least(stage, in_flight, candidates) for stage, in_flight, candidates in rows]

    def _candidates(
        self, members: Sequence[Sequence[int]], samples: Sequence[int], size: int
    ) -> list[list[Segments]]:
        cuts = [self._cuts.of(inside) for inside in members]
        candidates: list[list[Segments]] = [[] for _ in members]
        for number in range(max(map(len, cuts), default=0)):
            chosen = [cut[min(number, len(cut) - 1)] if cut else () for cut in cuts]
            cut_up = [
                [inside[begin:end] for begin, end in pairwise([0, *places, len(inside)])]
                for inside, places in zip(members, chosen, strict=True)
            ]
            parts = self._footprints.of([segment for segments in cut_up for segment in segments])
            times_s = {count: self._times_s(parts, count) for count in set(samples)}
            first = 0
            for stage, segments in enumerate(cut_up):
                if number < len(cuts[stage]):
                    span = range(first, first + len(segments))
                    inside = times_s[samples[stage]][:, span.start : span.stop]
                    candidates[stage].append(
                        self._segments(parts, span, inside, samples[stage], size)
                    )
                first += len(segments)
        return candidates

    def _times_s(self, parts: Footprint, samples: int) -> Floats:
        """Forward and backward of every stage of a partition for so many samples."""
        times, scale = self._times.at(samples), samples / self._profile.micro_batch_size
        return stage_times(parts.sums, times, scale, self._profile.stage)[:, 0]

    def _segments(
        self, parts: Footprint, span: range, times_s: Floats, samples: int, size: int
    ) -> Segments:
        """A span of stages of a partition as the segments of one stage.

        Args:
            times_s: forward and backward of each; shape [2, segments].
            samples: that a replica computes at once.
            size: of a micro-batch.
        """
        own, (forwards, backwards) = self._profile.micro_batch_size, times_s.tolist()
        longer = size / samples
        held = [_held(parts, segment, size / own) for segment in span]
        inputs: dict[str, int] = {}
        for name, kept in (pair for one in held for pair in one.inputs.items()):
            inputs[name] = max(kept, inputs.get(name, 0))
        segments = [_held(parts, segment, samples / own) for segment in span]
        made = forward_peak = 0
        for one in segments:
            forward_peak = max(forward_peak, made + one.peaks.forward_bytes)
            made += sum(one.results.values())
        later_peak, first_peak = _backward_peaks(segments)
        return Segments(
            firsts=tuple(parts.nodes[segment][0] for segment in span[1:]),
            forward_s=longer * sum(forwards),
            recompute_s=longer * forwards[-1],
            backward_s=longer * (sum(backwards) + sum(forwards[:-1])),
            kept_bytes=sum(inputs.values()),
            last_bytes=held[-1].own_bytes,
            peaks=StagePeaks(forward_peak, later_peak, first_peak, 0),
            recompute_peak_bytes=segments[-1].peaks.forward_bytes,
        )


@dataclass(frozen=True)
class _Held:
    """What one segment holds.

    Args:
        own_bytes: saved values, without inputs.
        inputs, results: bytes by storage.
        peaks: above its inputs.
        gradient_bytes: of its parameters.
    """

    own_bytes: int
    inputs: dict[str, int]
    results: dict[str, int]
    peaks: StagePeaks
    gradient_bytes: int


def _held(parts: Footprint, segment: int, scale: float) -> _Held:
    memory, crossing = parts.memory[segment], parts.crossings[segment]
    inputs = {name: ceil(size * scale) for name, size in crossing.received.items()}
    own = max(0, ceil(int(parts.sums.saved_bytes[0, segment]) * scale) - sum(inputs.values()))
    gradient_bytes = int(parts.sums.gradient_bytes[0, segment])
    without = StagePeaks(own, 0, gradient_bytes, 0)
    return _Held(
        own_bytes=own,
        inputs=inputs,
        results={name: ceil(size * scale) for name, size in crossing.sent.items()},
        peaks=memory.peaks(scale, None) or without,
        gradient_bytes=gradient_bytes,
    )


def _backward_peaks(segments: Sequence[_Held]) -> tuple[int, int]:
    """Peaks of a backward and of the first, above inputs and the last segment's saved values."""
    inner = {name for segment in segments for name in segment.results}
    later = first = held = gradients = 0
    waiting: dict[str, int] = {}
    for number, segment in reversed(list(enumerate(segments))):
        level = held + sum(waiting.values())
        if segment is not segments[-1]:
            later = max(later, level + segment.peaks.forward_bytes)
            first = max(first, level + gradients + segment.peaks.forward_bytes)
            level += segment.own_bytes
        later = max(later, level + segment.peaks.backward_bytes)
        first = max(first, level + gradients + segment.peaks.first_backward_bytes)
        gradients += segment.gradient_bytes
        earlier = {name for before in segments[:number] for name in before.inputs}
        freed = {name: size for name, size in segment.inputs.items() if name not in earlier}
        held -= sum(size for name, size in freed.items() if name in inner)
        held -= segment.own_bytes if segment is segments[-1] else 0
        waiting = {name: size for name, size in waiting.items() if name not in segment.results}
        waiting |= segment.inputs
    return later, first


def _least(stage: Stage, in_flight: int, candidates: Sequence[Segments]) -> Segments | None:
    """The candidate with the least memory; None if the whole stage needs no more."""
    if stage.backward_ranks or not candidates:
        return None
    update = 0 if stage.cost.peaks is None else stage.cost.peaks.update_bytes
    best = min(candidates, key=lambda segments: _most_bytes(stage, segments, in_flight))
    if _most_bytes(stage, best, in_flight) >= _most_bytes(stage, None, in_flight):
        return None
    assert best.peaks is not None
    return replace(best, peaks=replace(best.peaks, update_bytes=update))


def _most_bytes(stage: Stage, segments: Segments | None, in_flight: int) -> int:
    """Peak bytes of the micro-batches of a stage that recomputes."""
    recomputing = replace(stage, recompute=True, segments=segments)
    cost, kept = recomputing.running, recomputing.kept_bytes
    peaks = cost.peaks or StagePeaks(cost.saved_bytes, 0, cost.accumulated_bytes, 0)
    before = (in_flight - 1) * kept
    backward = before + cost.saved_bytes + max(peaks.backward_bytes, peaks.first_backward_bytes)
    if stage.cost.weight_s is not None:  # its backwards are split
        backward += recomputing.input_half_bytes
    return max(before + peaks.forward_bytes, backward)
