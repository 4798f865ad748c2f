"""Resume a run that has ended from its last checkpoint, with the same plan or a new one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple

from pipectl.batch import JobState, get_scheduler
from pipectl.cluster import Cluster
from pipectl.errors import DataFileError, PipectlError, UsageError
from pipectl.files import is_there, make_directory
from pipectl.hash_seed import VARIABLE
from pipectl.jobs.job import (
    Job,
    change,
    choose_scheduler,
    fit_to_allocation,
    make_job,
    with_hash_seed,
    with_output_beside,
)
from pipectl.jobs.output import complete_cluster, find_cluster, is_of_model, plan_file_key
from pipectl.jobs.owners import refuse_code_of_others
from pipectl.jobs.recover import add_next_job, recover
from pipectl.jobs.state import get_status
from pipectl.jobs.submit import Rollback, Submission, hand_over
from pipectl.plan import Plan
from pipectl.profile import Profile
from pipectl.runs import (
    PROFILING,
    REHEARSAL,
    Record,
    RunDirectory,
    last_checkpoint,
    locked,
    name_in_shell,
    read_heartbeat,
    read_measured,
    read_starts,
    step_of,
)
from pipectl.runs.code import Code, is_changed, loaded_of, new_copies, read_snapshot
from pipectl.runs.kept_code import read_code
from pipectl.spec import SpecFile, load, profile_key
from pipectl.spec.code import using
from pipectl.spec.settings import differences
from pipectl.units import plural

if TYPE_CHECKING:
    from pipectl.spec import JobSpec
    from pipectl.spec.models import EarlyStopping


class Resumption(NamedTuple):
    """A run that was submitted again.

    Args:
        replanned: whether the plan has changed.
        changes: old and new value of every key of the job that has changed.
        changed_files: files of the job that have changed since it was submitted.
        has_own_code: whether it goes on with the code that it has kept.
    """

    submission: Submission
    replanned: bool
    changes: dict[str, tuple[Any, Any]]
    changed_files: tuple[str, ...]
    has_own_code: bool


def resume(
    run: RunDirectory,
    overrides: Sequence[str],
    now: float,
    *,
    force: bool = False,
    trust_owner: bool = False,
    with_changed_code: bool = False,
) -> Resumption:
    """Submit a run again, in its own directory.

    Args:
        overrides: changes of the job, e.g. ``resources.nodes=4``, which may need a new plan. The
            number of micro-batches changes only if they set it, because results depend on it.
        force: resume even if it is unknown whether the run has ended.
        trust_owner: run code that another user could have written.
        with_changed_code: take the code as it is now, not as the run has kept it.

    Raises:
        UsageError: the run still waits or runs, is not a training, or its code is not only ours; or
            ``overrides`` change what cannot change.
        InfeasibleError: no plan fits.
        SchedulerError: the batch system rejects the job; the run is as it was.
    """
    with locked(run):
        record = recover(run, now, is_locked=True)
        state = _refuse_unfinished(run, record, now, force=force)
        if (other := add_next_job(run, record, now)) is not record:
            raise UsageError(
                f"{run.name}: its job script has just submitted job {other.job_id}",
                hint=f"follow it with `pipectl status {name_in_shell(run)}`",
            )
        file = SpecFile.read(run.job, overrides)
        if not trust_owner:
            refuse_code_of_others(file.spec(check_files=False), run.job)
        kept = read_code(run)
        changed = tuple(each.path for each in kept.changed()) if kept else ()
        with using(None if with_changed_code else read_snapshot(run)):
            code = Code.of(file.spec()).with_loaded(loaded_of(kept) if kept else ())
            code = replace(code, before=None if with_changed_code else kept)
        # Files that only the changed job needs are taken as they are now.
        with using(code.sources):
            specs = load(run.job), file.spec()
            before, spec = (_keep_hash_seed(each, record) for each in specs)
            if spec.resources.node_range is not None:
                spec = fit_to_allocation(spec, record.scheduler)
            if state is JobState.COMPLETED:
                _check_incomplete(run, record, before, spec)
            _check_steps(run, spec)
            _check_unchanged(run, record, before, spec)
            plan = Plan.load(run.plan) if is_there(run.plan) else None
            cluster, _, warning = find_cluster(with_output_beside(run, spec), record.scheduler)
            job = make_job(spec, record.scheduler)
            job = replace(
                job, cluster=cluster, cluster_warning=warning, plans_in_job=True, code=code
            )
            if plan is not None:
                job = _plan_again(run, before, job, cluster, overrides, plan)
            _check_micro_batches(run, job)
            replanned = job.plan != plan
            what = "resumed with changed code" if with_changed_code and changed else "resumed"
            submission = _hand_over_again(run, job, record, now, what, replanned=replanned)
        own_code = kept is not None and not with_changed_code
        return Resumption(submission, replanned, differences(before, spec), changed, own_code)


def _keep_hash_seed(spec: JobSpec, record: Record) -> JobSpec:
    """The spec with the hash seed of the run so far, unless it sets one."""
    kept = record.hash_seed is None or VARIABLE in spec.environment.variables
    return spec if kept else with_hash_seed(spec, record.hash_seed or 0)


def _refuse_unfinished(run: RunDirectory, record: Record, now: float, *, force: bool) -> JobState:
    if record.kind in (PROFILING, REHEARSAL):
        raise UsageError(
            f"{run.name}: is not a training run, so it cannot be resumed",
            hint="start it again with `pipectl profile` or `pipectl lab rehearse`",
        )
    job = get_status(run, now).job
    if job.state is JobState.UNKNOWN and not force:
        raise UsageError(
            f"{run.name}: it is not known whether it has ended: {job.reason}",
            hint="\n".join(
                filter(None, (job.hint, "if you know that it has: pipectl resume --force"))
            ),
        )
    if job.state.alive:
        raise UsageError(
            f"{run.name}: is {job.state.value}",
            hint=f"wait for its end, or `pipectl cancel {name_in_shell(run)}` first",
        )
    return job.state


def _check_incomplete(run: RunDirectory, record: Record, before: JobSpec, spec: JobSpec) -> None:
    """Refuse a complete run unless it gets more steps or, if it has ended early, evaluations.

    One that has ended early in its last step needs both.
    """
    measured = read_measured(run, record, read_heartbeat(run.start))
    early_stop, old, new = measured.early_stop, _early_stopping(before), _early_stopping(spec)
    stops = bool(early_stop) and old is not None and new == old
    in_last_step = not early_stop or measured.step >= record.steps
    is_done = in_last_step and spec.training.steps <= record.steps
    if not (stops or is_done):
        return
    cures, command = [], f"pipectl resume {name_in_shell(run)}"
    if early_stop and old is not None:
        cures.append("allow more evaluations")
        patience = "=null" if new is None else f".patience={'N' if stops else new.patience}"
        command += f" --set evaluation.early_stopping{patience}"
    if in_last_step:
        cures.append("give it more steps")
        steps = 2 * record.steps if is_done else spec.training.steps
        command += f" --set training.steps={steps}"
    why = f": {early_stop}" if stops else f", step {record.steps} of {record.steps}"
    raise UsageError(
        f"{run.name}: is complete{why}",
        hint=f"to train on, {' and '.join(cures)}: {command}",
    )


def _early_stopping(spec: JobSpec) -> EarlyStopping | None:
    return None if spec.evaluation is None else spec.evaluation.early_stopping


def _check_steps(run: RunDirectory, spec: JobSpec) -> None:
    """Refuse fewer steps than are done."""
    checkpoint = last_checkpoint(run)
    done = 0 if checkpoint is None else step_of(checkpoint) or 0
    if spec.training.steps < done:
        command = f"pipectl resume {name_in_shell(run)}"
        raise UsageError(
            f"{run.name}: step {done} of it is done, which is more than training.steps: "
            f"{spec.training.steps}",
            hint=f"to end it there: {command} --set training.steps={done}",
        )


def _check_micro_batches(run: RunDirectory, job: Job) -> None:
    """Refuse a plan with which the ranks would refuse the checkpoint."""
    checkpoint = last_checkpoint(run)
    plans = (*job.plans.values(), *([] if job.plan is None else [job.plan]))
    if checkpoint is None or not plans:
        return
    from pipectl.runtime.manifest import Manifest

    with suppress(DataFileError):  # the ranks take an earlier one if it is damaged
        size, batch = Manifest.load(checkpoint).micro_batch_size, job.spec.training.batch_size
        if all(plan.micro_batch_size == size for plan in plans):
            return
        count = ceil(batch / size)
        hint = f"keep their size: --set pipeline.micro_batches={count}"
        if ceil(batch / count) != size:
            hint = (
                f"set training.batch_size to a multiple of {size}, and pipeline.micro_batches to "
            )
            hint += "so many of them"
        raise UsageError(
            f"{run.name}: its checkpoints were written with micro-batches of "
            f"{plural(size, 'sample')}, and the plan has {plans[0].micro_batch_size}",
            hint=hint,
        )


def _check_unchanged(run: RunDirectory, record: Record, before: JobSpec, spec: JobSpec) -> None:
    """Refuse another batch system, and a model that does not fit the checkpoints."""
    scheduler = choose_scheduler(spec)
    if spec.launch.scheduler != before.launch.scheduler and scheduler != record.scheduler:
        raise UsageError(
            f"{run.name}: was submitted to {record.scheduler} and resumes there, not on "
            f"{scheduler} (launch.scheduler)",
            hint="leave it out, or submit a new run: "
            f"pipectl submit {run.job} --scheduler {scheduler}",
        )
    old, new = before.model, spec.model
    key = "model.factory" if old.factory != new.factory else "model.kwargs"
    changes = (old.factory, old.kwargs) != (new.factory, new.kwargs)
    if changes and last_checkpoint(run) is not None:
        raise UsageError(
            f"{run.name}: {key} has changed, but its checkpoints belong to the earlier model",
            hint="leave it as it was, or submit a new run, which can start from the weights that "
            f"`pipectl export {name_in_shell(run)}` writes (model.weights)",
        )


def _plan_again(
    run: RunDirectory,
    before: JobSpec,
    job: Job,
    machines: Cluster,
    overrides: Sequence[str],
    plan: Plan,
) -> Job:
    """The job with the run's plan if that is up to date, else with a new plan.

    If the model has changed, the job measures and plans in its allocation. A new plan has as many
    micro-batches as before unless the job sets their number, or starts from the beginning with
    another model. If only the ranks change, the profile stays: it is accurate enough.
    """
    from pipectl.jobs.corrections import correct_profile
    from pipectl.jobs.node_range import find_plans, plan_file, plan_range
    from pipectl.jobs.planning import plan_job
    from pipectl.runtime.nodes import check_supported

    own_profile, spec = Profile.load(run.profile), job.spec
    profile, cluster = complete_cluster(spec, own_profile, machines)
    is_of_code = not any(map(is_changed, own_profile.code))
    has_range = spec.resources.node_range is not None
    if is_of_code and has_range:
        plans = find_plans(spec, profile, cluster, partial(plan_file, run))
        if plans and {each.micro_batches for each in plans.values()} == {plan.micro_batches}:
            # The next start has the plan for its nodes. That of the last one may need more.
            most = plans[spec.resources.max_nodes]
            plan = plan if plan.ranks <= most.ranks else most
            job = replace(job, cluster=cluster, profile=profile, plan=plan, plans=plans)
            return replace(job, plans_in_job=False)
    if is_of_code and plan.key == plan_file_key(spec, profile, cluster):
        return replace(job, cluster=cluster, profile=profile, plan=plan, plans_in_job=False)
    same_model = is_of_model(spec, before, own_profile)
    if spec.pipeline.micro_batches is None and (same_model or last_checkpoint(run) is not None):
        count = plan.micro_batches
        if spec.training.batch_size != plan.batch_size:  # their size is that of the checkpoints
            count = ceil(spec.training.batch_size / plan.micro_batch_size)
        load(run.job, [*overrides, f"pipeline.micro_batches={count}"])  # checks it
        spec = change(spec, pipeline={"micro_batches": count})
    job = replace(job, spec=spec)
    if not same_model:
        return job
    # the key of the changed job, so that later changes are noticed
    key = None if own_profile.key is None else profile_key(spec)
    profile = own_profile
    with suppress(PipectlError):  # the profile stays as it is if no step was recorded
        profile = correct_profile(run)
    profile, cluster = complete_cluster(spec, replace(profile, key=key), machines)
    plans = plan_range(spec, profile, cluster) if has_range else {}
    plan = plans[spec.resources.max_nodes] if plans else plan_job(spec, profile, cluster)
    for each in (plan, *plans.values()):
        check_supported(each, str(run.plan), spec)
    job = replace(job, cluster=cluster, profile=profile, plan=plan, plans=plans)
    return replace(job, plans_in_job=False)


def _hand_over_again(
    run: RunDirectory, job: Job, record: Record, now: float, what: str, *, replanned: bool
) -> Submission:
    """Submit the run for its next start; on failure, restore what that has changed.

    Args:
        what: is done, for the history.
    """
    system = get_scheduler(record.scheduler)
    record = record.with_state(now, "submitting", detail=what)
    new = Submission.new(
        run,
        job,
        now,
        name=record.name,
        history=record.history,
        sweep=record.sweep,
        cluster=system.cluster_of(record.job_id) if record.job_id else record.clusters,
    )
    of_plan = [*run.trace.glob("step-*.json")] if replanned else []
    of_plan += [run.plan, run.predicted] if job.plan is None else []
    of_plan = [path for path in of_plan if path.exists()]
    starts = read_starts(run)
    before = run.trace_before(starts)  # nothing was recorded under a plan without a start
    moved = {path: before / path.name for path in of_plan if starts}
    rewritten = (
        run.job, run.cluster, run.profile, run.plan, run.predicted, run.script,
        run.variables, run.record, run.code_file, run.environment,
        *run.range.glob("*.json"),
    )  # fmt: skip
    start = run.next_start()
    made = [path for path in (start.path, run.range) if not path.exists()]
    created = (new_copies(run), *made)
    with Rollback(created=created, rewritten=rewritten, moved=moved) as rollback:
        for path in of_plan:
            if path in moved:
                make_directory(before)
                path.replace(moved[path])
            else:
                path.unlink()
        (submission,) = hand_over([new], rollback)
    return submission
