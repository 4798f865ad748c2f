"""A recorded step of a run, and the prediction it is compared with."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from pipectl.errors import PipectlError, UsageError
from pipectl.plan import Plan
from pipectl.report.comparison import Comparison, compare
from pipectl.runs import RunDirectory, measured_steps
from pipectl.schedule import channels
from pipectl.timeline import Timeline

_MAX_EVENTS = 20_000
"""Of a step that `status` compares, so that it answers at once."""


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
            return recorded.measured.step, recorded.compare().difference_s
    return None
