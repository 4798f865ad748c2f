"""A measured step beside the predicted one, action by action.

Computations are paired by rank, kind, stage and micro-batch. The rest of a rank's step is told
apart by what it waits for. A wait for a message counts as waiting for others until the message is
sent, which is the pipeline's bubble, and from then on as communication, which nothing hides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pipectl.report.messages import sent_at
from pipectl.schedule import Channel
from pipectl.simulate import COMPUTE_KINDS
from pipectl.timeline import Event, Timeline

COMPUTING, OTHERS, COMMUNICATION, SUMS, OFFLOAD, BETWEEN = SPENT = (
    "computing",
    "waiting_for_others",
    "communication",
    "sums",
    "offload",
    "between_actions",
)
"""What a rank's step consists of; the last is no action at all: Python, loading of data."""

_WAITS = {
    "send_wait": COMMUNICATION,
    "send_start": COMMUNICATION,
    "receive_start": COMMUNICATION,
    "update_wait": OTHERS,
    "reduce_start": SUMS,
    "reduce_wait": SUMS,
    **dict.fromkeys(("offload_start", "offload_wait", "fetch_start", "fetch_wait"), OFFLOAD),
    **dict.fromkeys(COMPUTE_KINDS, COMPUTING),
}


class Both(NamedTuple):
    """Seconds, as predicted and as measured."""

    predicted_s: float
    measured_s: float

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None where nothing was predicted."""
        return self.measured_s / self.predicted_s if self.predicted_s > 0 else None

    @property
    def more_s(self) -> float:
        """By how much the measured one is longer."""
        return self.measured_s - self.predicted_s

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {**self._asdict(), "ratio": self.ratio}


@dataclass(frozen=True)
class Part:
    """All computations of one kind that a rank does for a stage.

    Args:
        actions: how many were paired.
        time: of all of them.
    """

    rank: int
    stage: int
    kind: str
    actions: int
    time: Both

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        named = {"rank": self.rank, "stage": self.stage, "kind": self.kind}
        return {**named, "actions": self.actions, **self.time.to_json()}


@dataclass(frozen=True)
class RankStep:
    """How a rank spends the step, by the names in ``SPENT``."""

    rank: int
    spent: dict[str, Both]

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {"rank": self.rank, **{name: both.to_json() for name, both in self.spent.items()}}


@dataclass(frozen=True)
class Comparison:
    """A step.

    Args:
        step: its number.
        time: of the whole step.
        parts: by rank, stage and kind.
        ranks: those that were recorded.
        unpaired: computations that only one of the timelines has.
    """

    step: int | None
    time: Both
    parts: tuple[Part, ...]
    ranks: tuple[RankStep, ...]
    unpaired: int
    clock_error_s: float

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "step": self.step,
            **self.time.to_json(),
            "clock_error_s": self.clock_error_s,
            "unpaired": self.unpaired,
            "parts": [part.to_json() for part in self.parts],
            "ranks": [rank.to_json() for rank in self.ranks],
        }


def compare(predicted: Timeline, measured: Timeline, channels: Sequence[Channel]) -> Comparison:
    """Pair the timelines.

    Args:
        channels: of the plan.
    """
    ranks = sorted({event.rank for event in measured.events})
    parts, unpaired = _parts(predicted, measured, frozenset(ranks))
    spent = [_spent(timeline, channels) for timeline in (predicted, measured)]
    steps = (
        RankStep(rank, {name: Both(*(each[rank][name] for each in spent)) for name in SPENT})
        for rank in ranks
    )
    return Comparison(
        step=measured.step,
        time=Both(predicted.end_s, measured.end_s),
        parts=parts,
        ranks=tuple(steps),
        unpaired=unpaired,
        clock_error_s=measured.clock_error_s,
    )


def _parts(
    predicted: Timeline, measured: Timeline, ranks: frozenset[int]
) -> tuple[tuple[Part, ...], int]:
    """The parts, and how many computations have no counterpart."""
    ours, theirs = _computed(predicted, ranks), _computed(measured, ranks)
    paired = sorted(ours.keys() & theirs.keys())
    found: dict[tuple[int, int, str], list[Both]] = defaultdict(list)
    for key in paired:
        rank, stage, kind, _ = key
        found[rank, stage, kind].append(Both(_length_s(ours[key]), _length_s(theirs[key])))
    parts = tuple(
        Part(*key, len(each), Both(*map(sum, zip(*each, strict=True))))
        for key, each in sorted(found.items())
    )
    return parts, len(ours) + len(theirs) - 2 * len(paired)


def _computed(
    timeline: Timeline, ranks: frozenset[int]
) -> dict[tuple[int, int, str, int], list[Event]]:
    found: dict[tuple[int, int, str, int], list[Event]] = defaultdict(list)
    for event in timeline.events:
        if event.kind in COMPUTE_KINDS and event.rank in ranks:
            found[event.rank, event.stage, event.kind, event.micro_batch].append(event)
    return found


def _length_s(events: Sequence[Event]) -> float:
    return sum(event.end_s - event.start_s for event in events)


def _spent(timeline: Timeline, channels: Sequence[Channel]) -> dict[int, dict[str, float]]:
    """Seconds of every rank's step, which add up to the step."""
    sent, end_s = sent_at(timeline, channels), timeline.end_s
    found: dict[int, dict[str, float]] = defaultdict(lambda: dict.fromkeys(SPENT, 0.0))
    last_s: dict[int, float] = defaultdict(float)
    for event in timeline.events:
        for name, length_s in _shares(event, sent.get((event.channel, event.micro_batch))):
            found[event.rank][name] += length_s
        last_s[event.rank] = max(last_s[event.rank], event.end_s)
    for rank, spent in found.items():
        spent[BETWEEN] += max(0.0, last_s[rank] - sum(spent.values()))
        spent[OTHERS] += end_s - last_s[rank]
    return found


def _shares(event: Event, sent_s: float | None) -> Iterator[tuple[str, float]]:
    """What an event's time was spent on."""
    if event.kind != "receive_wait":
        yield _WAITS.get(event.kind, BETWEEN), event.end_s - event.start_s
        return
    begun_s = event.end_s if sent_s is None else min(max(sent_s, event.start_s), event.end_s)
    yield OTHERS, begun_s - event.start_s
    yield COMMUNICATION, event.end_s - begun_s
