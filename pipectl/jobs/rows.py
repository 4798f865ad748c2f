"""Measuring what rows of programs take: two ranks of this node train a small model for a moment."""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipectl.batch import JobRequest, choose_mpi, launch_command, process
from pipectl.cluster import Cluster
from pipectl.errors import PipectlError, SchedulerError
from pipectl.fields import read_fields
from pipectl.files import read_json
from pipectl.profile import Profile
from pipectl.row_times import RowTimes
from pipectl.spec.models import Environment, Launch, Pbs, Resources, Slurm

if TYPE_CHECKING:
    from pipectl.spec import JobSpec

RANKS = 2
_PROBE = "pipectl.runtime.row_probe"
_PATIENCE_S = 120.0
_CURE = "measure again with: pipectl profile JOB.yaml --again"
UNKNOWN = (
    "what messages take of the ranks' own time, and the start and end of a step, is not measured, "
    "and taken as nothing"
)


def request_of_two(launch: Launch, *command: str) -> JobRequest:
    """Two ranks of this node that run a Python module."""
    request = JobRequest(
        name="two ranks",
        tag="two ranks",
        run_directory=Path.cwd(),
        python=sys.executable,
        command=(sys.executable, "-m", "mpi4py", "-m", *command),
        resources=Resources(tasks_per_node=RANKS),
        launch=launch,
        environment=Environment(),
        slurm=Slurm(),
        pbs=Pbs(),
    )
    return choose_mpi(request).apply(request)


def join_rows(profile: Profile, cluster: Cluster) -> tuple[Profile, Cluster]:
    """A profile and a cluster of which the second has the times of rows, its own or the first's,
    and the first assumes nothing of them if they are known."""
    joined = cluster.with_rows(profile.rows)
    if any(node.device.rows is None for node in joined.nodes):
        return profile, joined
    others = tuple(each for each in profile.assumptions if not each.startswith(UNKNOWN))
    return replace(profile, assumptions=others), joined


def measure_rows(spec: JobSpec, scheduler: str) -> tuple[RowTimes | None, str]:
    """What rows take on this node, and what has to be assumed without them.

    They are measured for jobs whose ranks share nodes, as two of them that have cores of their own.

    Args:
        scheduler: whose launcher starts ranks here.
    """
    resources = spec.resources
    cores = len(os.sched_getaffinity(0))
    measurable = (
        resources.tasks_per_node >= RANKS
        and cores >= RANKS * resources.cpus_per_task
        and not resources.gpus_per_node
        and spec.environment.container is None
    )
    if not measurable:
        return None, UNKNOWN
    launch = spec.launch.model_copy(update={"bind": "none"})
    if scheduler == "slurm" and launch.launcher == "srun":
        one_node = (*launch.args, "--nodes=1", "--overlap")
        launch = launch.model_copy(update={"args": one_node})
    try:
        with tempfile.TemporaryDirectory(prefix="pipectl-rows-") as name:
            output = Path(name, "rows.json")
            arguments = ("--run", name, "--output", str(output), "--threads", str(spec.threads))
            command = launch_command(request_of_two(launch, _PROBE, *arguments), scheduler)
            done = process.run(command, cure="", timeout_s=_PATIENCE_S)
            if done.returncode:
                raise SchedulerError(done.message.splitlines()[-1])
            document = read_json(output, cure=_CURE)
            return read_fields(RowTimes, document, file=str(output), cure=_CURE), ""
    except (PipectlError, OSError) as error:
        text = error.message if isinstance(error, PipectlError) else str(error)
        return None, f"{UNKNOWN} (two ranks did not start: {text})"
