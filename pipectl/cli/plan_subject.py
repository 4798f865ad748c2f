"""Finds what `pipectl plan` is to plan, and warns of what does not fit together."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipectl.cli.console import note, warn
from pipectl.cli.plan_ask import Ask
from pipectl.jobs.wishes import Objective

if TYPE_CHECKING:
    from pipectl.jobs.subject import Subject
    from pipectl.profile import Profile
    from pipectl.spec import JobSpec


def find_subject(ask: Ask) -> tuple[Subject, Path | None]:
    """What to plan, and where its plan belongs; None where it is no job's own plan."""
    from pipectl.jobs.subject import for_steps

    subject, path = _of_profile(ask) if ask.job is None else _of_job(ask, ask.job)
    if ask.objective is not Objective.MAX_STAGE_LOAD:
        subject = for_steps(subject)
    return subject, path


def _of_profile(ask: Ask) -> tuple[Subject, Path | None]:
    from pipectl.jobs.subject import subject_of_profile
    from pipectl.profile import Profile

    assert ask.profile_file is not None, "checked"
    wishes = ask.wishes
    if ask.nodes is not None and wishes.cluster is None:  # every device is a node
        wishes = replace(wishes, devices=max(ask.nodes))
    return subject_of_profile(Profile.load(ask.profile_file), wishes), ask.output


def _of_job(ask: Ask, job: Path) -> tuple[Subject, Path | None]:
    from pipectl.jobs.places import plan_path, scheduler_name
    from pipectl.jobs.plan import coupling_warning, kept_micro_batches
    from pipectl.jobs.subject import subject_of_job
    from pipectl.spec import load

    overrides = [*ask.overrides, *ask.wishes.in_job()]
    spec = load(job, overrides)
    profile = _profile(spec, job, ask.profile_file, overrides)
    kept = None if ask.new_micro_batches or ask.nodes is not None else kept_micro_batches(spec)
    scheduler = scheduler_name(spec, ask.scheduler)
    subject = subject_of_job(spec, profile, scheduler, ask.wishes, kept)
    warn(subject.warning)
    if ask.objective is Objective.STEP_TIME:
        warn(coupling_warning(spec, profile))
    own = None if ask.wishes.is_what_if else plan_path(spec)
    return subject, ask.output or own


def _profile(spec: JobSpec, job: Path, path: Path | None, overrides: Sequence[str]) -> Profile:
    """The profile to plan with; a stale one is used, and said to be stale."""
    from pipectl.jobs.places import profile_path
    from pipectl.jobs.profiles import is_fresh
    from pipectl.profile import Profile

    path = path or profile_path(spec)
    profile = Profile.load(path)
    if not is_fresh(spec, profile):
        again = shlex.join(["pipectl", "profile", str(job), *_options(overrides)])
        note(
            f"warning: {path} was measured for other settings (model, data, optimizer, batch or "
            f"ranks a node); measure again with: {again}"
        )
    return profile


def _options(overrides: Sequence[str]) -> Iterator[str]:
    for override in overrides:
        yield from ("--set", override)
