"""What the recorded steps of a run say of its job: a profile corrected by what they took."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from statistics import median

from pipectl.errors import DataFileError, UsageError
from pipectl.plan import Plan
from pipectl.planner.costs.operator_times import operator_times
from pipectl.profile import Profile
from pipectl.report.comparison import compare
from pipectl.runs import RunDirectory, measured_steps, read_metrics
from pipectl.schedule import channels
from pipectl.schedule.measured_rows import Steps, row_times_of
from pipectl.timeline import Timeline

MAX_STEPS = 20
"""Of the recorded ones, the last count."""
FIRST_STEPS = 3
"""Slower than others, and left out if there are others."""
_FORWARD = frozenset({"forward", "recompute"})
_BACKWARD = frozenset({"backward", "backward_input", "backward_weight"})
Phases = tuple[float, float]
"""Of forward and backward."""


def corrected_profile(run: RunDirectory) -> Profile:
    """The profile of a run with what its stages, and the rows of its programs, took.

    The operators of a stage are scaled to the stage's time: within a stage, the profile knows best.

    Raises:
        UsageError: no step is recorded under the run's plan.
        DataFileError: a file is missing or damaged.
    """
    plan, profile = Plan.load(run.plan), Profile.load(run.profile)
    recorded = _recorded(run, plan)
    if not recorded:
        raise UsageError(
            f"{run.name}: no step is recorded under its plan",
            cure="`trace.steps` in the job says which will be",
        )
    predicted = Timeline.load(run.predicted)
    ratios = _stage_ratios(predicted, recorded, plan)
    lines = read_metrics(run)
    times_s = {line["step"]: line["step_time_s"] for line in lines if line.get("step_time_s")}
    known = [(each, times_s[each.step]) for each in recorded if each.step in times_s]
    update_s = sum(stage.cost.update_s for stage in plan.stages if 0 in stage.updating_ranks)
    steps = Steps(channels(plan), [a for a, _ in known], [b for _, b in known], update_s)
    return replace(
        _scaled(profile, plan, ratios),
        rows=row_times_of([steps]) if known else profile.rows,
        source=f"{profile.source.split('; corrected')[0]}; corrected by {run.name}",
    )


def _recorded(run: RunDirectory, plan: Plan) -> list[Timeline]:
    """The last steps that were recorded under a plan, without the first ones."""
    steps = measured_steps(run)
    later = [step for step in steps if step > FIRST_STEPS] or steps
    timelines = []
    for step in later[-MAX_STEPS:]:
        with suppress(DataFileError):
            timelines.append(Timeline.load(run.measured_of(step)))
    return [each for each in timelines if each.ranks == plan.ranks]


def _stage_ratios(
    predicted: Timeline, recorded: Sequence[Timeline], plan: Plan
) -> Mapping[int, Phases]:
    """Measured over predicted time of every stage: medians over the steps."""
    found: dict[int, list[Phases]] = defaultdict(list)
    for measured in recorded:
        parts = compare(predicted, measured, channels(plan)).parts
        for stage in range(len(plan.stages)):
            own = [part for part in parts if part.stage == stage]
            found[stage].append(
                (
                    _ratio([p.time for p in own if p.kind in _FORWARD]),
                    _ratio([p.time for p in own if p.kind in _BACKWARD]),
                )
            )
    return {
        stage: (median(f for f, _ in pairs), median(b for _, b in pairs))
        for stage, pairs in found.items()
    }


def _ratio(times: Sequence[tuple[float, float]]) -> float:
    predicted_s, measured_s = (
        (sum(column) for column in zip(*times, strict=True)) if times else (0, 0)
    )
    return measured_s / predicted_s if predicted_s > 0 and measured_s > 0 else 1.0


def _scaled(profile: Profile, plan: Plan, ratios: Mapping[int, Phases]) -> Profile:
    """The profile in which the stages of a plan take ``ratios`` of what they took."""
    times = operator_times(profile, plan.micro_batch_size).uncached
    factors: dict[str, Phases] = {}
    for index, stage in enumerate(plan.stages):
        own = [times[profile.index_of[node]] for node in stage.nodes if node in profile.by_id]
        totals_s = sum(f for f, _ in own), sum(b for _, b in own)
        predicted_s = stage.cost.forward_s, stage.cost.backward_s
        pair = [
            max(0.0, 1 + (ratio - 1) * whole_s / total_s) if total_s > 0 else 1.0
            for ratio, whole_s, total_s in zip(ratios[index], predicted_s, totals_s, strict=True)
        ]
        factors.update(dict.fromkeys(stage.nodes, (pair[0], pair[1])))
    operators = tuple(
        each.scaled(*factors[each.id]) if each.id in factors else each for each in profile.operators
    )
    return replace(profile, operators=operators)
