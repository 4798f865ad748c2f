"""`pipectl logs`: what a run printed."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from pipectl.cli.console import plain
from pipectl.cli.options import RUNS, RunsDirectory
from pipectl.errors import UnknownRunError
from pipectl.runs import RunDirectory, find_run

_POLL_S = 0.5
_LOOK_S = 10.0


def command(
    name: Annotated[str, typer.Argument(metavar="[RUN]", help="As for status.")] = "last",
    rank: Annotated[int | None, typer.Option(min=0, help="Only this rank's log.")] = None,
    script: Annotated[bool, typer.Option("--script", help="The job script instead.")] = False,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until it ends.")] = False,
    directory: RunsDirectory = RUNS,
) -> None:
    """Print the logs of a run."""
    run = find_run(directory, name)
    tail = _Tail()
    if script:
        tail.print([run.script])
        return
    tail.print(_files(run, rank))
    if follow:
        _follow(run, rank, tail)
    elif not tail.seen:
        raise UnknownRunError(f"{run.name}: no log yet", cure=f"see: pipectl status {run.name}")


def _files(run: RunDirectory, rank: int | None) -> Sequence[Path]:
    if rank is not None:
        return [run.log_of(rank)]
    return [run.job_log, *sorted(run.logs.glob("rank-*.log"))]


def _follow(run: RunDirectory, rank: int | None, tail: _Tail) -> None:
    """Print what is added until the run is over; the batch system is asked now and then."""
    from pipectl.jobs.status import status

    over = False
    while not over:
        until = time.monotonic() + _LOOK_S
        while time.monotonic() < until and not run.exit_code.exists():
            time.sleep(_POLL_S)
            tail.print(_files(run, rank))
        over = run.exit_code.exists() or status(run, time.time()).job.state.final
    tail.print(_files(run, rank))


class _Tail:
    """Prints each file once, from where it stopped before."""

    def __init__(self) -> None:
        self.seen: dict[Path, int] = {}
        self._last: Path | None = None

    def print(self, files: Sequence[Path]) -> None:
        for path in files:
            if path.exists():
                self._print(path, alone=len(files) == 1)

    def _print(self, path: Path, *, alone: bool) -> None:
        with path.open("rb") as stream:
            stream.seek(self.seen.get(path, 0))
            text = stream.read()
            self.seen[path] = stream.tell()
        if text and not alone and path != self._last:
            sys.stdout.write(f"==> {path.name} <==\n")
            self._last = path
        sys.stdout.write(plain(text.decode("utf-8", "replace")).plain)
        sys.stdout.flush()
