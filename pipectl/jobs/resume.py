"""Going on with a run that has ended: from its last checkpoint, under the same plan or another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipectl.batch import JobRequest, JobState, get
from pipectl.batch.process import NoAnswerError
from pipectl.errors import PipectlError, UsageError
from pipectl.files import make_directory, write_text
from pipectl.jobs.launching import Settled, settle
from pipectl.jobs.machines import find_machines
from pipectl.jobs.plan import find_plan, fresh_plan
from pipectl.jobs.recovery import completed, continued
from pipectl.jobs.request import job_request, make_tag
from pipectl.jobs.status import status
from pipectl.jobs.submit import Inputs, writer
from pipectl.jobs.template import write_script
from pipectl.jobs.trust import refuse_code_of_others
from pipectl.jobs.unchanged import check_unchanged, is_of_model, taken_for
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
    step_of,
)
from pipectl.spec import load

if TYPE_CHECKING:
    from pipectl.spec import JobSpec


@dataclass(frozen=True)
class Resumption:
    """A run that was handed over again.

    Args:
        plan: None where the job has to make it.
        step: of the last checkpoint; 0 where there is none, so that it begins anew.
        planned: whether it has another plan than before.
        warning: why a measured cluster was not used; empty where all is well.
        launch: what ranks are started with.
    """

    run: RunDirectory
    record: Record
    plan: Plan | None
    step: int
    planned: bool
    warning: str
    launch: Settled


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
        now: seconds since the epoch.
        force: go on even if it cannot be told whether it is over.
        trust_owner: run code that another user could have written.

    Raises:
        UsageError: it still waits or runs, is no training, is to change what it cannot, or its code
            is not only ours.
        InfeasibleError: no plan fits.
        SchedulerError: the batch system rejects it; the run is as it was.
    """
    with locked(run):
        record = completed(run, now)
        state = _check_over(run, record, now, force=force)
        if (other := continued(run, record, now)) is not record:
            raise UsageError(
                f"{run.name}: its job script has just submitted job {other.job_id}",
                cure=f"follow it with `pipectl status {as_typed(run)}`",
            )
        if not trust_owner:
            refuse_code_of_others(load(run.job, overrides, check_files=False), run.job)
        return _resume(run, record, state, overrides, now)


def _resume(
    run: RunDirectory, record: Record, state: JobState, overrides: Sequence[str], now: float
) -> Resumption:
    was, spec = load(run.job), load(run.job, overrides)
    _check_incomplete(run, record, spec, state)
    check_unchanged(run, record, was, spec)
    machines = find_machines(spec, record.scheduler, run.path.parent)
    before = Plan.load(run.plan) if run.plan.exists() else None
    inputs = Inputs(
        spec, record.scheduler, machines.cluster, None, before, warning=machines.warning
    )
    if before is not None:
        inputs = _planned(run, was, inputs, overrides, before.micro_batches)
    plan = inputs.plan
    request = job_request(
        inputs.spec, run.path, make_tag(run.path), prepare=plan is None, plan=plan
    )
    launch = settle(request)
    request = _counted_on(launch.of(request), read_starts(run))
    moves = _aside(run, replanned=plan != before)
    record = _hand_over(run, inputs, request, record, now, moves)
    last = last_checkpoint(run)
    step = 0 if last is None else step_of(last) or 0
    return Resumption(run, record, plan, step, plan != before, inputs.warning, launch)


def _planned(
    run: RunDirectory, was: JobSpec, inputs: Inputs, overrides: Sequence[str], micro_batches: int
) -> Inputs:
    """With the plan as it was, if the job is, else with another, which the job itself makes where
    the model is another.

    It has as many micro-batches as before, unless others are asked for. What begins anew with
    another model has those that suit it.
    """
    from pipectl.runtime.supported import check_supported

    spec, cluster, profile = inputs.spec, inputs.cluster, Profile.load(run.profile)
    if fresh_plan(spec, profile, cluster, run.plan) is not None:
        return inputs
    same = is_of_model(profile, was, spec)
    if spec.pipeline.micro_batches is None and (same or last_checkpoint(run) is not None):
        spec = load(run.job, [*overrides, f"pipeline.micro_batches={micro_batches}"])
    if not same:
        return replace(inputs, spec=spec, plan=None)
    profile = taken_for(profile, spec)
    plan = find_plan(spec, profile, cluster)
    check_supported(plan, str(run.plan))
    return replace(inputs, spec=spec, profile=profile, plan=plan)


