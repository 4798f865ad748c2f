"""What must stay as it was when a run goes on."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pipectl.errors import UsageError
from pipectl.jobs.places import scheduler_name
from pipectl.jobs.profile import is_fresh
from pipectl.profile import Profile
from pipectl.runs import Record, RunDirectory, as_typed, last_checkpoint
from pipectl.spec import profile_key
from pipectl.spec.references import parse

if TYPE_CHECKING:
    from pipectl.spec import JobSpec


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
            f"what `pipectl export {as_typed(run)}` writes (model.weights)",
        )


def is_of_model(profile: Profile, was: JobSpec, spec: JobSpec) -> bool:
    """Whether a run's profile is of the model and loss that it goes on with.

    For the rest it need not be measured again: the profile is near enough to plan other ranks by.
    """
    return is_fresh(was.model_copy(update={"model": spec.model, "loss": spec.loss}), profile)


def taken_for(profile: Profile, spec: JobSpec) -> Profile:
    """The profile with the key of a job that it is not quite of, so that changes from there on are
    seen."""
    return profile if profile.key is None else replace(profile, key=profile_key(spec))


def _changed_model(was: JobSpec, spec: JobSpec) -> str:
    """The key of the model that has changed; empty if none has."""
    before, after = (parse(job.model.factory, job.base) for job in (was, spec))
    if before != after:
        return "model.factory"
    return "" if was.model.kwargs == spec.model.kwargs else "model.kwargs"
