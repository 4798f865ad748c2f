"""`pipectl logs`: what a run printed."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from typing import Annotated

import typer

from pipectl.cli.console import note, plain
from pipectl.cli.options import RUNS, RunsDirectory, names_of_runs
from pipectl.errors import PipectlError, UsageError
from pipectl.runs import (
    Line,
    Printed,
    Record,
    RunDirectory,
    as_typed,
    find_run,
    late_lines,
    read_exit_code,
)

_POLL_S = 0.5
_LOOK_S = 10.0


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
        sys.stdout.write(plain(run.script.read_text("utf-8", "replace")).plain)
        return
    _check(run, rank or ())
    shown = _Shown(rank or ())
    printed = Printed(run.job_log)
    if follow:
        _follow(run, printed, shown)
    shown.print(printed.all())
    shown.print(late_lines(run))
    if not shown.any:
        whose = f"of rank {', '.join(map(str, rank))} " if rank else ""
        note(f"{run.name}: nothing {whose}was printed; see: pipectl status {as_typed(run)}")


def _follow(run: RunDirectory, printed: Printed, shown: _Shown) -> None:
    """Print what is added until the run is over; the batch system is asked now and then."""
    shown.print(printed.whole())
    while not _is_over(run):
        of_earlier_start = run.exit_code.exists()
        until = time.monotonic() + _LOOK_S
        while time.monotonic() < until and (of_earlier_start or not run.exit_code.exists()):
            time.sleep(_POLL_S)
            shown.print(printed.whole())


def _is_over(run: RunDirectory) -> bool:
    """What stopped at a checkpoint may go on: the batch system knows."""
    from pipectl.batch import CHECKPOINTED
    from pipectl.jobs.status import status

    if read_exit_code(run) not in (None, CHECKPOINTED):
        return True
    return status(run, time.time()).job.state.final


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
        ranks: whose; none for all, and what else is printed.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.any = False
        self._ranks = frozenset(ranks)

    def print(self, lines: Iterable[Line]) -> None:
        """Print those of the ranks."""
        for line in lines:
            if not self._ranks or line.rank in self._ranks:
                self.any = True
                sys.stdout.write(f"{plain(line.text).plain}\n")
        sys.stdout.flush()
