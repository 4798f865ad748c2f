"""A measured step beside the predicted one: action by action, and what stands out.

Computations are paired by rank, kind, stage and micro-batch. The rest of a rank's step is told
apart by what it waits for. A wait for a message counts as waiting for others until the message is
sent, which is the pipeline's bubble, and from then on as communication, which nothing hides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pipectl.graph import TransferKind
from pipectl.schedule import Channel
from pipectl.simulate import COMPUTE_KINDS
from pipectl.timeline import Event, Timeline
from pipectl.units import format_time


class Use(NamedTuple):
    """What a rank spends a part of its step on, in words.

    Args:
        difference: what to do if it takes longer than predicted.
        bottleneck: what to do if it limits the speed.
    """

    name: str
    difference: str
    bottleneck: str


_LINKS = "`pipectl profile --links` measures what the cluster file assumes"
_BUSY = "the nodes are busier, idler or other than when they were profiled: "
COMPUTING, OTHERS, COMMUNICATION, SUMS, OFFLOAD, BETWEEN = (
    "computing", "waiting_for_others", "communication", "sums", "offload", "between_actions",
)  # fmt: skip
SPENT = {
    COMPUTING: Use("computing", f"{_BUSY}`pipectl profile --again` measures anew", ""),
    OTHERS: Use("waiting for other ranks", "",
                "More micro-batches keep the pipeline full for longer."),
    COMMUNICATION: Use("waiting for messages on their way", _LINKS,
                       f"Fewer stages send less; {_LINKS}."),
    SUMS: Use("waiting for sums of gradients", _LINKS, f"Fewer replicas sum less; {_LINKS}."),
    OFFLOAD: Use("waiting for offloaded values",
                 "look at `disk_link` and `host_link` in the cluster file",
                 "Recomputing, or more memory per rank, needs no offload."),
    BETWEEN: Use("time between actions (Python)", "larger micro-batches have fewer actions",
                 "Larger micro-batches have fewer actions."),
}  # fmt: skip
"""What a rank's step consists of; the last is no action at all: Python, loading of data."""

_USES = {
    "send_wait": COMMUNICATION,
    "send_start": COMMUNICATION,
    "receive_start": COMMUNICATION,
    "update_wait": OTHERS,
    "reduce_start": SUMS,
    "reduce_wait": SUMS,
    **dict.fromkeys(("offload_start", "offload_wait", "fetch_start", "fetch_wait"), OFFLOAD),
    **dict.fromkeys(COMPUTE_KINDS, COMPUTING),
}

_MADE_BY = {
    TransferKind.ACTIVATION: ("forward",),
    TransferKind.GRADIENT: ("backward", "backward_input"),
    TransferKind.SAVED: ("forward",),
}
_READ_BY = {**_MADE_BY, TransferKind.SAVED: ("backward",)}

_MIN_DIFFERENCE = 0.02
"""Of the step: a difference that is worth a word."""
_MAX_RATIO = 100
"""Times the prediction, from which on the ratio says nothing."""
_MIN_SHARE = 0.005
_MOST_OF_IT = 0.5
"""Of the step: a rank that computes so long limits its speed."""
_EVEN = 0.9


