"""What may run the code of jobs from Python: one call at a time, and none in a job itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

from pipectl.api.advice import advising
from pipectl.errors import UsageError
from pipectl.jobs.own_process import is_in_job
from pipectl.units import Report

Progress = bool | Report
"""Whether to print it; or what is called with (done, total, what), total 0 if it is not known."""
_LOCK = RLock()
"""Which code a process sees is the same for all of its threads; and two measurements at once would
falsify each other."""
_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "PALS_SIZE", "SLURM_STEP_NUM_TASKS")
"""Variables that launchers set to the number of processes that they start."""


@contextmanager
def at_work() -> Iterator[None]:
    """A context for planning and submitting.

    Raises:
        UsageError: this process belongs to a job, or is one of several of an MPI program.
    """
    if is_in_job():
        raise UsageError(
            "this process belongs to a job, which has imported this file",
            hint='put what plans and submits under: if __name__ == "__main__":',
        )
    for name in _SIZES:
        size = os.environ.get(name, "")
        if size.isdecimal() and int(size) > 1:
            raise UsageError(
                f"this is one of {size} processes of an MPI program ({name}), each of which would "
                "plan and submit",
                hint="call it in a process that mpiexec or srun did not start, or in a single one",
            )
    with _LOCK, advising():
        yield


@contextmanager
def shown(progress: Progress) -> Iterator[Report | None]:
    """A context that shows the progress of measuring, if asked to."""
    if progress is True:
        from pipectl.cli.progress import progress_bar

        with progress_bar("profiling") as report:
            yield report
    else:
        yield progress or None
