"""`pipectl logs`: what a run logs."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from pipectl.access import read_limited
from pipectl.cli.console import note
from pipectl.cli.options import RUNS, RunsDirectory, names_of_runs
from pipectl.errors import PipectlError, UnknownRunError, UsageError
from pipectl.printable import printable
from pipectl.runs import (
    Line,
    Logs,
    Record,
    RunDirectory,
    as_typed,
    find_run,
    read_errors,
    read_exit_code,
)
from pipectl.watch.report import report_text

if TYPE_CHECKING:
    from pipectl.batch import JobStatus

_LARGEST_SCRIPT = 2**22
_POLL_S = 0.5
_LOOK_S = 10.0
_PATIENCE_S = 60.0
"""How long to follow a run of which nobody knows whether it goes on."""


def command(
    name: Annotated[
        str,
        typer.Argument(metavar="[RUN]", help="As for status.", autocompletion=names_of_runs),
    ] = "last",
    script: Annotated[bool, typer.Option("--script", help="The job script instead.")] = False,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until it ends.")] = False,
    rank: Annotated[
        list[int] | None,
        typer.Option("--rank", metavar="N", min=0, help="Only that rank; may be repeated."),
    ] = None,
    directory: RunsDirectory = RUNS,
) -> None:
    """Print what a run printed, lines of ranks as `[3] text`."""
    run = find_run(directory, name)
    if script:
        sys.stdout.write(printable(_script(run)))
        return
    _check(run, rank or ())
    shown = _Shown(rank or ())
    logs = Logs(run)
    unknown = _follow(run, logs, shown) if follow else None
    shown.print(logs.all())
    for error in read_errors(run) if rank else ():
        if error.get("rank") in (rank or ()):  # in the job's log, which is not of a rank
            shown.print(Line(error["rank"], text) for text in report_text(error).splitlines())
    if not shown.any:
        whose = f"of rank {', '.join(map(str, rank))} " if rank else ""
        note(f"{run.name}: nothing {whose}was printed; see: pipectl status {as_typed(run)}")
    if unknown is not None:
        raise UnknownRunError(
            f"{run.name}: it cannot be told whether it goes on: {unknown or 'nothing says so'}",
            cure=f"if it does, follow it again: pipectl logs -f {as_typed(run)}",
        )


def _script(run: RunDirectory) -> str:
    try:
        return read_limited(run.script, _LARGEST_SCRIPT).decode("utf-8", "replace")
    except OSError as error:
        raise UsageError(
            f"{run.script}: cannot be read: {error.strerror}", cure="look at the run's job.log"
        ) from None


def _follow(run: RunDirectory, logs: Logs, shown: _Shown) -> str | None:
    """Print what is added until the run is over; the batch system is asked now and then.

    Returns:
        None, or why it is not known whether it is over, where nothing was added for long.
    """
    from pipectl.batch import JobState

    shown.print(logs.whole())
    seen, last = logs.seen, time.monotonic()
    while (job := _going_on(run)) is not None:
        if job.state is not JobState.UNKNOWN or logs.seen != seen:
            seen, last = logs.seen, time.monotonic()
        elif time.monotonic() - last >= _PATIENCE_S:
            return job.reason
        of_earlier_start = run.exit_code.exists()
        until = time.monotonic() + _LOOK_S
        while time.monotonic() < until and (of_earlier_start or not run.exit_code.exists()):
            time.sleep(_POLL_S)
            shown.print(logs.whole())
    return None


def _going_on(run: RunDirectory) -> JobStatus | None:
    """The state of a run that is not over; what stopped at a checkpoint may go on."""
    from pipectl.batch import CHECKPOINTED
    from pipectl.jobs.status import status

    if read_exit_code(run) not in (None, CHECKPOINTED):
        return None
    job = status(run, time.time()).job
    return None if job.state.final else job


def _check(run: RunDirectory, ranks: Sequence[int]) -> None:
    """Refuse ranks that the run does not have, if it is known how many it has."""
    try:
        known = Record.load(run.record).ranks
    except PipectlError:
        return
    for rank in ranks:
        if rank >= known:
            raise UsageError(
                f"--rank {rank}: {run.name} has the ranks 0 to {known - 1}",
                cure="leave it out to see all",
            )


class _Shown:
    """Prints lines.

    Args:
        ranks: whose; none for all, and what else is logs.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.any = False
        self._ranks = frozenset(ranks)

    def print(self, lines: Iterable[Line]) -> None:
        """Print those of the ranks."""
        for line in lines:
            if not self._ranks or line.rank in self._ranks:
                self.any = True
                sys.stdout.write(f"{printable(line.text)}\n")
        sys.stdout.flush()
