"""Profiles of a job's model: measured now, resumed, or taken from the cache of earlier ones.

The cache keeps finished profiles under a hash of everything that they depend on. A file of it is
JSON: what was measured (its identity), when, where, and the profile. One that is damaged, or whose
identity is another, counts as absent.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pipectl
from pipectl.batch import LOCAL, allocation
from pipectl.errors import DataFileError, UsageError
from pipectl.faults import with_file
from pipectl.fields import read_fields, write_value
from pipectl.files import is_stream, make_directory, make_directory_of, read_json, write_json
from pipectl.profile import MeasuredOn, Profile
from pipectl.row_times import RowTimes
from pipectl.spec import profile_key

if TYPE_CHECKING:
    from pipectl.profiler.progress import Progress
    from pipectl.spec import JobSpec

LOADING = "loading torch"
_CURE = "measure again with: pipectl profile JOB.yaml --submit"
_CACHE_VERSION = 1
_MAX_CACHED = 32
_MEASURING_CODE = ("capture", "profiler", "runtime")


@dataclass(frozen=True)
class Measurement:
    """A profile and how it came to be.

    Args:
        measured_at: seconds since the epoch.
        host: on which it was measured.
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
        return {
            "cached": self.cached,
            "resumed": self.resumed,
            "measured_at": self.measured_at,
            "host": self.host,
            "seconds": self.seconds,
        }

    @classmethod
    def from_json(cls, document: dict[str, Any], profile: Profile, *, file: str) -> Measurement:
        """The measurement that :meth:`to_json` describes.

        Raises:
            DataFileError: the description is damaged.
        """
        fields = {**document, "profile": profile}
        return read_fields(cls, fields, file=file, cure=_CURE)

    @classmethod
    def load(cls, profile: Path, how: Path) -> Measurement:
        """The measurement whose two files these are.

        Raises:
            DataFileError: one is missing or damaged.
        """
        return cls.from_json(read_json(how, cure=_CURE), Profile.load(profile), file=str(how))


