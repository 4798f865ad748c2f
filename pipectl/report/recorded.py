"""The recorded steps of a run: one beside its prediction, and what all say of the job's profile."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import median

from pipectl.errors import DataFileError, PipectlError, UsageError
from pipectl.plan import Plan
from pipectl.profile import Profile
from pipectl.report.comparison import Comparison, Part, compare
from pipectl.runs import RunDirectory, measured_steps, read_metrics
from pipectl.schedule import channels
from pipectl.timeline import Timeline

_MAX_EVENTS = 20_000
"""`status` compares steps with at most so many events, so that it answers at once."""
_MAX_STEPS = 20
"""The last recorded steps correct a profile, at most so many."""
_FIRST_STEPS = 3
"""Slower than others, and left out if there are others."""
_PHASES = ({"forward", "recompute"}, {"backward", "backward_input", "backward_weight"})
"""Kinds of computations that a profile calls forward and backward."""


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
            cure="`trace.steps` in the job names the steps to record; `pipectl report -o "
            "page.html` shows the rest",
        )
    chosen = steps[-1] if step is None else step
    if chosen not in steps:
        some = ", ".join(map(str, steps[-5:]))
        raise UsageError(
            f"{run.name}: step {chosen} is not recorded", cure=f"recorded steps: {some}"
        )
    predicted, measured = Timeline.load(run.predicted), Timeline.load(run.measured_of(chosen))
    plan = Plan.load(run.plan)
    if measured.ranks != plan.ranks:
        raise UsageError(
            f"{run.name}: step {chosen} was recorded on {measured.ranks} ranks, and the plan has "
            f"{plan.ranks}",
            cure="it belongs to an earlier plan; choose another by `--step`",
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


def corrected_profile(run: RunDirectory) -> Profile:
    """The profile of a run with what its stages, and the rows of its programs, took.

    The operators of a stage are scaled to the stage's time: within a stage, the profile knows best.

    Raises:
        UsageError: no step is recorded under the run's plan.
        DataFileError: a file is missing or damaged.
    """
    from pipectl.schedule.measured_rows import Steps, row_times_of  # not for `status`

    plan, profile = Plan.load(run.plan), Profile.load(run.profile)
    steps = measured_steps(run)
    timelines = []
    for step in ([step for step in steps if step > _FIRST_STEPS] or steps)[-_MAX_STEPS:]:
        with suppress(DataFileError):
            timelines.append(Timeline.load(run.measured_of(step)))
    recorded = [each for each in timelines if each.ranks == plan.ranks]
    if not recorded:
        raise UsageError(
            f"{run.name}: no step is recorded under its plan",
            cure="`trace.steps` in the job names the steps to record",
        )
    predicted, sent = Timeline.load(run.predicted), channels(plan)
    profile = _scale_stages(
        profile, plan, [compare(predicted, measured, sent).parts for measured in recorded]
    )
    times_s = {
        line["step"]: line["step_time_s"] for line in read_metrics(run) if line.get("step_time_s")
    }
    pairs = [(each, times_s[each.step]) for each in recorded if each.step in times_s]
    update_s = sum(stage.cost.update_s for stage in plan.stages if 0 in stage.updating_ranks)
    timed = Steps(sent, [a for a, _ in pairs], [b for _, b in pairs], update_s)
    return replace(
        profile,
        rows=row_times_of([timed]) if pairs else profile.rows,
        source=f"{profile.source.split('; corrected')[0]}; corrected by {run.name}",
    )


def _scale_stages(profile: Profile, plan: Plan, steps: list[tuple[Part, ...]]) -> Profile:
    """The profile in which the stages of a plan take what they took in the median of the steps.

    Args:
        steps: computations of each, with predicted and measured times.
    """
    from pipectl.planner.costs.operator_times import operator_times  # not for `status`

    times = operator_times(profile, plan.micro_batch_size).uncached
    factors: dict[str, list[float]] = {}
    for index, stage in enumerate(plan.stages):
        node_times = [
            times[profile.index_of[node]] for node in stage.nodes if node in profile.by_id
        ]
        scales = []
        for phase, kinds in enumerate(_PHASES):
            ratios = []
            for parts in steps:
                pairs = [part.time for part in parts if part.stage == index and part.kind in kinds]
                predicted_s, measured_s = (sum(pair[i] for pair in pairs) for i in (0, 1))
                has_both = predicted_s > 0 and measured_s > 0
                ratios.append(measured_s / predicted_s if has_both else 1.0)
            whole_s = (stage.cost.forward_s, stage.cost.backward_s)[phase]
            total_s = sum(each[phase] for each in node_times)
            more = (median(ratios) - 1) * whole_s / total_s if total_s > 0 else 0.0
            scales.append(max(0.0, 1 + more))
        factors.update(dict.fromkeys(stage.nodes, scales))
    operators = tuple(
        each.scaled(*factors[each.id]) if each.id in factors else each for each in profile.operators
    )
    return replace(profile, operators=operators)
