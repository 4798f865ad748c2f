"""Runs in Python."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipectl.api.advice import advising
from pipectl.errors import PipectlError, UnknownRunError, UsageError, WorkerError
from pipectl.jobs.run_json import RunJson, run_json
from pipectl.jobs.state import POLL_S, RunStatus, fault_of_reading, get_status, poll
from pipectl.runs import (
    Best,
    Columns,
    Logs,
    RunDirectory,
    best_evaluation,
    find_run,
    find_runs,
    last_lines,
    list_runs,
    read_columns,
    runs_directory,
)
from pipectl.spec import override_texts
from pipectl.units import printable

if TYPE_CHECKING:
    from pipectl.jobs.export import Format
    from pipectl.runtime.checkpoint import StateDict


class Run:
    """A run: a job that was submitted.

    In a notebook it shows its state, its losses and a step; `rich.print` shows what `pipectl
    status` prints.

    Args:
        name: the name of the run, a part of it, its path, the id of its job, or ``last``.
        directory: of the runs; by default that of the variable ``PIPECTL_RUNS``, else ``runs``.

    Raises:
        UnknownRunError: there is no such run, or there are several.
    """

    def __init__(
        self, name: str | os.PathLike[str] = "last", directory: str | Path | None = None
    ) -> None:
        base = runs_directory() if directory is None else Path(directory)
        self._run = find_run(base, os.fspath(name))
        self._warnings: tuple[str, ...] = ()

    @classmethod
    def _of(cls, run: RunDirectory, warnings: Sequence[str] = ()) -> Run:
        made = cls.__new__(cls)
        made._run = run
        made._warnings = tuple(dict.fromkeys(filter(None, warnings)))
        return made

    @property
    def name(self) -> str:
        """Its name: date, time, and the name of the job."""
        return self._run.name

    @property
    def path(self) -> Path:
        """Its directory, whose files are described in docs/formats.md."""
        return self._run.path

    @property
    def warnings(self) -> tuple[str, ...]:
        """What `submit` or `resume` would have printed as warnings; empty of a run that was
        found."""
        return self._warnings

    @property
    def state(self) -> str:
        """Its state now: ``QUEUED``, ``RUNNING``, ``COMPLETED``, ``FAILED``, ``UNKNOWN``, ..."""
        return get_status(self._run, time.time()).job.state.value

    def status(self) -> RunJson:
        """What the batch system and its files say now: the keys of `pipectl status --json`."""
        return run_json(get_status(self._run, time.time()))

    @advising()
    def wait(
        self,
        *,
        progress: bool | Callable[[RunJson], None] = False,
        timeout_s: float | None = None,
        check: bool = True,
    ) -> Run:
        """Wait until the run is over. Ctrl-C ends the waiting, not the run.

        Args:
            progress: whether to print it; or a function that is called with the status, about
                twice a second.
            timeout_s: how long to wait at most.
            check: whether to raise an error if the run did not complete.

        Returns:
            The same run.

        Raises:
            WorkerError: it has failed or was cancelled; says why.
            UnknownRunError: no source has known its state for minutes.
            TimeoutError: it was not over in time; it goes on.
        """
        self._refuse_closed()
        statuses = _until(self._run, timeout_s)
        if progress is True:
            from pipectl.cli.submission import follow

            last = follow(self._run, statuses)
        else:
            for last in statuses:
                if callable(progress):
                    progress(run_json(last))
        if check:
            _check_complete(last)
        return self

    @advising()
    def metrics(self) -> Columns:
        """The figures of all steps: ``step``, ``loss``, ``step_time_s``, ``evaluation.loss``, ...

        Returns:
            Columns by name, of one length, with None where a step has no such figure:
            ``pandas.DataFrame(run.metrics())`` is a table.
        """
        self._refuse_closed()
        return read_columns(self._run)

    @advising()
    def logs(self, *, ranks: int | Sequence[int] = (), tail: int | None = None) -> str:
        """What its ranks and its job have printed; lines of a rank begin with its number.

        Args:
            ranks: only the lines of these.
            tail: only the last lines, at most so many.

        Raises:
            UsageError: it has no such rank, or ``tail`` is negative.
        """
        self._refuse_closed()
        wanted = frozenset((ranks,) if isinstance(ranks, int) else ranks)
        lines = last_lines(self._run, Logs(self._run), wanted, tail)
        return "".join(f"{printable(line.text)}\n" for line in lines)

    @advising()
    def cancel(self) -> bool:
        """End the run.

        Returns:
            Whether it had not ended before.

        Raises:
            UnknownRunError: its job is not known.
            SchedulerError: the batch system refuses or does not answer.
        """
        from pipectl.jobs.cancel import Cancellation, cancel

        return cancel(self._run, time.time()) is Cancellation.ASKED

    def resume(
        self,
        *,
        force: bool = False,
        trust_owner: bool = False,
        with_changed_code: bool = False,
        **changes: Any,
    ) -> Run:
        """Submit a run that has ended again; it goes on from its last checkpoint.

        Args:
            force: resume even if it is not known whether it has ended.
            trust_owner: run code that another user could have written.
            with_changed_code: take the code as it is now, not as it was submitted.
            changes: keys of the job, as for :class:`Job`: ``**{"training.steps": 200}``.

        Returns:
            The same run.

        Raises:
            UsageError: it still runs, or is complete, or ``changes`` change what cannot change.
        """
        from pipectl.api.work import at_work
        from pipectl.jobs.resume import resume
        from pipectl.jobs.warnings import splitting_warning

        with at_work():
            submission = resume(
                self._run,
                tuple(override_texts(changes, Path.cwd())),
                time.time(),
                force=force,
                trust_owner=trust_owner,
                with_changed_code=with_changed_code,
            ).submission
        job = submission.job
        warnings = [job.cluster_warning, job.mpi.warning, submission.warning]
        if job.profile is not None:
            warnings.append(splitting_warning(job.spec, job.profile))
        return Run._of(self._run, warnings)

    @advising()
    def best(self) -> Best:
        """The best evaluation so far: its ``step``, ``metric``, ``mode`` and ``value``.

        Raises:
            UsageError: the job does not compare evaluations, or none was saved yet.
        """
        self._refuse_closed()
        best = best_evaluation(self._run.checkpoints)
        if best is None:
            raise UsageError(
                f"{self.name}: does not know its best evaluation",
                hint="jobs with evaluation.early_stopping or checkpoint.keep_best know it, from "
                'their first checkpoint on; run.metrics() has the "evaluation." of every step',
            )
        return best

    @advising()
    def state_dict(self, step: int | None = None, *, best: bool = False) -> StateDict:
        """The weights of a checkpoint by their names in the model, on the CPU.

        Args:
            step: of the checkpoint; by default the last.
            best: the checkpoint of the best evaluation.

        Raises:
            UsageError: it has no such checkpoint.
            DataFileError: a file of it is missing or damaged.
        """
        from pipectl.jobs.export import find_checkpoint
        from pipectl.runtime.checkpoint import load

        self._refuse_closed()
        checkpoint = find_checkpoint(self._run, step, best=best)
        return dict(load(checkpoint.path, weights_only=True))

    @advising()
    def export(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        step: int | None = None,
        best: bool = False,
        format: Format | None = None,  # noqa: A002 - as the option is called
        like: str | os.PathLike[str] | None = None,
        shard_size: int | None = None,
    ) -> Path:
        """Write the weights of a checkpoint for other programs, as `pipectl export` does.

        Args:
            path: what to write; by default ``model.safetensors``, or the directory ``model``.
            step, best: see :meth:`state_dict`.
            format: ``safetensors``, ``hf`` (a directory for ``from_pretrained``) or ``dcp``.
            like: model whose names, types and other files to take.
            shard_size: bytes of the largest file of ``hf``.

        Returns:
            What was written.

        Raises:
            UsageError: it has no such checkpoint, or ``path`` exists.
        """
        from pipectl.jobs.export import export

        self._refuse_closed()
        return export(
            self._run,
            None if path is None else Path(path),
            step=step,
            best=best,
            file_format=format,
            like=None if like is None else Path(like),
            shard_bytes=shard_size,
        ).path

    def _refuse_closed(self) -> None:
        if fault := fault_of_reading(self._run):
            raise UsageError(f"{self.name}: {fault}")

    def __repr__(self) -> str:
        return f"<pipectl.Run {self.name}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and self._run == other._run

    def __hash__(self) -> int:
        return self._run.__hash__()

    def _repr_html_(self) -> str:
        from pipectl.cli.views.run import run_facts
        from pipectl.profile import Profile
        from pipectl.report import render
        from pipectl.report.charts import training_svgs
        from pipectl.report.comparison import known_timelines
        from pipectl.report.gantt import gantt_svg

        status = get_status(self._run, time.time())
        state, names = status.job.state, dict[str, str]()
        with suppress(PipectlError):
            profile = Profile.load(self._run.profile)
            names = {operator.id: operator.name for operator in profile.operators}
        timelines = known_timelines(self._run) if status.plan is not None else {}
        return render(
            "notebook.html.j2",
            title=self.name,
            state=state.value,
            is_bad=state.final and state.value != "COMPLETED",
            lines=[] if status.plan is None else [status.plan.summary],
            facts=run_facts(status),
            plan=status.plan,
            names=names,
            pictures={
                **{f"figures {n}": chart for n, chart in enumerate(training_svgs(status.curve), 1)},
                "a step": gantt_svg(timelines, "") if timelines else "",
            },
            notes=[("warning", text) for text in self._warnings],
        )

    def __rich__(self) -> Any:
        from pipectl.cli.views.run import draw_runs

        return draw_runs(self._run, [get_status(self._run, time.time())])


def runs(directory: str | os.PathLike[str] | None = None) -> list[Run]:
    """All runs of a directory, the oldest first, also those of others.

    Args:
        directory: by default that of the variable ``PIPECTL_RUNS``, else ``runs``.
    """
    base = runs_directory() if directory is None else Path(directory)
    return [Run._of(run) for run in list_runs(base)]


def directories(which: Run | str | Sequence[Run | str], base: Path) -> list[RunDirectory]:
    """The directories of runs, or of names of runs or sweeps, each once."""
    every = [which] if isinstance(which, Run | str) else which
    found: dict[RunDirectory, None] = {}
    for each in every:
        named = [each._run] if isinstance(each, Run) else find_runs(base, [each])
        found |= dict.fromkeys(named)
    return list(found)


def _until(run: RunDirectory, timeout_s: float | None) -> Iterator[RunStatus]:
    """The statuses of a run until it is over.

    Raises:
        TimeoutError: it was not over in time.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    for status in poll(run):
        yield status
        over = status.job.state.final
        if deadline is not None and not over and time.monotonic() + POLL_S > deadline:
            raise TimeoutError(f"{run.name}: is {status.job.state.value} after {timeout_s:g} s")


def _check_complete(status: RunStatus) -> None:
    """Raise an error if a run is over and not complete."""
    if not status.exit_code:
        return
    run, job, failure = status.run, status.job, status.failure
    if job.state.value == "UNKNOWN":
        raise UnknownRunError(f"{run.name}: its state is not known: {job.reason}", hint=job.hint)
    what = job.reason if failure is None else f"{failure.where}: {failure.what}"
    hint = failure.hint if failure else job.hint
    hint = hint or "see run.logs()"
    raise WorkerError(f"{run.name}: {job.state.value}" + (f": {what}" if what else ""), hint=hint)
