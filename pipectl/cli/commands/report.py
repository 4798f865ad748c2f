"""`pipectl report`: a recorded step beside its prediction, and a run on one page of HTML."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Annotated

from pipectl.cli.console import note, say, say_json, short_path
from pipectl.cli.options import RUNS, Json, RunName, RunsDirectory, count, option
from pipectl.cli.views.trace import print_comparison, step_line
from pipectl.errors import PipectlError
from pipectl.files import is_stream, make_directory_of, write_text
from pipectl.jobs.state import get_status
from pipectl.profile import Profile
from pipectl.report import render_page
from pipectl.report.charts import steps_svg
from pipectl.report.comparison import explain
from pipectl.report.gantt import gantt_svg
from pipectl.report.perfetto import chrome_trace
from pipectl.report.recorded import load_step
from pipectl.runs import RunDirectory, find_run, read_metrics
from pipectl.timeline import Timeline
from pipectl.units import format_bytes

_MAX_RANKS = 64
_CURVES = {"loss": "loss", "samples/s": "samples_per_s"}
"""What is drawn, by its key in the lines of metrics."""


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


def make_page(run: RunDirectory, now: float, step: int | None = None) -> str:
    """The page, from what the run directory holds by now; what is missing is left out.

    Args:
        step: of those recorded; by default the last.

    Raises:
        UsageError: that step is not recorded.
    """
    status = get_status(run, now)
    comparison, verdict, names = None, list[tuple[str, str]](), dict[str, str]()
    timelines: dict[str, Timeline] = {}
    with suppress(PipectlError):
        names = {operator.id: operator.name for operator in Profile.load(run.profile).operators}
    try:
        recorded = load_step(run, step)
        comparison, timelines = recorded.compare(), recorded.timelines()
        verdict = explain(comparison)
        if status.plan and (flops := status.plan.describe_flops(comparison.time.measured_s)):
            verdict.append(("speed", f"{flops}, all ranks together"))
    except PipectlError:
        if step is not None:
            raise
        with suppress(PipectlError):
            timelines = {"predicted": Timeline.load(run.predicted)}
    lines = read_metrics(run)
    curves = {
        name: [(line["step"], line[key]) for line in lines if line.get(key) is not None]
        for name, key in _CURVES.items()
    }
    peaks = sorted(status.peaks, key=lambda peak: -peak.measured_bytes)[:_MAX_RANKS]
    return render_page(
        now=f"{datetime.fromtimestamp(now):%Y-%m-%d %H:%M:%S}",
        status=status,
        plan=status.plan,
        names=names,
        comparison=comparison,
        verdict=verdict,
        timelines=gantt_svg(timelines, "") if timelines and status.plan else "",
        peaks=sorted(peaks),
        max_bytes=max((max(peak[1], peak[2] or 0) for peak in peaks), default=0) or 1,
        curves=steps_svg(curves),
    )