class Both(NamedTuple):
    """Seconds, as predicted and as measured."""

    predicted_s: float
    measured_s: float

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None if nothing was predicted."""
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
    ours, theirs = (_computing_s(timeline, ranks) for timeline in (predicted, measured))
    paired = sorted(ours.keys() & theirs.keys())
    times: dict[tuple[int, int, str], list[Both]] = defaultdict(list)
    for rank, stage, kind, micro_batch in paired:
        key = rank, stage, kind, micro_batch
        times[rank, stage, kind].append(Both(ours[key], theirs[key]))
    spent = [_spent(timeline, channels) for timeline in (predicted, measured)]
    return Comparison(
        step=measured.step,
        time=Both(predicted.end_s, measured.end_s),
        parts=tuple(
            Part(*key, len(each), Both(*map(sum, zip(*each, strict=True))))
            for key, each in sorted(times.items())
        ),
        ranks=tuple(
            RankStep(rank, {name: Both(*(each[rank][name] for each in spent)) for name in SPENT})
            for rank in ranks
        ),
        unpaired=len(ours) + len(theirs) - 2 * len(paired),
        clock_error_s=measured.clock_error_s,
    )


def _computing_s(
    timeline: Timeline, ranks: Sequence[int]
) -> dict[tuple[int, int, str, int], float]:
    """Seconds of every computation: by rank, stage, kind and micro-batch."""
    known = frozenset(ranks)
    times: dict[tuple[int, int, str, int], float] = defaultdict(float)
    for event in timeline.events:
        if event.kind in COMPUTE_KINDS and event.rank in known:
            key = event.rank, event.stage, event.kind, event.micro_batch
            times[key] += event.end_s - event.start_s
    return times


def _spent(timeline: Timeline, channels: Sequence[Channel]) -> dict[int, dict[str, float]]:
    """Seconds of every rank's step, which add up to the step."""
    sent, end_s = _find_send_times(timeline, channels), timeline.end_s
    ranks: dict[int, dict[str, float]] = defaultdict(lambda: dict.fromkeys(SPENT, 0.0))
    last_s: dict[int, float] = defaultdict(float)
    for event in timeline.events:
        spent, start_s = ranks[event.rank], event.start_s
        last_s[event.rank] = max(last_s[event.rank], event.end_s)
        if event.kind == "receive_wait":
            sent_s = sent.get((event.channel, event.micro_batch), event.end_s)
            sent_s = min(max(sent_s, start_s), event.end_s)
            spent[OTHERS] += sent_s - start_s
            spent[COMMUNICATION] += event.end_s - sent_s
        else:
            spent[_USES.get(event.kind, BETWEEN)] += event.end_s - start_s
    for rank, spent in ranks.items():
        spent[BETWEEN] += max(0.0, last_s[rank] - sum(spent.values()))
        spent[OTHERS] += end_s - last_s[rank]
    return ranks


def find_largest_difference(comparison: Comparison) -> str:
    """Where most of the difference to the prediction comes from, in a sentence.

    Waits for other ranks are left out: they follow from what those ranks do.
    """
    candidates = [
        (abs(both.more_s), -rank.rank, name, both)
        for rank in comparison.ranks
        for name, both in rank.spent.items()
        if name != OTHERS
    ]
    if not candidates:
        return "nothing was recorded"
    more_s, rank, name, both = max(candidates, key=lambda each: each[:2])
    if more_s < _MIN_DIFFERENCE * comparison.time.predicted_s:
        return f"no part of any rank's step differs by {_MIN_DIFFERENCE:.0%} of the step or more"
    what, note = SPENT[name].name, ""
    parts = [part for part in comparison.parts if part.rank == -rank]
    if name == COMPUTING and parts:
        part = max(parts, key=lambda each: abs(each.time.more_s))
        what, both = _describe(part), part.time
        note = "; loading the data counts as forward" if part.kind == "forward" else ""
    amount = f"{format_time(abs(both.more_s))} per step {'more' if both.more_s > 0 else 'less'}"
    times = f"takes {amount} than predicted"
    if both.ratio is not None and both.ratio <= _MAX_RATIO:
        times = f"takes {both.ratio:.2f} times what was predicted, {amount},"
    return f"{what} {times} on rank {-rank}: {SPENT[name].difference}{note}"


