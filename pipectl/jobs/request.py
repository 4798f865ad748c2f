"""From a job spec to what a batch system is asked for."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipectl.batch import Array, JobRequest, Template, check_template, get
from pipectl.errors import Problem, SpecError
from pipectl.jobs.places import scheduler_name
from pipectl.plan import OffloadTarget
from pipectl.runs import RunDirectory
from pipectl.spec.references import parse

if TYPE_CHECKING:
    from pipectl.plan import Plan
    from pipectl.spec import JobSpec

WORKER = "pipectl.runtime.worker"
PREPARE = "pipectl.jobs.prepare"
DRIVER = "pipectl.jobs.sweep"
TIGHT_HEAP = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0"}
"""Lets glibc join free memory at once. By default it holds the scraps around aligned blocks back,
so that a block which was freed between two of them is too small for the next of its size, and the
heap grows. It reads this before a process can say anything."""

_MAX_TEMPLATE_BYTES = 2**16


def job_request(
    spec: JobSpec,
    directory: Path,
    tag: str,
    *,
    prepare: bool = False,
    mpiexec: str | None = None,
    plan: Plan | None = None,
    after: tuple[str, ...] = (),
    template: Template | None = None,
) -> JobRequest:
    """The request for one run.

    Args:
        directory: the run directory.
        tag: see :class:`~pipectl.batch.JobRequest`.
        prepare: whether the job has to profile and plan before it trains.
        mpiexec: None finds it.
        plan: None if it is not known yet.
        after: ids of jobs that must have completed before.
        template: of job scripts; None reads the one that the spec names, if it does.
    """
    directory, python = directory.absolute(), sys.executable
    heap = TIGHT_HEAP if _offloads(spec, plan) else {}
    variables = {**heap, **spec.environment.variables}
    own = {"variables": variables, "container": spec.container}
    return JobRequest(
        name=spec.name,
        tag=tag,
        run_directory=directory,
        python=python,
        command=(python, "-m", "mpi4py", "-m", WORKER, "--run", str(directory)),
        resources=spec.resources,
        launch=spec.launch,
        environment=spec.environment.model_copy(update=own),
        slurm=spec.slurm,
        pbs=spec.pbs,
        checkpoint=spec.checkpoint,
        prepare=(python, "-m", PREPARE, str(directory)) if prepare else (),
        binds=_binds(spec, directory),
        mpiexec=mpiexec,
        after=after,
        template=template or read_template(spec),
    )


def trial_request(spec: JobSpec) -> JobRequest:
    """A request for checks only: nothing is submitted. It shows whether ranks could be started."""
    return job_request(spec, Path(spec.output.directory) / "check", "check")


def check_script(spec: JobSpec) -> None:
    """Write the script of a job that has a template of its own, and drop it.

    Raises:
        InvalidInputError: it cannot be written.
    """
    if spec.template_file is not None:
        plain = {"launcher": "mpiexec", "mpi": "auto", "bind": "none"}
        request = replace(trial_request(spec), mpiexec="mpiexec").update(launch=plain)
        get(scheduler_name(spec, None)).render(request)


def array_request(
    request: JobRequest, runs: Sequence[RunDirectory], at_once: int | None
) -> JobRequest:
    """The request of a job array.

    Args:
        request: of one of its jobs, in the directory of the sweep.
        at_once: how many may run at the same time; None sets no limit.
    """
    command = (request.python, "-m", DRIVER, str(request.run_directory))
    array = Array(tuple(run.path for run in runs), at_once)
    return replace(request, command=command, array=array)


def _binds(spec: JobSpec, directory: Path) -> tuple[Path, ...]:
    """What a container sees: the directories of the runs and of all files that the spec names.

    Preparing in the job writes profiles beside the run directory, for other runs to find.
    """
    if spec.container is None:
        return ()
    code = [parse(text, spec.base) for _, text in spec.factories()]
    files = (*(one.file for one in code), spec.weights_path, spec.cluster_file, spec.schedule_file)
    runs = directory.parent
    needed = {path.parent for path in files if path is not None}
    needed |= {one.root for one in code if one.root is not None}
    return (runs, *sorted(needed - {runs}))


def _offloads(spec: JobSpec, plan: Plan | None) -> bool:
    """Whether memory of the ranks is short, and what they offload leaves it."""
    if plan is None:
        return spec.pipeline.offload == "disk"
    return plan.offload_to is OffloadTarget.DISK and any(stage.offload for stage in plan.stages)


def read_template(spec: JobSpec) -> Template | None:
    """The user's own template of job scripts; None if the job names none.

    Raises:
        SpecError: it cannot be read or used, with the line.
    """
    path = spec.template_file
    if path is None:
        return None
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SpecError([Problem(str(path), 0, 0, error.strerror or "cannot be read")]) from None
    if len(content) > _MAX_TEMPLATE_BYTES:
        raise SpecError([Problem(str(path), 0, 0, "larger than 64 KiB; this is no template")])
    try:
        template = Template(str(path), content.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise SpecError([Problem(str(path), line, 1, "not UTF-8 text")]) from None
    check_template(template)
    return template


def make_tag(directory: Path) -> str:
    """A text that no other submission has.

    Args:
        directory: the run directory.
    """
    return f"{directory.name} {uuid.uuid4().hex[:8]}"
