"""A run on one page of HTML."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime

from pipectl.errors import PipectlError
from pipectl.jobs.state import get_status
from pipectl.profile import Profile
from pipectl.report import render_page
from pipectl.report.charts import steps_svg
from pipectl.report.comparison import explain
from pipectl.report.gantt import gantt_svg
from pipectl.report.recorded import load_step
from pipectl.runs import RunDirectory, read_metrics
from pipectl.timeline import Timeline

_MAX_RANKS = 64
_CURVES = {"loss": "loss", "samples/s": "samples_per_s"}
"""What is drawn, by its key in the lines of metrics."""


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
