"""Whether ranks start and reach each other, as those of a job would."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipectl.batch import JobRequest, mpiexec_command
from pipectl.batch.dialects import AUTO, NAMES
from pipectl.errors import PipectlError
from pipectl.jobs.doctor.finding import PATIENCE_S, Finding, Findings, Level, said
from pipectl.jobs.launching import settle
from pipectl.units import format_bytes, format_time

if TYPE_CHECKING:
    from pipectl.spec import JobSpec

_REACH = "pipectl.runtime.links.reach"


def mpi(spec: JobSpec | None) -> Findings:
    """Two ranks are started and send each other messages, as the ranks of a job do."""
    if spec is not None and spec.launch.launcher == "srun":
        text = "ranks start with srun, which is tried out within a job alone"
        yield Finding("MPI", Level.OK, text)
        return
    try:
        request = _two_ranks(spec)
        request = settle(request).of(request)
        command = mpiexec_command(request, here=True)
        found = json.loads(said(command, "").splitlines()[-1])
    except PipectlError as error:
        cure = error.cure or "pip install mpich, or load your cluster's MPI first"
        yield Finding("MPI", Level.FAIL, error.message, cure)
        return
    except (ValueError, IndexError):
        yield Finding("MPI", Level.FAIL, "ranks start, but print nothing", "see what mpiexec does")
        return
    yield from _reached(found, command[0], request.mpi)


def _reached(found: dict[str, Any], mpiexec: str, dialect: str) -> Findings:
    if found["ranks"] != 2:
        yield Finding(
            "MPI",
            Level.FAIL,
            f"{mpiexec} starts two ranks that know nothing of each other: it is not of the MPI "
            f"that mpi4py has loaded ({found['library']})",
            "load one MPI alone, or name its library in the variable MPI4PY_LIBMPI",
        )
        return
    yield Finding("MPI", Level.OK, f"{found['library']}, started by {mpiexec}")
    yield _dialect(dialect)
    many = found["threads"] == "multiple"
    yield Finding(
        "threads",
        Level.OK if many else Level.WARN,
        f"MPI_THREAD_{found['threads'].upper()}",
        "" if many else "messages are moved between operators instead; nothing needs to be done",
    )
    latency, bandwidth = found["latency_s"], found["bandwidth_bytes_per_s"]
    text = f"{format_time(latency)}, {format_bytes(int(bandwidth))}/s on this machine"
    yield Finding("messages", Level.OK, text)


def _dialect(name: str) -> Finding:
    """Whose words mpiexec understands."""
    if name != AUTO:
        return Finding("launcher", Level.OK, f"mpiexec takes the options of {name} (launch.mpi)")
    text = "mpiexec is of no known kind, so that it cannot be told to bind ranks"
    cure = f"if it is like one of {', '.join(NAMES)}, set launch.mpi to that"
    return Finding("launcher", Level.WARN, text, cure)


def _two_ranks(spec: JobSpec | None) -> JobRequest:
    """The launch of a job, with two ranks that send each other messages."""
    launch = None if spec is None else spec.launch
    return JobRequest(
        name="doctor",
        tag="doctor",
        run_directory=Path.cwd(),
        python=sys.executable,
        ranks=2,
        nodes=1,
        tasks_per_node=2,
        walltime_s=round(PATIENCE_S),
        command=(sys.executable, "-m", "mpi4py", "-m", _REACH),
        mpi="auto" if launch is None else launch.mpi,
        launch_args=() if launch is None else tuple(launch.args),
    )
