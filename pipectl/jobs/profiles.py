"""Profiles of a job's model: measured now, resumed, or taken from the cache.

The cache contains finished profiles. The name of a file is a hash of everything that the
measurement depends on. A damaged file counts as absent.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pipectl
from pipectl.batch import system_of_this_node
from pipectl.errors import DataFileError, PipectlError, UsageError
from pipectl.faults import with_details
from pipectl.fields import read_fields, write_value
from pipectl.files import (
    is_of_another,
    is_stream,
    make_directory,
    make_directory_of,
    read_json,
    user_cache,
    write_json,
)
from pipectl.jobs.output import is_fresh
from pipectl.jobs.rows import MEASURE_AGAIN, start_row_probe
from pipectl.jobs.variables import variables_set
from pipectl.link import RowTimes
from pipectl.profile import Profile
from pipectl.profile_parts import MeasuredOn
from pipectl.runs.code import Code
from pipectl.spec import profile_key, script_key
from pipectl.spec.code import active, using
from pipectl.units import Report

if TYPE_CHECKING:
    from pipectl.spec import JobSpec

LOADING = "loading torch"
_UNCOMPARED = "uncompared"
_EFFORTS = "thorough", "normal", "fast"
_MAX_CACHED = 32
_PROCESSORS = Path("/proc/cpuinfo")
_NAMES = ("model name", "Model Name", "cpu model", "cpu")
"""What architectures call the name of a processor: x86, LoongArch, MIPS and POWER."""
_NUMBERS = ("CPU implementer", "CPU part")
_MEASURING_CODE = (
    *(f"{part}/**/*.py" for part in ("capture", "profiler", "runtime", "script", "planner/costs")),
    *("lanes.py", "link.py", "profile.py", "profile_parts.py", "sorting.py", "torch_api.py"),
)
_MPI_VARIABLES = ("MPI4PY_LIBMPI", "MPI4PY_MPIABI", "LD_LIBRARY_PATH")
"""Variables that choose the MPI library."""


class Interrupted(KeyboardInterrupt):
    """Measuring was interrupted; ``kept`` measurements will not be repeated."""

    def __init__(self, kept: int) -> None:
        super().__init__(kept)
        self.kept = kept


def measure(
    spec: JobSpec,
    path: Path | None = None,
    progress: Report | None = None,
    effort: str | None = None,
    *,
    again: bool = False,
) -> Profile:
    """Find a job's profile for this machine in the cache of its output directory, or measure it.

    What the user's code prints goes to the standard error.

    Args:
        path: further file for the profile.
        effort: ``fast``, ``normal`` or ``thorough``; None for a profile of any of them, the most
            thorough, or else a new one with ``normal``.
        again: whether to measure without the cache.

    Raises:
        CaptureError: the model cannot be built or captured.
        Interrupted: the user interrupted the measurement.
        UsageError: ``path`` or the cache cannot be written.
    """
    if path is not None:
        make_directory_of(path)
    try:
        # The user may edit the code meanwhile: all of it is read once.
        sources = active() or Code.of(spec).sources
        with using(sources), variables_set(spec.environment.variables), redirect_stdout(sys.stderr):
            profile = _measure_unless_cached(spec, progress, effort, again=again)
    except Exception as error:
        beside = None if path is None or is_stream(path) else path.with_suffix(".fault.txt")
        fault = with_details(error, beside, write=True)
        if fault is not error:
            raise fault from error
        raise
    if path is not None:
        profile.save(path)
    return profile


def _measure_unless_cached(
    spec: JobSpec, progress: Report | None, effort: str | None, *, again: bool
) -> Profile:
    directory = _cache_of(spec)
    device, pipeline = this_device(spec), spec.pipeline
    free = [] if pipeline.micro_batches is not None else [pipeline.stages, spec.resources.ranks]
    identity = {
        "key": profile_key(spec),
        "shapes": [spec.training.batch_size, pipeline.micro_batches, *free],
        "device": asdict(device),
    }
    for known in () if again else (_EFFORTS if effort is None else (effort,)):
        with suppress(DataFileError):
            path = _cache_file(directory, "", {**identity, "effort": known})
            profile = replace(Profile.load(path), name=spec.name)
            if is_fresh(spec, profile):
                return profile
    effort = effort or "normal"
    identity["effort"] = effort
    path = _cache_file(directory, "", identity)
    if progress is not None:
        progress(0, 0, LOADING)
    from pipectl.profiler import profile_job
    from pipectl.profiler.effort import Effort
    from pipectl.profiler.journal import Journal

    started = time.time()
    journal = Journal(path.with_suffix(".journal"), identity)
    try:
        profile = profile_job(
            spec, device, progress, effort=Effort(effort), journal=journal,
            uncompared=None if again else _known_comparison(spec),
        )  # fmt: skip
        profile = _with_rows(profile, spec, progress, effort, directory, again=again)
    except KeyboardInterrupt as stop:
        raise Interrupted(len(journal)) from stop
    assert profile.device is not None
    device = replace(
        profile.device,
        host=socket.gethostname(),
        measured_at=time.time(),
        seconds=round(time.time() - started, 3),
        resumed=journal.resumed,
    )
    profile = replace(profile, device=device)
    profile.save(path)
    journal.remove()
    _remove_old_files(directory)
    return profile


def keep_comparison(spec: JobSpec, uncompared: Sequence[str], began: float) -> None:
    """Keep what came of comparing the first steps of a job's script, for its profile.

    Args:
        uncompared: what could not be compared.
        began: time before the script was read; if it was edited since, nothing is kept.
    """
    assert spec.script is not None
    files = [Path(spec.script.file), *Code.of(spec).sources.contents]
    with suppress(PipectlError, OSError):  # the profile compares it, then
        if all(file.stat().st_mtime < began for file in files):
            write_json(_comparison_file(spec), {_UNCOMPARED: [*uncompared]})


def _known_comparison(spec: JobSpec) -> tuple[str, ...] | None:
    """What was kept of the comparison of a job's script; None if nothing is of use."""
    if spec.beside_script or spec.script is None:
        return None
    with suppress(DataFileError, KeyError, TypeError):
        return tuple(read_json(_comparison_file(spec), hint=MEASURE_AGAIN)[_UNCOMPARED])
    return None


