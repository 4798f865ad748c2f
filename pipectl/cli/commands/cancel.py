"""`pipectl cancel`: cancel runs."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from pipectl.cli.console import say
from pipectl.cli.options import RUN_HELP, RUNS, RunsDirectory, names_of_runs
from pipectl.jobs.cancel import Cancellation, cancel, cancel_sweep
from pipectl.runs import RunDirectory, find


def command(
    names: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help=RUN_HELP, autocompletion=names_of_runs),
    ],
    directory: RunsDirectory = RUNS,
) -> None:
    for one in [find(directory, name) for name in names]:
        if not isinstance(one, RunDirectory):
            count = cancel_sweep(one, time.time())
            say(f"cancelled: {count} of the {len(one.runs())} runs of {one.name}")
            continue
        outcome = cancel(one, time.time())
        if outcome is Cancellation.ASKED:
            say(f"cancelled: {one.name}")
        elif outcome is Cancellation.REMOVED:
            say(f"{one.name} had already ended; its job was still listed and is cancelled")
        else:
            say(f"{one.name} had already ended")
