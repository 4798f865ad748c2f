"""A run on one page of HTML, and its recorded steps beside what was predicted."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

from pipectl.errors import PipectlError, UsageError
from pipectl.jobs.state import get_status
from pipectl.plan import Plan
from pipectl.profile import Profile
from pipectl.report import render_page
from pipectl.report.charts import steps_svg
from pipectl.report.comparison import (
    Comparison,
    compare,
    divide_difference,
    find_bottleneck,
    find_largest_difference,
)
from pipectl.report.gantt import gantt_svg
from pipectl.runs import RunDirectory, measured_steps, read_metrics
from pipectl.schedule import channels
from pipectl.timeline import Timeline

_MAX_RANKS = 64
_MAX_EVENTS = 20_000
"""Of a step that `status` compares, so that it answers at once."""
_CURVES = {"loss": "loss", "samples/s": "samples_per_s"}
"""What is drawn, by its key in the lines of metrics."""


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


def divide_last_step(run: RunDirectory) -> tuple[int, dict[str, float]] | None:
    """The last recorded step, and by how many seconds it is longer than predicted, by the names in
    :data:`pipectl.report.comparison.SPENT`; None if none can be compared."""
    with suppress(PipectlError):
        recorded = load_step(run)
        if len(recorded.measured.events) <= _MAX_EVENTS and recorded.measured.step is not None:
            return recorded.measured.step, divide_difference(recorded.compare())
    return None


def make_page(run: RunDirectory, now: float, step: int | None = None) -> str:
    """The page, from what the run directory holds by now; what is missing is left out.

    Args:
        now: seconds since the epoch.
        step: of those recorded; by default the last.

    Raises:
        UsageError: that step is not recorded.
    """
    status = get_status(run, now)
    comparison, verdict, names = None, list[str](), dict[str, str]()
    timelines: dict[str, Timeline] = {}
    with suppress(PipectlError):
        names = {operator.id: operator.name for operator in Profile.load(run.profile).operators}
    try:
        recorded = load_step(run, step)
        comparison, timelines = recorded.compare(), recorded.timelines()
        verdict = [*find_bottleneck(comparison), find_largest_difference(comparison)]
    except PipectlError:
        if step is not None:
            raise
        with suppress(PipectlError):
            timelines = {"predicted": Timeline.load(run.predicted)}
    lines = read_metrics(run)
    curves = {
        name: [(line["step"], line[key]) for line in lines if line.get(key) is not None]
        for name, key in _CURVES.items()
    }
    peaks = sorted(status.peaks, key=lambda peak: -peak.measured_bytes)[:_MAX_RANKS]
    return render_page(
        now=f"{datetime.fromtimestamp(now):%Y-%m-%d %H:%M:%S}",
        status=status,
        plan=status.plan,
        names=names,
        comparison=comparison,
        verdict=verdict,
        timelines=gantt_svg(timelines, "") if timelines and status.plan else "",
        peaks=sorted(peaks),
        max_bytes=max((max(peak[1], peak[2] or 0) for peak in peaks), default=0) or 1,
        curves=steps_svg(curves),
    )
