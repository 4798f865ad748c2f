"""The times of rows of programs on this node, measured by two ranks.

A row is an operation of a rank's program: what a rank does besides the operators of its stages.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from pipectl.batch import LOCAL, JobRequest, process
from pipectl.batch.launchers import (
    choose_mpi,
    is_told_of_jobs,
    launch_command,
    local_environment,
)
from pipectl.errors import PipectlError, SchedulerError
from pipectl.fields import read_fields
from pipectl.files import read_json
from pipectl.jobs.output import UNKNOWN_ROWS
from pipectl.link import RowTimes
from pipectl.spec.launch import Environment, Launch, Pbs, Resources, Slurm
from pipectl.units import Report

if TYPE_CHECKING:
    from pipectl.spec import JobSpec

MEASURE_AGAIN = "measure again with: pipectl profile JOB.yaml"
_ROW_RANKS = 2
_ROW_PATIENCE_S = 120.0
_ROWS_BUDGET_S = {"fast": 3.0, "normal": 10.0, "thorough": 30.0}
"""Time for the steps that measure rows, by effort."""


def start_row_probe(
    spec: JobSpec, scheduler: str, effort: str = "normal", progress: Report | None = None
) -> tuple[RowTimes | None, str]:
    """Start two ranks on this node that measure the times of rows.

    They have cores of their own, and train a small model for some seconds. They are not started if
    the ranks of the job do not share nodes.

    Args:
        scheduler: scheduler whose launcher starts ranks here.
        effort: ``fast``, ``normal`` or ``thorough``.

    Returns:
        The times, or None and what is assumed instead.
    """
    resources, launch = spec.resources, spec.launch.model_copy(update={"bind": "none"})
    if (
        resources.tasks_per_node < _ROW_RANKS
        or len(os.sched_getaffinity(0)) < _ROW_RANKS * resources.cpus_per_task
        or resources.gpus_per_node
        or spec.environment.container is not None
        or launch.launcher in ("ibrun", "flux")  # whose ranks cannot be put on this node
    ):
        return None, UNKNOWN_ROWS
    if progress is not None:
        progress(0, 0, "measuring messages between ranks")
    by_srun = scheduler == "slurm" and launch.launcher == "srun"
    if by_srun:
        one_node = (*launch.args, "--nodes=1", "--overlap")
        launch = launch.model_copy(update={"args": one_node})
    try:
        with tempfile.TemporaryDirectory(prefix="pipectl-rows-") as name:
            output = Path(name, "rows.json")
            arguments = ["--run", name, "--output", str(output), "--threads", str(spec.threads)]
            arguments += ["--budget", str(_ROWS_BUDGET_S[effort])]
            request = request_of_two(
                launch,
                "pipectl.runtime.row_probe",
                *arguments,
                cpus_per_task=resources.cpus_per_task,
            )
            in_job = by_srun or is_told_of_jobs(request.launch)
            result = process.run(
                launch_command(request, scheduler if in_job else LOCAL),
                hint="",
                env=None if in_job else local_environment(),
                timeout_s=_ROW_PATIENCE_S,
            )
            if result.returncode:
                raise SchedulerError(result.error_line)
            document = read_json(output, hint=MEASURE_AGAIN)
            return read_fields(RowTimes, document, file=str(output), hint=MEASURE_AGAIN), ""
    except (PipectlError, OSError) as error:
        text = error.message if isinstance(error, PipectlError) else str(error)
        return None, f"{UNKNOWN_ROWS} (two ranks did not start: {text})"


def request_of_two(launch: Launch, *command: str, cpus_per_task: int = 1) -> JobRequest:
    """A request for two ranks on this node that run a Python module."""
    environment = Environment()
    mpi = choose_mpi(launch, environment, single_process=False).kind
    return JobRequest(
        name="two ranks",
        tag="two ranks",
        run_directory=Path.cwd(),
        python=sys.executable,
        command=(sys.executable, "-m", "mpi4py", "-m", *command),
        resources=Resources(tasks_per_node=_ROW_RANKS, cpus_per_task=cpus_per_task),
        launch=launch.model_copy(update={"mpi": mpi}),
        environment=environment,
        slurm=Slurm(),
        pbs=Pbs(),
    )
