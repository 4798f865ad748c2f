"""Jobs in Python."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pipectl.api.plan import Plan
from pipectl.api.run import Run, directories
from pipectl.api.work import Progress, at_work, shown
from pipectl.batch import LOCAL, system_of_this_node
from pipectl.errors import DataFileError, UsageError
from pipectl.files import path_of_user, read_limited
from pipectl.jobs.job import Job as PreparedJob
from pipectl.jobs.job import change, choose_scheduler, fit_to_allocation
from pipectl.jobs.output import profile_path
from pipectl.jobs.owners import warning_of_code
from pipectl.profile import Profile
from pipectl.spec import JobSpec, Point, SpecFile, dump, override_texts
from pipectl.spec.document import MAX_BYTES
from pipectl.units import plural
from pipectl.versions import untested

Effort = Literal["fast", "normal", "thorough"]


class Job:
    """A training job: what is trained, on what, and how it runs.

    Args:
        spec: a job file, a mapping with the keys of one, or another job; None if ``changes`` has
            all keys.
        scheduler: batch system that the job goes to, such as ``slurm``, ``local`` (this machine) or
            ``here`` (this allocation); by default that of the spec.
        changes: keys and values that replace those of ``spec``; keys within sections are joined by
            dots: ``Job("job.yaml", **{"resources.nodes": 4})``. A mapping replaces a whole section.
            Functions and classes may be given as such if they are in a file.

    Relative paths are relative to the job file; without one, to the working directory. A job does
    not change after it is made.

    Raises:
        SpecError: with every problem of the spec.
    """

    def __init__(
        self,
        spec: str | os.PathLike[str] | Mapping[str, Any] | Job | None = None,
        /,
        *,
        scheduler: str | None = None,
        **changes: Any,
    ) -> None:
        self._file: Path | None = None
        self._directory, self._changes = Path.cwd(), tuple[str, ...]()
        if isinstance(spec, Job):
            self._file, self._directory, self._changes = spec._file, spec._directory, spec._changes
            scheduler = spec.scheduler if scheduler is None else scheduler
        elif isinstance(spec, Mapping):
            self._changes = tuple(override_texts(spec, self._directory))
        elif spec is not None:
            self._file = path_of_user(os.fspath(spec), variables=False).absolute()
            self._directory = self._file.parent
        self._changes += tuple(override_texts(changes, self._directory))
        self._scheduler = scheduler
        self._text = None if self._file is None else _content(self._file)
        self._read = SpecFile.read(
            self._file, self._changes, in_python=True, directory=self._directory
        )
        spec_read = self._read.spec()
        self._output = {"directory": str(Path(spec_read.output.directory).absolute())}
        self._spec = change(spec_read, output=self._output)

    @property
    def name(self) -> str:
        """Its name, with which the names of its runs end."""
        return self._spec.name

    @property
    def scheduler(self) -> str | None:
        """The batch system that was named; None for that of the spec."""
        return self._scheduler

    def to_yaml(self) -> str:
        """All keys and their values, as the text of a job file that means the same anywhere."""
        return dump(self._spec)

    def __repr__(self) -> str:
        spec = self._spec
        where = "" if self._file is None else f" of {self._file}"
        return (
            f"<pipectl.Job {self.name}{where}: {plural(spec.resources.ranks, 'rank')}, "
            f"{plural(spec.training.steps, 'step')}>"
        )

    def check(self) -> None:
        """Check the whole job, as `pipectl check` does: also that the functions and classes exist
        that it names. Runs none of its code.

        Raises:
            SpecError: with every problem.
        """
        self._checked()

    def profile(
        self, effort: Effort = "normal", *, again: bool = False, progress: Progress = False
    ) -> Profile:
        """Measure the model where the ranks will run, or take its profile from the cache.

        On this machine, it is measured in a process of its own, which imports the code of the job.
        If there is a batch system, it is measured in a job, whose end is waited for.

        Args:
            effort: how long to measure.
            again: whether to measure without the cache.
            progress: whether to print it, or a function of (done, total, what).

        Returns:
            The profile; it is also written where `plan` and `submit` look for it.

        Raises:
            CaptureError: the model cannot be built or captured.
            WorkerError: the job that measures has failed.
        """
        from pipectl.jobs.measuring import make_measuring_job
        from pipectl.jobs.own_process import measure_apart
        from pipectl.jobs.submit import submit

        with self._at_work() as (spec, _, system):
            path = profile_path(spec)
            if spec.environment.container is None and system in {LOCAL, system_of_this_node()}:
                with shown(progress) as report:
                    return measure_apart(spec, path, report, effort, again=again)
            job = make_measuring_job(spec, system, path, effort, links=False, again=again)
            (submission,) = submit([job], time.time())
        run = Run._of(submission.run)
        if progress is True or not progress:
            run.wait(progress=progress)
        else:
            run.wait(progress=lambda now: progress(now["step"], now["steps"] or 0, now["phase"]))
        return Profile.load(submission.run.profile)

    def plan(
        self,
        *,
        budget_s: float | None = None,
        new_micro_batches: bool = False,
        save: bool = True,
    ) -> Plan:
        """Find the plan with the shortest step, for the profile of the job.

        Args:
            budget_s: time limit of the search, which then ends with the best plan so far.
            new_micro_batches: whether the number of micro-batches may differ from the last plan's.
            save: whether to write the plan where `submit` looks for it.

        Raises:
            DataFileError: there is no profile: `job.profile()` makes it.
            MismatchError: it was measured for other settings.
            InfeasibleError: nothing fits; the message says how much is missing.
        """
        from pipectl.jobs.plan_search import PlanSearch, plan_step
        from pipectl.jobs.planning import gather_job

        with self._at_work() as (spec, _, system):
            if not (path := profile_path(spec)).exists():
                raise DataFileError(f"{path}: no such file", hint="job.profile() writes it")
            inputs = gather_job(spec, system, new_micro_batches=new_micro_batches)
            search = PlanSearch(budget_s)
            answer = plan_step(inputs, search, lambda _: None, explained=False)
            if save and inputs.plan_file is not None:
                answer.plan.save(inputs.plan_file)
            return Plan(answer)

    def submit(
        self, *, after: Run | str | Sequence[Run | str] = (), progress: Progress = False
    ) -> Run:
        """Submit the job, and measure and plan it first if necessary.

        On a batch system, a job without a profile measures and plans in its allocation.

        Args:
            after: runs, or names of runs, that must complete before it starts.
            progress: of measuring and planning; see :meth:`profile`.

        Raises:
            UsageError: it is a sweep; or its file has changed; or this is a process of a job.
            SchedulerError: the batch system is missing, or rejects the job.
        """
        with self._at_work() as (spec, points, system):
            if points:
                raise UsageError(
                    f"{self.name}: is a sweep of {plural(len(points), 'run')}",
                    hint="job.submit_sweep() submits them",
                )
            (run,) = self._submit(spec, (), system, after, progress)
            return run

    def submit_sweep(
        self, *, after: Run | str | Sequence[Run | str] = (), progress: Progress = False
    ) -> list[Run]:
        """Submit a run for every point of the job's sweep.

        Args:
            after, progress: see :meth:`submit`.

        Raises:
            UsageError: the job has no sweep.
        """
        with self._at_work() as (spec, points, system):
            if not points:
                raise UsageError(f"{self.name}: has no sweep", hint="job.submit() submits it")
            return self._submit(spec, points, system, after, progress)

    def _submit(
        self,
        spec: JobSpec,
        points: Sequence[Point],
        system: str,
        after: Run | str | Sequence[Run | str],
        progress: Progress,
    ) -> list[Run]:
        from pipectl.jobs.prepare import prepare
        from pipectl.jobs.submit import submit

        wait_for = directories(after, Path(spec.output.directory))
        with shown(progress) as report:
            jobs = prepare(spec, system, report, points=points, apart=True)
        at_once = None if spec.sweep is None else spec.sweep.at_once
        submissions = submit(jobs, time.time(), wait_for, at_once=at_once)
        own = [warning_of_code(spec, self._file or Path.cwd()), untested("torch")]
        return [
            Run._of(each.run, (*own, *_warnings_of(job), each.warning))
            for each, job in zip(submissions, jobs, strict=True)
        ]

    @contextmanager
    def _at_work(self) -> Iterator[tuple[JobSpec, tuple[Point, ...], str]]:
        """A context for what may run the job's code: one at a time, and not in a job itself.

        It gives the checked spec, the points of its sweep, and the batch system.
        """
        with at_work():
            spec, points = self._checked()
            system = choose_scheduler(spec, self._scheduler, must_answer=True)
            yield fit_to_allocation(spec, system), points, system

    def _checked(self) -> tuple[JobSpec, tuple[Point, ...]]:
        if self._file is not None and _content(self._file) != self._text:
            raise UsageError(
                f"{self._file}: has changed since this Job was made",
                hint="make it anew: job = pipectl.Job(...)",
            )
        spec = self._read.spec(check_names=True)
        points = self._read.points(spec)
        return self._spec, tuple(
            replace(point, spec=change(point.spec, output=self._output)) for point in points
        )


def _content(file: Path) -> bytes | None:
    """The content of a job file; None if it cannot be read, which reading it explains."""
    try:
        return read_limited(file, MAX_BYTES)
    except OSError:
        return None


def _warnings_of(job: PreparedJob) -> Iterator[str]:
    """What commands print as warnings about a job that is submitted."""
    from pipectl.jobs.warnings import warnings_of

    yield job.cluster_warning
    yield job.mpi.warning
    if job.profile is not None:
        yield from warnings_of(job.spec, job.profile)
