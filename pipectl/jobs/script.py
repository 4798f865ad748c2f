"""The job script without a submission: to read, or to ask the batch system about."""

from __future__ import annotations

import shutil
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pipectl.batch import JobRequest, get
from pipectl.files import write_text
from pipectl.jobs.launching import Settled, settle
from pipectl.jobs.places import LOCAL, scheduler_name
from pipectl.jobs.request import job_request

if TYPE_CHECKING:
    from pipectl.spec import JobSpec


class Rendered(NamedTuple):
    """A job script, and what its ranks are started with."""

    text: str
    launch: Settled


def render(spec: JobSpec, scheduler: str | None, now: float) -> Rendered:
    """The job script as it would be submitted; needs neither the batch system nor MPI."""
    name = scheduler_name(spec, scheduler)
    request = _dry_request(spec, name, now)
    launch = settle(request)
    return Rendered(get(name).render(launch.of(request)), launch)


def estimate(spec: JobSpec, scheduler: str | None, now: float) -> str | None:
    """When the job would start, in the batch system's words; None where it has no queue.

    Raises:
        SchedulerError: the batch system would reject the job.
    """
    name = scheduler_name(spec, scheduler)
    batch = get(name)
    with tempfile.TemporaryDirectory(prefix="pipectl-") as directory:
        script = Path(directory) / "job.sh"
        write_text(script, render(spec, name, now).text)
        return batch.estimate(script)


def _dry_request(spec: JobSpec, name: str, now: float) -> JobRequest:
    """The request of a run that will not be made; where MPI is missing, PATH is to have it."""
    stem = f"{datetime.fromtimestamp(now):%Y%m%d-%H%M%S}-{spec.name}"
    directory = Path(spec.output.directory) / stem
    known = shutil.which("mpiexec") or (Path(sys.executable).parent / "mpiexec").exists()
    return job_request(
        spec,
        directory,
        f"{directory.name} dry-run",
        prepare=name != LOCAL,
        mpiexec=None if known else "mpiexec",
    )