def _comparison_file(spec: JobSpec) -> Path:
    identity = {"key": script_key(spec), "torch": _version_of_torch()}
    return _cache_file(_cache_of(spec), "script-", identity)


def _cache_of(spec: JobSpec) -> Path:
    """The directory of a job's cache, which is made."""
    directory = Path(spec.output.directory) / ".cache"
    if is_of_another(directory):  # users may share the directory of the runs
        directory = directory.with_name(f".cache-{os.geteuid()}")
    make_directory(directory)
    return directory


def _cache_file(directory: Path, prefix: str, identity: dict[str, Any]) -> Path:
    """The cache file of a measurement that depends on ``identity``, on Python and on this code."""
    identity["python"] = platform.python_version()
    identity["pipectl"] = [pipectl.__version__, _hash_of_measuring_code()]
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return directory / f"{prefix}{digest[:32]}.json"


def _remove_old_files(directory: Path) -> None:
    """Keep the newest files of a cache."""
    ages = []
    for file in (*directory.glob("*.json"), *directory.glob("*.journal")):
        with suppress(OSError):
            ages.append((file.stat().st_mtime, file))
    for _, file in sorted(ages)[:-_MAX_CACHED]:
        with suppress(OSError):
            file.unlink()


@cache
def _hash_of_measuring_code() -> str:
    """Hash of the code that measures: it may change without a new version."""
    package = Path(pipectl.__file__).parent
    files = sorted(path for pattern in _MEASURING_CODE for path in package.glob(pattern))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()[:16]


def this_device(spec: JobSpec) -> MeasuredOn:
    """The device of a rank on this machine, as far as the cost of operators depends on it."""
    accelerator = None
    if spec.resources.gpus_per_node:  # only then is torch loaded
        from pipectl.profiler.machine import accelerator_name

        accelerator = accelerator_name(spec.resources.gpus_per_node)
    return MeasuredOn(
        kind=accelerator or "cpu",
        model=accelerator or processor(),
        cores=len(os.sched_getaffinity(0)),
        threads=spec.threads,
        torch=_version_of_torch(),
    )


def _version_of_torch() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return "unknown"


def processor(described: Path = _PROCESSORS) -> str:
    """Name of the first processor according to the kernel; the architecture if it has no name.

    On ARM the kernel has numbers: ``aarch64, CPU implementer 0x41, CPU part 0xd4f``.
    """
    try:
        lines = described.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    first_last = (line.partition(":") for line in reversed(lines))
    fields = {key.strip(): value.strip() for key, _, value in first_last}
    if name := next(filter(None, map(fields.get, _NAMES)), ""):
        return name
    numbers = [f"{key} {fields[key]}" for key in _NUMBERS if fields.get(key)]
    return ", ".join([platform.machine(), *numbers])


def _with_rows(
    profile: Profile,
    spec: JobSpec,
    progress: Report | None,
    effort: str,
    directory: Path,
    *,
    again: bool,
) -> Profile:
    """The profile with the times of rows of programs, or with what is assumed instead.

    These times depend on the machine and on how ranks are started, not on the model, so all jobs of
    a user share them on this machine.

    Args:
        directory: of the times if the user has no cache.
    """
    scheduler = system_of_this_node()
    identity = {
        "host": socket.gethostname(),
        "scheduler": scheduler,
        "launch": spec.launch.model_dump(mode="json"),
        "device": asdict(this_device(spec)),
        "effort": effort,
        "prefix": sys.prefix,
        "mpiexec": shutil.which("mpiexec"),
        "library": [os.environ.get(name) for name in _MPI_VARIABLES],
    }
    directory = user_cache("rows") or directory
    path = _cache_file(directory, "rows-", identity)
    if not again:
        with suppress(DataFileError):
            document = read_json(path, hint=MEASURE_AGAIN)
            rows = read_fields(RowTimes, document, file=str(path), hint=MEASURE_AGAIN)
            return replace(profile, rows=rows)
    row_times, assumption = start_row_probe(spec, scheduler, effort, progress)
    if row_times is None:
        return replace(profile, assumptions=(*profile.assumptions, assumption))
    with suppress(UsageError):  # a full home is no reason to fail
        write_json(path, write_value(row_times))
    _remove_old_files(directory)
    return replace(profile, rows=row_times)
