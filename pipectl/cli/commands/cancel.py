"""`pipectl cancel`: cancel runs."""

from __future__ import annotations

import time
from pathlib import Path

import typer

from pipectl.cli import options as opt
from pipectl.cli.console import say
from pipectl.jobs.cancel import cancel, cancel_sweep
from pipectl.runs import RunDirectory, find


def command(
    names: list[str] = typer.Argument(
        ..., metavar="RUN", help=opt.RUN_HELP, autocompletion=opt.names_of_runs
    ),
    directory: Path = opt.DIRECTORY,
) -> None:
    for one in [find(directory, name) for name in names]:
        if isinstance(one, RunDirectory):
            say(cancel(one, time.time()).value.format(run=one.name))
        else:
            count = cancel_sweep(one, time.time())
            say(f"cancelled: {count} of the {len(one.runs())} runs of {one.name}")
