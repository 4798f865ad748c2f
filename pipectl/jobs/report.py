"""A run on one page of HTML, and its recorded steps beside what was predicted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from html import escape

from pipectl.batch import JobState
from pipectl.errors import PipectlError, UsageError
from pipectl.jobs.state import RunStatus, get_status
from pipectl.plan import Plan, Stage
from pipectl.profile import Profile
from pipectl.report.comparison import (
    Comparison,
    compare,
    find_bottleneck,
    find_largest_difference,
)
from pipectl.report.page import Point, bars, curve, heading, page, paragraph, table, timelines_html
from pipectl.runs import RunDirectory, measured_steps, read_metrics
from pipectl.schedule import channels
from pipectl.timeline import Timeline
from pipectl.units import format_bytes, format_time

_STAGES = (
    "stage", "ranks", "operators", "first", "last", "forward", "backward", "parameters", "memory",
)  # fmt: skip
_FIGURES = ("stage", "operators", "forward", "backward", "parameters")
_MAX_RANKS = 64


@dataclass(frozen=True)
class RecordedStep:
    """One recorded step.

    Args:
        steps: all that were recorded.
    """

    run: RunDirectory
    plan: Plan
    steps: tuple[int, ...]
    predicted: Timeline
    measured: Timeline

    def compare(self) -> Comparison:
        """Predicted against measured."""
        return compare(self.predicted, self.measured, channels(self.plan))

    def timelines(self) -> dict[str, Timeline]:
        """Both, by name."""
        return {"predicted": self.predicted, f"measured, step {self.measured.step}": self.measured}


def load_step(run: RunDirectory, step: int | None = None) -> RecordedStep:
    """A recorded step; by default the last.

    Raises:
        UsageError: it was not recorded, or under another plan than the run has now.
        DataFileError: a file is missing or damaged.
    """
    steps = tuple(measured_steps(run))
    if not steps:
        raise UsageError(
            f"{run.name}: no step is recorded yet",
            cure="`trace.steps` in the job says which will be; `pipectl report -o page.html` "
            "shows the rest",
        )
    chosen = steps[-1] if step is None else step
    if chosen not in steps:
        some = ", ".join(map(str, steps[-5:]))
        raise UsageError(
            f"{run.name}: step {chosen} is not recorded", cure=f"steps that are: {some}"
        )
    predicted, measured = Timeline.load(run.predicted), Timeline.load(run.measured_of(chosen))
    plan = Plan.load(run.plan)
    if measured.ranks != plan.ranks:
        raise UsageError(
            f"{run.name}: step {chosen} was recorded on {measured.ranks} ranks, and the plan has "
            f"{plan.ranks}",
            cure="it is of an earlier plan; `--step` chooses another",
        )
    return RecordedStep(run, plan, steps, predicted, measured)


def make_page(run: RunDirectory, now: float, step: int | None = None) -> str:
    """The page, from what the run directory holds by now; what is missing is left out.

    Args:
        now: seconds since the epoch.
        step: of those recorded; by default the last.

    Raises:
        UsageError: that step is not recorded.
    """
    status = get_status(run, now)
    profile, recorded = None, None
    with suppress(PipectlError):
        profile = Profile.load(run.profile)
    try:
        recorded = load_step(run, step)
    except PipectlError:
        if step is not None:
            raise
    parts = [*_head(status, now), *_speed(status, recorded)]
    if status.plan is not None:
        parts += [*_plan(status.plan, profile), *_timelines(status, recorded), *_memory(status)]
    parts += _curves(run)
    return page(f"{run.name} - pipectl", parts)


def _head(status: RunStatus, now: float) -> Iterator[str]:
    yield f"<h1>{escape(status.run.name)}</h1>"
    state = status.job.state.value
    reason = f": {status.job.reason}" if status.job.reason else ""
    steps = f", step {status.measured.step} of {status.steps}" if status.steps else ""
    bad = status.job.state.final and status.job.state is not JobState.COMPLETED
    yield paragraph(f"{state}{steps}{reason}", "bad" if bad else "")
    if status.failure is not None and bad:
        yield paragraph(f"{status.failure.where}: {status.failure.message}", "bad")
    yield paragraph(f"as of {datetime.fromtimestamp(now):%Y-%m-%d %H:%M:%S}", "faint")


def _speed(status: RunStatus, recorded: RecordedStep | None) -> Iterator[str]:
    """How fast it is, and what limits that: as it was recorded, else as it was predicted."""
    yield heading("Speed")
    plan, measured_s, predicted_s = (
        status.plan,
        status.measured.step_time_s,
        status.predicted_step_s,
    )
    if measured_s and plan:
        rate = f"{format_time(measured_s)} per step, {plan.batch_size / measured_s:.1f} samples/s"
        share = "" if status.efficiency is None else f", efficiency {status.efficiency:.0%}"
        yield paragraph(f"Measured: {rate}{share}.")
    if predicted_s:
        ratio = f"; the run takes {measured_s / predicted_s:.2f} times that" if measured_s else ""
        yield paragraph(f"Predicted: {format_time(predicted_s)} per step{ratio}.")
    if recorded is not None:
        comparison = recorded.compare()
        difference = f"{find_largest_difference(comparison)}."
        yield paragraph(
            f"In step {comparison.step}, which took {format_time(comparison.time.measured_s)}:"
        )
        for sentence in (*find_bottleneck(comparison), f"{difference[0].upper()}{difference[1:]}"):
            yield paragraph(sentence)
    elif plan is not None and plan.prediction is not None:
        loads = [stage.load_s for stage in plan.stages]
        slowest = loads.index(max(loads))
        yield paragraph(
            f"Stage {slowest} is predicted to be the bottleneck, with {format_time(loads[slowest])}"
            f" per micro-batch; ranks are predicted to idle {plan.prediction.bubble:.1%} of a step."
        )
    if status.laggard is not None:
        one = status.laggard
        yield paragraph(
            f"All wait for rank {one.rank}: the others {one.others:.0%} of their time, "
            f"it {one.share:.0%} of its own."
        )


def _plan(plan: Plan, profile: Profile | None) -> Iterator[str]:
    def count(number: int, noun: str) -> str:
        return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith('ch') else 's'}"

    yield heading("Plan")
    yield paragraph(
        f"{count(len(plan.stages), 'stage')} on {count(plan.ranks, 'rank')}, "
        f"schedule {plan.schedule}, {count(plan.micro_batches, 'micro-batch')} of "
        f"{plan.micro_batch_size} (batch {plan.batch_size})"
    )
    names = {} if profile is None else {one.id: one.name for one in profile.operators}
    rows = [_stage_row(index, stage, names) for index, stage in enumerate(plan.stages)]
    yield table(_STAGES, rows, _FIGURES)


def _stage_row(index: int, stage: Stage, names: dict[str, str]) -> list[object]:
    ways = {
        "recompute": stage.recompute and stage.blocks is None,
        "blocks": stage.blocks is not None,
        "offload": stage.offload,
    }
    return [
        index,
        ", ".join(map(str, (*stage.ranks, *stage.backward_ranks))),
        len(stage.nodes),
        *(names.get(node, node) for node in (stage.nodes[0], stage.nodes[-1])),
        format_time(stage.cost.forward_s),
        format_time(stage.cost.backward_s),
        format_bytes(stage.cost.parameter_bytes),
        ", ".join(way for way, used in ways.items() if used),
    ]


def _timelines(status: RunStatus, recorded: RecordedStep | None) -> Iterator[str]:
    timelines = {} if recorded is None else recorded.timelines()
    if recorded is None:
        with suppress(PipectlError):
            timelines["predicted"] = Timeline.load(status.run.predicted)
    if timelines:
        yield heading("A step")
        yield timelines_html(timelines)


def _memory(status: RunStatus) -> Iterator[str]:
    every = status.peaks
    largest = sorted(every, key=lambda peak: -peak.measured_bytes)[:_MAX_RANKS]
    if not largest:
        return
    yield heading("Memory")
    if len(largest) < len(every):
        yield paragraph(f"{len(largest)} of {len(every):,} ranks: those that hold most.")
    most = max(max(peak.measured_bytes, peak.predicted_bytes or 0) for peak in largest)
    rows = []
    for peak in sorted(largest):
        sizes = {"measured": peak.measured_bytes, "predicted": peak.predicted_bytes}
        drawn = [
            (kind, size / most, f"{format_bytes(size)} {kind}")
            for kind, size in sizes.items()
            if size is not None
        ]
        rows.append((f"rank {peak.rank}", drawn))
    yield bars(rows)


def _curves(run: RunDirectory) -> list[str]:
    lines = read_metrics(run)

    def points(key: str) -> list[Point]:
        return [(line["step"], line[key]) for line in lines if line.get(key) is not None]

    drawn = [curve("loss", points("loss")), curve("samples/s", points("samples_per_s"))]
    return [heading("Training"), "".join(drawn)] if any(drawn) else []
