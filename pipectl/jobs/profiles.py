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
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pipectl
from pipectl.batch import LOCAL, JobRequest, allocation, process
from pipectl.batch.launchers import (
    choose_mpi,
    is_told_of_jobs,
    launch_command,
    local_environment,
)
from pipectl.errors import DataFileError, PipectlError, SchedulerError, UsageError
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
from pipectl.jobs.output import UNKNOWN_ROWS, is_fresh
from pipectl.jobs.variables import variables_set
from pipectl.link import RowTimes
from pipectl.profile import SEEDED_HINT, MeasuredOn, Profile
from pipectl.runs.code import Code
from pipectl.spec import evaluation_key, profile_key
from pipectl.spec.code import active, using
from pipectl.spec.launch import Environment, Launch, Pbs, Resources, Slurm
from pipectl.units import shorten

if TYPE_CHECKING:
    from pipectl.profiler.effort import Progress
    from pipectl.spec import JobSpec

LOADING = "loading torch"
_HINT = "measure again with: pipectl profile JOB.yaml"
_MAX_CACHED = 32
_PROCESSORS = Path("/proc/cpuinfo")
_NAMES = ("model name", "Model Name", "cpu model", "cpu")
"""What architectures call the name of a processor: x86, LoongArch, MIPS and POWER."""
_NUMBERS = ("CPU implementer", "CPU part")
_MAX_NAMED = 3
_SENSITIVE = frozenset({"Adam", "AdamW", "Adamax", "NAdam", "RAdam"})
"""Optimizers that train worse if gradients are one update old; see docs/schedules.md."""
_MEASURING_CODE = (
    *(f"{part}/**/*.py" for part in ("capture", "profiler", "runtime", "script", "planner/costs")),
    *("graph.py", "profile.py", "torch_api.py"),
)
_ROW_RANKS = 2
_ROW_PATIENCE_S = 120.0
_ROWS_BUDGET_S = {"fast": 3.0, "normal": 10.0, "thorough": 30.0}
"""Time for the steps that measure rows, by effort."""
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
    progress: Progress | None = None,
    effort: str = "normal",
    *,
    again: bool = False,
) -> Profile:
    """Find a job's profile for this machine in the cache of its output directory, or measure it.

    Args:
        path: further file for the profile.
        effort: ``fast``, ``normal`` or ``thorough``.
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
        with using(sources), variables_set(spec.environment.variables):
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
    spec: JobSpec, progress: Progress | None, effort: str, *, again: bool
) -> Profile:
    directory = Path(spec.output.directory) / ".cache"
    if is_of_another(directory):  # users may share the directory of the runs
        directory = directory.with_name(f".cache-{os.geteuid()}")
    make_directory(directory)
    device, pipeline = this_device(spec), spec.pipeline
    free = [] if pipeline.micro_batches is not None else [pipeline.stages, spec.resources.ranks]
    identity = {
        "key": profile_key(spec),
        "shapes": [spec.training.batch_size, pipeline.micro_batches, *free],
        "device": asdict(device),
        "effort": effort,
    }
    path = _cache_file(directory, "", identity)
    if not again:
        with suppress(DataFileError):
            profile = replace(Profile.load(path), name=spec.name)
            if is_fresh(spec, profile):
                return profile
    if progress is not None:
        progress(0, 0, LOADING)
    from pipectl.profiler import profile_job
    from pipectl.profiler.effort import Effort
    from pipectl.profiler.journal import Journal

    started = time.time()
    journal = Journal(path.with_suffix(".journal"), identity)
    try:
        profile = profile_job(spec, device, progress, effort=Effort(effort), journal=journal)
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


def warnings_of(spec: JobSpec, profile: Profile) -> list[str]:
    """What a plan can change in the results of training, and held-out data that are trained on."""
    say = (
        coupling_warning,
        replicas_warning,
        delay_warning,
        loss_warning,
        sharing_warning,
        splitting_warning,
        metrics_warning,
        redrawing_warning,
    )
    return [text for text in (each(spec, profile) for each in say) if text]


def redrawing_warning(_: JobSpec, profile: Profile) -> str:
    """A warning if initial weights are others each time; empty if they are not."""
    if profile.redrawn is None:
        return ""
    return (
        f"model: {profile.redrawn!r} has another initial value each time the model is built (by a "
        "generator of its own, os.urandom or the time?), so no training can be repeated, and ranks "
        f"that each hold it do not start: {SEEDED_HINT}"
    )


def sharing_warning(spec: JobSpec, profile: Profile) -> str:
    """A warning if held-out samples are trained on; empty if none were found."""
    if not profile.shared_samples or not _is_of_evaluation(profile, spec):
        return ""
    pairs = zip(*profile.shared_samples, strict=True)
    held_out, trained = (", ".join(map(str, each)) for each in pairs)
    return (
        f"samples {held_out} of evaluation.data equal samples {trained} of data, so evaluation "
        "measures what was trained on: let both factories split the same rows (both draw from the "
        "same seed), or draw rows with generators of their own "
        "(torch.Generator().manual_seed(1) in one, 2 in the other)"
    )


def splitting_warning(spec: JobSpec, profile: Profile) -> str:
    """A warning if each start of the job holds out other samples; empty if not."""
    if not profile.redrawn_samples or not _is_of_evaluation(profile, spec):
        return ""
    return (
        "each start of the job holds out other samples of evaluation.data (its generator has no "
        "seed?), so after a requeue or `resume`, evaluation measures what was trained on before: "
        "give the generator that splits the rows a seed, the same in both factories"
    )


def _is_of_evaluation(profile: Profile, spec: JobSpec) -> bool:
    """Whether a profile is about the held-out data and metrics of a job, as they are now."""
    return profile.evaluation_key in {None, evaluation_key(spec)}


def metrics_warning(spec: JobSpec, profile: Profile) -> str:
    """A warning if metrics depend on the size of micro-batches; empty if none is known to."""
    names = profile.uneven_metrics
    if not names or not _is_of_evaluation(profile, spec):
        return ""
    keys = ", ".join(f"evaluation.metrics.{name}" for name in names)
    is_are, it_they = ("is", "it depends") if len(names) == 1 else ("are", "they depend")
    return (
        f"{keys} {is_are} averaged over micro-batches, but no mean over samples (such as a root of "
        f"a mean, a maximum or a count), so {it_they} on their size; a class with update(outputs, "
        "targets) and compute() gets all held-out samples, as those of torchmetrics do"
    )


def loss_warning(spec: JobSpec, profile: Profile) -> str:
    """A warning if the loss depends on the number of micro-batches, or if that is unknown and the
    planner chooses their number; empty if it does not.
    """
    loss = profile.halved_loss
    if loss is None and profile.loss_unknown and spec.pipeline.micro_batches is None:
        return (
            "it is not known whether the loss depends on the number of micro-batches, which `auto` "
            "leaves to the planner: the loss of a batch could not be compared with that of its "
            f"halves ({profile.loss_unknown}); pipeline.micro_batches sets the number"
        )
    if spec.pipeline.micro_batches == 1 or loss is None or not loss.depends:
        return ""
    return f"{loss}: the loss, and in effect the learning rate, depend on pipeline.micro_batches"


def coupling_warning(spec: JobSpec, profile: Profile) -> str:
    """A warning if the plan can change the results of training; empty if it cannot."""
    names = profile.coupled
    if spec.pipeline.micro_batches is not None or not (names or profile.carried):
        return ""
    more = "computes" if len(names) == 1 else f"and {len(names) - 1} more compute"
    why = f"{names[0]} {more} over all samples of a micro-batch" if names else _carried(profile)
    return (
        f"{why}: results depend on the number of "
        "micro-batches, which `auto` leaves to the planner; pipeline.micro_batches sets it"
    )


def delay_warning(spec: JobSpec, _: Profile) -> str:
    """A warning if the optimizer does not bear the age of the gradients; empty if it does."""
    training, schedule = spec.training, spec.pipeline.schedule
    name = spec.optimizer.factory.rpartition(":")[2]
    if schedule != "pipedream-2bw" or training.correct_delay or name not in _SENSITIVE:
        return ""
    return (
        f"{name} loses quality by the gradients of {schedule}, which are one update old: "
        "training.correct_delay: true makes up for a part of it, and Muon needs it less"
    )


def replicas_warning(spec: JobSpec, profile: Profile) -> str:
    """A warning if replicas change the results of training, or are left out for that."""
    replicas = spec.pipeline.replicas
    if replicas in (None, 1) or not profile.carried:
        return ""
    if spec.training.reproducible and replicas != "any":  # forwards read what was before the step
        return ""
    if replicas == "any":
        return f"{_carried(profile)}, so the stage that does so has no replicas"
    return (
        f"{_carried(profile)}, and each of {replicas} replicas has values of its own until the end "
        "of a step: results differ from those of one rank; pipeline.replicas: any leaves that "
        "stage out"
    )


def _carried(profile: Profile) -> str:
    """The buffers that carry values between micro-batches."""
    names = list(dict.fromkeys(repr(name) for name, _ in profile.carried))
    return f"in training, forwards write and read {', '.join(shorten(names, _MAX_NAMED))}"


def this_device(spec: JobSpec) -> MeasuredOn:
    """The device of a rank on this machine, as far as the cost of operators depends on it."""
    accelerator = None
    if spec.resources.gpus_per_node:  # only then is torch loaded
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
    progress: Progress | None,
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
    scheduler = allocation()
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
            rows = read_fields(RowTimes, read_json(path, hint=_HINT), file=str(path), hint=_HINT)
            return replace(profile, rows=rows)
    row_times, assumption = measure_rows(spec, scheduler, effort, progress)
    if row_times is None:
        return replace(profile, assumptions=(*profile.assumptions, assumption))
    with suppress(UsageError):  # a full home is no reason to fail
        write_json(path, write_value(row_times))
    _remove_old_files(directory)
    return replace(profile, rows=row_times)


def measure_rows(
    spec: JobSpec, scheduler: str, effort: str = "normal", progress: Progress | None = None
) -> tuple[RowTimes | None, str]:
    """Measure the times of rows on this node.

    Two ranks with cores of their own train a small model for some seconds, if the ranks of the job
    share nodes.

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
        progress(0, 0, "messages between ranks")
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
            document = read_json(output, hint=_HINT)
            return read_fields(RowTimes, document, file=str(output), hint=_HINT), ""
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
