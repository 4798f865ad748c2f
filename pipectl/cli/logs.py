"""`pipectl logs`: what a run printed."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from pipectl.cli.console import note, plain
from pipectl.cli.options import RUNS, RunsDirectory, names_of_runs
from pipectl.runs import RunDirectory, find_run

_POLL_S = 0.5
_LOOK_S = 10.0


def command(
    name: Annotated[
        str,
        typer.Argument(metavar="[RUN]", help="As for status.", autocompletion=names_of_runs),
    ] = "last",
    script: Annotated[bool, typer.Option("--script", help="The job script instead.")] = False,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until it ends.")] = False,
    directory: RunsDirectory = RUNS,
) -> None:
    """Print what the job script and the ranks of a run printed."""
    run = find_run(directory, name)
    tail = _Tail(run.script if script else run.job_log)
    tail.print()
    if follow and not script:
        _follow(run, tail)
    if not tail.seen:
        note(f"{run.name}: nothing was printed; see: pipectl status {run.name}")


def _follow(run: RunDirectory, tail: _Tail) -> None:
    """Print what is added until the run is over; the batch system is asked now and then."""
    from pipectl.jobs.status import status

    over = False
    while not over:
        until = time.monotonic() + _LOOK_S
        while time.monotonic() < until and not run.exit_code.exists():
            time.sleep(_POLL_S)
            tail.print()
        over = run.exit_code.exists() or status(run, time.time()).job.state.final
    tail.print()


class _Tail:
    """Prints a file once, from where it stopped before; one that does not exist is empty."""

    def __init__(self, path: Path) -> None:
        self.seen = 0
        self._path = path

    def print(self) -> None:
        """Print what was added."""
        try:
            with self._path.open("rb") as stream:
                stream.seek(self.seen)
                text = stream.read()
        except FileNotFoundError:
            return
        self.seen += len(text)
        sys.stdout.write(plain(text.decode("utf-8", "replace")).plain)
        sys.stdout.flush()