class Interrupted(KeyboardInterrupt):
    """Measuring was interrupted.

    Args:
        kept: measurements that the next attempt will not repeat.
    """

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
        path: where it is written, too; until the new profile is whole, this stays as it is.
        effort: ``fast``, ``normal`` or ``thorough``.
        again: whether to measure even what is in the cache.

    Raises:
        CaptureError: the model cannot be built or captured.
        Interrupted: by the user; what was measured so far is used the next time.
        UsageError: ``path`` or the cache cannot be written.
    """
    if path is not None:
        make_directory_of(path)
    try:
        measurement = _find_or_measure(spec, progress, effort, again=again)
    except Exception as error:
        beside = None if path is None or is_stream(path) else path.with_suffix(".fault.txt")
        fault = with_file(error, beside)
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
    device = this_device(spec)
    identity = _identity(spec, device, effort)
    path = directory / f"{_digest(identity)}.json"
    cached = None if again else _read_cached(path, identity)
    if cached is not None:
        return replace(cached, profile=replace(cached.profile, name=spec.name))
    if progress is not None:
        progress(0, 0, LOADING)
    from pipectl.profiler import profile_job
    from pipectl.profiler.effort import Effort
    from pipectl.profiler.journal import Journal

    started = time.time()
    with Journal(path.with_suffix(".journal"), identity) as journal:
        try:
            profile = profile_job(spec, progress, effort=Effort(effort), journal=journal)
        except KeyboardInterrupt as stop:
            raise Interrupted(len(journal)) from stop
        neighbours = profile.device.neighbours if profile.device else 0
        profile = replace(profile, device=replace(device, neighbours=neighbours))
        profile = _with_rows(profile, spec, progress, directory, again=again)
        now, host, resumed = time.time(), socket.gethostname(), journal.resumed
        measurement = Measurement(profile, now, host, round(now - started, 3), resumed=resumed)
        found = {**measurement.to_json(), "profile": profile.to_json()}
        _write_entry(path, identity, found)
        journal.remove()
    _remove_oldest(directory)
    return measurement


def _with_rows(
    profile: Profile, spec: JobSpec, progress: Progress | None, cache: Path, *, again: bool
) -> Profile:
    """The profile with what rows of programs take, or with what is assumed instead.

    They depend on the machine and on how ranks are started, not on the model: jobs of one output
    directory share them.
    """
    from pipectl.jobs.rows import measure_rows

    scheduler = allocation()
    identity = {
        "host": socket.gethostname(),
        "scheduler": scheduler,
        "launch": spec.launch.model_dump(mode="json"),
        "threads": spec.threads,
        "python": platform.python_version(),
        "pipectl": [pipectl.__version__, _hash_of_measuring_code()],
    }
    path = cache / f"rows-{_digest(identity)}.json"
    if not again:
        with suppress(DataFileError):
            values = _read_entry(path, identity).get("rows") or {}
            rows = read_fields(RowTimes, values, file=str(path), cure=_CURE)
            return replace(profile, rows=rows)
    if progress is not None:
        progress(0, 0, "measuring messages")
    measured, assumption = measure_rows(spec, scheduler)
    if measured is None:
        return replace(profile, assumptions=(*profile.assumptions, assumption))
    _write_entry(path, identity, {"rows": write_value(measured)})
    return replace(profile, rows=measured)


def require_compute_node(scheduler: str) -> None:
    """A login node is no place to measure on: it is shared, and often another machine.

    Raises:
        UsageError: jobs go to a batch system, and this process is not within one.
    """
    if scheduler not in {LOCAL, allocation()}:
        raise UsageError(
            f"jobs go to {scheduler} from here, so this seems to be a login node, whose times say "
            "nothing about the nodes that train",
            cure="measure in an allocation: add --submit (and --wait to follow it);\n"
            "to measure on this machine all the same: --scheduler local",
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


def _identity(spec: JobSpec, device: MeasuredOn, effort: str) -> dict[str, Any]:
    """Everything that a profile depends on, as JSON."""
    pipeline = spec.pipeline
    free = [] if pipeline.micro_batches is not None else [pipeline.stages, spec.resources.ranks]
    return {
        "key": profile_key(spec),
        "shapes": [spec.training.batch_size, pipeline.micro_batches, *free],
        "device": asdict(device),
        "effort": effort,
        "python": platform.python_version(),
        "pipectl": [pipectl.__version__, _hash_of_measuring_code()],
    }


@cache
def _hash_of_measuring_code() -> str:
    """What that code measures may change without a new version."""
    package = Path(pipectl.__file__).parent
    files = sorted(path for part in _MEASURING_CODE for path in (package / part).glob("*.py"))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()[:16]


def _digest(identity: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]


def _write_entry(path: Path, identity: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    write_json(path, {"version": _CACHE_VERSION, "identity": identity, **found})


def _read_entry(path: Path, identity: Mapping[str, Any]) -> dict[str, Any]:
    """A file of the cache.

    Raises:
        DataFileError: it is missing or damaged, or of another identity.
    """
    document = read_json(path, cure=_CURE)
    if (document.get("version"), document.get("identity")) != (_CACHE_VERSION, identity):
        raise DataFileError(f"{path}: is of another measurement", cure=_CURE)
    return document


def _read_cached(path: Path, identity: Mapping[str, Any]) -> Measurement | None:
    """The profile of ``identity``, if there is a sound one."""
    try:
        document = _read_entry(path, identity)
        profile = Profile.from_json(document.get("profile") or {})
        measurement = Measurement.from_json(document, profile, file=str(path))
    except DataFileError:
        return None
    return replace(measurement, cached=True, resumed=0)


def _remove_oldest(directory: Path) -> None:
    """Keep the newest profiles and journals of the cache."""
    ages = []
    for path in (*directory.glob("*.json"), *directory.glob("*.journal")):
        with suppress(OSError):
            ages.append((path.stat().st_mtime, path))
    for _, path in sorted(ages)[:-_MAX_CACHED]:
        with suppress(OSError):
            path.unlink()
