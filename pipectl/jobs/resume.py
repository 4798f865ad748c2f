"""Resuming a run that has ended: from its last checkpoint, under the same plan or another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from pipectl.batch import JobState
from pipectl.errors import PipectlError, UsageError
from pipectl.fields import leaves
from pipectl.files import make_directory
from pipectl.jobs.job_files import fresh_plan, is_fresh, join_rows, move_to
from pipectl.jobs.prepare import Job, choose_scheduler, complete, refuse_code_of_others
from pipectl.jobs.state import add_next_job, get_status, recover_locked
from pipectl.jobs.submit import Rollback, Submission, hand_over
from pipectl.plan import Plan
from pipectl.profile import Profile
from pipectl.runs import (
    PROFILING,
    REHEARSAL,
    Record,
    RunDirectory,
    as_typed,
    last_checkpoint,
    locked,
    read_starts,
)
from pipectl.runs.readers import read_measured
from pipectl.spec import SpecFile, load, profile_key

if TYPE_CHECKING:
    from pipectl.spec import JobSpec


class Resumption(NamedTuple):
    """A run that was submitted once more.

    Args:
        replanned: whether it has another plan than before.
        changes: keys of the job whose values have changed: the value so far, and the new one.
    """

    submission: Submission
    replanned: bool
    changes: Mapping[str, tuple[Any, Any]]


def resume(
    run: RunDirectory,
    overrides: Sequence[str],
    now: float,
    *,
    force: bool = False,
    trust_owner: bool = False,
) -> Resumption:
    """Submit a run once more, in its own directory.

    Args:
        overrides: changes of its job, ``resources.nodes=4`` say, for which it is planned anew. Its
            micro-batches stay as they were unless these are changed: results depend on them.
        force: resume even if nobody can tell whether it is over.
        trust_owner: run code that another user could have written.

    Raises:
        UsageError: it still waits or runs, is no training, is to change what it cannot, or its code
            is not only ours.
        InfeasibleError: no plan fits.
        SchedulerError: the batch system rejects it; the run is as it was.
    """
    with locked(run):
        record = recover_locked(run, now)
        state = _check_over(run, record, now, force=force)
        if (other := add_next_job(run, record, now)) is not record:
            raise UsageError(
                f"{run.name}: its job script has just submitted job {other.job_id}",
                cure=f"follow it with `pipectl status {as_typed(run)}`",
            )
        file = SpecFile.read(run.job, overrides)
        if not trust_owner:
            refuse_code_of_others(file.spec(check_files=False), run.job)
        before, spec = load(run.job), file.spec()
        if state is JobState.COMPLETED:
            _check_incomplete(run, record, before, spec)
        _check_unchanged(run, record, before, spec)
        plan = Plan.load(run.plan) if run.plan.exists() else None
        job = replace(complete(Job(move_to(run, spec), record.scheduler)), spec=spec)
        job = _plan_again(run, before, job, overrides, plan)
        job = replace(job, plans_in_job=job.plan is None)
        replanned = job.plan != plan
        submission = _hand_over_again(run, job, record, now, replanned=replanned)
        return Resumption(submission, replanned, _changes(before, spec))


def _changes(before: JobSpec, after: JobSpec) -> dict[str, tuple[Any, Any]]:
    """The values that differ, by dotted key; not those of environment variables, maybe secrets."""
    private = {"environment": {"variables"}}
    old, new = (
        dict(leaves(spec.model_dump(mode="json", exclude=private))) for spec in (before, after)
    )
    keys = dict.fromkeys((*old, *new))
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}


def _check_over(run: RunDirectory, record: Record, now: float, *, force: bool) -> JobState:
    if record.kind in (PROFILING, REHEARSAL):
        raise UsageError(
            f"{run.name}: is not a training run, so it cannot be resumed",
            cure="start it again with `pipectl profile` or `pipectl lab rehearse`",
        )
    job = get_status(run, now).job
    if job.state is JobState.UNKNOWN and not force:
        raise UsageError(
            f"{run.name}: it is not known whether it has ended: {job.reason}",
            cure="if you know that it has: pipectl resume --force",
        )
    if job.state.alive:
        raise UsageError(
            f"{run.name}: is {job.state.value}",
            cure=f"wait for its end, or `pipectl cancel {as_typed(run)}` first",
        )
    return job.state


def _check_incomplete(run: RunDirectory, record: Record, before: JobSpec, spec: JobSpec) -> None:
    """Refuse a run that is complete, unless it gets more to do."""
    early_stop = read_measured(run, record).early_stop
    if early_stop and spec.evaluation == before.evaluation:
        raise UsageError(
            f"{run.name}: is complete: {early_stop}",
            cure=f"to train on, allow more evaluations: pipectl resume {as_typed(run)} "
            "--set evaluation.early_stopping.patience=N",
        )
    if not early_stop and spec.training.steps <= record.steps:
        raise UsageError(
            f"{run.name}: is complete, step {record.steps} of {record.steps}",
            cure=f"to train on, give it more steps: pipectl resume {as_typed(run)} "
            f"--set training.steps={2 * record.steps}",
        )


def _check_unchanged(run: RunDirectory, record: Record, before: JobSpec, spec: JobSpec) -> None:
    """Refuse another batch system, and another model than that of the checkpoints."""
    scheduler = choose_scheduler(spec)
    if spec.launch.scheduler != before.launch.scheduler and scheduler != record.scheduler:
        raise UsageError(
            f"{run.name}: was submitted to {record.scheduler} and resumes there, not on "
            f"{scheduler} (launch.scheduler)",
            cure="leave it out, or submit a new run: "
            f"pipectl submit {run.job} --scheduler {scheduler}",
        )
    old, new = (job.model.resolve(job.base) for job in (before, spec))
    key = "model.factory" if old != new else "model.kwargs"
    changes = old != new or before.model.kwargs != spec.model.kwargs
    if changes and last_checkpoint(run) is not None:
        raise UsageError(
            f"{run.name}: {key} has changed, but its checkpoints belong to the earlier model",
            cure="leave it as it was, or submit a new run, which can start from the weights that "
            f"`pipectl export {as_typed(run)}` writes (model.weights)",
        )


def _plan_again(
    run: RunDirectory, before: JobSpec, job: Job, overrides: Sequence[str], plan: Plan | None
) -> Job:
    """The job with the plan that the run had, if that is still of it; else with another, which the
    job itself makes if the model is another.

    A new plan has as many micro-batches as before, unless the job says how many. What begins anew
    with another model has those that suit it. Ranks can change without another profile: it is near
    enough if it is of the same model and loss.
    """
    from pipectl.jobs.planning import corrected_profile, find_plan
    from pipectl.runtime.nodes import check_supported

    assert job.cluster is not None
    if plan is None:
        return job
    machines = job.cluster
    profile, cluster = join_rows(Profile.load(run.profile), machines)
    if fresh_plan(job.spec, profile, cluster, run.plan) is not None:
        return replace(job, cluster=cluster, profile=profile, plan=plan)
    spec = job.spec
    like_before = before.model_copy(update={"model": spec.model, "loss": spec.loss})
    same_model = is_fresh(like_before, profile)
    if spec.pipeline.micro_batches is None and (same_model or last_checkpoint(run) is not None):
        spec = load(run.job, [*overrides, f"pipeline.micro_batches={plan.micro_batches}"])
    if not same_model:
        return replace(job, spec=spec)
    if profile.key is not None:  # that of the job from here on, so that later changes are seen
        profile = replace(profile, key=profile_key(spec))
    with suppress(PipectlError):  # of a run that recorded no step, the profile stays as it is
        profile = replace(corrected_profile(run), key=profile.key)
        profile, cluster = join_rows(profile, machines)
    plan = find_plan(spec, profile, cluster)
    check_supported(plan, str(run.plan))
    return replace(job, spec=spec, cluster=cluster, profile=profile, plan=plan)


def _hand_over_again(
    run: RunDirectory, job: Job, record: Record, now: float, *, replanned: bool
) -> Submission:
    """Hand the run over, without what its earlier start left; or leave it as it was."""
    starts = read_starts(run)
    record = record.after(now, "submitting", detail="resumed")
    new = Submission.new(
        run, job, now, name=record.name, history=record.history, sweep=record.sweep
    )
    # What the earlier start reported says nothing of the run while it waits.
    old_reports = [run.exit_code, run.resubmitted, run.stopped, run.requeue_error]
    if job.plan is None:
        old_reports += [run.plan, run.predicted]
    rewritten_files = (
        run.job, run.template, run.cluster, run.profile, run.plan, run.predicted, run.script,
        run.variables, run.record,
    )  # fmt: skip
    reports = [*run.errors.glob("*.json"), *([run.heartbeat] if run.heartbeat.exists() else [])]
    moved = {path: run.errors_before(starts) / path.name for path in reports}
    if replanned:  # recorded steps are of the earlier plan
        steps = run.trace.glob("step-*.json")
        moved |= {path: run.trace_before(starts) / path.name for path in steps}
    contents = {
        path: path.read_text(encoding="utf-8") if path.exists() else None
        for path in (*rewritten_files, *old_reports)
    }
    with Rollback(contents=contents, moved=moved) as rollback:
        for path, place in moved.items():
            make_directory(place.parent)
            path.replace(place)
        for path in old_reports:
            path.unlink(missing_ok=True)
        (submission,) = hand_over([new], rollback)
    return submission
