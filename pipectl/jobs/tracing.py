"""The recorded steps of a run, beside what was predicted."""

from __future__ import annotations

from dataclasses import dataclass

from pipectl.errors import UsageError
from pipectl.plan import Plan
from pipectl.report.comparison import Comparison, compare
from pipectl.report.perfetto import Group
from pipectl.runs import RunDirectory, measured_steps
from pipectl.schedule import channels
from pipectl.timeline import Timeline


@dataclass(frozen=True)
class Traced:
    """One recorded step.

    Args:
        steps: all that were recorded.
    """

    run: RunDirectory
    plan: Plan
    steps: tuple[int, ...]
    predicted: Timeline
    measured: Timeline

    def comparison(self) -> Comparison:
        """Predicted against measured."""
        return compare(self.predicted, self.measured, channels(self.plan))

    def timelines(self) -> dict[str, Timeline]:
        """Both, by name."""
        return {"predicted": self.predicted, f"measured, step {self.measured.step}": self.measured}

    def groups(self) -> tuple[Group, Group]:
        """Both, for a trace viewer."""
        return (
            Group("predicted", self.predicted, self.plan),
            Group("measured", self.measured, self.plan),
        )


def traced(run: RunDirectory, step: int | None = None) -> Traced:
    """A recorded step; by default the last.

    Raises:
        UsageError: it was not recorded, or under another plan than the run has now.
        DataFileError: a file is missing or damaged.
    """
    steps = tuple(measured_steps(run))
    if not steps:
        raise UsageError(
            f"{run.name}: no step is recorded yet",
            cure="`trace.steps` in the job says which will be",
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
    return Traced(run, plan, steps, predicted, measured)
