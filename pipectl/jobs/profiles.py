"""Profiles of a job's model: measured now, resumed, or taken from the cache of earlier ones.

The cache keeps finished measurements under a hash of everything that they depend on, their
identity. A file of it is JSON. One that is damaged, or whose identity is another, counts as absent.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pipectl
from pipectl.batch import JobRequest, allocation, process
from pipectl.batch.launchers import choose_mpi, launch_command
from pipectl.errors import DataFileError, PipectlError, SchedulerError
from pipectl.faults import with_details
from pipectl.fields import read_fields, write_value
from pipectl.files import is_stream, make_directory, make_directory_of, read_json, write_json
from pipectl.jobs.job_files import UNKNOWN_ROWS
from pipectl.link import RowTimes
from pipectl.profile import MeasuredOn, Profile
from pipectl.spec import profile_key
from pipectl.spec.models import Environment, Launch, Pbs, Resources, Slurm

if TYPE_CHECKING:
    from pipectl.profiler.progress import Progress
    from pipectl.spec import JobSpec

LOADING = "loading torch"
_CURE = "measure again with: pipectl profile JOB.yaml --submit"
_CACHE_VERSION = 1
_MAX_CACHED = 32
_MEASURING_CODE = ("capture", "profiler", "runtime")
_ROW_RANKS = 2
_ROW_PATIENCE_S = 120.0


@dataclass(frozen=True)
class Measurement:
    """A profile and how it came to be.

    Args:
        measured_at: seconds since the epoch.
        seconds: that measuring took.
        cached: whether nothing was measured now.
        resumed: measurements taken over from an interrupted attempt.
    """

    profile: Profile
    measured_at: float
    host: str
    seconds: float
    cached: bool = False
    resumed: int = 0

    def to_json(self) -> dict[str, Any]:
        """How it came to be; the profile itself has a place of its own."""
        names = (each.name for each in fields(self) if each.name != "profile")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def load(cls, file: Path, profile: Profile) -> Measurement:
        """The measurement of a profile that :meth:`to_json` describes in ``file``.

        Raises:
            DataFileError: the description is missing or damaged.
        """
        document = {**read_json(file, cure=_CURE), "profile": profile}
        return read_fields(cls, document, file=str(file), cure=_CURE)


class Interrupted(KeyboardInterrupt):
    """Measuring was interrupted; the next attempt will not repeat the measurements ``kept``."""

    def __init__(self, kept: int) -> None:
        super().__init__(kept)
        self.kept = kept


def measure(
    spec: JobSpec,
    path: Path | None = None,
    progress: Progress | None = None,
    effort: str = "normal",
    *,
    again: bool = False,
) -> Measurement:
    """The profile of a job on this machine: from the cache in its output directory, or measured.

    Args:
        path: where it is written, too, once it is whole.
        effort: ``fast``, ``normal`` or ``thorough``.
        again: whether to measure even what is in the cache.

    Raises:
        CaptureError: the model cannot be built or captured.
        Interrupted: by the user.
        UsageError: ``path`` or the cache cannot be written.
    """
    if path is not None:
        make_directory_of(path)
    try:
        measurement = _find_or_measure(spec, progress, effort, again=again)
    except Exception as error:
        beside = None if path is None or is_stream(path) else path.with_suffix(".fault.txt")
        fault = with_details(error, beside, write=True)
        if fault is not error:
            raise fault from error
        raise
    if path is not None:
        measurement.profile.save(path)
    return measurement


def _find_or_measure(
    spec: JobSpec, progress: Progress | None, effort: str, *, again: bool
) -> Measurement:
    directory = Path(spec.output.directory) / ".cache"
    make_directory(directory)
    device, pipeline = this_device(spec), spec.pipeline
    free = [] if pipeline.micro_batches is not None else [pipeline.stages, spec.resources.ranks]
    entry = _CacheEntry.of(
        directory,
        "",
        key=profile_key(spec),
        shapes=[spec.training.batch_size, pipeline.micro_batches, *free],
        device=asdict(device),
        effort=effort,
    )
    if not again:
        with suppress(DataFileError):
            document = entry.read()
            profile = replace(Profile.from_json(document.get("profile") or {}), name=spec.name)
            return replace(Measurement.load(entry.path, profile), cached=True, resumed=0)
    if progress is not None:
        progress(0, 0, LOADING)
    from pipectl.profiler import profile_job
    from pipectl.profiler.effort import Effort
    from pipectl.profiler.journal import Journal

    started = time.time()
    journal = Journal(entry.path.with_suffix(".journal"), entry.identity)
    try:
        profile = profile_job(spec, progress, effort=Effort(effort), journal=journal)
    except KeyboardInterrupt as stop:
        raise Interrupted(len(journal)) from stop
    neighbours = profile.device.neighbours if profile.device else 0
    profile = replace(profile, device=replace(device, neighbours=neighbours))
    profile = _with_rows(profile, spec, progress, directory, again=again)
    now, host, resumed = time.time(), socket.gethostname(), journal.resumed
    measurement = Measurement(profile, now, host, round(now - started, 3), resumed=resumed)
    entry.write({**measurement.to_json(), "profile": profile.to_json()})
    journal.remove()
    ages = []
    for file in (*directory.glob("*.json"), *directory.glob("*.journal")):
        with suppress(OSError):
            ages.append((file.stat().st_mtime, file))
    for _, file in sorted(ages)[:-_MAX_CACHED]:
        with suppress(OSError):
            file.unlink()
    return measurement


@dataclass(frozen=True)
class _CacheEntry:
    """A file of the cache, and what it depends on, as JSON."""

    path: Path
    identity: dict[str, Any]

    @classmethod
    def of(cls, directory: Path, prefix: str, **identity: Any) -> _CacheEntry:
        """That of an identity, to which the versions of Python and of this code belong."""
        identity["python"] = platform.python_version()
        identity["pipectl"] = [pipectl.__version__, _hash_of_measuring_code()]
        text = json.dumps(identity, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:32]
        return cls(directory / f"{prefix}{digest}.json", identity)

    def read(self) -> dict[str, Any]:
        """What is in it; a DataFileError if it is missing, damaged, or of another identity."""
        document = read_json(self.path, cure=_CURE)
        if (document.get("version"), document.get("identity")) != (_CACHE_VERSION, self.identity):
            raise DataFileError(f"{self.path}: is of another measurement", cure=_CURE)
        return document

    def write(self, values: Mapping[str, Any]) -> None:
        write_json(self.path, {"version": _CACHE_VERSION, "identity": self.identity, **values})


@cache
def _hash_of_measuring_code() -> str:
    """What that code measures may change without a new version."""
    package = Path(pipectl.__file__).parent
    files = sorted(path for part in _MEASURING_CODE for path in (package / part).rglob("*.py"))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()[:16]


def coupling_warning(spec: JobSpec, profile: Profile) -> str:
    """A warning if the plan changes the results of training; empty if it does not."""
    names = profile.coupled
    if spec.pipeline.micro_batches is not None or not names:
        return ""
    more = "computes" if len(names) == 1 else f"and {len(names) - 1} more compute"
    return (
        f"{names[0]} {more} over all samples of a micro-batch: results depend on the number of "
        "micro-batches, which `auto` leaves to the planner; pipeline.micro_batches sets it"
    )


def this_device(spec: JobSpec) -> MeasuredOn:
    """The device of a rank on this machine, as far as it decides what operators cost."""
    accelerator = None
    if spec.resources.gpus_per_node:  # else without loading torch
        from pipectl.profiler.machine import accelerator_name

        accelerator = accelerator_name(spec.resources.gpus_per_node)
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "unknown"
    return MeasuredOn(
        kind=accelerator or "cpu",
        model=accelerator or processor(),
        cores=len(os.sched_getaffinity(0)),
        threads=spec.threads,
        torch=torch,
    )


def processor() -> str:
    """What the kernel calls the first processor; its architecture if it has no name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.machine()