def _check_over(run: RunDirectory, record: Record, now: float, *, force: bool) -> JobState:
    if record.kind in (PROFILING, REHEARSAL):
        raise UsageError(
            f"{run.name}: trains nothing, so there is nothing to go on with",
            cure="start it again with `pipectl profile` or `pipectl submit --rehearse`",
        )
    found = status(run, now).job
    if found.state is JobState.UNKNOWN and not force:
        raise UsageError(
            f"{run.name}: it cannot be told whether it is over: {found.reason}",
            cure="if you know that it is: pipectl resume --force",
        )
    if found.state.alive:
        raise UsageError(
            f"{run.name}: is {found.state.value}",
            cure=f"wait for its end, or `pipectl cancel {as_typed(run)}` first",
        )
    return found.state


def _check_incomplete(run: RunDirectory, record: Record, spec: JobSpec, state: JobState) -> None:
    if state is JobState.COMPLETED and spec.training.steps <= record.steps:
        raise UsageError(
            f"{run.name}: is complete, step {record.steps} of {record.steps}",
            cure=f"to train on, give it more steps: pipectl resume {as_typed(run)} "
            f"--set training.steps={2 * record.steps}",
        )


def _hand_over(
    run: RunDirectory,
    inputs: Inputs,
    request: JobRequest,
    record: Record,
    now: float,
    moves: Mapping[Path, Path],
) -> Record:
    scheduler = get(record.scheduler)
    script = scheduler.render(request)
    record = _begun_anew(record, request, inputs.spec.training.steps, now)
    before = _contents(run, inputs)
    try:
        _move(moves)
        writer(run, inputs, request)()
        if inputs.plan is None:
            run.plan.unlink(missing_ok=True)
            run.predicted.unlink(missing_ok=True)
        write_script(run, script, request)
        record.save(run.record)
        run.exit_code.unlink(missing_ok=True)
        run.resubmitted.unlink(missing_ok=True)
        run.stopped.unlink(missing_ok=True)
        run.requeue_error.unlink(missing_ok=True)
    except (PipectlError, OSError, KeyboardInterrupt):
        _put_back(run, before, moves)
        raise
    try:
        job_id = scheduler.submit(run.script, request)
    except NoAnswerError:  # the job may be on its way, as behind a Ctrl-C
        raise
    except PipectlError:
        _put_back(run, before, moves)
        raise
    record = record.after(now, "submitted", job_id=job_id)
    with suppress(UsageError):  # it is found by its tag
        record.save(run.record)
    return record


def _counted_on(request: JobRequest, starts: int) -> JobRequest:
    """As often back into the queue as a new run, whose starts are counted from 1."""
    stop = request.stop
    if stop is None or not stop.requeues:
        return request
    return replace(request, stop=replace(stop, requeues=starts + stop.requeues))


def _begun_anew(record: Record, request: JobRequest, steps: int, now: float) -> Record:
    """The record of a run, as of one that has not been handed over yet."""
    record = replace(
        record,
        tag=request.tag,
        submitted_at=now,
        ranks=request.ranks,
        nodes=request.node_count,
        steps=steps,
        job_id=None,
        task=None,
    )
    return record.after(now, "submitting", detail="resumed")


def _contents(run: RunDirectory, inputs: Inputs) -> dict[Path, str | None]:
    """What is changed for another start; None where there is no file."""
    profile = () if inputs.profile is None else (run.profile,)
    paths = (
        run.job, run.template, run.cluster, run.plan, run.predicted, run.script, run.variables,
        run.record, run.exit_code, run.resubmitted, run.requeue_error, run.stopped, *profile,
    )  # fmt: skip
    return {path: _content(path) for path in paths}


def _aside(run: RunDirectory, *, replanned: bool) -> dict[Path, Path]:
    """Where goes what the earlier start reported, which says nothing of the run while it waits; and
    recorded steps, if the run gets another plan."""
    starts = read_starts(run)
    told = [*run.errors.glob("*.json"), *([run.heartbeat] if run.heartbeat.exists() else [])]
    steps = run.trace.glob("step-*.json") if replanned else ()
    return {
        **{path: run.errors_before(starts) / path.name for path in told},
        **{path: run.trace_before(starts) / path.name for path in steps},
    }


def _move(moves: Mapping[Path, Path]) -> None:
    for path, place in moves.items():
        make_directory(place.parent)
        path.replace(place)


def _put_back(
    run: RunDirectory, before: Mapping[Path, str | None], moves: Mapping[Path, Path]
) -> None:
    """Make the files what they were; each of them, even if others cannot be written."""
    for path, place in moves.items():
        with suppress(OSError):
            place.replace(path)
            place.parent.rmdir()  # once it is empty
    for path, text in before.items():
        with suppress(UsageError, OSError):
            if text is None:
                path.unlink(missing_ok=True)
            elif _content(path) != text:
                write_text(path, text, mode=0o700 if path == run.script else 0o600)


def _content(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
