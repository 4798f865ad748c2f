"""Whether this machine has what jobs need: one finding after the other."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pipectl import __version__
from pipectl.batch import (
    AUTO,
    MPIEXECS,
    JobRequest,
    choose_mpi,
    knows_pmi,
    mpiexec_command,
    pmi_kinds,
    process,
)
from pipectl.errors import PipectlError, SchedulerError
from pipectl.jobs.places import detect_scheduler, memory_of_this_machine
from pipectl.spec.models import Environment, Launch, Pbs, Resources, Slurm
from pipectl.units import format_bytes, format_time
from pipectl.versions import tested_torch, untested_torch

if TYPE_CHECKING:
    from pipectl.spec import JobSpec

_PATIENCE_S = 60.0
_MIN_FREE_BYTES = 1 << 30
_MIN_SHARED_BYTES = 256 << 20
_MAX_SKEW_S = 2.0
_REACH = "pipectl.runtime.links.reach"
_SELF_TEST = "pipectl.runtime.transport.self_test"
_TORCH = (
    "import json, torch; found = torch.accelerator.current_accelerator(); "
    "print(json.dumps([torch.__version__, found and found.type, torch.accelerator.device_count()]))"
)


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Finding(NamedTuple):
    """One line.

    Args:
        cure: what to do; empty where all is well.
    """

    what: str
    level: Level
    text: str
    cure: str = ""


def ok(what: str, text: str) -> Finding:
    """All is well."""
    return Finding(what, Level.OK, text)


def warn(what: str, text: str, cure: str) -> Finding:
    """Jobs run, but not as well as they could."""
    return Finding(what, Level.WARN, text, cure)


def fail(what: str, text: str, cure: str) -> Finding:
    """Jobs cannot run."""
    return Finding(what, Level.FAIL, text, cure)


def examine(spec: JobSpec | None, directory: Path) -> Iterator[Finding]:
    """What there is, and what is wrong with it.

    Args:
        spec: whose launch is tried out; None for that of a job that says nothing of it.
        directory: of the run directories.
    """
    yield ok("python", f"{platform.python_version()} ({sys.executable}), pipectl {__version__}")
    yield from check_torch()
    yield from check_mpi(spec)
    yield from check_slurm(spec)
    yield from check_pbs()
    yield from check_file_system(directory)
    yield from check_hardware()


def check_torch() -> Iterator[Finding]:
    """Whether torch can be imported, and how messages leave accelerators."""
    cure = "pip install torch"
    try:
        installed = version("torch")
    except PackageNotFoundError:
        yield fail("torch", "not installed", cure)
        return
    try:
        name, kind, count = json.loads(_output([sys.executable, "-c", _TORCH], cure))
    except (PipectlError, ValueError) as error:
        text = error.message if isinstance(error, PipectlError) else "says nothing of its devices"
        yield fail("torch", f"{installed} cannot be imported: {text}", cure)
        return
    if untested := untested_torch():
        cure = f"if something fails that should not, install {tested_torch()}"
        yield warn("torch", untested, cure)
    else:
        yield ok("torch", name)
    if not kind:
        yield ok("accelerators", "none: ranks compute on cores")
        return
    try:  # a test message from an accelerator's memory, which may crash the process
        _output([sys.executable, "-m", "mpi4py", "-m", _SELF_TEST, kind], "")
        way = "MPI reads their memory"
    except PipectlError:
        way = "messages pass through host memory"
    yield ok("accelerators", f"{count} of kind {kind}; {way}")


def check_mpi(spec: JobSpec | None) -> Iterator[Finding]:
    """Two ranks are started and send each other messages, as the ranks of a job do."""
    launch = None if spec is None else spec.launch
    if launch is not None and launch.launcher == "srun":
        yield ok("MPI", "ranks start with srun, which is tried out within a job alone")
        return
    request = JobRequest(
        name="doctor",
        tag="doctor",
        run_directory=Path.cwd(),
        python=sys.executable,
        command=(sys.executable, "-m", "mpi4py", "-m", _REACH),
        resources=Resources(tasks_per_node=2),
        launch=Launch() if launch is None else launch.model_copy(update={"bind": "none"}),
        environment=Environment(),
        slurm=Slurm(),
        pbs=Pbs(),
    )
    try:
        request = choose_mpi(request).apply(request)
        command = mpiexec_command(request, here=True)
        answer = json.loads(_output(command, "").splitlines()[-1])
    except PipectlError as error:
        cure = error.cure or "pip install mpich, or load your cluster's MPI first"
        yield fail("MPI", error.message, cure)
        return
    except (ValueError, IndexError):
        yield fail("MPI", "ranks start, but print nothing", "see what mpiexec does")
        return
    if answer["ranks"] != 2:
        yield fail(
            "MPI",
            f"{command[0]} starts two ranks that know nothing of each other: it is not of the MPI "
            f"that mpi4py has loaded ({answer['library']})",
            "load one MPI alone, or name its library in the variable MPI4PY_LIBMPI",
        )
        return
    yield ok("MPI", f"{answer['library']}, started by {command[0]}")
    if request.launch.mpi != AUTO:
        yield ok("launcher", f"mpiexec takes the options of {request.launch.mpi} (launch.mpi)")
    else:
        text = "mpiexec is of no known kind, so that it cannot be told to bind ranks"
        cure = f"if it is like one of {', '.join(MPIEXECS)}, set launch.mpi to that"
        yield warn("launcher", text, cure)
    threads = f"MPI_THREAD_{answer['threads'].upper()}"
    if answer["threads"] == "multiple":
        yield ok("threads", threads)
    else:
        cure = "messages are moved between operators instead; nothing needs to be done"
        yield warn("threads", threads, cure)
    rate = format_bytes(int(answer["bandwidth_bytes_per_s"]))
    yield ok("messages", f"{format_time(answer['latency_s'])}, {rate}/s on this machine")


def check_slurm(spec: JobSpec | None) -> Iterator[Finding]:
    """Whether Slurm answers, and what ``srun --mpi`` takes against what the job gives it."""
    if not shutil.which("sbatch"):
        yield ok("Slurm", "not installed")
        return
    cure = "ask the site, or set SLURM_CONF; jobs run here with --scheduler local"
    try:
        release = _output(["sinfo", "--version"], cure)
        partitions = _output(["sinfo", "-h", "-o", "%P"], cure).split()
    except PipectlError as error:
        yield fail("Slurm", error.message, cure)
        return
    yield ok("Slurm", f"{release}; partitions {', '.join(partitions) or 'none'}")
    with suppress(PipectlError):
        kinds = pmi_kinds(_output(["srun", "--mpi=list"], ""))
        wanted = AUTO if spec is None or spec.launch.launcher != "srun" else spec.launch.mpi
        text = f"srun --mpi: {', '.join(kind for kind in kinds if kind != 'none') or 'none'}"
        if wanted == AUTO or knows_pmi(kinds, wanted):
            yield ok("PMI", text)
        else:
            cure = "set launch.mpi to one of them, as your MPI needs it"
            yield fail("PMI", f"{text}; the job wants {wanted}", cure)


def check_pbs() -> Iterator[Finding]:
    """Whether PBS answers, if there is no Slurm."""
    if detect_scheduler() != "pbs":
        return
    cure = "ask the site, or set PBS_SERVER; jobs run here with --scheduler local"
    try:
        release = _output(["qstat", "--version"], cure)
        server = _output(["qstat", "-B", "-f"], cure)
    except PipectlError as error:
        yield fail("PBS", error.message, cure)
        return
    yield ok("PBS", release)
    if not re.search(r"^\s*flatuid\s*=\s*True\s*$", server, re.MULTILINE | re.IGNORECASE):
        text = "flatuid is not set: jobs may not be able to submit themselves again"
        advice = "ask the site for `set server flatuid = True`; else go on with pipectl resume"
        yield warn("PBS requeue", text, advice)


def check_file_system(directory: Path) -> Iterator[Finding]:
    """The file system of the runs: whole files by renaming, locks, space, and its clock."""
    place = next(path for path in (directory, *directory.absolute().parents) if path.is_dir())
    try:
        with tempfile.TemporaryDirectory(prefix=".pipectl-", dir=place) as name:
            one, other = Path(name, "one"), Path(name, "other")
            one.write_text("new")
            other.write_text("old")
            skew_s = abs(one.stat().st_mtime - time.time())
            one.replace(other)
            free, has_locks = shutil.disk_usage(name).free, _can_lock(other)
    except OSError as error:
        text = f"{place}: {error.strerror or error}"
        yield fail("files", text, "set output.directory to where you may write")
        return
    text = f"{place}: {format_bytes(free)} free"
    if free >= _MIN_FREE_BYTES:
        yield ok("files", text)
    else:
        yield warn("files", text, "checkpoints may find no room; free some space")
    if not has_locks:
        cure = "do not run two commands that change a run at the same time"
        yield warn("locks", "the file system knows no locks", cure)
    text = f"{skew_s:.1f} s from that of the file system"
    if skew_s < _MAX_SKEW_S:
        yield ok("clock", text)
    else:
        cure = "have the clocks of all nodes set by NTP; `status` may take silence for age"
        yield warn("clock", text, cure)


def _can_lock(path: Path) -> bool:
    """Whether a lock keeps others out."""
    with path.open("r+b") as first, path.open("r+b") as second:
        try:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        return False


def check_hardware() -> Iterator[Finding]:
    """Cores, memory and a compiler."""
    cores, memory = len(os.sched_getaffinity(0)), memory_of_this_machine()
    yield ok("machine", f"{cores} cores, {format_bytes(memory)} of memory")
    with suppress(OSError):
        shared = shutil.disk_usage("/dev/shm").total
        if shared < _MIN_SHARED_BYTES:
            text = f"/dev/shm holds {format_bytes(shared)} only"
            cure = "containers: start them with --shm-size=1g, or ranks of one node may crash"
            yield warn("shared memory", text, cure)
    if not any(map(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "clang++")))):
        yield ok("compiler", "no C++ compiler, which training.compile would need")


def _output(argv: Sequence[str], cure: str) -> str:
    """What a command prints.

    Raises:
        SchedulerError: it does not exist, fails, or takes too long.
    """
    done = process.run(argv, cure=cure, timeout_s=_PATIENCE_S)
    if done.returncode:
        last = done.message.splitlines()[-1]
        raise SchedulerError(f"{Path(argv[0]).name}: {last}", cure=cure or None)
    return done.stdout or done.stderr