def find_bottleneck(comparison: Comparison) -> list[str]:
    """What the ranks spent the measured step on, and what limits its speed; sentences.

    The rank that computes longest is the bottleneck, if it computes most of the step. Otherwise the
    step is as long as it is because of what else takes that rank's time.
    """
    step_s, ranks = comparison.time.measured_s, comparison.ranks
    if step_s <= 0 or not ranks:
        return []
    shares = {
        name: sum(rank.spent[name].measured_s for rank in ranks) / len(ranks) / step_s
        for name in SPENT
    }
    by_share = sorted((share, name) for name, share in shares.items() if share >= _MIN_SHARE)
    listed = ", ".join(f"{share:.0%} {SPENT[name].name}" for share, name in reversed(by_share))
    sentences = [f"The ranks' time: {listed}."]
    busiest = max(ranks, key=lambda rank: rank.spent[COMPUTING].measured_s)
    busy_s = busiest.spent[COMPUTING].measured_s
    own = [part for part in comparison.parts if part.rank == busiest.rank]
    most = max(own, key=lambda part: part.time.measured_s, default=None)
    of_it = "" if most is None else f", longest in {_describe(most)}"
    computes = f"computes for {format_time(busy_s)} of {format_time(step_s)}{of_it}"
    others_s = [rank.spent[COMPUTING].measured_s for rank in ranks if rank is not busiest]
    mean_s = sum(others_s) / len(others_s) if others_s else busy_s
    if busy_s >= _MOST_OF_IT * step_s and mean_s < _EVEN * busy_s:
        others = f"the others compute for {format_time(mean_s)} on average"
        sentences.append(f"Rank {busiest.rank} is the bottleneck: it {computes}; {others}.")
    elif busy_s >= _MOST_OF_IT * step_s:
        sentences.append(
            f"Computing limits the speed, on all ranks alike: rank {busiest.rank} {computes}."
        )
    else:
        rest = {name: busiest.spent[name].measured_s for name in SPENT if name != COMPUTING}
        name = max(rest, key=rest.__getitem__)
        what = SPENT[name].name
        sentences.append(
            f"{what[0].upper()}{what[1:]} limits the speed: {format_time(rest[name])} of rank "
            f"{busiest.rank}, which {computes}. {SPENT[name].bottleneck}"
        )
    return sentences


def _describe(part: Part) -> str:
    kind = part.kind.replace("_", " ")
    return f"{kind} of stage {part.stage}" if part.stage >= 0 else kind


class Computed:
    """The computations of a timeline by what they are."""

    def __init__(self, timeline: Timeline) -> None:
        self._events = {(e.rank, e.kind, e.stage, e.micro_batch): e for e in timeline.events}

    def source(self, channel: Channel, micro_batch: int) -> Event | None:
        """What made a message."""
        kinds = _MADE_BY.get(channel.kind, ())
        return self._find(kinds, channel.source_rank, channel.source_stage, micro_batch)

    def target(self, channel: Channel, micro_batch: int) -> Event | None:
        """What a message is for."""
        kinds = _READ_BY.get(channel.kind, ())
        return self._find(kinds, channel.target_rank, channel.target_stage, micro_batch)

    def _find(self, kinds: Sequence[str], rank: int, stage: int, micro_batch: int) -> Event | None:
        events = (self._events.get((rank, kind, stage, micro_batch)) for kind in kinds)
        return next((event for event in events if event is not None), None)


def _find_send_times(
    timeline: Timeline, channels: Sequence[Channel]
) -> dict[tuple[int, int], float]:
    """When each message (channel, micro-batch) that a rank waited for was sent, if it is known.

    Simulated timelines hold no starts; there it is the end of what made the message. Weights are
    those of the step before.
    """
    started = {(e.channel, e.micro_batch): e for e in timeline.events if e.kind == "send_start"}
    computed = Computed(timeline)
    times: dict[tuple[int, int], float] = {}
    for event in timeline.events:
        message = event.channel, event.micro_batch
        if event.kind != "receive_wait" or not 0 <= event.channel < len(channels):
            continue
        if message in started:
            times[message] = started[message].start_s
        elif channels[event.channel].kind is TransferKind.WEIGHT:
            times[message] = 0.0
        elif (source := computed.source(channels[event.channel], event.micro_batch)) is not None:
            times[message] = source.end_s
    return times
