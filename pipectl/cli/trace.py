"""`pipectl trace`: recorded steps beside the prediction."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipectl.cli.console import note, say_json, short
from pipectl.cli.options import RUNS, Json, RunName, RunsDirectory
from pipectl.files import make_directory_of, write_text
from pipectl.units import format_bytes

if TYPE_CHECKING:
    from pipectl.jobs.tracing import Traced


def command(
    name: RunName = "last",
    directory: RunsDirectory = RUNS,
    step: Annotated[
        int | None, typer.Option(min=1, help="Of those recorded; by default the last.")
    ] = None,
    perfetto: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a trace for ui.perfetto.dev.")
    ] = None,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw prediction and step as a picture.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare a recorded step with the prediction, action by action."""
    from pipectl.cli.trace_view import show
    from pipectl.jobs.tracing import traced
    from pipectl.runs import find_run

    run = find_run(directory, name)
    for path in filter(None, (perfetto, svg)):
        make_directory_of(path)
    found = traced(run, step)
    if as_json:
        say_json({"run": found.run.name, "steps": found.steps, **found.comparison().to_json()})
    else:
        show(found)
    if perfetto is not None:
        _write(perfetto, found)
    if svg is not None:
        _draw(svg, found)


def _draw(path: Path, found: Traced) -> None:
    from pipectl.cli.trace_view import step_line
    from pipectl.cli.views.plan import headline
    from pipectl.report.gantt_svg import gantts_svg

    title = step_line(found, found.comparison())
    write_text(path, gantts_svg(found.timelines(), title, headline(found.plan)))


def _write(path: Path, found: Traced) -> None:
    from pipectl.report.perfetto import chrome_trace

    text = chrome_trace(found.groups())
    write_text(path, text)
    note(
        f"{short(path.absolute())} ({format_bytes(len(text))}): open it at https://ui.perfetto.dev"
    )
