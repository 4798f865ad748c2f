"""Whether this machine has what jobs need, one finding after the other."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pipectl import __version__
from pipectl.batch import JobRequest, mpiexec_command, process
from pipectl.batch.dialects import AUTO, NAMES
from pipectl.batch.pmi import offered
from pipectl.errors import PipectlError, SchedulerError
from pipectl.jobs.launching import settle
from pipectl.units import format_bytes, format_time

if TYPE_CHECKING:
    from pipectl.spec import JobSpec

PING_PONG = "pipectl.runtime.links.ping_pong"
SELF_TEST = "pipectl.runtime.transport.self_test"
_PATIENCE_S = 60.0
_FREE, _SHARED = 1 << 30, 256 << 20
_SKEW_S = 2.0
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


Findings = Iterator[Finding]


def examine(spec: JobSpec | None, directory: Path) -> Findings:
    """What there is, and what is wrong with it.

    Args:
        spec: whose launch is tried out; None for that of a job that says nothing of it.
        directory: of the run directories.
    """
    yield from _python()
    yield from _torch()
    yield from _mpi(spec)
    yield from _slurm(spec)
    yield from _pbs()
    yield from _directory(directory)
    yield from _machine()


def _python() -> Findings:
    text = f"{platform.python_version()} ({sys.executable}), pipectl {__version__}"
    yield Finding("python", Level.OK, text)


def _torch() -> Findings:
    cure = "pip install torch"
    try:
        installed = version("torch")
    except PackageNotFoundError:
        yield Finding("torch", Level.FAIL, "not installed", cure)
        return
    try:
        name, kind, count = json.loads(_said([sys.executable, "-c", _TORCH], cure))
    except (PipectlError, ValueError) as error:
        text = error.message if isinstance(error, PipectlError) else "says nothing of its devices"
        yield Finding("torch", Level.FAIL, f"{installed} cannot be imported: {text}", cure)
        return
    yield Finding("torch", Level.OK, f"{name}")
    if not kind:
        yield Finding("accelerators", Level.OK, "none: ranks compute on cores")
        return
    way = "MPI reads their memory" if _reads(kind) else "messages pass through host memory"
    yield Finding("accelerators", Level.OK, f"{count} of kind {kind}; {way}")


def _reads(kind: str) -> bool:
    """Whether a test message from an accelerator's memory arrives; else the process may crash."""
    try:
        _said([sys.executable, "-m", "mpi4py", "-m", SELF_TEST, kind], "")
    except PipectlError:
        return False
    return True


def _mpi(spec: JobSpec | None) -> Findings:
    """Two ranks are started and send each other messages, as the ranks of a job do."""
    if spec is not None and spec.launch.launcher == "srun":
        text = "ranks start with srun, which is tried out within a job alone"
        yield Finding("MPI", Level.OK, text)
        return
    try:
        request = _two_ranks(spec)
        request = settle(request).of(request)
        command = mpiexec_command(request, here=True)
        found = json.loads(_said(command, "").splitlines()[-1])
    except PipectlError as error:
        cure = error.cure or "pip install 'pipectl[mpich]', or load your cluster's MPI first"
        yield Finding("MPI", Level.FAIL, error.message, cure)
        return
    except (ValueError, IndexError):
        yield Finding("MPI", Level.FAIL, "ranks start, but print nothing", "see what mpiexec does")
        return
    yield from _ping_pong(found, command[0], request.mpi)


def _ping_pong(found: dict[str, Any], mpiexec: str, dialect: str) -> Findings:
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


def _slurm(spec: JobSpec | None) -> Findings:
    if not shutil.which("sbatch"):
        yield Finding("Slurm", Level.OK, "not installed")
        return
    cure = "ask the site, or set SLURM_CONF; jobs run here with --scheduler local"
    try:
        known = _said(["sinfo", "--version"], cure)
        partitions = _said(["sinfo", "-h", "-o", "%P"], cure).split()
    except PipectlError as error:
        yield Finding("Slurm", Level.FAIL, error.message, cure)
        return
    yield Finding("Slurm", Level.OK, f"{known}; partitions {', '.join(partitions) or 'none'}")
    with suppress(PipectlError):
        yield _pmi(_said(["srun", "--mpi=list"], ""), spec)


