"""Correct a profile by the recorded steps of a run."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from statistics import median

from pipectl.errors import DataFileError, UsageError
from pipectl.plan import Plan
from pipectl.planner.costs.stage_costs import operator_times
from pipectl.profile import Profile
from pipectl.report.comparison import Part, compare
from pipectl.runs import WARM_UP_STEPS, RunDirectory, measured_steps, read_metrics
from pipectl.schedule import channels
from pipectl.schedule.measured_rows import Steps, row_times_of
from pipectl.timeline import Timeline

_MAX_STEPS = 20
"""Maximum number of recorded steps, the last ones, that correct a profile."""
_MAX_READ = 100
"""Maximum number of recorded steps, the last ones, that are read to find these."""
_PHASES = ({"forward", "recompute"}, {"backward", "backward_input", "backward_weight"})
"""Kinds of actions that a profile counts as forward and as backward."""


def correct_profile(run: RunDirectory) -> Profile:
    """The profile of a run, corrected by the measured times of its stages and rows.

    All operators of a stage are scaled by the same factor. Steps in which ranks did not get their
    cores do not count if there are others. Those with another batch than the plan's never do.

    Raises:
        UsageError: no such step was recorded with the run's plan.
        DataFileError: a file is missing or damaged.
    """
    plan, profile = Plan.load(run.plan), Profile.load(run.profile)
    of_plan = _load_steps(run, plan)
    # A step may have further lines, of its evaluation for example.
    lines = {line.step: line for line in read_metrics(run) if line.is_step}
    disturbed = {line.step for line in lines.values() if line.processor and line.processor.ranks}
    recorded = [each for each in of_plan if each.step not in disturbed] or of_plan
    if not recorded:
        raise UsageError(
            f"{run.name}: no step with the batch of its plan is recorded",
            hint="`trace.steps` in the job names the steps to record",
        )
    predicted, sent = Timeline.load(run.predicted), channels(plan)
    profile = _scale_stages(
        profile, plan, [compare(predicted, measured, sent).parts for measured in recorded]
    )
    times_s = {line.step: line.step_time_s for line in lines.values() if line.step_time_s}
    pairs = [(each, times_s[each.step]) for each in recorded if each.step in times_s]
    update_s = sum(stage.cost.update_s for stage in plan.stages if 0 in stage.updating_ranks)
    timed = Steps(sent, [a for a, _ in pairs], [b for _, b in pairs], update_s)
    return replace(
        profile,
        rows=row_times_of([timed]) if pairs else profile.rows,
        source=f"{profile.source.split('; corrected')[0]}; corrected by {run.name}",
    )


def _load_steps(run: RunDirectory, plan: Plan) -> list[Timeline]:
    """The last recorded steps that are as the plan has them."""
    steps, timelines = measured_steps(run), list[Timeline]()
    for step in reversed(([step for step in steps if step > WARM_UP_STEPS] or steps)[-_MAX_READ:]):
        with suppress(DataFileError):
            timeline = Timeline.load(run.measured_of(step))
            if timeline.ranks == plan.ranks and timeline.differs is None:
                timelines.append(timeline)
        if len(timelines) == _MAX_STEPS:
            break
    return timelines[::-1]


def _scale_stages(profile: Profile, plan: Plan, steps: list[tuple[Part, ...]]) -> Profile:
    """Scale the operators of every stage to the median time of the stage in ``steps``.

    Args:
        steps: computations of each step, with predicted and measured times.
    """
    times = operator_times(profile, plan.micro_batch_size).uncached.T.tolist()
    factors: dict[str, tuple[float, float]] = {}
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
        factors.update(dict.fromkeys(stage.nodes, (scales[0], scales[1])))
    return profile.scaled(factors)
