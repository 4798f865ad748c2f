"""Comparison of a measured step with its prediction.

Computations are paired by rank, kind, stage and micro-batch. The rest of a rank's step is divided
by what the rank waits for. A wait for a message counts as waiting for other ranks until the message
is sent (the pipeline's bubble), and as exposed communication from then on.

The bottleneck is found on the critical path, which goes from the end of the step backwards along a
rank, and from a wait for a message to the rank that sent it. It has no waits for other ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from statistics import mean
from typing import Any, NamedTuple, TypedDict

from pipectl.cluster import Cluster
from pipectl.errors import DataFileError, PipectlError, UsageError
from pipectl.lanes import TransferKind
from pipectl.plan import LONG_STEP_S, Plan
from pipectl.runs import (
    CoreShare,
    RankBeat,
    Record,
    RunDirectory,
    measured_steps,
    read_heartbeat,
    read_metrics,
)
from pipectl.schedule import Channel, channels
from pipectl.schedule.actions import COMPUTE_KINDS
from pipectl.schedule.registry import is_unflushed
from pipectl.timeline import Event, Timeline
from pipectl.units import format_time


class TimeUse(NamedTuple):
    """A use of a rank's time, in words.

    Args:
        advice: what to do if it is the bottleneck, or takes longer than predicted.
        cause: name if it is the bottleneck; empty for the same name.
    """

    name: str
    advice: str
    cause: str = ""


_PROFILED = (
    "when they were profiled, or these are other nodes; `pipectl profile --again` measures again"
)
_LINKS = "`pipectl profile --links` measures what the cluster file assumes"
COMPUTING, OTHERS, COMMUNICATION, SUMS, OFFLOAD, BETWEEN = (
    "computing", "waiting_for_others", "communication", "sums", "offload", "between_actions",
)  # fmt: skip
TIME_USES = {
    COMPUTING: TimeUse("computing", f"other processes may use the nodes, or did {_PROFILED}"),
    OTHERS: TimeUse("waiting for other ranks", "more micro-batches, or another schedule, keep the "
                "pipeline full for longer; the planner weighs both if the job leaves them to it "
                "(`auto`)",
                "filling and draining the pipeline"),
    COMMUNICATION: TimeUse("waiting for messages", f"fewer stages send less; {_LINKS}"),
    SUMS: TimeUse("waiting for sums of gradients", f"fewer replicas sum less; {_LINKS}"),
    OFFLOAD: TimeUse("waiting for offloaded values", "recomputing, or more memory per rank, needs "
                "no offload; `disk_link` and `host_link` in the cluster file say how fast it is"),
    BETWEEN: TimeUse("time between actions (Python)", "larger micro-batches have fewer actions"),
}  # fmt: skip
"""Uses of a rank's step; the last is time without an action: Python, loading of data."""

