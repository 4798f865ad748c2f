"""`pipectl doctor`: check that this machine has what jobs need."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from signal import Signals
from typing import Any

import typer

from pipectl import __version__
from pipectl.batch import LOCAL, find_scheduler, get_scheduler, process
from pipectl.batch.findings import Finding, assess
from pipectl.batch.launchers import (
    AUTO,
    MPIEXECS,
    belongs_to_mpi,
    launch_command,
    local_environment,
)
from pipectl.cli import options as opt
from pipectl.cli.console import labels, note, say_json, show
from pipectl.cli.submission import describe_job, follow
from pipectl.control_groups import memory_of_machine
from pipectl.errors import PipectlError, SchedulerError
from pipectl.jobs.job import choose_scheduler, fit_to_allocation
from pipectl.jobs.rows import request_of_two
from pipectl.jobs.variables import variables_set
from pipectl.runs.readers import AS_ROOT, HINT_OF_ROOT
from pipectl.spec import JobSpec, load
from pipectl.spec.launch import Environment, Launch
from pipectl.units import format_bytes, format_time
from pipectl.versions import hint_of_torch, tested, untested

_STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}
_INDENT = 19
_HERE = "jobs run here with --scheduler local"
_PATIENCE_S = 60.0
_MIN_FREE_BYTES = 1 << 30
_MIN_SHARED_BYTES = 256 << 20
_MAX_SKEW_S = 2.0
_SMALLEST_JOB = """\
version: 1
name: two-ranks
model: {factory: "torch.nn:Linear", kwargs: {in_features: 1, out_features: 1}}
loss: {factory: "torch.nn:MSELoss"}
data: {factory: "torch.utils.data:TensorDataset"}
training: {steps: 1, batch_size: 1}
resources: {nodes: 2, tasks_per_node: 1}
"""
_REACH = "pipectl.runtime.links.measure"
_SELF_TEST = "pipectl.runtime.transport.gpu_aware"
_TORCH = (
    "import json, torch; found = torch.accelerator.current_accelerator(); "
    "kind = 'ROCm' if torch.version.hip else found and found.type; "
    "print(json.dumps([torch.__version__, found and found.type, torch.accelerator.device_count(), "
    "kind]))"
)


def command(
    context: typer.Context,
    job: Path | None = typer.Argument(
        None, metavar="JOB.yaml", help="Job whose launch settings are tested."
    ),
    overrides: list[str] | None = opt.OVERRIDES,
    submit: bool = opt.flag("Start two ranks in a job of two minutes instead.", "--submit"),
    scheduler: str | None = opt.SCHEDULER,
    directory: Path = opt.DIRECTORY,
    as_json: bool = opt.JSON,
) -> None:
    spec = None
    if job is None:
        opt.refuse(context, "--set", "needs a JOB.yaml")
    else:
        why = "cannot be used with a job, which has its own"
        opt.refuse(context, "--directory", why, hint="--set output.directory=DIRECTORY")
        spec = load(job, overrides or ())
        directory = Path(spec.output.directory)
    if submit:
        found = _try_in_job(spec or _smallest_job(directory), scheduler)
    else:
        opt.refuse(context, "--scheduler", "needs --submit")
        found = examine(directory, spec)
    findings = []
    for finding in found:
        findings.append(finding)
        if as_json:
            continue
        lines = [(f"{finding.level:<5}{finding.what}", finding.text, "")]
        lines += [("", finding.hint, "")] if finding.hint else []
        show(labels(lines, _INDENT, _STYLES[finding.level]))
    if as_json:
        say_json([finding._asdict() for finding in findings])
    if any(finding.level == "fail" for finding in findings):
        raise typer.Exit(1)


def _smallest_job(directory: Path) -> JobSpec:
    """A job of two nodes with the settings of the site files."""
    with tempfile.TemporaryDirectory(prefix="pipectl-") as name:
        file = Path(name, "doctor.yaml")
        file.write_text(_SMALLEST_JOB)
        runs = json.dumps(str(directory.absolute()), ensure_ascii=False)
        return load(file, [f"output.directory={runs}"])


def _try_in_job(spec: JobSpec, scheduler: str | None) -> Iterator[Finding]:
    """Start two ranks in a job, and follow it to its end."""
    from pipectl.jobs.measuring import findings_of, make_trial_job
    from pipectl.jobs.submit import submit

    name = choose_scheduler(spec, scheduler, must_answer=True)
    spec = fit_to_allocation(spec, name)
    (submission,) = submit([make_trial_job(spec, name)], time.time())
    note(f"submitted: {submission.run.name} ({describe_job(submission.record)})")
    yield from findings_of(follow(submission.run))


def examine(
    directory: Path, spec: JobSpec | None = None, only: str | None = None
) -> Iterator[Finding]:
    """Run all checks.

    Args:
        directory: directory of the runs.
        spec: job whose launch settings and environment variables to test; None for the defaults.
        only: name of the only check to run.
    """
    launch = None if spec is None else spec.launch
    environment = Environment() if spec is None else spec.environment
    checks: dict[str, tuple[Iterator[Finding], str]] = {
        "python": (_check_python(), ""),
        "environment": (_check_environment(environment), ""),
        "torch": (_with(environment.variables, _check_torch()), ""),
        "MPI": (
            _with(environment.variables, _check_mpi(launch)),
            "pip install mpich, or load your cluster's MPI first",
        ),
        "batch system": (_check_batch_system(launch), ""),
        "files": (_check_file_system(directory), "set output.directory to where you may write"),
        "machine": (_check_machine(), ""),
    }
    for name, (findings, hint_of_failure) in checks.items():
        if only not in {None, name}:
            continue
        try:
            yield from findings
        except (PipectlError, OSError, ValueError, LookupError) as error:
            text = error.message if isinstance(error, PipectlError) else str(error)
            hint = (isinstance(error, PipectlError) and error.hint) or hint_of_failure
            yield Finding(name, "fail", text, hint)


def _check_python() -> Iterator[Finding]:
    yield assess("python", f"{platform.python_version()} ({sys.executable}), pipectl {__version__}")


def _with(variables: Mapping[str, str], findings: Iterator[Finding]) -> Iterator[Finding]:
    """Make findings as ranks of a job would, with its environment variables."""
    while True:
        with variables_set(variables):
            found = next(findings, None)
        if found is None:
            return
        yield found


def _check_environment(environment: Environment) -> Iterator[Finding]:
    """Name what a job makes of its environment and this process cannot."""
    parts = ("modules", "setup", "container")
    if given := [f"environment.{name}" for name in parts if getattr(environment, name)]:
        text = f"{' and '.join(given)} of the job: not used by these tests"
        yield assess("environment", text, "to test with them, add --submit")


def _check_torch() -> Iterator[Finding]:
    """Check that torch can be imported, and how messages leave accelerators."""
    result = _run([sys.executable, "-c", _TORCH])
    if result.returncode:
        number = max(0, -result.returncode)
        fault = result.error_line if not number else f"ended by {Signals(number).name}"
        text = f"cannot be imported by {sys.executable}: {fault}"
        yield Finding("torch", "fail", text, hint_of_torch(fault, number))
        return
    name, kind, count, built_for = json.loads(result.stdout.splitlines()[-1])
    warning = untested("torch")
    hint = f"if something fails, install {tested('torch')}"
    yield assess("torch", warning or name, hint if warning else "")
    if not kind:
        yield assess("accelerators", "none: ranks compute on cores")
        return
    if not count:
        built = {"cuda": "CUDA", "xpu": "XPU"}.get(built_for, built_for)
        text = f"torch is built for {built}, but it finds no GPU on this machine"
        yield assess("accelerators", f"{text}; login nodes usually have none")
        return
    try:  # a test message from an accelerator's memory, which may crash the process
        command = [sys.executable, "-m", "mpi4py", "-m", _SELF_TEST, kind]
        _output(command, local_environment())
        way = "MPI reads their memory"
    except PipectlError:
        way = "messages pass through host memory"
    yield assess("accelerators", f"{count} of kind {kind}; {way}")


def _check_mpi(launch: Launch | None) -> Iterator[Finding]:
    """Start two ranks that send each other messages, as the ranks of a job do."""
    launch = Launch() if launch is None else launch.model_copy(update={"bind": "none"})
    if not belongs_to_mpi(launch):
        text = f"ranks start with {launch.launcher}, which can only be tried within a job"
        yield assess("MPI", text)
        return
    request = request_of_two(launch, _REACH)
    command, mpi = launch_command(request, LOCAL), request.launch.mpi
    answer = _answer(command, local_environment(request.launch))
    if answer["ranks"] != 2:
        raise SchedulerError(
            f"{command[0]} starts two ranks that do not see each other: it does not belong to the "
            f"MPI that mpi4py has loaded ({answer['library']})",
            hint="load only one MPI, or set MPI4PY_LIBMPI to the library of this mpiexec, for a "
            "job\nin environment.variables, which `pipectl doctor JOB.yaml` uses",
        )
    yield assess("MPI", f"{answer['library']}, started by {command[0]}")
    if mpi == AUTO:
        hint = f"if it is like one of {', '.join(MPIEXECS)}, set launch.mpi to that"
        yield assess("launcher", "mpiexec is of an unknown kind, so it cannot bind ranks", hint)
    else:
        yield assess("launcher", f"mpiexec takes the options of {mpi} (launch.mpi)")
    threads = answer["threads"]
    hint = "large messages move only while ranks send or wait; load an MPI with MPI_THREAD_MULTIPLE"
    yield assess("threads", f"MPI_THREAD_{threads.upper()}", "" if threads == "multiple" else hint)
    rate = format_bytes(int(answer["bandwidth_bytes_per_s"]))
    yield assess("messages", f"{format_time(answer['latency_s'])}, {rate}/s on this machine")


def _check_batch_system(launch: Launch | None) -> Iterator[Finding]:
    """Check the batch system to which jobs go from here."""
    if (name := find_scheduler()) == LOCAL:
        yield assess("batch system", "none is installed: jobs run on this machine")
        return
    system = get_scheduler(name, _PATIENCE_S)
    try:
        yield from system.examine(launch)
    except SchedulerError as error:
        yield Finding(system.title, "fail", error.message, f"{system.unreachable_hint}; {_HERE}")


def _check_file_system(directory: Path) -> Iterator[Finding]:
    """Check the file system of the runs: renaming, locks, free space and clock."""
    place = next(path for path in (directory, *directory.absolute().parents) if path.is_dir())
    try:
        with tempfile.TemporaryDirectory(prefix=".pipectl-", dir=place) as name:
            one, other = Path(name, "one"), Path(name, "other")
            one.write_text("new")
            other.write_text("old")
            skew_s = abs(one.stat().st_mtime - time.time())
            one.replace(other)
            free_bytes, has_locks = shutil.disk_usage(name).free, _can_lock(other)
    except OSError as error:
        raise SchedulerError(f"{place}: {error.strerror or error}") from error
    hint = "" if free_bytes >= _MIN_FREE_BYTES else "checkpoints need room: free some space"
    yield assess("files", f"{place}: {format_bytes(free_bytes)} free", hint)
    if not has_locks:
        hint = "do not run two commands that change a run at the same time"
        yield assess("locks", "the file system has no locks", hint)
    text = f"{skew_s:.1f} s from that of the file system"
    hint = "synchronise the clocks of all nodes (NTP); `status` may misjudge how old heartbeats are"
    yield assess("clock", text, "" if skew_s < _MAX_SKEW_S else hint)


def _can_lock(path: Path) -> bool:
    """Whether locks work."""
    with path.open("r+b") as first, path.open("r+b") as second, suppress(OSError):
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def _check_machine() -> Iterator[Finding]:
    """Check cores, memory and compiler."""
    cores, memory = len(os.sched_getaffinity(0)), memory_of_machine()
    yield assess("machine", f"{cores} cores, {format_bytes(memory)} of memory")
    with suppress(OSError):
        shared = shutil.disk_usage("/dev/shm").total
        if shared < _MIN_SHARED_BYTES:
            hint = "containers: start them with --shm-size=1g, or ranks of one node may crash"
            yield assess("shared memory", f"/dev/shm has only {format_bytes(shared)}", hint)
    if not any(map(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "clang++")))):
        yield assess("compiler", "no C++ compiler, which training.compile would need")


def _run(argv: Sequence[str], env: Mapping[str, str] | None = None) -> process.Completed:
    return process.run(argv, hint="", env=env, timeout_s=_PATIENCE_S)


def _output(argv: Sequence[str], env: Mapping[str, str] | None = None) -> str:
    """The output of a command."""
    result = _run(argv, env)
    if result.returncode:
        hint = HINT_OF_ROOT if AS_ROOT in result.message else None
        raise SchedulerError(f"{Path(argv[0]).name}: {result.error_line}", hint=hint)
    return result.stdout or result.stderr


def _answer(argv: Sequence[str], env: Mapping[str, str] | None = None) -> Any:
    """The JSON in the last line that a command prints."""
    try:
        return json.loads(_output(argv, env).splitlines()[-1])
    except (ValueError, IndexError):
        raise SchedulerError(
            f"{Path(argv[0]).name} runs, but does not answer", hint=f"see what {argv[0]} prints"
        ) from None
