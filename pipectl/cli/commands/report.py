"""`pipectl report`: a run on one page."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from pipectl.cli.console import say, short
from pipectl.cli.options import RUNS, RunName, RunsDirectory
from pipectl.units import format_bytes


def command(
    name: RunName = "last",
    directory: RunsDirectory = RUNS,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="By default in the run directory."),
    ] = None,
) -> None:
    """Write a page of HTML about a run: plan, timelines, loss, memory, the model by stage."""
    from pipectl.files import is_stream, make_directory_of, write_text
    from pipectl.jobs.report import report
    from pipectl.runs import find_run

    run = find_run(directory, name)
    path = run.path / "report.html" if output is None else output.absolute()
    make_directory_of(path)
    trace = None if is_stream(path) else path.with_suffix(".perfetto.json")
    found = report(run, time.time(), None if trace is None else trace.name)
    write_text(path, found.page)
    if trace is None:
        return
    say(f"{short(path)} ({format_bytes(len(found.page))}): open it in a browser")
    if found.trace is not None:
        write_text(trace, found.trace)
        say(
            f"{short(trace)} ({format_bytes(len(found.trace))}): open it at https://ui.perfetto.dev"
        )
