"""Submitting a job that measures a model on a node like those it will train on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipectl.batch import JobRequest
from pipectl.jobs.measuring_run import prepare_output, submit_measuring
from pipectl.jobs.profile import Wish
from pipectl.jobs.profile_in_job import arguments_for
from pipectl.jobs.request import MEASURE, job_request, make_tag
from pipectl.jobs.submit import Submission, new_run
from pipectl.runs import RunDirectory

if TYPE_CHECKING:
    from pipectl.spec import JobSpec


def submit_profile(
    spec: JobSpec, scheduler: str, output: Path, wish: Wish, now: float
) -> Submission:
    """Submit the measuring of a job's model, as a run of its own.

    It gets one node with all the tasks that the job has on a node.

    Args:
        scheduler: its name.
        output: where the profile is put when it is finished.
        now: seconds since the epoch.

    Raises:
        SchedulerError: see :func:`pipectl.jobs.submit.submit`.
    """
    prepare_output(output)
    with new_run(spec, f"{spec.name}-profile", now) as (run, rollback):
        request = _request(spec, run, output, wish)
        return submit_measuring(spec, run, rollback, request, scheduler, now)


def _request(spec: JobSpec, run: RunDirectory, output: Path, wish: Wish) -> JobRequest:
    tag = make_tag(run.path)
    training = job_request(spec, run.path, tag)
    command = (training.python, "-m", MEASURE, *arguments_for(run, output, wish))
    name = f"{spec.name}-profile"
    return replace(
        training,
        name=name,
        ranks=1,
        nodes=1,
        more=(),
        command=command,
        alone=True,
        stop=None,
        container=training.container and training.container.seeing(output.absolute().parent),
    )