_USES = {
    "send_wait": COMMUNICATION,
    "send_start": COMMUNICATION,
    "receive_start": COMMUNICATION,
    "receive_wait": COMMUNICATION,
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
"""Minimum share of the step for a difference to be mentioned."""
_MIN_ADVISED = 0.05
"""Minimum difference of a whole step, as a share of it, that needs advice."""
_MAX_RATIO = 100
"""Maximum ratio to the prediction that is mentioned."""
_MIN_SHARE = 0.005
_MIN_CAUSE = 0.2
"""Minimum share of the step for a second bottleneck to be mentioned."""
_EVEN = 0.9
_MAX_EVENTS = 20_000
"""Maximum events of a step that ``status`` compares, so that it answers at once."""
_MAX_READ = 20
"""Maximum number of recorded steps, the last ones, among which one as predicted is looked for."""


class Times(NamedTuple):
    """Predicted and measured seconds."""

    predicted_s: float
    measured_s: float

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None if the prediction is 0."""
        return self.measured_s / self.predicted_s if self.predicted_s > 0 else None

    @property
    def more_s(self) -> float:
        """Measured minus predicted."""
        return self.measured_s - self.predicted_s

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {**self._asdict(), "ratio": self.ratio}


class Part(NamedTuple):
    """All computations of one kind of a rank for a stage.

    Args:
        actions: number of paired actions.
        time: total time.
    """

    rank: int
    stage: int
    kind: str
    actions: int
    time: Times

    def __str__(self) -> str:
        kind = self.kind.replace("_", " ")
        return f"{kind} of stage {self.stage}" if self.stage >= 0 else kind


TimeUses = Mapping[str, Times]
"""Seconds by name in ``TIME_USES``."""


@dataclass(frozen=True)
class Comparison:
    """The comparison of one step.

    Args:
        step: number of the step.
        time: time of the step.
        parts: computations by rank, stage and kind.
        ranks: uses of the step by recorded rank.
        critical: uses of the critical path.
        unpaired: number of computations in only one of the timelines.
        differs: how the step differs from the predicted one; None if both are alike.
    """

    step: int | None
    time: Times
    parts: tuple[Part, ...]
    ranks: Mapping[int, TimeUses]
    critical: TimeUses
    unpaired: int
    clock_error_s: float
    differs: str | None = None

    @property
    def difference_s(self) -> dict[str, float]:
        """Measured minus predicted seconds of the critical paths, by name in ``TIME_USES``.

        They add up to the difference of the step times.
        """
        return {name: both.more_s for name, both in self.critical.items()}

    def to_json(self) -> ComparisonJson:
        """Return the documented object."""
        return {
            "step": self.step,
            "predicted_s": self.time.predicted_s,
            "measured_s": self.time.measured_s,
            "ratio": self.time.ratio,
            "clock_error_s": self.clock_error_s,
            "unpaired": self.unpaired,
            "differs": self.differs,
            "difference_s": self.difference_s,
            "parts": [
                dict(zip(Part._fields[:-1], part[:-1], strict=True)) | part.time.to_json()
                for part in self.parts
            ],
            "ranks": [
                {"rank": rank, **{name: both.to_json() for name, both in spent.items()}}
                for rank, spent in self.ranks.items()
            ],
        }


class ComparisonJson(TypedDict):
    """The comparison of a recorded step with its prediction.

    Args:
        step: number of the step.
        predicted_s, measured_s, ratio: time of the step, and measured over predicted time.
        clock_error_s: largest error between times of different nodes.
        unpaired: number of computations in only one of the timelines.
        differs: how the step differs from the predicted one, such as by a batch that was not full;
            null if both are alike.
        difference_s: measured minus predicted seconds of the critical paths by use, such as
            ``computing`` and ``communication``.
        parts: computations by ``rank``, ``stage`` and ``kind``, with the number of ``actions``,
            both times and their ratio.
        ranks: of each ``rank``, both times and their ratio by use.
    """

    step: int | None
    predicted_s: float
    measured_s: float
    ratio: float | None
    clock_error_s: float
    unpaired: int
    differs: str | None
    difference_s: dict[str, float]
    parts: list[dict[str, Any]]
    ranks: list[dict[str, Any]]


def compare(
    predicted: Timeline, measured: Timeline, channels: Sequence[Channel], *, meets: bool = True
) -> Comparison:
    """Compare two timelines of a plan with the given channels.

    Args:
        meets: whether ranks wait for each other before they update.
    """
    ranks = sorted({event.rank for event in measured.events})
    ours, theirs = (StepTimes(each, channels, meets=meets) for each in (predicted, measured))
    expected = {key: time_s for key, time_s in ours.computing_s.items() if key[0] in ranks}
    paired = sorted(expected.keys() & theirs.computing_s.keys())
    times: dict[tuple[int, int, str], list[Times]] = defaultdict(list)
    for key in paired:
        rank, stage, kind, _ = key
        times[rank, stage, kind].append(Times(expected[key], theirs.computing_s[key]))

    def pair(before: Mapping[str, float], after: Mapping[str, float]) -> TimeUses:
        return {name: Times(before[name], after[name]) for name in TIME_USES}

    return Comparison(
        step=measured.step,
        time=Times(ours.step_s, theirs.step_s),
        parts=tuple(
            Part(*key, len(each), Times(*map(sum, zip(*each, strict=True))))
            for key, each in sorted(times.items())
        ),
        ranks={rank: pair(ours.spent_s[rank], theirs.spent_s[rank]) for rank in ranks},
        critical=pair(ours.critical_path(), theirs.critical_path()),
        unpaired=len(expected) + len(theirs.computing_s) - 2 * len(paired),
        clock_error_s=measured.clock_error_s,
        differs=measured.differs,
    )


class StepTimes:
    """The times in a timeline, given the channels of its plan.

    Args:
        meets: whether ranks wait for each other before they update; otherwise a rank begins its
            next step while others end theirs.

    Attributes:
        step_s: from step to step.
        computing_s: time of computations by rank, stage, kind and micro-batch.
        spent_s: uses of the step by rank and name in ``TIME_USES``; they add up to the step time.
    """

    def __init__(
        self, timeline: Timeline, channels: Sequence[Channel], *, meets: bool = True
    ) -> None:
        self._timeline, self._channels = timeline, channels
        self._computed = {(e.rank, e.stage, e.kind, e.micro_batch): e for e in timeline.events}
        self._sends = {
            (e.channel, e.micro_batch): e for e in timeline.events if e.kind == "send_start"
        }
        self.computing_s: dict[tuple[int, int, str, int], float] = defaultdict(float)
        self.spent_s: dict[int, dict[str, float]] = defaultdict(
            lambda: dict.fromkeys(TIME_USES, 0.0)
        )
        last_s: dict[int, float] = defaultdict(float)
        idle_s: dict[int, float] = {}  # until the first messages are sent
        computed: set[int] = set()
        begin_s = min((event.start_s for event in timeline.events), default=0.0)
        for event in timeline.events:
            spent, start_s = self.spent_s[event.rank], event.start_s
            if event.rank not in idle_s:  # a rank may begin a step later than others
                idle_s[event.rank] = spent[OTHERS] = 0.0 if meets else start_s - begin_s
            last_s[event.rank] = max(last_s[event.rank], event.end_s)
            if event.kind == "receive_wait":
                sent_s = self._sent_s(event)
                start_s = min(max(event.end_s if sent_s is None else sent_s, start_s), event.end_s)
                spent[OTHERS] += start_s - event.start_s
                if event.rank not in computed:
                    idle_s[event.rank] += start_s - event.start_s
            elif event.kind in COMPUTE_KINDS:
                computed.add(event.rank)
                key = event.rank, event.stage, event.kind, event.micro_batch
                self.computing_s[key] += event.end_s - start_s
            spent[_USES.get(event.kind, BETWEEN)] += event.end_s - start_s
        # The rank that sets the step time: the last one, or the last to begin its next step.
        self._setter = max(last_s, key=last_s.__getitem__, default=-1)
        self.step_s = timeline.end_s
        if last_s and not meets:
            self._setter = max(last_s, key=lambda rank: last_s[rank] - idle_s[rank])
            self.step_s = last_s[self._setter] - idle_s[self._setter]
            if self.step_s >= LONG_STEP_S:
                updates = (event.start_s for event in timeline.events if event.kind == "update")
                self.step_s = max(self.step_s, *updates)
        self._end_s = last_s[self._setter]
        for rank, spent in self.spent_s.items():
            spent[BETWEEN] += max(0.0, last_s[rank] - sum(spent.values()))
            spent[OTHERS] += self.step_s - last_s[rank]

    def ends(self, channel: Channel, micro_batch: int) -> tuple[Event | None, Event | None]:
        """Return the computations that produced and use a message."""
        made, read = _MADE_BY.get(channel.kind, ()), _READ_BY.get(channel.kind, ())

        def find(kinds: Sequence[str], rank: int, stage: int) -> Event | None:
            events = (self._computed.get((rank, stage, kind, micro_batch)) for kind in kinds)
            return next(filter(None, events), None)

        source = find(made, channel.source_rank, channel.source_stage)
        return source, find(read, channel.target_rank, channel.target_stage)

    def _sent_s(self, wait: Event) -> float | None:
        """Return when an awaited message was sent; None if it is unknown.

        Simulated timelines have no starts of sends: there it is the end of the computation that
        produced the message. Weights come from the previous step.
        """
        if not 0 <= wait.channel < len(self._channels):
            return None
        if start := self._sends.get((wait.channel, wait.micro_batch)):
            return start.start_s
        channel = self._channels[wait.channel]
        if channel.kind is TransferKind.WEIGHT:
            return 0.0
        source, _ = self.ends(channel, wait.micro_batch)
        return None if source is None else source.end_s

    def critical_path(self) -> dict[str, float]:
        """Return the uses of the critical path, by name in ``TIME_USES``; the sum is the step time.

        It ends on the rank that sets the step time.
        """
        spent, timeline = dict.fromkeys(TIME_USES, 0.0), self._timeline
        events: dict[int, list[Event]] = defaultdict(list)
        for event in sorted(timeline.events, key=lambda event: event.start_s):
            events[event.rank].append(event)
        rank, now_s = self._setter, self._end_s
        begin_s = max(0.0, now_s - self.step_s)
        while events[rank] and now_s > begin_s:
            event = events[rank].pop()
            if event.start_s >= now_s:
                continue
            end_s, start_s = max(begin_s, min(now_s, event.end_s)), event.start_s
            spent[BETWEEN] += now_s - end_s
            now_s = end_s
            use = _USES.get(event.kind, BETWEEN)
            if event.kind == "receive_wait":
                sent_s = self._sent_s(event)
                if sent_s is not None and start_s < sent_s < now_s:
                    start_s, rank = sent_s, self._channels[event.channel].source_rank
            elif event.kind == "update_wait":
                others = (e for each in events.values() for e in each if e.kind != "update_wait")
                ended = [e for e in others if start_s < e.end_s <= now_s]
                if ended:
                    last = max(ended, key=lambda each: each.end_s)
                    start_s, rank = last.end_s, last.rank
                use = COMMUNICATION
            start_s = max(start_s, begin_s)
            spent[use] += now_s - start_s
            now_s = start_s
        spent[BETWEEN] += now_s - begin_s
        return spent


def explain(
    comparison: Comparison,
    processor: CoreShare | None = None,
    beats: Sequence[RankBeat] = (),
    scheduler: str = "",
) -> list[tuple[str, str]]:
    """Describe the bottleneck, what would help, and the largest difference: labels and texts.

    If ranks did not get their cores, that comes first, and no advice about the plan is given. Of a
    step that differs from the predicted one, no difference is looked for. The bottleneck is the
    rank that computes longest, or another use on the critical path. Computing on that path beyond
    the time of the longest rank counts as filling and draining the pipeline.

    Args:
        scheduler: name of the run's batch system, which may have an option against that.
    """
    step_s, ranks = comparison.time.measured_s, comparison.ranks
    if step_s <= 0 or not ranks:
        return [("difference", "nothing was recorded")]
    computing_s = {rank: spent[COMPUTING].measured_s for rank, spent in ranks.items()}
    busiest = max(ranks, key=computing_s.__getitem__)
    busy_s = computing_s.pop(busiest)
    mean_s = mean(computing_s.values()) if computing_s else busy_s
    causes_s = {name: both.measured_s for name, both in comparison.critical.items()}
    causes_s[OTHERS] += max(0.0, causes_s.pop(COMPUTING) - busy_s)
    cause = max(causes_s, key=causes_s.__getitem__)
    what, cause_s = TIME_USES[cause].cause or TIME_USES[cause].name, causes_s[cause]
    computes = f"rank {busiest} computes for {format_time(busy_s)} of {format_time(step_s)}"
    if parts := [part for part in comparison.parts if part.rank == busiest]:
        computes += f", longest in {max(parts, key=lambda part: part.time.measured_s)}"
    is_worth = cause_s > busy_s or cause_s >= _MIN_CAUSE * step_s
    if cause_s > busy_s:
        bottleneck = f"{what}, {format_time(cause_s)}; {computes}"
    elif mean_s < _EVEN * busy_s:
        others = "the other" if len(computing_s) == 1 else "the others"
        bottleneck = f"{computes}; {others} for {format_time(mean_s)}"
    else:
        bottleneck = f"computing, on all ranks alike: {computes}"
    if is_worth and cause_s <= busy_s:
        bottleneck += f"; {what} adds {format_time(cause_s)}"
    lines = [("bottleneck", bottleneck)]
    lacks = processor is not None and bool(processor.ranks)
    if processor is not None and lacks:
        cure = [("would help", hint)] if (hint := processor.hint(scheduler)) else []
        lines = [("processor", processor.describe(beats)), *cure, *lines]
    elif is_worth:
        lines.append(("would help", _advice(cause, processor)))
    shares = [
        (mean(spent[name].measured_s for spent in ranks.values()) / step_s, use.name)
        for name, use in TIME_USES.items()
    ]
    by_share = sorted((share for share in shares if share[0] >= _MIN_SHARE), reverse=True)
    uses = ", ".join(f"{share:.0%} {name}" for share, name in by_share)
    lines.append(("ranks spend", uses))
    if comparison.differs is not None:
        why = f"{comparison.differs}; the prediction is of another step"
        return [*lines, ("difference", f"not looked for: {why}")]
    difference = _find_largest_difference(comparison, processor)
    return [*lines, *(difference[:1] if lacks else difference)]


def _advice(use: str, processor: CoreShare | None) -> str:
    """What to do about a use of time; of computing, by whether ranks had all of their cores."""
    if use == COMPUTING and processor is not None:
        return f"other processes may have used the nodes {_PROFILED}"
    return TIME_USES[use].advice


def _find_largest_difference(
    comparison: Comparison, processor: CoreShare | None
) -> list[tuple[str, str]]:
    """The largest difference to the prediction, other than waits for other ranks, and advice.

    It has the sign of the difference of the whole step.
    """
    sign = 1 if comparison.time.more_s >= 0 else -1
    more_s, rank, name, both = max(
        (
            (sign * both.more_s, -rank, name, both)
            for rank, spent in comparison.ranks.items()
            for name, both in spent.items()
            if name != OTHERS
        ),
        key=lambda each: each[:2],
    )
    if more_s < _MIN_DIFFERENCE * comparison.time.predicted_s:
        how = f"{_MIN_DIFFERENCE:.0%} of the step {'longer' if sign > 0 else 'shorter'}"
        return [("difference", f"no part of any rank's step is {how} than predicted, or more")]
    what, note = TIME_USES[name].name, ""
    parts = [part for part in comparison.parts if part.rank == -rank]
    if name == COMPUTING and parts:
        part = max(parts, key=lambda each: sign * each.time.more_s)
        what, both = str(part), part.time
        note = "; loading the data counts as forward" if part.kind == "forward" else ""
    amount = f"{format_time(abs(both.more_s))} {'longer' if both.more_s > 0 else 'shorter'}"
    times = "" if both.ratio is None or both.ratio > _MAX_RATIO else f" ({both.ratio:.2f} times)"
    difference = f"{what} on rank {-rank}: {amount} than predicted{times}{note}"
    lines = [("difference", difference)]
    if abs(comparison.time.more_s) >= _MIN_ADVISED * comparison.time.predicted_s:
        lines.append(("advice", _advice(name, processor)))
    return lines


@dataclass(frozen=True)
class RecordedStep:
    """A recorded step of a run.

    Args:
        steps: all recorded steps.
        meets: whether ranks wait for each other before they update.
    """

    run: RunDirectory
    plan: Plan
    steps: tuple[int, ...]
    predicted: Timeline
    measured: Timeline
    meets: bool

    def compare(self) -> Comparison:
        """Compare the measured step with the prediction."""
        return compare(self.predicted, self.measured, channels(self.plan), meets=self.meets)

    @cached_property
    def processor(self) -> CoreShare | None:
        """How much of their cores ranks got at that time; None if it is not known."""
        later = (line for line in read_metrics(self.run) if line.step >= (self.measured.step or 0))
        return next((line.processor for line in later if line.processor is not None), None)

    def explain(self, comparison: Comparison) -> list[tuple[str, str]]:
        """Describe a comparison of this step; see :func:`explain`."""
        heartbeat, scheduler = read_heartbeat(self.run.start), ""
        with suppress(DataFileError):
            scheduler = Record.load(self.run.record).scheduler
        beats = heartbeat.ranks if heartbeat else ()
        return explain(comparison, self.processor, beats, scheduler)

    def timelines(self) -> dict[str, Timeline]:
        """Return both timelines by name."""
        return {"predicted": self.predicted, f"measured, step {self.measured.step}": self.measured}


def known_timelines(run: RunDirectory) -> dict[str, Timeline]:
    """The last recorded step and its prediction, by name; the prediction alone if no step was
    recorded, and nothing if there is none."""
    try:
        return dict(load_step(run).timelines())
    except PipectlError:
        with suppress(PipectlError):
            return {"predicted": Timeline.load(run.predicted)}
    return {}


def load_step(run: RunDirectory, step: int | None = None) -> RecordedStep:
    """Load a recorded step, by default the last that is as the plan predicts it, if one is.

    Raises:
        UsageError: the step was not recorded, or was recorded under another plan.
        DataFileError: a file is missing or damaged.
    """
    steps = tuple(measured_steps(run))
    if not steps:
        earlier = sorted({path.parent.name for path in run.trace.glob("*/step-*.json")})
        kept = f" under its present plan; trace/{', trace/'.join(earlier)} has others"
        raise UsageError(
            f"{run.name}: no step is recorded yet{kept if earlier else ''}",
            hint="`trace.steps` in the job names the steps to record; `pipectl report -o "
            "page.html` shows the rest",
        )
    chosen = _last_comparable(run, steps) if step is None else step
    if chosen not in steps:
        some = ", ".join(map(str, steps[-5:]))
        raise UsageError(
            f"{run.name}: step {chosen} is not recorded", hint=f"recorded steps: {some}"
        )
    predicted, measured = Timeline.load(run.predicted), Timeline.load(run.measured_of(chosen))
    plan = Plan.load(run.plan)
    if measured.ranks != plan.ranks:
        raise UsageError(
            f"{run.name}: step {chosen} was recorded on {measured.ranks} ranks, and the plan has "
            f"{plan.ranks}",
            hint="it belongs to an earlier plan; choose another by `--step`",
        )
    meets = (
        plan.updates_together
        or is_unflushed(plan)
        or plan.updates_together_on(Cluster.load(run.cluster))
    )
    return RecordedStep(run, plan, steps, predicted, measured, meets)


def _last_comparable(run: RunDirectory, steps: Sequence[int]) -> int:
    for step in reversed(steps[-_MAX_READ:]):
        try:
            differs = Timeline.load(run.measured_of(step)).differs
        except DataFileError:
            return step  # which says what is wrong with it
        if differs is None:
            return step
    return steps[-1]


def divide_last_step(run: RunDirectory) -> tuple[int, dict[str, float]] | None:
    """Return the last recorded step and its ``difference_s``; None if it cannot be compared."""
    with suppress(PipectlError):
        recorded = load_step(run)
        measured = recorded.measured
        is_short, is_like = len(measured.events) <= _MAX_EVENTS, measured.differs is None
        if is_short and is_like and measured.step is not None:
            return measured.step, recorded.compare().difference_s
    return None
