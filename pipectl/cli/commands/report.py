"""`pipectl report`: a recorded step beside its prediction, and a run on one page."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

from pipectl.cli.console import note, say, say_json, short_path
from pipectl.cli.options import RUNS, Json, RunName, RunsDirectory, count, option
from pipectl.cli.views.trace import print_comparison, step_line
from pipectl.files import is_stream, make_directory_of, write_text
from pipectl.jobs.report import make_page
from pipectl.report.gantt import gantt_svg
from pipectl.report.perfetto import chrome_trace
from pipectl.report.recorded import load_step
from pipectl.runs import find_run
from pipectl.units import format_bytes


def command(
    name: RunName = "last",
    directory: RunsDirectory = RUNS,
    step: Annotated[int | None, count("Recorded step to show; by default the last.")] = None,
    output: Annotated[
        Path | None,
        option("FILE", "Write an HTML page to this file instead of printing.", "-o", "--output"),
    ] = None,
    svg: Annotated[
        Path | None, option("FILE", "Write a picture of both timelines to this file.")
    ] = None,
    perfetto: Annotated[
        Path | None, option("FILE", "Write a trace for ui.perfetto.dev to this file.")
    ] = None,
    as_json: Json = False,
) -> None:
    run = find_run(directory, name)
    for path in filter(None, (output, svg, perfetto)):
        make_directory_of(path)
    if output is not None:
        page = make_page(run, time.time(), step)
        write_text(output, page)
        if not is_stream(output):
            size = format_bytes(len(page))
            tell = note if as_json else say
            tell(f"{short_path(output.absolute())} ({size}): open it in a browser")
    if output is not None and not (svg or perfetto or as_json):
        return
    recorded = load_step(run, step)
    comparison = recorded.compare()
    if as_json:
        say_json({"run": run.name, "steps": recorded.steps, **comparison.to_json()})
    elif output is None:
        print_comparison(recorded, comparison)
    if perfetto is not None:
        text = chrome_trace(recorded.timelines(), recorded.plan)
        write_text(perfetto, text)
        size = format_bytes(len(text))
        note(f"{short_path(perfetto.absolute())} ({size}): open it at https://ui.perfetto.dev")
    if svg is not None:
        title = step_line(recorded, comparison)
        write_text(svg, gantt_svg(recorded.timelines(), title, recorded.plan.summary))