def _pmi(listed: str, spec: JobSpec | None) -> Finding:
    """What ``srun --mpi`` may be given, against what the job gives it."""
    kinds = [kind for kind in offered(listed) if kind != "none"]
    wanted = "auto" if spec is None else spec.launch.mpi
    text = f"srun --mpi: {', '.join(kinds) or 'none'}"
    if spec is None or spec.launch.launcher != "srun" or wanted in {*kinds, "auto"}:
        return Finding("PMI", Level.OK, text)
    cure = "set launch.mpi to one of them, as your MPI needs it"
    return Finding("PMI", Level.FAIL, f"{text}; the job wants {wanted}", cure)


def _pbs() -> Findings:
    if shutil.which("sbatch") or not (shutil.which("qsub") and shutil.which("qselect")):
        return
    cure = "ask the site, or set PBS_SERVER; jobs run here with --scheduler local"
    try:
        known = _said(["qstat", "--version"], cure)
        _said(["qstat", "-B"], cure)
    except PipectlError as error:
        yield Finding("PBS", Level.FAIL, error.message, cure)
        return
    yield Finding("PBS", Level.OK, known)


def _directory(directory: Path) -> Findings:
    """The file system of the runs: whole files by renaming, locks, space, and its clock."""
    place = next(path for path in (directory, *directory.absolute().parents) if path.is_dir())
    try:
        with tempfile.TemporaryDirectory(prefix=".pipectl-", dir=place) as name:
            yield from _file_system(place, Path(name))
    except OSError as error:
        text = f"{place}: {error.strerror or error}"
        yield Finding("files", Level.FAIL, text, "set output.directory to where you may write")


def _file_system(place: Path, folder: Path) -> Findings:
    one, other = folder / "one", folder / "other"
    one.write_text("new")
    other.write_text("old")
    skew_s = one.stat().st_mtime - time.time()
    one.replace(other)
    free = shutil.disk_usage(folder).free
    enough = free >= _FREE
    yield Finding(
        "files",
        Level.OK if enough else Level.WARN,
        f"{place}: {format_bytes(free)} free",
        "" if enough else "checkpoints may find no room; free some space",
    )
    if not _locks(other):
        text = "the file system knows no locks"
        cure = "do not run two commands that change a run at the same time"
        yield Finding("locks", Level.WARN, text, cure)
    near = abs(skew_s) < _SKEW_S
    yield Finding(
        "clock",
        Level.OK if near else Level.WARN,
        f"{abs(skew_s):.1f} s from that of the file system",
        ""
        if near
        else "have the clocks of all nodes set by NTP; `status` may take silence for age",
    )


def _locks(path: Path) -> bool:
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


def _machine() -> Findings:
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield Finding("machine", Level.OK, f"{cores} cores, {format_bytes(memory)} of memory")
    with suppress(OSError):
        shared = shutil.disk_usage("/dev/shm").total
        if shared < _SHARED:
            text = f"/dev/shm holds {format_bytes(shared)} only"
            cure = "containers: start them with --shm-size=1g, or ranks of one node may crash"
            yield Finding("shared memory", Level.WARN, text, cure)
    if not any(map(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "clang++")))):
        text = "no C++ compiler, which training.compile would need"
        yield Finding("compiler", Level.OK, text)


def _two_ranks(spec: JobSpec | None) -> JobRequest:
    """The launch of a job, with two ranks that play ping-pong."""
    launch = None if spec is None else spec.launch
    return JobRequest(
        name="doctor",
        tag="doctor",
        run_directory=Path.cwd(),
        python=sys.executable,
        ranks=2,
        nodes=1,
        tasks_per_node=2,
        walltime_s=round(_PATIENCE_S),
        command=(sys.executable, "-m", "mpi4py", "-m", PING_PONG),
        mpi="auto" if launch is None else launch.mpi,
        launch_args=() if launch is None else tuple(launch.args),
    )


def _said(argv: Sequence[str], cure: str) -> str:
    """What a command prints.

    Raises:
        SchedulerError: it does not exist, fails, or takes too long.
    """
    done = process.run(argv, cure=cure, timeout_s=_PATIENCE_S)
    if done.returncode:
        last = done.said.splitlines()[-1]
        raise SchedulerError(f"{Path(argv[0]).name}: {last}", cure=cure or None)
    return done.stdout or done.stderr
