"""What must stay as it was when a run goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipectl.errors import UsageError
from pipectl.jobs.places import scheduler_name
from pipectl.jobs.profile import is_fresh
from pipectl.profile import Profile
from pipectl.runs import Record, RunDirectory, last_checkpoint
from pipectl.spec.references import parse

if TYPE_CHECKING:
    from pipectl.spec import JobSpec

_NOT_OF_MODEL = ("resources", "pipeline", "launch")


def check_unchanged(run: RunDirectory, record: Record, was: JobSpec, spec: JobSpec) -> None:
    """Refuse what a run cannot go on with.

    Args:
        was, spec: its job so far, and as it is to go on.

    Raises:
        UsageError: another batch system, whose jobs the record does not name; or another model than
            that of the checkpoints.
    """
    asked = scheduler_name(spec, None)
    if spec.launch.scheduler != was.launch.scheduler and asked != record.scheduler:
        raise UsageError(
            f"{run.name}: was submitted to {record.scheduler} and goes on there, not on {asked} "
            "(launch.scheduler)",
            cure=f"leave it out, or submit a new run: pipectl submit {run.job} --scheduler {asked}",
        )
    changed = _changed_model(was, spec)
    if changed and last_checkpoint(run) is not None:
        raise UsageError(
            f"{run.name}: {changed} has changed, but its checkpoints are of the model as it was",
            cure="leave that out, or submit the other model as a run of its own; it may begin with "
            f"what `pipectl export {run.name}` writes (model.weights)",
        )


def is_of_model(profile: Profile, was: JobSpec, spec: JobSpec) -> bool:
    """Whether a run's profile is of the model, data and optimizer that it goes on with.

    Other ranks or micro-batches need no other profile, for it tells what theirs take.
    """
    same = spec.model_copy(update={name: getattr(was, name) for name in _NOT_OF_MODEL})
    any_number = was.pipeline.model_copy(update={"micro_batches": None})
    free = same.model_copy(update={"pipeline": any_number})
    return is_fresh(same, profile) or is_fresh(free, profile)


def _changed_model(was: JobSpec, spec: JobSpec) -> str:
    """The key of the model that has changed; empty if none has."""
    before, after = (parse(job.model.factory, job.base) for job in (was, spec))
    if before != after:
        return "model.factory"
    return "" if was.model.kwargs == spec.model.kwargs else "model.kwargs"