def _with_rows(
    profile: Profile, spec: JobSpec, progress: Progress | None, directory: Path, *, again: bool
) -> Profile:
    """The profile with what rows of programs take, or with what is assumed instead.

    They depend on the machine and on how ranks are started, not on the model: jobs of one output
    directory share them.
    """
    scheduler = allocation()
    entry = _CacheEntry.of(
        directory,
        "rows-",
        host=socket.gethostname(),
        scheduler=scheduler,
        launch=spec.launch.model_dump(mode="json"),
        threads=spec.threads,
    )
    if not again:
        with suppress(DataFileError):
            values = entry.read().get("rows") or {}
            rows = read_fields(RowTimes, values, file=str(entry.path), cure=_CURE)
            return replace(profile, rows=rows)
    if progress is not None:
        progress(0, 0, "measuring messages")
    row_times, assumption = measure_rows(spec, scheduler)
    if row_times is None:
        return replace(profile, assumptions=(*profile.assumptions, assumption))
    entry.write({"rows": write_value(row_times)})
    return replace(profile, rows=row_times)


def measure_rows(spec: JobSpec, scheduler: str) -> tuple[RowTimes | None, str]:
    """What rows take on this node, and what has to be assumed without them.

    Two ranks with cores of their own train a small model for a moment. That is done for jobs whose
    ranks share nodes.

    Args:
        scheduler: whose launcher starts ranks here.
    """
    resources, launch = spec.resources, spec.launch.model_copy(update={"bind": "none"})
    if (
        resources.tasks_per_node < _ROW_RANKS
        or len(os.sched_getaffinity(0)) < _ROW_RANKS * resources.cpus_per_task
        or resources.gpus_per_node
        or spec.environment.container is not None
    ):
        return None, UNKNOWN_ROWS
    if scheduler == "slurm" and launch.launcher == "srun":
        one_node = (*launch.args, "--nodes=1", "--overlap")
        launch = launch.model_copy(update={"args": one_node})
    try:
        with tempfile.TemporaryDirectory(prefix="pipectl-rows-") as name:
            output = Path(name, "rows.json")
            arguments = ("--run", name, "--output", str(output), "--threads", str(spec.threads))
            request = request_of_two(launch, "pipectl.runtime.row_probe", *arguments)
            command = launch_command(request, scheduler)
            result = process.run(command, cure="", timeout_s=_ROW_PATIENCE_S)
            if result.returncode:
                raise SchedulerError(result.message.splitlines()[-1])
            document = read_json(output, cure=_CURE)
            return read_fields(RowTimes, document, file=str(output), cure=_CURE), ""
    except (PipectlError, OSError) as error:
        text = error.message if isinstance(error, PipectlError) else str(error)
        return None, f"{UNKNOWN_ROWS} (two ranks did not start: {text})"


def request_of_two(launch: Launch, *command: str) -> JobRequest:
    """Two ranks of this node that run a Python module."""
    request = JobRequest(
        name="two ranks",
        tag="two ranks",
        run_directory=Path.cwd(),
        python=sys.executable,
        command=(sys.executable, "-m", "mpi4py", "-m", *command),
        resources=Resources(tasks_per_node=_ROW_RANKS),
        launch=launch,
        environment=Environment(),
        slurm=Slurm(),
        pbs=Pbs(),
    )
    return request.update(launch={"mpi": choose_mpi(request).mpi})
