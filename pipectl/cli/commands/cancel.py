"""`pipectl cancel`: cancel runs."""

from __future__ import annotations

import time
from pathlib import Path

import typer

from pipectl.cli import options as opt
from pipectl.cli.app import print_error
from pipectl.cli.console import say
from pipectl.errors import PipectlError
from pipectl.jobs.cancel import cancel, cancel_sweep
from pipectl.runs import RunDirectory, SweepDirectory, find


def command(
    names: list[str] = typer.Argument(
        ..., metavar="RUN", help=opt.RUN_HELP, autocompletion=opt.names_of_runs
    ),
    directory: Path = opt.DIRECTORY,
) -> None:
    failed: list[PipectlError] = []
    for one in [find(directory, name) for name in names]:
        try:
            _cancel(one)
        except PipectlError as error:  # the others are not left running
            failed.append(error)
    for each in failed[:-1]:
        print_error(each)
    if failed:
        raise failed[-1]


def _cancel(one: RunDirectory | SweepDirectory) -> None:
    if isinstance(one, RunDirectory):
        say(cancel(one, time.time()).value.format(run=one.name))
    else:
        count = cancel_sweep(one, time.time())
        say(f"cancelled: {count} of the {len(one.runs())} runs of {one.name}")
